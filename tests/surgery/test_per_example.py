"""Per-example gradients against one backward pass per example."""

import copy
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from subspan.errors import TargetError
from subspan.surgery.per_example import (
    ExampleGradients,
    ExampleRecorder,
    Ghost,
    LayerGradient,
    Stacked,
    add_calls,
    as_stored,
    batch_statistics_layers,
    example_gradients,
    mixes_examples,
)

D = torch.float64


def record(model: nn.Module, names: list[str], losses: Tensor, recorder: ExampleRecorder) -> dict[str, Tensor]:
    """Dense per-example weight gradients by layer, in the stored orientation."""
    got: dict[str, ExampleGradients] = {}

    def consume(name: str, gradient: LayerGradient) -> None:
        got[name] = add_calls(got.get(name), example_gradients(gradient.D, gradient.X))

    recorder.backward(losses, consume)
    return {name: torch.stack([as_stored(model.get_submodule(name), g) for g in got[name].dense()]) for name in names}


def one_by_one(model: nn.Module, names: list[str], x: Tensor) -> dict[str, Tensor]:
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        for name in names:
            rows[name].append(model.get_submodule(name).weight.grad.clone())
    model.zero_grad()
    return {name: torch.stack(grads) for name, grads in rows.items()}


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


class Tokens(nn.Module):
    """Sequence layers, a strided convolution, GPT-2's Conv1D and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(1, 1))
        self.up = nn.Linear(3, 12)
        self.gpt = Conv1D(5, 12)
        self.twice = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).flatten(2).mT  # b T 3
        h = self.gpt(torch.tanh(self.up(h)))
        return self.twice(torch.tanh(self.twice(h)))


NAMES = ["conv", "up", "gpt", "twice"]


@pytest.fixture
def tokens() -> tuple[Tokens, Tensor]:
    torch.manual_seed(0)
    return Tokens().to(D), torch.randn(4, 2, 5, 7, dtype=D)


def test_every_layer_kind_equals_one_backward_per_example(tokens: tuple[Tokens, Tensor]) -> None:
    model, x = tokens
    expected = one_by_one(model, NAMES, x)
    recorder = ExampleRecorder({n: model.get_submodule(n) for n in NAMES})
    got = record(model, NAMES, losses_of(model, x), recorder)
    for name in NAMES:
        torch.testing.assert_close(got[name], expected[name])
    assert all(p.grad is None for p in model.parameters())


def test_checkpointed_forward_gives_the_same(tokens: tuple[Tokens, Tensor]) -> None:
    model, x = tokens
    recorder = ExampleRecorder({n: model.get_submodule(n) for n in NAMES})
    plain = record(model, NAMES, losses_of(model, x), recorder)
    out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=False)
    again = record(model, NAMES, out.square().flatten(1).sum(1), recorder)
    for name in NAMES:
        torch.testing.assert_close(again[name], plain[name])


def test_two_forwards_may_be_in_flight(tokens: tuple[Tokens, Tensor]) -> None:
    model, x = tokens
    recorder = ExampleRecorder({n: model.get_submodule(n) for n in NAMES})
    alone = [record(model, NAMES, losses_of(model, part), recorder) for part in (x, -x)]
    first, second = losses_of(model, x), losses_of(model, -x)
    for losses, expected in zip((first, second), alone, strict=True):
        got = record(model, NAMES, losses, recorder)
        for name in NAMES:
            torch.testing.assert_close(got[name], expected[name])
    # one loss of two forwards: its gradient is the sum
    got = record(model, NAMES, losses_of(model, x) + losses_of(model, -x), recorder)
    torch.testing.assert_close(got["gpt"], alone[0]["gpt"] + alone[1]["gpt"])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_ghost_and_stacked_forms_agree(b: int, t: int, p: int, q: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    left, right = torch.randn(b, t, p, generator=g, dtype=D), torch.randn(b, t, q, generator=g, dtype=D)
    weights, basis = torch.rand(b, generator=g, dtype=D), torch.randn(p, 2, generator=g, dtype=D)
    dense = torch.einsum("btp,btq->bpq", left, right)
    for form in (Ghost(left, right), Stacked(left.mT @ right), example_gradients(left, right)):
        torch.testing.assert_close(form.dense(), dense)
        torch.testing.assert_close(form.norm_sq(), dense.square().sum((1, 2)))
        torch.testing.assert_close(form.weighted_sum(weights), torch.einsum("b,bpq->pq", weights, dense))
        torch.testing.assert_close(form.left_multiply(basis).dense(), basis.mT @ dense)
    for a in (Ghost(left, right), Stacked(dense)):
        for b_ in (Ghost(left, -2 * right), Stacked(-2 * dense)):
            torch.testing.assert_close(add_calls(a, b_).dense(), -dense)
    assert isinstance(example_gradients(left, right), Ghost) == (t * (p + q) < p * q)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(2, 60), st.integers(2, 60), st.floats(1e-8, 1.0), st.integers(0, 1000))
def test_t11_ghost_norms_never_fall_below_the_true_ones(t: int, p: int, q: int, rest: float, seed: int) -> None:
    """Tokens that cancel each other to ``rest``: what is left of the sum of products may be rounding alone."""
    g = torch.Generator().manual_seed(seed)
    left, right = torch.randn(9, t, p, generator=g), torch.randn(9, t, q, generator=g)
    left[:, 0] = rest * left[:, 0] - left[:, 1:].sum(1)
    right[:] = right[:, :1] * (1 + rest * right)
    true = (left.mT.to(D) @ right.to(D)).flatten(1).norm(dim=1)
    bound = Ghost(left, right).norm_sq().to(D).sqrt()
    assert bool((bound >= true * (1 - 1e-6)).all())
    plain = torch.randn(9, t, p, generator=g)
    loose = Ghost(plain, torch.randn(9, t, q, generator=g)).norm_sq().sqrt()
    assert loose.isfinite().all()


def test_ghost_norms_are_tight_where_nothing_cancels() -> None:
    g = torch.Generator().manual_seed(0)
    left, right = torch.randn(20, 8, 768, generator=g), torch.randn(20, 8, 8, generator=g)
    true = (left.mT.to(D) @ right.to(D)).flatten(1).norm(dim=1)
    torch.testing.assert_close(Ghost(left, right).norm_sq().to(D).sqrt(), true, rtol=5e-4, atol=0)


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 1, "padding_mode": "circular"}])
def test_every_padding_of_a_convolution(options: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, **options)).to(D)
    x = torch.randn(4, 2, 5, 7, dtype=D)
    expected = one_by_one(model, ["0"], x)
    recorder = ExampleRecorder({"0": model[0]})
    got = record(model, ["0"], losses_of(model, x), recorder)
    torch.testing.assert_close(got["0"], expected["0"])


def test_autocast_does_not_reach_the_gradients() -> None:
    """Inside autocast even products of float32 tensors would be taken in half precision."""
    layer = nn.Linear(8, 4)
    recorder = ExampleRecorder({"": layer})
    losses = layer(torch.randn(3, 5, 8)).sum((1, 2))
    seen: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        recorder.backward(losses, lambda _, g: seen.append(g.D.mT @ g.X))
    assert seen[0].dtype == torch.float32


def test_half_precision_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4).bfloat16()
    recorder = ExampleRecorder({"": layer})
    seen: list[LayerGradient] = []
    recorder.backward(layer(torch.randn(3, 8).bfloat16()).float().sum(1), lambda _, g: seen.append(g))
    assert seen[0].D.dtype == seen[0].X.dtype == torch.float32


def test_plain_backward_is_refused_because_it_would_mix_unclipped_gradients_in() -> None:
    layer = nn.Linear(3, 2)
    recorder = ExampleRecorder({"head": layer})
    with pytest.raises(TargetError, match=r"head: .*loss\.backward"):
        layer(torch.randn(4, 3)).sum().backward()
    recorder.remove()
    layer(torch.randn(4, 3)).sum().backward()
    assert layer.weight.grad is not None


def test_a_layer_without_gradient_is_named_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    recorder = ExampleRecorder({"a": model[0], "b": model[1]})
    x = torch.randn(4, 3)
    recorder.backward(model(x).sum(1), lambda *_: None)
    with pytest.raises(TargetError, match="a has no per-example gradient: it took no part"):
        recorder.backward(model[1](x).sum(1), lambda *_: None)
    with torch.no_grad():
        h = model[0](x)
    with pytest.raises(TargetError, match=r"a has .* ran without gradients .*use_reentrant=False"):
        recorder.backward(model[1](h).sum(1), lambda *_: None)
    seen: list[str] = []
    lenient = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    recorder = ExampleRecorder({"a": lenient[0], "b": lenient[1]}, allow_unused=True)
    recorder.backward(lenient[1](x).sum(1), lambda name, *_: seen.append(name))
    assert seen == ["b"]


def test_a_layer_the_loss_does_not_depend_on_has_zero_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    recorder = ExampleRecorder({"a": model[0], "b": model[1]})
    x, seen = torch.randn(4, 3), []
    model[0](x)
    recorder.backward(model[1](x).sum(1), lambda name, *_: seen.append(name))
    assert seen == ["b"]


def test_mixed_rows_are_refused() -> None:
    layer = nn.Linear(3, 2)
    recorder = ExampleRecorder({"expert": layer})
    out = layer(torch.randn(8, 3)).view(4, 2, 2)
    with pytest.raises(TargetError, match="expert: its input has 8 rows but there are 4 losses"):
        recorder.backward(out.sum((1, 2)), lambda *_: None)
    # an error leaves the recorder ready for the next batch
    recorder.backward(layer(torch.randn(4, 3)).sum(1), lambda *_: None)


def test_unsupported_layers_are_named() -> None:
    for module in (nn.Embedding(3, 2), nn.LayerNorm(3), nn.Conv2d(4, 4, 3, groups=2)):
        with pytest.raises(TargetError, match="it: no per-example gradients"):
            ExampleRecorder({"it": module})


def test_a_forgotten_recorder_is_freed_and_leaves_the_model_alone() -> None:
    layer = nn.Linear(3, 2)
    recorder = ExampleRecorder({"head": layer})
    del recorder
    gc.collect()
    layer(torch.randn(4, 3)).sum().backward()
    assert layer.weight.grad is not None


def test_batch_statistics_layers_finds_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
    assert list(batch_statistics_layers(model)) == ["1"]
    assert not batch_statistics_layers(copy.deepcopy(model[0]))
    norm = batch_statistics_layers(model)["1"]
    assert mixes_examples(norm)
    assert not mixes_examples(norm.eval())
    assert mixes_examples(nn.BatchNorm1d(2, track_running_stats=False).eval())
