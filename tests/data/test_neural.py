"""Generated recordings have the dynamics they promise; the real one is what it says, where it is present."""

import numpy as np
import pytest
import torch

from subspan.data import lorenz_thomas, motor_cortex, rotating_counts
from subspan.data.neural import _integrate, _lorenz, _thomas
from subspan.errors import MissingAsset


def test_the_integrator_is_of_fourth_order():
    exact = _integrate(_lorenz, [1, 1, 1], 161, dt=0.00125)[-1]  # 0.2 time units
    errors = [(_integrate(_lorenz, [1, 1, 1], steps + 1, dt=0.2 / steps)[-1] - exact).norm() for steps in (10, 20)]
    assert 10 < errors[0] / errors[1] < 25


def test_the_two_systems():
    p = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(_lorenz(p), torch.tensor([10.0, 23.0, -6.0], dtype=torch.float64))
    expected = torch.tensor([-np.sin(2.0), np.sin(3.0), np.sin(1.0)], dtype=torch.float64)
    torch.testing.assert_close(_thomas(p), expected)


def test_one_network_carries_both_systems():
    data = lorenz_thomas(steps=300, fit_steps=400, lr=1e-2, generator=torch.Generator().manual_seed(0))
    assert data.x.shape == (300, 20)
    torch.testing.assert_close(data.latents.mean(0), torch.zeros(6).double())
    torch.testing.assert_close(data.latents.std(0), torch.ones(6).double())
    assert data.error < 0.1  # of variance 1
    # x is A z + c with noise of deviation 0.1
    design = torch.cat([data.latents, torch.ones(300, 1).double()], 1)
    left = data.x - design @ torch.linalg.lstsq(design, data.x).solution
    assert left.std().item() == pytest.approx(0.1, rel=0.1)
    # and B tanh(x(t)) moves the latents on
    moved = torch.tanh(data.x[:-1]) @ data.B.T
    r2 = [np.corrcoef(moved[:, k], data.latents[1:, k])[0, 1] for k in range(6)]
    assert min(r2) > 0.8
    again, other = (lorenz_thomas(steps=20, fit_steps=3, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    assert torch.equal(again.x, lorenz_thomas(steps=20, fit_steps=3, generator=torch.Generator().manual_seed(0)).x)
    assert torch.equal(again.latents, other.latents)
    assert not torch.equal(again.x, other.x)


def test_rotating_counts(generator):
    data = rotating_counts(n_trials=200, bins=10, n_neurons=7, frequencies=(0.3, 0.1, 0.5), generator=generator)
    assert data.counts.shape == (200, 10, 7)
    assert torch.equal(data.counts, data.counts.round())
    assert data.groups == ((0, 1), (2, 3), (4, 5))
    z = torch.view_as_complex(data.latents.reshape(200, 10, 3, 2).contiguous())
    torch.testing.assert_close((z[:, 1:] / z[:, :-1]).angle()[0, 0], torch.tensor([0.3, 0.1, 0.5]).double())
    torch.testing.assert_close(z.abs(), torch.ones(200, 10, 3).double())
    # groups are independent over trials
    correlation = np.corrcoef(data.latents[:, 0].numpy().T)
    assert abs(correlation[:2, 2:4]).max() < 0.25


def test_motor_cortex():
    try:
        data = motor_cortex()
    except MissingAsset as error:
        pytest.skip(str(error))
    assert data.counts.shape == (168, 14, 154)
    assert data.counts.max() == 74
    np.testing.assert_array_equal(np.unique(data.direction, return_counts=True)[1], 21)
    # direction k points k x 45 degrees counter-clockwise from the right
    ends = data.position()[:, -1]
    for k in range(8):
        mean = ends[data.direction == k].mean(0)
        angle = np.degrees(np.arctan2(mean[1], mean[0])) % 360
        assert abs((angle - 45 * k + 180) % 360 - 180) < 12
