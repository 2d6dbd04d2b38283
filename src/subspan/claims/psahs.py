"""Claim: adjusting both graphs to one homophily helps adversarial adaptation when homophily shifts (PSAHS, ICML 2026).

Digits graphs (spec 7): halves of scikit-learn's digits, edges drawn by class at a homophily that shifts. Contextual
stochastic block models. Blog1 and Blog2, real, where they lie beside the checkout. Accuracy on all nodes of the target,
last epoch; no label of the target is used by any method.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.claims.psahs_peers import Asymmetric, Mixed, Rebuilt, StruRW, without_edges
from subspan.data import Graph, blogcatalog, contextual_sbm, digits_graphs
from subspan.errors import MissingAsset
from subspan.structure import PSAHS
from subspan.structure.homophily.adjust import weighted_homophily

DOWN, UP, SAME, HIGH = "0.77 -> 0.30", "0.29 -> 0.79", "0.40 -> 0.39", "0.77 -> 0.79"
BETAS = {SAME: ((4, 6), (4, 6)), DOWN: ((8, 2), (2, 5)), UP: ((2, 5), (8, 2)), HIGH: ((8, 2), (8, 2))}
BLOCKS = {"0.8 -> 0.2": (0.8, 0.2), "0.2 -> 0.8": (0.2, 0.8), "0.4 -> 0.4": (0.4, 0.4)}
ERM, DANN, OURS, MLP = "GNN (ERM)", "DANN", "PSAHS", "MLP"
FORTH, BACK = "Blog1 -> Blog2", "Blog2 -> Blog1"
SEEDS = tuple(range(100, 110))
FEW = 3  # seeds of what is only reported

# How each contender is made from the attributes' width and what all share (epochs, hidden, seed, mlp).
CONTENDERS: dict[str, Callable[[int, dict[str, Any]], PSAHS]] = {
    ERM: lambda p, o: PSAHS(sides="none", lambda_max=0.0, **o),
    DANN: lambda p, o: PSAHS(sides="none", **o),
    OURS: lambda p, o: PSAHS(**o),
    "PSAHS, source side only": lambda p, o: PSAHS(sides="source", **o),
    "PSAHS, target side only": lambda p, o: PSAHS(sides="target", **o),
    "PSAHS, no alignment": lambda p, o: PSAHS(lambda_max=0.0, **o),
    "PSAHS, official (lambda 1)": lambda p, o: PSAHS(preset="official", **o),
    "StruRW": lambda p, o: StruRW(sides="none", lambda_max=0.0, **o),
    "A2GNN": lambda p, o: PSAHS(sides="none", encoder=Asymmetric(p, o["hidden"]), **o),
    "mixed filters (HGDA)": lambda p, o: PSAHS(sides="none", encoder=Mixed(p, o["hidden"]), **o),
    "rebuilt graphs (RSGDA)": lambda p, o: PSAHS(sides="none", encoder=Rebuilt(p, o["hidden"]), **o),
}
METHODS = (*CONTENDERS, MLP)


# ---------------------------------------------------------------------------------------------------------- experiments


def compare(
    source: Graph, target: Graph, setting: dict[str, Any], seed: int, *, hidden: int, smoke: bool
) -> list[Row]:  # fmt: skip
    """Every contender on one pair of graphs. All share one MLP, and none is given the target's labels."""
    answers, asked = target.y, Graph(target.x, target.edge_index)
    assert answers is not None
    options: dict[str, Any] = {"epochs": 100, "hidden": hidden, "seed": seed, "mlp": None}
    if smoke:
        options |= {"epochs": 2, "hidden": 8, "mlp": torch.nn.Linear(source.x.shape[1], 2)}
    fitted: dict[str, PSAHS] = {}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # what the diagnosis says is measured below
        for name, make in CONTENDERS.items():
            torch.manual_seed(seed)  # the peers' encoders are made here
            model = make(source.x.shape[1], options)
            fitted[name] = model.fit(without_edges(source) if name == "A2GNN" else source, asked)
            options["mlp"] = model.mlp_
    found = {name: model.labels_ for name, model in fitted.items()}
    found[MLP] = options["mlp"](target.x).argmax(1)
    accuracy = {name: float((labels == answers).double().mean()) for name, labels in found.items()}
    rows = [Row(name, setting, "accuracy", seed, value) for name, value in accuracy.items()]

    report = fitted[ERM].report_
    measured = {
        "homophily gap": source_gap(fitted[OURS], source),
        "coverage": fitted[OURS].report_.coverage,
        "lead of the GNN over the MLP": accuracy[ERM] - accuracy[MLP],
        "lead predicted, rewired": report.gnn_matched - report.mlp_source,
        "lead predicted, source as it is": report.gnn_source - report.mlp_source,
    }
    return rows + [Row("diagnosis", setting, metric, seed, value) for metric, value in measured.items()]


def source_gap(model: PSAHS, source: Graph) -> float:
    """Largest |h' - h0| over the source's nodes that were below h0."""
    assert source.y is not None
    reached = weighted_homophily(model.source_.edge_index, model.source_.edge_weight, source.y)
    return float((reached - model.h0)[model.report_.source_h < model.h0].abs().max())


def measure_digits(seed: int, smoke: bool, *, pair: str) -> list[Row]:
    """The spec's experiment; the pair that no statement is about only for the first seeds."""
    if pair == HIGH and seed >= SEEDS[FEW]:
        return []
    ours, theirs = ((float(a), float(b)) for a, b in BETAS[pair])
    source, target = digits_graphs(ours, theirs, size=600 if smoke else 1797, random_state=seed)
    return compare(source, target, {"graphs": "digits", "pair": pair}, seed, hidden=64, smoke=smoke)


