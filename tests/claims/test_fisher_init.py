"""The fisher_init claim: its smoke form, and its statements on results made by hand."""

import pytest

from subspan.claims import Results, Row, run_claim
from subspan.claims.fisher_init import ABLATIONS, CLAIM, EARLY, GRID, LATE, OURS, PEERS, ROTATED


@pytest.mark.slow
def test_smoke(tmp_path):
    outcome = run_claim(CLAIM, smoke=True, jobs=1, folder=tmp_path, progress=False)
    assert outcome["smoke"] is True
    assert outcome["seeds"] == list(CLAIM.smoke_seeds)
    assert [s["problem"] for s in outcome["statements"]] == [None] * len(CLAIM.statements)
    found = {(row["method"], row["setting"]["experiment"]) for row in outcome["rows"]}
    assert {(m, e) for m in (*PEERS, OURS) for e in ("E1", "E2")} <= found


def made(ours: dict[str, float], peers: dict[str, float], seeds=(0, 1)) -> Results:
    """Rows with these losses (E1) and accuracies (E2, E3), the same for every seed, size and learning rate."""
    rows = []
    for seed in seeds:
        for method in (*PEERS, OURS, ROTATED):
            value = ours if method in (OURS, ROTATED) else peers
            for lr in GRID:
                for step in (25, 100):
                    setting = {"experiment": "E1", "size": "64x48", "lr": lr}
                    rows.append(Row(method, setting, f"loss at {step}", seed, value["loss"]))
                for step in (EARLY, LATE):
                    setting = {"experiment": "E2", "rank": 4, "lr": lr}
                    rows += [
                        Row(method, setting, f"{m} at {step}", seed, value["acc"]) for m in ("accuracy", "validation")
                    ]
        for label in ABLATIONS:
            value = ours["bottom"] if label in ("select bottom", "calibration 400") else ours["acc"]
            rows.append(Row(label, {"experiment": "E3", "lr": 1e-2}, f"accuracy at {EARLY}", seed, value))
    return Results(rows)


def verdicts(results: Results) -> dict[str, bool]:
    found = [statement.judge(results) for statement in CLAIM.statements]
    assert [v.problem for v in found] == [None] * len(found)
    return {v.text: v.holds for v in found}


def test_statements_hold_where_ours_is_far_ahead():
    found = verdicts(made({"loss": 0.05, "acc": 0.9, "bottom": 0.5}, {"loss": 1.0, "acc": 0.5}))
    against = {text: holds for text, holds in found.items() if text.startswith("Against it")}
    assert len(against) == 3
    assert not any(against.values())
    assert all(holds for text, holds in found.items() if text not in against)


def test_statements_fail_where_a_peer_is_ahead():
    found = verdicts(made({"loss": 2.0, "acc": 0.5, "bottom": 0.6}, {"loss": 1.0, "acc": 0.8}))
    against = {text: holds for text, holds in found.items() if text.startswith("Against it")}
    assert all(against.values())
    rest = {text: holds for text, holds in found.items() if text not in against}
    assert not any(rest.values())


def test_the_worst_seed_decides():
    good, bad = ({"loss": x, "acc": 0.9, "bottom": 0.5} for x in (0.05, 5.0))
    peers = {"loss": 1.0, "acc": 0.5}
    mixed = Results([*made(good, peers, seeds=(0,)), *made(bad, peers, seeds=(1,))])
    statement = next(s for s in CLAIM.statements if "PiSSA at step 25" in s.text)
    assert statement.judge(mixed).measured == pytest.approx(5.0)


def test_rates_are_chosen_on_the_validation_split():
    """A peer whose best test accuracy lies at a rate that validation does not choose gets no credit for it."""
    rows = [r for r in made({"loss": 1, "acc": 0.7, "bottom": 0.5}, {"loss": 1, "acc": 0.6}) if r.method != "EVA"]
    for lr, validation, test in zip(GRID, (0.9, 0.5, 0.5), (0.65, 0.99, 0.99), strict=True):
        setting = {"experiment": "E2", "rank": 4, "lr": lr}
        rows += [Row("EVA", setting, f"validation at {EARLY}", s, validation) for s in (0, 1)]
        rows += [Row("EVA", setting, f"accuracy at {EARLY}", s, test) for s in (0, 1)]
    statement = next(s for s in CLAIM.statements if s.text.endswith(f"a peer leads at step {EARLY}"))
    assert statement.judge(Results(rows)).measured == pytest.approx(5.0)
