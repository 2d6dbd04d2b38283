"""What users bring (spec section 9): odd data, odd models, stops half way, and what is refused."""

import gc
import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian
from torch.func import functional_call

from subspan.errors import ConfigError, DataError, NonFinite, TargetError
from subspan.linalg import Subspace
from subspan.theory import CollapseSpectraCallback, Sums, collapse_spectra, exact_layer_ggn, hessian_product
from subspan.theory.collapse.passes import checked_layers
from subspan.theory.collapse.statistics import accumulate, first_moments
from tests.theory.collapse_nets import data, gauss_newton, network, top

unbalanced = pytest.mark.filterwarnings("ignore:classes have")


@pytest.fixture
def case(generator):
    return network(generator), *data(generator)


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 1], "class 2 has no sample"),
        ([0, 1, 3], "label 3 is out of range"),
        ([0, -1, 2], "label -1 is out of"),
        ([0.0, 1.0, 2.0], "one class number per example"),
        ([[0], [1], [2]], "one class number per example"),
        ([0, 1], "3 here; got torch.int64 of shape"),
    ],
)
def test_bad_labels(case, labels, message):
    with pytest.raises(DataError, match=message):
        collapse_spectra(case[0], [(case[1][:3], torch.tensor(labels))])


def test_bad_layers_and_options(case):
    model, x, y = case
    for names, message in ((["7"], "match no layer"), (["1"], "match no layer")):
        with pytest.raises(TargetError, match=message):
            collapse_spectra(model, [(x, y)], names)
    for options in ({"loss": "hinge"}, {"estimator": "best"}, {"weighting": "none"}, {"basis": "full"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            collapse_spectra(model, [(x, y)], **options)
    with pytest.raises(ValueError, match="read 3 times"):
        collapse_spectra(model, iter([(x, y)]))
    for look in (collapse_spectra, lambda m, d: exact_layer_ggn(m, d, "2")):
        with pytest.raises(DataError, match="no batch"):
            look(model, [])
    with pytest.raises(DataError, match="no batch"):
        hessian_product(model, [], model[0], "ce")(torch.zeros(30))
    with pytest.raises(TargetError, match="no layer to look at"):
        collapse_spectra(model, [(x, y)], [])
    with pytest.raises(ValueError, match="k must be at least 1, got -1"):
        exact_layer_ggn(model, [(x, y)], "2", -1)
    with pytest.raises(DataError, match="at least 2 classes"):
        collapse_spectra(model, [(x, y)], forward_fn=lambda m, batch: (m(batch[0])[:, :1], 0 * batch[1]))
    with pytest.raises(ValueError, match="residuals must be at least 0, got -1"):
        collapse_spectra(model, [(x, y)], residuals=-1)
    with pytest.raises(DataError, match=r"is the loader a list of batches, \[\(x, y\)\]"):
        collapse_spectra(model, (x, y))
    with pytest.raises(ValueError, match="every must be"):
        CollapseSpectraCallback([], every=0)
    with pytest.raises(DataError, match="no labels"):
        collapse_spectra(model, [{"x": x}])


def test_logits_of_changing_number(case):
    model, x, y = case
    calls = []

    def forward(model, batch):
        calls.append(1)
        z = model(batch[0])
        return z if len(calls) == 1 else torch.cat([z, z], 1), batch[1]

    with pytest.raises(DataError, match="do all batches have the same classes"):
        collapse_spectra(model, [(x, y)] * 2, forward_fn=forward)


def test_features_that_are_not_finite_name_the_layer(case):
    model, x, y = case
    x = x.clone()
    x[1, 2] = math.nan
    with pytest.raises(NonFinite, match="input of 0 holds NaN"):
        collapse_spectra(model, [(x, y)])
    assert not model[0]._forward_hooks
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(NonFinite, match="Jacobian of 0 holds NaN"):
        collapse_spectra(model, [(case[1], y)])
    with pytest.raises(NonFinite, match="logits hold NaN"):
        collapse_spectra(model, [(case[1], y)], ["2"])


def test_shared_weights_are_refused_by_name_and_left_out_by_default():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.head(self.b(self.a(x).relu()).relu())

    model = Tied()
    with pytest.raises(TargetError, match=r"a shares its weight with b\.weight"):
        checked_layers(model, ["a"])
    assert list(checked_layers(model)) == ["head"]


# ------------------------------------------------------------------------------------------------------------- working


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_unbalanced_classes_one_sample_and_batches_of_one(generator, loss):
    model, (x, y) = network(generator), data(generator, counts=[1, 3, 2])
    with pytest.warns(UserWarning, match="classes have 1 to 3 samples"):
        report = collapse_spectra(model, [(a[None], b[None]) for a, b in zip(x, y, strict=True)], loss=loss)
    assert report.counts == (1, 3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = collapse_spectra(model, [(x, y)], loss=loss)
    for name, layer in report.layers.items():
        torch.testing.assert_close(layer.eigenvalues, whole[name].eigenvalues, rtol=1e-9, atol=1e-12)
        assert float(layer.eigenvalues[0]) <= float(top(gauss_newton(model, x, name, loss))[0])


def test_two_classes(generator):
    model, (x, y) = network(generator, K=2), data(generator, K=2)
    for loss, rank in (("mse", 4), ("ce", 2)):
        layer = collapse_spectra(model, [(x, y)], loss=loss)["2"]
        assert int((layer.eigenvalues > 1e-12).sum()) <= rank
        assert 0 < layer.trace_fraction <= 1 + 1e-9


def test_dependent_means_have_zero_eigenvalues_without_eigenvectors(case):
    model, x, y = case
    x = x[:, :1] * torch.ones(5, dtype=x.dtype)  # all class means on one line: rank at most K instead of K²
    for estimator in ("ritz", "means", "between"):
        layer = collapse_spectra(model, [(x, y)], loss="mse", estimator=estimator)["0"]
        assert len(layer.eigenvalues) == 9
        positive = int((layer.eigenvalues > 1e-12 * layer.eigenvalues[0]).sum())
        assert positive < 9
        assert bool((layer.eigenvalues[positive:] == 0).all()) or estimator == "ritz"
        layer.eigenvector(0)
        with pytest.raises(ValueError, match="is zero: it has no eigenvector"):
            layer.eigenvector(8)
        with pytest.raises(ValueError, match="there is no number 9"):
            layer.eigenvector(9)


def test_a_dead_network_has_nothing_to_find_and_says_so(case):
    model, x, y = case
    with torch.no_grad():
        model[0].weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = collapse_spectra(model, [(x, y)], loss="ce")
    layer = report["0"]
    assert layer.gradient.is_zero
    assert math.isnan(layer.gradient.fraction)
    assert math.isnan(layer.trace_ratio)
    assert float(layer.eigenvalues.sum()) == 0
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["gradient_fraction"] is None
    with pytest.raises(ValueError, match="read trace_ratio"):
        _ = collapse_spectra(model, [(x, y)], estimator="means", residuals=0)["0"].trace_fraction


def test_half_precision_is_near_to_double(case):
    model, x, y = case
    exact = collapse_spectra(model, [(x, y)])["2"].eigenvalues
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 2e-2)):
        layer = collapse_spectra(model.to(dtype), [(x.to(dtype), y)])["2"]
        assert layer.eigenvalues.dtype == torch.float64
        torch.testing.assert_close(layer.eigenvalues[:2], exact[:2], rtol=tolerance, atol=0)


def test_the_model_is_left_as_it_was(generator):
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = data(generator)
    model[0].weight.requires_grad_(False)
    model.train()
    model[2].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    first, second = (collapse_spectra(model, [(x, y)]) for _ in range(2))
    torch.testing.assert_close(first["0"].eigenvalues, second["0"].eigenvalues, rtol=0, atol=0)
    assert [m.training for m in model.modules()] == modes
    assert not model[0].weight.requires_grad
    assert model[4].weight.requires_grad
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_dicts_and_a_forward_function_of_ones_own(case):
    model, x, y = case

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, inputs):
            return type("Out", (), {"logits": self.net(inputs)})

    plain = collapse_spectra(model, [(x, y)])["2"].eigenvalues
    by_name = collapse_spectra(Named(), [{"inputs": x, "labels": y}])["net.2"].eigenvalues
    own = collapse_spectra(
        model, [{"a": x, "b": y.to(torch.int32)}], forward_fn=lambda m, batch: (m(batch["a"]), batch["b"])
    )
    torch.testing.assert_close(by_name, plain, rtol=0, atol=0)
    torch.testing.assert_close(own["2"].eigenvalues, plain, rtol=0, atol=0)


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("estimator", ["ritz", "between"])
def test_convolutions_sum_over_locations(loss, estimator, generator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)).double()
    x, y = torch.randn(9, 1, 4, 4, dtype=torch.float64), torch.arange(9) % 3
    layer = collapse_spectra(model, [(x[:4], y[:4]), (x[4:], y[4:])], ["0"], loss=loss, estimator=estimator)["0"]
    weight = model[0].weight.detach()
    J = jacobian(lambda w: functional_call(model, {"0.weight": w}, (x,)), weight).reshape(9, 3, -1)
    p = model(x).detach().softmax(1)
    R = torch.diag_embed(p) - p[:, :, None] * p[:, None, :] if loss == "ce" else torch.eye(3).double().expand(9, 3, 3)
    G = torch.einsum("bkp,bkl,blq->pq", J, R, J) / 9
    assert layer.shape == (2, 4)
    assert layer.trace == pytest.approx(float(G.trace()), rel=1e-9)
    assert bool((layer.eigenvalues[:8] <= top(G) + 1e-10).all())
    if estimator == "ritz":
        Q = Subspace.span(
            torch.stack([layer.directions.combine(c).flatten() for c in torch.eye(9).double()], 1), 1e-6
        ).Q
        torch.testing.assert_close(
            layer.eigenvalues[: Q.shape[1]], top(Q.T @ G @ Q), rtol=0, atol=1e-7 * float(layer.eigenvalues[0])
        )
    elif loss == "mse":
        means = torch.stack([J[y == c].mean(0) for c in range(3)])
        between = torch.einsum("ckp,ckq->pq", means, means) / 3
        torch.testing.assert_close(layer.eigenvalues[:8], top(between), rtol=0, atol=1e-9)
    for j, r in enumerate(layer.residuals):
        theta, u = layer.eigenvalues[j], layer.eigenvector(j).flatten()
        assert float(torch.linalg.norm(G @ u - theta * u) / theta) == pytest.approx(float(r), rel=1e-6)
    for method in ("dense", "lanczos"):
        found = exact_layer_ggn(model, [(x, y)], "0", 3, loss=loss, method=method).values
        torch.testing.assert_close(found, top(G)[:3])
    # with one patch per class, at all locations, the means are exact
    flat = x[:3, :, :1, :1].expand(-1, -1, 4, 4)[y]
    with pytest.warns(UserWarning, match="further approximation"):
        means = collapse_spectra(model, [(flat, y)], ["0"], loss=loss, estimator="means", residuals=0)["0"]
    exact = exact_layer_ggn(model, [(flat, y)], "0", 8, loss=loss).values
    torch.testing.assert_close(means.eigenvalues[:8], exact, rtol=0, atol=1e-10 * float(exact[0]))


