"""Speed and memory of TileQ: the fused correction, products of the tiled matrix, its solver, and the GPTQ sweep.

Peers, written plainly below: a pair of thin products for each expert (what private compensators cost), the experts'
own dense products, the tiled matrix formed whole with its exact SVD, and GPTQ expert by expert.
"""

import argparse
import time
from functools import partial

import torch
from torch import Tensor

from subspan.resize import TileQConfig, bit_budget, lowrank_moe, tile_factorize
from subspan.resize.tileq.factors import TiledMatrix, weighted_errors
from subspan.resize.tileq.placement import index_order
from subspan.resize.tileq.quantizers import gptq, inverse_factor, round_to_nearest
from timing import interleaved, median_ratio, peak_bytes, report

K, CHOSEN, GRID, P, Q, R = 16, 4, (4, 4), 256, 512, 32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_expert(x: Tensor, chosen: Tensor, weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """A pair of thin products for each expert with its own factors (K x p x R and K x R x q)."""
    out = x.new_zeros(len(x), right.shape[2])
    for e in chosen.unique().tolist():
        token, place = torch.where(chosen == e)
        out.index_add_(0, token, ((x[token] @ left[e]) @ right[e]) * weights[token, place, None])
    return out


def apart_by_expert(x: Tensor, chosen: Tensor, left: Tensor, right: Tensor) -> Tensor:
    out = x.new_zeros(*chosen.shape, right.shape[2])
    for e in chosen.unique().tolist():
        token, place = torch.where(chosen == e)
        out[token, place] = (x[token] @ left[e]) @ right[e]
    return out


def dense(x: Tensor, chosen: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """The experts themselves (K x q x p)."""
    out = x.new_zeros(len(x), experts.shape[1])
    for e in chosen.unique().tolist():
        token, place = torch.where(chosen == e)
        out.index_add_(0, token, (x[token] @ experts[e].mT) * weights[token, place, None])
    return out


def fused(repeats: int) -> None:
    w = normal(K, Q, P)
    one = torch.zeros(K, dtype=torch.long)
    factors = tile_factorize(w, torch.ones(1, P), index_order(K, GRID), GRID, R, groups=one)
    left = factors.inverse_scales[0].unsqueeze(-1) * factors.U[factors.cells[:, 0]] * factors.sigma
    right = factors.V[factors.cells[:, 1]]
    for tokens in (1, 16, 64, 512):
        x = normal(tokens, P, seed=tokens)
        scores = normal(tokens, K, seed=tokens + 1).softmax(-1)
        weights, chosen = scores.topk(CHOSEN, -1)
        runs = {
            "mixed": partial(lowrank_moe, x, chosen, weights, factors),
            "loop": partial(by_expert, x, chosen, weights, left, right),
            "apart": partial(lowrank_moe, x, chosen, None, factors),
            "apart loop": partial(apart_by_expert, x, chosen, left, right),
            "dense": partial(dense, x, chosen, weights, w),
        }
        torch.testing.assert_close(runs["mixed"](), runs["loop"](), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(runs["apart"](), runs["apart loop"](), rtol=1e-3, atol=1e-3)
        times = interleaved(runs, repeats, time.process_time)
        bar = {1: 3.0, 16: 3.0, 64: 1.5, 512: 1.2}[tokens]
        name = f"fused correction, {tokens} tokens"
        report(name, median_ratio(times, "loop", "mixed"), bar, "higher", "a pair of products per expert")
        name = f"outputs apart, {tokens} tokens"
        report(name, median_ratio(times, "apart loop", "apart"), 1.0, "higher", "a pair of products per expert")
        if tokens in (1, 512):
            bar = 0.25 if tokens == 1 else 0.12
            name = f"cost of the correction, {tokens} tokens"
            report(name, median_ratio(times, "mixed", "dense"), bar, "lower", "the experts' dense products")


def tiled(repeats: int) -> None:
    k, grid, p, q = 16, (4, 4), 512, 768
    # a spectrum that decays like that of trained weights
    decay = torch.arange(1, 257).float() ** -0.7
    w = torch.stack([(normal(q, 256, seed=e) * decay) @ normal(256, p, seed=e + k) for e in range(k)])
    scales, cells = torch.ones(k, p), index_order(k, grid)
    tile = TiledMatrix(w, scales, cells, grid)
    whole = tile.shape[0] * tile.shape[1] * 4
    x = normal(tile.shape[1], R)
    report("memory of a product", peak_bytes(lambda: tile @ x) / whole, 0.2, "lower", "the tiled matrix itself")
    runs = {
        solver: partial(tile_factorize, w, scales, cells, grid, R, solver=solver, generator=torch.Generator())
        for solver in ("randomized", "svd")
    }
    found = {solver: run() for solver, run in runs.items()}
    error = {solver: float(weighted_errors(w, scales, f).sum()) for solver, f in found.items()}
    report("weighted error, randomised", (error["randomized"] / error["svd"]) ** 0.5, 1.02, "lower", "exact SVD")
    times = interleaved(runs, repeats, time.process_time)
    report("factorisation", median_ratio(times, "svd", "randomized"), 3.0, "higher", "exact SVD of the matrix, formed")


def gptq_alone(w: Tensor, h: Tensor, bits: int, group: int) -> Tensor:
    """GPTQ as published: one expert, one column at a time, blocks of a group."""
    u, w, out = inverse_factor(h, 0.01), w.clone(), torch.empty_like(w)
    for start in range(0, w.shape[1], group):
        block, errors = w[:, start : start + group].clone(), torch.empty(len(w), group)
        low, high = block.amin(1).clamp(max=0), block.amax(1).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).bfloat16().float()
        zero = (-low / scale).round().clamp(0, 2**bits - 1)
        for j in range(group):
            i = start + j
            code = ((block[:, j] / scale).round() + zero).clamp(0, 2**bits - 1)
            out[:, i] = scale * (code - zero)
            errors[:, j] = (block[:, j] - out[:, i]) / u[i, i]
            block[:, j + 1 :] -= errors[:, j, None] * u[i, i + 1 : start + group]
        w[:, start + group :] -= errors @ u[start : start + group, start + group :]
    return out


def sweep(repeats: int) -> None:
    k, p, q = 8, 256, 256
    x = normal(k, 512, p) @ normal(p, p, seed=1)
    w, h = 0.02 * normal(k, q, p, seed=2), x.mT @ x / 512
    runs = {
        "batched": lambda: gptq(w, h, 2, 128).decode(),
        "one by one": lambda: torch.stack([gptq_alone(a, b, 2, 128) for a, b in zip(w, h, strict=True)]),
        "rounded": lambda: round_to_nearest(w, 2, 128).decode(),
    }
    loss = {name: float((((w - run()) @ h) * (w - run())).sum()) for name, run in runs.items()}
    report("loss of the batched sweep", loss["batched"] / loss["one by one"], 1.001, "lower", "expert by expert")
    report("loss of the sweep", loss["batched"] / loss["rounded"], 0.7, "lower", "rounding to nearest")
    times = interleaved(runs, repeats, time.process_time)
    report("batched sweep", median_ratio(times, "batched", "one by one"), 1.0, "lower", "expert by expert")


def bytes_stored() -> None:
    """Qwen1.5-MoE's gate, by the closed form that equals the bytes written."""
    config = TileQConfig(grid=(8, 8))
    tiled = bit_budget(60, 1408, 2048, config)
    private = bit_budget(1, 1408, 2048, TileQConfig(grid=(1, 1)))
    report(
        "bits of factors, Qwen1.5-MoE's gate", tiled["factors"] / private["factors"], 0.14, "lower", "private factors"
    )
    report("bytes, Qwen1.5-MoE's gate", sum(tiled.values()) / 16, 0.15, "lower", "bfloat16")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    with torch.no_grad():
        fused(40 if quick else 200)
        tiled(2 if quick else 5)
        sweep(2 if quick else 8)
    bytes_stored()
