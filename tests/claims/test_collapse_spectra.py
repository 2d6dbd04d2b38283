"""The claim's smoke form, and its statements on hand-made results."""

import pytest

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.collapse_spectra import (
    CE,
    CLAIM,
    EXACT,
    LANCZOS,
    LINEAR,
    MEANS,
    OUTER,
    RELU,
    RITZ,
    RITZ_UNIFORM,
    UNIFORM,
)
from tests.claims.judging import broken, measured

FREE = {
    "largest over smallest of the 9": 1.0, "tenth over first eigenvalue": 1e-9,
    "least alignment": 1.0, "loss minus closed form": 1e-6,
}  # fmt: skip
# (net, method, metric) -> value at epoch 1 and at epoch 300, the same in layers 3 to 5
GOOD = {
    (RELU, MEANS, "mean error"): (0.2, 0.01), (RELU, MEANS, "worst error"): (0.3, 0.05),
    (RELU, MEANS, "overlap"): (0.9, 0.99), (RELU, RITZ, "overlap"): (0.9, 1.0),
    (RELU, RITZ, "worst error"): (0.1, 0.005),
    (RELU, EXACT, "gap behind K²"): (1.0, 60.0), (RELU, RITZ, "share of the gradient"): (0.9, 0.6),
    (LINEAR, RITZ, "share of the gradient"): (0.9, 0.99), (CE, RITZ, "worst error"): (0.3, 0.009),
    (CE, RITZ, "mean error"): (0.2, 0.03), (CE, OUTER, "worst error"): (0.2, 0.05),
    (CE, UNIFORM, "mean error"): (0.9, 0.3), (CE, RITZ, "share of the gradient"): (0.9, 0.97),
}  # fmt: skip


def results(changes=None, free=None):
    rows = []
    for seed in (0, 1):
        rows += [Row("free features", {"step": 3000}, k, seed, v) for k, v in (FREE | (free or {})).items()]
        for (net, method, metric), pair in (GOOD | (changes or {})).items():
            for layer in (3, 4, 5):
                for epoch, value in zip((1, 300), pair, strict=True):
                    rows.append(Row(method, {"net": net, "layer": layer, "epoch": epoch}, metric, seed, value))
    return Results(rows)


def test_statements_hold_on_good_numbers():
    found = measured(CLAIM, results())
    expected = [
        1,
        1e-9,
        1,
        1e-6,
        20,
        0.01,
        0.01,
        0.99,
        0.005,
        0.1,
        10,
        1,
        60,
        0.6,
        0.99,
        0.009,
        0.009,
        0.03,
        0.05,
        10,
        0.97,
    ]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("failing", "change"),
    [
        ([0, 1, 2, 3], {"free": dict(zip(FREE, (1.1, 1e-3, 0.9, 1e-3), strict=True))}),
        ([4], {"changes": {(RELU, MEANS, "mean error"): (0.02, 0.01)}}),
        ([5, 6], {"changes": {(RELU, MEANS, "mean error"): (0.9, 0.09)}}),
        ([7], {"changes": {(RELU, MEANS, "overlap"): (0.9, 0.97)}}),
        ([8, 10], {"changes": {(RELU, RITZ, "worst error"): (0.1, 0.02)}}),
        ([9], {"changes": {(RELU, RITZ, "worst error"): (0.3, 0.005)}}),
        ([11], {"changes": {(RELU, RITZ, "overlap"): (0.9, 0.98)}}),
        ([12], {"changes": {(RELU, EXACT, "gap behind K²"): (1.0, 10.0)}}),
        ([13], {"changes": {(RELU, RITZ, "share of the gradient"): (0.9, 0.5)}}),
        ([14], {"changes": {(LINEAR, RITZ, "share of the gradient"): (0.9, 0.9)}}),
        ([15, 16], {"changes": {(CE, RITZ, "worst error"): (0.9, 0.3)}}),
        ([17, 19], {"changes": {(CE, RITZ, "mean error"): (0.2, 0.1)}}),
        ([18], {"changes": {(CE, OUTER, "worst error"): (0.2, 0.1)}}),
        ([20], {"changes": {(CE, RITZ, "share of the gradient"): (0.9, 0.9)}}),
    ],
)
def test_statements_can_fail(failing, change):
    assert broken(CLAIM, results(**change)) == failing


@pytest.mark.slow
def test_the_smoke_form_runs(tmp_path):
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert all(s["problem"] is None for s in outcome["statements"])
    assert {row["method"] for row in outcome["rows"]} >= {MEANS, UNIFORM, RITZ, RITZ_UNIFORM, OUTER, LANCZOS, EXACT}
