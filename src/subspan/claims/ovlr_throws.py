"""Throwing at a target through a simulator that says hit or miss: part E5 of the OVLR claim."""

import numpy as np
import torch
from torch import Tensor

from subspan.claims.claim import Row
from subspan.claims.ovlr_peers import WeightNoise, mean_of, network
from subspan.optim import GeometricSigma, OutputSpaceLoss


def misses(actions: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """1 unless a ball thrown at (angle, speed) passes a wall halfway and lands within 0.15 m of its target.

    Quadratic drag and wind, integrated in steps of 0.05 s. contexts: distance, height of the wall, wind.
    """
    distance, wall, wind = (contexts[..., i] for i in range(3))
    angle = np.clip(0.8 + 0.5 * actions[..., 0], 0.1, 1.5)
    speed = np.clip(7.5 + 2.0 * actions[..., 1], 1.0, 15.0)
    vx, vy = speed * np.cos(angle), speed * np.sin(angle)
    x, y = np.zeros_like(vx), np.zeros_like(vx)
    landed, over = np.full_like(vx, np.inf), np.zeros(vx.shape, dtype=bool)
    for _ in range(56):
        drag = 0.03 * np.hypot(vx - wind, vy)
        vx, vy = vx - 0.05 * drag * (vx - wind), vy - 0.05 * (9.81 + drag * vy)
        new_x, new_y = x + 0.05 * vx, y + 0.05 * vy
        share = (distance / 2 - x) / np.maximum(new_x - x, 1e-9)
        over |= (share >= 0) & (share < 1) & (y + share * (new_y - y) > wall)
        down = (new_y <= 0) & np.isinf(landed)
        landed = np.where(down, x + (new_x - x) * y / np.maximum(y - new_y, 1e-9), landed)
        x, y = new_x, new_y
    return 1.0 - ((np.abs(landed - distance) < 0.15) & over)


def contexts_of(rng: np.random.Generator, n: int) -> np.ndarray:
    low, high = np.array([3.0, 0.0, -3.0]), np.array([7.0, 1.5, 3.0])
    return rng.uniform(low, high, (n, 3)).astype(np.float32)


def scaled(contexts: np.ndarray) -> Tensor:
    return torch.from_numpy((contexts - [5.0, 0.75, 0.0]) / [1.2, 0.45, 1.7]).float()


def throws(seed: int, smoke: bool) -> list[Row]:
    """From (distance, wall, wind) to a throw; a simulator answers hit or miss. Each method gets 16 throws a context."""
    steps, pairs = (10, 8) if smoke else (200, 8)
    fresh = contexts_of(np.random.default_rng(10_000 + seed), 2000)
    schedule = GeometricSigma(1.0, 0.1, steps)

    def simulate(out: Tensor, contexts: Tensor) -> Tensor:
        return torch.from_numpy(misses(out.detach().numpy(), contexts.numpy())).float()

    rows = []
    for method in ("before", "OVLR", "REINFORCE", "ES on the weights"):
        model, rng = network(seed, 3, 64, 64, 2), np.random.default_rng(seed)
        by_weights = method == "ES on the weights"
        adam = torch.optim.Adam(model.parameters(), lr=1e-2 if by_weights else 3e-3)  # ES needs the larger one
        criterion = OutputSpaceLoss(misses, sigma=schedule, pairs=pairs, vectorized=True, as_numpy=True, seed=seed)
        es = WeightNoise(model, mean_of(simulate), pairs, 0.03, seed)
        generator = torch.Generator().manual_seed(seed)
        for step in range(0 if method == "before" else steps):
            contexts = contexts_of(rng, 32)
            adam.zero_grad()
            if method == "OVLR":
                criterion(model(scaled(contexts)), torch.from_numpy(contexts)).backward()
            elif method == "REINFORCE":
                reinforce(model(scaled(contexts)), contexts, schedule(step), 2 * pairs, generator).backward()
            else:
                es.backward(scaled(contexts), torch.from_numpy(contexts))
            adam.step()
        with torch.no_grad():
            hits = 1 - float(misses(model(scaled(fresh)).numpy(), fresh).mean())
        rows.append(Row(method, {"task": "throws"}, "hit_rate", seed, hits))
    return rows


def reinforce(z: Tensor, contexts: np.ndarray, sigma: float, n: int, generator: torch.Generator) -> Tensor:
    """Score-function surrogate of a Gaussian policy with n actions a context, each against the mean of the others."""
    policy = torch.distributions.Normal(z, sigma)
    with torch.no_grad():
        actions = z + sigma * torch.randn(n, *z.shape, generator=generator)
        losses = torch.from_numpy(misses(actions.numpy(), contexts)).float()
        advantage = (losses - losses.mean(0)) * n / (n - 1)
    return (advantage * policy.log_prob(actions).sum(-1)).mean()