def measure_blocks(seed: int, smoke: bool, *, pair: str) -> list[Row]:
    """Five classes of about 100 nodes on each side, 16 attributes, the target's all shifted by 0.5."""
    if seed >= SEEDS[FEW]:
        return []
    rng = np.random.RandomState(seed)
    means = 0.6 * rng.normal(size=(5, 16))
    source, target = (
        contextual_sbm(120 if smoke else 500, means + shift, homophily=h, degree=10.0, random_state=rng)
        for h, shift in zip(BLOCKS[pair], (0.0, 0.5), strict=True)
    )
    return compare(source, target, {"graphs": "blocks", "pair": pair}, seed, hidden=64, smoke=smoke)


def measure_blogs(seed: int, smoke: bool, *, pair: str) -> list[Row]:
    """Real graphs: seeds only change the source's split, the networks' start and the new edges."""
    if seed >= SEEDS[2 if pair == FORTH else 1]:  # three minutes each
        return []
    try:
        one, two = blogcatalog()
    except MissingAsset:
        return []
    graphs = (one, two) if pair == FORTH else (two, one)
    return compare(*graphs, {"graphs": "blogs", "pair": pair}, seed, hidden=128, smoke=smoke)


def cells(smoke: bool) -> list[Cell]:
    if smoke:
        return [
            *(Cell(f"digits {pair}", measure_digits, {"pair": pair}) for pair in (DOWN, UP, SAME)),
            Cell("blocks", measure_blocks, {"pair": "0.4 -> 0.4"}),
        ]
    return [
        *(Cell(f"digits {pair}", measure_digits, {"pair": pair}) for pair in BETAS),
        *(Cell(f"blocks {pair}", measure_blocks, {"pair": pair}) for pair in BLOCKS),
        *(Cell(pair, measure_blogs, {"pair": pair}) for pair in (FORTH, BACK)),
    ]


# ----------------------------------------------------------------------------------------------------------- statements


def lead(r: Results, over: str, pair: str) -> np.ndarray:
    """Accuracy of PSAHS minus another's, by seed."""
    where = {"graphs": "digits", "pair": pair}
    return r.values(OURS, "accuracy", **where) - r.values(over, "accuracy", **where)


def largest_gap(r: Results) -> float:
    return max(row.value for row in r.where("diagnosis", "homophily gap"))


def upper(difference: np.ndarray) -> float:
    """Mean plus one standard error (the mean itself for one seed)."""
    error = difference.std(ddof=1) / len(difference) ** 0.5 if len(difference) > 1 else 0.0
    return float(difference.mean() + error)


def share_of_right_warnings(r: Results, metric: str) -> float:
    """How often the sign of the predicted lead of the GNN over the MLP is that on the target."""
    predicted = [row.value for row in r.where("diagnosis", metric)]
    measured = [row.value for row in r.where("diagnosis", "lead of the GNN over the MLP")]
    return float(np.mean([(p > 0) == (m > 0) for p, m in zip(predicted, measured, strict=True)]))


STATEMENTS = (
    Statement("on the source h' = h0 exactly: largest gap (float32 weights)", largest_gap, 1e-6, "<="),
    Statement("0.77 -> 0.30: PSAHS leads DANN by 0.05", lambda r: float(lead(r, DANN, DOWN).mean()), 0.05),
    Statement("in at least 8 of 10 seeds", lambda r: float((lead(r, DANN, DOWN) > 0).mean()), 0.8),
    Statement("0.29 -> 0.79: PSAHS leads the plain GNN", lambda r: float(lead(r, ERM, UP).mean()), 0.0),
    Statement("0.40 -> 0.39: nor does it trail by one standard error", lambda r: upper(lead(r, ERM, SAME)), 0.0),
    Statement(
        "the diagnosis says whether edges help, without labels: right in 0.8 of all runs",
        lambda r: share_of_right_warnings(r, "lead predicted, rewired"),
        0.8,
    ),
)

NOTES = """The lead over the plain GNN at 0.29 -> 0.79 was -.025 +- .017 when last measured. The alignment loses it:
without, the two tie there, and the adjustment leads by .10 and .13 on the other two pairs, in every seed.
The MLP, which sees no edges, is better than every variant of PSAHS at 0.77 -> 0.30, and on BlogCatalog.
The peers are short versions in one training loop: StruRW as pygda has it, A2GNN's asymmetric propagation with two hops,
the mixed filters of HGDA and the rebuilt graphs of RSGDA, all aligned as PSAHS is, except StruRW, which is not.
Nobody is given a label of the target, and nothing is selected: the last of 100 epochs counts."""

CLAIM = Claim(
    slug="psahs",
    title="Adjusting both graphs to one homophily helps adversarial adaptation when homophily shifts",
    source="Progressive Graph Structure Adjustment for Homophily Shift Adaptation, ICML 2026",
    cells=cells,
    statements=STATEMENTS,
    seeds=SEEDS,
    smoke_seeds=(100,),
    plots=[
        *(
            Plot(f"Digits graphs, homophily {pair}", "accuracy", where={"pair": pair}, methods=METHODS)
            for pair in BETAS
        ),
        Plot("Blog1 -> Blog2", "accuracy", where={"pair": "Blog1 -> Blog2"}, methods=METHODS),
    ],
    notes=NOTES,
)
