"""The claim's smoke form, its statements on hand-made results, and the peers that estimate graphs."""

import numpy as np
import pytest
from sklearn.covariance import graphical_lasso as sklearn_lasso

from subspan.claims import jic_hd, run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.jic_hd import CLAIM, GRAPHS, GRID, PENALTIES, f_score, graph_hubs, pilot_penalties
from subspan.claims.jic_hd_peers import graphical_lasso, hub_graphical_lasso, joint
from subspan.structure import make_common_hub_ggm

GOOD = {
    "paper 50": 0.70, "paper 100": 0.92, "intersection": 0.10, "partial 200": 0.75, "partial 400": 0.92,
    "pooled": 0.65, "truth": 1.0, "weight 2": 0.08, "halves": 0.90, "gap": 1e-8,
}  # fmt: skip


def results(**changes: float) -> Results:
    value = GOOD | {name.replace("_", " "): x for name, x in changes.items()}
    rows = []
    for seed in (0, 1):
        for n in (50, 100):
            setting = {"design": "paper", "n": n, "r": 5}
            rows.append(Row("JIC-HD", setting, "F", seed, value[f"paper {n}"]))
            rows.append(Row("JIC-HD", setting, "gap", seed, value["gap"] if seed else 0.0))
            rows.append(Row("IPC-HD, intersection", setting, "F", seed, value["intersection"]))
        rows.append(Row("JIC-HD", {"design": "paper", "n": 100, "r": 15}, "F", seed, 0.3))  # must not matter
        for n in (200, 400):
            setting = {"design": "partial, strong", "n": n, "r": 5}
            rows.append(Row("JIC-HD", setting, "F", seed, value[f"partial {n}"]))
            rows.append(Row("Pooled eigenspace", setting, "F", seed, value["pooled"]))
        truth = {"design": "partial, strong", "n": 0, "r": 5}
        rows.append(Row("JIC-HD", truth, "F", seed, value["truth"] if seed else 1.0))
        rows.append(Row("JIC-HD", {"design": "uneven", "n": 400, "r": 5}, "weight 2", seed, value["weight 2"]))
        for data in ("breast cancer", "wine"):
            better = value["halves"] if data == "wine" else 0.95
            rows.append(Row("JIC-HD", {"data": data}, "stability", seed, better))
            rows.append(Row("IPC-HD, least influence", {"data": data}, "stability", seed, 0.85))
    return Results(rows)


def test_statements_hold_on_good_numbers():
    verdicts = [s.judge(results()) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in verdicts), verdicts
    assert [v.measured for v in verdicts] == pytest.approx([0.70, 0.92, 0.60, 0.10, 0.27, 1.0, 0.08, 0.05, 1e-8])


@pytest.mark.parametrize(
    ("index", "change"),
    [
        ([0, 2], {"paper_50": 0.55}),
        ([1], {"paper_100": 0.85}),
        ([2], {"intersection": 0.25}),
        ([3], {"partial_200": 0.69}),
        ([4], {"partial_400": 0.79}),
        ([5], {"truth": 0.9}),
        ([6], {"weight_2": 0.2}),
        ([7], {"halves": 0.84}),
        ([8], {"gap": 2e-5}),
    ],
)
def test_statements_fail_on_worse_numbers(index, change):
    verdicts = [s.judge(results(**change)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == index


@pytest.mark.slow
def test_smoke_form_runs_the_whole_path(tmp_path):
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert outcome["smoke"] is True
    assert all(s["problem"] is None for s in outcome["statements"])
    methods = {row["method"] for row in outcome["rows"]}
    assert {"JIC-HD", "JIC-HD, gap rule", "Pooled eigenspace", "IPC-HD, intersection"} <= methods
    partial = {row["method"] for row in outcome["rows"] if row["setting"].get("design") == "partial, strong"}
    for name in ("JIC-HD", "Pooled eigenspace", "IPC-HD, least influence"):
        assert {f"{name}, s = sqrt", f"{name}, s = 1.5sqrt"} <= partial
    assert len(CLAIM.seeds) >= 24


def test_every_graph_estimator_has_a_penalty_wherever_the_full_form_runs_it():
    asked = [(cell.run, cell.params) for cell in CLAIM.cells(False) if cell.params.get("graphs")]
    assert len(asked) == 4
    for run, params in asked:
        design = "paper" if run is jic_hd.measure_design else f"partial, {params['strength']}"
        assert all((design, params["n"]) in PENALTIES[name] for name in GRAPHS)


def test_penalties_come_from_the_pilot_and_from_inside_its_grid():
    assert all(GRID[0] < lam < GRID[-1] and lam in GRID for best in PENALTIES.values() for lam in best.values())
    found = pilot_penalties(["Pooled GLASSO"], (PENALTIES["Pooled GLASSO"]["paper", 100], 1.0), [0])["Pooled GLASSO"]
    assert set(found) == set(PENALTIES["Pooled GLASSO"])
    chosen, large = found["paper", 100].values()
    assert chosen > large


def test_f_score():
    assert f_score([1, 2], [2, 3]) == 0.5
    assert f_score([], [1]) == 0.0
    assert f_score([], []) == 0.0


@pytest.fixture(scope="module")
def S():
    return np.array([np.corrcoef(x.T) for x in make_common_hub_ggm(40, 300, 2, 1, hub_sets=[], random_state=0).X])


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_plain_peer_is_scikit_learns_graphical_lasso(S):
    ours = graphical_lasso(S, 0.1)
    for k in range(2):
        np.testing.assert_allclose(ours[k], sklearn_lasso(S[k], alpha=0.1, tol=1e-6)[1], atol=5e-3)


def test_penalties_reduce_to_each_other(S):
    np.testing.assert_allclose(joint(S, 0.1, 1.0), graphical_lasso(S, 0.1), atol=1e-10)
    twins = np.stack([S[0], S[0]])
    # for equal populations the group penalty is the lasso's: sqrt(K) |(x, x)| = 2 |x|
    np.testing.assert_allclose(joint(twins, 0.1, 0.0)[1], graphical_lasso(S[:1], 0.1)[0], atol=5e-3)
    assert (hub_graphical_lasso(S, 0.1, 1e3) == 0).all()


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_peers_find_the_hub_of_many_samples(name, S):
    assert 0 in graph_hubs(name, S, 0.05)


def test_every_method_reports_on_a_design():
    rows = jic_hd.measure_design(0, False, n=50, r=5, graphs=True)
    methods = {row.method for row in rows if row.metric == "F"}
    assert {*GRAPHS, "JIC-HD, authors' solver", "IPC-HD ratio/5, intersection"} <= methods
