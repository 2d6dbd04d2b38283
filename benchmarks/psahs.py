"""Speed of homophily adjustment and of PSAHS against a loop over nodes and against plain training.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process; contenders in turn; CPU times for
adjustments and epochs, because a pause of the machine is nobody's cost. ``--quick`` uses smaller graphs for all but the
bar in seconds, ``--threads`` sets torch's threads (default 1).
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, lil_matrix
from torch.nn.functional import cross_entropy

from subspan.data import Graph, contextual_sbm
from subspan.structure import PSAHS, adjust_homophily
from subspan.structure.homophily.networks import DirGCN, Propagation, two_layers
from subspan.structure.homophily.training import Alternation
from timing import interleaved, median_ratio, peak_bytes, report

H0 = 0.6


def graph(n: int, degree: float, classes: int = 10, homophily: float = 0.3, p: int = 64, seed: int = 0) -> Graph:
    means = np.random.default_rng(seed).normal(size=(classes, p))
    return contextual_sbm(n, means, homophily=homophily, degree=degree, random_state=seed)


def cpu_seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


# --------------------------------------------------------------------------------------------------------- adjustment


def loop_as_released(
    a: csr_matrix, y: np.ndarray, members: list[np.ndarray], random: np.random.Generator
) -> lil_matrix:
    """Node by node (row = receiver) with the steps of the released code: a mask over the whole class, LIL entries."""
    new = a.copy().tolil()
    for u in range(len(y)):
        neighbours = a.indices[a.indptr[u] : a.indptr[u + 1]]
        if len(neighbours) == 0:
            continue
        same = y[neighbours] == y[u]
        h = same.sum() / len(neighbours)
        if h >= H0:
            continue
        alpha = (H0 - h) / (1 - H0 * h)
        new[u, neighbours[same]] = 1 + alpha
        new[u, neighbours[~same]] = 1 - alpha
        group = members[y[u]]
        free = group[np.isin(group, neighbours, assume_unique=True, invert=True) & (group != u)]
        random.shuffle(free)
        for v in free[: int((~same).sum())]:
            new[u, v] = alpha
    return new


def careful_loop(a: csr_matrix, y: np.ndarray, members: list[np.ndarray], random: np.random.Generator) -> lil_matrix:
    """Node by node as well as we can: whole rows are written, and candidates drawn again where they are taken."""
    new = a.copy().tolil()
    for u in range(len(y)):
        neighbours = new.rows[u]
        d = len(neighbours)
        if d == 0:
            continue
        same = y[neighbours] == y[u]
        s = int(same.sum())
        if s / d >= H0:
            continue
        alpha = (H0 - s / d) / (1 - H0 * s / d)
        taken, group, more = {u, *neighbours}, members[y[u]], list[int]()
        while len(more) < min(d - s, len(group) - s - 1):
            v = int(group[random.integers(len(group))])
            if v not in taken:
                taken.add(v)
                more.append(v)
        weights = np.where(same, 1 + alpha, 1 - alpha).tolist() + [alpha] * len(more)
        ends = np.array(neighbours + more)
        order = ends.argsort()
        new.rows[u], new.data[u] = ends[order].tolist(), np.array(weights)[order].tolist()
    return new


def adjustment(n: int, degree: float, repeats: int) -> None:
    g = graph(n, degree, p=1)
    assert g.y is not None
    y = g.y.numpy()
    sender, receiver = g.edge_index.numpy()
    a = csr_matrix((np.ones(len(sender), np.float32), (receiver, sender)), (n, n))
    members = [np.flatnonzero(y == c) for c in range(10)]
    random = np.random.default_rng(0)
    runs: dict[str, Callable[[], Any]] = {
        "ours": lambda: adjust_homophily(g.edge_index, g.y, H0),
        "released": lambda: loop_as_released(a, y, members, random),
        "careful": lambda: careful_loop(a, y, members, random),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(cpu_seconds(run))
    new = adjust_homophily(g.edge_index, g.y, H0)
    for theirs in (runs["released"](), runs["careful"]()) if n <= 10_000 else ():
        assert new.edge_index.shape[1] == theirs.nnz  # as many edges, with the same weight in all
        assert abs(float(new.edge_weight.double().sum()) - theirs.sum()) < 1e-4 * theirs.sum()
    report(
        f"adjust_{n}_nodes", median_ratio(seconds, "released", "ours"), 20.0, "higher", "released loop over LIL rows",
        over_careful_loop=median_ratio(seconds, "careful", "ours"), ours_s=statistics.median(seconds["ours"]),
        edges=g.edge_index.shape[1], added=new.report.added, worst_gap=new.report.worst_gap,
    )  # fmt: skip


def adjustment_seconds(repeats: int) -> None:
    g = graph(100_000, 10.0, p=1)
    assert g.y is not None
    ours = statistics.median(cpu_seconds(lambda: adjust_homophily(g.edge_index, g.y, H0)) for _ in range(repeats))
    load = os.getloadavg()[0]
    report("adjust_1e6_edges", ours / 2.0, 1.0, "lower", "2 s of one core", ours_s=ours, load=load)


# ----------------------------------------------------------------------------------------------------------- training


def run_of(source: Graph, target: Graph, **options: Any) -> Alternation:
    """A run that is ready to step, with a stand-in for the classifier without edges."""
    model = PSAHS(**options)
    domains = model._labelled_source(source), model._domain(target, "target")
    model.n_classes_ = int(domains[0].y.max()) + 1
    guess = torch.randint(model.n_classes_, (len(target.x),), generator=torch.Generator().manual_seed(0))
    return Alternation(domains, model._networks(domains[0]), guess, model._schedule())


class Plain:
    """Supervised training of the same encoder and head on one graph."""

    def __init__(self, g: Graph, edges: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.x, self.y, self.edges = g.x, g.y, edges
        self.encoder, self.head = DirGCN(g.x.shape[1]), two_layers(128, 64, 10)
        self.optimizer = torch.optim.Adam([*self.encoder.parameters(), *self.head.parameters()], lr=3e-3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.head(self.encoder(self.x, *self.edges)), self.y).backward()
        self.optimizer.step()


def training(n: int, degree: float, repeats: int, name: str) -> None:
    """Epochs without an adjustment in them against plain ones, on the same adjusted edges and on the original ones."""
    graphs = graph(n, degree), graph(n, degree, seed=1)
    run = run_of(*graphs, epochs=10**6, rw_freq=10**6)
    for _ in range(2):
        run.step()  # epoch 1 adjusts the target
    same = [Plain(g, edges) for g, edges in zip(graphs, (run.source, run.target), strict=True)]
    fewer = [Plain(g, d.plain()) for g, d in zip(graphs, run.domains, strict=True)]
    runs: dict[str, Callable[[], Any]] = {
        "ours": run.step,
        "same": lambda: [p.step() for p in same],
        "fewer": lambda: [p.step() for p in fewer],
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats + 1):
        for contender, step in runs.items():
            seconds = cpu_seconds(step)
            if i > 0:  # the first round warms up
                times[contender].append(seconds)
    report(
        f"epoch_{name}", median_ratio(times, "ours", "same"), 1.3, "lower", "two plain Dir-GCN epochs",
        over_original_edges=median_ratio(times, "ours", "fewer"), ours_s=statistics.median(times["ours"]),
        edges=run.source[0].shape[1] + run.target[0].shape[1], load=os.getloadavg()[0],
    )  # fmt: skip


def share_of_adjustments(n: int, degree: float, epochs: int) -> None:
    """All adjustments of a fit against the whole of it."""
    source, target = graph(n, degree), graph(n, degree, seed=1)
    spent = 0.0
    module = __import__("subspan.structure.homophily.training", fromlist=["adjust_homophily"])
    original = module.adjust_homophily

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        out = original(*args, **kwargs)
        spent += time.perf_counter() - began
        return out

    module.adjust_homophily = timed
    try:
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PSAHS(epochs=epochs).fit(source, Graph(target.x, target.edge_index))
        whole = time.perf_counter() - began
    finally:
        module.adjust_homophily = original
    report("adjustments_of_fit", spent / whole, 0.05, "lower", "whole fit", fit_s=whole, epochs=epochs)


def propagation(n: int, degree: float, repeats: int) -> None:
    """One product with the normalised adjacency, forwards and backwards, against gather and scatter."""
    g = graph(n, degree)
    edges = g.edge_index.shape[1]
    product = Propagation(g.edge_index, torch.ones(edges), n)
    sender, receiver = g.edge_index
    scale = torch.bincount(receiver, minlength=n).clamp_min(1).rsqrt()
    weight = scale[sender] * scale[receiver]
    x = torch.randn(n, 128, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def scatter() -> None:
        torch.zeros(n, 128).index_add(0, receiver, weight[:, None] * x[sender]).sum().backward()

    times = interleaved({"ours": lambda: product.into(x).sum().backward(), "scatter": scatter}, repeats)
    report(f"propagate_{n}_nodes", median_ratio(times, "scatter", "ours"), 1.0, "higher", "gather and index_add")


def scale(epochs: int) -> None:
    """100,000 nodes and 1,000,000 edges on either side."""
    source, target = graph(100_000, 10.0), graph(100_000, 10.0, seed=1)
    run = run_of(source, target, epochs=10**6)
    run.step()
    seconds = [cpu_seconds(run.step) for _ in range(epochs)]  # the first one adjusts
    gib = peak_bytes(run.step) / 2**30
    edges = run.source[0].shape[1] + run.target[0].shape[1]
    ours = statistics.median(seconds[1:])
    more = {"ours_s": ours, "with_adjustment_s": seconds[0], "gib": gib, "edges": edges}
    report("scale_epoch", ours / 30.0, 1.0, "lower", "30 s of one core", **more)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller graphs, within 50 s on two cores")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quick = arguments.quick
    adjustment_seconds(3)
    adjustment(3_000, 10.0, 2)
    if not quick:
        adjustment(30_000, 10.0, 1)
    training(900, 12.0, 20 if quick else 60, "900_nodes")
    training(5_000 if quick else 20_000, 10.0, 5, "large")
    share_of_adjustments(2_000 if quick else 5_000, 10.0, 42 if quick else 62)
    propagation(10_000 if quick else 100_000, 10.0, 5)
    if not quick:
        scale(2)
