"""Orthogonal factors: orthonormal bases and Procrustes rotations."""

import torch
from jaxtyping import Float
from torch import Tensor


def orthonormalise(x: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b n k"]:
    """Orthonormal basis of the columns of ``x`` (n >= k) by Householder QR, with R's diagonal made non-negative.

    The sign rule makes the result a continuous, deterministic function of ``x`` (for full column rank).
    """
    q, r = torch.linalg.qr(x)
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(x.dtype)
    return q * sign.unsqueeze(-2)


def random_orthonormal(
    n: int,
    k: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Float[Tensor, "n k"]:
    """Haar-distributed n x k matrix with orthonormal columns (QR of a Gaussian, signs fixed)."""
    if k > n:
        raise ValueError(f"cannot have {k} orthonormal columns in dimension {n}")
    return orthonormalise(torch.randn(n, k, generator=generator, dtype=dtype, device=device))


def polar(x: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b m n"]:
    """Exact polar factor P Qᵀ of the thin SVD x = P S Qᵀ: the nearest matrix with orthonormal rows or columns.

    Directions whose singular value is zero to working precision are left out, so ``polar(0) = 0``.
    """
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    # Relative to the largest singular value, below this the singular vectors are rounding noise.
    cutoff = max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    keep = (s > cutoff * s[..., :1]).to(x.dtype)
    return (u * keep.unsqueeze(-2)) @ vh


def procrustes(source: Float[Tensor, "*b n k"], target: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b k k"]:
    """Orthogonal Q minimising |source Q - target|_F: the orthogonal factor of sourceᵀ target (Schoenemann 1966).

    Unlike ``polar`` it completes a rank-deficient product, so that Q is always orthogonal.
    """
    return nearest_orthogonal(source.mT @ target)


def nearest_orthogonal(x: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b k k"]:
    """Orthogonal matrix nearest to the square ``x`` in Frobenius norm (any one, where ``x`` is singular)."""
    u, _, vh = torch.linalg.svd(x)
    return u @ vh
