"""Labelled texts as batches: as many of each class, short ones with short ones, the same every time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subspan.data import Labels, guess_column, load_text, pick_columns
from subspan.errors import DataError
from subspan.inspect.subject import Subject, label_names
from subspan.surgery.answers import pad_token, padded

Batch = dict[str, Tensor]


def labelled_batches(
    subject: Subject,
    source: str,
    *,
    text: str | None,
    label: str | None,
    rows: int,
    max_length: int,
    batch_size: int,
) -> list[Batch]:
    """Up to ``rows`` rows of a table, balanced over the classes, tokenised and padded.

    Raises:
        DataError: no such file or column, labels that the classifier does not know, or a class without a row.
    """
    table = load_text(source)
    columns = {
        "text": text or guess_column(table, "text", "--text"),
        "label": label or guess_column(table, "label", "--label"),
    }
    table = pick_columns(table, **columns)
    model: Any = subject.model
    names = label_names(subject.labels, table["label"][:], model.config.num_labels)
    numbers = torch.tensor(Labels(names).encode(table["label"][:]))
    chosen = balanced(numbers, len(names), rows, names)
    limit = min(max_length, getattr(model.config, "max_position_embeddings", None) or max_length)
    ids = subject.tokenizer([table["text"][i] for i in chosen], truncation=True, max_length=limit)["input_ids"]
    order = sorted(range(len(chosen)), key=lambda i: len(ids[i]))
    pad = pad_token(subject.tokenizer)
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = pad  # decoders find a row's last token by it
    return [
        _batch([ids[i] for i in part], numbers[[chosen[i] for i in part]], pad)
        for part in (order[at : at + batch_size] for at in range(0, len(order), batch_size))
    ]


def balanced(labels: Tensor, classes: int, rows: int, names: Sequence[str]) -> list[int]:
    """Places of up to rows // classes random rows of each class, as many of every class."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    places = [order[labels[order] == c].tolist() for c in range(classes)]
    if empty := [name for name, found in zip(names, places, strict=True) if not found]:
        raise DataError(f"the data has no row with label {empty[0]!r}; class means need every label")
    each = min(max(1, rows // classes), *map(len, places))
    return [i for found in places for i in found[:each]]


def _batch(ids: Sequence[Sequence[int]], labels: Tensor, pad: int) -> Batch:
    mask = padded([[1] * len(row) for row in ids], 0, "right")
    return {"input_ids": padded(ids, pad, "right"), "attention_mask": mask, "labels": labels}
