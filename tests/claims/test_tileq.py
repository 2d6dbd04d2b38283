"""The claim's smoke form, and its statements on hand-made results."""

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.tileq import (
    BEST,
    CLAIM,
    EQUAL,
    ERROR,
    FACTORS,
    GPTQ,
    INDEX,
    LARGE,
    LOSS,
    OURS,
    PLANTED,
    RTN,
    SCRATCH,
    SIDED,
    UPCYCLED,
    planted_experts,
    variants,
)
from subspan.resize import TileQConfig
from tests.claims.judging import broken, measured

ERRORS = {OURS: 0.12, EQUAL: 0.24, INDEX: 0.24, SIDED: 0.12, GPTQ: 0.4}
LOSSES = {BEST: 0.03, GPTQ: 0.04, EQUAL: 0.032, SIDED: 0.03, RTN: 0.06}


def results(errors=None, losses=None, scratch=None, rand=1.0, shared=0.4):
    rows = []
    for seed in (0, 1):
        for draw in (0, 1):
            setting = {"model": PLANTED, "draw": draw}
            for method, value in (ERRORS | (errors or {})).items():
                # the last draw is harder for all
                rows.append(Row(method, setting, ERROR, seed, value * (1 + draw)))
            rows += [Row(OURS, setting, FACTORS, seed, shared), Row(SIDED, setting, FACTORS, seed, 1.0)]
            rows += [Row(OURS, setting, f"adjusted Rand index of {side}", seed, rand) for side in ("rows", "columns")]
        for model, changed in ((UPCYCLED, losses or {}), (SCRATCH, scratch or {})):
            for method, value in (LOSSES | changed).items():
                rows.append(Row(method, {"model": model}, LOSS, seed, value * (1 + seed)))
    return Results(rows)


def test_statements_hold_on_good_numbers():
    found = measured(CLAIM, results())
    assert found == pytest.approx([1, 0.5, 0.5, 1, 0.4, 0.3] + 2 * [0.75, 0.9375, 1, 0.5])


@pytest.mark.parametrize(
    ("failing", "change"),
    [
        ([0], {"rand": 0.9}),
        ([1], {"errors": {EQUAL: 0.15}}),
        ([2], {"errors": {INDEX: 0.15}}),
        ([3], {"errors": {SIDED: 0.1}}),
        ([4], {"shared": 0.5}),
        ([5], {"errors": {GPTQ: 0.25}}),
        ([6], {"losses": {GPTQ: 0.033}}),
        ([7], {"losses": {EQUAL: 0.029}}),
        ([8], {"losses": {SIDED: 0.02}}),
        ([9], {"losses": {RTN: 0.03}}),
        ([11, 12], {"scratch": {EQUAL: 0.029, SIDED: 0.02}}),
    ],
)
def test_statements_can_fail(failing, change):
    assert broken(CLAIM, results(**change)) == failing


def test_a_missing_method_is_said():
    rows = [row for row in results() if row.method != INDEX]
    found = CLAIM.statements[2].judge(Results(rows))
    assert not found.holds
    assert INDEX in found.problem


def test_peers_are_given_what_is_said():
    every = variants(TileQConfig(rank=24, grid=(4, 4), group_size=32), private=6)
    assert {name: (c.rank, c.grid, alone) for name, (c, alone) in every.items() if name in (EQUAL, LARGE, SIDED)} == {
        EQUAL: (6, (1, 1), True),
        LARGE: (24, (1, 1), True),
        SIDED: (24, (1, 16), False),
    }
    weights, inputs, cells = planted_experts(0)
    assert (weights.shape, inputs.shape) == ((16, 96, 64), (16, 256, 64))
    assert len({tuple(c) for c in cells.tolist()}) == 16


@pytest.mark.slow
def test_the_smoke_form_runs(tmp_path):
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert all(s["problem"] is None for s in outcome["statements"])
    assert {row["method"] for row in outcome["rows"]} >= {BEST, OURS, GPTQ, SIDED, "full precision"}
