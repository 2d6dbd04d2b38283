"""The three stages: a buffer and a reinforcing adapter once per base model, and each user's run.

A small loop with AdamW, for one device. Where more is wanted, any trainer does: train the stages' adapters as ordinary
LoRA, with ``buffered`` around the user's and the reinforcing run.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subspan.errors import SafetyError
from subspan.safety.buffer_reinforce.attach import buffered
from subspan.safety.buffer_reinforce.roles import mark_role
from subspan.safety.descent import adamw_steps
from subspan.surgery.answers import IGNORED, Batch, Losses, answer_logits, on_device_of, target_losses

Row = Mapping[str, Any]
Collate = Callable[[Sequence[Row]], Batch]


@dataclass(frozen=True)
class Fit:
    """How a stage trains; the defaults are the authors' but for the number of steps, which they give in epochs."""

    steps: int = 100
    batch_size: int = 8
    lr: float = 1e-5
    weight_decay: float = 0.01
    warmup: float = 0.05
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"steps={self.steps}, batch_size={self.batch_size}: at least 1 of both is needed")


@dataclass(frozen=True)
class Gate:
    """When a buffer is done: it answers what is forbidden, and ordinary answers are as likely as they were.

    Measured on a held-out share of both kinds of rows. A forbidden row counts as answered where the first token of its
    answer outscores the token with which the base model opens.
    """

    answered: float = 0.95
    factor: float = 1.1
    slack: float = 0.05
    every: int = 5
    holdout: float = 0.2

    def allowed(self, base: Any) -> Any:
        """What an ordinary answer may cost that costs the base model ``base``, in nats a token."""
        return self.factor * base + self.slack

    def passes(self, reading: "Reading") -> bool:
        return reading.answered >= self.answered and reading.ordinary <= self.allowed(reading.base)

    def require(self, reading: "Reading", steps: int) -> None:
        """Raise ``SafetyError`` where the buffer does not pass after this many steps."""
        if not self.passes(reading):
            raise SafetyError(
                f"after {steps} steps the buffered model answers {100 * reading.answered:.0f} % of the forbidden "
                f"prompts (at least {100 * self.answered:.0f} % is wanted), and ordinary answers cost "
                f"{reading.ordinary:.3f} nats a token where the base model pays {reading.base:.3f} (at most "
                f"{self.factor:g} times that and {self.slack:g} more): take more steps or a higher rate for the first, "
                "more kept rows or a lower rate for the second"
            )


class Reading(NamedTuple):
    """What a gate looks at: share of the forbidden rows that are answered, loss of ordinary ones with and without."""

    answered: float
    ordinary: float
    base: float


@dataclass(frozen=True)
class StageReport:
    """Steps taken, the loss of each, and what the gate of a buffer last saw."""

    steps: int
    losses: tuple[float, ...]
    gate: Reading | None = None


