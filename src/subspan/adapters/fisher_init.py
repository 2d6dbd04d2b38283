"""Fisher-guided LoRA initialisation: start the adapter where the model's predictions are most sensitive.

After "Learning in the Fisher Subspace: A Guided Initialization for LoRA Fine-Tuning" (Feng, Lin and Kao, ICML 2026,
arXiv 2605.01046). Only its abstract and first page could be read; modes, signs, scale and allocation are a design of
our own from K-FAC (Martens and Grosse 2015), EKFAC (George et al. 2018), PiSSA, EVA, LoRA-GA and FWSVD.

A perturbation Z of an m x n weight costs about E(Z)/2 nats, with E(Z) = tr(S_Y Z S_X Zᵀ) the Fisher energy (S_X, S_Y
the second moments of inputs and output gradients). For orthonormal u_k and v_k the sum of E(u_k v_kᵀ) is largest for
the leading eigenvectors of S_Y and S_X, paired in order.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import BaseMismatch, PrivacyError, TargetError
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
from subspan.surgery import (
    BaseShift,
    FactorPair,
    FisherStats,
    LayerMoments,
    base_fingerprint,
    base_layer,
    factor_pairs,
    shift_base,
    weight_matrix,
)

Mode = Literal["eigen", "score", "weighted", "projected", "gradient"]
Sign = Literal["gradient", "rotate", "fixed"]
Select = Literal["top", "bottom", "random"]


# ---------------------------------------------------------------------------------------------- the mathematics (3.2)


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
    fisher = KroneckerCovariance(_or_identity(layer.inputs), _or_identity(layer.outputs))
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


def alignment_scores(w: SVD, fisher: KroneckerCovariance) -> Float[Tensor, " k"]:
    """a_i = s_i² (u_iᵀ S_Y u_i)(v_iᵀ S_X v_i) = E(s_i u_i v_iᵀ) of the singular triples of a weight."""
    return w.S.square() * fisher.pair_energies(w.U, w.V)


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
        return random_orthonormal(c.dim, rank, generator=generator, dtype=like.dtype, device=like.device)
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
    u, v, energy, _ = vars(layer.corrected).values()
    if rank > min(energy.shape):
        raise ValueError(f"only {min(energy.shape)} corrected pairs were measured, {rank} are wanted; raise rank=")
    rows, cols = linear_sum_assignment(energy.cpu().numpy(), maximize=True)
    chosen = energy[rows, cols]
    order = torch.sort(chosen, descending=True, stable=True).indices[:rank].cpu()
    j, k = torch.as_tensor(rows)[order], torch.as_tensor(cols)[order]
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


# ------------------------------------------------------------------------------------------------- the factors (3.3)


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


# ------------------------------------------------------------------------------------------------------- the reports


@dataclass(frozen=True)
class LayerReport:
    """One layer's start.

    ``energy_captured`` is the share of the Fisher trace in its directions; the effective ranks are participation ratios
    of S_X and S_Y; ``kfac_error`` is the relative error of K-FAC's independence (0 is perfect; measured by
    ``corrected``); ``residual_error`` is max |W' + s B A - W| / max |W| on up to 64 rows.
    """

    name: str
    rank: int
    energy_captured: float
    effective_rank_inputs: float
    effective_rank_outputs: float
    kfac_error: float | None = None
    residual_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class InitReport:
    """What ``fisher_init`` did. ``shift`` is what it took out of the base weights (None with ``zero_b``)."""

    layers: Sequence[LayerReport]
    mode: Mode
    shift: BaseShift | None = None


class LayerSpectrum(NamedTuple):
    """Leading eigenvalues of S_X and S_Y, and their products in order."""

    inputs: np.ndarray
    outputs: np.ndarray
    energy: np.ndarray


def fisher_spectrum(stats: FisherStats, k: int = 64) -> dict[str, LayerSpectrum]:
    """The ``k`` leading eigenvalues of every layer's S_X and S_Y (fewer where a sketch kept fewer), for plots."""
    found = {}
    for name, layer in stats.layers.items():
        x, y = (_leading_values(c, k).cpu().numpy() for c in (layer.inputs, layer.outputs))
        size = min(len(x), len(y))
        found[name] = LayerSpectrum(x, y, x[:size] * y[:size])
    return found


def _leading_values(c: Covariance, k: int) -> Float[Tensor, " k"]:
    kept = c.dim if isinstance(c, DenseCovariance) else c.values.shape[0]
    # Rounding leaves zero eigenvalues slightly negative.
    return c.leading(min(k, kept)).values.clamp(min=0.0)


