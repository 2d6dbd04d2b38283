"""Conditioning of residuals: important columns first, all others rotated by Hadamard blocks (LoPRo)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subspan.linalg import hadamard_transform


def importance(residual: Float[Tensor, "*b q p"], diagonal: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
    """mean_i |R_ij| / (log2 H_jj - min log2 H + 1): small for a column with small residuals and large inputs."""
    seen = diagonal > 0
    least = torch.where(seen, diagonal, torch.inf).amin(-1, keepdim=True)
    log = torch.where(seen, diagonal / torch.where(least < torch.inf, least, 1.0), 1.0).log2()  # dead: as the faintest
    return residual.abs().mean(-2) / (log + 1)


def block_length(width: int, first: int, longest: int) -> int:
    """The largest power of two up to ``longest`` whose blocks fill the columns behind the first; 1 for no rotation."""
    rest = max(width - first, 0)
    return min(rest & -rest, longest) if rest else 1


def rotate(x: Float[Tensor, "*b p"], order: Int[Tensor, "*c p"], first: int, block: int) -> Float[Tensor, "*b p"]:
    """x P D: columns in this order (which broadcasts against x's batch), all but the ``first`` in Hadamard blocks."""
    x = x.gather(-1, order.expand(x.shape)) if order.ndim > 1 else x[..., order]
    if block == 1:
        return x
    head, tail = x[..., :first], x[..., first:]
    return torch.cat([head, hadamard_transform(tail.unflatten(-1, (-1, block))).flatten(-2)], -1)


def rotate_back(x: Float[Tensor, "q p"], order: Int[Tensor, " p"], first: int, block: int) -> Float[Tensor, "q p"]:
    """x Dᵀ Pᵀ."""
    undone = rotate(x, torch.arange(x.shape[-1], device=x.device), first, block)
    return undone[..., order.argsort()]


def rotate_hessian(
    h: Float[Tensor, "k p p"], order: Int[Tensor, "k p"], first: int, block: int
) -> Float[Tensor, "k p p"]:
    """Dᵀ Pᵀ H P D."""
    rows = order.unsqueeze(1)
    return rotate(rotate(h, rows, first, block).mT, rows, first, block)
