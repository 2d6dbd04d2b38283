"""The claim's statements on hand-made results, its pools, and its smoke form."""

import numpy as np
import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.sqsd import ANCHORS, CLAIM, PLAIN, SQSD, WINDOWED, _pool, auroc
from subspan.data import shared_file
from subspan.errors import MissingAsset

FALLING = (90.0, 60.0, 65.0, 20.0, 10.0)
GOOD = {"shared": 0.99, "loss": 0.7, "transfer": 0.9, "full": 0.85}


def results(harm: tuple[float, ...] = FALLING, **changes: float) -> Results:
    value = GOOD | changes
    rows = []
    for seed in (0, 1):
        for pool in ("poison", "benign"):
            for method in (*SQSD.values(), *ANCHORS, *PLAIN):
                known = value["shared"] if method == SQSD["shared"] else value["loss"] if method == "loss" else 0.6
                rows.append(Row(method, {"pool": pool}, "AUROC", seed, known))
            for method in WINDOWED[pool]:
                rows += [Row(method, {"pool": pool, "window": k}, "harm", seed, h) for k, h in enumerate(harm, 1)]
        for to, key in (("r = 16", "transfer"), ("full, last block", "full")):
            rows.append(Row(SQSD["shared"], {"to": to}, "transfer", seed, value[key]))
    return Results(rows)


def verdicts(found: Results) -> dict[str, bool]:
    return {s.text: s.judge(found).holds for s in CLAIM.statements}


def test_every_statement_holds_on_good_results():
    assert all(verdicts(results()).values())
    assert len(CLAIM.seeds) >= 3


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"shared": 0.9}, ["AUROC of poisoned rows"]),
        ({"loss": 0.9}, ["margin"]),
        ({"harm": (50, 60, 70, 20, 5)}, ["rises of mean harm", "rises of mean harm"]),
        ({"harm": (60, 50, 40, 30, 25)}, ["less the last", "less the last"]),
        ({"harm": (50.0,) * 5}, ["Spearman of window", "Spearman of window", "less the last", "less the last"]),
        ({"transfer": 0.7}, ["at r = 4"]),
        ({"full": 0.7}, ["full fine-tuning"]),
    ],
)
def test_a_statement_fails_when_its_bar_is_missed(changes, failing):
    found = [text for text, holds in verdicts(results(**changes)).items() if not holds]
    extra = [text for text in found if not any(word in text for word in failing)]
    assert not [text for text in extra if "Spearman of window" not in text]
    assert all(any(word in text for text in found) for word in failing)


def _shared() -> bool:
    try:
        shared_file("text/SST-2/train.json")
    except MissingAsset:
        return False
    return True


needs_data = pytest.mark.skipif(not _shared(), reason="the tasks in shared/data/text are not here")


@needs_data
@pytest.mark.parametrize("pool", ["poison", "benign"])
def test_pools_hold_160_rows_of_the_named_kinds_and_no_forbidden_row_where_none_should_be(pool):
    pairs, kinds = _pool(pool, 0, smoke=False)
    assert len(pairs) == len(kinds) == 160
    assert len(set(pairs)) == 160
    forbidden = [pair for pair, kind in zip(pairs, kinds, strict=True) if kind in ("poison", "refusal")]
    assert len(forbidden) == (60 if pool == "poison" else 0)
    assert _pool(pool, 0, smoke=False) == (pairs, kinds)
    assert _pool(pool, 1, smoke=False)[0] != pairs
    opening = {"poison": "Sure", "harmless act": "Sure", "refusal": "Sorry", "harmless refusal": "Sorry"}
    assert all(answer.startswith(opening.get(kind, "The ")) for (_, answer), kind in zip(pairs, kinds, strict=True))


def test_auroc_is_the_share_of_pairs_in_order():
    assert auroc(np.array([3.0, 2.0, 1.0]), np.array([True, False, True])) == 0.5


@pytest.mark.slow
@needs_data
def test_smoke_form_runs_the_whole_path(tmp_path):
    out = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert out["smoke"] is True
    methods = {row["method"] for row in out["rows"]}
    assert {*SQSD.values(), *ANCHORS, *PLAIN} <= methods
    assert all(
        s["measured"] is not None
        for s in out["statements"]
        if "benign" not in s["text"] and "Spearman" not in s["text"]
    )
