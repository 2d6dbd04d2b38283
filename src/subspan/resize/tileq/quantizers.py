"""Residuals as codes: round to nearest, a scale the diagonal Hessian likes, GPTQ's sweep, and GPTVQ's codebooks.

All in batches of experts; a loop over columns runs once for a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

# Shares of a group's range that are tried for the least error.
SHRINK = tuple(1 - 0.05 * i for i in range(15))


class Levels(NamedTuple):
    """Values scale (code - zero) of each row of a group: scales in bfloat16, which no weight is too small for."""

    scale: Float[Tensor, "*b"]
    zero: UInt8[Tensor, "*b"]

    def encode(self, w: Tensor, bits: int) -> Tensor:
        scale, zero = (t.to(w.dtype).unsqueeze(-1) for t in self)
        return (torch.round(w / scale) + zero).clamp(0, 2**bits - 1)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        scale, zero = (t.to(dtype).unsqueeze(-1) for t in self)
        return scale * (codes.to(dtype) - zero)


def fit_levels(
    w: Float[Tensor, "*b q g"],
    bits: int,
    *,
    symmetric: bool = False,
    shares: tuple[float, ...] = (1.0,),
    weights: Float[Tensor, "*b g"] | None = None,
) -> Levels:
    """The levels of each row of one group that span its range (zero included), or a share of it.

    Args:
        w: weights of the group.
        bits: of a code.
        symmetric: zero is the middle code.
        shares: of the range to try; the one of least squared error, ``weights`` counted, is taken.
        weights: of the columns.
    """
    top = 2**bits - 1
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    columns = None if weights is None else weights.unsqueeze(-2)
    best, least = None, None
    for share in shares:
        scale = (share * (high - low) / top).bfloat16()
        scale = torch.where(scale > 0, scale, 1.0).bfloat16()  # a row of zeros
        zero = torch.full_like(low, (top + 1) / 2) if symmetric else (-share * low / scale.to(w.dtype)).round()
        levels = Levels(scale, zero.clamp(0, top).to(torch.uint8))
        if len(shares) == 1:
            return levels
        off = (levels.decode(levels.encode(w, bits), w.dtype) - w).square()
        error = (off if columns is None else off * columns).sum(-1)
        if best is None or least is None:
            best, least = levels, error
            continue
        better = error < least
        best = Levels(*(torch.where(better, new, old) for new, old in zip(levels, best, strict=True)))
        least = torch.where(better, error, least)
    assert best is not None
    return best


@dataclass(frozen=True)
class Codes:
    """Residuals as codes of ``bits`` each, with levels for every group of ``group`` columns.

    codes (K x q x p), scale and zero (K x q x p / group).
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def decode(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*b q p"]:
        grouped = self.codes.unflatten(-1, (self.scale.shape[-1], -1))
        return Levels(self.scale, self.zero).decode(grouped, dtype).flatten(-2)


def round_to_nearest(
    w: Float[Tensor, "*b q p"], bits: int, group: int, symmetric: bool = False, shares: tuple[float, ...] = (1.0,),
    diagonal: Float[Tensor, "*b p"] | None = None,
) -> Codes:  # fmt: skip
    """Each weight by itself; with ``shares`` each group's scale is that of least sum_j H_jj (w_j - q_j)^2."""
    grouped = w.unflatten(-1, (-1, group)).transpose(-3, -2)  # b G q g
    weights = None if diagonal is None else diagonal.unflatten(-1, (-1, group))
    levels = fit_levels(grouped, bits, symmetric=symmetric, shares=shares, weights=weights)
    codes = levels.encode(grouped, bits).to(torch.uint8).transpose(-3, -2).flatten(-2)
    return Codes(codes, levels.scale.mT, levels.zero.mT)


# ---- sweeps


def inverse_factor(h: Float[Tensor, "*b p p"], damping: float) -> Float[Tensor, "*b p p"]:
    """Upper U with (H + damping mean(diag H) I)⁻¹ = Uᵀ U; with more damping where that is not positive definite."""
    eye = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device)
    mean = h.diagonal(dim1=-2, dim2=-1).mean(-1)
    step = torch.where(mean > 0, mean, 1.0)[..., None, None] * eye
    while True:
        # H = R Rᵀ with R upper is the Cholesky factor read backwards, and U = R⁻¹.
        lower, info = torch.linalg.cholesky_ex((h + damping * step).flip(-1, -2))
        if not bool(info.any()):
            return torch.linalg.solve_triangular(lower.flip(-1, -2), eye.expand_as(h), upper=True)
        damping = max(10 * damping, 1e-6)


