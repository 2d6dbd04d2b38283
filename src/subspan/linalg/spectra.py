"""Leading parts and densities of spectra, from products with vectors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.linalg.lowrank import SVD, fix_signs
from subspan.linalg.orthogonal import orthonormalise

Matvec = Callable[[Tensor], Tensor]


class Eigh(NamedTuple):
    """Eigenvalues (k, descending) and orthonormal eigenvectors (n x k)."""

    values: Tensor
    vectors: Tensor


def randomized_svd(
    x: Float[Tensor, "m n"],
    rank: int,
    *,
    oversample: int = 8,
    power: int = 2,
    generator: torch.Generator | None = None,
) -> SVD:
    """Leading ``rank`` singular triples by a randomised range finder (Halko, Martinsson and Tropp 2011).

    ``power`` rounds of re-orthonormalised subspace iteration sharpen a slowly decaying spectrum. Signs are fixed.
    """
    m, n = x.shape
    if not 1 <= rank <= min(m, n):
        raise ValueError(f"rank must lie between 1 and min(m, n) = {min(m, n)}, got {rank}")
    k = min(rank + oversample, m, n)
    q = orthonormalise(x @ torch.randn(n, k, generator=generator, dtype=x.dtype, device=x.device))
    for _ in range(power):
        q = orthonormalise(x @ orthonormalise(x.mT @ q))
    u, s, vh = torch.linalg.svd(q.mT @ x, full_matrices=False)
    return fix_signs(SVD(q @ u[:, :rank], s[:rank], vh.mT[:, :rank]))


def _rayleigh_ritz(basis: Tensor, image: Tensor, k: int) -> tuple[Eigh, Tensor]:
    """Leading k Ritz pairs in an orthonormal basis with known image S basis, and the images of their vectors."""
    projected = basis.mT @ image
    values, vectors = torch.linalg.eigh((projected + projected.mT) / 2)
    lead = vectors[:, -k:].flip(-1)
    return Eigh(values[-k:].flip(-1), basis @ lead), image @ lead


def leading_eigh(
    s: Float[Tensor, "n n"] | Matvec,
    k: int,
    *,
    n: int | None = None,
    oversample: int = 8,
    depth: int = 6,
    tol: float = 1e-5,
    max_restarts: int = 50,
    like: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Eigh:
    """Leading ``k`` eigenpairs of a symmetric matrix (dense, or a product with n x b blocks) by restarted block Krylov.

    Each restart builds a Krylov basis of ``depth`` blocks of k + ``oversample`` columns, takes Ritz pairs and starts
    again from the leading ones, until every residual |S v - l v| is at most ``tol`` times the largest eigenvalue.
    Where the basis would fill the space, a dense matrix is decomposed exactly. Raises ``RuntimeError`` if the
    iteration does not converge. For a product give ``n`` and ``like`` (dtype and device of the vectors).
    """
    dense = s if isinstance(s, Tensor) else None
    size = dense.shape[0] if dense is not None else n
    proto = dense if dense is not None else like
    if size is None or proto is None:
        raise ValueError("a matrix product needs n= (its size) and like= (a tensor with its dtype and device)")
    if not 1 <= k <= size:
        raise ValueError(f"k must lie between 1 and n = {size}, got {k}")
    block = min(k + oversample, size)
    if dense is not None and block * depth >= size:
        values, vectors = torch.linalg.eigh(dense)
        return Eigh(values[-k:].flip(-1), vectors[:, -k:].flip(-1))
    apply: Matvec = dense.matmul if dense is not None else s  # pyright: ignore[reportAssignmentType]
    start = orthonormalise(torch.randn(size, block, generator=generator, dtype=proto.dtype, device=proto.device))
    for _ in range(max_restarts):
        basis, image = start, apply(start)
        last = image
        for _ in range(min(depth, size // block) - 1):
            fresh = last
            for _ in range(2):  # twice: once loses orthogonality when the residual is small
                fresh = orthonormalise(fresh - basis @ (basis.mT @ fresh))
            last = apply(fresh)
            basis, image = torch.cat([basis, fresh], 1), torch.cat([image, last], 1)
        pairs, images = _rayleigh_ritz(basis, image, block)
        residual = torch.linalg.norm(images - pairs.vectors * pairs.values, dim=0)
        if bool((residual[:k] <= tol * pairs.values.abs().max()).all()):
            return Eigh(pairs.values[:k], pairs.vectors[:, :k])
        start = pairs.vectors
    worst = float(residual[:k].max() / pairs.values.abs().max())
    raise RuntimeError(f"leading_eigh: residual {worst:.1e} after {max_restarts} restarts exceeds tol={tol:g}")


class Lanczos(NamedTuple):
    """S Q = Q T + (residual): T tridiagonal with ``diagonal`` (k) and ``offdiagonal`` (k - 1), Q n x k orthonormal."""

    diagonal: Tensor
    offdiagonal: Tensor
    Q: Tensor

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Ritz values (ascending) and the eigenvectors of T, as columns."""
        t = torch.diag(self.diagonal) + torch.diag(self.offdiagonal, 1) + torch.diag(self.offdiagonal, -1)
        values, vectors = torch.linalg.eigh(t)
        return values, vectors


def lanczos(matvec: Matvec, start: Float[Tensor, " n"], steps: int) -> Lanczos:
    """Lanczos tridiagonalisation with full re-orthogonalisation; stops early when the Krylov space is exhausted."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    norm = torch.linalg.norm(start)
    if not bool(norm > 0):
        raise ValueError("the start vector of lanczos is zero")
    basis, diagonal, offdiagonal = [start / norm], [], []
    for j in range(min(steps, start.shape[0])):
        w = matvec(basis[-1])
        diagonal.append(torch.dot(basis[-1], w))
        q = torch.stack(basis, 1)
        scale = torch.linalg.norm(w)
        for _ in range(2):
            w = w - q @ (q.mT @ w)
        beta = torch.linalg.norm(w)
        # Below this, w is rounding noise: the Krylov space is invariant.
        if j + 1 == min(steps, start.shape[0]) or not bool(beta > 10 * torch.finfo(w.dtype).eps * scale):
            break
        offdiagonal.append(beta)
        basis.append(w / beta)
    empty = start.new_zeros(0)
    return Lanczos(torch.stack(diagonal), torch.stack(offdiagonal) if offdiagonal else empty, torch.stack(basis, 1))


def spectral_density(
    matvec: Matvec,
    n: int,
    grid: Float[Tensor, " g"],
    *,
    bandwidth: float,
    steps: int = 64,
    probes: int = 8,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " g"]:
    """Density of the eigenvalues of a symmetric matrix on ``grid``, smoothed by a Gaussian of width ``bandwidth``.

    Stochastic Lanczos quadrature: the mean over Gaussian probes of the Ritz values' Gaussians, weighted by the squared
    first entries of T's eigenvectors (Golub and Welsch; Lin, Saad and Yang 2016). It integrates to one.
    """
    density = torch.zeros_like(grid)
    for _ in range(probes):
        probe = torch.randn(n, generator=generator, dtype=grid.dtype, device=grid.device)
        values, vectors = lanczos(matvec, probe, steps).ritz()
        kernel = torch.exp(-0.5 * ((grid[:, None] - values[None, :]) / bandwidth) ** 2)
        density += kernel @ vectors[0].square() / (bandwidth * (2 * torch.pi) ** 0.5)
    return density / probes
