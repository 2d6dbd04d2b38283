"""One context, one token at a time, on a CPU: the layers of ``layers.py`` once more, in numpy.

The work of a token in a layer is a few thousand multiplications, and torch's dispatch costs several times that. numpy
writes a run of 500 tokens six times faster. Rounding and denoising stay torch's, on shared memory.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subspan.theory.turing.layers import Layer
from subspan.theory.turing.numerics import Arithmetic, denoised, rounded, snapped


class _Part(NamedTuple):
    """A layer's arrays, sharing memory with the module, and its keys and values so far [heads, capacity, width]."""

    layer: Layer
    gather: np.ndarray
    times: np.ndarray
    slots: np.ndarray
    out: np.ndarray
    up: np.ndarray
    bias: np.ndarray
    down: np.ndarray
    seen: np.ndarray


class Stepper:
    """Keys and values of one context, and the next token's way through the layers."""

    def __init__(self, layers: list[Layer], how: Arithmetic, capacity: int) -> None:
        self.how, self.length = how, 0
        self.parts = []
        for layer in layers:
            seen = np.empty((len(layer.heads), capacity, layer.widths[1]), dtype=np.float32)
            heads = (layer.gather, layer.times, layer.slots, layer.out)
            gather, times, slots, out = (array.numpy() for array in heads)
            up, bias, down = (p.detach().numpy() for p in (layer.up.weight, layer.up.bias, layer.down.weight))
            self.parts.append(_Part(layer, gather, times, slots, out, up, bias, down, seen))

    def extend(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "1 d"]:
        """Take the embeddings of the next tokens; the last one's final state."""
        row = np.empty(0, dtype=np.float32)
        for embedded in x.numpy():
            row = embedded.copy()
            for part in self.parts:
                row = self._layer(row, part)
            self.length += 1
        return torch.from_numpy(row)[None]

    def _layer(self, x: np.ndarray, part: _Part) -> np.ndarray:
        how = self.how
        if part.layer.heads:
            x = self._attend(x, part)
        if how.denoise in ("mlp", "mlp-full") and not how.selective:
            x = denoised(torch.from_numpy(x), how.dtype).numpy()
        elif how.denoise == "snap":
            x = snapped(torch.from_numpy(x)).numpy()
        if not len(part.bias):
            return x
        hidden = self._rounded(np.maximum(part.up @ x + part.bias, 0))
        return self._rounded(x + part.down @ hidden)

    def _attend(self, x: np.ndarray, part: _Part) -> np.ndarray:
        how, keys = self.how, part.layer.widths[0]
        picked = x[part.gather].reshape(len(part.seen), -1)
        part.seen[:, self.length] = picked[:, keys:]
        kv = part.seen[:, : self.length + 1]
        scores = (kv[..., :keys] @ (picked[:, :keys] * part.times[:, 0])[..., None])[..., 0]
        if how.attention == "sparse1":
            heads = kv[np.arange(len(kv)), self._one_maximiser(scores), keys:-1]
        elif how.attention == "softmax":
            weights = np.exp((scores - scores.max(-1, keepdims=True)) * np.float32(how.scale))
            weights = self._rounded(weights / weights.sum(-1, keepdims=True), how.weight_dtype)
            heads = (weights[:, None] @ kv[..., keys:-1])[:, 0]
        else:
            maximal = (scores == scores.max(-1, keepdims=True)).astype(np.float32)
            sums = (maximal[:, None] @ kv[..., keys:])[:, 0]
            heads = sums[:, :-1] / sums[:, -1:]
        new = self._rounded(x[part.out] + self._rounded(heads.ravel()[part.slots]))
        if how.selective:
            new = denoised(torch.from_numpy(new), how.dtype).numpy()
        x = x.copy()
        x[part.out] = new
        return x

    def _one_maximiser(self, scores: np.ndarray) -> np.ndarray:
        n = scores.shape[-1]
        if self.how.choice == "random":
            return (scores + np.random.default_rng(n).random(scores.shape) / 2).argmax(-1)
        ramp = np.arange(n) / (2 * n)
        return (scores + ramp if self.how.choice == "last" else scores - ramp).argmax(-1)

    def _rounded(self, x: np.ndarray, dtype: torch.dtype | None = None) -> np.ndarray:
        """To the activations' format, or to another one."""
        dtype = dtype or self.how.dtype
        if dtype in (None, torch.float32):
            return x
        return rounded(torch.from_numpy(x), dtype).numpy()
