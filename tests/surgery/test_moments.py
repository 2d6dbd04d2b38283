"""Streaming second moments: exact against per-example autograd, whatever the batches, masks and hooks do."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from subspan.errors import DataError, NonFinite, TargetError
from subspan.linalg import DenseCovariance, LowRank, SpikedCovariance, Subspace
from subspan.surgery import Bernoulli, FisherStats, Gaussian, collect_fisher, weight_matrix
from subspan.surgery.moments.collect import _siblings
from subspan.surgery.moments.stream import Layer, SecondMoment
from tests.surgery.processes import collect_part, labelled, mlp

DOUBLE = torch.float64


def collect(model, data, targets=("0", "2"), **options) -> FisherStats:
    options = {"dtype": DOUBLE, "converged": None, **options}
    return collect_fisher(model, data, list(targets), **options)


def whole(c) -> Tensor:
    assert isinstance(c, DenseCovariance)
    return c.matrix


def same(a: FisherStats, b: FisherStats, tol: float = 1e-10) -> None:
    assert a.layers.keys() == b.layers.keys()
    for name, layer in a.layers.items():
        other = b.layers[name]
        for x, y in [(whole(layer.inputs), whole(other.inputs)), (whole(layer.outputs), whole(other.outputs))]:
            torch.testing.assert_close(x, y, rtol=tol, atol=tol * float(y.trace()))
        torch.testing.assert_close(layer.gradient, other.gradient, rtol=tol, atol=tol)
        assert layer.positions == other.positions


def output_gradients(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Each layer's (x, g) rows, one example at a time, by plain autograd."""
    rows: dict[str, list[tuple[Tensor, Tensor]]] = {"0": [], "2": []}
    for i in range(len(x)):
        h = model[0](x[i])
        a = model[1](h)
        out = model[2](a)
        loss = nn.functional.cross_entropy(out[None], y[i : i + 1])
        g0, g2 = torch.autograd.grad(loss, [h, out])
        rows["0"].append((x[i], g0))
        rows["2"].append((a.detach(), g2))
    return {name: tuple(torch.stack(part) for part in zip(*r, strict=True)) for name, r in rows.items()}


# ------------------------------------------------------------------------------------------------ what is collected


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 9))
def test_moments_are_those_of_per_example_gradients(seed, n):
    model, (x, y) = mlp(seed), labelled(n, seed)
    stats = collect(model, [(x, y)])
    for name, (rows, g) in output_gradients(model, x, y).items():
        layer = stats.layers[name]
        torch.testing.assert_close(whole(layer.inputs), rows.mT @ rows / n)
        torch.testing.assert_close(whole(layer.outputs), g.mT @ g / n)
        torch.testing.assert_close(layer.gradient, g.mT @ rows / n)
        assert layer.positions == n


def test_gbar_is_the_gradient_of_the_mean_loss():
    model, (x, y) = mlp(), labelled()
    stats = collect(model, [(x, y)])
    nn.functional.cross_entropy(model(x), y).backward()
    for name in ("0", "2"):
        torch.testing.assert_close(stats.layers[name].gradient, model.get_submodule(name).weight.grad)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 7))
def test_t11_batches_do_not_matter(seed, cut):
    model, (x, y) = mlp(seed), labelled(8, seed)
    one = collect(model, [(x, y)])
    same(collect(model, [(x[:cut], y[:cut]), (x[cut:], y[cut:])]), one)
    same(collect(model, [(x[i : i + 1], y[i : i + 1]) for i in range(8)]), one)


