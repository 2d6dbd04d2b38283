"""Any ``nn.TransformerEncoder`` as a tower, two or more of them as a backbone, and their contrastive pre-training."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from subspan.adapters.aoept.backbones import Stream, attendable
from subspan.adapters.aoept.prompts import bounded_scale, masked_mean
from subspan.adapters.aoept.seeding import seeded

Pooling = Literal["first", "mean", "last"]


class TokenEmbedding(nn.Module):
    """Arrays (B, S, F) as tokens (B, 1 + S, width): a linear map, positions, and a class token in front."""

    def __init__(self, features: int, width: int, length: int) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(features, width)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + length, width))

    def forward(self, x: Float[Tensor, "b s f"]) -> Float[Tensor, "b s1 d"]:
        tokens = torch.cat([self.first.expand(len(x), -1, -1), self.linear(x)], 1)
        return tokens + self.positions[:, : tokens.shape[1]]


class Tower(nn.Module):
    """One modality: ``embed``, an ``nn.TransformerEncoder``, pooling and a projection.

    Args:
        embed: maps the modality's input (B, S, ...) to tokens (B, S', D) with their positions; tokens it adds come
            first and are always valid.
        encoder: built with ``batch_first=True``; its final norm, if any, comes before pooling.
        project: of the pooled token (identity if None); with the encoder's final norm it trains with the head.
        pooling: "first" token, "mean" of the valid ones or the "last" valid one.
        causal: tokens see only what is before them.

    Raises:
        ValueError: an encoder with ``batch_first=False``, or an unknown pooling.
    """

    def __init__(
        self,
        embed: nn.Module,
        encoder: nn.TransformerEncoder,
        project: nn.Module | None = None,
        *,
        pooling: Pooling = "first",
        causal: bool = False,
    ) -> None:
        super().__init__()
        attention: Any = encoder.layers[0].self_attn
        if not attention.batch_first:
            raise ValueError("the tower's encoder must be built with batch_first=True")
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
        self.embed, self.encoder, self.project = embed, encoder, project or nn.Identity()
        self.pooling, self.causal, self.width = pooling, causal, int(attention.embed_dim)

    def stream(self, x: Tensor, mask: Tensor | None) -> Stream:
        h = self.embed(x)
        added = h.shape[1] - x.shape[1]
        if mask is not None:
            mask = torch.cat([mask.new_ones(len(mask), added).bool(), mask.bool()], 1)
        return Stream(h, mask)

    def masks(self, h: Tensor, keep: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What an encoder layer takes: the causal mask and the padding, True where attention is forbidden."""
        length = h.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=h.device).triu(1) if self.causal else None
        return causal, None if keep is None else ~attendable(keep)

    def pooled(self, h: Tensor, mask: Tensor | None) -> Tensor:
        norm = self.encoder.norm
        h = h if norm is None else norm(h)
        if self.pooling == "mean":
            pooled = masked_mean(h, mask).to(h.dtype)
        elif self.pooling == "first" or mask is None:
            pooled = h[:, 0 if self.pooling == "first" else -1]
        else:
            last = torch.where(mask, torch.arange(h.shape[1], device=h.device), 0).amax(1)
            pooled = h[torch.arange(len(h), device=h.device), last]
        return self.project(pooled)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Float[Tensor, "b p"]:
        """The tower alone, as it is pre-trained."""
        stream = self.stream(x, mask)
        causal, padding = self.masks(stream.h, stream.mask)
        h = stream.h
        for layer in self.encoder.layers:  # the encoder's own forward would apply its norm before the slots are cut
            h = layer(h, src_mask=causal, src_key_padding_mask=padding)
        return self.pooled(h, stream.mask)


