"""Claim: an exact clone of a trained network stays as narrow as its seed whatever trains it; with one per cent of noise
Muon leaves that subspace trap and is better for it, AdamW hardly does either.

A two-layer character-level GPT of width 32 learns the documentation that comes with Python, is grown to width 64 and
trained on. Everything is measured on the last tenth of the text; learning rates are chosen on the tenth before.
"""

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.linalg import newton_schulz
from subspan.optim import MuonAdamW, build_muon_groups
from subspan.optim.muon import muon_scale, nesterov_stack
from subspan.resize import TrapMonitor, asymmetric_state_reset, expand_width, register_axes, use_of_width

CONTEXT, BATCH, HEAD = 64, 16, 16
EXACT, NOISY, SCRATCH = "exact clone", "clone, 40 dB", "from scratch"
SHIPPED = "Muon (Gram)"
# What each optimiser may choose from on the validation split, and what the specification's pilot found best.
RATES = {"AdamW": (1e-3, 3e-3, 1e-2), "Muon": (3e-3, 1e-2, 3e-2)}
SCRATCH_RATES = (3e-3, 1e-2, 3e-2)
RATE = {"AdamW": 3e-3, "Muon": 1e-2}

# ------------------------------------------------------------------------------------------------------- network, text


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attn = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class CharGPT(nn.Module):
    """Pre-norm, without biases; heads of 16, so that their number follows from the width."""

    def __init__(self, symbols: int, width: int, depth: int = 2) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(symbols, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, symbols, bias=False)
        for table in (self.tok, self.pos):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


register_axes(
    "CharGPT",
    {
        "tok": "vocab -> residual",
        "pos": "pos -> residual",
        "*.attn.[qkv]": "heads <- residual",
        "*.attn.o": "residual <- heads",
        "*.up": "ffn <- residual",
        "*.down": "residual <- ffn",
        "*norm": "residual",
        "head": "vocab <- residual",
    },
    final_norm="norm.weight",
)


