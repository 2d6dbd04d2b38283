"""Speed and memory of binary layers: SURGE's step against straight-through's, and packed inference against float.

Peers: the published form, f_b - sg(f_ao) + f_ao with a separate pass for the norms, written plainly below; torch's
float layers for inference.
"""

import argparse
import time
from functools import partial

import torch
from torch import Tensor, nn

from subspan.resize import BinaryLinear, SurgeConfig, SurgeMonitor, export_binary
from timing import interleaved, median_ratio, peak_bytes, report

_WIDTH, _DEPTH, _BATCH = 512, 6, 128


class Published(nn.Module):
    """The add-and-subtract form on top of a straight-through layer; lambda from a backward pass of its own."""

    def __init__(self, layer: BinaryLinear, eta: float) -> None:
        super().__init__()
        self.layer, self.eta, self.twin = layer, eta, nn.Parameter(layer.weight.detach().clone())
        self.scale = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        f_a = nn.functional.linear(x, self.twin)
        f_b = self.layer(x)
        if torch.is_grad_enabled():
            f_b.register_hook(lambda g: self._measure(g))
        f_ao = self.scale * f_a
        return f_b - f_ao.detach() + f_ao

    @torch.no_grad()
    def _measure(self, g: Tensor) -> None:
        w = self.layer.weight
        g_b = g @ (w.abs().mean(1, keepdim=True) * w.sign())
        self.scale = self.eta * g_b.norm() / ((g @ self.twin).norm() + 1e-8)


def stack(config: SurgeConfig) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(BinaryLinear(_WIDTH, _WIDTH, config=config) for _ in range(_DEPTH)))


def step(model: nn.Module, x: Tensor):
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return run


def training(repeats: int) -> None:
    x = torch.randn(_BATCH, _WIDTH, requires_grad=True)
    ste, ags = stack(SurgeConfig(mode="ste")), stack(SurgeConfig())
    watched = stack(SurgeConfig())
    SurgeMonitor(watched)
    runs = {
        "ste": ste,
        "ags": ags,
        "frozen twin": stack(SurgeConfig(aux_update=False)),
        "shared": stack(SurgeConfig(share=True)),
        "watched": watched,
        "published": nn.Sequential(*(Published(layer, 0.3) for layer in stack(SurgeConfig(mode="ste")))),
    }
    times = interleaved({k: step(m, x) for k, m in runs.items()}, repeats, time.process_time)
    load = {"width": _WIDTH, "depth": _DEPTH, "batch": _BATCH}
    report("step", median_ratio(times, "ags", "ste"), 1.9, "lower", "straight-through step", **load)
    report("step, twin frozen", median_ratio(times, "frozen twin", "ste"), 1.5, "lower", "straight-through step")
    report("step, weights shared", median_ratio(times, "shared", "ste"), 1.5, "lower", "straight-through step")
    report("step against published form", median_ratio(times, "ags", "published"), 1.0, "lower", "add and subtract")
    report("monitor", median_ratio(times, "watched", "ags"), 1.05, "lower", "unwatched step")

    with torch.no_grad():
        forward = interleaved({k: lambda m=runs[k]: m(x) for k in ("ags", "ste")}, repeats, time.process_time)
    report("forward", median_ratio(forward, "ags", "ste"), 1.03, "lower", "plain binary layer")

    def held(model: nn.Module) -> int:
        """Bytes a forward pass leaves for the backward pass, parameters apart."""
        kept: dict[int, int] = {}
        own = {p.data_ptr() for p in model.parameters()}

        def keep(t: Tensor) -> Tensor:
            if t.data_ptr() not in own:
                kept[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = model(x)
        del out
        return sum(kept.values())

    inputs = _DEPTH * x.nbytes
    report("activations held", held(ags) / inputs, 1.1, "lower", "the layers' inputs once, as clipping needs them")
    report("activations held, twin frozen", held(runs["frozen twin"]) / inputs, 0.26, "lower", "the same")
    report(
        "peak memory of a step", peak_bytes(step(ags, x)) / peak_bytes(step(ste, x)), 1.9, "lower", "straight-through"
    )


def inference(repeats: int) -> None:
    for width, batch in ((4096, 1), (4096, 32), (1024, 1), (1024, 128)):
        torch.manual_seed(0)
        binary = nn.Sequential(BinaryLinear(width, width, config=SurgeConfig(mode="ste"))).eval()
        packed, dense = export_binary(binary), nn.Linear(width, width)
        x = torch.randn(batch, width)
        layers = {"packed": packed, "float": dense, "unpacked": binary}
        with torch.no_grad():
            runs = {name: partial(layer, x) for name, layer in layers.items()}
            times = interleaved(runs, repeats, time.process_time)
        size = f"{width} x {width}, {batch} rows"
        bar = 0.5 if batch == 1 and width == 4096 else 1.0
        report(
            f"packed inference, {size}", median_ratio(times, "packed", "float"), bar, "lower", "nn.Linear in float32"
        )
        report(
            f"against the binary layer, {size}", median_ratio(times, "packed", "unpacked"), 1.0, "lower", "BinaryLinear"
        )
    state = export_binary(binary).state_dict()
    bytes_packed = sum(t.nbytes for t in state.values())
    report(
        "packed bytes", bytes_packed / sum(p.nbytes for p in dense.parameters()), 0.035, "lower", "nn.Linear in float32"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    repeats = 15 if parser.parse_args().quick else 40
    torch.set_num_threads(1)
    training(repeats)
    inference(repeats)