# --------------------------------------------------------------------------------------------- rank allocation (3.4)


class RankAllocation(NamedTuple):
    """``rank_pattern`` and ``alpha_pattern`` for a peft ``LoraConfig``."""

    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]


def allocate_ranks(
    stats: FisherStats,
    r: int,
    *,
    lora_alpha: float,
    rho: float = 1.0,
    normalize: bool = True,
    adjust_scaling: bool = False,
    use_rslora: bool = False,
) -> RankAllocation:
    """Share the rank budget r x layers out by Fisher energy, with 1 <= r_l <= rho r.

    Every layer's spectrum e_k = l^X_k l^Y_k (divided by tr(S_X) tr(S_Y) with ``normalize``) enters one pool, whose
    largest entries win. Layers with equal entries get equal ranks as far as the budget divides. ``alpha_pattern`` keeps
    each layer's scaling s, or its s r with ``adjust_scaling``.
    """
    if r < 1 or rho < 1:
        raise ValueError(f"need r >= 1 and rho >= 1, got r={r} and rho={rho}")
    caps = {n: min(int(rho * r), *layer.shape) for n, layer in stats.layers.items()}
    entries: list[tuple[float, int, str]] = []
    for name, layer in stats.layers.items():
        x, y = (_leading_values(c, caps[name]) for c in (layer.inputs, layer.outputs))
        size = min(len(x), len(y))
        caps[name] = min(caps[name], size)
        scale = float(layer.fisher.trace) if normalize else 1.0
        energy = (x[:size] * y[:size] / (scale or 1.0)).tolist()
        entries += [(e, k, name) for k, e in enumerate(energy) if k > 0]
    ranks = dict.fromkeys(caps, 1)
    left = sum(min(r, *layer.shape) for layer in stats.layers.values()) - len(ranks)
    skipped: list[str] = []
    for tied in _tied(sorted(entries, key=lambda e: (-e[0], e[1]))):
        if len(tied) <= left:
            for name in tied:
                ranks[name] += 1
            left -= len(tied)
        else:
            skipped += tied
    for name in skipped:  # what does not divide evenly goes by order: the budget is spent
        if left and ranks[name] < caps[name]:
            ranks[name] += 1
            left -= 1
    s = lora_alpha / (math.sqrt(r) if use_rslora else r)
    alphas = {}
    for name, rank in ranks.items():
        wanted = s * r / rank if adjust_scaling else s
        alphas[name] = wanted * (math.sqrt(rank) if use_rslora else rank)
    # "^" keeps peft from matching a name as the ending of another.
    return RankAllocation({f"^{n}": k for n, k in ranks.items()}, {f"^{n}": a for n, a in alphas.items()})


def _tied(entries: Sequence[tuple[float, int, str]]) -> list[list[str]]:
    """Names of entries in order, grouped where energy and index agree."""
    groups: list[list[str]] = []
    last: tuple[float, int] | None = None
    for energy, k, name in entries:
        if last is not None and k == last[1] and math.isclose(energy, last[0], rel_tol=1e-9):
            groups[-1].append(name)
        else:
            groups.append([name])
        last = energy, k
    return groups


# --------------------------------------------------------------------------------------------------------- the shell


