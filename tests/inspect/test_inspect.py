"""The page: what it says of classifiers, language models and adapters, going on after a stop, and refusals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from subspan.cli import app
from subspan.data import SentenceClassifier
from subspan.errors import ConfigError, DataError, NonFinite, TargetError
from subspan.inspect import inspect
from subspan.linalg import LowRank
from subspan.resize import SurgeConfig, binarize
from subspan.surgery import find_targets, save_factors
from tests.tune.conftest import causal, encoder, sentence_encoder, table, tokenizer  # noqa: F401  (fixtures)

HEAD = ["encoder.encoder.layer.1.output.dense", "classifier"]


@pytest.fixture(scope="module")
def classifier(sentence_encoder, tmp_path_factory):  # noqa: F811
    """What ``subspan tune`` leaves of a whole sentence classifier."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole") / "model"
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    SentenceClassifier.from_pretrained(str(sentence_encoder), **names).save_pretrained(folder)
    tokenizer(chat=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    y = torch.arange(24) % 3
    x = torch.randn(24, 5) + torch.eye(3, 5)[y]
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    return net, [(x[:12], y[:12]), (x[12:], y[12:])]


def run(*args):
    return CliRunner().invoke(app, ["inspect", *map(str, args)], catch_exceptions=True)


def test_a_sentence_classifier_with_texts(classifier, table, tmp_path):  # noqa: F811
    out = tmp_path / "page.html"
    args = [classifier, "--data", table, "--rows", 20, "--measure", 6, "--out", out]
    result = run(*args, *(word for name in HEAD for word in ("--layers", name)), "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["files"] == {"html": str(out), "json": str(out.with_suffix(".json"))}
    assert facts["kind"] == "classifier"
    assert facts["curvature"]["counts"] == [10, 10]
    assert [layer["layer"] for layer in facts["curvature"]["layers"]] == HEAD
    for layer in facts["curvature"]["layers"]:
        measured = layer["measured"]["eigenvalues"]
        assert layer["eigenvalues"][0] <= measured[0] * (1 + 1e-4)
        assert 0 <= layer["trace_ratio"] <= 1 + 1e-6
        assert 0 <= layer["measured"]["overlap"] <= 1 + 1e-6
    assert {row["role"] for row in facts["weights"]} >= {"embed", "q", "k", "v", "head"}
    assert {row["group"] for row in facts["fingerprint"]} >= {"embed", "q", "head"}
    page = out.read_text()
    for title in (
        "Curvature, predicted and measured",
        "Bulk and outliers",
        "neural collapse",
        "fingerprint",
        "Weights",
    ):
        assert title in page
    assert page.count("<svg") == 1 + len(HEAD) + 2
    assert json.loads(out.with_suffix(".json").read_text())["curvature"] == facts["curvature"]
    assert not out.with_suffix(".part").exists()


def test_a_causal_model_and_an_encoder_say_that_they_have_no_labels(causal, encoder, table, tmp_path):  # noqa: F811
    for model, kind in ((causal, "causal language model"), (encoder, "encoder")):
        result = run(model, "--data", table, "--out", tmp_path / "page.html")
        assert result.exit_code == 0, result.output
        page = (tmp_path / "page.html").read_text()
        assert f"a model without labels ({kind})" in page
        assert "was not read" in page
        assert "Effective rank of the weights" in page
        assert "curvature" not in json.loads((tmp_path / "page.json").read_text())
        assert "without labels" in result.stdout


def adapter(model, folder, names, rank=2):
    g = torch.Generator().manual_seed(0)
    shapes = {n: m.weight.shape for n, m in find_targets(model, names).items()}
    drawn = {n: LowRank(*(torch.randn(size, rank, generator=g) for size in shape)) for n, shape in shapes.items()}
    save_factors(folder, drawn, dict.fromkeys(drawn, 0.5))
    return drawn


@pytest.mark.filterwarnings("error::FutureWarning")  # of libraries: none of the user's business
def test_an_adapter_with_and_without_its_base(causal, tmp_path):  # noqa: F811
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(causal)
    drawn = adapter(base, tmp_path / "adapter", ["q_proj", "down_proj"])
    alone = inspect(str(tmp_path / "adapter"), out=tmp_path / "alone.html")
    assert "base model is not known" in alone["notes"][0]
    assert "weights" not in alone
    name, z = next(iter(drawn.items()))
    row = next(r for r in alone["update"] if r["layer"] == name)
    expected = 0.5 * torch.linalg.svdvals(z.dense())[:2]
    assert row["singular_values"] == pytest.approx(expected.tolist(), rel=1e-4)
    assert 1 <= row["stable_rank"] <= row["effective_rank"] + 1e-6 <= 2 + 1e-5
    whole = inspect(str(tmp_path / "adapter"), base=str(causal), out=tmp_path / "whole.html")
    row = next(r for r in whole["update"] if r["layer"] == name)
    moved = 0.5 * z.dense().norm() / base.get_parameter(f"{name}.weight").norm()
    assert row["frobenius"] == pytest.approx(float(moved.detach()), rel=1e-4)
    assert {"weights", "fingerprint"} <= set(whole)
    shape = base.config.__class__(**{**base.config.to_dict(), "hidden_size": 16})
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "other")
    with pytest.raises(DataError, match="does not fit"):
        inspect(str(tmp_path / "adapter"), base=str(tmp_path / "other"), out=tmp_path / "whole.html")


@pytest.mark.slow
def test_a_run_folder_of_tune_with_its_trained_head(sentence_encoder, table, tmp_path):  # noqa: F811
    from peft import LoraConfig, get_peft_model

    from subspan.surgery import export_plain_lora

    model = SentenceClassifier.from_pretrained(str(sentence_encoder), num_labels=2)
    config = LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"], task_type="SEQ_CLS")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        adapted.base_model.model.classifier.modules_to_save["default"].weight.mul_(3)
    export_plain_lora(adapted, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "config.yaml").write_text(f"model: {sentence_encoder}\n")
    facts = inspect(
        str(tmp_path / "run"), str(table), layers=["classifier"], rows=12, measure=4, out=tmp_path / "page.html"
    )
    assert facts["kind"] == "classifier"
    assert len(facts["update"]) == 2
    assert facts["kind"] in (tmp_path / "page.html").read_text()
    (layer,) = facts["curvature"]["layers"]
    head = adapted.base_model.model.classifier.modules_to_save["default"].weight
    values = torch.linalg.svdvals(head.detach().double()).square()
    assert layer["weight_eigenvalues"][:2] == pytest.approx(values.tolist(), rel=1e-4)


@pytest.mark.slow
def test_a_module_with_binary_layers_shows_their_gradients(module, tmp_path):
    net, batches = module
    torch.manual_seed(0)
    binary = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    binarize(binary, SurgeConfig())
    facts = inspect(binary, batches, measure=0, out=tmp_path / "page.html")
    assert list(facts["binary"]) == ["1"]
    assert facts["binary"]["1"]["straight"] > 0
    assert "Binary layers" in (tmp_path / "page.html").read_text()
    assert all(p.grad is None for p in binary.parameters())
    assert inspect(net, batches, measure=0, out=tmp_path / "page.html")["binary"] == {}


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 8])
def test_a_stopped_inspection_goes_on_and_gives_the_same(module, tmp_path, stop):
    net, batches = module
    expected = inspect(net, batches, measure=5, out=tmp_path / "whole.html")
    told = []

    def progress(what, done, total):
        told.append((what, done, total))
        if len(told) == stop:
            raise Stop

    out = tmp_path / "page.html"
    with pytest.raises(Stop):
        inspect(net, batches, measure=5, out=out, save_every=0, progress=progress)
    assert out.with_suffix(".part").is_dir()
    for other, layers in ((batches[:1], None), (batches, ["2"])):
        with pytest.raises(ConfigError, match="with another model, data or options"):
            inspect(net, other, layers=layers, measure=5, out=out)
    before = len(told)
    found = inspect(net, batches, measure=5, out=out, save_every=0, progress=progress)
    assert told[-1] == ("measured layers", 2, 2)
    assert len(told) - before <= 2 + 6 + 2 - (stop - 2)  # weights are read again, batches and layers are not
    assert found == expected
    inspect(net, batches[:1], measure=0, out=out, resume=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere.csv"}, "there is no file"),
        ({"layers": "encoder.nothing"}, "match no layer"),
        ({"label": "mood"}, "no column 'mood'"),
        ({"out": "page.txt"}, "written as .html"),
        ({"rows": 0}, "at least 1"),
        ({"model": "./nowhere"}, "there is no model at"),
        ({"model": "."}, "no model loads from"),
    ],
)
def test_what_a_user_can_put_right_is_one_sentence_and_status_2(
    classifier,
    table,  # noqa: F811
    tmp_path,
    monkeypatch,
    changes,
    message,
):
    monkeypatch.chdir(tmp_path)
    options = {"data": table, "out": "page.html", "rows": 8, "measure": 0} | changes
    model = options.pop("model", classifier)
    result = run(model, *(word for k, v in options.items() for word in (f"--{k}", v)))
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "page.part").exists()


