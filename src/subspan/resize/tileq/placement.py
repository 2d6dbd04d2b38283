"""Which experts share a grid row, and which a column: clusters of their singular subspaces."""

import math
import warnings
from itertools import product

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from subspan.linalg import projection_kernel, randomized_svd
from subspan.resize.tileq.config import Assignment, Features, TileQConfig
from subspan.resize.tileq.factors import Grid


def grid_shape(experts: int, p: int, q: int, wanted: object = "auto") -> Grid:
    """(M, N) with M N >= experts: near square, as given, or ("auto") the one that stores fewest numbers, M p + N q."""
    if wanted == "square":
        m = math.ceil(math.sqrt(experts))
        return m, math.ceil(experts / m)
    if wanted == "auto":
        return min(((m, math.ceil(experts / m)) for m in range(1, experts + 1)), key=lambda g: (g[0] * p + g[1] * q, g))
    assert isinstance(wanted, tuple)
    if math.prod(wanted) < experts:
        raise ValueError(f"a grid of {wanted[0]} x {wanted[1]} has no room for {experts} experts")
    return wanted


def index_order(experts: int, grid: Grid) -> Int[Tensor, "k 2"]:
    """Cells in the experts' own order, row by row."""
    e = torch.arange(experts)
    return torch.stack([e // grid[1], e % grid[1]], 1)


def features(
    weights: Float[Tensor, "k q p"], scales: Float[Tensor, "k p"], rank: int, kind: Features, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What tells experts apart on the input and on the output side: two matrices with a row per expert.

    "projector": rows whose inner products are the overlaps of the leading subspaces, blind to signs and rotations of
    singular vectors; "vectors": the singular vectors themselves (published); "sketch": images of one random matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    size = max(1, min(rank // 2, *weights.shape[1:]))
    dtype = torch.promote_types(weights.dtype, torch.float32)
    scaled = (w.to(dtype) * s.to(dtype) for w, s in zip(weights, scales, strict=True))  # A_eᵀ
    if kind == "sketch":
        q, p = weights.shape[1:]
        tests = [torch.randn(n, size, generator=generator, dtype=dtype).to(weights.device) for n in (q, p)]
        pairs = [(a.mT @ tests[0], a @ tests[1]) for a in scaled]
    else:
        pairs = [(svd.V, svd.U) for svd in (randomized_svd(a, size, power=4, generator=generator) for a in scaled)]
    inputs, outputs = (torch.stack(side) for side in zip(*pairs, strict=True))
    embed = _projector_embedding if kind == "projector" else _unit_rows
    return embed(inputs), embed(outputs)


def _projector_embedding(bases: Float[Tensor, "k n s"]) -> NDArray[np.float64]:
    """Rows whose Gram matrix is the projection kernel: Q sqrt(max(w, 0))."""
    values, vectors = torch.linalg.eigh(projection_kernel(bases.double()))
    return (vectors * values.clamp(min=0).sqrt()).cpu().numpy()  # rounding leaves zero eigenvalues negative


def _unit_rows(x: Float[Tensor, "k n s"]) -> NDArray[np.float64]:
    rows = x.double().flatten(1)
    return (rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)).cpu().numpy()  # an expert of zeros stays zero


def clustered(rows: NDArray[np.float64], groups: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Group of each row by k-means, and each row's affinity to each group: minus its squared distance to the centre."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # equal experts are fewer points than groups
        found = KMeans(min(groups, len(rows)), n_init=10, random_state=seed).fit(rows)  # pyright: ignore[reportArgumentType]
    affinity = -((rows[:, None] - found.cluster_centers_) ** 2).sum(-1)
    missing = groups - affinity.shape[1]
    return np.asarray(found.labels_, np.int64), np.pad(affinity, ((0, 0), (0, missing)), constant_values=affinity.min())


def greedy_cells(rows: NDArray[np.int64], columns: NDArray[np.int64], grid: Grid) -> Int[Tensor, "k 2"]:
    """Each expert in the cell of its groups, or else the nearest free one.

    Group by group; near in Manhattan distance, then Chebyshev distance, then row, then column.
    """
    free = set(product(range(grid[0]), range(grid[1])))
    cells = torch.zeros(len(rows), 2, dtype=torch.long)
    for e in sorted(range(len(rows)), key=lambda e: (rows[e], columns[e], e)):

        def far(cell: tuple[int, int], i: int = int(rows[e]), j: int = int(columns[e])) -> tuple[int, ...]:
            down, across = abs(cell[0] - i), abs(cell[1] - j)
            return down + across, max(down, across), *cell

        nearest = min(free, key=far)
        free.remove(nearest)
        cells[e] = torch.tensor(nearest)
    return cells


def hungarian_cells(rows: NDArray[np.float64], columns: NDArray[np.float64], grid: Grid) -> Int[Tensor, "k 2"]:
    """The cells of greatest total affinity to row and column groups."""
    from scipy.optimize import linear_sum_assignment

    affinity = rows[:, :, None] + columns[:, None, :]
    _, flat = linear_sum_assignment(-affinity.reshape(len(rows), -1))
    return torch.from_numpy(np.stack(np.divmod(flat, grid[1]), 1))


def place_experts(
    weights: Float[Tensor, "k q p"],
    scales: Float[Tensor, "k p"],
    grid: Grid,
    rank: int,
    *,
    kind: Features = "projector",
    assignment: Assignment = "greedy",
    seed: int = 0,
) -> Int[Tensor, "k 2"]:
    """Cells of the grid for experts: those with like inputs share a row, those with like outputs a column.

    Args:
        weights: W_e (K x q x p).
        scales: s_e (K x p).
        grid: (M, N) with M N >= K.
        rank: of the factors; half of it describes an expert.
        kind: of features, see ``features``.
        assignment: "greedy" (published) or "hungarian", which never has less total affinity.
        seed: of sketches and k-means.
    """
    sides = features(weights, scales, rank, kind, seed)
    (rows, row_affinity), (columns, column_affinity) = (
        clustered(side, size, seed) for side, size in zip(sides, grid, strict=True)
    )
    if assignment == "hungarian":
        return hungarian_cells(row_affinity, column_affinity, grid)
    return greedy_cells(rows, columns, grid)


def candidates(
    weights: Float[Tensor, "k q p"], scales: Float[Tensor, "k p"], grid: Grid, config: TileQConfig
) -> dict[str, Int[Tensor, "k 2"]]:
    """The placements that ``config`` asks to consider, by name; on one row or column all are the same."""
    found = {"index": index_order(len(weights), grid)}
    kinds: dict[str, tuple[Features, ...]] = {"best": ("projector", "sketch"), "clusters": (config.features,)}
    if min(grid) == 1 or config.placement == "index":
        return found
    if config.placement == "clusters":
        found = {}
    for kind in kinds[config.placement]:
        found[kind] = place_experts(
            weights, scales, grid, config.rank, kind=kind, assignment=config.assignment, seed=config.seed
        )
    return found
