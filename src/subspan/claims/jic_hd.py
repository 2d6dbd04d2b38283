"""Claim: JIC-HD finds hubs common to populations from few samples (Sánchez Gómez et al., ICML 2026).

E1 the paper's simulation, where separate detections fail and pooling does as well; E2 partial hubs, which pooling
mistakes for common ones, and where the number of directions decides who leads; E3 a small population; E4 real data
without a truth, where the scores of half-samples are compared.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.claims.jic_hd_peers import (
    graphical_lasso,
    hub_graphical_lasso,
    hub_weighted,
    joint,
    ridge_inverse,
    row_strength,
)
from subspan.structure import IPCHD, JICHD, GGMData, HubSet, PooledHD, fit_populations, individual_hubs, intersect_hubs
from subspan.structure import make_common_hub_ggm as simulate
from subspan.structure.hubs.samples import covariance

# The peers that estimate graphs: a score per population (K x p); common hubs are heavy in all. "Least row" takes the
# least score over populations first.
GRAPHS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "GLASSO, intersection": lambda S, lam: row_strength(graphical_lasso(S, lam)),
    "GLASSO, least row": lambda S, lam: row_strength(graphical_lasso(S, lam)).min(0, keepdims=True),
    "HW-GLASSO, intersection": lambda S, lam: row_strength(hub_weighted(S, lam)),
    "Hub GLASSO, intersection": lambda S, lam: hub_graphical_lasso(S, lam, HUB_COLUMNS * lam),
    "Joint GLASSO, intersection": lambda S, lam: row_strength(joint(S, lam, 0.5)),
    "Group-sparse, intersection": lambda S, lam: row_strength(joint(S, lam, 0.0)),
    "Pooled GLASSO": lambda S, lam: row_strength(graphical_lasso(S.mean(0, keepdims=True), lam)),
}
# The penalty of hub columns (Hub GLASSO) is tied to the other by this factor; it was not searched.
HUB_COLUMNS = 5.0
GRID = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
# By ``pilot_penalties`` on seeds 0 to 5, that is, by the true hubs: a choice no user has. JIC-HD keeps the paper's.
_PILOTS = (("paper", 50), ("paper", 100), ("partial, strong", 200), ("partial, strong", 400))
PENALTIES: dict[str, dict[tuple[str, int], float]] = {
    name: dict(zip(_PILOTS, penalties, strict=True))
    for name, penalties in {
        "GLASSO, intersection": (0.1, 0.1, 0.06, 0.15),
        "GLASSO, least row": (0.2, 0.1, 0.06, 0.03),
        "HW-GLASSO, intersection": (0.15, 0.06, 0.002, 0.005),
        "Hub GLASSO, intersection": (0.15, 0.15, 0.1, 0.002),
        "Joint GLASSO, intersection": (0.15, 0.06, 0.1, 0.03),
        "Group-sparse, intersection": (0.2, 0.03, 0.1, 0.03),
        "Pooled GLASSO": (0.03, 0.03, 0.002, 0.0002),
    }.items()
}


def pilot_penalties(
    names: Sequence[str] = tuple(GRAPHS), grid: Sequence[float] = GRID, seeds: Sequence[int] = range(6)
) -> dict[str, dict[tuple[str, int], dict[float, float]]]:
    """Mean F-score of each graph estimator on each design at each penalty; each of ``PENALTIES`` is one of the best."""
    scores: dict[str, dict[tuple[str, int], dict[float, float]]] = {name: {} for name in names}
    for design, n in _PILOTS:
        drawn = [draw(design, n, seed) for seed in seeds]
        matrices = [correlations(data) for data in drawn]
        for name in names:
            scores[name][design, n] = {
                lam: float(
                    np.mean([f_score(graph_hubs(name, S, lam), d.common) for S, d in zip(matrices, drawn, strict=True)])
                )
                for lam in grid
            }
    return scores


def draw(design: str, n: int, seed: int, r: int = 5) -> GGMData:
    """The paper's design at p = 100 with r common hubs; or one with partial hubs.

    There populations 0 and 1 share five strong hubs and their edges, which population 2 does not have.
    """
    if design == "paper":
        return simulate(100, n, r=r, random_state=seed)
    common = {"partial, strong": (0.4, 0.6), "partial, weak": (0.25, 0.4)}[design]
    partial = HubSet(range(25, 30), [0, 1], (0.7, 0.9))
    return simulate(100, n, hub_sets=[partial], p_common=common, random_state=seed)


def f_score(found: Sequence[int] | np.ndarray, true: Sequence[int] | np.ndarray) -> float:
    """2 TP / (found + true); 0 where there is nothing to find and nothing found."""
    hits = len(set(map(int, found)) & set(map(int, true)))
    return 2 * hits / max(1, len(found) + len(true))


def heavy(score: np.ndarray) -> set[int]:
    """The 2-sd rule on a score."""
    return set(np.flatnonzero(score > score.mean() + 2 * score.std(ddof=1)).tolist())


def graph_hubs(name: str, S: np.ndarray, lam: float) -> list[int]:
    return sorted(set.intersection(*(heavy(score) for score in GRAPHS[name](S, lam))))


def correlations(data: GGMData) -> np.ndarray:
    return np.array([np.corrcoef(x.T) for x in data.X])


def population_correlations(data: GGMData) -> np.ndarray:
    out = []
    for theta in data.precision:
        sigma = np.linalg.inv(theta)
        scale = np.sqrt(np.diag(sigma))
        out.append(sigma / np.outer(scale, scale))
    return np.array(out)


def quiet(run: Callable[..., list[Row]]) -> Callable[..., list[Row]]:
    """Null spaces and small populations are what is measured here: their warnings are expected."""

    def silently(*args: Any, **kwargs: Any) -> list[Row]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(*args, **kwargs)

    return silently


# ----------------------------------------------------------------------------------------------------- E1, E2 and E3


def measure_design(seed: int, smoke: bool, *, n: int, r: int, graphs: bool) -> list[Row]:
    """E1: the paper's design at p = 100, with r common hubs."""
    setting = {"design": "paper", "n": n, "r": r}
    return quiet(_score)(draw("paper", n, seed, r), setting, seed, smoke, s="sqrt", graphs=graphs)


