"""The claims page shows verdicts, peers and plots, and survives whatever is missing."""

import pytest

from subspan.claims import Cell, Claim, Plot, Row, Statement, run_claim, write_report
from subspan.claims.report import claims_page
from subspan.errors import DataError


def measure(seed: int, smoke: bool, method: str) -> list[Row]:
    return [
        Row(method, {"lr": lr, "init": "lora"}, "accuracy", seed, value + 0.01 * seed)
        for lr, value in {0.01: 0.5, 0.1: 0.75}.items()
    ]


CLAIM = Claim(
    slug="toy",
    title="Toy <claim>",
    source="A paper & its table",
    cells=lambda smoke: [Cell(method, measure, {"method": method}) for method in ("ours", "peer")],
    statements=[
        Statement("this one holds", lambda r: r.values("ours", "accuracy", lr=0.1).mean(), 0.7),
        Statement("this one fails", lambda r: r.values("peer", "accuracy", lr=0.1).mean(), 0.7, "<="),
        Statement("this one lacks rows", lambda r: r.values("absent", "accuracy").mean(), 0.7),
    ],
    seeds=(0, 1, 2),
    plots=[
        Plot("By learning rate", "accuracy", over="lr", log_x=True),
        Plot("At 0.1", "accuracy", where={"lr": 0.1}),
        Plot("All settings, one method", "accuracy", methods=["ours"]),
        Plot("Nothing", "loss"),
        Plot("Not a number on the axis", "accuracy", over="init"),
    ],
    notes="An honest negative.",
)


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.setattr("subspan.claims.report.claim_slugs", lambda: ["other", "toy"])
    monkeypatch.setattr("subspan.claims.report.load_claim", {"toy": CLAIM}.__getitem__)


@pytest.mark.usefixtures("harness")
def test_page_shows_verdicts_peers_plots_and_what_is_missing(tmp_path):
    run_claim(CLAIM, folder=tmp_path, jobs=1, progress=False)
    path, slugs = write_report(tmp_path)
    assert (path, slugs) == (tmp_path / "report.html", ["toy"])
    html = path.read_text("utf-8")
    assert "1 of 3 statements hold" in html
    assert html.count('badge bad">does not hold') == 2
    assert html.count('badge good">holds') == 1
    assert "NOT MEASURED: not measured: MissingResults: no rows for method=&#39;absent&#39;" in html
    assert "0.76 ± 0.01" in html
    assert "lr 0.01, init lora" in html
    assert "Toy &lt;claim&gt;" in html
    assert html.count("<svg") == 3
    assert "ours (lr 0.1, init lora)" in html
    assert "No plot of &#39;loss&#39;" in html
    assert "An honest negative." in html
    assert "Smoke run" not in html


@pytest.mark.usefixtures("harness")
def test_smoke_results_are_marked_and_give_way_to_full_ones(tmp_path):
    output = tmp_path / "page.html"
    run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    write_report(tmp_path, output)
    assert "Smoke run: the path works, the numbers prove nothing." in output.read_text("utf-8")
    run_claim(CLAIM, folder=tmp_path, jobs=1, progress=False)
    write_report(tmp_path, output)
    assert "Smoke run" not in output.read_text("utf-8")


@pytest.mark.usefixtures("harness")
def test_verdicts_of_another_source_are_marked(tmp_path, monkeypatch):
    run_claim(CLAIM, folder=tmp_path, jobs=1, progress=False)
    path, _ = write_report(tmp_path)
    assert "another state of the source" not in path.read_text("utf-8")
    monkeypatch.setattr("subspan.claims.report.claim_fingerprint", lambda claim, smoke: "since mended")
    write_report(tmp_path)
    assert "Measured with another state of the source: run it again." in path.read_text("utf-8")


def test_diverged_values_do_not_break_the_page():
    rows = [
        {"method": "ours", "setting": {"lr": 0.1}, "metric": "accuracy", "mean": None, "std": None, "n": 2,
         "values": {"0": None, "1": 0.5}},
        {"method": "peer", "setting": {"lr": 0.1}, "metric": "accuracy", "mean": None, "std": 0.0, "n": 1,
         "values": {"0": None}},
    ]  # fmt: skip
    outcome = {"statements": [], "rows": rows, "seeds": [0, 1], "task_seconds": 1.0, "smoke": False, "source": ""}
    html = claims_page([(CLAIM, outcome)]).html()
    assert "– ± –" in html


@pytest.mark.usefixtures("harness")
def test_no_results_is_said(tmp_path):
    with pytest.raises(DataError, match=r"no results in .*; make some with: subspan claims run SLUG"):
        write_report(tmp_path)
