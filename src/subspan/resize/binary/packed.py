"""Binary layers as bits: 1/32 of the memory of float32, and products by XOR and population count."""

import copy
import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, UInt8
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from subspan.files import replacing
from subspan.resize.binary.config import SurgeConfig
from subspan.resize.binary.estimators import filter_scale
from subspan.resize.binary.joint import Convolution, Dense, require_floating, scaled_output
from subspan.resize.binary.layers import (
    BinaryLayer,
    BinaryLinear,
    binary_kind,
    binary_layers,
    padded,
    to_binary,
)
from subspan.surgery import replace_modules

# Rows x outputs of one block: the words' XOR and counts of a block stay in the second-level cache.
_BLOCK = (16, 1024)


def pack(positive: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Eight signs a byte, the first in its lowest bit, one for +; the last byte of a row is filled up with zeros."""
    return np.packbits(positive, axis=-1, bitorder="little")


def unpack(bits: UInt8[Tensor, "*b c"], p: int) -> Float32[Tensor, "*b p"]:
    """The p signs of each row as +1 and -1."""
    ones = np.unpackbits(bits.cpu().numpy(), axis=-1, count=p, bitorder="little")
    return torch.from_numpy(ones).to(bits.device, torch.float32).mul_(2).sub_(1)


def word_columns(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Packed rows as 64-bit words, (ceil(bytes / 8), rows): the same word of all rows lies together."""
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    return np.ascontiguousarray(rows.view(np.uint64).T)


def sign_products(x: NDArray[np.uint64], w: NDArray[np.uint64], p: int) -> NDArray[np.float32]:
    """Inner products of signs, p - 2 popcount(x XOR w), for words from ``word_columns``: (rows of x, rows of w)."""
    kind = np.uint16 if p < 2**16 else np.uint32
    out = np.empty((x.shape[1], w.shape[1]), np.float32)
    if x.shape[1] <= 2:  # one pass over all words is quicker than one loop per word
        for row, words in zip(out, x.T, strict=True):
            np.subtract(p, 2.0 * np.bitwise_count(w ^ words[:, None]).sum(0, dtype=kind), out=row)
        return out
    differ, count = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint8)
    for i in range(0, x.shape[1], _BLOCK[0]):
        for j in range(0, w.shape[1], _BLOCK[1]):
            block = out[i : i + _BLOCK[0], j : j + _BLOCK[1]]
            rows, columns = block.shape
            total = np.zeros(block.shape, kind)
            xor, ones = differ[:rows, :columns], count[:rows, :columns]
            for a, b in zip(x[:, i : i + rows], w[:, j : j + columns], strict=True):
                np.bitwise_xor(a[:, None], b, out=xor)
                np.add(total, np.bitwise_count(xor, out=ones), out=total)
            np.subtract(p, 2.0 * total, out=block)
    return out


def answer_dtype(x: Tensor) -> torch.dtype:
    """Of the output of torch's own layers: the input's, or autocast's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype


class PackedLayer(nn.Module):
    """Bits of the weights, and a scale and a bias per output channel; gradients do not pass.

    On a CPU signs are counted, elsewhere unpacked and multiplied.
    """

    weight = None  # some of transformers' models ask a layer for its weight's dtype, unless it has none
    bits: Tensor
    alpha: Tensor | None
    bias: Tensor | None
    threshold: Tensor | None
    falling: Tensor | None

    def __init__(self, layer: BinaryLayer) -> None:
        super().__init__()
        weight = layer.latent().detach()
        self.shape = weight.shape
        self.register_buffer("bits", torch.from_numpy(pack((weight >= 0).flatten(1).cpu().numpy())).to(weight.device))
        self.register_buffer("alpha", filter_scale(weight) if layer.config.alpha == "channel" else None)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self.register_buffer("threshold", None)
        self.register_buffer("falling", None)
        self._words: NDArray[np.uint64] | None = None

    def fold(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        """Take over the batch normalisation of this layer's input: only the sign of what it returns counts here."""
        mean, var = norm.running_mean, norm.running_var
        if mean is None or var is None:
            raise ValueError("a batch normalisation without running statistics cannot be folded")
        wide = torch.promote_types(mean.dtype, torch.float32)  # as the normalisation itself computes
        mean, var = mean.to(wide), var.to(wide)
        gamma = norm.weight.to(wide) if norm.affine else torch.ones_like(mean)
        beta = norm.bias.to(wide) if norm.affine else torch.zeros_like(mean)
        # gamma (x - mean) / sd + beta >= 0 is x >= t, or x <= t where gamma < 0; where gamma = 0, all or nothing.
        always = torch.where(beta >= 0, -torch.inf, torch.inf)
        self.threshold = torch.where(gamma == 0, always, mean - beta * (var + norm.eps).sqrt() / gamma).detach()
        self.falling = (gamma < 0).detach()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._words = None
        super()._load_from_state_dict(*args, **kwargs)

    def words(self) -> NDArray[np.uint64]:
        """The weights as words, laid out at the first call after loading."""
        if self._words is None:
            self._words = word_columns(self.bits.cpu().numpy())
        return self._words

    def signs(self, dtype: torch.dtype) -> Tensor:
        """The signs of the weights, in the weights' shape."""
        return unpack(self.bits, self.shape[1:].numel()).to(dtype).view(self.shape)

    def positive(self, x: Tensor) -> Bool[Tensor, "*s"]:
        """Where the sign is +1; what comes before this layer is folded in."""
        if self.threshold is None or self.falling is None:
            return x >= 0
        shape = (-1, *(1,) * (x.ndim - 2))  # a batch normalisation's channels are dimension 1, whatever the layer's
        t, falling = self.threshold.view(shape), self.falling.view(shape)
        return torch.where(falling, x <= t, x >= t)

    def multiplied(self, x: Tensor, operator: Dense | Convolution) -> Tensor:
        """The product by unpacked signs, off the CPU."""
        return operator(torch.where(x.isnan(), x, 2 * self.positive(x).to(x.dtype) - 1), self.signs(x.dtype))


