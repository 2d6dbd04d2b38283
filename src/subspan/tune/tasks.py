"""The two tasks: how a row becomes tokens, how a batch becomes one loss per row, and how rows are scored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import DataError
from subspan.surgery.answers import (
    IGNORED,
    Batch,
    Losses,
    answer_batch,
    answer_logits,
    pad_token,
    padded,
    target_losses,
)

Row = dict[str, Any]

# Stand-ins while the chat template is rendered once; no text or template holds them.
_TEXT, _ANSWER = "\x02text\x03", "\x02answer\x03"


class _Frame(NamedTuple):
    """The prompt with a stand-in for the text, and what surrounds an answer."""

    prompt: str
    lead: str
    tail: str


class Scored(NamedTuple):
    """The losses of a batch and, where the labels are a closed set, which rows were labelled right (bool, B)."""

    losses: Losses
    correct: Tensor | None


def by_length(batch: Batch) -> Batch:
    """The rows of a padded batch from the shortest to the longest."""
    order = batch["attention_mask"].sum(1).argsort(stable=True)
    return {key: value[order] for key, value in batch.items()}


def trimmed(batch: Batch) -> Batch:
    """The batch without the columns that are padding in every row (what is left of a longer batch's width)."""
    used = batch["attention_mask"].any(0)
    return {key: value[:, used] if value.ndim == 2 else value for key, value in batch.items()}


@dataclass(frozen=True)
class Classification:
    """A sequence classifier: one label per row, read from a pooled position.

    ``among`` are the labels (by number) that these rows can have at all; the others' logits are minus infinity.
    """

    labels: Sequence[str]
    tokenizer: Any
    max_length: int
    among: Sequence[int] | None = None
    loss_shifts: bool = field(default=False, init=False)
    peft_task: str = field(default="SEQ_CLS", init=False)

    def encode(self, texts: Sequence[str], labels: Sequence[int]) -> list[Row]:
        ids = self.tokenizer(list(texts), truncation=True, max_length=self.max_length)["input_ids"]
        return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]

    def collate(self, rows: Sequence[Row]) -> Batch:
        ids = [r["input_ids"] for r in rows]
        return {
            "input_ids": padded(ids, pad_token(self.tokenizer), "right"),
            "attention_mask": padded([[1] * len(r) for r in ids], 0, "right"),
            "labels": torch.tensor([r["labels"] for r in rows], dtype=torch.long),
        }

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        return self.score(model, batch).losses

    def score(self, model: nn.Module, batch: Batch) -> Scored:
        logits = self.logits(model, batch)
        total = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        return Scored(Losses(total, torch.ones_like(total)), logits.argmax(-1) == batch["labels"])

    def logits(self, model: nn.Module, batch: Batch) -> Float[Tensor, "b labels"]:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        if self.among is None:
            return logits
        barred = torch.ones(len(self.labels), dtype=torch.bool, device=logits.device)
        barred[list(self.among)] = False
        return logits.masked_fill(barred, -torch.inf)


