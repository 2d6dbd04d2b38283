"""Merging the adapters of a peft model: the user's and the reinforcing one into one plain LoRA, or into the base."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from subspan.errors import SafetyError, TargetError
from subspan.linalg import LowRank
from subspan.safety.buffer_reinforce.merge import (
    Basis,
    Missing,
    Variant,
    Weight,
    both_weights,
    check_settings,
    merged,
)
from subspan.safety.buffer_reinforce.roles import mark_role, role_of_adapter
from subspan.surgery import FactorPair, factor_pairs, weight_matrix, write_weight
from subspan.surgery.plain import check_plain_lora

ALPHAS = (0.0, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class MergedModule:
    """What the merge did to one module; norms are Frobenius, of the weight changes with their scaling."""

    name: str
    user_norm: float
    reinforce_norm: float
    kept_rank: int
    """Directions of the user's output subspace."""
    removed_energy: float
    """|QᵀD_R|² / |D_R|²: the share of the reinforcing change inside that subspace, before alpha."""
    error: float
    """Relative error of the recompression to ``rank`` (0 without)."""


@dataclass(frozen=True)
class MergeReport:
    """Settings of a merge and what it did, module by module."""

    alpha: float
    tau: float
    weight: tuple[float, float]
    modules: tuple[MergedModule, ...]

    def table(self) -> str:
        """The modules as aligned text."""
        lines = [f"{'module':48} {'|D_U|':>9} {'|D_R|':>9} {'rank':>5} {'removed':>8} {'error':>8}"]
        lines += [
            f"{m.name:48} {m.user_norm:9.3g} {m.reinforce_norm:9.3g} {m.kept_rank:5d} {m.removed_energy:8.3f} "
            f"{m.error:8.1e}"
            for m in self.modules
        ]
        return "\n".join(lines)


def merge_reinforced(
    model: Any,
    user: str = "user",
    reinforce: str = "reinforce",
    into: str = "final",
    *,
    alpha: float = 0.1,
    tau: float = 0.01,
    weight: Weight = (1.0, 0.5),
    subspace: Basis = "svd",
    variant: Variant = "qr",
    missing: Missing = "error",
    rank: int | None = None,
    merge_into_base: bool = False,
) -> MergeReport:
    """Merge two adapters of ``model`` into a new one, c_U D_U + c_R (I - alpha Q Qᵀ) D_R in every module.

    The new adapter is a plain LoRA of scaling 1 and rank r_U + r_R (by module), exact to rounding, and becomes the
    active one; the other two stay. It loads in plain peft after ``save_adapter``.

    Args:
        model: a peft model that holds both adapters; a buffer must be off.
        user: name of the user's adapter.
        reinforce: name of the provider's.
        into: name of the new adapter; that of ``user`` replaces it.
        alpha: see ``qr_merge``; ``choose_merge`` picks it by what you measure.
        tau: see ``qr_merge``.
        weight: c for both (the paper: 0.5), or (c_U, c_R).
        subspace: see ``qr_merge``.
        variant: see ``qr_merge``.
        missing: a module that only ``reinforce`` adapts is an error, kept (as c_R D_R) or dropped. One that only
            ``user`` adapts becomes c_U D_U.
        rank: recompress every module to this rank by SVD; the report states the relative error.
        merge_into_base: write the change into the base weights (summed in float32) in place of a new adapter.

    Raises:
        ValueError: alpha, tau or a name out of range, factors that are not finite, by module.
        TargetError: an adapter that is missing or no plain LoRA, a module that only ``reinforce`` adapts, a quantised
            base with ``merge_into_base``.
        SafetyError: one of the two is a buffer.
    """
    check_settings(alpha, tau, subspace, variant, missing)
    if user == reinforce:
        raise ValueError(f"user and reinforce are both {user!r}; two adapters are merged")
    pairs = _checked(model, user), _checked(model, reinforce)
    weights = both_weights(weight)
    merges = dict(_merges(*pairs, alpha, tau, weights, subspace, variant, missing, rank))
    report = MergeReport(alpha, tau, weights, tuple(row for _, row in merges.values()))
    changes = {name: change for name, (change, _) in merges.items()}
    if merge_into_base:
        layers = {p.name: p.layer for p in (*pairs[0].values(), *pairs[1].values())}
        _write_into_base(layers, changes)
        model.base_model.set_adapter([])
    else:
        write_adapter(model, into, changes, model.peft_config[user], replace=into in (user, reinforce))
        mark_role(model, into, "final")
    return report


