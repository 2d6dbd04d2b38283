"""Sums over samples from which every prediction is made: streamed, mergeable, and kept in a file."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import one_hot

from subspan.errors import DataError, NonFinite
from subspan.files import replacing
from subspan.surgery.answers import on_device_of
from subspan.surgery.jacobians import LayerJacobian, logit_jacobians
from subspan.surgery.moments.stream import calibrating
from subspan.surgery.per_example import example_gradients
from subspan.theory.collapse.losses import Loss, curvature, residual, root_product, values

Forward = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


class Captured(NamedTuple):
    """One batch: logits, labels, and every layer's Jacobian and inputs."""

    logits: Float[Tensor, "b k"]
    labels: Int[Tensor, " b"]
    layers: Mapping[str, LayerJacobian]


def wide(x: Tensor) -> Tensor:
    """float64, where the device has it."""
    return x.to(torch.float64 if x.device.type != "mps" else torch.float32)


@dataclass
class Sums:
    """Sums over samples by name, and the number of batches they hold. float64 where the device has it."""

    values: dict[str, Tensor] = field(default_factory=dict)
    batches: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def add(self, more: Mapping[str, Tensor], batches: int = 1) -> None:
        """Take the sums of some more batches."""
        for name, value in more.items():
            held = self.values.get(name)
            if held is not None and held.shape != value.shape:
                raise DataError(
                    f"{name} has shape {tuple(value.shape)} in one batch and {tuple(held.shape)} in another: do all "
                    "batches have the same classes and layers?"
                )
            self.values[name] = wide(value) if held is None else held + value
        self.batches += batches

    def merge(self, other: "Sums") -> "Sums":
        """The sums over the samples of both."""
        both = Sums(dict(self.values), self.batches)
        both.add(other.values, other.batches)
        return both

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        with replacing(path) as part:
            save_file({k: v.contiguous() for k, v in self.values.items()}, part, {"batches": str(self.batches)})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "Sums":
        """What ``save`` wrote."""
        from safetensors import safe_open

        with safe_open(path, "pt", device=str(device)) as file:
            return cls({name: file.get_tensor(name) for name in file.keys()}, int(file.metadata()["batches"]))  # noqa: SIM118


def default_forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch: (inputs, labels), or a dict with "labels"; moved to where the model is."""
    if isinstance(batch, Mapping):
        inputs = on_device_of(model, batch)
        if "labels" not in inputs:
            raise DataError(f"a batch of {', '.join(inputs)} holds no labels; give forward_fn=")
        labels = inputs.pop("labels")
        out = model(**inputs)
    elif isinstance(batch, Tensor):
        raise DataError(
            "a batch is (inputs, labels) or a dict, not a tensor; is the loader a list of batches, [(x, y)]?"
        )
    else:
        device = next(model.parameters()).device
        *args, labels = (part.to(device) for part in batch)
        out = model(*args)
    return getattr(out, "logits", out), labels


def accumulate(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    loader: Iterable[Any],
    measure: Callable[[Captured], Mapping[str, Tensor]],
    *,
    forward_fn: Forward = default_forward,
    sums: Sums | None = None,
    after: Callable[[Sums], None] | None = None,
) -> Sums:
    """One pass over the data: what ``measure`` makes of each batch, summed.

    The model runs in evaluation mode with frozen parameters and is put back; no graph outlives its batch.

    Args:
        model: the classifier.
        layers: the layers to look at, by name.
        loader: batches, in the same order every time.
        measure: sums of one batch.
        forward_fn: (model, batch) -> (logits, labels).
        sums: an earlier part of this pass, whose batches are skipped.
        after: told the sums after each batch.
    """
    sums = Sums() if sums is None else sums
    with calibrating(model):
        for batch in islice(loader, sums.batches, None):
            sums.add(measure(capture(model, layers, batch, forward_fn)))
            if after is not None:
                after(sums)
    return sums


def capture(model: nn.Module, layers: Mapping[str, nn.Module], batch: Any, forward_fn: Forward) -> Captured:
    """One batch through the model, checked."""
    found: list[Tensor] = []

    def forward() -> Tensor:
        logits, labels = forward_fn(model, batch)
        found.append(labels)
        return logits

    logits, jacobians = logit_jacobians(forward, layers)
    labels, classes = found[0], logits.shape[1]
    if classes < 2:
        raise DataError(f"the model has {classes} logit; class means need a classifier of at least 2 classes")
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise DataError(
            f"labels must be one class number per example, {len(logits)} here; got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    labels = labels.long()
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        wrong = next(int(y) for y in labels if not 0 <= y < classes)
        raise DataError(f"label {wrong} is out of range: the model has {classes} logits, for labels 0 to {classes - 1}")
    for name, (A, X) in jacobians.items():
        for what, x in (("input", X), ("Jacobian", A)):
            if not bool(torch.isfinite(x).all()):
                raise NonFinite(f"the {what} of {name} holds NaN or infinity")
    if not bool(torch.isfinite(logits).all()):
        raise NonFinite("the logits hold NaN or infinity")
    return Captured(wide(logits), labels, jacobians)


def location_weights(A: Float[Tensor, "k b t p"]) -> Float[Tensor, "b t"]:
    """Equal weights on those locations of an example that its logits depend on: padding does not count."""
    seen = A.abs().amax((0, 3)) > 0
    seen = seen | ~seen.any(1, keepdim=True)  # an example on which no location acts counts whole
    return seen.to(A.dtype) / seen.sum(1, keepdim=True)


def sample_features(layer: LayerJacobian) -> Float[Tensor, "b q"]:
    """The mean over an example's locations of its inputs."""
    if layer.X.shape[1] == 1:
        return layer.X[:, 0]
    return (location_weights(layer.A)[:, None] @ layer.X)[:, 0]


