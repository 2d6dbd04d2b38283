"""What the page of a run says: curves, the spectra of the learned update, what was trained, how to load it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from subspan.data import SentenceClassifier, classifier_class, model_source
from subspan.linalg import LowRank, effective_rank, stable_rank
from subspan.pages import Code, Figure, Page, Section, Table, Text
from subspan.pages.plots import Curve, bars, curves, spectra
from subspan.surgery import BaseShift, FactorPair, role_of, weight_matrix
from subspan.tune.config import Config, dump
from subspan.tune.folder import RunFolder

_SHOWN = 32  # singular values kept per layer


def layer_table(pairs: Sequence[FactorPair], shift: BaseShift | None) -> list[dict[str, Any]]:
    """The learned update s (A Bᵀ - A0 B0ᵀ) of each layer: size, spectrum, effective and stable rank."""
    rows = []
    for pair in pairs:
        update = pair.low_rank()
        weight = weight_matrix(pair.layer).float()
        if shift is not None and pair.name in shift.start:
            start = shift.start[pair.name]
            start = LowRank(start.A.to(update.A), start.B.to(update.B))
            weight = weight + pair.scaling * start.dense()
            update = LowRank.merge([update, start], [1.0, -1.0])
        values = update.svd().S * pair.scaling
        m, n, r = pair.shape
        rows.append(
            {
                "layer": pair.name,
                "role": role_of(pair.name),
                "shape": [m, n],
                "r": r,
                "relative_norm": float(torch.linalg.norm(values) / torch.linalg.norm(weight)),
                "effective_rank": float(effective_rank(values)),
                "stable_rank": float(stable_rank(values)),
                "singular_values": [float(v) for v in values[:_SHOWN]],
            }
        )
    return rows


def write_report(folder: RunFolder, config: Config, summary: Mapping[str, Any]) -> None:
    """Write the self-contained page of a finished run."""
    records = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    sections = [
        _outcome(config, summary),
        _learning(records),
        *_privacy(summary),
        *([update(summary["layers"])] if summary["layers"] else []),
        trained(summary),
        reload(config, folder, summary),
        Section("Configuration", [Code(dump(config))]),
        *([layers(summary["layers"])] if summary["layers"] else []),
    ]
    lead = f"{config.model} on {config.data.source}: {config.max_steps} steps, {summary['seconds']:.0f} s."
    Page(f"subspan tune: {config.output.name}", sections, lead).write(folder.report)


def _outcome(config: Config, summary: Mapping[str, Any]) -> Section:
    before, after = summary["before"], summary["after"]
    rows: list[list[Any]] = [[name, before[name], after[name]] for name in after]
    columns = ["held-out test split", "before", "after"]
    if twin := summary.get("twin"):
        columns.append("after, without privacy")
        rows = [[*row, twin["after"].get(row[0])] for row in rows]
    count = summary["facts"]["data"]["test"]
    blocks: list[Any] = [Table(columns, rows)]
    if "accuracy" in after:
        error = (after["accuracy"] * (1 - after["accuracy"]) / count) ** 0.5
        repeated = summary["facts"]["data"]["test_rows_also_in_train"]
        unseen = "that training never saw" if not repeated else f"of which {repeated} stand word for word in training"
        blocks.append(Text(f"{count} rows {unseen}; standard error of the accuracy {error:.3f}."))
    blocks.append(
        Text(
            "loss: mean negative log-likelihood (natural logarithm) of a target, that is of a label, or of a token of "
            "the answer with its end mark; a model that was never told the form of the answer begins high."
        )
    )
    return Section("Outcome", blocks)


def _series(records: Sequence[Mapping[str, Any]], key: str) -> Curve | None:
    points = [(r["step"], r[key]) for r in records if key in r]
    return Curve([p[0] for p in points], [p[1] for p in points]) if points else None


def _learning(records: Sequence[Mapping[str, Any]]) -> Section:
    def named(**keys: str) -> dict[str, Curve]:
        return {name.replace("_", " "): c for name, key in keys.items() if (c := _series(records, key)) is not None}

    blocks: list[Any] = []
    losses = named(training="loss", validation="validation_loss", test="test_loss")
    if losses:
        svg = curves(losses, xlabel="step", ylabel="loss per target")
        blocks.append(Figure(svg, "Loss.", "Training, validation and test loss against the step."))
    scores = named(validation="validation_accuracy", test="test_accuracy")
    if scores:
        svg = curves(scores, xlabel="step", ylabel="accuracy")
        blocks.append(Figure(svg, "Accuracy on held-out rows.", "Accuracy against the step."))
    return Section("Learning", blocks or [Text("No step was logged.")])


def _privacy(summary: Mapping[str, Any]) -> list[Section]:
    facts = summary["facts"].get("privacy")
    if facts is None:
        return []
    words = (
        "sigma: standard deviation of the noise over the clipping norm. One training row, more or less, changes the "
        "law of the adapter by at most these epsilon and delta. They cover the training rows only; choosing settings "
        "by looking at private rows would cost more."
    )
    if "twin" in summary:
        words += (
            " The accuracy without privacy, and the folder twin/ with its adapter, were made without noise. They carry "
            "no guarantee: publish neither."
        )
    return [Section("Privacy", [Table(["quantity", "value"], [[k, v] for k, v in facts.items()]), Text(words)])]


def update(layers: Sequence[Mapping[str, Any]]) -> Section:
    roles = sorted({row["role"] for row in layers})
    by_role = {role: [row for row in layers if row["role"] == role] for role in roles}
    depth = {role: min(len(row["singular_values"]) for row in rows) for role, rows in by_role.items()}
    median = {
        role: np.median([row["singular_values"][: depth[role]] for row in rows], axis=0).tolist()
        for role, rows in by_role.items()
    }
    median = {role: values for role, values in median.items() if max(values) > 0}
    blocks: list[Any] = []
    if median:
        blocks.append(
            Figure(
                spectra(median),
                "Singular values of the learned update, median over the layers of each role.",
                "One falling line per role of a layer.",
            )
        )
    ranks = {role: [row["effective_rank"] for row in rows] for role, rows in by_role.items()}
    blocks.append(Figure(bars(ranks, ylabel="effective rank of the update"), "Effective rank, one point per layer."))
    return Section("The learned update", blocks)


def layers(layers: Sequence[Mapping[str, Any]]) -> Section:
    columns = ["layer", "shape", "r", "update / weight", "effective rank", "stable rank"]
    table = [
        [
            row["layer"],
            "{} x {}".format(*row["shape"]),
            row["r"],
            row["relative_norm"],
            row["effective_rank"],
            row["stable_rank"],
        ]
        for row in layers
    ]
    caption = (
        "The update's Frobenius norm relative to the weight's; effective rank: exp of the entropy of its singular "
        "values, that is, how many directions share it; stable rank: squared Frobenius over squared spectral norm."
    )
    return Section("Layer by layer", [Table(columns, table, caption)])


def trained(summary: Mapping[str, Any]) -> Section:
    rows = [
        [part, name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else value]
        for part, facts in summary["facts"].items()
        if part != "privacy"
        for name, value in facts.items()
    ]
    return Section("What was trained", [Table(["part", "quantity", "value"], rows)])


def reload(config: Config, folder: RunFolder, summary: Mapping[str, Any]) -> Section:
    source = model_source(config.model)
    home, kind, options = "transformers", "AutoModelForCausalLM", "gguf_file=source.gguf_file"
    if config.task == "classification":
        wanted = classifier_class(source.path)
        home = "subspan.tune" if wanted is SentenceClassifier else home
        kind, options = wanted.__name__, f"id2label={dict(enumerate(summary['facts']['data']['labels']))!r}"
    if config.adapter is None:
        words = "The folder holds the whole model and its tokenizer."
        code = (
            f"from transformers import AutoTokenizer\nfrom {home} import {kind}\n\n"
            f"model = {kind}.from_pretrained({str(folder.model)!r})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({str(folder.model)!r})"
        )
    else:
        words = (
            "The adapter is an ordinary peft LoRA for the unmodified base model; subspan only locates the base here."
        )
        if home == "subspan.tune":
            words = (
                "The adapter is an ordinary peft LoRA for the unmodified encoder with a linear head on its mean token."
            )
        words += " check_base raises if the base is not the one the adapter was made for."
        first, check = "from peft import PeftModel", "from subspan.surgery import check_base"
        kept = repr(str(folder.adapter))
        last = f"check_base(base, {kept})\nmodel = PeftModel.from_pretrained(base, {kept})"
        if config.continual and config.continual.method == "moram":
            words = (
                "The adapter is a memory for the unmodified base model, which load_moram makes sure of. It cannot be "
                "merged: what a token reads depends on the token."
            )
            first, check = "from subspan.adapters import load_moram", ""
            last = f"model = load_moram(base, {kept}).eval()"
        code = (
            f"{first}\n"
            "from transformers import AutoTokenizer\n"
            f"from {home} import {kind}\n"
            "from subspan.data import model_source\n"
            + (f"{check}\n\n" if check else "\n")
            + f"source = model_source({config.model!r})\n"
            "tokenizer = AutoTokenizer.from_pretrained(source.path, gguf_file=source.gguf_file)\n"
            f"base = {kind}.from_pretrained(source.path, {options})\n" + last
        )
    if config.task == "causal-lm" and not config.continual:
        words += (
            f" It was trained on this user message, through the chat template where there is one: {config.prompt!r}"
        )
    return Section("Load it again", [Text(words), Code(code)])
