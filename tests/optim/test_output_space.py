"""The output-space estimator against closed forms, its variances, and everything a loss can do wrong."""

import copy
import io
import json
import math
import sys
import threading
import warnings
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.datasets import load_iris, make_blobs
from sklearn.metrics import f1_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from subspan.errors import NonFinite, SubspanError
from subspan.optim import (
    GeometricSigma,
    HttpLoss,
    OutputSpaceLoss,
    SubprocessLoss,
    ZeroOneClassifier,
    compute_loss_func,
    expected_truncated_square,
    expected_zero_one,
    metric_loss,
    output_gradient,
    suggest_pairs,
    top_coordinates,
    truncated_cross_entropy,
    truncated_square,
    zero_one,
)
from subspan.optim.output_space.noise import Draws

DRAWS = 200_000
ALL = ("antithetic", "plain", "loo", "forward", "orthogonal", "sphere")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def repeated(z, loss, *, pairs=1, draws=DRAWS, seed=0, target=None, **options):
    """``draws`` independent estimates at one z (K,): the samples of a batch are independent of each other."""
    z = torch.as_tensor(z, dtype=torch.float64)
    options = {"sigma": 1.0, "vectorized": True} | options
    found = output_gradient(z.expand(draws, -1), loss, target, pairs=pairs, generator=generator(seed), **options)
    return found.grad


def close(grad, truth, errors=5.0):
    """Within 5 standard errors estimated from the same draws."""
    spread = grad.std(0) / len(grad) ** 0.5
    assert ((grad.mean(0) - truth).abs() <= errors * spread + 1e-12).all(), (grad.mean(0), truth, spread)


def quadratic(z, t):
    return (z - t).square().sum(-1) / 2


def linear(a, c=0.0):
    a = torch.as_tensor(a, dtype=torch.float64)
    return lambda z: (z * a).sum(-1) + c


def label(k, n=DRAWS):
    return torch.full((n,), k)


# Section 4


@settings(max_examples=10, deadline=None)
@given(c=st.floats(-1e3, 1e3), scale=st.floats(-10, 10), seed=st.integers(0, 99))
@pytest.mark.parametrize("estimator", ["antithetic", "loo", "orthogonal"])
def test_t1_t2_constants_do_not_count_and_factors_do(estimator, c, scale, seed):
    z, t = gaussian(4, 3, seed=seed), gaussian(4, 3, seed=seed + 1)

    def found(loss):
        options = {"sigma": 0.7, "pairs": 5, "estimator": estimator, "vectorized": True}
        return output_gradient(z, loss, t, generator=generator(seed), **options).grad

    plain = found(quadratic)
    assert (found(lambda z, t: quadratic(z, t) + c) - plain).abs().max() <= 1e-12 * max(1, abs(c)) * 50
    torch.testing.assert_close(found(lambda z, t: scale * quadratic(z, t)), scale * plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("sigma", [0.3, 2.0])
def test_t3_every_estimator_is_unbiased_for_a_quadratic_at_every_sigma(estimator, sigma):
    z, t = gaussian(3, seed=1), gaussian(3, seed=2)
    close(repeated(z, lambda x: quadratic(x, t), sigma=sigma, estimator=estimator, draws=60_000, pairs=2), z - t)


def test_t3_a_sigma_of_its_own_for_each_coordinate():
    z, t = gaussian(3, seed=1), gaussian(3, seed=2)
    sigma = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    close(repeated(z, lambda x: quadratic(x, t), sigma=sigma), z - t)


def test_t4_an_even_loss_gives_exactly_zero():
    z = torch.zeros(7, 3, dtype=torch.float64)
    found = output_gradient(z, lambda x: x.square().sum(-1).sqrt(), sigma=0.9, pairs=6, generator=generator())
    assert not found.grad.any()
    assert found.value.min() > 0


A, B = (1.0, -2.0, 0.5, 3.0, -1.0), 4.35
PLAIN = {0.01: 946216.5, 0.1: 9552.75, 1.0: 186.1125, 10.0: 92.4461}


@pytest.mark.parametrize("sigma", PLAIN)
def test_t5_a_pair_s_variance_does_not_depend_on_sigma_and_a_single_draw_s_does(sigma):
    z = gaussian(5, seed=3)
    loss = linear(A, B - float(linear(A)(z)))
    noise = gaussian(400_000, 5, seed=4)

    def variance(estimator, noise):
        many = z.expand(len(noise[0]), -1)
        found = output_gradient(many, loss, sigma=sigma, noise=noise, estimator=estimator, vectorized=True)
        return float(found.grad.var(0).sum())

    squared = float(torch.tensor(A).square().sum())
    assert 6 * squared == 91.5
    assert variance("antithetic", noise.unsqueeze(0)) == pytest.approx(91.5, rel=0.02)
    assert variance("antithetic", noise.view(4, -1, 5)) == pytest.approx(91.5 / 4, rel=0.02)
    wanted = B**2 * 5 / sigma**2 + 6 * squared
    assert wanted == pytest.approx(PLAIN[sigma], rel=1e-5)
    assert variance("plain", noise.unsqueeze(0)) == pytest.approx(wanted, rel=0.02)


def test_t6_for_a_purely_odd_loss_antithetic_is_twice_as_variable():
    z = torch.zeros(5)
    odd, plain = (
        float(repeated(z, linear(A), estimator=e, draws=400_000).var(0).sum()) for e in ("antithetic", "plain")
    )
    assert odd / plain == pytest.approx(2.0, rel=0.05)  # one pair against two draws
    # With a large even part the order turns.
    even = {
        e: float(repeated(z, lambda x: linear(A)(x) + 9 * x.square().sum(-1), estimator=e).var(0).sum())
        for e in ("antithetic", "plain")
    }
    assert even["antithetic"] < 0.2 * even["plain"]


def test_t7_the_parameters_gradient_is_the_vector_jacobian_product():
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(10, 6), torch.arange(10) % 3
    criterion = OutputSpaceLoss(zero_one, pairs=4)
    z = net(x)
    criterion(z, y).backward()
    again = OutputSpaceLoss(zero_one, pairs=4, reduction="none")
    leaf = z.detach().requires_grad_()
    again(leaf, y).sum().backward()
    wanted = torch.autograd.grad(z := net(x), list(net.parameters()), leaf.grad / 10)
    for p, g in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-6, atol=1e-8)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), m=st.integers(1, 6))
def test_t8_with_no_network_it_is_antithetic_evolution_strategies(seed, m):
    theta, noise, sigma = gaussian(1, 5, seed=seed), gaussian(m, 1, 5, seed=seed + 1), 0.3

    def f(v):
        return torch.cos(v).prod(-1) + (v[..., 0] > 0)

    found = output_gradient(theta, f, sigma=sigma, noise=noise)
    es = sum((f(theta + sigma * e) - f(theta - sigma * e)) * e for e in noise) / (2 * m * sigma)
    torch.testing.assert_close(found.grad, es, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.5, 1.5])
def test_t9_two_classes_have_the_gaussian_density(sigma):
    z = torch.tensor([0.4, -0.3], dtype=torch.float64)
    v = norm.pdf(0.7 / (sigma * 2**0.5)) / (sigma * 2**0.5)
    grad = repeated(z, zero_one, target=label(0), sigma=sigma)
    close(grad, torch.tensor([-v, v], dtype=torch.float64))


