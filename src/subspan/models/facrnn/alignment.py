"""How well estimated latents and sub-circuits match known ones, up to what is not identified.

Groups are identified up to their order, and each group up to an invertible affine map of its own.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from subspan.models.facrnn.penalty import GroupsLike, resolve_groups


@dataclass(frozen=True)
class AlignmentReport:
    """Which estimated group stands for which reference group.

    Attributes:
        scores: R^2 of each reference group (rows) regressed on each estimated group (columns).
        assignment: the estimated group of each reference group; no two share one.
        r2: mean R^2 over the matched pairs.
        aligned: the reference as the matched groups predict it, (n, K').
    """

    scores: Float[np.ndarray, "Gt Gp"]
    assignment: Int[np.ndarray, "Gt"]
    r2: float
    aligned: Float[np.ndarray, "n K"]

    @property
    def matched(self) -> Float[np.ndarray, "Gt"]:
        """R^2 of each reference group on its match."""
        return self.scores[np.arange(len(self.assignment)), self.assignment]

    @property
    def leak(self) -> float:
        """The largest R^2 of a reference group on a group matched to another; 0 where there is only one."""
        others = self.scores[:, self.assignment][~np.eye(len(self.assignment), dtype=bool)]
        return float(others.max()) if len(others) else 0.0


def align_groups(
    z_pred: Float[np.ndarray, "n K"],
    z_true: Float[np.ndarray, "m R"],
    groups_pred: GroupsLike,
    groups_true: GroupsLike,
) -> AlignmentReport:
    """Match groups by regressing every reference group on every estimated one (and 1), each pair on its own.

    Raises:
        ValueError: fewer estimated than reference groups, constant reference columns, or different numbers of rows.
    """
    z_pred, z_true = np.asarray(z_pred, dtype=np.float64), np.asarray(z_true, dtype=np.float64)
    if len(z_pred) != len(z_true):
        raise ValueError(f"z_pred has {len(z_pred)} rows, z_true {len(z_true)}")
    pred, true = resolve_groups(groups_pred, z_pred.shape[1]), resolve_groups(groups_true, z_true.shape[1])
    if len(pred) < len(true):
        raise ValueError(f"{len(pred)} estimated groups cannot be matched with {len(true)} reference groups")
    spread = np.square(z_true - z_true.mean(0)).sum(0)
    # constant up to the rounding of its mean
    tiny = len(z_true) * np.square(100 * np.finfo(np.float64).eps * np.abs(z_true).max(0))
    if (constant := np.flatnonzero(spread <= tiny)).size:
        raise ValueError(f"column {constant[0]} of z_true is constant: R^2 is not defined")
    fitted = [_regress(z_true, z_pred[:, list(members)]) for members in pred]
    r2 = np.stack([1 - np.square(z_true - fit).sum(0) / spread for fit in fitted], 1)
    scores = np.stack([r2[list(members)].mean(0) for members in true])
    assignment = linear_sum_assignment(scores, maximize=True)[1]
    aligned = np.empty_like(z_true)
    for members, match in zip(true, assignment, strict=True):
        aligned[:, list(members)] = fitted[match][:, list(members)]
    return AlignmentReport(scores, assignment, float(scores[np.arange(len(true)), assignment].mean()), aligned)


def _regress(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    design = np.column_stack([np.ones(len(x)), x])
    return design @ np.linalg.lstsq(design, y, rcond=None)[0]


def best_partition(
    z_pred: Float[np.ndarray, "n K"],
    z_true: Float[np.ndarray, "n R"],
    groups_true: GroupsLike,
    sizes: Sequence[int],
    max_partitions: int = 20_000,
) -> AlignmentReport:
    """The best alignment over all partitions of the estimated coordinates into groups of these sizes.

    A diagnostic for methods without groups: it uses the truth, K! / (G! (H!)^G) times over.

    Raises:
        ValueError: more partitions than ``max_partitions``.
    """
    K = z_pred.shape[1]
    if sum(sizes) != K:
        raise ValueError(f"sizes={list(sizes)} do not sum to the {K} columns of z_pred")
    count = math.factorial(K)
    for size in sizes:
        count //= math.factorial(size)
    for same in {size: list(sizes).count(size) for size in sizes}.values():
        count //= math.factorial(same)
    if count > max_partitions:
        raise ValueError(f"there are {count:,} partitions, more than max_partitions={max_partitions:,}")
    reports = [align_groups(z_pred, z_true, groups, groups_true) for groups in partitions(tuple(range(K)), sizes)]
    return max(reports, key=lambda report: report.r2)


def partitions(rest: tuple[int, ...], sizes: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Every set of groups of these sizes once: the first coordinate left is in the next group of each size tried."""
    if not rest:
        return [[]]
    out = []
    for size in dict.fromkeys(sizes):
        remaining = list(sizes)
        remaining.remove(size)
        for others in itertools.combinations(rest[1:], size - 1):
            group = (rest[0], *others)
            left = tuple(k for k in rest if k not in group)
            out += [[group, *tail] for tail in partitions(left, remaining)]
    return out


def connectivity_scores(
    estimated: Sequence[Float[np.ndarray, "N N"]], truth: Sequence[Float[np.ndarray, "N N"]]
) -> tuple[float, float]:
    """Pearson correlation of the sums W, and of the stacked sub-circuits W_g with the truth's.

    The sub-circuits are matched first, by the smallest summed mean absolute error.
    """
    if len(estimated) != len(truth):
        raise ValueError(f"{len(estimated)} estimated sub-circuits against {len(truth)} true ones")
    estimated_, truth_ = np.array(estimated, dtype=np.float64), np.array(truth, dtype=np.float64)
    error = np.abs(truth_[:, None] - estimated_[None]).mean((-2, -1))
    order = linear_sum_assignment(error)[1]
    whole = np.corrcoef(estimated_.sum(0).ravel(), truth_.sum(0).ravel())[0, 1]
    return float(whole), float(np.corrcoef(estimated_[order].ravel(), truth_.ravel())[0, 1])
