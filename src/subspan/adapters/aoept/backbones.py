"""What AOEPT asks of a backbone, and the adapters for transformers' CLIP and ViLT."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import interpolate

from subspan.errors import MissingExtra


@dataclass(frozen=True)
class Stream:
    """The tokens of one modality at the input of the first layer.

    ``mask`` marks content tokens (None: all are). ``pool_at`` is the token that stands for the whole, by sample.
    """

    h: Float[Tensor, "b s d"]
    mask: Bool[Tensor, "b s"] | None = None
    pool_at: Int64[Tensor, " b"] | None = None


@runtime_checkable
class BackboneAdapter(Protocol):
    """A multimodal transformer, layer by layer. An adapter is an ``nn.Module`` with these methods.

    ``fused`` backbones run all modalities as one sequence, whose first token is the class token of the first modality.
    """

    modalities: tuple[str, ...]
    fused: bool

    def input_names(self, modality: str) -> tuple[str, ...]:
        """Names of the inputs that hold this modality's raw content, the main one first."""
        ...

    def width(self, modality: str) -> int:
        """D of its stream."""
        ...

    def n_layers(self, modality: str) -> int: ...

    def pooled_width(self, modality: str) -> int: ...

    def blank(self, modality: str, inputs: Mapping[str, Tensor], missing: Bool[Tensor, " b"]) -> Mapping[str, Tensor]:
        """The inputs with the rows of ``missing`` replaced as a whole, whatever they hold."""
        ...

    def embed(self, modality: str, inputs: Mapping[str, Tensor], *, prefix: int = 0) -> Stream:
        """Tokens at the input of layer 0. ``prefix``: positions to leave free in front."""
        ...

    def attention(self, modality: str, h: Tensor, keep: Tensor | None) -> Any:
        """The mask that ``layer`` takes, for tokens like ``h`` of which ``keep`` may be attended to."""
        ...

    def layer(self, modality: str, index: int, h: Tensor, attention: Any) -> Tensor: ...

    def pool(self, modality: str, h: Tensor, stream: Stream) -> Tensor:
        """(B, pooled_width) of the last layer's content; a fused backbone is asked for its first modality only."""
        ...

    def trained_modules(self) -> Sequence[nn.Module]:
        """The few parts that train with the head."""
        ...


def attendable(keep: Bool[Tensor, "b s"]) -> Bool[Tensor, "b s"]:
    """The same, but a row that is all padding may attend to its first token: a softmax over nothing is NaN."""
    lone = ~keep.any(1, keepdim=True)
    return keep | (lone & (torch.arange(keep.shape[1], device=keep.device) == 0))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("this backbone needs transformers: pip install 'subspan[tune]'") from error
    return transformers


def _batch(inputs: Mapping[str, Tensor], missing: Tensor, name: str) -> Tensor | None:
    """The main input; None if it was not given, which is fine where every sample lacks it."""
    if name not in inputs and not bool(missing.all()):
        raise ValueError(f"{name} is not given, but missing says that some samples have it")
    return inputs.get(name)


def _blank_text(
    inputs: Mapping[str, Tensor], missing: Tensor, blank_ids: Sequence[int], pad: int
) -> tuple[Tensor, Tensor | None]:
    """Ids and attention mask with the empty text in the rows of ``missing``."""
    ids = _batch(inputs, missing, "input_ids")
    if ids is None:
        ids = torch.full((len(missing), len(blank_ids)), pad, device=missing.device)
    if ids.shape[1] < len(blank_ids):
        raise ValueError(f"texts of {ids.shape[1]} tokens leave no room for the empty text {tuple(blank_ids)}")
    empty = torch.full_like(ids[0], pad)
    empty[: len(blank_ids)] = torch.tensor(blank_ids, device=ids.device)
    mask = inputs.get("attention_mask")
    if mask is not None:
        mask = mask.bool()
    elif "input_ids" not in inputs:
        mask = torch.zeros_like(ids, dtype=torch.bool)
    if mask is not None:
        mask = torch.where(missing[:, None], torch.arange(ids.shape[1], device=ids.device) < len(blank_ids), mask)
    return torch.where(missing[:, None], empty, ids), mask


