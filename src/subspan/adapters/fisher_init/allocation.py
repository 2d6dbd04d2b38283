"""Fisher spectra of the layers, and ranks shared out by them (spec 3.4)."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import BaseMismatch
from subspan.linalg import Covariance, DenseCovariance
from subspan.surgery import FisherStats, LayerMoments, base_fingerprint, weight_matrix


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


class RankAllocation(NamedTuple):
    """``rank_pattern`` and ``alpha_pattern`` for a peft ``LoraConfig``."""

    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]


def allocate_ranks(
    stats: FisherStats,
    r: int,
    *,
    lora_alpha: float | int,
    rho: float = 1.0,
    normalize: bool = True,
    adjust_scaling: bool = False,
    use_rslora: bool = False,
    spectrum: Literal["eigen", "weighted"] = "eigen",
    model: nn.Module | None = None,
) -> RankAllocation:
    """Share the rank budget r x layers out by Fisher energy, with 1 <= r_l <= rho r.

    Every layer's spectrum (divided by tr(S_X) tr(S_Y) with ``normalize``) enters one pool, whose largest entries win:
    e_k = l^X_k l^Y_k with "eigen"; with "weighted" e_k = d_k², the singular values of S_Y^{1/2} W S_X^{1/2}, for which
    ``model`` is the plain base model the statistics come from. Layers with equal entries get equal ranks as far as the
    budget divides. ``alpha_pattern`` keeps each layer's scaling s, or its s r with ``adjust_scaling``.

    Raises ``BaseMismatch`` for another base model.
    """
    if r < 1 or rho < 1:
        raise ValueError(f"need r >= 1 and rho >= 1, got r={r} and rho={rho}")
    if spectrum not in ("eigen", "weighted"):
        raise ValueError(f"spectrum must be eigen or weighted, got {spectrum!r}")
    if (spectrum == "weighted") != (model is not None):
        raise ValueError("spectrum='weighted' reads the weights of model=, and spectrum='eigen' none")
    if model is not None and base_fingerprint(model, stats.parameters) != stats.fingerprint:
        raise BaseMismatch("the weights of model= differ from those the statistics were collected on; load them again")
    caps = {n: min(int(rho * r), *layer.shape) for n, layer in stats.layers.items()}
    entries: list[tuple[float, int, str]] = []
    for name, layer in stats.layers.items():
        w = None if model is None else weight_matrix(model.get_submodule(name))
        energy = _energies(layer, w, caps[name])
        caps[name] = len(energy)
        scale = float(layer.fisher.trace) if normalize else 1.0
        entries += [(e, k, name) for k, e in enumerate((energy / (scale or 1.0)).tolist()) if k > 0]
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


def _energies(layer: LayerMoments, w: Tensor | None, k: int) -> Float[Tensor, " k"]:
    """The ``k`` leading products of eigenvalues (or as many as a sketch kept); of a weight, weighted values squared."""
    if w is None:
        x, y = (_leading_values(c, k) for c in (layer.inputs, layer.outputs))
        size = min(len(x), len(y))
        return x[:size] * y[:size]
    solver = torch.Generator(w.device).manual_seed(0)  # the ranks are a function of model and statistics
    return layer.fisher.truncate(w.to(layer.dtype), k, solver).values[:k].square()


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
