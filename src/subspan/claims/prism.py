"""Claim: under privacy PRISM does not depend on the factors' gauge and beats what does (Wang and Zhang, ICML 2026).

A 64-128-128-10 network pretrained on 500 upright digits adapts to 1000 private digits rotated by 90 degrees. All
methods share one engine, one accountant and one grid of learning rates, chosen by accuracy on a validation part.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.data.images import DomainShift, digits_domain_shift
from subspan.errors import NonFinite
from subspan.privacy import (
    Lamb,
    LoraRite,
    Prism,
    PrismConfig,
    PrismPrivacy,
    lora_plus_groups,
    noise_multiplier,
)

DELTA, RATE, STEPS, RANK = 1e-3, 0.25, 100, 4
LRS = (0.003, 0.01, 0.03, 0.05, 0.1, 0.3)
SGD_LRS = (0.1, 0.3, 1.0, 3.0)
EPSILONS = (1.0, 3.0, 8.0)
GAUGES = (1 / 16, 1 / 4, 1.0, 3.0, 4.0, 16.0)  # 3 is no power of two: there rounding differs


def _adamw(priv: PrismPrivacy, lr: float) -> Optimizer:
    return torch.optim.AdamW(priv.parameters(), lr, weight_decay=0.0)


# name -> (what the engine clips and noises, the start, the optimizer)
METHODS: dict[str, tuple[str, str, Callable[[PrismPrivacy, float], Optimizer]]] = {
    "prism": ("prism", "spectral", lambda priv, lr: Prism(priv.factor_pairs, lr, noise_std=priv.noise_std)),
    "prism, whitened": (
        "prism",
        "spectral",
        lambda priv, lr: Prism(priv.factor_pairs, lr, noise_std=priv.noise_std, precond="whitened"),
    ),
    "adamw, standard start": ("naive", "keep", _adamw),
    "adamw, balanced start": ("naive", "spectral", _adamw),
    "ffa": ("ffa", "keep", _adamw),
    "lora+": (
        "naive",
        "keep",
        lambda priv, lr: torch.optim.AdamW(lora_plus_groups(priv.factor_pairs, lr), weight_decay=0.0),
    ),
    "lamb": ("naive", "spectral", lambda priv, lr: Lamb(priv.parameters(), lr)),
    "rite": ("naive", "spectral", lambda priv, lr: LoraRite(priv.factor_pairs, lr)),
    "dp-sgd, balanced start": ("naive", "spectral", lambda priv, lr: torch.optim.SGD(priv.parameters(), lr)),
}
STANDARD = "adamw, standard start"
WITHOUT_PRIVACY = ("prism", "adamw, standard start", "lora+")


@cache
def sigma_for(epsilon: float) -> float:
    """Noise multiplier by the RDP accountant."""
    return noise_multiplier(epsilon, DELTA, RATE, STEPS, "rdp").sigma


@cache
def split(seed: int, smoke: bool) -> DomainShift:
    """500 upright digits are public, 1000 rotated ones private; learning rates are chosen on 97, reported on 200."""
    if smoke:
        return digits_domain_shift(n_pretrain=200, n_train=120, n_validation=40, n_test=60, random_state=seed)
    return digits_domain_shift(n_pretrain=500, n_train=1000, n_validation=97, n_test=200, random_state=seed)


@cache
def pretrained(seed: int, smoke: bool) -> nn.Module:
    """An MLP 64-128-128-10 after Adam on the upright digits. Adapt copies of it."""
    data = split(seed, smoke)
    g = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )  # fmt: skip
    for p in model.parameters():  # torch's own start, drawn from our generator
        fan_in = p.shape[1] if p.ndim == 2 else 128
        p.data = (2 * torch.rand(p.shape, generator=g) - 1) / fan_in**0.5
    x, y = torch.from_numpy(data.pretrain.x.copy()), torch.from_numpy(data.pretrain.y)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(60 if smoke else 400):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    return model


def accuracy(model: nn.Module, part: Any) -> float:
    """Per cent correct."""
    with torch.no_grad():
        predicted = model(torch.from_numpy(part.x.copy())).argmax(1).numpy()
    return 100 * float((predicted == part.y).mean())


def finetune(
    base: nn.Module,
    data: DomainShift,
    method: str,
    lr: float,
    epsilon: float | None,
    seed: int,
    steps: int,
    c: float = 1.0,
) -> tuple[float, float]:
    """Private training from factors (c A, B / c); accuracy on the validation and the test part.

    A run whose gradients become infinite stops there and is scored as it is.
    """
    from peft import LoraConfig, get_peft_model

    how, init, make = METHODS[method]
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["0", "2", "4"])
    with torch.random.fork_rng(devices=[]):  # peft draws lora_A from the global generator
        torch.manual_seed(seed)
        model = get_peft_model(copy.deepcopy(base), config)  # pyright: ignore[reportArgumentType]
    sigma = 0.0 if epsilon is None else sigma_for(epsilon)
    n = len(data.train.y)
    priv = PrismPrivacy(
        model,
        PrismConfig(
            noise_multiplier=sigma,
            target_delta=DELTA,
            max_grad_norm=1.0 if sigma else float("inf"),
            method=how,  # pyright: ignore[reportArgumentType]
            init=init,  # pyright: ignore[reportArgumentType]
            accountant="rdp",
        ),
        dataset_size=n,
        expected_batch_size=RATE * n,
        steps=steps,
        generator=torch.Generator().manual_seed(1000 + seed),
    )
    for pair in priv.factor_pairs:
        pair.write(pair.low_rank().regauge(c * torch.eye(RANK)))
    optimizer = priv.attach(make(priv, lr))
    x, y = torch.from_numpy(data.train.x.copy()), torch.from_numpy(data.train.y)
    for batch in priv.sampler(torch.Generator().manual_seed(2000 + seed)):
        try:
            if batch:
                priv.backward(nn.functional.cross_entropy(model(x[batch]), y[batch], reduction="none"))
            optimizer.step()
        except NonFinite:
            break
    return accuracy(model, data.validation), accuracy(model, data.test)


def _scored(method: str, setting: dict[str, float | int | str], seed: int, scores: tuple[float, float]) -> list[Row]:
    names = ("validation_accuracy", "test_accuracy")
    return [Row(method, setting, name, seed, value) for name, value in zip(names, scores, strict=True)]


def run_grid(seed: int, smoke: bool, method: str, epsilons: Sequence[float | None], lrs: Sequence[float]) -> list[Row]:
    """One method at every budget (None is no privacy) on the common grid of learning rates."""
    data = split(seed, smoke)
    base = pretrained(seed, smoke)
    rows: list[Row] = []
    for epsilon in epsilons:
        for lr in lrs:
            setting = {"epsilon": "none" if epsilon is None else epsilon, "lr": lr}
            scores = finetune(base, data, method, lr, epsilon, seed, 4 if smoke else STEPS)
            rows += _scored(method, setting, seed, scores)
    return rows


def run_before(seed: int, smoke: bool) -> list[Row]:
    """Accuracy on the rotated digits before any adaptation."""
    data = split(seed, smoke)
    base = pretrained(seed, smoke)
    return [Row("before adaptation", {}, "test_accuracy", seed, accuracy(base, data.test))]


def run_gauge(seed: int, smoke: bool, method: str, lrs: Sequence[float], gauges: Sequence[float]) -> list[Row]:
    """Epsilon 3 from (c A, B / c): the learning rate is chosen on the validation part at c = 1 and then kept."""
    data = split(seed, smoke)
    base = pretrained(seed, smoke)
    steps = 4 if smoke else STEPS
    scores = {lr: finetune(base, data, method, lr, 3.0, seed, steps) for lr in lrs}
    best = max(scores, key=lambda lr: scores[lr][0])
    rows: list[Row] = []
    for c in gauges:
        found = scores[best] if c == 1 else finetune(base, data, method, best, 3.0, seed, steps, c)
        rows += _scored(f"{method}, gauge", {"c": c}, seed, found)
    return rows


def cells(smoke: bool) -> list[Cell]:
    lrs = list(LRS[1:4] if smoke else LRS)
    out = [Cell("before adaptation", run_before)]
    for method in METHODS:
        budgets: list[float | None] = [3.0] if "whitened" in method else list(EPSILONS)
        if method in WITHOUT_PRIVACY:
            budgets.append(None)
        if "dp-sgd" not in method:
            out.append(Cell(method, run_grid, {"method": method, "epsilons": budgets, "lrs": lrs}))
    for method, grid in (
        ("prism", lrs[1:4]),
        ("adamw, balanced start", lrs[1:4]),
        ("dp-sgd, balanced start", SGD_LRS[:1] if smoke else SGD_LRS),
    ):
        out.append(
            Cell(f"gauges of {method}", run_gauge, {"method": method, "lrs": list(grid), "gauges": list(GAUGES)})
        )
    return out


# -------------------------------------------------------------------------------------------------------- statements


def best(results: Results, method: str, epsilon: float | str) -> np.ndarray:
    """Test accuracies by seed at the learning rate that is best on the validation part."""
    chosen = results.select(method, by="validation_accuracy", over="lr", epsilon=epsilon)
    return chosen.values(method, "test_accuracy")


def margin(ours: str, theirs: str, epsilon: float | str) -> Callable[[Results], float]:
    return lambda results: float(np.mean(best(results, ours, epsilon)) - np.mean(best(results, theirs, epsilon)))


def gauge_range(method: str) -> Callable[[Results], float]:
    """Largest minus smallest mean test accuracy over the gauges c."""

    def measure(results: Results) -> float:
        name = f"{method}, gauge"
        gauges = dict.fromkeys(row.setting["c"] for row in results.where(name, "test_accuracy"))
        means = [float(np.mean(results.values(name, "test_accuracy", c=c))) for c in gauges]
        return max(means) - min(means)

    return measure


def at_lr(ours: str, theirs: str, epsilon: float, lr: float) -> Callable[[Results], float]:
    def measure(results: Results) -> float:
        a, b = (results.values(m, "test_accuracy", epsilon=epsilon, lr=lr) for m in (ours, theirs))
        return float(np.mean(a) - np.mean(b))

    return measure


def smallest_margin_over_rates(results: Results) -> float:
    """The least margin over the budgets when nobody tuned: mean test accuracy over the rates 0.01, 0.03 and 0.05."""

    def untuned(method: str, epsilon: float) -> float:
        rates = (0.01, 0.03, 0.05)
        return float(np.mean([results.values(method, "test_accuracy", epsilon=epsilon, lr=lr) for lr in rates]))

    return min(untuned("prism", e) - untuned(STANDARD, e) for e in EPSILONS)


def largest_gap(results: Results) -> float:
    """Over the budgets, the largest distance between PRISM and AdamW from the balanced start."""
    return max(abs(margin("prism", "adamw, balanced start", e)(results)) for e in EPSILONS)


CLAIM = Claim(
    slug="prism",
    title="PRISM: private LoRA that does not depend on how the update is factored",
    source="arXiv 2606.00944; the laptop experiment of its specification",
    cells=cells,
    statements=[
        Statement("(a) PRISM's accuracy over gauges c = 1/16 .. 16 at epsilon 3: range in points",
                  gauge_range("prism"), 0.3, "<="),
        Statement("(a) AdamW's accuracy over the same gauges: range in points",
                  gauge_range("adamw, balanced start"), 30.0),
        Statement("(a) DP-SGD's accuracy over the same gauges: range in points",
                  gauge_range("dp-sgd, balanced start"), 50.0),
        *(Statement(f"(b) PRISM above FFA at epsilon {e:g}, in points", margin("prism", "ffa", e), need)
          for e, need in ((8.0, 4.0), (3.0, 4.0), (1.0, 8.0))),
        *(Statement(f"(c) PRISM above AdamW from the standard start at epsilon {e:g}, in points",
                    margin("prism", STANDARD, e), need) for e, need in ((8.0, 3.0), (3.0, 1.5), (1.0, -1.0))),
        Statement("(d) honest negative: PRISM and AdamW from a balanced start differ by at most 3 points at any budget",
                  largest_gap, 3.0, "<="),
        Statement("(e) at the small learning rate 0.01 and epsilon 8 PRISM is above AdamW from the standard start",
                  at_lr("prism", STANDARD, 8.0, 0.01), 10.0),
        Statement("(f) untuned, over the learning rates 0.01 to 0.05, PRISM is above AdamW from the standard start at "
                  "every budget", smallest_margin_over_rates, 3.0),
    ],
    seeds=range(5),
    plots=[
        Plot("Accuracy over the gauge (c A, B / c) at epsilon 3", "test_accuracy", over="c", log_x=True,
             methods=[f"{m}, gauge" for m in ("prism", "adamw, balanced start", "dp-sgd, balanced start")]),
        *(Plot(f"Test accuracy over the learning rate at epsilon {e:g}", "test_accuracy", over="lr", log_x=True,
               where={"epsilon": e}) for e in EPSILONS),
    ],
    notes=(
        "The margins of (b) and (c) are those of a prototype whose learning rates were chosen on the test split from "
        "grids that differed by method. Its grid for AdamW seems to have missed 0.03, where AdamW has a narrow peak: "
        "at 0.02 we measure the prototype's figures for it. On one common grid, chosen on a validation split, a tuned "
        "AdamW is as good as PRISM or a little better (five seeds leave two points or so); what remains is that PRISM "
        "forgives the choice of the learning rate (e, f) and of the gauge (a). (f) was added after seeing seeds 0 to 4 "
        "and checked on seeds 5 to 9. Choosing a learning rate on private data costs budget that no method here is "
        "charged for. Without privacy LoRA+ is best, as in the paper."
    ),
)  # fmt: skip