class ClipAdapter(nn.Module):
    """Two towers: transformers' ``CLIPModel``. Inputs ``input_ids``, ``attention_mask`` and ``pixel_values``.

    Args:
        clip: the model, of a local path, a hub or a configuration.
        blank_ids: the empty text, by default begin and end of text.
        blank_pixel: value of each channel of the missing image; by default black, normalised as OpenAI's CLIP does.
    """

    modalities = ("text", "image")
    fused = False

    def __init__(
        self, clip: nn.Module, *, blank_ids: Sequence[int] | None = None, blank_pixel: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        constants = _transformers().image_utils
        self.clip: Any = clip
        text = self.clip.config.text_config
        # Checkpoints before transformers 4.31 carry token ids that their tokenizer never had: the end of text is the
        # last of the vocabulary, its begin the one before. CLIPModel pools the same way.
        legacy = text.eos_token_id == 2
        self.eos = text.vocab_size - 1 if legacy else text.eos_token_id
        self.blank_ids = tuple(blank_ids or (text.vocab_size - 2 if legacy else text.bos_token_id, self.eos))
        if blank_pixel is None:
            blank_pixel = [-m / s for m, s in zip(constants.OPENAI_CLIP_MEAN, constants.OPENAI_CLIP_STD, strict=True)]
        self.blank_pixel = tuple(blank_pixel)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> "ClipAdapter":
        """From a local folder or the hub, for example ``openai/clip-vit-base-patch16``."""
        return cls(_transformers().CLIPModel.from_pretrained(name), **options)

    def tower(self, modality: str) -> Any:
        return self.clip.text_model if modality == "text" else self.clip.vision_model

    def input_names(self, modality: str) -> tuple[str, ...]:
        return ("input_ids", "attention_mask") if modality == "text" else ("pixel_values",)

    def width(self, modality: str) -> int:
        return self.tower(modality).config.hidden_size

    def n_layers(self, modality: str) -> int:
        return len(self.tower(modality).encoder.layers)

    def pooled_width(self, modality: str) -> int:
        return self.clip.config.projection_dim

    def blank(self, modality: str, inputs: Mapping[str, Tensor], missing: Bool[Tensor, " b"]) -> Mapping[str, Tensor]:
        if modality == "text":
            ids, mask = _blank_text(inputs, missing, self.blank_ids, self.eos)
            return {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
        pixels = _batch(inputs, missing, "pixel_values")
        if pixels is None:
            config = self.clip.vision_model.config
            shape = (len(missing), config.num_channels, config.image_size, config.image_size)
            pixels = self.clip.visual_projection.weight.new_zeros(shape)
        blank = torch.tensor(self.blank_pixel, device=pixels.device, dtype=pixels.dtype)[:, None, None]
        return {"pixel_values": torch.where(missing[:, None, None, None], blank, pixels)}

    def embed(self, modality: str, inputs: Mapping[str, Tensor], *, prefix: int = 0) -> Stream:
        tower = self.tower(modality)
        if modality == "image":
            return Stream(tower.pre_layrnorm(tower.embeddings(inputs["pixel_values"])))
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        length = ids.shape[1]
        if mask is None:  # in a causal tower nothing sees what follows the end of text
            mask = torch.arange(length, device=ids.device) <= self._end_of_text(ids, None)[:, None]
        mask, table = mask.bool(), tower.embeddings
        if not prefix:
            h = table(input_ids=ids)
        else:
            places = table.position_embedding.weight
            size = (len(places) + prefix, places.shape[1])
            stretched = interpolate(places[None, None], size=size, mode="bilinear")[0, 0]
            h = table.token_embedding(ids) + stretched[prefix : prefix + length]
        return Stream(h, mask, self._end_of_text(ids, mask))

    def _end_of_text(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """The first end-of-text token, or the last valid token of a text that was cut."""
        found = ids == self.eos
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        last = places.amax(1) if mask is None else torch.where(mask, places, 0).amax(1)
        return torch.where(found.any(1), found.int().argmax(1), last)

    def attention(self, modality: str, h: Tensor, keep: Tensor | None) -> Any:
        from transformers import masking_utils

        mask = None if keep is None else attendable(keep)
        about: dict[str, Any] = {"config": self.tower(modality).config, "inputs_embeds": h, "attention_mask": mask}
        if modality == "text":
            return masking_utils.create_causal_mask(cache=None, **about)
        return masking_utils.create_bidirectional_mask(**about)

    def layer(self, modality: str, index: int, h: Tensor, attention: Any) -> Tensor:
        options = {"is_causal": True} if modality == "text" else {}
        return self.tower(modality).encoder.layers[index](h, attention, **options)

    def pool(self, modality: str, h: Tensor, stream: Stream) -> Tensor:
        if modality == "text":
            rows = torch.arange(len(h), device=h.device)
            return self.clip.text_projection(self.clip.text_model.final_layer_norm(h[rows, stream.pool_at]))
        return self.clip.visual_projection(self.clip.vision_model.post_layernorm(h[:, 0]))

    def trained_modules(self) -> Sequence[nn.Module]:
        clip = self.clip
        norms = clip.text_model.final_layer_norm, clip.vision_model.post_layernorm
        return cast(list[nn.Module], [clip.text_projection, clip.visual_projection, *norms])


class ViltAdapter(nn.Module):
    """One stream: transformers' ``ViltModel``, with its pooler.

    Inputs ``input_ids``, ``attention_mask``, ``token_type_ids``, ``pixel_values`` and ``pixel_mask``.

    Args:
        vilt: the model, of a local path, a hub or a configuration.
        blank_ids: the empty text, by default [CLS] and [SEP] of BERT's uncased vocabulary.
        blank_pixel: value of the missing image, a square of the model's own image size.

    Raises:
        ValueError: a model without a pooler.
    """

    modalities = ("text", "image")
    fused = True

    def __init__(self, vilt: nn.Module, *, blank_ids: Sequence[int] = (101, 102), blank_pixel: float = 1.0) -> None:
        super().__init__()
        self.vilt: Any = vilt
        if self.vilt.pooler is None:
            raise ValueError("this ViltModel has no pooler: load it with add_pooling_layer=True")
        self.blank_ids, self.blank_pixel = tuple(blank_ids), blank_pixel

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> "ViltAdapter":
        """From a local folder or the hub, for example ``dandelin/vilt-b32-mlm``."""
        return cls(_transformers().ViltModel.from_pretrained(name), **options)

    def input_names(self, modality: str) -> tuple[str, ...]:
        names = {
            "text": ("input_ids", "attention_mask", "token_type_ids"),
            "image": ("pixel_values", "pixel_mask"),
        }
        return names[modality]

    def width(self, modality: str) -> int:
        return self.vilt.config.hidden_size

    def n_layers(self, modality: str) -> int:
        return len(self.vilt.encoder.layer)

    def pooled_width(self, modality: str) -> int:
        return self.vilt.config.hidden_size

    def blank(self, modality: str, inputs: Mapping[str, Tensor], missing: Bool[Tensor, " b"]) -> Mapping[str, Tensor]:
        if modality == "text":
            ids, mask = _blank_text(inputs, missing, self.blank_ids, self.vilt.config.pad_token_id or 0)
            mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            kinds = inputs.get("token_type_ids", torch.zeros_like(ids))
            kinds = torch.where(missing[:, None], 0, kinds)
            return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}
        size = self.vilt.config.image_size
        pixels = _batch(inputs, missing, "pixel_values")
        if pixels is None:
            shape = (len(missing), self.vilt.config.num_channels, size, size)
            pixels = self.vilt.pooler.dense.weight.new_zeros(shape)
        mask = inputs.get("pixel_mask", torch.ones_like(pixels[:, 0], dtype=torch.int64))
        # The same square in every batch, however large its other images are.
        square = torch.zeros_like(mask[0])
        square[:size, :size] = 1
        return {
            "pixel_values": torch.where(missing[:, None, None, None], self.blank_pixel, pixels),
            "pixel_mask": torch.where(missing[:, None, None], square, mask),
        }

    def embed(self, modality: str, inputs: Mapping[str, Tensor], *, prefix: int = 0) -> Stream:
        if prefix:
            raise ValueError("prompt_positions='interpolate' is CLIP's: use 'none'")
        table = self.vilt.embeddings
        kind = table.token_type_embeddings.weight[0 if modality == "text" else 1]
        if modality == "text":
            h = table.text_embeddings(input_ids=inputs["input_ids"], token_type_ids=inputs["token_type_ids"])
            return Stream(h + kind, inputs["attention_mask"].bool())
        h, mask, (places, (_, columns)) = table.visual_embed(
            inputs["pixel_values"], inputs["pixel_mask"], max_image_length=self.vilt.config.max_image_length
        )
        # ViLT shuffles the patches. Sorted again, a sample gives the same bits whatever the generator's state is.
        order = (places[..., 0] * columns + places[..., 1]).argsort(dim=1, stable=True) + 1
        order = torch.cat([torch.zeros_like(order[:, :1]), order], 1)
        h = h.gather(1, order[..., None].expand_as(h)) + kind
        return Stream(h, mask.gather(1, order).bool())

    def attention(self, modality: str, h: Tensor, keep: Tensor | None) -> Any:
        from transformers.masking_utils import create_bidirectional_mask

        mask = None if keep is None else attendable(keep)
        return create_bidirectional_mask(config=self.vilt.config, inputs_embeds=h, attention_mask=mask)

    def layer(self, modality: str, index: int, h: Tensor, attention: Any) -> Tensor:
        return self.vilt.encoder.layer[index](h, attention)[0]

    def pool(self, modality: str, h: Tensor, stream: Stream) -> Tensor:
        return self.vilt.pooler(self.vilt.layernorm(h))

    def trained_modules(self) -> Sequence[nn.Module]:
        return [self.vilt.pooler]
