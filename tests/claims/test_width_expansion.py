"""The claim's smoke form, and its statements on hand-made results."""

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.width_expansion import CLAIM, EXACT, NOISY, RATE, RATES, SCRATCH, SCRATCH_RATES
from tests.claims.judging import broken, measured

LOSS = {(EXACT, "AdamW"): 1.805, (EXACT, "Muon"): 1.715, (NOISY, "AdamW"): 1.803, (NOISY, "Muon"): 1.655,
        (SCRATCH, "AdamW"): 2.2, (SCRATCH, "Muon"): 1.785}  # fmt: skip
OTHERS = {
    "escape": {(EXACT, "AdamW"): 0.0, (EXACT, "Muon"): 2e-5, (NOISY, "AdamW"): 0.08, (NOISY, "Muon"): 0.67},
    "use of width": {(EXACT, "AdamW"): 0.0, (EXACT, "Muon"): 1e-5, (NOISY, "AdamW"): 0.006, (NOISY, "Muon"): 0.21},
}


def results(changes=None, best=None):
    """``best`` names another rate that the validation split prefers, at which everything is worse."""
    rows = []
    figures = {"loss": LOSS} | OTHERS
    for metric, values in figures.items():
        for (name, kind), value in (values | (changes or {}).get(metric, {})).items():
            rates = RATES[kind] if name == NOISY else SCRATCH_RATES if name == SCRATCH else (RATE[kind],)
            for seed in (0, 1):
                for lr in rates:
                    here = value if lr == RATE[kind] else value * 0.5
                    rows.append(Row(f"{name}, {kind}", {"lr": lr}, metric, seed, here))
                    if metric == "loss":
                        wanted = (best or {}).get((name, kind), RATE[kind])
                        rows.append(Row(f"{name}, {kind}", {"lr": lr}, "validation", seed, 1.0 if lr == wanted else 2))
    return Results(rows)


def test_statements_hold_on_the_specification_s_numbers():
    found = measured(CLAIM, results())
    wanted = [2e-5, 1e-5, 0.08, 0.67, 0.21, 35, 0.002, 0.06, 0.058, 0.13]
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("failing", "changes"),
    [
        ([0], {"escape": {(EXACT, "AdamW"): 2e-4}}),
        ([1], {"use of width": {(EXACT, "Muon"): -2e-3}}),
        ([2], {"escape": {(NOISY, "AdamW"): 0.2}}),
        ([3], {"escape": {(NOISY, "Muon"): 0.5}}),
        ([4], {"use of width": {(NOISY, "Muon"): 0.1}}),
        ([5], {"use of width": {(NOISY, "AdamW"): 0.03}}),
        ([6, 8], {"loss": {(NOISY, "AdamW"): 1.75}}),
        ([7, 8, 9], {"loss": {(NOISY, "Muon"): 1.71}}),
    ],
)
def test_statements_can_fail(failing, changes):
    assert broken(CLAIM, results(changes=changes)) == failing


def test_the_rate_of_the_noisy_clone_is_the_one_that_validation_chose():
    assert broken(CLAIM, results(best={(NOISY, "Muon"): RATES["Muon"][2]})) == [3, 4]


@pytest.mark.slow
def test_the_smoke_form_runs(tmp_path):
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert all(s["problem"] is None for s in outcome["statements"])
    assert {row["method"] for row in outcome["rows"]} >= {f"{SCRATCH}, Muon", "seed, AdamW", "diagonal, Muon"}
