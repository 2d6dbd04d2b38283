"""nn.MultiheadAttention taken apart, for methods that must reach its projections one by one."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from subspan.surgery.layers import replace_modules


class SplitAttention(nn.Module):
    """The same attention as an ``nn.MultiheadAttention``, with ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``.

    The packed module multiplies with its weights itself, past any wrapper around them; here each projection is called.
    Arguments and results of ``forward`` are those of ``nn.MultiheadAttention``.

    Raises:
        ValueError: the attention has ``add_bias_kv`` or ``add_zero_attn``, whose extra position no projection gives.
    """

    # nn.TransformerEncoderLayer asks for these before it takes its fused path, which must not be taken.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        if packed.bias_k is not None or packed.add_zero_attn:
            raise ValueError("attention with add_bias_kv or add_zero_attn cannot be split into its projections")
        self.num_heads, self.head_dim, self.dropout = packed.num_heads, packed.head_dim, packed.dropout
        self.embed_dim, self.batch_first = packed.embed_dim, packed.batch_first
        packed_weight: Any = packed.in_proj_weight
        if packed_weight is not None:
            weights = packed_weight.detach().chunk(3)
        else:
            weights = [w.detach() for w in (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)]  # pyright: ignore
        biases = packed.in_proj_bias.detach().chunk(3) if packed.in_proj_bias is not None else (None,) * 3
        self.q_proj, self.k_proj, self.v_proj = (_linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.out_proj = packed.out_proj
        self.train(packed.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        time_first = batched and not self.batch_first
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if not batched:
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif time_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        mask = self._mask(q, k, key_padding_mask, attn_mask, is_causal)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(self.head_dim)) @ k.mT
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            out = nn.functional.dropout(weights, dropout) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = out.transpose(1, 2).flatten(2)
        out = self.out_proj(out.transpose(0, 1) if time_first else out if batched else out.squeeze(0))
        return out, weights if batched or weights is None else weights.squeeze(0)

    def _mask(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attention: Tensor | None, is_causal: bool
    ) -> Tensor | None:
        """Both masks as one to add to the scores (b x heads x t x s, or what broadcasts to it)."""
        if is_causal and attention is None:
            attention = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        total = None
        if attention is not None:
            attention = _additive(attention, q.dtype)
            if attention.dim() == 3:  # one per batch entry and head
                attention = attention.unflatten(0, (-1, self.num_heads))
            total = attention
        if padding is not None:
            padding = _additive(padding, q.dtype)[:, None, None, :]
            total = padding if total is None else total + padding
        return total


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """True means "do not look"; a float mask is added as it is."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
    return mask.to(dtype)


def split_attention(model: nn.Module) -> list[str]:
    """Replace every ``nn.MultiheadAttention`` inside ``model`` by a ``SplitAttention``; returns their names."""
    packed = {name: m for name, m in model.named_modules() if name and isinstance(m, nn.MultiheadAttention)}
    replace_modules(model, {m: SplitAttention(m) for m in packed.values()})
    return list(packed)