@cache
def text() -> tuple[Tensor, Tensor, Tensor, int]:
    """Symbols to train on (80 %), to choose rates on (10 %) and to report on (10 %), and how many there are."""
    from pydoc_data.topics import topics

    written = "\n".join(topics[name] for name in sorted(topics))
    symbols = {c: i for i, c in enumerate(sorted(set(written)))}
    data = torch.tensor([symbols[c] for c in written])
    n = len(data)
    learn, choose, report = data.split([n * 8 // 10, n // 10, n - n * 8 // 10 - n // 10])
    return learn, choose, report, len(symbols)


@torch.no_grad()
def loss_on(model: nn.Module, data: Tensor) -> float:
    """Cross-entropy per symbol over every second window of a split, in nats."""
    windows = data[: (len(data) - 1) // CONTEXT * CONTEXT + 1]
    x, y = windows[:-1].view(-1, CONTEXT)[::2], windows[1:].view(-1, CONTEXT)[::2]
    return float(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))


# ------------------------------------------------------------------------------------------------------------ training


class PlainMuon(MuonAdamW):
    """The iteration on each matrix itself: it treats clones alike to the last bit.

    ``MuonAdamW`` iterates on Gram matrices where that is faster (here: the feed-forward layers). The result is the same
    but for rounding, and rounding is all that Muon needs to tell clones apart.
    """

    def _muon_step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            buffers = self._buffers([p], "momentum_buffer", p.dtype)
            grads: list[Any] = [p.grad]
            u = nesterov_stack(grads, buffers, group["momentum"], group["nesterov"], group["momentum_form"])
            o = newton_schulz(u, group["ns_steps"], group["ns"], fast=False)[0]
            p.add_(o, alpha=-group["lr"] * muon_scale(p.shape, group["scale"]))


def optimizer_for(model: nn.Module, kind: str, lr: float) -> torch.optim.Optimizer:
    if kind != "AdamW":
        return (PlainMuon if kind == "Muon" else MuonAdamW)(build_muon_groups(model, lr), lr)
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int, *, warmup: float = 0.05) -> None:
    """Cosine decay after a linear warm-up, gradients clipped at 1. Equal seeds see equal batches."""
    data, generator = text()[0], torch.Generator().manual_seed(seed)
    start = max(1, round(warmup * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: min((t + 1) / start, 0.5 * (1 + math.cos(math.pi * max(0, t - start) / max(1, steps - start)))),
    )
    for _ in range(steps):
        at = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        window = data[at[:, None] + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


# --------------------------------------------------------------------------------------------------------- experiments


@cache
def trained_seed(seed: int, smoke: bool) -> nn.Module:
    """The narrow network, trained with AdamW."""
    torch.manual_seed(seed)
    model = CharGPT(text()[3], 32)
    train(model, optimizer_for(model, "AdamW", 3e-3), 20 if smoke else 800, seed)
    return model


def started(name: str, seed: int, smoke: bool) -> nn.Module:
    """The network that a method trains on."""
    if name == SCRATCH:
        torch.manual_seed(1000 + seed)
        return CharGPT(text()[3], 64)
    small = trained_seed(seed, smoke)
    if name == "seed":
        return copy.deepcopy(small)
    options: dict[str, Any] = {
        EXACT: {"noise_db": None},
        NOISY: {"noise_db": 40.0},
        "clone, 10 dB (HyperCloning)": {"noise_db": 10.0},
        "diagonal": {"noise_db": None, "scheme": "diagonal"},
        "exact clone, moments reset": {"noise_db": None},
    }[name]
    probe = text()[1][:CONTEXT][None]
    return expand_width(small, 2, generator=torch.Generator().manual_seed(seed), verify=probe, **options)[0]


def continued(name: str, kind: str, lr: float, seed: int, smoke: bool) -> list[Row]:
    """300 steps, and what came of them."""
    model, steps = started(name, seed, smoke), 5 if smoke else 300
    wide = name != "seed"
    monitor = TrapMonitor(model, 2) if wide else None
    optimizer = optimizer_for(model, kind, lr)
    if name.endswith("reset"):
        early = max(1, steps // 20)
        train(model, optimizer, early, 5000 + seed)
        asymmetric_state_reset(optimizer, model, 2)
        train(model, optimizer, steps - early, 6000 + seed)
    else:
        train(model, optimizer, steps, 5000 + seed)
    validation, test = (split[:2000] if smoke else split for split in text()[1:3])
    figures = {"validation": loss_on(model, validation), "loss": loss_on(model, test)}
    if monitor is not None:
        optimizer.zero_grad()
        seen = monitor.record(0)
        figures |= {"escape": seen["esc"], "effective rank": seen["effective_rank"]}
        figures["use of width"] = use_of_width(model, lambda net: loss_on(net, test), 2)
    return [Row(f"{name}, {kind}", {"lr": lr}, metric, seed, value) for metric, value in figures.items()]


def chosen_rate(seed: int, smoke: bool, *, kind: str) -> list[Row]:
    """The two methods whose rate is chosen: the noisy clone, and the wide network from scratch."""
    runs = [(NOISY, lr) for lr in RATES[kind]] + [(SCRATCH, lr) for lr in SCRATCH_RATES]
    return [row for name, lr in runs for row in continued(name, kind, lr, seed, smoke)]


def fixed_rate(seed: int, smoke: bool, *, kind: str) -> list[Row]:
    """The others, at the noisy clone's rate."""
    names = (EXACT, "clone, 10 dB (HyperCloning)", "diagonal", "exact clone, moments reset", "seed")
    runs = [(name, kind) for name in names] + [(name, SHIPPED) for name in (EXACT, NOISY) if kind == "Muon"]
    return [row for name, by in runs for row in continued(name, by, RATE[kind], seed, smoke)]


def cells(smoke: bool) -> list[Cell]:
    return [
        Cell(f"{label}, {kind}", run, {"kind": kind})
        for kind in RATES
        for label, run in (("chosen", chosen_rate), ("fixed", fixed_rate))
    ]


# ---------------------------------------------------------------------------------------------------------- statements


def of(r: Results, name: str, kind: str, metric: str) -> np.ndarray:
    """By seed, at the rate that is best on the validation split (or the only one)."""
    return r.select(f"{name}, {kind}", by="validation", over="lr", maximize=False).values(f"{name}, {kind}", metric)


def both(metric: str) -> Callable[[Results], float]:
    """The largest over the seeds and optimisers, of exact clones."""
    return lambda r: float(max(np.abs(of(r, EXACT, kind, metric)).max() for kind in RATES))


def noisy(kind: str, metric: str, over: Callable[[np.ndarray], Any]) -> Callable[[Results], float]:
    return lambda r: float(over(of(r, NOISY, kind, metric)))


def use_ratio(r: Results) -> float:
    """Mean use of the width, Muon's over AdamW's (floored at a thousandth of a nat: less is not measurable here)."""
    return float(of(r, NOISY, "Muon", "use of width").mean() / max(of(r, NOISY, "AdamW", "use of width").mean(), 1e-3))


def dividend(kind: str) -> Callable[[Results], float]:
    """Loss of the exact clone less that of the noisy one, both at the same rate; mean over the seeds."""

    def measure(r: Results) -> float:
        exact, escaped = (r.values(f"{name}, {kind}", "loss", lr=RATE[kind]) for name in (EXACT, NOISY))
        return float((exact - escaped).mean())

    return measure


def head_start(r: Results) -> float:
    return float((of(r, SCRATCH, "Muon", "loss") - of(r, NOISY, "Muon", "loss")).mean())


STATEMENTS = (
    Statement("C1: an exact clone stays in the trap under AdamW and Muon (largest escape)", both("escape"), 1e-4, "<="),
    Statement("C1: and knows nothing in the new width (nats)", both("use of width"), 1e-3, "<="),
    Statement("C2: at 40 dB AdamW hardly escapes, on any seed", noisy("AdamW", "escape", np.max), 0.15, "<="),
    Statement("C2: Muon does, on every seed", noisy("Muon", "escape", np.min), 0.6),
    Statement("C2: Muon's use of the new width (nats, mean)", noisy("Muon", "use of width", np.mean), 0.12),
    Statement("C2: at least 8 times AdamW's", use_ratio, 8.0),
    Statement("C3: what escaping gains AdamW (nats) is next to nothing", dividend("AdamW"), 0.02, "<="),
    Statement("C3: what it gains Muon (nats)", dividend("Muon"), 0.04),
    Statement("C3: the difference of the two dividends", lambda r: dividend("Muon")(r) - dividend("AdamW")(r), 0.02),
    Statement("C4: grown and trained by Muon, ahead of from scratch by Muon (nats)", head_start, 0.08),
)

NOTES = """The rate of the noisy clone and of training from scratch is chosen on the validation tenth of the text, over
the seeds that are reported; the other methods take the rate that the specification's pilot chose for the noisy clone.
Losses are of the last tenth. "Seed" is the narrow network trained on for the same steps. "HyperCloning" is its noise of
10 dB, made by this package. "Muon" iterates on the matrices themselves, which treats clones alike to the last bit;
"Muon (Gram)" is MuonAdamW as it is, whose rounding differs between clones: from an exact clone it leaves the trap too,
later. Exact copies can be the better start of short or stochastic continuations (arXiv
2604.04281): what is claimed is about a continuation long enough to use the width, with an isotropic optimiser."""

CLAIM = Claim(
    slug="width_expansion",
    title="Exact width expansion is a trap that Muon leaves and AdamW does not",
    source="Chen et al., Escaping the Subspace Trap, ICML 2026, PMLR 306 (chen26eq)",
    cells=cells,
    statements=STATEMENTS,
    seeds=(200, 201, 202),
    smoke_seeds=(0,),
    plots=(
        Plot("Loss on the last tenth, by learning rate", "loss", over="lr", log_x=True),
        Plot("Escape ratio, by learning rate", "escape", over="lr", log_x=True),
    ),
    notes=NOTES,
)
