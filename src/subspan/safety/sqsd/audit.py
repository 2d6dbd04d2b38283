"""The whole job behind ``subspan audit``: find or train what is missing, score, write, draw the page."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subspan.data import load_pretrained
from subspan.errors import DataError
from subspan.safety.sqsd.direction import Direction
from subspan.safety.sqsd.risk import Progress, SafetyRisk
from subspan.safety.sqsd.stream import settings_hash
from subspan.safety.sqsd.table import RiskTable, checked_format
from subspan.safety.sqsd.tokens import conversation
from subspan.safety.sqsd.training import encoded_rows, row_losses

Say = Callable[[str], None]
Source = str | os.PathLike[str]


def load_causal_lm(name: str) -> nn.Module:
    """A causal language model from an asset, a folder or the hub, on the accelerator if there is one.

    Raises:
        DataError: no such model loads.
    """
    from transformers import AutoModelForCausalLM

    model = load_pretrained(AutoModelForCausalLM, name, "causal language model", dtype="auto")
    if torch.accelerator.is_available():
        nn.Module.to(model, torch.accelerator.current_accelerator())
    return model


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model. Raises ``DataError`` where none loads."""
    from transformers import AutoTokenizer

    return load_pretrained(AutoTokenizer, name, "tokenizer")


def find_direction(
    source: Source, model: nn.Module, tokenizer: Any, cache: Path, say: Say, **training: Any
) -> Direction:
    """A direction from wherever ``source`` points.

    Args:
        source: a LoRA folder; a full checkpoint, compared with ``model``; or a file of rows, on which one is trained
            (by DPO where it has columns ``chosen`` and ``rejected``) and kept in ``cache``.
        model: the base model.
        tokenizer: its tokenizer.
        cache: folder for a direction that is trained here; one that lies there from the same rows is taken.
        say: told what is done.
        **training: options of ``train_direction``.
    """
    path = Path(source)
    if (path / "adapter_config.json").is_file():
        return Direction.from_adapter(path)
    if (path / "config.json").is_file():
        say(f"comparing {path} with the base model")
        return Direction.from_models(model, load_causal_lm(str(path)))
    if path.is_dir():
        raise DataError(f"{path} holds neither an adapter (adapter_config.json) nor a model (config.json)")
    rows = _rows(path)
    if {"chosen", "rejected"} <= set(rows.column_names):
        training = {"objective": "dpo", **training}
    return trained_once(model, tokenizer, rows, cache, say, str(path), **training)


def trained_once(
    model: nn.Module,
    tokenizer: Any,
    rows: Iterable[Mapping[str, Any]],
    cache: Path,
    say: Say,
    what: str,
    **training: Any,
) -> Direction:
    """``Direction.from_data``, or what it left in ``cache`` for the same rows and options."""
    from subspan.surgery import base_fingerprint

    rows = list(rows)
    mark = settings_hash({"rows": rows, "training": training, "base": base_fingerprint(model)})
    kept = cache.with_name(f"{cache.name}-{mark[:8]}")
    if (kept / "adapter_config.json").is_file():
        return Direction.from_adapter(kept)
    say(f"training a direction on {what}")
    Direction.from_data(model, tokenizer, rows, **training).save(kept)
    return Direction.from_adapter(kept)