def measure_partial(seed: int, smoke: bool, *, n: int, strength: str, graphs: bool) -> list[Row]:
    """E2: hubs of two populations in three; s = 5, the true number of common hubs. n = 0: the true correlations."""
    setting = {"design": f"partial, {strength}", "n": n, "r": 5}
    return quiet(_score)(draw(setting["design"], n or 2, seed), setting, seed, smoke, s=5, graphs=graphs)


def _score(data: GGMData, setting: dict[str, Any], seed: int, smoke: bool, *, s: int | str, graphs: bool) -> list[Row]:
    """Every method's hubs; and those of the eigenspaces at other numbers of directions than ``s``."""
    rows: list[Row] = []

    def add(method: str, hubs: Sequence[int] | np.ndarray, **more: float) -> None:
        scores = {
            "F": f_score(hubs, data.common),
            "false positives": len(set(map(int, hubs)) - set(data.common.tolist())),
        }
        rows.extend(Row(method, setting, metric, seed, value) for metric, value in (scores | more).items())

    S = correlations(data) if setting["n"] else population_correlations(data)

    def fit(detector: Any) -> Any:
        return detector.fit_covariances(list(S))

    exact = fit(JICHD(s))
    weights = {f"weight {k}": float(w) for k, w in enumerate(exact.weights_)}
    add("JIC-HD", exact.hubs_, **weights, gap=exact.gap_ / (1 + abs(exact.objective_)))
    add("Pooled eigenspace", fit(PooledHD(s)).hubs_)
    alone = {k: IPCHD(s).fit_covariances([S[k]]) for k in range(len(S))}
    add("IPC-HD, intersection", intersect_hubs(alone.values()))
    omega = np.array([fitted.influence_ for fitted in alone.values()])
    add("IPC-HD, mean influence", sorted(heavy(omega.mean(0))))
    add("IPC-HD, least influence", sorted(heavy(omega.min(0))))
    for other in ("sqrt/2", "sqrt", "1.5sqrt", setting["r"]):
        if other == s:
            continue
        name = "number of hubs" if other == setting["r"] else other
        add(f"JIC-HD, s = {name}", fit(JICHD(other)).hubs_)
        add(f"Pooled eigenspace, s = {name}", fit(PooledHD(other)).hubs_)
        least = np.min([IPCHD(other).fit_covariances([m]).influence_ for m in S], axis=0)
        add(f"IPC-HD, least influence, s = {name}", sorted(heavy(least)))
    rows_of_inverse = row_strength(ridge_inverse(S))
    add("Ridge inverse, least row", sorted(heavy(rows_of_inverse.min(0))))
    add("Ridge inverse, intersection", sorted(set.intersection(*map(heavy, rows_of_inverse))))
    add("Ridge inverse of the pooled", sorted(heavy(row_strength(ridge_inverse(S.mean(0))))))
    if setting["n"] and not smoke:
        add("JIC-HD, authors' solver", fit(JICHD(s, solver="subgradient", random_state=seed)).hubs_)
        add("IPC-HD ratio/5, intersection", intersect_hubs([IPCHD("ratio/5").fit_covariances([m]) for m in S]))
    add("JIC-HD, gap rule", fit(JICHD(s, rule="gap")).hubs_)
    add("JIC-HD, number of hubs known", fit(JICHD(s, rule="top", n_hubs=setting["r"])).hubs_)
    only = individual_hubs(alone, exact.hubs_)
    score = float(np.mean([f_score(only[k], data.individual[k]) for k in only]))
    rows.append(Row("IPC-HD minus common", setting, "individual F", seed, score))
    if graphs:
        for name in GRAPHS:
            add(name, graph_hubs(name, S, PENALTIES[name][setting["design"], setting["n"]]))
    return rows


