"""The joint minimax eigenspace as a convex problem: its smoothed dual, Newton's method on it, and a certificate.

S (K x p x p) are symmetric matrices of K populations on the same p variables, in float64. Among the elements M of the
Fantope (0 <= M <= I, tr M = s; the hull of projectors of rank s) the solution has the smallest max_k <S_k, M>:

    min_M max_k <S_k, M>  =  max_w g(w),   g(w) = sum of the s smallest eigenvalues of S(w) = sum_k w_k S_k,      (1)

with w in the simplex. With (mu/2)|M|² added, M is unique and the dual smooth. Projection onto the Fantope: Vu, Cho, Lei
and Rohe (2013).
"""

import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

# Eigenvalues below this share of the mean diagonal entry are zero: 1e4 times the rounding of eigh at p = 1000.
_NULL = 1e-10


class NotIdentified(UserWarning):
    """Several subspaces are equally good, so that what is returned is their common average."""


@dataclass(frozen=True)
class JointSubspace:
    """M = basis diag(shares) basisᵀ with tr M = s, and what certifies it.

    Attributes:
        basis: p x a eigenvectors of S(w), by ascending eigenvalue; a >= s.
        shares: a numbers in (0, 1], descending, with sum s.
        weights: w, K numbers.
        primal: max_k <S_k, M>.
        dual: g(w). No subspace of dimension s has a smaller maximum than this.
        eigh_calls: eigendecompositions that were needed.
        null_dim: 0, or the dimension m > s of the null space common to all S_k; then M is s/m times its projector.
    """

    basis: Tensor
    shares: Tensor
    weights: np.ndarray
    primal: float
    dual: float
    eigh_calls: int
    null_dim: int = 0

    @property
    def gap(self) -> float:
        """primal - dual. Rounding may leave it slightly below zero; it is zero then."""
        return max(0.0, self.primal - self.dual)

    def influence(self) -> Float64[Tensor, " p"]:
        """omega = diag M: in [0, 1], with sum s."""
        return self.basis.square() @ self.shares

    def projector(self) -> Float64[Tensor, "p p"]:
        return (self.basis * self.shares) @ self.basis.mT


def fantope_shares(e: Float64[Tensor, " p"], s: int, mu: float) -> Float64[Tensor, " p"]:
    """clip((tau - e) / mu, 0, 1) for ascending e, with tau such that the sum is s.

    These are the eigenvalues of the M that minimises <S, M> + (mu/2)|M|² over the Fantope, where e are those of S.
    """
    p = len(e)
    if s == p:
        return torch.ones_like(e)
    # Relative to the s-th eigenvalue, so that dividing by a small mu loses no digits where the shares are decided.
    x = (e[s - 1] - e) / mu  # descending; shares are clip(x - theta, 0, 1)
    # phi(theta), the sum of the shares, falls from p to 0, linear between these points; find the last with phi >= s.
    points = torch.cat([x, x - 1]).sort().values
    rising = x.flip(0)
    sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
    above = p - torch.searchsorted(rising, points, right=True)  # x_i > point
    ones = p - torch.searchsorted(rising, points + 1, right=True)  # x_i > point + 1
    phi = ones + sums[above] - sums[ones] - (above - ones) * points
    last = int((phi >= s).sum()) - 1
    middle = (points[last] + points[last + 1]) / 2
    full, fractional = x - middle >= 1, (x > middle) & (x - middle < 1)
    if not bool(fractional.any()):  # a flat piece: every theta in it gives exactly the first s
        return full.to(e.dtype)
    theta = (x[fractional].sum() - (s - full.sum())) / fractional.sum()
    return (x - theta).clamp(0, 1)


class _Spectrum(NamedTuple):
    """Ascending eigenvalues and their vectors, as columns."""

    values: Tensor
    vectors: Tensor


class _Point(NamedTuple):
    """The smoothed dual at w: its value and gradient, and what its Hessian is made from."""

    w: np.ndarray
    eigh: _Spectrum  # of S(w)
    mu: float
    shares: Tensor  # the positive ones
    images: Tensor  # K x a x p: U_aᵀ S_k
    gradient: np.ndarray  # <S_k, M>
    value: float


