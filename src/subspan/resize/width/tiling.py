"""Cloning, folding and projecting one tensor: what the grown model, the streamed checkpoint and the monitor share."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.resize.width.axes import Layout, Segment


def expand_tensor(x: Tensor, layout: Layout, scheme: str = "clone") -> Tensor:
    """The wide tensor: every axis cloned, divided by the clones along the input axis (rules 1 to 4 of section 3.1).

    The scheme "diagonal" puts the seed's matrix on the diagonal blocks instead, I_n (x) W, for hidden layers.
    """
    if layout.gain != 1:
        x = (x + layout.offset) * layout.gain - layout.offset
    if scheme == "diagonal" and layout.hidden:
        return _diagonal(x, layout)
    if all(len(axis) == 1 and axis[0].drawn is None for axis in layout.axes):  # clones of whole axes: one copy
        x = x / layout.r_in if layout.r_in > 1 else x
        times = [axis[0].times for axis in layout.axes]
        return x.repeat(times) if max(times, default=1) > 1 else x
    # Input first: it is divided while small.
    for dim in sorted(range(x.ndim), key=lambda dim: dim != layout.inp):
        x = _by_segment(x, dim, layout.axes[dim], lambda part, s, dim=dim: _clone(part, dim, s, dim == layout.inp))
    return x


def fold_tensor(x: Tensor, layout: Layout) -> Tensor:
    """The seed-size tensor that the wide one represents: the sum over input clones, the mean over all others."""
    for dim, axis in enumerate(layout.axes):
        x = _by_segment(x, dim, axis, lambda part, s, dim=dim: _fold(part, dim, s, dim == layout.inp), wide=True)
    return x if layout.gain == 1 else (x + layout.offset) / layout.gain - layout.offset


def _by_segment(x: Tensor, dim: int, axis: Sequence[Segment], change, wide: bool = False) -> Tensor:
    if not any(s.grows for s in axis):
        return x
    parts = x.split([s.wide if wide else s.size for s in axis], dim)
    changed = [change(part, s) for part, s in zip(parts, axis, strict=True)]
    return changed[0] if len(changed) == 1 else torch.cat(changed, dim)


def _clone(x: Tensor, dim: int, s: Segment, divide: bool) -> Tensor:
    if s.drawn is not None:
        out = x.index_select(dim, s.drawn.index.to(x.device))
        return out.mul_(_along(s.drawn.share.to(out), dim, x.ndim)) if divide else out
    if s.times == 1:
        return x
    x = x / s.times if divide else x
    return x.repeat([s.times if i == dim else 1 for i in range(x.ndim)])


def _along(vector: Tensor, dim: int, ndim: int) -> Tensor:
    return vector.view([-1 if i == dim else 1 for i in range(ndim)])


def _fold(x: Tensor, dim: int, s: Segment, total: bool) -> Tensor:
    if s.times == 1:
        return x
    clones = x.unflatten(dim, (s.times, s.size))
    return clones.sum(dim) if total else clones.mean(dim)


def _diagonal(x: Tensor, layout: Layout) -> Tensor:
    out = x.new_zeros(layout.wide_shape)
    assert layout.out is not None  # hidden layers have both axes
    assert layout.inp is not None
    if layout.r_out != layout.r_in:
        raise ValueError(
            f"{layout.name} would have {layout.r_out} output and {layout.r_in} input clones; the scheme 'diagonal' "
            "needs as many of each, use 'clone'"
        )
    n, start = layout.r_in, 0
    for s in layout.axes[layout.out]:
        part = x.narrow(layout.out, start, s.size)
        for a in range(n):
            at = out.narrow(layout.out, start * n + a * s.size, s.size)
            at.narrow(layout.inp, a * x.shape[layout.inp], x.shape[layout.inp]).copy_(part)
        start += s.size
    return out


def matrices(x: Tensor, layout: Layout) -> list[Tensor]:
    """A hidden weight's parts as (batches of) wide out x in matrices, one per segment of the output axis; views."""
    assert layout.out is not None
    x = x if layout.inp is not None and layout.out < layout.inp else x.mT
    return list(x.split([s.wide for s in layout.axes[layout.out]], -2))


