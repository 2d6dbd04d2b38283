"""Losses and metrics without a useful gradient. Each takes any leading dimensions, also that of the perturbations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def _labels(logits: Tensor, target: Tensor) -> Tensor:
    k = logits.shape[-1]
    if target.is_floating_point():
        raise TypeError(f"labels must be integers, got {target.dtype}")
    if target.numel() and (int(target.min()) < 0 or int(target.max()) >= k):
        raise ValueError(f"labels must lie between 0 and {k - 1}, got {int(target.min())} to {int(target.max())}")
    return target


def zero_one(logits: Tensor, target: Tensor) -> Tensor:
    """1 where the largest logit is not the label's, else 0; of equal logits the first counts.

    Args:
        logits: (..., \\*lead, K). target: (\\*lead) labels.
    """
    return (logits.argmax(-1) != _labels(logits, target)).to(logits.dtype)


def truncated_cross_entropy(logits: Tensor, target: Tensor, cap: float = 2.0) -> Tensor:
    """min(cross-entropy, cap) in nats: beyond the cap a sample costs no more, and pulls no more.

    Args:
        logits: (..., \\*lead, K). target: (\\*lead) labels.
    """
    labels = _labels(logits, target).expand(logits.shape[:-1])
    losses = cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none")
    return losses.view(labels.shape).clamp(max=cap)


def truncated_square(output: Tensor, target: Tensor, tau: float = 1.0) -> Tensor:
    """Sum over the last dimension of min(r^2, tau^2) / 2, r = output - target.

    Args:
        output: (..., \\*lead, K). target: (\\*lead, K).
    """
    if output.shape[output.ndim - target.ndim :] != target.shape:
        raise ValueError(f"the target's shape {tuple(target.shape)} is not that of the outputs, {tuple(output.shape)}")
    return (output - target).square().clamp(max=tau**2).sum(-1) / 2


for _loss in (zero_one, truncated_cross_entropy, truncated_square):
    _loss.vectorized = True  # what ``vectorized="auto"`` asks for before it tries


def metric_loss(
    metric: Callable[..., Any], *, scores: bool = False, greater_is_better: bool = True
) -> Callable[[Tensor, Tensor], float]:
    """A metric of scikit-learn's form, ``metric(y_true, y_pred) -> number``, as a loss of a whole batch.

    For ``OutputSpaceLoss(metric_loss(f1_score), credit="batch", pairs=128)``: a batch of B rows is one event of B K
    dimensions, and needs many pairs.

    Args:
        metric: gets numpy arrays.
        scores: hand over scores instead of predicted labels: the one output, the difference of two, or all K.
        greater_is_better: the loss is 1 - metric, else the metric itself.
    """

    def loss(output: Tensor, target: Tensor) -> float:
        z, y = output.cpu().numpy(), np.asarray(target.cpu())
        binary = z[:, -1] - z[:, 0] if z.shape[1] == 2 else z[:, 0] if z.shape[1] == 1 else None
        if scores:
            predicted = z if binary is None else binary
        else:
            predicted = z.argmax(1) if binary is None else (binary > 0).astype(np.int64)
        value = float(metric(y, predicted))
        return 1.0 - value if greater_is_better else value

    loss.vectorized = False
    return loss


def losses_of(answer: Any, device: torch.device) -> Tensor:
    """What a loss returned (tensor, array, list, number), detached and on the device."""
    if isinstance(answer, Tensor):
        return answer.detach().to(device)
    return torch.as_tensor(np.asarray(answer), device=device)
