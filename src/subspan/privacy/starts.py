"""Non-zero starts of LoRA factors that look at no data: PRISM needs both factors of full rank."""

from collections.abc import Iterable

import torch
from torch import Tensor

from subspan.linalg import LowRank, TangentSpace, random_orthonormal, randomized_svd
from subspan.surgery import FactorPair, base_layer, weight_matrix


def _check_rank(pair: FactorPair) -> None:
    m, n, r = pair.shape
    if r > min(m, n):
        raise ValueError(f"{pair.name}: rank {r} exceeds min(m, n) = {min(m, n)}; lower r for this layer")


def unbalanced(z: LowRank, stored: torch.dtype) -> Tensor:
    """Whether |AᵀA - BᵀB| is more than PRISM's own steps leave, so that someone edited the factors (bool, by batch).

    Storage in half precision alone unbalances factors by a few units of round-off: that is no edit.
    """
    return z.imbalance() > max(1e-3, 8 * torch.finfo(stored).eps)


def tangent_space(z: LowRank, names: str) -> TangentSpace:
    """The tangent space at ``z``; ``ValueError`` names the modules and the remedy where it has none."""
    try:
        return z.tangent()
    except ValueError as error:
        raise ValueError(
            f"{names}: {error}. PRISM needs both LoRA factors of full rank, and peft's default start has B = 0: use "
            'PrismConfig(init="spectral") or init="balanced_random" (without an engine: spectral_init, then shift_base)'
        ) from error


def spectral_init(pairs: Iterable[FactorPair], generator: torch.Generator | None = None) -> None:
    """(3.5) s A Bᵀ = the leading rank-r part of W0, balanced. Take it out of the base with ``surgery.shift_base``.

    Raises ``TargetError`` for quantised base weights.
    """
    for pair in pairs:
        _check_rank(pair)
        w = weight_matrix(base_layer(pair.layer))
        w = w.to(torch.promote_types(w.dtype, torch.float32))
        # on the generator's device, so that one seed gives one start wherever the model lies
        if generator is not None:
            w = w.to(generator.device)
        svd = randomized_svd(w, pair.shape[2], oversample=8, power=2, generator=generator)
        pair.write(LowRank.from_svd(svd._replace(S=svd.S / pair.scaling)))


def balanced_random_init(
    pairs: Iterable[FactorPair], scale: float = 0.02, generator: torch.Generator | None = None
) -> None:
    """(3.5) A = c Q, B = c Q' with random orthonormal columns and c = ``scale``: a small, balanced, full-rank Z."""
    for pair in pairs:
        _check_rank(pair)
        m, n, r = pair.shape
        where = None if generator is None else generator.device
        a, b = (random_orthonormal(k, r, generator=generator, device=where) for k in (m, n))
        pair.write(LowRank(scale * a, scale * b))
