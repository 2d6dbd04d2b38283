"""Speed and memory of growing: against copying the result, and against growing the plain way; the monitor's share of a
training step; the peak memory of a streamed checkpoint.

The peer is HyperCloning's procedure written plainly: a wide network is built and initialised, then every tensor is made
and copied into it.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from subspan.claims.width_expansion import BATCH, CONTEXT, CharGPT, optimizer_for
from subspan.resize import TrapMonitor, expand_width, fold_width
from timing import interleaved, median_ratio, peak_bytes, report


def llama(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=6,
            num_attention_heads=width // 32, num_key_value_heads=width // 64,
        )
    )  # fmt: skip


def plainly(model: nn.Module, width: int) -> nn.Module:
    big = llama(width)
    wide = big.state_dict()
    with torch.no_grad():
        for name, w in model.state_dict().items():
            target = wide[name]
            times = [a // b for a, b in zip(target.shape, w.shape, strict=True)]
            divided = w / times[1] if w.ndim == 2 and "embed" not in name else w
            target.copy_(divided.repeat(times))
    return big


def growing(repeats: int) -> None:
    small = llama(256)
    exact = {"noise_db": None, "verify": False}
    big, _ = expand_width(small, 2, **exact)
    runs = {
        "exact": lambda: expand_width(small, 2, **exact),
        "noisy": lambda: expand_width(small, 2, generator=torch.Generator().manual_seed(0), verify=False),
        "fold": lambda: fold_width(big, 2),
        "copy": lambda: copy.deepcopy(big),
        "plain": lambda: plainly(small, 512),
    }
    size = sum(p.nbytes for p in big.parameters())
    times = interleaved(runs, repeats, time.process_time)
    report("expand_width, exact", median_ratio(times, "exact", "copy"), 2.5, "lower", "copy.deepcopy of the result",
           megabytes=size / 2**20)  # fmt: skip
    report("expand_width, 40 dB", median_ratio(times, "noisy", "copy"), 2.5, "lower", "copy.deepcopy of the result")
    report("expand_width against plain growing", median_ratio(times, "exact", "plain"), 1.0, "lower", "HyperCloning")
    report("fold_width", median_ratio(times, "fold", "copy"), 2.5, "lower", "copy.deepcopy of the wide network")
    largest = max(p.nbytes for p in big.parameters())
    for name in ("exact", "noisy"):
        extra = peak_bytes(runs[name]) - size
        report(f"memory beyond source and result, {name}", extra / (2 * largest), 1.0, "lower", "largest matrix x 2")


def watching(repeats: int) -> None:
    torch.manual_seed(0)
    model = CharGPT(103, 64)
    monitor = TrapMonitor(model, 2, rank_every=10**9)
    optimizer = optimizer_for(model, "AdamW", 1e-3)
    tokens = torch.randint(103, (BATCH, CONTEXT + 1))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    times = interleaved({"step": step, "record": lambda: monitor.record(1)}, 5 * repeats, time.process_time)
    report("TrapMonitor.record", median_ratio(times, "record", "step"), 0.05, "lower", "training step, width 64")


_GROW = """
import json, sys
from subspan.resize import grow_checkpoint
from subspan.tune.memory import PeakMemory
summary = grow_checkpoint("asset:smollm2-135m-instruct", sys.argv[1], noise_db=None, verify=sys.argv[2] == "verify")
peak = PeakMemory().mebibytes() * 2**20
print(json.dumps({"bytes": summary.bytes, "peak": peak, "error": summary.max_rel_err, "wide": summary.parameters[1]}))
"""


def streaming() -> None:
    for mode in ("write", "verify"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", _GROW, str(Path(folder) / "big"), mode]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        report(
            f"peak memory of growing SmolLM2-135M, {mode}", found["peak"] / found["bytes"], 3.0, "lower",
            "the tensors written", parameters=found["wide"],
        )  # fmt: skip
        if found["error"] is not None:
            report("outputs of the grown SmolLM2-135M", found["error"], 1e-5, "lower", "the seed's outputs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    growing(5 if quick else 11)
    watching(5 if quick else 20)
    if not quick:
        streaming()
