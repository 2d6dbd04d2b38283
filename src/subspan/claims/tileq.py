"""Claim: one factorisation of all experts on a grid corrects 2-bit residuals as well as private factors several times
its size, or better than private ones of its own size, where experts share structure.

E1 plants a grid: experts whose input side comes from four factors and whose output side comes from four others, hidden
by a random permutation. E2 trains Mixtral's own code on Python source, byte by byte, and compresses all its experts.
"""

import copy
import math
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subspan.claims.claim import Cell, Claim, MissingResults, Plot, Results, Row, Statement
from subspan.resize import (
    Moments,
    TileQConfig,
    TileQLinear,
    activation_scale,
    calibrated_layers,
    fit_projection,
    place_experts,
)
from subspan.resize.tileq.config import Features

GPTQ, RTN = "GPTQ alone", "rounding to nearest"
EQUAL, LARGE = "private factors, equal memory", "private factors, equal rank"
SIDED = "one-sided sharing, equal rank"
INDEX, RAW, OURS, BEST = "TileQ, index order", "TileQ, raw vectors", "TileQ, projectors", "TileQ, best of"
NEAREST, VECTORS = "TileQ, best of, rounded to nearest", "TileQ, best of, GPTVQ"

PLANTED, UPCYCLED, SCRATCH = "planted grid", "upcycled Mixtral", "Mixtral from random copies"
ERROR, LOSS = "relative output error", "increase of held-out loss"
BITS, FACTORS = "bits per weight", "bits of factors"

# Bytes of a window of text; exponent of the activation scale, that of the specification's planted grid.
LENGTH, EXPONENT = 64, 1.0


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


@dataclass(frozen=True)
class Cost:
    """Bytes of all that is stored, and of the factors, for some weights."""

    stored: int
    factors: int
    weights: int

    @classmethod
    def total(cls, parts: Iterable["Cost"]) -> "Cost":
        return cls(*map(sum, zip(*((c.stored, c.factors, c.weights) for c in parts), strict=True)))

    def rows(self, name: str, setting: dict[str, Any], seed: int) -> list[Row]:
        bits = {BITS: self.stored, FACTORS: self.factors}
        return [Row(name, setting, metric, seed, 8 * nbytes / self.weights) for metric, nbytes in bits.items()]


def restored(
    projection: str, weights: Tensor, moments: Moments, config: TileQConfig, private: bool
) -> tuple[Tensor, Cost]:
    """The weights that a compressed projection stands for, and what it costs."""
    if private:
        parts = [restored(projection, weights[e : e + 1], only(moments, e), config, False) for e in range(len(weights))]
        return torch.cat([w for w, _ in parts]), Cost.total(cost for _, cost in parts)
    stored, fit = fit_projection(projection, weights, moments, config)
    linear = TileQLinear(projection, *fit.shape, config)
    linear.load_state_dict(stored)
    factors = sum(stored[name].nbytes for name in ("U", "V") if name in stored)
    whole = torch.stack([linear.dequantize(e) for e in range(len(weights))])
    return whole, Cost(fit.nbytes, factors, fit.weights)


def only(moments: Moments, e: int) -> Moments:
    return Moments(moments.count[e : e + 1], moments.mean_abs[e : e + 1], moments.hessian[e : e + 1])


# ---- E1


def planted(seed: int, smoke: bool, *, draw: int) -> list[Row]:
    """E1: 16 experts (96 x 64) on a 4 x 4 grid of factors of rank 24; relative output error on their own inputs."""
    from sklearn.metrics import adjusted_rand_score

    weights, inputs, true = planted_experts(10 * seed + draw)
    moments = Moments.of(list(inputs))
    base = TileQConfig(
        bits=2, rank=24, grid=(4, 4), group_size=32, scale_exponent=1.0, scale_sharing="expert", rotation=False,
        seed=seed,
    )  # fmt: skip
    rows, setting = [], {"model": PLANTED, "draw": draw}
    truth = (inputs @ weights.mT).square().sum()
    for name, (config, private) in variants(base, private=6).items():
        found, cost = restored("gate", weights, moments, config, private)
        error = float(((inputs @ (weights - found).mT).square().sum() / truth).sqrt())
        rows += [Row(name, setting, ERROR, seed, error), *cost.rows(name, setting, seed)]
    scales = activation_scale(moments.mean_abs, 1.0)
    kinds: dict[str, Features] = {OURS: "projector", RAW: "vectors"}
    for name, kind in kinds.items():
        cells = place_experts(weights, scales, (4, 4), 24, kind=kind, seed=seed)
        for side, index in (("rows", 0), ("columns", 1)):
            rand = adjusted_rand_score(true[:, index], cells[:, index])
            rows.append(Row(name, setting, f"adjusted Rand index of {side}", seed, float(rand)))
    return rows


