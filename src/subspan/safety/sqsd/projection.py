"""How one row's gradient step moves an adapter along a direction: the mathematics, in factors, batched over rows.

Per linear layer W (m x n) an adapter computes W + s A Bᵀ (A m x r, B n x r: the other papers' letters, peft's
``lora_B`` and transposed ``lora_A``), and a direction is V = P Qᵀ (P m x k, Q n x k). No m x n matrix is formed.
Equation numbers are those of this project's specification; the paper (arXiv 2605.04572) defines dW, the sum of cosines
over modules and their difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from subspan.linalg import LowRank
from subspan.surgery.per_example import LayerGradient, example_gradients

Metric = Literal["cosine", "global", "projection", "dot", "l2"]
METRICS: tuple[str, ...] = get_args(Metric)


class FactorGradients(NamedTuple):
    """Gradients of b rows' losses with respect to the factors."""

    A: Float[Tensor, "b m r"]
    B: Float[Tensor, "b n r"]


class Projected(NamedTuple):
    """<dW, V> for k directions, |dW|², and the squared norm of what an optimiser sees, for b rows."""

    dots: Float[Tensor, "b k"]
    norm_sq: Float[Tensor, " b"]
    grad_sq: Float[Tensor, " b"]


def factor_gradients(D: Float[Tensor, "b t m"], X: Float[Tensor, "b t n"], z: LowRank, s: float) -> FactorGradients:
    """From a layer's inputs X and its outputs' gradients D: g_A = s Dᵀ(X B), g_B = s Xᵀ(D A)."""  # (3.5)
    return FactorGradients((s * _thin(X, z.B) @ D).mT, (s * _thin(D, z.A) @ X).mT)


def _thin(x: Float[Tensor, "b t n"], f: Float[Tensor, "n r"]) -> Float[Tensor, "b r t"]:
    """(x f)ᵀ of each row. Products of a wide and a thin matrix are three to five times as fast on a CPU this way round,
    and so are those with the result, whose long side lies in memory in one piece."""
    b, t, n = x.shape
    return (f.mT @ x.reshape(b * t, n).mT).view(-1, b, t).transpose(0, 1)


