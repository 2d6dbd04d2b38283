"""The main job on the real models that arrive as wheels: a few steps, then plain peft on the unmodified base."""

import pytest
import torch

from subspan.data import asset_path, model_source
from subspan.errors import MissingAsset
from subspan.tune import parse, tune


def needs(*assets):
    missing = []
    for asset in assets:
        try:
            asset_path(asset)
        except MissingAsset as error:
            missing.append(str(error))
    return pytest.mark.skipif(bool(missing), reason="; ".join(missing))


@needs("smollm2-135m-instruct", "reviews")
@pytest.mark.slow
def test_smollm2_reloads_in_plain_peft_with_identical_logits(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = parse(
        {
            "model": "asset:smollm2-135m-instruct",
            "task": "causal-lm",
            "data": {"source": "asset:reviews", "max_words": 20, "validation": 4, "test": 8, "train": 64},
            "prompt": "Positive or negative?\n\n{text}",
            "system": "",
            "output": str(tmp_path / "run"),
            "adapter": {"r": 4, "targets": ["q_proj", "down_proj"]},
            "init": "fisher",
            "calibration_rows": 8,
            "optimizer": "muon",
            "batch_size": 4,
            "max_steps": 2,
        }
    )
    trained = {}

    class Watcher:
        def say(self, text):
            trained.setdefault("said", []).append(text)

        def progress(self, step, total, figures):
            trained.update(figures)

        def evaluated(self, done, total):
            pass

    summary = tune(config, display=Watcher())
    source = model_source("asset:smollm2-135m-instruct")
    base = AutoModelForCausalLM.from_pretrained(source.path, gguf_file=source.gguf_file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.path, gguf_file=source.gguf_file)
    batch = tokenizer(["a film worth every minute", "dull"], return_tensors="pt", padding=True)
    with torch.no_grad():
        plain = base(**batch).logits
        model = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
        adapted = model(**batch).logits
        with model.disable_adapter():
            again = model(**batch).logits
    assert torch.equal(plain, again)  # the base is the original one
    assert (adapted - plain).abs().max() > 1e-3
    from subspan.tune.display import Silent
    from subspan.tune.fitting import score
    from subspan.tune.loading import load_task

    task, rows = load_task(config)
    assert score(task, model, rows.test, 4, Silent())["loss"] == pytest.approx(summary["after"]["loss"], abs=1e-4)


@pytest.mark.slow
@needs("minilm", "reviews")
def test_minilm_trains_privately_and_states_its_budget(tmp_path):
    config = parse(
        {
            "model": "asset:minilm",
            "data": {"source": "asset:reviews", "max_words": 20, "validation": 8, "test": 16, "train": 200},
            "output": str(tmp_path / "run"),
            "adapter": {"r": 4, "targets": ["query", "value"]},
            "privacy": {"method": "prism", "epsilon": 8.0, "delta": 1e-3, "twin": False},
            "batch_size": 16,
            "max_steps": 3,
        }
    )
    facts = tune(config)["facts"]["privacy"]
    assert facts["steps"] == 3
    assert 0 < facts["epsilon"] <= 8.0
    assert facts["sample_rate"] == 16 / 200
