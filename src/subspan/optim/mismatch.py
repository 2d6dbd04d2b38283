"""Instruments for the optimiser mismatch: how weights look, how far an update goes, and what the wrong optimiser costs.

Qu, Huang and Horvath (ICML 2026, arXiv 2605.10468) find that checkpoints pre-trained with Adam lose about 1 % when they
are fully fine-tuned with Muon, and less under LoRA. These numbers describe a model; none of them alone is a verdict.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from subspan.linalg import LowRank, singular_values, spectral_entropy, stable_rank
from subspan.surgery import (
    BaseShift,
    FactorPair,
    base_layer,
    factor_pairs,
    matrix_layers,
    packed_rows,
    role_of,
    weight_matrix,
    write_weight,
)

Grouping = Callable[[str, nn.Module], str | None]

_QUANTITIES = ("stable_rank", "entropy", "max_norm", "spectral_norm", "peak")
# The absolute norms depend on the learning rate as much as on the optimiser, so they take no part in a comparison.
_SCALE_FREE = ("stable_rank", "entropy", "peak")


def describe(x: Tensor) -> dict[str, float]:
    """Summary of a matrix: stable rank, entropy H, largest entry, spectral norm, and peak = max |x| sqrt(mn) / |x|_F.

    Stable rank, entropy and peak do not change when the matrix is scaled.
    """
    s = singular_values(x)
    largest, norm = float(x.abs().max()), float(s.norm())
    return {
        "stable_rank": float(stable_rank(s)),
        "entropy": float(spectral_entropy(s)),
        "max_norm": largest,
        "spectral_norm": float(s.max()),
        "peak": largest * math.sqrt(x.numel()) / norm if norm else 0.0,
    }


def fingerprint(
    model: nn.Module,
    groups: Literal["auto"] | Grouping = "auto",
    reference: tuple[nn.Module, nn.Module] | None = None,
) -> list[dict[str, Any]]:
    """Mean spectral summary of the (base) weights by role: one row for q, k, v, o, gate, up, down, embed, head, other.

    Packed attention projections are split where the model's config tells the number of heads. ``groups`` may be a
    function (name, module) -> group instead, None to leave a layer out. ``pandas.DataFrame(rows)`` makes a table.

    Pre-training with Muon leaves higher stable rank, entropy and largest entries than with Adam, on the same data and
    architecture. Between different models the numbers cannot be compared, so a row says nothing about the optimiser
    unless ``reference`` gives a pair (pre-trained with Adam, with Muon) of the same architecture. It adds
    ``*_position`` columns for the scale-free quantities: 0 is where the Adam model lies, 1 where the Muon model lies.
    """
    rows = _fingerprint(model, groups)
    if reference is not None:
        adam, muon = ({row["group"]: row for row in _fingerprint(other, groups)} for other in reference)
        for row in rows:
            for key in _SCALE_FREE:
                low, high = adam[row["group"]][key], muon[row["group"]][key]
                row[f"{key}_position"] = (row[key] - low) / (high - low) if high != low else math.nan
    return rows


@torch.no_grad()
def _fingerprint(model: nn.Module, groups: Literal["auto"] | Grouping) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {}
    seen: set[int] = set()
    for name, module in matrix_layers(model).items():
        layer = base_layer(module)
        if id(layer.weight) in seen:  # a tied head is its embedding
            continue
        seen.add(id(layer.weight))
        weight = layer.weight.detach() if isinstance(layer, nn.Embedding) else weight_matrix(layer)
        if groups == "auto":
            parts = _attention_parts(model, name, layer) or {role_of(name, layer): weight}
        else:
            group = groups(name, layer)
            parts = {} if group is None else {group: weight}
        for group, part in parts.items():
            found.setdefault(group, []).append(describe(part))
    return [
        {"group": group, "layers": len(all_), **{k: float(np.mean([d[k] for d in all_])) for k in _QUANTITIES}}
        for group, all_ in found.items()
    ]


def _attention_parts(model: nn.Module, name: str, layer: nn.Module) -> dict[str, Tensor] | None:
    """The q, k and v rows of a packed projection, or None if it is not packed or its layout is unknown."""
    config = getattr(model, "config", None)
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if role_of(name, layer) != "qkv" or not isinstance(heads, int) or not isinstance(width, int):
        return None
    weight = weight_matrix(layer)
    size = getattr(config, "head_dim", None) or width // heads
    # Models name their number of key and value heads differently; the number of rows tells it.
    kv_heads, rest = divmod(weight.shape[0] - heads * size, 2 * size)
    if rest or kv_heads < 1 or (name.endswith("query_key_value") and 1 < kv_heads < heads):
        return None
    rows = packed_rows(name, layer, heads=heads, kv_heads=kv_heads)
    return {role: weight[index.to(weight.device)] for role, index in rows.items()}


@torch.no_grad()
def update_strength(
    model: nn.Module,
    base: nn.Module | None = None,
    adapter_name: str = "default",
    shift: BaseShift | None = None,
) -> list[dict[str, Any]]:
    """How far fine-tuning moved each weight matrix from W0, and along how many directions; one row per layer.

    Columns: ``cosd`` = 1 - cos(W, W0), ``frobenius`` = |dW|_F / |W0|_F, ``spectral`` = |dW|_2 / |W0|_2, ``stable_rank``
    and ``entropy`` of dW, and for LoRA layers the same of ``A`` (r x n), ``B`` (m x r) and of their product ``BA``. The
    product is often far spikier than its factors. ``BA_entropy`` is relative to the r directions it could have.

    ``base`` is the model before fine-tuning. Without it a peft model's own base weights stand for W0, and dW is all
    that the adapter computes: right only for an adapter that started at zero. A start that was taken out of the base
    weights (a residual Fisher or PRISM start) needs its ``shift``: then W0 = W' + s A0 B0ᵀ and dW = s (A Bᵀ - A0 B0ᵀ).
    A start that peft itself took out (PiSSA) needs ``base``. Under DoRA dW includes the magnitudes.

    Raises ``ValueError`` without an adapter and without ``base``, with both ``base`` and ``shift``, and when either
    belongs to another model.
    """
    pairs = {p.name: p for p in factor_pairs(model, adapter_name)} if hasattr(model, "peft_config") else {}
    if base is None and not pairs:
        raise ValueError("update_strength needs base=, the model before fine-tuning, for a model without an adapter")
    if base is not None and shift is not None:
        raise ValueError("update_strength takes base= or shift=, not both: each of them tells W0")
    layers, before = _linear_layers(model), None if base is None else _linear_layers(base)
    starts = {} if shift is None else _starts(layers, shift)
    rows = []
    for name, module in layers.items():
        pair = pairs.get(name)
        if before is None and pair is None:
            continue
        trained = dict(getattr(module, "modules_to_save", {})).get(adapter_name, module)
        weight = weight_matrix(trained).float()
        start = starts.get(name)
        update = torch.zeros_like(weight) if pair is None else _adapter_update(pair, weight, start)
        origin = weight if start is None else weight + start.dense()
        if before is not None:
            if name not in before:
                raise ValueError(f"the base model has no layer {name}: it is another model")
            origin = weight_matrix(before[name]).float()
            if origin.shape != weight.shape:
                raise ValueError(f"{name} is {tuple(origin.shape)} in the base model but {tuple(weight.shape)} now")
            update = update + (weight - origin)
        row = {"layer": name, "group": role_of(name, module)} | _strength(origin, update)
        rows.append(row | (_factor_spectra(pair.low_rank()) if pair is not None else {}))
    return rows


def _adapter_update(pair: FactorPair, weight: Tensor, start: LowRank | None) -> Tensor:
    """W_eff - W0, where the layer's weight is W0 - ``start``."""
    z = pair.low_rank()
    if start is None:
        update = pair.scaling * z.dense()
    else:
        # s (A Bᵀ - A0 B0ᵀ) by the differences of the factors, which a small update on a large start does not cancel.
        z0 = start.scale(1 / pair.scaling)
        update = pair.scaling * (LowRank(z.A - z0.A, z.B) + LowRank(z0.A, z.B - z0.B)).dense()
    magnitudes = getattr(pair.layer, "lora_magnitude_vector", {})
    if pair.adapter in magnitudes:  # DoRA: W_eff = m V / |V| by rows, V = W + s A Bᵀ
        v = weight + pair.scaling * z.dense()
        m = magnitudes[pair.adapter].weight.float().reshape(-1, 1)
        update = update + (m / v.norm(dim=1, keepdim=True) - 1) * v
    return update


