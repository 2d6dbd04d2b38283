"""The claim's smoke form, and its statements on hand-made results."""

import numpy as np
import pytest
import torch

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.lozo import CLAIM, CONTROLS, DOMAINS, ERROR_GRID, GRID, NETWORK, QUADRATIC, Adaptation, _shifted
from tests.claims.judging import failing

GOOD = {
    "quadratic": 0.20,  # LOZO+ energy; 0.25 without selection, 0.28 the others
    "loss": 0.60,  # LOZO+ on every domain; LOZO r = 2: 0.65, others 0.62
    "energy_worst": 5.0,
    "accuracy": 0.85,  # LOZO+; 0.80 the others
    "errors_gain": 0.2,
}


def results(**changes: float) -> Results:
    value = GOOD | changes
    rows = []
    for seed in (0, 1):
        for method in QUADRATIC:
            final = {"LOZO+ energy": value["quadratic"], "LOZO+ energy, no selection": 0.25}.get(method, 0.28)
            rows.append(Row(method, {"task": "quadratic"}, "final", seed, final))
        for domain in DOMAINS:
            for method in {**NETWORK, **CONTROLS}:
                for lr in GRID:
                    loss = {"LOZO+": value["loss"], "LOZO, r = 2": 0.65}.get(method, 0.62)
                    if method == "LOZO+ energy":
                        loss = value["energy_worst"]
                    metrics = {
                        "train_loss": loss,
                        "validation_loss": 0.5 if lr == 1e-3 else 1.0,
                        # Better elsewhere on the test split, which must not matter.
                        "test_accuracy": (value["accuracy"] if method == "LOZO+" else 0.8) if lr == 1e-3 else 0.99,
                    }
                    setting = {"task": "digits", "domain": domain, "lr": lr}
                    rows += [Row(method, setting, k, seed, v) for k, v in metrics.items()]
        rows.append(Row("before", {"task": "error rate"}, "test_accuracy", seed, 0.4))
        for lr in ERROR_GRID:
            best = lr == ERROR_GRID[1]
            for metric, v in (
                ("validation_accuracy", 0.9 if best else 0.1),
                ("test_accuracy", 0.4 + value["errors_gain"] if best else 1.0),
            ):
                rows.append(Row("LOZO+", {"task": "error rate", "lr": lr}, metric, seed, v))
    return Results(rows)


def test_all_statements_hold_on_good_results():
    assert failing(CLAIM, results()) == set()


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"quadratic": 0.26}, 3),  # over LOZO .93, over MeZO .93, and no better than no selection
        ({"loss": 0.645}, 3),  # the mean, shifted right, and the random choice
        ({"loss": 0.67}, 4),
        ({"energy_worst": 0.3}, 1),
        ({"accuracy": 0.79}, 1),
        ({"errors_gain": 0.05}, 1),
    ],
)
def test_each_statement_can_fail(changes, count):
    assert len(failing(CLAIM, results(**changes))) == count


@pytest.mark.slow
def test_smoke_form_runs_the_whole_path(tmp_path):
    out = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert out["smoke"] is True
    methods = {row["method"] for row in out["rows"]}
    assert {"before", *QUADRATIC, *NETWORK, *CONTROLS} <= methods
    assert {"final", "alignment", "predicted_gain", "train_loss", "test_accuracy"} <= {r["metric"] for r in out["rows"]}


def test_images_move_and_black_comes_in():
    image = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    assert np.array_equal(_shifted(image, (0, 1))[0, :, 1:], image[0, :, :-1])
    assert np.array_equal(_shifted(image, (0, -1))[0, :, :-1], image[0, :, 1:])
    assert np.array_equal(_shifted(image, (1, 0))[0, 1:], image[0, :-1])
    assert not _shifted(image, (1, 0))[0, 0].any()


def test_splits_are_disjoint_and_the_shifted_domain_is_new():
    task = Adaptation(3, "right", epochs=3)
    assert [len(part[1]) for part in (task.train, task.validation, task.test)] == [1000, 300, 497]
    scores = task.scores(task.base)
    x, _ = task.test
    assert x.min() >= 0.2 - 1e-6  # brightness 0.2 on black
    assert scores["test_accuracy"] < 0.8
    before = [p.clone() for p in task.base.parameters()]
    task.adapt(NETWORK["MeZO"], 1e-3, 4, 0)
    assert all(torch.equal(p, q) for p, q in zip(before, task.base.parameters(), strict=True))
