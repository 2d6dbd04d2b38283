"""Matrices of low rank kept as factors, and the geometry of the set they form.

Z = A Bᵀ with A m x r and B n x r is never formed. Everything here depends on Z alone unless it says otherwise: the
factors (A R, B R⁻ᵀ) stand for the same Z for every invertible R (a change of gauge).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.linalg.orthogonal import nearest_orthogonal
from subspan.linalg.subspace import Subspace


class SVD(NamedTuple):
    """Z = U diag(S) Vᵀ with U m x k, S k (descending), V n x k."""

    U: Tensor
    S: Tensor
    V: Tensor


def fix_signs(svd: SVD) -> SVD:
    """Make the entry of largest magnitude in each column of U positive, so that the SVD is a function of Z."""
    row = svd.U.abs().argmax(dim=-2, keepdim=True)
    sign = torch.where(svd.U.gather(-2, row) < 0, -1.0, 1.0).to(svd.U.dtype)
    return SVD(svd.U * sign, svd.S, svd.V * sign)


@dataclass(frozen=True)
class LowRank:
    """Z = A Bᵀ, with A (m x r) and B (n x r) in floating point of one dtype on one device.

    The geometry (svd, balance, norm, tangent, retract, align_to) allows equal leading batch dimensions on both.
    """

    A: Tensor
    B: Tensor

    def __post_init__(self) -> None:
        if self.A.shape[-1] != self.B.shape[-1]:
            raise ValueError(f"A has {self.A.shape[-1]} columns but B has {self.B.shape[-1]}; Z = A Bᵀ needs as many")

    @classmethod
    def from_svd(cls, svd: SVD) -> "LowRank":
        """Balanced factors A = U S^{1/2}, B = V S^{1/2}."""
        root = svd.S.sqrt().unsqueeze(-2)
        return cls(svd.U * root, svd.V * root)

    @property
    def shape(self) -> tuple[int, int]:
        return self.A.shape[-2], self.B.shape[-2]

    @property
    def rank(self) -> int:
        """Number of columns of the factors, an upper bound of the rank of Z."""
        return self.A.shape[-1]

    def dense(self) -> Float[Tensor, "*b m n"]:
        return self.A @ self.B.mT

    def svd(self) -> SVD:
        """Thin SVD from two QRs and one r x r SVD, O((m + n) r²); signs fixed by U's largest entries."""
        qa, ra = torch.linalg.qr(self.A)
        qb, rb = torch.linalg.qr(self.B)
        p, s, wh = torch.linalg.svd(ra @ rb.mT, full_matrices=False)
        return fix_signs(SVD(qa @ p, s, qb @ wh.mT))

    def balance(self) -> "LowRank":
        """The same Z with AᵀA = BᵀB = S, by the sign-fixed SVD: a canonical gauge."""
        return LowRank.from_svd(self.svd())

    def imbalance(self) -> Float[Tensor, "*b"]:
        """|AᵀA - BᵀB|_F / |AᵀA|_F: zero in a balanced gauge."""
        m, n = self.A.mT @ self.A, self.B.mT @ self.B
        return torch.linalg.matrix_norm(m - n) / torch.linalg.matrix_norm(m)

    def regauge(self, r: Float[Tensor, "r r"]) -> "LowRank":
        """The same Z from (A R, B R⁻ᵀ), R invertible."""
        return LowRank(self.A @ r, torch.linalg.solve(r, self.B.mT).mT)

    def align_to(self, reference: "LowRank") -> "LowRank":
        """Rotate both factors by the orthogonal Q that brings them nearest to the reference's factors."""
        q = nearest_orthogonal(self.A.mT @ reference.A + self.B.mT @ reference.B)
        return LowRank(self.A @ q, self.B @ q)

    def norm(self) -> Float[Tensor, "*b"]:
        """Frobenius norm, from the R factors (Grams would square the condition number)."""
        return torch.linalg.matrix_norm(torch.linalg.qr(self.A).R @ torch.linalg.qr(self.B).R.mT)

    def inner(self, other: "LowRank") -> Float[Tensor, ""]:
        """<Z, Z'>_F = sum of (AᵀA') * (BᵀB'), O((m + n) r r')."""
        return ((self.A.mT @ other.A) * (self.B.mT @ other.B)).sum()

    def __add__(self, other: "LowRank") -> "LowRank":
        """Exact sum, of rank r + r' (factors side by side)."""
        if self.shape != other.shape:
            raise ValueError(f"cannot add low-rank matrices of shapes {self.shape} and {other.shape}")
        return LowRank(torch.cat([self.A, other.A], -1), torch.cat([self.B, other.B], -1))

    def scale(self, c: float) -> "LowRank":
        return LowRank(self.A * c, self.B)

    def truncate(self, rank: int) -> "LowRank":
        """Best approximation of Z of the given rank (Eckart-Young), in balanced factors; zero columns if Z has less."""
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        u, s, v = self.svd()
        kept = LowRank.from_svd(SVD(u[:, :rank], s[:rank], v[:, :rank]))
        missing = rank - kept.rank
        if missing > 0:
            kept = LowRank(*(torch.nn.functional.pad(f, (0, missing)) for f in (kept.A, kept.B)))
        return kept

    @classmethod
    def merge(
        cls, terms: Sequence["LowRank"], weights: Sequence[float] | None = None, rank: int | None = None
    ) -> "LowRank":
        """Weighted sum of low-rank matrices by QR of the stacked factors; ``rank`` keeps the leading directions only.

        Without ``rank`` the sum is exact, with as many columns as the terms have together.
        """
        if not terms:
            raise ValueError("merge needs at least one low-rank matrix")
        scaled = [t.scale(w) for t, w in zip(terms, weights or [1.0] * len(terms), strict=True)]
        total = scaled[0]
        for term in scaled[1:]:
            total = total + term
        return total if rank is None else total.truncate(rank)

    def column_space(self, tol: float | None = None) -> Subspace:
        """Span of the columns of Z; singular values up to ``tol`` times the largest are dropped (default: roundoff)."""
        u, s, _ = self.svd()
        return Subspace(u[:, self._significant(s, tol)])

    def row_space(self, tol: float | None = None) -> Subspace:
        """Span of the rows of Z, with the same rule as ``column_space``."""
        _, s, v = self.svd()
        return Subspace(v[:, self._significant(s, tol)])

    def _significant(self, s: Tensor, tol: float | None) -> Tensor:
        tol = max(self.shape) * torch.finfo(s.dtype).eps if tol is None else tol
        return s > tol * s.max()

    def damp_columns(self, space: Subspace, alpha: float) -> "LowRank":
        """(I - alpha Q Qᵀ) Z: remove the share ``alpha`` of the columns' part inside ``space``, on the factors."""
        return LowRank(self.A - alpha * space.project(self.A), self.B)

    def tangent(self) -> "TangentSpace":
        """Tangent space at Z of the manifold of m x n matrices of rank r; needs both factors of full column rank."""
        u, s, v = self.svd()  # sign-fixed: coordinates, and noise drawn in them, are functions of Z alone
        ratio = float((s[..., -1] / s[..., 0]).nan_to_num(0.0).min()) if s.shape[-1] == self.rank else 0.0
        if not ratio > torch.finfo(s.dtype).eps:
            raise ValueError(
                f"the {self.shape[0]} x {self.shape[1]} matrix of factor rank {self.rank} is rank deficient (smallest "
                f"singular value {ratio:.1e} of the largest): it has no tangent space"
            )
        return TangentSpace(u, s, v, u.mT @ self.A, v.mT @ self.B)

    def retract(self, dA: Float[Tensor, "*b m r"], dB: Float[Tensor, "*b n r"], step: float) -> "LowRank":
        """Best rank-r approximation of Z + step (dA Bᵀ + A dBᵀ), in sign-fixed balanced factors, O((m + n) r²).

        There is no step² dA dBᵀ term. If fewer than r singular values survive, the last columns are zero.
        """
        r = self.rank
        eye = torch.eye(r, dtype=self.A.dtype, device=self.A.device)
        core = torch.zeros(2 * r, 2 * r, dtype=self.A.dtype, device=self.A.device)
        core[:r, :r], core[:r, r:], core[r:, :r] = eye, step * eye, step * eye
        qu, ru = torch.linalg.qr(torch.cat([self.A, dA], -1))
        qv, rv = torch.linalg.qr(torch.cat([self.B, dB], -1))
        u, s, vh = torch.linalg.svd(ru @ core @ rv.mT)
        return LowRank.from_svd(fix_signs(SVD(qu @ u[..., :r], s[..., :r], qv @ vh.mT[..., :r])))


