"""A causal language model's loss on the answers of a batch: left padding, and logits for answer positions only."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Batch = dict[str, Tensor]

IGNORED = -100


class Losses(NamedTuple):
    """Summed negative log-likelihood of each row, and the number of targets it sums over (both of length B)."""

    total: Float[Tensor, " b"]
    count: Float[Tensor, " b"]

    def mean(self) -> Float[Tensor, ""]:
        """Mean over all targets of the batch (token mean)."""
        return self.total.sum() / self.count.sum().clamp(min=1)

    def per_row(self) -> Float[Tensor, " b"]:
        """Mean over each row's own targets: it depends on no other row of the batch."""
        return self.total / self.count.clamp(min=1)


def padded(rows: Sequence[Sequence[int]], value: int, side: str) -> Int[Tensor, "b t"]:
    """Rows of tokens as one matrix, filled up with ``value`` on the ``side`` left or right."""
    # At least one column, so that an empty (Poisson) batch still has two dimensions.
    width = max((len(r) for r in rows), default=1)
    out = torch.full((len(rows), width), value, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        out[i, at] = torch.tensor(row, dtype=torch.long)
    return out


def pad_token(tokenizer: Any) -> int:
    """The padding token, or the end mark of a tokenizer that has none."""
    pad = tokenizer.pad_token_id
    return int(pad if pad is not None else tokenizer.eos_token_id)


def answer_batch(rows: Sequence[Mapping[str, Any]], pad: int) -> Batch:
    """Rows of ``input_ids`` and ``labels`` padded on the left, so that the answers line up at the end."""
    ids = [r["input_ids"] for r in rows]
    return {
        "input_ids": padded(ids, pad, "left"),
        "attention_mask": padded([[1] * len(r) for r in ids], 0, "left"),
        "labels": padded([r["labels"] for r in rows], IGNORED, "left"),
    }


def on_device_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with its tensors where the model's first parameter is."""
    device = next(model.parameters()).device
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def answer_logits(model: nn.Module, batch: Batch) -> tuple[Float[Tensor, "b t v"], Int[Tensor, "b t"]]:
    """Logits (float32 or better) and targets at the positions from the first target of any row to the end."""
    labels, mask = batch["labels"], batch["attention_mask"]
    used = (labels != IGNORED).any(0).nonzero()
    tail = labels.shape[1] - int(used[0]) if len(used) else 1
    extra: dict[str, Any] = {}
    if _accepts(model, "position_ids"):  # left padding must not count as positions
        extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if _accepts(model, "logits_to_keep"):
        extra["logits_to_keep"] = tail + 1
    if _accepts(model, "use_cache"):
        extra["use_cache"] = False
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, **extra).logits
    exact = torch.promote_types(logits.dtype, torch.float32)
    return logits[:, -(tail + 1) : -1].to(exact), labels[:, -tail:]


def target_losses(logits: Float[Tensor, "b t v"], target: Int[Tensor, "b t"]) -> Losses:
    """Cross-entropy of each row, summed over its targets."""
    flat = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")
    return Losses(flat.view(target.shape).sum(-1), (target != IGNORED).sum(-1).to(flat.dtype))


def _accepts(model: nn.Module, name: str) -> bool:
    inner: Any = model
    if hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    return name in inspect.signature(inner.forward).parameters
