"""Claim: independent groups of latents, and their sub-circuits, are found where a low-rank RNN mixes them.

E1 the paper's simulation (Lorenz and Thomas in one network of 20 channels), test bins interleaved with the training
bins or after them; E2 two rotations in 60 Poisson neurons; E3 a monkey's motor cortex, where the recording is present.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.models import (
    FacRNN,
    align_groups,
    best_partition,
    connectivity_scores,
    dependence,
    ica_readout,
    resolve_groups,
    svd_readout,
)
from subspan.models.facrnn.alignment import partitions
from subspan.models.facrnn.network import scott_std
from subspan.models.facrnn.penalty import Groups, aggregated_partial_correlation

# method -> its arguments beside n_components=6
LORENZ: dict[str, dict[str, Any]] = {
    "lrRNN": {"groups": 1},
    "bdRNN": {"groups": 2, "beta": 0.0, "alpha": 1.0},
    "FacRNN-full": {"groups": 6},
    "FacRNN": {"groups": 2},
}
# On pilot seeds (0 to 2, and 100) one start often ended where a coordinate of each system had changed places: latent R2
# near 0.6, and a training loss 10 % to 40 % higher. So every method has six starts of 300 epochs, chosen by training
# loss; and eight for the rotations, which one start in three separates.
RESTARTS, EPOCHS = 6, 300
ROTATION_RESTARTS, ROTATION_EPOCHS = 8, 80
# On the pilot split (seed 0) beta = 20 led to a better score than 2 or 5, and one lag than three.
CORTEX_RESTARTS, CORTEX_EPOCHS = 3, 200


def quiet(run: Callable[..., list[Row]]) -> Callable[..., list[Row]]:
    """bdRNN with a tanh, and FastICA short of convergence, are what is measured here: their warnings are expected."""

    @functools.wraps(run)
    def silently(*args: Any, **kwargs: Any) -> list[Row]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(*args, **kwargs)

    return silently


def r2(x: np.ndarray, fitted: np.ndarray) -> float:
    """Mean over channels, 1 - SSE / SST."""
    return float(np.mean(1 - np.square(x - fitted).sum(0) / np.square(x - x.mean(0)).sum(0)))


def least_dependent(z: np.ndarray) -> Groups:
    """Of the ten partitions of six coordinates into threes the one with the lowest PC: groups without a penalty."""
    means = torch.from_numpy((z - z.mean(0)) / z.std(0)).float()

    def pc(groups: Groups) -> float:
        generator = torch.Generator().manual_seed(0)
        log_std = float(np.log(scott_std(*means.shape)))
        return aggregated_partial_correlation(means, log_std, groups, draws=1, generator=generator)

    return min((tuple(groups) for groups in partitions(tuple(range(6)), [3, 3])), key=pc)


def standardised_dependence(z: np.ndarray, groups: Any, seed: int) -> dict[str, float]:
    """PC and its null, of latents brought to unit variance: Scott's rule presumes it, and read-outs differ in scale."""
    means = torch.from_numpy((z - z.mean(0)) / z.std(0)).float()
    generator = torch.Generator().manual_seed(seed)
    found = dependence(means, float(np.log(scott_std(*z.shape))), groups, draws=3, generator=generator)
    return {"PC": found.pc, "PC excess": found.pc_excess, "TC": found.tc}


# ------------------------------------------------------------------------------------------------- E1 Lorenz, Thomas


