"""The page of a run over several tasks: the matrix, what was kept, what each task reads, how to load it."""

import json
from collections.abc import Mapping
from typing import Any

from subspan.pages import Code, Figure, Page, Section, Table, Text
from subspan.pages.plots import Curve, curves, heat_map
from subspan.tune.config import Config, dump
from subspan.tune.continual import task_configs
from subspan.tune.folder import RunFolder
from subspan.tune.report import layers, reload, trained, update

_WORDS = {
    "last": "mean over all tasks after the last one",
    "average": "mean over the whole matrix",
    "just_learned": "mean over tasks right after their own training",
    "transfer": "mean over tasks before their own training",
    "forgetting": "what tasks lost between their own training and the end (mean, without the last task)",
    "zero_shot": "mean of the base model",
    "retention": "transfer minus the base model's score on the same tasks: what other tasks did to those not yet seen",
}


def write_stream_report(folder: RunFolder, config: Config, summary: Mapping[str, Any]) -> None:
    """Write the self-contained page of a finished run over several tasks."""
    outcome = summary["continual"]
    sections = [
        _outcome(outcome),
        _learning(config),
        *([_memory(outcome)] if "reads" in outcome else []),
        *([update(summary["layers"])] if summary["layers"] else []),
        trained(summary),
        reload(config, folder, summary),
        Section("Configuration", [Code(dump(config))]),
        *([layers(summary["layers"])] if summary["layers"] else []),
    ]
    assert config.continual is not None
    lead = (
        f"{config.model}, {len(outcome['tasks'])} tasks in turn by {config.continual.method}: "
        f"{summary['steps']} steps, {summary['seconds']:.0f} s."
    )
    Page(f"subspan tune: {config.output.name}", sections, lead).write(folder.report)


def _outcome(outcome: Mapping[str, Any]) -> Section:
    names, metric = outcome["tasks"], outcome["metric"]
    rows = ["before", *(f"after {name}" for name in names)]
    matrix = [outcome["zero_shot"], *outcome["matrix"]]
    table = [[row, *values] for row, values in zip(rows, matrix, strict=True)]
    measured = [[k.replace("_", " "), outcome["metrics"][k], words] for k, words in _WORDS.items()]
    by_task = {name: Curve(list(range(len(rows))), [row[j] for row in matrix]) for j, name in enumerate(names)}
    return Section(
        "Outcome",
        [
            Table([f"{metric} on", *names], table, "Held-out rows of every task, before training and after each task."),
            Figure(heat_map(matrix, row_labels=rows, column_labels=names, label=metric), "The same, as a picture."),
            Figure(curves(by_task, xlabel="tasks learned", ylabel=metric), "Each task as the others come."),
            Table(["quantity", metric, "meaning"], measured),
            Text("No task id was given: a row is scored by one and the same model, among the labels of its own task."),
        ],
    )


def _learning(config: Config) -> Section:
    losses = {}
    for own in task_configs(config):
        text = RunFolder(own.output).metrics.read_text(encoding="utf-8")
        points = [(r["step"], r["loss"]) for line in text.splitlines() if "loss" in (r := json.loads(line))]
        if points:
            losses[own.output.name] = Curve([p[0] for p in points], [p[1] for p in points])
    if not losses:
        return Section("Learning", [Text("No step was logged.")])
    return Section("Learning", [Figure(curves(losses, xlabel="step of the task", ylabel="loss per target"), "Loss.")])


def _memory(outcome: Mapping[str, Any]) -> Section:
    names = outcome["tasks"]
    rows, columns = [f"rows of {name}" for name in names], [f"atoms of {name}" for name in names]
    growth = outcome["growth"]
    silent = [[name, share] for name, share in zip(names, outcome["silent"], strict=True)]
    return Section(
        "The memory",
        [
            Figure(
                heat_map(outcome["reads"], row_labels=rows, column_labels=columns, label="weight"),
                "Whose atoms the rows of each task read: mean weight over tokens and layers after the last task.",
            ),
            Table(["task", "share of tokens that read nothing"], silent),
            Table(
                ["task", "atoms", "values trained", "values stored so far"],
                [[row["task"], row["atoms"], row["values"], row["stored"]] for row in growth],
                "Growth over all layers.",
            ),
        ],
    )
