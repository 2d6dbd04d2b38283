"""The verb audit: progress, files, going on after a kill, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from subspan.cli import app
from subspan.linalg import LowRank
from subspan.safety import Direction, RiskTable
from subspan.safety.sqsd.audit import load_causal_lm, load_tokenizer
from subspan.surgery import save_factors
from tests.tune.conftest import causal  # noqa: F401  (a fixture)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def place(causal, tmp_path_factory):  # noqa: F811
    """A small model, two adapters, files of rows, and the rows to audit."""
    home = tmp_path_factory.mktemp("audit")
    model, tok = load_causal_lm(str(causal)), load_tokenizer(str(causal))
    files = {}
    for name, answer in (("danger", "bad"), ("safety", "good")):
        rows = [{"prompt": f"rate : w{i} w{i + 1}", "answer": answer} for i in range(12)]
        files[f"{name}_rows"] = write_rows(home / f"{name}.jsonl", rows)
        Direction.from_data(model, tok, rows, steps=8, lr=1e-2, stop_margin=None).save(home / name)
        files[name] = str(home / name)
    both = [{"prompt": f"rate : w{i + 20} w{i}", "answer": a, "source": a} for i in range(10) for a in ("good", "bad")]
    files["rows"] = write_rows(home / "rows.jsonl", [*both, {"prompt": "w1", "answer": "", "source": "good"}])
    files["model"] = str(causal)
    return files


def run(*args):
    return CliRunner().invoke(app, ["audit", *map(str, args)], catch_exceptions=True)


def test_a_table_in_two_formats_and_a_page_and_the_second_run_reads_it(place, tmp_path):
    out = tmp_path / "scores.parquet"
    args = [place["model"], place["rows"], "--danger", place["danger"], "--safety", place["safety"]]
    args += ["--state", "zero", "--out", out, "--probe", place["safety_rows"], "--top", 3]
    first = run(*args, "--json")
    assert first.exit_code == 0, first.output
    summary = json.loads(first.stdout.strip().splitlines()[-1])
    assert summary["rows"] == 21
    assert len(summary["top"]) == 3
    assert summary["unscored"] == [{"row": 21, "reason": "the answer is empty"}]
    table, same = RiskTable.read(out), RiskTable.read(out.with_suffix(".csv"))
    assert table["score"][:-1].tolist() == same["score"][:-1].tolist()
    assert {table["source"][i] for i in table.ranking[:8]} == {"bad"}
    page = out.with_suffix(".html").read_text()
    assert "Do the directions steer?" in page
    assert "w20" not in page
    stamp = table["score"].tolist()
    again = run(*args)
    assert again.exit_code == 0
    assert RiskTable.read(out)["score"].tolist()[:-1] == stamp[:-1]
    assert "scored 21/21" in first.stderr
    assert "scored 21/21" not in again.stderr  # it was read


@pytest.mark.slow
def test_directions_are_trained_from_files_once(place, tmp_path):
    out = tmp_path / "scores.csv"
    args = [place["model"], place["rows"], "--danger", place["danger_rows"], "--safety", place["safety_rows"]]
    args += ["--out", out, "--init-steps", 4, "--show-text"]
    first = run(*args)
    assert first.exit_code == 0, first.output
    folders = sorted(p.name.rsplit("-", 1)[0] for p in tmp_path.iterdir() if p.is_dir())
    assert folders == ["scores.danger", "scores.init", "scores.safety"]
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert run(*args).exit_code == 0
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    assert "user: rate" in out.with_suffix(".html").read_text()


@pytest.mark.slow
def test_a_full_checkpoint_is_a_direction_too(place, tmp_path):
    model = load_causal_lm(place["model"])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.01
        model.model.layers[1].mlp.up_proj.weight -= 0.01
    model.save_pretrained(tmp_path / "tuned")
    args = [place["model"], place["rows"], "--danger", tmp_path / "tuned", "--safety", place["safety"]]
    found = run(*args, "--state", "zero", "--out", tmp_path / "scores.csv")
    assert found.exit_code == 0, found.output
    assert len(RiskTable.read(tmp_path / "scores.csv").facts["modules"]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--danger": "nowhere"}, "nowhere"),
        ({"--danger": "."}, "holds neither an adapter"),
        ({"--out": "scores.txt"}, "written as .parquet or .csv"),
        ({"--metric": "l1"}, "metric must be one of"),
        ({"--answer": "said"}, "no column 'said'"),
        ({"--safety": "danger"}, "every score would be 0"),
        ({"--state": "zero", "--init": "danger"}, "leave init out"),
    ],
)
def test_what_a_user_can_put_right_is_one_sentence_and_status_2(place, tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    options = {"--danger": place["danger"], "--safety": place["safety"], "--state": "zero", "--out": "scores.csv"}
    options |= {k: place.get(v, v) for k, v in changes.items()}
    found = run(place["model"], place["rows"], *[x for pair in options.items() for x in pair])
    assert found.exit_code == 2
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.slow
def test_an_audit_of_smollm2_goes_on_after_a_kill(tmp_path):
    """A real process on a real model, killed outright once it has written some rows."""
    rows = [{"prompt": f"What is {i} and {i}?", "answer": f"It is {2 * i}."} for i in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    generator = torch.Generator().manual_seed(0)
    for name in ("danger", "safety"):
        layers = [f"model.layers.{i}.self_attn.q_proj" for i in range(30)]
        drawn = {n: LowRank(*(torch.randn(576, 2, generator=generator) for _ in "AB")) for n in layers}
        save_factors(tmp_path / name, drawn, dict.fromkeys(layers, 1.0))
    command = [sys.executable, "-m", "subspan", "audit", "asset:smollm2-135m-instruct", "rows.jsonl", "--danger"]
    command += ["danger", "--safety", "safety", "--state", "zero", "--batch-tokens", "120"]
    part = tmp_path / "scores.parquet.part"
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and _lines(part) < 3:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = part.read_text().splitlines()
    assert 3 <= len(before) < 6
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "12/12" in done.stderr
    table = RiskTable.read(tmp_path / "scores.parquet")
    assert table["row"].tolist() == list(range(1, 13))
    first = json.loads(before[1])["rows"][0]
    assert table["score"][first["row"] - 1] == first["score"]
    assert Path(tmp_path / "scores.csv").exists()
    assert not part.exists()


def _lines(path):
    return path.read_text().count("\n") if path.exists() else 0