def _decompose(S: Tensor, w: np.ndarray) -> _Spectrum:
    return _Spectrum(*torch.linalg.eigh(torch.tensordot(torch.as_tensor(w).to(S), S, 1)))


def _point(S: Tensor, w: np.ndarray, eigh: _Spectrum, s: int, mu: float) -> _Point:
    shares = fantope_shares(eigh.values, s, mu)
    active = int((shares > 0).sum())
    u, shares = eigh.vectors[:, :active], shares[:active]
    images = u.mT @ S
    # (2) gradient_k = <S_k, M>, by Danskin's theorem
    gradient = ((images * u.mT).sum(-1) @ shares).cpu().numpy()
    value = float(w @ gradient + mu / 2 * shares.square().sum().item())
    return _Point(w, eigh, mu, shares, images, gradient, value)


def _hessian(point: _Point) -> np.ndarray:
    """Second derivatives of the smoothed dual in w: <S_k, dM/dw_l>, by the derivative of a spectral function.

    (3) With D_k = Uᵀ S_k U: sum over i, j of D_k,ij G_ij D_l,ij, where G_ij <= 0 is the difference quotient of the
    shares over the eigenvalues, and -1/mu between two fractional shares. On the diagonal of the fractional set D_k,ii
    counts from its mean there, because tau moves so that the trace stays s.
    """
    e, u = point.eigh
    a = len(point.shares)
    full = torch.zeros_like(e)
    full[:a] = point.shares
    fractional = (full > 0) & (full < 1)
    d = point.images @ u  # K x a x p
    if bool(fractional.any()):
        diagonal = d.diagonal(dim1=1, dim2=2)[:, fractional[:a]]
        index = fractional.nonzero()[:, 0]
        d[:, index, index] = diagonal - diagonal.mean(1, keepdim=True)
    run = e[:a, None] - e
    # Equal eigenvalues have equal shares: no slope between them, unless both are fractional.
    fall = torch.where(run == 0, 0.0, (full - point.shares[:, None]) / torch.where(run == 0, 1.0, run))
    fall = torch.where(fractional[:a, None] & fractional, 1 / point.mu, fall)
    fall[:, a:] *= 2  # (i, j) and (j, i)
    root = (d * fall.clamp(min=0).sqrt()).flatten(1)  # rounding may leave a slope of the wrong sign
    return -(root @ root.mT).cpu().numpy()


