"""The standard parts: norm, feed-forward, attention with normalised queries and keys, and the bias of its keys.

Numbers in comments are the steps of "Simple yet Effective: Low-Rank Spatial Attention for Neural Operators" (Yang, Xin,
Du and Liu, ICML 2026, arXiv 2604.03582) as listed in ``LRSAAttention``.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention

NormKind = Literal["rms", "layer"]


class RMSNorm(nn.RMSNorm):
    """g x / sqrt(mean(x²) + 1e-6), g learned; torch takes the mean in float32 for half-precision inputs."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        # the gain in the input's dtype: under autocast torch's fused kernel needs one dtype
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm with eps 1e-6, and gain and bias in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def make_norm(kind: NormKind, width: int) -> nn.Module:
    if kind not in ("rms", "layer"):
        raise ValueError(f"norm must be 'rms' or 'layer', got {kind!r}")
    return RMSNorm(width) if kind == "rms" else LayerNorm(width)


def linear(
    n_in: int, n_out: int, *, bias: bool = True, depth: int | None = None, generator: torch.Generator | None = None
) -> nn.Linear:
    """Weights from a normal law of deviation 1/sqrt(n_in), cut at three deviations, and zero bias.

    ``depth`` marks a matrix that writes into the residual stream of block ``depth`` (from 0): its deviation is
    1/sqrt(2 n_in (depth + 1)), so that the stream does not grow with the number of blocks (Mitchell's scheme).
    """
    layer = nn.Linear(n_in, n_out, bias=bias)
    std = (n_in * (1 if depth is None else 2 * (depth + 1))) ** -0.5
    nn.init.trunc_normal_(layer.weight, std=std, a=-3 * std, b=3 * std, generator=generator)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def width_of_head(d: int, heads: int) -> int:
    """d / heads. Raises ``ValueError`` where that is no whole number."""
    if heads < 1 or d % heads:
        raise ValueError(f"the width must be a multiple of the number of heads, got d={d} and heads={heads}")
    return d // heads


def hidden_width(d: int, ratio: float) -> int:
    """ratio d, rounded. Raises ``ValueError`` where nothing is left."""
    if not round(ratio * d) >= 1:
        raise ValueError(f"ffn_ratio={ratio} leaves a feed-forward part of width d={d} without hidden units")
    return round(ratio * d)


