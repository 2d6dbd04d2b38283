"""Closed forms of the deep unconstrained feature model against automatic differentiation (spec section 4), float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import hessian, jacobian

from subspan.theory import (
    DeepUFM,
    UFMOptimum,
    alignment,
    collapse_spectra,
    linear_hessian,
    natural_basis,
    simplex_spectrum,
    train_ufm,
)
from subspan.theory.collapse.ufm import expanded

PAPER = UFMOptimum(3, 40, [0.01] * 5, 0.01)
SMALL = UFMOptimum(3, 2, [0.004, 0.006, 0.005], 0.01)  # unequal lambdas
SEEDS = st.integers(0, 2**31)


def logits(weights, h):
    for w in weights:
        h = w @ h
    return h


def data_term(weights, h, K):
    y = torch.eye(K, dtype=h.dtype).repeat_interleave(h.shape[1] // K, 1)
    return (logits(weights, h) - y).square().sum() / (2 * h.shape[1])


def objective(weights, h, opt):
    decay = sum(lam * w.square().sum() for lam, w in zip(opt.lams, weights, strict=True)) + opt.lam_h * h.square().sum()
    return data_term(weights, h, opt.K) + decay / 2


def unpacked(flat, weights):
    parts = flat.split([w.numel() for w in weights])
    return [p.view_as(w) for p, w in zip(parts, weights, strict=True)]


def spectrum_of(matrix):
    return torch.linalg.eigvalsh(matrix).flip(0)


def test_t1_the_built_optimum_is_stationary(generator):
    for opt in (SMALL, UFMOptimum(4, 3, [0.002, 0.003], 0.004), PAPER):
        weights, h = opt.build(d=6, generator=generator)
        for part in (*weights, h):
            part.requires_grad_()
        gradient = torch.autograd.grad(objective(weights, h, opt), [*weights, h])
        assert max(g.abs().max() for g in gradient) <= 1e-13


def test_t2_the_loss_at_the_optimum(generator):
    assert PAPER.gamma == pytest.approx(0.9422774667181081, abs=1e-12)
    assert PAPER.loss == pytest.approx(0.164837872724478, abs=1e-12)
    for opt in (PAPER, SMALL):
        weights, h = opt.build(d=7, generator=generator)
        assert float(objective(weights, h, opt)) == pytest.approx(opt.loss, abs=1e-12)
        assert float(h[:, 0].square().sum()) == pytest.approx(opt.feature_norms[0], rel=1e-12)
        assert float(logits(weights, h)[:, 0].square().sum()) == pytest.approx(opt.feature_norms[-1], rel=1e-12)


def test_t3_the_layer_hessian_has_k_squared_equal_outliers(generator):
    assert PAPER.hessian_eigenvalue(3) == pytest.approx(0.163242569780579, rel=1e-12)
    weights, h = PAPER.build(d=6, generator=generator)
    for l in (1, 3, 5):
        at = weights[l - 1]
        full = hessian(lambda w, l=l: data_term([*weights[: l - 1], w, *weights[l:]], h, 3), at)
        found = spectrum_of(full.reshape(at.numel(), at.numel()))
        torch.testing.assert_close(found, expanded(PAPER.spectrum("hessian", 6, l=l)), rtol=1e-10, atol=1e-13)
        assert expanded(PAPER.spectrum("hessian", 6, l=l, weight_decay=True))[-1] == pytest.approx(0.01)


@settings(deadline=None, max_examples=5)
@given(seed=SEEDS, l=st.integers(1, 3))
def test_t4_the_kronecker_form_is_the_hessian_at_a_random_point(seed, l):
    g = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (3, 4), (2, 3)]
    weights = [torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes]
    h = torch.randn(3, 6, generator=g, dtype=torch.float64)
    found = linear_hessian(weights, h, l)
    full = hessian(lambda w: data_term([*weights[: l - 1], w, *weights[l:]], h, 2), weights[l - 1])
    torch.testing.assert_close(torch.kron(*found), full.reshape(len(torch.kron(*found)), -1), rtol=0, atol=1e-10)
    torch.testing.assert_close(found.values(), spectrum_of(torch.kron(*found)), rtol=1e-9, atol=1e-10)
    m = torch.randn(shapes[l - 1], generator=g, dtype=torch.float64)
    torch.testing.assert_close((found @ m).flatten(), torch.kron(*found) @ m.flatten())


def test_t5_the_data_gradient_is_minus_lambda_times_the_weight(generator):
    weights, h = SMALL.build(d=5, generator=generator)
    for w in weights:
        w.requires_grad_()
    for lam, w, g in zip(SMALL.lams, weights, torch.autograd.grad(data_term(weights, h, 3), weights), strict=True):
        assert (g + lam * w).abs().max() <= 1e-12


@pytest.mark.parametrize("decay", [False, True])
def test_t6_the_full_hessian(decay, generator):
    d = 5
    weights, h = SMALL.build(d=d, generator=generator)
    flat = torch.cat([w.flatten() for w in weights])

    def f(x):
        parts = unpacked(x, weights)
        penalty = sum(lam / 2 * w.square().sum() for lam, w in zip(SMALL.lams, parts, strict=True))
        return data_term(parts, h, 3) + (penalty if decay else 0.0)

    listed = SMALL.spectrum("hessian_full", d, weight_decay=decay)
    assert sum(many for _, many in listed) == flat.numel()
    found = spectrum_of(hessian(f, flat))
    torch.testing.assert_close(found, expanded(listed), rtol=0, atol=1e-11)
    outliers = found[: 3 * 3]  # exactly K² separate, in two groups of K(K+1)/2 and K(K-1)/2
    assert outliers[-1] > 3 * found[9]
    assert sorted(torch.unique(outliers.round(decimals=9), return_counts=True)[1].tolist()) == [3, 6]
    assert (found.min() < -1e-6) == (not decay)


@pytest.mark.parametrize("matrix", ["gauss_newton", "gauss_newton_features"])
def test_t7_gauss_newton_over_weights_and_over_features_too(matrix, generator):
    d = 4
    weights, h = SMALL.build(d=d, generator=generator)
    parts = [*weights, h] if matrix == "gauss_newton_features" else weights
    flat = torch.cat([p.flatten() for p in parts])

    def f(x):
        *rest, last = unpacked(x, parts)
        return logits(rest, last) if matrix == "gauss_newton_features" else logits([*rest, last], h)

    J = jacobian(f, flat).flatten(0, 1)
    listed = SMALL.spectrum(matrix, d)
    assert sum(many for _, many in listed) == flat.numel()
    found = spectrum_of(J.T @ J / h.shape[1])
    torch.testing.assert_close(found, expanded(listed), rtol=1e-10, atol=1e-13)


def test_the_weight_spectrum(generator):
    weights, _ = SMALL.build(d=5, generator=generator)
    for l, w in enumerate(weights, 1):
        torch.testing.assert_close(spectrum_of(w.T @ w), expanded(SMALL.spectrum("weight", 5, l=l)), atol=1e-13, rtol=0)


@pytest.mark.parametrize("K", [2, 3, 4, 5, 10])
def test_t11_cross_entropy_at_a_simplex(K, generator):
    a, m = 1.3, 1.7
    P = torch.eye(K, dtype=torch.float64) - 1 / K
    p = (a * m * P).softmax(1)
    R = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    full = sum(torch.kron(a * a * P @ r @ P, m * m * torch.outer(v, v)) for r, v in zip(R, P, strict=True)) / K
    listed = expanded(simplex_spectrum(K, a, m))
    assert len(listed) == (K - 1) ** 2
    torch.testing.assert_close(spectrum_of(full)[: len(listed)], listed, rtol=0, atol=1e-12)
    assert spectrum_of(full)[len(listed) :].abs().max() < 1e-12


def test_a_simplex_far_from_and_far_beyond_what_the_exponential_holds():
    for K in (2, 3, 10):
        assert all(0 <= value < 1e-200 for value, _ in simplex_spectrum(K, 700.0, 1.0))
        wrong = [value for value, _ in simplex_spectrum(K, -800.0, 1.0)]  # q = 1 / (K - 1) in every wrong class
        scale = 800**2 / K / (K - 1)
        expected = [0.0] if K == 2 else [scale, scale / (K - 1), 0.0]
        assert wrong == pytest.approx(expected, abs=1e-9)
    (first, _), *_ = simplex_spectrum(3, 40.0, 1.0)
    assert first == pytest.approx(40**2 / 3 * 3 * math.exp(-40), rel=1e-12)


def test_t17_gamma_goes_to_one_as_the_decay_goes_to_zero():
    opt = UFMOptimum(3, 40, [1e-6] * 5, 1e-6)
    assert 1 - opt.gamma == pytest.approx((3**6 * 40 * 1e-6**6) ** (1 / 6), rel=1e-2)
    assert UFMOptimum(10, 5000, [1e-6] * 30, 1e-6).gamma < 1  # in logarithms: K^31 Lambda underflows


@pytest.mark.parametrize("L", [2, 3, 5])
def test_t18_the_threshold_of_global_optimality(L):
    lam = ((L - 1) ** (L - 1) / L ** (2 * L) / (3 ** (L + 1) * 40)) ** (1 / (L + 1))
    opt = UFMOptimum(3, 40, [lam] * L, lam)
    assert opt.gamma == pytest.approx((L - 1) / L, abs=1e-9)
    assert opt.loss == pytest.approx(0.5, abs=1e-9)
    assert UFMOptimum(3, 40, [lam * 0.99] * L, lam).globally_optimal
    above = UFMOptimum(3, 40, [lam * 1.001] * L, lam)
    assert not above.globally_optimal
    assert above.loss > 0.5


def test_the_model_trains_to_the_optimum_and_its_outliers_are_the_predicted_ones(generator):
    opt = UFMOptimum(2, 4, [0.02] * 3, 0.02)
    model = DeepUFM(2, 4, 6, 3, generator=generator)
    seen = []
    began = float(model.objective(opt.lams, opt.lam_h).detach())
    assert train_ufm(model, opt.lams, opt.lam_h, steps=20, after=seen.append) < began
    assert seen == list(range(1, 21))
    reached = train_ufm(model, opt.lams, opt.lam_h, steps=8, lr=1.0, method="lbfgs")
    assert reached == pytest.approx(opt.loss, abs=1e-9)
    weights, h = [layer.weight.detach() for layer in model.layers], model.features.detach().T
    top = linear_hessian(weights, h, 2)
    torch.testing.assert_close(top.values()[:4], expanded(opt.spectrum("hessian", 6, l=2))[:4], rtol=1e-4, atol=0)
    means = [x[:, ::4].T for x in (weights[1] @ weights[0] @ h, weights[0] @ h)]
    assert all(alignment(b, top @ b).value > 1 - 1e-6 for b in natural_basis(*means).flatten(0, 1))
    report = collapse_spectra(model, model.batches, loss="mse")
    torch.testing.assert_close(report["layers.1"].eigenvalues, top.values()[:4], rtol=1e-4, atol=0)
    assert report["layers.1"].collapse_gap < 1e-4


def test_alignment_of_a_null_vector_is_zero_and_says_so():
    v = torch.tensor([1.0, 2.0])
    assert alignment(v, 3 * v) == (pytest.approx(1.0), False)
    assert alignment(v, torch.zeros(2)) == (0.0, True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UFMOptimum(3, 40, [0.01] * 5, 0.01).build(d=2), "at least the number of classes 3"),
        (lambda: UFMOptimum(3, 40, [0.01], 0.01), "at least 2 layers"),
        (lambda: UFMOptimum(3, 40, [0.01, 0.0], 0.01), r"lams\[1\] must be positive"),
        (lambda: UFMOptimum(3, 40, [0.01, math.nan], 0.01), r"lams\[1\] must be positive"),
        (lambda: UFMOptimum(3, 40, [0.01, 0.01], -1.0), "lam_h must be positive"),
        (lambda: UFMOptimum(1, 40, [0.01, 0.01], 0.01), "at least 2 classes"),
        (lambda: UFMOptimum(3, 40, [0.1, 0.1], 0.1), "only zero is stationary"),
        (lambda: PAPER.spectrum("hessian", 5), "a number from 1 to 5, got None"),
        (lambda: PAPER.hessian_eigenvalue(0), "a number from 1 to 5, got 0"),
        (lambda: linear_hessian([torch.ones(3, 5)], torch.ones(5, 6), 0), "a number from 1 to 1, got 0"),
        (lambda: DeepUFM(3, 4, 2, 2), "d >= K and L >= 2, got K=3, n=4, d=2"),
        (lambda: PAPER.spectrum("gauss_newton", 5, weight_decay=True), "weight decay belongs to Hessians"),
        (lambda: DeepUFM(3, 4, 5, 2, "gelu"), "'linear' or 'relu'"),
        (lambda: train_ufm(DeepUFM(3, 4, 5, 2), [0.1] * 2, 0.1, steps=1, method="adam"), "'gd' or 'lbfgs'"),
        (lambda: train_ufm(DeepUFM(3, 4, 5, 2), [0.1], 0.1, steps=1), "each of the 2 layers"),
        (lambda: train_ufm(DeepUFM(3, 4, 5, 2), [0.1, math.nan], 0.1, steps=1), "a lambda of at least 0"),
        (lambda: train_ufm(DeepUFM(3, 4, 5, 2), [0.1, 0.1], -0.1, steps=1), "a lambda of at least 0"),
        (lambda: simplex_spectrum(1, 1.0, 1.0), "at least 2 classes"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
