"""The mathematics: which directions an adapter starts in, and the factors that write them (spec 3.2, 3.3, 3.6)."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.linalg import (
    SVD,
    Covariance,
    DenseCovariance,
    KroneckerCovariance,
    LowRank,
    SpikedCovariance,
    fix_signs,
    leading_eigh,
    leading_svd,
    random_orthonormal,
)
from subspan.surgery import LayerMoments

Mode = Literal["eigen", "score", "weighted", "projected", "gradient"]
Sign = Literal["gradient", "rotate", "fixed"]
Select = Literal["top", "bottom", "random"]


class Directions(NamedTuple):
    """Rank-one directions u_k v_kᵀ with orthonormal U (m x r) and V (n x r).

    ``energy`` is (u_kᵀ S_Y u_k)(v_kᵀ S_X v_k). ``values`` are the singular values of the part of the weight (or of the
    step) that the mode picks, Delta0 = U diag(values) Vᵀ, and None where it picks directions only (``eigen``).
    """

    U: Tensor
    V: Tensor
    energy: Tensor
    values: Tensor | None = None


def directions(
    w: Float[Tensor, "m n"] | None,
    layer: LayerMoments,
    rank: int,
    *,
    mode: Mode = "eigen",
    sign: Sign = "gradient",
    select: Select = "top",
    corrected: bool = False,
    damping: float = 1e-2,
    generator: torch.Generator | None = None,
) -> Directions:
    """The ``rank`` directions a mode picks for the weight ``w``, signed and paired (see ``fisher_init``).

    ``w`` may be None in ``eigen`` mode; it then cannot order the directions that complete a rank-deficient basis.
    Raises ``ValueError`` for a rank the layer does not have, and where the mode or sign needs a mean gradient that was
    not collected.
    """
    m, n = layer.shape
    if not 1 <= rank <= min(m, n):
        raise ValueError(f"rank {rank} does not fit a {m} x {n} layer")
    fisher = informed(layer)
    if mode == "eigen":
        if corrected:
            u, v, energy = _corrected_pairs(layer, rank)
        else:
            u = _side(layer.outputs, rank, select, w, generator)
            v = _side(layer.inputs, rank, select, None if w is None else w.mT, generator)
            energy = fisher.pair_energies(u, v)
        return Directions(*_signed(u, v, layer.gradient, sign), energy)
    if corrected:
        raise ValueError(f"corrected=True pairs eigenvectors: it needs mode='eigen', got {mode!r}")
    if w is None:
        raise ValueError(f"mode={mode!r} reads the weight, but none was given (a quantised base allows mode='eigen')")
    if select != "top" and mode in ("weighted", "gradient"):
        raise ValueError(f"mode={mode!r} is a best approximation: it knows select='top' only, got {select!r}")
    if mode == "score":
        return _scored(w, fisher, rank, select, generator)
    if mode == "weighted":
        part = fisher.damped(damping).truncate(w, rank, generator).low_rank
    elif mode == "projected":
        # U_r U_rᵀ W V_r V_rᵀ: the part of W inside the Fisher subspace.
        u = _side(layer.outputs, rank, select, w, generator)
        v = _side(layer.inputs, rank, select, w.mT, generator)
        part = LowRank(u @ (u.mT @ w @ v), v)
    elif mode == "gradient":
        if layer.gradient is None:
            raise ValueError("mode='gradient' needs the mean gradient: collect with labels and gradient=True")
        g = layer.gradient.dense() if isinstance(layer.gradient, LowRank) else layer.gradient
        part = fisher.damped(damping).natural_step(g, rank, generator).low_rank.scale(-1.0)
    else:
        raise ValueError(f"mode must be eigen, score, weighted, projected or gradient, got {mode!r}")
    u, s, v = part.svd()
    return Directions(u, v, fisher.pair_energies(u, v), s)


def alignment_scores(w: SVD, fisher: KroneckerCovariance, *, normalize: bool = False) -> Float[Tensor, " k"]:
    """a_i = s_i² (u_iᵀ S_Y u_i)(v_iᵀ S_X v_i) = E(s_i u_i v_iᵀ) of the singular triples of a weight.

    ``normalize`` divides by |W|_F², the sum of all s_i² (give the whole decomposition), to compare layers.
    """
    energy = w.S.square()
    if normalize:
        energy = energy / energy.sum().clamp(min=torch.finfo(energy.dtype).tiny)  # a weight of zero scores zero
    return energy * fisher.pair_energies(w.U, w.V)


def _scored(
    w: Tensor, fisher: KroneckerCovariance, rank: int, select: Select, generator: torch.Generator | None
) -> Directions:
    """The weight's own singular triples, ranked by alignment score instead of singular value."""
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    svd = fix_signs(SVD(u, s, vh.mT))
    order = torch.sort(alignment_scores(svd, fisher), descending=True, stable=True).indices
    if select == "bottom":
        order = order[svd.S[order] > 0].flip(0)
    elif select == "random":
        order = torch.randperm(len(s), generator=generator, device=None if generator is None else generator.device)
    chosen = order[:rank].to(w.device)
    u, v = svd.U[:, chosen], svd.V[:, chosen]
    return Directions(u, v, fisher.pair_energies(u, v), svd.S[chosen])


def informed(layer: LayerMoments) -> KroneckerCovariance:
    """The layer's S_X ⊗ S_Y, with the identity for a side of which nothing is known."""
    return KroneckerCovariance(_or_identity(layer.inputs), _or_identity(layer.outputs))


