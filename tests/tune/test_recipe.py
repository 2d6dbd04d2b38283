"""Whole runs on tiny models: what they learn, what they leave, and what they survive."""

import html
import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from subspan.errors import BaseMismatch, ConfigError, DataError, NonFinite, SubspanError, TargetError
from subspan.tune import parse, plan, tune
from subspan.tune.display import Silent
from subspan.tune.folder import RunFolder
from subspan.tune.loading import load_model, load_task
from tests.tune.stops import stopped_at


def adapter(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "changes",
    [
        {"init": "fisher", "optimizer": "muon"},
        {"init": "pissa"},
        {"init": "olora"},
        {"init": "orthogonal"},
        {"init": "mica"},
        {"init": "corda"},
        {"init": "lora_ga"},
        {"init": "eva"},
        {"init": "fisher", "fisher": {"preserve": "zero_b"}},
        {"adapter": {"dora": True}, "init": "fisher"},
        {"adapter": {"rslora": True}, "init": "pissa"},
    ],
    ids=lambda c: "-".join(map(str, [*c, *c.values()])),
)
def test_plain_peft_loads_the_adapter_on_the_unmodified_base_with_the_same_logits(settings, changes, tmp_path):
    from peft import PeftModel

    config = parse(settings(**changes, calibration_rows=16))
    kept = {}
    tune(config, display=Watcher(kept))
    task, rows = load_task(config)
    batch = task.collate(rows.test[:8])
    base = load_model(config, rows.labels).eval()
    loaded = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    with torch.no_grad():
        reloaded = task.score(loaded, batch).losses.total
    trained = json.loads((tmp_path / "run" / "summary.json").read_text())["after"]["loss"]
    figures = loss_of(task, loaded, rows.test)
    assert figures == pytest.approx(trained, abs=1e-4)
    assert torch.isfinite(reloaded).all()


class Watcher:
    def __init__(self, kept=None):
        self.kept, self.said, self.steps = {} if kept is None else kept, [], []

    def say(self, text):
        self.said.append(text)

    def progress(self, step, total, figures):
        self.steps.append((step, total, dict(figures)))

    def evaluated(self, done, total):
        self.kept["scored"] = (done, total)


def loss_of(task, model, rows):
    from subspan.tune.display import Silent
    from subspan.tune.fitting import score

    return score(task, model, rows, 8, Silent())["loss"]


@pytest.mark.parametrize("task", ["causal-lm", "classification"])
def test_it_learns_what_a_small_model_can_learn(settings, task):
    config = parse(settings(task, max_steps=200, lr=1e-2, evaluate_every=None, checkpoint_every=200))
    watcher = Watcher()
    summary = tune(config, display=watcher)
    assert summary["after"]["accuracy"] >= 0.9
    assert summary["before"]["accuracy"] < 0.8
    assert watcher.steps[-1][:2] == (200, 200)


def test_the_run_folder_holds_what_it_promises(settings, tmp_path):
    config = parse(settings())
    summary = tune(config)
    run = tmp_path / "run"
    names = {p.name for p in run.iterdir()}
    assert {"adapter", "config.yaml", "metrics.jsonl", "report.html", "summary.json"} <= names
    assert "checkpoints" not in names
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 7))
    assert [r["step"] for r in records if "validation_accuracy" in r] == [3, 6]
    assert [r["step"] for r in records if "test_accuracy" in r] == [0, 6]
    page = (run / "report.html").read_text()
    for part in ("Outcome", "Learning", "The learned update", "What was trained", "Load it again", "<svg"):
        assert part in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert tune(config) == summary  # a finished run is read, not repeated


@pytest.mark.parametrize("kind", ["causal-lm", "classification", "sentence"])
def test_the_code_in_the_report_loads_the_trained_model(settings, sentence_encoder, tmp_path, kind):
    changes = {"model": str(sentence_encoder)} if kind == "sentence" else {}
    config = parse(settings("causal-lm" if kind == "causal-lm" else "classification", **changes))
    summary = tune(config)
    page = (tmp_path / "run" / "report.html").read_text()
    code = html.unescape(page[page.index("from peft import") :].partition("</code>")[0])
    scope = {}
    exec(code, scope)
    task, rows = load_task(config)
    assert (type(scope["base"]).__name__ == "SentenceClassifier") == (kind == "sentence")
    assert loss_of(task, scope["model"], rows.test) == pytest.approx(summary["after"]["loss"], abs=1e-4)