class TorchTowersAdapter(nn.Module):
    """Two or more towers. Inputs are named as the modalities, with an optional boolean ``NAME_mask`` (B, S) each.

    A missing modality is a blank of zeros; where masks are in use, one single blank token.

    Raises:
        ValueError: fewer than two towers.
    """

    fused = False

    def __init__(self, towers: Mapping[str, Tower]) -> None:
        super().__init__()
        if len(towers) < 2:
            raise ValueError(f"a multimodal backbone needs two towers at least, got {len(towers)}")
        self.modalities = tuple(towers)
        self.towers = nn.ModuleDict(towers)

    def tower(self, modality: str) -> Any:
        return self.towers[modality]

    def input_names(self, modality: str) -> tuple[str, ...]:
        return modality, f"{modality}_mask"

    def width(self, modality: str) -> int:
        return self.tower(modality).width

    def n_layers(self, modality: str) -> int:
        return len(self.tower(modality).encoder.layers)

    def pooled_width(self, modality: str) -> int:
        project = self.tower(modality).project
        return getattr(project, "out_features", self.width(modality))

    def blank(self, modality: str, inputs: Mapping[str, Tensor], missing: Bool[Tensor, " b"]) -> Mapping[str, Tensor]:
        if modality not in inputs:
            raise ValueError(f"{modality!r} is not given: where all samples lack it, give zeros of its usual shape")
        x, mask = inputs[modality], inputs.get(f"{modality}_mask")
        out = {modality: torch.where(missing.view(-1, *[1] * (x.ndim - 1)), torch.zeros_like(x), x)}
        if mask is not None:
            lone = torch.arange(mask.shape[1], device=mask.device) == 0
            out[f"{modality}_mask"] = torch.where(missing[:, None], lone, mask.bool())
        return out

    def embed(self, modality: str, inputs: Mapping[str, Tensor], *, prefix: int = 0) -> Stream:
        if prefix:
            raise ValueError("prompt_positions='interpolate' is CLIP's: use 'none'")
        return self.tower(modality).stream(inputs[modality], inputs.get(f"{modality}_mask"))

    def attention(self, modality: str, h: Tensor, keep: Tensor | None) -> Any:
        return self.tower(modality).masks(h, keep)

    def layer(self, modality: str, index: int, h: Tensor, attention: Any) -> Tensor:
        causal, padding = attention
        return self.tower(modality).encoder.layers[index](h, src_mask=causal, src_key_padding_mask=padding)

    def pool(self, modality: str, h: Tensor, stream: Stream) -> Tensor:
        return self.tower(modality).pooled(h, stream.mask)

    def trained_modules(self) -> Sequence[nn.Module]:
        parts = [(self.tower(name).project, self.tower(name).encoder.norm) for name in self.modalities]
        return [part for pair in parts for part in pair if part is not None]


def make_towers(
    shapes: Mapping[str, tuple[int, int]],
    *,
    width: int = 32,
    layers: int = 3,
    heads: int = 4,
    generator: torch.Generator | None = None,
) -> TorchTowersAdapter:
    """Small pre-norm towers for arrays of tokens (length, features) by modality, to be pre-trained here."""

    def tower(length: int, features: int) -> Tower:
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        for parameter in encoder.parameters():  # the layers are copies of one: give each its own start
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        return Tower(TokenEmbedding(features, width, length), encoder, nn.Linear(width, width))

    with seeded(generator):
        return TorchTowersAdapter({name: tower(*shape) for name, shape in shapes.items()})


def contrastive_pretrain(
    backbone: TorchTowersAdapter,
    arrays: Mapping[str, Tensor],
    *,
    steps: int,
    batch_size: int = 128,
    lr: float = 2e-3,
    generator: torch.Generator | None = None,
) -> list[float]:
    """Bring the towers' projections of one sample together, and those of different samples apart, as CLIP does.

    Args:
        backbone: trained in place; every pair of towers is compared, both ways.
        arrays: inputs of complete training samples, with their masks; no labels are read.
        steps: of AdamW.
        batch_size: samples a step, with replacement between steps only.
        lr: learning rate, with a linear warm-up over a tenth of the steps.
        generator: of the batches.

    Returns:
        The loss of every step.

    Raises:
        ValueError: fewer than two samples, which have nothing to be told apart from.
    """
    count = len(arrays[backbone.modalities[0]])
    if count < 2:
        raise ValueError(f"contrastive pre-training needs at least two complete samples, got {count}")
    log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07), device=next(backbone.parameters()).device))
    optimizer = torch.optim.AdamW([*backbone.parameters(), log_scale], lr)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (0.1 * steps + 1)))
    losses = []
    backbone.train()
    for _ in range(steps):
        rows = torch.randperm(count, generator=generator)[:batch_size]
        batch = {name: x[rows.to(x.device)] for name, x in arrays.items()}
        unit = [normalize(backbone.tower(m)(batch[m], batch.get(f"{m}_mask")), dim=-1) for m in backbone.modalities]
        terms = [_symmetric(a, b, bounded_scale(log_scale)) for a, b in combinations(unit, 2)]
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        losses.append(float(loss.detach()))
    backbone.eval()
    return losses


def _symmetric(a: Float[Tensor, "b d"], b: Float[Tensor, "b d"], scale: Tensor) -> Tensor:
    logits = scale * a @ b.T
    own = torch.arange(len(a), device=a.device)
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
