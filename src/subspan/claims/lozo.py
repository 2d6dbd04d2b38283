"""Claim: choosing directions by the loss beats drawing them blindly, at equal queries (LOZO+, ICML 2026).

Only the abstract of LOZO+ was readable: what is measured is this project's reading of it. E1 is a quadratic with a
gradient of rank 2, where theory says that selection must pay. E2 adapts a network, pre-trained on scikit-learn's
digits, to shifted digits of another contrast; E4 does so from the error rate alone, which has no gradient.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.data import digits
from subspan.errors import NonFinite
from subspan.optim import LOZO, LOZOPlus, MeZO, ZOOptimizer, alignment, query_gain

Make = Callable[..., ZOOptimizer]

# E1: rates at the stability bound of each estimator, 1 / (d + 2) and r / (n (m r + 2)).
SIDE = 64


def _bound(rank: int) -> float:
    return rank / (SIDE * (SIDE * rank + 2))


energy = partial(LOZOPlus, score="energy")
QUADRATIC: dict[str, tuple[Make, float]] = {
    "MeZO": (MeZO, 1 / (SIDE**2 + 2)),
    "LOZO, r = 1": (partial(LOZO, rank=1), _bound(1)),
    "LOZO, r = 2": (LOZO, _bound(2)),
    "LOZO+ energy": (energy, _bound(2)),
    "LOZO+ energy, no selection": (partial(energy, threshold=0.0, max_rank=16), _bound(2)),
    "LOZO+ random choice": (partial(LOZOPlus, score="random"), _bound(2)),
    "LOZO+ energy, no carry": (partial(energy, carry=False), _bound(2)),
    "LOZO+ energy, weighted": (partial(energy, merge="weighted"), _bound(1)),
}


def quadratic(seed: int, smoke: bool) -> list[Row]:
    """E1: F(X) = |X - X*|^2 / 2 with X0 - X* of rank 2 and norm 1; two problems a seed, so that there are ten."""
    rows = []
    for problem in (2 * seed, 2 * seed + 1):
        generator = torch.Generator().manual_seed(problem)
        left, right = (torch.randn(SIDE, 2, generator=generator, dtype=torch.float64) for _ in range(2))
        start = left @ right.mT
        start /= start.norm()
        for method, (make, lr) in QUADRATIC.items():
            X = nn.Parameter(start.clone())
            optimizer = make([X], lr=lr, seed=problem)
            aligned = []
            while optimizer.total_queries < (80 if smoke else 6000):
                optimizer.step(lambda X=X: X.square().sum() / 2)
                if isinstance(optimizer, LOZO) and optimizer.t % optimizer.interval == 1:
                    aligned.append(alignment([X.detach()], [optimizer.right[optimizer.blocks[0]]]))
            scores = {"final": float(X.detach().square().sum() / 2)}
            if aligned:
                scores["alignment"] = float(np.mean(aligned))
            rows += [Row(method, {"task": "quadratic"}, key, problem, value) for key, value in scores.items()]
    return rows


# ------------------------------------------------------------------------------------------------------------ networks

DOMAINS: dict[str, tuple[tuple[int, int], float, float]] = {
    "right": ((0, 1), 0.6, 0.2),
    "left": ((0, -1), 0.5, 0.3),
    "down": ((1, 0), 0.6, 0.2),
}
GRID = (3e-4, 6e-4, 1e-3, 1.5e-3)
COMMON_LR = 6e-4
LOZOS: dict[str, Make] = {f"LOZO, r = {r}": partial(LOZO, rank=r) for r in (1, 2, 4, 8)}
NETWORK: dict[str, Make] = {"MeZO": MeZO, **LOZOS, "LOZO+": LOZOPlus, "LOZO+ no carry": partial(LOZOPlus, carry=False)}
CONTROLS: dict[str, Make] = {"LOZO+ energy": energy, "LOZO+ random choice": partial(LOZOPlus, score="random")}


class Adaptation:
    """A network pre-trained on upright digits and the splits of a shifted domain; all from the seed."""

    def __init__(self, seed: int, domain: str, epochs: int = 30) -> None:
        shift, contrast, brightness = DOMAINS[domain]
        images, labels = digits()
        order = np.random.default_rng(seed).permutation(len(labels))
        train, validation, test = np.split(order, (1000, 1300))
        moved = contrast * _shifted(images, shift) + brightness

        def part(source: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
            return torch.from_numpy(source[rows].reshape(-1, 64)), torch.from_numpy(labels[rows])

        self.train, self.validation, self.test = (part(moved, rows) for rows in (train, validation, test))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            widths = (64, 128, 128, 10)
            layers: list[nn.Module] = []
            for a, b in pairwise(widths):
                layers += [nn.Linear(a, b), nn.ReLU()]
            self.base = nn.Sequential(*layers[:-1])
        self._pretrain(*part(images, train), epochs, torch.Generator().manual_seed(seed))

    def _pretrain(self, x: Tensor, y: Tensor, epochs: int, generator: torch.Generator) -> None:
        adam = torch.optim.Adam(self.base.parameters(), lr=1e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(y), generator=generator).split(100):
                adam.zero_grad()
                cross_entropy(self.base(x[rows]), y[rows]).backward()
                adam.step()

    def scores(self, model: nn.Module) -> dict[str, float]:
        out = {}
        with torch.no_grad():
            for name, (x, y) in (("train", self.train), ("validation", self.validation), ("test", self.test)):
                logits = model(x)
                out[f"{name}_loss"] = float(cross_entropy(logits, y))
                out[f"{name}_accuracy"] = float((logits.argmax(1) == y).float().mean())
        return out

    def adapt(
        self,
        make: Make,
        lr: float,
        queries: int,
        seed: int,
        *,
        batch: int = 128,
        errors: bool = False,
        **options: Any,
    ) -> tuple[nn.Module, ZOOptimizer, list[float]]:
        """A copy of the base after that many queries, and the alignment of each period's directions."""
        model = copy.deepcopy(self.base)
        optimizer = make(model.parameters(), lr=lr, seed=seed, **options)
        generator = torch.Generator().manual_seed(seed)
        x, y = self.train
        aligned = []
        while optimizer.total_queries < queries:
            rows = torch.randint(len(y), (batch,), generator=generator)

            def loss(rows: Tensor = rows) -> Tensor:
                logits = model(x[rows])
                return (logits.argmax(1) != y[rows]).double().mean() if errors else cross_entropy(logits, y[rows])

            try:
                optimizer.step(loss)
            except NonFinite:  # diverged: its scores say so
                break
            if isinstance(optimizer, LOZO) and optimizer.t % optimizer.interval == 1:
                aligned.append(self._alignment(model, optimizer))
        return model, optimizer, aligned

    def _alignment(self, model: nn.Module, optimizer: LOZO) -> float:
        """A diagnostic with true gradients, which no step here uses."""
        x, y = self.train
        params = list(model.parameters())
        gradients = dict(zip(params, torch.autograd.grad(cross_entropy(model(x), y), params), strict=True))
        blocks = optimizer.matrices
        return alignment([gradients[b.param] for b in blocks], [optimizer.right[b] for b in blocks])  # pyright: ignore[reportArgumentType]


