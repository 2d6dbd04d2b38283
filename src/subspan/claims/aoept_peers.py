"""Peers of AOEPT: prompts by missing pattern, and imputed features under a linear head."""

from collections.abc import Mapping

import numpy as np
import torch
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from subspan.adapters import (
    AOEPTConfig,
    AOEPTModel,
    BackboneAdapter,
    Stream,
    TokenEmbedding,
    TorchTowersAdapter,
    make_towers,
)
from subspan.adapters.aoept.passes import Features, SlotMaker, Slots


class MissingAwarePrompts(nn.Module):
    """MAPs (Lee et al., CVPR 2023): free prompts for each pattern of missing modalities, layer and sequence."""

    def __init__(self, widths: Mapping[str, int], depth: int, length: int) -> None:
        super().__init__()
        self.modalities = tuple(widths)
        patterns = 2 ** len(widths)
        self.tokens = nn.ParameterDict(
            {name: nn.Parameter(0.02 * torch.randn(patterns, depth, length, d)) for name, d in widths.items()}
        )

    def bind(self) -> SlotMaker:
        def make(names: tuple[str, ...], layer: int, features: Features, present: Tensor) -> Slots:
            weights = 2 ** torch.arange(len(self.modalities))
            pattern = (present.long() * weights).sum(1)
            tokens = self.tokens[names[0]][pattern, layer]
            return Slots(tokens, {name: tokens for name in names})

        return make

    def mean_gates(self) -> dict[str, list[float]]:
        return {}


def missing_aware(backbone: BackboneAdapter, length: int, depth: int, classes: int, seed: int) -> AOEPTModel:
    """The same model and head around prompts by pattern."""
    generator = torch.Generator().manual_seed(seed)
    config = AOEPTConfig(prompt_len=length, depth=depth, mcp="random", alpha=0.0, gate=False)
    model = AOEPTModel(backbone, None, config, num_labels=classes, generator=generator)
    widths = {name: backbone.width(name) for name in backbone.modalities}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.prompts = MissingAwarePrompts(widths, depth, length)
    return model


class OneStream(nn.Module):
    """A small single-stream backbone, as ViLT is one: both views' tokens in one encoder, with one class token.

    It is pre-trained with labels on complete data, as ViLT is on pairs; its last norm trains with the head.
    """

    fused = True

    def __init__(self, shapes: Mapping[str, tuple[int, int]], width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.modalities = tuple(shapes)
        self.embeds = nn.ModuleDict({name: TokenEmbedding(f, width, length) for name, (length, f) in shapes.items()})
        self.encoder = make_towers(shapes, width=width, layers=layers, heads=heads).tower(self.modalities[0]).encoder

    def input_names(self, modality: str) -> tuple[str, ...]:
        return (modality,)

    def width(self, modality: str) -> int:
        return self.encoder.norm.normalized_shape[0]

    def n_layers(self, modality: str) -> int:
        return len(self.encoder.layers)

    pooled_width = width

    def blank(self, modality: str, inputs: Mapping[str, Tensor], missing: Tensor) -> Mapping[str, Tensor]:
        x = inputs[modality]
        return {modality: torch.where(missing[:, None, None], torch.zeros_like(x), x)}

    def embed(self, modality: str, inputs: Mapping[str, Tensor], *, prefix: int = 0) -> Stream:
        return Stream(self.embeds[modality](inputs[modality]))

    def attention(self, modality: str, h: Tensor, keep: Tensor | None) -> None:
        return None

    def layer(self, modality: str, index: int, h: Tensor, attention: None) -> Tensor:
        return self.encoder.layers[index](h)

    def pool(self, modality: str, h: Tensor, stream: Stream) -> Tensor:
        return self.encoder.norm(h[:, 0])

    def trained_modules(self) -> list[nn.Module]:
        return [self.encoder.norm]


def one_stream(views: Mapping[str, Tensor], labels: Tensor, steps: int, seed: int) -> OneStream:
    """Pre-trained by AdamW at 2e-3 on batches of 128."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = OneStream({name: (x.shape[1], x.shape[2]) for name, x in views.items()}, 32, 3, 4)
        head = nn.Linear(32, int(labels.max()) + 1)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], 2e-3)
    for _ in range(steps):
        rows = torch.randperm(len(labels), generator=generator)[:128]
        h = torch.cat([backbone.embed(name, {name: x[rows]}).h for name, x in views.items()], 1)
        for index in range(3):
            h = backbone.layer("", index, h, None)
        loss = cross_entropy(head(backbone.encoder.norm(h[:, 0])), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return backbone.eval()


def imputed_head(kind: str, C: float, seed: int) -> object:
    """Features with NaN where the modality is missing, imputed, scaled, under logistic regression."""
    if kind == "KNN":
        imputer = KNNImputer(n_neighbors=5, keep_empty_features=True)
    else:
        imputer = IterativeImputer(max_iter=3, n_nearest_features=8, random_state=seed, keep_empty_features=True)
    return make_pipeline(imputer, StandardScaler(), LogisticRegression(C=C, max_iter=300))


@torch.no_grad()
def pooled_features(backbone: TorchTowersAdapter, inputs: Mapping[str, Tensor], missing: Tensor) -> np.ndarray:
    """Each tower's projection, NaN where the modality is missing."""
    parts = []
    for column, name in enumerate(backbone.modalities):
        pooled = backbone.tower(name)(inputs[name])
        parts.append(torch.where(missing[:, column, None], torch.nan, pooled))
    return torch.cat(parts, 1).numpy()
