"""The claim's smoke form, and its statements on hand-made results."""

import math

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.expressivity import BUCKETS, CLAIM, COUNTER, DEPTHS, MODES, NEVER, SEEDS, WITHIN

GOOD = {
    "exact": 1.0,
    "weak": 0.2,
    "scot_depth": 28.0,
    "scot_bits": 8.0,
    "snap": -1.0,  # measured minus bound
    "mlp": -2.0,
    "slope": 1.0,
    "none": 3.0,  # more than with the MLP
    "selective": 342.0,
    "full": 1024.0,
    "snap_ties": 1024.0,
    "bf16": float(NEVER),
    "silent": 0.0,
    "scot_learned": 0.9,
    "shallow": 0.2,
    "bf16_learned": 0.48,
}


def results(**changes: float) -> Results:
    value = GOOD | changes
    rows = []
    for seed in SEEDS:
        for mode in MODES:
            shares = {"hardmax": 1.0, "softmax bf16": value["exact"], "softmax bf16, c = 1": value["weak"]}
            shares["softmax bf16, not denoised"] = 0.7  # in no statement
            rows += [Row(form, {"mode": mode}, "exact runs", seed, x) for form, x in shares.items()]
        for run, n in enumerate((40, 200, 1000)):
            setting = {"run": run, "tokens": n}
            bounds = {"bound with snap, ln 4n": math.log(4 * n), "bound with MLP, ln 16n": math.log(16 * n)}
            tilt = (value["slope"] - 1) * (math.log(n) - math.log(200))
            scales = {
                "snap, fp32": bounds["bound with snap, ln 4n"] + value["snap"],
                "MLP, bf16": bounds["bound with MLP, ln 16n"] + value["mlp"] + tilt,
            }
            scales["not denoised, bf16"] = scales["MLP, bf16"] + value["none"]
            rows += [Row(form, setting, "scale", seed, c) for form, c in (bounds | scales).items()]
        for mode in MODES:
            for layers in DEPTHS:
                for low, high in BUCKETS:
                    learned = value["scot_learned"] if mode == "scot" else 0.5 if layers > 1 else value["shallow"]
                    setting = {"layers": layers, "arithmetic": "fp32", "entries": f"{low}-{high}"}
                    rows.append(Row(f"learned, {mode}", setting, "counts solved", seed, learned))
        for layers in DEPTHS:
            setting = {"layers": layers, "arithmetic": "bf16", "entries": WITHIN}
            learned = value["bf16_learned"] if layers == 2 else 0.5 if layers == 4 else value["shallow"]
            rows.append(Row("learned, cot", setting, "counts solved", seed, learned))
    for k in COUNTER:
        last = k == COUNTER[-1]
        rows.append(Row("cot", {"k": k}, "depth", 0, 43.0))
        rows.append(Row("scot", {"k": k}, "depth", 0, value["scot_depth"] if last else 23.0))
        rows.append(Row("scot", {"k": k}, "position bits", 0, value["scot_bits"] if last else 6.0))
    ties = {"e4m3, selective": value["selective"], "e4m3, full": value["full"], "e4m3, snap": value["snap_ties"]}
    ties |= {"bf16": value["bf16"], "fp16": NEVER, "e5m2": NEVER, "sparse1": NEVER}
    rows += [Row(form, {}, "ties at the first wrong token", 0, x) for form, x in ties.items()]
    rows.append(Row("guarded", {}, "silently wrong", 0, value["silent"]))
    return Results(rows)


def test_statements_hold_on_good_numbers() -> None:
    verdicts = [s.judge(results()) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in verdicts), verdicts
    expected = [1, 0.2, 15, 2, 1, 2, 1, 2, 1, 1, 3, 342, 342, 1024, 1024, 1024, 1024, NEVER, 0, 0.4, 0.02, 0.3 - 0.02]
    assert [v.measured for v in verdicts] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"exact": 0.99}),
        (1, {"weak": 0.6}),
        (2, {"scot_depth": 33.0}),
        (3, {"scot_bits": 10.0}),
        (4, {"snap": 0.1}),
        (6, {"snap": -2.6}),
        (7, {"mlp": -3.6}),
        (8, {"slope": 0.4}),
        (9, {"slope": 1.6}),
        (10, {"none": 1.9}),
        (11, {"selective": 341.0}),
        (12, {"selective": 343.0}),
        (13, {"full": 1000.0}),
        (14, {"full": 1100.0}),
        (15, {"snap_ties": 1000.0}),
        (16, {"snap_ties": 1100.0}),
        (17, {"bf16": 2000.0}),
        (18, {"silent": 1.0}),
        (19, {"scot_learned": 0.6}),
        (20, {"bf16_learned": 0.4}),
        (20, {"bf16_learned": 0.6}),
        (21, {"shallow": 0.49}),
    ],
)
def test_each_statement_fails_alone_on_worse_numbers(index: int, change: dict[str, float]) -> None:
    verdicts = [s.judge(results(**change)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == [index]


def test_a_run_that_needs_more_than_the_bound_fails_it() -> None:
    verdicts = [s.judge(results(mlp=0.1)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == [5]


@pytest.mark.slow
def test_the_smoke_form_runs(tmp_path) -> None:
    outcome = run_claim(CLAIM, smoke=True, jobs=1, folder=tmp_path, progress=False)
    held = {line["text"]: line["holds"] for line in outcome["statements"]}
    assert all(holds for text, holds in held.items() if text.startswith(("A: all", "C: with", "E: e4m3 selective")))
    methods = {row["method"] for row in outcome["rows"]}
    assert {"hardmax", "sparse1, last", "softmax e4m3", "cot", "scot", "snap, fp32", "learned, cot"} <= methods
