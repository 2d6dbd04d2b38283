"""Several data sets in turn: what is learned and kept, what is left, resume between and within tasks, refusals."""

import csv
import html
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from subspan.errors import ConfigError
from subspan.tune import parse, plan, tune
from subspan.tune.config import dump, load
from subspan.tune.continual import Scores, lines, load_tasks, task_configs
from subspan.tune.loading import load_task
from tests.tune.conftest import WORDS
from tests.tune.stops import stopped_at


@pytest.fixture(scope="session")
def topics(tmp_path_factory):
    """Three tables whose rows differ in their topic words; the label is told by other words in each."""
    rng = random.Random(1)
    folder = tmp_path_factory.mktemp("topics")
    made = []
    for number in range(3):
        good, bad, topic = (WORDS[at + 6 * number : at + 6 * number + 2] for at in (0, 2, 4))
        path = folder / f"topic{number}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for row in range(120):
                words = rng.choices(good if row % 2 else bad, k=3) + rng.choices(topic, k=3)
                rng.shuffle(words)
                writer.writerow([" ".join(words), "good" if row % 2 else "bad"])
        made.append(path)
    return made


@pytest.fixture
def stream(settings, topics):
    """Builds a small stream: ``stream(method="moram", count=2, max_steps=...)``."""

    def build(task="causal-lm", method="moram", count=2, continual=None, **changes):
        values = settings(task, **changes)
        del values["data"]
        tasks = [
            {"name": f"t{i}", "source": str(path), "validation": 10, "test": 20}
            for i, path in enumerate(topics[:count])
        ]
        values["continual"] = {"method": method, "tasks": tasks} | (continual or {})
        return values

    return build


def saved(folder):
    name = "moram.safetensors" if (folder / "adapter" / "moram.json").exists() else "adapter_model.safetensors"
    return load_file(folder / "adapter" / name)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def loss_of(task, model, rows):
    from subspan.tune.display import Silent
    from subspan.tune.fitting import score

    return score(task, model, rows, 8, Silent())["loss"]


class Words:
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def progress(self, step, total, figures):
        pass

    def evaluated(self, done, total):
        pass


@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("causal-lm", "moram"),
        pytest.param("classification", "moram", marks=pytest.mark.slow),
        pytest.param("causal-lm", "lora", marks=pytest.mark.slow),
    ],
)
def test_a_stream_leaves_its_matrix_its_page_and_an_adapter_that_loads(stream, tmp_path, task, method):
    config = parse(stream(task, method, max_steps=4))
    summary = tune(config)
    outcome, run = summary["continual"], tmp_path / "run"
    assert (outcome["tasks"], outcome["metric"]) == (["t0", "t1"], "accuracy")
    assert [len(row) for row in [outcome["zero_shot"], *outcome["matrix"]]] == [2, 2, 2]
    assert set(outcome["metrics"]) >= {"last", "average", "forgetting", "retention"}
    assert summary["after"]["accuracy"] == pytest.approx(sum(outcome["matrix"][-1]) / 2)
    assert {"adapter", "config.yaml", "report.html", "summary.json", "stream.json", "tasks"} <= {
        p.name for p in run.iterdir()
    }
    assert {p.name for p in (run / "tasks" / "02-t1").iterdir()} == {"adapter", "metrics.jsonl"}
    page = (run / "report.html").read_text()
    for part in ("Outcome", "tasks learned", "Learning", "Load it again", "forgetting", "<svg"):
        assert part in page
    assert ("The memory" in page) == (method == "moram")
    if method == "moram" and task == "causal-lm":
        assert outcome["growth"][-1]["stored"] == plan(config)["stored"]
    code = page[page.index("from subspan.adapters import" if method == "moram" else "from peft import") :]
    scope = {}
    exec(html.unescape(code.partition("</code>")[0]), scope)
    configs = task_configs(config)
    tasks, _ = load_tasks(configs)
    measured = sum(loss_of(t, scope["model"], rows.test) for t, rows in tasks) / 2
    assert measured == pytest.approx(summary["after"]["loss"], abs=1e-4)
    assert tune(config) == summary  # a finished run is read, not repeated
    assert "after t1" in "\n".join(lines(outcome))


