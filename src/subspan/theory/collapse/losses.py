"""The two losses: the halved squared distance to the one-hot label, and cross-entropy. R is a loss's Hessian in z."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

Loss = Literal["mse", "ce"]


def checked_loss(loss: str) -> Loss:
    """Raises ``ValueError`` for any other name."""
    if loss not in ("mse", "ce"):
        raise ValueError(f"loss must be 'mse' (half the squared distance to the one-hot label) or 'ce', got {loss!r}")
    return loss  # pyright: ignore[reportReturnType]


def values(loss: Loss, logits: Float[Tensor, "b k"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """The loss of each example."""
    if loss == "ce":
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (logits - one_hot(labels, logits.shape[1])).square().sum(1) / 2


def residual(loss: Loss, logits: Float[Tensor, "b k"], labels: Int[Tensor, " b"]) -> Float[Tensor, "b k"]:
    """d loss / d logits."""
    predicted = logits.softmax(1) if loss == "ce" else logits
    return predicted - one_hot(labels, logits.shape[1])


def curvature(loss: Loss, logits: Float[Tensor, "b k"]) -> Float[Tensor, "b k k"]:
    """R: the identity, or diag(p) - p pᵀ."""
    if loss == "mse":
        return torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device).expand(len(logits), -1, -1)
    p = logits.softmax(1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def root_product(loss: Loss, logits: Float[Tensor, "b k"], A: Float[Tensor, "k b t p"]) -> Float[Tensor, "k b t p"]:
    """S = Bᵀ A with B Bᵀ = R, so that Sᵀ S = Aᵀ R A; B = diag(sqrt p) - p sqrt(p)ᵀ needs no matrix root."""
    if loss == "mse":
        return A
    p = logits.softmax(1).T[:, :, None, None].to(A.dtype)
    return p.sqrt() * (A - (p * A).sum(0))
