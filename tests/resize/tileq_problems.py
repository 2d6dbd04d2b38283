"""Small experts, inputs and models that the tests of TileQ share."""

import torch
from torch import Tensor, nn

from subspan.resize import Experts, Moments, TileQConfig

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(k: int, n: int, p: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    """Inputs of k experts whose channels differ in size."""
    return normal(k, n, p, seed=seed, dtype=dtype) * torch.exp(0.7 * normal(p, seed=seed + 1, dtype=dtype))


def some_experts(k: int = 6, d: int = 32, f: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32) -> Experts:
    weights = {"gate": (k, f, d), "up": (k, f, d), "down": (k, d, f)}
    drawn = {name: 0.1 * normal(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(weights.items())}
    return Experts(drawn, nn.functional.silu)


def moments_of(experts: Experts, n: int = 200, seed: int = 0) -> dict[str, Moments]:
    k, _, d = experts.weights["up"].shape
    x = inputs(k, n, d, seed, experts.weights["up"].dtype)
    outer, inner = Moments.of(list(x)), Moments.of([experts.inner(e, x[e]) for e in range(k)])
    return {name: inner if name == "down" else outer for name in experts.weights}


def small(**changes) -> TileQConfig:
    """Quick settings: clustering is asked for where it matters."""
    return TileQConfig(**{"bits": 3, "rank": 8, "group_size": 32, "placement": "index"} | changes)
