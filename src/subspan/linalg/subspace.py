"""A subspace by an orthonormal basis, and scalar summaries of a spectrum."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subspan.linalg.orthogonal import orthonormalise


@dataclass(frozen=True)
class Subspace:
    """The span of the orthonormal columns of ``Q`` (n x k; k = 0 is the zero subspace)."""

    Q: Tensor

    @classmethod
    def span(cls, x: Float[Tensor, "n k"], tol: float | None = None) -> "Subspace":
        """Span of the columns of ``x``, dropping directions whose singular value is at most ``tol`` times the largest.

        The default ``tol`` is max(n, k) times machine epsilon, as in numerical rank.
        """
        u, s, _ = torch.linalg.svd(x, full_matrices=False)
        tol = max(x.shape) * torch.finfo(x.dtype).eps if tol is None else tol
        return cls(u[:, s > tol * s.max()] if s.numel() else u)

    @property
    def dim(self) -> int:
        return self.Q.shape[-1]

    @property
    def ambient(self) -> int:
        return self.Q.shape[-2]

    def coordinates(self, x: Float[Tensor, "n *c"]) -> Float[Tensor, "k *c"]:
        """Qᵀ x."""
        return self.Q.mT @ x

    def project(self, x: Float[Tensor, "n *c"]) -> Float[Tensor, "n *c"]:
        """Q (Qᵀ x), never forming Q Qᵀ."""
        return self.Q @ (self.Q.mT @ x)

    def reject(self, x: Float[Tensor, "n *c"]) -> Float[Tensor, "n *c"]:
        """x - Q (Qᵀ x): the part of ``x`` outside the subspace."""
        return x - self.project(x)

    def complement(self) -> "Subspace":
        """Orthogonal complement, by the trailing columns of a full QR."""
        full, _ = torch.linalg.qr(self.Q, mode="complete")
        return Subspace(full[:, self.dim :])

    def extended(self, x: Float[Tensor, "n c"]) -> "Subspace":
        """Span of this subspace and the columns of ``x``; the columns of Q stay as they are."""
        # Rejecting twice restores the orthogonality lost to cancellation when x lies almost inside.
        fresh = Subspace.span(self.reject(x))
        return Subspace(torch.cat([self.Q, orthonormalise(self.reject(fresh.Q))], dim=-1))

    def principal_angles(self, other: "Subspace") -> Float[Tensor, " k"]:
        """Principal angles in radians, ascending (min(dim) of them).

        Cosines lose all angles below 1e-8, sines lose those near pi/2, so each angle is read from the better one
        (Bjoerck and Golub 1973).
        """
        small, large = (self, other) if self.dim <= other.dim else (other, self)
        cosine = torch.linalg.svdvals(large.Q.mT @ small.Q).clamp(max=1.0)
        sine = torch.linalg.svdvals(large.reject(small.Q)).flip(-1).clamp(max=1.0)
        return torch.where(cosine**2 > 0.5, torch.arcsin(sine), torch.arccos(cosine))

    def overlap(self, other: "Subspace") -> Float[Tensor, ""]:
        """Mean squared cosine of the principal angles, |Q₁ᵀ Q₂|_F² / min(dim): 1 when one contains the other."""
        return (self.Q.mT @ other.Q).square().sum() / max(1, min(self.dim, other.dim))

    def captured_energy(self, x: Float[Tensor, "n *c"]) -> Float[Tensor, ""]:
        """Share of |x|_F² inside the subspace, in [0, 1] (0 for x = 0)."""
        total = x.square().sum()
        inside = self.coordinates(x).square().sum()
        return torch.where(total > 0, inside / total.clamp(min=torch.finfo(x.dtype).tiny), torch.zeros_like(total))


def singular_values(x: Float[Tensor, "m n"]) -> Float[Tensor, " k"]:
    """All singular values, ascending, in float64 from the eigenvalues of the smaller Gram matrix.

    Many times faster than an SVD, for summaries that need s²: values below 1e-8 of the largest are rounding noise (3e-4
    on MPS, which has no float64 and computes in float32).
    """
    x = x.to(torch.float64 if x.device.type != "mps" else torch.float32)
    gram = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()  # rounding leaves zero eigenvalues slightly negative


def stable_rank(s: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """|X|_F² / |X|_2² from the singular values ``s``; between 1 and the rank, and 0 for a zero matrix."""
    energy = s.square()
    top = energy.amax(-1)
    return torch.where(top > 0, energy.sum(-1) / top.clamp(min=torch.finfo(s.dtype).tiny), torch.zeros_like(top))


def _entropy(s: Tensor) -> Tensor:
    energy = s.square()
    p = energy / energy.sum(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)
    return -torch.special.xlogy(p, p).sum(-1)


def spectral_entropy(s: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """Entropy of the energies s² / sum s², divided by ln k: 0 for rank one, 1 for a flat spectrum (0 where k = 1)."""
    k = s.shape[-1]
    return _entropy(s) / torch.log(torch.tensor(float(max(k, 2)), dtype=s.dtype, device=s.device))


def effective_rank(s: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """exp of the entropy of the energies s² / sum s²: the number of directions that carry the matrix.

    It is k for a flat spectrum, 1 for rank one, and 0 for a zero matrix.
    """
    return torch.where(s.amax(-1) > 0, _entropy(s).exp(), torch.zeros_like(s[..., 0]))


def energy_rank(s: Float[Tensor, "*b k"], energy: float = 0.99) -> Int[Tensor, "*b"]:
    """The smallest k such that the first k of the descending singular values hold this share of sum s².

    0 for a zero matrix. For the whole range of shares see ``effective_rank``, which needs none.
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy is a share of the whole, above 0 and at most 1, got {energy}")
    held = s.square().cumsum(-1)
    total = held[..., -1:]
    return ((held < energy * total).sum(-1, keepdim=True) + (total > 0)).squeeze(-1)


def projection_kernel(bases: Float[Tensor, "k n s"]) -> Float[Tensor, "k k"]:
    """|Q_iᵀ Q_j|_F² / s for k orthonormal n x s bases: 1 for equal spans, 0 for orthogonal ones.

    The Gram matrix of the projectors Q Qᵀ / √s, so positive semi-definite and blind to the choice of each basis.
    """
    k, n, s = bases.shape
    flat = bases.permute(1, 0, 2).reshape(n, k * s)
    return (flat.mT @ flat).view(k, s, k, s).square().sum((1, 3)) / s