@pytest.mark.parametrize("k", [3, 6])
def test_t10_the_estimate_of_the_zero_one_loss_is_the_closed_form_s_gradient(k):
    z = gaussian(k, seed=k)
    leaf = z.clone().requires_grad_()
    value = expected_zero_one(leaf, torch.tensor(1), 0.8)
    (truth,) = torch.autograd.grad(value, leaf)
    assert abs(float(truth.sum())) < 1e-10
    noise = gaussian(1, DRAWS, k, seed=9)
    found = output_gradient(z.expand(DRAWS, -1), zero_one, label(1), sigma=0.8, noise=noise)
    close(found.grad, truth)
    close(found.value.unsqueeze(1), value.detach())
    scaled = output_gradient(z.expand(DRAWS, -1) / 0.8, zero_one, label(1), sigma=1.0, noise=noise)
    torch.testing.assert_close(found.grad, scaled.grad / 0.8, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("mu", "wanted"), [(0.5, 0.0897799), (1.5, 0.1189548), (3.0, 0.0142982)])
def test_t11_the_truncated_square(mu, wanted):
    leaf = torch.tensor(mu, dtype=torch.float64, requires_grad=True)
    (truth,) = torch.autograd.grad(expected_truncated_square(leaf, 1.0, 1.0), leaf)
    assert float(truth) == pytest.approx(wanted, abs=5e-8)
    a, b = -1 - mu, 1 - mu
    formula = mu * (norm.cdf(b) - norm.cdf(a)) - (norm.pdf(b) - norm.pdf(a))
    assert float(truth) == pytest.approx(formula, abs=1e-12)
    h = 1e-4
    ends = expected_truncated_square(torch.tensor([mu - h, mu + h], dtype=torch.float64), 1.0, 1.0)
    assert float(truth) == pytest.approx(float(ends.diff()) / (2 * h), abs=1e-9)
    close(repeated([mu], truncated_square, target=torch.zeros(DRAWS, 1, dtype=torch.float64)), truth)