def fisher_init(
    model: nn.Module,
    stats: FisherStats,
    *,
    mode: Mode = "eigen",
    sign: Sign = "gradient",
    kappa: float = 0.3,
    select: Select = "top",
    preserve: Literal["residual", "zero_b"] = "residual",
    corrected: bool = False,
    damping: float = 1e-2,
    strict: bool = True,
    force: bool = False,
    private: bool = False,
    adapter_name: str = "default",
    generator: torch.Generator | None = None,
) -> InitReport:
    """Write a Fisher-guided start into the LoRA factors of a peft model, once, right after ``get_peft_model``.

    Args:
        model: a peft model whose base is the model ``stats`` were collected from, unmodified.
        stats: from ``collect_fisher``.
        mode: "eigen" pairs the leading eigenvectors of S_Y and S_X; "score" keeps W's singular triples of largest
            alignment score; "weighted" takes the best rank-r part of W in Fisher norm; "projected" the part of W inside
            the Fisher subspace; "gradient" the best rank-r natural-gradient step (a bridge to LoRA-GA).
        sign: of the eigen directions: "gradient" flips each so that growing it lowers the loss; "rotate" signs and
            pairs them by the SVD of UᵀGbar V (for degenerate eigenvalues); "fixed" needs no gradient.
        kappa: size of the start, s B A = kappa |W|_2 U Vᵀ (eigen; for gradient, its largest singular value).
        select: "bottom" (smallest non-zero) and "random" are for study.
        preserve: "residual" takes the start out of the base weights, so that the function is unchanged (export with
            ``export_plain_lora(model, path, shift=report.shift)``); "zero_b" sets A = Vᵀ, B = 0, base untouched.
        corrected: pair eigenvectors by measured energies (needs ``collect_fisher(..., corrected=True)``).
        damping: of the inverse roots in weighted and gradient mode, relative to the mean eigenvalues.
        strict: refuse a rank above min(m, n); otherwise the surplus columns keep peft's values, with a warning.
        force: overwrite an adapter whose B is not zero.
        private: the adapter will be trained under a privacy guarantee.
        generator: for select="random".

    Raises:
        PrivacyError: ``private`` with statistics that were not declared public.
        BaseMismatch: the base weights are not those of the statistics.
        TargetError: quantised or tied weights in residual mode.
        ValueError: a trained adapter, a rank that does not fit, or missing statistics.

    Nothing is written when an error is raised.
    """
    if private and not stats.public:
        raise PrivacyError(
            "calibration is not differentially private: train privately only from statistics of public data, declared "
            "by collect_fisher(..., public=True)"
        )
    if kappa <= 0:
        raise ValueError(f"kappa must be positive, got {kappa}")
    residual = preserve == "residual"
    if not residual and mode != "eigen":
        raise ValueError(
            f"preserve='zero_b' starts B at zero and uses input directions only: mode must be 'eigen', got {mode!r}"
        )
    pairs = _matched(model, stats, adapter_name)
    _check_start(model, pairs, stats, residual=residual, force=force, strict=strict)
    starts: dict[str, tuple[LowRank, Directions]] = {}
    rows: dict[str, Tensor] = {}
    for pair in pairs:
        m, n, r = pair.shape
        layer = stats.layers[pair.name]
        rank = min(r, m, n)
        w = _weight(pair) if residual else None
        d = directions(
            w, layer, rank, mode=mode, sign=sign if residual else "fixed", select=select,
            corrected=corrected, damping=damping, generator=generator or _solver_start(pair.A),
        )  # fmt: skip
        if w is None:
            start = LowRank(torch.zeros_like(d.U), d.V)
        else:
            rows[pair.name] = _sample(w)
            start = start_factors(d, pair.scaling, _size(w, mode, kappa))
        starts[pair.name] = start, d
    for pair in pairs:
        pair.write(_fit(starts[pair.name][0], pair))
    shift = shift_base(model, pairs) if residual else None
    if residual:
        _set_magnitudes(pairs)
    reports = [
        _layer_report(pair, stats.layers[pair.name], starts[pair.name][1], rows.get(pair.name)) for pair in pairs
    ]
    return InitReport(reports, mode, shift)


def _matched(model: nn.Module, stats: FisherStats, adapter_name: str) -> list[FactorPair]:
    """The adapter's factor pairs that have statistics; says which layers keep peft's initialisation."""
    pairs = factor_pairs(model, adapter_name)
    other = [
        name
        for name, module in model.named_modules()
        if (adapter_name in getattr(module, "lora_embedding_A", {}) or adapter_name in getattr(module, "lora_A", {}))
        and all(module is not pair.layer for pair in pairs)
    ]
    uncalled = [p.name for p in pairs if p.name not in stats.layers and p.name.endswith("out_proj")]
    if other or uncalled:
        warnings.warn(
            f"{', '.join(other + uncalled)}: such layers (embeddings, packed attention) have no Fisher "
            "statistics and keep peft's initialisation",
            stacklevel=3,
        )
    missing = [p.name for p in pairs if p.name not in stats.layers and p.name not in uncalled]
    if missing:
        raise ValueError(
            f"no statistics for {len(missing)} adapted layers ({', '.join(missing[:4])}); collect them with the "
            "adapter's own target modules"
        )
    return [p for p in pairs if p.name in stats.layers]