def test_padding_changes_nothing(generator):
    model = nn.ModuleDict({"layer": nn.Linear(5, 6), "head": nn.Linear(6, 3)}).double()
    x, y = torch.randn(9, 4, 5, generator=generator, dtype=torch.float64), torch.arange(9) % 3

    def forward(model, batch):
        x, mask, y = batch
        return model["head"]((model["layer"](x).relu() * mask[..., None]).sum(1)), y

    whole = collapse_spectra(model, [(x, torch.ones(9, 4), y)], forward_fn=forward)
    padded = torch.cat([x, torch.full((9, 3, 5), 7.0)], 1)
    mask = torch.cat([torch.ones(9, 4), torch.zeros(9, 3)], 1)
    longer = collapse_spectra(model, [(padded, mask, y)], forward_fn=forward)
    for name, layer in whole.layers.items():
        torch.testing.assert_close(longer[name].eigenvalues, layer.eigenvalues, rtol=1e-9, atol=1e-12)
        assert longer[name].nc1 == pytest.approx(layer.nc1, rel=1e-9)


# ---------------------------------------------------------------------------------------------- streaming and resuming


@unbalanced
def test_two_halves_merged_are_one_pass_and_so_is_a_file(case, tmp_path):
    model, x, y = case
    layers = checked_layers(model)

    def run(*batches):
        return accumulate(model, layers, batches, lambda batch: first_moments(batch, "ce", "curvature"))

    whole, halves = run((x, y)), (run((x[:6], y[:6])), run((x[6:], y[6:])))
    halves[0].save(tmp_path / "half.safetensors")
    merged = Sums.load(tmp_path / "half.safetensors").merge(halves[1])
    assert (merged.batches, halves[0].batches) == (2, 1)
    assert merged.values.keys() == whole.values.keys()
    for name, value in whole.values.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-9)
        assert value.dtype == torch.float64


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 6))])
def test_a_pass_that_stopped_goes_on_where_it_was_saved(case, tmp_path, stop, monkeypatch):
    model, x, y = case
    load, places = Sums.load, []
    monkeypatch.setattr(Sums, "load", lambda path, place="nowhere": (places.append(place), load(path, place))[1])
    batches = list(zip(x.split(5), y.split(5), strict=True))
    expected = collapse_spectra(model, batches)
    told = []

    def progress(done, total):
        told.append((done, total))
        if len(told) == stop:
            raise Stop

    with pytest.raises(Stop):
        collapse_spectra(model, batches, state=tmp_path, save_every=0, progress=progress)
    assert not model[0]._forward_hooks
    before = len(told)
    again = collapse_spectra(model, batches, state=tmp_path, save_every=0, progress=progress)
    assert told[-1] == (9, 9)
    assert set(places) == {x.device}
    assert len(told) == before + 9 - stop  # what was saved is not done again
    for name, layer in again.layers.items():
        assert json.dumps(layer.to_dict()) == json.dumps(expected[name].to_dict())
    with pytest.raises(ConfigError, match="differs in loss; choose"):
        collapse_spectra(model, batches, state=tmp_path, loss="mse")
    with pytest.raises(ConfigError, match="differs in layers, residuals;"):
        collapse_spectra(model, batches, ["2"], state=tmp_path, residuals=1)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(ConfigError, match="differs in model"):
        collapse_spectra(model, batches, state=tmp_path)