def _starts(layers: Mapping[str, nn.Module], shift: BaseShift) -> dict[str, LowRank]:
    """s A0 B0ᵀ by layer, in float32 or better and where the layer is."""
    missing = [name for name in shift.start if name not in layers]
    if missing:
        raise ValueError(f"the model has no layer {missing[0]}: the shift belongs to another model")
    out = {}
    for name, z in shift.start.items():
        weight = weight_matrix(layers[name])
        if z.shape != weight.shape:
            shapes = f"{tuple(weight.shape)} in the model but {tuple(z.shape)} in the shift"
            raise ValueError(f"{name} is {shapes}: it belongs to another model")
        exact = torch.promote_types(weight.dtype, torch.float32)
        out[name] = LowRank(z.A.to(weight.device, exact), z.B.to(weight.device, exact)).scale(shift.scaling[name])
    return out


@contextmanager
def _shift_undone(model: nn.Module, shift: BaseShift) -> Iterator[None]:
    """The base weights as they were before the shift (up to their rounding); afterwards those of now, bit by bit."""
    layers = _linear_layers(model)
    starts = _starts(layers, shift)
    merged = [name for name in starts if getattr(layers[name], "merged", False)]
    if merged:
        raise ValueError(f"an adapter is merged into {merged[0]}; call unmerge_adapter() first")
    weights: list[nn.Parameter] = [base_layer(layers[name]).weight for name in starts]  # pyright: ignore[reportAssignmentType]
    kept = [weight.detach().clone() for weight in weights]
    try:
        for name, start in starts.items():
            write_weight(layers[name], weight_matrix(layers[name]).to(start.A.dtype) + start.dense())
        yield
    finally:
        with torch.no_grad():
            for weight, copy in zip(weights, kept, strict=True):
                weight.copy_(copy)


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers with a weight matrix by the names they have without peft."""
    layers = matrix_layers(model).items()
    return {n.removeprefix("base_model.model."): m for n, m in layers if not isinstance(base_layer(m), nn.Embedding)}


def _strength(origin: Tensor, update: Tensor) -> dict[str, float]:
    d, s0, norm0 = singular_values(update), singular_values(origin), origin.norm()
    # 1 - (1 + a) / sqrt(1 + 2a + b), written so that small updates do not cancel.
    a, b = float((origin * update).sum() / norm0**2), float((update.norm() / norm0) ** 2)
    root = math.sqrt(max(0.0, 1 + 2 * a + b))
    return {
        "cosd": (b - a * a) / (root * (root + 1 + a)) if root else 1.0,
        "frobenius": math.sqrt(b),
        "spectral": float(d.max() / s0.max()),
        "stable_rank": float(stable_rank(d)),
        "entropy": float(spectral_entropy(d)),
    }


def _factor_spectra(z: LowRank) -> dict[str, float]:
    """Stable rank and entropy in peft's letters: A is r x n (our z.B), B is m x r (our z.A)."""
    spectra = {"A": torch.linalg.svdvals(z.B), "B": torch.linalg.svdvals(z.A), "BA": z.svd().S}
    summaries = {"stable_rank": stable_rank, "entropy": spectral_entropy}
    return {f"{letter}_{key}": float(f(s)) for letter, s in spectra.items() for key, f in summaries.items()}