def test_the_first_step_starts_from_the_base_models_own_answers(settings):
    config = parse(settings(init="fisher", max_steps=1, evaluate_every=None))
    summary = tune(config)
    task, rows = load_task(config)
    base = load_model(config, rows.labels)
    assert summary["before"]["loss"] == pytest.approx(loss_of(task, base, rows.test), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}, {"privacy": {"epsilon": 8.0, "noise_seed": 0}}])
def test_the_head_has_a_rate_of_its_own(settings, changes, tmp_path):
    """With a tiny rate the adapter stays where it starts, and the head moves as far as its own rate says."""
    moved = {}
    for head_lr in (1e-6, 1e-2):
        config = parse(
            settings("classification", lr=1e-6, head_lr=head_lr, output=str(tmp_path / f"{head_lr}"), **changes)
        )
        tune(config)
        moved[head_lr] = adapter(config.output)
    for key, small in moved[1e-6].items():
        difference = float((moved[1e-2][key] - small).abs().max())
        assert (difference > 1e-3) == ("classifier" in key), key


def test_accumulation_gives_the_same_update_as_one_batch(settings, tmp_path, monkeypatch):
    from subspan.tune import trainer

    # One batch of eight rows, and the same eight rows in two halves: the loss is a mean over all their targets.
    rows = list(range(8))

    def fixed(lengths, batch_size, batches, seed):
        return [rows[i : i + batch_size] for i in range(0, 8, batch_size)]

    monkeypatch.setattr(trainer, "ShuffledBatches", fixed)
    whole = parse(settings(max_steps=1, evaluate_every=None, output=str(tmp_path / "a")))
    tune(whole)
    tune(whole.model_copy(update={"accumulate": 2, "output": tmp_path / "b"}))
    a, b = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    assert a.keys() == b.keys()
    assert max(float(v.abs().max()) for v in a.values()) > 0.01
    for key, value in a.items():
        torch.testing.assert_close(value, b[key], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_processes_share_each_batch_and_end_where_one_does(settings, tmp_path):
    import yaml

    config = settings(max_steps=4, accumulate=2, init="pissa", output=str(tmp_path / "two"))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "subspan", "tune", str(tmp_path / "two.yaml")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report:") == 1
    tune(parse(config | {"output": str(tmp_path / "one")}))
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    for key, value in one.items():
        torch.testing.assert_close(value, two[key], rtol=1e-3, atol=1e-5)
    files = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("one", "two")]
    assert files[0] == files[1]
    steps = [[json.loads(line)["step"] for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("one", "two")]
    assert steps[0] == steps[1]


def test_a_batch_that_cannot_be_shared_out_is_refused(settings, monkeypatch):
    from accelerate import PartialState

    monkeypatch.setattr(PartialState(cpu=True), "num_processes", 3)
    with pytest.raises(ConfigError, match=r"batch_size=8 does not divide into accumulate=1 parts on each of 3"):
        tune(parse(settings()))


KILLS = {
    "in the first step": "trainer.TuneTrainer.compute_loss",
    "while the second checkpoint is half written": "trainer.TuneTrainer._save_rng_state",
    "before a checkpoint is renamed": "parts.starts.PeftStart.save",
    "after training": "single.export_plain_lora",
}


@pytest.mark.parametrize(
    "when", [pytest.param(k, marks=[pytest.mark.slow] * (k != "before a checkpoint is renamed")) for k in KILLS]
)
def test_a_killed_run_resumes_to_bit_equal_weights(settings, tmp_path, when):
    reference = parse(
        settings(init="pissa", optimizer="muon", output=str(tmp_path / "whole"), adapter={"dropout": 0.1})
    )
    tune(reference)
    config = reference.model_copy(update={"output": tmp_path / "killed"})
    place, name = KILLS[when].rsplit(".", 1)
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        from subspan.tune import load, tune
        import subspan.tune.single as single, subspan.tune.trainer as trainer, subspan.tune.parts.starts
        import subspan.tune.parts as parts
        holder, name, calls = {place}, {name!r}, []
        original = getattr(holder, name)
        def deadly(*args, **kwargs):
            calls.append(1)
            if len(calls) == {1 if when in ("in the first step", "after training") else 2}:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(holder, name, deadly)
        tune(load(sys.argv[1]))
        """
    )
    path = tmp_path / "config.yaml"
    from subspan.tune.config import dump

    path.write_text(dump(config))
    died = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, env=os.environ)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (tmp_path / "killed" / "summary.json").exists()
    tune(config)
    assert equal(adapter(tmp_path / "whole"), adapter(tmp_path / "killed"))
    assert (tmp_path / "whole" / "metrics.jsonl").read_text() == (tmp_path / "killed" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_private_run_resumes_to_bit_equal_weights_and_the_same_budget(settings, tmp_path, monkeypatch):
    private = {"epsilon": 8.0, "delta": 1e-3, "twin": False, "noise_seed": 5, "physical_batch": 4}
    whole = parse(settings("classification", privacy=private, output=str(tmp_path / "whole")))
    first = tune(whole)
    config = whole.model_copy(update={"output": tmp_path / "cut"})
    from subspan.tune.trainer import TuneTrainer

    step, calls = TuneTrainer.training_step, []

    def cut(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(TuneTrainer, "training_step", cut)
    with pytest.raises(KeyboardInterrupt):
        tune(config)
    monkeypatch.undo()
    second = tune(config)
    assert equal(adapter(tmp_path / "whole"), adapter(tmp_path / "cut"))
    assert first["facts"]["privacy"] == second["facts"]["privacy"]
    assert second["facts"]["privacy"]["steps"] == 6


@pytest.mark.parametrize("method", ["prism", "naive", "ffa"])
def test_private_runs_state_their_budget_and_log_no_private_loss(settings, tmp_path, monkeypatch, method):
    from subspan.tune.trainer import TuneTrainer

    private, states = {"method": method, "epsilon": 8.0, "delta": 1e-3}, []
    save = TuneTrainer._save_rng_state
    monkeypatch.setattr(
        TuneTrainer, "_save_rng_state", lambda self, f: (states.append(list(self.state.log_history)), save(self, f))
    )
    summary = tune(parse(settings("classification", privacy=private)))
    history = [entry for state in states[:3] for entry in state]  # the private run saves three times, then its twin
    assert history
    assert {entry["loss"] for entry in history if "loss" in entry} <= {0.0}
    facts = summary["facts"]["privacy"]
    assert facts["method"] == method
    assert 0 < facts["epsilon"] <= 8.0
    assert {"delta", "sigma", "sample_rate", "accountant", "clip_norm"} <= facts.keys()
    assert summary["twin"]["after"]["accuracy"] >= 0
    records = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"loss"' not in records
    page = (tmp_path / "run" / "report.html").read_text()
    for word in ("sigma", "sample_rate", "accountant", "epsilon", "delta", "without privacy"):
        assert word in page


@pytest.mark.parametrize(("batch", "limit", "parts"), [(16, 16, 1), (16, 15, 2), (18, 5, 6), (7, 3, 7)])
def test_the_twin_needs_no_more_memory_than_the_private_run(settings, batch, limit, parts):
    from subspan.tune.recipe import _parts

    private = {"method": "naive", "physical_batch": limit}
    assert _parts(parse(settings(batch_size=batch, privacy=private))) == parts


def test_the_plan_counts_parameters_steps_and_noise_without_loading_weights(settings, tmp_path):
    private = {"epsilon": 8.0, "delta": 1e-3}
    config = parse(settings("classification", privacy=private, adapter={"targets": ["query"]}))
    facts = plan(config)
    assert facts["trained"] == 2 * 4 * (32 + 32) + 2 * 32 + 2  # two layers' factors and the head
    assert facts["steps"] == 6
    assert facts["train_rows"] == 180
    assert facts["sigma"] > 0
    assert facts["memory_gib"] > 0
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"data": {"source": "nowhere.csv"}}, DataError, "nowhere.csv"),
        ({"data": {"text": "txt"}}, DataError, "there is no column 'txt'.*did you mean 'text'"),
        ({"data": {"validation": 200, "test": 100}}, DataError, "too few"),
        ({"adapter": {"r": 33}}, ConfigError, "adapter.r=33 exceeds"),
        ({"adapter": {"targets": ["q_prj"]}}, TargetError, "match no layer.*q_proj"),
        ({"max_length": 7}, DataError, "max_length=7 leaves no room"),
        ({"model": "/nowhere/at/all"}, DataError, "/nowhere/at/all"),
    ],
)
def test_bad_input_is_one_sentence(settings, changes, error, words):
    base = settings(data=changes.pop("data", {}), adapter=changes.pop("adapter", {}))
    with pytest.raises(error, match=words) as caught:
        tune(parse(base | changes))
    assert "\n" not in str(caught.value)


def test_an_empty_table_is_refused(settings, tmp_path):
    path = tmp_path / "empty.csv"
    path.write_text("text,label\n")
    with pytest.raises(DataError, match="holds no rows"):
        tune(parse(settings(data={"source": str(path)})))


def test_a_label_that_training_never_saw_is_named(settings, tmp_path):
    path = tmp_path / "many.csv"
    rows = [f"w{i} w{i % 5},l{i % 8}" for i in range(40)]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    data = {"source": str(path), "train": 4, "validation": 8, "test": 8}
    with pytest.raises(DataError, match=r"row \d+ has label 'l\d', which the training data does not have") as caught:
        load_task(parse(settings("classification", data=data)))
    number, label = re.search(r"row (\d+) has label '(l\d)'", str(caught.value)).groups()
    assert rows[int(number) - 1].endswith("," + label)  # rows are counted as the file has them


def test_another_configuration_in_the_same_folder_is_refused(settings):
    tune(parse(settings()))
    with pytest.raises(ConfigError, match=r"another configuration \(lr: 0.01 there, 0.001 here\)"):
        tune(parse(settings(lr=1e-3)))
    assert tune(parse(settings(lr=1e-3)), fresh=True)["steps"] == 6


def test_a_folder_with_other_files_is_never_touched(settings, tmp_path):
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    for name in ("thesis.txt", "adapter/mine.bin", "config.yaml"):
        (tmp_path / "run" / name).write_text("title: mine")
        for fresh in (False, True):
            with pytest.raises(ConfigError, match="is no run folder"):
                tune(parse(settings()), fresh=fresh)
        assert (tmp_path / "run" / name).read_text() == "title: mine"


def test_a_fresh_start_that_cannot_begin_leaves_the_finished_run(settings, tmp_path):
    tune(parse(settings()))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    for changes in ({"data": {"source": "typo.csv"}}, {"adapter": {"r": 1000}}, {"max_length": 7}):
        with pytest.raises((ConfigError, DataError)):
            tune(parse(settings(**changes)), fresh=True)
        assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
        assert (tmp_path / "run" / "summary.json").exists()
    tune(parse(settings()), fresh=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_mistake_leaves_no_run_folder_behind(settings, tmp_path):
    with pytest.raises(DataError, match=r"typo\.csv"):
        tune(parse(settings(data={"source": "typo.csv"})))
    assert not (tmp_path / "run").exists()
    assert tune(parse(settings()))["steps"] == 6


def test_two_runs_never_share_a_folder(settings, tmp_path):
    with RunFolder(tmp_path / "run").held(), pytest.raises(ConfigError, match="another run is at work"):
        tune(parse(settings()))
    assert tune(parse(settings()))["steps"] == 6


def test_a_finished_run_says_so_and_a_lost_adapter_is_missed(settings, tmp_path):
    import shutil

    first = tune(parse(settings()))
    said = []

    class Heard(Silent):
        def say(self, text):
            said.append(text)

    assert tune(parse(settings()), display=Heard())["after"] == first["after"]
    assert ["is finished; --fresh trains again" in text for text in said] == [True]
    shutil.rmtree(tmp_path / "run" / "adapter")
    with pytest.raises(ConfigError, match="adapter is gone"):
        tune(parse(settings()))


def test_resuming_on_other_rows_is_refused(settings, table, tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    path.write_text(table.read_text())
    config = parse(settings(data={"source": str(path)}))
    stopped_at(4, config, monkeypatch)
    path.write_text(table.read_text().replace(",good", ",bad", 1))
    with pytest.raises(ConfigError, match=r"the rows of .* are no longer those the run in .* began with"):
        tune(config)
    path.write_text(table.read_text())
    assert tune(config)["steps"] == 6


def test_a_damaged_checkpoint_is_passed_over(settings, tmp_path, monkeypatch):
    whole = parse(settings(output=str(tmp_path / "whole")))
    tune(whole)
    config = parse(settings())
    stopped_at(6, config, monkeypatch)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    for name in ("optimizer.pt", "adapter_model.safetensors"):
        path = folder / "checkpoint-4" / name
        kept = path.read_bytes()
        path.write_bytes(kept[: len(kept) // 2])
        from subspan.tune.trainer import latest_checkpoint

        assert latest_checkpoint(tmp_path / "run").name == "checkpoint-2"
    tune(config)
    assert equal(adapter(tmp_path / "whole"), adapter(tmp_path / "run"))


def test_an_infinite_gradient_stops_the_run_even_where_nothing_is_clipped(settings, monkeypatch):
    from subspan.tune.tasks import CausalLM

    losses = CausalLM.losses

    def steep(self, model, batch):
        found = losses(self, model, batch)
        if found.total.requires_grad:
            found.total.register_hook(lambda g: g * float("inf"))
        return found

    monkeypatch.setattr(CausalLM, "losses", steep)
    with pytest.raises(NonFinite, match="the gradient norm is"):
        tune(parse(settings(max_grad_norm=0.0, evaluate_every=None)))


@pytest.mark.parametrize(
    ("task", "changes", "error", "words"),
    [
        ("classification", {"max_length": 100, "data": {"source": "long"}}, ConfigError, "set max_length=64"),
        ("causal-lm", {"model": "encoder"}, ConfigError, "both directions"),
        ("classification", {"batch_size": 500}, ConfigError, "exceeds the 180 training rows"),
        ("classification", {"privacy": {"delta": 0.5}}, DataError, "publishes one row"),
        ("classification", {"data": {"label": "text"}}, DataError, "labels that recur"),
    ],
)  # fmt: skip
def test_what_this_model_cannot_do_with_these_rows_is_refused(settings, encoder, tmp_path, task, changes, error, words):
    if changes.get("data", {}).get("source") == "long":
        path = tmp_path / "long.csv"
        path.write_text("text,label\n" + "\n".join(f"{'w1 ' * 90},{'good' if i % 2 else 'bad'}" for i in range(80)))
        changes = changes | {"data": {"source": str(path)}}
    if changes.get("model") == "encoder":
        changes = changes | {"model": str(encoder)}
    config = parse(settings(task, **changes))
    with pytest.raises(error, match=words):
        tune(config)
    if "encoder" not in words and "both" not in words:
        with pytest.raises(error, match=words):
            plan(config)


def test_a_nan_loss_stops_the_run_and_keeps_the_last_good_checkpoint(settings, tmp_path, monkeypatch):
    from subspan.tune.tasks import CausalLM, Losses

    losses, calls = CausalLM.losses, []

    def broken(self, model, batch):
        found = losses(self, model, batch)
        calls.append(1)
        return Losses(found.total * float("nan"), found.count) if len(calls) == 4 else found

    monkeypatch.setattr(CausalLM, "losses", broken)
    config = parse(settings(evaluate_every=None))
    with pytest.raises(NonFinite, match=r"the loss is nan in step 4 \(rows [\d, ]+ of .*\).*checkpoint-2"):
        tune(config)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors").exists()
    monkeypatch.undo()
    assert tune(config)["steps"] == 6


def test_a_full_disk_while_saving_leaves_the_old_checkpoint_whole(settings, tmp_path, monkeypatch):
    from subspan.tune.trainer import TuneTrainer

    save, calls = TuneTrainer._save_optimizer_and_scheduler, []

    def full(self, folder):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return save(self, folder)

    monkeypatch.setattr(TuneTrainer, "_save_optimizer_and_scheduler", full)
    config = parse(settings())
    with pytest.raises(SubspanError, match=r"could not write checkpoint-4 .*No space left.*checkpoint-2.*is intact"):
        tune(config)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["checkpoint-2"]
    monkeypatch.undo()
    assert tune(config)["steps"] == 6


@pytest.mark.parametrize("init", ["default", "pissa"])
def test_resuming_on_an_edited_base_is_refused(settings, causal, tmp_path, monkeypatch, init):
    import shutil

    model = tmp_path / "model"
    shutil.copytree(causal, model)
    config = parse(settings(init=init, model=str(model)))
    from subspan.tune.trainer import TuneTrainer

    monkeypatch.setattr(TuneTrainer, "train", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tune(config)
    monkeypatch.undo()
    weights = load_file(model / "model.safetensors")
    from safetensors.torch import save_file

    save_file({k: v * 1.01 for k, v in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseMismatch, match="are not those the run in"):
        tune(config)