def test_t12_the_bias_of_a_smooth_loss_falls_with_sigma_squared():
    def grad(sigma):
        """d/dz_1 of E cross-entropy at margin 0.7: the margin m + sigma sqrt 2 t; softplus' = sigmoid."""
        return quad(lambda t: norm.pdf(t) / (1 + math.exp(0.7 + sigma * 2**0.5 * t)), -12, 12)[0]

    bias = [grad(s) - 1 / (1 + math.exp(0.7)) for s in (0.125, 0.25, 0.5, 1.0)]
    assert bias[1:] == pytest.approx([0.004434, 0.015576, 0.043360], abs=1e-6)
    ratios = [after / before for before, after in pairwise(bias)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == pytest.approx(4.0, abs=0.15)
    # sigma^2 / 2 times the gradient of the Laplacian, p (1 - p) (1 - 2 p) for each of two logits.
    p = 1 / (1 + math.exp(0.7))
    assert bias[0] == pytest.approx(0.125**2 * p * (1 - p) * (1 - 2 * p), rel=0.05)
    z = torch.tensor([0.7, 0.0], dtype=torch.float64)
    estimate = repeated(z, partial(cross, target=0), sigma=1.0)
    close(estimate[:, 1:], torch.tensor([grad(1.0)], dtype=torch.float64))


def cross(z, target):
    return torch.logsumexp(z, -1) - z[..., target]


@pytest.mark.parametrize("k", [1, 4])
def test_t13_on_the_sphere_linear_and_quadratic_gradients_are_exact(k):
    z, t, a = gaussian(6, k, seed=1), gaussian(6, k, seed=2), gaussian(k, seed=3)
    for loss, truth in ((quadratic, z - t), (lambda z, t: (z * a).sum(-1), a.expand(6, -1))):
        found = output_gradient(z, loss, t, sigma=0.5, pairs=2 * k, estimator="sphere", generator=generator())
        torch.testing.assert_close(found.grad, truth, rtol=1e-12, atol=1e-12)


def test_orthogonal_draws_are_single_standard_normals_and_orthogonal_together():
    z = torch.zeros(20_000, 3, dtype=torch.float64)
    eps = Draws(z, 3, 5, "orthogonal", generator()).take(5)
    flat = eps.flatten(0, 1)
    close(flat, 0.0)
    close((flat.unsqueeze(-1) * flat.unsqueeze(-2)).flatten(1), torch.eye(3, dtype=torch.float64).flatten())
    close(flat.norm(dim=-1, keepdim=True).pow(4), 15.0)  # E chi_3^4
    dots = (eps[0] * eps[1]).sum(-1), (eps[0] * eps[2]).sum(-1), (eps[3] * eps[4]).sum(-1)
    assert max(float(d.abs().max()) for d in dots) < 1e-10
    assert float((eps[0] * eps[3]).sum(-1).abs().max()) > 1
    # Haar: without the sign rule the first coordinate of the first direction would have one sign.
    assert abs(float((eps[0][:, 0] > 0).double().mean()) - 0.5) < 5 * 0.5 / 20_000**0.5


def test_orthogonal_draws_lower_the_variance():
    z, t = gaussian(4, seed=1), gaussian(4, seed=2)
    options = {"pairs": 4, "draws": 20_000}
    spread = {
        e: float(repeated(z, lambda x: quadratic(x, t), estimator=e, **options).var(0).sum())
        for e in ("antithetic", "orthogonal")
    }
    assert spread["orthogonal"] < 0.8 * spread["antithetic"]


def test_t14_projection_keeps_the_mean_and_lowers_the_variance():
    z = gaussian(3, seed=5)
    free = repeated(z, zero_one, target=label(0))
    held = repeated(z, zero_one, target=label(0), invariance="shift")
    torch.testing.assert_close(held, free - free.mean(1, keepdim=True))
    leaf = z.clone().requires_grad_()
    (truth,) = torch.autograd.grad(expected_zero_one(leaf, torch.tensor(0), 1.0), leaf)
    close(held, truth)
    assert float(held.var(0).sum()) < 0.75 * float(free.var(0).sum())


@pytest.mark.parametrize("estimator", ALL)
def test_t15_chunks_and_the_way_of_calling_change_nothing(estimator):
    z, y = gaussian(5, 4, seed=1), torch.tensor([0, 1, 2, 3, 0])

    def found(chunk, vectorized):
        options = {"pairs": 7, "sigma": 0.8, "estimator": estimator, "chunk": chunk, "vectorized": vectorized}
        loss = partial(cross_entropy, reduction="none") if vectorized in ("vmap", False) else cross_of
        return output_gradient(z, loss, y, generator=generator(3), stderr=True, **options)

    whole = found(None, True)
    for chunk, vectorized in ((1, True), (3, True), (None, "vmap"), (2, "vmap"), (5, False)):
        other = found(chunk, vectorized)
        assert other.evaluations == whole.evaluations == 14 + (estimator == "forward")
        for one, two in ((whole.grad, other.grad), (whole.value, other.value), (whole.stderr, other.stderr)):
            torch.testing.assert_close(one, two, rtol=1e-12 if estimator != "loo" else 1e-9, atol=1e-12)


def cross_of(z, y):
    return torch.logsumexp(z, -1) - z.gather(-1, y.expand(z.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def test_t15_the_order_of_samples_does_not_matter():
    z, y, noise = gaussian(6, 4, seed=1), torch.arange(6) % 4, gaussian(5, 6, 4, seed=2)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    one = output_gradient(z, zero_one, y, sigma=1.0, noise=noise).grad
    two = output_gradient(z[order], zero_one, y[order], sigma=1.0, noise=noise[:, order]).grad
    torch.testing.assert_close(one[order], two, rtol=1e-12, atol=1e-12)


def test_t16_with_elementwise_credit_a_coordinate_s_variance_is_its_own():
    a = torch.tensor(A, dtype=torch.float64)
    grad = repeated(torch.zeros(5), lambda z: z * a, credit="elementwise", draws=400_000)
    torch.testing.assert_close(grad.var(0), 2 * a**2, rtol=0.02, atol=0)
    whole = repeated(torch.zeros(5), linear(A))
    assert float(whole.var(0).sum()) > 2.5 * float(grad.var(0).sum())


def test_masked_samples_with_groups_do_not_count():
    z = gaussian(4, 6, seed=1)
    mask = torch.tensor([True, False, True, True])

    def groups(x):
        losses = x.square().unflatten(-1, (3, 2)).sum(-1)
        losses[..., 1, :] = torch.nan
        return losses

    found = output_gradient(z, groups, sigma=1.0, credit="elementwise", mask=mask, vectorized=True)
    assert not found.grad[1].any()
    assert found.grad[[0, 2, 3]].all()
    assert found.value[1] == 0


def test_with_groups_the_shift_is_each_group_s_own():
    z, y = gaussian(5, 6, seed=1), torch.arange(10).view(5, 2) % 3

    def two_labels(x, y):
        return zero_one(x.unflatten(-1, (2, 3)), y)

    options = {"sigma": 1.0, "credit": "elementwise", "invariance": "shift", "vectorized": True}
    found = output_gradient(z, two_labels, y, generator=generator(), **options)
    assert found.grad.unflatten(-1, (2, 3)).sum(-1).abs().max() < 1e-12
    free = output_gradient(z, two_labels, y, generator=generator(), **options | {"invariance": None})
    grouped = free.grad.unflatten(-1, (2, 3))
    torch.testing.assert_close(found.grad, (grouped - grouped.mean(-1, keepdim=True)).flatten(-2))


def test_groups_of_coordinates_get_their_own_losses():
    z, t = gaussian(6, seed=1), gaussian(6, seed=2)

    def pairs_of(x):
        return (x - t).square().unflatten(-1, (3, 2)).sum(-1) / 2

    grad = repeated(z, pairs_of, credit="elementwise", pairs=2, draws=50_000)
    close(grad, z - t)
    whole = repeated(z, lambda x: quadratic(x, t), pairs=2, draws=50_000)
    assert float(grad.var(0).sum()) < 0.7 * float(whole.var(0).sum())
    found = output_gradient(z.expand(9, -1), pairs_of, sigma=1.0, credit="elementwise")
    assert found.value.shape == (9,)


@pytest.mark.parametrize("weighted", [False, True])
def test_t17_two_copies_of_the_batch_weigh_as_much_as_one(weighted):
    z = gaussian(1, 3, seed=1)
    ends = []
    for copies in (1, 2):
        leaf = z.expand(copies * DRAWS // 10, -1).clone().requires_grad_()
        weight = torch.ones(len(leaf)) if weighted else None
        OutputSpaceLoss(zero_one, pairs=1, seed=copies)(leaf, label(0, len(leaf)), weight=weight).backward()
        ends.append((leaf.grad.sum(0), leaf.grad.std(0) * len(leaf) ** 0.5))
    assert ((ends[0][0] - ends[1][0]).abs() < 5 * (ends[0][1] ** 2 + ends[1][1] ** 2).sqrt()).all()
    assert ends[0][0].abs().max() > 0.05


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
def test_t18_the_slope_of_the_identity_is_one_at_every_sigma(estimator, sigma):
    close(repeated([1.7], lambda z: z[..., 0], sigma=sigma, estimator=estimator, draws=50_000), 1.0)


# Closed forms


@pytest.mark.parametrize("k", [2, 3, 10])
def test_the_zero_one_quadrature_agrees_with_scipy(k):
    z = gaussian(k, seed=k)

    def density(t):
        return norm.pdf(t) * np.prod([norm.cdf(float(z[0] - z[j]) / 0.7 + t) for j in range(1, k)])

    wanted = 1 - quad(density, -12, 12, epsabs=1e-13)[0]
    assert float(expected_zero_one(z, torch.tensor(0), 0.7)) == pytest.approx(wanted, abs=1e-9)
    equal = expected_zero_one(torch.zeros(k, dtype=torch.float64), torch.tensor(1), 0.3)
    assert float(equal) == pytest.approx(1 - 1 / k, abs=1e-10)


def test_the_zero_one_form_takes_batches_keeps_tiny_gradients_and_half_precision():
    z = torch.tensor([[0.0, 30.0, 0.0], [30.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    errors = expected_zero_one(z, torch.tensor([0, 0]), 2.0)
    (grad,) = torch.autograd.grad(errors.sum(), z)
    assert grad.isfinite().all()
    assert float(grad[0, 0]) < 0
    assert float(errors[1].detach()) >= 0
    assert expected_zero_one(z.detach().half(), torch.tensor([0, 0]), 2.0).dtype == torch.float32
    with pytest.raises(ValueError, match="sigma must be positive"):
        expected_zero_one(z, torch.tensor([0, 0]), 0.0)


def test_the_truncated_square_agrees_with_scipy_also_far_out():
    ends = truncated_square(torch.tensor([[3.0], [1.0]]), torch.zeros(2, 1), tau=2.0)
    assert ends.tolist() == [2.0, 0.5]
    for mu, sigma, tau in ((0.3, 0.5, 1.0), (-2.0, 1.0, 0.7), (6.0, 1.5, 1.0)):
        wanted = quad(lambda e, m=mu, s=sigma, t=tau: min((m + s * e) ** 2, t**2) / 2 * norm.pdf(e), -12, 12,
                      points=[(-tau - mu) / sigma, (tau - mu) / sigma], limit=200)[0]  # fmt: skip
        value = expected_truncated_square(torch.tensor(mu, dtype=torch.float64), sigma, tau)
        assert float(value) == pytest.approx(wanted, abs=1e-9)
    leaf = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    assert float(torch.autograd.grad(expected_truncated_square(leaf, 1.0, 1.0), leaf)[0]) == 0
    with pytest.raises(ValueError, match="tau"):
        expected_truncated_square(leaf, 1.0, -1.0)


# Subspaces, standard errors, pairs


def test_noise_in_a_subspace_estimates_the_gradient_s_part_there():
    z, t = gaussian(6, seed=1), gaussian(6, seed=2)
    P = torch.linalg.qr(gaussian(6, 2, seed=3)).Q
    for estimator in ("antithetic", "sphere"):
        close(repeated(z, lambda x: quadratic(x, t), basis=P, estimator=estimator, pairs=2), (z - t) @ P @ P.mT)
    half = repeated(z, lambda x: quadratic(x, t), basis=P)
    assert float(half.var(0).sum()) < 0.5 * float(repeated(z, lambda x: quadratic(x, t)).var(0).sum())


def test_noise_on_the_top_coordinates_leaves_the_others_alone():
    z, y = gaussian(8, 20, seed=1), torch.arange(8)
    places = top_coordinates(z, y, 4)
    assert (places == y.unsqueeze(1)).any(1).all()
    assert all(len(set(row.tolist())) == 4 for row in places)
    found = output_gradient(z, cross_of, y, sigma=0.5, basis=places, pairs=64, generator=generator())
    inside = torch.zeros(8, 20, dtype=torch.bool).scatter_(1, places, True)
    assert not found.grad[~inside].any()
    assert found.grad[inside].all()


@pytest.mark.parametrize("invariance", [None, "shift"])
@pytest.mark.parametrize("estimator", ["antithetic", "plain", "forward", "loo"])
def test_the_standard_error_is_that_of_repeated_estimates(estimator, invariance):
    z = torch.tensor([0.5, 0.1, -0.4], dtype=torch.float64).expand(4000, -1)
    found = output_gradient(
        z, zero_one, label(0, 4000), sigma=0.7, pairs=40, estimator=estimator, invariance=invariance, stderr=True,
        generator=generator(),
    )  # fmt: skip
    claimed = found.stderr.square().mean(0).sqrt()
    torch.testing.assert_close(claimed, found.grad.std(0), rtol=0.06, atol=0)


def test_suggested_pairs_reach_the_cosine():
    z, y = gaussian(500, 5, seed=1), torch.zeros(500, dtype=torch.long)
    pilot = output_gradient(z, cross_of, y, sigma=0.5, pairs=20, stderr=True, generator=generator())
    m = suggest_pairs(pilot, 0.9)
    leaf = z.clone().requires_grad_()
    (truth,) = torch.autograd.grad(cross_of(leaf, y).sum(), leaf)
    found = output_gradient(z, cross_of, y, sigma=0.5, pairs=m, generator=generator(7)).grad
    assert float(torch.cosine_similarity(found.flatten(), truth.flatten(), 0)) == pytest.approx(0.9, abs=0.05)
    short = output_gradient(z, cross_of, y, sigma=0.5, pairs=5, stderr=True, generator=generator(3))
    assert suggest_pairs(short, 0.9) == pytest.approx(m, rel=0.15)  # its own variance does not pass for signal
    with pytest.raises(ValueError, match="between 0 and 1"):
        suggest_pairs(pilot, 1.0)
    with pytest.raises(ValueError, match="stderr=True"):
        suggest_pairs(output_gradient(z, cross_of, y, sigma=0.5), 0.5)
    nothing = output_gradient(z, lambda z: z.sum(-1) * 0 + 1, sigma=1.0, pairs=4, stderr=True, vectorized=True)
    with pytest.raises(ValueError, match="too few"):
        suggest_pairs(nothing, 0.5)


# How a loss is called


def test_auto_finds_what_agrees_with_a_loop_and_warns_only_where_nothing_does():
    z, t = gaussian(3, 3, seed=1), gaussian(3, 3, seed=2)

    def stacked(x, t):
        return quadratic(x, t)

    def single(x, t):  # wrong over stacked outputs of a batch of 3: it would average the wrong dimension
        return (x - t).square().mean(1)

    def stubborn(x, t):
        return torch.tensor([float(v) for v in quadratic(x, t).reshape(-1)])[: len(t)]

    one = output_gradient(z, stacked, t, sigma=1.0, noise=gaussian(4, 3, 3)).grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = output_gradient(z, single, t, sigma=1.0, noise=gaussian(4, 3, 3)).grad
    torch.testing.assert_close(found, one * 2 / 3)

    def slightly(x, t):  # a little off where outputs are stacked
        return quadratic(x, t) * (1 + 1e-3 * (x.ndim - 2))

    found = output_gradient(z, slightly, t, sigma=1.0, noise=gaussian(4, 3, 3)).grad
    torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9)
    with pytest.warns(UserWarning, match="called once for each perturbation"):
        again = output_gradient(z, stubborn, t, sigma=1.0, noise=gaussian(4, 3, 3)).grad
    torch.testing.assert_close(again, one, rtol=1e-5, atol=1e-5)


def test_numpy_losses_get_arrays_and_the_caller_s_generator_is_what_draws():
    def loss(out, target):
        assert isinstance(out, np.ndarray)
        assert isinstance(target, np.ndarray)
        return ((out - target) ** 2).sum(-1) / 2

    z, t = gaussian(5, 2, seed=1), gaussian(5, 2, seed=2)
    source = generator(4)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    found = output_gradient(z, loss, t, sigma=1.0, as_numpy=True, generator=source).grad
    assert torch.equal(state, torch.random.get_rng_state())
    truth = output_gradient(z, quadratic, t, sigma=1.0, generator=generator(4)).grad
    torch.testing.assert_close(found, truth)
    assert not torch.equal(source.get_state(), generator(4).get_state())


def test_a_stochastic_loss_with_a_generator_draws_the_same_for_both_signs():
    def noisy(z, t, generator):
        return quadratic(z, t) + 100 * torch.randn((), generator=generator, dtype=z.dtype)

    z, t = gaussian(4, 3, seed=1), gaussian(4, 3, seed=2)
    noise = gaussian(5, 4, 3, seed=3)
    clean = output_gradient(z, quadratic, t, sigma=1.0, noise=noise).grad
    for chunk in (None, 2):
        found = output_gradient(z, noisy, t, sigma=1.0, noise=noise, generator=generator(1), chunk=chunk).grad
        torch.testing.assert_close(found, clean, rtol=1e-9, atol=1e-10)
    values = [output_gradient(z, noisy, t, sigma=1.0, noise=noise, generator=generator(i)).value for i in (1, 1, 2)]
    assert torch.equal(values[0], values[1])
    assert (values[0] - values[2]).abs().min() > 1
    seen = []
    output_gradient(z, lambda z, t, generator: seen.append(generator.initial_seed()) or quadratic(z, t), t, sigma=1.0,
                    noise=noise)  # fmt: skip
    assert len(seen) == 2 * len(set(seen)) == 10


def test_a_metric_of_the_batch_is_one_event():
    z = gaussian(12, 2, seed=1)
    y = torch.arange(12) % 2
    loss = metric_loss(f1_score)
    assert loss(z, y) == pytest.approx(1 - f1_score(y, z.argmax(1)))
    found = output_gradient(z, loss, y, sigma=1.0, credit="batch", pairs=64, generator=generator())
    assert found.grad.shape == z.shape
    assert found.value.shape == ()
    noise = gaussian(3, 12, 2, seed=5)
    hand = sum((loss(z + e, y) - loss(z - e, y)) * e for e in noise) / 6
    torch.testing.assert_close(output_gradient(z, loss, y, sigma=1.0, noise=noise, credit="batch").grad, hand)
    ranking = metric_loss(roc_auc_score, scores=True)
    assert ranking(z, y) == pytest.approx(1 - roc_auc_score(y, z[:, 1] - z[:, 0]))
    assert metric_loss(f1_score)(z[:, 1:] - z[:, :1], y) == pytest.approx(loss(z, y))
    assert metric_loss(lambda a, b: 3.0, greater_is_better=False)(z, y) == 3.0
    with pytest.raises(ValueError, match="credit='batch'"):
        output_gradient(z, loss, y, sigma=1.0)


def test_outputs_with_positions_are_events_of_their_own():
    z, y = gaussian(3, 5, 4, seed=1), torch.arange(15).view(3, 5) % 4
    found = output_gradient(z, zero_one, y, sigma=1.0, pairs=8, generator=generator())
    assert found.value.shape == (3, 5)
    joint = output_gradient(z, lambda z, y: zero_one(z, y).mean(-1), y, sigma=1.0, event_dims=2, vectorized=True)
    assert joint.value.shape == (3,)
    scalar = output_gradient(z[..., 0], lambda z: z.sign(), sigma=1.0, event_dims=0)
    assert scalar.value.shape == (3, 5)
    images = gaussian(2, 3, 4, 4, seed=2)
    pixel = output_gradient(
        images, lambda z: z.flatten(-3).square(), sigma=1.0, event_dims=3, credit="elementwise", vectorized=True
    )
    assert pixel.value.shape == (2,)


# Section 9


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"sigma": 0.0}, ValueError, "sigma must be positive"),
        ({"sigma": math.nan}, ValueError, "sigma must be positive"),
        ({"sigma": torch.tensor([1.0, -1.0, 1.0])}, ValueError, "sigma must be positive"),
        ({"sigma": torch.ones(2)}, ValueError, "does not broadcast"),
        ({"sigma": torch.ones(2, 4, 3)}, ValueError, "does not broadcast"),
        ({"pairs": 0}, ValueError, "pairs must be an integer"),
        ({"chunk": 0}, ValueError, "chunk must be an integer"),
        ({"estimator": "spsa"}, ValueError, "estimator"),
        ({"credit": "token"}, ValueError, "credit"),
        ({"event_dims": 3}, ValueError, "event_dims=3"),
        ({"basis": torch.ones(3, 2)}, ValueError, "orthonormal"),
        ({"basis": torch.eye(3, 4)}, ValueError, "between 1 and 3"),
        ({"basis": torch.eye(4, 2)}, ValueError, r"shape \(3, r\)"),
        ({"basis": torch.zeros(4, 2, dtype=torch.long)}, ValueError, "differ from each other"),
        ({"basis": torch.full((4, 1), 3)}, ValueError, "between 0 and 2"),
        ({"basis": torch.zeros(2, 1, dtype=torch.long)}, ValueError, "int64 of shape"),
        ({"basis": torch.eye(3, 2), "invariance": "shift"}, ValueError, "does not go with a basis"),
        ({"basis": torch.eye(3, 2), "sigma": torch.ones(3)}, ValueError, "one sigma"),
        ({"estimator": "loo", "noise": torch.zeros(1, 4, 3)}, ValueError, "at least two"),
        ({"noise": torch.zeros(2, 3)}, ValueError, "noise must have the shape"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"shape \(4,\)"),
        ({"loss": lambda z, y: z}, ValueError, r"must have the shape \(16, 4\), got \(16, 4, 3\)"),
        ({"loss": lambda z, y: z[..., :2], "credit": "elementwise"}, ValueError, "G dividing the 3"),
        ({"target": torch.tensor([0, 1, 2, 3])}, ValueError, "labels must lie between 0 and 2, got 0 to 3"),
        ({"target": torch.zeros(4)}, TypeError, "labels must be integers"),
        ({"output": torch.zeros(4, 3, dtype=torch.long)}, TypeError, "floating point"),
        ({"paris": 3}, TypeError, "paris"),
    ],
)
def test_what_cannot_work_is_refused(changes, error, words):
    options = {"output": torch.zeros(4, 3), "loss": zero_one, "target": torch.tensor([0, 1, 2, 0]), "sigma": 1.0}
    options |= {"vectorized": True} | changes
    output, loss, target = (options.pop(k) for k in ("output", "loss", "target"))
    with pytest.raises((error, TypeCheckError), match=words):
        output_gradient(output, loss, target, **options)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: OutputSpaceLoss(3), TypeError, "loss|callable"),
        (lambda: OutputSpaceLoss(zero_one, sigma=-1), ValueError, "sigma must be positive"),
        (lambda: OutputSpaceLoss(zero_one, sigma="relative:-2"), ValueError, "relative:a"),
        (lambda: OutputSpaceLoss(zero_one, sigma="auto"), ValueError, "relative:a"),
        (lambda: OutputSpaceLoss(zero_one, reduction="max"), ValueError, "reduction"),
        (lambda: OutputSpaceLoss(zero_one, value="loud"), ValueError, "value"),
        (lambda: OutputSpaceLoss(zero_one)(torch.zeros(2, 3), torch.tensor([0, 1])), ValueError, "require grad"),
        (lambda: OutputSpaceLoss(zero_one)(leaf(2), torch.tensor([0, 1]), weight=-torch.ones(2)), ValueError, "weigh"),
        (lambda: GeometricSigma(1.0, 0.0, 10), ValueError, "positive ends"),
        (lambda: output_gradient(torch.zeros(1, 600), zero_one, sigma=1.0, estimator="sphere"), ValueError, "512"),
        (lambda: truncated_square(torch.zeros(4, 1), torch.zeros(4)), ValueError, "not that of the outputs"),
    ],
)  # fmt: skip
def test_what_a_loss_refuses(make, error, words):
    with pytest.raises((error, TypeCheckError), match=words):  # the test run checks types before we do
        make()


