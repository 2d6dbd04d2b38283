"""Tiny backbones of every kind, built from configurations, and batches for them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subspan.adapters import (
    AOEPTConfig,
    AOEPTModel,
    ClipAdapter,
    PrototypeBank,
    TokenEmbedding,
    TorchTowersAdapter,
    Tower,
    ViltAdapter,
)

EOS = 59


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seeded(seed: int, make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def tower(width: int, *, length: int = 5, features: int = 3, layers: int = 3, pooling="first", causal=False) -> Tower:
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
    for p in encoder.parameters():
        if p.ndim > 1:
            nn.init.xavier_uniform_(p)
    embed = TokenEmbedding(features, width, length)
    return Tower(embed, encoder, nn.Linear(width, 6), pooling=pooling, causal=causal)


def towers(widths: Mapping[str, int] | None = None, seed: int = 0, **options: Any) -> TorchTowersAdapter:
    widths = {"text": 16, "image": 24} if widths is None else widths
    made = seeded(seed, lambda: {name: tower(width, **options) for name, width in widths.items()})
    return TorchTowersAdapter(made).double().eval()


def clip(seed: int = 0, **text: Any) -> ClipAdapter:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
            "vocab_size": EOS + 1, "max_position_embeddings": 12, "projection_dim": 12, "bos_token_id": EOS - 1,
            "eos_token_id": EOS, "pad_token_id": EOS, **text,
        },
        vision_config={
            "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 4, "projection_dim": 12,
        },
        projection_dim=12,
    )  # fmt: skip
    return ClipAdapter(seeded(seed, lambda: _spread(CLIPModel(config)).eval()))


def vilt(seed: int = 0) -> ViltAdapter:
    from transformers import ViltConfig, ViltModel

    config = ViltConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=EOS + 1,
        max_position_embeddings=12, image_size=8, patch_size=4, max_image_length=-1,
    )  # fmt: skip
    return ViltAdapter(seeded(seed, lambda: _spread(ViltModel(config)).eval()), blank_ids=(1, 2))


def _spread(model: nn.Module) -> nn.Module:
    """transformers starts at 0.02, where layers hardly do anything: weights of a trained size tell mistakes apart."""
    for p in model.parameters():
        nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    return model


def arrays(count: int, seed: int = 0, names=("text", "image"), length: int = 5, features: int = 3) -> dict[str, Tensor]:
    g = generator(seed)
    return {name: torch.randn(count, length, features, generator=g, dtype=torch.float64) for name in names}


def captions(count: int, seed: int = 0, length: int = 9) -> dict[str, Tensor]:
    """Texts of different lengths that end in EOS, padded with it, and images."""
    g = generator(seed)
    ids = torch.randint(3, EOS - 1, (count, length), generator=g)
    ends = torch.randint(2, length, (count,), generator=g)
    places = torch.arange(length)
    ids[places >= ends[:, None]] = EOS
    pixels = torch.randn(count, 3, 8, 8, generator=g)
    return {"input_ids": ids, "attention_mask": (places <= ends[:, None]).long(), "pixel_values": pixels}


def batch_for(backbone: Any, count: int, seed: int = 0) -> dict[str, Tensor]:
    return (
        arrays(count, seed, backbone.modalities) if isinstance(backbone, TorchTowersAdapter) else captions(count, seed)
    )


def bank_for(backbone: Any, depth: int = 2, prototypes: int = 6, seed: int = 0) -> PrototypeBank:
    g = generator(seed)
    centres = {m: torch.randn(depth, prototypes, backbone.width(m), generator=g) for m in backbone.modalities}
    return PrototypeBank(centres)


def model_for(
    backbone: Any, seed: int = 0, labels: int = 3, problem_type="single_label_classification", **options: Any
) -> AOEPTModel:
    """Depth 2, four prompts, two heads, in the backbone's precision."""
    options = {"prompt_len": 4, "depth": 2, "num_heads": 2, "reduction": 4} | options
    config = AOEPTConfig(**options)
    bank = bank_for(backbone, config.depth) if config.depth else None
    model = AOEPTModel(backbone, bank, config, num_labels=labels, problem_type=problem_type, generator=generator(seed))
    return model.to(next(backbone.parameters()).dtype).eval()


def absent(*rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows).bool()


KINDS = {"towers": towers, "clip": clip, "vilt": vilt}
