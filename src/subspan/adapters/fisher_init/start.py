"""Writing a Fisher-guided start into a peft model, with every check before the first write."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from subspan.adapters.fisher_init.directions import (
    Directions,
    Mode,
    Select,
    Sign,
    directions,
    informed,
    spectral_norm,
    start_factors,
)
from subspan.errors import BaseMismatch, PrivacyError, TargetError
from subspan.linalg import LowRank
from subspan.surgery import (
    BaseShift,
    FactorPair,
    FisherStats,
    LayerMoments,
    base_fingerprint,
    base_layer,
    factor_pairs,
    mark_data_start,
    shift_base,
    weight_matrix,
)


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

    Nothing is written when an error is raised. A start from statistics that were not declared public is marked on the
    LoRA layers (``surgery.data_start``) and in ``report.shift.public``, so that private training can refuse it.
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
            None if w is None else w.to(layer.dtype), layer, rank,
            mode=mode, sign=sign if residual else "fixed", select=select, corrected=corrected, damping=damping,
            generator=generator or _solver_start(pair.A),
        )  # fmt: skip
        if w is None:
            start = LowRank(torch.zeros_like(d.U), d.V)
        else:
            rows[pair.name] = _sample(w)
            start = start_factors(d, pair.scaling, _size(w, mode, kappa))
        starts[pair.name] = start, d
    for pair in pairs:
        pair.write(_fit(starts[pair.name][0], pair))
        if not stats.public:
            mark_data_start(pair, "fisher_init, private calibration data")
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
    parents = {id(child): module for module in model.modules() for child in module.children()}
    matrices = {id(pair.layer) for pair in pairs}
    other = [
        name
        for name, module in model.named_modules()
        if (adapter_name in getattr(module, "lora_embedding_A", {}) or adapter_name in getattr(module, "lora_A", {}))
        and id(module) not in matrices
    ]
    # nn.MultiheadAttention reads this layer's weight without calling it.
    uncalled = [p.name for p in pairs if isinstance(parents.get(id(p.layer)), nn.MultiheadAttention)]
    if other or uncalled:
        warnings.warn(
            f"{', '.join(other + uncalled)}: such layers (embeddings, packed attention) have no Fisher "
            "statistics and keep peft's initialisation",
            stacklevel=3,
        )
    pairs = [p for p in pairs if p.name not in uncalled]
    missing = [p.name for p in pairs if p.name not in stats.layers]
    if missing:
        raise ValueError(
            f"no statistics for {len(missing)} adapted layers ({', '.join(missing[:4])}); collect them with the "
            "adapter's own target modules"
        )
    return pairs


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
        if pair.scaling <= 0:
            raise ValueError(f"{pair.name} has scaling {pair.scaling}: a start needs lora_alpha > 0")
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
    others = {a for pair in pairs for a in pair.layer.lora_A} - {pairs[0].adapter}
    if others:
        warnings.warn(
            f"the base weights are shifted for adapter {pairs[0].adapter!r}: {', '.join(sorted(others))} will compute "
            "something else on them; preserve='zero_b' leaves the base alone",
            stacklevel=4,
        )


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
            w = _weight(pair)
            effective = w + pair.scaling * pair.low_rank(w.dtype).dense()
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
    return LayerReport(
        pair.name,
        d.U.shape[1],
        float(d.energy.sum() / informed(layer).trace),
        float(layer.inputs.effective_rank()),
        float(layer.outputs.effective_rank()),
        None if layer.corrected is None else layer.corrected.kfac_error,
        error,
        "; ".join(notes),
    )
