"""Orthogonal factors: orthonormal bases, polar factors (exact and by Newton-Schulz) and Procrustes rotations."""

from functools import cache
from typing import Literal

import numpy as np
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


def hadamard_transform(x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """x H with the normalised n x n Walsh-Hadamard matrix (Sylvester's order), n a power of two, in O(n log n).

    H is symmetric and orthogonal: a second transform undoes the first.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Walsh-Hadamard transform needs a power of two, got length {n}")
    y = x.reshape(-1, n)
    half = 1
    while half < n:
        a, b = y.view(-1, n // (2 * half), 2, half).unbind(2)
        y = torch.stack([a + b, a - b], 2).view(-1, n)
        half *= 2
    return (y / n**0.5).view(x.shape)


NSMethod = Literal["quintic", "polar_express", "exact"]

# Keller Jordan's quintic: the slope at 0 (3.4445 a step) is bought by not converging; values settle in [0.68, 1.21].
_QUINTIC = (3.4445, -4.7750, 2.0315)

# polar_express_coeffs() with its defaults. Further steps repeat the last triple.
_POLAR_EXPRESS = (
    (8.2373124905, -23.1577474146, 16.6805684114),
    (4.08244199906, -2.89304773533, 0.525284925698),
    (3.92634799225, -2.85474680348, 0.531802242289),
    (3.29821871331, -2.42454198103, 0.486320083588),
    (2.29703694346, -1.63662558126, 0.400262845595),
    (1.87638053514, -1.23478965777, 0.358918875017),
    (1.85644234856, -1.21324498808, 0.356800348777),
    (1.85643691161, -1.21324017101, 0.356800851403),
    (1.85643116714, -1.21322890849, 0.356795331117),
    (1.87499547757, -1.24999095516, 0.374995477589),
)


def ns_coefficients(method: NSMethod, steps: int) -> list[tuple[float, float, float]]:
    """The triples (a, b, c) of ``steps`` odd quintics p(x) = a x + b x³ + c x⁵ (none for "exact")."""
    if method == "quintic":
        return [_QUINTIC] * steps
    if method == "polar_express":
        return list(_POLAR_EXPRESS[:steps]) + [_POLAR_EXPRESS[-1]] * max(0, steps - len(_POLAR_EXPRESS))
    raise ValueError(f"method must be 'quintic', 'polar_express' or 'exact', got {method!r}")


def newton_schulz(
    x: Float[Tensor, "*b m n"],
    steps: int = 5,
    method: NSMethod = "quintic",
    fast: bool | Literal["auto"] = "auto",
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Float[Tensor, "*b m n"]:
    """Approximate polar factor of each matrix by ``steps`` odd quintics in X Xᵀ, without an SVD.

    ``quintic`` leaves singular values above about 0.002 |X|_F within [0.68, 1.21] after 5 steps and no others above
    1.21; it does not converge. ``polar_express`` (Amsel et al. 2025) converges: within 1e-5 of 1 after 8 steps for
    those above 1.1e-3 |X|_F. ``exact`` is ``polar``.

    ``fast`` iterates on the small Gram matrix instead (four products over the long side in place of fifteen, always in
    float32 or better; the result is the same up to rounding). "auto" chooses it where one side is at most a quarter of
    the other. The plain loop runs in ``dtype`` (default: that of ``x``). ``overwrite`` allows to use the memory of
    ``x`` for scratch and result, which saves one copy.

    Inputs with |X|_F below about 1e-6 are attenuated (1e-7 is added to the norm), and a zero matrix stays zero.
    """
    if not 1 <= steps < 100:
        raise ValueError(f"steps must lie between 1 and 99, got {steps}")
    at_least_single = torch.promote_types(x.dtype, torch.float32)
    if method == "exact":
        return polar(x.to(at_least_single)).to(x.dtype)
    triples = ns_coefficients(method, steps)
    # Rounding could push the largest singular value above 1, where the first Polar Express step diverges.
    margin = 1.1 if method == "polar_express" else 1.0
    short, long = sorted(x.shape[-2:])
    if fast is True or (fast == "auto" and 4 * short <= long):
        y = x.to(at_least_single)
        return _gram_newton_schulz(y, triples, margin, overwrite or y is not x).to(x.dtype)
    y = x if dtype is None else x.to(dtype)
    return _plain_newton_schulz(y, triples, margin, overwrite or y is not x).to(x.dtype)


# Added to the norm to keep 0 / 0 out; far below any gradient worth following.
_EPS = 1e-7


def _plain_newton_schulz(
    x: Tensor, triples: list[tuple[float, float, float]], margin: float, overwrite: bool
) -> Tensor:
    """X <- a X + (b S + c S²) X with S = X Xᵀ over the shorter side."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.reshape(-1, *x.shape[-2:])
    y = y.mT if tall else y
    norm = margin * torch.linalg.matrix_norm(y, keepdim=True) + _EPS
    y = y.div_(norm) if overwrite else y / norm
    spare = torch.empty_like(y) if overwrite else None
    for triple in triples:
        y, spare = _quintic_step(y, triple, spare), y if overwrite else None
    return (y.mT if tall else y).reshape(x.shape)


def _quintic_step(y: Tensor, triple: tuple[float, float, float], out: Tensor | None) -> Tensor:
    a, b, c = triple
    s = y @ y.mT
    return torch.baddbmm(y, torch.baddbmm(s, s, s, beta=b, alpha=c), y, beta=a, out=out)


# Steps before the Gram matrix is formed anew. A Gram matrix in float32 loses the directions below 3e-4 of the largest
# singular value; two steps raise them, and a second Gram matrix then makes the result as good as the plain loop's.
_RESTART = 2


def _gram_newton_schulz(x: Tensor, triples: list[tuple[float, float, float]], margin: float, overwrite: bool) -> Tensor:
    """The same iteration as a polynomial of the small Gram matrix: O = Q X."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.reshape(-1, *x.shape[-2:])
    s = _gram(y, tall)
    norm = s.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].sqrt()  # |X|_F is the root of the trace
    inverse = 1 / (margin * norm + _EPS)
    q = _polynomial(s * inverse.square(), triples[:_RESTART]) * inverse
    o = y @ q if tall else q @ y
    if len(triples) > _RESTART:
        q = _polynomial(_gram(o, tall), triples[_RESTART:])
        o = torch.bmm(*((o, q) if tall else (q, o)), out=y if overwrite else None)
    return o.reshape(x.shape)


def _gram(x: Tensor, tall: bool) -> Tensor:
    return x.mT @ x if tall else x @ x.mT


def _polynomial(s: Tensor, triples: list[tuple[float, float, float]]) -> Tensor:
    """Q = P_k ... P_1 with P = a I + b S + c S² and S <- P S P."""
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    q = None
    for k, (a, b, c) in enumerate(triples):
        p = a * eye + torch.baddbmm(s, s, s, beta=b, alpha=c)
        q = p if q is None else p @ q
        if k + 1 < len(triples):
            s = p @ s @ p
            s = (s + s.mT) / 2  # otherwise rounding feeds the antisymmetric part
    return q  # pyright: ignore[reportReturnType]


@cache
def polar_express_coeffs(
    l: float = 1e-3, steps: int = 10, cushion: float = 0.02, safety: float = 1e-2
) -> list[tuple[float, float, float]]:
    """Coefficients of the Polar Express: the composition of odd quintics nearest to 1 on [l, 1] (Amsel et al. 2025).

    Each quintic is the best one for the interval the previous left. ``cushion`` raises the lower end to that fraction
    of the upper (so that small singular values are not bought at the price of large ones), and ``safety`` shrinks
    the argument of all but the last step against rounding.
    """
    if not 0 < l <= 1 or steps < 1:
        raise ValueError(f"need 0 < l <= 1 and steps >= 1, got l={l} and steps={steps}")
    upper, triples = 1.0, []
    for k in range(steps):
        a, b, c = _optimal_quintic(max(l, cushion * upper), upper)
        if cushion * upper > l:  # recentre, so that the values at l and upper lie equally far from 1
            rescale = 2 / sum(a * x + b * x**3 + c * x**5 for x in (l, upper))
            a, b, c = a * rescale, b * rescale, c * rescale
        if k < steps - 1:
            a, b, c = a / (1 + safety), b / (1 + safety) ** 3, c / (1 + safety) ** 5
        triples.append((a, b, c))
        l = a * l + b * l**3 + c * l**5
        upper = 2 - l
    return triples


def _optimal_quintic(l: float, u: float) -> tuple[float, float, float]:
    """The odd quintic with the least maximal error |1 - p| on [l, u], by its four equioscillation nodes (Remez)."""
    if l / u > 1 - 5e-6:  # the nodes merge: the limit is the Newton-Schulz quintic
        return 15 / 8 / u, -10 / 8 / u**3, 3 / 8 / u**5
    nodes, error, last = np.array([l, (3 * l + u) / 4, (l + 3 * u) / 4, u]), np.inf, -np.inf
    while abs(error - last) > 1e-15:
        last = error
        system = np.stack([nodes, nodes**3, nodes**5, [1.0, -1.0, 1.0, -1.0]], axis=1)
        a, b, c, error = np.linalg.solve(system, np.ones(4))
        root = np.sqrt(9 * b * b - 20 * a * c)  # interior nodes are the roots of p'
        nodes[1:3] = np.sqrt((-3 * b + np.array([-root, root])) / (10 * c))
    return float(a), float(b), float(c)