@dataclass(frozen=True)
class CausalLM:
    """A language model that answers a prompt. Prompts are masked: only the answer's tokens are targets.

    Rows are padded on the left, so that the answers line up at the end and logits are computed for those positions
    only. With ``labels`` (a closed set of answers) rows are scored by the likelihood of each.
    """

    labels: Sequence[str]
    tokenizer: Any
    max_length: int
    prompt: str = "{text}"
    system: str | None = None
    loss_shifts: bool = field(default=True, init=False)
    peft_task: str = field(default="CAUSAL_LM", init=False)

    def encode(self, texts: Sequence[str], answers: Sequence[int | str]) -> list[Row]:
        """Tokens of each row; an answer is the place of a label in ``labels``, or a free text."""
        words = [self.labels[a] if isinstance(a, int) else a for a in answers]
        prompts = self._ids([self._frame.prompt.replace(_TEXT, text.strip()) for text in texts], start=True)
        targets = self._targets(words)
        rows = [self._fit(*row) for row in zip(texts, prompts, targets, strict=True)]
        return [r | {"target": a} if isinstance(a, int) else r for r, a in zip(rows, answers, strict=True)]

    @cached_property
    def _frame(self) -> _Frame:
        """What the chat template writes around a text and around an answer, read off once."""
        tok = self.tokenizer
        user = self.prompt.replace("{text}", _TEXT)
        if not tok.chat_template:
            return _Frame(f"{self.system}\n\n{user}" if self.system else user, " ", "")
        turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        turns.append({"role": "user", "content": user})
        before = tok.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        whole = tok.apply_chat_template([*turns, {"role": "assistant", "content": _ANSWER}], tokenize=False)
        lead, found, tail = whole.removeprefix(before).partition(_ANSWER)
        if not (whole.startswith(before) and found and before.count(_TEXT) == 1):
            raise DataError("this model's chat template does not put the answer after its generation prompt")
        return _Frame(before, lead, tail)

    def _ids(self, texts: Sequence[str], start: bool = False) -> list[list[int]]:
        """Token ids; the template writes its own special tokens, a model without one gets its start token."""
        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        begin = self.tokenizer.bos_token_id
        return (
            [[begin, *row] for row in ids] if start and begin is not None and not self.tokenizer.chat_template else ids
        )

    def _targets(self, answers: Sequence[str]) -> list[list[int]]:
        """Token ids of answers with their end mark."""
        frame, end = self._frame, self.tokenizer.eos_token_id
        ids = self._ids([frame.lead + answer + frame.tail for answer in answers])
        # A template's white space behind the end mark is no target.
        return [[*(row[: row.index(end)] if end in row else row), end] for row in ids]

    def _fit(self, text: str, prompt: list[int], target: list[int]) -> Row:
        """Cut the end of the text, never the answer, until the row has at most ``max_length`` tokens."""
        over = len(prompt) + len(target) - self.max_length
        while over > 0:
            (words,) = self._ids([text])
            if len(words) <= over:
                raise DataError(
                    f"max_length={self.max_length} leaves no room for the text: the prompt and the answer alone take "
                    f"{len(prompt) + len(target) - len(words)} tokens"
                )
            text = self.tokenizer.decode(words[:-over])
            (prompt,) = self._ids([self._frame.prompt.replace(_TEXT, text.strip())], start=True)
            over = len(prompt) + len(target) - self.max_length
        return {"input_ids": prompt + target, "labels": [IGNORED] * len(prompt) + target}

    def collate(self, rows: Sequence[Row]) -> Batch:
        batch = answer_batch(rows, pad_token(self.tokenizer))
        if rows and "target" in rows[0]:
            batch["target"] = torch.tensor([r["target"] for r in rows], dtype=torch.long)
        return batch

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        return target_losses(*answer_logits(model, batch))

    def score(self, model: nn.Module, batch: Batch) -> Scored:
        """Losses, and whether the likeliest label given the prompt is the row's own.

        Labels are compared by their first token where that tells them apart, else by the likelihood of the whole label.
        """
        logits, target = answer_logits(model, batch)
        losses = target_losses(logits, target)
        if not self.labels:
            return Scored(losses, None)
        answers = self._targets(self.labels)
        heads = torch.tensor([a[0] for a in answers], device=target.device)
        if len(heads.unique()) == len(heads):
            # The first token tells the labels apart: it is judged where the true answer begins, on the same logits.
            first = (target != IGNORED).int().argmax(-1)
            at_first = logits[torch.arange(len(first), device=first.device), first]
            return Scored(losses, at_first[:, heads].argmax(-1) == batch["target"])
        likelihood = torch.stack([-self.losses(model, self._answered(batch, a)).total for a in answers], -1)
        return Scored(losses, likelihood.argmax(-1) == batch["target"])

    def _answered(self, batch: Batch, answer: list[int]) -> Batch:
        """The same prompts, followed by another answer."""
        device = batch["labels"].device
        asked = (batch["labels"] == IGNORED) & batch["attention_mask"].bool()
        prompts = [row[keep].tolist() for row, keep in zip(batch["input_ids"], asked, strict=True)]
        rows = [{"input_ids": p + answer, "labels": [IGNORED] * len(p) + answer} for p in prompts]
        return {k: v.to(device) for k, v in self.collate(rows).items()}