@dataclass(frozen=True)
class FactorStep:
    """The step of SGD on the factors of one module, dW = -(g_A Bᵀ + A g_Bᵀ), seen along some directions."""

    z: LowRank
    s: float
    directions: Sequence[LowRank]

    @cached_property
    def _fixed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Aᵀ and Bᵀ as they are multiplied with; [BᵀB, I] and [AᵀA, I], whose products with gᵀg are norms."""
        z = self.z
        eye = torch.eye(z.rank, dtype=z.A.dtype, device=z.A.device)
        by_b, by_a = (torch.stack([f.mT @ f, eye]).flatten(1) for f in (z.B, z.A))
        return z.A.mT.contiguous(), z.B.mT.contiguous(), by_b, by_a

    @cached_property
    def _anchors(self) -> tuple[Float[Tensor, "k rm"], Float[Tensor, "k rn"]]:
        """-P (Qᵀ B) and -Q (Pᵀ A) of each direction, transposed and flat: what g_A and g_B are multiplied with."""
        a = [-(v.A @ (v.B.mT @ self.z.B)).mT.flatten() for v in self.directions]
        b = [-(v.B @ (v.A.mT @ self.z.A)).mT.flatten() for v in self.directions]
        return torch.stack(a), torch.stack(b)

    def project(self, D: Float[Tensor, "b t m"], X: Float[Tensor, "b t n"]) -> Projected:
        """Of b rows, from the layer's inputs and its outputs' gradients."""
        return self.project_gradients(factor_gradients(D, X, self.z, self.s))

    def project_gradients(self, g: FactorGradients) -> Projected:
        """<dW, V> and |dW|² in O((m + n) r (r + k)) per row."""
        to_a, to_b = self._anchors
        at, bt, by_b, by_a = self._fixed
        a, b = g.A.mT, g.B.mT
        dots = linear(a.flatten(1), to_a) + linear(b.flatten(1), to_b)  # (3.4)
        # Columns: <g_Aᵀg_A, BᵀB> + <AᵀA, g_Bᵀg_B>, and |g_A|² + |g_B|².
        squares = linear((a @ a.mT).flatten(1), by_b) + linear((b @ b.mT).flatten(1), by_a)
        cross = 2 * (linear(a, at).mT * linear(b, bt)).sum((1, 2))
        norm_sq = (squares[:, 0] + cross).clamp(min=0)  # (3.4); rounding may leave a little less than zero
        # Where the terms cancel, what is left of their sum is rounding: those rows' norms come from QR factors.
        lost = norm_sq < 1e-6 * (squares[:, 0] + cross.abs())
        if lost.any():
            norm_sq = norm_sq.clone()
            norm_sq[lost] = self._step(FactorGradients(g.A[lost], g.B[lost])).norm().square()
        return Projected(dots, norm_sq, squares[:, 1])

    def _step(self, g: FactorGradients) -> LowRank:
        """-dW as factors of rank 2r."""
        b = len(g.A)
        return LowRank(torch.cat([g.A, self.z.A.expand(b, -1, -1)], 2), torch.cat([self.z.B.expand(b, -1, -1), g.B], 2))


@dataclass(frozen=True)
class WeightStep:
    """The step of SGD on the weight of one module itself, dW = -Dᵀ X: full fine-tuning."""

    directions: Sequence[LowRank]

    def project(self, D: Float[Tensor, "b t m"], X: Float[Tensor, "b t n"]) -> Projected:
        dots = -torch.stack([LayerGradient(D, X).inner(v) for v in self.directions], 1)
        norm_sq = example_gradients(D, X).norm_sq()
        return Projected(dots, norm_sq, norm_sq)


def contributions(
    metric: str, dots: Float[Tensor, "b l"], norm_sq: Float[Tensor, "b l"], direction_norms: Float[Tensor, " l"]
) -> Float[Tensor, "b l"]:
    """What each of l modules adds to a term of b rows; the sum over modules is the term.

    Args:
        metric: "cosine" of each module (the paper); "global", one cosine over all modules together; "projection",
            <dW, V>/|V|; "dot", <dW, V>; "l2", -|dW - V|, so that, as elsewhere, larger is nearer to the direction.
        dots: <dW, V> of each row and module.
        norm_sq: |dW|² of each row and module.
        direction_norms: |V| of each module.
    """
    if metric == "dot":
        return dots
    if metric == "l2":
        return -(norm_sq - 2 * dots + direction_norms.square()).clamp(min=0).sqrt()
    if metric == "projection":
        return _over(dots, direction_norms.expand_as(dots))
    if metric == "global":
        length = norm_sq.sum(1, keepdim=True).sqrt() * direction_norms.square().sum().sqrt()
        return _over(dots, length.expand_as(dots))
    if metric == "cosine":
        return _over(dots, norm_sq.sqrt() * direction_norms).clamp(-1, 1)  # (2); rounding may pass 1 by an ulp
    raise ValueError(f"metric {metric!r} is none of {', '.join(METRICS)}")


def _over(value: Tensor, length: Tensor) -> Tensor:
    """value / length, and 0 where the length is: a row without gradient moves nowhere. NaN stays NaN."""
    return torch.where(length == 0, torch.zeros_like(value), value / torch.where(length == 0, 1.0, length))


def jackknife_error(parts: Float[Tensor, "b l"]) -> Float[Tensor, " b"]:
    """Standard error of the sum over l modules by leaving out one at a time: sqrt(l) times their standard deviation.

    NaN for a single module.
    """
    count = parts.shape[1]
    return count**0.5 * parts.std(1) if count > 1 else torch.full_like(parts[:, 0], torch.nan)


def null_deviation(shapes: Sequence[tuple[int, int]], terms: int = 2) -> float:
    """Standard deviation of a sum of cosines along independent random directions: sqrt(terms * sum 1/(m n)).

    A direction of Gaussian factors has a covariance proportional to the identity whatever its rank, so that each cosine
    has mean 0 and variance near 1/(m n).
    """
    return sum(terms / (m * n) for m, n in shapes) ** 0.5
