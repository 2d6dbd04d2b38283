"""Signs, what stands in for their derivative, and what is done to weights before their sign is taken."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Estimator = Literal["clip", "identity", "bireal", "ede"]
AlphaGrad = Literal["identity", "detach", "full"]
Transform = Literal["none", "center", "standardize", "recu"]


def sign(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """+1 where x >= 0 (0 and -0.0 too), -1 where x < 0; NaN stays NaN."""
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return torch.where(x >= 0, one, torch.where(x < 0, -one, x))


def derivative(x: Float[Tensor, "*s"], estimator: Estimator, progress: float = 0.0) -> Tensor | None:
    """What the backward pass takes for d sign / dx; None is one everywhere.

    Args:
        x: the layer's input.
        estimator: "clip", 1 on [-1, 1] and 0 outside; "identity"; "bireal", the slope 2 - 2|x| of Bi-Real Net's
            piecewise polynomial on [-1, 1]; "ede", IR-Net's k t (1 - tanh^2(t x)) with k = max(1/t, 1).
        progress: share of training done, in [0, 1]; moves EDE's t from 0.1 to 10.
    """
    if estimator == "identity":
        return None
    if estimator == "clip":
        return (x.abs() <= 1).to(x.dtype)
    if estimator == "bireal":
        return (2 - 2 * x.abs()).clamp_min(0)
    t = 10 ** (2 * progress - 1)
    return max(1 / t, 1.0) * t * (1 - torch.tanh(t * x).square())


def filter_scale(weight: Float[Tensor, "q *f"]) -> Float[Tensor, " q"]:
    """alpha: the mean magnitude of each output channel's filter (XNOR-Net)."""
    return weight.abs().flatten(1).mean(1)


def weight_gradient(
    grad: Float[Tensor, "q *f"], weight: Float[Tensor, "q *f"], alpha: Tensor | None, rule: AlphaGrad
) -> Float[Tensor, "q *f"]:
    """Gradient of the latent weights from that of Q_W = alpha sign(W).

    "identity": as it is; "detach": times alpha; "full": also through alpha = mean |W|,
    alpha G + sign(W) sum(G sign(W)) / n over each filter of n weights.
    """
    if rule == "identity" or alpha is None:
        return grad
    scaled = per_channel(alpha, grad) * grad
    if rule == "detach":
        return scaled
    s = sign(weight)
    through = (grad * s).flatten(1).mean(1)
    return scaled + per_channel(through, s) * s


def per_channel(values: Float[Tensor, " q"], like: Float[Tensor, "q *f"]) -> Tensor:
    """One value per output channel, in a shape that multiplies a weight."""
    return values.view(-1, *(1,) * (like.ndim - 1))


def transformed(weight: Float[Tensor, "q *f"], transform: Transform, tau: float = 0.99) -> Float[Tensor, "q *f"]:
    """Latent weights as they are before the sign, differentiable.

    "center" and "standardize" act on each filter (IR-Net); "recu" clamps between the filter's quantiles 1 - tau and
    tau, which revives weights that are too large ever to change sign (ReCU).
    """
    if transform == "none":
        return weight
    rows = weight.flatten(1)
    if transform == "recu":
        low, high = torch.quantile(rows.detach().float(), torch.tensor([1 - tau, tau], device=rows.device), dim=1)
        rows = rows.clamp(low[:, None].to(rows), high[:, None].to(rows))
    else:
        rows = rows - rows.mean(1, keepdim=True)
        if transform == "standardize":
            # A constant filter has no spread; the floor leaves it at zero.
            rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12) * rows.shape[1] ** 0.5
    return rows.view_as(weight)
