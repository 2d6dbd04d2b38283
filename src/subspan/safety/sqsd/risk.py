"""Risk scores of training rows in one pass: forward, backward, contract in the hook, write, forget."""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import ConfigError, DataError, TargetError
from subspan.linalg import LowRank
from subspan.safety.sqsd.direction import Direction, fresh_state, on_device, weight_shape
from subspan.safety.sqsd.projection import (
    METRICS,
    FactorStep,
    Projected,
    WeightStep,
    contributions,
    jackknife_error,
    null_deviation,
)
from subspan.safety.sqsd.stream import Journal, Record, refuse_other_settings, row_hash, settings_hash
from subspan.safety.sqsd.table import RiskTable, checked_format
from subspan.safety.sqsd.tokens import Tokens, is_encoded, row_tokens
from subspan.surgery import base_fingerprint, plain_layers, side_paths, undisturbed
from subspan.surgery.answers import answer_batch, answer_logits, on_device_of, pad_token, target_losses
from subspan.surgery.per_example import ExampleRecorder, LayerGradient

State = Literal["shared", "paper", "zero"]
Progress = Callable[[int, int | None], None]

# Rows that are tokenised, and sorted by length, together.
_CHUNK = 512


class _Pass(NamedTuple):
    """One state: the factors that the model runs with, and which directions are looked at there."""

    state: Direction
    scaling: Mapping[str, float]
    directions: Sequence[str]


class _Term(NamedTuple):
    """What each module adds to a term, for b rows."""

    parts: Float[Tensor, "b l"]
    grad_norm: Float[Tensor, " b"]
    losses: Float[Tensor, " b"]


@dataclass(frozen=True)
class _Row:
    number: int
    digest: str
    tokens: Tokens
    source: str | None


