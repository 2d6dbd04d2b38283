"""Runs without gradients: adapters and whole models, their progress, memory, resume and refusals."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from subspan.data import SentenceClassifier
from subspan.errors import ConfigError, NonFinite
from subspan.tune import parse, plan, tune
from tests.tune.stops import stopped_at

FAST = {"interval": 2, "candidates": 2, "rank": 1}


@pytest.mark.parametrize("optimizer", ["mezo", "lozo", "lozo+"])
def test_a_run_without_gradients_counts_its_queries_and_its_memory(settings, tmp_path, optimizer, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **k: pytest.fail("a gradient was asked for"))
    summary = tune(parse(settings(optimizer=optimizer, zeroth=FAST, lr=1e-3)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    queries = [line["queries"] for line in lines if "queries" in line]
    assert len(queries) == 6
    assert queries == sorted(set(queries))
    assert summary["facts"]["optimiser"]["queries"] == queries[-1]
    assert queries[0] >= 2
    assert all("grad_norm" not in line for line in lines)
    memory = summary["facts"]["memory"]
    assert memory["ratio"] == pytest.approx(memory["peak_while_training_mib"] / memory["peak_while_scoring_mib"], 0.01)
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert "queries" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(("task", "optimizer"), [("causal-lm", "lozo+"), ("classification", "adamw")])
def test_a_whole_model_is_trained_and_loads_again(settings, tmp_path, task, optimizer):
    config = whole(settings, task, optimizer)
    summary = tune(config)
    counts = summary["facts"]["model"]
    assert counts["trained"] == counts["parameters"]
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    kind = AutoModelForCausalLM if task == "causal-lm" else AutoModelForSequenceClassification
    folder = tmp_path / "run" / "model"
    trained, base = kind.from_pretrained(folder), kind.from_pretrained(config.model)
    assert len(AutoTokenizer.from_pretrained(folder)) == 50
    name = "model.layers.0.mlp.up_proj.weight" if task == "causal-lm" else "bert.encoder.layer.0.output.dense.weight"
    moved = trained.get_parameter(name) - base.get_parameter(name)
    assert moved.norm() > 1e-4 * base.get_parameter(name).norm()
    text = (tmp_path / "run" / "report.html").read_text()
    assert "The folder holds the whole model" in text
    assert str(folder) in text


def whole(settings, task="causal-lm", optimizer="lozo+", **changes):
    built = settings(task, optimizer=optimizer, lr=1e-3, zeroth=FAST, **changes)
    return parse(built | {"adapter": None})


def test_a_sentence_encoder_is_saved_with_its_head(settings, sentence_encoder, tmp_path):
    config = whole(settings, "classification", "lozo", max_steps=2).model_copy(update={"model": str(sentence_encoder)})
    tune(config)
    folder = str(tmp_path / "run" / "model")
    again = SentenceClassifier.from_pretrained(folder)
    saved = load_file(os.path.join(folder, "classifier.safetensors"))
    assert torch.equal(again.classifier.weight, saved["weight"])
    ids = torch.tensor([[5, 6, 7]])
    assert again(ids, torch.ones_like(ids)).logits.shape == (1, 2)


@pytest.mark.parametrize("adapter", [True, False])
def test_a_stopped_run_resumes_to_bit_equal_weights_and_as_many_queries(settings, tmp_path, monkeypatch, adapter):
    def build(name):
        built = settings(optimizer="lozo+", zeroth=FAST | {"interval": 3}, lr=1e-3, output=str(tmp_path / name))
        return parse(built if adapter else built | {"adapter": None})

    first = tune(build("whole"))
    stopped_at(6, build("cut"), monkeypatch)  # in the middle of a period, past the checkpoint of step 4
    second = tune(build("cut"))
    file = "adapter/adapter_model.safetensors" if adapter else "model/model.safetensors"
    one, two = load_file(tmp_path / "whole" / file), load_file(tmp_path / "cut" / file)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert first["facts"]["optimiser"]["queries"] == second["facts"]["optimiser"]["queries"]
    assert second["facts"]["memory"]["peak_while_scoring_mib"] > 0
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert texts[0] == texts[1]


def test_micro_batches_give_the_update_of_one_batch(settings, tmp_path, monkeypatch):
    from subspan.tune import trainer

    def fixed(lengths, batch_size, batches, seed):
        return [list(range(i, i + batch_size)) for i in range(0, 8, batch_size)]

    monkeypatch.setattr(trainer, "ShuffledBatches", fixed)
    ends = []
    for parts in (1, 2):
        config = parse(
            settings(
                optimizer="lozo", accumulate=parts, max_steps=1, evaluate_every=None, output=str(tmp_path / f"{parts}")
            )
        )
        tune(config)
        ends.append(load_file(config.output / "adapter" / "adapter_model.safetensors"))
    assert max(float(v.abs().max()) for v in ends[0].values()) > 0.01
    for key, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][key], rtol=1e-2, atol=1e-4)


def test_a_loss_that_is_not_finite_names_the_rows(settings, monkeypatch):
    from subspan.tune.tasks import CausalLM, Losses

    config = parse(settings(optimizer="mezo", lr=1e-3, checkpoint_every=2))
    original, calls = CausalLM.losses, []

    def broken(self, model, batch):
        if model.training:
            calls.append(1)
        losses = original(self, model, batch)
        return Losses(losses.total * torch.nan, losses.count) if len(calls) > 7 else losses

    monkeypatch.setattr(CausalLM, "losses", broken)
    with pytest.raises(NonFinite, match=r"the loss is nan in step 4 \(rows \d+, .*checkpoint-2"):
        tune(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "lozo+", "privacy": "naive"}, "never sees the gradient of a row"),
        ({"adapter": None, "init": "fisher"}, "adapter: null asks for none"),
        ({"adapter": None, "privacy": "naive"}, "adapter: null asks for none"),
        (
            {"optimizer": "lozo+", "zeroth": {"intervall": 1}},
            "unknown key in zeroth: 'intervall'; did you mean 'interval'",
        ),
        ({"optimizer": "zo"}, "optimizer"),
        ({"optimizer": "lozo+", "zeroth": {"rank": 2}}, "needs an adapter.r above 4, not 4"),
        ({"optimizer": "lozo", "adapter": {"r": 2}}, "needs an adapter.r above 2, not 2"),
    ],
)
def test_what_cannot_work_is_refused(settings, changes, words):
    with pytest.raises(ConfigError, match=words):
        parse(settings() | changes)


@pytest.mark.parametrize(("optimizer", "r", "rank"), [("lozo+", 8, 3), ("lozo+", 16, 4), ("lozo", 4, 1)])
def test_directions_on_an_adapter_are_of_lower_rank_than_its_factors(settings, optimizer, r, rank):
    """At 4, LOZO+'s own default, all factors of the default adapter would move densely: MeZO under another name."""
    config = parse(settings(optimizer=optimizer, adapter={"r": r}, zeroth={"candidates": 2}, max_steps=1))
    facts = tune(config)["facts"]["optimiser"]
    assert facts["rank"] == rank
    assert facts["queries"] == (2 if optimizer == "lozo" else 2 + 1 + 2 * 2) + 1


def test_warm_up_is_off_unless_asked_for(settings):
    assert parse(settings(optimizer="lozo")).warmup == 0
    assert parse(settings(optimizer="lozo", warmup=0.1)).warmup == 0.1
    assert parse(settings()).warmup == 0.05


def test_the_plan_of_a_forward_only_run_needs_less_memory(settings):
    forward, backward = (plan(whole(settings, optimizer=o)) for o in ("lozo+", "adamw"))
    assert forward["trained"] == forward["parameters"] == backward["parameters"]
    assert forward["memory_gib"] < backward["memory_gib"] / 2
