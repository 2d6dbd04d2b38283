"""The claim's smoke form, and its statements on hand-made results."""

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.surge import AGS, CLAIM, E1, FIXED, IDENTITY, ONE, STE, TUNED
from tests.claims.judging import broken, measured

GOOD = {
    (STE, E1): 80.0, (IDENTITY, E1): 89.0, (TUNED[0], E1): 85.0, (TUNED[1], E1): 90.0, (ONE, E1): 92.0,
    (TUNED[3], E1): 91.0, (f"{FIXED}, twin x 30", E1): 83.0, (f"{ONE}, twin x 30", E1): 91.0,
    (STE, "depth 4, gamma 1"): 96.0, (TUNED[1], "depth 4, gamma 1"): 95.5,
    (STE, "depth 10, gamma 1"): 91.0, (TUNED[1], "depth 10, gamma 1"): 92.0,
    (STE, "MNIST, gamma 3"): 90.0, (ONE, "MNIST, gamma 3"): 91.0,
    (STE, "MNIST, gamma 1"): 94.0, (TUNED[1], "MNIST, gamma 1"): 93.0,
    (STE, "MiniLM's last layer"): 70.0, (ONE, "MiniLM's last layer"): 71.0,
}  # fmt: skip
TOY = {"distance from the minimiser found": 0.02, "error over straight-through's": 0.9}


def results(changes=None, toy=None, chosen=ONE):
    rows = []
    for seed in (0, 1):
        for (method, network), value in (GOOD | (changes or {})).items():
            rows.append(Row(method, {"network": network}, "accuracy", seed, value + seed))
        for name in TUNED:
            rows.append(Row(name, {"network": E1}, "validation", seed, 95.0 if name == chosen else 90.0))
        rows += [Row("lambda*", {"toy": "t"}, k, seed, v) for k, v in (TOY | (toy or {})).items()]
    return Results(rows)


def test_statements_hold_on_good_numbers():
    found = measured(CLAIM, results())
    assert found == pytest.approx([12, 12, 12, 3, 8, -0.5, 1, 1, -1, 1, 0.02, 0.9])


@pytest.mark.parametrize(
    ("failing", "change"),
    [
        ([0, 1, 2, 3, 4], {"changes": {(ONE, E1): 83.0, (f"{ONE}, twin x 30", E1): 83.0}}),
        ([2], {"chosen": TUNED[0]}),  # the eta that validation chose is reported, not the best on the test digits
        ([5], {"changes": {(TUNED[1], "depth 4, gamma 1"): 94.0}}),
        ([6], {"changes": {(TUNED[1], "depth 10, gamma 1"): 89.0}}),
        ([7], {"changes": {(ONE, "MNIST, gamma 3"): 89.0}}),
        ([8], {"changes": {(TUNED[1], "MNIST, gamma 1"): 92.0}}),
        ([9], {"changes": {(ONE, "MiniLM's last layer"): 69.0}}),
        ([10, 11], {"toy": {"distance from the minimiser found": 0.06, "error over straight-through's": 1.1}}),
    ],
)
def test_statements_can_fail(failing, change):
    assert broken(CLAIM, results(**change)) == failing


@pytest.mark.slow
def test_the_smoke_form_runs(tmp_path):
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert all(s["problem"] is None for s in outcome["statements"])
    assert {row["method"] for row in outcome["rows"]} >= {STE, ONE, f"{AGS}, random twin", "full precision"}