def test_t10_scale_and_repetition_change_no_direction():
    model, (x, y) = mlp(), labelled()
    one = collect(model, [(x, y)])
    twice = collect(model, [(x, y), (x, y)])
    scaled = collect(
        model, [(x, y)], loss_fn=lambda out, b: 7 * nn.functional.cross_entropy(out, b[1], reduction="sum")
    )
    for name, layer in one.layers.items():
        for other in (twice.layers[name], scaled.layers[name]):
            for side in ("inputs", "outputs"):
                a, b = (Subspace(getattr(s, side).leading(2).vectors) for s in (layer, other))
                assert a.principal_angles(b).max() < 1e-6
        torch.testing.assert_close(whole(scaled.layers[name].outputs), 49 * whole(layer.outputs))


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_t13_moments_are_psd_with_the_trace_of_mean_squares(seed):
    model, (x, y) = mlp(seed, (6, 9, 4)), labelled(5, seed)
    stats = collect(model, [(x, y)], dtype=torch.float32)
    for layer in stats.layers.values():
        for c in (layer.inputs, layer.outputs):
            torch.testing.assert_close(whole(c), whole(c).mT)
            values = torch.linalg.eigvalsh(whole(c))
            assert values[0] >= -1e-6 * values[-1]
    mean_square = x.square().sum(1).mean().float()
    torch.testing.assert_close(stats.layers["0"].inputs.trace, mean_square, rtol=1e-6, atol=0)


def test_exact_fisher_sums_over_the_classes():
    model, (x, y) = mlp(), labelled(5)
    stats = collect(model, [(x[:2], y[:2]), (x[2:], y[2:])], fisher="exact")
    p = model(x).softmax(-1).detach()
    expected = torch.zeros(9, 9, dtype=DOUBLE)
    for k in range(4):
        g = output_gradients(model, x, torch.full_like(y, k))["0"][1]
        expected += (p[:, k : k + 1] * g).mT @ g
    torch.testing.assert_close(whole(stats.layers["0"].outputs), expected / 5)
    assert stats.layers["0"].positions == 5
    torch.testing.assert_close(stats.layers["0"].gradient, collect(model, [(x, y)]).layers["0"].gradient)


def test_monte_carlo_fisher_approaches_the_exact_one(generator):
    model, (x, y) = mlp(), labelled(4)
    exact = collect(model, [(x, y)], fisher="exact").layers["2"].outputs
    many = [(x.repeat(500, 1), y.repeat(500))] * 2
    mc = collect(model, many, fisher="mc", n_samples=10**9, generator=generator).layers["2"].outputs
    torch.testing.assert_close(whole(mc), whole(exact), rtol=0, atol=0.03 * float(exact.trace))


def test_t2_monte_carlo_fisher_of_gaussian_regression(generator):
    """Exact Fisher S_X ⊗ I / v: with labels drawn from the model S_Y tends to I / v."""
    torch.manual_seed(0)
    model, v = nn.Sequential(nn.Linear(5, 3)).double(), 0.25
    x = torch.randn(4000, 5, dtype=DOUBLE, generator=generator)
    stats = collect(
        model, [x[:2000], x[2000:]], ["0"], fisher="mc", loss_fn=Gaussian(v), n_samples=10**9, generator=generator
    )
    layer = stats.layers["0"]
    torch.testing.assert_close(whole(layer.outputs), torch.eye(3, dtype=DOUBLE) / v, rtol=0, atol=0.1 / v)
    torch.testing.assert_close(whole(layer.inputs), x.mT @ x / 4000)
    assert layer.gradient is None  # there were no labels


def test_regression_and_multi_label_losses():
    model, (x, _) = mlp(), labelled()
    targets = torch.rand(8, 4, dtype=DOUBLE)
    g = model(x).detach() - targets
    torch.testing.assert_close(whole(collect(model, [(x, targets)]).layers["2"].outputs), g.mT @ g / 8)
    b = model(x).detach().sigmoid() - targets.round()
    found = collect(model, [(x, targets.round())], loss_fn=Bernoulli()).layers["2"].outputs
    torch.testing.assert_close(whole(found), b.mT @ b / 8)


