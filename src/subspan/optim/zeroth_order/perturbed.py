"""The loss at X + eps Z and X - eps Z: weights moved in place and back, or a low-rank term on the layers' outputs."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from subspan.optim.zeroth_order.blocks import Block, Direction
from subspan.surgery import is_conv1d, parameter_owners

Restore = Literal["auto", "exact", "arith"]


class Slot:
    """Low-rank terms x V L^T on the output of every layer that holds one weight; the weight itself is not touched."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.total: tuple[Tensor, Tensor] | None = None
        """What the period has added so far, (A, V): the weight counts as X + A V^T."""
        self.probe: tuple[Tensor, Tensor] | None = None
        self.fired = False
        self.handles = [layer.register_forward_hook(self, with_kwargs=True) for layer in layers]

    def __call__(self, layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        self.fired = True
        (x,) = (*args, *kwargs.values())
        if self.probe and self.total and self.probe[1] is self.total[1]:
            terms = [(self.total[0] + self.probe[0], self.total[1])]
        else:
            terms = [term for term in (self.total, self.probe) if term]
        for left, right in terms:
            output = add_low_rank_output(output, layer, x, left.to(output.dtype), right.to(output.dtype))
        return output

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def add_low_rank_output(
    output: Tensor, layer: Any, x: Tensor, left: Float[Tensor, "m r"], right: Float[Tensor, "n r"]
) -> Tensor:
    """The layer's output with what the weight U V^T would add to it; written in place where that is one product."""
    if isinstance(layer, nn.Embedding):
        return output.add_(F.embedding(x, left) @ right.mT)
    if isinstance(layer, nn.Conv2d):
        kernel = right.mT.reshape(-1, *layer.weight.shape[1:])
        return output.add_(torch.einsum("mr,...rhw->...mhw", left, layer._conv_forward(x, kernel, None)))
    inner = (x.to(right.dtype) @ right).reshape(-1, right.shape[1])
    output.view(-1, output.shape[-1]).addmm_(inner, left.mT)
    return output


def hookable(layer: nn.Module) -> bool:
    """Whether a weight of this layer acts as x W^T in one call: Linear, transformers' Conv1D, Embedding, Conv2d.

    Not their subclasses: Gemma's embedding scales what it looks up, torch's attention reads the weight of its output
    projection without calling the layer.
    """
    if type(layer) is nn.Conv2d:
        return layer.groups == 1
    if type(layer) is nn.Embedding:
        return layer.max_norm is None
    return type(layer) is nn.Linear or is_conv1d(layer)


class Weights:
    """The blocks of a run, and how each is perturbed: through a ``Slot``, or in place."""

    def __init__(self, blocks: Sequence[Block], model: nn.Module | None, restore: Restore) -> None:
        self.restore = restore
        self.slots: dict[Block, Slot] = {}
        owners: dict[Any, list[tuple[str, nn.Module]]] = parameter_owners(model) if model is not None else {}
        for block in blocks:
            places = owners.get(block.param, [])
            if block.rank and places and all(name.endswith("weight") and hookable(m) for name, m in places):
                self.slots[block] = Slot([m for _, m in places])

    def silent(self, closure: Callable[[], float]) -> list[str]:
        """Evaluate once; the blocks whose weight the model reads without calling its layer."""
        for slot in self.slots.values():
            slot.fired = False
        closure()
        return [block.name for block, slot in self.slots.items() if not slot.fired]

    def in_place(self, names: Sequence[str]) -> None:
        """Perturb these blocks in place from now on."""
        for block in [b for b in self.slots if b.name in names]:
            self.slots.pop(block).remove()

    def evaluate(self, direction: Direction, eps: float, closure: Callable[[], float]) -> tuple[float, float]:
        """(F(X + eps Z), F(X - eps Z)). X is back afterwards, whatever the closure raises."""
        moved = [b for b in direction.blocks() if b not in self.slots]
        kept = {b: b.param.detach().clone() for b in moved if self._exactly(b)}
        hooked = {self.slots[b]: pair for b, pair in direction.factors.items() if b in self.slots}
        losses = []
        at = 0.0
        try:
            for offset in (eps, -eps):
                for block in moved:
                    direction.add(block, offset - at)
                for slot, (left, right) in hooked.items():
                    slot.probe = left * offset, right
                at = offset
                losses.append(closure())
        finally:
            for slot in hooked:
                slot.probe = None
            for block in moved:
                if block in kept:
                    block.param.copy_(kept[block])
                else:
                    direction.add(block, -at)
        return losses[0], losses[1]

    def _exactly(self, block: Block) -> bool:
        """Whether to restore from a copy: in 16 bits (100 cycles drift by 0.08 in bfloat16), and where lr is 0."""
        if self.restore == "auto":
            return block.param.dtype.itemsize < 4 or block.group["lr"] == 0
        return self.restore == "exact"
