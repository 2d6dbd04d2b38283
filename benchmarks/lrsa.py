"""Speed, scaling and memory of low-rank spatial attention against full attention and physics attention.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, blocks of d = 64 with
four heads and 32 latents, run in turn; times are CPU times, because a pause of the machine is nobody's cost.
``--quick`` takes fewer rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from subspan.models import FullAttention, LRSABlock, PhysicsAttention
from timing import interleaved, median_ratio, peak_bytes, report

SIZES = (1024, 4096, 16384)


def blocks() -> dict[str, LRSABlock]:
    generator = torch.Generator().manual_seed(0)
    return {
        "lrsa": LRSABlock(64, 4, 32, generator=generator),
        "physics": LRSABlock(64, mixer=PhysicsAttention(64, 4, 32, generator=generator), norm="layer"),
        "full": LRSABlock(64, mixer=FullAttention(64, 4, generator=generator)),
    }


def training_step(block: LRSABlock, h: torch.Tensor, **points: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        block(h, **points).square().sum().backward()

    return run


def speed(repeats: int) -> None:
    h = torch.randn(1, 4096, 64, generator=torch.Generator().manual_seed(0))
    runs = {name: training_step(block, h) for name, block in blocks().items()}
    times = interleaved(runs, repeats, time.process_time)
    ms = {f"{name}_ms": 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    report("train_4096_full", median_ratio(times, "lrsa", "full"), 0.2, "lower", "full attention", **ms)
    report("train_4096_physics", median_ratio(times, "lrsa", "physics"), 2.2, "lower", "physics attention, equal width")


def scaling(repeats: int) -> None:
    """Slope of log time over log N."""
    block = blocks()["lrsa"]
    runs = {str(n): training_step(block, torch.randn(1, n, 64)) for n in SIZES}
    seconds = [min(times) for times in interleaved(runs, repeats, time.process_time).values()]
    slope = np.polyfit(np.log(SIZES), np.log(seconds), 1)[0]
    report("scaling_slope", float(slope), 1.2, "lower", "linear in N (a slope of 0.8 to 1.2)")


def masks(repeats: int) -> None:
    h = torch.randn(4, 4096, 64)
    mass, valid = torch.rand(4, 4096) + 0.1, torch.rand(4, 4096) < 0.9
    block = blocks()["lrsa"]
    runs = {
        "plain": training_step(block, h),
        "masks": training_step(block, h, valid=valid),
        "masses": training_step(block, h, mass=mass, valid=valid),
    }
    times = interleaved(runs, repeats, time.process_time)
    for name in ("masks", "masses"):
        report(f"with_{name}", median_ratio(times, name, "plain"), 1.3, "lower", "the plain path")


def memory() -> None:
    """Of one block in inference, over 8 N d numbers."""
    n, d = 65536, 64
    h = torch.randn(1, n, d)
    peak = {}
    for name, mixer in (("lrsa", None), ("physics", PhysicsAttention(d, 4, 64))):
        block = LRSABlock(d, 4, 64, mixer=mixer)
        with torch.inference_mode():
            peak[name] = peak_bytes(lambda block=block: block(h)) / (8 * n * d * 4)
    report("memory_65536", peak["lrsa"], 1.0, "lower", "8 N d numbers (134 MB)", physics_attention=peak["physics"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, within 50 s on two cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    speed(5 if quick else 15)
    scaling(3 if quick else 10)
    masks(5 if quick else 15)
    memory()
