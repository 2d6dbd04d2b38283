"""Several data sets in turn on one model: after each, every task is scored; and a run that stops goes on."""

import json
import math
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from subspan.adapters import MoRAM, MoRAMConfig, cl_metrics
from subspan.files import write_json
from subspan.surgery import base_fingerprint, export_plain_lora, factor_pairs
from subspan.surgery.answers import on_device_of
from subspan.tune.config import Config
from subspan.tune.display import Display
from subspan.tune.fitting import (
    check_fit,
    checked_targets,
    fit,
    head_names,
    lora_config,
    parameter_counts,
    save_whole,
    score,
)
from subspan.tune.folder import RunFolder
from subspan.tune.loading import Rows, load_model, load_task
from subspan.tune.part import Run
from subspan.tune.parts import assemble
from subspan.tune.sections import Data
from subspan.tune.tasks import CausalLM, Classification

_LOOKED_AT = 64  # test rows of each task whose reads of the memory are averaged for the report


def task_configs(config: Config) -> list[Config]:
    """The configuration of each task's own training, in folders below the run's."""
    stream = config.continual
    assert stream is not None
    home = RunFolder(config.output).tasks
    made = []
    for number, task in enumerate(stream.tasks, 1):
        own: dict[str, Any] = {"data": Data(**{k: getattr(task, k) for k in Data.model_fields})}
        own |= {"continual": None, "output": home / f"{number:02d}-{task.name}"}
        own |= {"prompt": task.prompt or config.prompt, "max_steps": task.max_steps or config.max_steps}
        made.append(config.model_copy(update=own))
    return made


Loaded = list[tuple[Classification | CausalLM, Rows]]


def load_tasks(configs: Sequence[Config]) -> tuple[Loaded, list[str]]:
    """Every task with its rows, and the labels of all (none for a language model, whose tasks keep their own).

    A classifier has one head: labels of the same name are the same label, and a row is judged among its task's own.
    """
    loaded = [load_task(config) for config in configs]
    if configs[0].task != "classification":
        return loaded, []
    names = list(dict.fromkeys(name for _, rows in loaded for name in rows.labels))
    shared: Loaded = []
    for task, rows in loaded:
        assert isinstance(task, Classification)
        numbers = [names.index(name) for name in rows.labels]
        parts = [
            [row | {"labels": numbers[row["labels"]]} for row in part]
            for part in (rows.train, rows.validation, rows.test)
        ]
        shared.append((replace(task, labels=names, among=numbers), Rows(*parts, labels=rows.labels)))
    return shared, names


# ------------------------------------------------------------------------------------------------------ what is trained


class Learner(Protocol):
    """What learns the tasks: one adapter, from the first task to the last."""

    model: nn.Module

    def begin(self, number: int, name: str) -> None: ...

    def end(self) -> None: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None:
        """What ``save`` wrote after an earlier task."""
        ...


class Memory:
    """A bank of atoms that grows by ``adapter.r`` in each layer with every task."""

    def __init__(self, base: nn.Module, config: Config, targets: list[str]) -> None:
        from subspan.adapters import inject_moram

        stream, wanted = config.continual, config.adapter
        assert stream is not None
        assert wanted is not None
        self.seed = config.seed
        heads = head_names(base) if config.task == "classification" else None
        settings = MoRAMConfig(
            r=wanted.r,
            top_k=stream.top_k,
            temperature=stream.temperature,
            threshold=stream.threshold,
            alpha=wanted.alpha,
            dropout=wanted.dropout,
            target_modules=targets,
            modules_to_save=heads,
        )
        self.model = inject_moram(base, settings)

    @property
    def memory(self) -> MoRAM:
        return self.model.moram  # pyright: ignore[reportReturnType]

    def begin(self, number: int, name: str) -> None:
        generator = torch.Generator().manual_seed(self.seed + number)
        self.memory.begin_task(name, generator=generator)

    def end(self) -> None:
        self.memory.end_task()

    def save(self, path: Path) -> None:
        self.memory.save(path)

    def load(self, path: Path) -> None:
        self.memory.load(path)


class OneLoRA:
    """A single LoRA that each task goes on training: what to compare with."""

    def __init__(self, base: nn.Module, config: Config, targets: list[str], peft_task: str) -> None:
        from peft import get_peft_model

        assert config.adapter is not None
        lora = lora_config(config.adapter, targets, peft_task)
        self.model: nn.Module = get_peft_model(base, lora)  # pyright: ignore[reportArgumentType]

    def begin(self, number: int, name: str) -> None:
        pass

    def end(self) -> None:
        pass

    def save(self, path: Path) -> None:
        export_plain_lora(self.model, path)

    def load(self, path: Path) -> None:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(self.model, load_file(path / "adapter_model.safetensors"))  # pyright: ignore


