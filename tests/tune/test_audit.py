"""Rows scored before training, then dropped or drawn less often."""

import json
import shutil

import pytest
import torch

from subspan.errors import ConfigError, DataError
from subspan.safety import Direction, RiskTable
from subspan.tune import tune
from subspan.tune.config import Config, parse
from subspan.tune.loading import load_model, load_task, load_tokenizer
from subspan.tune.part import Run
from subspan.tune.parts.audit import Audited, WeightedBatches


@pytest.fixture(scope="module")
def directions(causal, tmp_path_factory):
    """Toward answering "bad", and toward answering "good"."""
    home = tmp_path_factory.mktemp("directions")
    config = Config.model_validate(
        {"model": str(causal), "task": "causal-lm", "data": {"source": "x"}, "output": str(home)}
    )
    model, tok = load_model(config, []), load_tokenizer(config)
    for name, answer in (("danger", "bad"), ("safety", "good")):
        rows = [{"prompt": f"rate : w{i} w{i + 1}", "answer": answer} for i in range(12)]
        Direction.from_data(model, tok, rows, steps=8, lr=1e-2, stop_margin=None).save(home / name)
    return {name: str(home / name) for name in ("danger", "safety")}


def dropping(settings, directions, **changes):
    values = settings(audit={**directions, "drop_top": 0.25, "state": "zero"}, **changes)
    values["data"] |= {"train": 80}
    return parse(values)


def test_the_riskiest_rows_are_dropped(settings, directions):
    config = dropping(settings, directions)
    task, rows = load_task(config)
    part, every = Audited(config.audit), list(rows.train)
    run = Run(config, config.output, task, every, load_model(config, []), print)
    part.prepare_base(run)
    part.prepare_adapter(run)
    assert len(RiskTable.read(config.output / "audit" / "scores.parquet")) == len(every) == 80
    assert len(run.train) == 60
    assert run.facts["audit"]["outcome"] == "20 dropped"
    assert (config.output / "audit" / "scores.html").exists()
    # the danger direction says "bad": the dropped rows are those that say so
    kept = {r["row"] for r in run.train}
    dropped = [r for r in every if r["row"] not in kept]
    assert sum(r["target"] == task.labels.index("bad") for r in dropped) >= 17


@pytest.mark.slow
def test_a_resumed_run_drops_the_same_rows(settings, directions, monkeypatch):
    config = dropping(settings, directions, max_steps=4)
    from subspan.tune.trainer import TuneTrainer

    step, seen = TuneTrainer.training_step, []

    def stopped(self, *args, **kwargs):
        seen.append({r["row"] for r in self.run.train})
        if len(seen) == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(TuneTrainer, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        tune(config)
    assert len(seen[0]) == 60
    summary = tune(config)
    assert seen[-1] == seen[0]
    assert summary["facts"]["audit"]["outcome"] == "20 dropped"


@pytest.mark.slow
def test_a_resumed_run_that_edited_the_base_takes_the_scores_from_their_file(settings, directions, monkeypatch):
    audit = {**directions, "reweight": True, "state": "zero"}
    config = parse(settings(audit=audit, init="olora", max_steps=4))
    from subspan.tune.trainer import TuneTrainer

    step, calls = TuneTrainer.training_step, []

    def stopped(self, *args, **kwargs):
        calls.append(next(p.weights for p in self.parts if isinstance(p, Audited)).clone())
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(TuneTrainer, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        tune(config)
    monkeypatch.setattr(Audited, "prepare_base", None)  # must not be called again: the base is not bare
    summary = tune(config)
    assert torch.equal(calls[0], calls[-1])
    assert summary["facts"]["audit"]["outcome"] == "weighted by the score"


@pytest.mark.slow
def test_without_init_a_state_is_trained_and_a_fresh_run_scores_again(settings, directions):
    values = settings(audit={**directions, "drop_top": 0.1}, max_steps=2, data={"train": 40, "test": 10})
    tune(parse(values))
    home = parse(values).output / "audit"
    (state,) = home.glob("init-*")
    facts = json.loads((home / "scores.json").read_text())
    assert facts["settings"]["init"] == Direction.from_adapter(state).digest()
    (home / "scores.csv").write_text("left over")
    shutil.rmtree(state)
    tune(parse(values), fresh=True)
    assert not (home / "scores.csv").exists()


def test_weighted_batches_repeat_and_follow_the_weights():
    weights = torch.tensor([0.1] * 50 + [0.9] * 50)
    batches = WeightedBatches(weights, 10, 200, seed=3)
    assert list(batches) == list(batches)
    assert len(batches) == 200
    drawn = torch.tensor(list(batches))
    assert all(len(set(b.tolist())) == 10 for b in drawn)
    assert 0.8 < (drawn >= 50).double().mean() < 0.95
    with pytest.raises(DataError, match="drawn from 2 training rows"):
        WeightedBatches(torch.tensor([0.0, 0.5, 0.5]), 3, 1, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audit": {"drop_top": 0.1}}, "along two directions, and danger and safety is not given"),
        ({"audit": {"danger": "d", "drop_top": 0.1}}, "and safety is not given"),
        ({"audit": {"danger": "d", "safety": "s"}}, "drop_top: 0.02 or reweight: true"),
        ({"audit": {"danger": "d", "safety": "s", "drop_top": 0.1, "reweight": True}}, "one of the two"),
        ({"audit": {"danger": "d", "safety": "s", "drop_top": 0.1, "state": "zero", "init": "i"}}, "leave out init"),
        ({"privacy": "naive"}, "no privacy would be left"),
        ({"task": "classification"}, "use causal-lm"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_reason(settings, changes, message):
    values = settings(changes.get("task", "causal-lm"))
    values |= {"audit": {"danger": "d", "safety": "s", "drop_top": 0.1}} | changes
    with pytest.raises(ConfigError, match=message):
        parse(values)


def test_directions_that_are_not_there_stop_the_run_before_training(settings, directions):
    with pytest.raises(DataError, match=r"no local file|there is no file"):
        tune(parse(settings(audit={"danger": "nowhere.jsonl", "safety": directions["safety"], "drop_top": 0.1})))