class FeedForward(nn.Module):
    """W2 gelu(W1 x + b1) + b2 with ratio d hidden units, or W2 (gelu(Wg x) * (W1 x)) when ``gated``.

    The gated form's hidden width is rounded up to a multiple of 16.
    """

    def __init__(
        self,
        d: int,
        ratio: float = 1.0,
        gated: bool = False,
        *,
        depth: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        hidden = hidden_width(d, ratio)
        if gated:
            hidden = 16 * math.ceil(hidden / 16)
        self.up = linear(d, hidden, generator=generator)
        self.gate = linear(d, hidden, generator=generator) if gated else None
        self.out = linear(hidden, d, depth=depth, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gelu(self.up(x)) if self.gate is None else gelu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """softmax(rms(Q) rms(K)ᵀ / sqrt(d_h) + bias) V per head, heads side by side, times W_O plus b_O.

    The norms of queries and keys have gains of their own. With unit gains a logit is at most sqrt(d_h) in size, so no
    precision can overflow, and heads narrower than 16 can hardly select.

    Args:
        d: width, a multiple of ``heads``.
        heads: number of heads.
        queries: number of learned queries, used as they are; None makes queries from features.
        qk_norm: normalise queries and keys.
        depth: index of the block, for the initial size of W_O.
        generator: for the initial weights.
    """

    def __init__(
        self,
        d: int,
        heads: int,
        *,
        queries: int | None = None,
        qk_norm: bool = True,
        depth: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        head_width = width_of_head(d, heads)
        self.query = linear(d, d, bias=False, generator=generator) if queries is None else None
        if queries is not None:
            # only directions matter under qk_norm: as different from each other as can be
            directions = nn.init.orthogonal_(torch.empty(queries, d), generator=generator)
            self.queries = nn.Parameter(directions.view(queries, heads, head_width))
        self.key = linear(d, d, bias=False, generator=generator)
        self.value = linear(d, d, bias=False, generator=generator)
        self.out = linear(d, d, depth=depth, generator=generator)
        self.query_norm = RMSNorm(head_width) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(head_width) if qk_norm else nn.Identity()

    def project(
        self,
        source: Float[Tensor, "b n d"],
        target: Float[Tensor, "b m d"] | None = None,
        source_angles: Tensor | None = None,
        target_angles: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (b, heads, m, d_h), learned or of the target, keys and values (b, heads, n, d_h) of the source."""
        if self.query is None:
            q = self.queries.transpose(0, 1).expand(source.shape[0], -1, -1, -1)
        else:
            q = split_heads(self.query(source if target is None else target), self.heads)
        k, v = split_heads(self.key(source), self.heads), split_heads(self.value(source), self.heads)
        q, k = rotate(self.query_norm(q), target_angles), rotate(self.key_norm(k), source_angles)
        # under autocast learned queries are float32 and values are not, and the kernel wants one dtype
        return q.to(v.dtype), k.to(v.dtype), v

    def forward(
        self,
        source: Float[Tensor, "b n d"],
        target: Float[Tensor, "b m d"] | None = None,
        bias: Tensor | None = None,
        source_angles: Tensor | None = None,
        target_angles: Tensor | None = None,
    ) -> Float[Tensor, "b m d"]:
        """What each target (learned where there are any, by default the source itself) reads from the source."""
        q, k, v = self.project(source, target, source_angles, target_angles)
        if bias is not None and bias.is_floating_point():
            bias = bias.to(v.dtype)
        return self.out(scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


def split_heads(x: Float[Tensor, "b n d"], heads: int) -> Float[Tensor, "b h n e"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attention_weights(
    q: Float[Tensor, "b h m e"], k: Float[Tensor, "b h n e"], bias: Tensor | None = None
) -> Float[Tensor, "b h m n"]:
    """softmax(Q Kᵀ / sqrt(e) + bias), formed: for looking at, in float32 or better."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(dtype) @ k.to(dtype).mT / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias if bias.is_floating_point() else logits.masked_fill(~bias, -torch.inf)
    return logits.softmax(-1)


def key_bias(
    mass: Float[Tensor, "b n"] | None, valid: Bool[Tensor, "b n"] | None
) -> Float[Tensor, "b 1 1 n"] | Bool[Tensor, "b 1 1 n"] | None:
    """What attention adds to the logits of its keys (3.3): log mass over its mean; keys that are not valid drop out.

    A key of mass k then counts as k equal keys would. Without masses the bias is the boolean mask itself.
    """
    if mass is None:
        return None if valid is None else valid[:, None, None]
    mass = relative_mass(mass, valid)
    # below 1e-6 of the mean a point counts for nothing, and log(0) would not be a number to differentiate
    bias = mass.clamp(min=1e-6).log()
    if valid is not None:
        # half of float16's range: adding a logit cannot overflow, and exp of it is zero in every dtype
        bias = bias.masked_fill(~valid, -3e4)
    return bias[:, None, None]


def relative_mass(mass: Float[Tensor, "b n"], valid: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n"]:
    """Masses over their mean among the valid points, in float32 or better; zero where not valid."""
    mass = mass.to(torch.promote_types(mass.dtype, torch.float32))
    if valid is None:
        return mass / mass.mean(-1, keepdim=True)
    mass = mass.masked_fill(~valid, 0)
    return mass * (valid.sum(-1, keepdim=True) / mass.sum(-1, keepdim=True))


def rotary_angles(
    position: Float[Tensor, "b n p"], head_width: int, exponents: tuple[float, float]
) -> Float[Tensor, "b 1 n pairs"]:
    """Angles 2^e x for every axis x and e from ``exponents[0]`` to ``exponents[1]``: d_h // (2p) of them an axis."""
    axes = position.shape[-1]
    count = head_width // (2 * axes)
    if count < 1:
        raise ValueError(f"rotary coordinates of {axes} axes need heads of width {2 * axes} or more, got {head_width}")
    position = position.to(torch.promote_types(position.dtype, torch.float32))
    frequencies = torch.linspace(*exponents, count, dtype=position.dtype, device=position.device).exp2()
    return (position.unsqueeze(-1) * frequencies).flatten(-2).unsqueeze(1)


def rotate(x: Float[Tensor, "b h n e"], angles: Float[Tensor, "b 1 n pairs"] | None) -> Float[Tensor, "b h n e"]:
    """Turn the pairs (x_i, x_{i + pairs}) by their angles; what is beyond twice the number of pairs stays."""
    if angles is None:
        return x
    pairs = angles.shape[-1]
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest.to(cos.dtype)], -1).to(x.dtype)