def measure_uneven(seed: int, smoke: bool) -> list[Row]:
    """E3: 400, 400 and 60 samples."""
    data = simulate(100, (400, 400, 60), random_state=seed)
    setting = {"design": "uneven", "n": 400, "r": 5}
    return quiet(_score)(data, setting, seed, smoke, s="sqrt", graphs=False)


# ----------------------------------------------------------------------------------------------------------------- E4


def load_classes(name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Data and labels; None where the optional Debian package is missing."""
    from sklearn.datasets import load_breast_cancer, load_wine

    from subspan.data import golub, leukemia_all
    from subspan.errors import MissingAsset

    if name in ("breast cancer", "wine"):
        bunch: Any = load_breast_cancer() if name == "breast cancer" else load_wine()
        return bunch.data, bunch.target
    try:
        data = golub() if name == "golub" else leukemia_all()
    except MissingAsset:
        return None
    kind = "leukaemia" if name == "golub" else "lineage"
    return data.most_variable(100).values, np.asarray(data.subtypes[kind])


def scores(X: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Each method's score of every variable, from normal scores of the data."""
    options: dict[str, Any] = {"n_components": "sqrt", "nonparanormal": True}
    alone = np.array([fit.influence_ for fit in fit_populations(IPCHD(**options), X).values()])
    S = np.array([covariance(x, nonparanormal=True) for x in X])
    return {
        "JIC-HD": JICHD(**options).fit(X).influence_,
        "Pooled eigenspace": PooledHD(**options).fit(X).influence_,
        "IPC-HD, least influence": alone.min(0),
        "Ridge inverse, least row": row_strength(ridge_inverse(S)).min(0),
        "GLASSO row norms, alpha 0.1": row_strength(graphical_lasso(S, 0.1)).min(0),
    }


def measure_halves(seed: int, smoke: bool, *, data: str) -> list[Row]:
    """E4: Spearman's correlation of the scores of two random halves of each class."""
    from scipy.stats import spearmanr

    loaded = load_classes(data)
    if loaded is None:
        return []
    x, labels = loaded
    rng = np.random.default_rng(seed)
    halves: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        middle = len(rows) // 2
        for half, part in zip(halves, (rows[:middle], rows[middle:]), strict=True):
            half.append(x[part])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = scores(halves[0]), scores(halves[1])
    return [
        Row(name, {"data": data}, "stability", seed, float(spearmanr(first[name], second[name]).statistic))
        for name in first
    ]


def cells(smoke: bool) -> list[Cell]:
    out = [
        Cell(f"paper n={n} r={r}", measure_design, {"n": n, "r": r, "graphs": graphs and not smoke})
        for n, r, graphs in ((50, 5, True), (100, 5, True), (100, 15, False))
        if r == 5 or not smoke
    ]
    out += [
        Cell(f"partial {kind} n={n}", measure_partial, {"n": n, "strength": kind, "graphs": graphs and not smoke})
        for kind, n, graphs in (
            ("strong", 100, False), ("strong", 200, True), ("strong", 400, True), ("strong", 0, False),
            ("weak", 200, False), ("weak", 0, False),
        )
        if (n != 100 and kind == "strong") or not smoke
    ]  # fmt: skip
    out.append(Cell("uneven", measure_uneven))
    real = ("breast cancer", "wine") if smoke else ("breast cancer", "wine", "golub", "leukemia_all")
    return out + [Cell(f"halves of {data}", measure_halves, {"data": data}) for data in real]


# ----------------------------------------------------------------------------------------------------------- statements

SIMULATED = {"paper": {"design": "paper", "r": 5}, "partial": {"design": "partial, strong"}}


def mean_f(method: str, design: str, n: int) -> Callable[[Results], float]:
    return lambda r: float(r.values(method, "F", n=n, **SIMULATED[design]).mean())


def lead(over: str, design: str, n: int) -> Callable[[Results], float]:
    """Mean over seeds of JIC-HD's F-score minus another's."""
    return lambda r: mean_f("JIC-HD", design, n)(r) - mean_f(over, design, n)(r)


def least_lead_over_intersection(r: Results) -> float:
    return min(lead("IPC-HD, intersection", "paper", n)(r) for n in (50, 100))


def worst_gap(r: Results) -> float:
    return max(row.value for row in r.where("JIC-HD", "gap"))


def small_weight(r: Results) -> float:
    return float(r.values("JIC-HD", "weight 2", design="uneven").mean())


def least_stability_lead(r: Results) -> float:
    """Smallest mean margin of JIC-HD over the minimum of separate scores, on the two data sets anyone has."""
    margins = [
        r.values("JIC-HD", "stability", data=data) - r.values("IPC-HD, least influence", "stability", data=data)
        for data in ("breast cancer", "wine")
    ]
    return min(float(margin.mean()) for margin in margins)


STATEMENTS = (
    Statement("paper's design, n = 50: mean F-score of at least 0.60", mean_f("JIC-HD", "paper", 50), 0.60),
    Statement("paper's design, n = 100: mean F-score of at least 0.86", mean_f("JIC-HD", "paper", 100), 0.86),
    Statement("at both it leads the intersection of separate IPC-HD fits by 0.5", least_lead_over_intersection, 0.5),
    Statement(
        "partial hubs, n = 200, s = 5: it leads the pooled eigenspace by 0.05",
        lead("Pooled eigenspace", "partial", 200),
        0.05,
    ),
    Statement(
        "partial hubs, n = 400, s = 5: it leads the pooled eigenspace by 0.15",
        lead("Pooled eigenspace", "partial", 400),
        0.15,
    ),
    Statement(
        "partial hubs, true correlations, s = 5: F-score 1 in every seed",
        lambda r: float(r.values("JIC-HD", "F", n=0, **SIMULATED["partial"]).min()),
        1.0,
    ),
    Statement("of 400, 400 and 60 samples the 60 have a mean weight of at most 0.15", small_weight, 0.15, "<="),
    Statement(
        "halves of breast cancer and wine agree more than by the least of separate scores", least_stability_lead, 0.0
    ),
    Statement("every solution is certified to 1e-5 (1 + objective)", worst_gap, 1e-5, "<="),
)

NOTES = """In the paper's design the pooled eigenspace, which the paper does not compare with, is as good as JIC-HD: the
weights stay near one third. With hubs that only some populations share JIC-HD leads it, at every number of directions.
With partial hubs s = 5 is the true number of common hubs, which no user has. At the paper's own choices, floor(sqrt p)
and floor(1.5 sqrt p), JIC-HD finds fewer of them, and the least of the separate influences, which five directions
starve, leads from four samples per variable on, and at floor(1.5 sqrt p) from two.
The penalties of the graph estimators were chosen by the true hubs of pilot seeds, which favours them.
Peers that take the least row sum over populations, of a ridge inverse or a graphical lasso, lead with two or more
samples per variable; it is the intersection of separate detections, the paper's rule, that makes them look weak.
On breast cancer the graphical lasso's row norms are more stable between half-samples than any eigenspace, and
JIC-HD's margin over the least separate influence (.005 +- .018 when last measured) is within chance.
golub and leukemia_all (100 most variable genes) need Debian packages and are left out where those are missing.
n = 0 stands for the true correlation matrices. A population without a hub counts as F-score 0 for every method."""

CLAIM = Claim(
    slug="jic_hd",
    title="Joint minimax eigenspaces find hubs that all populations share",
    source="Sánchez Gómez et al., JIC-HD: Joint Inverse Components for Hub Detection, ICML 2026",
    cells=cells,
    statements=STATEMENTS,
    seeds=tuple(range(1000, 1024)),
    smoke_seeds=(0,),
    plots=(
        Plot("Paper's design, n = 50", "F", where={"design": "paper", "n": 50}),
        Plot("Paper's design, n = 100", "F", where={"design": "paper", "n": 100, "r": 5}),
        Plot("Partial hubs, n = 200", "F", where={"design": "partial, strong", "n": 200}),
        Plot("Partial hubs, n = 400", "F", where={"design": "partial, strong", "n": 400}),
        Plot("Agreement of half-samples, breast cancer", "stability", where={"data": "breast cancer"}),
        Plot("Agreement of half-samples, wine", "stability", where={"data": "wine"}),
    ),
    notes=NOTES,
)
