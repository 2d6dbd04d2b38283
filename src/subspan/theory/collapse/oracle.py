"""What predictions are measured against: the exact Gauss-Newton matrix of a layer, and products with its Hessian."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from subspan.linalg import Eigh, leading_eigh
from subspan.surgery import base_layer
from subspan.surgery.moments.stream import calibrating
from subspan.theory.collapse.estimators import gauss_newton_product
from subspan.theory.collapse.losses import checked_loss, root_product, values
from subspan.theory.collapse.passes import checked_layers
from subspan.theory.collapse.statistics import Forward, capture, default_forward, wide

DENSE = 4096  # the largest p q whose matrix is formed


class LayerRows:
    """A layer's Gauss-Newton matrix G (p q x p q) by the Jacobians of all samples: products, and G where it is small.

    Args:
        model: the classifier.
        loader: batches.
        layer: the module.
        loss: "mse" or "ce".
        forward_fn: (model, batch) -> (logits, labels).
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        layer: nn.Module,
        loss: str,
        forward_fn: Forward = default_forward,
    ) -> None:
        kind = checked_loss(loss)
        self.parts: list[tuple[Tensor, Tensor]] = []
        with calibrating(model):
            for batch in loader:
                logits, _, jacobians = capture(model, {"layer": layer}, batch, forward_fn)
                A, X = jacobians["layer"]
                self.parts.append((root_product(kind, logits, A), X))
        self.samples = sum(len(X) for _, X in self.parts)
        S, X = self.parts[0]
        self.shape = (S.shape[3], X.shape[2])
        self.like = X.new_zeros(1)

    def product(self, v: Float[Tensor, "pq *r"]) -> Float[Tensor, "pq *r"]:
        """G v for a vector, or a block of columns."""
        U = v.reshape(v.shape[0], -1).T.reshape(-1, *self.shape)
        total = sum((gauss_newton_product(S, X, U) for S, X in self.parts), torch.zeros_like(U)) / self.samples
        return total.flatten(1).T.reshape(v.shape)

    def dense(self) -> Float[Tensor, "pq pq"]:
        """G, in float64 where the device has it."""
        out: Tensor = torch.zeros((), device=self.like.device)
        for S, X in self.parts:
            rows = wide(torch.einsum("kbtp,btq->kbpq", S, X).flatten(0, 1).flatten(1))
            out = out + rows.T @ rows
        return out / self.samples


def exact_layer_ggn(
    model: nn.Module,
    loader: Iterable[Any],
    layer: str,
    k: int = 20,
    *,
    loss: str = "ce",
    method: str = "auto",
    forward_fn: Forward = default_forward,
    generator: torch.Generator | None = None,
) -> Eigh:
    """The k leading eigenpairs of a layer's Gauss-Newton matrix (p q x p q), without approximation; for small layers.

    It holds the Jacobians of all samples, K p numbers each, and for "dense" the matrix.

    Args:
        model: the classifier.
        loader: batches.
        layer: a layer's name.
        k: eigenpairs.
        loss: "mse" (the halved squared distance) or "ce".
        method: "dense" decomposes the matrix, "lanczos" (block Krylov) multiplies with it; "auto" forms it up to
            p q = 4096.
        forward_fn: (model, batch) -> (logits, labels).
        generator: of the start vectors.
    """
    if method not in ("auto", "dense", "lanczos"):
        raise ValueError(f"method must be 'auto', 'dense' or 'lanczos', got {method!r}")
    rows = LayerRows(model, loader, checked_layers(model, [layer])[layer], loss, forward_fn)
    n = rows.shape[0] * rows.shape[1]
    if method == "dense" or (method == "auto" and n <= DENSE):
        values, vectors = torch.linalg.eigh(rows.dense())
        return Eigh(values.flip(0)[:k].clamp(min=0), vectors.flip(1)[:, :k])  # rounding leaves zeros negative
    generator = generator or torch.Generator().manual_seed(0)
    return leading_eigh(rows.product, min(k, n), n=n, like=rows.like, generator=generator)


def hessian_product(
    model: nn.Module, loader: Iterable[Any], layer: nn.Module, loss: str, forward_fn: Forward = default_forward
) -> Callable[[Float[Tensor, " pq"]], Float[Tensor, " pq"]]:
    """v -> H v, H the Hessian of the mean loss in the layer's weight: two backward passes over the data per product.

    The weight is laid out as the layer stores it. Where the network is piecewise linear, H = G almost everywhere.
    """
    kind = checked_loss(loss)
    weight: nn.Parameter = base_layer(layer).weight  # pyright: ignore[reportAssignmentType]

    def product(v: Tensor) -> Tensor:
        total, samples = torch.zeros_like(weight), 0
        # the fused attention kernels have no second derivative
        with calibrating(model), sdpa_kernel(SDPBackend.MATH):
            weight.requires_grad_()
            for batch in loader:
                logits, labels = forward_fn(model, batch)
                (g,) = torch.autograd.grad(values(kind, logits, labels).sum(), weight, create_graph=True)
                total += torch.autograd.grad((g * v.view_as(g)).sum(), weight)[0]
                samples += len(labels)
        return total.flatten() / samples

    return product