@quiet
def measure_lorenz(seed: int, smoke: bool, *, split: str) -> list[Row]:
    """One simulated network, half of its bins for training; every seed has a network, noise and starts of its own."""
    from subspan.data import lorenz_thomas

    generator = torch.Generator().manual_seed(seed)
    steps, fit_steps = (200, 50) if smoke else (2000, 3000)
    data = lorenz_thomas(steps=steps, fit_steps=fit_steps, generator=generator)
    x, z = data.x.numpy(), data.latents.numpy()
    test = np.arange(steps) % 2 == 1 if split == "interleaved" else np.arange(steps) >= steps // 2
    test_only, train_only = (np.broadcast_to(~rows[:, None], x.shape) for rows in (test, ~test))
    subs = [(data.A[:, list(k)] @ data.B[list(k)]).numpy() for k in data.groups]
    setting = {"data": "Lorenz and Thomas", "split": split}
    rows: list[Row] = []

    def add(method: str, **scores: float) -> None:
        rows.extend(Row(method, setting, metric, seed, value) for metric, value in scores.items())

    def basis(method: str, latents: np.ndarray, parts: np.ndarray, groups: Any, recon: float) -> None:
        """Everything that depends on the basis of the latents, in their nominal groups."""
        report = align_groups(latents, z[test], groups, data.groups)
        scores = {"latent R2": report.r2, "reconstruction R2": recon}
        scores |= standardised_dependence(latents, groups, seed)
        scores["corr W"], scores["corr sub-W"] = connectivity_scores(list(parts), subs)
        scores["latent R2, best partition"] = best_partition(latents, z[test], data.groups, [3, 3]).r2
        scores["component R2"] = align_groups(latents, z[test], 6, 6).r2
        add(method, **scores)

    def fit(method: str, options: Mapping[str, Any]) -> None:
        size = {"epochs": 3, "n_restarts": 2} if smoke else {"epochs": EPOCHS, "n_restarts": RESTARTS}
        model = FacRNN(6, random_state=seed, **size, **options).fit(x, mask=train_only)
        recon = r2(x[test], model.reconstruct(x)[test])
        # a method without groups, or with six, is scored on the same two as the others
        groups = resolve_groups(2, 6)
        A, B = model.network_.A.double().numpy(), model.network_.B.double().numpy()
        parts = np.array([A[:, list(k)] @ B[list(k)] for k in groups])
        basis(method, model.transform(x)[test].astype(np.float64), parts, groups, recon)
        u = model.history(x, mask=test_only)
        starts = [net.encode(torch.from_numpy(u).float()).double().numpy() for net in model.restarts_]
        spread = [align_groups(latents, z[test], groups, data.groups).r2 for latents in starts]
        add(method, **{"latent R2, mean of starts": float(np.mean(spread)), "latent R2, worst start": min(spread)})
        if method == "lrRNN":
            readouts = {
                "lrRNN + SVD": svd_readout(model),
                "lrRNN + ICA": ica_readout(model, x, mask=train_only, random_state=seed),
            }
            for name, readout in readouts.items():
                basis(name, readout.latents(u), readout.sub_connectivities(groups), groups, recon)
                found = least_dependent(readout.latents(model.history(x, mask=train_only)))
                parts = readout.sub_connectivities(found)
                basis(f"{name}, grouped by PC", readout.latents(u), parts, found, recon)

    for method, options in LORENZ.items():
        fit(method, options)
    return rows


# --------------------------------------------------------------------------------------------------- E2 rotations


