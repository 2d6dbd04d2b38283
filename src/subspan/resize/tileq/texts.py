"""Calibration text as token ids."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from subspan.data import load_pretrained, load_text, pick_columns
from subspan.errors import DataError


def calibration_texts(source: str | os.PathLike[str], column: str = "text") -> Iterable[str]:
    """One text from a .txt file, or a column of whatever ``load_text`` reads."""
    name = os.fspath(source)
    if name.endswith(".txt"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        try:
            return [path.read_text("utf-8")]
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8 text") from None
    return pick_columns(load_text(name), text=column)["text"]


def calibration_batches(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    column: str = "text",
    samples: int = 128,
    length: int = 2048,
    batch: int = 8,
) -> list[Tensor]:
    """The first ``samples`` windows of ``length`` tokens of the texts, set end to end, in batches.

    Args:
        model: folder with the model's tokenizer and configuration, which may allow shorter windows only.
        source: of text, see ``subspan.data.load_text``; or a .txt file.
        column: with the text.
        samples: windows; fewer where the text ends.
        length: of a window.
        batch: windows per batch.

    Raises:
        DataError: no tokenizer, no such data, or less text than one window.
        ValueError: samples, length or batch below 1.
    """
    if min(samples, length, batch) < 1:
        raise ValueError(f"samples, length and batch must be at least 1, got {samples}, {length} and {batch}")
    if not Path(model).is_dir():
        raise DataError(f"there is no folder {os.fspath(model)}")
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer, os.fspath(model), "tokenizer")
    longest = getattr(load_pretrained(AutoConfig, os.fspath(model)), "max_position_embeddings", None)
    length = min(length, longest or length)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = iter(calibration_texts(source, column))
    stream = itertools.chain.from_iterable(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end for text in texts
    )
    ids = list(itertools.islice(stream, samples * length))
    if len(ids) < length:
        raise DataError(
            f"{os.fspath(source)} holds {len(ids)} tokens, less than one window of {length}; "
            "give more, or a smaller length"
        )
    return list(torch.tensor(ids[: len(ids) // length * length]).view(-1, length).split(batch))