def _shifted(images: np.ndarray, by: tuple[int, int]) -> np.ndarray:
    """Images moved by whole pixels; what enters is black."""
    down, right = by
    padded = np.pad(images, ((0, 0), (max(down, 0), max(-down, 0)), (max(right, 0), max(-right, 0))))
    height, width = images.shape[1:]
    top, left = max(-down, 0), max(-right, 0)
    return padded[:, top : top + height, left : left + width]


def network(seed: int, smoke: bool, *, domain: str) -> list[Row]:
    """E2: 4,000 queries of 128 digits; on the first domain over the grid of rates, on the others at one rate."""
    task = Adaptation(seed, domain, 2 if smoke else 30)
    setting = {"task": "digits", "domain": domain}
    rows = [Row("before", setting, key, seed, value) for key, value in task.scores(task.base).items()]
    methods = NETWORK | (CONTROLS if domain == "right" else {})
    for method, make in methods.items():
        rates = GRID if domain == "right" else (COMMON_LR,)
        for lr in rates[:1] if smoke else rates:
            model, optimizer, aligned = task.adapt(make, lr, 40 if smoke else 4000, seed)
            scores = task.scores(model)
            if aligned:
                scores["alignment"] = float(np.mean(aligned))
                pool = optimizer.candidates + 2 if isinstance(optimizer, LOZOPlus) else 0
                scores["predicted_gain"] = query_gain(pool, 50, scores["alignment"])
            rows += [Row(method, setting | {"lr": lr}, key, seed, value) for key, value in scores.items()]
    return rows


ERROR_GRID = (1e-3, 3e-3, 1e-2)


def error_rate(seed: int, smoke: bool) -> list[Row]:
    """E4: the error rate of 512 digits is all that is asked; back-propagation has nothing to work with."""
    task = Adaptation(seed, "right", 2 if smoke else 30)
    setting = {"task": "error rate"}
    rows = [Row("before", setting, key, seed, value) for key, value in task.scores(task.base).items()]
    for method in ("MeZO", "LOZO, r = 2", "LOZO+"):
        for lr in ERROR_GRID[:1] if smoke else ERROR_GRID:
            options = {"batch": 512, "errors": True, "eps": 1e-2}
            model, _, _ = task.adapt(NETWORK[method], lr, 40 if smoke else 4000, seed, **options)
            rows += [Row(method, setting | {"lr": lr}, key, seed, v) for key, v in task.scores(model).items()]
    return rows


def cells(smoke: bool) -> list[Cell]:
    domains = [Cell(f"digits {domain}", network, {"domain": domain}) for domain in DOMAINS]
    return [Cell("quadratic", quadratic, {}), *domains, Cell("error rate", error_rate, {})]


# ----------------------------------------------------------------------------------------------------------- statements


