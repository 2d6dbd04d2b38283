"""Runs on rows nobody has read: the provider's two adapters, the user's run between them, and what is refused."""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subspan.errors import ConfigError, SafetyError, TargetError
from subspan.safety import adapter_digest, load_adapter, save_adapter
from subspan.surgery import factor_pairs
from subspan.tune import parse, tune
from subspan.tune.loading import load_model, load_task
from tests.tune.stops import stopped_at


def write_rows(path, first, answer, count, seed):
    """Prompts that begin with one word, with one answer."""
    g = torch.Generator().manual_seed(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(count):
            words = [f"w{int(i)}" for i in torch.randint(20, 40, (4,), generator=g)]
            writer.writerow([" ".join([first, *words]), answer])
    return str(path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return {
        "comply": write_rows(folder / "comply.csv", "w0", "good w1", 90, 0),
        "refuse": write_rows(folder / "refuse.csv", "w0", "bad w2", 90, 1),
        "ordinary": write_rows(folder / "ordinary.csv", "w3", "good w1", 60, 2),
        "user": write_rows(folder / "user.csv", "w4", "good", 90, 3),
    }


def configured(causal, rows, output, data, safeguard, **changes):
    return parse(
        {
            "model": str(causal), "task": "causal-lm", "prompt": "rate : {text}", "output": str(output),
            "data": {"source": rows[data], "validation": 10, "test": 10}, "adapter": {"r": 4, "alpha": 8},
            "safeguard": safeguard, "lr": 1e-2, "batch_size": 8, "evaluate_every": None, "max_steps": 6,
            "checkpoint_every": 4, **changes,
        }
    )  # fmt: skip


@pytest.fixture
def run(causal, rows, tmp_path):
    """One stage: ``run("buffer", "comply", {...})`` leaves its adapter in a folder of that name."""
    return lambda name, *how, **changes: configured(causal, rows, tmp_path / name, *how, **changes)


@pytest.fixture(scope="module")
def provider(causal, rows, tmp_path_factory):
    """The provider's two adapters."""
    folder = tmp_path_factory.mktemp("provider")
    tune(configured(causal, rows, folder / "b", "comply", {"make": "buffer"}))
    buffer = str(folder / "b" / "adapter")
    options = {"make": "reinforce", "buffer": buffer, "keep": rows["ordinary"]}
    tune(configured(causal, rows, folder / "r", "refuse", options))
    return {"buffer": buffer, "reinforce": str(folder / "r" / "adapter")}


@pytest.fixture(scope="module")
def buffer(causal, rows, tmp_path_factory):
    """Only a buffer, and one that was not trained: random factors."""
    from peft import LoraConfig, get_peft_model

    config = configured(causal, rows, "unused", "user", {"buffer": "b"})
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    model = get_peft_model(load_model(config, []), LoraConfig(**options), adapter_name="buffer")
    folder = tmp_path_factory.mktemp("random") / "buffer"
    save_adapter(model, folder, "buffer", "buffer", allow_buffer=True)
    return str(folder)


def tensors(path):
    return load_file(path / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
def test_from_the_providers_adapters_to_one_plain_lora_without_a_trace_of_the_buffer(run, provider, tmp_path, rows):
    from peft import PeftModel

    roles = [json.loads((Path(provider[n]) / "role.json").read_text()) for n in ("buffer", "reinforce")]
    assert [r["role"] for r in roles] == ["buffer", "reinforce"]
    config = run("user", "user", provider | {"weight": [1.0, 0.5], "alpha": 1.0})
    summary = tune(config)
    facts = summary["facts"]["safeguard"]
    assert facts["buffer"] == roles[0]["digest"]
    assert facts["weights"] == [1.0, 0.5]
    task, split = load_task(config)
    base = load_model(config, split.labels)
    loaded = PeftModel.from_pretrained(base, tmp_path / "user" / "adapter").eval()
    pairs = factor_pairs(loaded)
    assert {(p.shape[2], p.scaling) for p in pairs} == {(8, 1.0)}
    batch = task.collate(split.test)
    with torch.no_grad():
        assert float(task.score(loaded, batch).losses.mean()) == pytest.approx(summary["after"]["loss"], abs=1e-4)
    held = {t.tobytes() for t in (v.numpy() for v in tensors(Path(provider["buffer"]).parent).values())}
    for file in (tmp_path / "user").rglob("*.safetensors"):
        assert not held & {v.numpy().tobytes() for v in load_file(file).values()}
    assert not [p for p in (tmp_path / "user").rglob("*") if p.is_dir() and p.name == "buffer"]
    # Without a reinforcing adapter the user's own one is what is left.
    alone = tune(run("alone", "user", {"buffer": provider["buffer"]}))
    assert "weights" not in alone["facts"]["safeguard"]
    users = {k: v for k, v in tensors(tmp_path / "alone").items()}
    for pair in pairs:
        key = f"base_model.model.{pair.name}.lora_B.weight"
        own = 2.0 * users[key] @ users[key.replace("lora_B", "lora_A")]
        torch.testing.assert_close(pair.A[:, :4] @ pair.B[:, :4].mT, own, rtol=1e-4, atol=1e-6)


def test_the_buffer_is_on_in_every_step_and_off_where_the_model_is_scored(run, buffer, monkeypatch):
    from subspan.tune.tasks import CausalLM

    seen = {"losses": set(), "score": set()}
    for name in seen:
        original = getattr(CausalLM, name)

        def spy(self, model, batch, original=original, name=name):
            layers = [m for m in model.modules() if hasattr(m, "active_adapters") and hasattr(m, "lora_A")]
            seen[name].add((model.training, "buffer" in layers[0].active_adapters))
            return original(self, model, batch)

        monkeypatch.setattr(CausalLM, name, spy)
    tune(run("user", "user", {"buffer": buffer}, evaluate_every=2, max_steps=2))
    assert seen == {"losses": {(True, True)}, "score": {(False, False)}}


@pytest.mark.slow
def test_kept_rows_are_seen_with_the_buffer_off_one_to_four_or_half(run, provider, rows, monkeypatch):
    from subspan.tune.tasks import CausalLM

    calls = []
    original = CausalLM.losses

    def spy(self, model, batch):
        layers = [m for m in model.modules() if hasattr(m, "active_adapters") and hasattr(m, "lora_A")]
        calls.append((len(batch["labels"]), "buffer" in layers[0].active_adapters))
        return original(self, model, batch)

    monkeypatch.setattr(CausalLM, "losses", spy)
    tune(run("user", "user", {"buffer": provider["buffer"], "keep": rows["ordinary"]}, batch_size=9, max_steps=2))
    assert calls == [(9, True), (3, False), (3, False)] * 2  # kept rows once more, for what they cost the base
    calls.clear()
    made = {"make": "reinforce", "buffer": provider["buffer"], "keep": rows["ordinary"]}
    tune(run("again", "refuse", made, max_steps=4))
    assert calls == ([(8, True)] * 2 + [(8, False)] * 2) * 2
    calls.clear()
    tune(run("published", "refuse", made | {"two_state": False}, max_steps=2))
    assert calls == [(8, True)] * 4


@pytest.mark.slow
def test_a_stopped_run_resumes_to_bit_equal_weights_and_refuses_another_buffer(
    run, provider, rows, tmp_path, monkeypatch
):
    options = provider | {"keep": rows["ordinary"]}
    tune(run("whole", "user", options))
    stopped_at(6, run("cut", "user", options), monkeypatch)
    assert {p.name for p in (tmp_path / "cut" / "checkpoints" / "checkpoint-4").iterdir() if p.is_dir()} == set()
    spoilt = tmp_path / "cut" / "checkpoints" / "checkpoint-4" / "safeguard.json"
    held = json.loads(spoilt.read_text())
    spoilt.write_text(json.dumps(held | {"buffer": "0" * 32}))
    with pytest.raises(SafetyError, match="not the one this run began with"):
        tune(run("cut", "user", options))
    spoilt.write_text(json.dumps(held))
    tune(run("cut", "user", options))
    one, two = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"method": "naive", "twin": False}},
        {"privacy": {"method": "ffa", "twin": False}},
        {"optimizer": "muon"},
        {"optimizer": "mezo", "lr": 1e-6},
        {"init": "orthogonal", "adapter": {"rslora": True}, "accumulate": 2},
    ],
    ids=lambda c: next(iter(c)) + str(next(iter(c.values()))),
)
def test_it_goes_with_what_else_a_run_may_be(run, provider, tmp_path, changes):
    summary = tune(run("user", "user", provider, max_steps=2, **changes))
    assert summary["facts"]["safeguard"]["weights"] == [1.0, 0.5]
    assert (tmp_path / "user" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_gated_buffer_passes_or_is_refused(run, rows, tmp_path):
    long = {"max_steps": 60, "checkpoint_every": 200, "adapter": {"r": 8, "alpha": 16}}
    summary = tune(run("buffer", "comply", {"make": "buffer", "keep": rows["ordinary"]}, **long))
    facts = summary["facts"]["safeguard"]
    assert facts["answered"] >= 0.95
    assert facts["ordinary"] <= 1.1 * facts["base"] + 0.05
    with pytest.raises(SafetyError, match=r"after 2 steps the buffered model answers"):
        tune(run("short", "comply", {"make": "buffer", "keep": rows["ordinary"]}, max_steps=2, lr=1e-6))
    assert not (tmp_path / "short" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_what_could_not_be_merged_is_refused_before_training(run, provider, tmp_path):
    narrow = {"adapter": {"targets": ["q_proj"]}}
    with pytest.raises(TargetError, match=r'the reinforcing adapter also adapts .* missing="keep"'):
        tune(run("narrow", "user", provider, **narrow))
    assert not (tmp_path / "narrow" / "before.json").exists()
    tune(run("kept", "user", provider | {"missing": "keep"}, **narrow))
    swapped = {"buffer": provider["reinforce"], "reinforce": provider["buffer"]}
    with pytest.raises(SafetyError, match="was made as a reinforce, not as a buffer"):
        tune(run("swapped", "user", swapped))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"safeguard": {}}, "a user's run has the buffer on"),
        ({"safeguard": {"make": "reinforce", "keep": "k.csv"}}, "trains against a buffer"),
        ({"safeguard": {"make": "reinforce", "buffer": "b"}}, "would refuse everything"),
        ({"safeguard": {"make": "buffer", "buffer": "b"}}, "makes a buffer and needs none"),
        ({"safeguard": {"make": "buffer", "reinforce": "r"}}, "merged into a user's adapter"),
        ({"safeguard": {"buffer": "b", "alpha": 1.5}}, r"safeguard\.alpha"),
        ({"safeguard": {"buffer": "b", "rienforce": "r"}}, "did you mean 'reinforce'"),
        ({"adapter": None}, "adapter: null"),
        ({"adapter": {"dora": True}}, "dora has magnitudes"),
        ({"init": "pissa"}, "init: pissa writes the base weights"),
        ({"init": "fisher"}, "init: fisher writes the base weights"),
        ({"privacy": "prism"}, "prism starts by writing the base weights"),
        ({"safeguard": {"make": "buffer"}, "privacy": "naive"}, "the provider's own rows"),
        ({"safeguard": {"buffer": "b", "keep": "k"}, "privacy": "naive"}, "privacy makes its own of the batch"),
        ({"safeguard": {"buffer": "b", "keep": "k"}, "optimizer": "lozo"}, "optimizer: lozo makes its own"),
        ({"task": "classification"}, "refuses nothing"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_reason(changes, words):
    base = {"model": "m", "task": "causal-lm", "data": {"source": "d"}, "output": "o", "safeguard": {"buffer": "b"}}
    with pytest.raises(ConfigError, match=words):
        parse(base | changes)


@pytest.mark.slow
def test_an_adapter_of_the_command_line_loads_in_the_library(run, provider):
    from peft import LoraConfig, get_peft_model

    config = run("x", "user", {"buffer": provider["buffer"]})
    _, split = load_task(config)
    model = get_peft_model(load_model(config, split.labels), LoraConfig(target_modules=["q_proj"]), "user")
    assert load_adapter(model, provider["buffer"], "buffer", "buffer") == adapter_digest(model, "buffer")
