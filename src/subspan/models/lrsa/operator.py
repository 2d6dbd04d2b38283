"""The block around a mixer, and the neural operator: embed points, mix, project."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint as recompute

from subspan.errors import MissingExtra
from subspan.models.lrsa.attention import FeedForward, LayerNorm, NormKind, hidden_width, linear, make_norm
from subspan.models.lrsa.checks import check_arguments, check_values
from subspan.models.lrsa.mixers import LRSAAttention, zero_invalid

MixerFactory = Callable[[int], nn.Module]


class GridFeedForward(nn.Module):
    """The point update on a grid: 3 x 3 convolution, LayerNorm, linear, gelu, linear (3.2).

    A dense convolution. It knows neighbours, hence the block is no longer equivariant to permutations of the points.
    """

    def __init__(self, d: int, ratio: float = 1.0, *, depth: int = 0, generator: torch.Generator | None = None) -> None:
        super().__init__()
        hidden = hidden_width(d, ratio)
        self.conv = nn.Conv2d(d, d, 3, padding=1)
        for parameter in self.conv.parameters():  # torch's own law, drawn from the generator
            nn.init.uniform_(parameter, -((9 * d) ** -0.5), (9 * d) ** -0.5, generator=generator)
        self.norm = LayerNorm(d)
        self.up = linear(d, hidden, bias=False, generator=generator)
        self.out = linear(hidden, d, depth=depth, generator=generator)

    def forward(self, x: Float[Tensor, "b n d"], grid_shape: tuple[int, int] | None) -> Float[Tensor, "b n d"]:
        if grid_shape is None or len(grid_shape) != 2 or math.prod(grid_shape) != x.shape[1]:
            raise ValueError(f"{x.shape[1]} points are no grid of shape {grid_shape}: pass grid_shape=(rows, columns)")
        # in one piece: torch 2.13's compiler cannot keep a view for the backward pass whose strides are unknown
        image = x.mT.unflatten(2, grid_shape).contiguous()
        return self.out(gelu(self.up(self.norm(self.conv(image).flatten(2).mT))))


class LRSABlock(nn.Module):
    """h + mixer(norm(h)), then plus a point-wise feed-forward part of the norm of that.

    Args:
        d: width.
        heads: heads of the mixer.
        latents: latent tokens of the mixer.
        point: "ffn" treats every point alone; "conv" convolves on a grid.
        ffn_ratio: hidden width of all feed-forward parts over d.
        gated: gated feed-forward parts (not on a grid).
        qk_norm: see ``LRSAAttention``.
        latent_attention: see ``LRSAAttention``.
        rotary: see ``LRSAAttention``.
        norm: "rms" or "layer".
        mixer: a module to mix with in place of ``LRSAAttention``, which the options of the mixer then do not reach.
        depth: index of the block from 0, for the initial size of what it writes.
        generator: for the initial weights.
    """

    def __init__(
        self,
        d: int,
        heads: int = 8,
        latents: int = 64,
        point: Literal["ffn", "conv"] = "ffn",
        *,
        ffn_ratio: float = 1.0,
        gated: bool = False,
        qk_norm: bool = True,
        norm: NormKind = "rms",
        latent_attention: bool | Literal["ffn"] = True,
        rotary: tuple[float, float] | None = None,
        mixer: nn.Module | None = None,
        depth: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if point not in ("ffn", "conv"):
            raise ValueError(f"point must be 'ffn' or 'conv', got {point!r}")
        self.norm, self.point_norm = make_norm(norm, d), make_norm(norm, d)
        if mixer is None:
            mixer = LRSAAttention(
                d, heads, latents, ffn_ratio=ffn_ratio, gated=gated, qk_norm=qk_norm, norm=norm,
                latent_attention=latent_attention, rotary=rotary, depth=depth, generator=generator,
            )  # fmt: skip
        self.mixer = mixer
        self.point = (
            GridFeedForward(d, ffn_ratio, depth=depth, generator=generator)
            if point == "conv"
            else FeedForward(d, ffn_ratio, gated, depth=depth, generator=generator)
        )

    def forward(
        self,
        h: Float[Tensor, "b n d"],
        *,
        mass: Float[Tensor, "b n"] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
        grid_shape: tuple[int, int] | None = None,
        pos: Float[Tensor, "b n p"] | None = None,
        keys: int | None = None,
    ) -> Float[Tensor, "b n d"]:
        """New point features; see ``LRSAAttention`` for the arguments. Padding is never read; its rows mean nothing."""
        h = zero_invalid(h, valid)  # also a weight of zero would hand on a NaN, forwards and backwards
        h = h + self.mixer(self.norm(h), mass=mass, valid=valid, grid_shape=grid_shape, pos=pos, keys=keys)  # 1 - 6
        x = self.point_norm(h)
        if isinstance(self.point, FeedForward):
            return h + self.point(x)  # step 7
        return h + self.point(zero_invalid(x, valid), grid_shape)


class PositionEmbedding(nn.Module):
    """[x, sin(f x), cos(f x)] with f = pi 2^e, e evenly spaced (3.5): coordinates, all sines (by axis), all cosines.

    In float32 or better. ``width`` is the number of features.
    """

    def __init__(
        self, axes: int, count: int = 6, exponents: tuple[float, float] = (-1, 4), include: bool = True
    ) -> None:
        super().__init__()
        self.count, self.exponents, self.include = count, exponents, include
        self.width = axes * (include + 2 * count)
        if self.width < 1:
            raise ValueError("an embedding needs frequencies or the coordinates themselves")

    def forward(self, x: Float[Tensor, "*b p"]) -> Float[Tensor, "*b e"]:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        # made here, not kept: a model cast to half precision would have rounded them
        frequencies = math.pi * torch.linspace(*self.exponents, self.count, dtype=x.dtype, device=x.device).exp2()
        phase = (x.unsqueeze(-1) * frequencies).flatten(-2)
        return torch.cat([*([x] if self.include else []), phase.sin(), phase.cos()], -1)


class Lift(nn.Module):
    """Embedded coordinates, and a function's channels beside them, to features: linearly or by one hidden layer."""

    def __init__(
        self, embedding: PositionEmbedding, channels: int, hidden: int | None, d: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.network = mlp(embedding.width + channels, hidden, d, generator)

    def forward(self, x: Float[Tensor, "*b p"], f: Float[Tensor, "*b c"] | None = None) -> Float[Tensor, "*b d"]:
        features = self.embedding(x)
        if f is not None:
            features = torch.cat([features, f.to(features.dtype)], -1)
        return self.network(features.to(next(self.network.parameters()).dtype))


def mlp(n_in: int, hidden: int | None, n_out: int, generator: torch.Generator | None) -> nn.Module:
    if hidden is None:
        return linear(n_in, n_out, generator=generator)
    return nn.Sequential(
        linear(n_in, hidden, generator=generator), nn.GELU(), linear(hidden, n_out, generator=generator)
    )


class LRSAOperator(nn.Module):
    """A neural operator on any set of points: grids, meshes or clouds of any size, from N points to N or other points.

    Args:
        coord_dim: p, axes of the coordinates, which should lie in about [-1, 1] or [0, 1].
        in_channels: channels of the input function; 0 when there is none.
        out_channels: channels of the output.
        d: width.
        layers: number of blocks.
        heads: see ``LRSABlock``, as for the next eight.
        latents: latent tokens; double them until the validation error moves by less than 2 %.
        point: see ``LRSABlock``.
        ffn_ratio: see ``LRSABlock``.
        gated: see ``LRSABlock``.
        qk_norm: see ``LRSABlock``.
        norm: see ``LRSABlock``.
        latent_attention: see ``LRSABlock``.
        rotary: see ``LRSABlock``.
        pos_freqs: frequencies per axis of the position embedding.
        pos_exp: exponents of the lowest and the highest frequency, pi 2^e.
        pos_include: whether the embedding holds the coordinates themselves.
        lift_hidden: hidden width of the lifting network; None lifts linearly.
        head_hidden: hidden width of the projecting network (128 in the paper); None projects linearly.
        output_norm: a norm before the projection.
        time: whether ``forward`` takes times, embedded as coordinates are.
        blind_queries: give query points at which the input function is not known a lift of their own.
        checkpoint: recompute the blocks in the backward pass instead of keeping what they did.
        mixer: makes the mixer of the block of a given index, in place of ``LRSAAttention``.
        generator: for the initial weights.

    Source: arXiv 2604.03582. Query points and times are of the ancestors' and our making.
    """

    def __init__(
        self,
        coord_dim: int,
        in_channels: int,
        out_channels: int,
        d: int = 128,
        layers: int = 8,
        heads: int = 8,
        latents: int = 64,
        *,
        point: Literal["ffn", "conv"] = "ffn",
        ffn_ratio: float = 1.0,
        gated: bool = False,
        qk_norm: bool = True,
        norm: NormKind = "rms",
        latent_attention: bool | Literal["ffn"] = True,
        rotary: tuple[float, float] | None = None,
        pos_freqs: int = 6,
        pos_exp: tuple[float, float] = (-1, 4),
        pos_include: bool = True,
        lift_hidden: int | None = None,
        head_hidden: int | None = None,
        output_norm: bool = False,
        time: bool = False,
        blind_queries: bool = False,
        checkpoint: bool = False,
        mixer: MixerFactory | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.coord_dim, self.in_channels = coord_dim, in_channels
        self.checkpoint = checkpoint

        def lift(axes: int, channels: int) -> Lift:
            embedding = PositionEmbedding(axes, pos_freqs, pos_exp, pos_include)
            return Lift(embedding, channels, lift_hidden, d, generator)

        self.lift = lift(coord_dim, in_channels)
        self.query_lift = lift(coord_dim, 0) if blind_queries else None
        self.time_lift = lift(1, 0) if time else None
        self.blocks = nn.ModuleList(
            LRSABlock(
                d, heads, latents, point, ffn_ratio=ffn_ratio, gated=gated, qk_norm=qk_norm, norm=norm,
                latent_attention=latent_attention, rotary=rotary, mixer=mixer(depth) if mixer else None, depth=depth,
                generator=generator,
            )
            for depth in range(layers)
        )  # fmt: skip
        self.output_norm = make_norm(norm, d) if output_norm else nn.Identity()
        self.head = mlp(d, head_hidden, out_channels, generator)

    def forward(
        self,
        x: Float[Tensor, "b n p"],
        f: Float[Tensor, "b n c"] | None = None,
        *,
        mass: Float[Tensor, "b n"] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
        grid_shape: tuple[int, int] | None = None,
        query_x: Float[Tensor, "b q p"] | None = None,
        query_f: Float[Tensor, "b q c"] | None = None,
        t: Float[Tensor, " b"] | None = None,
        check: bool = True,
    ) -> Float[Tensor, "b k out"]:
        """The output function at the points, or at the query points when there are any.

        Args:
            x: coordinates.
            f: the input function there; None when ``in_channels`` is 0.
            mass: positive quadrature weights of the points (cell areas; 1 / density for scattered points).
            valid: False for padding; its coordinates and values may be anything and its output is zero.
            grid_shape: (rows, columns) of points in row-major order, needed by ``point="conv"``.
            query_x: where to evaluate; these points are answered and never read, so that each answer stands alone.
            query_f: the input function there, needed unless ``in_channels`` is 0 or ``blind_queries`` is set.
            t: a time per sample, when built with ``time``.
            check: also look at the values, for masses that are not positive, samples without a valid point, and
                NaN and infinities. Never while compiling, where only shapes and types are looked at.

        Raises:
            ValueError: shapes or values that do not fit; the message names the first.
            TypeError: integers where floating point is needed.
        """
        check_arguments(self, x, f, mass, valid, grid_shape, query_x, query_f, t)
        if check and not torch.compiler.is_compiling():
            check_values(x, f, mass, valid, query_x, query_f, t)
        n = x.shape[1]
        h, pos = self.embed(x, f, valid=valid, t=t), zero_invalid(x, valid)
        keys = None
        if query_x is not None:
            keys, pos = n, torch.cat([pos, query_x], 1)
            h = torch.cat([h, self.embed(query_x, query_f, t=t)], 1)
            valid = None if valid is None else torch.cat([valid, valid.new_ones(query_x.shape[:2])], 1)
            mass = None if mass is None else torch.cat([mass, mass.new_ones(query_x.shape[:2])], 1)
        for block in self.blocks:
            arguments = {"mass": mass, "valid": valid, "grid_shape": grid_shape, "pos": pos, "keys": keys}
            if self.checkpoint and torch.is_grad_enabled():
                h = recompute(block, h, use_reentrant=False, **arguments)
            else:
                h = block(h, **arguments)
        h, valid = (h, valid) if keys is None else (h[:, keys:], None)
        return zero_invalid(self.head(self.output_norm(h)), valid)

    def embed(
        self,
        x: Float[Tensor, "b n p"],
        f: Float[Tensor, "b n c"] | None = None,
        *,
        valid: Bool[Tensor, "b n"] | None = None,
        t: Float[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """The features with which points enter the first block; padding enters as if it were at the origin."""
        x = zero_invalid(x, valid)
        if f is not None:
            h = self.lift(x, zero_invalid(f, valid))
        else:
            h = self.lift(x) if self.query_lift is None or not self.in_channels else self.query_lift(x)
        return h if self.time_lift is None or t is None else h + self.time_lift(t[:, None]).unsqueeze(1)

    def from_batch(self, data: object) -> Float[Tensor, "points out"]:
        """The outputs of a torch_geometric batch (``pos``, ``batch`` and, with input channels, ``x``), one row a node.

        Graphs of different size are padded by ``torch_geometric.utils.to_dense_batch``; edges are not used. A
        ``mass`` attribute of the nodes and a ``t`` of the graphs are passed on.
        """
        try:
            from torch_geometric.utils import to_dense_batch  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtra("from_batch needs torch_geometric: pip install 'subspan[graph]'") from error
        graph = getattr(data, "batch", None)
        x, valid = to_dense_batch(data.pos, graph)
        f = to_dense_batch(data.x, graph)[0] if self.in_channels else None
        mass = getattr(data, "mass", None)
        mass = None if mass is None else to_dense_batch(mass, graph)[0]
        return self(x, f, mass=mass, valid=valid, t=getattr(data, "t", None))[valid]
