"""Claim: one factorisation of all experts on a grid corrects 2-bit residuals as well as private factors several times
its size, or better than private ones of its own size, where experts share structure.

E1 plants a grid: experts whose input side comes from four factors and whose output side comes from four others, hidden
by a random permutation. E2 trains Mixtral's own code on Python source, byte by byte, and compresses all its experts.
"""

import copy
import math
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.resize import (
    Moments,
    TileQConfig,
    TileQLinear,
    calibrated_layers,
    fit_projection,
)

GPTQ, RTN = "GPTQ alone", "rounding to nearest"
EQUAL, LARGE = "private factors, equal memory", "private factors, equal rank"
SIDED = "one-sided sharing, equal rank"
INDEX, RAW, OURS, BEST = "TileQ, index order", "TileQ, raw vectors", "TileQ, projectors", "TileQ, best of"
NEAREST, VECTORS = "TileQ, best of, rounded to nearest", "TileQ, best of, GPTVQ"

PLANTED, TRAINED = "planted grid", "trained Mixtral"


def variants(base: TileQConfig, private: int) -> dict[str, tuple[TileQConfig, bool]]:
    """What is compared, and whether each expert is compressed by itself; ``private`` is the rank of equal memory."""
    none, one = replace(base, rank=0), replace(base, grid=(1, 1))
    clusters = replace(base, placement="clusters")
    experts = math.prod(base.grid)  # pyright: ignore[reportArgumentType]
    return {
        GPTQ: (none, False),
        RTN: (replace(none, quantizer="rtn"), False),
        EQUAL: (replace(one, rank=private), True),
        LARGE: (one, True),
        SIDED: (replace(base, grid=(1, experts)), False),
        INDEX: (replace(base, placement="index"), False),
        RAW: (replace(clusters, features="vectors"), False),
        OURS: (replace(clusters, features="projector"), False),
        BEST: (base, False),
    }


def restored(
    projection: str, weights: Tensor, moments: Moments, config: TileQConfig, private: bool
) -> tuple[Tensor, int, int]:
    """The weights that a compressed projection stands for, the bytes it stores, and those of its factors."""
    if private:
        parts = [
            restored(projection, weights[e : e + 1], only(moments, e), config, False) for e in range(len(weights))
        ]
        return torch.cat([p[0] for p in parts]), sum(p[1] for p in parts), sum(p[2] for p in parts)
    stored, fit = fit_projection(projection, weights, moments, config)
    linear = TileQLinear(projection, *weights.shape, config)
    linear.load_state_dict(stored)
    factors = sum(stored[name].nbytes for name in ("U", "V") if name in stored)
    return torch.stack([linear.dequantize(e) for e in range(len(weights))]), fit.nbytes, factors


def only(moments: Moments, e: int) -> Moments:
    return Moments(moments.count[e : e + 1], moments.mean_abs[e : e + 1], moments.hessian[e : e + 1])


# ---- E1


def planted(seed: int, smoke: bool) -> list[Row]:
    """E1: 16 experts (96 x 64) on a 4 x 4 grid of factors of rank 24; relative output error on their own inputs."""
    from sklearn.metrics import adjusted_rand_score

    from subspan.resize import activation_scale, place_experts

    weights, inputs, true = planted_experts(seed)
    moments = Moments.of(list(inputs))
    base = TileQConfig(
        bits=2, rank=24, grid=(4, 4), group_size=32, scale_exponent=1.0, scale_sharing="expert", rotation=False, seed=seed
    )
    rows, setting = [], {"model": PLANTED}
    truth = (inputs @ weights.mT).square().sum()
    for name, (config, private) in variants(base, private=6).items():
        found, nbytes, factors = restored("gate", weights, moments, config, private)
        error = float(((inputs @ (weights - found).mT).square().sum() / truth).sqrt())
        rows += [
            Row(name, setting, "relative output error", seed, error),
            Row(name, setting, "bits per weight", seed, 8 * nbytes / weights.numel()),
            Row(name, setting, "bits of factors", seed, 8 * factors / weights.numel()),
        ]
    scales = activation_scale(moments.mean_abs, 1.0)
    for name, kind in ((OURS, "projector"), (RAW, "vectors")):
        cells = place_experts(weights, scales, (4, 4), 24, kind=kind, seed=seed)
        for side, index in (("rows", 0), ("columns", 1)):
            rand = adjusted_rand_score(true[:, index], cells[:, index])
            rows.append(Row(name, setting, f"adjusted Rand index of {side}", seed, float(rand)))
    return rows