def learner(base: nn.Module, config: Config, peft_task: str) -> Memory | OneLoRA:
    """The adapter on the base model. Raises ``ConfigError`` or ``TargetError`` for targets that cannot be adapted."""
    stream, wanted = config.continual, config.adapter
    assert stream is not None
    assert wanted is not None
    targets = list(checked_targets(base, wanted))
    if stream.method == "moram":
        return Memory(base, config, targets)
    return OneLoRA(base, config, targets, peft_task)


# -------------------------------------------------------------------------------------------------------------- the run


def train_stream(config: Config, folder: RunFolder, display: Display, fresh: bool) -> dict[str, Any]:
    """Learn the tasks in order; the summary's ``continual`` holds the matrix and what follows from it."""
    from accelerate import PartialState
    from transformers import set_seed

    from subspan.tune.report import layer_table
    from subspan.tune.trainer import Journal, latest_checkpoint

    stream = config.continual
    assert stream is not None
    # Tasks not yet learned, or unlike any, are meant to read nothing; the report says how many do.
    warnings.filterwarnings("ignore", message="more than half of the tokens read nothing")
    configs, names = task_configs(config), [task.name for task in stream.tasks]
    display.say(f"reading {len(names)} tasks: {', '.join(names)}")
    tasks, labels = load_tasks(configs)
    display.say(f"loading {config.model}")
    set_seed(config.seed)
    processes = PartialState()
    base = load_model(config, labels).to(processes.device)
    for own, (task, rows) in zip(configs, tasks, strict=True):
        check_fit(own, task, rows, base)
    if processes.is_main_process:
        digest = "-".join(rows.digest() for _, rows in tasks)
        folder.open(config, fresh, digest, base_fingerprint(base))
    processes.wait_for_everyone()
    student = learner(base, config, tasks[0][0].peft_task)
    model = student.model.to(processes.device)
    scores = Scores(folder.stream)

    def score_all() -> list[dict[str, float]]:
        display.say(f"scoring {sum(len(rows.test) for _, rows in tasks)} held-out rows of {len(tasks)} tasks")
        return [score(task, model, rows.test, config.batch_size, display) for task, rows in tasks]

    def tidy() -> None:
        """Checkpoints of finished tasks go, those that a killed run left too."""
        for own in configs[: len(scores.after)] if processes.is_main_process else ():
            shutil.rmtree(own.output / "checkpoints", ignore_errors=True)

    if scores.zero_shot is None:
        scores.zero_shot = score_all()
        scores.write(processes.is_main_process)
    elif scores.after:
        student.load(configs[len(scores.after) - 1].output / "adapter")
        display.say(f"continuing after task {names[len(scores.after) - 1]}")
        tidy()
    for number in range(len(scores.after), len(tasks)):
        own, (task, rows) = configs[number], tasks[number]
        home = RunFolder(own.output)
        home.path.mkdir(parents=True, exist_ok=True)
        student.begin(number, names[number])
        run = Run(own, home.path, task, rows.train, model, display.say)
        parts = assemble(own)
        for part in parts:
            part.prepare_adapter(run)

        def evaluate(task: Any = task, rows: Rows = rows) -> dict[str, float]:
            return score(task, model, rows.validation, config.batch_size, display)

        writes = processes.is_main_process
        journal = Journal(home.metrics, evaluate, own.evaluate_every, display.progress, parts, writes=writes)
        last = latest_checkpoint(home.path)
        at = f" from {last.name}" if last else ""
        display.say(f"task {number + 1} of {len(tasks)}, {names[number]}: {own.max_steps} steps{at}")
        if last is not None:
            journal.rewind(int(last.name.rsplit("-", 1)[1]))
        elif writes:
            home.metrics.unlink(missing_ok=True)
        fit(run, parts, journal, last)
        student.end()
        scores.after.append(score_all())
        scores.facts = run.facts
        if writes:
            student.save(home.adapter)
        scores.write(writes)
        tidy()
    if processes.is_main_process:
        display.say("writing the adapter and the report")
        student.save(folder.adapter)
    facts = scores.facts
    facts["data"] = {
        name: f"{len(rows.train)} training, {len(rows.validation)} validation, {len(rows.test)} test rows"
        for name, (_, rows) in zip(names, tasks, strict=True)
    }
    facts["data"]["labels"] = labels
    facts["adapter"] = {"parameters": parameter_counts(model)["parameters"], "method": stream.method}
    outcome = scores.outcome(names)
    if isinstance(student, Memory):
        outcome["growth"] = student.memory.growth()
        outcome["reads"], outcome["silent"] = reads(student.memory, tasks, config.batch_size)
    layers = layer_table(factor_pairs(model), None) if isinstance(student, OneLoRA) else []
    if config.merged and processes.is_main_process:
        save_whole(model.merge_and_unload(), tasks[0][0].tokenizer, folder.model)  # pyright: ignore[reportCallIssue]
    return {
        "before": _mean(scores.zero_shot or []),
        "after": _mean(scores.after[-1]),
        "steps": sum(own.max_steps for own in configs),
        "facts": facts,
        "continual": outcome,
        "layers": layers,
    }