class PackedLinear(PackedLayer):
    """A ``BinaryLinear`` for inference: ceil(p / 8) bytes a row and a scale."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        require_floating(x)
        if x.shape[-1] != self.shape[1]:
            raise ValueError(f"a linear layer of {self.shape[1]} inputs takes (*, inputs), got {tuple(x.shape)}")
        if x.device.type != "cpu":
            return scaled_output(self.multiplied(x, Dense()), self.alpha, self.bias, -1)
        q, p = self.shape
        rows = pack(self.positive(x).numpy().reshape(-1, p))
        y = torch.from_numpy(sign_products(word_columns(rows), self.words(), p)).view(*x.shape[:-1], q)
        y = y.masked_fill_(x.isnan().any(-1, keepdim=True), torch.nan).to(answer_dtype(x))
        return scaled_output(y, self.alpha, self.bias, -1)


class PackedConv(PackedLayer):
    """A ``BinaryConv1d`` or ``BinaryConv2d`` for inference: the same on patches."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        self.in_channels = layer.in_channels
        self.padding_mode = layer.padding_mode
        self._reversed_padding_repeated_twice = layer._reversed_padding_repeated_twice
        self._border: tuple[torch.Size, Tensor] | None = None

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        require_floating(x)
        x, operator = padded(self, x)
        y = self._counted(x, operator) if x.device.type == "cpu" else self.multiplied(x, operator)
        return scaled_output(y, self.alpha, self.bias, 1)

    def _counted(self, x: Tensor, operator: Convolution) -> Tensor:
        rows = _patches(self.positive(x).numpy(), operator, self.shape[2:], True)
        words = np.split(self.words(), operator.groups, axis=1)
        p = self.shape[1:].numel()
        b, *size = rows.shape[: x.ndim - 1]
        rows = rows.reshape(-1, operator.groups, p)
        found = [sign_products(word_columns(pack(rows[:, g])), np.ascontiguousarray(w), p) for g, w in enumerate(words)]
        y = torch.from_numpy(np.concatenate(found, 1)).view(b, *size, self.shape[0]).movedim(-1, 1)
        if x.isnan().any():
            hit = _patches(x.isnan().numpy(), operator, self.shape[2:], False).any(-1)
            nan = torch.from_numpy(hit).movedim(-1, 1).repeat_interleave(self.shape[0] // operator.groups, 1)
            y = y.masked_fill(nan, torch.nan)
        return (y - self._padding(x, operator) if any(operator.padding) else y).to(answer_dtype(x))

    def _padding(self, x: Tensor, operator: Convolution) -> Tensor:
        """A padded place counts for nothing, but a bit knows no zero: what its weights added as if it were +1."""
        if self._border is None or self._border[0] != x.shape[1:]:
            ones, weight = torch.ones(1, *x.shape[1:]), self.signs(torch.float32)
            everywhere = weight.flatten(1).sum(1).view(1, -1, *(1,) * (x.ndim - 2))
            self._border = (x.shape[1:], everywhere - operator(ones, weight))
        return self._border[1]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._border = None
        super()._load_from_state_dict(*args, **kwargs)


def _patches(image: NDArray[np.bool_], conv: Convolution, kernel: Sequence[int], filling: bool) -> NDArray[np.bool_]:
    """Windows of an image that is padded with ``filling``: (b, *output size, groups, p)."""
    n = len(kernel)
    around = ((0, 0), (0, 0), *((pad, pad) for pad in conv.padding))
    reach = [d * (k - 1) + 1 for d, k in zip(conv.dilation, kernel, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(image, around, constant_values=filling), reach, tuple(range(2, 2 + n))
    )
    windows = windows[(slice(None), slice(None), *(slice(None, None, s) for s in (*conv.stride, *conv.dilation)))]
    b, c, *rest = windows.shape
    split = windows.reshape(b, conv.groups, c // conv.groups, *rest)
    order = (0, *range(3, 3 + n), 1, 2, *range(3 + n, 3 + 2 * n))
    return split.transpose(order).reshape(b, *rest[:n], conv.groups, c // conv.groups * math.prod(kernel))


def export_binary(model: nn.Module, *, fold_batch_norm: bool = False) -> nn.Module:
    """A copy of the model for inference: binary layers as bits, no twins.

    Args:
        model: with binary layers, of any mode.
        fold_batch_norm: take over the batch normalisation that stands directly before a binary layer in an
            ``nn.Sequential`` as a threshold per channel (in exact arithmetic the same signs). A layer that stands in
            two places keeps its normalisations.
    """
    out = copy.deepcopy(model)
    replace_modules(out, {layer: _packed(layer) for layer in binary_layers(out).values()})
    if fold_batch_norm:
        places = Counter(module for _, module in out.named_modules(remove_duplicate=False))
        for chain in [m for m in out.modules() if isinstance(m, nn.Sequential)]:
            for i, (first, second) in enumerate(pairwise(chain)):
                before = isinstance(first, nn.modules.batchnorm._BatchNorm)
                if before and isinstance(second, PackedLayer) and places[second] == 1:
                    second.fold(first)
                    chain[i] = nn.Identity()
    return out


def _packed(layer: BinaryLayer) -> PackedLayer:
    packed = PackedLinear(layer) if isinstance(layer, BinaryLinear) else PackedConv(layer)
    return packed.train(layer.training)


def save_packed(model: nn.Module, path: str | Path) -> None:
    """Write an exported model's tensors, bits as bits, as one safetensors file."""
    packed = {name: m.alpha is not None for name, m in model.named_modules() if isinstance(m, PackedLayer)}
    if not packed:
        raise ValueError("the model has no packed layer; call export_binary first")
    tensors = {k: v.detach().clone().contiguous() for k, v in model.state_dict().items()}
    with replacing(Path(path)) as partial:
        save_file(tensors, partial, {"packed": json.dumps(packed)})


def load_packed(model: nn.Module, path: str | Path) -> nn.Module:
    """Read what ``save_packed`` wrote into a model of the architecture that ``binarize`` was given; returns it.

    Raises ``ValueError`` where the file holds no packed layers or others than this model has, and torch's own
    ``RuntimeError`` where shapes differ.
    """
    with safe_open(path, "pt") as file:
        meta = json.loads((file.metadata() or {}).get("packed", "{}"))
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    if not meta:
        raise ValueError(f"{path} holds no packed layers")
    out = copy.deepcopy(model)
    named = dict(out.named_modules())
    new: dict[nn.Module, nn.Module] = {}
    for name, scaled in meta.items():
        layer = named.get(name)
        if layer is None or not (isinstance(layer, BinaryLayer) or binary_kind(layer)):
            raise ValueError(f"{path} packs {name}, which is no linear or convolutional layer of this model")
        config = SurgeConfig(mode="ste", alpha="channel" if scaled else "none")
        packed = _packed(layer if isinstance(layer, BinaryLayer) else to_binary(layer, config))
        packed.threshold, packed.falling = (tensors.get(f"{name}.{part}") for part in ("threshold", "falling"))
        new[layer] = packed
    replace_modules(out, new)
    for name, module in list(out.named_modules()):
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if norm and module.track_running_stats and f"{name}.running_mean" not in tensors:
            out.set_submodule(name, nn.Identity())  # folded
    out.load_state_dict(tensors)
    return out