class TangentVector(NamedTuple):
    """The tangent vector U X Vᵀ + Up Vᵀ + U Vpᵀ by its orthogonal coordinates (leading batch dimensions allowed).

    X is r x r, Up m x r with UᵀUp = 0, Vp n x r with VᵀVp = 0.
    """

    X: Tensor
    Up: Tensor
    Vp: Tensor

    def norm_sq(self) -> Float[Tensor, "*b"]:
        """Squared Frobenius norm: a sum of squares, so it cannot cancel."""
        flat = (part.flatten(-2).square().sum(-1) for part in self)
        return sum(flat)  # pyright: ignore[reportReturnType]

    def add(self, other: "TangentVector", scale: float = 1.0) -> "TangentVector":
        return TangentVector(*(a + scale * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class TangentSpace:
    """Tangent space at Z = U diag(S) Vᵀ = A Bᵀ, where A = U TA and B = V TB (TA, TB r x r and invertible)."""

    U: Tensor
    S: Tensor
    V: Tensor
    TA: Tensor
    TB: Tensor

    @property
    def dim(self) -> int:
        """r (m + n - r)."""
        r = self.U.shape[-1]
        return r * (self.U.shape[-2] + self.V.shape[-2] - r)

    @cached_property
    def inverses(self) -> tuple[Tensor, Tensor]:
        """TA⁻¹ and TB⁻¹."""
        eye = torch.eye(self.TA.shape[-1], dtype=self.TA.dtype, device=self.TA.device)
        return torch.linalg.solve(self.TA, eye), torch.linalg.solve(self.TB, eye)

    def coordinates(self, gA: Float[Tensor, "*b m r"], gB: Float[Tensor, "*b n r"]) -> TangentVector:
        """Coordinates of the projection P(G) from the factor gradients gA = G B and gB = Gᵀ A; G is never formed.

        With A = U TA and B = V TB: G V = gA TB⁻¹ and Gᵀ U = gB TA⁻¹, so the error grows with cond(B), not cond(B)².
        """
        inv_a, inv_b = self.inverses
        return self.split(gA @ inv_b, gB @ inv_a)

    def coordinates_of(self, G: Float[Tensor, "*b m n"]) -> TangentVector:
        """Coordinates of P(G) for a dense G."""
        return self.split(G @ self.V, G.mT @ self.U)

    def split(self, gv: Float[Tensor, "*b m r"], gu: Float[Tensor, "*b n r"]) -> TangentVector:
        """Coordinates of P(G) from gv = G V and gu = Gᵀ U.

        Each part is projected by itself: |X|² + |Up|² = |gv|² and |Vp|² = |gu|² - |Vᵀ gu|² hold to rounding even where
        half-precision inputs make the two disagree about X.
        """
        x = self.U.mT @ gv
        return TangentVector(x, gv - self.U @ x, gu - self.V @ (self.V.mT @ gu))

    def coordinates_of_lift(self, dA: Float[Tensor, "*b m r"], dB: Float[Tensor, "*b n r"]) -> TangentVector:
        """Coordinates of dA Bᵀ + A dBᵀ (always a tangent vector)."""
        left, right = dA @ self.TB.mT, dB @ self.TA.mT
        xa, xb = self.U.mT @ left, self.V.mT @ right
        return TangentVector(xa + xb.mT, left - self.U @ xa, right - self.V @ xb)

    def lift(self, v: TangentVector) -> tuple[Tensor, Tensor]:
        """(dA, dB) with dA Bᵀ + A dBᵀ = v, horizontal for the metric tr(dAᵀdA BᵀB) + tr(dBᵀdB AᵀA)."""
        inv_a, inv_b = self.inverses
        return (v.Up + 0.5 * self.U @ v.X) @ inv_b.mT, (v.Vp + 0.5 * self.V @ v.X.mT) @ inv_a.mT

    def factor_gradients(self, v: TangentVector) -> tuple[Tensor, Tensor]:
        """(G B, Gᵀ A) for the tangent vector G = v: what back-propagation would leave on the factors."""
        return (self.U @ v.X + v.Up) @ self.TB, (self.V @ v.X.mT + v.Vp) @ self.TA

    def dense(self, v: TangentVector) -> Float[Tensor, "*b m n"]:
        return (self.U @ v.X + v.Up) @ self.V.mT + self.U @ v.Vp.mT

    def project(self, G: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b m n"]:
        """P(G) = G - (I - U Uᵀ) G (I - V Vᵀ), dense."""
        return self.dense(self.coordinates_of(G))

    def gaussian(self, generator: torch.Generator | None = None) -> TangentVector:
        """A draw with the law of P(Ξ), Ξ an m x n matrix of iid N(0, 1), from r (m + n + r) normal numbers.

        The numbers are drawn on the generator's device.
        """

        def normal(*shape: int) -> Tensor:
            where = self.U.device if generator is None else generator.device
            return torch.randn(*shape, generator=generator, dtype=self.U.dtype, device=where).to(self.U.device)

        up, vp = normal(*self.U.shape), normal(*self.V.shape)
        x = normal(*self.S.shape, self.S.shape[-1])
        return TangentVector(x, up - self.U @ (self.U.mT @ up), vp - self.V @ (self.V.mT @ vp))
