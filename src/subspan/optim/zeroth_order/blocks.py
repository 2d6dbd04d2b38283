"""Parameters as blocks, and the random directions that belong to them: numbers, never stored tensors."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Noise and products are made in pieces of this many numbers: no temporary is as large as a big embedding.
_PIECE = 2**20


def seeded(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator that depends on nothing but ``key``; the global stream is neither read nor moved (3.1)."""
    text = b"".join(k.encode() + b"\0" if isinstance(k, str) else struct.pack("<q", k) for k in key)
    (seed,) = struct.unpack("<Q", hashlib.blake2b(text, digest_size=8).digest())
    return torch.Generator(device).manual_seed(seed % 2**63)


@dataclass(eq=False)
class Block:
    """One parameter of the optimiser: a matrix of ``rank`` directions, or dense (rank 0).

    A matrix is m x n, outputs x inputs; ``transposed`` says that the parameter is stored n x m.
    """

    index: int
    name: str
    param: Tensor = field(repr=False)
    group: dict[str, Any] = field(repr=False)
    rank: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of the matrix; kernels of a convolution count as inputs."""
        rows, columns = self.param.shape[0], self.param[0].numel()
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def dtype(self) -> torch.dtype:
        """That of its directions and accumulators: float32, or float64 for float64 parameters."""
        return torch.promote_types(self.param.dtype, torch.float32)

    def gaussian(self, rows: int, columns: int, *key: int | str) -> Float[Tensor, "rows columns"]:
        generator = seeded(self.param.device, self.index, *key)
        return torch.randn(rows, columns, generator=generator, device=self.param.device, dtype=self.dtype)

    def left(self, rank: int, *key: int | str) -> Float[Tensor, "m r"]:
        """U, a fresh Gaussian factor."""
        return self.gaussian(self.shape[0], rank, "left", *key)

    def right(self, seed: int, candidates: Sequence[int]) -> Float[Tensor, "n r"]:
        """One Gaussian column for each candidate: the same number always gives the same column."""
        columns = [self.gaussian(self.shape[1], 1, "right", seed, c) for c in candidates]
        return torch.cat(columns, 1)

    def add_product(self, left: Float[Tensor, "m r"], right: Float[Tensor, "n r"], scale: float) -> None:
        """X <- X + scale U V^T, rounded once."""
        first, second = (right, left) if self.transposed else (left, right)
        matrix = self.param.detach().flatten(1) if self.param.is_contiguous() else None
        if matrix is None:
            self.param.add_((first @ second.mT).reshape(self.param.shape), alpha=scale)
        elif matrix.dtype == first.dtype:
            matrix.addmm_(first, second.mT, alpha=scale)
        else:
            rows = max(1, _PIECE // matrix.shape[1])
            for piece, factor in zip(matrix.split(rows), first.split(rows), strict=True):
                piece.copy_(torch.addmm(piece.to(first.dtype), factor, second.mT, alpha=scale))

    def add_noise(self, scale: float, *key: int | str) -> None:
        """p <- p + scale z with z ~ N(0, I) from the key, in pieces."""
        generator = seeded(self.param.device, self.index, "dense", *key)
        flat = self.param.detach()
        for piece in flat.view(-1).split(_PIECE) if flat.is_contiguous() else (flat,):
            noise = torch.randn(piece.shape, generator=generator, device=piece.device, dtype=self.dtype)
            if piece.dtype == self.dtype:
                piece.add_(noise, alpha=scale)
            else:
                piece.copy_(noise.mul_(scale).add_(piece))


@dataclass(frozen=True)
class Direction:
    """A joint perturbation Z of some blocks: (scaled U, V) for a matrix, a key of the noise for a dense block."""

    factors: Mapping[Block, tuple[Tensor, Tensor]]
    noise: Mapping[Block, tuple[int | str, ...]]

    def add(self, block: Block, scale: float) -> None:
        """Add scale Z to the block's parameter."""
        if block in self.factors:
            block.add_product(*self.factors[block], scale)
        else:
            block.add_noise(scale, *self.noise[block])

    def blocks(self) -> list[Block]:
        return [*self.factors, *self.noise]
