"""The deep unconstrained feature model: its optimum and its spectra in closed form, and the model itself to train.

J = |W_L ... W_1 H_1 - Y|² / 2N + sum_l lam_l/2 |W_l|² + lam_H/2 |H_1|², with N = K n free features (paper, eq. 1).
Numbers in comments are sections of the specification's derivation, checked against automatic differentiation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subspan.linalg import random_orthonormal
from subspan.theory.collapse.losses import values as losses

MATRICES = ("hessian", "hessian_full", "gauss_newton", "gauss_newton_features", "weight")
Spectrum = list[tuple[float, int]]


@dataclass(frozen=True)
class UFMOptimum:
    """The collapsed optimum of the deep linear UFM under the squared loss, and the spectra there.

    gamma is the root of gamma^(L-1) (1 - gamma)^(L+1) = K^(L+1) n Lambda with Lambda = lam_H lam_1 ... lam_L. Every W_l
    has K equal singular values with square gamma (1 - gamma) / (K lam_l).

    Args:
        K: classes.
        n: samples of each class.
        lams: lam_1, ..., lam_L, positive; at least two layers.
        lam_h: lam_H, of the features.

    Raises:
        ValueError: K < 2, n < 1, L < 2, a lambda that is not positive, or regularisation so strong that zero is the
            only stationary solution.
    """

    K: int
    n: int
    lams: Sequence[float]
    lam_h: float

    def __post_init__(self) -> None:
        if self.K < 2 or self.n < 1:
            raise ValueError(f"the model needs at least 2 classes and 1 sample of each, got K={self.K}, n={self.n}")
        if len(self.lams) < 2:
            raise ValueError(f"the deep model needs at least 2 layers, got {len(self.lams)}")
        for name, lam in [*((f"lams[{i}]", lam) for i, lam in enumerate(self.lams)), ("lam_h", self.lam_h)]:
            if not (math.isfinite(lam) and lam > 0):
                raise ValueError(f"{name} must be positive, got {lam}")
        L = len(self.lams)
        excess = self._log_rhs - self._log_lhs((L - 1) / (2 * L))
        if excess > 0:
            raise ValueError(
                f"the regularisation is so strong that only zero is stationary: K^(L+1) n lam_h prod(lams) is "
                f"{math.exp(excess):.3g} times the largest value that a collapsed solution allows; lower the lambdas"
            )

    @property
    def _log_rhs(self) -> float:
        L = len(self.lams)
        return (L + 1) * math.log(self.K) + math.log(self.n) + math.log(self.lam_h) + sum(map(math.log, self.lams))

    def _log_lhs(self, gamma: float) -> float:
        L = len(self.lams)
        return (L - 1) * math.log(gamma) + (L + 1) * math.log1p(-gamma)

    @cached_property
    def gamma(self) -> float:
        """The scale of the logits, in [(L-1)/2L, 1): W_L ... W_1 H_1 = gamma Y."""
        from scipy.optimize import brentq

        # In t = log(1 - gamma), so that gamma near 1 keeps its digits; both sides in logarithms, which never underflow.
        L, rhs = len(self.lams), self._log_rhs

        def excess(t: float) -> float:
            return (L - 1) * math.log(-math.expm1(t)) + (L + 1) * t - rhs

        high = math.log((L + 1) / (2 * L))
        if excess(high) <= 0:  # on the edge, up to rounding
            return -math.expm1(high)
        return -math.expm1(float(brentq(excess, (rhs - 1) / (L + 1) - 1, high, xtol=1e-15)))  # pyright: ignore

    @property
    def globally_optimal(self) -> bool:
        """Whether collapse is the global minimum: K^{L+1} n Lambda < (L-1)^{L-1} / L^{2L}; otherwise zero is."""
        L = len(self.lams)
        return self._log_rhs < (L - 1) * math.log(L - 1) - 2 * L * math.log(L)

    @property
    def loss(self) -> float:
        """J at the collapsed solution."""
        g, L = self.gamma, len(self.lams)
        return (1 - g) ** 2 / 2 + (L + 1) * g * (1 - g) / 2

    @property
    def sigma(self) -> tuple[float, ...]:
        """The K equal singular values of each W_l."""
        return tuple(math.sqrt(self._c / lam) for lam in self.lams)

    @property
    def feature_norms(self) -> tuple[float, ...]:
        """|mu_c^{(l)}|² for l = 1, ..., L + 1; the last is that of the logits, gamma²."""
        norms = [self._c / (self.lam_h * self.n)]
        for s in self.sigma:
            norms.append(s * s * norms[-1])
        return tuple(norms)

    @property
    def _c(self) -> float:
        return self.gamma * (1 - self.gamma) / self.K

    def hessian_eigenvalue(self, l: int) -> float:
        """The K²-fold eigenvalue lam_l gamma / (1 - gamma) of the data term's Hessian in W_l, l = 1, ..., L."""
        return self.lams[_layer(l, len(self.lams)) - 1] * self.gamma / (1 - self.gamma)

    def build(
        self, d: int, *, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> tuple[list[Tensor], Tensor]:
        """One of the optima, of width d: W_l = sigma_l U_{l+1} U_lᵀ and H_1 = sqrt(m_1) U_1 (x) 1ᵀ, U_l random.

        Raises:
            ValueError: d < K.
        """
        if d < self.K:
            raise ValueError(f"the width d must be at least the number of classes {self.K}, got {d}")
        frames = [random_orthonormal(d, self.K, generator=generator, dtype=dtype) for _ in self.lams]
        frames.append(torch.eye(self.K, dtype=dtype))
        pairs = pairwise(frames)
        weights = [s * after @ before.T for s, (before, after) in zip(self.sigma, pairs, strict=True)]
        return weights, self.feature_norms[0] ** 0.5 * frames[0].repeat_interleave(self.n, 1)

    def spectrum(self, matrix: str, d: int, *, l: int | None = None, weight_decay: bool = False) -> Spectrum:
        """Eigenvalues and multiplicities, zeros included, largest first.

        Args:
            matrix: "hessian", of the data term in W_l alone; "hessian_full", in all weights, H_1 fixed;
                "gauss_newton", of all weights; "gauss_newton_features", of weights and H_1; "weight", W_lᵀ W_l.
            d: width.
            l: the layer, 1 to L, for "hessian" and "weight".
            weight_decay: add lam_l I (Hessians only).
        """
        K, L, g = self.K, len(self.lams), self.gamma
        if matrix not in MATRICES:
            raise ValueError(f"matrix must be one of {', '.join(MATRICES)}, got {matrix!r}")
        if d < K:
            raise ValueError(f"the width d must be at least the number of classes {K}, got {d}")
        if matrix in ("hessian", "weight"):
            _layer(l, L)
        if weight_decay and not matrix.startswith("hessian"):
            raise ValueError(f"weight decay belongs to Hessians, not to {matrix!r}")
        size = (L - 1) * d * d + K * d
        if matrix == "hessian" and l is not None:
            lam = self.lams[l - 1] if weight_decay else 0.0
            size = d * (K if l == L else d)
            return _sorted([(self.hessian_eigenvalue(l) + lam, K * K), (lam, size - K * K)])
        if matrix == "weight" and l is not None:
            return _sorted([(self._c / self.lams[l - 1], K), (0.0, d - K)])
        if matrix == "gauss_newton":
            return _sorted([(g / (1 - g) * sum(self.lams), K * K), (0.0, size - K * K)])
        if matrix == "gauss_newton_features":
            features = self.lam_h * g / (1 - g)
            top = g / (1 - g) * (sum(self.lams) + self.lam_h)
            within = K * K * (self.n - 1)
            return _sorted([(top, K * K), (features, within), (0.0, size + d * K * self.n - K * K - within)])
        return self._full_hessian(d, weight_decay)

    def _full_hessian(self, d: int, weight_decay: bool) -> Spectrum:
        K, L, g, rest = self.K, len(self.lams), self.gamma, d - self.K
        lams = torch.tensor(list(self.lams), dtype=torch.float64)
        inverse = 1 / torch.tensor(self.sigma, dtype=torch.float64)
        off = g * (1 - g) * (1 - torch.eye(L, dtype=torch.float64))
        found: Spectrum = []
        for sign, many in ((-1, K * (K + 1) // 2), (1, K * (K - 1) // 2)):
            m = torch.outer(inverse, inverse) / K * (g * g + sign * off) + weight_decay * torch.diag(lams)
            found += [(float(value), many) for value in torch.linalg.eigvalsh(m)]
        for a, b in pairwise(self.lams):  # W_l and W_{l+1} meet where the other is zero
            pair = (0.0, a + b) if weight_decay else (-math.sqrt(a * b), math.sqrt(a * b))
            found += [(value, K * rest) for value in pair]
        for l, lam in enumerate(self.lams):
            free = (K * rest if l == 0 else 0) + (rest * rest if l < L - 1 else 0)
            found.append((lam * weight_decay, free))
        return _sorted(found)


def _layer(l: int | None, L: int) -> int:
    if l is None or not 1 <= l <= L:
        raise ValueError(f"the layer l must be a number from 1 to {L}, got {l}")
    return l


def _sorted(spectrum: Spectrum) -> Spectrum:
    return sorted(((value, many) for value, many in spectrum if many > 0), reverse=True)


def expanded(spectrum: Spectrum) -> Float[Tensor, " n"]:
    """Each eigenvalue as often as it occurs, descending."""
    values, counts = zip(*spectrum, strict=True)
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(counts))


def simplex_spectrum(K: int, a: float, m: float) -> Spectrum:
    """Non-zero spectrum of a layer's Hessian under cross-entropy at collapse to a simplex ETF.

    A = a P Uᵀ and mu_c = m V P e_c with P = I - 11ᵀ/K: the logits of class c are a m P e_c. (K-1)² eigenvalues in three
    groups; one for K = 2.
    """
    if K < 2:
        raise ValueError(f"there are at least 2 classes, got {K}")
    high = max(a * m, 0.0)  # the largest logit, without which exp may overflow
    total = math.exp(a * m - high) + (K - 1) * math.exp(-high)
    p, q, scale = math.exp(a * m - high) / total, math.exp(-high) / total, (a * m) ** 2 / K
    # with p + (K - 1) q = 1 and delta = p - q, q + delta (1 - delta) (K - 1) / K is K p q; products lose no digits
    groups = [(K * p * q, 1), (q * ((K - 1) * p + q), K - 1), (q, K * K - 3 * K + 1)]
    return _sorted([(scale * value, many) for value, many in (groups if K > 2 else groups[:1])])


class DeepUFM(nn.Module):
    """Free features and L bias-free layers; ``model(rows)`` gives the logits of these of the N = K n samples.

    Entries start normal with standard deviation 1/sqrt(d). ``labels`` are ordered class by class.

    Args:
        K: classes.
        n: samples of each.
        d: width, of the features and between layers.
        L: layers.
        nonlinearity: between layers, "linear" or "relu" (with derivative 0 at 0).
        generator: of the start.
        dtype: of everything.
    """

    def __init__(
        self,
        K: int,
        n: int,
        d: int,
        L: int,
        nonlinearity: str = "linear",
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        if nonlinearity not in ("linear", "relu"):
            raise ValueError(f"nonlinearity must be 'linear' or 'relu', got {nonlinearity!r}")
        if K < 2 or n < 1 or L < 2 or d < K:
            raise ValueError(f"the model needs K >= 2, n >= 1, d >= K and L >= 2, got K={K}, n={n}, d={d}, L={L}")
        widths = [d] * L + [K]
        self.nonlinearity = nonlinearity

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype) / d**0.5

        self.features = nn.Parameter(normal(K * n, d))
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False, dtype=dtype) for i, o in pairwise(widths))
        for layer in self.layers:
            layer.weight = nn.Parameter(normal(*layer.weight.shape))  # pyright: ignore[reportArgumentType]
        self.register_buffer("labels", torch.arange(K).repeat_interleave(n))

    def forward(self, rows: Int[Tensor, " b"]) -> Float[Tensor, "b K"]:
        h = self.features[rows]
        *hidden, last = self.layers
        for layer in hidden:
            h = layer(h)
            h = h.relu() if self.nonlinearity == "relu" else h
        return last(h)

    def load(self, weights: Sequence[Tensor], features: Float[Tensor, "d N"]) -> "DeepUFM":
        """Take the weights and features of ``UFMOptimum.build``."""
        with torch.no_grad():
            self.features.copy_(features.T)
            for layer, weight in zip(self.layers, weights, strict=True):
                layer.weight.copy_(weight)  # pyright: ignore
        return self

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """All samples as one batch, for ``collapse_spectra``."""
        labels: Tensor = self.labels  # pyright: ignore[reportAssignmentType]
        return [(torch.arange(len(labels), device=labels.device), labels)]

    def objective(self, lams: Sequence[float], lam_h: float) -> Float[Tensor, ""]:
        """J."""
        ((rows, labels),) = self.batches
        data = losses("mse", self(rows), labels).mean()
        decay = sum(lam * layer.weight.square().sum() for lam, layer in zip(lams, self.layers, strict=True))  # pyright: ignore
        return data + decay / 2 + lam_h / 2 * self.features.square().sum()


