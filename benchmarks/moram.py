"""Speed of a layer with a memory against dense LoRA of the same total rank and against the bare layer.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, float32, evaluation, all
variants in turn; times are CPU times, because a pause of the machine is nobody's cost. ``--quick`` takes fewer rounds.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from subspan.adapters import MoRAMConfig, MoRAMLinear, inject_moram
from timing import interleaved, median_ratio, report

D = 768


def layer(atoms: int, k: int, read: str, base: nn.Linear) -> MoRAMLinear:
    made = MoRAMLinear(base, MoRAMConfig(r=atoms, top_k=k, temperature=0.05, threshold=0.2, read=read))
    generator = torch.Generator().manual_seed(0)
    keys = (2 * torch.rand(atoms, D, generator=generator) - 1) / D**0.5
    made.bank.open(keys, torch.randn(atoms, D, generator=generator) / D**0.5, 1.0, 0)
    made.bank.freeze()
    made._unwatched = False  # random keys are silent by design; the check for it runs once per evaluation
    return made.eval()


class DenseLoRA(nn.Module):
    """What peft computes without dropout."""

    def __init__(self, base: nn.Linear, r: int) -> None:
        super().__init__()
        self.base, self.A, self.B = base, nn.Linear(D, r, bias=False), nn.Linear(r, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.B(self.A(x)) * 2.0


class Naive(nn.Module):
    """The steps of the paper as they are written: scores of all atoms, a masked softmax over all, a dense read."""

    def __init__(self, memory: MoRAMLinear, k: int) -> None:
        super().__init__()
        self.memory, self.k = memory, k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bank = self.memory.bank
        p = x @ bank.keys.T
        s = p / p.norm(dim=-1, keepdim=True).clamp_min(1e-8)
        top = s.topk(self.k, -1).indices
        masked = torch.full_like(s, float("-inf")).scatter(-1, top, s.gather(-1, top))
        w = torch.softmax(masked / 0.05, -1) * (s >= 0.2)
        return self.memory.base_layer(x) + (w * p * bank.scale) @ bank.values


def forward(atoms: int, k: int, tokens: int, repeats: int) -> None:
    torch.manual_seed(0)
    base = nn.Linear(D, D)
    x = torch.randn(tokens, D)
    runs = {read: layer(atoms, k, read, base) for read in ("dense", "gather", "auto")}
    peers = {"base": base, "lora": DenseLoRA(base, atoms), "naive": Naive(runs["dense"], k)}
    with torch.inference_mode():
        times = interleaved({n: lambda m=m: m(x) for n, m in (runs | peers).items()}, repeats, time.process_time)
    best = min(("dense", "gather"), key=lambda n: statistics.median(times[n]))
    ms = {f"{name}_ms": 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    bar = 0.85 if atoms > 256 else 1.10
    name = f"forward_R{atoms}"
    report(f"{name}_lora", median_ratio(times, best, "lora"), bar, "lower", f"dense LoRA of rank {atoms}", **ms)
    report(f"{name}_auto", median_ratio(times, "auto", best), 1.10, "lower", f"the better path, {best}")
    report(f"{name}_naive", median_ratio(times, best, "naive"), 1.0, "lower", "masked softmax as written")
    if atoms == 160:
        report(f"{name}_base", median_ratio(times, best, "base"), 2.0, "lower", "the layer without memory")


def growth() -> None:
    """Seconds to begin a task on 6 sites x 12 layers."""
    sites = {name: nn.Linear(D, D) for name in ("q", "k", "v", "out")} | {"up": nn.Linear(D, 4 * D)}
    blocks = [nn.ModuleDict(sites | {"down": nn.Linear(4 * D, D)}) for _ in range(12)]
    copies = nn.ModuleList(
        [nn.ModuleDict({n: nn.Linear(m.in_features, m.out_features) for n, m in b.items()}) for b in blocks]
    )
    model = inject_moram(copies, MoRAMConfig(r=16, target_modules=["q", "k", "v", "out", "up", "down"]))
    seconds = []
    for _ in range(4):
        start = time.process_time()
        model.moram.begin_task()
        seconds.append(time.process_time() - start)
        for bank in (layer.bank for layer in model.moram.layers.values()):
            bank.freeze()
        model.moram.open_task = None
    report(
        "growth_72_sites", statistics.median(seconds) / 0.2, 1.0, "lower", "0.2 s", seconds=statistics.median(seconds)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    repeats = 9 if parser.parse_args().quick else 31
    torch.set_num_threads(1)
    forward(160, 16, 1576, repeats)
    forward(64, 8, 1576, repeats)
    forward(1024, 16, 512, repeats)
    growth()


if __name__ == "__main__":
    main()
