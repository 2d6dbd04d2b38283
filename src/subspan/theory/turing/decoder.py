"""The softmax form as a plain decoder: standard blocks only, two for each layer, with the scale inside W_Q and W_K."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from subspan.theory.turing.circuit import Head
from subspan.theory.turing.layers import fixed_linear
from subspan.theory.turing.model import CompiledTransformer
from subspan.theory.turing.numerics import DENOISER, paper_scale


class Block(nn.Module):
    """Causal attention with fused projections, then a ReLU MLP, both added to the residual stream; no normalisation."""

    def __init__(self, heads: int, qkv: Tensor, out: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = fixed_linear(qkv), fixed_linear(out)
        self.up, self.down = fixed_linear(up, bias), fixed_linear(down)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        b, n, _ = x.shape
        rows = self.qkv(x).view(b, n, self.heads, -1).transpose(1, 2)
        values = self.out.in_features // self.heads
        keys = (rows.shape[-1] - values) // 2
        q, k, v = rows.split((keys, keys, values), -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # divides by sqrt(d_k)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """Token and position embeddings, blocks, and an unembedding."""

    def __init__(self, embedding: Tensor, positions: Tensor, blocks: list[Block], unembedding: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(embedding)
        self.positions = nn.Embedding.from_pretrained(positions)
        self.blocks = nn.ModuleList(blocks)
        self.unembedding = fixed_linear(unembedding)

    def forward(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n v"]:
        """Logits of the next token."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.unembedding(x)


def to_decoder(model: CompiledTransformer) -> Decoder:
    """A denoised softmax model as 2 L = 5 r + 16 plain blocks: attention and denoiser, then the MLP (3.6 d).

    The blocks hold float32; ``.to(torch.bfloat16)`` rounds the weights too. Scores reach c (4 r - 1), so a kernel must
    keep them in float32, as torch's do; one that rounds them to half precision breaks the separation of c.

    Raises:
        ValueError: not a softmax model with "mlp" denoising, or a factored vocabulary.
    """
    how = model.how
    if how.attention != "softmax" or how.scale is None or how.denoise not in ("mlp", "mlp-selective", "mlp-full"):
        raise ValueError("only a softmax model with a denoising MLP is made of plain blocks: call softmax() first")
    if model.embedding is None or model.unembedding is None:
        raise ValueError("a factored vocabulary has no tables to export: compile without factored_vocab")
    heads = [layer.heads for layer in model.layers]
    H = max(map(len, heads))
    keys = max(len(head.q) for layer in heads for head in layer)
    values = max(len(head.v) for layer in heads for head in layer)
    d = model.circuit.width
    blocks = []
    for layer in model.layers:
        qkv, out = _projections(layer.heads, H, keys, values, d, paper_scale(how.scale, keys))
        # a layer without heads still gets its denoiser block: cleaning a clean position bit changes nothing
        written = (layer.out.tolist() or [0]) if how.selective else list(range(d))
        blocks.append(Block(H, qkv, out, *_denoiser(written, d)))
        silent = torch.zeros_like(qkv), torch.zeros_like(out)
        up, down = layer.up, layer.down
        blocks.append(Block(H, *silent, up.weight.clone(), up.bias.clone(), down.weight.clone()))
    positions = torch.cat([model.places, model.places.new_zeros(len(model.places), d - model.bits)], 1)
    return Decoder(model.embedding.weight.clone(), positions, blocks, model.unembedding.weight.clone())


def _projections(heads: list[Head], H: int, keys: int, values: int, d: int, c_p: float) -> tuple[Tensor, Tensor]:
    """W_Q, W_K (times c_p) and W_V of every head in a row, and W_O; unused heads and widths are zero."""
    qkv, out = torch.zeros(H, 2 * keys + values, d), torch.zeros(d, H, values)
    for h, head in enumerate(heads):
        for start, coords, weight in ((0, head.q, c_p), (keys, head.k, c_p), (2 * keys, head.v, 1.0)):
            qkv[h, torch.arange(start, start + len(coords)), torch.tensor(coords)] = weight
        out[torch.tensor(head.out), h, torch.arange(len(head.v))] = 1.0
    return qkv.flatten(0, 1), out.flatten(1)


def _denoiser(coords: list[int], d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Six neurons for each of these coordinates."""
    up, bias = torch.zeros(len(coords), len(DENOISER), d), torch.zeros(len(coords), len(DENOISER))
    down = torch.zeros(d, len(coords), len(DENOISER))
    for i, c in enumerate(coords):
        for j, (sign, threshold, slope) in enumerate(DENOISER):
            up[i, j, c], bias[i, j], down[c, i, j] = sign, -threshold, slope
    return up.flatten(0, 1), bias.flatten(), down.flatten(1)


def decoder_parameters(model: CompiledTransformer) -> int:
    """Dense parameters of ``to_decoder``'s blocks (no embeddings), without building them: O((log l)^3)."""
    rows = {row["quantity"]: row["measured"] for row in model.size_report()}
    d, per_head = rows["width d"], 2 * rows["key width d_k"] + 2 * rows["value width d_v"]
    attention = 2 * len(model.layers) * d * rows["heads per layer H"] * per_head
    written = [max(len(layer.out), 1) if model.how.selective else d for layer in model.layers]
    denoisers = sum(len(DENOISER) * n * (2 * d + 1) for n in written)
    return attention + denoisers + rows["MLP parameters"]


def exponent_bits(length: int) -> int:
    """Exponent bits with which 1/length is a normal number: O(log log l) (3.6 f)."""
    return 1 + math.ceil(math.log2(math.log2(max(length, 2)) + 2))