def train_ufm(
    model: DeepUFM,
    lams: Sequence[float],
    lam_h: float,
    *,
    steps: int,
    lr: float = 0.2,
    method: str = "gd",
    after: Callable[[int], None] | None = None,
) -> float:
    """Full-batch gradient descent ("gd") or "lbfgs" on J; the final J. ``after`` is told each step's number, from 1."""
    kinds = {"gd": torch.optim.SGD, "lbfgs": torch.optim.LBFGS}
    if method not in kinds:
        raise ValueError(f"method must be 'gd' or 'lbfgs', got {method!r}")
    if len(lams) != len(model.layers) or not all(math.isfinite(lam) and lam >= 0 for lam in (*lams, lam_h)):
        raise ValueError(
            f"each of the {len(model.layers)} layers and the features need a lambda of at least 0, got {list(lams)} "
            f"and {lam_h}"
        )
    options = {"line_search_fn": "strong_wolfe"} if method == "lbfgs" else {}
    optimizer = kinds[method](model.parameters(), lr=lr, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.objective(lams, lam_h)
        loss.backward()
        return loss

    for step in range(1, steps + 1):
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        if after is not None:
            after(step)
    return float(model.objective(lams, lam_h).detach())


class KroneckerHessian(NamedTuple):
    """P (x) Q, acting as M -> P M Qᵀ on matrices (row-major vectors)."""

    P: Float[Tensor, "p p"]
    Q: Float[Tensor, "q q"]

    def values(self) -> Float[Tensor, " pq"]:
        """All eigenvalues, descending."""
        return (
            torch.outer(torch.linalg.eigvalsh(self.P), torch.linalg.eigvalsh(self.Q)).flatten().sort(descending=True)[0]
        )

    def __matmul__(self, m: Float[Tensor, "p q"]) -> Float[Tensor, "p q"]:
        return self.P @ m @ self.Q.T


@torch.no_grad()
def linear_hessian(weights: Sequence[Tensor], features: Float[Tensor, "d N"], l: int) -> KroneckerHessian:
    """Hessian of the data term of a deep linear network in W_l (l = 1, ..., L), at any point: AᵀA (x) H Hᵀ / N."""
    A = torch.eye(len(weights[-1]), dtype=features.dtype, device=features.device)
    for weight in reversed(weights[_layer(l, len(weights)) :]):
        A = A @ weight
    h = features
    for weight in weights[: l - 1]:
        h = weight @ h
    return KroneckerHessian(A.T @ A, h @ h.T / h.shape[1])


class Alignment(NamedTuple):
    """f(v) in [0, 1], one exactly for eigenvectors; ``null`` where H v = 0, and the value then 0."""

    value: float
    null: bool


def alignment(v: Float[Tensor, "*s"], hv: Float[Tensor, "*s"]) -> Alignment:
    """f(v) = (vᵀ H v)² / (|v|² |H v|²), the paper's measure of how far v is from an eigenvector of H."""
    norms = v.square().sum() * hv.square().sum()
    if not bool(norms > 0):
        return Alignment(0.0, True)
    return Alignment(float((v * hv).sum().square() / norms), False)


def natural_basis(after: Float[Tensor, "c p"], before: Float[Tensor, "c q"]) -> Float[Tensor, "c c p q"]:
    """b_cc' = mu_c^{(l+1)} mu_c'^{(l)}ᵀ, the paper's K² eigenvectors of layer l, as matrices."""
    return torch.einsum("cp,eq->cepq", after, before)