def forgetting(
    model: Any,
    evaluate: Callable[[nn.Module], Mapping[str, float]],
    base: nn.Module | None = None,
    shift: BaseShift | None = None,
) -> dict[str, dict[str, float]]:
    """``evaluate`` (source-task metrics by name) before and after fine-tuning, and the change.

    "Before" is ``base``, or a peft model with its adapter switched off. The latter is the model before fine-tuning only
    if the adapter started at zero: with a start that was taken out of the base weights give its ``shift``, which is
    added back for that evaluation and then undone bit by bit (a copy of the shifted weights is kept meanwhile).

    Raises ``ValueError`` without an adapter and without ``base``, with both ``base`` and ``shift``, and for a shift of
    another model or a merged adapter.
    """
    if base is None and not hasattr(model, "disable_adapter"):
        raise ValueError("forgetting needs base=, the model before fine-tuning, for a model without an adapter")
    if base is not None and shift is not None:
        raise ValueError("forgetting takes base= or shift=, not both: each of them tells the model before fine-tuning")
    with (
        nullcontext() if base is not None else model.disable_adapter(),
        nullcontext() if shift is None else _shift_undone(model, shift),
    ):
        before = dict(evaluate(base if base is not None else model))
    after = dict(evaluate(model))
    return {k: {"before": before[k], "after": after[k], "change": after[k] - before[k]} for k in before}