@pytest.mark.slow
def test_a_memory_learns_and_keeps_what_it_learned(stream):
    config = parse(stream(count=2, max_steps=60, lr=2e-2, evaluate_every=None, checkpoint_every=60))
    outcome = tune(config)["continual"]
    assert min(outcome["matrix"][i][i] for i in range(2)) >= 0.9
    assert outcome["metrics"]["forgetting"] <= 0.15
    reads = torch.tensor(outcome["reads"])
    assert reads.shape == (2, 2)
    assert ((reads.sum(1) > 0) & (reads.sum(1) <= 1 + 1e-6)).all()
    assert [row["task"] for row in outcome["growth"]] == ["t0", "t1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "count", "step", "at"),
    [
        ("moram", 3, 7, "from checkpoint-2"),  # within the second
        ("lora", 2, 5, "continuing after task t0"),  # between two
    ],
)
def test_a_stopped_stream_goes_on_bit_for_bit(stream, tmp_path, monkeypatch, method, count, step, at):
    def build(name):
        values = stream(method=method, count=count, max_steps=4, output=str(tmp_path / name), evaluate_every=None)
        return parse(values)

    first = tune(build("whole"))
    stopped_at(step, build("cut"), monkeypatch)
    words = Words()
    second = tune(build("cut"), display=words)
    assert any(at in said for said in words.said)
    assert equal(saved(tmp_path / "whole"), saved(tmp_path / "cut"))
    assert first["continual"] == second["continual"]
    assert not list((tmp_path / "cut").rglob("checkpoints"))


