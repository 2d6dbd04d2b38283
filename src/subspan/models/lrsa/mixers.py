"""Ways for N points to exchange what they know, all called alike: mixer(h, mass=, valid=, grid_shape=, pos=, keys=).

Most are one template, compress (N to M), process, reconstruct (M to N): with frozen weights each head mixes the points
by a matrix U G V of rank M at most.
"""

import math
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax

from subspan.models.lrsa.attention import (
    Attention,
    FeedForward,
    NormKind,
    attention_weights,
    key_bias,
    linear,
    make_norm,
    relative_mass,
    rotary_angles,
    split_heads,
    width_of_head,
)


class Factors(NamedTuple):
    """A mixing matrix U G V per head: V (b, h, M, N) compresses, U (b, h, N, M) reconstructs.

    G (b, h, M, M) is None where no matrix says what happens between them.
    """

    V: Tensor
    U: Tensor
    G: Tensor | None = None


@runtime_checkable
class LowRankMixer(Protocol):
    """A mixer that can show its factors."""

    def factors(
        self, h: Tensor, *, mass: Tensor | None = None, valid: Tensor | None = None, pos: Tensor | None = None
    ) -> Factors: ...


class LRSAAttention(nn.Module):
    """Low-rank spatial attention: M learned queries read the N points, exchange, and every point reads them.

    Its input is normalised point features (``LRSABlock`` does that) and its output is what to add to the stream. Beside
    what M tokens cost it takes 4 N d² + 4 N M d multiply-adds: linear in the number of points, which may differ between
    calls.

    Args:
        d: width, a multiple of ``heads``; give heads a width of 16 or more.
        heads: number of heads.
        latents: M, the number of latent tokens: each head's mixing matrix has rank M at most.
        ffn_ratio: hidden width of the feed-forward parts over d.
        gated: gated feed-forward parts.
        qk_norm: normalise queries and keys, which bounds the logits.
        norm: "rms" or "layer", before each part.
        latent_attention: whether the tokens attend to each other; "ffn" puts a feed-forward part of about as many
            parameters in its place (the paper's ablation).
        rotary: exponents (low, high) of frequencies by which Down's keys and Up's queries turn with the position.
        depth: index of the block, for the initial size of what it writes.
        generator: for the initial weights.

    Source: arXiv 2604.03582, the block between the first norm and the last feed-forward part.
    """

    def __init__(
        self,
        d: int,
        heads: int = 8,
        latents: int = 64,
        *,
        ffn_ratio: float = 1.0,
        gated: bool = False,
        qk_norm: bool = True,
        norm: NormKind = "rms",
        latent_attention: bool | Literal["ffn"] = True,
        rotary: tuple[float, float] | None = None,
        depth: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if latents < 1:
            raise ValueError(f"at least one latent token is needed, got latents={latents}")
        if latent_attention not in (True, False, "ffn"):
            raise ValueError(f"latent_attention must be True, False or 'ffn', got {latent_attention!r}")
        self.rotary = rotary
        attention: dict[str, Any] = {"qk_norm": qk_norm, "depth": depth, "generator": generator}
        forward: dict[str, Any] = {"gated": gated, "depth": depth, "generator": generator}
        self.down = Attention(d, heads, queries=latents, **attention)
        self.norm1, self.ffn1 = make_norm(norm, d), FeedForward(d, ffn_ratio, **forward)
        if latent_attention:
            self.norm2 = make_norm(norm, d)
        if latent_attention == "ffn":
            self.latent = FeedForward(d, 2.0, depth=depth, generator=generator)  # 4 d², as the attention has
        else:
            self.latent = Attention(d, heads, **attention) if latent_attention else None
        self.norm3, self.ffn2 = make_norm(norm, d), FeedForward(d, ffn_ratio, **forward)
        self.norm4, self.up = make_norm(norm, d), Attention(d, heads, **attention)

    def compress(
        self,
        h: Float[Tensor, "b n d"],
        *,
        mass: Float[Tensor, "b n"] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
        pos: Float[Tensor, "b n p"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        """The latent tokens: read from the points, then passed through an ordinary Transformer layer."""
        z = self.down(h, bias=key_bias(mass, valid), source_angles=self._angles(pos))  # step 2
        z = z + self.ffn1(self.norm1(z))  # step 3
        if self.latent is not None:
            z = z + self.latent(self.norm2(z))  # step 4
        return z + self.ffn2(self.norm3(z))  # step 5

    def reconstruct(
        self, h: Float[Tensor, "b n d"], z: Float[Tensor, "b m d"], *, pos: Float[Tensor, "b n p"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """What each point reads from the latent tokens: any points, not only those that were compressed."""
        return self.up(self.norm4(z), h, target_angles=self._angles(pos))  # step 6

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
        """Mix.

        Args:
            h: normalised point features.
            mass: positive weights of the points, such as cell areas: a point of mass k counts as k equal points.
            valid: False for padding, which nobody reads and which gets zero; its features must be finite here.
            grid_shape: not used: points need no order.
            pos: coordinates, for rotary only.
            keys: only the first ``keys`` points are read; the others are answered.
        """
        seen = [None if t is None else t[:, :keys] for t in (mass, valid, pos)]
        z = self.compress(h[:, :keys], mass=seen[0], valid=seen[1], pos=seen[2])
        return zero_invalid(self.reconstruct(h, z, pos=pos), valid)

    @torch.no_grad()
    def factors(
        self,
        h: Float[Tensor, "b n d"],
        *,
        mass: Float[Tensor, "b n"] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
        pos: Float[Tensor, "b n p"] | None = None,
    ) -> Factors:
        """The weights with which latents read points and points read latents; what is between them is no matrix."""
        angles = self._angles(pos)
        q, k, _ = self.down.project(h, source_angles=angles)
        z = self.norm4(self.compress(h, mass=mass, valid=valid, pos=pos))
        up_q, up_k, _ = self.up.project(z, h, target_angles=angles)
        return Factors(attention_weights(q, k, key_bias(mass, valid)), attention_weights(up_q, up_k))

    def _angles(self, pos: Tensor | None) -> Tensor | None:
        if self.rotary is None:
            return None
        if pos is None:
            raise ValueError("rotary coordinates need the points' coordinates: pass pos=")
        return rotary_angles(pos, self.down.queries.shape[-1], self.rotary)


def zero_invalid(x: Float[Tensor, "b n d"], valid: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n d"]:
    return x if valid is None else x.masked_fill(~valid.unsqueeze(-1), 0)


# ------------------------------------------------------------------------------------------------------ for comparison


class FullAttention(nn.Module):
    """Every point reads every point, by the same attention: N² weights. A reference, and the exact long way."""

    def __init__(
        self,
        d: int,
        heads: int = 8,
        *,
        qk_norm: bool = True,
        depth: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.attention = Attention(d, heads, qk_norm=qk_norm, depth=depth, generator=generator)

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
        """Mix, as ``LRSAAttention`` does."""
        seen = [None if t is None else t[:, :keys] for t in (mass, valid)]
        return zero_invalid(self.attention(h[:, :keys], h, bias=key_bias(*seen)), valid)


class PhysicsAttention(nn.Module):
    """Transolver's slice attention (Wu et al., ICML 2024), as a reference: tied and explicit (b, h, N, M) weights.

    Points share themselves out to M slices by a softmax; a slice's token is the weighted mean of its points; tokens
    attend to each other and are handed back by the same weights. The column sums over N, in the input's precision,
    overflow float16 from N = 65,504 M on.
    """

    def __init__(
        self,
        d: int,
        heads: int = 8,
        latents: int = 64,
        *,
        depth: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        width = width_of_head(d, heads)
        self.feature = linear(d, d, generator=generator)
        self.address = linear(d, d, generator=generator)
        self.slice = nn.Linear(width, latents)
        nn.init.orthogonal_(self.slice.weight, generator=generator)
        nn.init.zeros_(self.slice.bias)
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), 0.5))
        self.query, self.key, self.value = (linear(width, width, bias=False, generator=generator) for _ in range(3))
        self.out = linear(d, d, depth=depth, generator=generator)

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
        """Mix, as ``LRSAAttention`` does; masses weight the means of the slices."""
        w = self._slices(h)
        seen = [None if t is None else t[:, :keys] for t in (mass, valid)]
        token = self._pool(w[:, :, :keys], *seen) @ split_heads(self.feature(h[:, :keys]), self.heads)
        token = scaled_dot_product_attention(self.query(token), self.key(token), self.value(token))
        return zero_invalid(self.out((w.to(token.dtype) @ token).transpose(1, 2).flatten(2)), valid)

    @torch.no_grad()
    def factors(
        self,
        h: Float[Tensor, "b n d"],
        *,
        mass: Float[Tensor, "b n"] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
        pos: Float[Tensor, "b n p"] | None = None,
    ) -> Factors:
        """V the normalised, U the plain slice weights, G the attention between slices."""
        w = self._slices(h)
        pool = self._pool(w, mass, valid)
        token = pool @ split_heads(self.feature(h), self.heads)
        return Factors(pool, w, attention_weights(self.query(token), self.key(token)))

    def _slices(self, h: Tensor) -> Tensor:
        return softmax(self.slice(split_heads(self.address(h), self.heads)) / self.temperature, dim=-1)

    def _pool(self, w: Tensor, mass: Tensor | None, valid: Tensor | None) -> Tensor:
        share = None if valid is None else valid.to(w.dtype)
        if mass is not None:
            share = relative_mass(mass, valid).to(w.dtype)
        w = w if share is None else w * share[:, None, :, None]
        return (w / (w.sum(-2, keepdim=True) + 1e-5)).mT  # 1e-5 as in Transolver: a slice may be empty


class SpectralMixer(nn.Module):
    """The Fourier layer of FNO (Li et al., ICLR 2021), as a reference: a d x d matrix for each of the lowest modes.

    For points that are a regular periodic grid: ``grid_shape`` of one or two axes (one axis of N points by default).
    In one dimension the modes 0 to m - 1 of a real signal mix with rank 2 m - 1 at most.
    """

    def __init__(self, d: int, modes: int = 12, dims: int = 2, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if dims not in (1, 2):
            raise ValueError(f"one or two dimensions are there, got dims={dims}")
        self.modes, self.dims = modes, dims
        # real and imaginary parts side by side: optimisers and casts need not know complex numbers
        self.weight = nn.Parameter(
            torch.randn(modes * (2 * modes - 1) ** (dims - 1), d, d, 2, generator=generator) / (math.sqrt(2) * d)
        )

    def forward(
        self,
        h: Float[Tensor, "b n d"],
        *,
        mass: Float[Tensor, "b n"] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
        grid_shape: tuple[int, ...] | None = None,
        pos: Float[Tensor, "b n p"] | None = None,
        keys: int | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Mix the points of a full grid."""
        if mass is not None or valid is not None or keys is not None:
            raise ValueError("a Fourier layer knows no masses, padding or query points")
        shape = grid_shape or (h.shape[1],)
        if len(shape) != self.dims or math.prod(shape) != h.shape[1]:
            raise ValueError(f"{h.shape[1]} points are no grid of shape {tuple(shape)} with {self.dims} axes")
        if shape[-1] // 2 + 1 < self.modes or (min(shape) < 2 * self.modes - 1 and self.dims == 2):
            raise ValueError(f"a grid of shape {tuple(shape)} does not hold {self.modes} modes")
        axes = tuple(range(1, self.dims + 1))
        # FFTs of half precision want powers of two, where they exist at all
        grid = h.unflatten(1, shape).to(torch.promote_types(h.dtype, torch.float32))
        spectrum = torch.fft.rfftn(grid, dim=axes)
        weight = torch.view_as_complex(self.weight.to(grid.dtype))
        low = [torch.arange(self.modes, device=h.device)]
        if self.dims == 2:
            low.insert(0, torch.arange(1 - self.modes, self.modes, device=h.device) % shape[0])
        index = torch.meshgrid(*low, indexing="ij")
        kept = spectrum[:, *index].flatten(1, -2)
        mixed = torch.einsum("bmi,mio->bmo", kept, weight).unflatten(1, index[0].shape)
        out = torch.zeros_like(spectrum)
        out[:, *index] = mixed
        return torch.fft.irfftn(out, s=shape, dim=axes).flatten(1, self.dims).to(h.dtype)