@dataclass(frozen=True)
class StudyRow:
    """One fine-tuning run: the optimiser that pre-trained, what was trained (full or lora), by which optimiser."""

    pretrain: str
    mode: str
    optimizer: str
    lr: float
    seed: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BestCell:
    """The score of one optimiser at its best learning rate. ``edge``: that rate is the first or last of its grid."""

    pretrain: str
    mode: str
    optimizer: str
    lr: float
    scores: tuple[float, ...]
    edge: bool

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with a bootstrap confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MismatchTable:
    """``best``: the cells; ``gap[pretrain, mode]``: matched minus mismatched optimiser (positive: the mismatch costs).

    ``reduction[pretrain]`` = 1 - gap_lora / gap_full, only where the full gap's interval lies above zero: a gap that is
    not there cannot be reduced. ``warnings`` name every cell whose best rate lies on the edge of its grid: a coarse or
    short grid creates gaps of its own.
    """

    best: tuple[BestCell, ...]
    gap: Mapping[tuple[str, str], Estimate]
    reduction: Mapping[str, Estimate]
    warnings: tuple[str, ...]


def mismatch_table(
    results: Sequence[StudyRow],
    *,
    score: str = "score",
    select_by: str = "validation",
    maximize: bool = True,
    confidence: float = 0.95,
    resamples: int = 2000,
    random_state: int = 0,
) -> MismatchTable:
    """Best-over-learning-rate scores of {full, LoRA} x {AdamW, Muon} and what the mismatched optimiser costs.

    The rate of each cell is the best mean ``select_by`` over the seeds (a validation metric); the cell's value is
    ``score`` there. With ``maximize=False`` both are losses, and gaps keep their sign (positive: the mismatch costs).
    Intervals come from a paired bootstrap over seeds.
    """
    best = tuple(_best_cells(results, score, select_by, maximize))
    cells = {(c.pretrain, c.mode, c.optimizer): np.array(c.scores) for c in best}
    sign = 1.0 if maximize else -1.0
    gaps: dict[tuple[str, str], np.ndarray] = {}
    for pretrain, mode, optimizer in cells:
        others = [o for p, m, o in cells if (p, m) == (pretrain, mode) and o != pretrain]
        if optimizer == pretrain and others:
            gaps[pretrain, mode] = sign * (cells[pretrain, mode, pretrain] - cells[pretrain, mode, others[0]])
    rng, tail = np.random.default_rng(random_state), (1 - confidence) / 2

    def estimate(statistic: Callable[..., Any], *samples: np.ndarray) -> Estimate:
        n = len(samples[0])
        draws = rng.integers(0, n, size=(resamples, n))
        values = statistic(*(s[draws].mean(1) for s in samples))
        low, high = np.quantile(values, [tail, 1 - tail])
        return Estimate(float(statistic(*(s.mean() for s in samples))), float(low), float(high))

    gap = {key: estimate(lambda g: g, values) for key, values in gaps.items()}
    reduction = {
        pretrain: estimate(lambda full, lora: 1 - lora / full, values, gaps[pretrain, "lora"])
        for (pretrain, mode), values in gaps.items()
        if mode == "full" and (pretrain, "lora") in gaps and gap[pretrain, mode].low > 0
    }
    edges = tuple(
        f"{c.mode} {c.optimizer} on the {c.pretrain}-pretrained model is best at lr {c.lr:g}, the edge of its grid"
        for c in best
        if c.edge
    )
    return MismatchTable(best, gap, reduction, edges)


def _best_cells(results: Sequence[StudyRow], score: str, select_by: str, maximize: bool) -> list[BestCell]:
    cells: dict[tuple[str, str, str], dict[float, list[StudyRow]]] = {}
    for row in results:
        cells.setdefault((row.pretrain, row.mode, row.optimizer), {}).setdefault(row.lr, []).append(row)
    if not cells:
        raise ValueError("mismatch_table got no results")
    out = []
    seeds = {row.seed for row in results}
    for key, by_lr in cells.items():
        for lr, rows in by_lr.items():
            if {row.seed for row in rows} != seeds or len(rows) != len(seeds):
                raise ValueError(f"{key} at lr {lr:g} has not exactly one run for each of the seeds {sorted(seeds)}")

        def quality(lr: float, by_lr: dict[float, list[StudyRow]] = by_lr) -> float:
            value = float(np.mean([row.metrics[select_by] for row in by_lr[lr]]))
            return -math.inf if math.isnan(value) else (value if maximize else -value)  # a diverged run never wins

        grid = sorted(by_lr)
        lr = max(grid, key=quality)
        scores = tuple(row.metrics[score] for row in sorted(by_lr[lr], key=lambda row: row.seed))
        out.append(BestCell(*key, lr, scores, lr in (grid[0], grid[-1])))
    return out
