"""SURGE's gradient: the checks of its specification, in the order of their numbers."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn
from torch.nn import functional as F

from subspan.resize import (
    BinaryConv1d,
    BinaryConv2d,
    BinaryLinear,
    GradientMoments,
    SurgeConfig,
    binarize,
    param_groups,
    smoothed_sign_loss,
    surge_conv2d,
    surge_linear,
)
from subspan.resize.binary.estimators import derivative, sign, transformed, weight_gradient
from subspan.resize.binary.joint import compensation, norm

STE = SurgeConfig(mode="ste")


def gradients(y, g, *inputs):
    return torch.autograd.grad(y, [i for i in inputs if i is not None], g)


def rand(*shape, seed=0, dtype=torch.float64, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(dtype=torch.float64, b=6, p=9, q=5):
    x, w, a = rand(b, p, seed=1, dtype=dtype), rand(q, p, seed=2, dtype=dtype), rand(q, p, seed=3, dtype=dtype)
    bias, g = rand(q, seed=4, dtype=dtype), rand(b, q, seed=5, dtype=dtype)
    return [t.requires_grad_() for t in (x, w, a, bias)], g


def plain(x, w, bias):
    """A binary layer without any gradient rule."""
    s, t = torch.where(x >= 0, 1.0, -1.0).to(x.dtype), torch.where(w >= 0, 1.0, -1.0).to(w.dtype)
    return F.linear(s, t) * w.abs().mean(1) + bias


def moments(seed, cov=False):
    """Exact moments of a finite law: n pairs of gradients, and the law's samples."""
    b, a = rand(40, 7, seed=seed) + rand(7, seed=seed + 1), rand(40, 7, seed=seed + 2) + rand(7, seed=seed + 3)
    if cov:
        a = a + 0.7 * b
    truth = rand(7, seed=seed + 4)
    return GradientMoments.of(b, a, truth), b, a, truth


class TestTheory:
    @pytest.mark.parametrize("seed", [0, 10, 20])
    def test_t1_lambda_star_minimises_the_error(self, seed):
        m, b, a, truth = moments(seed, cov=True)
        best = m.best_scale()
        exact = [((b + s * a - truth) ** 2).sum(1).mean().item() for s in (best - 0.1, best, best + 0.1)]
        assert exact[1] == pytest.approx(m.mse(best), rel=1e-9)
        assert exact[1] < min(exact[0], exact[2])
        # A parabola is least where its central difference vanishes.
        assert m.mse(best + 0.1) == pytest.approx(m.mse(best - 0.1), rel=1e-9)

    @pytest.mark.parametrize("seed", [0, 10, 20])
    def test_t2_the_gain_and_where_it_is_positive(self, seed):
        m, *_ = moments(seed)
        best = m.best_scale()
        assert m.mse(0) - m.mse(best) == pytest.approx(m.gain(), rel=1e-9)
        for ratio, helps in ((0.01, True), (1.99, True), (2.01, False), (-0.01, False)):
            assert (m.mse(ratio * best) < m.mse(0)) is helps

    def test_t3_eta_from_angle_bias_and_noise(self):
        m = GradientMoments(rand(7, seed=1), rand(7, seed=2), rand(7, seed=3), 0.4, 0.9)
        c = F.cosine_similarity(m.bias, m.twin, dim=0).item()
        beta, rho = (m.bias.norm() / m.straight.norm()).item(), 0.9 / m.twin.square().sum().item()
        assert m.best_eta() == pytest.approx(beta * c / (1 + rho), rel=1e-9)
        assert m.best_scale() == pytest.approx(m.best_eta() * (m.straight.norm() / m.twin.norm()).item(), rel=1e-9)

    def test_t4_correlated_noise_moves_the_best_scale(self):
        n, d = 200_000, 3
        noise, mu_b, mu_a, truth = rand(n, d, seed=0), rand(d, seed=1), rand(d, seed=2), rand(d, seed=3)
        b, a = mu_b + noise, mu_a + 0.5 * noise + 0.3 * rand(n, d, seed=4)
        wanted = ((truth - mu_b) @ mu_a - 0.5 * d) / (mu_a.square().sum() + d * (0.25 + 0.09))
        found = GradientMoments.of(b, a, truth)
        # Three standard errors of the numerator's terms, each of order one, over the root of n.
        assert abs(found.best_scale() - wanted.item()) < 3 * 3 / math.sqrt(n)
        without = ((truth - mu_b) @ mu_a) / (mu_a.square().sum() + d * 0.34)
        assert abs(without - wanted) > 0.1  # the covariance matters in this example

    def test_t15_the_smoothed_loss_and_gradient_against_all_sign_patterns(self):
        d = 5
        x, v, t, tau = rand(d, seed=1, scale=0.5).requires_grad_(), rand(3, d, seed=2), rand(3, seed=3), 0.7
        up = 0.5 * (1 + torch.erf(x / tau / math.sqrt(2)))
        total = torch.zeros((), dtype=x.dtype)
        for k in range(2**d):
            s = torch.tensor([1.0 if k >> i & 1 else -1.0 for i in range(d)], dtype=x.dtype)
            total = total + torch.where(s > 0, up, 1 - up).prod() * (v @ s - t).square().sum() / 2
        loss, grad = smoothed_sign_loss(x.detach(), v, t, tau)
        assert loss.item() == pytest.approx(total.item(), rel=1e-6)
        torch.testing.assert_close(grad, gradients(total, None, x)[0], rtol=1e-6, atol=1e-9)


