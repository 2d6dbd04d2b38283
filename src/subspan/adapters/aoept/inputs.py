"""Batches: which inputs belong to which modality, what is missing, and what is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from subspan.adapters.aoept.backbones import BackboneAdapter, Stream


def split_batch(
    backbone: BackboneAdapter, batch: Mapping[str, Any], device: torch.device | str
) -> tuple[dict[str, Tensor], int]:
    """The backbone's inputs among a batch's entries, on the device, and the number of samples.

    Raises:
        ValueError: none of them is there, or they disagree in the number of samples.
    """
    known = [name for modality in backbone.modalities for name in backbone.input_names(modality)]
    inputs = {name: batch[name].to(device) for name in known if batch.get(name) is not None}
    if not inputs:
        given = ", ".join(name for name, x in batch.items() if x is not None) or "none"
        raise ValueError(
            f"a batch needs at least one of {', '.join(known)}; it has {given} (a Trainer drops columns that it does "
            "not know, unless remove_unused_columns=False)"
        )
    sizes = {name: len(x) for name, x in inputs.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"inputs disagree in the number of samples: {sizes}")
    return inputs, next(iter(sizes.values()))


def missing_mask(
    backbone: BackboneAdapter, inputs: Mapping[str, Tensor], missing: Any, size: int, device: torch.device | str
) -> Bool[Tensor, "b m"]:
    """``missing`` checked; without it a modality is missing whose main input was not given.

    Raises:
        TypeError: not boolean.
        ValueError: another shape than (samples, modalities).
    """
    given = [backbone.input_names(modality)[0] in inputs for modality in backbone.modalities]
    if missing is None:
        return torch.tensor([not there for there in given], device=device).expand(size, -1)
    if not isinstance(missing, Tensor) or missing.dtype != torch.bool:
        found = missing.dtype if isinstance(missing, Tensor) else type(missing).__name__
        raise TypeError(f"missing must be a boolean tensor, got {found}: True where a modality is missing")
    wanted = (size, len(backbone.modalities))
    if tuple(missing.shape) != wanted:
        raise ValueError(
            f"missing must have shape {wanted}, a column for each of {', '.join(backbone.modalities)}; got "
            f"{tuple(missing.shape)}"
        )
    return missing.to(device)


def check_finite(backbone: BackboneAdapter, inputs: Mapping[str, Tensor], missing: Tensor, ids: Sequence[Any]) -> None:
    """Refuse NaN and infinity where a modality is said to be there.

    Raises:
        ValueError: names the samples.
    """
    for column, modality in enumerate(backbone.modalities):
        for name in backbone.input_names(modality):
            x = inputs.get(name)
            if x is None or not x.is_floating_point():
                continue
            bad = ~x.isfinite().flatten(1).all(1) & ~missing[:, column]
            if bool(bad.any()):
                names = ", ".join(str(ids[row]) for row in bad.nonzero().flatten().tolist()[:5])
                raise ValueError(
                    f"{name} holds NaN or infinity in samples {names}: mark {modality!r} as missing there, or repair it"
                )


def embedded(
    backbone: BackboneAdapter, inputs: Mapping[str, Tensor], missing: Bool[Tensor, "b m"], prefix: int = 0
) -> dict[str, Stream]:
    """Tokens of every modality; whatever a missing modality holds is replaced before anything reads it."""
    streams = {}
    for column, modality in enumerate(backbone.modalities):
        own = {name: inputs[name] for name in backbone.input_names(modality) if name in inputs}
        blanked = backbone.blank(modality, own, missing[:, column])
        streams[modality] = backbone.embed(modality, blanked, prefix=prefix)
    return streams
