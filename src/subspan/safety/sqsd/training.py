"""Directions from data: a short LoRA training on rows (SFT), or on pairs of a preferred and a rejected answer (DPO)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from subspan.errors import DataError
from subspan.linalg import LowRank
from subspan.safety.descent import adamw_steps
from subspan.safety.sqsd.direction import Direction, fresh_state, on_device
from subspan.safety.sqsd.tokens import Tokens, row_tokens
from subspan.surgery import find_targets, plain_layers, side_paths, undisturbed
from subspan.surgery.answers import Losses, answer_batch, answer_logits, on_device_of, pad_token, target_losses

Pair = tuple[Tokens, Tokens]


def dpo_loss(
    chosen: Float[Tensor, " b"],
    rejected: Float[Tensor, " b"],
    chosen_base: Float[Tensor, " b"],
    rejected_base: Float[Tensor, " b"],
    beta: float = 0.1,
) -> Float[Tensor, ""]:
    """-log sigmoid(beta [(log pi(y+) - log pi_0(y+)) - (log pi(y-) - log pi_0(y-))]), mean over pairs.  # (3.8)

    The arguments are log-probabilities summed over the answer's tokens. Source: Rafailov et al. 2023.
    """
    return -logsigmoid(beta * ((chosen - chosen_base) - (rejected - rejected_base))).mean()


def row_losses(model: nn.Module, tokenizer: Any, rows: Sequence[Tokens]) -> Losses:
    """Losses of the answers of a few rows, on the model's device."""
    pad = 0 if tokenizer is None else pad_token(tokenizer)
    batch = answer_batch([{"input_ids": r.input_ids, "labels": r.labels} for r in rows], pad)
    return target_losses(*answer_logits(model, on_device_of(model, batch)))


def encoded_rows(
    tokenizer: Any, rows: Iterable[Mapping[str, Any]], max_length: int, answer: str | None = None
) -> list[Tokens]:
    """Tokens of the rows that have an answer, in the column ``answer`` if it is named."""
    prompt = None if answer is None else "prompt"
    found = [row_tokens(row, i, tokenizer, max_length, prompt=prompt, answer=answer) for i, row in enumerate(rows, 1)]
    return [row for row in found if not row.reason]


def _batches(order: list[int], size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Batches without end, shuffled anew where the rest is smaller than one; all there is where that is less."""
    at = 0
    while True:
        if at + size > len(order):
            order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
            at = 0
        yield order[at : at + size]
        at += size


def train_direction(
    model: nn.Module,
    tokenizer: Any,
    rows: Iterable[Mapping[str, Any]],
    *,
    objective: Literal["sft", "dpo"] = "sft",
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = "all-linear",
    steps: int = 50,
    batch_size: int = 8,
    lr: float = 1e-3,
    beta: float = 0.1,
    stop_margin: float | None = 0.05,
    max_length: int = 1024,
    start: Direction | None = None,
    seed: int = 0,
) -> Direction:
    """Train LoRA factors beside a model's layers with AdamW, and give them as a direction; the model stays as it was.

    Args:
        model: a causal language model, plain or peft.
        tokenizer: its tokenizer; None where rows are tokens already.
        rows: as ``SafetyRisk.score`` takes them; for "dpo" rows with ``prompt``, ``chosen`` and ``rejected``.
        objective: "sft" on the answers, or "dpo" on pairs, where the base is the same model without the factors.
        rank: r of the factors.
        alpha: the scaling is alpha / r.
        targets: the layers, as peft names them.
        steps: at most so many steps.
        batch_size: rows (pairs) of a step.
        lr: of AdamW on the factors, constant. The paper trains thousands of steps at 5e-6.
        beta: of "dpo".
        stop_margin: stop when the loss on held-out rows (a tenth of them) falls below it, looked at every five steps;
            a direction driven on far beyond refuses, or complies with, everything. None never stops.
        max_length: tokens of a row.
        start: factors to train on from, in place of a fresh adapter.
        seed: of the fresh adapter and the order of the rows.

    Raises:
        DataError: fewer than two rows with an answer, or a column missing.
        ValueError: an option out of its range.
        NonFinite: the loss is no number any more.
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps={steps}, batch_size={batch_size}: at least 1 of both is needed")
    items: list[Any]
    rows = list(rows)
    if objective == "dpo":
        sides = [encoded_rows(tokenizer, rows, max_length, side) for side in ("chosen", "rejected")]
        if len(sides[0]) != len(sides[1]) or len(sides[0]) != len(rows):
            raise DataError("a pair has an empty answer; drop it: dpo needs both a chosen and a rejected one")
        items = list(zip(*sides, strict=True))
    elif objective == "sft":
        items = encoded_rows(tokenizer, rows, max_length)
    else:
        raise ValueError(f"objective must be sft or dpo, got {objective!r}")
    if len(items) < 2:
        raise DataError(
            f"a direction, or an initial state, needs at least two rows with an answer, got {len(items)}; state 'zero' "
            "does without an initial state"
        )
    layers = plain_layers(model)
    wanted = {n.removeprefix("base_model.model.").replace(".base_layer", "") for n in find_targets(model, targets)}
    chosen = {n: layer for n, layer in layers.items() if n in wanted}
    state = start or fresh_state(chosen, rank, alpha, seed)
    factors = {
        name: LowRank(z.A.clone().requires_grad_(), z.B.clone().requires_grad_())
        for name, z in on_device(state.factors, chosen).items()
    }
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(items), generator=generator).tolist()
    held = order[: max(1, len(order) // 10)] if stop_margin is not None else []
    draws = _batches(order[len(held) :], batch_size, generator)

    def log_likelihoods(part: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        both = -row_losses(model, tokenizer, [p[0] for p in part] + [p[1] for p in part]).total
        return both[: len(part)], both[len(part) :]

    with undisturbed(model):
        base: dict[int, Tensor] = {}
        if objective == "dpo":
            with torch.no_grad():
                for i in order:
                    base[i] = torch.cat(log_likelihoods([items[i]]))

        def loss_of(indices: Sequence[int]) -> Tensor:
            part = [items[i] for i in indices]
            if objective == "sft":
                return row_losses(model, tokenizer, part).per_row().mean()
            reference = torch.stack([base[i] for i in indices])
            return dpo_loss(*log_likelihoods(part), reference[:, 0], reference[:, 1], beta)

        with side_paths(layers, factors, state.scaling), torch.enable_grad():
            params = [p for z in factors.values() for p in (z.A, z.B)]
            for step, _ in enumerate(adamw_steps(params, map(loss_of, draws), steps, lr), 1):
                if stop_margin is not None and step % 5 == 0:
                    with torch.no_grad():
                        if float(loss_of(held)) < stop_margin:
                            break
    trained = {n: LowRank(z.A.detach().float(), z.B.detach().float()) for n, z in factors.items()}
    return Direction(trained, {n: state.scaling[n] for n in trained}, f"{objective} on {len(items)} rows")
