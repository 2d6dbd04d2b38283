"""Speed and memory of dynamic facility location against looking everywhere and against greedy from scratch.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread. Contenders take the same
updates in turn, in a full window; times are CPU times, because a pause of the machine is nobody's cost. ``--quick``
takes fewer updates.
"""

import argparse
import os
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from subspan.structure import DynamicFacilityLocation
from subspan.structure.facility.reference import jms_greedy
from timing import report

ORACLES: dict[str, dict[str, Any]] = {
    "exact": {"oracle": "exact"},
    "counters": {"oracle": "counters"},
    "hash": {"oracle": "hash", "n_tables": 4},
}


def mixture(n: int, m: int, d: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients (n, d) and facilities (m, d) from 20 Gaussians, and prices up to 100 mean nearest distances."""
    random = np.random.default_rng(seed)
    centres = spread * random.normal(size=(20, d))
    x = centres[random.integers(20, size=n + m)] + random.normal(size=(n + m, d))
    clients, places = x[:n], x[n:]
    prices = random.uniform(0, 100 * cdist(clients[:1000], places).min(axis=1).mean(), m)
    return clients, places, prices


def seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def slide(model: DynamicFacilityLocation, x: np.ndarray, start: int, stop: int, window: int) -> np.ndarray:
    """Seconds of every insert and every delete (stop - start, 2)."""
    return np.array(
        [
            (
                seconds(lambda j=j: model.partial_fit(x[j : j + 1], ids=[j])),
                seconds(lambda j=j: model.forget([j - window])),
            )
            for j in range(start, stop)
        ]
    )


def against_exact(pairs: int) -> None:
    n, m = 1000, 100
    for name, spread in (("separated", 3.0), ("overlapping", 0.7)):
        x, places, prices = mixture(n + pairs, m, 32, spread)
        models = {
            oracle: DynamicFacilityLocation(random_state=0, **options).fit(
                x[:n], facilities=places, opening_cost=prices
            )
            for oracle, options in ORACLES.items()
        }
        spent: dict[str, list[np.ndarray]] = {oracle: [] for oracle in models}
        for j in range(n, n + pairs, 20):  # in turn, but each long enough to warm its own caches
            for oracle, model in models.items():
                spent[oracle].append(slide(model, x, j, j + 20, n))
        times = {oracle: np.concatenate(rows) for oracle, rows in spent.items()}
        D = cdist(x[pairs:], places)
        recompute = min(seconds(lambda D=D, prices=prices: jms_greedy(D, prices)) for _ in range(3))
        for oracle in ("hash", "counters"):
            t = times[oracle]
            more = {
                "update_us": 1e6 * t.mean(), "insert_us": 1e6 * t[:, 0].mean(),
                "insert_p99_us": 1e6 * np.quantile(t[:, 0], 0.99),
                "most_us": 1e6 * t.max(), "load": os.getloadavg()[0],
            }  # fmt: skip
            bar = 10.0 if name == "separated" else 1.0
            report(f"{oracle}_{name}", times["exact"].mean() / t.mean(), bar, "higher", "looking everywhere", **more)
            report(f"{oracle}_{name}_vs_greedy", recompute / t.mean(), 100.0, "higher", "plain NumPy JMS from scratch")


def long_stream(updates: int) -> None:
    """A window of 2000 in 64 dimensions, 100 facilities: does the last tenth take longer than the first?"""
    window, m = 2000, 100
    pairs = updates // 2
    x, places, prices = mixture(window + pairs, m, 64, 3.0)
    for oracle in ("counters", "hash"):
        model = DynamicFacilityLocation(random_state=0, **ORACLES[oracle])
        model.fit(x[:window], facilities=places, opening_cost=prices)
        t = slide(model, x, window, window + pairs, window).sum(axis=1)
        tenth = pairs // 10
        more = {"update_us": 5e5 * t.mean(), "updates": updates, "moves": model.n_client_moves_ / updates}
        report(f"{oracle}_long_stream", t[-tenth:].mean() / t[:tenth].mean(), 1.2, "lower", "its first tenth", **more)


def more_clients(pairs: int) -> None:
    """Ten times the clients, the same facilities: the spec's cost does not depend on n."""
    for oracle in ("counters", "hash"):
        means = {}
        for n in (2000, 20_000):
            x, places, prices = mixture(n + pairs, 100, 64, 3.0)
            model = DynamicFacilityLocation(random_state=0, **ORACLES[oracle])
            model.fit(x[:n], facilities=places, opening_cost=prices)
            means[n] = np.median(slide(model, x, n, n + pairs, n).sum(axis=1))
        report(
            f"{oracle}_20000_clients",
            means[20_000] / means[2000],
            1.5,
            "lower",
            "2000 clients",
            ours_us=5e5 * means[20_000],
        )


def memory() -> None:
    """After ``compact``: bytes over 16 (n r + T levels n), where positions (r = d numbers) stand for the r nearest."""
    n, d = 5000, 64
    x, places, prices = mixture(n, 500, d, 3.0)
    tracemalloc.start()
    model = DynamicFacilityLocation(random_state=0, **ORACLES["hash"]).fit(x, facilities=places, opening_cost=prices)
    model.compact()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    levels = int(np.ptp(model._clusters.oracle.levels)) + 1
    allowed = 16 * (n * d + 4 * levels * n)
    report("compact_memory", held / allowed, 1.0, "lower", "16 bytes (n d + T levels n)", mib=held / 2**20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer updates, within 50 s on two cores")
    quick = parser.parse_args().quick
    against_exact(100 if quick else 1000)
    long_stream(10_000 if quick else 100_000)
    more_clients(200 if quick else 1000)
    memory()
