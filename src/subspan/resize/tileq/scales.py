"""Activation scales: how much a weight's input channel counts when the factors are fitted."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The exponent falls by this step until the scales are tame, and no further than the least.
_STEP, _LEAST = 0.2, 0.5


def activation_scale(
    mean_abs: Float[Tensor, "*b p"], exponent: float = 2.4, ratio_max: float = 1e5
) -> Float[Tensor, "*b p"]:
    """s = m^t, centred so that max(s) min(s) = 1, in float64.

    m is the mean absolute activation of each input channel. Where max(s) / min(s) would reach ``ratio_max``, t falls in
    steps of 0.2 as far as 0.5; where that does not help either, and where m is zero, s = 1. A channel that never fired
    gets the scale of the faintest that did (a floor of 1e-15 would drive every ratio past the limit, and s to 1).
    """
    m = mean_abs.double()
    if not bool(torch.isfinite(m).all() and (m >= 0).all()):
        raise ValueError("mean absolute activations must be finite and not negative")
    faintest = torch.where(m > 0, m, torch.inf).amin(-1, keepdim=True)
    log = torch.where(m > 0, m, torch.where(faintest < torch.inf, faintest, 1.0)).log()
    low, high = log.amin(-1, keepdim=True), log.amax(-1, keepdim=True)
    tried = m.new_tensor(_exponents(exponent))
    tame = tried * (high - low) < math.log(ratio_max)
    t = torch.where(tame.any(-1, keepdim=True), tried[tame.int().argmax(-1)].unsqueeze(-1), 0.0)
    return torch.exp(t * (log - (low + high) / 2))


def _exponents(first: float) -> list[float]:
    least = min(first, _LEAST)
    steps = math.ceil((first - least) / _STEP - 1e-9)
    return [first - _STEP * i for i in range(steps)] + [least]


def pooled(
    values: Float[Tensor, "k p"], counts: Int[Tensor, " k"], groups: Int[Tensor, " k"], size: int
) -> Float[Tensor, "g p"]:
    """Mean over the experts of each of ``size`` groups, weighted by the tokens each saw; zero where none saw any."""
    weights = counts.to(values.dtype).unsqueeze(1)
    total = values.new_zeros(size, values.shape[1]).index_add_(0, groups, weights * values)
    return total / values.new_zeros(size, 1).index_add_(0, groups, weights).clamp(min=1)  # an empty group's sum is zero