def clone_counts(layout: Layout) -> list[tuple[int, int]]:
    """The clones (r_out, r_in) along the axes of each of ``matrices``; drawn clones count as none."""
    assert layout.out is not None
    assert layout.inp is not None
    return [(s.times, layout.axes[layout.inp][0].times) for s in layout.axes[layout.out]]


@torch.no_grad()
def add_noise(x: Tensor, layout: Layout, snr_db: float, noise: str, generator: torch.Generator) -> None:
    """Add N to one block of columns and subtract it from the next, in place: cloned inputs cancel it (section 3.3).

    ``N`` is Gaussian, fresh for every row of blocks ("row"), or with the opposite sign in every second one
    ("balanced", which cancels in the backward pass as well). An odd last block stays exact.
    """
    for matrix, (r_out, r_in) in zip(matrices(x, layout), clone_counts(layout), strict=True):
        rows = matrix.unflatten(-2, (r_out, -1)).unflatten(-1, (r_in, -1))  # *batch, r_out, d_out, r_in, d_in
        size = 10 ** (-snr_db / 20) * _norm(rows[..., 0, :, 0, :])  # of every block: they are clones
        for b in range(0, r_in - 1, 2):
            drawn = None
            for a in range(r_out if noise == "row" else r_out - r_out % 2):
                if drawn is None or noise == "row" or a % 2 == 0:
                    drawn, sign = _noise_of(size, rows[..., a, :, b, :], generator), 1
                else:
                    sign = -1
                rows[..., a, :, b, :].add_(drawn, alpha=sign)
                rows[..., a, :, b + 1, :].sub_(drawn, alpha=sign)


def _norm(x: Tensor) -> Tensor:
    wide_enough = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide_enough)


def _noise_of(size: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian noise of this norm, in float32; drawn on the CPU, so that it is equal on every device."""
    z = torch.randn(like.shape, generator=generator).to(like.device)
    return z.mul_((size / _norm(z)).float())


# ------------------------------------------------------------------------------------------------------------- the trap


def _pair(factor: int | tuple[int, int]) -> tuple[int, int]:
    return factor if isinstance(factor, tuple) else (factor, factor)


def trap_projection(x: Float[Tensor, "*b m k"], factor: int | tuple[int, int]) -> Float[Tensor, "*b m k"]:
    """The orthogonal projection on the trap {J (x) M}: every block becomes the mean of the blocks.

    Args:
        x: wide matrices, out x in.
        factor: clones of both axes, or (of the rows, of the columns). Raises ``ValueError`` if they do not divide x.
    """
    blocks = _blocks(x, *_pair(factor))
    return _block_mean(blocks).expand_as(blocks).reshape(x.shape)


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    if min(rows, columns) < 1 or x.shape[-2] % rows or x.shape[-1] % columns:
        raise ValueError(f"a {tuple(x.shape[-2:])} matrix does not consist of {rows} x {columns} equal blocks")
    return x.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))


def _block_mean(blocks: Tensor) -> Tensor:
    """One axis after the other: torch's mean over both at once takes ten times as long."""
    return blocks.mean(-4, keepdim=True).mean(-2, keepdim=True)


def escape_ratio(x: Float[Tensor, "*b m k"], factor: int | tuple[int, int]) -> Float[Tensor, "*b"]:
    """||X - P_T X|| / ||X||: 0 inside the trap (and for X = 0), at most 1. Arguments as for ``trap_projection``.

    Computed in float32 or better. Gaussian matrices have sqrt(1 - 1/n^2).
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    blocks = _blocks(x, *_pair(factor))
    outside = (blocks - _block_mean(blocks)).flatten(-4).norm(dim=-1)
    total = x.flatten(-2).norm(dim=-1)
    return torch.where(total == 0, 0.0, outside / total)  # a NaN stays one