def _checked(model: Any, adapter: str) -> dict[str, FactorPair]:
    check_plain_lora(model, adapter)
    if role_of_adapter(model, adapter) == "buffer":
        raise SafetyError(f"{adapter!r} is the buffer: it is taken off after the user's run, never merged")
    return {pair.name: pair for pair in factor_pairs(model, adapter)}


def check_modules(users: Iterable[str], reinforces: Iterable[str], missing: str) -> list[str]:
    """Modules that only the reinforcing adapter has; with ``missing`` "error" there may be none (``TargetError``)."""
    known = set(users)
    extra = [name for name in reinforces if name not in known]
    if extra and missing == "error":
        more = f" and {len(extra) - 1} more" if extra[1:] else ""
        raise TargetError(
            f"the reinforcing adapter also adapts {extra[0]}{more}, which the user's does not; "
            'missing="keep" adds it all the same, "drop" leaves it out'
        )
    return extra


def _change(pair: FactorPair) -> LowRank:
    """D = s A Bᵀ in float32 or better."""
    return pair.low_rank(torch.promote_types(pair.param_A.dtype, torch.float32)).scale(pair.scaling)


def _merges(
    users: dict[str, FactorPair],
    reinforces: dict[str, FactorPair],
    alpha: float,
    tau: float,
    weights: tuple[float, float],
    subspace: Basis,
    variant: Variant,
    missing: str,
    rank: int | None,
) -> Iterable[tuple[str, tuple[LowRank, MergedModule]]]:
    """Each module's merged change and its line in the report."""
    extra = check_modules(users, reinforces, missing)
    for name in [*users, *(extra if missing == "keep" else [])]:
        user = _change(users[name]) if name in users else None
        reinforce = _change(reinforces[name]) if name in reinforces else None
        kept, share = 0, 0.0
        if user is not None and reinforce is not None:
            try:
                change, part = merged(user, reinforce, alpha, tau, weights, subspace, variant)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            kept, share = part.kept_rank, part.removed_energy
        else:
            change = user.scale(weights[0]) if user is not None else reinforce.scale(weights[1])  # pyright: ignore
            if not (change.A.isfinite().all() and change.B.isfinite().all()):
                raise ValueError(f"{name}: the factors hold NaN or Inf")
        error = 0.0
        if rank is not None and rank < change.rank:
            values = change.svd().S
            left = float(torch.linalg.norm(values[rank:]))
            error = left / float(torch.linalg.norm(values)) if left else 0.0
            change = change.truncate(rank)
        sizes = {f"{k}_norm": float(z.norm()) if z else 0.0 for k, z in (("user", user), ("reinforce", reinforce))}
        yield name, (change, MergedModule(name, **sizes, kept_rank=kept, removed_energy=share, error=error))


