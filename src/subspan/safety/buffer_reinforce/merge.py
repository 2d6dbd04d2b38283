"""The QR merge (paper, section on merging; equations by the numbers of the method's page).

An adapter's weight change is D = s B A, here a ``LowRank`` with ``.A`` = s lora_B (m x r) and ``.B`` = lora_Aᵀ (n x r).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from subspan.linalg import LowRank, Subspace

Basis = Literal["svd", "gram", "qr"]
Variant = Literal["qr", "flat"]
Missing = Literal["error", "keep", "drop"]
Weight = float | Sequence[float]


class Damped(NamedTuple):
    """D_R' = change - along D_U: what is left of the reinforcing change once its part along the user's is damped."""

    change: LowRank
    along: float
    kept_rank: int
    removed_energy: float
    """|QᵀD_R|² / |D_R|²: the share of the reinforcing change that lies along the user's update."""


def output_subspace(user: LowRank, tau: float = 0.01, basis: Basis = "svd") -> Subspace:
    """Orthonormal basis Q (m x k, k <= r) of the output directions that the user's update makes use of.

    Args:
        user: D_U.
        tau: directions whose energy is at most ``tau`` times the largest are dropped.
        basis: "svd" keeps singular directions of D_U itself, whatever the gauge of its factors; "gram" is the authors'
            code, which thresholds the spectrum of A_U A_Uᵀ and orthonormalises the surviving columns of B_U; "qr"
            orthonormalises all of B_U.
    """
    if basis == "svd":  # (5b); tau is stated on squares of singular values. Roundoff is no direction: None for tau = 0.
        return user.column_space(math.sqrt(tau) or None)
    columns = user.A
    if basis == "gram":  # (5a)
        energy, v = torch.linalg.eigh(user.B.mT @ user.B)
        kept = energy > tau * energy.max()
        columns = columns if kept.all() else columns @ v[:, kept]
    if not columns.any():  # QR of zeros would return arbitrary directions
        return Subspace(columns[:, :0])
    return Subspace(torch.linalg.qr(columns).Q)


def damped(
    user: LowRank, reinforce: LowRank, alpha: float, tau: float, subspace: Basis = "svd", variant: Variant = "qr"
) -> Damped:
    """D_R', the reinforcing change without the share ``alpha`` of its part along the user's update.

    ``variant`` "qr" removes it from every output direction of the user's, (I - alpha Q Qᵀ) D_R; "flat" removes the one
    component along D_U as a long vector.
    """
    energy = float(reinforce.inner(reinforce))
    if variant == "flat":  # (3.4)
        size = float(user.inner(user))
        along = float(reinforce.inner(user)) / (size + 1e-8)  # the authors' floor
        share = along**2 * size / energy if energy > 0 else 0.0
        return Damped(reinforce, alpha * along, int(size > 0), share)
    space = output_subspace(user, tau, subspace)
    coordinates = LowRank(space.coordinates(reinforce.A), reinforce.B)
    inside = float(coordinates.inner(coordinates))
    share = inside / energy if energy > 0 else 0.0
    return Damped(reinforce.damp_columns(space, alpha), 0.0, space.dim, share)  # (6)


def qr_merge(
    user: LowRank,
    reinforce: LowRank,
    *,
    alpha: float = 0.1,
    tau: float = 0.01,
    weight: Weight = 0.5,
    subspace: Basis = "svd",
    variant: Variant = "qr",
) -> LowRank:
    """c_U D_U + c_R (I - alpha Q Qᵀ) D_R as one low-rank matrix, exact, of rank r_U + r_R.

    Args:
        user: D_U, the user's weight change (m x n) with its scaling.
        reinforce: D_R, the reinforcing change of the same layer.
        alpha: share of D_R that is removed inside the user's output subspace, in [0, 1].
        tau: threshold of that subspace, in [0, 1); see ``output_subspace``.
        weight: c for both, or (c_U, c_R).
        subspace: how Q is found; see ``output_subspace``.
        variant: "flat" removes D_R's component along D_U as one vector instead (an ablation).

    Raises:
        ValueError: alpha, tau or a name outside their range, shapes that do not match, factors that are not finite.

    Computed in float32 or better. Source: Ham et al., ICML 2026, arXiv 2605.24550, and the authors' ``qr_merging.py``.
    """
    check_settings(alpha, tau, subspace, variant)
    return merged(user, reinforce, alpha, tau, both_weights(weight), subspace, variant)[0]


def check_settings(alpha: float, tau: float, subspace: str, variant: str, missing: str = "error") -> None:
    """Raise ``ValueError`` for what is out of range, and for a name that none of the branches knows."""
    chosen = {"subspace": (subspace, Basis), "variant": (variant, Variant), "missing": (missing, Missing)}
    for name, (value, known) in chosen.items():
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is the share that is removed, in [0, 1], got {alpha}")
    if not 0 <= tau < 1:
        raise ValueError(f"tau is a threshold relative to the largest, in [0, 1), got {tau}")


def both_weights(weight: Weight) -> tuple[float, float]:
    """(c_U, c_R), from a pair or from one number for both."""
    c_user, c_reinforce = weight if isinstance(weight, Sequence) else (weight, weight)
    if not (math.isfinite(c_user) and math.isfinite(c_reinforce)):
        raise ValueError(f"the weights of a merge must be finite, got {weight}")
    return c_user, c_reinforce


def merged(
    user: LowRank,
    reinforce: LowRank,
    alpha: float,
    tau: float,
    weights: tuple[float, float],
    subspace: Basis,
    variant: Variant,
) -> tuple[LowRank, Damped]:
    """``qr_merge`` with (c_U, c_R), and what was damped."""
    if user.shape != reinforce.shape:
        raise ValueError(f"the user's change is {user.shape}, the reinforcing one {reinforce.shape}")
    user, reinforce = (LowRank(*(exact(f) for f in (z.A, z.B))) for z in (user, reinforce))
    for name, z in (("user", user), ("reinforcing", reinforce)):
        if not (z.A.isfinite().all() and z.B.isfinite().all()):
            raise ValueError(f"the {name} factors hold NaN or Inf")
    c_user, c_reinforce = weights
    part = damped(user, reinforce, alpha, tau, subspace, variant)
    return LowRank.merge([user, part.change], [c_user - c_reinforce * part.along, c_reinforce]), part  # (7)


def exact(x: Tensor) -> Tensor:
    """In float32 or better: a half-precision QR would lose more than the merge changes."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
