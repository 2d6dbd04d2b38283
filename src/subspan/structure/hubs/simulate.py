"""Gaussian graphical models of populations with common, individual and partial hubs (the paper's simulation)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

Range = tuple[float, float]


@dataclass(frozen=True)
class HubSet:
    """Variables that are hubs in some populations only, with the same edges in each of them.

    ``probability``: each hub draws the probability of its edges from this range. ``weight``: magnitudes of its edges.
    """

    hubs: Sequence[int]
    populations: Sequence[int]
    probability: Range = (0.5, 0.8)
    weight: Range = (4.0, 5.0)


class GGMData(NamedTuple):
    """Samples X_k (n_k x p) and precision matrices (p x p) of K populations, and which variables are hubs."""

    X: list[np.ndarray]
    precision: list[np.ndarray]
    common: Int64[np.ndarray, " r"]
    individual: list[np.ndarray]  # per population


def make_common_hub_ggm(
    p: int = 100,
    n: int | Sequence[int] = 100,
    K: int = 3,
    r: int = 5,
    *,
    hub_sets: Sequence[HubSet] | None = None,
    p_common: Range = (0.4, 0.7),
    p_individual: Range = (0.5, 0.8),
    p_other: float = 0.05,
    weight: Range = (4.0, 5.0),
    gaussian_weights: bool = False,
    shift: float = 2.0,
    random_state: Any = None,
) -> GGMData:
    """Draw K populations whose graphs share the first ``r`` variables as hubs.

    One adjacency is common to all: each common hub meets any variable with its own probability, drawn from
        ``p_common``;
    other pairs meet with probability ``p_other``, except those of other hubs. Each hub set adds edges of its hubs to
    anything that is neither a common hub nor a hub of another set, in its populations. All populations share one
    symmetric matrix of edge weights, and one multiple of I is added to all so that the smallest eigenvalue of any is
    ``shift``.

    Args:
        p: variables.
        n: samples of each population.
        K: populations.
        r: common hubs, the variables 0 to r - 1.
        hub_sets: hubs of some populations; by default five for each population k, from variable 25 (k + 1) on.
        p_common: range of the edge probabilities of common hubs.
        p_individual: range of those of the default hub sets.
        p_other: probability of all other edges.
        weight: range of edge magnitudes; signs are random.
        gaussian_weights: draw edge weights from N(0, m²) instead, with m the middle of the range.
        shift: smallest eigenvalue.
        random_state: seed or ``RandomState``.

    Source: J. S. Gómez's simulation design (public reproduction code of JIC-HD), restated and generalised.

    Raises:
        ValueError: hubs that do not fit in p variables, overlap with the common ones, or lie in two sets.
    """
    from sklearn.utils import check_random_state

    rng = check_random_state(random_state)
    sizes = [n] * K if isinstance(n, int | np.integer) else list(n)
    if len(sizes) != K:
        raise ValueError(f"n has {len(sizes)} sizes for {K} populations")
    if hub_sets is None:
        hub_sets = [HubSet(range(25 * (k + 1), 25 * (k + 1) + 5), [k], p_individual, weight) for k in range(K)]
    others = [hub for group in hub_sets for hub in group.hubs]
    if len(set(others)) < len(others) or any(hub < r for hub in others):
        raise ValueError("a variable can belong to one hub set only, and not to the common hubs")
    if r > p or any(hub >= p for hub in others):
        raise ValueError(f"hubs up to variable {max([r - 1, *others])} do not fit in p = {p} variables")

    # probability of each pair, by the hub with the lower index; -1 marks rows that stay empty in the common graph
    chance = np.full((p, p), p_other)
    chance[others], chance[:, others] = 0.0, 0.0
    for hub in reversed(range(r)):
        chance[hub], chance[:, hub] = (rng.uniform(*p_common),) * 2
    common = _symmetric(rng.uniform(size=(p, p)) < chance)
    edges = [common.copy() for _ in range(K)]
    low = np.full((p, p), weight[0])
    high = np.full((p, p), weight[1])
    for group in hub_sets:
        hubs = list(group.hubs)
        taken = [*range(r), *(hub for hub in others if hub not in hubs)]
        chance = np.zeros((p, p))
        for hub in reversed(hubs):
            chance[hub], chance[:, hub] = (rng.uniform(*group.probability),) * 2
        chance[taken], chance[:, taken] = 0.0, 0.0
        extra = _symmetric(rng.uniform(size=(p, p)) < chance)
        low[extra], high[extra] = group.weight
        for k in group.populations:
            edges[k] |= extra
    if gaussian_weights:
        weights = _mirrored(rng.normal(size=(p, p)) * (low + high) / 2)
    else:
        weights = _mirrored(rng.uniform(low, high) * rng.choice([-1.0, 1.0], size=(p, p)))
    precision = [weights * edge for edge in edges]
    lift = shift - min(float(np.linalg.eigvalsh(theta)[0]) for theta in precision)
    precision = [theta + lift * np.eye(p) for theta in precision]
    individual = [
        np.array(sorted(hub for group in hub_sets if k in group.populations for hub in group.hubs), dtype=np.int64)
        for k in range(K)
    ]
    samples = [_normal(theta, size, rng) for theta, size in zip(precision, sizes, strict=True)]
    return GGMData(samples, precision, np.arange(r), individual)


def _symmetric(upper: np.ndarray) -> np.ndarray:
    """The adjacency whose upper triangle is given."""
    upper = np.triu(upper, 1)
    return upper | upper.T


def _mirrored(x: np.ndarray) -> np.ndarray:
    upper = np.triu(x, 1)
    return upper + upper.T


def _normal(precision: Float64[np.ndarray, "p p"], n: int, rng: Any) -> Float64[np.ndarray, "n p"]:
    """n rows from N(0, Theta^-1): solve Lᵀ x = z with Theta = L Lᵀ, inverting nothing."""
    from scipy.linalg import cholesky, solve_triangular

    lower = cholesky(precision, lower=True)
    return solve_triangular(lower, rng.normal(size=(len(precision), n)), lower=True, trans=1).T
