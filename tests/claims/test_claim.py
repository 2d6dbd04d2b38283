"""Questions asked of results, and verdicts on statements."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from subspan.claims import MissingResults, Results, Row, Statement

ROWS = [
    Row("muon", {"lr": lr, "init": "lora"}, metric, seed, value + seed)
    for metric, values in {"validation": {0.1: 1.0, 0.2: 3.0}, "test": {0.1: 5.0, 0.2: 4.0}}.items()
    for lr, value in values.items()
    for seed in (1, 0)
]
RESULTS = Results([*ROWS, Row("adam", {"lr": 0.1, "init": "lora"}, "test", 0, 0.25)])


def test_values_are_ordered_by_seed():
    np.testing.assert_array_equal(RESULTS.values("muon", "test", lr=0.2), [4.0, 5.0])
    assert RESULTS.methods() == ["muon", "adam"]


def test_values_must_be_one_per_seed():
    with pytest.raises(ValueError, match="also fix init, lr"):
        RESULTS.values("muon", "test")


@pytest.mark.parametrize(
    ("method", "metric", "setting"), [("sgd", "test", {}), ("adam", "loss", {}), ("adam", "test", {"eps": 3})]
)
def test_values_that_were_not_measured_are_named(method, metric, setting):
    with pytest.raises(MissingResults, match=r"no rows for method=.*; measured methods: muon, adam"):
        RESULTS.values(method, metric, **setting)


def test_select_takes_the_best_setting_on_the_validation_metric():
    best = RESULTS.select("muon", by="validation", over="lr")
    np.testing.assert_array_equal(best.values("muon", "test"), [4.0, 5.0])  # not the best on the test metric
    worst = RESULTS.select("muon", by="validation", over="lr", maximize=False)
    np.testing.assert_array_equal(worst.values("muon", "test"), [5.0, 6.0])


@pytest.mark.parametrize("maximize", [True, False])
def test_select_never_takes_a_setting_that_diverged(maximize):
    rows = [Row("a", {"lr": lr}, "v", 0, value) for lr, value in {1: math.nan, 2: 0.5}.items()]
    assert Results(rows).select("a", by="v", over="lr", maximize=maximize).rows[0].setting == {"lr": 2}


def test_select_without_rows_says_so():
    with pytest.raises(MissingResults, match="to select by"):
        RESULTS.select("adam", by="validation", over="lr")


def test_summary_gives_sample_statistics_and_returns_to_rows():
    summary = RESULTS.summary()
    line = next(line for line in summary if line["metric"] == "test" and line["setting"]["lr"] == 0.2)
    assert (line["mean"], line["n"]) == (4.5, 2)
    assert line["std"] == pytest.approx(math.sqrt(0.5))
    assert summary[-1]["std"] == 0.0
    assert Results.from_summary(summary).summary() == summary


@pytest.mark.parametrize(
    ("relation", "required", "holds"), [(">=", 4.5, True), (">=", 4.6, False), ("<=", 4.5, True), ("<=", 4.4, False)]
)
def test_statements_come_out_both_ways(relation, required, holds):
    statement = Statement("s", lambda r: r.values("muon", "test", lr=0.2).mean(), required, relation)
    verdict = statement.judge(RESULTS)
    assert verdict.holds is holds
    assert verdict.measured == 4.5
    assert verdict.problem is None


@pytest.mark.parametrize(
    ("measure", "problem"),
    [
        (lambda r: r.values("sgd", "test").mean(), "no rows for method='sgd'"),
        (lambda r: r.values("muon", "test", lr=0.1) - np.zeros(3), "broadcast"),
        (lambda r: math.nan, "measured nan"),
    ],
)
def test_a_statement_that_cannot_be_measured_does_not_hold_and_says_why(measure, problem):
    verdict = Statement("s", measure, 0.0).judge(RESULTS)
    assert verdict.holds is False
    assert verdict.measured is None
    assert problem in verdict.problem


def test_the_example_of_the_documentation_runs_and_holds():
    page = (Path(__file__).parents[2] / "docs" / "claims.md").read_text("utf-8")
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), names)
    claim = names["CLAIM"]
    rows = [row for cell in claim.cells(False) for seed in claim.seeds for row in cell.run(seed, False, **cell.params)]
    verdict = claim.statements[0].judge(Results(rows))
    assert verdict.holds
    assert 0.15 <= verdict.measured <= 0.35
