"""The linear layer with a memory beside it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.adapters.moram.bank import MemoryBank, Routing, read_values, responses, route
from subspan.adapters.moram.config import MoRAMConfig
from subspan.surgery import is_conv1d

Observer = Callable[[Tensor, Tensor, Routing], None]


class MoRAMLinear(nn.Module):
    """y = W0 x + b0 + sum_i w_i c_i p_i v_i: a frozen linear layer and the read of its bank, token by token.

    Wraps nn.Linear (quantised ones too: the weight is never read) or transformers' Conv1D as ``base_layer``, as peft
    does. ``observer``, where set, is called with each forward's input, responses and routing.
    """

    def __init__(self, base_layer: nn.Module, config: MoRAMConfig) -> None:
        super().__init__()
        weight: Any = base_layer.weight
        self.in_features: int = weight.shape[0] if is_conv1d(base_layer) else base_layer.in_features  # pyright: ignore
        self.out_features: int = base_layer.nf if is_conv1d(base_layer) else base_layer.out_features  # pyright: ignore
        self.base_layer, self.config = base_layer, config
        dtype = weight.dtype if weight.is_floating_point() else torch.float32
        self.bank = MemoryBank(self.in_features, self.out_features, weight.device, dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.enabled = True
        self.gate_in_training = False
        self.observer: Observer | None = None
        self._unwatched = True

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    @property
    def weight(self) -> Tensor:
        """The base layer's (some models look at its dtype)."""
        return self.base_layer.weight  # pyright: ignore[reportReturnType]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # pyright: ignore[reportReturnType]

    def train(self, mode: bool = True) -> "MoRAMLinear":
        self._unwatched = True
        return super().train(mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.base_layer(x, *args, **kwargs)  # (1)
        if not self.enabled or len(self.bank) == 0:
            return y
        read = self.memory(x)
        return y if read is None else y + read.to(y.dtype)

    def memory(self, x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b m"] | None:
        """What the bank adds (float32 or better); None where no atom is live."""
        keys, values = self.bank.tables()
        if sum(map(len, keys)) == 0:
            return None
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._mix(x, keys, values)
        return self._mix(x, keys, values)

    def _mix(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        config = self.config
        seen = self.dropout(x)
        parts = [responses(seen, table) for table in keys]
        p = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        gate = config.threshold if self.gate_in_training or not self.training else None
        routing = route(
            p,
            config.k,
            config.temperature,
            gate,
            score=config.score,
            normalize=config.normalize,
            mixing=config.mixing,
        )
        if gate and not self.training:
            self._watch(routing)
        if self.observer is not None:
            self.observer(x, p, routing)
        scale = self.bank.scale.to(p.dtype)[routing.index]
        return read_values(routing.index, routing.weight * scale * routing.response, values, config.read)

    def _watch(self, routing: Routing) -> None:
        """Say once per switch to evaluation where the gate silences most tokens."""
        if not self._unwatched or torch.compiler.is_compiling() or routing.weight.numel() == 0:
            return
        self._unwatched = False
        silent = float((routing.weight.detach().sum(-1) == 0).float().mean())
        if silent > 0.5:
            warnings.warn(
                "more than half of the tokens read nothing from the memory: threshold is too high for this bank, or "
                "these inputs resemble no task it holds",
                stacklevel=2,
            )
