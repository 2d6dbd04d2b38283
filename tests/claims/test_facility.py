"""The claim's smoke form, and its statements on hand-made results."""

import dataclasses

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.facility import CLAIM, MIXTURES, NARROW, NEAREST, ONLINE, ORACLES, OURS, RECOMPUTED, SIZES, WIDE

EXACT, COARSE, HASH, FAST, _ = OURS
GOOD = {
    "exact": 1.02, "coarse": 1.1, "hash": 1.03, "fast": 1.05, "nearest": 6.0, "worst": 1.1, "coarse_worst": 1.4,
    "moved": 0.05, "recomputed": 1.0, "bound": 0.9, "separated": 200.0, "overlapping": 800.0, "growth": 0.1,
    "overlapping_growth": 0.3, "counters_growth": 0.1,
}  # fmt: skip


def results(**changes: float) -> Results:
    value = GOOD | changes
    ratio = {EXACT: "exact", COARSE: "coarse", HASH: "hash", FAST: "fast", NEAREST: "nearest"}
    rows = []
    for seed in (0, 1):
        for scale in (WIDE, NARROW):
            at = {"prices": scale}
            for method in (*OURS, RECOMPUTED, NEAREST, ONLINE):
                measured = {
                    "mean ratio": value[ratio[method]] if method in ratio else 1.0,
                    "worst ratio": value["coarse_worst"] if method == COARSE else value["worst"],
                    "interval recourse": value["recomputed"] if method == RECOMPUTED else 0.1,
                    "recourse": value["moved"],
                    "worst bound": value["bound"],
                }
                rows += [Row(method, at, metric, seed, number) for metric, number in measured.items()]
        for mixture in MIXTURES:
            for n in SIZES:
                at = {"mixture": mixture, "clients": n}
                growth = value["growth" if mixture == "separated" else "overlapping_growth"]
                times = {
                    "exact": 4000.0,
                    "counters": 100.0 * (n / 1000) ** value["counters_growth"],
                    "hash, 4 tables": value[mixture] * (n / 1000) ** growth,
                }
                rows += [Row(name, at, "microseconds", seed, times[name]) for name in ORACLES]
    return Results(rows)


def test_statements_hold_on_good_numbers() -> None:
    verdicts = [s.judge(results()) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in verdicts), verdicts
    assert [v.measured for v in verdicts] == pytest.approx(
        [1.02, 1.1, 1.1, 1.4, 6 / 1.02, 0.05, 10.0, 1.03 / 1.02, 1.05 / 1.02, 0.9, 20.0, 5.0, 0.1, 0.3, 0.1]
    )


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"exact": 1.09, "hash": 1.09, "fast": 1.1, "nearest": 7.0}),
        (1, {"coarse": 1.4}),
        (2, {"worst": 3.2}),
        (3, {"coarse_worst": 7.0}),
        (4, {"nearest": 4.0}),
        (5, {"moved": 0.3}),
        (6, {"recomputed": 0.4}),
        (7, {"hash": 1.08}),
        (8, {"fast": 1.2}),
        (9, {"bound": 0.3}),
        (10, {"separated": 500.0}),
        (11, {"overlapping": 5000.0}),
        (12, {"growth": 0.6}),
        (13, {"overlapping_growth": 0.6}),
        (14, {"counters_growth": 0.6}),
    ],
)
def test_each_statement_fails_alone_on_worse_numbers(index: int, change: dict[str, float]) -> None:
    verdicts = [s.judge(results(**change)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == [index]


def test_the_worst_state_of_any_seed_decides_the_guarantee() -> None:
    def worsen(row: Row) -> Row:
        one = (row.method, row.metric, row.seed, row.setting.get("prices")) == (EXACT, "worst ratio", 1, NARROW)
        return dataclasses.replace(row, value=3.5) if one else row

    verdict = CLAIM.statements[2].judge(Results([worsen(row) for row in results()]))
    assert not verdict.holds
    assert verdict.measured == 3.5


@pytest.mark.slow
def test_smoke_form_runs_the_whole_path(tmp_path) -> None:
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert outcome["slug"] == "facility"
    assert outcome["smoke"] is True
    assert len(outcome["statements"]) == len(CLAIM.statements)
    assert all(s["problem"] is None for s in outcome["statements"])
    assert {row["method"] for row in outcome["rows"]} == {*OURS, RECOMPUTED, NEAREST, ONLINE, *ORACLES}
    assert len(CLAIM.seeds) >= 5
