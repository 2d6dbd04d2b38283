"""Ratios of section 10: AOEPT against the frozen backbone, and against prompts by missing pattern."""

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from subspan.adapters import AOEPTConfig, AOEPTModel, PrototypeBank, TorchTowersAdapter, make_towers
from subspan.adapters.aoept import sources
from subspan.claims.aoept_peers import missing_aware
from timing import interleaved, median_ratio, report

# Two towers of 12 layers and width 256, 49 tokens and a class token, batches of 32; L = 8, N = 6.
LENGTH, DEPTH, BATCH = 8, 6, 32
Batch = dict[str, Tensor]


def towers() -> TorchTowersAdapter:
    shapes = {"text": (49, 16), "image": (49, 16)}
    return make_towers(shapes, width=256, layers=12, heads=8, generator=torch.Generator().manual_seed(0))


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    views = {name: torch.randn(BATCH, 49, 16, generator=generator) for name in ("text", "image")}
    missing = torch.zeros(BATCH, 2, dtype=torch.bool)
    missing[:10, 0] = True
    missing[10:20, 1] = True
    return views | {"missing": missing, "labels": torch.arange(BATCH) % 10}


def models() -> dict[str, AOEPTModel]:
    generator = torch.Generator().manual_seed(2)
    centres = {name: torch.randn(DEPTH, 256, 256, generator=generator) for name in ("text", "image")}
    bank = PrototypeBank(centres)
    frozen = AOEPTModel(towers(), None, AOEPTConfig(depth=0), num_labels=10)
    ours = AOEPTModel(towers(), bank, AOEPTConfig(prompt_len=LENGTH, depth=DEPTH), num_labels=10)
    return {"frozen": frozen, "MAPs": missing_aware(towers(), LENGTH, DEPTH, 10, 0), "AOEPT": ours}


def evaluation(repeats: int) -> None:
    inputs = {name: x for name, x in batch().items() if name != "labels"}
    found = {name: model.eval() for name, model in models().items()}
    with torch.no_grad():
        runs = {name: (lambda model=model: model(**inputs)) for name, model in found.items()}
        times = interleaved(runs, repeats, clock=time.process_time)
    report("evaluation", median_ratio(times, "AOEPT", "frozen"), 1.35, "lower", "the frozen backbone without prompts")
    report("evaluation_maps", median_ratio(times, "AOEPT", "MAPs"), 1.10, "lower", "MAPs with the same L and N")


def attention_calls() -> None:
    """Calls of the attention over the bank in ten batches of evaluation, after the first."""
    model, inputs = models()["AOEPT"].eval(), batch()
    plain, calls = sources.attend, []

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return plain(*arguments)

    with torch.no_grad():
        model(**inputs)
        sources.attend = counted
        for _ in range(10):
            model(**inputs)
    sources.attend = plain
    report("bank_attention_calls", len(calls), 0, "lower", "calls in ten batches after the first")


def training(repeats: int) -> None:
    inputs, runs = batch(), {}
    for name, model in models().items():
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

        def step(model: AOEPTModel = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            loss = model(**inputs).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        runs[name] = step
    del runs["frozen"]
    times = interleaved(runs, repeats, clock=time.process_time)
    report("training_step", median_ratio(times, "AOEPT", "MAPs"), 1.15, "lower", "MAPs' step with the same L and N")


def collection(repeats: int) -> None:
    """The bank's pass stops at the last layer that it needs."""
    backbone, inputs = towers(), {name: x for name, x in batch().items() if name != "labels"}
    frozen = models()["frozen"].eval()

    def collect() -> None:
        PrototypeBank.collect(backbone, [inputs], n_prototypes=4, depth=DEPTH)

    with torch.no_grad():
        times = interleaved({"collect": collect, "pass": lambda: frozen(**inputs)}, repeats, clock=time.process_time)
    report("collection_small", median_ratio(times, "collect", "pass"), 2.0, "lower", "one whole pass, K-means included")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 50 s on two cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    evaluation(5 if quick else 25)
    training(3 if quick else 15)
    attention_calls()
    if not quick:
        collection(7)