def leaf(n, k=3, dtype=torch.float32):
    return torch.linspace(-1, 1, n * k).view(n, k).to(dtype).requires_grad_()


def test_backward_works_once_and_not_twice():
    z = leaf(4)
    loss = OutputSpaceLoss(zero_one)(z, torch.tensor([0, 1, 2, 0]))
    (grad,) = torch.autograd.grad(loss, z, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()
    w = torch.ones(3, requires_grad=True)
    (inner,) = torch.autograd.grad(
        OutputSpaceLoss(zero_one)(leaf(4) * w, torch.tensor([0, 1, 2, 0])), w, create_graph=True
    )
    with pytest.raises(RuntimeError, match="twice"):
        (inner.square().sum() + w.sum()).backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_outputs_are_perturbed_in_32(dtype):
    """In bfloat16 30 + 0.05 is 30: perturbed there, nothing would ever change."""
    z = torch.full((50, 2), 30.0, dtype=dtype).requires_grad_()
    criterion = OutputSpaceLoss(lambda out: out.double().sum(-1), sigma=0.05, vectorized=True)
    loss = criterion(z)
    loss.backward()
    assert loss.dtype == torch.float32
    assert z.grad.dtype == dtype
    assert float(z.grad.double().sum(0).mean()) == pytest.approx(1.0, abs=0.2)
    seen = []
    output_gradient(z, lambda out: seen.append(out.dtype) or out.sum(-1), sigma=1.0, vectorized=True)
    assert set(seen) == {torch.float32}


def test_a_grad_scaler_and_autocast_do_not_disturb():
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(32, 4), torch.arange(32) % 3
    criterion = OutputSpaceLoss(zero_one, pairs=8)
    with torch.autocast("cpu", torch.bfloat16):
        z = net(x)
        assert z.dtype == torch.bfloat16
        loss = criterion(z, y)
    (loss * 1024).backward()
    scaled = [p.grad.clone() / 1024 for p in net.parameters()]
    net.zero_grad()
    again = OutputSpaceLoss(zero_one, pairs=8)
    with torch.autocast("cpu", torch.bfloat16):
        z = net(x)
        seen = []
        output_gradient(z, lambda out, y: seen.append((out @ out.mT).dtype) or zero_one(out, y), y, sigma=1.0)
    assert set(seen) == {torch.float32}
    again(z, y).backward()
    for p, g in zip(net.parameters(), scaled, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0.02, atol=1e-4)


def test_a_compiled_network_trains_the_same():
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.arange(8) % 3
    compiled = torch.compile(net, backend="eager")
    ends = []
    for model in (net, compiled):
        net.zero_grad()
        OutputSpaceLoss(zero_one)(model(x), y).backward()
        ends.append(net.weight.grad.clone())
    assert torch.equal(*ends)


def wild(z, y):
    """Infinite or NaN for about half of the perturbations of sample 0, an ordinary loss for the others."""
    losses = zero_one(z, y)
    bad = torch.zeros_like(losses, dtype=torch.bool)
    bad[..., 0] = z[..., 0, 0] > 0.5
    return torch.where(bad, torch.where(z[..., 0, 1:2] > 0, torch.inf, torch.nan), losses)


wild.vectorized = True


@pytest.mark.parametrize("estimator", ["antithetic", "plain", "loo"])
def test_non_finite_losses_raise_or_drop_their_pair_alone(estimator):
    z, y, noise = gaussian(4, 3, seed=1) * 0.1, torch.tensor([0, 1, 2, 0]), gaussian(50, 4, 3, seed=2)
    options = {"sigma": 1.0, "noise": noise, "estimator": estimator}
    with pytest.raises(NonFinite, match="1 of 4 samples"):
        output_gradient(z, wild, y, **options)
    found = output_gradient(z, wild, y, on_nonfinite="drop", **options)
    clean = output_gradient(z, zero_one, y, **options)
    torch.testing.assert_close(found.grad[1:], clean.grad[1:])
    torch.testing.assert_close(found.value[1:], clean.value[1:])
    signs = (1, -1) if estimator == "antithetic" else (1,)
    kept = torch.stack([torch.stack([wild(z + s * e, y)[0].isfinite() for s in signs]).all() for e in noise])
    alone = output_gradient(z[:1], zero_one, y[:1], sigma=1.0, noise=noise[kept][:, :1], estimator=estimator)
    assert 3 < int(kept.sum()) < 47
    torch.testing.assert_close(found.grad[:1], alone.grad)


def test_a_sample_whose_pairs_are_all_dropped_has_no_gradient_and_a_warning():
    def loss(z, y):
        losses = zero_one(z, y)
        losses[..., 1] = torch.nan
        return losses

    z, y = gaussian(3, 3), torch.tensor([0, 1, 2])
    with pytest.warns(UserWarning, match="dropped"):
        found = output_gradient(z, loss, y, sigma=1.0, on_nonfinite="drop", vectorized=True)
    assert not found.grad[1].any()
    assert found.grad[0].any()
    assert found.grad.isfinite().all()


def test_masked_samples_may_be_nan_and_do_not_count():
    z = leaf(4)
    y = torch.tensor([0, 1, 2, 0])

    def loss(z, y):
        losses = zero_one(z, y)
        losses[..., 2] = torch.nan
        return losses

    weight = torch.tensor([1.0, 2.0, 0.0, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of a sample that counts was dropped
        value = OutputSpaceLoss(loss, vectorized=True, pairs=32)(z, y, weight=weight)
    value.backward()
    assert value.isfinite()
    assert not z.grad[2].any()
    assert OutputSpaceLoss(loss, vectorized=True, value="clean")(leaf(4), y, weight=weight).isfinite()
    each = leaf(4)
    rows = OutputSpaceLoss(loss, vectorized=True, pairs=32, reduction="none")(each, y, weight=weight)
    assert float((rows.sum() / 4).detach()) == pytest.approx(float(value.detach()))
    rows.sum().backward()
    torch.testing.assert_close(each.grad / 4, z.grad)
    nobody = OutputSpaceLoss(zero_one)(leaf(4), y, weight=torch.zeros(4))
    assert float(nobody.detach()) == 0


def test_an_empty_batch_costs_nothing():
    net = nn.Linear(4, 3)
    for options in ({}, {"reduction": "sum"}, {"credit": "batch"}, {"value": "clean"}):
        net.zero_grad()
        loss = OutputSpaceLoss(zero_one, **options)(net(torch.zeros(0, 4)), torch.zeros(0, dtype=torch.long))
        loss.backward()
        assert float(loss.detach()) == 0
        assert not net.weight.grad.any()
    looped = OutputSpaceLoss(zero_one, vectorized=False)
    looped(net(torch.zeros(0, 4)), torch.zeros(0, dtype=torch.long))
    assert looped.spec.vectorized is False


@pytest.mark.parametrize("estimator", ["antithetic", "loo", "forward", "orthogonal", "sphere"])
def test_a_constant_loss_has_exactly_no_gradient(estimator):
    found = output_gradient(
        gaussian(3, 4),
        lambda z: torch.full(z.shape[:-1], 0.1),
        sigma=1.0,
        estimator=estimator,
        chunk=3,
        vectorized=True,
    )
    assert not found.grad.any()


def test_outputs_that_are_nan_are_no_wrong_answers():
    z, y = leaf(4).detach(), torch.tensor([0, 1, 2, 0])
    z[1, 2] = torch.nan
    z[0, 1] = -torch.inf  # a class that is ruled out
    with pytest.raises(NonFinite, match="outputs of 1 of 4 samples"):
        OutputSpaceLoss(zero_one)(z.requires_grad_(), y)
    assert OutputSpaceLoss(zero_one)(z, y, weight=torch.tensor([1.0, 0.0, 1.0, 1.0])).isfinite()


def test_one_sample_one_output_and_ties():
    found = output_gradient(torch.zeros(1, 1), lambda z: z[..., 0], sigma=1.0, pairs=1, generator=generator())
    assert found.grad.shape == (1, 1)
    assert zero_one(torch.zeros(2, 3), torch.tensor([0, 1])).tolist() == [0, 1]  # the first of equals
    assert torch.equal(truncated_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), cap=0.5), torch.full((2,), 0.5))


def test_the_loss_sees_detached_outputs_and_no_gradient_flows_through_it():
    w = torch.ones(3, requires_grad=True)

    def loss(z, y):
        assert not z.requires_grad
        return (z * w).sum(-1)

    z = leaf(4)
    OutputSpaceLoss(loss, vectorized=True)(z, torch.zeros(4, dtype=torch.long)).backward()
    assert w.grad is None
    assert z.grad is not None


# The wrapper


def test_eval_and_no_grad_return_the_value_and_change_nothing():
    criterion = OutputSpaceLoss(zero_one, sigma="relative:0.5")
    z, y = leaf(4), torch.tensor([0, 1, 2, 0])
    criterion(z, y)
    state = criterion.get_extra_state()
    with torch.no_grad():
        one = criterion(z, y)
    two = criterion.eval()(z, y)
    assert torch.equal(one, two)
    assert not two.requires_grad
    assert torch.equal(criterion.get_extra_state(), state)
    clean = OutputSpaceLoss(zero_one, value="clean").eval()(z, y)
    assert float(clean) == float(zero_one(z, y).mean())


def test_a_resumed_run_goes_on_bit_for_bit():
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.arange(16) % 3

    def steps(net, criterion, n):
        for _ in range(n):
            loss = criterion(net(x), y)
            net.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad

    def make():
        schedule_free = OutputSpaceLoss(zero_one, sigma="relative:0.7", pairs=4, seed=5)
        return nn.Linear(4, 3), schedule_free

    net, criterion = make()
    steps(net, criterion, 3)
    file = io.BytesIO()
    torch.save([net.state_dict(), criterion.state_dict()], file)
    steps(net, criterion, 3)
    file.seek(0)
    again, fresh = make()
    for module, state in zip((again, fresh), torch.load(file), strict=True):
        module.load_state_dict(state)
    assert fresh.step == 3
    steps(again, fresh, 3)
    assert torch.equal(net.weight, again.weight)
    assert criterion.spread == fresh.spread


def test_noise_depends_on_seed_step_and_rank_but_not_on_the_global_state(monkeypatch):
    y = torch.tensor([0, 1, 2, 0])

    def grad(seed=0, calls=1):
        criterion = OutputSpaceLoss(zero_one, seed=seed, pairs=2)
        for _ in range(calls):
            z = leaf(4)
            criterion(z, y).backward()
        return z.grad

    torch.manual_seed(1)
    first = grad()
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(grad(), first)
    assert not torch.equal(grad(seed=1), first)
    assert not torch.equal(grad(calls=2), first)
    torch.random.set_rng_state(state)
    grad()
    assert torch.equal(torch.random.get_rng_state(), state)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert not torch.equal(grad(), first)


def test_schedules_and_relative_sigma():
    schedule = GeometricSigma(2.0, 0.5, 10)
    assert [schedule(k) for k in (0, 5, 10, 99)] == pytest.approx([2.0, 1.0, 0.5, 0.5])
    criterion = OutputSpaceLoss(zero_one, sigma=schedule, pairs=1)
    y = torch.tensor([0, 1, 2, 0])
    for expected in (schedule(0), schedule(1)):
        criterion(leaf(4), y)
        assert criterion.last_sigma == expected
    relative = OutputSpaceLoss(zero_one, sigma="relative:0.5")
    z = leaf(4)
    relative(z, y)
    rms = float((z - z.mean(1, keepdim=True)).detach().square().mean().sqrt())
    assert relative.last_sigma == pytest.approx(0.5 * rms)
    relative((10 * z.detach()).requires_grad_(), y)
    assert relative.last_sigma == pytest.approx(0.5 * rms * (0.99 + 0.1))
    flat = OutputSpaceLoss(zero_one, sigma="relative:0.5")
    flat(torch.zeros(4, 3, requires_grad=True), y)
    assert flat.last_sigma == 0.5
    single = OutputSpaceLoss(truncated_square, sigma="relative:0.5")
    single(z := leaf(6, 1), torch.zeros(6, 1))  # an event of one number has no spread of its own
    assert single.last_sigma == pytest.approx(0.5 * float(z.detach().std(correction=0)))
    tensor = OutputSpaceLoss(zero_one, sigma=torch.tensor([1.0, 2.0, 3.0]))
    tensor(leaf(4), y)
    assert tensor.last_sigma == 2.0


def test_a_starving_gradient_is_announced():
    criterion, y = OutputSpaceLoss(zero_one, pairs=1), torch.tensor([0, 1, 2, 0])
    with pytest.warns(UserWarning, match="starves"):
        criterion((leaf(4) * 1000).detach().requires_grad_(), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion((leaf(4) * 1000).detach().requires_grad_(), y)


def test_what_was_found_out_about_a_loss_is_remembered():
    calls = []
    criterion = OutputSpaceLoss(lambda z: calls.append(z.shape) or z.sum(-1), pairs=3)
    criterion(leaf(4))
    tried = len(calls)
    criterion(leaf(4))
    assert calls[tried:] == [(3, 4, 3)] * 2
    assert tried > 2


def test_losses_keep_their_own_precision_until_levels_are_subtracted():
    z = torch.zeros(50, 2, requires_grad=True)
    OutputSpaceLoss(lambda out: 1e9 + out.double().sum(-1), vectorized=True)(z).backward()
    assert float(z.grad.sum(0).mean()) == pytest.approx(1.0, abs=0.2)


def test_clean_value_and_smoothed_value_share_the_gradient():
    y, ends = torch.tensor([0, 1, 2, 0]), []
    for value in ("smoothed", "clean"):
        z = leaf(4)
        loss = OutputSpaceLoss(truncated_cross_entropy, value=value, pairs=64)(z, y)
        loss.backward()
        ends.append((float(loss.detach()), z.grad))
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[1][0] == pytest.approx(float(truncated_cross_entropy(leaf(4).detach(), y).mean()))
    assert ends[0][0] != ends[1][0]


def test_gradient_accumulation_is_the_whole_batch_when_summed():
    z, y, noise = leaf(6), torch.arange(6) % 3, torch.randn(4, 6, 3, generator=generator())
    whole = output_gradient(z, zero_one, y, sigma=1.0, noise=noise).grad
    halves = [output_gradient(z[i], zero_one, y[i], sigma=1.0, noise=noise[:, i]).grad for i in (slice(3), slice(3, 6))]
    torch.testing.assert_close(torch.cat(halves), whole)


def test_it_copies_and_prints():
    criterion = OutputSpaceLoss(partial(truncated_square, tau=2.0), sigma=0.5)
    assert "pairs=16" in repr(copy.deepcopy(criterion))


# Black boxes

SCORER = """
import json, subprocess, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    mode = sys.argv[1]
    if mode == "exit": sys.exit(3)
    if mode == "sleep": time.sleep(60)
    if mode == "child": subprocess.run(["sleep", "60"])
    if mode == "words": print("hello", flush=True); continue
    rows = asked["outputs"]
    losses = [sum((a - t) ** 2 for a, t in zip(row, ts)) / 2 for row, ts in zip(rows, asked["targets"])]
    if mode == "batch": losses = [sum(losses) / len(losses)]
    if mode == "short": losses = losses[:-1]
    if mode == "null": losses[0] = None
    print(json.dumps({"losses": losses}), flush=True)
"""


def program(mode, **options):
    return SubprocessLoss([sys.executable, "-c", SCORER, mode], **{"timeout": 20.0} | options)


def test_a_program_scores_rows_in_requests_and_stays():
    z, t = gaussian(5, 2, seed=1), gaussian(5, 2, seed=2)
    wanted = output_gradient(z, quadratic, t, sigma=1.0, pairs=4, generator=generator()).grad
    with program("rows", rows=3) as box:
        for _ in range(2):
            found = output_gradient(z, box, t, sigma=1.0, pairs=4, generator=generator()).grad
            torch.testing.assert_close(found, wanted)
            pid = box._process.pid
        assert box._process.pid == pid
        process = box._process
    assert process.poll() is not None
    with program("batch", per="batch") as box:
        leafed = z.clone().requires_grad_()
        loss = OutputSpaceLoss(box, credit="batch", pairs=3)(leafed, t)
        assert loss.shape == ()
    with program("null") as box, pytest.raises(NonFinite):
        output_gradient(z, box, t, sigma=1.0, pairs=1)


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("exit", {}, "ended with exit status 3"),
        ("sleep", {"timeout": 0.3}, "did not answer within 0.3 seconds"),
        ("words", {}, "answered 'hello"),
        ("short", {}, "answered 9 losses for 10 asked"),
    ],
)
def test_a_program_that_fails_is_one_sentence(mode, options, words):
    with program(mode, **options) as box, pytest.raises(SubspanError, match=words):
        output_gradient(gaussian(5, 2), box, gaussian(5, 2), sigma=1.0, pairs=2)


