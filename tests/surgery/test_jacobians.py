"""Jacobians of logits by hooks: against plain differentiation, for every kind of layer, and leaving nothing behind."""

import pytest
import torch
from torch import nn

from subspan.errors import TargetError
from subspan.surgery import logit_jacobians


class Twice(nn.Module):
    """One layer called twice, then a head."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(self.layer(x).tanh()).tanh())


class Tokens(nn.Module):
    """A layer on every token, their mean, and a head."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.layer(x).relu_().mean(1))


CONV = (nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3 * 9, 3))
CASES = {
    "twice": (Twice, (5, 4), ["layer", "head"]),
    "tokens": (Tokens, (5, 6, 4), ["layer", "head"]),
    "conv": (lambda: nn.Sequential(*CONV), (5, 2, 5, 5), ["0", "3"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_jacobian_of_each_logit_is_that_of_plain_differentiation(case, frozen):
    make, shape, names = CASES[case]
    torch.manual_seed(0)
    model, x = make().double().requires_grad_(not frozen), torch.randn(shape, dtype=torch.float64)
    layers = {name: model.get_submodule(name) for name in names}
    logits, found = logit_jacobians(lambda: model(x), layers)
    torch.testing.assert_close(logits, model(x).detach())
    assert not any(t.requires_grad for layer in found.values() for t in layer)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers.values())
    model.requires_grad_()
    for name, layer in layers.items():
        for b, k in ((0, 1), (4, 2)):
            (g,) = torch.autograd.grad(model(x)[b, k], layer.weight)
            torch.testing.assert_close(found[name].A[k, b].mT @ found[name].X[b], g.flatten(1))


def test_an_operation_that_cannot_be_batched_is_done_logit_by_logit():
    class Stubborn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(g.numpy() * 2)  # vmap refuses

    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    _, found = logit_jacobians(lambda: Stubborn.apply(layer(x)), {"layer": layer})
    torch.testing.assert_close(found["layer"].A, 2 * torch.eye(2)[:, None, None].expand(2, 4, 1, 2))


def test_half_precision_gives_single():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(torch.bfloat16)
    logits, found = logit_jacobians(lambda: model(torch.randn(5, 3, dtype=torch.bfloat16)), {"0": model[0]})
    assert {logits.dtype, found["0"].A.dtype, found["0"].X.dtype} == {torch.float32}


def test_what_has_no_jacobian_is_refused_and_the_hooks_come_off():
    model = Tokens()
    with pytest.raises(TargetError, match="unused took no part"):
        logit_jacobians(lambda: model(torch.randn(2, 3, 4)), {"head": model.head, "unused": model.unused})
    with pytest.raises(TargetError, match="LayerNorm"):
        logit_jacobians(lambda: model(torch.randn(2, 3, 4)), {"norm": nn.LayerNorm(3)})
    with pytest.raises(ValueError, match=r"got \(6, 3, 5\)"):
        logit_jacobians(lambda: model.layer(torch.randn(6, 3, 4)), {"layer": model.layer})
    with pytest.raises(TargetError, match="one row of the first dimension"):
        logit_jacobians(lambda: model.layer(torch.randn(6, 4)).reshape(3, 10), {"layer": model.layer})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