def maximise_on_simplex(gradient: np.ndarray, hessian: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The y in the simplex that maximises gradient·(y - w) + (y - w)ᵀ hessian (y - w) / 2, by an active-set method.

    ``hessian`` (K x K) is negative semidefinite, ``w`` lies in the simplex.
    """
    k = len(w)
    a = -(hessian + hessian.T) / 2
    # Directions without curvature (a population that is a mean of others) must not make the system singular.
    a[np.diag_indices(k)] += 1e-13 * (np.abs(np.diag(a)).max() + np.abs(gradient).max()) + np.finfo(float).tiny ** 0.5
    r = gradient + a @ w
    y, free = w.copy(), w > 0
    for _ in range(20 * k):
        m = int(free.sum())
        system = np.ones((m + 1, m + 1))
        system[:m, :m], system[m, m] = a[np.ix_(free, free)], 0
        solution = np.linalg.solve(system, np.append(r[free], 1.0))
        target = np.zeros(k)
        target[free], level = solution[:m], solution[m]
        if (target >= 0).all():
            y = target / target.sum()
            # A fixed population enters when its slope exceeds the common one of the free ones.
            slack = np.where(free, -np.inf, r - a @ y - level)
            entering = int(slack.argmax())
            if slack[entering] <= 1e-14 * (1 + np.abs(gradient).max()):
                return y
            free[entering] = True
        else:
            shrinking = free & (target < 0)
            steps = np.where(shrinking, y / np.where(shrinking, y - target, 1.0), np.inf)
            y = np.maximum(y + steps.min() * (target - y), 0.0)
            free[int(steps.argmin())] = False
            y[~free] = 0.0
    return y


def _newton(S: Tensor, point: _Point, s: int, limit: int, tol: float) -> tuple[_Point, int, bool]:
    """Maximise the smoothed dual from ``point`` by Newton's method on the simplex, to a smoothed gap of ``tol``.

    Also the number of eigendecompositions, and whether it converged within ``limit`` of them.
    """
    calls = 0
    while calls < limit:
        direction = maximise_on_simplex(point.gradient, _hessian(point), point.w) - point.w
        slope = float(point.gradient @ direction)
        length = np.abs(direction).sum()
        # The value is known to rounding once w is known to half its digits; the gap is first order in w.
        gap = point.gradient.max() - point.w @ point.gradient
        if slope <= 1e-15 * (abs(point.value) + point.mu) and gap <= tol:
            return point, calls, True
        step, trial = 1.0, point
        while calls < limit:
            w = np.maximum(point.w + step * direction, 0.0)
            w /= w.sum()
            trial, calls = _point(S, w, _decompose(S, w), s, point.mu), calls + 1
            # Armijo, up to the rounding of the value
            if trial.value >= point.value + 1e-4 * step * slope - 1e-14 * abs(point.value):
                break
            ahead = float(trial.gradient @ direction)  # negative: the maximum along the line lies before
            step *= min(max(slope / max(slope - ahead, slope), 0.1), 0.7)
        if trial.value > point.value or length < 1e-6:
            point = trial
        if step == 1.0 and length < 1e-7:  # convergence is quadratic: what is left is below rounding
            return point, calls, True
    return point, calls, False


class _Path:
    """Follows the maximiser of the smoothed dual while mu falls, and counts what that costs."""

    def __init__(self, S: Tensor, s: int, scale: float, tol: float) -> None:
        self.S, self.s, self.scale, self.tol = S, s, scale, tol
        self.w = np.full(len(S), 1 / len(S))
        self.eigh = _decompose(S, self.w)
        self.calls = 1
        self.steps: list[tuple[float, np.ndarray]] = []

    def descend(self, mu: float, limit: int) -> tuple[_Point, bool]:
        """The maximiser at ``mu`` times the scale, started from the last one, or from a line through the last two."""
        start = _point(self.S, self.w, self.eigh, self.s, mu * self.scale)
        if len(self.S) > 1 and len(self.steps) > 1:
            (mu_0, w_0), (mu_1, w_1) = self.steps[-2:]
            w = np.maximum(w_1 + (w_1 - w_0) * (mu - mu_1) / (mu_1 - mu_0), 0.0)
            w /= w.sum()
            predicted = _point(self.S, w, _decompose(self.S, w), self.s, start.mu)
            self.calls += 1
            start = max(start, predicted, key=lambda point: point.value)
        point, calls, converged = _newton(self.S, start, self.s, limit, self.tol * self.scale)
        self.calls += calls
        self.w, self.eigh = point.w, point.eigh
        self.steps.append((mu, point.w))
        return point, converged


def joint_subspace(
    S: Float64[Tensor, "K p p"],
    s: int,
    *,
    mu: float = 1e-3,
    tol: float = 1e-6,
) -> JointSubspace:
    """The element M of the Fantope with the smallest max_k <S_k, M>, and the dual weights that prove it.

    Args:
        S: K symmetric matrices.
        s: dimension of the subspace, 1 to p.
        mu: quadratic regularisation, relative to the spread of the eigenvalues (their root mean square distance from
            their mean, the largest over k: it does not change when a multiple of I, or a mean of the S_k, is added).
        tol: ``mu`` is divided by 10, at most twice, while the gap exceeds ``tol`` times that spread.

    Raises:
        ValueError: ``mu`` is not positive and finite.

    Warns:
        NotIdentified: all S_k vanish on a common subspace of more than s dimensions.
        ConvergenceWarning: the gap is still above 1e-5 (1 + |primal|); it is a valid bound all the same.
    """
    if not 0 < mu < np.inf:
        raise ValueError(f"mu must be positive and finite, got {mu}")
    p = S.shape[-1]
    means = S.diagonal(dim1=1, dim2=2).mean(1)
    size = float(means.abs().mean())
    eye = torch.eye(p, dtype=S.dtype, device=S.device)
    spread = float(torch.linalg.matrix_norm(S - means[:, None, None] * eye).max()) / p**0.5
    # Multiples of I have no spread: then any positive number does, and all directions get the same share.
    path = _Path(S, s, max(spread, 1e-8 * size, np.finfo(float).tiny ** 0.5), tol)
    if found := _common_null_space(S, path.eigh, s, path.w):
        return found
    point, converged = path.descend(mu, limit=12)
    if not converged:  # many eigenvalues cross on the way: come from where the dual is smooth
        path.steps.clear()
        for coarse in (1e3 * mu, 1e2 * mu, 1e1 * mu, mu):
            point, _ = path.descend(coarse, limit=60)
    best = _certified(point, s)
    for fine in (mu / 10, mu / 100):
        if best.gap <= tol * path.scale:
            break
        point, _ = path.descend(fine, limit=60)
        best = min(best, _certified(point, s), key=lambda found: found.gap)
    if best.gap > 1e-5 * (1 + abs(best.primal)):
        warnings.warn(
            f"the solution is only known to lie within {best.gap:.1e} of the optimum {best.dual:.6g}: merge "
            "populations or choose another number of components",
            ConvergenceWarning,
            stacklevel=2,
        )
    return replace(best, eigh_calls=path.calls)


def _certified(point: _Point, s: int) -> JointSubspace:
    return JointSubspace(
        point.eigh.vectors[:, : len(point.shares)],
        point.shares,
        point.w,
        primal=float(point.gradient.max()),
        dual=float(point.eigh.values[:s].sum()),
        eigh_calls=0,
    )


def bottom_subspace(S: Float64[Tensor, "p p"], s: int) -> JointSubspace:
    """The eigenspace of the s smallest eigenvalues of one matrix, tied eigenvalues sharing what is left.

    Warns:
        NotIdentified: S vanishes on more than s dimensions.
    """
    w = np.ones(1)
    eigh = _decompose(S[None], w)
    if found := _common_null_space(S[None], eigh, s, w):
        return found
    e = eigh.values
    # Eigenvalues that differ by rounding only are tied.
    shares = fantope_shares(e, s, 1e-12 * max(float(e.abs().max()), np.finfo(float).tiny ** 0.5))
    active = int((shares > 0).sum())
    primal, dual = float(shares[:active] @ e[:active]), float(e[:s].sum())
    return JointSubspace(eigh.vectors[:, :active], shares[:active], w, primal, dual, eigh_calls=1)


def _common_null_space(S: Tensor, eigh: _Spectrum, s: int, w: np.ndarray) -> JointSubspace | None:
    """The average of all optima, where the S_k vanish together on more than s dimensions. ``eigh`` is that of S(w)."""
    size = float(S.diagonal(dim1=1, dim2=2).abs().mean())
    null = int((eigh.values < _NULL * size).sum())
    if null <= s:
        return None
    basis = eigh.vectors[:, :null]
    # Indefinite matrices (after a threshold) may cancel in S(w) without vanishing themselves.
    if float((basis.mT @ S @ basis).abs().max()) > 10 * len(S) * _NULL * size:
        return None
    warnings.warn(
        f"the data leave a common null space of dimension {null} > {s} = the number of components, and every subspace "
        "of it is optimal: their average is returned. Use threshold=, screen= or shrinkage=, or collect more samples",
        NotIdentified,
        stacklevel=3,
    )
    shares = torch.full((null,), s / null, dtype=S.dtype, device=S.device)
    return JointSubspace(basis, shares, w, primal=0.0, dual=0.0, eigh_calls=1, null_dim=null)
