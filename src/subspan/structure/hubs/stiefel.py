"""The authors' solver: a Riemannian subgradient method for min max_k tr(Vᵀ S_k V) over the Stiefel manifold.

Kept for reproduction, and to turn a fractional solution of :mod:`subspan.structure.hubs.minimax` into a subspace.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from subspan.linalg import orthonormalise, polar


class Descent(NamedTuple):
    """The best V (p x s, orthonormal columns), its f(V), f at every step, and the share of steps led by each k."""

    V: Tensor
    value: float
    values: list[float]
    lead: Tensor


def traces(S: Float64[Tensor, "K p p"], V: Float64[Tensor, "p s"]) -> Float64[Tensor, " K"]:
    """tr(Vᵀ S_k V) for every k; f(V) is the largest."""
    return ((S @ V) * V).sum((1, 2))


def subgradient_descent(
    S: Float64[Tensor, "K p p"],
    V: Float64[Tensor, "p s"],
    *,
    steps: int = 500,
    alpha: float = 0.1,
    bound: float | None = None,
) -> Descent:
    """Descend from V by steps of length alpha / log(t + 2), as the authors do, and return where it ends.

    With a lower ``bound`` of f, Polyak's steps (f - bound) / |U|² are taken instead, and the best point is returned.
    """
    values, lead = [], S.new_zeros(len(S))
    best, least = V, math.inf
    for t in range(2, steps + 2):
        images = S @ V
        f = (images * V).sum((1, 2))
        k = int(f.argmax())  # the first of the largest
        values.append(float(f[k]))
        if bound is not None and values[-1] < least:
            best, least = V, values[-1]
        if t == steps + 1:
            break
        u = 2 * images[k]
        inner = V.mT @ u
        u = u - V @ (inner + inner.mT) / 2  # onto the tangent space
        if bound is None:
            step = alpha / math.log(t + 2)
        else:
            step = (values[-1] - bound) / max(float(u.square().sum()), torch.finfo(u.dtype).tiny)
        lead[k] += step
        V = polar(V - step * u)
    if bound is None:
        best, least = V, values[-1]
    return Descent(best, least, values, lead / lead.sum() if steps > 1 else lead + 1 / len(S))


def random_starts(
    S: Float64[Tensor, "K p p"],
    s: int,
    *,
    starts: int,
    generator: torch.Generator,
    steps: int = 500,
    alpha: float = 0.1,
) -> Descent:
    """The descent with the smallest final f among ``starts`` random orthonormal starts (the authors take 10)."""
    p = S.shape[-1]
    runs = []
    for _ in range(starts):
        gaussian = torch.randn(p, s, generator=generator, dtype=S.dtype, device=generator.device)
        runs.append(subgradient_descent(S, orthonormalise(gaussian.to(S.device)), steps=steps, alpha=alpha))
    return min(runs, key=lambda run: run.value)
