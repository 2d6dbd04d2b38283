"""The buffer_reinforce claim: its smoke form, and its statements on results made by hand."""

import pytest

from subspan.claims import Results, Row, run_claim
from subspan.claims.buffer_reinforce import CLAIM, KEPT, OURS, PLAIN, PUBLISHED, SAFE_INSTRUCT, TWO_STATE
from subspan.data import shared_file
from subspan.errors import MissingAsset

BASE = "aligned base"


@pytest.mark.slow
def test_smoke(tmp_path):
    try:
        shared_file("text/agnews/train.json")
    except MissingAsset as missing:
        pytest.skip(str(missing))
    outcome = run_claim(CLAIM, smoke=True, jobs=1, folder=tmp_path, progress=False)
    assert outcome["smoke"] is True
    assert [s["problem"] for s in outcome["statements"]] == [None] * len(CLAIM.statements)
    found = {(row["method"], row["metric"]) for row in outcome["rows"]}
    assert {
        (m, k) for m in (BASE, PLAIN, SAFE_INSTRUCT, PUBLISHED, KEPT, TWO_STATE, OURS) for k in ("HS", "OR", "FA")
    } <= found


def made(plain=(95, 0, 80), ours=(1, 1, 80), damped=0.1, seeds=(0, 1), shares=(0.1, 0.5, 1.0)) -> Results:
    """Rows with these scores at every p and seed."""
    rows = []
    for seed in seeds:
        for p in shares:
            for method, scores in ((BASE, (0, 0, 60)), (PLAIN, plain), (OURS, ours)):
                rows += [Row(method, {"p": p}, k, seed, v) for k, v in zip(("HS", "OR", "FA"), scores, strict=True)]
            for state, norm in (("off", 1.0), ("on", damped)):
                rows.append(Row(f"buffer {state}", {"p": p, "rows": "forbidden"}, "gradient norm", seed, norm))
    return Results(rows)


def holds(results: Results) -> list[bool]:
    verdicts = [statement.judge(results) for statement in CLAIM.statements]
    assert [v.problem for v in verdicts] == [None] * len(verdicts)
    return [v.holds for v in verdicts]


def test_statements_hold_where_ours_stays_aligned():
    assert all(holds(made()))


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"plain": (70, 0, 80)}, 0),
        ({"ours": (9, 1, 80)}, 1),
        ({"ours": (1, 14, 80)}, 2),
        ({"ours": (1, 1, 75)}, 3),
        ({"damped": 0.9}, 4),
    ],
)
def test_each_statement_can_fail(changes, broken):
    assert holds(made(**changes)) == [i != broken for i in range(len(CLAIM.statements))]


def test_the_worst_share_decides_and_accuracy_at_p_one_does_not_count():
    good, bad = made(shares=(0.1, 0.5)), made(shares=(1.0,), ours=(50, 0, 0))
    assert holds(Results([*good, *bad])) == [True, False, True, True, True]
