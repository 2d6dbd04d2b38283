"""What was predicted and found for each layer, as plain data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.linalg import Subspace, singular_values
from subspan.theory.collapse.estimators import Directions, Frame, Products
from subspan.theory.collapse.metrics import CollapseMetrics


@dataclass(frozen=True)
class WeightSpectrum:
    """The weight beside the class means.

    Attributes:
        values: eigenvalues of WᵀW, descending.
        mean_energy: share of |W|_F² in the span of the class means of the inputs.
        gap: sigma_K / sigma_{K+1}; infinite for a weight of rank K, nan where there are only K singular values.
    """

    values: Float[Tensor, " r"]
    mean_energy: float
    gap: float

    @classmethod
    def of(cls, weight: Float[Tensor, "p q"], means: Float[Tensor, "c q"]) -> "WeightSpectrum":
        s = singular_values(weight).flip(0)
        k = len(means)
        gap = math.nan if len(s) <= k else float(s[k - 1] / s[k]) if bool(s[k] > 0) else math.inf
        return cls(s.square(), float(Subspace.span(means.T).captured_energy(weight.T)), gap)


@dataclass(frozen=True)
class GradientReport:
    """The gradient of the mean loss beside the directions D_q. A zero gradient has nan for its shares.

    Attributes:
        norm: |g|_F.
        fraction: share of |g|² inside the span of all D_q.
        coefficients: <D, g>² / (|D|² |g|²) of D_(c,c') = A_c[c'] mu_cᵀ (c x c'); at collapse 1/K on the diagonal.
    """

    norm: float
    fraction: float
    coefficients: Float[Tensor, "c k"]

    @property
    def is_zero(self) -> bool:
        return self.norm == 0

    @classmethod
    def of(cls, gradient: Float[Tensor, "p q"], span: Frame, natural: Directions, classes: int) -> "GradientReport":
        norm = float(torch.linalg.norm(gradient))
        inner, lengths = natural.inner(gradient), natural.gram().diagonal()
        if norm == 0:
            return cls(0.0, math.nan, torch.full_like(inner, math.nan).view(classes, -1))
        # a direction of length zero has no angle with the gradient; zero stands for it
        squares = torch.where(lengths > 0, inner.square() / lengths.clamp(min=torch.finfo(inner.dtype).tiny), 0.0)
        fraction = float(span.coordinates(gradient).square().sum()) / norm**2
        return cls(norm, fraction, (squares / norm**2).view(classes, -1))


@dataclass(frozen=True)
class LayerSpectrum:
    """The predicted top of one layer's Gauss-Newton matrix (p q x p q) and what goes with it.

    Attributes:
        name: the layer.
        shape: (p, q).
        estimator: "means", "between" or "ritz".
        basis: which directions: "paired" (K²), "outer" (K³) or "class" (K).
        eigenvalues: of the estimator, descending, one per direction that was kept; zeros where these are dependent.
        eigenvalues_means: the paper's prediction, from class means alone.
        trace: of the whole matrix.
        residuals: |G u_j - theta_j u_j| / theta_j of the leading eigenpairs; some eigenvalue of G lies within
            residual x theta_j of theta_j. Empty where they were not asked for.
        collapse: distance from neural collapse.
        gradient: the gradient beside the directions.
        weights: the weight beside the class means.
        shares: of the trace, by Papyan's class, cross and within parts ("between" only, else empty).
        classes: K.
        locations: mean number of positions, patches or calls of the layer per sample.
        directions: D_q, as factors.
        coefficients: of the eigenvectors over the directions, as columns.
        span: an orthonormal frame of the directions.
    """

    name: str
    shape: tuple[int, int]
    estimator: str
    basis: str
    eigenvalues: Float[Tensor, " r"]
    eigenvalues_means: Float[Tensor, " s"]
    trace: float
    residuals: Float[Tensor, " j"]
    collapse: CollapseMetrics
    gradient: GradientReport
    weights: WeightSpectrum
    shares: Mapping[str, float]
    classes: int
    locations: float
    directions: Directions | Products
    coefficients: Float[Tensor, "d v"]
    span: Frame

    @property
    def nc1(self) -> float:
        """tr Sigma_W / tr Sigma_B of the layer's inputs."""
        return self.collapse.nc1_trace

    @property
    def gradient_fraction(self) -> float:
        """Share of the gradient's energy inside the span of the directions (nan for a zero gradient)."""
        return self.gradient.fraction

    @property
    def jacobian_size(self) -> int:
        """Numbers that hold one sample's Jacobians and inputs."""
        return round(self.locations * (self.classes * self.shape[0] + self.shape[1]))

    @property
    def trace_ratio(self) -> float:
        """Sum of the eigenvalues over the trace, nan for a matrix of zeros; "means" may predict more than 1."""
        return float(self.eigenvalues.sum()) / self.trace if self.trace > 0 else math.nan

    @property
    def trace_fraction(self) -> float:
        """The share of the trace that was found. ``ValueError`` for "means", whose ``trace_ratio`` is no share."""
        if self.estimator == "means":
            raise ValueError("the estimator 'means' bounds nothing: read trace_ratio, or use 'ritz' or 'between'")
        return self.trace_ratio

    @property
    def collapse_gap(self) -> float:
        """Largest |theta_means - theta| / theta among the first K: how far the theorems are from holding here."""
        if self.estimator == "means":
            return math.nan
        k = min(self.classes, len(self.eigenvalues), len(self.eigenvalues_means))
        theta, means = self.eigenvalues[:k], self.eigenvalues_means[:k]
        positive = theta > 0
        return float(((means - theta).abs() / theta)[positive].max()) if bool(positive.any()) else math.nan

    def eigenvector(self, j: int) -> Float[Tensor, "p q"]:
        """The j-th unit eigenvector in the shape of the weight. ``ValueError`` where the eigenvalue is zero."""
        if not -len(self.eigenvalues) <= j < len(self.eigenvalues):
            raise ValueError(f"{self.name} has {len(self.eigenvalues)} predicted eigenvalues, there is no number {j}")
        if not bool(self.eigenvalues[j] > 0):
            raise ValueError(f"eigenvalue {j} of {self.name} is zero: it has no eigenvector of its own")
        return self.directions.combine(self.coefficients[:, j])

    def matvec(self, x: Float[Tensor, "p q"]) -> Float[Tensor, "p q"]:
        """sum_j theta_j u_j <u_j, x>: the predicted matrix times x, in time (p + q) K²."""
        c = self.coefficients
        x = x.to(c.dtype)
        return self.directions.combine(c @ (self.eigenvalues[: c.shape[1]] * (c.T @ self.directions.inner(x))))

    def project(self, x: Float[Tensor, "p q"]) -> Float[Tensor, "p q"]:
        """The part of a matrix (a gradient, say) inside the span of the directions D_q."""
        return self.span.project(x.to(self.coefficients.dtype))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists; None for what is not known."""
        out: dict[str, Any] = {
            "layer": self.name,
            "shape": list(self.shape),
            "estimator": self.estimator,
            "basis": self.basis,
            "directions": self.span.T.shape[1],
            "eigenvalues": self.eigenvalues.tolist(),
            "eigenvalues_means": self.eigenvalues_means.tolist(),
            "trace": self.trace,
            "trace_ratio": self.trace_ratio,
            "collapse_gap": self.collapse_gap,
            "residuals": self.residuals.tolist(),
            **vars(self.collapse),
            "gradient_norm": self.gradient.norm,
            "gradient_fraction": self.gradient.fraction,
            "gradient_coefficients": self.gradient.coefficients.tolist(),
            "weight_eigenvalues": self.weights.values.tolist(),
            "weight_mean_energy": self.weights.mean_energy,
            "weight_gap": self.weights.gap,
            "shares": dict(self.shares),
        }
        return {key: _known(value) for key, value in out.items()}


def _known(value: Any) -> Any:
    """JSON has no nan and no infinity."""
    if isinstance(value, list):
        return [_known(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class NetworkSpectrum:
    """The Gauss-Newton matrix of all analysed layers at once, by the sums of their directions ("ritz" only) and means.

    Other directions, those of single layers, are not looked at: the Ritz values bound eigenvalues from below.
    """

    eigenvalues: Float[Tensor, " r"] | None
    eigenvalues_means: Float[Tensor, " s"]


@dataclass(frozen=True)
class SpectrumReport:
    """A ``LayerSpectrum`` for each layer; ``report["fc2"]`` is one.

    Attributes:
        layers: by name.
        network: the layers together; None where the directions were cut to the leading ones (K > 20).
        loss: "mse" or "ce".
        mean_loss: of the data.
        counts: samples of each class.
        weighting: of the samples within a class.
        notes: what to keep in mind with these numbers.
    """

    layers: Mapping[str, LayerSpectrum]
    network: NetworkSpectrum | None
    loss: str
    mean_loss: float
    counts: tuple[int, ...]
    weighting: str
    notes: tuple[str, ...]

    def __getitem__(self, layer: str) -> LayerSpectrum:
        return self.layers[layer]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        network = None
        if self.network is not None:
            network = {key: None if v is None else v.tolist() for key, v in vars(self.network).items()}
        return {
            "loss": self.loss,
            "mean_loss": self.mean_loss,
            "counts": list(self.counts),
            "weighting": self.weighting,
            "notes": list(self.notes),
            "network": network,
            "layers": [layer.to_dict() for layer in self.layers.values()],
        }

    def to_pandas(self) -> Any:
        """One row per layer with the numbers that are single, and the first eigenvalue."""
        import pandas

        rows = []
        for layer in self.layers.values():
            figures = layer.to_dict()
            top = {"top": figures["eigenvalues"][0], "top_means": figures["eigenvalues_means"][0]}
            rows.append({k: v for k, v in figures.items() if not isinstance(v, list | dict)} | top)
        return pandas.DataFrame(rows).set_index("layer")
