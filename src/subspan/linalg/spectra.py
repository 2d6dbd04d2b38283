"""Leading parts and densities of spectra, from products with vectors."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.linalg.lowrank import SVD, fix_signs
from subspan.linalg.orthogonal import orthonormalise

Matvec = Callable[[Tensor], Tensor]


@runtime_checkable
class Operator(Protocol):
    """An m x n matrix that is known by its products ``x @ block`` and ``x.mT @ block``; a tensor is one."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def mT(self) -> "Operator": ...
    def __matmul__(self, other: Tensor, /) -> Tensor: ...


class Eigh(NamedTuple):
    """Eigenvalues (k, descending) and orthonormal eigenvectors (n x k)."""

    values: Tensor
    vectors: Tensor

    def function(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """V diag(f(values)) Vᵀ, also in batches."""
        return (self.vectors * f(self.values).unsqueeze(-2)) @ self.vectors.mT


def spectral_function(s: Float[Tensor, "*b n n"], f: Callable[[Tensor], Tensor]) -> Float[Tensor, "*b n n"]:
    """f(S) of a symmetric matrix (its lower triangle is read): f maps the eigenvalues, all at once, to as many numbers.

    Floors and cut-offs belong into f, which sees the whole spectrum; rounding may leave zero eigenvalues negative.
    """
    values, vectors = torch.linalg.eigh(s)
    return Eigh(values.flip(-1), vectors.flip(-1)).function(f)


def _gaussian(rows: int, columns: int, like: Tensor | Operator, generator: torch.Generator | None) -> Tensor:
    """Drawn on the generator's device, which need not be that of ``like``."""
    where = like.device if generator is None else generator.device
    return torch.randn(rows, columns, generator=generator, dtype=like.dtype, device=where).to(like.device)


def randomized_svd(
    x: Float[Tensor, "m n"] | Operator,
    rank: int,
    *,
    oversample: int = 8,
    power: int = 2,
    generator: torch.Generator | None = None,
) -> SVD:
    """Leading ``rank`` singular triples by a randomised range finder (Halko, Martinsson and Tropp 2011).

    ``power`` rounds of re-orthonormalised subspace iteration sharpen a slowly decaying spectrum. Signs are fixed. Of
    the matrix only products with m x k and n x k blocks are needed.
    """
    m, n = x.shape
    if not 1 <= rank <= min(m, n):
        raise ValueError(f"rank must lie between 1 and min(m, n) = {min(m, n)}, got {rank}")
    k = min(rank + oversample, m, n)
    q = orthonormalise(x @ _gaussian(n, k, x, generator))
    for _ in range(power):
        q = orthonormalise(x @ orthonormalise(x.mT @ q))
    u, s, vh = torch.linalg.svd((x.mT @ q).mT, full_matrices=False)
    return fix_signs(SVD(q @ u[:, :rank], s[:rank], vh.mT[:, :rank]))


def leading_svd(x: Float[Tensor, "m n"], rank: int, *, generator: torch.Generator | None = None) -> SVD:
    """The leading ``rank`` singular triples or more: all where min(m, n) <= 1024, else by ``randomized_svd``."""
    if min(x.shape) <= 1024:
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return SVD(u, s, vh.mT)
    # Twice the rank and four rounds: the error of the subspace falls as (s_{2r+1} / s_r)^9.
    return randomized_svd(x, rank, oversample=max(8, rank), power=4, generator=generator)


def _rayleigh_ritz(basis: Tensor, image: Tensor) -> tuple[Eigh, Tensor]:
    """Ritz pairs (descending) in an orthonormal basis with known image S basis, and the images of their vectors."""
    projected = basis.mT @ image
    values, vectors = torch.linalg.eigh((projected + projected.mT) / 2)
    vectors = vectors.flip(-1)
    return Eigh(values.flip(-1), basis @ vectors), image @ vectors


def _orthogonal_to(basis: Tensor, x: Tensor) -> Tensor:
    """Orthonormal columns from the part of ``x`` outside the basis (twice: once loses it when little is left)."""
    for _ in range(2):
        x = orthonormalise(x - basis @ (basis.mT @ x))
    return x


def leading_eigh(
    s: Float[Tensor, "n n"] | Matvec,
    k: int,
    *,
    n: int | None = None,
    oversample: int = 0,
    depth: int = 8,
    tol: float = 1e-5,
    angle: float = 2e-4,
    max_restarts: int = 60,
    like: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Eigh:
    """Leading ``k`` eigenpairs of a symmetric matrix (dense, or a product with n x b blocks) by block Krylov-Schur.

    The Krylov basis holds ``depth`` blocks of k + ``oversample`` columns (8 at least); when it is full, its leading
    Ritz vectors are kept and it grows again (Stewart 2001), until every residual |S v - l v| is at most ``tol`` |l|,
    or so small beside the gap below the k-th Ritz value that the subspace is known to within ``angle`` radians (Davis
    and Kahan 1970), or lost in rounding. Small matrices are decomposed whole, and so are dense ones on which it does
    not converge; a product raises ``RuntimeError`` then. For a product give ``n`` and ``like`` (a tensor with the dtype
    and device of the vectors).
    """
    dense = s if isinstance(s, Tensor) else None
    size = dense.shape[0] if dense is not None else n
    proto = dense if dense is not None else like
    if size is None or proto is None:
        raise ValueError("a matrix product needs n= (its size) and like= (a tensor with its dtype and device)")
    if not 1 <= k <= size:
        raise ValueError(f"k must lie between 1 and n = {size}, got {k}")
    block = min(max(k + oversample, 8), size)
    apply: Matvec = dense.matmul if dense is not None else s  # pyright: ignore[reportAssignmentType]
    # Measured on CPU: there the whole decomposition is as fast.
    if 2 * block * depth >= size or (dense is not None and size <= 256):
        return _whole(apply(torch.eye(size, dtype=proto.dtype, device=proto.device)) if dense is None else dense, k)
    basis = orthonormalise(_gaussian(size, block, proto, generator))
    image = last = apply(basis)
    width = depth * block
    error = torch.inf
    for _ in range(max_restarts):
        while basis.shape[1] + block <= width:
            fresh = _orthogonal_to(basis, last)
            last = apply(fresh)
            basis, image = torch.cat([basis, fresh], 1), torch.cat([image, last], 1)
        pairs, images = _rayleigh_ritz(basis, image)
        residual = torch.linalg.norm(images[:, :k] - pairs.vectors[:, :k] * pairs.values[:k], dim=0)
        scale = pairs.values.abs().max()
        gap = pairs.values[k - 1] - pairs.values[min(k, width - 1)]
        known = torch.maximum(tol * pairs.values[:k].abs(), angle * gap)
        error = (residual / scale).max()
        # No residual falls below a few roundings of the largest eigenvalue.
        if bool((residual <= known.clamp(min=10 * torch.finfo(proto.dtype).eps * scale)).all()):
            return Eigh(pairs.values[:k], pairs.vectors[:, :k])
        # S maps the kept Ritz vectors into their own span and that of the next block: no product is wasted.
        fresh, keep = _orthogonal_to(basis, last), max(block, (width - block) // 2)
        last = apply(fresh)
        basis, image = torch.cat([pairs.vectors[:, :keep], fresh], 1), torch.cat([images[:, :keep], last], 1)
    if dense is not None:
        return _whole(dense, k)
    raise RuntimeError(
        f"leading_eigh: residual {float(error):.1e} of the largest eigenvalue after {max_restarts} "
        "restarts; give a looser tol or more restarts"
    )


def _whole(s: Tensor, k: int) -> Eigh:
    values, vectors = torch.linalg.eigh(s)
    return Eigh(values[-k:].flip(-1), vectors[:, -k:].flip(-1))


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
        probe = _gaussian(n, 1, grid, generator)[:, 0]
        values, vectors = lanczos(matvec, probe, steps).ritz()
        kernel = torch.exp(-0.5 * ((grid[:, None] - values[None, :]) / bandwidth) ** 2)
        density += kernel @ vectors[0].square() / (bandwidth * (2 * torch.pi) ** 0.5)
    return density / probes
