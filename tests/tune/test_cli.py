"""subspan tune as a command: results, plans, the schema, and errors as one sentence with exit status 2."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from subspan.cli import app
from subspan.tune import Config


@pytest.fixture
def run():
    return lambda *words: CliRunner().invoke(app, ["tune", *map(str, words)])


@pytest.fixture
def written(settings, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings()))
    return path


def test_it_trains_shows_progress_and_prints_one_json_object(run, written, tmp_path):
    result = run(written, "--max-steps", 2, "--set", "lr=1e-3", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["steps"] == 2
    assert {"before", "after", "facts", "seconds"} <= summary.keys()
    assert "step 2/2" in result.stderr
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["lr"], saved["max_steps"]) == (1e-3, 2)


def test_words_for_people_name_the_outcome_and_where_it_lies(run, written, tmp_path):
    result = run(written, "--max-steps", 1)
    assert result.exit_code == 0, result.output
    assert "before" in result.stdout
    assert str(tmp_path / "run" / "adapter") in result.stdout
    assert str(tmp_path / "run" / "report.html") in result.stdout


def test_a_dry_run_prints_the_plan_and_writes_nothing(run, written, tmp_path):
    result = run(written, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["steps"] == 6
    assert facts["trained"] < facts["parameters"]
    assert not (tmp_path / "run").exists()


def test_the_schema_is_that_of_the_configuration(run):
    assert json.loads(run("--schema").stdout) == Config.model_json_schema()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.yaml"], "there is no configuration file nowhere.yaml"),
        (["FILE", "--set", "optimiser=muon"], "did you mean 'optimizer'"),
        (["FILE", "--set", "adapter.r=64"], "adapter.r=64 exceeds the smaller side"),
        (["FILE", "--set", "data.source=gone.csv"], "there is no file gone.csv"),
        (["FILE", "--set", "model=asset:nothing"], "there is no asset 'nothing'"),
        (["FILE", "--max-steps", "0"], "max_steps"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_status_2(run, written, words, sentence):
    result = run(*[written if w == "FILE" else w for w in words])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
