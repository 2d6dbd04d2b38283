"""Kronecker-factored covariances: F = X ⊗ Y on column-stacked m x n matrices, with X n x n and Y m x m.

F is never formed: vec(Z)ᵀ (X ⊗ Y) vec(Z) = tr(Y Z X Zᵀ), and every power of F is the Kronecker product of the factors'
powers. A factor is held whole (``DenseCovariance``) or by its leading eigenpairs above a flat floor
(``SpikedCovariance``, for wide layers seen through a sketch); both answer the same questions.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.linalg.lowrank import LowRank, fix_signs
from subspan.linalg.spectra import Eigh, leading_eigh, leading_svd


@dataclass(frozen=True)
class DenseCovariance:
    """A symmetric positive semi-definite ``matrix`` (n x n)."""

    matrix: Tensor
    _leading: dict[int, Eigh] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def dim(self) -> int:
        return self.matrix.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def trace(self) -> Float[Tensor, ""]:
        return self.matrix.trace()

    @cached_property
    def eigh(self) -> Eigh:
        """All eigenpairs, descending."""
        values, vectors = torch.linalg.eigh(self.matrix)
        return Eigh(values.flip(-1), vectors.flip(-1))

    def leading(self, k: int) -> Eigh:
        """The leading ``k`` eigenpairs, by block Krylov where that is cheaper than the whole decomposition.

        Found once for each k: layers often share a covariance. The solver starts from a fixed random block, so the
        result is a function of the matrix.
        """
        if "eigh" in self.__dict__:
            return Eigh(self.eigh.values[:k], self.eigh.vectors[:, :k])
        if k not in self._leading:
            start = torch.Generator(self.matrix.device).manual_seed(0)
            self._leading[k] = leading_eigh(self.matrix, k, generator=start)
        return self._leading[k]

    def apply(self, x: Float[Tensor, "n *c"]) -> Float[Tensor, "n *c"]:
        return self.matrix @ x

    def form(self, v: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """Quadratic form vᵀ S v of each column."""
        return (v * self.apply(v)).sum(0)

    def damped(self, amount: float | Tensor) -> "DenseCovariance":
        """S + amount I."""
        eye = torch.eye(self.dim, dtype=self.matrix.dtype, device=self.matrix.device)
        return DenseCovariance(self.matrix + amount * eye)

    def power(self, p: float) -> "DenseCovariance":
        """S^p on the range of S (a pseudo-inverse for p < 0)."""
        return DenseCovariance(self.eigh.function(lambda values: _range_power(values, p)))

    def effective_rank(self) -> Float[Tensor, ""]:
        """Participation ratio tr(S)² / tr(S²): n for a flat spectrum, 1 for rank one, 0 for zero. O(n²)."""
        return _ratio(self.trace**2, self.matrix.square().sum())

    def dense(self) -> Float[Tensor, "n n"]:
        return self.matrix


@dataclass(frozen=True)
class SpikedCovariance:
    """S = V diag(values - floor) Vᵀ + floor I: k leading eigenpairs (descending) and a flat rest of the spectrum."""

    values: Tensor
    vectors: Tensor
    floor: Tensor

    @classmethod
    def with_trace(cls, leading: Eigh, trace: Tensor) -> "SpikedCovariance":
        """The flat rest that gives S this trace; eigenvalues below it (a sketch's last ones) are raised to it."""
        values, dim = leading.values, leading.vectors.shape[0]
        kept = torch.arange(1, values.shape[0] + 1, dtype=values.dtype, device=values.device)
        # The rest if only the first 1, 2, ... eigenvalues stand out. Rounding may leave more in them than the trace.
        rest = ((trace - values.cumsum(0)) / (dim - kept).clamp(min=1)).clamp(min=0.0)
        standing = values >= rest
        floor = rest[standing.nonzero()[-1, 0]] if bool(standing.any()) else trace / dim
        return cls(values.clamp(min=floor), leading.vectors, floor)

    @property
    def dim(self) -> int:
        return self.vectors.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.vectors.dtype

    @property
    def trace(self) -> Float[Tensor, ""]:
        return self.values.sum() + self.floor * (self.dim - self.values.shape[0])

    def leading(self, k: int) -> Eigh:
        """The leading ``k`` eigenpairs; raises ``ValueError`` beyond those that are kept."""
        if k > self.values.shape[0]:
            raise ValueError(f"only {self.values.shape[0]} leading eigenpairs were kept, {k} are wanted")
        return Eigh(self.values[:k], self.vectors[:, :k])

    def apply(self, x: Float[Tensor, "n *c"]) -> Float[Tensor, "n *c"]:
        return self.vectors @ ((self.values - self.floor)[:, None] * (self.vectors.mT @ x)) + self.floor * x

    def form(self, v: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """Quadratic form vᵀ S v of each column."""
        return (v * self.apply(v)).sum(0)

    def damped(self, amount: float | Tensor) -> "SpikedCovariance":
        """S + amount I."""
        return SpikedCovariance(self.values + amount, self.vectors, self.floor + amount)

    def power(self, p: float) -> "SpikedCovariance":
        """S^p on the range of S (a pseudo-inverse for p < 0)."""
        powers = _range_power(torch.cat([self.values, self.floor[None]]), p)
        return SpikedCovariance(powers[:-1], self.vectors, powers[-1])

    def effective_rank(self) -> Float[Tensor, ""]:
        """Participation ratio tr(S)² / tr(S²)."""
        square = self.values.square().sum() + self.floor**2 * (self.dim - self.values.shape[0])
        return _ratio(self.trace**2, square)

    def dense(self) -> Float[Tensor, "n n"]:
        return self.apply(torch.eye(self.dim, dtype=self.values.dtype, device=self.values.device))


Covariance = DenseCovariance | SpikedCovariance


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b.clamp(min=torch.finfo(b.dtype).tiny), torch.zeros_like(a))


def _range_power(values: Tensor, p: float) -> Tensor:
    """values^p, and zero where the eigenvalue is zero to working precision (those directions are not in the range)."""
    cutoff = values.shape[0] * torch.finfo(values.dtype).eps * values.max()
    inside = values > cutoff
    return torch.where(inside, torch.where(inside, values, 1.0) ** p, 0.0)


def nystrom(image: Float[Tensor, "n k"], test: Float[Tensor, "n k"]) -> Eigh:
    """Eigenpairs of the Nyström approximation (S Ω) (Ωᵀ S Ω)⁺ (S Ω)ᵀ of a PSD matrix from its image S Ω.

    The image is linear in S, so it can be streamed and summed over processes. Algorithm 3 of Tropp, Yurtsever, Udell
    and Cevher (2017), with their shift against rounding.
    """
    # Their shift: large enough for the Cholesky factor to exist, small beside every eigenvalue that is kept.
    shift = (image.shape[0] ** 0.5) * torch.finfo(image.dtype).eps * torch.linalg.norm(image)
    if not bool(shift > 0):
        return Eigh(image.new_zeros(image.shape[1]), torch.linalg.qr(test).Q)
    shifted = image + shift * test
    core = test.mT @ shifted
    chol, info = torch.linalg.cholesky_ex((core + core.mT) / 2)
    if int(info):
        # S of much lower rank than k: the same map by the pseudo-inverse root of the core.
        values, vectors = torch.linalg.eigh((core + core.mT) / 2)
        half = shifted @ (vectors * _range_power(values.clamp(min=0.0), -0.5))
    else:
        half = torch.linalg.solve_triangular(chol, shifted.mT, upper=False).mT
    u, s, _ = torch.linalg.svd(half, full_matrices=False)
    return Eigh((s.square() - shift).clamp(min=0.0), u)


class FisherSVD(NamedTuple):
    """Best approximation of a matrix in a Kronecker norm: ``low_rank`` and all (or the leading) weighted values."""

    low_rank: LowRank
    values: Tensor


@dataclass(frozen=True)
class KroneckerCovariance:
    """F = X ⊗ Y on column-stacked m x n matrices: ``X`` (n x n) of the columns' side, ``Y`` (m x m) of the rows'."""

    X: Covariance
    Y: Covariance

    @property
    def trace(self) -> Float[Tensor, ""]:
        return self.X.trace * self.Y.trace

    def apply(self, z: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """F vec(Z), as the matrix Y Z X."""
        return self.X.apply(self.Y.apply(z).mT).mT

    def energy(self, z: Float[Tensor, "m n"] | LowRank) -> Float[Tensor, ""]:
        """vec(Z)ᵀ F vec(Z) = tr(Y Z X Zᵀ); on factors it costs no m x n matrix."""
        if isinstance(z, LowRank):
            return ((z.A.mT @ self.Y.apply(z.A)) * (z.B.mT @ self.X.apply(z.B))).sum()
        return (z * self.apply(z)).sum()

    def pair_energies(self, u: Float[Tensor, "m k"], v: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """(uᵀ Y u)(vᵀ X v) of each column pair: the energy of the rank-one matrix u vᵀ."""
        return self.Y.form(u) * self.X.form(v)

    def damped(self, damping: float) -> "KroneckerCovariance":
        """Factored Tikhonov damping (Martens and Grosse 2015, section 6.3).

        With a, b the mean eigenvalues of X, Y, pi = sqrt(a / b) and gamma = damping² a b, the factors become
        X + pi sqrt(gamma) I = X + damping a I and Y + sqrt(gamma) / pi I = Y + damping b I.
        """
        a, b = self.X.trace / self.X.dim, self.Y.trace / self.Y.dim
        return KroneckerCovariance(self.X.damped(damping * a), self.Y.damped(damping * b))

    def power(self, p: float) -> "KroneckerCovariance":
        """F^p = X^p ⊗ Y^p on the range."""
        return KroneckerCovariance(self.X.power(p), self.Y.power(p))

    def truncate(self, w: Float[Tensor, "m n"], rank: int, generator: torch.Generator | None = None) -> FisherSVD:
        """Rank-``rank`` matrix nearest to ``w`` in the norm tr(Y Z X Zᵀ), in balanced factors (weighted Eckart-Young).

        Y^{1/2} W X^{1/2} = P D Qᵀ and W_r = Y^{-1/2} P_r D_r Q_rᵀ X^{-1/2}; the squared error is the sum of the d_i²
        that are left out.
        """
        return _truncate(self.power(0.5).apply(w), self.power(-0.5), rank, generator)

    def natural_step(self, g: Float[Tensor, "m n"], rank: int, generator: torch.Generator | None = None) -> FisherSVD:
        """Rank-``rank`` matrix nearest to the natural gradient F⁻¹ G in F's own norm: SVD of Y^{-1/2} G X^{-1/2}."""
        inverse = self.power(-0.5)
        return _truncate(inverse.apply(g), inverse, rank, generator)

    def dense(self) -> Float[Tensor, "mn mn"]:
        """X ⊗ Y as a matrix (small sizes only)."""
        return torch.kron(self.X.dense().contiguous(), self.Y.dense().contiguous())


def _truncate(
    whitened: Tensor, inverse_root: KroneckerCovariance, rank: int, generator: torch.Generator | None
) -> FisherSVD:
    p, d, q = fix_signs(leading_svd(whitened, rank, generator=generator))
    half = d[:rank].sqrt()
    left = inverse_root.Y.apply(p[:, :rank] * half)
    right = inverse_root.X.apply(q[:, :rank] * half)
    return FisherSVD(LowRank(left, right).balance(), d)