def _check_start(
    model: nn.Module, pairs: Sequence[FactorPair], stats: FisherStats, *, residual: bool, force: bool, strict: bool
) -> None:
    """Refuse, before anything is written, what would not be the start that was asked for."""
    if base_fingerprint(model, stats.parameters) != stats.fingerprint:
        raise BaseMismatch(
            "the base weights differ from those the statistics were collected on (another model, an edit, or an "
            "earlier initialisation that shifted them); load the original base or collect again"
        )
    for pair in pairs:
        m, n, r = pair.shape
        if (m, n) != stats.layers[pair.name].shape:
            raise BaseMismatch(f"{pair.name} is {m} x {n}, but its statistics are for {stats.layers[pair.name].shape}")
        if r > min(m, n):
            if strict:
                raise ValueError(f"rank {r} exceeds the {m} x {n} layer {pair.name}; lower it or pass strict=False")
            warnings.warn(
                f"{pair.name} ({m} x {n}) has only {min(m, n)} directions: the other {r - min(m, n)} columns keep "
                "peft's values",
                stacklevel=4,
            )
        if not force and bool(pair.A.any()):
            raise ValueError(
                f"adapter {pair.adapter!r} is not fresh: lora_B of {pair.name} is not zero; force=True overwrites it"
            )
    if residual:
        _check_shiftable(model, pairs)


def _check_shiftable(model: nn.Module, pairs: Sequence[FactorPair]) -> None:
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            owners[id(p)] = owners.get(id(p), 0) + 1
    for pair in pairs:
        weight_matrix(pair.layer)  # refuses quantised and meta weights
        if owners[id(base_layer(pair.layer).weight)] > 1:
            raise TargetError(
                f"the weight of {pair.name} is tied to another layer: shifting it would change both; use "
                "preserve='zero_b' or leave the layer out"
            )
    others = {a for pair in pairs for a in _lora_A(pair)} - {pairs[0].adapter}
    if others:
        warnings.warn(
            f"the base weights are shifted for adapter {pairs[0].adapter!r}: {', '.join(sorted(others))} will compute "
            "something else on them; preserve='zero_b' leaves the base alone",
            stacklevel=4,
        )


def _lora_A(pair: FactorPair) -> Mapping[str, Any]:
    return pair.layer.lora_A  # pyright: ignore[reportReturnType]


def _weight(pair: FactorPair) -> Tensor:
    w = weight_matrix(pair.layer)
    return w.to(torch.promote_types(w.dtype, torch.float32))


def _size(w: Tensor, mode: Mode, kappa: float) -> float | None:
    """Directions without a size of their own start at kappa |W|_2; parts of the weight keep theirs."""
    return kappa * spectral_norm(w, _solver_start(w)) if mode in ("eigen", "gradient") else None


def _solver_start(like: Tensor) -> torch.Generator:
    """Iterative solvers always start from the same random block: the result is a function of the inputs."""
    return torch.Generator(like.device).manual_seed(0)


def _sample(w: Tensor) -> Tensor:
    return w[:: max(1, w.shape[0] // 64)].clone()


def _fit(start: LowRank, pair: FactorPair) -> LowRank:
    """Where the layer has fewer directions than the adapter columns, the surplus columns keep their values."""
    if start.rank == pair.shape[2]:
        return start
    own = pair.low_rank(start.A.dtype)
    return LowRank(torch.cat([start.A, own.A[:, start.rank :]], 1), torch.cat([start.B, own.B[:, start.rank :]], 1))


@torch.no_grad()
def _set_magnitudes(pairs: Sequence[FactorPair]) -> None:
    """DoRA divides by the row norms of W' + s A Bᵀ: set its magnitudes to them, so that the function is unchanged."""
    for pair in pairs:
        magnitudes = getattr(pair.layer, "lora_magnitude_vector", {})
        if pair.adapter in magnitudes:
            weight = magnitudes[pair.adapter].weight
            effective = _weight(pair) + pair.scaling * pair.low_rank().dense()
            weight.copy_(torch.linalg.norm(effective, dim=1).reshape(weight.shape))


def _layer_report(pair: FactorPair, layer: LayerMoments, d: Directions, before: Tensor | None) -> LayerReport:
    notes, error = [], None
    if before is not None:
        z = pair.low_rank(before.dtype)
        after = _sample(_weight(pair)) + pair.scaling * LowRank(_sample(z.A), z.B).dense()
        error = float((after - before).abs().max() / before.abs().max().clamp(min=torch.finfo(before.dtype).tiny))
    if not bool(layer.outputs.trace > 0):
        notes.append("all gradients were zero: S_Y = I, output directions from the weight")
    if layer.positions < 4 * d.U.shape[1]:
        notes.append(f"only {layer.positions} positions for rank {d.U.shape[1]}")
    fisher = KroneckerCovariance(_or_identity(layer.inputs), _or_identity(layer.outputs))
    return LayerReport(
        pair.name,
        d.U.shape[1],
        float(d.energy.sum() / fisher.trace),
        float(layer.inputs.effective_rank()),
        float(layer.outputs.effective_rank()),
        None if layer.corrected is None else layer.corrected.kfac_error,
        error,
        "; ".join(notes),
    )