def _or_identity(c: Covariance) -> Covariance:
    """A covariance of zero knows nothing: the identity prefers no direction."""
    if bool(c.trace > 0):
        return c
    like = c.matrix if isinstance(c, DenseCovariance) else c.values
    return DenseCovariance(torch.eye(c.dim, dtype=like.dtype, device=like.device))


def _side(
    c: Covariance, rank: int, select: Select, w: Tensor | None, generator: torch.Generator | None
) -> Float[Tensor, "d r"]:
    """``rank`` orthonormal directions of one side: eigenvectors, completed where the covariance has lower rank."""
    like = c.matrix if isinstance(c, DenseCovariance) else c.values
    if select == "random":
        where = like.device if generator is None else generator.device
        return random_orthonormal(c.dim, rank, generator=generator, dtype=like.dtype, device=where).to(like.device)
    if select == "bottom":
        if isinstance(c, SpikedCovariance):
            raise ValueError("select='bottom' needs whole covariances, but this layer kept a sketch; raise max_dim")
        values, vectors = c.eigh
        found = vectors[:, values > c.dim * torch.finfo(values.dtype).eps * values[0]][:, -rank:].flip(-1)
    else:
        values, vectors = c.leading(rank)
        # Below this an eigenvalue is rounding of the largest one.
        found = vectors[:, values > 10 * torch.finfo(values.dtype).eps * values[0]]
    found = _fixed(found)
    return found if found.shape[1] == rank else _completed(found, rank, w, generator)


def _completed(found: Tensor, rank: int, w: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """Add directions orthogonal to those found: the left singular vectors of ``w`` in order, then the axes."""
    d = found.shape[0]
    candidates = torch.eye(d, min(d, 2 * rank), dtype=found.dtype, device=found.device)
    if w is not None:
        k = min(2 * rank, *w.shape)
        u = fix_signs(leading_svd(w, k, generator=generator)).U[:, :k]
        candidates = torch.cat([u.to(found), candidates], 1)
    q, r = torch.linalg.qr(torch.cat([found, candidates], 1)[:, :d])
    # A candidate that lies almost inside the span before it names no direction of its own.
    own = r.diagonal().abs() > 1e-3
    own[: found.shape[1]] = False
    return torch.cat([found, q[:, own]], 1)[:, :rank]


def _fixed(vectors: Tensor) -> Tensor:
    """Largest entry of each column positive (ties by index): the same directions whatever the solver's signs."""
    if vectors.shape[1] == 0:
        return vectors
    return fix_signs(SVD(vectors, vectors.new_ones(vectors.shape[1]), vectors)).U


def _corrected_pairs(layer: LayerMoments, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(3.6) Pairs (j, k) with distinct j and k that carry the most measured energy Lam[j, k]."""
    from scipy.optimize import linear_sum_assignment

    if layer.corrected is None:
        raise ValueError("corrected=True needs measured energies: collect_fisher(..., corrected=True)")
    u, v, energy = layer.corrected.U, layer.corrected.V, layer.corrected.energy
    if rank > min(energy.shape):
        raise ValueError(f"only {min(energy.shape)} corrected pairs were measured, {rank} are wanted; raise rank=")
    rows, cols = map(torch.as_tensor, linear_sum_assignment(energy.cpu().numpy(), maximize=True))
    order = torch.sort(energy[rows, cols], descending=True, stable=True).indices[:rank].cpu()
    j, k = rows[order], cols[order]
    return _fixed(u[:, j]), _fixed(v[:, k]), energy[j, k]


def _signed(u: Tensor, v: Tensor, g: Tensor | LowRank | None, sign: Sign) -> tuple[Tensor, Tensor]:
    """Fisher energy does not see the sign of u vᵀ; the mean gradient does: growing the start should lower the loss."""
    if sign == "fixed":
        return u, v
    if g is None:
        raise ValueError(
            f"sign={sign!r} needs the mean gradient: collect with labels and gradient=True, or sign='fixed'"
        )
    core = u.mT @ (g.A @ (g.B.mT @ v) if isinstance(g, LowRank) else g @ v)
    if sign == "gradient":  # u_kᵀ Gbar v_k <= 0
        return torch.where(core.diagonal() > 0, -u, u), v
    if sign == "rotate":  # the same subspaces, signed and paired by the SVD of the core
        p, _, qh = torch.linalg.svd(core)
        return -u @ p, v @ qh.mT
    raise ValueError(f"sign must be gradient, rotate or fixed, got {sign!r}")


def start_factors(d: Directions, s: float, size: float | None = None) -> LowRank:
    """A Bᵀ (papers' letters) for a residual start with scaling ``s``: the balanced split of U diag(values) Vᵀ / s.

    ``size`` sets the largest value (eigen: all of them, equal weights); None keeps Delta0 as it is.
    """
    values = torch.ones_like(d.energy) if d.values is None else d.values
    if size is not None:
        values = values * (size / values.max().clamp(min=torch.finfo(values.dtype).tiny))
    return LowRank.from_svd(SVD(d.U, values / s, d.V))


def spectral_norm(w: Float[Tensor, "m n"], generator: torch.Generator | None = None) -> float:
    """Largest singular value, to about 1e-3 relative (the residual of 3e-2 enters a Rayleigh quotient squared)."""
    small = w if w.shape[0] <= w.shape[1] else w.mT
    top = leading_eigh(
        lambda x: small @ (small.mT @ x),
        1, n=small.shape[0], like=small, depth=3, tol=3e-2, generator=generator,
    )  # fmt: skip
    return float(top.values[0].clamp(min=0.0).sqrt())
