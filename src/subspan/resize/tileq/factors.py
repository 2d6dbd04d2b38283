"""The experts of a projection as one tiled matrix, and its truncated SVD: factors that rows and columns share."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from subspan.linalg import SVD, fix_signs, randomized_svd
from subspan.resize.tileq.config import Solver

Grid = tuple[int, int]

# Largest stored entry of a factor, by dtype: the column's scale goes into sigma. A unit vector of length 8192 has
# entries of 0.01, below float8_e4m3fn's smallest normal number.
_PEAK = {torch.float8_e4m3fn: 256.0, torch.float8_e5m2: 256.0, torch.int8: 127.0}


@dataclass(frozen=True)
class TiledMatrix:
    """T (M p x N q): block (i, j) is S_e W_eᵀ of the expert e in cell (i, j), zero in an empty cell.

    Never formed: products go block by block, in the scales' dtype.

    Attributes:
        weights: W (K x q x p), each y = W_e x.
        scales: diagonals of S (K x p).
        cells: row and column of each expert, no two the same.
        grid: (M, N).
        transposed: stands for Tᵀ.
    """

    weights: Float[Tensor, "k q p"]
    scales: Float[Tensor, "k p"]
    cells: Int[Tensor, "k 2"]
    grid: Grid
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        (m, n), (_, q, p) = self.grid, self.weights.shape
        return (n * q, m * p) if self.transposed else (m * p, n * q)

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def mT(self) -> "TiledMatrix":
        return replace(self, transposed=not self.transposed)

    def blocks(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Row, column, W_e and s_e of each expert."""
        for (i, j), w, s in zip(self.cells.tolist(), self.weights, self.scales, strict=True):
            yield i, j, w.to(s.dtype), s.unsqueeze(-1)

    def __matmul__(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "m c"]:
        out = x.new_zeros(self.shape[0], x.shape[1])
        (m, n), c = self.grid, x.shape[1]
        if self.transposed:
            y, x = out.view(n, -1, c), x.view(m, -1, c)
            for i, j, w, s in self.blocks():
                y[j].addmm_(w, s * x[i])
        else:
            y, x = out.view(m, -1, c), x.view(n, -1, c)
            for i, j, w, s in self.blocks():
                y[i].addcmul_(s, w.mT @ x[j])
        return out

    def dense(self) -> Float[Tensor, "m n"]:
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class TileFactors:
    """Corrections L_e = (diag(a_e) U[i] diag(sigma) V[j])ᵀ of the experts in cells (i, j); a_e is the inverse scale.

    Attributes:
        U: input factors of the grid's rows (M x p x R), in any dtype.
        sigma: (R,).
        V: output factors of the grid's columns (N x R x q).
        inverse_scales: a, one row per group of experts that share it (g x p).
        groups: each expert's row of it.
        cells: each expert's grid row and column.
        kept: experts whose correction counts (all but outliers).
    """

    U: Tensor
    sigma: Float[Tensor, " r"]
    V: Tensor
    inverse_scales: Float[Tensor, "g p"]
    groups: Int[Tensor, " k"]
    cells: Int[Tensor, "k 2"]
    kept: Bool[Tensor, " k"]

    # What the fused path needs at every call, made at the first: of one token, each look at a tensor's shape counts.

    @cached_property
    def grid(self) -> Grid:
        return len(self.U), len(self.V)

    @cached_property
    def rank(self) -> int:
        return len(self.sigma)

    @cached_property
    def one_scale(self) -> bool:
        """Whether all experts share one scale of the inputs."""
        return len(self.inverse_scales) == 1

    @cached_property
    def wide(self) -> Float[Tensor, "p mr"]:
        """The input factors of all grid rows side by side; a scale that all experts share is folded in."""
        wide = self.U.transpose(0, 1).flatten(1)
        return self.inverse_scales[0].unsqueeze(1) * wide if self.one_scale else wide.contiguous()

    @cached_property
    def deep(self) -> Float[Tensor, "nr q"]:
        """The output factors of all grid columns below each other, with sigma folded in."""
        return (self.sigma.unsqueeze(1) * self.V).flatten(0, 1)

    @cached_property
    def places(self) -> Int[Tensor, " k"]:
        """Each expert's cell, numbered column by column."""
        return self.cells[:, 1] * len(self.U) + self.cells[:, 0]

    @cached_property
    def all_kept(self) -> bool:
        return bool(self.kept.all())

    def correction(self, e: int) -> Float[Tensor, "q p"]:
        """L_e in sigma's dtype; zero where the expert keeps none."""
        i, j = self.cells[e].tolist()
        dtype = self.sigma.dtype
        left = self.inverse_scales[self.groups[e]].to(dtype).unsqueeze(-1) * self.U[i].to(dtype)
        return self.kept[e] * ((left * self.sigma) @ self.V[j].to(dtype)).mT

    def stored(self, dtype: torch.dtype, scale_dtype: torch.dtype) -> "TileFactors":
        """U and V in ``dtype``, each vector scaled to the dtype's range and the scale folded into sigma (float32)."""
        u, c = encode(self.U, (0, 1), dtype)
        v, d = encode(self.V, (0, 2), dtype)
        sigma = (self.sigma / (c.flatten() * d.flatten())).float()
        return replace(self, U=u, V=v, sigma=sigma, inverse_scales=self.inverse_scales.to(scale_dtype))

    def working(self) -> "TileFactors":
        """The same in float32, to multiply with."""
        return replace(self, U=self.U.float(), V=self.V.float(), inverse_scales=self.inverse_scales.float())