def test_a_program_that_is_late_goes_with_what_it_started():
    z = torch.zeros(1, 2, 2)
    with program("child", timeout=0.5) as box:
        with pytest.raises(SubspanError, match="did not answer"):
            box(z, z[0])
        box.command[-1], box.timeout = "rows", 20.0
        assert not box(z, z[0]).any()


def test_a_program_that_does_not_exist_and_bad_options():
    with pytest.raises(SubspanError, match="does not start"):
        SubprocessLoss(["/no/such/program"])(torch.zeros(1, 2, 3))
    for options in ({"timeout": 0.0}, {"rows": 0}, {"per": "token"}):
        with pytest.raises((ValueError, TypeCheckError), match=r"must be|per"):
            SubprocessLoss(["true"], **options)
    with pytest.raises(ValueError, match="http"):
        HttpLoss("file:///etc/passwd")


@pytest.fixture
def endpoint(monkeypatch):
    """A scorer on the loopback interface; its paths fail in different ways."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    sizes = []
    held = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sizes.append(len(asked["outputs"]))
            if self.path == "/late":
                held.wait(5)
            if self.path == "/refuse":
                self.send_error(503)
                return
            if self.path == "/key" and self.headers["X-Key"] != "sesame":
                self.send_error(403)
                return
            if self.path == "/babble":
                self.wfile.write(b"what?\r\n\r\n")
                return
            losses = [sum(x * x for x in row) / 2 for row in asked["outputs"]]
            body = b"not json" if self.path == "/words" else json.dumps({"losses": losses}).encode()
            self.send_response(200)
            if self.path == "/cut":
                self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", sizes
    held.set()
    server.shutdown()
    server.server_close()


def test_an_endpoint_scores_rows_in_requests(endpoint):
    url, sizes = endpoint
    z = gaussian(5, 2, seed=1)
    found = output_gradient(z, HttpLoss(url, rows=4), sigma=1.0, pairs=2, generator=generator()).grad
    wanted = output_gradient(z, lambda z: z.square().sum(-1) / 2, sigma=1.0, pairs=2, generator=generator()).grad
    torch.testing.assert_close(found, wanted)
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert HttpLoss(f"{url}/key", headers={"X-Key": "sesame"})(z.unsqueeze(0)).shape == (1, 5)
    ends = {"refuse": "status 503", "key": "status 403", "words": "instead of", "babble": "reached", "cut": "reached"}
    for path, words in ends.items():
        with pytest.raises(SubspanError, match=words):
            HttpLoss(f"{url}/{path}", timeout=20.0)(z.unsqueeze(0))
    with pytest.raises(SubspanError, match="within 0"):
        HttpLoss(f"{url}/late", timeout=0.2)(z.unsqueeze(0))
    with pytest.raises(SubspanError, match="cannot be reached"):
        HttpLoss("http://127.0.0.1:9")(z.unsqueeze(0))


# Shells


def test_the_trainer_s_loss_masks_shifts_and_weighs_micro_batches():
    logits = torch.randn(2, 4, 5, generator=generator(), requires_grad=True)
    labels = torch.tensor([[1, 2, -100, -100], [0, 3, 4, 1]])
    loss = compute_loss_func(OutputSpaceLoss(zero_one, pairs=8))({"logits": logits}, labels)
    loss.backward()
    assert not logits.grad[0, 2:].any()
    valid = labels != -100
    each = OutputSpaceLoss(zero_one, pairs=8).per_sample(logits, labels.where(valid, 0), valid)
    torch.testing.assert_close(loss, each.sum() / 6)
    part = compute_loss_func(OutputSpaceLoss(zero_one, pairs=8))((logits,), labels, num_items_in_batch=12)
    torch.testing.assert_close(part, loss / 2)
    moved = compute_loss_func(OutputSpaceLoss(zero_one, pairs=8), shift_labels=True)({"logits": logits}, labels)
    each = OutputSpaceLoss(zero_one, pairs=8).per_sample(
        logits[:, :-1], labels[:, 1:].where(valid[:, 1:], 0), valid[:, 1:]
    )
    torch.testing.assert_close(moved, each.sum() / 4)
    y = torch.tensor([0, 1])
    batch = OutputSpaceLoss(metric_loss(f1_score), credit="batch", pairs=2)
    one = compute_loss_func(batch)({"logits": logits[:, 0, :2]}, y, num_items_in_batch=4)
    again = OutputSpaceLoss(metric_loss(f1_score), credit="batch", pairs=2)(logits[:, 0, :2], y)
    torch.testing.assert_close(one, again / 2)
    regression = OutputSpaceLoss(truncated_square, pairs=2)
    value = compute_loss_func(regression)({"logits": logits[:, 0]}, torch.zeros(2, 5))
    assert value.requires_grad
    again = compute_loss_func(OutputSpaceLoss(truncated_square, pairs=2))
    torch.testing.assert_close(again({"logits": logits[:, 0]}, torch.zeros(2, 5), num_items_in_batch=10), value)


def test_transformers_trainer_trains_on_the_error_rate(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=12, num_labels=2, **shape))
    rows = [{"input_ids": [2 + i % 2 * 4, 3, 3], "attention_mask": [1, 1, 1], "labels": i % 2} for i in range(32)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=25, learning_rate=1e-2, report_to="none", disable_tqdm=True, use_cpu=True,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    criterion = OutputSpaceLoss(zero_one, invariance="shift")
    trainer = Trainer(model, arguments, train_dataset=rows, compute_loss_func=compute_loss_func(criterion))
    trainer.train()
    assert criterion.step == 50
    model.eval()
    ids, labels = torch.tensor([r["input_ids"] for r in rows]), torch.tensor([r["labels"] for r in rows])
    assert (model(ids).logits.argmax(1) == labels).float().mean() == 1.0


@parametrize_with_checks([ZeroOneClassifier(hidden=(16,), epochs=6, batch_size=32, lr=3e-2, pairs=2, random_state=0)])
def test_zero_one_classifier_is_an_estimator(estimator, check):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the network never predicts")
        check(estimator)


def test_zero_one_classifier_in_a_pipeline_and_its_attributes():
    X, y = load_iris(return_X_y=True)
    names = np.array(["a", "b", "c"])[y]
    model = make_pipeline(StandardScaler(), ZeroOneClassifier(epochs=30, lr=5e-3, random_state=0)).fit(X, names)
    assert model.score(X, names) > 0.93
    fitted = model[-1]
    assert len(fitted.loss_curve_) == 30
    assert list(fitted.dead_classes_) == []
    p = model.predict_proba(X)
    assert np.allclose(p.sum(1), 1)
    assert np.array_equal(fitted.classes_[p.argmax(1)], model.predict(X))
    again = make_pipeline(StandardScaler(), ZeroOneClassifier(epochs=30, lr=5e-3, random_state=0)).fit(X, names)
    assert np.array_equal(again.predict_proba(X), p)


def test_a_class_dies_from_a_bad_start_and_the_classifier_says_so():
    X, y = make_blobs(90, centers=[[2, 0], [-1, 1.7], [-1, -1.7]], cluster_std=0.5, random_state=0)

    class Biased(nn.Linear):
        """Never predicts class 2: at a bias of -80 no noise ever makes it win."""

        def __init__(self, features, classes):
            super().__init__(features, classes)
            with torch.no_grad():
                self.bias[2] = -80.0

    options = {"module": Biased, "epochs": 30, "lr": 0.05, "random_state": 0}
    with pytest.warns(UserWarning, match="never predicts the classes 2"):
        cold = ZeroOneClassifier(warmup_frac=0.0, **options).fit(X, y)
    assert list(cold.dead_classes_) == [2]


@pytest.mark.parametrize(
    "changes", [{"epochs": 0}, {"pairs": 0.5}, {"warmup_frac": 2}, {"warmup_loss": "hinge"}, {"sigma": -1.0}]
)
def test_the_classifier_refuses_what_cannot_work(changes):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=next(iter(changes))):
        ZeroOneClassifier(**changes).fit(X, y)


def test_another_warm_up_loss_is_used():
    X, y = load_iris(return_X_y=True)

    def scaled(logits, y):
        return mse_loss(logits.softmax(1), torch.nn.functional.one_hot(y, 3).float())

    curve = ZeroOneClassifier(epochs=2, warmup_loss=scaled, warmup_frac=1.0, random_state=0).fit(X, y).loss_curve_
    assert all(v < 0.5 for v in curve)


# End to end


def test_wrong_labels_hurt_cross_entropy_more_than_the_error_rate():
    X, y = make_blobs(500, centers=[[2, 0], [-1, 1.7], [-1, -1.7]], cluster_std=0.8, random_state=0)
    rng = np.random.default_rng(0)
    X = np.hstack([X, rng.normal(size=(500, 15))])
    noisy = np.where(rng.random(250) < 0.5, rng.integers(0, 3, 250), y[:250])
    scores = []
    for share in (1.0, 0.1):  # of cross-entropy: all, or a start
        model = ZeroOneClassifier(hidden=(128,), epochs=40, lr=5e-3, warmup_frac=share, random_state=0, pairs=8)
        scores.append(model.fit(X[:250], noisy).score(X[250:], y[250:]))
    assert scores[1] > scores[0] + 0.05
