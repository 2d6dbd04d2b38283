"""How far a layer is from neural collapse: within-class spread, the frame of class means, duality with the weights."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.linalg import Subspace


@dataclass(frozen=True)
class CollapseMetrics:
    """Zero at collapse, except ``nc3`` and ``nc3_dual``, cosines that are one. None: not measured.

    Attributes:
        nc1_trace: tr Sigma_W / tr Sigma_B.
        nc1_pinv: tr(Sigma_W Sigma_B⁺) / K; needs a second pass.
        nc1_square: |Sigma_W Sigma_B⁺|_F²; needs a second pass.
        nc2_frame: deviation of the class means' Gram matrix from the nearest multiple of I (squared loss, no bias).
        nc2_simplex: of the centred means' from the nearest multiple of I - 11ᵀ/K (cross-entropy, or a bias).
        nc3: cosine of WᵀW, restricted to the span of the class means, and M Mᵀ.
        nc3_dual: mean cosine of a class's own logit row in A and the class mean of the next analysed layer's inputs (or
            of the logits), where the widths agree; it has a meaning for layers in a chain, not side by side.
    """

    nc1_trace: float
    nc1_pinv: float | None
    nc1_square: float | None
    nc2_frame: float
    nc2_simplex: float
    nc3: float
    nc3_dual: float | None = None


def between_eigen(means: Float[Tensor, "c q"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "q r"]]:
    """Non-zero eigenvalues and eigenvectors of Sigma_B = (1/K) sum_c (mu_c - mu_G)(.)ᵀ."""
    centred = means - means.mean(0)
    u, s, _ = torch.linalg.svd(centred.T, full_matrices=False)
    keep = s > max(centred.shape) * torch.finfo(s.dtype).eps * s[0]
    return s[keep].square() / len(means), u[:, keep]


def within_between_ratio(within: float, means: Float[Tensor, "c q"]) -> float:
    """tr Sigma_W / tr Sigma_B; infinite where all class means are one."""
    between = float((means - means.mean(0)).square().sum()) / len(means)
    return within / between if between > 0 else math.inf


def frame_deviation(gram: Float[Tensor, "c c"], shape: Float[Tensor, "c c"]) -> float:
    """|gram - t shape| / |gram| for the best t: the sine of the angle between them (nan for a zero Gram matrix)."""
    norm = torch.linalg.norm(gram)
    if not bool(norm > 0):
        return math.nan
    t = (gram * shape).sum() / shape.square().sum()
    return float(torch.linalg.norm(gram - t * shape) / norm)


def cosine(a: Float[Tensor, "*s"], b: Float[Tensor, "*s"]) -> float:
    """Of two tensors as vectors (nan where one is zero)."""
    norms = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    return float((a * b).sum() / norms) if bool(norms > 0) else math.nan


def nc2(means: Float[Tensor, "c q"]) -> tuple[float, float]:
    """Deviation from an orthogonal frame, and of the centred means from a simplex ETF."""
    eye = torch.eye(len(means), dtype=means.dtype, device=means.device)
    centred = means - means.mean(0)
    return frame_deviation(means @ means.T, eye), frame_deviation(centred @ centred.T, eye - 1 / len(means))


def nc3(weight: Float[Tensor, "p q"], means: Float[Tensor, "c q"]) -> float:
    """cos(WᵀW on span(M), M Mᵀ), the columns of M being the class means."""
    span = Subspace.span(means.T).Q
    on_weight, on_means = weight @ span, means @ span
    return cosine(on_weight.T @ on_weight, on_means.T @ on_means)


def nc3_dual(A: Float[Tensor, "c k p"], behind: Float[Tensor, "c p"]) -> float:
    """Mean over classes of the cosine of A_c[c] and the class mean of what follows the layer."""
    own = A[torch.arange(len(A)), torch.arange(len(A))]
    return sum(cosine(a, m) for a, m in zip(own, behind, strict=True)) / len(A)