def planted_experts(seed: int, k: int = 16, p: int = 64, q: int = 96, latent: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (k x q x p), inputs (k x 256 x p) and the cell of each expert."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    side = round(k**0.5)
    spectrum = torch.arange(1, latent + 1) ** -0.5
    left, right = normal(side, p, latent), normal(side, latent, q)
    cells = torch.stack([torch.arange(k) // side, torch.arange(k) % side], 1)[torch.randperm(k, generator=generator)]
    weights = []
    for i, j in cells.tolist():
        noise = 0.15 * (spectrum[:, None] * spectrum).sqrt() * normal(latent, latent) / latent**0.5
        w = left[i] @ (torch.diag(spectrum) + noise) @ right[j]
        weights.append(0.02 * (w / w.square().mean().sqrt() + 0.35 * normal(p, q)).mT)
    inputs = normal(k, 256, p) * torch.exp(0.7 * normal(p))
    return torch.stack(weights), inputs, cells


# ---- E2


@cache
def source_text() -> Tensor:
    """The first 3 MB of the Python standard library's own source, as bytes."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= 3_000_000:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:3_000_000]), dtype=torch.uint8).long()


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    start = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[start + torch.arange(length)]


def trained_model(seed: int, steps: int, batch: int = 32, length: int = 64) -> nn.Module:
    """A Mixtral of two layers and 16 experts, which start as one feed-forward network plus noise (upcycled)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    shape = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=16, num_experts_per_tok=2, max_position_embeddings=length,
        output_router_logits=True, router_aux_loss_coef=0.01, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(shape)
    with torch.no_grad():
        for name, w in model.named_parameters():
            if ".experts." in name:
                w.copy_(w[:1] + 0.5 * w.std() * torch.randn_like(w))
    text = source_text()
    train = text[: int(0.9 * len(text))]
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = windows(train, batch, length, generator)
        optimizer.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def loss(model: Any, text: Tensor, length: int = 64, batch: int = 256) -> float:
    """Nats per byte, on whole windows."""
    x = text[: len(text) // length * length].view(-1, length)
    total = 0.0
    for part in x.split(batch):
        logits = model(input_ids=part, output_router_logits=False).logits[:, :-1]
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / (x.shape[0] * (length - 1))


@torch.no_grad()
def compressed(model: nn.Module, batches: list[Tensor], config: TileQConfig, private: bool) -> tuple[nn.Module, int, int]:
    """A copy with the weights that the compressed experts stand for, the bytes stored, and those of the factors."""
    model = copy.deepcopy(model)
    total, factors = 0, 0
    for stage in calibrated_layers(model, batches, config):
        assert stage.moments is not None
        for projection, w in stage.experts.weights.items():
            found, stored, own = restored(projection, w, stage.moments[projection], config, private)
            w.copy_(found)  # a view of the model's weights: the next layer sees what this one gives now
            total, factors = total + stored, factors + own
    return model, total, factors


def trained(seed: int, smoke: bool, *, exponent: float = 1.0) -> list[Row]:
    """E2: increase of the held-out loss of a byte-level Mixtral when its experts go to two bits."""
    model = trained_model(seed, steps=20 if smoke else 1200)
    text, generator = source_text(), torch.Generator().manual_seed(seed)
    train, held = text[: int(0.9 * len(text))], text[int(0.95 * len(text)) :]
    held = held[:2000] if smoke else held
    batches = [windows(train, 32, 64, generator) for _ in range(2 if smoke else 16)]
    base = TileQConfig(
        bits=2, rank=16, grid=(4, 4), group_size=32, scale_exponent=exponent, rotation=False, seed=seed
    )
    weights = sum(w.numel() for name, w in model.named_parameters() if ".experts." in name)
    full, setting, rows = loss(model, held), {"model": TRAINED}, []
    rows.append(Row("full precision", setting, "held-out nats per byte", seed, full))
    every = variants(base, private=4)
    every[NEAREST] = (replace(base, quantizer="rtn"), False)
    every[VECTORS] = (replace(base, quantizer="gptvq"), False)
    for name, (config, private) in every.items():
        found, nbytes, factors = compressed(model, batches, config, private)
        rows += [
            Row(name, setting, "increase of held-out loss", seed, loss(found, held) - full),
            Row(name, setting, "bits per weight", seed, 8 * nbytes / weights),
            Row(name, setting, "bits of factors", seed, 8 * factors / weights),
        ]
    return rows