def test_a_model_that_returns_only_its_mean_loss():
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor, labels: Tensor | None = None):
            out = type("Out", (), {})()
            out.loss = None if labels is None else nn.functional.cross_entropy(self.body(x), labels)
            return out

    x, y = labelled()
    stats = collect(Mean(), [{"x": x, "labels": y}], ["body.0", "body.2"])
    plain = collect(mlp(), [(x, y)])
    torch.testing.assert_close(whole(stats.layers["body.0"].outputs), whole(plain.layers["0"].outputs))


# ------------------------------------------------------------------------------------------------ language models


def llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).double().eval()


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def sentences(lengths: tuple[int, ...] = (7, 4, 6), pad_to: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    width = pad_to or max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, n in zip(ids, lengths, strict=True):
        row[:n] = torch.randint(1, 40, (n,), generator=g)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_t11_padding_changes_nothing():
    model = llama()
    short = collect(model, [sentences()], ALL)
    same(collect(model, [sentences(pad_to=12)], ALL), short, 1e-8)
    one = {k: v[:1] for k, v in sentences().items()}
    rest = {k: v[1:] for k, v in sentences(pad_to=9).items()}
    same(collect(model, [one, rest], ALL), short, 1e-8)
    assert short.layers["model.layers.0.self_attn.q_proj"].positions == 7 + 4 + 6


def test_causal_labels_are_shifted_like_the_models_own_loss():
    model, batch = llama(), sentences()
    stats = collect(model, [batch], ALL)
    counted = (batch["labels"][:, 1:] != -100).sum()
    (model(**batch).loss * counted).backward()
    for name, layer in stats.layers.items():
        torch.testing.assert_close(layer.gradient * layer.positions, model.get_submodule(name).weight.grad)


@pytest.mark.parametrize("positions", ["attended", "labelled"])
def test_positions_counted_when_a_prompt_is_masked(positions):
    """Gradient flows back into the prompt through attention: only all attended positions give the weight's gradient."""
    model, batch = llama(), sentences()
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, :3] = -100
    stats = collect(model, [batch], ["v_proj"], positions=positions)
    layer = stats.layers["model.layers.0.self_attn.v_proj"]
    predicting = int((batch["labels"][:, 1:] != -100).sum())
    (model(**batch).loss * predicting).backward()
    grad = model.model.layers[0].self_attn.v_proj.weight.grad
    close = torch.allclose(layer.gradient * layer.positions, grad)
    assert (layer.positions, close) == ((17, True) if positions == "attended" else (predicting, False))


def test_layers_that_read_one_tensor_share_one_moment():
    stats = collect(llama(), [sentences(), sentences(seed=1)], ALL)
    layers = {name.removeprefix("model.layers."): layer for name, layer in stats.layers.items()}
    q, k, v, o = (layers[f"0.self_attn.{x}_proj"].inputs for x in "qkvo")
    assert q is k is v
    assert q is not o
    assert layers["0.mlp.gate_proj"].inputs is layers["0.mlp.up_proj"].inputs
    assert q is not layers["1.self_attn.q_proj"].inputs


def test_sharing_ends_where_inputs_part():
    """Two layers read the same tensor in the first batch only."""

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
            self.part = False

        def forward(self, x: Tensor) -> Tensor:
            out = self.a(x) + self.b(2 * x if self.part else x)
            self.part = True
            return out

    torch.manual_seed(0)
    x, y = labelled()
    stats = collect(Forked(), [(x[:4], y[:4]), (x[4:], y[4:])], ["a", "b"])
    torch.testing.assert_close(whole(stats.layers["a"].inputs), x.mT @ x / 8)
    expected = (x[:4].mT @ x[:4] + 4 * x[4:].mT @ x[4:]) / 8
    torch.testing.assert_close(whole(stats.layers["b"].inputs), expected)


