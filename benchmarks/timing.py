"""What the benchmarks share: interleaved timing, peak memory, and one JSON line per figure."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def report(name: str, ratio: float, bar: float, better: str, peer: str, **more: float) -> None:
    """Print {"name", "ratio", "bar", "better": "higher" or "lower", "peer"} and further numbers, to three digits."""
    line = {"name": name, "ratio": _rounded(ratio), "bar": bar, "better": better, "peer": peer}
    print(json.dumps(line | {k: _rounded(v) for k, v in more.items()}, ensure_ascii=False), flush=True)


def _rounded(x: float) -> float:
    return float(f"{x:.3g}")


def interleaved(
    runs: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each function, called in turn so that a busy machine slows all alike; round one warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if i > 0:
                times[name].append(clock() - start)
    return times


def median_ratio(times: dict[str, list[float]], top: str, bottom: str) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times[top], times[bottom], strict=True))


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that torch held at once above what it held at the start."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