@pytest.mark.slow
def test_no_graph_survives_a_batch(case):
    model, x, y = case
    alive = []

    def progress(done, total):
        gc.collect()
        alive.append(sum(isinstance(o, torch.Tensor) and o.grad_fn is not None for o in gc.get_objects()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects that gc lists warn when they are looked at
        collapse_spectra(model, [(x, y)] * 2, residuals=0, progress=progress)
    assert alive == [0, 0, 0, 0]


@unbalanced
def test_the_callback_keeps_reports_in_a_loop(case):
    model, x, y = case
    watch = CollapseSpectraCallback([(x, y)], ["2"], every=10, loss="mse", residuals=0)
    assert [step for step in range(1, 31) if watch(model, step) is not None] == [1, 10, 20, 30]
    assert list(watch.history) == [1, 10, 20, 30]


@pytest.mark.slow
def test_the_callback_makes_a_table_and_works_under_the_trainer(case):
    model, x, y = case
    watch = CollapseSpectraCallback([(x, y)], ["2"], every=10, loss="mse", residuals=0)
    assert watch(model, 10) is not None
    table = watch.to_pandas()
    assert table.loc[(10, "2"), "top"] == pytest.approx(float(watch.history[10]["2"].eigenvalues[0]))
    state = type("State", (), {"global_step": 40})
    watch.for_trainer().on_step_end(None, state, None, model=model)
    assert 40 in watch.history