@quiet
def measure_rotations(seed: int, smoke: bool) -> list[Row]:
    """Two planar rotations in 60 Poisson neurons."""
    from subspan.data import rotating_counts

    generator = torch.Generator().manual_seed(seed)
    data = rotating_counts(n_trials=10 if smoke else 60, rate=4.0, generator=generator)
    counts, z = data.counts.numpy(), data.latents.numpy().reshape(-1, 4)
    options = {
        "likelihood": "poisson", "link": "exp", "sqrt_counts": True, "nonlinearity": "identity", "lags": 4,
        "kernel": "uniform", "lr": 1e-2, "epochs": 3 if smoke else ROTATION_EPOCHS, "random_state": seed,
        "n_restarts": 2 if smoke else ROTATION_RESTARTS,
    }  # fmt: skip
    rows: list[Row] = []

    def add(method: str, latents: np.ndarray, **more: float) -> None:
        report = align_groups(latents, z, 2, data.groups)
        scores = {
            "matched R2": float(report.matched.min()),
            "leak": report.leak,
            "latent R2": report.r2,
            "latent R2, best partition": best_partition(latents, z, data.groups, [2, 2]).r2,
            "R2 of all on all": align_groups(latents, z, 1, 1).r2,
        }
        setting = {"data": "rotations"}
        rows.extend(Row(method, setting, metric, seed, value) for metric, value in (scores | more).items())

    for method, groups in {"lrRNN": 1, "FacRNN": 2}.items():
        model = FacRNN(4, groups, **options).fit(counts)
        latents = model.transform(counts).reshape(-1, 4).astype(np.float64)
        add(method, latents, **standardised_dependence(latents, ((0, 1), (2, 3)), seed))
        if method == "lrRNN":
            u = model.history(counts)
            for name, readout in {
                "SVD": svd_readout(model),
                "ICA": ica_readout(model, counts, random_state=seed),
            }.items():
                latents = readout.latents(u)
                add(f"lrRNN + {name}", latents, **standardised_dependence(latents, ((0, 1), (2, 3)), seed))
    return rows


# ------------------------------------------------------------------------------------------------ E3 motor cortex


def position_scores(latents: np.ndarray, position: np.ndarray) -> dict[str, float]:
    """R^2 of the hand's x and y on one group of summed latents each, and how much better than at 45 degrees."""
    summed = latents.cumsum(1).reshape(-1, latents.shape[2]).astype(np.float64)

    def at(degrees: float) -> float:
        angle = np.radians(degrees)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        return align_groups(summed, (position @ turn).reshape(-1, 2), 2, 2).r2

    upright, oblique = at(0), at(45)
    flat = position.reshape(-1, 2)
    return {
        "position R2": upright,
        "preferred axis": upright - oblique,
        "position R2, best partition": best_partition(summed, flat, 2, [2, 2]).r2,
        "position R2 of all": align_groups(summed, flat, 1, 1).r2,
    }


@quiet
def measure_cortex(seed: int, smoke: bool) -> list[Row]:
    """Two thirds of the trials of every direction train, the others are scored. No rows where the data is missing."""
    from subspan.data import motor_cortex
    from subspan.errors import MissingAsset

    try:
        data = motor_cortex()
    except MissingAsset:
        return []
    rng = np.random.default_rng(seed)
    test = np.zeros(len(data.counts), dtype=bool)
    for direction in np.unique(data.direction):
        test[rng.permutation(np.flatnonzero(data.direction == direction))[:7]] = True
    train_x, test_x, position = data.counts[~test], data.counts[test], data.position()[test]
    options = {
        "likelihood": "poisson", "sqrt_counts": True, "nonlinearity": "identity", "pad": "edge", "n_ref": 512,
        "epochs": 2 if smoke else CORTEX_EPOCHS, "n_restarts": 1 if smoke else CORTEX_RESTARTS, "random_state": seed,
    }  # fmt: skip
    rows: list[Row] = []

    def add(method: str, latents: np.ndarray, **more: float) -> None:
        scores = position_scores(latents, position) | more
        flat = latents.reshape(-1, latents.shape[2]).astype(np.float64)
        scores |= standardised_dependence(flat, resolve_groups(2, flat.shape[1]), seed)
        rows.extend(Row(method, {"data": "motor cortex"}, metric, seed, value) for metric, value in scores.items())

    for method, groups in {"lrRNN": 1, "FacRNN": 2}.items():
        model = FacRNN(4, groups, **options).fit(train_x)
        z = model.transform(test_x)
        add(method, z, **{"log-likelihood": model.score(test_x, draws=16)})
        if method == "lrRNN":
            u = model.history(test_x)
            ica = ica_readout(model, train_x, random_state=seed)
            for name, readout in {"SVD": svd_readout(model), "ICA": ica}.items():
                add(f"lrRNN + {name}", readout.latents(u).reshape(z.shape))
    return rows


