"""The verb ``subspan hubs``."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from subspan.cli import app
from subspan.structure import make_common_hub_ggm


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    data = make_common_hub_ggm(80, 300, random_state=1)
    path = tmp_path_factory.mktemp("hubs") / "data.csv"
    rows = [",".join([f"s{k}", *map(str, row)]) for k, x in enumerate(data.X) for row in x.tolist()]
    path.write_text("\n".join([",".join(["site", *(f"v{i}" for i in range(80))]), *rows]) + "\n")
    return path


def call(*words):
    return CliRunner().invoke(app, ["hubs", *map(str, words)])


def test_prints_the_hubs_and_writes_table_and_page(table, tmp_path):
    result = call(table, "--group", "site", "--stability", 3, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sorted(line.split()[1] for line in lines if line.startswith("hub ")) == [f"v{i}" for i in range(5)]
    assert any(line.startswith("population s1: 300 samples, weight 0.") for line in lines)
    assert any(line.startswith("only in s2: v7") for line in lines)
    assert (tmp_path / "hubs.csv").is_file()
    assert "<svg" in (tmp_path / "report.html").read_text("utf-8")


def test_json_is_one_object_and_options_reach_the_detector(table, tmp_path):
    result = call(table, "--group", "site", "--top", 2, "--components", 3, "--json", "--out", tmp_path)
    found = json.loads(result.stdout)
    assert len(found["hubs"]) == 2
    assert found["components"] == 3
    assert found["report"] == str(tmp_path / "report.html")
    one = json.loads(call(table, "--drop", "site", "--covariance", "--json", "--out", tmp_path).stdout)
    assert [p["name"] for p in one["populations"]] == ["all"]
    assert one["influence"] != found["influence"]


def test_no_hub_and_warnings_are_said(tmp_path):
    path = tmp_path / "few.csv"
    x = np.random.default_rng(0).normal(size=(5, 30))
    path.write_text("\n".join([",".join(f"v{i}" for i in range(30)), *(",".join(map(str, row)) for row in x)]))
    result = call(path, "-c", 9, "--out", tmp_path)
    assert "no variable is a hub by this rule" in result.stdout
    assert "note: the data leave a common null space" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--group", "sit"], "has no column 'sit'; did you mean 'site'?"),
        ([], "column 'site': row 1 holds 's0', which is no number"),
        (["--group", "site", "--rule", "3sd"], "rule must be '2sd'"),
        (["--group", "site", "--components", "many"], "n_components must be an integer or one of"),
        (["--group", "site", "--components", "0"], "n_components must lie between 1"),
    ],
)
def test_a_user_error_is_one_line_with_status_2(table, tmp_path, words, message):
    result = call(table, *words, "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
