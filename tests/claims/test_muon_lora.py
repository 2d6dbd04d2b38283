"""The claim's smoke form, and its statements on hand-made results."""

import dataclasses

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.muon_lora import CLAIM, FULL_GRID, METHODS, PEERS, PRETRAIN_LR

GOOD = {
    "stable_rank": 26.0,  # of the Muon-pretrained weights; 12 for AdamW
    "entropy": 0.87,
    "max_norm": 0.38,
    "spectral_norm": 2.3,
    "factor_stable_rank": 5.0,  # of LoRA-Muon; 2 for LoRA-AdamW
    "factor_entropy": 0.96,
    "lora_muon_test": 0.90,  # both AdamW 0.89
    "full_muon_test": 0.88,
    "cosd_slope": 1.0,
    "source_slope": -1.0,
    "blown_up_loss": 3.0,
}
ADAM = {"stable_rank": 12.0, "entropy": 0.84, "max_norm": 0.2, "spectral_norm": 2.8}


def results(**changes: float) -> Results:
    value = GOOD | changes
    rows = []
    for seed in (0, 1):
        for before in PRETRAIN_LR:
            quantities = ADAM if before == "adamw" else {k: value[k] for k in ADAM}
            rows += [Row(f"{before}-pretrained", {"pretrain": before}, k, seed, v) for k, v in quantities.items()]
            for method, (_, _, _, grid) in METHODS.items():
                muon = method.endswith("Muon")
                for lr in grid:
                    metrics = {
                        "validation": 0.9 if lr == 6e-3 else 0.5,
                        # The test score is best elsewhere, which must not matter.
                        "test": (value[f"{method[:4].lower()}_muon_test"] if muon else 0.89) if lr == 6e-3 else 0.99,
                        "source": 0.5 + value["source_slope"] * lr,
                        "cosd": 0.5 + value["cosd_slope"] * lr,
                        "loss": value["blown_up_loss"] if lr == FULL_GRID[-1] else 1.0,
                        "factor_stable_rank": value["factor_stable_rank"] if muon else 2.0,
                        "factor_entropy": value["factor_entropy"] if muon else 0.6,
                    }
                    rows += [Row(method, {"pretrain": before, "lr": lr}, k, seed, v) for k, v in metrics.items()]
    return Results(rows)


def test_statements_hold_on_good_numbers() -> None:
    verdicts = [s.judge(results()) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in verdicts), verdicts
    assert [v.measured for v in verdicts] == pytest.approx(
        [26 / 12, 0.87 / 0.84, 1.9, 2.8 / 2.3, 2.5, 0.96, 0.02, 0.01, 1.0, -1.0, 3.0]
    )


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"stable_rank": 18.0}),
        (1, {"entropy": 0.83}),
        (2, {"max_norm": 0.19}),
        (3, {"spectral_norm": 2.9}),
        (4, {"factor_stable_rank": 3.5}),
        (5, {"factor_entropy": 0.93}),
        (6, {"full_muon_test": 0.905}),
        (7, {"lora_muon_test": 0.885}),
        (8, {"cosd_slope": -1.0}),
        (9, {"source_slope": 1.0}),
        (10, {"blown_up_loss": 1.9}),
    ],
)
def test_each_statement_fails_alone_on_worse_numbers(index: int, change: dict[str, float]) -> None:
    verdicts = [s.judge(results(**change)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == [index]


def test_the_worst_seed_decides_the_orderings() -> None:
    worse = [
        dataclasses.replace(row, value=15.0)
        if (row.method, row.metric, row.seed) == ("muon-pretrained", "stable_rank", 1)
        else row
        for row in results()
    ]
    verdict = CLAIM.statements[0].judge(Results(worse))
    assert not verdict.holds
    assert verdict.measured == pytest.approx(15 / 12)


@pytest.mark.slow
def test_smoke_form_runs_the_whole_path(tmp_path) -> None:
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert outcome["slug"] == "muon_lora"
    assert outcome["smoke"] is True
    assert len(outcome["statements"]) == len(CLAIM.statements)
    assert all(s["problem"] is None for s in outcome["statements"])
    methods = {row["method"] for row in outcome["rows"]}
    assert methods == {*METHODS, *PEERS, "adamw-pretrained", "muon-pretrained"}
    assert len(CLAIM.seeds) >= 8
