"""Solutions of partial differential equations, by solvers: steady flow through a porous medium, and a stirred fluid.

Both draw their random fields as series of fixed length. The same seed therefore gives the same fields at every size,
and what a model learnt on one grid can be tested on another.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Float64
from numpy import fft
from scipy import sparse
from torch import Tensor

Generator = np.random.Generator


class DarcyFlow(NamedTuple):
    """Nodes (N, 2) in the unit square, row by row, and the coefficient a and the solution u of every sample there."""

    coords: Float32[Tensor, "N 2"]
    a: Float32[Tensor, "n N"]
    u: Float32[Tensor, "n N"]


class DarcyGenerator:
    """Steady flow through two materials: -div(a grad u) = 1 in the unit square, u = 0 on its boundary.

    a is 12 where a Gaussian field of covariance (-Laplacian + 9)^-2 (cosine series without its mean) is at least zero,
    and 3 elsewhere: the Darcy benchmark of Li et al. (Fourier Neural Operator, ICLR 2021).

    Args:
        size: nodes of an axis, the boundary included.
        random_state: seed or generator of the fields.
        modes: cosines of an axis, whatever the size.
    """

    def __init__(self, size: int = 21, random_state: int | Generator | None = None, modes: int = 21) -> None:
        if size < 4 or modes < 2:  # one inner node has no neighbours to solve for
            raise ValueError(f"needs size >= 4 and modes >= 2, got size={size} and modes={modes}")
        self.size, self.modes = size, modes
        self.random = np.random.default_rng(random_state)

    def sample(self, n: int) -> DarcyFlow:
        """The next n samples."""
        x = np.linspace(0, 1, self.size)
        k = np.arange(self.modes)
        waves = np.where(k == 0, 1.0, np.sqrt(2)) * np.cos(np.pi * np.outer(x, k))  # orthonormal on [0, 1]
        deviation = 1 / (np.pi**2 * (k[:, None] ** 2 + k**2) + 9)
        deviation[0, 0] = 0
        fields = waves @ (deviation * self.random.standard_normal((n, self.modes, self.modes))) @ waves.T
        a = np.where(fields >= 0, 12.0, 3.0)
        u = np.array([solve_darcy(one) for one in a]).reshape(a.shape)
        return DarcyFlow(_nodes(x), _flat(a), _flat(u))


def solve_darcy(a: Float64[np.ndarray, "s s"], force: float = 1.0) -> Float64[np.ndarray, "s s"]:
    """-div(a grad u) = force on the nodes of the unit square, u = 0 on the boundary.

    Five points; a face's coefficient is the mean of its two nodes. Second order where a is smooth.
    """
    inside = a.shape[0] - 2
    down, right = (a[1:, 1:-1] + a[:-1, 1:-1]) / 2, (a[1:-1, 1:] + a[1:-1, :-1]) / 2  # faces around the inner nodes
    diagonal = down[1:] + down[:-1] + right[:, 1:] + right[:, :-1]
    beside = right[:, 1:].copy()
    beside[:, -1] = 0  # the last node of a row has no inner neighbour at its right
    matrix = sparse.diags_array(
        [diagonal.ravel(), -beside.ravel()[:-1], -beside.ravel()[:-1], -down[1:-1].ravel(), -down[1:-1].ravel()],
        offsets=[0, 1, -1, inside, -inside],  # pyright: ignore[reportArgumentType]
        format="csc",
    )
    h = 1 / (a.shape[0] - 1)
    u = np.zeros_like(a)
    solution = sparse.linalg.splu(matrix, permc_spec="MMD_AT_PLUS_A").solve(np.full(inside**2, force * h * h))
    u[1:-1, 1:-1] = solution.reshape(inside, inside)
    return u


class Vorticity(NamedTuple):
    """Nodes (N, 2) of the periodic unit square, row by row, and the vorticity there at times 0, interval, ..."""

    coords: Float32[Tensor, "N 2"]
    w: Float32[Tensor, "n frames N"]


class NavierStokesGenerator:
    """A stirred incompressible fluid in the periodic unit square: w_t + v . grad w = viscosity Laplace w + f.

    f = 0.1 (sin 2 pi (x + y) + cos 2 pi (x + y)), and w starts from a Gaussian field of covariance
    7^3 (-Laplacian + 49)^-2.5: the Navier-Stokes benchmark of Li et al. (ICLR 2021; viscosity 1e-3 to 1e-5).

    Args:
        size: nodes of an axis.
        random_state: seed or generator of the first fields.
        viscosity: of the fluid.
        step: largest time step of the solver.
        modes: waves of an axis in the first field, whatever the size.
    """

    def __init__(
        self,
        size: int = 32,
        random_state: int | Generator | None = None,
        viscosity: float = 1e-3,
        step: float = 0.05,
        modes: int = 8,
    ) -> None:
        if size < 3 * modes or viscosity < 0 or step <= 0:
            raise ValueError(
                f"needs size >= 3 modes, viscosity >= 0 and step > 0, got {size=}, {modes=}, {viscosity=} and {step=}"
            )
        self.size, self.modes = size, modes
        self.viscosity, self.step = viscosity, step
        self.random = np.random.default_rng(random_state)

    def sample(self, n: int, frames: int = 11, interval: float = 1.0) -> Vorticity:
        """The next n runs."""
        x = np.arange(self.size) / self.size
        phase = 2 * np.pi * (x[:, None] + x)
        force = 0.1 * (np.sin(phase) + np.cos(phase))
        w = [self._start(n)]
        for _ in range(frames - 1):
            w.append(solve_vorticity(w[-1], force, self.viscosity, interval, self.step))
        return Vorticity(_nodes(x), _flat(np.stack(w, axis=1)))

    def _start(self, n: int) -> Float64[np.ndarray, "n s s"]:
        low = np.arange(-self.modes, self.modes + 1)
        half = np.arange(self.modes + 1)
        draws = self.random.standard_normal((2, n, low.size, half.size))
        deviation = np.sqrt(343 / 2) * (4 * np.pi**2 * (low[:, None] ** 2 + half**2) + 49) ** -1.25
        deviation[self.modes, 0] = 0
        # the real part of these waves keeps half of their energy
        deviation[:, 0] *= np.sqrt(2)
        spectrum = np.zeros((n, self.size, self.size // 2 + 1), dtype=complex)
        spectrum[:, low[:, None], half] = self.size**2 * deviation * (draws[0] + 1j * draws[1])
        return fft.irfft2(spectrum, s=(self.size, self.size))


def solve_vorticity(
    w: Float64[np.ndarray, "*n s s"], force: Float64[np.ndarray, "s s"], viscosity: float, time: float, step: float
) -> Float64[np.ndarray, "*n s s"]:
    """The vorticity after ``time``, by Fourier series: Heun's rule for transport, Crank and Nicolson's for viscosity.

    Second order in time; products are freed of aliases (the upper third of the waves is left out).
    """
    size = w.shape[-1]
    kx, ky = 2 * np.pi * size * fft.fftfreq(size)[:, None], 2 * np.pi * size * fft.rfftfreq(size)
    square = kx**2 + ky**2
    inverse = 1 / np.where(square == 0, 1, square)  # the mean carries no flow: kx = ky = 0 there
    kept = np.maximum(abs(kx), abs(ky)) < 2 * np.pi * size / 3

    def change(w_hat: np.ndarray) -> np.ndarray:
        """f - v . grad w, with v = (d psi / dy, -d psi / dx) and -Laplace psi = w."""
        waves = np.stack([1j * ky * inverse * w_hat, -1j * kx * inverse * w_hat, 1j * kx * w_hat, 1j * ky * w_hat])
        vx, vy, wx, wy = fft.irfft2(waves, s=(size, size))
        return kept * (f_hat - fft.rfft2(vx * wx + vy * wy))

    f_hat, w_hat = fft.rfft2(force), kept * fft.rfft2(w)
    steps = max(1, int(np.ceil(time / step - 1e-9)))
    dt = time / steps
    before, after = 1 - dt * viscosity * square / 2, 1 / (1 + dt * viscosity * square / 2)
    for _ in range(steps):
        first = change(w_hat)
        guess = (before * w_hat + dt * first) * after
        w_hat = (before * w_hat + dt / 2 * (first + change(guess))) * after
    return fft.irfft2(w_hat, s=(size, size))


def _nodes(x: np.ndarray) -> Tensor:
    return torch.tensor(np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1).reshape(-1, 2), dtype=torch.float32)


def _flat(fields: np.ndarray) -> Tensor:
    return torch.tensor(fields.reshape(*fields.shape[:-2], -1), dtype=torch.float32)