def test_a_layer_called_twice_counts_both_calls():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.head = nn.Linear(6, 6).double(), nn.Linear(6, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.f(torch.tanh(self.f(x)))))

    torch.manual_seed(0)
    model, (x, y) = Twice(), labelled()
    stats = collect(model, [(x, y)], ["f"])
    h = torch.tanh(model.f(x)).detach()
    torch.testing.assert_close(whole(stats.layers["f"].inputs), (x.mT @ x + h.mT @ h) / 16)
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    torch.testing.assert_close(stats.layers["f"].gradient * 16, model.f.weight.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_once(reentrant):
    plain = collect(llama(), [sentences()], ALL)
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()  # transformers checkpoints while training only
    for module in model.modules():  # dropout is zero here, so evaluation changes nothing but the checkpointing
        module.eval = lambda: None
        module.train = lambda mode=True: None
    same(collect(model, [sentences()], ALL), plain, 1e-8)


def test_conv1d_and_encoder_decoders():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=16)).double().eval()
    stats = collect(model, [sentences()], ["c_attn", "c_proj"])
    batch = sentences()
    (model(**batch).loss * (batch["labels"][:, 1:] != -100).sum()).backward()
    for name, layer in stats.layers.items():
        assert layer.shape == tuple(weight_matrix(model.get_submodule(name)).shape)
        torch.testing.assert_close(layer.gradient * layer.positions, model.get_submodule(name).weight.grad.mT)

    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=24, d_kv=8, num_layers=1, num_heads=2, vocab_size=40))
    t5 = t5.double().eval()
    t5.config.decoder_start_token_id = 0
    stats = collect(t5, [{k: v for k, v in sentences().items() if k != "attention_mask"}], ["q", "wo"])
    (t5(**{k: v for k, v in sentences().items() if k != "attention_mask"}).loss * 17).backward()
    layer = stats.layers["decoder.block.0.layer.1.EncDecAttention.q"]
    grad = t5.decoder.block[0].layer[1].EncDecAttention.q.weight.grad
    torch.testing.assert_close(layer.gradient * layer.positions, grad)


@pytest.mark.parametrize("padding", [0, "same"])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_convolutions_unfold_to_the_matrix_of_their_weight(padding, mode):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, (3, 2), padding=padding, padding_mode=mode)
    model = nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(5, 2, 6, 6)
    model(x)
    model = model.double()
    x, y = x.double(), torch.randint(4, (5,))
    stats = collect(model, [(x, y)], ["0"])
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    layer = stats.layers["0"]
    assert layer.shape == (3, 12)
    torch.testing.assert_close(layer.gradient * layer.positions, conv.weight.grad.flatten(1))


def test_reduce_sum_makes_one_row_per_example():
    model, batch = llama(), sentences()
    stats = collect(model, [batch], ["down_proj"], reduce="sum")
    assert stats.layers["model.layers.1.mlp.down_proj"].positions == 3
    again = collect(model, [sentences(pad_to=10)], ["down_proj"], reduce="sum")
    same(stats, again, 1e-8)


# ------------------------------------------------------------------------------------------------ sketches, passes


def test_wide_layers_keep_a_sketch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(120, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(120, 120, generator=g, dtype=DOUBLE)).Q
    x = torch.randn(400, 120, generator=g, dtype=DOUBLE) * 0.7 ** torch.arange(120) @ basis.mT
    y = torch.randint(4, (400,), generator=g)
    dense = collect(model, [(x, y)], ["0"], n_samples=400)
    data = [(x[:100], y[:100]), (x[100:], y[100:])]
    sketch = collect(model, data, ["0"], n_samples=400, max_dim=60, rank=8)
    a, b = dense.layers["0"].inputs, sketch.layers["0"].inputs
    assert isinstance(b, SpikedCovariance)
    assert b.vectors.shape == (120, 48)
    torch.testing.assert_close(b.trace, a.trace)
    assert Subspace(a.leading(8).vectors).principal_angles(Subspace(b.leading(8).vectors)).max() < 1e-3
    assert isinstance(sketch.layers["0"].outputs, DenseCovariance)


