"""The loop that trains the adapters of this room: AdamW over losses as they come, one at a time."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from subspan.errors import NonFinite


def adamw_steps(
    params: Sequence[nn.Parameter | Tensor],
    losses: Iterable[Tensor],
    steps: int,
    lr: float,
    *,
    weight_decay: float = 0.0,
    rate: Callable[[int], float] | None = None,
    max_grad_norm: float | None = None,
) -> Iterator[float]:
    """Descend on each of ``steps`` losses, and give its value; whoever asks for no further one stops the training.

    Args:
        params: what trains.
        losses: drawn one by one; back-propagated with gradients that earlier passes may have left for the same step.
        steps: how many.
        lr: of AdamW.
        weight_decay: of AdamW.
        rate: factor of ``lr`` at each step, from 0; constant if None.
        max_grad_norm: gradients are clipped to it; None clips nothing.

    Raises:
        NonFinite: a loss is no number any more.
    """
    optimizer = torch.optim.AdamW(params, lr, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate or (lambda step: 1.0))
    for step, loss in enumerate(islice(losses, steps), 1):
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFinite(f"the loss is {value} in step {step}: lower the rate, or look at the rows")
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(params, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield value