class TestGradient:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("scale", [1.0, 1e4])
    def test_t5_the_twin_never_reaches_the_output(self, dtype, scale):
        (x, w, a, bias), _ = problem(dtype)
        wanted = plain(x, w, bias)
        for config in (SurgeConfig(), STE, SurgeConfig(mode="fixed", fixed_scale=1e6)):
            assert torch.equal(surge_linear(x, w, scale * a, bias, config), wanted)
        image, kernel = rand(2, 3, 5, 5, dtype=dtype), rand(4, 3, 3, 3, seed=1, dtype=dtype)
        assert torch.equal(
            surge_conv2d(image, kernel, scale * kernel, padding=1),
            F.conv2d(sign(image), sign(kernel), padding=1) * kernel.abs().flatten(1).mean(1).view(-1, 1, 1),
        )

    @pytest.mark.parametrize("granularity", ["layer", "sample", "channel"])
    def test_t6_the_published_graph_with_the_same_lambda(self, granularity):
        (x, w, a, bias), g = problem()
        x, g = x.detach().view(2, 3, -1).requires_grad_(), g.view(2, 3, -1)
        config = SurgeConfig(granularity=granularity)
        found = gradients(surge_linear(x, w, a, bias, config), g, x, w, a, bias)
        # Straight through: value of the sign, gradient of the clipped identity; for the weights of the identity.
        clipped, alpha = x.clamp(-1, 1), w.detach().abs().mean(1, keepdim=True)
        f_b = F.linear(sign(x) + clipped - clipped.detach(), alpha * sign(w) + w - w.detach(), bias)
        g_b = torch.autograd.grad(f_b, x, g, retain_graph=True)[0]
        scale = compensation(g_b, g @ a.detach(), config)
        f_ao = F.linear(scale * x, a)
        out = f_b - f_ao.detach() + f_ao
        for one, other in zip(found, gradients(out, g, x, w, a, bias), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)

    @given(eta=st.floats(0.01, 3), seed=st.integers(0, 99))
    @settings(max_examples=10, deadline=None)
    def test_t7_the_added_gradient_has_eta_times_the_norm(self, eta, seed):
        (x, w, a, bias), _ = problem()
        g = rand(6, 5, seed=seed)
        ste = gradients(surge_linear(x, w, a, bias, STE), g, x, w)  # which makes nothing of the twin
        ags = gradients(surge_linear(x, w, a, bias, SurgeConfig(eta=eta)), g, x, w)
        assert (ags[0] - ste[0]).norm() == pytest.approx(eta * ste[0].norm().item(), rel=1e-6)
        assert torch.equal(ags[1], ste[1])

    def test_t8_the_size_of_the_twin_does_not_matter_to_ags(self):
        (x, w, a, bias), g = problem()
        for config, same in ((SurgeConfig(), True), (SurgeConfig(mode="fixed"), False)):
            one, other = (gradients(surge_linear(x, w, c * a, bias, config), g, x)[0] for c in (1.0, 30.0))
            assert torch.allclose(one, other, rtol=1e-5) is same

    def test_t9_all_gradients_scale_with_the_loss(self):
        (x, w, a, bias), g = problem()
        y = surge_linear(x, w, a, bias)
        one, other = gradients(y, g, x, w, a, bias), gradients(surge_linear(x, w, a, bias), 1e3 * g, x, w, a, bias)
        for u, v in zip(one, other, strict=True):
            torch.testing.assert_close(1e3 * u, v, rtol=1e-5, atol=1e-8)

    def test_t10_eta_zero_is_straight_through_training(self):
        def trained(config):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), BinaryLinear(8, 8, config=config), nn.Linear(8, 3))
            optimizer = torch.optim.Adam([p for n, p in net.named_parameters() if "aux" not in n], 1e-2)
            for step in range(20):
                x = rand(16, 6, seed=step, dtype=torch.float32)
                loss = F.cross_entropy(net(x), torch.arange(16) % 3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return [p for n, p in net.named_parameters() if "aux" not in n]

        # A twin at random would draw other numbers for the layers after it.
        assert all(torch.equal(u, v) for u, v in zip(trained(SurgeConfig(eta=0.0)), trained(STE), strict=True))
        assert not all(torch.equal(u, v) for u, v in zip(trained(SurgeConfig(eta=1.0)), trained(STE), strict=True))

    def test_t11_zero_gradients(self):
        (x, w, a, bias), g = problem()
        y = surge_linear(x, w, a, bias)
        assert all((u == 0).all() for u in gradients(y, torch.zeros_like(g), x, w, a, bias))
        far = (5 * sign(x)).detach().requires_grad_()  # every input saturated: g_b = 0
        for reference, silent in (("clipped", True), ("unclipped", False)):
            dx, da = gradients(surge_linear(far, w, a, bias, SurgeConfig(reference=reference)), g, far, a)
            assert bool((dx == 0).all()) is silent
            assert bool((da == 0).all()) is silent
        zero = torch.zeros_like(a).requires_grad_()
        ste = gradients(surge_linear(x, w, None, bias, STE), g, x)[0]
        dx, da = gradients(surge_linear(x, w, zero, bias), g, x, zero)
        assert torch.equal(dx, ste)
        assert da.isfinite().all()

    @pytest.mark.parametrize(
        "options", [{}, {"stride": 2, "padding": 1}, {"padding": 2, "dilation": 2}, {"groups": 2, "padding": 1}]
    )
    def test_t12_convolutions_against_torch(self, options):
        groups = options.get("groups", 1)
        x, g_seed = rand(2, 4, 7, 6, seed=1).requires_grad_(), 5
        w, a = (rand(6, 4 // groups, 3, 3, seed=s).requires_grad_() for s in (2, 3))
        config = SurgeConfig(mode="fixed", fixed_scale=0.4, alpha="none", estimator="identity")
        y = surge_conv2d(x, w, a, None, config, **options)
        g = rand(*y.shape, seed=g_seed)
        dx, dw, da = gradients(y, g, x, w, a)
        t = torch.nn.grad
        wanted = t.conv2d_input(x.shape, sign(w), g, **options) + 0.4 * t.conv2d_input(x.shape, a, g, **options)
        torch.testing.assert_close(dx, wanted, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(dw, t.conv2d_weight(sign(x), w.shape, g, **options), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(da, 0.4 * t.conv2d_weight(x, a.shape, g, **options), rtol=1e-6, atol=1e-9)

    def test_t12_a_1x1_convolution_is_a_linear_layer(self):
        (x, w, a, bias), g = problem()
        dense = gradients(surge_linear(x, w, a, bias), g, x, w, a, bias)
        square = surge_conv2d(x[..., None, None], w[..., None, None], a[..., None, None], bias)
        conv = gradients(square, g[..., None, None], x, w, a, bias)
        for u, v in zip(dense, conv, strict=True):
            torch.testing.assert_close(u, v, rtol=1e-6, atol=1e-9)

    def test_t13_the_twin_path_alone(self):
        (x, w, a, _), g = problem()
        saturated = (x.detach() + 10 * sign(x.detach())).requires_grad_()  # the binary path is silent
        config = SurgeConfig(mode="fixed", fixed_scale=1.0)
        found = gradients(surge_linear(saturated, w, a, None, config), g, saturated, a)
        wanted = gradients(F.linear(saturated, a), g, saturated, a)
        for u, v in zip(found, wanted, strict=True):
            torch.testing.assert_close(u, v, rtol=1e-6, atol=1e-9)


class TestEstimators:
    def test_the_sign_of_zero_is_plus_and_nan_stays(self):
        x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, torch.inf, -torch.inf])
        assert sign(x).tolist() == [1, 1, 1, -1, 1, -1]
        assert sign(torch.tensor([torch.nan])).isnan().all()
        assert surge_linear(torch.tensor([[torch.nan, 1.0]]), torch.ones(1, 2), None).isnan().all()

    @pytest.mark.parametrize(
        ("estimator", "wanted"),
        [("clip", [1, 1, 1, 0]), ("identity", [1, 1, 1, 1]), ("bireal", [2, 0.2, 0, 0])],
    )
    def test_derivatives_at_0_09_1_15(self, estimator, wanted):
        x = torch.tensor([0.0, 0.9, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
        config = SurgeConfig(mode="ste", estimator=estimator, alpha="none")
        grads = gradients(
            surge_linear(x[:, None], torch.ones(1, 1).double(), None, None, config), torch.ones(4, 1).double(), x
        )
        torch.testing.assert_close(grads[0], torch.tensor(wanted, dtype=torch.float64))

    def test_ede_goes_from_flat_to_steep(self):
        x = torch.tensor([0.0, 1.0], dtype=torch.float64)
        early, late = derivative(x, "ede", 0.0), derivative(x, "ede", 1.0)
        torch.testing.assert_close(early[0].item(), 1.0)  # k t = 1
        torch.testing.assert_close(late[0].item(), 10.0)
        assert early[1] > 0.9 > 1e-6 > late[1]

    @pytest.mark.parametrize("rule", ["identity", "detach", "full"])
    def test_the_scale_s_part_in_the_weight_gradient(self, rule):
        w, grad = rand(4, 6, seed=1).requires_grad_(), rand(4, 6, seed=2)
        # sign(w) straight through: value of the sign, gradient of w.
        straight = sign(w.detach()) + w - w.detach()
        alpha = w.abs().mean(1, keepdim=True)
        graph = {"identity": straight, "detach": alpha.detach() * straight, "full": alpha * straight}[rule]
        wanted = gradients(graph, grad, w)[0]
        found = weight_gradient(grad, w.detach(), w.detach().abs().mean(1), rule)
        torch.testing.assert_close(found, wanted)

    def test_transforms(self):
        w = rand(3, 50, seed=1) + 2
        assert torch.equal(transformed(w, "none"), w)
        torch.testing.assert_close(transformed(w, "center").mean(1), torch.zeros(3).double(), atol=1e-12, rtol=0)
        standard = transformed(w, "standardize")
        torch.testing.assert_close(standard.square().mean(1), torch.ones(3).double())
        clamped = transformed(w, "recu", 0.9)
        assert ((clamped == w).float().mean(1) - 0.8).abs().max() <= 0.05
        assert clamped.max() < w.max()
        constant = transformed(torch.ones(1, 4), "standardize")
        assert torch.equal(constant, torch.zeros(1, 4))


class TestScale:
    def test_an_ema_smooths_and_starts_unbiased(self):
        config, running = SurgeConfig(ema=0.9, eta=1.0), torch.zeros(3)
        b, a = torch.ones(2, 3), torch.full((2, 3), 2.0)
        assert compensation(b, a, config, running=running).item() == pytest.approx(0.5)
        heavy = SurgeConfig(ema=0.9, eps=1.0)  # then the norms' own size counts, not their ratio alone
        started = compensation(b, a, heavy, running=torch.zeros(3)).item()
        assert started == pytest.approx(compensation(b, a, SurgeConfig(eps=1.0)).item())
        later = compensation(4 * b, a, config, running=running).item()
        assert later == pytest.approx(0.5 * (0.9 * 0.1 * 1 + 0.1 * 4) / (0.9 * 0.1 + 0.1))

    def test_a_gradient_that_is_not_finite_leaves_the_ema_alone(self):
        config, running = SurgeConfig(ema=0.9), torch.zeros(3)
        compensation(torch.ones(2, 3), torch.ones(2, 3), config, running=running)
        before = running.clone()
        compensation(torch.full((2, 3), torch.inf), torch.ones(2, 3), config, running=running)
        assert torch.equal(running, before)

    def test_a_silent_twin_meets_the_guard(self):
        config = SurgeConfig(eta=1.0, lambda_max=7.0)
        assert compensation(torch.ones(2, 3), torch.zeros(2, 3), config).item() == 7.0

    def test_a_cosine_schedule_ends_at_straight_through(self):
        config = SurgeConfig(eta=0.8, schedule="cosine")
        wanted = [0.8, 0.4 + 0.4 * 0.5**0.5, 0.4, 0.0]
        assert [config.eta_at(t) for t in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(wanted)

    def test_half_precision_overflows_in_neither_norms_nor_lambda(self):
        b = torch.full((100, 100), 1000.0, dtype=torch.float16)
        assert compensation(b, b, SurgeConfig(eta=1.0)).item() == pytest.approx(1.0, rel=1e-3)
        (x, w, a, bias), g = problem(torch.float16)
        silent = torch.zeros_like(a)  # lambda is lambda_max, beyond 65504
        found, wanted = (gradients(surge_linear(x, w, t, bias), g, x)[0] for t in (silent, None))
        assert torch.equal(found, wanted)

    def test_norms_of_a_layer_a_sample_and_a_channel(self):
        g = rand(3, 4, 5)
        for granularity, channel_dim, shape in (
            ("layer", 1, ()), ("sample", 1, (3, 1, 1)), ("channel", 1, (1, 4, 1)), ("channel", -1, (1, 1, 5)),
        ):  # fmt: skip
            found = norm(g, granularity, channel_dim)
            assert found.shape == shape
            wanted = g.square().sum([d for d in range(3) if not shape or shape[d] == 1], keepdim=bool(shape)).sqrt()
            torch.testing.assert_close(found, wanted)


COMPILED = """
import copy, torch
from subspan.resize import BinaryConv2d, SurgeConfig

net = torch.nn.Sequential(torch.nn.Tanh(), BinaryConv2d(3, 4, 3, padding=1, config=SurgeConfig(ema=0.5)))
other = copy.deepcopy(net)
for module in (net, torch.compile(other, backend="eager", fullgraph=True)):
    module(torch.ones(2, 3, 5, 5)).square().sum().backward()
assert torch.equal(net[1].weight_aux.grad, other[1].weight_aux.grad)
assert torch.equal(net[1].smoothed_norms, other[1].smoothed_norms)
"""


def layer_pair(layer):
    """The layer, and a copy of it without a twin."""
    plain_layer = copy.deepcopy(layer)
    plain_layer.config = STE
    plain_layer.weight_aux = None
    return layer, plain_layer


class TestLayers:
    @pytest.mark.parametrize(
        ("layer", "shape"),
        [
            (lambda: BinaryLinear(6, 4), (3, 6)),
            (lambda: BinaryConv1d(4, 6, 3, padding=1), (2, 4, 9)),
            (lambda: BinaryConv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 9, 8)),
            (lambda: BinaryConv2d(4, 6, (3, 2), padding=(2, 0), stride=(1, 2), groups=2), (2, 4, 9, 8)),
            (lambda: BinaryConv2d(4, 6, 3, stride=2, padding=1, padding_mode="circular"), (2, 4, 9, 8)),
        ],
    )
    def test_layers_have_torch_s_shapes_and_padding(self, layer, shape):
        layer = layer()
        x = rand(*shape, dtype=torch.float32)
        base = next(c for c in type(layer).__mro__ if c.__module__.startswith("torch.nn") and c is not nn.Module)
        with torch.no_grad():
            wanted = base.forward(copy_of_signs(layer, base), sign(x))
        torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)

    def test_frozen_parts(self):
        x = rand(5, 6, dtype=torch.float32)
        layer = BinaryLinear(6, 4, config=SurgeConfig(aux_update=False))
        layer(x.requires_grad_()).sum().backward()
        assert layer.weight_aux.grad is None
        layer = BinaryLinear(6, 4)
        layer.weight.requires_grad_(False)
        layer(x.detach()).sum().backward()  # the input needs no gradient: the twin trains all the same
        assert layer.weight.grad is None
        assert layer.weight_aux.grad.abs().sum() > 0

    def test_a_frozen_twin_keeps_one_byte_an_input_and_the_same_gradient(self):
        (x, w, a, bias), g = problem()
        wanted = gradients(surge_linear(x, w, a, bias), g, x)[0]
        assert torch.equal(gradients(surge_linear(x, w, a.detach(), bias), g, x)[0], wanted)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            surge_linear(x, w, a.detach(), bias)
        assert kept[0].dtype == torch.int8

    def test_sharing_the_latent_weights(self):
        layer = BinaryLinear(6, 4, config=SurgeConfig(share=True))
        assert layer.weight_aux is None
        x, g = rand(5, 6, dtype=torch.float32).requires_grad_(), rand(5, 4, dtype=torch.float32, seed=1)
        dx, dw = gradients(layer(x), g, x, layer.weight)
        other = surge_linear(x, layer.weight, layer.weight.detach(), layer.bias)
        torch.testing.assert_close(gradients(other, g, x, layer.weight), (dx, dw))

    def test_a_layer_used_twice_and_no_rows(self):
        layer = BinaryLinear(4, 4, config=SurgeConfig(ema=0.5))
        layer(layer(rand(3, 4, dtype=torch.float32))).sum().backward()
        assert layer.smoothed_norms[0] == pytest.approx(0.75)  # two readings
        empty = torch.zeros(0, 4, requires_grad=True)
        y = layer(empty)
        y.sum().backward()
        assert y.shape == (0, 4)
        assert layer.weight.grad.isfinite().all()
        assert layer.weight_aux.grad.isfinite().all()

    def test_an_all_zero_filter(self):
        layer = BinaryLinear(4, 2, bias=False)
        with torch.no_grad():
            layer.weight[0] = 0
        y = layer(rand(3, 4, dtype=torch.float32))
        assert (y[:, 0] == 0).all()
        y.sum().backward()
        assert layer.weight.grad.isfinite().all()

    @pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])  # the second: from a layer under autocast
    @pytest.mark.parametrize(
        ("make", "shape"),
        [(lambda: BinaryLinear(16, 4), (8, 16)), (lambda: BinaryConv2d(16, 4, 3, padding=1), (8, 16, 5, 5))],
    )
    def test_autocast_gives_bfloat16_outputs_and_float32_gradients(self, make, shape, x_dtype):
        layer, reference = layer_pair(make())
        x = rand(*shape, dtype=torch.float32).to(x_dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, wanted = layer(x), reference(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, wanted)
        y.float().square().sum().backward()
        exact = copy.deepcopy(layer)
        exact.zero_grad()
        exact(x.float()).square().sum().backward()
        for p, q in ((layer.weight, exact.weight), (layer.weight_aux, exact.weight_aux)):
            assert p.grad.dtype == torch.float32
            assert F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.999

    @pytest.mark.parametrize("aux_update", [True, False])  # what is kept of the input differs
    def test_under_autocast_signs_and_masks_are_those_of_the_input_itself(self, aux_update):
        layer = BinaryLinear(3, 1, config=SurgeConfig(eta=0.0, aux_update=aux_update))
        x = torch.tensor([[1.0001, -1e-9, 1.0]], requires_grad=True)  # float16 rounds to 1, -0 and 1
        with torch.autocast("cpu", dtype=torch.float16):
            y = layer(x)
        y.float().sum().backward()
        assert (x.grad[0] != 0).tolist() == [False, True, True]
        assert layer.weight.grad[0].tolist() == [1, -1, 1]

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_gradient_checkpointing(self, reentrant):
        layer = BinaryLinear(6, 4, config=SurgeConfig(ema=0.5))
        twin = copy.deepcopy(layer)
        x = rand(5, 6, dtype=torch.float32).requires_grad_()
        layer(x).square().sum().backward()
        wanted, x.grad = x.grad, None
        torch.utils.checkpoint.checkpoint(twin, x, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(x.grad, wanted)
        assert torch.equal(layer.weight_aux.grad, twin.weight_aux.grad)
        assert torch.equal(layer.smoothed_norms, twin.smoothed_norms)

    @pytest.mark.slow
    def test_torch_compile_gives_the_same_numbers_in_one_graph(self):
        """In a process of its own: the shape checker of the test run cannot be compiled."""
        subprocess.run([sys.executable, "-c", COMPILED], check=True)

    def test_a_second_derivative_is_refused(self):
        x = rand(5, 6, dtype=torch.float32).requires_grad_()
        (dx,) = torch.autograd.grad(BinaryLinear(6, 4)(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()

    def test_channels_last(self):
        layer = BinaryConv2d(4, 6, 3, padding=1)
        x = rand(2, 4, 5, 5, dtype=torch.float32)
        a, b = layer(x), layer(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(a, b)


def copy_of_signs(layer, base):
    """A layer of torch's own whose weights are the signs times their scale."""
    other = copy.deepcopy(layer)
    other.__class__ = base
    w = layer.weight.detach()
    other.weight = nn.Parameter(sign(w) * w.abs().flatten(1).mean(1).view(-1, *(1,) * (w.ndim - 1)))
    return other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta": -0.1}, "eta must be finite"),
        ({"eta": math.nan}, "eta must be finite"),
        ({"fixed_scale": math.inf}, "fixed_scale must be finite"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"lambda_max": 0.0}, "lambda_max must be positive"),
        ({"estimator": "tanh"}, "estimator"),
        ({"mode": "agz"}, "mode"),
        ({"ema": 1.0}, "ema must be"),
        ({"ema": 0.9, "granularity": "sample"}, "granularity 'sample' has many"),
        ({"tau": 0.4}, "tau must be"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises((ValueError, TypeCheckError), match=message):
        SurgeConfig(**options)


def test_inputs_that_cannot_work():
    w = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"int64|i64"):
        surge_linear(torch.ones(1, 3, dtype=torch.int64), w, None)
    with pytest.raises((ValueError, TypeCheckError), match="twin"):
        surge_linear(torch.ones(1, 3), w, torch.ones(2, 4))
    with pytest.raises(ValueError, match="NaN or infinity"):
        surge_linear(torch.full((1, 3), torch.nan), w, None, None, SurgeConfig(debug=True))
    with pytest.raises(ValueError, match="groups"):
        BinaryConv2d(3, 4, 3, groups=2)
    with pytest.raises(ValueError, match=r"of 3 channels takes \(b, channels, \*\), got \(3, 5, 5\)"):
        BinaryConv2d(3, 4, 3)(torch.ones(3, 5, 5))
    with pytest.raises(ValueError, match="odd kernels"):
        BinaryConv2d(3, 4, 2, padding="same")(torch.ones(1, 3, 5, 5))


def test_adam_on_two_groups_trains_the_twin_at_its_own_rate():
    model = binarize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)))
    groups = param_groups(model, 1e-3, aux_lr=0.0, weight_decay=0.1)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups] == [(6, 1e-3, 0.1), (1, 0.0, 0.0)]
    assert groups[1]["params"][0] is model[1].weight_aux
    model[0].requires_grad_(False)
    model[1].weight_aux.requires_grad_(False)
    assert [len(g["params"]) for g in param_groups(model, 1e-3)] == [4]
