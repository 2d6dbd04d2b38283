"""From a model and data to a report: one pass for class means, one to project G on them, one for residuals."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subspan.linalg import Eigh
from subspan.surgery import base_fingerprint, weight_matrix
from subspan.theory.collapse.estimators import (
    CLASS_ONLY,
    COMPRESS,
    Directions,
    Frame,
    Products,
    class_products,
    gauss_newton_product,
    gram_spectrum,
    paired,
    predicted,
    rayleigh,
    ritz_frame,
    split,
    squares,
)
from subspan.theory.collapse.losses import Loss, checked_loss, root_product
from subspan.theory.collapse.metrics import CollapseMetrics, between_eigen, nc2, nc3, nc3_dual, within_between_ratio
from subspan.theory.collapse.passes import Passes, Progress, checked_layers
from subspan.theory.collapse.report import (
    GradientReport,
    LayerSpectrum,
    NetworkSpectrum,
    SpectrumReport,
    WeightSpectrum,
)
from subspan.theory.collapse.statistics import (
    Captured,
    ClassMeans,
    Forward,
    LayerMeans,
    Sums,
    default_forward,
    first_moments,
    sample_features,
    wide,
)


def collapse_spectra(
    model: nn.Module,
    loader: Iterable[Any],
    layers: Sequence[str] | None = None,
    *,
    loss: str = "ce",
    estimator: str = "ritz",
    weighting: str = "curvature",
    basis: str = "paired",
    residuals: int = 5,
    device: torch.device | str | None = None,
    forward_fn: Forward = default_forward,
    state: str | Path | None = None,
    save_every: float = 30.0,
    progress: Progress | None = None,
) -> SpectrumReport:
    """The leading eigenvalues and eigenvectors of each layer's Gauss-Newton matrix from class means (Garrod, Keating).

    "means" is the paper's prediction: exact at neural collapse, without a bound before it. "ritz" keeps the paper's
    eigenvectors and measures the eigenvalues on them: never above the true ones, and of second-order accuracy.
    "between" takes the means of the products; never above either, at K² p q numbers of memory.

    For K > 20 classes "ritz" projects on the 4K leading directions of the prediction; for K > 200 each class has one
    direction (``basis="class"``). Memory: K p numbers per location and example of a batch, for all layers at once.
    Locations of a convolution or of a token-wise layer are averaged into the directions, and summed in G.

    Args:
        model: a classifier; it runs in evaluation mode and is left as it was.
        loader: batches, read once per pass ("means" 1, others 2, residuals 1 more), in the same order each time.
        layers: names of Linear, Conv1D or Conv2d layers; all of them by default, but those that share a weight.
        loss: "mse", half the squared distance to the one-hot label, or "ce".
        estimator: see above.
        weighting: of samples within a class: by "curvature" (tr R, which matters for cross-entropy) or "uniform".
        basis: "paired" (K² directions), "outer" (K³, for a few classes: hidden ReLU layers gain), "class" (K).
        residuals: residuals of this many leading eigenpairs (0 saves a pass).
        device: where to run; by default where the model is.
        forward_fn: (model, batch) -> (logits, labels); by default batches are (inputs, labels) or dicts with "labels".
        state: a folder for running sums: called again with the same arguments, it goes on after a kill.
        save_every: seconds between two writes of those.
        progress: called with the batches done and their number over all passes (None if the loader has no length).

    Raises:
        TargetError: unknown layers, or layers without a weight matrix of their own.
        DataError: no data, labels out of range, a class without a sample.
        NonFinite: NaN or infinity at a layer, which is named.
        ConfigError: ``state`` holds sums of other settings.
        ValueError: options that cannot work.
    """
    kind: Loss = checked_loss(loss)
    for name, value, known in (
        ("estimator", estimator, ("ritz", "means", "between")),
        ("weighting", weighting, ("curvature", "uniform")),
        ("basis", basis, ("paired", "outer", "class")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if residuals < 0:
        raise ValueError(f"residuals must be at least 0, got {residuals}")
    count = 1 + (estimator != "means") + (residuals > 0)
    if count > 1 and iter(loader) is loader:
        raise ValueError(f"the loader is read {count} times, but an iterator gives its batches once; give a list")
    if device is not None:
        nn.Module.to(model, device)
    modules = checked_layers(model, layers)
    settings: dict[str, Any] = {"loss": loss, "estimator": estimator, "weighting": weighting, "basis": basis}
    settings |= {"layers": list(modules), "residuals": residuals}
    settings |= {"model": base_fingerprint(model)} if state is not None else {}
    run = Passes(
        model, modules, loader, forward_fn, count, state=None if state is None else Path(state),
        settings=settings, save_every=save_every, progress=progress,
    )  # fmt: skip
    means = ClassMeans.of(run("means", partial(first_moments, loss=kind, weighting=weighting)), modules)
    plan = _Plan.of(means, basis, estimator, 1e-12 if next(model.parameters()).dtype == torch.float64 else 1e-8)
    second = Sums() if estimator == "means" else run("projections", partial(plan.measure, loss=kind))
    found = {name: plan.spectrum(name, second) for name in modules}
    images = Sums()
    if residuals > 0:
        vectors = {name: _leading_vectors(*pairs, residuals) for name, pairs in found.items()}
        images = run("residuals", partial(_images, vectors=vectors, loss=kind))
    behind = _features_behind(means)
    out = {}
    for name, (directions, pairs) in found.items():
        weight, layer, frame = wide(weight_matrix(modules[name])), means.layers[name], plan.frames[name]
        out[name] = LayerSpectrum(
            name=name,
            shape=(weight.shape[0], weight.shape[1]),
            estimator=estimator,
            basis=plan.basis,
            eigenvalues=_padded(pairs.values, plan.kept(directions)),
            eigenvalues_means=_prediction(means, layer)[1].values,
            trace=layer.trace,
            residuals=_residuals(directions, pairs, images.values.get(f"{name}/images"), float(means.count.sum())),
            collapse=_collapse(layer, float(means.count.sum()), second, name, weight, behind.get(name)),
            gradient=GradientReport.of(layer.gradient, frame, paired(layer.A, layer.mu), len(means.count)),
            weights=WeightSpectrum.of(weight, layer.features),
            shares=_shares(second[f"{name}/products"], means, layer.trace) if estimator == "between" else {},
            classes=len(means.count),
            locations=layer.locations,
            directions=directions,
            coefficients=pairs.vectors,
            span=frame,
        )
    return SpectrumReport(
        layers=out,
        network=plan.together(second),
        loss=loss,
        mean_loss=means.loss,
        counts=tuple(round(c) for c in means.count.tolist()),
        weighting=weighting,
        notes=_notes(means, estimator),
    )


def _limit(classes: int) -> int | None:
    """How many eigenvalues are kept: all, or for many classes the leading ones."""
    return None if classes <= COMPRESS else 4 * classes


def _prediction(means: ClassMeans, layer: LayerMeans) -> tuple[Directions, Eigh]:
    directions = predicted(means, layer)
    return directions, gram_spectrum(directions, _limit(len(means.count)))


@dataclass(frozen=True)
class _Plan:
    """What pass 1 asks of pass 2: to project on a frame per layer, and on one for all layers."""

    means: ClassMeans
    basis: str
    estimator: str
    frames: Mapping[str, Frame]
    network: Frame | None
    whitened: Mapping[str, Tensor]  # Sigma_B^+ U, U the eigenvectors of Sigma_B

    @classmethod
    def of(cls, means: ClassMeans, basis: str, estimator: str, cut: float) -> "_Plan":
        classes = len(means.count)
        if basis == "outer" and classes > COMPRESS:
            raise ValueError(f"basis='outer' has K³ directions, too many for {classes} classes; use 'paired'")
        if classes > CLASS_ONLY:
            basis = "class"
        frames = {name: ritz_frame(means, layer, basis, cut) for name, layer in means.layers.items()}
        network = None
        if basis != "paired" or classes <= COMPRESS:  # the index set is the same in every layer
            first, *rest = (frame.directions for frame in frames.values())
            network = Frame.of(first, cut, sum((d.gram() for d in rest), first.gram()))
        eigen = {name: between_eigen(layer.features) for name, layer in means.layers.items()}
        return cls(means, basis, estimator, frames, network, {n: u / values for n, (values, u) in eigen.items()})

    def kept(self, directions: Directions | Products) -> int:
        return min(len(directions), _limit(len(self.means.count)) or len(directions))

    def measure(self, batch: Captured, loss: Loss) -> dict[str, Tensor]:
        """The sums of pass 2."""
        out: dict[str, Tensor] = {}
        total: Tensor | None = None
        for name, layer in batch.layers.items():
            S = root_product(loss, batch.logits, layer.A)
            if self.estimator == "between":
                out[f"{name}/products"] = class_products(S, layer.X, batch.labels, batch.logits.shape[1])
            else:
                frame = self.frames[name]
                raw = frame.directions.overlaps(S, layer.X)
                out[f"{name}/Z"] = squares(frame.rotate(raw))
                total = raw if total is None else total.add_(raw)
            h = sample_features(layer)
            off = h - self.means.layers[name].features.to(h.dtype)[batch.labels]
            out[f"{name}/within"] = off.square().sum()
            out[f"{name}/whitened"] = off.T @ (off @ self.whitened[name].to(h.dtype))  # n Sigma_W Sigma_B^+ U
        if self.network is not None and total is not None:
            out["network/Z"] = squares(self.network.rotate(total))
        return out

    def spectrum(self, name: str, second: Sums) -> tuple[Directions | Products, Eigh]:
        """Directions, eigenvalues, and the eigenvectors' coefficients over them."""
        means = self.means
        if self.estimator == "means":
            return _prediction(means, means.layers[name])
        if self.estimator == "ritz":
            frame = self.frames[name]
            return frame.directions, rayleigh(second[f"{name}/Z"] / means.count.sum(), frame)
        products = second[f"{name}/products"] / means.count[:, None, None, None]
        stack = Products((means.share.sqrt()[:, None, None, None] * products).flatten(0, 1))
        return stack, gram_spectrum(stack)

    def together(self, second: Sums) -> NetworkSpectrum | None:
        if self.network is None:
            return None
        first, *rest = (predicted(self.means, layer).gram() for layer in self.means.layers.values())
        theory = torch.linalg.eigvalsh(sum(rest, first)).flip(0).clamp(min=0)  # rounding leaves zeros negative
        if "network/Z" not in second.values:
            return NetworkSpectrum(None, theory)
        return NetworkSpectrum(rayleigh(second["network/Z"] / self.means.count.sum(), self.network).values, theory)


