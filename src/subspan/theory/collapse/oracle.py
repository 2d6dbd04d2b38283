"""What predictions are measured against: the exact Gauss-Newton matrix of a layer, and products with its Hessian."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from subspan.errors import DataError
from subspan.linalg import Eigh, Subspace, lanczos, leading_eigh
from subspan.surgery import base_layer
from subspan.surgery.moments.stream import calibrating
from subspan.theory.collapse.estimators import gauss_newton_product
from subspan.theory.collapse.losses import checked_loss, root_product, values
from subspan.theory.collapse.passes import checked_layers
from subspan.theory.collapse.report import LayerSpectrum, SpectrumReport
from subspan.theory.collapse.statistics import Forward, capture, default_forward, wide

DENSE = 4096  # the largest p q whose matrix is formed


@dataclass(frozen=True)
class LayerRows:
    """A layer's Gauss-Newton matrix G (p q x p q) by S and X of all samples: products, and G where it is small."""

    parts: list[tuple[Tensor, Tensor]]  # S (k b t p) and X (b t q) of each batch

    @property
    def shape(self) -> tuple[int, int]:
        """(p, q)."""
        S, X = self.parts[0]
        return S.shape[3], X.shape[2]

    @property
    def like(self) -> Tensor:
        """A number of the dtype and device that ``product`` takes."""
        return self.parts[0][1].new_zeros(1)

    def product(self, v: Float[Tensor, "pq *r"]) -> Float[Tensor, "pq *r"]:
        """G v for a vector, or a block of columns."""
        U = v.reshape(v.shape[0], -1).T.reshape(-1, *self.shape)
        total = sum((gauss_newton_product(S, X, U) for S, X in self.parts), torch.zeros_like(U))
        return (total / sum(len(X) for _, X in self.parts)).flatten(1).T.reshape(v.shape)

    def dense(self) -> Float[Tensor, "pq pq"]:
        """G, in float64 where the device has it."""
        out = wide(self.like)
        for S, X in self.parts:
            rows = wide(torch.einsum("kbtp,btq->kbpq", S, X).flatten(0, 1).flatten(1))
            out = out + rows.T @ rows
        return out / sum(len(X) for _, X in self.parts)


def layer_rows(
    model: nn.Module,
    loader: Iterable[Any],
    layers: Sequence[str],
    *,
    loss: str = "ce",
    forward_fn: Forward = default_forward,
) -> dict[str, LayerRows]:
    """Hold the Jacobians of all samples (K p + q numbers per location) for several layers, from one pass.

    Args:
        model: the classifier.
        loader: batches.
        layers: names.
        loss: "mse" (the halved squared distance) or "ce".
        forward_fn: (model, batch) -> (logits, labels).
    """
    kind, modules = checked_loss(loss), checked_layers(model, layers)
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in modules}
    with calibrating(model):
        for batch in loader:
            logits, _, jacobians = capture(model, modules, batch, forward_fn)
            for name, (A, X) in jacobians.items():
                S = root_product(kind, logits, A)
                parts[name].append((S.transpose(0, 1).contiguous().transpose(0, 1), X))  # as products read it
    if not all(parts.values()):
        raise DataError("there is no data: the loader gave no batch")
    return {name: LayerRows(held) for name, held in parts.items()}


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
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    rows = layer_rows(model, loader, [layer], loss=loss, forward_fn=forward_fn)[layer]
    n = rows.shape[0] * rows.shape[1]
    if method == "dense" or (method == "auto" and n <= DENSE):
        values, vectors = torch.linalg.eigh(rows.dense())
        return Eigh(values.flip(0)[:k].clamp(min=0), vectors.flip(1)[:, :k])  # rounding leaves zeros negative
    generator = generator or torch.Generator().manual_seed(0)
    return leading_eigh(rows.product, min(k, n), n=n, like=rows.like, generator=generator)


class MeasuredSpectrum(NamedTuple):
    """Lanczos on a layer's Gauss-Newton matrix beside a prediction of it.

    Attributes:
        eigenvalues: Ritz values, descending: the first few are eigenvalues, the last stand for the bulk.
        overlap: mean squared cosine of the angles between the leading eigenspaces, measured and predicted, of as many
            dimensions as there are classes (nan where nothing was predicted).
    """

    eigenvalues: Float[Tensor, " s"]
    overlap: float


def measured_spectra(
    model: nn.Module,
    loader: Iterable[Any],
    report: SpectrumReport,
    layers: Sequence[str],
    *,
    steps: int = 20,
    held: int = 2**27,
    forward_fn: Forward = default_forward,
) -> Iterator[tuple[str, MeasuredSpectrum]]:
    """Measure what ``report`` predicts, layer by layer, by ``steps`` products with the exact matrix of each.

    Args:
        model: the classifier.
        loader: the batches of the report.
        report: of ``collapse_spectra``.
        layers: names.
        steps: of Lanczos.
        held: numbers of Jacobians that may be held at once; more layers fit into one pass over the data.
        forward_fn: (model, batch) -> (logits, labels).
    """
    group: list[str] = []
    room = held
    for name in [*layers, None]:
        size = math.inf if name is None else report[name].jacobian_size * sum(report.counts)
        if group and size > room:
            rows = layer_rows(model, loader, group, loss=report.loss, forward_fn=forward_fn)
            for member in group:
                yield member, _measured(rows.pop(member), report[member], steps)
            group, room = [], held
        if name is not None:
            group.append(name)
            room -= int(size)


def _measured(rows: LayerRows, layer: LayerSpectrum, steps: int) -> MeasuredSpectrum:
    size = rows.shape[0] * rows.shape[1]
    start = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(rows.like)
    krylov = lanczos(rows.product, start, min(steps, size))
    values, vectors = krylov.ritz()
    k = min(layer.classes, len(values), int((layer.eigenvalues > 0).sum()))
    if not k:
        return MeasuredSpectrum(values.flip(0).clamp(min=0), math.nan)
    exact = Subspace.span(krylov.Q @ vectors.flip(1)[:, :k])
    predicted = torch.stack([layer.eigenvector(j).flatten() for j in range(k)], 1)
    # G is positive semidefinite: what is below zero is rounding
    return MeasuredSpectrum(values.flip(0).clamp(min=0), float(exact.overlap(Subspace.span(predicted.to(exact.Q)))))


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
        if not samples:
            raise DataError("there is no data: the loader gave no batch")
        return total.flatten() / samples

    return product