class Scores:
    """The scores of every task's test rows: of the base model, and after each task; kept in a file as they come.

    ``facts`` is what the last task's training noted for the report.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.zero_shot: list[dict[str, float]] | None = None
        self.after: list[list[dict[str, float]]] = []
        self.facts: dict[str, dict[str, Any]] = {}
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.zero_shot, self.after, self.facts = (kept[name] for name in ("zero_shot", "after", "facts"))

    def write(self, writes: bool) -> None:
        if writes:
            write_json(self.path, {"zero_shot": self.zero_shot, "after": self.after, "facts": self.facts})

    def outcome(self, names: list[str]) -> dict[str, Any]:
        """The matrix of the accuracy (of the loss, where a task's answers are free) and its summaries.

        For a loss, levels are losses and changes are counted so that forgetting, a rise of the loss, is positive.
        """
        assert self.zero_shot is not None
        everything = [self.zero_shot, *self.after]
        metric = "accuracy" if all("accuracy" in cell for row in everything for cell in row) else "loss"
        sign = 1.0 if metric == "accuracy" else -1.0
        base, *matrix = [[cell[metric] for cell in row] for row in everything]
        found = cl_metrics([[sign * v for v in row] for row in matrix], zero_shot=[sign * v for v in base])
        levels = ("last", "average", "just_learned", "transfer", "zero_shot")
        metrics = {k: sign * v if k in levels else v for k, v in found.items()}
        assert not any(math.isnan(v) for v in metrics.values())
        return {"tasks": names, "metric": metric, "zero_shot": base, "matrix": matrix, "metrics": metrics}


def _mean(row: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over tasks of the figures that all have."""
    return {k: sum(cell[k] for cell in row) / len(row) for k in row[0] if all(k in cell for cell in row)}


def reads(memory: MoRAM, tasks: Loaded, batch_size: int) -> tuple[list[list[float]], list[float]]:
    """For rows of each task: the weight that atoms of each task get, mean over layers and tokens; and the share of
    tokens that read nothing."""
    by_task, silent = [], []
    for task, rows in tasks:
        some = rows.test[:_LOOKED_AT]
        batches = [
            on_device_of(memory.model, task.collate(some[at : at + batch_size]))
            for at in range(0, len(some), batch_size)
        ]
        found = memory.stats(batches, lambda batch, task=task: task.losses(memory.model, batch)).values()
        by_task.append((sum(use.task_weight for use in found) / len(found)).tolist())
        silent.append(sum(use.silent for use in found) / len(found))
    return by_task, silent


def lines(outcome: dict[str, Any]) -> list[str]:
    """The matrix and the summaries as text, for a terminal."""
    names = outcome["tasks"]
    wide = max(13, *(len(n) + 6 for n in names))
    head = f"{outcome['metric'] + ' on':{wide}}" + "".join(f"{n:>{max(8, len(n) + 1)}}" for n in names)
    rows = [("before", outcome["zero_shot"])]
    rows += [(f"after {name}", row) for name, row in zip(names, outcome["matrix"], strict=True)]
    out = [head]
    for label, row in rows:
        out.append(
            f"{label:{wide}}" + "".join(f"{v:>{max(8, len(n) + 1)}.3f}" for n, v in zip(names, row, strict=True))
        )
    m = outcome["metrics"]
    out.append(f"average {outcome['metric']} after the last task: {m['last']:.3f}")
    out.append(f"forgetting: {m['forgetting']:.3f}")
    out.append(f"zero-shot retention: {m['retention']:+.3f} (tasks not trained yet, against the base model)")
    return out
