"""Claim: directions of largest Fisher information are a fast start for LoRA (after Feng, Lin and Kao, ICML 2026).

E1, a linear map whose strong directions are not where the data is; E2, digits rotated by 90 degrees; E3, ablations of
E2. Every peer starts through peft. The paper's tables could not be read, so its numbers are not what is checked here.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subspan.adapters import collect_fisher, fisher_init
from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.data import digits_domain_shift, misaligned_linear_map

GRID = (3e-3, 1e-2, 3e-2)
PEERS = ("LoRA", "PiSSA", "CorDA", "EVA", "LoRA-GA")
# name -> options of fisher_init; kappa is the experiment's own unless given.
FISHER: dict[str, dict[str, Any]] = {
    "Fisher eigen": {},
    "Fisher eigen, kappa 0.3": {"kappa": 0.3},
    "Fisher eigen, sign rotate": {"sign": "rotate"},
    "Fisher eigen, sign fixed": {"sign": "fixed"},
    "Fisher eigen, corrected": {"corrected": True},
    "Fisher weighted": {"mode": "weighted"},
    "Fisher score": {"mode": "score"},
    "Fisher gradient": {"mode": "gradient"},
}
OURS, ROTATED = "Fisher eigen", "Fisher eigen, sign rotate"
# The methods that are compared at the largest rate.
RIVALS = ("EVA", "LoRA-GA", OURS)
Loss = Callable[[nn.Module], Tensor]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch and peft draw their starts from the global generator: seed it, and put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _look(model: nn.Module, batches: Iterable[Tensor]) -> None:
    for batch in batches:
        model(batch)


def start(
    base: nn.Module, method: str, rank: int, data: tuple[Tensor, Tensor], mean_loss: Loss, kappa: float,
    options: Mapping[str, Any] | None = None, calibration: Mapping[str, Any] | None = None, examples: int | None = None,
) -> nn.Module:  # fmt: skip
    """A copy of ``base`` with a LoRA adapter on every linear layer, started by ``method`` from ``data``."""
    from peft import LoraConfig, get_peft_model, initialize_lora_eva_weights
    from peft.tuners.lora.config import CordaConfig, EvaConfig, LoraGAConfig
    from peft.tuners.lora.corda import preprocess_corda
    from peft.tuners.lora.loraga import preprocess_loraga

    model = copy.deepcopy(base)
    x, y = data
    targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    common: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": targets}
    if method == "LoRA":
        return get_peft_model(model, LoraConfig(**common))
    if method == "PiSSA":
        return get_peft_model(model, LoraConfig(**common, init_lora_weights="pissa"))
    if method == "CorDA":
        config = LoraConfig(**common, init_lora_weights="corda", corda_config=CordaConfig())
        # Its factors are the more unbalanced the more rows one call brings: 16 served it best among 4, 16, 64 and all.
        preprocess_corda(model, config, run_model=lambda: _look(model, x.split(16)))
        return get_peft_model(model, config)
    if method == "EVA":
        config = LoraConfig(**common, init_lora_weights="eva", eva_config=EvaConfig(rho=1.0))
        adapted = get_peft_model(model, config)
        batches = list(x.split(64))
        initialize_lora_eva_weights(
            adapted,
            batches,
            forward_fn=lambda m, b: m(b),
            prepare_model_inputs_fn=None,
            prepare_layer_inputs_fn=None,
            show_progress_bar=False,
        )
        return adapted
    if method == "LoRA-GA":
        common |= {"init_lora_weights": "lora_ga"}  # which LoraConfig's annotation forgets
        config = LoraConfig(**common, lora_ga_config=LoraGAConfig())
        preprocess_loraga(model, config, train_step=lambda: mean_loss(model).backward())
        return get_peft_model(model, config)
    options = {"kappa": kappa, **(FISHER[method] if options is None else options)}
    stats = collect_fisher(
        model, [(x[:examples], y[:examples])], targets,
        n_samples=len(x), rank=rank, corrected=options.get("corrected", False), **(calibration or {}),
    )  # fmt: skip
    adapted = get_peft_model(model, LoraConfig(**common))
    fisher_init(adapted, stats, generator=torch.Generator().manual_seed(0), **options)
    return adapted


def trained(optimizer: torch.optim.Optimizer, losses: Iterator[Tensor]) -> Iterator[int]:
    """Train; give the number of steps done after each."""
    for step, loss in enumerate(losses, 1):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step


# ------------------------------------------------------------------------------------------------ E1: a linear map


def linear_map(seed: int, smoke: bool, *, n_in: int, n_out: int) -> list[Row]:
    """Full-batch Adam on half the squared error; a second sample of the same map is the validation split."""
    rank, steps = 4, 100
    generator = torch.Generator().manual_seed(seed)
    problem = misaligned_linear_map(n_in=n_in, n_out=n_out, rank=rank, n_samples=2500, generator=generator)
    linear = nn.Linear(n_in, n_out, bias=False)
    linear.weight.data.copy_(problem.weight)
    base = nn.Sequential(linear)
    x, y = problem.inputs[:2000].float(), problem.outputs[:2000].float()
    vx, vy = problem.inputs[2000:].float(), problem.outputs[2000:].float()

    def loss_of(model: nn.Module, x: Tensor = x, y: Tensor = y) -> Tensor:
        return (model(x) - y).square().sum(1).mean() / 2

    study = {"Fisher random": {"select": "random"}, "Fisher bottom": {"select": "bottom"}}
    rows = []
    for method in (*PEERS, OURS, ROTATED) if smoke else (*PEERS, *FISHER, *study):
        for lr in GRID[1:2] if smoke else GRID:
            setting: dict[str, Any] = {"experiment": "E1", "size": f"{n_in}x{n_out}", "lr": lr}
            with _seeded(seed):
                model = start(base, method, rank, (x, y), loss_of, 0.1, study.get(method))
            optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
            for step in trained(optimizer, (loss_of(model) for _ in range(steps))):
                if step in (25, steps):
                    with torch.no_grad():
                        found = {"loss": loss_of(model), "validation loss": loss_of(model, vx, vy)}
                    rows += [Row(method, setting, f"{k} at {step}", seed, float(v)) for k, v in found.items()]
    return rows


# ------------------------------------------------------------------------------------------- E2, E3: rotated digits

EARLY, LATE = 40, 200


class Digits:
    """A 64-128-128-10 network trained on 500 upright digits, and 400 rotated ones to adapt it to."""

    def __init__(self, seed: int, pretraining: int) -> None:
        shift = digits_domain_shift(n_pretrain=500, n_train=400, n_validation=297, n_test=600, random_state=seed)
        parts = (shift.pretrain, shift.train, shift.validation, shift.test)
        old, self.train, self.validation, self.test = (
            (torch.from_numpy(np.ascontiguousarray(p.x)), torch.from_numpy(p.y)) for p in parts
        )
        with _seeded(seed):
            self.base = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(self.base.parameters(), lr=1e-3)
        for _ in trained(optimizer, self.batches(self.base, old, seed, pretraining)):
            pass

    @staticmethod
    def batches(model: nn.Module, data: tuple[Tensor, Tensor], seed: int, steps: int) -> Iterator[Tensor]:
        """Cross entropy on batches of 64, reshuffled every epoch."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.cat(
            [torch.randperm(len(data[1]), generator=generator)[: 64 * (len(data[1]) // 64)] for _ in range(steps)]
        )
        for rows in order.split(64)[:steps]:
            yield nn.functional.cross_entropy(model(data[0][rows]), data[1][rows])

    def rows(
        self,
        method: str,
        setting: dict[str, Any],
        seed: int,
        rank: int,
        lr: float,
        label: str | None = None,
        **how: Any,
    ) -> list[Row]:
        """Start, train, and score on validation and test digits at an early and a late step."""
        loss_of = lambda model: nn.functional.cross_entropy(model(self.train[0]), self.train[1])  # noqa: E731
        with _seeded(seed):
            model = start(self.base, method, rank, self.train, loss_of, **{"kappa": 1.0, **how})
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        rows = []
        for step in trained(optimizer, self.batches(model, self.train, seed, LATE)):
            if step in (EARLY, LATE):
                with torch.no_grad():
                    for split, (x, y) in (("accuracy", self.test), ("validation", self.validation)):
                        value = float((model(x).argmax(1) == y).double().mean())
                        rows.append(Row(label or method, {**setting, "lr": lr}, f"{split} at {step}", seed, value))
        return rows


def rotated_digits(seed: int, smoke: bool, *, rank: int) -> list[Row]:
    """E2: every method over the grid of learning rates."""
    task = Digits(seed, 40 if smoke else 400)
    methods = (*PEERS, OURS) if smoke else (*PEERS, *FISHER)
    runs = [(m, lr) for m in methods for lr in GRID if not smoke or lr == 1e-2 or (lr > 1e-2 and m in RIVALS)]
    setting: dict[str, Any] = {"experiment": "E2", "rank": rank}
    return [row for method, lr in runs for row in task.rows(method, setting, seed, rank, lr)]


# E3: label -> (mode, options of fisher_init, options of collect_fisher, calibration examples)
ABLATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    **{f"calibration {n}": ("Fisher eigen", {}, {}, n) for n in (8, 25, 100, 400)},
    **{f"fisher {kind}": ("Fisher eigen", {}, {"fisher": kind}, 400) for kind in ("empirical", "mc", "exact")},
    **{f"select {k}": ("Fisher eigen", {"select": k}, {}, 400) for k in ("top", "bottom", "random")},
    **{
        f"weighted, damping {d:g}": ("Fisher weighted", {"mode": "weighted", "damping": d}, {}, 400)
        for d in (1e-4, 1e-2, 1e-1)
    },
    **{
        f"gradient, damping {d:g}": ("Fisher gradient", {"mode": "gradient", "damping": d}, {}, 400)
        for d in (1e-4, 1e-2, 1e-1)
    },
    "preserve zero_b": ("Fisher eigen", {"preserve": "zero_b"}, {}, 400),
    **{f"kappa {k:g}": ("Fisher eigen", {"kappa": k}, {}, 400) for k in (0.03, 0.1, 0.3, 1.0, 3.0)},
}


def ablations(seed: int, smoke: bool) -> list[Row]:
    """E3 on the digits, rank 4 and learning rate 1e-2."""
    task = Digits(seed, 40 if smoke else 400)
    chosen = ("select top", "select bottom", "calibration 25", "calibration 400") if smoke else tuple(ABLATIONS)
    rows = []
    for label in chosen:
        method, options, calibration, examples = ABLATIONS[label]
        rows += task.rows(
            method,
            {"experiment": "E3"},
            seed,
            4,
            1e-2,
            label,
            options=options,
            calibration=calibration,
            examples=examples,
        )
    return rows


# ------------------------------------------------------------------------------------------------ the claim

Measure = Callable[[Results], float]


def _e1(results: Results, method: str, step: int) -> np.ndarray:
    """Losses of every seed and size, at learning rate 1e-2."""
    sizes = dict.fromkeys(row.setting["size"] for row in results.where(experiment="E1"))
    at = {"experiment": "E1", "lr": 1e-2}
    return np.concatenate([results.values(method, f"loss at {step}", size=size, **at) for size in sizes])


def worst_ratio(peer: str, step: int, ours: str = OURS) -> Measure:
    """Largest over all seeds and sizes of our loss over the peer's."""
    return lambda results: float((_e1(results, ours, step) / _e1(results, peer, step)).max())


def worst_ratio_to_best(results: Results) -> float:
    best = np.min([_e1(results, peer, 100) for peer in PEERS], axis=0)
    return float((_e1(results, OURS, 100) / best).max())


def points(results: Results, method: str, step: int, lr: float = 1e-2) -> float:
    """Mean test accuracy in points, E2 at rank 4."""
    return 100 * float(results.values(method, f"accuracy at {step}", experiment="E2", rank=4, lr=lr).mean())


def lead(peer: str, step: int) -> Measure:
    return lambda results: points(results, OURS, step) - points(results, peer, step)


def lead_over_best(step: int, lr: float = 1e-2, peers: tuple[str, ...] = PEERS) -> Measure:
    def measure(results: Results) -> float:
        measured = [peer for peer in peers if peer in results.methods()]
        return points(results, OURS, step, lr) - max(points(results, peer, step, lr) for peer in measured)

    return measure


def tuned(results: Results, method: str, step: int) -> float:
    """Mean test accuracy in points at the learning rate that is best on the validation digits at that step."""
    chosen = results.select(method, by=f"validation at {step}", over="lr", experiment="E2", rank=4)
    return 100 * float(chosen.values(method, f"accuracy at {step}").mean())


def tuned_lead(step: int) -> Measure:
    def measure(results: Results) -> float:
        measured = [peer for peer in PEERS if peer in results.methods()]
        return tuned(results, OURS, step) - max(tuned(results, peer, step) for peer in measured)

    return measure


def ablation(label: str, other: str) -> Measure:
    def measure(results: Results) -> float:
        values = (results.values(k, f"accuracy at {EARLY}", experiment="E3").mean() for k in (label, other))
        return 100 * float(next(values) - next(values))

    return measure


def cells(smoke: bool) -> list[Cell]:
    sizes = [(64, 48)] if smoke else [(64, 48), (96, 64)]
    ranks = [4] if smoke else [2, 4]
    return [
        *(Cell(f"E1 linear map {n} to {m}", linear_map, {"n_in": n, "n_out": m}) for n, m in sizes),
        *(Cell(f"E2 rotated digits, rank {r}", rotated_digits, {"rank": r}) for r in ranks),
        Cell("E3 ablations", ablations),
    ]


E1 = "E1, lr 1e-2, worst seed: loss of Fisher eigen over that of"
E2 = "E2, rank 4, lr 1e-2, mean test points of Fisher eigen minus"
CLAIM = Claim(
    slug="fisher_init",
    title="A LoRA adapter started in the Fisher subspace learns faster at first",
    source="Feng, Lin and Kao, Learning in the Fisher Subspace, ICML 2026, arXiv 2605.01046 (abstract and first page)",
    cells=cells,
    statements=(
        Statement(f"{E1} PiSSA at step 25", worst_ratio("PiSSA", 25), 0.1, "<="),
        Statement(f"{E1} PiSSA at step 100", worst_ratio("PiSSA", 100), 0.1, "<="),
        Statement(f"{E1} LoRA at step 25", worst_ratio("LoRA", 25), 0.6, "<="),
        Statement(f"{E1} EVA at step 25", worst_ratio("EVA", 25), 0.6, "<="),
        Statement(f"{E1} LoRA-GA at step 25", worst_ratio("LoRA-GA", 25), 0.6, "<="),
        Statement(f"{E1} the best peer at step 100", worst_ratio_to_best, 1.15, "<="),
        *(
            Statement(f"E1, sign='rotate', likewise: {peer} at step 25", worst_ratio(peer, 25, ROTATED), bound, "<=")
            for peer, bound in (("PiSSA", 0.1), ("LoRA", 0.6), ("EVA", 1.0), ("LoRA-GA", 1.0))
        ),
        Statement(f"{E2} PiSSA at step {EARLY}", lead("PiSSA", EARLY), 6.0),
        Statement(f"{E2} PiSSA at step {LATE}", lead("PiSSA", LATE), 1.0),
        Statement(f"{E2} LoRA at step {EARLY}", lead("LoRA", EARLY), 30.0),
        Statement(f"{E2} LoRA-GA at step {EARLY}", lead("LoRA-GA", EARLY), 3.0),
        Statement(f"{E2} the best peer at step {LATE}", lead_over_best(LATE), -1.5),
        Statement(
            f"Against it: at lr 3e-2 EVA or LoRA-GA leads at step {EARLY} (points, eigen minus the better)",
            lead_over_best(EARLY, 3e-2, RIVALS[:2]), 0.0, "<=",
        ),
        Statement(
            f"Against it: with every method at its own best lr (by validation) a peer leads at step {EARLY}",
            tuned_lead(EARLY), 0.0, "<=",
        ),
        Statement(
            f"Against it: with every method at its own best lr (by validation) a peer leads at step {LATE}",
            tuned_lead(LATE), 0.0, "<=",
        ),
        Statement(
            f"E3: top minus bottom directions at step {EARLY}, points", ablation("select top", "select bottom"), 10.0
        ),
        Statement(
            f"E3: 25 calibration examples minus 400 at step {EARLY}, points",
            ablation("calibration 25", "calibration 400"), -5.0,
        ),
    ),
    seeds=(200, 201, 202, 203, 204),
    smoke_seeds=(200,),
    plots=(
        Plot("E1: loss at step 25", "loss at 25", "lr", {"experiment": "E1", "size": "64x48"}, log_x=True, log_y=True),
        Plot(f"E2: accuracy, {EARLY} steps", f"accuracy at {EARLY}", "lr", {"experiment": "E2", "rank": 4}, log_x=True),
        Plot(f"E2: accuracy, {LATE} steps", f"accuracy at {LATE}", "lr", {"experiment": "E2", "rank": 4}, log_x=True),
        Plot(f"E3: accuracy at step {EARLY}", f"accuracy at {EARLY}", None, {"experiment": "E3"}),
    ),
    notes="""\
The paper's method section and tables could not be read; nothing here reproduces its numbers. Mode, sign and kappa (0.1
in E1, 1 in E2) were chosen on seeds 0 to 4 of the same two problems, and the statements on sign='rotate' were added
after seeds 100 to 104; the seeds reported here are fresh. Peers start through peft with its defaults (EVA with rho = 1;
CorDA fed 16 rows a call, which served it best). Learning rates in E1 and E2 are the grid 3e-3, 1e-2, 3e-2 for all.
In E1 eight input directions are equally strong, so the pairing of eigenvectors is arbitrary: on some seeds
sign='gradient' pairs badly, and 'rotate' is there for that case.""",
)  # fmt: skip
