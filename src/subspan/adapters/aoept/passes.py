"""One pass of a backbone over all layers, with slots for prompts in the first ones (3.6)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from subspan.adapters.aoept.backbones import BackboneAdapter, Stream
from subspan.adapters.aoept.config import Insert, Order
from subspan.adapters.aoept.prompts import masked_mean

Features = Mapping[str, Tensor]


class Slots(NamedTuple):
    """What is inserted into one sequence: ``tokens`` (B, slots, D), and each modality's ``own`` (B, L, D) in it."""

    tokens: Tensor
    own: Mapping[str, Tensor]


# (modalities of the sequence, layer, features at the gates, present) -> what to insert
SlotMaker = Callable[[tuple[str, ...], int, Features, Tensor], Slots]


@dataclass(frozen=True)
class Prompting:
    """Fresh slots for the first ``depth`` layers, and how they enter."""

    make: SlotMaker
    depth: int
    order: Order = "sequential"
    insert: Insert = "all"


class Step(NamedTuple):
    """One modality in one prompted layer: its prompts, the features that gated, slots and features after the layer."""

    modality: str
    layer: int
    prompts: Tensor
    gated_by: Features
    slots_out: Tensor
    features_out: Tensor


class Outcome(NamedTuple):
    """``content`` after the last layer by modality; ``features`` at the input of the first layers; prompted steps."""

    content: Mapping[str, Tensor]
    features: Sequence[Features]
    steps: list[Step]


class _Sequence:
    """What one transformer sees: [class token of a fused backbone; slots; content], with a span for each modality."""

    def __init__(self, backbone: BackboneAdapter, streams: Mapping[str, Stream]) -> None:
        self.backbone, self.streams, self.names = backbone, streams, tuple(streams)
        self.at, self.slots = int(backbone.fused), 0
        self.h = torch.cat([stream.h for stream in streams.values()], 1)
        self.keep = None
        if any(stream.mask is not None for stream in streams.values()):
            self.keep = torch.cat([_mask_of(stream) for stream in streams.values()], 1)
        self.attention: Any = None
        self.stale = True

    def insert(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """Put fresh slots in the place of the old; ``hidden`` (B,) are samples that must not see them."""
        content = self.content()
        if self.slots == 0:
            self._make_room(tokens.shape[1], hidden)
        self.h = torch.cat([content[:, : self.at], tokens.to(content.dtype), content[:, self.at :]], 1)

    def _make_room(self, slots: int, hidden: Tensor | None) -> None:
        self.slots, self.stale = slots, True
        if self.keep is None and hidden is None:
            return
        keep = self.h.new_ones(self.h.shape[:2], dtype=torch.bool) if self.keep is None else self.keep
        seen = keep.new_ones(len(keep)) if hidden is None else ~hidden
        self.keep = torch.cat([keep[:, : self.at], seen[:, None].expand(-1, slots), keep[:, self.at :]], 1)

    def forward(self, index: int, checkpointing: bool) -> None:
        name = self.names[0]
        if self.stale:
            self.attention, self.stale = self.backbone.attention(name, self.h, self.keep), False
        layer = self.backbone.layer
        if checkpointing and torch.is_grad_enabled():
            self.h = cast(Tensor, checkpoint(layer, name, index, self.h, self.attention, use_reentrant=False))
        else:
            self.h = layer(name, index, self.h, self.attention)

    def content(self) -> Tensor:
        if self.at == 0 or self.slots == 0:
            return self.h[:, self.slots :]
        return torch.cat([self.h[:, : self.at], self.h[:, self.at + self.slots :]], 1)

    def slots_out(self) -> Tensor:
        return self.h[:, self.at : self.at + self.slots]

    def parts(self) -> dict[str, Tensor]:
        lengths = [stream.h.shape[1] for stream in self.streams.values()]
        return dict(zip(self.names, self.content().split(lengths, 1), strict=True))

    def features(self) -> dict[str, Tensor]:
        return {name: masked_mean(part, self.streams[name].mask) for name, part in self.parts().items()}


def _mask_of(stream: Stream) -> Tensor:
    return stream.h.new_ones(stream.h.shape[:2], dtype=torch.bool) if stream.mask is None else stream.mask


def run(
    backbone: BackboneAdapter,
    streams: Mapping[str, Stream],
    present: Bool[Tensor, "b m"],
    prompting: Prompting | None = None,
    *,
    track: int = 0,
    stop: int | None = None,
    checkpointing: bool = False,
) -> Outcome:
    """All layers of all modalities in step: layer l of the first, of the second, ..., then layer l + 1.

    Args:
        backbone: the adapter.
        streams: embedded tokens by modality.
        present: which modalities each sample has.
        prompting: fresh slots, or None for the backbone as it is.
        track: return the features at the inputs of this many layers.
        stop: run this many layers only.
        checkpointing: recompute layers in the backward pass.
    """
    groups = [streams] if backbone.fused else [{name: stream} for name, stream in streams.items()]
    sequences = [_Sequence(backbone, group) for group in groups]
    features: Features = {name: masked_mean(stream.h, stream.mask) for name, stream in streams.items()}
    depth = prompting.depth if prompting else 0
    tracked, steps = [features], []
    for index in range(max(map(backbone.n_layers, streams)) if stop is None else stop):
        after: dict[str, Tensor] = {}
        for sequence in sequences:
            if index >= backbone.n_layers(sequence.names[0]):
                continue
            if prompting and index < depth:
                gates = {**features, **after} if prompting.order == "sequential" else features
                slots = prompting.make(sequence.names, index, gates, present)
                sequence.insert(slots.tokens, _hidden(backbone, sequence.names, present, prompting.insert))
                sequence.forward(index, checkpointing)
                after |= sequence.features()
                out = sequence.slots_out()
                steps += [Step(m, index, slots.own[m], gates, out, after[m]) for m in sequence.names]
            else:
                sequence.forward(index, checkpointing)
                after |= sequence.features() if index + 1 < track else {}
        features = {**features, **after}
        tracked += [features] if index + 1 < track else []
    content = {name: part for sequence in sequences for name, part in sequence.parts().items()}
    return Outcome(content, tracked, steps)


def _hidden(backbone: BackboneAdapter, names: tuple[str, ...], present: Tensor, insert: Insert) -> Tensor | None:
    """With ``missing_only`` the samples that have all modalities of a sequence do not see its slots."""
    if insert == "all":
        return None
    return present[:, [backbone.modalities.index(name) for name in names]].all(1)
