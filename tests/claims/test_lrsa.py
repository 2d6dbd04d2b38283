"""The claim's smoke form, and its statements on hand-made results."""

import dataclasses

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.lrsa import CLAIM, DARCY, FLUID, PRECISION

GOOD = {
    ("LRSA", "error"): 0.05,
    ("LRSA", "error, finer grid"): 0.06,
    ("LRSA", "error, scattered"): 0.08,
    ("LRSA", "error, scattered, masses"): 0.07,
    ("LRSA without QK-norm", "error"): 0.06,
    ("Physics attention, equal width", "error"): 0.055,
    ("Ridge", "error"): 0.07,
}
DTYPES = {"float32": 0.10, "bfloat16": 0.105}


def results(changes: dict | None = None, bf16: float = DTYPES["bfloat16"]) -> Results:
    rows = []
    for seed in (0, 1, 2):
        rows += [Row(m, {"task": "darcy"}, k, seed, v) for (m, k), v in (GOOD | (changes or {})).items()]
        for dtype, value in (DTYPES | {"bfloat16": bf16}).items():
            rows.append(Row("LRSA", {"task": "precision", "dtype": dtype}, "error", seed, value))
    return Results(rows)


def test_statements_hold_on_good_numbers() -> None:
    verdicts = [s.judge(results()) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in verdicts), verdicts
    assert [v.measured for v in verdicts] == pytest.approx([5 / 7, 50 / 55, 5 / 6, 1.2, 1.0, 0.05])


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"changes": {("Ridge", "error"): 0.058}}),
        (1, {"changes": {("Physics attention, equal width", "error"): 0.049}}),
        (2, {"changes": {("LRSA without QK-norm", "error"): 0.049}}),
        (3, {"changes": {("LRSA", "error, finer grid"): 0.076}}),
        (4, {"changes": {("LRSA", "error, scattered, masses"): 0.081}}),
        (5, {"bf16": 0.111}),
        (5, {"bf16": 0.089}),
    ],
)
def test_each_statement_fails_alone_on_worse_numbers(index: int, change: dict) -> None:
    verdicts = [s.judge(results(**change)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == [index]


def test_masses_may_hurt_in_one_seed_of_three() -> None:
    rows = [
        dataclasses.replace(row, value=0.09) if row.metric.endswith("masses") and row.seed == 1 else row
        for row in results()
    ]
    verdict = CLAIM.statements[4].judge(Results(rows))
    assert verdict.holds
    assert verdict.measured == pytest.approx(2 / 3)


@pytest.mark.slow
def test_smoke_form_runs_the_whole_path(tmp_path) -> None:
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert outcome["smoke"] is True
    assert len(outcome["statements"]) == len(CLAIM.statements)
    assert all(s["problem"] is None for s in outcome["statements"])
    methods: dict[str, set[str]] = {}
    for row in outcome["rows"]:
        methods.setdefault(row["setting"]["task"], set()).add(row["method"])
    assert methods == {"darcy": {*DARCY, "Mean field", "Ridge"}, "fluid": {*FLUID}, "precision": {*PRECISION}}
    assert len(CLAIM.seeds) >= 3
