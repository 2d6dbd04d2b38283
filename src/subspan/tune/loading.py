"""From a configuration to encoded rows, a tokenizer and a base model."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from subspan.data import classifier_class, guess_column, load_pretrained, model_source
from subspan.errors import DataError, first_line
from subspan.tune.config import Config
from subspan.tune.sections import Data
from subspan.tune.tasks import CausalLM, Classification, Row


@dataclass(frozen=True)
class Rows:
    """The encoded rows of a run, by split, and the names of the labels (empty for free answers)."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    labels: list[str]

    def digest(self) -> str:
        """Of every row of every split, in order."""
        parts = [self.train, self.validation, self.test]
        text = json.dumps([[{k: r[k] for k in ("input_ids", "labels")} for r in part] for part in parts])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def repeated(self) -> int:
        """Test rows whose tokens stand in the training split, word for word."""
        seen = {tuple(r["input_ids"]) for r in self.train}
        return sum(tuple(r["input_ids"]) in seen for r in self.test)


def load_task(config: Config) -> tuple[Classification | CausalLM, Rows]:
    """Tokenizer, splits and encoded rows.

    Answers of a causal language model count as a closed label set when there are two to ``_CLOSED`` different ones.
    """
    from subspan.data import Labels, limit_words, load_text, pick_columns, split_data

    data = config.data
    table = load_text(data.source)
    columns = column_names(table, data)
    group = data.group or ("film" if data.source == "asset:reviews" else None)
    table = pick_columns(table, **columns, **({"group": group} if group else {}))
    if data.max_words is not None:
        table = limit_words(table, data.max_words)
    if data.validation + data.test >= len(table):
        raise DataError(
            f"{data.source} holds {len(table)} rows, too few for {data.validation} validation and {data.test} test rows"
        )
    table = table.add_column("row", list(range(1, len(table) + 1)))
    distinct = len(set(table["label"][:]))
    if config.task == "classification" and distinct > len(table) / 2:
        raise DataError(
            f"column {columns['label']!r} holds {distinct} different values in {len(table)} rows: a classifier needs "
            "labels that recur"
        )
    closed = config.task == "classification" or 1 < distinct <= _CLOSED
    splits = split_data(
        table,
        validation=data.validation / len(table),
        test=data.test / len(table),
        label="label" if closed else None,
        group="group" if group else None,
        random_state=config.seed,
    )
    parts = [
        splits.train.select(range(min(len(splits.train), data.train or len(splits.train)))),
        splits.validation.select(range(min(len(splits.validation), data.validation))),
        splits.test.select(range(min(len(splits.test), data.test))),
    ]
    labels = Labels.of(parts[0]["label"][:]) if closed else None
    tokenizer = load_tokenizer(config)
    names = list(labels.names) if labels else []
    if config.task == "classification":
        task: Classification | CausalLM = Classification(names, tokenizer, config.max_length)
    else:
        task = CausalLM(names, tokenizer, config.max_length, config.prompt, config.system)

    def encode(part: Any) -> list[Row]:
        numbers = part["row"][:]
        targets = labels.encode(part["label"][:], numbers) if labels else part["label"][:]
        encoded = task.encode(part["text"][:], targets)
        return [row | {"row": number} for row, number in zip(encoded, numbers, strict=True)]

    return task, Rows(*(encode(p) for p in parts), labels=names)


_CLOSED = 20


def column_names(table: Any, data: Data) -> dict[str, str]:
    """The columns that hold texts and labels: those that were named, or those with a usual name."""
    return {
        "text": data.text or guess_column(table, "text", "data.text"),
        "label": data.label or guess_column(table, "label", "data.label"),
    }


def load_tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    return load_pretrained(AutoTokenizer, config.model, "tokenizer")


def load_model(config: Config, labels: Sequence[str], *, meta: bool = False) -> nn.Module:
    """The base model on the CPU, with a new head for classification; with ``meta`` its structure, without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    options: dict[str, Any] = {}
    if config.task == "classification":
        factory = classifier_class(model_source(config.model).path)
        options["id2label"] = dict(enumerate(labels))
        options["label2id"] = {name: i for i, name in enumerate(labels)}
    what = f"{config.task} model"
    if not meta:
        return load_pretrained(factory, config.model, what, dtype=config.dtype, **options)
    shape = load_pretrained(AutoConfig, config.model, what, **options)
    try:
        with torch.device("meta"):
            return factory.from_config(shape)
    except ValueError as error:
        raise DataError(f"no {what} loads from {config.model}: {first_line(error)}") from error