def planted_experts(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (k x q x p), inputs (k x 256 x p) and the cell of each expert."""
    k, side, p, q, latent = 16, 4, 64, 96, 24
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

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
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(path.read_bytes() for path in files)[:3_000_000])
    return torch.frombuffer(text, dtype=torch.uint8).long()


def split(smoke: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Text to train and calibrate on, to choose settings on, and to report on: the first 90 %, 5 % and 5 %."""
    text = source_text()
    n = len(text)
    train, validation, test = text[: int(0.9 * n)], text[int(0.9 * n) : int(0.95 * n)], text[int(0.95 * n) :]
    return train, validation, test[:2000] if smoke else test


def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    start = torch.randint(len(text) - LENGTH, (count, 1), generator=generator)
    return text[start + torch.arange(LENGTH)]


def mixtral(experts: int, layers: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=experts, num_experts_per_tok=min(2, experts),
        max_position_embeddings=LENGTH, output_router_logits=True, router_aux_loss_coef=0.01, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return MixtralForCausalLM(shape)


def fit(model: Any, steps: int, text: Tensor, generator: torch.Generator) -> None:
    """AdamW in batches of 32 windows, one cycle of the rate."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        x = windows(text, 32, generator)
        optimizer.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def trained_model(seed: int, smoke: bool, upcycled: bool) -> nn.Module:
    """A Mixtral of two layers and 16 experts, trained for 1200 steps, whose experts start as noisy copies of one.

    Upcycled, that one comes from a dense network trained for the first 800 steps; otherwise it is as random as the
    rest, and all steps train the experts.
    """
    torch.manual_seed(seed)
    steps, experts, layers = (24, 4, 1) if smoke else (1200, 16, 2)
    train, _, _ = split(smoke)
    generator = torch.Generator().manual_seed(seed)
    model, known, noise, before = mixtral(experts, layers), {}, 0.5, 0
    if upcycled:
        dense, noise, before = mixtral(1, layers), 0.1, 2 * steps // 3
        fit(dense, before, train, generator)
        known = dict(dense.named_parameters())
    with torch.no_grad():
        for name, w in model.named_parameters():
            start = known.get(name, w)
            if ".experts." in name:
                w.copy_(start[:1] + noise * start.std() * torch.randn_like(w))
            elif start.shape == w.shape:  # all but the router
                w.copy_(start)
    fit(model, steps - before, train, generator)
    return model.eval()


@torch.no_grad()
def loss(model: Any, text: Tensor) -> float:
    """Nats per byte, on windows side by side."""
    x = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    total = 0.0
    for part in x.split(256):
        logits = model(input_ids=part, output_router_logits=False).logits[:, :-1]
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / (len(x) * (LENGTH - 1))


@torch.no_grad()
def compressed(model: nn.Module, batches: list[Tensor], config: TileQConfig, private: bool) -> tuple[nn.Module, Cost]:
    """A copy with the weights that the compressed experts stand for, and what those cost."""
    model, costs = copy.deepcopy(model), []
    for stage in calibrated_layers(model, batches, config):
        assert stage.moments is not None
        for projection, w in stage.experts.weights.items():
            found, cost = restored(projection, w, stage.moments[projection], config, private)
            w.copy_(found)  # a view of the model's weights: the next layer sees what this one gives now
            costs.append(cost)
    return model, Cost.total(costs)


def trained(seed: int, smoke: bool, *, upcycled: bool) -> list[Row]:
    """E2: increase of the held-out loss of a byte-level Mixtral when its experts go to two bits."""
    model = trained_model(seed, smoke, upcycled)
    train, _, held = split(smoke)
    generator = torch.Generator().manual_seed(seed)
    batches = [windows(train, 32, generator) for _ in range(2 if smoke else 16)]
    base = TileQConfig(
        bits=2, rank=16, grid=(2, 2) if smoke else (4, 4), group_size=32, scale_exponent=EXPONENT, rotation=False,
        seed=seed,
    )  # fmt: skip
    full, setting = loss(model, held), {"model": UPCYCLED if upcycled else SCRATCH}
    every = variants(base, private=4) | {
        NEAREST: (replace(base, quantizer="rtn"), False),
        VECTORS: (replace(base, quantizer="gptvq"), False),
    }
    rows = [Row("full precision", setting, "held-out nats per byte", seed, full)]
    for name, (config, private) in every.items():
        found, cost = compressed(model, batches, config, private)
        rows.append(Row(name, setting, LOSS, seed, loss(found, held) - full))
        rows += cost.rows(name, setting, seed)
    return rows


def cells(smoke: bool) -> list[Cell]:
    draws = [Cell(f"{PLANTED} {draw}", planted, {"draw": draw}) for draw in range(1 if smoke else 3)]
    return [*draws, *(Cell(f"Mixtral {upcycled}", trained, {"upcycled": upcycled}) for upcycled in (True, False))]


# ---- statements


def ratios(ours: str, other: str, metric: str, model: str) -> Callable[[Results], np.ndarray]:
    """Ours over the other's, by seed and draw."""

    def measure(r: Results) -> np.ndarray:
        found = []
        for method in (ours, other):
            rows = r.where(method, metric, model=model)
            if not len(rows):
                raise MissingResults(f"no {metric!r} of {method!r}")
            found.append([row.value for row in sorted(rows, key=lambda row: (row.seed, row.setting.get("draw", 0)))])
        return np.array(found[0]) / np.array(found[1])

    return measure


def worst(other: str, metric: str = ERROR) -> Callable[[Results], float]:
    return lambda r: float(ratios(OURS, other, metric, PLANTED)(r).max())


def mean_increase(other: str, model: str) -> Callable[[Results], float]:
    """Ratio of the mean increases of the loss."""
    return lambda r: float(r.values(BEST, LOSS, model=model).mean() / r.values(other, LOSS, model=model).mean())


def recovered(r: Results) -> float:
    """The least adjusted Rand index of rows and columns."""
    return min(row.value for row in r.where(OURS, model=PLANTED) if row.metric.startswith("adjusted Rand"))


STATEMENTS = (
    Statement("planted grid: rows and columns are found, every time", recovered, 1.0),
    Statement("error over private factors of equal memory, at worst", worst(EQUAL), 0.70, "<="),
    Statement("error over the same grid in index order, at worst", worst(INDEX), 0.65, "<="),
    Statement("error over one-sided sharing of equal rank, at worst", worst(SIDED), 1.10, "<="),
    Statement("with this share of its factors' memory", worst(SIDED, FACTORS), 0.401, "<="),
    Statement("error over GPTQ alone, at worst", worst(GPTQ), 0.40, "<="),
    *(
        Statement(f"{model}: increase of the loss over that of {other}", mean_increase(other, model), bar, "<=")
        for model in (UPCYCLED, SCRATCH)
        for other, bar in ((GPTQ, 0.90), (EQUAL, 1.00), (SIDED, 1.25), (RTN, 0.90))
    ),
)

NOTES = """\
Planted grids favour the method by construction; a trained model does not. Upcycled experts share the network that they
were copied from; copies of a random one soon share little. The held-out loss is of a small byte-level model: two
layers, 16 experts of 64 x 128, groups of 32. At this size the factors cost 0.75 bit per weight and levels 0.56; in a
model of real size 0.04 and 0.14. All costs are the bytes stored.
"""

CLAIM = Claim(
    slug="tileq",
    title="Factors shared on a grid of experts correct two-bit weights at a fraction of their own memory",
    source="Gu et al., TileQ: Efficient Low-Rank Quantization of Mixture-of-Experts with 2D Tiling, ICML 2026",
    cells=cells,
    statements=STATEMENTS,
    seeds=(500, 501, 502),
    smoke_seeds=(0,),
    plots=(
        Plot("Relative output error on planted grids", ERROR, where={"model": PLANTED}),
        Plot("Increase of the held-out loss of an upcycled Mixtral", LOSS, where={"model": UPCYCLED}),
        Plot("The same, its experts copies of a random one", LOSS, where={"model": SCRATCH}),
        Plot("Bits per weight of factors, upcycled Mixtral", FACTORS, where={"model": UPCYCLED}),
    ),
    notes=NOTES,
)