@pytest.mark.slow
def test_a_killed_stream_goes_on_bit_for_bit(stream, tmp_path):
    def build(name):
        steps = {"max_steps": 40, "checkpoint_every": 10}
        return stream(count=2, **steps, output=str(tmp_path / name), evaluate_every=None)

    tune(parse(build("whole")))
    path = tmp_path / "cut.yaml"
    path.write_text(yaml.safe_dump(build("cut")))
    command = [sys.executable, "-m", "subspan", "tune", str(path)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    at = tmp_path / "cut" / "tasks" / "02-t1" / "checkpoints"
    deadline = time.time() + 120
    while not list(at.glob("checkpoint-*")):
        assert child.poll() is None, "it ended before it could be killed"
        assert time.time() < deadline
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    words = Words()
    tune(load(path), display=words)
    assert any("continuing after task t0" in said for said in words.said)
    assert equal(saved(tmp_path / "whole"), saved(tmp_path / "cut"))


@pytest.mark.slow
def test_a_stream_stopped_behind_its_last_task_leaves_no_checkpoints_and_the_same_report(stream, tmp_path, monkeypatch):
    def build(name):
        return parse(stream(max_steps=2, output=str(tmp_path / name), evaluate_every=None))

    whole, write, calls = tune(build("whole")), Scores.write, []

    def dying(self, writes):
        write(self, writes)
        calls.append(1)
        if len(calls) == 3:  # of the base, of the first task, of the second
            raise KeyboardInterrupt

    monkeypatch.setattr(Scores, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        tune(build("cut"))
    monkeypatch.setattr(Scores, "write", write)
    cut = tune(build("cut"))
    assert cut["facts"] == whole["facts"]
    assert cut["continual"] == whole["continual"]
    assert not list((tmp_path / "cut").rglob("checkpoints"))


def test_checkpoints_of_a_memory_hold_no_base_model(stream, tmp_path, monkeypatch):
    stopped_at(4, parse(stream(max_steps=4, evaluate_every=None)), monkeypatch)
    (checkpoint,) = (tmp_path / "run" / "tasks" / "01-t0" / "checkpoints").glob("checkpoint-*")
    names = {p.name for p in checkpoint.iterdir()}
    assert {"moram.safetensors", "optimizer.pt", "trainer_state.json"} <= names
    assert "model.safetensors" not in names


def test_the_command_prints_the_matrix(stream, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from subspan.cli import app

    path = tmp_path / "stream.yaml"
    path.write_text(yaml.safe_dump(stream()))
    scores = Scores(tmp_path / "none.json")
    scores.zero_shot = [{"accuracy": 0.5}, {"accuracy": 0.6}]
    scores.after = [[{"accuracy": 0.9}, {"accuracy": 0.65}], [{"accuracy": 0.875}, {"accuracy": 1.0}]]
    done = {"before": {"accuracy": 0.55}, "after": {"accuracy": 0.9375}, "continual": scores.outcome(["t0", "t1"])}
    monkeypatch.setattr("subspan.tune.tune", lambda *args, **kwargs: done, raising=False)
    out = CliRunner().invoke(app, ["tune", str(path)]).output
    for part in ("accuracy on", "before", "after t0", "0.875", "forgetting: 0.025", "zero-shot retention: +0.050"):
        assert part in out


def test_labels_of_one_name_are_one_label_and_rows_are_judged_among_their_own(stream, topics, tmp_path):
    other = tmp_path / "other.csv"
    text = topics[1].read_text()
    other.write_text(text.replace(",good", ",fine"))
    values = stream("classification", max_steps=2)
    values["continual"]["tasks"][1]["source"] = str(other)
    tasks, labels = load_tasks(task_configs(parse(values)))
    assert labels == ["bad", "good", "fine"]
    assert [list(task.among) for task, _ in tasks] == [[0, 1], [0, 2]]
    assert {row["labels"] for row in tasks[1][1].train} == {0, 2}

    class Model(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            from types import SimpleNamespace

            return SimpleNamespace(logits=torch.tensor([[0.0, 5.0, 1.0]]).repeat(len(input_ids), 1))

    task, rows = tasks[1]
    logits = task.logits(Model(), task.collate(rows.train[:3]))
    assert logits.argmax(1).tolist() == [2, 2, 2]
    assert torch.isneginf(logits[:, 1]).all()


@pytest.mark.slow
def test_a_new_head_is_trained_along_and_only_its_rows_of_the_task(stream, topics, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text(topics[1].read_text().replace(",good", ",fine").replace(",bad", ",poor"))
    values = stream("classification", max_steps=3, evaluate_every=None)
    values["continual"]["tasks"][1]["source"] = str(other)
    tune(parse(values))
    heads = [
        load_file(tmp_path / "run" / "tasks" / name / "adapter" / "moram.safetensors")[
            "classifier.modules_to_save.weight"
        ]
        for name in ("01-t0", "02-t1")
    ]
    assert torch.equal(heads[0][:2], heads[1][:2])
    assert not torch.equal(heads[0][2:], heads[1][2:])


def test_tasks_bring_their_own_prompt_and_steps(stream):
    values = stream(max_steps=4)
    values["continual"]["tasks"][1] |= {"prompt": "good : {text}", "max_steps": 7}
    first, second = task_configs(parse(values))
    assert (first.max_steps, second.max_steps) == (4, 7)
    assert (first.prompt, second.prompt) == ("rate : {text}", "good : {text}")
    assert second.data.source != first.data.source


@pytest.mark.slow
def test_other_rows_or_another_base_are_refused(stream, topics, tmp_path, monkeypatch):
    copy = tmp_path / "copy.csv"
    copy.write_text(topics[1].read_text())
    values = stream(max_steps=4, evaluate_every=None)
    values["continual"]["tasks"][1]["source"] = str(copy)
    stopped_at(5, parse(values), monkeypatch)
    copy.write_text("\n".join(topics[1].read_text().splitlines()[:-20]))
    with pytest.raises(ConfigError, match="rows"):
        tune(parse(values))
    values["continual"]["tasks"][0]["train"] = 50
    with pytest.raises(ConfigError, match="another configuration"):
        tune(parse(values))
    tune(parse(values), fresh=True)


def test_a_memory_is_as_the_configuration_says_and_each_task_has_keys_of_its_own(stream):
    from subspan.tune.continual import Memory
    from subspan.tune.loading import load_model

    read = {"top_k": 3, "temperature": 0.3, "threshold": 0.1}
    config = parse(stream(continual=read, adapter={"alpha": 12, "dropout": 0.25}))
    student = Memory(load_model(config, []), config, ["q_proj"])
    found = student.memory.config
    assert (found.r, found.alpha, found.dropout) == (4, 12.0, 0.25)
    assert {name: getattr(found, name) for name in read} == read
    keys = []
    for number in range(2):
        student.begin(number, f"t{number}")
        keys.append(next(iter(student.memory.layers.values())).bank.new_keys.detach())
        student.end()
    assert not torch.equal(*keys)


def test_free_answers_are_scored_by_their_loss(tmp_path):
    scores = Scores(tmp_path / "none.json")
    scores.zero_shot = [{"loss": 3.0}, {"loss": 4.0}]
    scores.after = [[{"loss": 1.0}, {"loss": 5.0}], [{"loss": 1.5}, {"loss": 2.0}]]
    outcome = scores.outcome(["a", "b"])
    assert outcome["metric"] == "loss"
    m = outcome["metrics"]
    assert m["last"] == 1.75
    assert m["forgetting"] == 0.5  # the loss rose
    assert m["retention"] == -1.0  # and rose where nothing was trained yet
    assert m["transfer"] == 5.0


def test_a_dry_run_tells_the_whole_stream(stream):
    facts = plan(parse(stream(max_steps=4)))
    assert (facts["steps"], facts["tasks"], facts["train_rows"]) == (8, 2, 2 * 90)
    assert facts["trained"] > 0
    assert facts["stored"] > facts["trained"]


def test_the_dumped_configuration_reads_back(stream, tmp_path):
    config = parse(stream("classification"))
    (tmp_path / "c.yaml").write_text(dump(config))
    assert load(tmp_path / "c.yaml") == config
    values = stream()
    del values["adapter"]["alpha"]
    assert parse(values).adapter.alpha == values["adapter"]["r"]  # a memory's atoms have scale 1
    assert parse(stream()).adapter.alpha == 8


BAD = [
    ({"data": {"source": "x.csv"}}, "leave out data"),
    ({"privacy": "prism"}, "a memory has none"),
    ({"privacy": "naive"}, "a memory has none"),
    ({"init": "fisher"}, "start empty"),
    ({"init": "pissa"}, "start empty"),
    ({"optimizer": "muon"}, "vectors of their own"),
    ({"optimizer": "lozo+"}, "never sees a gradient"),
    ({"adapter": None}, "adapter: null"),
    ({"adapter": {"dora": True}}, "trains no LoRA"),
    ({"adapter": {"rslora": True}}, "trains no LoRA"),
    ({"merged": True}, "depends on the token"),
    ({"safeguard": {"buffer": "somewhere"}}, "one training stage"),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=lambda x: str(x)[:30])
def test_what_cannot_work_with_a_memory_is_refused(stream, changes, words):
    with pytest.raises(ConfigError, match=words):
        parse(stream() | changes)


@pytest.mark.parametrize(
    ("method", "changes", "continual", "words"),
    [
        ("lora", {"privacy": "naive"}, {}, "one budget for one data set"),
        ("lora", {"init": "olora"}, {}, "goes on from its last task"),
        ("lora", {}, {"temperature": 0.2}, "temperature says how a memory is read"),
        ("moram", {}, {"threshold": 2.0}, "threshold"),
        ("moram", {}, {"temprature": 2.0}, "did you mean 'temperature'"),
        ("moran", {}, {}, "continual.method"),
        ("moram", {}, {"tasks": [{"name": "a", "source": "x"}]}, "at least two"),
        ("moram", {}, {"tasks": [{"name": "a", "source": "x"}] * 2}, "two tasks are called 'a'"),
        ("moram", {}, {"tasks": [{"name": "a", "sorce": "x"}, {"name": "b", "source": "y"}]}, "tasks.0"),
        ("moram", {}, {"tasks": [{"name": "a/b", "source": "x"}, {"name": "b", "source": "y"}]}, "name"),
        (
            "moram",
            {},
            {"tasks": [{"name": "a", "source": "x", "prompt": "no"}, {"name": "b", "source": "y"}]},
            "prompt",
        ),
    ],
)
def test_what_makes_no_stream_is_refused(stream, method, changes, continual, words):
    with pytest.raises(ConfigError, match=words):
        parse(stream(method=method, continual=continual) | changes)


def test_prompts_and_objectives_do_not_go_with_classifiers_in_turn(stream):
    values = stream("classification")
    values["continual"]["tasks"][0]["prompt"] = "rate {text}"
    with pytest.raises(ConfigError, match="reads the text alone"):
        parse(values)
    with pytest.raises(ConfigError, match="each task of continual has its own"):
        parse(stream("classification") | {"objective": "zero-one"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_merged_model_computes_what_the_adapter_does(settings, stream, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    options = {"max_steps": 2, "evaluate_every": None, "merged": True}
    config = parse(settings(init="pissa", **options) if kind == "plain" else stream(method="lora", **options))
    summary = tune(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tasks = [load_task(config)] if kind == "plain" else load_tasks(task_configs(config))[0]
    losses = [loss_of(task, model, rows.test) for task, rows in tasks]
    assert sum(losses) / len(losses) == pytest.approx(summary["after"]["loss"], abs=1e-4)


def test_there_is_nothing_to_merge_without_an_adapter(settings):
    with pytest.raises(ConfigError, match="adapter: null"):
        parse(settings(adapter={}) | {"adapter": None, "merged": True})


@pytest.mark.slow
def test_two_real_tasks_on_a_real_encoder(tmp_path):
    from subspan.data import asset_path, shared_file
    from subspan.errors import MissingAsset

    try:
        asset_path("minilm")
        sources = [str(shared_file(f"text/{name}/train.json")) for name in ("SST-2", "agnews")]
    except MissingAsset as error:
        pytest.skip(str(error))
    own = {"text": "prompt", "label": "answer", "max_words": 30, "validation": 10, "test": 40}
    tasks = [{"name": n, "source": s, **own} for n, s in zip(("sst2", "agnews"), sources, strict=True)]
    config = parse(
        {
            "model": "asset:minilm",
            "continual": {"tasks": tasks},
            "output": str(tmp_path / "run"),
            "adapter": {"r": 4, "targets": ["query", "value"]},
            "lr": 5e-3,
            "head_lr": 2e-2,
            "batch_size": 16,
            "max_steps": 12,
            "evaluate_every": None,
        }
    )
    summary = tune(config)
    outcome = summary["continual"]
    assert summary["facts"]["data"]["labels"] == ["Bad", "Good", "Business", "Science or Technology", "Sports", "World"]
    assert outcome["matrix"][1][1] > outcome["zero_shot"][1] + 0.2  # four topics, from an untrained head
    assert (tmp_path / "run" / "adapter" / "moram.safetensors").exists()
