"""Runs on another objective than cross-entropy: what is trained, the warm start, resume, labels that die, refusals."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from subspan.errors import ConfigError
from subspan.tune import load, parse, tune
from subspan.tune.parts.objective import OutputObjective, imported
from tests.tune.stops import stopped_at


def running(settings, objective, **changes):
    built = settings("classification", objective=objective, **changes)
    return parse(built)


def test_accuracy_is_trained_after_a_start_with_cross_entropy(settings, tmp_path):
    options = {"loss": "zero-one", "warmup": 0.3, "sigma": "relative:1.0", "pairs": 32}
    summary = tune(running(settings, options, max_steps=40, evaluate_every=None, checkpoint_every=40))
    assert summary["after"]["accuracy"] > summary["before"]["accuracy"] + 0.2
    facts = summary["facts"]["objective"]
    assert facts["evaluations_a_step"] == 64
    assert facts["labels_never_predicted"] == []
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    # Noisy copies of rows are right or wrong: their mean is a share of 64 x 8, a cross-entropy in nats is none.
    shares = [abs(64 * 8 * loss - round(64 * 8 * loss)) < 1e-3 for loss in losses]
    assert shares == [False] * 12 + [True] * 28
    assert any("sigma" in line for line in lines)
    assert "evaluations a step" in (tmp_path / "run" / "report.html").read_text()


MODULE = """
import torch

def rows(logits, labels):
    return (logits.argmax(-1) != labels).float()

def f1(logits, labels):
    predicted = logits.argmax(-1)
    hits = ((predicted == 1) & (labels == 1)).sum()
    return 1 - 2 * float(hits) / max(1, int((predicted == 1).sum() + (labels == 1).sum()))

number = 3
"""


@pytest.mark.parametrize(("function", "credit"), [("rows", "sample"), ("f1", "batch")])
def test_a_function_of_the_user_scores_rows_or_batches(settings, tmp_path, monkeypatch, function, credit):
    (tmp_path / "my_objectives.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_objectives", raising=False)
    seen = []
    original = OutputObjective._criterion

    def watched(self, *args):
        seen.append(original(self, *args))
        return seen[-1]

    monkeypatch.setattr(OutputObjective, "_criterion", watched)
    options = {"loss": f"python:my_objectives.{function}", "warmup": 0.0, "pairs": 4}
    summary = tune(running(settings, options, accumulate=2, evaluate_every=None, max_steps=2))
    assert seen[0].spec.credit == credit
    assert seen[0].step == 4  # micro-batches
    assert summary["facts"]["objective"]["evaluations_a_step"] == 16


def test_a_function_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "other_objectives.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    for name, words in (
        ("alone", "must name a module and a function"),
        ("no_such_module.f", "cannot be imported"),
        ("other_objectives.g", "has no g"),
        ("other_objectives.number", "is no function"),
    ):
        with pytest.raises(ConfigError, match=words):
            imported(name)
    assert callable(imported("other_objectives.rows"))


def test_a_stopped_run_resumes_to_bit_equal_weights(settings, tmp_path, monkeypatch):
    def build(name):
        options = {"loss": "truncated", "warmup": 0.2, "sigma": "relative:0.5", "pairs": 4}
        return running(settings, options, output=str(tmp_path / name))

    first = tune(build("whole"))
    stopped_at(6, build("cut"), monkeypatch)
    second = tune(build("cut"))
    one, two = (load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("whole", "cut"))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert first["facts"]["objective"] == second["facts"]["objective"]


def test_a_label_that_died_is_named(settings, tmp_path, monkeypatch):
    from subspan.tune.tasks import Classification

    original = Classification.logits

    def biased(self, model, batch):
        return original(self, model, batch) + torch.tensor([500.0, 0.0])

    monkeypatch.setattr(Classification, "logits", biased)
    with pytest.warns(UserWarning, match="starves"):
        summary = tune(running(settings, {"loss": "zero-one", "warmup": 0.0, "pairs": 2}, evaluate_every=None))
    dead = summary["facts"]["objective"]["labels_never_predicted"]
    assert len(dead) == 1
    assert dead[0] == summary["facts"]["data"]["labels"][1]


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("causal-lm", {"objective": "zero-one"}, "scores the logits of a row's labels"),
        ("classification", {"objective": "zero-one", "privacy": "naive"}, "clips row by row"),
        ("classification", {"objective": "zero-one", "optimizer": "lozo"}, "backward pass"),
        ("classification", {"objective": "zero-won"}, "did you mean 'zero-one'"),
        ("classification", {"objective": {"loss": "zero-one", "pair": 3}}, "did you mean 'pairs'"),
        ("classification", {"objective": {"loss": "zero-one", "sigma": -1.0}}, "sigma"),
        ("classification", {"objective": {"loss": "zero-one", "sigma": "half"}}, "sigma"),
        ("classification", {"objective": {"loss": "zero-one", "warmup": 1.0}}, "warmup"),
    ],
)
def test_what_cannot_work_is_refused(settings, task, changes, words):
    with pytest.raises(ConfigError, match=words):
        parse(settings(task) | changes)


def test_a_name_alone_is_the_section_with_its_defaults(settings):
    objective = running(settings, "truncated").objective
    assert objective.loss == "truncated"
    assert (objective.pairs, objective.sigma, objective.warmup) == (16, 1.0, 0.05)


def test_an_override_reaches_into_a_section_of_one_word(settings, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings("classification", objective="zero-one")))
    objective = load(path, ["objective.pairs=4"]).objective
    assert (objective.loss, objective.pairs) == ("zero-one", 4)
