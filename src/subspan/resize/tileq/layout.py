"""What is stored for the experts of a projection, known before anything is computed, and what each weight costs."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from subspan.resize.tileq.config import TileQConfig
from subspan.resize.tileq.factors import Grid
from subspan.resize.tileq.packing import packed_length
from subspan.resize.tileq.placement import grid_shape
from subspan.resize.tileq.quantizers import tile_side
from subspan.resize.tileq.rotation import block_length

# Scales of groups, of codebooks and of inputs: no 16-bit format with fewer exponent bits holds every model's.
SCALE = torch.bfloat16

_TERMS = {
    "codes": "residual", "scale": "levels", "zero": "levels", "codebook": "codebooks", "codebook_scale": "codebooks",
    "U": "factors", "V": "factors", "sigma": "sigma", "inverse_scales": "input scales",
    "cells": "placement", "kept": "placement", "order": "permutation",
}  # fmt: skip


class Buffer(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Layout(NamedTuple):
    """The buffers of a projection of K experts (q x p), the grid, and how inputs are rotated."""

    buffers: dict[str, Buffer]
    grid: Grid
    first: int
    block: int


def layout(projection: str, experts: int, q: int, p: int, config: TileQConfig) -> Layout:
    """What ``config`` stores for a projection.

    Raises:
        ValueError: the group size, or the length of code vectors, does not divide p; the grid is too small.
    """
    k, bits, length = experts, config.bits, config.vector_length
    grid = grid_shape(k, p, q, config.grid)
    if config.quantizer == "gptvq":
        if p % length:
            raise ValueError(f"{projection} has {p} inputs, which vectors of {length} do not divide; use 'gptq'")
        tiles = (k, q // tile_side(q), p // tile_side(p, length))
        buffers = {
            "codes": Buffer((k, q, packed_length(p // length, bits * length)), torch.uint8),
            "codebook": Buffer((*tiles, 2 ** (bits * length), length), torch.int8),
            "codebook_scale": Buffer(tiles, SCALE),
        }
    else:
        if p % config.group_size:
            fitting = [g for g in (256, 128, 96, 64, 48, 32, 24, 16) if p % g == 0]
            hint = f"; {', '.join(map(str, fitting))} do" if fitting else ""
            raise ValueError(f"{projection} has {p} inputs, which group_size {config.group_size} does not divide{hint}")
        groups = p // config.group_size
        buffers = {
            "codes": Buffer((k, q, packed_length(p, bits)), torch.uint8),
            "scale": Buffer((k, q, groups), SCALE),
        }
        if not config.symmetric:
            buffers["zero"] = Buffer((k, packed_length(q * groups, bits)), torch.uint8)
    if config.rank:
        (m, n), r = grid, min(config.rank, grid[0] * p, grid[1] * q)
        dtype = getattr(torch, config.factor_dtype)
        shared = {"expert": k, "row": m, "layer": 1}[config.sharing(projection)]
        buffers |= {
            "U": Buffer((m, p, r), dtype),
            "sigma": Buffer((r,), torch.float32),
            "V": Buffer((n, r, q), dtype),
            "inverse_scales": Buffer((shared, p), SCALE),
            "cells": Buffer((k, 2), torch.int16),
            "kept": Buffer((k,), torch.bool),
        }
    first = min(config.identity_block, p)
    block = block_length(p, first, config.rotation_block) if config.rotation else 1
    if config.rotation:
        buffers["order"] = Buffer((k, p), torch.int16 if p <= 2**15 else torch.int32)
    return Layout(buffers, grid, first, block)


def bits_by_term(buffers: Mapping[str, Buffer], weights: int) -> dict[str, float]:
    """Bits per weight of each kind of buffer; they add up to the bytes written."""
    terms: dict[str, float] = {}
    for name, buffer in buffers.items():
        terms[_TERMS[name]] = terms.get(_TERMS[name], 0.0) + 8 * buffer.nbytes / weights
    return terms


def bit_budget(experts: int, q: int, p: int, config: TileQConfig, projection: str = "gate") -> dict[str, float]:
    """Bits per weight of a projection of ``experts`` (q x p), by what they are for, before any of it is computed.

    The residual's codes, scales and zero points of its groups (or codebooks), factors, sigma, input scales, places on
    the grid, and permutations. The sum is 8 times the bytes of the stored tensors over the number of weights.
    """
    return bits_by_term(layout(projection, experts, q, p, config).buffers, experts * q * p)
