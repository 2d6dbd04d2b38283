"""The geometry of the trap: checks T4 to T8 and T12 of the specification, on matrices alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subspan.linalg import newton_schulz, ns_coefficients, polar
from subspan.resize import escape_ratio, initial_alignment, trap_projection

F64 = torch.float64


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def cloned(g, n):
    """J (x) G."""
    return g.repeat(n, n)


@given(n=st.integers(2, 4), m=st.integers(1, 5), k=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_t12_the_projection_is_linear_selfadjoint_and_idempotent(n, m, k, seed):
    x, y = rand(n * m, n * k, seed=seed), rand(n * m, n * k, seed=seed + 100)
    px, py = trap_projection(x, n), trap_projection(y, n)
    torch.testing.assert_close(trap_projection(2 * x - y, n), 2 * px - py, rtol=0, atol=1e-12)
    assert (px * y).sum().item() == pytest.approx((x * py).sum().item(), abs=1e-12 * x.norm().item() * y.norm().item())
    torch.testing.assert_close(trap_projection(px, n), px, rtol=0, atol=1e-12)
    assert x.square().sum().item() == pytest.approx((px.square().sum() + (x - px).square().sum()).item(), rel=1e-12)
    # It is the mean of the blocks, in every block.
    blocks = [x[a * m : (a + 1) * m, b * k : (b + 1) * k] for a in range(n) for b in range(n)]
    torch.testing.assert_close(px, cloned(sum(blocks) / n**2, n))


@given(seed=st.integers(0, 99), n=st.integers(2, 3))
@settings(max_examples=10, deadline=None)
def test_t4_signs_stay_in_the_trap_while_the_rest_is_smaller(seed, n):
    g = cloned(rand(6, 5, seed=seed), n)
    inside = g.abs() * (2 * torch.rand(g.shape, generator=torch.Generator().manual_seed(seed), dtype=F64) - 1)
    assert escape_ratio(inside, n) > 0.3  # what is added has a large part outside
    assert escape_ratio((g + 0.999 * inside).sign(), n) == 0
    assert escape_ratio((g + 3 * inside).sign(), n) > 0


@pytest.mark.parametrize("eps", [1e-3, 0.1, 2.0])
def test_t5_sgd_escapes_by_what_the_gradient_does(eps):
    g, e = cloned(rand(6, 5), 2), rand(12, 10, seed=1)
    e = e - trap_projection(e, 2)
    e = e * eps * g.norm() / e.norm()
    assert escape_ratio(g + e, 2).item() == pytest.approx(eps / math.sqrt(1 + eps**2), rel=1e-10)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_t6_the_polar_factor_escapes_by_the_same_however_little_there_was(n):
    g, e = cloned(rand(12, 8), n), rand(12 * n, 8 * n, seed=1)
    for eps in (1e-4, 1e-6):
        esc = escape_ratio(polar(g + eps * e * g.norm() / e.norm()), n).item()
        assert abs(esc**2 - (1 - 1 / n)) < 1e-8 * (eps / 1e-6) ** 2
    assert escape_ratio(polar(g), n).item() < 1e-12  # the limit is discontinuous: an exact clone is a trap


def test_t7_newton_schulz_amplifies_what_is_small_but_not_to_one():
    assert math.prod(a for a, _, _ in ns_coefficients("quintic", 5)) == pytest.approx(484.876, rel=1e-5)
    assert math.prod(a for a, _, _ in ns_coefficients("polar_express", 5)) / 1.1 == pytest.approx(909, abs=1)

    def reached(x, method, steps, margin=1.0):
        x = x / margin
        for a, b, c in ns_coefficients(method, steps):
            x = a * x + b * x**3 + c * x**5
        return x

    assert reached(1e-4, "polar_express", 8, 1.1) == pytest.approx(0.54, abs=0.01)
    assert reached(1e-3, "polar_express", 8, 1.1) == pytest.approx(1.0, abs=0.01)
    g, e = cloned(rand(16, 24), 2), rand(32, 48, seed=1)
    e = e - trap_projection(e, 2)
    found = [
        escape_ratio(newton_schulz(g + eps * e * g.norm() / e.norm(), 5, "quintic"), 2).item()
        for eps in (1e-4, 1e-3, 1e-2, 1e-1)
    ]
    # Measured values of the specification; those of other Gaussian draws differ by some per cent.
    for one, other in zip(found, (0.0092, 0.091, 0.63, 0.69), strict=True):
        assert one == pytest.approx(other, rel=0.15)


@pytest.mark.parametrize(("n", "wanted"), [(2, 0.866), (3, 0.9428)])
def test_t8_gaussian_changes_have_sqrt_of_one_less_one_over_n_squared(n, wanted):
    assert wanted == pytest.approx(math.sqrt(1 - 1 / n**2), abs=1e-4)
    assert escape_ratio(rand(64 * n, 64 * n), n).item() == pytest.approx(wanted, abs=0.01)


def test_escape_of_zero_is_zero_and_batches_and_rectangles_count_one_by_one():
    assert escape_ratio(torch.zeros(4, 4), 2) == 0
    assert escape_ratio(torch.full((4, 4), math.nan), 2).isnan()  # a run that diverged is not trapped
    x = rand(3, 6, 4)
    assert torch.equal(escape_ratio(x, (3, 2)), torch.stack([escape_ratio(m, (3, 2)) for m in x]))
    assert escape_ratio(rand(6, 4).bfloat16(), 2).dtype == torch.float32
    with pytest.raises(ValueError, match=r"\(6, 4\) matrix"):
        escape_ratio(rand(6, 4), 4)
    with pytest.raises(ValueError, match=r"0 x 0"):
        escape_ratio(rand(6, 4), 0)


def test_alignment_with_the_start_without_knowing_the_clones():
    start = cloned(rand(4, 4), 2).float()
    assert initial_alignment(cloned(rand(4, 4, seed=1), 2).float(), start) == pytest.approx(1, abs=1e-5)
    other = rand(8, 8, seed=2).float()
    assert initial_alignment(other, start) < 0.8
    assert initial_alignment(other, start, rank=1) < initial_alignment(other, start, rank=4)
    assert initial_alignment(torch.zeros(8, 8), start) == 0
