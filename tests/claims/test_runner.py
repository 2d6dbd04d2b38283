"""The sweep: seeds, resume, stale rows, failures."""

import json

import pytest

from subspan.claims import Cell, Claim, Row, Statement, claim_slugs, load_claim, run_claim
from subspan.claims.claim import Results
from subspan.claims.runner import TaskFailed, source_fingerprint, sweep_seeds
from subspan.errors import ConfigError, MissingAsset, MissingExtra


def measure(seed: int, smoke: bool, lr: float, log: str) -> list[Row]:
    """Leave a trace of having run; the value is exact in binary."""
    print("chatter that must not reach standard output")
    with open(log, "a") as file:
        file.write(f"{lr} {seed}\n")
    return [Row("adam", {"lr": lr}, "acc", seed, lr + seed + 0.5 * smoke)]


def fail(seed: int, smoke: bool) -> list[Row]:
    raise ValueError("a bug")


def lack(seed: int, smoke: bool) -> list[Row]:
    raise MissingAsset("nothing here")


def accuracy(results: Results) -> float:
    return results.values("adam", "acc", lr=0.5).mean()


def make_claim(log, extra: tuple[Cell, ...] = ()) -> Claim:
    cells = [Cell(f"lr{lr}", measure, {"lr": lr, "log": str(log)}) for lr in (0.25, 0.5)]
    return Claim(
        slug="toy",
        title="Toy",
        source="nowhere",
        cells=lambda smoke: [*cells, *extra],
        statements=[Statement("adam reaches 1.5", accuracy, 1.5)],
        seeds=(0, 1, 2),
    )


def run(claim: Claim, tmp_path, **options) -> dict:
    return run_claim(claim, folder=tmp_path, progress=False, jobs=1, **options)


def test_outcome_holds_statements_rows_seeds_and_is_strict_json(tmp_path, capsys):
    log = tmp_path / "log"
    outcome = run(make_claim(log), tmp_path)
    assert capsys.readouterr().out == ""
    assert outcome["statements"] == [
        {
            "text": "adam reaches 1.5",
            "holds": True,
            "measured": 1.5,
            "required": 1.5,
            "relation": ">=",
            "problem": None,
        }
    ]
    row = outcome["rows"][1]
    assert (row["method"], row["setting"], row["metric"]) == ("adam", {"lr": 0.5}, "acc")
    assert (row["mean"], row["std"], row["n"]) == (1.5, 1.0, 3)
    assert row["values"] == {"0": 0.5, "1": 1.5, "2": 2.5}
    assert outcome["seeds"] == [0, 1, 2]
    assert outcome["smoke"] is False
    assert json.loads((tmp_path / "toy" / "full.json").read_text()) == outcome
    assert len(log.read_text().splitlines()) == 6


def test_resume_runs_only_what_is_missing_even_after_a_line_was_cut(tmp_path):
    log = tmp_path / "log"
    first = run(make_claim(log), tmp_path)
    lines = tmp_path / "toy" / "full.jsonl"
    kept = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(b"".join(kept[:4]) + kept[4][:20])
    log.write_text("")
    second = run(make_claim(log), tmp_path)
    assert len(log.read_text().splitlines()) == 2
    assert second["reused"] == 4
    assert second["rows"] == first["rows"]
    log.write_text("")
    assert run(make_claim(log), tmp_path)["reused"] == 6  # the cut line did not swallow its successor
    assert log.read_text() == ""


def test_fresh_measures_again_and_more_seeds_add_to_what_is_there(tmp_path):
    log = tmp_path / "log"
    run(make_claim(log), tmp_path, seeds=2)
    outcome = run(make_claim(log), tmp_path, seeds=4)
    assert outcome["seeds"] == [0, 1, 2, 3]
    assert outcome["reused"] == 4
    assert run(make_claim(log), tmp_path, fresh=True)["reused"] == 0


def test_smoke_is_kept_apart(tmp_path):
    log = tmp_path / "log"
    run(make_claim(log), tmp_path)
    outcome = run(make_claim(log), tmp_path, smoke=True)
    assert outcome["smoke"] is True
    assert outcome["seeds"] == [0]
    assert outcome["reused"] == 0
    assert outcome["rows"][0]["mean"] == 0.75


def test_rows_of_other_sources_are_not_reused(tmp_path, monkeypatch):
    log = tmp_path / "log"
    run(make_claim(log), tmp_path)
    monkeypatch.setattr("subspan.claims.runner.source_fingerprint", lambda modules: "other")
    assert run(make_claim(log), tmp_path)["reused"] == 0


