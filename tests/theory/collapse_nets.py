"""Small classifiers, data, and the vectors v of their Gauss-Newton matrices by plain automatic differentiation."""

from itertools import pairwise

import torch
from torch import nn
from torch.autograd.functional import jacobian
from torch.func import functional_call

WIDTHS = (5, 6)


def network(generator, K=3, relu=True, widths=WIDTHS, bias=False):
    """Linear layers "0", "2", ... with ReLU or nothing between, float64."""
    sizes = [*widths, K]
    layers = []
    for i, o in pairwise(sizes):
        layer = nn.Linear(i, o, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * (2 / i) ** 0.5)
        layers += [layer, nn.ReLU() if relu else nn.Identity()]
    return nn.Sequential(*layers[:-1])


def data(generator, K=3, counts=None, width=WIDTHS[0]):
    """Features that lean towards their class, and labels in random order; ``counts`` samples of each class."""
    counts = counts or [5] * K
    y = torch.arange(K).repeat_interleave(torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=generator)]
    centres = torch.randn(K, width, generator=generator, dtype=torch.float64)
    return centres[y] + torch.randn(len(y), width, generator=generator, dtype=torch.float64), y


def vectors(model, x, name, loss):
    """v of each sample and logit (n x k x p q), so that G = sum v vᵀ / n, and the logits."""
    weight = model.get_parameter(f"{name}.weight").detach()
    J = jacobian(lambda w: functional_call(model, {f"{name}.weight": w}, (x,)), weight)
    J, z = J.reshape(len(x), -1, weight.numel()), model(x).detach()
    if loss == "mse":
        return J, z
    p = z.softmax(1)
    values, U = torch.linalg.eigh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
    root = (U * values.clamp(min=0).sqrt()[:, None]) @ U.mT
    return root @ J, z


def gauss_newton(model, x, name, loss):
    v = vectors(model, x, name, loss)[0].flatten(0, 1)
    return v.T @ v / len(x)


def top(matrix):
    return torch.linalg.eigvalsh(matrix).flip(0)