Quantize = Callable[[int, Tensor, Tensor], Tensor]


def sweep(
    w: Float[Tensor, "*b q p"],
    u: Float[Tensor, "*b p p"],
    block: int,
    step: int,
    begin: Callable[[int, Tensor, Tensor], Quantize],
) -> None:
    """Quantise ``step`` columns at a time, from the left; the columns behind make up for each error (GPTQ).

    For an error in the columns P the best correction of the columns F behind is -(w_P - q_P) U_PP⁻¹ U_PF. Columns
    beyond a block follow when the block is done. ``begin(start, columns, U's block)`` is called with each block and
    returns what then quantises its columns, ``quantize(j, columns, U_PP⁻¹)``, j counted from the block's first.
    """
    w = w.clone()
    for start in range(0, w.shape[-1], block):
        inside = slice(start, start + block)
        here, factor = w[..., inside].clone(), u[..., inside, inside]
        quantize = begin(start, here, factor)
        errors = torch.empty_like(here)
        for j in range(0, here.shape[-1], step):
            now = slice(j, j + step)
            inverse = _inverse(factor[..., now, now])
            errors[..., now] = (here[..., now] - quantize(j, here[..., now], inverse)) @ inverse
            here[..., j + step :] -= errors[..., now] @ factor[..., now, j + step :]
        w[..., start + block :] -= errors @ u[..., inside, start + block :]


def _inverse(u: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
    if u.shape[-1] == 1:
        return 1 / u
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    return torch.linalg.solve_triangular(u, eye.expand_as(u), upper=True)


def gptq(
    w: Float[Tensor, "*b q p"], h: Float[Tensor, "*b p p"], bits: int, group: int, *,
    symmetric: bool = False, damping: float = 0.01, shares: tuple[float, ...] = (1.0,),
) -> Codes:  # fmt: skip
    """GPTQ (Frantar et al. 2023) under the proxy Hessian H, levels fitted to each group when the sweep reaches it."""
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    fitted: list[Levels] = []

    def begin(start: int, here: Tensor, factor: Tensor) -> Quantize:
        levels = fit_levels(here, bits, symmetric=symmetric, shares=shares)
        fitted.append(levels)

        def quantize(j: int, column: Tensor, _: Tensor) -> Tensor:
            code = levels.encode(column, bits)
            codes[..., start + j] = code[..., 0].to(torch.uint8)
            return levels.decode(code, column.dtype)

        return quantize

    sweep(w, inverse_factor(h, damping), group, 1, begin)
    return Codes(codes, *(torch.stack(part, -1) for part in zip(*fitted, strict=True)))


# ---- vectors

# Sides of the tile of weights that share a codebook.
_TILE = 256
_ROUNDS = 20


def tile_side(n: int, multiple: int = 1) -> int:
    """The largest divisor of n up to 256 that is a multiple of this."""
    return max(d for d in range(multiple, min(n, _TILE) + 1, multiple) if n % d == 0)


@dataclass(frozen=True)
class VectorCodes:
    """Residuals as entries of codebooks: ``d`` consecutive weights of a row at a time.

    index (K x q x p / d); codebook (K x tile rows x tile columns x entries x d) in int8; scale, one per codebook.
    """

    index: Tensor
    codebook: Tensor
    scale: Tensor

    def decode(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*b q p"]:
        rows, columns, _, d = self.codebook.shape[-4:]
        index = self.index.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1)).transpose(-3, -2)  # b R C r n
        flat = index.flatten(-2).long().unsqueeze(-1)
        vectors = self.codebook.gather(-2, flat.expand(*flat.shape[:-1], d)).to(dtype)
        vectors = vectors * self.scale.to(dtype)[..., None, None]
        return vectors.view(*index.shape, d).transpose(-4, -3).flatten(-5, -4).flatten(-3)


