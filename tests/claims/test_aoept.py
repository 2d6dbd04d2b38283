"""The claim's smoke form, and its statements on hand-made results."""

import numpy as np
import pytest

from subspan.claims import run_claim
from subspan.claims.aoept import CLAIM, IMPUTED, LAMBDAS, PROMPTED, TASKS, interval, paired
from subspan.claims.claim import Results, Row

INFORMATION = dict(zip(LAMBDAS, (0.01, 0.06, 0.14, 0.19, 0.25, 0.4), strict=True))
ACCURACY = {"blank-fill": 80.0, "AOEPT": 82.0, "MAPs": 83.0}


def results(**change: float) -> Results:
    """``change``: nm2i_<lambda>, ceiling, constant, stream or towers (AOEPT's accuracy there)."""
    rows = []
    for seed in (0, 1):
        for shared, value in INFORMATION.items():
            setting, value = {"lambda": shared}, change.get(f"nm2i_{shared}", value)
            rows.append(Row("AOEPT", setting, "NM2I", seed, value))
            rows.append(Row("AOEPT", setting, "ceiling", seed, change.get("ceiling", value)))
        rows += [
            Row(name, {"lambda": 1.0}, "NM2I", seed, change.get("constant", 0.0))
            for name in ("MAPs", "AOEPT without gate")
        ]
        for data, key in (("digits", "towers"), ("digits, one stream", "stream")):
            for case, rate in (("both", 0.7), ("both", 0.5), ("text", 0.7)):  # the others must not matter
                for method, value in ACCURACY.items():
                    value = change.get(key, value) if method == "AOEPT" else value
                    value = value if (case, rate) == ("both", 0.7) else 0.0
                    setting = {"data": data, "case": case, "trained at": rate}
                    rows.append(Row(method, setting, "accuracy", seed, value + seed))
    return Results(rows)


def test_statements_hold_on_good_numbers():
    verdicts = [s.judge(results()) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in verdicts), verdicts
    assert [v.measured for v in verdicts] == pytest.approx([2.0, 2.0, 0.05, 0.01, 0.14, 0.25, 0.0, 0.0])


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"stream": 80.9}),
        (1, {"towers": 80.9}),
        (2, {"nm2i_2.0": 0.25}),
        (3, {"nm2i_0.0": 0.03}),
        (3, {"nm2i_0.0": -0.03}),
        (4, {"nm2i_0.5": 0.09}),
        (5, {"nm2i_1.0": 0.195}),
        (6, {"ceiling": 0.3}),
        (7, {"constant": 0.001}),
    ],
)
def test_each_statement_fails_alone_on_worse_numbers(index, change):
    verdicts = [s.judge(results(**change)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == [index]


def test_intervals_are_of_paired_differences():
    found = paired(results(), "AOEPT", "blank-fill", data="digits", case="both", **{"trained at": 0.7})
    assert found.tolist() == [2.0, 2.0]
    assert interval(found) == 0.0
    assert interval(found + np.array([0.0, 1.0])) == pytest.approx(12.706 * 0.5, rel=1e-3)


def test_the_full_form_has_every_cell_once():
    names = [cell.name for cell in CLAIM.cells(False)]
    assert len(set(names)) == len(names)
    assert len(CLAIM.seeds) >= 10


@pytest.mark.slow
def test_the_smoke_run_has_every_method(tmp_path):
    report = run_claim(CLAIM, smoke=True, jobs=1, folder=tmp_path, progress=False)
    assert report["smoke"]
    assert [s["text"] for s in report["statements"]] == [s.text for s in CLAIM.statements]
    assert all(s["measured"] is not None for s in report["statements"])
    methods = {row["method"] for row in report["rows"] if row["setting"].get("data") == "digits"}
    assert {*IMPUTED, *PROMPTED, "MAPs"} <= methods
    assert {"AOEPT minus MAPs", "AOEPT minus AOEPT without gate", "AOEPT minus AOEPT, random bank"} <= methods
    assert {row["setting"]["data"] for row in report["rows"]} == {*TASKS, "latents"}
    metrics = {row["metric"] for row in report["rows"]}
    assert {"NM2I", "ceiling", "floor", "accuracy", "accuracy, incomplete", "accuracy at 0.9", "validation"} <= metrics