def test_a_module_that_cannot_be_inspected_is_refused_and_leaves_nothing_behind(module, tmp_path):
    net, batches = module
    out = tmp_path / "page.html"
    broken = nn.Linear(5, 3)
    with torch.no_grad():
        broken.weight[0, 0] = torch.nan
    for model, data, options, error, message in (
        (broken, batches, {}, NonFinite, "weight of the model holds NaN"),
        (net, [], {}, DataError, "list of batches is empty"),
        (net, batches, {"loss": "hinge"}, ValueError, "loss must be"),
        (net, batches, {"out": tmp_path}, ValueError, "written as .html"),
    ):
        with pytest.raises(error, match=message):
            inspect(model, data, **({"out": out} | options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_someone_else_in_the_states_place_is_kept(module, tmp_path, resume):
    mine = tmp_path / "page.part" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep")
    with pytest.raises(ConfigError, match="is no unfinished inspection"):
        inspect(*module, measure=0, out=tmp_path / "page.html", resume=resume)
    assert mine.read_text() == "keep"


def test_labels_that_do_not_fit(classifier, tmp_path):
    for name, rows, message in (
        ("other", [("w1", "good"), ("w2", "fine")], "row 2 has label 'fine'"),
        ("one", [("w1", "good"), ("w2", "good")], "no row with label 'bad'"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
        with pytest.raises(DataError, match=message):
            inspect(str(classifier), str(path), out=tmp_path / "page.html")


@pytest.mark.slow
def test_numbered_labels(sentence_encoder, tmp_path):  # noqa: F811
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(sentence_encoder, num_labels=3)
    model.save_pretrained(tmp_path / "numbered")
    tokenizer(chat=False).save_pretrained(tmp_path / "numbered")
    cases = {"numbers": ["0", "1", "2"], "names": ["a", "b", "c"], "few": ["a", "b"]}
    for case, labels in cases.items():
        path = tmp_path / f"{case}.csv"
        path.write_text("sentence,class\n" + "".join(f"w{i} w{i + 1},{labels[i % len(labels)]}\n" for i in range(12)))
        if case == "few":
            with pytest.raises(DataError, match="the data has 2 labels"):
                inspect(str(tmp_path / "numbered"), str(path), out=tmp_path / "page.html")
            continue
        found = inspect(
            str(tmp_path / "numbered"), str(path), layers=["classifier"], measure=0, out=tmp_path / "p.html"
        )
        assert found["curvature"]["counts"] == [4, 4, 4]
    with pytest.raises(TargetError, match="match no layer"):
        inspect(str(tmp_path / "numbered"), str(tmp_path / "names.csv"), layers=["head"], out=tmp_path / "p.html")


@pytest.mark.slow
def test_an_inspection_of_minilm_goes_on_after_a_kill(tmp_path):
    """A real process on a real encoder with a head, killed outright once some sums are on disk."""
    from subspan.data import find_asset

    if find_asset("minilm").locate() is None or find_asset("reviews").locate() is None:
        pytest.skip("asset:minilm or asset:reviews is not installed")
    from subspan.data import model_source

    torch.manual_seed(0)
    names = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    SentenceClassifier.from_pretrained(model_source("asset:minilm").path, **names).save_pretrained(tmp_path / "model")
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model_source("asset:minilm").path).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "subspan", "inspect", "model", "--data", "asset:reviews", "--rows", "24"]
    command += ["--batch-size", "4", "--measure", "3", "--max-length", "24"]
    for layer in ("encoder.encoder.layer.4.output.dense", "encoder.encoder.layer.5.intermediate.dense", "classifier"):
        command += ["--layers", layer]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = tmp_path / "inspection.part" / "sums" / "means.safetensors"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not part.exists() and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert part.exists()
    stamp = part.stat().st_mtime_ns
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "measured layers 3/3" in done.stderr
    assert not part.exists()
    assert stamp
    facts = json.loads((tmp_path / "inspection.json").read_text())
    for layer in facts["curvature"]["layers"]:
        assert 0 < layer["eigenvalues"][0] <= layer["measured"]["eigenvalues"][0] * 1.001
