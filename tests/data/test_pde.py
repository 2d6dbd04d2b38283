"""The solvers against exact solutions and their order; the generators' laws."""

import numpy as np
import pytest
import torch

from subspan.data import DarcyGenerator, NavierStokesGenerator
from subspan.data.pde import solve_darcy, solve_vorticity


@pytest.mark.parametrize(("size", "centre"), [(17, 0.0734458), (33, 0.0736147), (65, 0.0736572)])
def test_darcy_of_one_material_has_the_centre_of_the_poisson_problem(size: int, centre: float) -> None:
    assert solve_darcy(np.ones((size, size)))[size // 2, size // 2] == pytest.approx(centre, abs=5e-8)


def test_darcy_is_second_order_for_a_smooth_coefficient() -> None:
    def centre(size: int) -> float:
        x = np.linspace(0, 1, size)
        return float(solve_darcy(1 + x[:, None] * np.ones(size) + 0.5 * x**2)[size // 2, size // 2])

    coarse, middle, fine = (centre(s) for s in (9, 17, 33))
    assert (coarse - middle) / (middle - fine) == pytest.approx(4, rel=0.1)


def test_darcy_scales_and_transposes() -> None:
    a = np.random.default_rng(0).uniform(1, 5, (12, 12))
    u = solve_darcy(a)
    np.testing.assert_allclose(solve_darcy(4 * a, force=2.0), u / 2, rtol=1e-12)
    np.testing.assert_allclose(solve_darcy(a.T), u.T, rtol=1e-12)
    assert (u[1:-1, 1:-1] > 0).all()
    assert not u[[0, -1]].any()
    assert not u[:, [0, -1]].any()


def test_darcy_samples_of_one_seed_are_the_same_fields_at_every_size() -> None:
    coarse, fine = (DarcyGenerator(size, random_state=3).sample(4) for size in (11, 21))
    every_second = np.arange(21 * 21).reshape(21, 21)[::2, ::2].ravel()
    torch.testing.assert_close(fine.coords[every_second], coarse.coords)
    assert torch.equal(fine.a[:, every_second], coarse.a)
    assert set(coarse.a.unique().tolist()) == {3.0, 12.0}
    assert (fine.u[:, every_second] - coarse.u).norm() < 0.1 * coarse.u.norm()
    again, other = DarcyGenerator(11, random_state=3).sample(4), DarcyGenerator(11, random_state=4).sample(4)
    assert torch.equal(again.u, coarse.u)
    assert not torch.equal(other.u, coarse.u)


def waves(size: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(size) / size
    return np.meshgrid(2 * np.pi * x, 2 * np.pi * x, indexing="ij")


def test_a_taylor_green_vortex_only_decays() -> None:
    x, y = waves(16)
    w = np.cos(x) * np.cos(2 * y)
    nu, time = 3e-3, 0.7
    exact = w * np.exp(-nu * (2 * np.pi) ** 2 * 5 * time)
    np.testing.assert_allclose(solve_vorticity(w, np.zeros_like(w), nu, time, 0.005), exact, atol=2e-6)


def test_transport_without_viscosity_keeps_energy_and_enstrophy() -> None:
    x, y = waves(32)
    w = np.cos(x) + np.sin(2 * y) + 0.5 * np.cos(x + y)
    later = solve_vorticity(w, np.zeros_like(w), 0.0, 0.5, 0.002)
    assert np.linalg.norm(later - w) > 0.01 * np.linalg.norm(w)  # it did move
    k = np.fft.fftfreq(32, 1 / 32)
    square = k[:, None] ** 2 + k**2
    for weight in (np.ones_like(square), 1 / np.where(square == 0, np.inf, square)):  # enstrophy, energy
        kept = [float((weight * abs(np.fft.fft2(field)) ** 2).sum()) for field in (w, later)]
        assert kept[1] == pytest.approx(kept[0], rel=1e-6)
    assert later.mean() == pytest.approx(0, abs=1e-12)


def test_vorticity_is_second_order_in_time() -> None:
    x, y = waves(16)
    w, force = 3 * np.cos(x) + 2 * np.sin(2 * y + x), np.sin(x + y)
    coarse, middle, fine = (solve_vorticity(w, force, 1e-2, 1.0, step) for step in (0.1, 0.05, 0.025))
    ratio = np.linalg.norm(coarse - middle) / np.linalg.norm(middle - fine)
    assert ratio == pytest.approx(4, rel=0.25)


def test_vorticity_samples_of_one_seed_start_alike_at_every_size_and_have_the_covariance_asked_for() -> None:
    coarse, fine = (NavierStokesGenerator(size, random_state=1).sample(3, frames=2, interval=0.1) for size in (26, 52))
    every_second = np.arange(52 * 52).reshape(52, 52)[::2, ::2].ravel()
    torch.testing.assert_close(fine.w[:, 0, every_second], coarse.w[:, 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(fine.w[:, 1, every_second], coarse.w[:, 1], atol=2e-3, rtol=0)
    torch.testing.assert_close(fine.coords[every_second], coarse.coords)
    start = NavierStokesGenerator(24, random_state=0).sample(2000, frames=1).w[:, 0]
    k = np.arange(-8, 9)
    variance = 343 * (4 * np.pi**2 * (k[:, None] ** 2 + k**2) + 49.0) ** -2.5
    assert start.var().item() == pytest.approx(variance.sum() - variance[8, 8], rel=0.05)
    spectrum = np.fft.fft2(start.reshape(-1, 24, 24).double().numpy()) / 576
    energy = np.square(abs(spectrum)).mean(0)
    np.testing.assert_allclose(energy[[0, 1, 3, -2], [2, 0, 3, 1]], variance[[8, 9, 11, 6], [10, 8, 11, 9]], rtol=0.1)


@pytest.mark.parametrize(
    "make", [lambda: DarcyGenerator(3), lambda: NavierStokesGenerator(23), lambda: NavierStokesGenerator(32, step=0.0)]
)
def test_sizes_without_sense_are_refused(make) -> None:
    with pytest.raises(ValueError, match="needs size"):
        make()


def test_darcy_coefficients_follow_the_sign_of_the_stated_field() -> None:
    flow = DarcyGenerator(9, random_state=3, modes=4).sample(20)
    fine = (np.arange(2000) + 0.5) / 2000
    weight = np.random.default_rng(3).standard_normal((20, 4, 4))
    weight[:, 0, 0] = 0
    field = np.zeros((20, 81))
    for k in range(4):
        for j in range(4):
            wave = [np.cos(np.pi * m * x) for m, x in zip((k, j), flow.coords.double().numpy().T, strict=True)]
            norm = [np.square(np.cos(np.pi * m * fine)).mean() ** 0.5 for m in (k, j)]
            share = weight[:, k, j] / (np.pi**2 * (k * k + j * j) + 9)
            field += share[:, None] * (wave[0] / norm[0] * wave[1] / norm[1])
    np.testing.assert_array_equal(flow.a, np.where(field >= 0, 12, 3))


def test_the_upper_third_of_the_waves_is_left_out() -> None:
    w = solve_vorticity(np.random.default_rng(0).normal(size=(12, 12)), np.zeros((12, 12)), 0.0, 0.01, 0.01)
    size = abs(np.fft.fft2(w))
    kept = np.maximum(*np.meshgrid(*[abs(np.fft.fftfreq(12, 1 / 12))] * 2)) < 4
    assert size[~kept].max() < 1e-10 < 1e-3 < size[kept].max()