def train_buffer(
    model: Any,
    forbidden: Sequence[Row],
    *,
    collate: Collate,
    keep: Sequence[Row] | None = None,
    fit: Fit = Fit(),
    gate: Gate = Gate(),
    adapter: str = "buffer",
    generator: torch.Generator | None = None,
) -> StageReport:
    """Train the adapter that complies, by plain cross-entropy on forbidden prompts with complying answers (1).

    Args:
        model: a peft model that holds a fresh LoRA called ``adapter``.
        forbidden: rows of forbidden prompts and complying answers.
        collate: rows to a batch of ``input_ids``, ``attention_mask`` and ``labels`` (-100 except on the answer), padded
            on the left.
        keep: ordinary rows, half of every batch, and the gate: training stops as soon as it passes. A buffer that also
            changes ordinary answers is what makes a user's adapter refuse them. None is the published recipe, which
            takes all steps.
        fit: steps and rates.
        gate: what must hold, with ``keep``.
        adapter: name of the adapter.
        generator: order of the rows, and what is held out.

    Raises:
        SafetyError: the gate has not passed after all steps.
        NonFinite: a loss that is not finite.
    """
    model.set_adapter(adapter)
    mark_role(model, adapter, "buffer")
    if keep is None:
        draws = shuffled_batches(forbidden, fit.batch_size, generator)
        return _report(descend(model, (answer_loss(model, collate, rows) for rows in draws), fit))
    forbidden, asked = _held_out(forbidden, gate.holdout, generator, "forbidden rows")
    keep, ordinary = _held_out(keep, gate.holdout, generator, "ordinary rows")
    half = max(fit.batch_size // 2, 1)
    pairs = zip(shuffled_batches(forbidden, half, generator), shuffled_batches(keep, half, generator), strict=True)
    losses = (answer_loss(model, collate, [*bad, *good]) for bad, good in pairs)
    return _gated(model, losses, fit, gate, collate, asked, ordinary)


def _gated(
    model: Any, losses: Iterator[Tensor], fit: Fit, gate: Gate, collate: Collate, asked: list[Row], ordinary: list[Row]
) -> StageReport:
    taken: list[float] = []
    reading = Reading(0.0, math.inf, 0.0)
    for loss in descend(model, losses, fit):
        taken.append(loss)
        if len(taken) % gate.every == 0 or len(taken) == fit.steps:
            reading = gate_reading(model, collate, asked, ordinary)
            if gate.passes(reading):
                break
    model.eval()
    gate.require(reading, len(taken))
    return StageReport(len(taken), tuple(taken), reading)


def gate_reading(model: Any, collate: Collate, asked: Sequence[Row], ordinary: Sequence[Row]) -> Reading:
    """Measure the active adapter against the base, on forbidden rows and on ordinary ones."""
    with model.disable_adapter():
        openings = first_tokens(model, collate, asked)[0].argmax(-1)
        base = mean_loss(model, collate, ordinary)
    logits, wanted = first_tokens(model, collate, asked)
    own = logits.gather(1, wanted[:, None]) > logits.gather(1, openings[:, None])
    # A row that the base already answers as the row does needs no buffer.
    answered = float((own[:, 0] | (wanted == openings)).double().mean())
    return Reading(answered, mean_loss(model, collate, ordinary), base)


def train_reinforce(
    model: Any,
    refusals: Sequence[Row],
    ordinary: Sequence[Row],
    *,
    collate: Collate,
    two_state: bool = False,
    fit: Fit = Fit(),
    adapter: str = "reinforce",
    buffer: str = "buffer",
    generator: torch.Generator | None = None,
) -> StageReport:
    """Train the adapter that refuses again with the buffer on, by cross-entropy on refusals and ordinary answers (2).

    Args:
        model: a peft model that holds the trained buffer and a fresh LoRA called ``adapter``.
        refusals: rows of forbidden prompts and refusals.
        ordinary: rows of ordinary prompts and answers, half of every batch: without them all would be refused.
        collate: see ``train_buffer``.
        two_state: every other step with the buffer off; three refusals to one ordinary row while it is on, one to three
            while it is off.
        fit: steps and rates.
        adapter: name of the adapter.
        buffer: name of the buffer.
        generator: order of the rows.
    """
    with buffered(model, buffer, adapter) as attached:
        size = fit.batch_size
        most, few = (size - size // 4, size // 4) if two_state else (size - size // 2, size // 2)
        if not few:
            raise ValueError(f"batch_size={size} leaves no row of one kind; take at least {4 if two_state else 2}")
        drawn = [shuffled_batches(rows, k, generator) for k in (most, few) for rows in (refusals, ordinary)]

        def losses() -> Iterator[Tensor]:
            while True:
                yield answer_loss(model, collate, [*next(drawn[0]), *next(drawn[3])])
                if two_state:
                    with attached.paused():
                        yield answer_loss(model, collate, [*next(drawn[2]), *next(drawn[1])])

        report = _report(descend(model, losses(), fit))
    mark_role(model, adapter, "reinforce")
    return report


def train_user(
    model: Any,
    rows: Sequence[Row],
    *,
    collate: Collate,
    keep: Sequence[Row] | None = None,
    fit: Fit = Fit(),
    adapter: str = "user",
    buffer: str | None = "buffer",
    generator: torch.Generator | None = None,
) -> StageReport:
    """A user's run by ordinary cross-entropy, with the buffer on (3) and off again afterwards (4).

    Args:
        model: a peft model that holds the buffer and a fresh LoRA called ``adapter``.
        rows: the user's rows.
        collate: see ``train_buffer``.
        keep: ordinary rows of the provider, one beside every four of the user's, seen with the buffer *off*
            (two-state). They count by what they have lost alone, see ``lost``.
        fit: steps and rates.
        adapter: name of the adapter.
        buffer: name of the buffer; None trains without one.
        generator: order of the rows.
    """
    if buffer is None:
        model.set_adapter(adapter)
        state: Any = nullcontext()
    else:
        state = buffered(model, buffer, adapter)
    with state:
        few = max(fit.batch_size // 4, 1) if keep else 0
        drawn, kept = (shuffled_batches(part, k, generator) for part, k in ((rows, fit.batch_size), (keep or [], few)))
        share = few / (fit.batch_size + few)

        def losses() -> Iterator[Tensor]:
            while True:
                loss = (1 - share) * answer_loss(model, collate, next(drawn))
                if few:
                    # Each state is gone through by itself: what the backward pass sees must not have been switched.
                    loss.backward()
                    with state.paused() if buffer else nullcontext():
                        yield loss.detach() + share * lost(model, collate, next(kept))
                else:
                    yield loss

        return _report(descend(model, losses(), fit))


# ------------------------------------------------------------------------------------------------------------ the loop


def shuffled_batches(rows: Sequence[Row], size: int, generator: torch.Generator | None) -> Iterator[list[Row]]:
    """Batches without end: pass after pass in random order, ``size`` rows each."""
    if not rows:
        raise ValueError("there are no rows to train on")
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(len(rows), generator=generator).tolist()
        yield [rows[i] for i in waiting[:size]]
        waiting = waiting[size:]


def _held_out(
    rows: Sequence[Row], share: float, generator: torch.Generator | None, what: str
) -> tuple[list[Row], list[Row]]:
    count = max(round(share * len(rows)), 1)
    if count >= len(rows):
        raise ValueError(f"{len(rows)} {what} are too few to hold out a share of {share:g} for the gate")
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [rows[i] for i in order[count:]], [rows[i] for i in order[:count]]


def row_losses(model: nn.Module, collate: Collate, rows: Sequence[Row]) -> Losses:
    return target_losses(*answer_logits(model, on_device_of(model, collate(rows))))


def answer_loss(model: nn.Module, collate: Collate, rows: Sequence[Row]) -> Tensor:
    """Mean over the rows of the mean cross-entropy of a row's answer tokens."""
    return row_losses(model, collate, rows).per_row().mean()


def lost(model: Any, collate: Collate, rows: Sequence[Row], gate: Gate = Gate()) -> Tensor:
    """Mean over ordinary rows of what their loss lies above that of the base model, and above the gate's allowance.

    Zero while they are as likely as they were. An optimiser that divides gradients by their size, as Adam does, would
    make full steps even of what is left to learn of rows that the base model answers already.
    """
    with torch.no_grad(), model.disable_adapter():
        base = row_losses(model, collate, rows).per_row()
    return (row_losses(model, collate, rows).per_row() - gate.allowed(base)).clamp(min=0).mean()


def descend(model: nn.Module, losses: Iterator[Tensor], fit: Fit) -> Iterator[float]:
    """AdamW over ``fit.steps`` losses, cosine after a short warm-up; gives each step's loss."""
    params = [p for p in model.parameters() if p.requires_grad]
    rising = round(fit.warmup * fit.steps)

    def rate(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(fit.steps - rising, 1)))

    model.train()
    yield from adamw_steps(
        params, losses, fit.steps, fit.lr, weight_decay=fit.weight_decay, rate=rate, max_grad_norm=fit.max_grad_norm
    )
    model.eval()


def _report(steps: Iterator[float]) -> StageReport:
    losses = tuple(steps)
    return StageReport(len(losses), losses)


@torch.no_grad()
def first_tokens(model: nn.Module, collate: Collate, rows: Sequence[Row], size: int = 32) -> tuple[Tensor, Tensor]:
    """Logits (n x v) where each row's answer begins, and its first token (n)."""
    training = model.training
    model.eval()
    logits, wanted = [], []
    for at in range(0, len(rows), size):
        scores, target = answer_logits(model, on_device_of(model, collate(rows[at : at + size])))
        place = (target != IGNORED).int().argmax(-1)
        every = torch.arange(len(place), device=place.device)
        logits.append(scores[every, place])
        wanted.append(target[every, place])
    model.train(training)
    return torch.cat(logits), torch.cat(wanted)


@torch.no_grad()
def mean_loss(model: nn.Module, collate: Collate, rows: Sequence[Row], size: int = 32) -> float:
    """Mean over rows of the mean cross-entropy of their answer tokens, in nats."""
    training = model.training
    model.eval()
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    total = sum(float(answer_loss(model, collate, part)) * len(part) for part in parts)
    model.train(training)
    return total / len(rows)
