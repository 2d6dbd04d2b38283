"""Predictions for real networks against dense Gauss-Newton matrices made by plain differentiation (spec section 4)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.functional import jacobian
from torch.nn.functional import one_hot

from subspan.linalg import Subspace
from subspan.theory import DeepUFM, UFMOptimum, collapse_spectra, exact_layer_ggn, hessian_product, measured_spectra
from subspan.theory.collapse import estimators, losses
from subspan.theory.collapse import spectra as spectra_module
from subspan.theory.collapse.estimators import class_vectors, outer, paired, split
from tests.theory.collapse_nets import data, gauss_newton, network, top, vectors

SEEDS = st.integers(0, 2**31)
LOSSES = ("mse", "ce")
quick = settings(deadline=None, max_examples=3)
pytestmark = pytest.mark.filterwarnings("ignore:classes have")


def spectra(model, x, y, loss, batches=2, **options):
    return collapse_spectra(model, list(zip(x.chunk(batches), y.chunk(batches), strict=True)), loss=loss, **options)


def drawn(seed, relu=True, counts=(4, 7, 2)):
    g = torch.Generator().manual_seed(seed)
    return network(g, relu=relu), *data(g, counts=list(counts))


@quick
@given(seed=SEEDS, relu=st.booleans())
def test_t8_class_cross_and_within_add_up_to_the_gauss_newton_matrix(seed, relu):
    model, x, y = drawn(seed, relu, (5, 5, 5))
    x, y = x[y.argsort()], y.sort()[0]
    for name in ("0", "2"):
        v = vectors(model, x, name, "mse")[0].view(3, 5, 3, -1)  # c i c' pq
        means = v.mean(1)
        of_class, cross = split(means[..., None], torch.full((3,), 1 / 3, dtype=torch.float64))
        rows = torch.cat([of_class.flatten(0, 0)[..., 0], cross[..., 0].flatten(0, 1)])
        within = (v - means[:, None]).flatten(0, 2)
        found = rows.T @ rows + within.T @ within / 15
        torch.testing.assert_close(found, gauss_newton(model, x, name, "mse"), rtol=0, atol=1e-10)
        report = spectra(model, x, y, "mse", estimator="between")[name]
        assert report.shares["class"] * report.trace == pytest.approx(float(of_class.square().sum()), rel=1e-9)
        assert report.shares["within"] * report.trace == pytest.approx(float(within.square().sum()) / 15, rel=1e-9)


@quick
@given(seed=SEEDS)
def test_t9_means_are_bounds_for_linear_nets_under_the_squared_loss(seed):
    model, x, y = drawn(seed, relu=False)
    report = spectra(model, x, y, "mse", estimator="means", residuals=0)
    for name in report.layers:
        theta = report[name].eigenvalues
        assert bool((theta <= top(gauss_newton(model, x, name, "mse"))[: len(theta)] + 1e-10).all())


@pytest.mark.parametrize(
    "options", [{"estimator": "between"}, {}, {"basis": "outer"}, {"basis": "class"}, {"weighting": "uniform"}]
)
@settings(deadline=None, max_examples=2)
@given(seed=SEEDS, relu=st.booleans(), loss=st.sampled_from(LOSSES))
def test_t10_between_and_ritz_are_bounds_always_and_t10d_sum_to_less_than_the_trace(options, seed, relu, loss):
    model, x, y = drawn(seed, relu)
    report = spectra(model, x, y, loss, residuals=0, **options)
    for name in report.layers:
        G, theta = gauss_newton(model, x, name, loss), report[name].eigenvalues
        assert bool((theta[: len(G)] <= top(G)[: len(theta)] + 1e-10).all())
        assert report[name].trace == pytest.approx(float(G.trace()), rel=1e-10)
        assert float(theta.sum()) <= report[name].trace + 1e-10


@pytest.mark.parametrize("loss", LOSSES)
def test_t10b_ritz_values_on_mean_products_are_at_least_the_between_values(loss):
    for seed in range(2):
        model, x, y = drawn(seed)
        report = spectra(model, x, y, loss, estimator="between", residuals=0)
        for name, layer in report.layers.items():
            Q = torch.linalg.qr(layer.directions.stack.flatten(1).T)[0]
            ritz = top(Q.T @ gauss_newton(model, x, name, loss) @ Q)
            assert bool((ritz >= layer.eigenvalues[: len(ritz)] - 1e-10).all())


@quick
@given(seed=SEEDS)
def test_t10c_linear_nets_order_the_estimators(seed):
    model, x, y = drawn(seed, relu=False)
    means, ritz = (spectra(model, x, y, "mse", estimator=e, residuals=0) for e in ("means", "ritz"))
    for name in ritz.layers:
        assert bool((means[name].eigenvalues <= ritz[name].eigenvalues + 1e-10).all())
        torch.testing.assert_close(ritz[name].eigenvalues_means, means[name].eigenvalues)


def test_t10c_at_the_optimum_of_the_free_feature_model_all_agree(generator):
    opt = UFMOptimum(3, 4, [0.004, 0.006, 0.005], 0.01)
    model = DeepUFM(3, 4, 6, 3, generator=generator).load(*opt.build(6, generator=generator))
    for estimator in ("means", "between", "ritz"):
        report = collapse_spectra(model, model.batches, loss="mse", estimator=estimator)
        for l, layer in enumerate(report.layers.values(), 1):
            expected = torch.full((9,), opt.hessian_eigenvalue(l), dtype=torch.float64)
            torch.testing.assert_close(layer.eigenvalues, expected, rtol=1e-10, atol=0)
            assert layer.trace_ratio == pytest.approx(1, rel=1e-10)
            assert layer.residuals.max() < 1e-10
            assert layer.gradient.fraction == pytest.approx(1, rel=1e-9)
            coefficients = torch.eye(3, dtype=torch.float64) / 3
            torch.testing.assert_close(layer.gradient.coefficients, coefficients, rtol=0, atol=1e-9)
            assert layer.weights.mean_energy == pytest.approx(1)
            metrics = layer.collapse
            assert max(metrics.nc1_trace, metrics.nc2_frame, metrics.nc2_simplex) < 1e-10
            assert (metrics.nc3, metrics.nc3_dual) == (pytest.approx(1), pytest.approx(1))
        together = report.network.eigenvalues_means[:9] / (opt.gamma / (1 - opt.gamma))
        assert together.tolist() == pytest.approx([sum(opt.lams)] * 9, rel=1e-10)
    assert report.network.eigenvalues.tolist() == pytest.approx(report.network.eigenvalues_means.tolist(), rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_t10d_one_sample_of_each_class_leaves_nothing_out(loss):
    model, x, y = drawn(0, counts=(1, 1, 1))
    for layer in spectra(model, x, y, loss).layers.values():
        assert layer.trace_fraction == pytest.approx(1, rel=1e-9)


def test_t12_relu_with_disjoint_supports_has_rank_k_in_hidden_layers_and_k_squared_in_the_last(generator):
    """Non-negative orthogonal means with disjoint supports: unit vectors; pre-activations of other classes are 0."""
    opt, n = UFMOptimum(3, 4, [0.004, 0.006, 0.005], 0.01), 4
    model = DeepUFM(3, n, 3, 3, "relu", generator=generator)
    s1, s2, s3 = opt.sigma
    eye = torch.eye(3, dtype=torch.float64)
    model.load([s1 * eye, s2 * eye, s3 * eye], opt.feature_norms[0] ** 0.5 * eye.repeat_interleave(n, 1))
    report = collapse_spectra(model, model.batches, loss="mse", estimator="means")
    for l, (name, rank) in enumerate(zip(report.layers, (3, 3, 9), strict=True), 1):
        expected = torch.zeros(9, dtype=torch.float64)
        expected[:rank] = opt.hessian_eigenvalue(l)
        torch.testing.assert_close(report[name].eigenvalues, expected, rtol=1e-10, atol=1e-14)
        exact = exact_layer_ggn(model, model.batches, name, 9, loss="mse").values
        torch.testing.assert_close(exact, expected, rtol=1e-10, atol=1e-14)


@quick
@given(seed=SEEDS, loss=st.sampled_from(LOSSES), estimator=st.sampled_from(["ritz", "means", "between"]))
def test_t13_repeated_shuffled_and_relabelled_data_give_the_same_spectra(seed, loss, estimator):
    model, x, y = drawn(seed)
    before = spectra(model, x, y, loss, estimator=estimator, residuals=0)
    order = torch.randperm(2 * len(x), generator=torch.Generator().manual_seed(seed))
    swap = torch.tensor([2, 0, 1])
    with torch.no_grad():
        model[-1].weight.copy_(model[-1].weight[swap.argsort()])
    after = spectra(
        model, torch.cat([x, x])[order], swap[torch.cat([y, y])[order]], loss, 3, estimator=estimator, residuals=0
    )
    for name in before.layers:
        torch.testing.assert_close(after[name].eigenvalues, before[name].eigenvalues, rtol=0, atol=1e-10)


@quick
@given(seed=SEEDS, loss=st.sampled_from(LOSSES), estimator=st.sampled_from(["ritz", "means", "between"]))
def test_t14_rotated_features_rotate_the_eigenvectors(seed, loss, estimator):
    model, x, y = drawn(seed)
    before = spectra(model, x, y, loss, estimator=estimator, residuals=0)["0"]
    Q = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight @ Q.T)
    after = spectra(model, x @ Q.T, y, loss, estimator=estimator, residuals=0)["0"]
    torch.testing.assert_close(after.eigenvalues, before.eigenvalues, rtol=0, atol=1e-9)
    u = before.eigenvector(0) @ Q.T
    assert float((u * after.eigenvector(0)).sum().abs()) == pytest.approx(1, abs=1e-7)


@quick
@given(seed=SEEDS, loss=st.sampled_from(LOSSES), estimator=st.sampled_from(["ritz", "means", "between"]))
def test_t15_longer_features_and_smaller_weights_scale_the_spectrum(seed, loss, estimator):
    model, x, y = drawn(seed)
    before = spectra(model, x, y, loss, estimator=estimator, residuals=0)["0"].eigenvalues
    with torch.no_grad():
        model[0].weight.div_(3)
    after = spectra(model, 3 * x, y, loss, estimator=estimator, residuals=0)["0"].eigenvalues
    torch.testing.assert_close(after, 9 * before, rtol=1e-10, atol=1e-12 * float(before[0]))


@quick
@given(seed=SEEDS, loss=st.sampled_from(LOSSES), estimator=st.sampled_from(["ritz", "means", "between"]))
def test_t16_an_eigenvalue_lies_within_each_residual(seed, loss, estimator):
    model, x, y = drawn(seed)
    for name, layer in spectra(model, x, y, loss, estimator=estimator).layers.items():
        G = gauss_newton(model, x, name, loss)
        exact = top(G)
        assert len(layer.residuals) == min(5, int((layer.eigenvalues > 0).sum()))
        for j, r in enumerate(layer.residuals):
            theta = layer.eigenvalues[j]
            assert (exact - theta).abs().min() <= r * theta + 1e-12
            u = layer.eigenvector(j).flatten()
            assert estimator != "ritz" or float(u @ G @ u) == pytest.approx(float(theta), rel=1e-6)
            assert float(torch.linalg.norm(G @ u - theta * u) / theta) == pytest.approx(float(r), rel=1e-6, abs=1e-9)


def test_t16b_the_root_without_a_root():
    z = torch.tensor([[0.3, -1.0, 2.0], [0.0, -torch.inf, -torch.inf], [1.0, 1.0, -torch.inf]], dtype=torch.float64)
    Bt = losses.root_product("ce", z, torch.eye(3, dtype=torch.float64)[:, None, None].expand(3, 3, 1, 3))[:, :, 0]
    torch.testing.assert_close(torch.einsum("kbp,kbq->bpq", Bt, Bt), losses.curvature("ce", z), rtol=0, atol=1e-15)


@quick
@given(
    seed=SEEDS,
    loss=st.sampled_from(LOSSES),
    basis=st.sampled_from(["paired", "outer"]),
    near=st.sampled_from([1.0, 0.02]),
)
def test_t16c_the_implicit_projection_equals_the_dense_one(seed, loss, basis, near):
    model, x, y = drawn(seed)
    x = near * x + (1 - near)  # with class means that are almost one vector, some directions are almost dependent
    for name, layer in spectra(model, x, y, loss, basis=basis, residuals=0).layers.items():
        D = layer.directions
        rows = (D.a[D.i][:, :, None] * D.m[D.j][:, None]).flatten(1)
        assert len(rows) == {"paired": 9, "outer": 27}[basis]
        Q = Subspace.span(rows.T, tol=1e-6).Q
        exact = top(Q.T @ gauss_newton(model, x, name, loss) @ Q)
        assert (layer.eigenvalues[: len(exact)] - exact).abs().max() <= 1e-7 * exact[0]
        assert layer.eigenvalues[len(exact) :].abs().sum() == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_t19_collapsed_features_through_any_linear_head(loss, generator):
    model = network(generator, relu=False)
    y = torch.tensor([0, 1, 2, 0, 0, 1, 0, 0, 1, 0])  # of unequal numbers
    x = torch.randn(3, 5, generator=generator, dtype=torch.float64)[y]
    for name, layer in spectra(model, x, y, loss, estimator="means").layers.items():
        exact = top(gauss_newton(model, x, name, loss))[:9]
        torch.testing.assert_close(layer.eigenvalues[: len(exact)], exact, rtol=0, atol=1e-10 * float(exact[0]))


# ------------------------------------------------------------------------------------------- beyond the spec's table


@pytest.mark.parametrize("loss", LOSSES)
def test_means_of_jacobians_and_the_gradient_are_those_of_plain_differentiation(loss):
    model, x, y = drawn(3)
    report = spectra(model, x, y, loss, batches=4)
    z = model(x)
    plain = nn.functional.cross_entropy(z, y) if loss == "ce" else (z - one_hot(y, 3)).square().sum(1).mean() / 2
    assert report.mean_loss == pytest.approx(float(plain.detach()))
    for name, layer in report.layers.items():
        gaps = (layer.eigenvalues_means - layer.eigenvalues)[:3].abs() / layer.eigenvalues[:3]
        assert layer.collapse_gap == pytest.approx(float(gaps.max()))
        (g,) = torch.autograd.grad(plain, model.get_parameter(f"{name}.weight"), retain_graph=True)
        assert layer.gradient.norm == pytest.approx(float(g.norm()))
        inside = layer.project(g)
        assert float(inside.square().sum() / g.square().sum()) == pytest.approx(layer.gradient.fraction, rel=1e-6)
        torch.testing.assert_close(layer.project(inside), inside, rtol=0, atol=1e-7)
        u = [layer.eigenvector(j) for j in range(3)]
        dots = torch.stack([a.flatten() for a in u]) @ torch.stack([a.flatten() for a in u]).T
        torch.testing.assert_close(dots, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-6)
        moved = layer.matvec(u[1])
        torch.testing.assert_close(moved, layer.eigenvalues[1] * u[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_collapse_metrics_and_the_weight_report_are_those_of_dense_matrices(loss):
    model, x, y = drawn(7, counts=(4, 7, 3))
    report = spectra(model, x, y, loss)
    z = model(x).detach()
    classes = [y == c for c in range(3)]
    for name, h, behind in (("0", x, model[:2](x).detach()), ("2", model[:2](x).detach(), z)):
        M, W = torch.stack([h[c].mean(0) for c in classes]), model.get_parameter(f"{name}.weight").detach()
        off, centred = h - M[y], M - M.mean(0)
        within, between = off.T @ off / len(h), centred.T @ centred / 3
        ratio = within @ torch.linalg.pinv(between, rtol=1e-9)
        layer = report[name]
        found = layer.collapse
        assert found.nc1_trace == pytest.approx(float(within.trace() / between.trace()), rel=1e-9)
        assert found.nc1_pinv == pytest.approx(float(ratio.trace()) / 3, rel=1e-7)
        assert found.nc1_square == pytest.approx(float(ratio.square().sum()), rel=1e-7)
        once = spectra(model, x, y, loss, estimator="means", residuals=0)[name].collapse
        assert (once.nc1_trace, once.nc1_pinv) == (pytest.approx(found.nc1_trace), None)
        for gram, shape, value in (
            (M @ M.T, torch.eye(3), found.nc2_frame),
            (centred @ centred.T, torch.eye(3) - 1 / 3, found.nc2_simplex),
        ):
            cosine = (gram * shape).sum() / gram.norm() / shape.norm()
            assert value == pytest.approx(float((1 - cosine**2).sqrt()), rel=1e-6)
        P = M.T @ torch.linalg.pinv(M.T)
        on_weight, on_means = P @ W.T @ W @ P, M.T @ M
        assert found.nc3 == pytest.approx(float((on_weight * on_means).sum() / on_weight.norm() / on_means.norm()))
        assert layer.weights.mean_energy == pytest.approx(float((W @ P).square().sum() / W.square().sum()))
        s = torch.linalg.svdvals(W)
        torch.testing.assert_close(layer.weights.values, s.square())
        gap = float(s[2] / s[3]) if len(s) > 3 else math.nan
        assert layer.weights.gap == pytest.approx(gap, nan_ok=True)
        t = torch.ones(len(z), dtype=z.dtype) if loss == "mse" else 1 - z.softmax(1).square().sum(1)
        if name == "2":
            own, means = torch.eye(3, dtype=z.dtype), torch.stack([z[c].mean(0) for c in classes])
        else:
            J = jacobian(model[1:], x @ W.T).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # b x k x p
            own = torch.stack([(t[c, None] * J[c, i]).sum(0) / t[c].sum() for i, c in enumerate(classes)])
            means = torch.stack([behind[c].mean(0) for c in classes])
        assert found.nc3_dual == pytest.approx(float(torch.cosine_similarity(own, means).mean()), rel=1e-6)


def test_the_factored_gram_products_are_those_of_dense_matrices(generator):
    A, mu = (torch.randn(3, *s, generator=generator, dtype=torch.float64) for s in ((4, 5), (6,)))
    v = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    R = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    own = torch.stack([R[c, c] @ A[c] for c in range(3)])
    for D, dense in (
        (paired(A, mu), torch.einsum("ckp,cq->ckpq", A, mu)),
        (outer(A, mu), torch.einsum("ckp,eq->ckepq", A, mu)),
        (class_vectors(A, mu, R), torch.einsum("cp,cq->cpq", own, mu)),
    ):
        rows = dense.flatten(0, -3).flatten(1)
        torch.testing.assert_close((D.a[D.i][:, :, None] * D.m[D.j][:, None]).flatten(1), rows)
        torch.testing.assert_close(D.gram(), rows @ rows.T)
        block = v.repeat(3, 1)[: len(D)]
        torch.testing.assert_close(D.gram_product(block), rows @ (rows.T @ block))
        torch.testing.assert_close(D.combine(block[:, 0]).flatten(), rows.T @ block[:, 0])
        x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(D.inner(x), rows @ x.flatten())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_oracle_dense_and_by_lanczos_is_the_plain_matrix_and_so_is_the_hessian_of_a_piecewise_linear_net(loss):
    model, x, y = drawn(5)
    batches = list(zip(x.chunk(3), y.chunk(3), strict=True))
    for name in ("0", "2"):
        G = gauss_newton(model, x, name, loss)
        for method in ("dense", "lanczos"):
            found = exact_layer_ggn(model, batches, name, 5, loss=loss, method=method)
            torch.testing.assert_close(found.values, top(G)[:5].clamp(min=0), rtol=1e-8, atol=1e-12)
            torch.testing.assert_close(G @ found.vectors, found.vectors * found.values, rtol=0, atol=1e-6)
        report = collapse_spectra(model, batches, [name], loss=loss, residuals=0)
        ((_, measured),) = measured_spectra(model, batches, report, [name], steps=len(G))
        torch.testing.assert_close(measured.eigenvalues[:5], top(G)[:5].clamp(min=0), rtol=1e-8, atol=1e-12)
        leading = torch.linalg.eigh(G)[1][:, -3:]
        span = torch.linalg.qr(torch.stack([report[name].eigenvector(j).flatten() for j in range(3)], 1))[0]
        assert measured.overlap == pytest.approx(float((leading.T @ span).square().sum() / 3), rel=1e-6)
        v = torch.randn(len(G), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        product = hessian_product(model, batches, model.get_submodule(name), loss)
        torch.testing.assert_close(product(v), G @ v, rtol=1e-8, atol=1e-10)


def test_layers_are_measured_in_one_pass_as_far_as_their_jacobians_may_be_held():
    class Counted(list):
        reads = 0

        def __iter__(self):
            self.reads += 1
            return super().__iter__()

    model, x, y = drawn(5)
    report, found = spectra(model, x, y, "mse", residuals=0), {}
    for held, reads in ((2**27, 1), (1, 2)):
        batches = Counted([(x, y)])
        found[held] = dict(measured_spectra(model, batches, report, ["0", "2"], steps=3, held=held))
        assert batches.reads == reads
    for name, layer in found[1].items():
        torch.testing.assert_close(layer.eigenvalues, found[2**27][name].eigenvalues)


@pytest.mark.slow
def test_many_classes_keep_the_leading_directions_only(generator):
    K = 24
    model, (x, y) = network(generator, K=K), data(generator, K=K, counts=[2] * K)
    for basis, kept in (("paired", 4 * K), ("class", K)):
        report = spectra(model, x, y, "ce", basis=basis, residuals=2)
        for name, layer in report.layers.items():
            exact = top(gauss_newton(model, x, name, "ce"))
            assert len(layer.eigenvalues) <= kept
            assert bool((layer.eigenvalues[: len(exact)] <= exact[: len(layer.eigenvalues)] + 1e-10).all())
            assert layer.basis == basis
            assert len(layer.eigenvalues_means) == 4 * K
        assert basis == "class" or report["2"].span.T.shape[1] == kept  # of 6 x 24 dimensions
    assert report.network is not None
    with pytest.raises(ValueError, match="too many for 24 classes"):
        spectra(model, x, y, "ce", basis="outer")


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["paired", "class"])
def test_very_many_classes_by_lanczos_and_by_one_direction_each(basis, generator, monkeypatch):
    """The paths for K > 64 and K > 200, with those limits lowered to what is quick."""
    monkeypatch.setattr(estimators, "LEADING", 20)
    for module in (estimators, spectra_module) if basis == "class" else ():
        monkeypatch.setattr(module, "CLASS_ONLY", 21)
    model, (x, y) = network(generator, K=22), data(generator, K=22, counts=[2] * 22)
    for name, layer in spectra(model, x, y, "mse", residuals=1).layers.items():
        exact = top(gauss_newton(model, x, name, "mse"))
        assert layer.basis == basis
        assert bool((layer.eigenvalues[:3] <= exact[:3] + 1e-9).all())
        assert float(layer.eigenvalues[0] / exact[0]) > 0.2
