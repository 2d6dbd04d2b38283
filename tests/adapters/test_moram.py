"""The mathematics of MoRAM: section 4's checks, and both read paths."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from subspan.adapters import MoRAMConfig, MoRAMLinear
from subspan.adapters.moram.bank import (
    EPS,
    GATHER_FROM,
    MemoryBank,
    dense_read,
    gather_read,
    kept,
    read_path,
    read_values,
    responses,
    route,
)

F64 = torch.float64
seeds = st.integers(0, 10_000)
few = settings(max_examples=15, deadline=None)


def draw(seed: int, *shape: int, dtype=F64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def bank(seed: int = 0, atoms: int = 12, n: int = 6, m: int = 5):
    return draw(seed, atoms, n), draw(seed + 1, atoms, m)


def output(x, A, B, k=4, tau=0.1, threshold=None, c=None, read=dense_read, **options):
    """dy as the layer computes it; B holds values as rows."""
    index, w, p = route(responses(x, A), k, tau, threshold, **options)
    scale = torch.ones(len(A), dtype=p.dtype) if c is None else c
    return read(index, w * scale[index] * p, B)


def by_the_book(x, A, B, k, tau, threshold):
    """Steps 2 to 7 for one token, in plain Python."""
    p = [float(a @ x) for a in A]
    norm = max(math.sqrt(sum(v * v for v in p)), EPS)
    s = [v / norm for v in p]
    top = sorted(range(len(s)), key=lambda i: -s[i])[: min(max(k, 2), len(s))]
    peak = max(s[i] for i in top)
    e = {i: math.exp((s[i] - peak) / tau) for i in top}
    w = {i: e[i] / sum(e.values()) for i in top}
    return sum(
        (w[i] * p[i] * B[i] for i in top if not threshold or s[i] >= threshold), torch.zeros(B.shape[1], dtype=F64)
    )


@few
@given(seeds, st.integers(1, 14), st.sampled_from([0.05, 0.3, 2.0]), st.sampled_from([None, 0.0, 0.2, 0.6]))
def test_the_forward_pass_follows_the_seven_steps(seed, k, tau, threshold):
    A, B = bank(seed)
    x = draw(seed + 2, 6)
    wanted = by_the_book(x, A, B, k, tau, threshold)
    torch.testing.assert_close(output(x, A, B, k, tau, threshold), wanted, atol=1e-10, rtol=0)
    torch.testing.assert_close(output(x, A, B, k, tau, threshold, read=gather_read), wanted, atol=1e-10, rtol=0)


@few
@given(seeds)
def test_t1_scores_have_unit_norm_and_no_response_gives_nothing(seed):
    A, B = bank(seed)
    p = responses(draw(seed + 2, 7, 6), A)
    _, w, kept_p = route(p, len(A), 1.0)
    s = torch.log(w) - torch.log(w).mean(-1, keepdim=True)  # softmax at temperature 1 gives scores up to a shift
    norm = p.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(s, p / norm - (p / norm).mean(-1, keepdim=True), atol=1e-10, rtol=0)
    torch.testing.assert_close((kept_p / norm).square().sum(-1), torch.ones(7, dtype=F64), atol=1e-10, rtol=0)
    for threshold in (None, 0.2):
        zero = output(torch.zeros(3, 6, dtype=F64), A, B, threshold=threshold)
        assert torch.equal(zero, torch.zeros(3, 5, dtype=F64))


@few
@given(seeds, st.sampled_from([0.2, 0.3, 0.5, 0.72, 0.95]))
def test_t2_at_most_one_over_threshold_squared_atoms_pass(seed, threshold):
    p = draw(seed, 40, 64)
    capacity = math.floor(1 / threshold**2 + 1e-9)
    w = route(p, 64, 1.0, threshold).weight
    assert (w > 0).sum(-1).max() <= capacity
    equal = torch.zeros(1, 64, dtype=F64)
    equal[:, :capacity] = 3.0
    at_capacity = route(equal, 64, 1.0, threshold - 1e-9).weight
    assert (at_capacity > 0).sum() == capacity  # attained
    if threshold > 1 / math.sqrt(2):
        assert capacity == 1


def test_t2_a_score_at_the_threshold_passes():
    p = torch.tensor([3.0, 4.0], dtype=F64)  # scores 0.6 and 0.8
    assert (route(p, 2, 1.0, 0.6).weight > 0).all()
    assert (route(p, 2, 1.0, 0.6 + 1e-9).weight > 0).sum() == 1


@few
@given(seeds, st.integers(1, 20), st.sampled_from([None, 0.2]))
def test_t3_weights_are_sparse_and_sum_to_at_most_one(seed, k, threshold):
    p = draw(seed, 30, 12, dtype=torch.float32)
    index, w, _ = route(p, k, 0.05, threshold)
    assert w.shape[-1] == kept(k, 12) <= max(k, 2)
    assert (w >= 0).all()
    assert all(len(set(row.tolist())) == len(row) for row in index)
    whole = route(p, k, 0.05).weight
    torch.testing.assert_close(whole.sum(-1), torch.ones(30), atol=1e-6, rtol=0)
    passes = (p / p.norm(dim=-1, keepdim=True)).gather(-1, index) >= (threshold or -1)
    torch.testing.assert_close(w, whole * passes, atol=1e-6, rtol=0)  # nothing is renormalised


@few
@given(seeds, st.floats(1e-2, 1e2))
def test_t4_positively_homogeneous_and_not_odd(seed, a):
    A, B = bank(seed)
    x = draw(seed + 2, 9, 6)
    for threshold in (None, 0.2):
        dy = output(x, A, B, threshold=threshold)
        torch.testing.assert_close(output(a * x, A, B, threshold=threshold), a * dy, atol=1e-10 * a, rtol=1e-10)
        assert not torch.allclose(output(-x, A, B, threshold=threshold), -dy)


@few
@given(seeds)
def test_t5_hot_and_full_it_is_dense_lora_over_r(seed):
    A, B = bank(seed)
    x = draw(seed + 2, 9, 6)
    lora = x @ A.T @ B
    torch.testing.assert_close(output(x, A, B, len(A), 1e9), lora / len(A), atol=1e-8, rtol=0)
    c = torch.full((len(A),), float(len(A)), dtype=F64)
    torch.testing.assert_close(output(x, A, B, len(A), 1e9, c=c), lora, atol=1e-7, rtol=0)


@few
@given(seeds)
def test_t6_cold_it_reads_the_best_atom_alone(seed):
    A, B = bank(seed)
    x = draw(seed + 2, 6)
    p = A @ x
    j = int(p.argmax())
    torch.testing.assert_close(output(x, A, B, 4, 1e-7), p[j] * B[j], atol=1e-10, rtol=0)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("tau", [0.05, 0.5])
def test_t7_orthonormal_keys_recall_exactly(k, tau):
    A = torch.linalg.qr(draw(0, 6, 6)).Q
    B = draw(1, 6, 5)
    p = A @ A[2]
    p[p.abs() < 1e-12] = 0.0  # the other responses, up to rounding, which must not decide a tie
    index, w, response = route(p, k, tau)
    at = (index == 2).nonzero()[0, 0]
    wanted = 1 / (1 + (kept(k, 6) - 1) * math.exp(-1 / tau))
    assert float(w[at]) == pytest.approx(wanted, abs=1e-12)
    torch.testing.assert_close(dense_read(index, w * response, B), wanted * B[2], atol=1e-12, rtol=0)
    gated = route(p, k, tau, 0.2)
    assert int((gated.weight > 0).sum()) == 1


def test_t8_twins_interfere_as_their_mean():
    A = torch.stack([draw(0, 6)] * 2)
    B = draw(1, 2, 5)
    x = draw(2, 6)
    assert torch.equal(route(A @ x, 2, 0.05).weight, torch.tensor([0.5, 0.5], dtype=F64))
    torch.testing.assert_close(output(x, A, B, 2, 0.05), (A[0] @ x) * B.mean(0), atol=1e-10, rtol=0)


@few
@given(seeds)
def test_t9_growth_shrinks_old_scores_by_one_factor(seed):
    old, new = draw(seed, 20, 10), draw(seed + 1, 20, 4)
    energy = [p.square().sum(-1, keepdim=True) for p in (old, new)]
    rho = (energy[0] / (energy[0] + energy[1])).sqrt()
    scores = [torch.log(route(p, p.shape[-1], 1.0).weight)[:, :10] for p in (old, torch.cat([old, new], -1))]
    spread = [s - s[:, :1] for s in scores]  # differences of scores
    torch.testing.assert_close(spread[1], rho * spread[0], atol=1e-10, rtol=0)


def test_t9_fresh_keys_have_the_energy_of_kaiming():
    memory = MemoryBank(50, 3, dtype=F64)
    memory.grow(0, 4000, 1.0, torch.Generator().manual_seed(0))
    x = draw(0, 50)
    energy = float(responses(x, memory.new_keys.detach()).square().sum())
    assert energy == pytest.approx(4000 * float(x.square().sum()) / (3 * 50), rel=0.08)
    assert memory.new_keys.abs().max() <= 50**-0.5
    assert not memory.new_values.any()


@few
@given(seeds, st.floats(0.1, 10))
def test_t11_a_common_rescale_is_a_gauge_and_that_of_one_atom_is_not(seed, a):
    A, B = bank(seed)
    x = draw(seed + 2, 9, 6)
    dy = output(x, A, B)
    torch.testing.assert_close(output(x, a * A, B / a), dy, atol=1e-9, rtol=1e-9)
    one = torch.ones(len(A), 1, dtype=F64)
    one[0] = 3.0
    assert not torch.allclose(output(x, one * A, B / one, k=len(A)), output(x, A, B, k=len(A)), atol=1e-3)


@few
@given(seeds)
def test_t12_atoms_may_change_places_and_inputs_their_basis(seed):
    A, B = bank(seed)
    x = draw(seed + 2, 9, 6)
    order = torch.randperm(len(A), generator=torch.Generator().manual_seed(seed))
    Q = torch.linalg.qr(draw(seed + 3, 6, 6)).Q
    for options in ({}, {"threshold": 0.2}):
        dy = output(x, A, B, **options)
        torch.testing.assert_close(output(x, A[order], B[order], **options), dy, atol=1e-10, rtol=0)
        torch.testing.assert_close(output(x @ Q.T, A @ Q.T, B, **options), dy, atol=1e-10, rtol=0)


def test_t13_values_get_gradient_where_they_are_read_and_keys_everywhere():
    A, B = bank(3)
    A.requires_grad_()
    B.requires_grad_()
    x = draw(4, 6)
    index, w, p = route(responses(x, A), 3, 0.3)
    dense_read(index, w * p, B).sum().backward()
    unread = [i for i in range(len(A)) if i not in index.tolist()]
    assert not B.grad[unread].any()
    assert B.grad[index].abs().min() > 0
    assert A.grad[unread].abs().min() > 0  # through the norm of the responses


def test_t13_with_empty_values_keys_get_no_gradient():
    A, B = bank(3)
    A.requires_grad_()
    output(draw(4, 2, 6), A, torch.zeros_like(B)).sum().backward()
    assert not A.grad.any()


@pytest.mark.parametrize("read", [dense_read, gather_read])
@pytest.mark.parametrize("options", [{}, {"threshold": 0.3}, {"score": "abs"}, {"normalize": False}], ids=str)
def test_t13_gradients_are_right(read, options):
    A, B = bank(5, 7, 4, 3)
    x = draw(6, 3, 4)
    for t in (x, A, B):
        t.requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: output(*t, k=3, tau=0.5, read=read, **options), (x, A, B))


@few
@given(seeds, st.integers(2, 20))
def test_t16_a_token_does_not_see_its_batch(seed, size):
    A, B = bank(seed)
    x = draw(seed + 2, size, 6)
    # float32 with keys of their initial size and outputs of O(1): sums of a product are rounded by its shape
    for dtype, tolerance in ((F64, 1e-12), (torch.float32, 1e-6)):
        keys, values, tokens = (A / 18**0.5).to(dtype), (B / 4).to(dtype), x.to(dtype)
        together = output(tokens, keys, values, threshold=0.2)
        alone = torch.stack([output(row, keys, values, threshold=0.2) for row in tokens])
        torch.testing.assert_close(together, alone, atol=tolerance, rtol=0)


# --------------------------------------------------------------------------------------------------------- read paths


@few
@given(seeds, st.integers(1, 30), st.integers(0, 12))
def test_both_read_paths_agree_also_when_a_part_trains(seed, k, frozen):
    A, B = bank(seed, 16)
    A, B = A.float(), B.float()
    index, w, p = route(responses(draw(seed + 2, 2, 5, 6, dtype=torch.float32), A), k, 0.2)
    whole = dense_read(index, w * p, B)
    parts = [B[:frozen], B[frozen:]] if frozen else [B]
    for read in ("dense", "gather"):
        torch.testing.assert_close(read_values(index, w * p, parts, read), whole, atol=1e-5, rtol=0)


def test_the_choice_goes_by_the_share_of_atoms_kept():
    assert read_path("auto", 10 * GATHER_FROM - 1, 10) == "dense"
    assert read_path("auto", 10 * GATHER_FROM, 10) == "gather"
    assert read_path("dense", 10_000, 2) == "dense"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_responses_are_float32_or_better(dtype):
    A, _ = bank(0)
    x = draw(1, 3, 6).to(dtype)
    assert responses(x, A.float()).dtype == torch.float32
    assert responses(x.double(), A).dtype == F64
    assert responses(x, A.to(dtype)).dtype == torch.float32  # a model that was moved as a whole
    torch.testing.assert_close(responses(x, A.float()), x.float() @ A.float().T)


def test_ablations_change_what_they_say():
    p = torch.tensor([0.9, -2.0, 0.5, 0.1])
    assert set(route(p, 2, 0.1).index.tolist()) == {0, 2}
    index, _, response = route(p, 2, 0.1, score="abs")
    assert set(index.tolist()) == {0, 1}
    assert response[index == 1] == -2.0  # read with its sign
    assert torch.equal(route(p, 2, 0.1, mixing="hard").weight, torch.ones(2))
    raw = route(p, 4, 0.5, normalize=False).weight
    torch.testing.assert_close(raw, torch.softmax(p / 0.5, -1))


def test_nan_and_empty_batches_pass_through():
    A, B = bank(0)
    for read in (dense_read, gather_read):
        assert output(torch.zeros(0, 6, dtype=F64), A, B, read=read).shape == (0, 5)
        x = draw(0, 2, 6)
        x[0, 0] = torch.nan
        dy = output(x, A, B, read=read)
        assert dy[0].isnan().all()
        assert dy[1].isfinite().all()


def test_extreme_responses_stay_finite():
    A, B = bank(0)
    x = torch.stack([draw(0, 6) * 1e-30, draw(1, 6) * 1e30])
    dy = output(x, A, B, tau=0.01)
    assert dy.isfinite().all()


@pytest.mark.parametrize("alpha", [None, 12.0])
def test_a_layer_adds_the_scaled_read_to_what_its_base_gives(alpha):
    config = MoRAMConfig(r=4, alpha=alpha, temperature=0.1, threshold=0.3)
    layer = MoRAMLinear(nn.Linear(6, 5, dtype=F64), config).eval()
    A, B = bank(0, 4)
    layer.bank.open(A, B, config.scale(4), 0)
    x = draw(2, 9, 6)
    read = (1.0 if alpha is None else 3.0) * torch.stack([by_the_book(row, A, B, 4, 0.1, 0.3) for row in x])
    assert (read.abs().amax(1) > 0.1).sum() >= 5
    torch.testing.assert_close(layer(x), layer.base_layer(x) + read, atol=1e-10, rtol=0)


def test_dropout_is_on_what_keys_see_in_training_alone():
    layer = MoRAMLinear(nn.Linear(6, 5), MoRAMConfig(r=4, dropout=0.5, threshold=None))
    layer.bank.open(torch.randn(4, 6), torch.zeros(4, 5), 1.0, 0)
    x, seen = torch.randn(20, 6), []
    assert torch.equal(layer.train()(x), layer.base_layer(x))  # the base path sees all of it
    layer.observer = lambda x, p, routing: seen.append(p)
    for training in (True, True, False):
        layer.train(training)
        nn.init.ones_(layer.bank.new_values)
        layer(x)
    whole = responses(x, layer.bank.new_keys.detach())
    assert not torch.allclose(seen[0].detach(), seen[1].detach())
    torch.testing.assert_close(seen[2].detach(), whole)


def test_all_scores_negative_reads_nothing_in_evaluation():
    layer = MoRAMLinear(nn.Linear(2, 3), MoRAMConfig(r=2, threshold=0.1))
    layer.bank.open(-torch.rand(2, 2), torch.ones(2, 3), 1.0, 0)
    x = torch.rand(4, 2)
    layer.eval()
    with pytest.warns(UserWarning, match="more than half of the tokens"):
        assert torch.equal(layer(x), layer.base_layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer.base_layer(x))
