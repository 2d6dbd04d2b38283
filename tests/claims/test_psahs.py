"""The claim's smoke form, its statements on hand-made results, and the peers."""

import dataclasses
import math

import pytest
import torch

from subspan.claims import psahs, run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.psahs import CLAIM, DANN, DOWN, ERM, MLP, OURS, SAME, UP
from subspan.claims.psahs_peers import Asymmetric, Mixed, Rebuilt, class_connections, without_edges
from subspan.data import Graph
from subspan.errors import MissingAsset

GOOD = {"down": 0.45, "up": 0.97, "same": 0.70, "gap": 1e-7, "dann": 0.30, "matched": 0.1}


def results(**changes: float) -> Results:
    value = GOOD | changes
    rows = []
    for seed in range(10):
        for pair, ours, plain in ((DOWN, "down", 0.5), (UP, "up", 0.96), (SAME, "same", 0.69)):
            at = {"graphs": "digits", "pair": pair}
            found = {OURS: value[ours], ERM: plain, DANN: value["dann"], MLP: 0.4}
            rows += [Row(method, at, "accuracy", seed, accuracy) for method, accuracy in found.items()]
            measured = {
                "homophily gap": value["gap"] if seed else 0.0,
                "lead of the GNN over the MLP": plain - 0.4,
                "lead predicted, rewired": value["matched"],
            }
            rows += [Row("diagnosis", at, metric, seed, number) for metric, number in measured.items()]
    return Results(rows)


def test_statements_hold_on_good_numbers() -> None:
    verdicts = [s.judge(results()) for s in CLAIM.statements]
    assert all(v.holds and v.problem is None for v in verdicts), verdicts
    assert [v.measured for v in verdicts] == pytest.approx([1e-7, 0.15, 1.0, 0.01, 0.01, 1.0])


@pytest.mark.parametrize(
    ("failing", "change"),
    [
        ([0], {"gap": 2e-6}),
        ([1], {"down": 0.34}),
        ([1, 2], {"down": 0.29}),
        ([3], {"up": 0.95}),
        ([4], {"same": 0.6}),
        ([5], {"matched": -0.1}),
    ],
)
def test_statements_fail_on_worse_numbers(failing: list[int], change: dict[str, float]) -> None:
    verdicts = [s.judge(results(**change)) for s in CLAIM.statements]
    assert [i for i, v in enumerate(verdicts) if not v.holds] == failing


def test_a_mean_below_zero_passes_within_one_standard_error() -> None:
    def vary(row: Row) -> Row:
        ours = row.method == OURS and row.setting["pair"] == SAME
        return dataclasses.replace(row, value=row.value + (0.1 if row.seed % 2 else -0.1)) if ours else row

    verdict = CLAIM.statements[4].judge(Results([vary(row) for row in results(same=0.68)]))
    assert verdict.holds
    assert verdict.measured == pytest.approx(-0.01 + 0.1 * math.sqrt(10 / 9) / math.sqrt(10))


@pytest.mark.slow
def test_smoke_form_runs_the_whole_path(tmp_path) -> None:
    outcome = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert outcome["smoke"] is True
    assert all(s["problem"] is None for s in outcome["statements"])
    assert outcome["statements"][0]["holds"]  # the adjustment is exact whatever was trained
    assert {row["method"] for row in outcome["rows"]} == {*psahs.METHODS, "diagnosis"}
    assert len(CLAIM.seeds) >= 10


def test_blogs_are_left_out_where_they_are_missing(monkeypatch) -> None:
    def missing() -> None:
        raise MissingAsset("not here")

    monkeypatch.setattr(psahs, "blogcatalog", missing)
    assert psahs.measure_blogs(100, True, pair=psahs.FORTH) == []


def test_peers_that_are_only_reported_have_fewer_seeds() -> None:
    assert psahs.measure_digits(109, True, pair=psahs.HIGH) == []
    assert psahs.measure_blocks(109, True, pair="0.4 -> 0.4") == []
    assert psahs.measure_blogs(109, True, pair=psahs.FORTH) == []


def test_class_connections_are_edges_per_pair_of_nodes() -> None:
    index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    y = torch.tensor([0, 0, 1])
    wanted = torch.tensor([[1 / 4, 1 / 2, 0], [1 / 2, 0, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(class_connections(index, y, 3), wanted)  # nobody is in class 2


@pytest.mark.parametrize("make", [Asymmetric, Mixed, Rebuilt])
def test_encoders_of_the_peers_see_edges_and_attributes(make) -> None:
    torch.manual_seed(0)
    x, index = torch.randn(30, 5), torch.randint(30, (2, 80))
    encoder = make(5, 8).eval()
    out = encoder(x, index, torch.ones(80))
    assert out.shape == (30, 8)
    assert not torch.allclose(out, encoder(x, index[:, :40].clone(), torch.ones(40)))
    assert not torch.allclose(out, encoder(x + 1, index, torch.ones(80)))
    assert without_edges(Graph(x, index)).edge_index.shape == (2, 0)
