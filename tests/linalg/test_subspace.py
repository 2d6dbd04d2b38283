"""Subspaces and summaries of a spectrum, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subspan.linalg import (
    Subspace,
    effective_rank,
    energy_rank,
    projection_kernel,
    random_orthonormal,
    singular_values,
    spectral_entropy,
    stable_rank,
)

SEEDS = st.integers(0, 2**31)
CLOSE = dict(atol=1e-10, rtol=0)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_subspace(n: int, k: int, seed: int) -> Subspace:
    return Subspace(random_orthonormal(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


@given(n=st.integers(2, 10), k=st.integers(0, 10), seed=SEEDS)
@settings(deadline=None, max_examples=40)
def test_projection_is_idempotent_symmetric_and_splits_every_vector(n: int, k: int, seed: int) -> None:
    space = random_subspace(n, min(k, n), seed)
    x, y = gaussian(n, 3, seed=seed), gaussian(n, 3, seed=seed + 1)
    px = space.project(x)
    torch.testing.assert_close(space.project(px), px, **CLOSE)
    torch.testing.assert_close(px.mT @ y, x.mT @ space.project(y), **CLOSE)
    torch.testing.assert_close(px + space.reject(x), x, **CLOSE)
    torch.testing.assert_close(space.Q @ space.coordinates(x), px, **CLOSE)
    inside, outside = px.square().sum(), space.reject(x).square().sum()
    torch.testing.assert_close(inside + outside, x.square().sum(), atol=1e-9, rtol=0)
    torch.testing.assert_close(space.captured_energy(x), inside / x.square().sum(), **CLOSE)


@given(n=st.integers(2, 10), k=st.integers(0, 10), seed=SEEDS)
@settings(deadline=None, max_examples=40)
def test_complement_is_orthogonal_and_fills_the_space(n: int, k: int, seed: int) -> None:
    space = random_subspace(n, min(k, n), seed)
    other = space.complement()
    assert (space.ambient, space.dim + other.dim) == (n, n)
    full = torch.cat([space.Q, other.Q], -1)
    torch.testing.assert_close(full.mT @ full, torch.eye(n, dtype=full.dtype), **CLOSE)


def test_span_keeps_directions_and_drops_dependent_columns() -> None:
    x = gaussian(8, 3)
    space = Subspace.span(torch.cat([x, x @ gaussian(3, 4, seed=1)], -1))
    assert space.dim == 3
    torch.testing.assert_close(space.project(x), x, **CLOSE)
    assert Subspace.span(torch.zeros(5, 2, dtype=torch.float64)).dim == 0
    assert Subspace.span(torch.zeros(5, 0, dtype=torch.float64)).dim == 0
    assert Subspace.span(torch.diag(torch.tensor([1.0, 1e-3], dtype=torch.float64)), tol=1e-2).dim == 1


@given(angle=st.floats(1e-9, math.pi / 2), more=st.integers(0, 3), seed=SEEDS)
@settings(deadline=None, max_examples=60)
def test_principal_angles_are_exact_from_tiny_to_right(angle: float, more: int, seed: int) -> None:
    n, k = 9, 2
    q = random_orthonormal(n, 2 * k + more, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    a, b, rest = q[:, :k], q[:, k : 2 * k], q[:, 2 * k :]
    tilted = torch.cat([math.cos(angle) * a[:, :1] + math.sin(angle) * b[:, :1], a[:, 1:], rest], -1)
    first, second = Subspace(a), Subspace(tilted)
    for x, y in ((first, second), (second, first)):
        angles = x.principal_angles(y)
        assert angles.shape == (k,)
        assert float(angles[0]) == pytest.approx(0.0, abs=1e-12)
        assert float(angles[1]) == pytest.approx(angle, rel=1e-6)
        # The overlap is the mean squared cosine.
        assert float(x.overlap(y)) == pytest.approx(float(angles.cos().square().mean()), abs=1e-12)


def test_overlap_of_nested_equal_orthogonal_and_zero_subspaces() -> None:
    big = random_subspace(8, 5, 0)
    small = Subspace(big.Q[:, :2])
    assert float(big.overlap(small)) == pytest.approx(1.0)
    assert float(big.overlap(big)) == pytest.approx(1.0)
    assert float(big.overlap(big.complement())) == pytest.approx(0.0, abs=1e-12)
    assert float(Subspace(torch.zeros(8, 0, dtype=torch.float64)).overlap(big)) == 0.0


@given(k=st.integers(1, 4), extra=st.integers(1, 4), noise=st.sampled_from([1.0, 1e-6]), seed=SEEDS)
@settings(deadline=None, max_examples=40)
def test_extended_keeps_the_old_basis_and_stays_orthonormal(k: int, extra: int, noise: float, seed: int) -> None:
    space = random_subspace(10, k, seed)
    # Almost inside the subspace: what is left over is small, and must still come out orthogonal.
    x = space.project(gaussian(10, extra, seed=seed)) + noise * gaussian(10, extra, seed=seed + 1)
    wider = space.extended(x)
    assert wider.dim == k + extra
    assert torch.equal(wider.Q[:, :k], space.Q)
    torch.testing.assert_close(wider.Q.mT @ wider.Q, torch.eye(k + extra, dtype=x.dtype), **CLOSE)
    torch.testing.assert_close(wider.project(x), x, atol=1e-9, rtol=0)


def test_captured_energy_of_zero_is_zero() -> None:
    assert float(random_subspace(4, 2, 0).captured_energy(torch.zeros(4, dtype=torch.float64))) == 0.0


def test_t13_summaries_of_known_spectra() -> None:
    s = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    assert float(stable_rank(s)) == pytest.approx(1.555556, abs=1e-6)
    assert float(spectral_entropy(s)) == pytest.approx(0.755928, abs=1e-6)
    assert float(effective_rank(s)) == pytest.approx(math.exp(0.755928 * math.log(3)), abs=1e-5)
    for k in (2, 5):
        flat, spike = torch.ones(k, dtype=torch.float64), torch.eye(k, dtype=torch.float64)[0]
        assert [float(f(flat)) for f in (stable_rank, spectral_entropy, effective_rank)] == pytest.approx([k, 1, k])
        assert [float(f(spike)) for f in (stable_rank, spectral_entropy, effective_rank)] == pytest.approx([1, 0, 1])


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=8), st.floats(1e-6, 1e6))
@settings(deadline=None)
def test_summaries_are_scale_free_ordered_and_batched(values: list[float], scale: float) -> None:
    s = torch.tensor(values, dtype=torch.float64)
    for f in (stable_rank, spectral_entropy, effective_rank):
        torch.testing.assert_close(f(scale * s), f(s), atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(f(torch.stack([s, 2 * s])), f(s).repeat(2), atol=1e-9, rtol=1e-9)
    assert 1 - 1e-9 <= float(stable_rank(s)) <= float(effective_rank(s)) + 1e-9 <= len(values) + 1e-8
    assert -1e-12 <= float(spectral_entropy(s)) <= 1 + 1e-12


def test_summaries_of_a_zero_matrix_are_zero() -> None:
    zero = torch.zeros(3)
    assert [float(f(zero)) for f in (stable_rank, spectral_entropy, effective_rank)] == [0.0, 0.0, 0.0]


@given(m=st.integers(1, 10), n=st.integers(1, 10), seed=SEEDS)
@settings(deadline=None, max_examples=30)
def test_singular_values_are_those_of_the_svd_in_float64(m: int, n: int, seed: int) -> None:
    x = gaussian(m, n, seed=seed).float()
    s = singular_values(x)
    assert s.dtype == torch.float64
    torch.testing.assert_close(s, torch.linalg.svdvals(x.double()).flip(0), atol=1e-7 * float(s.max()), rtol=0)
    assert torch.equal(singular_values(torch.zeros(m, n)), torch.zeros(min(m, n), dtype=torch.float64))


def test_energy_rank_of_the_poisson_spectrum_and_at_its_ends() -> None:
    s = torch.arange(1, 5001, dtype=torch.float64) ** -2  # of the Green's function of a second derivative
    assert [int(energy_rank(s, energy)) for energy in (0.99, 0.999, 0.999999)] == [3, 7, 68]
    flat = torch.ones(2, 4, dtype=torch.float64)
    assert [energy_rank(flat, energy).tolist() for energy in (0.25, 0.26, 1.0)] == [[1, 1], [2, 2], [4, 4]]
    assert energy_rank(torch.zeros(3)) == 0
    with pytest.raises(ValueError, match="share of the whole"):
        energy_rank(s, 0.0)


def test_projection_kernel_is_the_overlap_of_every_pair_whatever_the_bases() -> None:
    spaces = [random_subspace(9, 3, seed) for seed in range(4)]
    turned = [s.Q @ random_subspace(3, 3, 10 + i).Q for i, s in enumerate(spaces)]
    kernel = projection_kernel(torch.stack([s.Q for s in spaces]))
    expected = torch.stack([torch.stack([a.overlap(b) for b in spaces]) for a in spaces])
    torch.testing.assert_close(kernel, expected, **CLOSE)
    torch.testing.assert_close(projection_kernel(torch.stack(turned)), kernel, **CLOSE)