def curvature_trace(S: Float[Tensor, "k b t p"], X: Float[Tensor, "b t q"]) -> Float[Tensor, ""]:
    """Sum over examples and rows of |sum_t S_t X_tᵀ|²: n times the trace of the layer's Gauss-Newton matrix."""
    if S.shape[2] == 1:
        return (torch.linalg.vector_norm(S, dim=(0, 2, 3)).square() * X[:, 0].square().sum(1)).sum()
    return sum((example_gradients(rows, X).norm_sq().sum() for rows in S), S.new_zeros(()))


def first_moments(batch: Captured, loss: Loss, weighting: str) -> dict[str, Tensor]:
    """The sums of pass 1: what class means, the gradient and the trace of each layer need."""
    logits, labels, layers = batch
    member = one_hot(labels, logits.shape[1]).to(logits.dtype)  # b x c
    R = curvature(loss, logits)
    weight = R.diagonal(dim1=1, dim2=2).sum(1) if weighting == "curvature" else torch.ones_like(logits[:, 0])
    out = {
        "count": member.sum(0),
        "weight": weight @ member,
        "curvature": torch.einsum("bc,bij->cij", member, R),
        "loss": values(loss, logits, labels).sum(),
        "logits": member.T @ logits,
    }
    slope = residual(loss, logits, labels)
    for name, layer in layers.items():
        A, X = layer
        classes, weighted, u = (x.to(A.dtype) for x in (member, member * weight[:, None], slope))
        h, whole = sample_features(layer), A[:, :, 0] if A.shape[2] == 1 else A.sum(2)
        pulled = torch.einsum("bk,kbtp->btp", u, A)
        out |= {
            f"{name}/features": classes.T @ h,
            f"{name}/squares": h.square().sum(),
            f"{name}/weighted": weighted.T @ h,
            f"{name}/jacobians": (weighted.T @ whole).transpose(0, 1),  # c x k x p
            f"{name}/gradient": pulled.flatten(0, 1).T @ X.flatten(0, 1),
            f"{name}/trace": curvature_trace(root_product(loss, logits, A), X),
            f"{name}/locations": X.new_tensor(X.shape[0] * X.shape[1]),
        }
    return out


@dataclass(frozen=True)
class LayerMeans:
    """What pass 1 says of one layer with weight W (p x q), K classes and n samples.

    Attributes:
        A: Abar_c, the weighted mean Jacobian of the logits (c x k x p), summed over locations.
        mu: weighted class means of the inputs (c x q).
        features: unweighted class means of the inputs (c x q).
        within: tr Sigma_W, the mean squared distance of inputs from their class mean.
        gradient: of the mean loss, p x q.
        trace: of the Gauss-Newton matrix.
        locations: per example.
    """

    A: Float[Tensor, "c k p"]
    mu: Float[Tensor, "c q"]
    features: Float[Tensor, "c q"]
    within: float
    gradient: Float[Tensor, "p q"]
    trace: float
    locations: float


@dataclass(frozen=True)
class ClassMeans:
    """What pass 1 says of the data, and of its layers.

    Attributes:
        count: samples of each class.
        R: mean curvature of the loss in each class (c x k x k).
        loss: the mean loss.
        logits: class means of the logits.
        layers: by name.
    """

    count: Float[Tensor, " c"]
    R: Float[Tensor, "c k k"]
    loss: float
    logits: Float[Tensor, "c k"]
    layers: Mapping[str, LayerMeans]

    @property
    def share(self) -> Float[Tensor, " c"]:
        """w_c: each class's share of the samples."""
        return self.count / self.count.sum()

    @classmethod
    def of(cls, sums: Sums, names: Iterable[str]) -> "ClassMeans":
        """Divide the sums of ``first_moments``.

        Raises:
            DataError: no data, or a class without a sample.
        """
        if "count" not in sums.values:
            raise DataError("there is no data: the loader gave no batch")
        count = sums["count"]
        if bool((count == 0).any()):
            raise DataError(f"class {int((count == 0).nonzero()[0])} has no sample; every class needs one")
        n = float(count.sum())
        # A class that is fitted to the last bit has no curvature: its means are then zero, and so are its eigenvalues.
        weight = sums["weight"].clamp(min=torch.finfo(count.dtype).tiny)[:, None]
        layers = {}
        for name in names:
            features = sums[f"{name}/features"] / count[:, None]
            spread = float(sums[f"{name}/squares"] - (count * features.square().sum(1)).sum())
            layers[name] = LayerMeans(
                A=sums[f"{name}/jacobians"] / weight[..., None],
                mu=sums[f"{name}/weighted"] / weight,
                features=features,
                within=max(0.0, spread) / n,  # rounding leaves a collapsed layer's slightly negative
                gradient=sums[f"{name}/gradient"] / n,
                trace=float(sums[f"{name}/trace"]) / n,
                locations=float(sums[f"{name}/locations"]) / n,
            )
        R, logits = sums["curvature"] / count[:, None, None], sums["logits"] / count[:, None]
        return cls(count, R, float(sums["loss"]) / n, logits, layers)