def test_fingerprint_follows_imports_into_rooms_and_outside_modules(tmp_path, monkeypatch):
    module = tmp_path / "some_claim.py"
    monkeypatch.syspath_prepend(tmp_path)

    def fingerprint(text: str) -> str:
        module.write_text(text)
        import some_claim  # noqa: F401  # pyright: ignore[reportMissingImports]

        return source_fingerprint(["some_claim"])

    plain = fingerprint("x = 1\n")
    assert plain == fingerprint("x = 1\n")
    assert plain != fingerprint("x = 2\n")
    monkeypatch.setattr("subspan.claims.runner.__file__", str(tmp_path / "subspan" / "claims" / "runner.py"))
    room = tmp_path / "subspan" / "optim"
    room.mkdir(parents=True)
    deeper = tmp_path / "subspan" / "linalg"
    deeper.mkdir()
    (room / "__init__.py").write_text("from subspan.linalg import polar\n")
    (room / "muon.py").write_text("a = 1\n")
    (deeper / "__init__.py").write_text("b = 1\n")
    text = "def f():\n    from subspan.optim import Muon\n"
    before = fingerprint(text)
    (room / "muon.py").write_text("a = 2\n")
    after = fingerprint(text)
    assert before != after
    (deeper / "__init__.py").write_text("b = 2\n")
    assert fingerprint(text) != after


def test_processes_give_the_same_rows(tmp_path):
    log = tmp_path / "log"
    one = run(make_claim(log), tmp_path / "a")
    two = run_claim(make_claim(log), folder=tmp_path / "b", progress=False, jobs=2)
    assert one["rows"] == two["rows"]


def test_a_failing_cell_is_named_and_finished_tasks_are_kept(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(TaskFailed, match="cell 'bad' failed with seed 0: ValueError: a bug"):
        run(make_claim(log, (Cell("bad", fail),)), tmp_path)
    assert run(make_claim(log), tmp_path)["reused"] == 2


def test_a_user_error_in_a_cell_stays_one(tmp_path):
    with pytest.raises(MissingAsset, match="nothing here"):
        run(make_claim(tmp_path / "log", (Cell("lack", lack),)), tmp_path)


def test_progress_goes_to_stderr(tmp_path, capsys):
    run_claim(make_claim(tmp_path / "log"), folder=tmp_path, jobs=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "toy: 6/6 lr0.5 (seed 2)" in captured.err


def test_the_same_cell_twice_is_refused(tmp_path):
    log = tmp_path / "log"
    again = Cell("lr0.5", measure, {"log": str(log), "lr": 0.5})
    with pytest.raises(ConfigError, match="same cell twice"):
        run(make_claim(log, (again,)), tmp_path)


@pytest.mark.parametrize(("options", "message"), [({"seeds": 0}, "at least 1, got 0"), ({"jobs": 0}, "got 0")])
def test_counts_below_one_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run_claim(make_claim(tmp_path / "log"), folder=tmp_path, **options)


def test_seed_counts(tmp_path):
    claim = make_claim(tmp_path)
    assert sweep_seeds(claim, smoke=False, count=None) == [0, 1, 2]
    assert sweep_seeds(claim, smoke=False, count=2) == [0, 1]
    assert sweep_seeds(claim, smoke=False, count=5) == [0, 1, 2, 3, 4]
    assert sweep_seeds(claim, smoke=True, count=None) == [0]


def test_ray_backend_without_ray_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtra, match="pip install ray"):
        run(make_claim(tmp_path / "log"), tmp_path, backend="ray")


def test_discovery_lists_only_files_that_define_a_claim(tmp_path, monkeypatch):
    monkeypatch.setattr("subspan.claims.runner.__file__", str(tmp_path / "runner.py"))
    (tmp_path / "prism.py").write_text("CLAIM = 1\n")
    (tmp_path / "muon_lora.py").write_text("CLAIM: int = 1\n")
    (tmp_path / "helper.py").write_text("from x import CLAIM\n")
    assert claim_slugs() == ["muon_lora", "prism"]
    with pytest.raises(ConfigError, match="did you mean 'prism'"):
        load_claim("prsim")
    with pytest.raises(ConfigError, match="claims are: muon_lora, prism"):
        load_claim("zzz")


def test_every_claim_in_the_package_loads():
    for slug in claim_slugs():
        assert load_claim(slug).slug == slug