def write_adapter(model: Any, name: str, changes: dict[str, LowRank], like: Any, replace: bool = False) -> None:
    """Add a plain LoRA of scaling exactly 1 with these changes, and make it the one that is active.

    What does not concern its factors (task, base model's name) it has from the configuration ``like``.
    """
    from peft import LoraConfig

    ranks = [z.rank for z in changes.values()]
    r = max(set(ranks), key=ranks.count)
    # "^" keeps peft from taking a name for the ending of another.
    others = {f"^{n}": z.rank for n, z in changes.items() if z.rank != r}
    options: dict[str, Any] = {"r": r, "lora_alpha": r, "rank_pattern": others, "alpha_pattern": dict(others)}
    for field in ("task_type", "fan_in_fan_out", "base_model_name_or_path", "revision"):
        options[field] = getattr(like, field)
    if replace:
        model.delete_adapter(name)
    model.add_adapter(name, LoraConfig(target_modules=list(changes), lora_dropout=0.0, **options))
    for pair in factor_pairs(model, name):
        pair.write(changes[pair.name])
    model.set_adapter(name, inference_mode=True)


def _write_into_base(layers: dict[str, Any], changes: dict[str, LowRank]) -> None:
    sums = {}
    for name, z in changes.items():  # all of them before any is written, so that a refusal leaves the model whole
        weight = weight_matrix(layers[name])
        sums[name] = weight.to(torch.promote_types(weight.dtype, torch.float32)) + z.dense()
    for name, total in sums.items():
        write_weight(layers[name], total)


class Scores(NamedTuple):
    """What decides between merges, in percent: harmful score, over-refusal, accuracy on the user's task."""

    harmful: float
    over_refusal: float
    accuracy: float


class Choice(NamedTuple):
    """The merge that was chosen and its scores; ``admissible`` is False where every candidate over-refuses."""

    alpha: float
    weight: tuple[float, float]
    scores: Scores
    admissible: bool


def choose_merge(
    model: Any,
    evaluate: Callable[[Any], Scores],
    user: str = "user",
    reinforce: str = "reinforce",
    *,
    alphas: Sequence[float] = ALPHAS,
    weights: Sequence[tuple[float, float]] = ((1.0, 0.0), (1.0, 0.1), (1.0, 0.3), (1.0, 0.5), (0.5, 0.5)),
    most_refused: float = 10.0,
    **options: Any,
) -> Choice:
    """Try merges on *validation* rows and take the least harmful one that costs the user nothing.

    Merging takes milliseconds; only ``evaluate`` costs. Of the candidates with an accuracy within one point of the best
    and an over-refusal of at most ``most_refused`` percent the one with the smallest harmful score is chosen (ties: the
    smallest c_R, the smallest alpha). Where all refuse more, the one that refuses least.

    Args:
        model: a peft model that holds both adapters; it is left with ``user`` active.
        evaluate: scores the model as it then is, on rows that no training and no test sees.
        user: name of the user's adapter.
        reinforce: name of the provider's.
        alphas: candidates.
        weights: candidates (c_U, c_R); c_R = 0 is the user's adapter alone.
        most_refused: bound on over-refusal in percent.
        options: further arguments of ``merge_reinforced``.
    """
    tried: list[tuple[float, tuple[float, float], Scores]] = []
    for weight in weights:
        for alpha in alphas if weight[1] else alphas[:1]:  # without a reinforcing term alpha has no effect
            merge_reinforced(model, user, reinforce, "_candidate", alpha=alpha, weight=weight, **options)
            tried.append((alpha, weight, evaluate(model)))
            model.set_adapter(user)  # peft would make the first adapter it finds the active one, a buffer even
            model.delete_adapter("_candidate")
    return best_of(tried, most_refused)


def best_of(tried: Sequence[tuple[float, tuple[float, float], Scores]], most_refused: float = 10.0) -> Choice:
    """The rule of ``choose_merge`` on (alpha, weight, scores)."""
    calm = [t for t in tried if t[2].over_refusal <= most_refused]
    if not calm:
        return Choice(*min(tried, key=lambda t: (t[2].over_refusal, t[2].harmful, t[1][1], t[0])), False)
    best = max(t[2].accuracy for t in calm)
    able = [t for t in calm if t[2].accuracy >= best - 1]
    return Choice(*min(able, key=lambda t: (t[2].harmful, t[1][1], t[0])), True)
