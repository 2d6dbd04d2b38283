"""The claim's smoke form, and its statements on hand-made results."""

import pytest

from subspan.claims.claim import Results, Row
from subspan.claims.prism import CLAIM, EPSILONS, GAUGES, LRS, METHODS, cells, run_grid
from subspan.claims.runner import run_claim

GOOD = {
    "prism": {8.0: 86.0, 3.0: 80.0, 1.0: 65.0},
    "ffa": {8.0: 79.0, 3.0: 74.0, 1.0: 53.0},
    "adamw, standard start": {8.0: 81.0, 3.0: 78.0, 1.0: 65.0},
    "adamw, balanced start": {8.0: 87.0, 3.0: 80.0, 1.0: 64.0},
}
GAUGE_RANGE = {"prism": 0.0, "adamw, balanced start": 40.0, "dp-sgd, balanced start": 70.0}


def results(scores: dict, ranges: dict, small_rate: float) -> Results:
    """Best at lr 0.03 by validation; a better test score at 0.1 must not be used."""
    rows = []
    for seed in (0, 1):
        for method, by_epsilon in scores.items():
            for epsilon, value in by_epsilon.items():
                for lr, validation, test in ((0.01, 50.0, small_rate if method == "prism" else 60.0),
                                             (0.03, 90.0, value), (0.05, 60.0, 70.0), (0.1, 10.0, 99.0)):  # fmt: skip
                    setting = {"epsilon": epsilon, "lr": lr}
                    rows += [Row(method, setting, "validation_accuracy", seed, validation),
                             Row(method, setting, "test_accuracy", seed, test)]  # fmt: skip
        for method, spread in ranges.items():
            for i, c in enumerate(GAUGES):
                value = 80.0 - (spread if i == 4 else 0.0)
                rows.append(Row(f"{method}, gauge", {"c": c}, "test_accuracy", seed, value))
    return Results(rows)


def test_statements_hold_on_the_prototypes_numbers_and_fail_on_worse_ones() -> None:
    good = [s.judge(results(GOOD, GAUGE_RANGE, 75.0)) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in good), good
    assert [v.measured for v in good[:3]] == [0.0, 40.0, 70.0]
    assert good[3].measured == pytest.approx(7.0)
    bad_scores = GOOD | {"prism": {8.0: 60.0, 3.0: 60.0, 1.0: 40.0}}
    bad_ranges = {"prism": 5.0, "adamw, balanced start": 1.0, "dp-sgd, balanced start": 1.0}
    bad = [s.judge(results(bad_scores, bad_ranges, 61.0)) for s in CLAIM.statements]
    assert not any(v.holds for v in bad)
    assert all(v.problem is None for v in bad)


def test_full_form_covers_every_peer_budget_and_rate() -> None:
    full = {cell.name: cell for cell in cells(False)}
    for method in METHODS:
        if "dp-sgd" not in method:
            assert full[method].params["lrs"] == list(LRS)
            if "whitened" not in method:
                assert full[method].params["epsilons"][:3] == list(EPSILONS)
    assert sum(name.startswith("gauges of") for name in full) == 3
    assert list(CLAIM.seeds) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_the_smoke_form_runs(tmp_path) -> None:
    outcome = run_claim(CLAIM, smoke=True, jobs=1, folder=tmp_path, progress=False)
    assert outcome["smoke"] is True
    rows = outcome["rows"]
    of_prism = {(r["metric"], r["setting"].get("epsilon")) for r in rows if r["method"] == "prism"}
    assert {("validation_accuracy", 3.0), ("test_accuracy", "none")} <= of_prism
    gauges = [r["mean"] for r in rows if r["method"] == "prism, gauge" and r["metric"] == "test_accuracy"]
    assert len(gauges) > 1
    assert len(set(gauges)) == 1  # powers of two are exact changes of gauge


@pytest.mark.parametrize("method", ["ffa", "lora+", "lamb", "rite", "prism, whitened"])
def test_every_peer_runs(method: str) -> None:
    (a, b) = run_grid(0, True, method, [3.0], [0.01])
    assert 0 <= a.value <= 100
    assert 0 <= b.value <= 100
