"""Orthonormal bases, polar factors, Newton-Schulz: exact properties in float64, the tolerances given in float32."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from subspan.linalg import (
    hadamard_transform,
    nearest_orthogonal,
    newton_schulz,
    ns_coefficients,
    orthonormalise,
    polar,
    polar_express_coeffs,
    procrustes,
    random_orthonormal,
)

METHODS = ("quintic", "polar_express")
SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 12))
SEEDS = st.integers(0, 2**31)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def conditioned(m: int, n: int, cond: float, seed: int) -> torch.Tensor:
    """An m x n matrix with singular values from 1 down to 1 / cond."""
    k = min(m, n)
    g = torch.Generator().manual_seed(seed)
    u, v = (random_orthonormal(d, k, generator=g, dtype=torch.float64) for d in (m, n))
    return (u * torch.logspace(0, -math.log10(cond), k, dtype=torch.float64)) @ v.mT


def scalar_map(method: str, steps: int, x: np.ndarray) -> np.ndarray:
    for a, b, c in ns_coefficients(method, steps):
        x = a * x + b * x**3 + c * x**5
    return x


@given(st.integers(1, 8), st.integers(0, 8), SEEDS)
@settings(deadline=None, max_examples=30)
def test_orthonormalise_spans_the_same_columns_with_positive_diagonal(k: int, more: int, seed: int) -> None:
    x = gaussian(k + more, k, seed=seed)
    q = orthonormalise(x)
    r = q.mT @ x
    torch.testing.assert_close(q.mT @ q, torch.eye(k, dtype=x.dtype), atol=1e-12, rtol=0)
    torch.testing.assert_close(q @ r, x, atol=1e-10, rtol=0)
    assert (r.diagonal() >= 0).all()


def test_random_orthonormal_is_reproducible_orthonormal_and_refuses_too_many_columns() -> None:
    q = random_orthonormal(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(q.mT @ q, torch.eye(3, dtype=q.dtype), atol=1e-12, rtol=0)
    assert torch.equal(q, random_orthonormal(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    with pytest.raises(ValueError, match="4 orthonormal columns in dimension 3"):
        random_orthonormal(3, 4)


def test_random_orthonormal_is_haar_in_its_first_moments() -> None:
    g = torch.Generator().manual_seed(0)
    draws = torch.stack([random_orthonormal(3, 3, generator=g, dtype=torch.float64) for _ in range(4000)])
    # Under the Haar measure the entries have mean 0 and variance 1/3; a QR without the sign rule fails this.
    assert draws.mean(0).abs().max() < 0.04
    torch.testing.assert_close(
        draws.square().mean(0), torch.full((3, 3), 1 / 3, dtype=torch.float64), atol=0.03, rtol=0
    )


@given(SHAPES, SEEDS)
@settings(deadline=None, max_examples=30)
def test_polar_has_unit_singular_values_and_a_positive_symmetric_remainder(shape: tuple[int, int], seed: int) -> None:
    x = gaussian(*shape, seed=seed)
    p = polar(x)
    torch.testing.assert_close(torch.linalg.svdvals(p), torch.ones(min(shape), dtype=x.dtype), atol=1e-10, rtol=0)
    h = p.mT @ x if shape[0] >= shape[1] else x @ p.mT
    torch.testing.assert_close(h, h.mT, atol=1e-10, rtol=0)
    assert torch.linalg.eigvalsh(h).min() > -1e-10


def test_polar_of_rank_deficient_matrices_leaves_the_null_directions_out() -> None:
    x = gaussian(6, 2) @ gaussian(2, 5, seed=1)
    s = torch.linalg.svdvals(polar(x))
    torch.testing.assert_close(s, torch.tensor([1.0, 1, 0, 0, 0], dtype=s.dtype), atol=1e-10, rtol=0)
    assert torch.equal(polar(torch.zeros(3, 4)), torch.zeros(3, 4))


@given(st.integers(1, 6), SEEDS)
@settings(deadline=None, max_examples=20)
def test_procrustes_recovers_a_rotation_and_beats_every_other(k: int, seed: int) -> None:
    source = gaussian(k + 3, k, seed=seed)
    rotation = random_orthonormal(k, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(procrustes(source, source @ rotation), rotation, atol=1e-8, rtol=0)
    target = gaussian(k + 3, k, seed=seed + 1)
    best = torch.linalg.norm(source @ procrustes(source, target) - target)
    assert best <= torch.linalg.norm(source @ rotation - target) + 1e-10


def test_nearest_orthogonal_completes_a_singular_matrix() -> None:
    q = nearest_orthogonal(torch.zeros(3, 3, dtype=torch.float64))
    torch.testing.assert_close(q.mT @ q, torch.eye(3, dtype=q.dtype))


def test_t5_quintic_range_and_values() -> None:
    v = scalar_map("quintic", 5, np.linspace(0.01, 1, 200_001))
    assert v.min() >= 0.6818
    assert v.max() <= 1.2024
    everywhere = scalar_map("quintic", 5, np.linspace(0, 1, 200_001))
    assert 1.2020 < everywhere.max() <= 1.2024  # attained near 0.0041
    for x, y in ((1.0, 0.696436), (0.1, 0.712120), (1e-3, 0.470544)):
        assert scalar_map("quintic", 5, np.array(x)) == pytest.approx(y, abs=1e-6)
    assert scalar_map("quintic", 5, np.array(1e-9)) / 1e-9 == pytest.approx(484.876, abs=1e-3)


def test_t5_polar_express_range_and_convergence() -> None:
    v = scalar_map("polar_express", 5, np.linspace(0.003, 1, 200_001))
    assert v.min() >= 0.8689 - 5e-5
    assert v.max() <= 1.1310
    # newton_schulz divides by 1.1 |X|_F first, so a singular value of 1e-3 |X|_F enters as 1e-3 / 1.1.
    assert scalar_map("polar_express", 5, np.array(1e-3 / 1.1)) == pytest.approx(0.8047, abs=1e-4)
    assert np.abs(1 - scalar_map("polar_express", 8, np.geomspace(1e-3, 1, 200_001))).max() < 1e-5


def test_t5_newton_schulz_applies_the_scalar_map_to_the_singular_values() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64)
    x[range(3), range(3)] = torch.tensor([3.0, 2.0, 0.05], dtype=torch.float64)
    for method, margin in (("quintic", 1.0), ("polar_express", 1.1)):
        scaled = x.diagonal().numpy() / (margin * float(x.norm()) + 1e-7)
        for steps in (1, 5, 8, 12):
            out = newton_schulz(x, steps, method, fast=False)
            np.testing.assert_allclose(out.diagonal().numpy(), scalar_map(method, steps, scaled), atol=1e-12)
            assert float((out - torch.nn.functional.pad(torch.diag(out.diagonal()), (0, 1))).abs().max()) < 1e-12


def test_polar_express_constants_are_what_the_generator_gives() -> None:
    generated = np.array(polar_express_coeffs())
    np.testing.assert_allclose(np.array(ns_coefficients("polar_express", 10)), generated, atol=1e-5)
    published = [
        (8.2373, -23.1577, 16.6806),
        (4.0824, -2.8930, 0.5253),
        (3.9263, -2.8547, 0.5318),
        (3.2982, -2.4245, 0.4863),
        (2.2970, -1.6366, 0.4003),
    ]
    np.testing.assert_allclose(generated[:5], np.array(published), atol=6e-5)
    assert ns_coefficients("polar_express", 13)[-4:] == [ns_coefficients("polar_express", 10)[-1]] * 4


@given(st.floats(1e-4, 0.9))
@settings(deadline=None, max_examples=30)
def test_one_polar_express_quintic_equioscillates(l: float) -> None:
    ((a, b, c),) = polar_express_coeffs(l, steps=1, cushion=0.0)
    x = np.concatenate([np.geomspace(l, 1, 20_001), np.linspace(l, 1, 20_001)])
    error = 1 - (a * x + b * x**3 + c * x**5)
    worst = np.abs(error).max()
    # Minimax: the error reaches both bounds, at both ends of the interval with opposite sign.
    assert error.max() == pytest.approx(-error.min(), rel=1e-3, abs=1e-12)
    assert abs(1 - (a * l + b * l**3 + c * l**5)) == pytest.approx(worst, rel=1e-6, abs=1e-12)


def test_polar_express_generator_refuses_nonsense() -> None:
    for l, steps in ((0.0, 5), (2.0, 5), (1e-3, 0)):
        with pytest.raises(ValueError, match="0 < l <= 1"):
            polar_express_coeffs(l, steps)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("method", METHODS)
@given(shape=SHAPES, seed=SEEDS)
@settings(deadline=None, max_examples=20)
def test_t6_commutes_with_orthogonal_maps_transpose_sign_and_scale(
    method: str, fast: bool, shape: tuple[int, int], seed: int
) -> None:
    m, n = shape
    x = gaussian(m, n, seed=seed)
    g = torch.Generator().manual_seed(seed)
    q, r = (random_orthonormal(k, k, generator=g, dtype=torch.float64) for k in (m, n))
    ns = newton_schulz(x, 5, method, fast)
    close = dict(atol=1e-10, rtol=0)
    torch.testing.assert_close(newton_schulz(q @ x @ r, 5, method, fast), q @ ns @ r, **close)
    torch.testing.assert_close(newton_schulz(x.mT, 5, method, fast), ns.mT, **close)
    torch.testing.assert_close(newton_schulz(-x, 5, method, fast), -ns, **close)
    # eps shifts the norm by 1e-7, which the slope at 0 magnifies; beside 1e8 it is lost.
    large = x * (1e8 / x.norm())
    ns = newton_schulz(large, 5, method, fast)
    torch.testing.assert_close(newton_schulz(37.0 * large, 5, method, fast), ns, **close)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "exact"])
def test_t6_zero_stays_zero(method: str, fast: bool) -> None:
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 40), 5, method, fast), torch.zeros(2, 3, 40))


def test_tiny_inputs_are_attenuated_by_eps_and_never_blow_up() -> None:
    x = gaussian(4, 64, dtype=torch.float32)
    x = x / x.norm()
    for fast in (False, True):
        assert newton_schulz(1e-12 * x, fast=fast).abs().max() < 0.005
        assert newton_schulz(1e-4 * x, fast=fast).norm() > 1.3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("cond", "tol"), [(1, 2e-7), (1e2, 2e-5), (1e3, 9e-5), (1e4, 4e-4)])
@pytest.mark.parametrize("tall", [False, True])
def test_t7_gram_path_agrees_with_the_plain_loop(method: str, cond: float, tol: float, tall: bool) -> None:
    for seed in range(3):
        x = conditioned(8, 768, cond, seed)  # the size of a LoRA factor
        x = x.mT if tall else x
        plain = newton_schulz(x, 5, method, fast=False)
        assert (newton_schulz(x, 5, method, fast=True) - plain).abs().max() < 1e-11
        # Polar Express's first step cancels to a few per cent of its terms, which costs even the plain loop 1e-6.
        allowed = tol if method == "quintic" else max(tol, 1e-6)
        assert (newton_schulz(x.float(), 5, method, fast=True).double() - plain).abs().max() < allowed


@pytest.mark.parametrize("method", METHODS)
def test_gram_path_in_float32_is_as_accurate_as_the_plain_loop(method: str) -> None:
    # A single Gram matrix would be off by 1e-4 here.
    for seed in range(5):
        x = conditioned(8, 768, 1e3, seed).float()
        exact = newton_schulz(x.double(), 5, method, fast=False)
        assert (newton_schulz(x, 5, method, fast=True).double() - exact).abs().max() < 1e-5


def test_auto_takes_the_gram_path_for_long_matrices_only() -> None:
    wide, square = gaussian(4, 16, dtype=torch.float32), gaussian(8, 16, dtype=torch.float32)
    assert torch.equal(newton_schulz(wide), newton_schulz(wide, fast=True))
    assert torch.equal(newton_schulz(square), newton_schulz(square, fast=False))


def test_gram_path_of_half_precision_runs_in_float32() -> None:
    x = gaussian(4, 64, dtype=torch.float32).bfloat16()
    out = newton_schulz(x, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, newton_schulz(x.float()).bfloat16())


@pytest.mark.parametrize("method", [*METHODS, "exact"])
@pytest.mark.parametrize("shape", [(4, 40), (40, 4), (6, 7), (1, 9), (9, 1), (1, 1)])
def test_t8_batched_equals_one_by_one(method: str, shape: tuple[int, int]) -> None:
    x = gaussian(2, 3, *shape, dtype=torch.float32)
    out = newton_schulz(x, 5, method)
    assert out.shape == x.shape
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(out[i, j], newton_schulz(x[i, j], 5, method), atol=1e-6, rtol=0)


def test_input_is_untouched_unless_overwriting_is_allowed() -> None:
    for shape in ((3, 4, 5), (3, 5, 4), (2, 2, 40)):
        x = gaussian(*shape, dtype=torch.float32)
        kept = x.clone()
        out = newton_schulz(x)
        assert torch.equal(x, kept)
        assert torch.equal(newton_schulz(x.clone(), overwrite=True), out)


def test_one_row_is_normalised_to_ns5_of_one_and_exactly_by_exact() -> None:
    x = gaussian(1, 50)
    assert float(newton_schulz(x).norm()) == pytest.approx(0.696436, abs=1e-5)
    assert float(newton_schulz(x, method="exact").norm()) == pytest.approx(1.0, abs=1e-12)


def test_polar_express_approaches_the_exact_factor() -> None:
    x = conditioned(5, 30, 50.0, 0)
    torch.testing.assert_close(newton_schulz(x, 10, "polar_express"), polar(x), atol=1e-5, rtol=0)
    assert (newton_schulz(x, 10) - polar(x)).abs().max() > 1e-3  # the quintic does not converge, and need not


def test_plain_loop_is_differentiable() -> None:
    x = gaussian(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: newton_schulz(y, 2, fast=False), x)


@pytest.mark.parametrize("steps", [0, -1, 100])
def test_steps_out_of_range_are_refused(steps: int) -> None:
    with pytest.raises(ValueError, match="steps must lie between 1 and 99"):
        newton_schulz(torch.eye(2), steps)


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="'cubic'"):
        inspect.unwrap(ns_coefficients)("cubic", 5)  # without the type checks of the test run


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_hadamard_transform_is_the_product_with_sylvesters_matrix(n: int) -> None:
    x = gaussian(3, n)
    h = torch.from_numpy(hadamard(n)).double() / n**0.5
    torch.testing.assert_close(hadamard_transform(x), x @ h)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x[0])), x[0])
    assert hadamard_transform(x[:0]).shape == (0, n)


@pytest.mark.parametrize("n", [0, 3, 12])
def test_hadamard_transform_needs_a_power_of_two(n: int) -> None:
    with pytest.raises(ValueError, match=f"power of two, got length {n}"):
        hadamard_transform(torch.ones(2, n))
