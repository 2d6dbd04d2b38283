"""The verb ``subspan facilities``, and the stream behind it."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from subspan.cli import app
from subspan.errors import ConfigError, DataError
from subspan.structure import DynamicFacilityLocation
from subspan.structure.facility.stream import StreamConfig, run_stream

SUBSPAN = [sys.executable, "-c", "from subspan.cli import main; main()"]


def table(path, rows, names):
    path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


@pytest.fixture(scope="module")
def points():
    rng = np.random.default_rng(0)
    return np.round(3 * rng.normal(size=(6, 2))[rng.integers(6, size=400)] + rng.normal(size=(400, 2)), 3)


@pytest.fixture
def stream(tmp_path, points):
    return table(tmp_path / "s.csv", [[f"c{j}", *x] for j, x in enumerate(points.tolist())], ["id", "x", "y"])


@pytest.fixture
def places(tmp_path, points):
    rows = [[x, y, 5 + i] for i, (x, y) in enumerate(points[::20].tolist())]
    return table(tmp_path / "places.csv", rows, ["x", "y", "price"])


def call(*words):
    return CliRunner().invoke(app, ["facilities", *map(str, words)])


def config(source, **changes):
    given = dict(facilities=None, first=20, price=30.0, window=None, options={}) | changes
    return StreamConfig(source=str(source), **given)


def test_a_stream_gives_what_the_estimator_gives(stream, places, points, tmp_path):
    result = call(stream, "--facilities", places, "--window", 100, "--out", tmp_path / "o", "--json", "--every", 150)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    prices = 5.0 + np.arange(20)
    model = DynamicFacilityLocation().fit(np.zeros((0, 2)), facilities=points[::20], opening_cost=prices)
    for j, x in enumerate(points):
        model.partial_fit(x[None], ids=[f"c{j}"])
        if j >= 100:
            model.forget([f"c{j - 100}"])
    assert summary["rows"] == 400
    assert summary["clients"] == 100
    assert summary["cost"] == model.cost_
    assert summary["client_moves"] == model.n_client_moves_
    assert summary["proven_ratio"] == pytest.approx(model.certificate().ratio)
    lines = (tmp_path / "o" / "clients.csv").read_text().splitlines()
    assert lines == ["id,facility", *(f"{i},{p}" for i, p in zip(model.ids_, model.assignment_.tolist(), strict=True))]
    rows = [line.split(",") for line in (tmp_path / "o" / "facilities.csv").read_text().splitlines()]
    assert rows[0] == ["facility", "price", "clients", "x", "y"]
    assert [int(row[0]) for row in rows[1:]] == model.open_facilities_.tolist()
    assert sum(int(row[2]) for row in rows[1:]) == 100
    assert [float(row[1]) for row in rows[1:]] == prices[model.open_facilities_].tolist()
    metrics = [json.loads(line)["rows"] for line in (tmp_path / "o" / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [150, 300, 400]


def test_it_says_what_came_out(stream, tmp_path):
    words = call(stream, "--price", 30, "--out", tmp_path / "o").stdout
    assert words.startswith("400 rows: 400 clients at ")
    assert "times the optimum" in words
    assert f"facilities: {tmp_path / 'o' / 'facilities.csv'}" in words


def test_inserts_deletes_weights_and_prices(tmp_path):
    rows = [
        ["insert", "a", 0, 0, 2, ""], ["insert", "b", 10, 0, "", ""], ["insert", "c", 0, 1, 1, ""],
        ["delete", "b", "", "", "", ""], ["price", 1, "", "", "", 0.5], ["insert", "b", 10, 1, "", ""],
    ]  # fmt: skip
    path = table(tmp_path / "s.csv", rows, ["op", "id", "x", "y", "weight", "price"])
    summary = run_stream(config(path, first=2, price=3.0), out=tmp_path / "o")
    assert summary["clients"] == 3
    # places (0, 0) at 3 and (10, 0) at 0.5; a (weight 2) and c at the first, b at the second
    assert summary["cost"] == pytest.approx(3.0 + 0.5 + 1.0 + 1.0)
    assert (tmp_path / "o" / "clients.csv").read_text() == "id,facility\na,0\nc,0\nb,1\n"


def test_parquet_streams(tmp_path, points):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"x": points[:, 0], "y": points[:, 1]}), tmp_path / "s.parquet")
    summary = run_stream(config(tmp_path / "s.parquet"), out=tmp_path / "o")
    assert (summary["rows"], summary["clients"]) == (400, 400)
    assert (tmp_path / "o" / "clients.csv").read_text().startswith("id,facility\n1,")  # rows are numbered from 1


def test_standard_input_goes_on_where_it_stopped(stream, tmp_path, monkeypatch):
    lines = stream.read_text().splitlines(keepends=True)
    whole = run_stream(config(stream, window=50), out=tmp_path / "whole")
    for part in (lines[:151], [lines[0], *lines[151:]]):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(part)))
        parts = run_stream(config("-", window=50), out=tmp_path / "parts")
    for name in ("clients.csv", "facilities.csv"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    ignored = {"seconds", "out"}
    assert {k: v for k, v in parts.items() if k not in ignored} == {k: v for k, v in whole.items() if k not in ignored}


def test_a_bad_row_is_named_and_the_run_goes_on_once_it_is_put_right(stream, tmp_path):
    good = stream.read_text()
    lines = good.splitlines(keepends=True)
    stream.write_text("".join([*lines[:300], "c299,here,3\n", *lines[301:]]))
    with pytest.raises(DataError, match="row 300: column 'x' holds 'here', which is no number"):
        run_stream(config(stream), out=tmp_path / "o")
    assert json.loads((tmp_path / "o" / "metrics.jsonl").read_text())["rows"] == 299
    stream.write_text(good)
    resumed = run_stream(config(stream), out=tmp_path / "o")
    whole = run_stream(config(stream), out=tmp_path / "w")
    assert resumed["cost"] == whole["cost"]
    assert (tmp_path / "o" / "clients.csv").read_bytes() == (tmp_path / "w" / "clients.csv").read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("insert,a,1,1,", "row 3: client 'a' is present already"),
        ("delete,z,,,", "row 3: client 'z' is not present"),
        ("upsert,z,1,1,", "row 3: op must be insert, delete or price, got 'upsert'"),
        ("insert,z,nan,1,", "row 3: Input X contains NaN"),
        ("price,7,,,2", "row 3: there is no facility 7; there are 2"),
        ("price,0,,,", "row 3: column 'price' holds '', which is no number"),
        ("price,0,,,-2", "row 3: opening_cost must be positive"),
        ("insert,z,1,1", "line 4: 4 cells for 5 columns"),
    ],
)
def test_rows_that_do_not_fit(tmp_path, line, message):
    path = tmp_path / "s.csv"
    path.write_text(f"op,id,x,y,price\ninsert,a,0,0,\ninsert,b,1,0,\n{line}\n")
    with pytest.raises(DataError, match=message):
        run_stream(config(path, first=2), out=tmp_path / "o")


@pytest.mark.parametrize("more", [["id"], ["weight", "op"], [""], ["facility", "clients"]])
def test_places_leave_out_what_is_no_coordinate(places, stream, tmp_path, more):
    rows = [line.split(",") for line in places.read_text().splitlines()]
    rows = [[*(f"p{i}" if name == "id" else "9000" for name in more), *row] for i, row in enumerate(rows)]
    wide = table(tmp_path / "wide.csv", rows[1:], [*more, "x", "y", "price"])
    found = [run_stream(config(stream, facilities=str(path)), out=tmp_path / path.stem) for path in (places, wide)]
    assert found[0]["cost"] == found[1]["cost"]


def test_a_run_takes_the_facilities_of_another_as_places(stream, places, tmp_path):
    first = run_stream(config(stream, facilities=str(places)), out=tmp_path / "a")
    again = run_stream(config(stream, facilities=str(tmp_path / "a" / "facilities.csv")), out=tmp_path / "b")
    assert again["cost"] <= 1.1 * first["cost"]  # the places that were open, at their prices


def test_columns_that_the_places_lack_are_refused(places, points, tmp_path):
    path = table(tmp_path / "s.csv", [[*x, 5.0] for x in points.tolist()], ["x", "y", "z"])
    with pytest.raises(DataError, match=r"s\.csv has the column 'z', but the places have x, y: leave it out"):
        run_stream(config(path, facilities=str(places)), out=tmp_path / "o")
    assert not (tmp_path / "o").exists()  # no row was applied: the places may be put right as well
    places.write_text("price\n1\n")
    with pytest.raises(DataError, match=r"places\.csv holds no coordinates"):
        run_stream(config(path, facilities=str(places)), out=tmp_path / "o")


def test_a_damaged_run_says_how_to_start_over_and_lost_metrics_stop_nothing(stream, tmp_path):
    out = tmp_path / "o"
    whole = run_stream(config(stream), out=out)
    (out / "metrics.jsonl").unlink()
    assert run_stream(config(stream), out=out)["cost"] == whole["cost"]
    state = (out / "state.safetensors").read_bytes()
    for damaged in (b"", state[: len(state) // 2], state.replace(b"slots", b"slits")):
        (out / "state.safetensors").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"holds a damaged run .*start over with --fresh"):
            run_stream(config(stream), out=out)


def test_what_a_run_needs(stream, places, tmp_path):
    for words, message in (
        ([stream], "error: no price is given; places lie about"),
        ([tmp_path / "none.csv", "--price", 3], "error: there is no file"),
        ([table(tmp_path / "e.csv", [], ["x"]), "--price", 3], "inserts nothing"),
        ([stream, "--price", 3, "--kappa", 1], "error: kappa must be above 1"),
        ([stream, "--price", 3, "--window", 0], "error: every, first and window must be at least 1"),
        (
            [stream, "--facilities", table(tmp_path / "z.csv", [[1, 2, 3]], ["x", "y", "z"]), "--price", 3],
            "'z' is missing",
        ),
    ):
        result = call(*words, "--out", tmp_path / "o")
        assert result.exit_code == 2, result.output
        assert message in result.stderr


def test_a_folder_belongs_to_one_run(stream, tmp_path):
    run_stream(config(stream), out=tmp_path / "o")
    with pytest.raises(ConfigError, match="holds a run with another price, window; start over"):
        run_stream(config(stream, price=31.0, window=9), out=tmp_path / "o")
    assert run_stream(config(stream, price=31.0), out=tmp_path / "o", fresh=True)["rows"] == 400
    again = run_stream(config(stream, price=31.0), out=tmp_path / "o")  # nothing is left to do
    assert again["rows"] == 400


def test_progress_shows_how_things_stand(stream, tmp_path, monkeypatch):
    from subspan.cli.facilities import _view

    monkeypatch.setattr("subspan.structure.facility.stream._SHOW_EVERY", 0.0)
    seen = []
    run_stream(config(stream, window=50), out=tmp_path / "o", progress=seen.append)
    assert [standing.rows for standing in seen] == [*range(1, 401), 400]  # and once at the end
    assert seen[-1].clients == 50
    view = _view(seen[-1])
    assert "400" in next(iter(view.columns[1].cells))


@pytest.mark.slow
def test_ctrl_c_saves_a_whole_state_and_the_same_command_goes_on(stream, tmp_path):
    lines = stream.read_text().splitlines(keepends=True)
    command = [*SUBSPAN, "facilities", "-", "--price", "30", "--first", "20", "--out", str(tmp_path / "o"), "--json"]
    command += ["--every", "100"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write("".join(lines[:251]))
    process.stdin.flush()
    metrics = tmp_path / "o" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and '"rows": 200' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # the last fifty rows
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    done = json.loads(metrics.read_text().splitlines()[-1])["rows"]
    assert 200 <= done <= 250
    rest = "".join([lines[0], *lines[1 + done :]])
    finished = json.loads(subprocess.run(command, input=rest, capture_output=True, text=True, check=True).stdout)
    whole = run_stream(config(stream, options={"kappa": 1.2}), out=tmp_path / "w")
    assert finished["rows"] == 400
    assert finished["cost"] == whole["cost"]
    assert finished["client_moves"] == whole["client_moves"]