def test_layers_per_pass_keeps_leading_eigenpairs_only():
    model, data = llama(), [sentences(), sentences(seed=1)]
    whole_stats = collect(model, data, ALL, rank=1)
    stats = collect(model, data, ALL, rank=1, layers_per_pass=3)
    assert stats.layers.keys() == whole_stats.layers.keys()
    for name, layer in stats.layers.items():
        full = whole_stats.layers[name]
        assert isinstance(layer.inputs, SpikedCovariance)
        torch.testing.assert_close(layer.inputs.trace, full.inputs.trace)
        a, b = full.outputs.leading(2), layer.outputs.leading(2)
        torch.testing.assert_close(a.values, b.values)
        v = full.inputs.leading(2).vectors
        core = a.vectors.mT @ full.gradient @ v
        torch.testing.assert_close(a.vectors.mT @ layer.gradient.dense() @ v, core)


def test_t19_corrected_energies_are_measured(generator):
    """Lam >= 0, sums to the Fisher trace in the span, and equals l^Y l^X when x and g are independent."""
    model, (x, y) = mlp(), labelled(64)
    stats = collect(model, [(x, y)], rank=4, corrected=True)
    rows = output_gradients(model, x, y)
    for name, layer in stats.layers.items():
        c = layer.corrected
        r, g = rows[name]
        expected = (g @ c.U).square().mT @ (r @ c.V).square() / 64
        torch.testing.assert_close(c.energy, expected)
        assert (c.energy >= 0).all()
        span = torch.einsum("ti,tj->tij", g @ c.U, r @ c.V).square().sum() / 64
        torch.testing.assert_close(c.energy.sum(), span)