def _leading_vectors(directions: Directions | Products, pairs: Eigh, count: int) -> Tensor:
    """The first unit eigenvectors (j x p x q); a zero matrix where there is none."""
    positive = max(1, min(count, int((pairs.values > 0).sum())))
    coefficients = pairs.vectors if pairs.vectors.shape[1] else pairs.vectors.new_zeros(len(directions), 1)
    return torch.stack([directions.combine(column) for column in coefficients[:, :positive].T])


def _images(batch: Captured, vectors: Mapping[str, Tensor], loss: Loss) -> dict[str, Tensor]:
    """The sums of pass 3: n G u_j."""
    out = {}
    for name, (A, X) in batch.layers.items():
        S = root_product(loss, batch.logits, A)
        out[f"{name}/images"] = gauss_newton_product(S, X, vectors[name].to(X.dtype))
    return out


def _residuals(directions: Directions | Products, pairs: Eigh, images: Tensor | None, n: float) -> Tensor:
    positive = pairs.values[pairs.values > 0]
    found = [
        torch.linalg.norm(image / n - theta * directions.combine(pairs.vectors[:, j])) / theta
        for j, (theta, image) in enumerate(zip(positive, () if images is None else images, strict=False))
    ]
    return torch.stack(found) if found else positive[:0]