def cells(smoke: bool) -> list[Cell]:
    short = [
        Cell("Lorenz and Thomas, interleaved", measure_lorenz, {"split": "interleaved"}),
        Cell("rotations", measure_rotations),
        Cell("motor cortex", measure_cortex),
    ]
    return short if smoke else [*short, Cell("Lorenz and Thomas, contiguous", measure_lorenz, {"split": "contiguous"})]


# ----------------------------------------------------------------------------------------------------- statements


def mean(r: Results, method: str, metric: str, split: str = "interleaved") -> float:
    return float(r.values(method, metric, split=split).mean())


def lead(over: str, metric: str = "latent R2") -> Callable[[Results], float]:
    """Mean over seeds of FacRNN's score minus another's, test bins between the training bins."""
    return lambda r: mean(r, "FacRNN", metric) - mean(r, over, metric)


def least_pc_lead(r: Results) -> float:
    """How far FacRNN's PC lies below the lowest of the five others."""
    others = ("lrRNN", "lrRNN + SVD", "lrRNN + ICA", "bdRNN", "FacRNN-full")
    return min(mean(r, other, "PC") for other in others) - mean(r, "FacRNN", "PC")


def rotation(metric: str) -> Callable[[Results], float]:
    return lambda r: float(r.values("FacRNN", metric, data="rotations").mean())


STATEMENTS = (
    Statement("latent R2 exceeds the low-rank RNN's by 0.15", lead("lrRNN"), 0.15),
    Statement("it exceeds that of the low-rank RNN with ICA by 0.15", lead("lrRNN + ICA"), 0.15),
    Statement("it exceeds the block-diagonal RNN's by 0.15", lead("bdRNN"), 0.15),
    Statement("it exceeds that of the low-rank RNN's singular vectors by 0.08", lead("lrRNN + SVD"), 0.08),
    Statement("its dependence between groups (PC) is the lowest of all six", least_pc_lead, 0.0),
    Statement("reconstruction R2 is at most 0.05 below the low-rank RNN's", lead("lrRNN", "reconstruction R2"), -0.05),
    Statement("correlation of the sub-circuits exceeds the low-rank RNN's by 0.15", lead("lrRNN", "corr sub-W"), 0.15),
    Statement("two rotations: each is matched with an R2 of at least 0.7", rotation("matched R2"), 0.7),
    Statement("two rotations: R2 of a rotation on the other's group at most 0.2", rotation("leak"), 0.2, "<="),
)

NOTES = """PC is measured on latents brought to unit variance, at Scott's bandwidth of the test bins, for all alike.
Where test bins lie between training bins, singular vectors or ICA of the low-rank RNN are as good or better once their
coordinates are grouped by PC, which needs no truth and no penalty; on later bins FacRNN leads. The paper does not
compare with this.
Reconstruction of the second half fails for all methods: Thomas's system without damping wanders off.
The motor cortex is scored only where its recording is present; there the methods cannot be told apart on new trials."""

CLAIM = Claim(
    slug="facrnn",
    title="Independent groups of latents and their sub-circuits from one recording",
    source="Li et al., A Factorized Low-Rank RNN Framework, ICML 2026, arXiv 2511.13899",
    cells=cells,
    statements=STATEMENTS,
    seeds=tuple(range(200, 205)),
    smoke_seeds=(0,),
    plots=(
        Plot("Latent R2, interleaved split", "latent R2", where={"split": "interleaved"}),
        Plot("Latent R2, contiguous split", "latent R2", where={"split": "contiguous"}),
        Plot("PC, interleaved split", "PC", where={"split": "interleaved"}),
        Plot("R2 of the rotations", "latent R2", where={"data": "rotations"}),
        Plot("R2 of the hand's position", "position R2", where={"data": "motor cortex"}),
    ),
    notes=NOTES,
)
