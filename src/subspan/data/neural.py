"""Neural recordings: real ones, and generated ones whose latents are known."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from subspan.data.shared import shared_file
from subspan.errors import DataError

_SPIKES_PER_UNIT = 74  # the file holds counts divided by their largest


class MotorCortex(NamedTuple):
    """Centre-out reaches: spike counts, hand velocity, and the direction (0 to 7, counter-clockwise from the right)."""

    counts: Float64[np.ndarray, "trials bins neurons"]
    velocity: Float64[np.ndarray, "trials bins 2"]
    direction: Int64[np.ndarray, "trials"]

    def position(self) -> Float64[np.ndarray, "trials bins 2"]:
        """Of the hand, from its start (in the velocity's unit times bins)."""
        return self.velocity.cumsum(1)


def motor_cortex() -> MotorCortex:
    """168 reaches of 14 bins, recorded from 154 neurons of a monkey's primary motor cortex.

    Raises:
        MissingAsset: ``shared/data/neural/m1_154.npz`` is not there.
        DataError: the file does not hold counts.
    """
    path = shared_file("neural/m1_154.npz")
    with np.load(path) as file:
        scaled, velocity, direction = file["neural"], file["vel"], file["direction"]
    counts = np.round(scaled * _SPIKES_PER_UNIT)
    if not np.allclose(counts, scaled * _SPIKES_PER_UNIT, atol=1e-6):
        raise DataError(f"{path} does not hold spike counts divided by {_SPIKES_PER_UNIT}")
    return MotorCortex(counts, velocity, direction)


class LatentSeries(NamedTuple):
    """A series, the latents that drive it, and the low-rank network behind it: W = A B, with groups of latents."""

    x: Float64[Tensor, "T N"]
    latents: Float64[Tensor, "T K"]
    A: Float64[Tensor, "N K"]
    B: Float64[Tensor, "K N"]
    groups: tuple[tuple[int, ...], ...]
    error: float


def lorenz_thomas(
    *, n_channels: int = 20, steps: int = 2000, fit_steps: int = 3000, lr: float = 3e-3, generator: torch.Generator
) -> LatentSeries:
    """Two independent chaotic systems, Lorenz's and Thomas's, carried by one low-rank network of ``n_channels``.

    A, c, B, d are fitted such that B (tanh(A z(t) + c) + eta(t)) + d is z(t + 1) (``error`` is the mean square that
    remains), and x = A z + c + 0.1 N(0, 1). The latents are standardised and always the same; the generator decides on
    network and noise.

    Source: the simulation of Li et al., ICML 2026, arXiv 2511.13899.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    z = torch.cat([_integrate(_lorenz, [1, 1, 1], steps), _integrate(_thomas, [0.1, 1, 1], steps)], 1)
    z = (z - z.mean(0)) / z.std(0)
    eta = 0.005 * normal(steps, n_channels)

    def start(rows: int, columns: int, fan_in: int) -> nn.Parameter:
        draw = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
        return nn.Parameter((2 * draw - 1) / fan_in**0.5)

    A, c = start(n_channels, 6, 6), start(1, n_channels, 6)
    B, d = start(6, n_channels, n_channels), start(1, 6, n_channels)
    optimizer = torch.optim.AdamW([A, c, B, d], lr)
    loss = torch.zeros(())
    for _ in range(fit_steps):
        loss = ((torch.tanh(z[:-1] @ A.T + c) + eta[:-1]) @ B.T + d - z[1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    A, c, B = A.detach(), c.detach(), B.detach()
    x = z @ A.T + c + 0.1 * normal(steps, n_channels)
    return LatentSeries(x, z, A, B, ((0, 1, 2), (3, 4, 5)), float(loss.detach()))


def _lorenz(p: Tensor) -> Tensor:
    x, y, z = p
    return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


def _thomas(p: Tensor) -> Tensor:
    """Without damping (b = 0), as in the paper."""
    return -torch.sin(p.roll(-1)) * torch.tensor([1.0, -1.0, -1.0], dtype=p.dtype)


def _integrate(derivative, start: list[float], steps: int, dt: float = 0.1) -> Tensor:
    """Runge-Kutta of order 4; the first row is the start."""
    p = torch.tensor(start, dtype=torch.float64)
    rows = [p]
    for _ in range(steps - 1):
        k1 = derivative(p)
        k2 = derivative(p + dt / 2 * k1)
        k3 = derivative(p + dt / 2 * k2)
        k4 = derivative(p + dt * k3)
        p = p + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        rows.append(p)
    return torch.stack(rows)


class CountTrials(NamedTuple):
    """Counts of trials, and the latents that drive them in groups."""

    counts: Float64[Tensor, "trials bins neurons"]
    latents: Float64[Tensor, "trials bins K"]
    groups: tuple[tuple[int, ...], ...]


def rotating_counts(
    *,
    n_trials: int = 60,
    bins: int = 40,
    n_neurons: int = 60,
    frequencies: tuple[float, ...] = (0.31, 0.17),
    rate: float = 2.0,
    spread: float = 0.0,
    generator: torch.Generator,
) -> CountTrials:
    """Independent planar rotations, each with its own frequency (radians per bin), that drive Poisson neurons.

    Every trial draws each rotation's phase and its radius in 1 - ``spread`` to 1 + ``spread``; counts have the mean
    ``rate`` exp(A z) with A normal of deviation 0.5. Our construction.
    """
    G = len(frequencies)
    phase = 2 * np.pi * torch.rand(n_trials, 1, G, generator=generator, dtype=torch.float64)
    angle = phase + torch.arange(bins).unsqueeze(-1) * torch.tensor(frequencies, dtype=torch.float64)
    radius = 1 + spread * (2 * torch.rand(n_trials, 1, G, generator=generator, dtype=torch.float64) - 1)
    z = torch.stack([radius * angle.cos(), radius * angle.sin()], -1).reshape(n_trials, bins, 2 * G)
    A = 0.5 * torch.randn(n_neurons, 2 * G, generator=generator, dtype=torch.float64)
    counts = torch.poisson(rate * torch.exp(z @ A.T), generator=generator)
    return CountTrials(counts, z, tuple((2 * g, 2 * g + 1) for g in range(G)))