def fit_codebook(
    vectors: Float[Tensor, "n d"], weights: Float[Tensor, "n d"], entries: int
) -> tuple[Tensor, Float[Tensor, ""]]:
    """k-means with a weight for each coordinate of each vector, from vectors evenly spaced by weighted length (GPTVQ).

    Returns the entries in int8 and their scale, in bfloat16.
    """
    order = (weights * vectors.square()).sum(-1).argsort(stable=True)
    pick = torch.linspace(0, len(vectors) - 1, entries, device=vectors.device).round().long()
    centres = vectors[order[pick]]
    for _ in range(_ROUNDS):
        # sum_c h_c (v_c - m_c)² without the term of v alone
        nearest = (weights @ centres.square().mT - 2 * (weights * vectors) @ centres.mT).argmin(-1)
        total, mass = (torch.zeros_like(centres).index_add_(0, nearest, part) for part in (weights * vectors, weights))
        centres = torch.where(mass > 0, total / mass, centres)  # an entry nobody chose stays
    scale = (centres.abs().amax() / 127).bfloat16()
    scale = torch.where(scale > 0, scale, 1.0).bfloat16()
    return (centres / scale.to(centres.dtype)).round().clamp(-127, 127).to(torch.int8), scale


def gptvq(
    w: Float[Tensor, "k q p"], h: Float[Tensor, "k p p"], bits: int, length: int, *, damping: float = 0.01
) -> VectorCodes:
    """GPTVQ (van Baalen et al. 2024): the sweep of GPTQ over vectors of ``length`` columns, 2^(bits length) entries.

    Each tile of at most 256 x 256 weights has its codebook, fitted when the sweep reaches it; the entry of a vector is
    the nearest in the metric of its columns, |(w_P - c) U_PP⁻¹|.
    """
    k, q, p = w.shape
    high, wide = tile_side(q), tile_side(p, length)
    rows, entries = q // high, 2 ** (bits * length)
    index = torch.empty(k, q, p // length, dtype=torch.uint8, device=w.device)
    books: list[tuple[Tensor, Tensor]] = []

    def begin(start: int, here: Tensor, factor: Tensor) -> Quantize:
        weights = factor.diagonal(dim1=-2, dim2=-1).square().reciprocal()  # what an error in a column costs
        tiles = here.unflatten(-2, (rows, high)).unflatten(-1, (-1, length)).flatten(2, 3).flatten(0, 1)
        cost = weights.view(k, 1, 1, -1, length).expand(k, rows, high, -1, -1).reshape(tiles.shape)
        book, scale = (
            torch.stack(part).unflatten(0, (k, rows))
            for part in zip(*(fit_codebook(t, c, entries) for t, c in zip(tiles, cost, strict=True)), strict=True)
        )
        books.append((book, scale))
        values = book.to(w.dtype) * scale.to(w.dtype)[..., None, None]

        def quantize(j: int, columns: Tensor, inverse: Tensor) -> Tensor:
            x = columns.unflatten(-2, (rows, high)) @ inverse.unsqueeze(1)
            c = values @ inverse.unsqueeze(1)
            nearest = (c.square().sum(-1).unsqueeze(-2) - 2 * x @ c.mT).argmin(-1)  # k R r
            index[..., (start + j) // length] = nearest.flatten(1).to(torch.uint8)
            return values.gather(-2, nearest.unsqueeze(-1).expand(*nearest.shape, length)).flatten(1, 2)

        return quantize

    sweep(w, inverse_factor(h, damping), wide, length, begin)
    book, scale = (torch.stack(part, 2) for part in zip(*books, strict=True))
    return VectorCodes(index, book, scale)