def test_t19_independent_inputs_and_gradients_give_a_small_kfac_error(generator):
    """g does not depend on x: labels and logits come from the bias alone."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(5, 4).double()
            nn.init.zeros_(self.f.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.f(x)

    x = torch.randn(100_000, 5, generator=generator, dtype=DOUBLE)
    y = torch.randint(4, (100_000,), generator=generator)
    data = [(x[i : i + 10_000], y[i : i + 10_000]) for i in range(0, 100_000, 10_000)]
    stats = collect(Biased(), data, ["f"], n_samples=10**6, rank=4, corrected=True)
    assert stats.layers["f"].corrected.kfac_error < 0.05
    dependent = collect(mlp(), [labelled(256)], n_samples=256, rank=4, corrected=True)
    assert dependent.layers["0"].corrected.kfac_error > 0.05


def test_early_stop_when_the_leading_subspaces_have_settled():
    model, (x, y) = mlp(), labelled(8)
    endless = [(x, y)] * 100
    stopped = collect(model, endless, n_samples=800, converged=0.99, rank=2)
    assert stopped.examples == 16  # the second batch repeats the first
    assert collect(model, endless, n_samples=800, converged=None).examples == 800
    g = torch.Generator().manual_seed(0)
    fresh = [(torch.randn(2, 6, generator=g, dtype=DOUBLE), torch.randint(4, (2,), generator=g)) for _ in range(4)]
    assert collect(model, fresh, n_samples=8, converged=0.99, rank=3).examples == 8


def test_the_pass_ends_at_n_samples_and_at_the_batch_cap():
    model, (x, y) = mlp(), labelled(2)
    assert collect(model, [(x, y)] * 20, n_samples=5).examples == 6
    assert collect(model, [(x, y)] * 300, n_samples=10**6).examples == 256


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    "options", [{}, {"max_dim": 5, "rank": 1}, {"layers_per_pass": 1, "rank": 1}, {"corrected": True}]
)
def test_statistics_survive_their_file(tmp_path, options):
    stats = collect(mlp(), [labelled()], public=True, **options)
    stats.save(tmp_path / "stats.safetensors")
    loaded = FisherStats.load(tmp_path / "stats.safetensors")
    for key in ("fingerprint", "fisher", "examples", "public", "parameters"):
        assert getattr(loaded, key) == getattr(stats, key)
    for name, layer in stats.layers.items():
        other = loaded.layers[name]
        torch.testing.assert_close(other.inputs.dense(), layer.inputs.dense(), rtol=0, atol=0)
        torch.testing.assert_close(other.outputs.dense(), layer.outputs.dense(), rtol=0, atol=0)
        a, b = (g.dense() if isinstance(g, LowRank) else g for g in (layer.gradient, other.gradient))
        torch.testing.assert_close(a, b)
        assert (layer.corrected is None) == (other.corrected is None)
        if layer.corrected is not None:
            torch.testing.assert_close(other.corrected.energy, layer.corrected.energy)


def test_shared_moments_are_stored_once(tmp_path):
    from safetensors import safe_open

    collect(llama(), [sentences()], ["q_proj", "k_proj", "v_proj"]).save(tmp_path / "s.safetensors")
    with safe_open(tmp_path / "s.safetensors", "pt") as file:
        assert sum(key.startswith("covariance.") for key in file.keys()) == 2 * (1 + 3)  # noqa: SIM118
    loaded = FisherStats.load(tmp_path / "s.safetensors")
    layers = list(loaded.layers.values())
    assert layers[0].inputs is layers[1].inputs


def test_another_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match="holds no Fisher statistics"):
        FisherStats.load(tmp_path / "other.safetensors")


# ------------------------------------------------------------------------------------------------ leaving no trace


def state(model: nn.Module) -> tuple:
    hooks = sum(len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())
    return (
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [p.grad is None for p in model.parameters()],
        hooks,
        torch.get_rng_state().tolist(),
    )


class Broken(Exception):
    pass


@pytest.mark.parametrize("fail", [None, "loader", "loss", "backward"])
def test_t20_everything_is_put_back(fail):
    model = llama().train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)

    def loader():
        yield sentences()
        torch.rand(3)  # a loader that uses the global generator
        if fail == "loader":
            raise Broken
        yield sentences(seed=1)

    def loss(outputs, batch):
        if fail == "loss":
            raise Broken
        value = outputs.logits.square().sum()
        if fail == "backward":
            value.register_hook(lambda g: (_ for _ in ()).throw(Broken()))
        return value

    before = state(model)
    data = loader()
    if fail is None:
        collect(model, data, ["q_proj"], loss_fn=loss)
    else:
        with pytest.raises(Broken):
            collect(model, data, ["q_proj"], loss_fn=loss)
    assert state(model) == before


def test_existing_gradients_are_left_alone():
    model, (x, y) = mlp(), labelled()
    nn.functional.cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    collect(model, [(x, y)])
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


def test_a_frozen_base_and_no_grad_callers_work():
    model, (x, y) = mlp(), labelled()
    plain = collect(model, [(x, y)])
    model.requires_grad_(False)
    with torch.no_grad():
        same(collect(model, [(x, y)]), plain)


def test_frozen_batch_norm_is_not_updated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double().train()
    before = model[1].running_mean.clone()
    collect(model, [labelled()])
    assert torch.equal(model[1].running_mean, before)


# ------------------------------------------------------------------------------------------------ refusals and rescue


def test_half_precision_models_have_float32_statistics():
    x, y = labelled()
    for dtype in (torch.bfloat16, torch.float16):
        model = mlp().to(dtype)
        stats = collect(model, [(x.to(dtype), y)], dtype=torch.float32)
        reference = collect(copy.deepcopy(model).double(), [(x.to(dtype).double(), y)])
        for name in ("0", "2"):
            found = whole(stats.layers[name].outputs)
            assert found.dtype == torch.float32
            expected = whole(reference.layers[name].outputs).float()
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02 * float(expected.trace()))


def test_fp16_gradients_do_not_underflow():
    """Confident predictions give gradients near 1e-7, which fp16 holds only after scaling."""
    model = nn.Sequential(nn.Linear(6, 4)).half()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([15.5, 0, 0, 0]))
    x = torch.ones(4, 6).half()
    stats = collect(model, [(x, torch.zeros(4, dtype=torch.long))], ["0"], dtype=torch.float32)
    g = torch.tensor([15.5, 0, 0, 0]).softmax(-1) - torch.tensor([1.0, 0, 0, 0])
    torch.testing.assert_close(whole(stats.layers["0"].outputs).diagonal(), g.square(), rtol=0.05, atol=0)


def test_an_empty_loader_is_refused():
    with pytest.raises(DataError, match="it gave no batch"):
        collect(mlp(), [])


def test_missing_labels_are_refused():
    with pytest.raises(DataError, match="hold no labels"):
        collect(mlp(), [labelled()[0]])


def test_layers_without_a_path_to_the_loss_are_listed():
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.lost = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            self.lost(x)
            return self.used(x)

    with pytest.raises(TargetError, match=r"sends no gradient to 1 target layer.*: lost;"):
        collect(Detached(), [labelled()], ["used", "lost"])
    model = mlp()
    with pytest.raises(TargetError, match="sends no gradient"):
        collect(model, [labelled()], loss_fn=lambda out, batch: torch.zeros((), dtype=DOUBLE))


@pytest.mark.parametrize("where", ["input", "gradient"])
def test_non_finite_values_name_the_layer_and_the_batch(where):
    model, (x, y) = mlp(), labelled()
    bad = x.clone()
    if where == "input":
        bad[3, 2] = float("inf")
        data = [(x, y), (bad, y)]
        with pytest.raises(NonFinite, match="batch 1"):
            collect(model, data)
    else:

        def loss(out, batch):
            return nn.functional.cross_entropy(out, batch[1], reduction="sum") + (0 * out).sqrt().sum()

        with pytest.raises(NonFinite, match="the gradient at 2 is not finite in calibration batch 0"):
            collect(model, [(x, y)], loss_fn=loss)


def test_an_infinite_input_that_the_loss_does_not_see_is_still_found():
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return torch.nan_to_num(self.a(x), 0.0, 0.0, 0.0)

    x, y = labelled()
    x[0, 0] = float("nan")
    with pytest.raises(NonFinite, match="the input of a is not finite in calibration batch 0"):
        collect(Clamped(), [(x, y)], ["a"])


def test_an_input_changed_in_place_is_noticed():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            out = self.a(x)
            x.add_(1)
            return out

    with pytest.raises(TargetError, match="the input of a was changed in place"):
        collect(InPlace(), [labelled()], ["a"])


def test_inplace_activations_are_fine():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 4)).double()
    plain = nn.Sequential(model[0], nn.ReLU(), model[2])
    same(collect(model, [labelled()]), collect(plain, [labelled()]))


def test_exact_fisher_needs_few_classes():
    model = mlp(sizes=(6, 9, 17))
    with pytest.raises(ValueError, match=r"at most 16, but the logits have shape \(8, 17\); use fisher='mc'"):
        collect(model, [labelled()], fisher="exact")


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="loss_fn is a plain function"):
        collect(mlp(), [labelled()], fisher="mc", loss_fn=lambda o, b: o.sum())
    with pytest.raises(ValueError, match="the dataloader is an iterator"):
        collect(mlp(), iter([labelled()]), corrected=True)
    with pytest.raises(TargetError, match="match no layer"):
        collect(mlp(), [labelled()], ["nothing"])
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(TargetError, match="meta device"):
        collect(meta, [labelled()], ["0"])


def test_a_peft_model_is_refused():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(mlp(), LoraConfig(target_modules=["0"]))
    with pytest.raises(TargetError, match="before get_peft_model"):
        collect(model, [labelled()], ["0"])


def test_packed_attention_is_left_out_with_a_message():
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None]
            return self.head(self.attn(x, x, x)[0][:, 0])

    torch.manual_seed(0)
    model = Attending().double()
    with pytest.warns(UserWarning, match=r"attn\.out_proj: nn\.MultiheadAttention never calls"):
        stats = collect(model, [labelled()], ["out_proj", "head"])
    assert list(stats.layers) == ["head"]
    with pytest.warns(UserWarning, match="never calls"), pytest.raises(TargetError, match="no target layer is left"):
        collect(model, [labelled()], ["out_proj"])


# ------------------------------------------------------------------------------------------------ experts


class Experts(nn.Module):
    """Tokens go to one of three experts; the last one sees few or none."""

    def __init__(self, share: tuple[int, ...]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 4).double() for _ in share)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, list(self.share))
        return torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True) if len(p)])


def test_starved_experts_are_shrunk_towards_their_siblings():
    torch.manual_seed(0)
    model, (x, y) = Experts((30, 30, 4)), labelled(64)
    with pytest.warns(UserWarning, match=r"1 layers saw fewer than 8 tokens \(experts\.2"):
        stats = collect(model, [(x, y)], ["0", "1", "2"], rank=2)
    own, pooled = x[60:].mT @ x[60:] / 4, x.mT @ x / 64
    torch.testing.assert_close(whole(stats.layers["experts.2"].inputs), 0.5 * own + 0.5 * pooled)
    torch.testing.assert_close(whole(stats.layers["experts.0"].inputs), x[:30].mT @ x[:30] / 30)


def test_an_expert_that_saw_nothing_takes_its_siblings_mean():
    torch.manual_seed(0)
    model, (x, y) = Experts((30, 34, 0)), labelled(64)
    with pytest.warns(UserWarning, match="shrunk"):
        stats = collect(model, [(x, y)], ["0", "1", "2"], rank=2)
    torch.testing.assert_close(whole(stats.layers["experts.2"].inputs), x.mT @ x / 64)
    assert stats.layers["experts.2"].positions == 0
    assert stats.layers["experts.2"].gradient.abs().max() == 0


def test_layers_that_never_ran_are_listed():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.idle = nn.Linear(6, 4).double(), nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    with pytest.raises(TargetError, match="never ran on the calibration data: idle"):
        collect(Idle(), [labelled()], ["a", "idle"])


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("model.layers.1.mlp.experts.12.w1", "model.layers.1.mlp.experts.#.w1"),
        ("block.0.layer.1.mlp.experts.expert_3.wi", "block.0.layer.1.mlp.experts.expert_#.wi"),
        ("experts.2", "experts.#"),
        ("model.layers.1.mlp.shared_expert.up_proj", "model.layers.1.mlp.shared_expert.up_proj"),
        ("model.layers.1.q_proj", "model.layers.1.q_proj"),
        ("experts_of_old.1.q_proj", "experts_of_old.1.q_proj"),
    ],
)
def test_only_experts_have_siblings(name, family):
    layer = Layer(name, nn.Linear(3, 2), (2, 3), SecondMoment(2, None, DOUBLE, torch.device("cpu")), None)
    assert _siblings(layer) == (family, (2, 3))


def test_a_dense_block_that_never_ran_is_an_error():
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(6, 6).double()}) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2]["q"](torch.tanh(self.layers[0]["q"](x)))

    with pytest.raises(TargetError, match=r"never ran on the calibration data: layers\.1\.q$"):
        collect(Skipping(), [labelled()], ["q"])


# ------------------------------------------------------------------------------------------------ many processes


@pytest.mark.slow
def test_processes_sum_their_moments(tmp_path):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(s.getsockname()[1]))
    torch.multiprocessing.spawn(collect_part, (str(tmp_path),), nprocs=2)
    same(FisherStats.load(tmp_path / "stats.safetensors"), collect(mlp(), [labelled()]))
    sketch = FisherStats.load(tmp_path / "sketch.safetensors").layers["0"]
    alone = collect(mlp(), [labelled()], max_dim=5, rank=1, corrected=True).layers["0"]
    torch.testing.assert_close(sketch.inputs.dense(), alone.inputs.dense())
    torch.testing.assert_close(sketch.corrected.energy, alone.corrected.energy)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