def final_ratio(method: str, peer: str) -> Callable[[Results], float]:
    """E1: mean final F of the method over the peer's."""
    return lambda r: float(r.values(method, "final").mean() / r.values(peer, "final").mean())


def loss_ratios(r: Results, domains: Iterable[str], method: str = "LOZO+", peer: str = "LOZO, r = 2") -> np.ndarray:
    """Geometric mean over seeds of the paired ratio of training losses, at the common rate, for each domain."""
    at = [{"task": "digits", "domain": d, "lr": COMMON_LR} for d in domains]
    logs = [np.log(r.values(method, "train_loss", **s) / r.values(peer, "train_loss", **s)) for s in at]
    return np.exp([x.mean() for x in logs])


def mean_ratio(r: Results) -> float:
    return float(np.exp(np.log(loss_ratios(r, DOMAINS)).mean()))


def over_random(r: Results) -> float:
    """Largest ratio, over the rates of the spec, of LOZO+'s mean loss to the random choice's."""
    ratios = []
    for lr in GRID[:3]:
        at = {"task": "digits", "domain": "right", "lr": lr}
        chosen, random = (r.values(m, "train_loss", **at).mean() for m in ("LOZO+", "LOZO+ random choice"))
        ratios.append(chosen / random)
    return float(max(ratios))


def stability(r: Results) -> float:
    """At the larger common rate, the worst loss over seeds of energy scoring over that of decrease scoring."""
    at = {"task": "digits", "domain": "right", "lr": 1e-3}
    worst = [np.nan_to_num(r.values(m, "train_loss", **at), nan=np.inf).max() for m in ("LOZO+ energy", "LOZO+")]
    return float(min(worst[0] / worst[1], 1e6))


def best(r: Results, method: str, metric: str = "test_accuracy", **setting: Any) -> float:
    """The metric at the rate with the least validation loss."""
    chosen = r.select(method, by="validation_loss", over="lr", maximize=False, **setting)
    return float(chosen.values(method, metric).mean())


def at_own_best(r: Results) -> float:
    """Right shift: LOZO+'s test accuracy over the best peer's, each at its own best rate."""
    at: dict[str, Any] = {"task": "digits", "domain": "right"}
    return best(r, "LOZO+", **at) - max(best(r, m, **at) for m in ("MeZO", *LOZOS))


def gain_from_errors(r: Results) -> float:
    at: dict[str, Any] = {"task": "error rate"}
    chosen = r.select("LOZO+", by="validation_accuracy", over="lr", **at)
    return float((chosen.values("LOZO+", "test_accuracy") - r.values("before", "test_accuracy", **at)).mean())


CLAIM = Claim(
    slug="lozo",
    title="Choosing low-rank directions by the loss",
    source="LOZO+ (ICML 2026 poster 64159, abstract only), LOZO (arXiv 2410.07698), MeZO (arXiv 2305.17333)",
    cells=cells,
    statements=[
        Statement(
            "quadratic: LOZO+ (energy) over LOZO r = 2, final loss",
            final_ratio("LOZO+ energy", "LOZO, r = 2"),
            0.85,
            "<=",
        ),
        Statement("quadratic: LOZO+ (energy) over MeZO", final_ratio("LOZO+ energy", "MeZO"), 0.92, "<="),
        Statement(
            "quadratic: selection over keeping every direction, at equal queries",
            final_ratio("LOZO+ energy", "LOZO+ energy, no selection"),
            1.0,
            "<=",
        ),
        Statement("digits: LOZO+ over LOZO r = 2, training loss, mean over three domains", mean_ratio, 0.985, "<="),
        Statement("digits: ... the worst domain", lambda r: float(loss_ratios(r, DOMAINS).max()), 1.02, "<="),
        Statement("digits: ... shifted right", lambda r: float(loss_ratios(r, ["right"])[0]), 0.97, "<="),
        Statement("digits: LOZO+ over a random choice at equal queries, worst of three rates", over_random, 1.0, "<="),
        Statement("digits, lr 1e-3: worst loss of energy scoring over that of decrease scoring", stability, 1.0, ">="),
        Statement("digits: test accuracy above the best of MeZO and LOZO, own rates", at_own_best, 0.0, ">="),
        Statement("error rate alone: test accuracy gained by LOZO+", gain_from_errors, 0.10, ">="),
    ],
    seeds=range(400, 405),
    smoke_seeds=(0,),
    plots=[
        Plot("Final loss of the quadratic after 6,000 queries", "final"),
        Plot(
            "Digits shifted right: training loss after 4,000 queries",
            "train_loss",
            over="lr",
            where={"domain": "right"},
            log_x=True,
            log_y=True,
        ),
        Plot(
            "Error rate as the only signal: test accuracy",
            "test_accuracy",
            over="lr",
            where={"task": "error rate"},
            log_x=True,
        ),
    ],
    notes=(
        "The paper's tables could not be read; nothing here repeats them. The case for low-rank directions is matrices "
        "far larger than these: on a small dense network MeZO, or LOZO at a higher rank, is a strong peer at its own "
        "rate."
    ),
)