def encode(x: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """c x in ``dtype``, and c: one scale for each slice over ``dims``, which brings its largest entry to the peak."""
    largest = x.abs().amax(dims, keepdim=True)
    c = torch.where(largest > 0, _PEAK.get(dtype, 1.0) / largest, 1.0)
    scaled = x * c
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype), c


# ---- solvers


def truncated_svd(
    tile: TiledMatrix, rank: int, solver: Solver, generator: torch.Generator | None, dtype: torch.dtype | None = None
) -> SVD:
    """Leading triples of T: whole ("svd"), by a randomised range finder, or one by one ("r1svd")."""
    if solver == "svd":
        u, s, vh = torch.linalg.svd(tile.dense(), full_matrices=False)
        return fix_signs(SVD(u[:, :rank], s[:rank], vh[:rank].mT))
    if solver == "randomized":
        return randomized_svd(tile, rank, power=4, generator=generator)
    return rank_one_svd(tile, rank, dtype, generator=generator)


def rank_one_svd(
    tile: TiledMatrix,
    rank: int,
    dtype: torch.dtype | None = None,
    *,
    rounds: int = 8,
    generator: torch.Generator | None = None,
) -> SVD:
    """Rank-one power iterations with deflation by the *stored* vectors, so that later ones repair their rounding.

    The published sketch (LoPRo), with normalised iterates. Stops early where nothing is left.
    """
    device = tile.device if generator is None else generator.device
    us, vs = (torch.zeros(n, 0, dtype=tile.dtype, device=tile.device) for n in tile.shape)
    sigma = us.new_zeros(0)

    def left(x: Tensor) -> Tensor:
        return tile @ x - (us * sigma) @ (vs.mT @ x)

    def right(y: Tensor) -> Tensor:
        return tile.mT @ y - (vs * sigma) @ (us.mT @ y)

    def rounded(x: Tensor) -> Tensor:
        if dtype is None:
            return x
        codes, c = encode(x, (0,), dtype)
        return codes.to(x.dtype) / c

    for _ in range(rank):
        x = torch.randn(tile.shape[1], 1, generator=generator, dtype=tile.dtype, device=device).to(tile.device)
        y = left(x)
        for _ in range(rounds):
            y = left(right(y / y.norm().clamp(min=torch.finfo(y.dtype).tiny)))  # zero stays zero
        if not bool(y.norm() > 0):
            break
        u = y / y.norm()
        z = right(u)
        s = z.norm()
        if not bool(s > 0):
            break
        us, vs = torch.cat([us, rounded(u)], 1), torch.cat([vs, rounded(z / s)], 1)
        sigma = torch.cat([sigma, s.view(1)])
    return SVD(us, sigma, vs)


def tile_factorize(
    weights: Float[Tensor, "k q p"],
    scales: Float[Tensor, "g p"],
    cells: Int[Tensor, "k 2"],
    grid: Grid,
    rank: int,
    *,
    groups: Int[Tensor, " k"] | None = None,
    solver: Solver = "randomized",
    storage: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> TileFactors:
    """Truncated SVD of the tiled matrix of a projection's experts: one U a grid row, one V a grid column.

    Args:
        weights: W_e (K x q x p), outputs x inputs.
        scales: s, one row per group; by default one per expert.
        cells: grid row and column of each expert.
        grid: (M, N) with M N >= K.
        rank: R, cut down to min(M p, N q).
        groups: the row of ``scales`` of each expert.
        solver: "randomized", "svd" or "r1svd".
        storage: dtype that "r1svd" rounds its vectors to as it goes.
        generator: for the random starts.

    Raises:
        ValueError: rank below 1, a grid too small, cells outside it or taken twice.
    """
    check_cells(cells, grid, len(weights))
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    groups = torch.arange(len(weights), device=weights.device) if groups is None else groups
    dtype = torch.promote_types(weights.dtype, torch.float32)
    tile = TiledMatrix(weights, scales.to(dtype)[groups], cells, grid)
    u, s, v = truncated_svd(tile, min(rank, *tile.shape), solver, generator, storage)
    (m, n), (_, q, p) = grid, weights.shape
    return TileFactors(
        U=u.view(m, p, -1),
        sigma=s,
        V=v.view(n, q, -1).mT,
        inverse_scales=1 / scales.to(dtype),
        groups=groups,
        cells=cells,
        kept=torch.ones(len(weights), dtype=torch.bool, device=weights.device),
    )


def check_cells(cells: Int[Tensor, "k 2"], grid: Grid, experts: int) -> None:
    """Every expert has a cell of the grid for itself."""
    if math.prod(grid) < experts:
        raise ValueError(f"a grid of {grid[0]} x {grid[1]} has no room for {experts} experts")
    inside = bool(((cells >= 0) & (cells < cells.new_tensor(grid))).all())
    if not inside or len(set(map(tuple, cells.tolist()))) < experts or len(cells) != experts:
        raise ValueError(f"cells must be {experts} different places on a grid of {grid[0]} x {grid[1]}")


def weighted_errors(
    weights: Float[Tensor, "k q p"], scales: Float[Tensor, "k p"], factors: TileFactors
) -> Float[Tensor, " k"]:
    """|S_e (W_e - L_e)ᵀ|_F² of each expert."""
    dtype = factors.sigma.dtype
    rests = ((w.to(dtype) - factors.correction(e)) * scales[e].to(dtype) for e, w in enumerate(weights))
    return torch.stack([rest.square().sum() for rest in rests])