class SafetyRisk:
    """Scores rows by how far one gradient step on each moves the model along danger minus along safety.

    score = sum over layers of cos(dW, V_danger) - the same with V_safety, where dW is the first-order change of an
    adapter's update by one SGD step on the row. Wang et al., "From Parameter Dynamics to Risk Scoring", ICML 2026.

    Args:
        model: a causal language model, plain or peft (its own adapters are off while rows are scored).
        danger: where dangerous training moves the model.
        safety: where safe training moves it.
        tokenizer: of the model; needed unless rows come with ``input_ids`` and ``labels``.
        state: where gradients are taken. "shared" (default): both terms at ``init``. "paper": danger at ``init``,
            safety at the safe adapter itself with ``safety_scale``. "zero": both at a fresh adapter, that is, at the
            base model. "paper" asks what will erode refusals, "shared" what is poisoned.
        init: a trained adapter, by convention of a few steps on the rows to be scored; a folder or a ``Direction``.
        metric: "cosine" of each layer (the paper), "global", "projection", "dot" or "l2"; see ``contributions``.
        update: "lora": a step on the adapter's factors; "full": a step on the weights themselves.
        terms: "both", or one term alone.
        safety_scale: scaling of the safe adapter under "paper".
        batch_tokens: rows times longest row of one forward pass: memory, and what a kill loses, but no score.
        max_length: tokens of a row; longer ones lose the beginning of the prompt, then the end of the answer.
        last_turn_only: the last answer of a conversation counts, in place of all.
        prompt: column with the user's turn.
        answer: column with the answer.
        rank: of the fresh adapter under "zero".

    Raises:
        BaseMismatch: a direction, or ``init``, belongs to another base model.
        TargetError: no layer is common to all of them.
        ValueError: an option unknown, a combination that cannot work, or twice the same direction.
    """

    def __init__(
        self,
        model: nn.Module,
        danger: Direction,
        safety: Direction,
        *,
        tokenizer: Any = None,
        state: State = "shared",
        init: Direction | str | os.PathLike[str] | None = None,
        metric: str = "cosine",
        update: Literal["lora", "full"] = "lora",
        terms: Literal["both", "danger", "safety"] = "both",
        safety_scale: float = 1.0,
        batch_tokens: int = 1024,
        max_length: int = 1024,
        last_turn_only: bool = False,
        prompt: str | None = None,
        answer: str | None = None,
        rank: int = 8,
    ) -> None:
        _one_of("state", state, ("shared", "paper", "zero"))
        _one_of("metric", metric, METRICS)
        _one_of("update", update, ("lora", "full"))
        _one_of("terms", terms, ("both", "danger", "safety"))
        if state != "zero" and init is None:
            raise ValueError(
                f"state {state!r} takes gradients at a trained adapter: give init, or use state 'zero' (the base model)"
            )
        if state == "zero" and init is not None:
            raise ValueError("state 'zero' takes gradients at the base model; leave init out, or use state 'shared'")
        if danger.same_update(safety):
            raise ValueError(
                f"danger and safety are the same direction ({danger.source or 'both'}): every score would be 0"
            )
        if batch_tokens < 1 or max_length < 2:
            raise ValueError(f"batch_tokens={batch_tokens}, max_length={max_length}: at least 1 and 2 are needed")
        if isinstance(init, str | os.PathLike):
            init = Direction.from_adapter(Path(init))
        self.model, self.tokenizer = model, tokenizer
        self.metric, self.terms, self.batch_tokens = metric, terms, batch_tokens
        self.max_length, self.last_turn_only, self.prompt, self.answer = max_length, last_turn_only, prompt, answer
        self._layers = plain_layers(model)
        given = {"danger": danger, "safety": safety, **({"init": init} if init else {})}
        for direction in given.values():
            direction.check(model)
        common = [n for n in self._layers if all(n in d.factors for d in given.values())]
        if state == "zero":
            init = fresh_state({n: self._layers[n] for n in common}, rank)
        assert init is not None
        self.names = common
        self._warn_of_skipped(given)
        # Factors live where their layers do, once, not batch by batch.
        placed = {k: on_device(d.factors, self._layers) for k, d in given.items()}
        at_init = on_device(init.factors, self._layers)
        if state == "paper":
            scales = dict.fromkeys(safety.factors, safety_scale)
            self._passes = [_Pass(init, init.scaling, ["danger"]), _Pass(safety, scales, ["safety"])]
            states = [at_init, placed["safety"]]
        else:
            self._passes = [_Pass(init, init.scaling, ["danger", "safety"])]
            states = [at_init]
        self._states = states
        self._steps = [
            {n: self._step(update, z[n], p.scaling[n], [placed[k][n] for k in p.directions]) for n in common}
            for p, z in zip(self._passes, states, strict=True)
        ]
        self._norms = {k: given[k].norms(common) for k in ("danger", "safety")}
        self.settings: dict[str, Any] = {
            "danger": danger.digest(),
            "safety": safety.digest(),
            "init": init.digest(),
            "base": base_fingerprint(model),
            "state": state,
            "metric": metric,
            "update": update,
            "terms": terms,
            "safety_scale": safety_scale,
            "max_length": max_length,
            "last_turn_only": last_turn_only,
            "prompt": prompt,
            "answer": answer,
            "template": getattr(tokenizer, "chat_template", None),
            "dtype": str(next(model.parameters()).dtype),
        }

    @staticmethod
    def _step(update: str, z: LowRank, s: float, directions: list[LowRank]) -> FactorStep | WeightStep:
        return WeightStep(directions) if update == "full" else FactorStep(z, s, directions)

    def _warn_of_skipped(self, given: Mapping[str, Direction]) -> None:
        if not self.names:
            counts = ", ".join(f"{name} has {len(d.factors)}" for name, d in given.items())
            raise TargetError(f"no linear layer is common to the model and all directions ({counts})")
        skipped = {name: len(d.factors) - len(self.names) for name, d in given.items()}
        if any(skipped.values()):
            counts = ", ".join(f"{n} of {name}" for name, n in skipped.items() if n)
            warnings.warn(f"{len(self.names)} layers are compared; not common to all: {counts}", stacklevel=3)

    # -------------------------------------------------------------------------------------------------------- scoring

    def score(
        self,
        dataset: Iterable[Mapping[str, Any]],
        out: str | os.PathLike[str] | None = None,
        resume: bool = True,
        progress: Progress | None = None,
    ) -> RiskTable:
        """Score every row, in the order of the data.

        Args:
            dataset: rows with ``messages``, or a prompt's and an answer's column, or ``input_ids`` and ``labels``; a
                column ``source`` is carried along.
            out: a ``.parquet`` or ``.csv`` file. Until it is complete, what is scored lies beside it in a ``.part``
                file, from which the same call goes on after a kill.
            resume: go on from there; False starts over.
            progress: called with the rows that are done and their total (None where the data does not know it).

        Raises:
            ConfigError: ``out`` holds scores of other settings.
            DataError: a column is missing, a row cannot be split into prompt and answer, or rows changed meanwhile.
        """
        target = checked_format(out) if out is not None else None
        total = len(dataset) if hasattr(dataset, "__len__") else None  # pyright: ignore[reportArgumentType]
        if total == 0:
            raise DataError("there are no rows to score")
        if target is not None and resume and (done := self._finished(target, dataset)) is not None:
            return done
        part = target.with_name(f"{target.name}.part") if target is not None else None
        journal = Journal(part, self.settings, len(self.names), resume)
        with ExitStack() as stack:
            stack.enter_context(undisturbed(self.model))
            recorder = ExampleRecorder({n: self._layers[n] for n in self.names}, allow_unused=True)
            stack.callback(recorder.remove)
            for batch in self._batches(dataset):
                if todo := [row for row in batch if not journal.done(row.number, row.digest)]:
                    journal.add(*self._score_batch(todo, recorder))
                if progress is not None:
                    progress(len(journal.records), total)
        table = RiskTable.of([journal.records[n] for n in sorted(journal.records)], self._facts(journal))
        if target is not None and part is not None:
            table.write(target)
            part.unlink()
        return table

    def _finished(self, target: Path, dataset: Iterable[Mapping[str, Any]]) -> RiskTable | None:
        """The table that a finished audit of these rows left, or None."""
        if not target.exists():
            return None
        table = RiskTable.read(target)
        if "settings" not in table.facts:
            raise ConfigError(
                f"{target} exists, and no audit wrote it; choose another file, or start over (--fresh, resume=False)"
            )
        refuse_other_settings(target, table.facts, self.settings, settings_hash(self.settings))
        hashes = [_digest(row) for row in dataset]
        if hashes != table["hash"].tolist():
            raise ConfigError(
                f"{target} holds scores of other rows; choose another file, or start over (--fresh, resume=False)"
            )
        return table

    def _batches(self, dataset: Iterable[Mapping[str, Any]]) -> Iterator[list[_Row]]:
        """Rows of similar length together, in a fixed order; rows that cannot be scored come first in their chunk."""
        rows = iter(dataset)
        at = 1
        while chunk := [self._row(row, at + i) for i, row in enumerate(islice(rows, _CHUNK))]:
            at += len(chunk)
            if hollow := [row for row in chunk if row.tokens.reason]:
                yield hollow
            batch: list[_Row] = []
            ordered = sorted((r for r in chunk if not r.tokens.reason), key=lambda r: len(r.tokens.input_ids))
            for row in ordered:
                if batch and (len(batch) + 1) * len(row.tokens.input_ids) > self.batch_tokens:
                    yield batch
                    batch = []
                batch.append(row)
            if batch:
                yield batch

    def _row(self, row: Mapping[str, Any], number: int) -> _Row:
        source = None if row.get("source") is None else str(row["source"])
        tokens = row_tokens(
            row,
            number,
            self.tokenizer,
            self.max_length,
            last_turn_only=self.last_turn_only,
            prompt=self.prompt,
            answer=self.answer,
        )
        return _Row(number, _digest(row), tokens, source)

    def _score_batch(self, batch: Sequence[_Row], recorder: ExampleRecorder) -> tuple[list[Record], np.ndarray | None]:
        """Records of a batch, and what its rows add to the shares of the modules."""
        if batch[0].tokens.reason:
            return [_record(row, {}, row.tokens.reason) for row in batch], None
        terms = self.terms_of([row.tokens for row in batch], recorder)
        danger, safety = terms["danger"].parts, terms["safety"].parts
        parts = {"both": danger - safety, "danger": danger, "safety": -safety}[self.terms]
        score = parts.sum(1)
        columns = {
            "score": score,
            "danger": danger.sum(1),
            "safety": safety.sum(1),
            "loss": terms["danger"].losses,
            "grad_norm": terms["danger"].grad_norm,
            "se": jackknife_error(parts),
        }
        values = {name: column.tolist() for name, column in columns.items()}
        records = []
        for i, row in enumerate(batch):
            found = {name: column[i] for name, column in values.items()}
            sound = math.isfinite(found["score"]) and math.isfinite(found["loss"])
            what = "loss" if not math.isfinite(found["loss"]) else "gradient"
            records.append(_record(row, found, "" if sound else f"the {what} is not finite"))
        sound_rows = score.isfinite()
        kept = parts[sound_rows]
        shares = torch.stack([kept.sum(0), (kept * score[sound_rows, None]).sum(0)])
        return records, shares.cpu().double().numpy()

    def terms_of(self, rows: Sequence[Tokens], recorder: ExampleRecorder) -> dict[str, _Term]:
        """Both terms of a batch, module by module; each state is one forward and one backward pass."""
        device = next(self.model.parameters()).device
        pad = pad_token(self.tokenizer) if self.tokenizer is not None else 0
        packed = on_device_of(
            self.model, answer_batch([{"input_ids": r.input_ids, "labels": r.labels} for r in rows], pad)
        )
        out = {}
        for one, state, steps in zip(self._passes, self._states, self._steps, strict=True):
            found: dict[str, Projected] = {}

            def consume(name: str, gradient: LayerGradient, found: Any = found, steps: Any = steps) -> None:
                if name in found:
                    raise TargetError(f"{name} is used twice in one forward pass, where its step is no sum of two")
                found[name] = steps[name].project(gradient.D, gradient.X)

            with torch.enable_grad(), side_paths(self._layers, state, one.scaling):
                losses = target_losses(*answer_logits(self.model, packed)).per_row()
                # The sum of the rows' means: what a row's gradient is does not depend on its neighbours.
                recorder.backward(losses, consume)
            losses = losses.detach().float() if losses.dtype != torch.float64 else losses.detach()
            zeros = losses.new_zeros(len(rows))
            nothing = Projected(zeros[:, None].expand(-1, len(one.directions)), zeros, zeros)
            each = [found.get(n, nothing) for n in self.names]
            norm_sq = torch.stack([p.norm_sq.to(device) for p in each], 1)
            grad_norm = torch.stack([p.grad_sq.to(device) for p in each], 1).sum(1).sqrt()
            for i, which in enumerate(one.directions):
                dots = torch.stack([p.dots[:, i].to(device) for p in each], 1)
                parts = contributions(self.metric, dots, norm_sq, self._norms[which].to(dots))
                out[which] = _Term(parts, grad_norm, losses)
        return out

    def _facts(self, journal: Journal) -> dict[str, Any]:
        """What the page says of the audit: provenance, null reference, and the share of each module."""
        import transformers

        scored = [r["score"] for r in journal.records.values() if r["score"] is not None]
        count = max(len(scored), 1)
        mean = float(np.mean(scored)) if scored else 0.0
        variance = float(np.var(scored)) if scored else 0.0
        added, crossed = journal.shares / count
        spread = (crossed - added * mean) / variance if variance > 0 else np.zeros_like(added)
        shapes = [weight_shape(self._layers[n]) for n in self.names]
        terms = 2 if self.terms == "both" else 1
        return {
            "settings": journal.settings,
            "digest": journal.digest,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "null_deviation": null_deviation(shapes, terms) if self.metric == "cosine" else None,
            "modules": {
                name: {"mean": float(m), "share": float(v)}
                for name, m, v in zip(self.names, added, spread, strict=True)
            },
        }


def _digest(row: Mapping[str, Any]) -> str:
    return row_hash({k: row[k] for k in ("input_ids", "labels")} if is_encoded(row) else row)


def _record(row: _Row, found: Mapping[str, float], reason: str) -> Record:
    values = {k: (v if math.isfinite(v) else None) for k, v in found.items()}
    if reason:
        values["score"] = None
    names = ("score", "danger", "safety", "loss", "grad_norm", "se")
    record: Record = {"row": row.number, "hash": row.digest, **{n: values.get(n) for n in names}, "reason": reason}
    record["n_answer_tokens"] = sum(label >= 0 for label in row.tokens.labels)
    if row.source is not None:
        record["source"] = row.source
    return record


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