def initial_rows(rows: Any, count: int = 64, seed: int = 0) -> list[Mapping[str, Any]]:
    """A random subset of the rows to be scored, on which the initial state is trained."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows[i] for i in order[:count]]


def likelihood_probe(tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Callable[[nn.Module], float]:
    """Behaviour as one number: the mean log-likelihood per token of these answers, such as refusals."""
    encoded = encoded_rows(tokenizer, rows, 1024)
    if not encoded:
        raise DataError("the probe has no row with an answer")
    return partial(_likelihood, tokenizer=tokenizer, rows=encoded)


def _likelihood(model: nn.Module, tokenizer: Any, rows: Sequence[Any]) -> float:
    parts = [row_losses(model, tokenizer, rows[i : i + 16]).per_row() for i in range(0, len(rows), 16)]
    return -float(torch.cat(parts).mean())


def audit(
    model: str,
    data: Source,
    danger: Source,
    safety: Source,
    *,
    init: Source | None = None,
    state: str = "shared",
    init_steps: int = 50,
    out: Source = "scores.parquet",
    probe: Source | None = None,
    top: int = 20,
    show_text: bool = False,
    resume: bool = True,
    say: Say = lambda text: None,
    progress: Progress | None = None,
    **options: Any,
) -> RiskTable:
    """Score the rows of a file, and write the scores as parquet and csv, their facts as json, and a page.

    Args:
        model: "asset:..." name, local folder or hub name of a causal language model.
        data: the rows (see ``load_text``), with ``messages`` or a prompt's and an answer's column.
        danger: an adapter folder, a full checkpoint, or a file of dangerous rows; see ``find_direction``.
        safety: the same, of safe rows, or of pairs ``chosen`` and ``rejected``.
        init: adapter at which gradients are taken; without it one is trained on 64 of the rows.
        state: "shared", "paper" or "zero"; see ``SafetyRisk``.
        init_steps: steps of that training.
        out: a .parquet or .csv file; the other format, .json and .html lie beside it.
        probe: a file of safe answers, to see whether the directions steer the model.
        top: rows that the page lists.
        show_text: show what those rows say.
        resume: go on from what an earlier run left.
        say: told what is done.
        progress: called with the rows done and their total.
        **options: of ``SafetyRisk``.

    Raises:
        SubspanError: a file, column or model is missing, or belongs to something else.
        ValueError: options that cannot work.
    """
    target = checked_format(out)
    say(f"reading {data}")
    rows = _rows(data)
    messages = partial(conversation, prompt=options.get("prompt"), answer=options.get("answer"))
    messages(rows[0], 1)  # a missing column is told before a model is loaded
    say(f"loading {model}")
    base, tokenizer = load_causal_lm(model), load_tokenizer(model)
    beside = partial(Path.with_name, target)
    steer = {
        name: find_direction(source, base, tokenizer, beside(f"{target.stem}.{name}"), say)
        for name, source in (("danger", danger), ("safety", safety))
    }
    begin: Direction | None = None
    if init is not None:
        begin = Direction.from_adapter(Path(init))
    elif state != "zero":
        texts = [{"messages": messages(row, 0)} for row in initial_rows(rows)]
        cache = beside(f"{target.stem}.init")
        begin = trained_once(
            base, tokenizer, texts, cache, say, f"{len(texts)} of the rows", steps=init_steps, stop_margin=None
        )
    risk = SafetyRisk(base, steer["danger"], steer["safety"], tokenizer=tokenizer, state=state, init=begin, **options)  # pyright: ignore[reportArgumentType]
    say(f"scoring {len(rows)} rows")
    table = risk.score(rows, out=target, resume=resume, progress=progress)
    if probe is not None:
        say("steering the model along both directions")
        look = likelihood_probe(tokenizer, list(_rows(probe)))
        curves = {
            name: steer[name].validate(base, look, expected)._asdict()
            for name, expected in (("danger", "fall"), ("safety", "rise"))
        }
        table = replace(table, facts={**table.facts, "steering": curves})
    for suffix in (".parquet", ".csv"):
        table.write(target.with_suffix(suffix))
    said = [_shown(messages(row, 0)) for row in rows] if show_text else None
    table.report(target.with_suffix(".html"), said, top)
    return table


def _rows(source: Source) -> Any:
    from subspan.data import load_text

    return load_text(source)


def _shown(messages: Sequence[Mapping[str, str]]) -> str:
    return " | ".join(f"{m['role']}: {m['content']}" for m in messages)[:300]
