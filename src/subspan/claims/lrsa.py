"""Claim: low-rank spatial attention learns solution operators, on any points and in bf16 (Yang et al., ICML 2026).

Darcy flow: 600 samples on 21 x 21 nodes, tested on 100 others there, on 41 x 41 nodes and on scattered ones. A stirred
fluid: one second ahead, then ten seconds by repetition. Precision: Darcy flow again, smaller, under bf16 autocast.
Every seed draws data and start anew; the same settings hold for all methods.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.data import DarcyFlow, DarcyGenerator, NavierStokesGenerator
from subspan.models import LRSAOperator, PhysicsAttention, SpectralMixer, relative_l2

Build = Callable[[int, torch.Generator], LRSAOperator]


LRSA, MLP = "LRSA", "LRSA, MLP for latent attention"
EQUAL, MATCHED = "Physics attention, equal width", "Physics attention, equal parameters"
FOURIER = "Fourier layers, equal width"


def methods(latents: int) -> dict[str, Build]:
    """d 32 (56 for equal parameters) and three blocks; LRSA with two heads of width 16."""

    def lrsa(**options) -> Build:
        return lambda channels, generator: LRSAOperator(
            2, channels, 1, 32, 3, 2, latents, generator=generator, **options
        )

    def physics(d: int) -> Build:
        return lambda channels, generator: LRSAOperator(
            2, channels, 1, d, 3, norm="layer", generator=generator,
            mixer=lambda depth: PhysicsAttention(d, 4, latents, depth=depth, generator=generator),
        )  # fmt: skip

    def fourier(channels: int, generator: torch.Generator) -> LRSAOperator:
        return LRSAOperator(
            2, channels, 1, 32, 3, generator=generator, mixer=lambda depth: SpectralMixer(32, 8, generator=generator)
        )

    return {
        LRSA: lrsa(),
        "LRSA without QK-norm": lrsa(qk_norm=False),
        MLP: lrsa(latent_attention="ffn"),
        EQUAL: physics(32),
        MATCHED: physics(56),
        FOURIER: fourier,
    }


DARCY = (LRSA, "LRSA without QK-norm", EQUAL, MATCHED)
FLUID = (LRSA, MLP, MATCHED, FOURIER)
PRECISION = (LRSA, EQUAL)


class Task(NamedTuple):
    """Points (N, 2), inputs (n, N, c) and outputs (n, N, 1) of training, validation and test samples, in this order."""

    x: Tensor
    f: Tensor
    u: Tensor
    n_train: int
    n_test: int

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        rows = {
            "train": slice(self.n_train),
            "validation": slice(self.n_train, -self.n_test),
            "test": slice(-self.n_test, None),
        }[name]
        return self.f[rows], self.u[rows]


def darcy(size: int, seed: int, n_train: int, n_test: int) -> Task:
    flow = DarcyGenerator(size, random_state=seed).sample(n_train + n_test)
    test = darcy_test(size, seed, n_test)
    f, u = (torch.cat(parts)[..., None] for parts in ((flow.a, test.a), (flow.u, test.u)))
    return Task(flow.coords, f, u, n_train, n_test)


def darcy_test(size: int, seed: int, n: int) -> DarcyFlow:
    """The same fields at every size."""
    return DarcyGenerator(size, np.random.default_rng([seed, 1])).sample(n)


class Trained(NamedTuple):
    """A model, and the units of its training data."""

    model: LRSAOperator
    f_mean: Tensor
    f_std: Tensor
    u_mean: Tensor
    u_std: Tensor

    def predict(self, x: Tensor, f: Tensor, mass: Tensor | None = None) -> Tensor:
        side = round(x.shape[0] ** 0.5)
        grid = (side, side) if side * side == x.shape[0] else None
        mass = None if mass is None else mass.expand(len(f), -1)
        out = self.model(
            x.expand(len(f), -1, -1), (f - self.f_mean) / self.f_std, mass=mass, grid_shape=grid, check=False
        )
        return self.u_mean + self.u_std * out.float()

    @torch.inference_mode()
    def error(self, x: Tensor, f: Tensor, u: Tensor, mass: Tensor | None = None) -> float:
        parts = [self.predict(x, part, mass) for part in f.split(50)]
        return float(relative_l2(torch.cat(parts), u))


def fit(
    build: Build, task: Task, seed: int, *, epochs: int, lr: float = 1e-2, batch: int = 16, bf16: bool = False
) -> Trained:
    """AdamW, one cycle, relative error of fields in their own units, gradients clipped at norm 1."""
    generator = torch.Generator().manual_seed(seed)
    f, u = task.split("train")
    trained = Trained(build(f.shape[-1], generator), f.mean((0, 1)), f.std((0, 1)), u.mean((0, 1)), u.std((0, 1)))
    steps = epochs * (len(f) // batch)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(f), generator=generator)[: len(f) // batch * batch].split(batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                prediction = trained.predict(task.x, f[rows])
            optimizer.zero_grad()
            relative_l2(prediction, u[rows]).backward()
            torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return trained


# --------------------------------------------------------------------------------------------------------------- cells


def measure_darcy(seed: int, smoke: bool, *, method: str) -> list[Row]:
    """Error where it was trained, on the finer grid, and on scattered points of it with and without masses."""
    size, n_train, n_test, epochs = (15, 16, 4, 1) if smoke else (21, 600, 100, 30)
    task = darcy(size, seed, n_train, n_test)
    trained = fit(methods(16)[method], task, seed, epochs=epochs, lr=3e-3)
    values = {
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "validation error": trained.error(task.x, *task.split("validation")),
        "error": trained.error(task.x, *task.split("test")),
    }
    x, f, u = darcy_test(2 * size - 1, seed, n_test)
    f, u = f[..., None], u[..., None]
    values["error, finer grid"] = trained.error(x, f, u)
    # nodes kept with a probability that grows with x: the mass of a node is one over it
    share = (0.2 + x[:, 0]) / 2.4
    keep = torch.rand(len(share), generator=torch.Generator().manual_seed(seed)) < share
    some = x[keep], f[:, keep], u[:, keep]
    values["error, scattered"] = trained.error(*some)
    values["error, scattered, masses"] = trained.error(*some, mass=1 / share[keep])
    return [Row(method, {"task": "darcy"}, metric, seed, value) for metric, value in values.items()]


def measure_floors(seed: int, smoke: bool) -> list[Row]:
    """What needs no network: the mean field, and ridge regression on the coefficient."""
    size, n_train, n_test = (15, 16, 4) if smoke else (21, 600, 100)
    task = darcy(size, seed, n_train, n_test)
    (f, u), (f_test, u_test) = (tuple(t[..., 0].double() for t in task.split(part)) for part in ("train", "test"))
    centred, mean = f - f.mean(0), u.mean(0)
    # penalty 1e4, in the coefficient's own units
    weight = torch.linalg.solve(
        centred.T @ centred + 1e4 * torch.eye(f.shape[1], dtype=f.dtype), centred.T @ (u - mean)
    )
    predictions = {"Mean field": mean.expand_as(u_test), "Ridge": mean + (f_test - f.mean(0)) @ weight}
    return [
        Row(name, {"task": "darcy"}, "error", seed, float(relative_l2(p[..., None], u_test[..., None])))
        for name, p in predictions.items()
    ]


def measure_fluid(seed: int, smoke: bool, *, method: str) -> list[Row]:
    """Vorticity one second ahead, learnt from pairs; tested by ten such steps from the start."""
    runs, n_test, frames, epochs = (8, 2, 3, 1) if smoke else (40, 15, 11, 8)
    flow = NavierStokesGenerator(32, random_state=seed).sample(runs + 2 * n_test, frames)
    every_second = torch.arange(32 * 32).view(32, 32)[::2, ::2].flatten()
    w = flow.w[:, :, every_second, None]
    pairs = frames - 1
    now, then = (t.reshape(-1, *t.shape[2:]) for t in (w[:, :-1], w[:, 1:]))
    task = Task(flow.coords[every_second], now, then, runs * pairs, n_test * pairs)
    trained = fit(methods(32)[method], task, seed, epochs=epochs)
    with torch.inference_mode():
        state, errors = w[-n_test:, 0], []
        for k in range(1, frames):
            state = trained.predict(task.x, state)
            errors.append(float(relative_l2(state, w[-n_test:, k])))
    values = {
        "validation error": trained.error(task.x, *task.split("validation")),
        "error, one step": trained.error(task.x, *task.split("test")),
        "error, all steps": float(np.mean(errors)),
    }
    return [Row(method, {"task": "fluid"}, metric, seed, value) for metric, value in values.items()]


def measure_precision(seed: int, smoke: bool, *, method: str) -> list[Row]:
    """The same training in float32 and under bf16 autocast; small, because most CPUs only imitate bf16."""
    size, n_train, n_test, epochs = (7, 16, 4, 1) if smoke else (13, 200, 50, 8)
    task = darcy(size, seed, n_train, n_test)
    rows = []
    for name in ("float32", "bfloat16"):
        trained = fit(methods(32)[method], task, seed, epochs=epochs, bf16=name == "bfloat16")
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bfloat16"):
            error = trained.error(task.x, *task.split("test"))
        rows.append(Row(method, {"task": "precision", "dtype": name}, "error", seed, error))
    return rows


def cells(smoke: bool) -> list[Cell]:
    return [
        Cell("floors", measure_floors),
        *(Cell(f"darcy, {method}", measure_darcy, {"method": method}) for method in DARCY),
        *(Cell(f"fluid, {method}", measure_fluid, {"method": method}) for method in FLUID),
        *(Cell(f"precision, {method}", measure_precision, {"method": method}) for method in PRECISION),
    ]


# ---------------------------------------------------------------------------------------------------------- statements


def mean(r: Results, method: str, metric: str = "error", **setting: str) -> float:
    return float(r.values(method, metric, **({"task": "darcy"} | setting)).mean())


def against(peer: str) -> Callable[[Results], float]:
    """LRSA's mean error over the peer's."""
    return lambda r: mean(r, LRSA) / mean(r, peer)


def masses_help(r: Results) -> float:
    """Share of seeds in which masses do not raise the error on scattered points."""
    error = {
        metric: r.values(LRSA, metric, task="darcy") for metric in ("error, scattered", "error, scattered, masses")
    }
    return float((error["error, scattered, masses"] <= error["error, scattered"]).mean())


def bf16_change(r: Results) -> float:
    """|mean error in bf16 / mean error in float32 - 1|."""
    low, full = (mean(r, LRSA, task="precision", dtype=dtype) for dtype in ("bfloat16", "float32"))
    return abs(low / full - 1)


STATEMENTS = (
    Statement("on Darcy flow LRSA's error is at most 0.85 of ridge regression's", against("Ridge"), 0.85, "<="),
    Statement("and at most that of physics attention of equal width", against(EQUAL), 1.0, "<="),
    Statement("normalising queries and keys does not raise it", against("LRSA without QK-norm"), 1.0, "<="),
    Statement(
        "on a grid twice as fine, without training there, its error is at most 1.5 times as large",
        lambda r: mean(r, LRSA, "error, finer grid") / mean(r, LRSA),
        1.5,
        "<=",
    ),
    Statement("on scattered points masses do no harm, in two seeds of three", masses_help, 2 / 3),
    Statement("bf16 autocast changes its error by at most a tenth", bf16_change, 0.1, "<="),
)

NOTES = """Not claimed, because it does not come out at this size: the paper's lead over physics attention of equal
parameters, and what attention between latents adds over an MLP. Both are in the table. Fourier layers of equal width
have thirteen times the parameters and know nothing but full grids; the fluid, periodic and smooth, is made for them."""

CLAIM = Claim(
    slug="lrsa",
    title="Low-rank spatial attention learns solution operators on any points, also in bf16",
    source="Yang, Xin, Du and Liu, Simple yet Effective: Low-Rank Spatial Attention, ICML 2026, arXiv 2604.03582",
    cells=cells,
    statements=STATEMENTS,
    seeds=(300, 301, 302),
    plots=(
        Plot("Relative L2 error on Darcy flow, 21 x 21 nodes", "error", where={"task": "darcy"}),
        Plot("The same on 41 x 41 nodes, without training there", "error, finer grid", where={"task": "darcy"}),
        Plot("Fluid, mean over ten seconds by one-second steps", "error, all steps", where={"task": "fluid"}),
        Plot("Darcy flow, float32", "error", where={"task": "precision", "dtype": "float32"}),
        Plot("Darcy flow, bf16 autocast", "error", where={"task": "precision", "dtype": "bfloat16"}),
    ),
    notes=NOTES,
)
