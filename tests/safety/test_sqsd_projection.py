"""The mathematics of risk scores: section 4 of the specification, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subspan.linalg import LowRank
from subspan.safety.sqsd.projection import (
    FactorGradients,
    FactorStep,
    WeightStep,
    contributions,
    factor_gradients,
    jackknife_error,
    null_deviation,
)

SIZES = st.tuples(st.integers(1, 200), st.integers(1, 200), st.integers(1, 16), st.integers(1, 16), st.integers(0, 999))


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dense_step(g: FactorGradients, z: LowRank) -> torch.Tensor:
    """b x m x n, as the paper writes it."""
    return -(g.A @ z.B.mT + z.A @ g.B.mT)


def problem(seed: int, m: int = 7, n: int = 9, r: int = 3, b: int = 4, t: int = 5):
    """D, X, the state and a direction."""
    d, x, a, b_, p, q = drawn(seed, (b, t, m), (b, t, n), (m, r), (n, r), (m, 2), (n, 2))
    return d, x, LowRank(a, b_), LowRank(p, q)


@given(SIZES)
@settings(max_examples=30, deadline=None)
def test_t1_factored_products_and_norms_equal_the_dense_ones(sizes):
    m, n, r, k, seed = sizes
    a, b, p, q, ga, gb = drawn(seed, (m, r), (n, r), (m, k), (n, k), (3, m, r), (3, n, r))
    z, v, g = LowRank(a, b), LowRank(p, q), FactorGradients(ga, gb)
    found = FactorStep(z, 2.0, [v]).project_gradients(g)
    dw = dense_step(g, z)
    norm_sq = dw.square().sum((1, 2))
    scale = norm_sq.sqrt() * v.norm()
    torch.testing.assert_close(found.norm_sq, norm_sq, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.grad_sq, ga.square().sum((1, 2)) + gb.square().sum((1, 2)), rtol=1e-10, atol=0)
    assert ((found.dots[:, 0] - (dw * v.dense()).sum((1, 2))).abs() <= 1e-10 * scale).all()
    cosine = contributions("cosine", found.dots, found.norm_sq[:, None], v.norm()[None])
    direct = torch.nn.functional.cosine_similarity(dw.flatten(1), v.dense().flatten()[None], dim=1)
    torch.testing.assert_close(cosine[:, 0], direct, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shift", [1e-6, 1e-9, 0.0])
def test_t1_norms_survive_terms_that_cancel(shift):
    m, n, r = 12, 10, 2
    a, b, c, noise = drawn(3, (m, r), (n, r), (r, r), (1, m, r))
    # g_A Bᵀ + A g_Bᵀ = A C Bᵀ - A C Bᵀ up to the noise
    g = FactorGradients((a @ c)[None] + shift * noise, -(b @ c.mT)[None])
    z = LowRank(a, b)
    found = FactorStep(z, 1.0, [z]).project_gradients(g).norm_sq.sqrt()
    exact = dense_step(FactorGradients(shift * noise, torch.zeros(1, n, r, dtype=torch.float64)), z)
    assert abs(float(found) - float(torch.linalg.matrix_norm(exact))) < 1e-13


def test_t2_a_finite_step_misses_the_first_order_by_e_gB_gA():
    d, x, z, _ = problem(0)
    g = factor_gradients(d, x, z, 2.0)
    for e in (1e-2, 1.0):
        moved = (z.A - e * g.A) @ (z.B - e * g.B).mT
        rest = (moved - z.dense()) / e - dense_step(g, z)
        torch.testing.assert_close(rest, e * g.A @ g.B.mT, rtol=0, atol=1e-10)


def test_t3_chain_rule_from_the_weights_gradient():
    d, x, z, v = problem(1)
    s = 1.7
    full = d.mT @ x  # dLoss/dW_eff
    g = factor_gradients(d, x, z, s)
    torch.testing.assert_close(g.A, s * full @ z.B, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(g.B, s * full.mT @ z.A, rtol=1e-10, atol=1e-10)
    dw = -s * (full @ z.B @ z.B.mT + z.A @ z.A.mT @ full)
    torch.testing.assert_close(dense_step(g, z), dw, rtol=1e-10, atol=1e-10)
    q = torch.linalg.qr(z.B).Q
    fresh = LowRank(torch.zeros_like(z.A), q)
    start = factor_gradients(d, x, fresh, s)
    torch.testing.assert_close(dense_step(start, fresh), -s * full @ (q @ q.mT), rtol=1e-10, atol=1e-10)
    whole = WeightStep([v]).project(d, x)
    torch.testing.assert_close(whole.dots[:, 0], -(full * v.dense()).sum((1, 2)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(whole.norm_sq, full.square().sum((1, 2)), rtol=1e-10, atol=1e-10)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.1, 10), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_t5_cosines_ignore_scales_and_stay_within_one(c, d_scale, s, seed):
    d, x, z, v = problem(seed)

    def cosine(d, v, s):
        found = FactorStep(z, s, [v]).project(d, x)
        return contributions("cosine", found.dots, found.norm_sq[:, None], v.norm()[None])

    base = cosine(d, v, 1.0)
    torch.testing.assert_close(cosine(d * d_scale, v.scale(c), s), base, rtol=1e-12, atol=1e-12)
    assert (base.abs() <= 1).all()
    own = LowRank(-(d[:1].mT @ x[:1])[0] @ z.B, z.B)  # its own step's part in A: cosine 1 at A = 0
    at_start = FactorStep(LowRank(torch.zeros_like(z.A), z.B), s, [own]).project(d[:1], x[:1])
    assert float(contributions("cosine", at_start.dots, at_start.norm_sq[:, None], own.norm()[None])) > 1 - 1e-12


def test_t6_orthogonal_gauges_change_nothing_and_others_do():
    d, x, z, _ = problem(2)
    (w,) = drawn(5, (3, 3))
    q = torch.linalg.qr(w).Q
    same = z.regauge(q)
    torch.testing.assert_close(
        dense_step(factor_gradients(d, x, same, 1.0), same),
        dense_step(factor_gradients(d, x, z, 1.0), z),
        rtol=1e-8,
        atol=1e-8,
    )
    other = z.regauge(torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)))
    torch.testing.assert_close(other.dense(), z.dense())
    difference = dense_step(factor_gradients(d, x, other, 1.0), other) - dense_step(factor_gradients(d, x, z, 1.0), z)
    assert difference.abs().max() > 1e-2


def test_t7_rows_that_made_a_direction_point_along_it():
    d, x, z, _ = problem(4, b=6)
    start = LowRank(torch.zeros_like(z.A), z.B)
    each = factor_gradients(d, x, start, 1.0)
    whole = FactorGradients(each.A.sum(0, keepdim=True), each.B.sum(0, keepdim=True))
    v = LowRank(-whole.A[0], start.B)  # one step of the full batch; g_B = 0 at A = 0
    step = FactorStep(start, 1.0, [v])

    def cosines(g):
        found = step.project_gradients(g)
        return contributions("cosine", found.dots, found.norm_sq[:, None], v.norm()[None])

    assert float(cosines(whole)) == pytest.approx(1.0, abs=1e-8)
    assert float(cosines(each).mean()) > 0


def test_half_precision_gradients_do_not_overflow():
    d, x, z, v = problem(6)
    low = LowRank(z.A.float(), z.B.float())
    direction = LowRank(v.A.float(), v.B.float())
    large = (d.clamp(-2, 2) * 3e4).half().float()  # squared norms lie far beyond float16's 65504
    found = FactorStep(low, 1.0, [direction]).project(large, x.float())
    assert found.norm_sq.isfinite().all()
    assert (found.norm_sq > 65504).all()


def test_every_metric_sums_to_its_term():
    dots, norm_sq, norms = drawn(7, (5, 3), (5, 3), (3,))
    norm_sq, norms = norm_sq.square() + 10, norms.abs() + 1
    for metric, expected in {
        "dot": dots.sum(1),
        "projection": (dots / norms).sum(1),
        "cosine": (dots / (norm_sq.sqrt() * norms)).sum(1),
        "global": dots.sum(1) / (norm_sq.sum(1) * norms.square().sum()).sqrt(),
        "l2": -(norm_sq - 2 * dots + norms.square()).sqrt().sum(1),
    }.items():
        torch.testing.assert_close(contributions(metric, dots, norm_sq, norms).sum(1), expected)
    with pytest.raises(ValueError, match="'l1' is none of cosine"):
        contributions("l1", dots, norm_sq, norms)


@pytest.mark.parametrize("metric", ["cosine", "global", "projection"])
def test_without_gradient_or_direction_a_cosine_is_zero_and_nan_stays_nan(metric):
    dots = torch.tensor([[0.0, 1.0], [0.0, 0.0], [torch.nan, 0.0]], dtype=torch.float64)
    norm_sq = torch.tensor([[0.0, 4.0], [0.0, 0.0], [torch.nan, 1.0]], dtype=torch.float64)
    found = contributions(metric, dots, norm_sq, torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert found[0, 0] == 0
    assert found[0, 1] > 0
    assert (found[1] == 0).all()
    assert found[2, 0].isnan()
    nowhere = contributions(metric, dots[:2], norm_sq[:2], torch.zeros(2, dtype=torch.float64))
    assert (nowhere == 0).all()


def test_jackknife_error_equals_leaving_one_module_out():
    (parts,) = drawn(8, (2, 6))
    left_out = torch.stack([parts[:, [j for j in range(6) if j != i]].sum(1) * 6 / 5 for i in range(6)], 1)
    error = (5 / 6 * (left_out - left_out.mean(1, keepdim=True)).square().sum(1)).sqrt()
    torch.testing.assert_close(jackknife_error(parts), error)
    assert jackknife_error(parts[:, :1]).isnan().all()


def test_null_deviation_is_that_of_random_directions():
    d, x, z, _ = problem(9, m=20, n=30, b=1)
    draws = drawn(10, (2000, 20, 2), (2000, 30, 2))
    step = FactorStep(z, 1.0, [LowRank(p, q) for p, q in zip(*draws, strict=True)])
    found = step.project(d, x)
    norms = torch.stack([v.norm() for v in step.directions])
    spread = (found.dots[0] / (found.norm_sq.sqrt() * norms)).std()
    assert float(spread) == pytest.approx(null_deviation([(20, 30)], terms=1), rel=0.1)