def _features_behind(means: ClassMeans) -> dict[str, Tensor]:
    """Class means of what follows each layer: the next analysed layer's inputs, or the logits, where widths agree."""
    layers = list(means.layers.items())
    nexts = [layer.features for _, layer in layers[1:]] + [means.logits]
    pairs = zip(layers, nexts, strict=True)
    return {name: behind for (name, layer), behind in pairs if behind.shape[1] == layer.A.shape[2]}


def _collapse(
    layer: LayerMeans, n: float, second: Sums, name: str, weight: Tensor, behind: Tensor | None
) -> CollapseMetrics:
    within, pinv, square = layer.within, None, None
    if f"{name}/whitened" in second.values:
        within, image = float(second[f"{name}/within"]) / n, second[f"{name}/whitened"] / n
        pinv = float((between_eigen(layer.features)[1] * image).sum()) / len(layer.mu)
        square = float(image.square().sum())
    return CollapseMetrics(
        within_between_ratio(within, layer.features),
        pinv,
        square,
        *nc2(layer.features),
        nc3(weight, layer.features),
        None if behind is None else nc3_dual(layer.A, behind),
    )


def _shares(products: Tensor, means: ClassMeans, trace: float) -> dict[str, float]:
    """Papyan's class, cross and within shares of the trace (nan for a matrix of zeros)."""
    parts = split(products / means.count[:, None, None, None], means.share)
    shares = [float(part.square().sum()) / trace if trace > 0 else math.nan for part in parts]
    return {"class": shares[0], "cross": shares[1], "within": 1 - sum(shares)}


def _padded(values: Tensor, size: int) -> Tensor:
    """With zeros for directions that depend on others."""
    return torch.cat([values, values.new_zeros(max(0, size - len(values)))])


def _notes(means: ClassMeans, estimator: str) -> tuple[str, ...]:
    low, high = (round(float(c)) for c in (means.count.min(), means.count.max()))
    notes = []
    if low < high:
        notes.append(f"classes have {low} to {high} samples; the closed forms assume equal numbers")
    several = [name for name, layer in means.layers.items() if layer.locations > 1]
    if estimator == "means" and several:
        notes.append(
            f"{several[0]} works at several locations of an example, whose means are a further approximation; "
            "estimator='ritz' is none"
        )
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return tuple(notes)
