"""The equations of zeroth-order training along low-rank directions, as pure functions.

LOZO: Chen et al., "Enhancing Zeroth-order Fine-tuning for Language Models with Low-rank Structures" (ICLR 2025, arXiv
2410.07698). LOZO+: "Provably Efficient Zeroth-Order Fine-Tuning via Greedy Low-Rank Subspace Selection" (ICML 2026);
only its abstract was readable, so the scores and the threshold below are this project's design.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Score = Literal["decrease", "energy", "random"]
Scaling = Literal["unit", "paper", "reference"]


def scales(scaling: Scaling, rank: int) -> tuple[float, float]:
    """Factors (a, b): the probe is a U V^T and the update -lr c b (a U V^T).

    "paper" divides the update by r, "unit" puts 1/sqrt(r) on both sides (the same for a model of matrices, better
    balanced where vectors share c), "reference" is the published code, which never divides.
    """
    if scaling == "unit":
        return rank**-0.5, 1.0
    return 1.0, 1.0 / rank if scaling == "paper" else 1.0


def lge(c: float, left: Float[Tensor, "m r"], right: Float[Tensor, "n r"]) -> Float[Tensor, "m n"]:
    """LOZO's low-rank gradient estimate c U V^T / r, unbiased for the gradient as the radius goes to 0 (3.3)."""
    return left @ right.mT * (c / right.shape[1])


def transfer_momentum(
    momentum: Float[Tensor, "m r0"], old: Float[Tensor, "n r0"], new: Float[Tensor, "n r1"]
) -> Float[Tensor, "m r1"]:
    """The momentum N of N V_old^T in a new basis, N V_old^T V_new / n (3.4).

    Nearly all of it is lost unless the two subspaces overlap: on average N' V_new^T = (r1 / n) N V_old^T.
    """
    return momentum @ (old.mT @ new) / old.shape[0]


def unit_columns(right: Float[Tensor, "n r"], orthogonal: bool = False) -> Float[Tensor, "n r"]:
    """Columns of norm sqrt(n), the length of a Gaussian one; orthogonal to each other on demand (where r <= n)."""
    n, r = right.shape
    if orthogonal and r <= n:
        return torch.linalg.qr(right).Q * n**0.5
    return right * (n**0.5 / right.norm(dim=0))


def candidate_scores(
    c: Float[Tensor, " p"],
    kappa: Float[Tensor, " p"],
    score: Score = "decrease",
    generator: torch.Generator | None = None,
) -> Float[Tensor, " p"]:
    """What each of p candidates promises, from the slope c and the curvature kappa along its probe (3.5, step 4).

    "energy" is c^2, on average sum_l |G_l v_l|^2. "decrease" is the descent of the ideal step along the probe,
    c^2 / (2 kappa), with curvatures floored at a tenth of their mean positive part. In networks slope and curvature
    share their dominant input directions, so large energy alone picks stiff directions. "random" ignores the losses (a
    control). A non-finite candidate scores -inf.
    """
    finite = c.isfinite() & kappa.isfinite()
    energy = c.square()
    if score == "random":
        values = torch.rand(len(c), generator=generator, dtype=c.dtype)
    elif score == "energy" or not finite.any():
        values = energy
    else:
        floor = 0.1 * kappa[finite].clamp(min=0).mean()
        values = energy / (2 * kappa.clamp(min=float(floor))) if floor > 0 else energy
    return torch.where(finite, values, -torch.inf)


def select_directions(
    scores: Float[Tensor, " p"], threshold: float, max_rank: int, tau: float | None = None
) -> tuple[list[int], float]:
    """Indices kept, best first, and the threshold used (3.5, step 5).

    Kept are scores of at least ``tau``, by default ``threshold`` times the mean of the finite ones; the ``max_rank``
    largest if more, the single best if none. Ties go to the earlier candidate.
    """
    finite = scores[scores.isfinite()]
    if tau is None:
        tau = threshold * float(finite.mean()) if len(finite) else 0.0
    order = torch.argsort(scores, descending=True, stable=True).tolist()
    kept = [i for i in order if scores[i] >= tau or _equal_up_to_rounding(float(scores[i]), tau)][:max_rank]
    return kept or order[:1], tau


def _equal_up_to_rounding(score: float, tau: float) -> bool:
    """A pool of equal scores must not fall below its own mean because of the mean's last bit."""
    return abs(score - tau) <= 1e-12 * abs(tau)


def alignment(gradients: Sequence[Tensor], rights: Sequence[Tensor]) -> float:
    """How well kept directions meet the gradient: sum |G_l V_l|^2 / (r sum |G_l|^2), on average 1 for random V_l.

    A diagnostic: it takes true gradients (m x n each), which no optimiser here ever computes.
    """
    met = sum(float((g @ v).square().sum()) / v.shape[1] for g, v in zip(gradients, rights, strict=True))
    return met / sum(float(g.square().sum()) for g in gradients)


def query_gain(probes: int, interval: int, alpha: float, *, probe_updates: bool = True) -> float:
    """Expected progress per query against LOZO's, (P + nu alpha) / (P + nu + 1/2); without probe updates P counts for
    nothing above. A period costs 2 P + 1 + 2 nu queries; selection pays where this exceeds 1."""
    return ((probes if probe_updates else 0) + interval * alpha) / (probes + interval + 0.5)
