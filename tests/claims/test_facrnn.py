"""The claim's smoke form, and its statements on hand-made results."""

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.facrnn import CLAIM, LORENZ

GOOD = {
    "FacRNN": {"latent R2": 0.90, "PC": 0.12, "reconstruction R2": 0.88, "corr sub-W": 0.85},
    "FacRNN-full": {"latent R2": 0.75, "PC": 0.14, "reconstruction R2": 0.88, "corr sub-W": 0.80},
    "lrRNN": {"latent R2": 0.65, "PC": 0.70, "reconstruction R2": 0.90, "corr sub-W": 0.60},
    "lrRNN + SVD": {"latent R2": 0.70, "PC": 0.20, "reconstruction R2": 0.90, "corr sub-W": 0.85},
    "lrRNN + ICA": {"latent R2": 0.60, "PC": 0.30, "reconstruction R2": 0.90, "corr sub-W": 0.70},
    "bdRNN": {"latent R2": 0.55, "PC": 0.60, "reconstruction R2": 0.90, "corr sub-W": 0.60},
}
ROTATIONS = {"matched R2": 0.8, "leak": 0.05}


def results(method: str = "", metric: str = "", value: float = 0.0) -> Results:
    rows = []
    for seed in (0, 1):
        for name, scores in GOOD.items():
            for split in ("interleaved", "contiguous"):  # a poor contiguous split must not matter
                given = scores | ({metric: value} if name == method else {})
                given = given if split == "interleaved" else dict.fromkeys(given, 0.0)
                rows += [Row(name, {"split": split}, k, seed, v) for k, v in given.items()]
        given = ROTATIONS | ({metric: value} if method == "rotations" else {})
        rows += [Row("FacRNN", {"data": "rotations"}, k, seed, v) for k, v in given.items()]
    return Results(rows)


def test_statements_hold_on_good_numbers():
    verdicts = [s.judge(results()) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in verdicts), verdicts
    expected = [0.25, 0.30, 0.35, 0.20, 0.02, -0.02, 0.25, 0.8, 0.05]
    assert [v.measured for v in verdicts] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, ("lrRNN", "latent R2", 0.76)),
        (1, ("lrRNN + ICA", "latent R2", 0.76)),
        (2, ("bdRNN", "latent R2", 0.76)),
        (3, ("lrRNN + SVD", "latent R2", 0.83)),
        (4, ("FacRNN-full", "PC", 0.11)),
        (5, ("lrRNN", "reconstruction R2", 0.94)),
        (6, ("lrRNN", "corr sub-W", 0.75)),
        (7, ("rotations", "matched R2", 0.69)),
        (8, ("rotations", "leak", 0.21)),
    ],
)
def test_each_statement_fails_alone_on_worse_numbers(index, change):
    verdicts = [s.judge(results(*change)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == [index]


@pytest.mark.slow
def test_the_smoke_run_has_every_method(tmp_path):
    report = run_claim(CLAIM, smoke=True, jobs=1, folder=tmp_path, progress=False)
    assert report["smoke"]
    assert {s["text"] for s in report["statements"]} == {s.text for s in CLAIM.statements}
    assert all(s["measured"] is not None for s in report["statements"])
    measured = {row["method"] for row in report["rows"] if row["setting"].get("split") == "interleaved"}
    readouts = {f"lrRNN + {name}{how}" for name in ("SVD", "ICA") for how in ("", ", grouped by PC")}
    assert set(LORENZ) | readouts == measured
    metrics = {row["metric"] for row in report["rows"] if row["method"] == "FacRNN"}
    assert {"PC", "PC excess", "TC", "corr W", "component R2", "latent R2, best partition", "leak"} <= metrics
