"""MeZO, LOZO and LOZO+ against closed forms, each other, and the faults of the published code."""

import copy
import itertools
import math
import warnings

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from scipy.stats import ks_2samp
from torch import nn

from subspan.errors import NonFinite
from subspan.optim import (
    LOZO,
    LOZOPlus,
    MeZO,
    alignment,
    candidate_scores,
    diagnose_directions,
    lge,
    query_gain,
    replay,
    select_directions,
    transfer_momentum,
)
from subspan.optim.zeroth_order.algebra import scales, unit_columns
from subspan.optim.zeroth_order.blocks import seeded

SHAPES = [(3, 4, 1), (3, 4, 2), (5, 6, 3), (6, 8, 4)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def quadratic(X, hessian=None, target=0.0):
    """F(X) = <X - X*, H (X - X*)> / 2, H acting on columns."""
    d = X - target
    return (d * (d if hessian is None else hessian @ d)).sum() / 2


def problem(m=12, n=16, seed=0, dtype=torch.float64):
    return nn.Parameter(gaussian(m, n, seed=seed).to(dtype))


def run(optimizer, closure, steps):
    return [optimizer.step(closure) and optimizer.last for _ in range(steps)]


FAMILY = {
    "mezo": lambda p, **o: MeZO(p, **{"lr": 1e-3} | o),
    "lozo": lambda p, **o: LOZO(p, **{"lr": 1e-3, "interval": 3} | o),
    "lozo-m": lambda p, **o: LOZO(p, **{"lr": 1e-3, "interval": 3, "momentum": 0.9} | o),
    "lozo+": lambda p, **o: LOZOPlus(p, **{"lr": 1e-3, "interval": 3, "max_rank": 2, "candidates": 4} | o),
}
everyone = pytest.mark.parametrize("kind", FAMILY)


# Section 4


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), eps=st.sampled_from([1e-3, 1.0, 10.0]))
def test_l1_slope_and_curvature_are_exact_on_a_quadratic(seed, eps):
    X = problem(seed=seed)
    half = gaussian(12, 12, seed=seed + 1)
    hessian = half @ half.mT
    optimizer = LOZOPlus([X], lr=0.0, max_rank=2, candidates=1, eps=eps, interval=1)
    block = optimizer.blocks[0]
    Z = optimizer._probe([block], 0, 0)
    dense = Z.factors[block][0] @ Z.factors[block][1].mT
    info = run(optimizer, lambda: quadratic(X, hessian), 1)[0]
    kappa = float((dense * (hessian @ dense)).sum())
    assert info.kappa == pytest.approx(kappa, rel=1e-9 if eps >= 1 else 1e-6)
    left = block.left(1, 0, "step", 0)
    direction = left @ optimizer.right[block].mT
    assert info.c == pytest.approx(float(((hessian @ X.detach()) * direction).sum()), rel=1e-9)


def draws(m, n, r, count=200_000):
    return gaussian(count, m, r, seed=1), gaussian(count, n, r, seed=2)


def estimates(G, U, V):
    """c U V^T / r for a stack of factors, with c = <G, U V^T>."""
    Z = U @ V.mT
    return (Z * G).sum((1, 2), keepdim=True) * Z / V.shape[-1]


@pytest.mark.parametrize(("m", "n", "r"), SHAPES[:3])
def test_l2_l4_the_estimate_is_unbiased_and_its_second_moment_is_that_of_a_dense_draw_or_more(m, n, r):
    G = gaussian(m, n, seed=3)
    E = estimates(G, *draws(m, n, r))
    error = (E.mean(0) - G).abs() / (E.std(0) / len(E) ** 0.5)
    assert error.max() < 5
    wanted = (m * n + 2 * (m + n + r + 1) / r) * G.square().sum()
    assert float(E.square().sum((1, 2)).mean() / wanted) == pytest.approx(1, abs=0.03)
    assert wanted / G.square().sum() == pytest.approx({1: 30, 2: 22, 3: 40}[r])
    one = estimates(G, *(x[:1] for x in draws(m, n, r, 1)))[0]
    U, V = (x[0] for x in draws(m, n, r, 1))
    torch.testing.assert_close(lge(float((G * (U @ V.mT)).sum()), U, V), one)


def test_l3_given_v_the_estimate_is_the_gradient_on_its_columns():
    m, n, r = 5, 6, 3
    G, V = gaussian(m, n, seed=3), gaussian(n, r, seed=4)
    E = estimates(G, gaussian(400_000, m, r), V)
    error = (E.mean(0) - G @ V @ V.mT / r).abs() / (E.std(0) / len(E) ** 0.5)
    assert error.max() < 5


def test_l5_l8_second_moment_and_descent_with_orthogonal_columns():
    m, n, r = 5, 6, 3
    G, V = gaussian(m, n, seed=3), unit_columns(gaussian(n, r, seed=4), orthogonal=True)
    torch.testing.assert_close(V.mT @ V, n * torch.eye(r, dtype=torch.float64))
    E = estimates(G, gaussian(400_000, m, r), V)
    met = float((G @ V).square().sum())
    second = n * (m * r + 2) * met / r**2
    assert float(E.square().sum((1, 2)).mean()) == pytest.approx(second, rel=0.02)
    # F(X) = |X|^2 / 2 at X = G: L = 1.
    lr = r / (n * (m * r + 2))
    drop = (0.5 * (G - lr * E).square().sum((1, 2))).mean() - 0.5 * G.square().sum()
    assert float(drop) == pytest.approx(-lr * met / r * (1 - lr * n * (m * r + 2) / (2 * r)), rel=0.03)
    assert float(drop) <= -lr * met / (2 * r) * 0.97


def test_l6_energy_is_unbiased_with_variance_two():
    G, v = gaussian(5, 6, seed=3), gaussian(6, 1, seed=4)
    c = (gaussian(400_000, 5, 1) * (G @ v)).sum((1, 2))
    energy = candidate_scores(c, torch.zeros_like(c), "energy")
    truth = float((G @ v).square().sum())
    assert abs(float(energy.mean()) - truth) < 5 * float(energy.std()) / len(c) ** 0.5
    assert float(energy.var()) == pytest.approx(2 * truth**2, rel=0.03)


@pytest.mark.parametrize("scaling", ["unit", "paper", "reference"])
def test_l7_every_step_goes_down_the_slope_refresh_steps_included(scaling):
    """Public fault 1: the reference code draws another U for the update than for the probe at each refresh."""
    X = problem()
    optimizer = LOZO([X], lr=1e-5, rank=2, interval=2, scaling=scaling)
    _, update = scales(scaling, 2)
    for _ in range(6):
        before = X.detach().clone()
        optimizer.step(lambda: quadratic(X))
        gain = float((before * (X.detach() - before)).sum())
        assert gain == pytest.approx(-1e-5 * optimizer.last.c**2 * update, rel=1e-9)
        assert gain < 0


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.floats(0, 1e3), min_size=1, max_size=20),
    threshold=st.floats(0, 5),
    max_rank=st.integers(1, 6),
)
def test_l9_l10_what_is_kept_scores_at_least_the_mean_of_the_pool(scores, threshold, max_rank):
    pool = torch.tensor(scores, dtype=torch.float64)
    kept, tau = select_directions(pool, threshold, max_rank)
    assert 1 <= len(kept) <= max_rank
    assert len(set(kept)) == len(kept)
    assert pool[kept].mean() >= pool.mean() * (1 - 1e-12)
    if threshold == 0:
        assert len(kept) == min(max_rank, len(scores))
    if len(kept) > 1:
        assert pool[kept].min() >= tau * (1 - 1e-9)


@pytest.mark.parametrize(
    ("q", "noisy", "exact", "best"),
    [(2, 1.40, 1.64, 1.64), (4, 1.84, 2.29, 2.47), (8, 2.14, 2.52, 3.45), (16, 2.26, 2.54, 4.56)],
)
def test_l11_selection_raises_the_energy_of_a_rank_one_gradient(q, noisy, exact, best):
    pools = 100_000
    true = gaussian(pools, q, seed=1).square()
    probed = true * gaussian(pools, q, seed=2).square()
    figures = []
    for scores, threshold in ((probed, 1.0), (true, 1.0), (true, 100.0)):
        # the vectorised rule, and the function itself on some of the pools
        mask = scores >= threshold * scores.mean(1, keepdim=True)
        mask |= (scores == scores.max(1, keepdim=True).values) & ~mask.any(1, keepdim=True)
        figures.append(float(((true * mask).sum(1) / mask.sum(1)).mean()))
        for i in range(50):
            assert sorted(select_directions(scores[i], threshold, q)[0]) == mask[i].nonzero().flatten().tolist()
    assert figures == pytest.approx([noisy, exact, best], abs=0.03)


def test_l12_the_query_model():
    assert query_gain(16, 50, 1.0) == pytest.approx(66 / 66.5)
    assert query_gain(16, 50, 2.26) == pytest.approx((16 + 113) / 66.5)
    assert query_gain(16, 50, 2.26, probe_updates=False) == pytest.approx(113 / 66.5)


def test_l13_a_period_is_zeroth_order_sgd_on_the_left_factor():
    X = problem()
    target = gaussian(12, 16, seed=9)
    optimizer = LOZO([X], lr=1e-3, rank=2, interval=20, scaling="paper")
    start, A = X.detach().clone(), torch.zeros(12, 2, dtype=torch.float64)
    for t in range(20):
        optimizer.step(lambda: quadratic(X, target=target))
        block = optimizer.blocks[0]
        U, V = block.left(2, 0, "step", t), optimizer.right[block]
        plus, minus = (quadratic(start + (A + s * 1e-3 * U) @ V.mT, target=target) for s in (1, -1))
        A = A - 1e-3 * (plus - minus) / 2e-3 * U / 2
    torch.testing.assert_close(X.detach(), start + A @ V.mT, rtol=0, atol=1e-12)


def test_l14_many_columns_approach_a_dense_draw():
    """(m n + 2 (m + n + r + 1) / r) goes to MeZO's m n + 2."""
    m, n = 4, 5
    G = gaussian(m, n, seed=3)
    E = estimates(G, *draws(m, n, 60, 20_000))
    assert float(E.square().sum((1, 2)).mean() / G.square().sum()) == pytest.approx(m * n + 2, rel=0.12)


def test_l14_without_selection_it_is_lozo_bit_for_bit():
    X, Y = problem(), problem()
    lozo = LOZO([X], lr=1e-3, rank=3, interval=4)
    plus = LOZOPlus(
        [Y], lr=1e-3, max_rank=3, candidates=3, interval=4, threshold=0.0, carry=False, probe_update="none",
        normalize=False, score="energy", restore="exact",
    )  # fmt: skip
    lozo.weights.restore = "exact"
    run(lozo, lambda: quadratic(X), 10)
    run(plus, lambda: quadratic(Y), 10)
    assert torch.equal(X, Y)
    assert (lozo.total_queries, plus.total_queries) == (20, 20 + 3 * 6)


class Small(nn.Module):
    """Embedding, convolution, linear, transformers' Conv1D and tied weights in one model."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(1, 7, 3, padding=1)
        self.up = Conv1D(12, 6)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids):
        h = self.embed(ids)
        h = h + self.conv(h.unsqueeze(1)).mean(1)
        h = h + self.down(torch.tanh(self.up(h)))
        return self.head(self.norm(h))


def small(dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Small(dtype)
    ids = torch.randint(0, 11, (3, 5), generator=generator())
    return model, lambda: nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def double(dtype=torch.float64):
    model, _ = small(dtype)
    ids = torch.randint(0, 11, (3, 5), generator=generator())
    return model, lambda: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


@pytest.mark.parametrize("kind", ["lozo", "lozo-m", "lozo+"])
def test_l15_back_ends_agree(kind):
    (one, loss_one), (two, loss_two) = double(), double()
    inplace = FAMILY[kind](one.named_parameters(), model=one, backend="inplace")
    hooked = FAMILY[kind](two.named_parameters(), model=two, backend="lowrank")
    assert {b.name for b in hooked.weights.slots} == {"embed.weight", "conv.weight", "up.weight", "down.weight"}
    assert hooked.blocks[[b.name for b in hooked.blocks].index("up.weight")].transposed
    for _ in range(20):
        inplace.step(loss_one)
        hooked.step(loss_two)
        assert hooked.last.c == pytest.approx(inplace.last.c, rel=1e-6)
    with torch.no_grad():
        assert float(loss_two()) == pytest.approx(float(loss_one()), rel=1e-10)
    hooked.merge()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-8)
    assert hooked.total_queries == inplace.total_queries + 1  # the first step asks which layers are called


def test_l16_the_momentum_survives_only_where_the_subspaces_overlap():
    m, n, r = 4, 9, 2
    N, old = gaussian(m, r, seed=1), gaussian(n, r, seed=2)
    new = gaussian(100_000, n, 3, seed=3)
    moved = torch.stack([transfer_momentum(N, old, v) for v in new[:3]])
    torch.testing.assert_close(moved, (N @ (old.mT @ new[:3])) / n)
    carried = (N @ (old.mT @ new)) / n @ new.mT
    error = (carried.mean(0) - 3 / n * N @ old.mT).abs() / (carried.std(0) / len(new) ** 0.5)
    assert error.max() < 5
    basis = unit_columns(old, orthogonal=True)
    torch.testing.assert_close(transfer_momentum(N, basis, basis), N, rtol=0, atol=1e-12)


@everyone
@pytest.mark.parametrize("hooks", [False, True])
def test_l17_a_log_replays_a_run_bit_for_bit(kind, hooks):
    (one, loss), (two, _) = small(torch.float32), small(torch.float32)
    options = {"model": one, "backend": "lowrank"} if hooks and kind != "mezo" else {}
    optimizer = FAMILY[kind](one.named_parameters(), **options)
    log = []
    for t in range(8):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + t)
        optimizer.step(loss)
        log.append(optimizer.last)
    options = options and options | {"model": two}
    again = FAMILY[kind](two.named_parameters(), **options)
    replay(again, log)
    optimizer.merge()
    again.merge()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.down.weight, small(torch.float32)[0].down.weight)


@pytest.mark.parametrize("score", ["energy", "decrease"])
def test_l18_scores_do_not_depend_on_the_scale_of_the_loss(score):
    c, kappa = gaussian(12), gaussian(12, seed=1)
    for a in (0.25, 8.0):
        plain, scaled = (candidate_scores(s * c, s * kappa, score) for s in (1.0, a))
        assert select_directions(plain, 1.0, 4)[0] == select_directions(scaled, 1.0, 4)[0]
    infos = []
    for a in (1.0, 4.0):
        X = problem()
        optimizer = LOZOPlus([X], lr=0.0, max_rank=2, candidates=5, score=score, interval=1)
        infos.append(run(optimizer, lambda a=a, X=X: a * quadratic(X), 1)[0])
    assert infos[0].kept == infos[1].kept
    assert infos[1].c == pytest.approx(4 * infos[0].c)


def test_l19_a_rotation_of_the_outputs_changes_no_distribution():
    Q = torch.linalg.qr(gaussian(8, 8, seed=5)).Q
    start = gaussian(8, 9, seed=6)
    ends = []
    for rotation, seeds in ((torch.eye(8, dtype=torch.float64), range(60)), (Q, range(100, 160))):
        final = []
        for seed in seeds:
            X = nn.Parameter(rotation @ start)
            optimizer = LOZO([X], lr=5e-3, rank=2, interval=3, seed=seed)
            run(optimizer, lambda X=X: quadratic(X), 6)
            final.append(float(quadratic(X.detach())))
        ends.append(final)
    assert ks_2samp(*ends).pvalue > 0.01


# The faults of the public reference code (section 6)


def test_fault_2_half_precision_weights_come_back_from_a_perturbation():
    """Public fault 2: in 16 bits the loss becomes 0 or NaN because +eps, -2 eps, +eps does not return."""
    for dtype in (torch.bfloat16, torch.float16):
        X = problem(dtype=dtype)
        before = X.detach().clone()
        optimizer = LOZO([X], lr=0.0, rank=2)
        run(optimizer, lambda X=X: quadratic(X.float()), 30)
        assert torch.equal(X, before)
        drifting = LOZO([X], lr=1e-30, rank=2, restore="arith")
        run(drifting, lambda X=X: quadratic(X.float()), 30)
        assert not torch.equal(X, before)


def test_fault_3_momentum_works_when_v_changes_at_every_step():
    """Public fault 3: at interval 1 the reference code silently has no momentum."""
    X, Y = problem(), problem()
    plain = LOZO([X], lr=1e-3, rank=2, interval=1)
    heavy = LOZO([Y], lr=1e-3, rank=2, interval=1, momentum=0.9)
    run(plain, lambda: quadratic(X), 1)
    run(heavy, lambda: quadratic(Y), 1)
    torch.testing.assert_close(X, Y, rtol=1e-12, atol=0)  # the first step takes c U whole
    block = heavy.blocks[0]
    old_right, old = heavy.right[block].clone(), heavy.state[Y]["N"].clone()
    heavy.step(lambda: quadratic(Y))
    new_right = heavy.right[block]
    left = block.left(2, 0, "step", 1) * 2**-0.5
    wanted = 0.9 * transfer_momentum(old, old_right, new_right) + 0.1 * heavy.last.c * left
    torch.testing.assert_close(heavy.state[Y]["N"], wanted)
    assert transfer_momentum(old, old_right, new_right).norm() > 0.01 * old.norm()


def test_a_bias_corrected_momentum_is_the_mean_of_what_it_has_seen():
    X = problem()
    optimizer = LOZO([X], lr=1e-3, rank=2, interval=100, momentum=0.9, bias_correction=True)
    block = optimizer.blocks[0]
    estimates = []
    for step in range(4):
        before = X.detach().clone()
        optimizer.step(lambda: quadratic(X))
        estimates.append(optimizer.last.c * block.left(2, 0, "step", step) * 2**-0.5)
        weights = torch.tensor([0.9 ** (step - k) for k in range(step + 1)], dtype=torch.float64)
        mean = sum(w * e for w, e in zip(weights / weights.sum(), estimates, strict=True))
        torch.testing.assert_close(X.detach() - before, -1e-3 * mean @ optimizer.right[block].mT)


def test_a_diagnosis_meets_the_closed_forms():
    a, b = gaussian(12, 1, seed=1), gaussian(16, 1, seed=2)
    model = nn.ModuleDict({"flat": nn.Linear(16, 12, bias=False), "unused": nn.Linear(16, 12)}).double()
    weight = model["flat"].weight

    def closure():
        return (weight * (a @ b.mT)).sum()  # the gradient is a b^T

    optimizer = LOZO(model.named_parameters(), lr=1e-3, rank=3, seed=5)
    with pytest.raises(ValueError, match="take a step first"):
        diagnose_directions(optimizer, closure)
    optimizer.step(closure)
    before = weight.detach().clone()
    seen = diagnose_directions(optimizer, closure)
    V = optimizer.right[optimizer.blocks[0]]
    met = (b.mT @ V).square().sum()
    assert seen["flat.weight"].alpha == pytest.approx(float(met / (3 * b.square().sum())))
    assert seen["flat.weight"].cosine == pytest.approx(float(met / (b.norm() * (b.mT @ V @ V.mT).norm())))
    assert seen["flat.weight"].stable_rank == pytest.approx(1.0)
    assert math.isnan(seen["unused.weight"].alpha)
    assert "unused.bias" not in seen
    assert torch.equal(weight, before)
    with pytest.raises(ValueError, match="differentiated"):
        diagnose_directions(optimizer, lambda: closure().detach())


def test_a_diagnosis_reads_through_the_low_rank_back_end_and_transposed_weights():
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(12, 16).double()
    x = gaussian(8, 16)
    results = []
    for backend in ("inplace", "lowrank"):
        fresh = copy.deepcopy(layer)
        optimizer = LOZO(fresh.named_parameters(), lr=1e-3, rank=2, model=fresh, backend=backend)
        run(optimizer, lambda fresh=fresh: fresh(x).square().mean(), 3)
        results.append(diagnose_directions(optimizer, lambda fresh=fresh: fresh(x).square().mean())["weight"])
    assert results[0].alpha == pytest.approx(results[1].alpha)
    assert results[0].cosine == pytest.approx(results[1].cosine)


# What all four share


@everyone
def test_resume_in_the_middle_of_a_period_continues_bit_for_bit(kind):
    for hooks in (False, True):
        model, loss = small(torch.float32)
        options = {"model": model, "backend": "lowrank"} if hooks and kind != "mezo" else {}
        optimizer = FAMILY[kind](model.named_parameters(), **options)
        run(optimizer, loss, 4)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        run(optimizer, loss, 5)
        other, other_loss = small(torch.float32, seed=7)
        other.load_state_dict(weights)
        resumed = FAMILY[kind](other.named_parameters(), **(options and options | {"model": other}))
        resumed.load_state_dict(state)
        run(resumed, other_loss, 5)
        assert resumed.total_queries == optimizer.total_queries
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["lozo", "lozo+"])
def test_a_state_moves_to_the_other_back_end(kind):
    (one, loss_one), (two, loss_two) = double(), double()
    hooked = FAMILY[kind](one.named_parameters(), model=one, backend="lowrank")
    run(hooked, loss_one, 4)
    two.load_state_dict(one.state_dict())
    inplace = FAMILY[kind](two.named_parameters(), model=two, backend="inplace")
    inplace.load_state_dict(copy.deepcopy(hooked.state_dict()))
    run(hooked, loss_one, 4)
    run(inplace, loss_two, 4)
    hooked.merge()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-8)


@everyone
def test_the_global_random_state_is_left_alone_and_dropout_is_the_same_within_a_step(kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(4, 8, generator=generator())
    seen = []

    def closure():
        mask = torch.rand(3)
        seen.append(mask)
        return model(x).square().mean()

    before = torch.get_rng_state()
    optimizer = FAMILY[kind](model.parameters())
    run(optimizer, closure, 2)
    assert torch.equal(torch.get_rng_state(), before)
    first = optimizer.last.queries
    assert all(torch.equal(a, seen[-1]) for a in seen[-first:])
    assert not torch.equal(seen[0], seen[-1])


@everyone
def test_frozen_parameters_schedules_groups_and_a_rate_of_zero(kind):
    model, loss = small(torch.float32)
    model.conv.requires_grad_(False)
    fixed, still = model.conv.weight.clone(), model.down.weight.clone()
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.startswith("down")]},
        {"params": list(model.down.parameters()), "lr": 0.0},
    ]
    optimizer = FAMILY[kind](groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    for _ in range(4):
        optimizer.step(loss)
        schedule.step()
    assert torch.equal(model.conv.weight, fixed)
    assert torch.equal(model.down.weight, still)
    assert optimizer.last.rates == pytest.approx([1e-3 / 4, 0.0])


@everyone
def test_weight_decay_is_decoupled(kind):
    X = problem()
    start = X.detach().clone()
    optimizer = FAMILY[kind]([X], weight_decay=0.5)
    run(optimizer, lambda: torch.zeros(()), 3)  # no slope: only the decay is left
    torch.testing.assert_close(X.detach(), start * (1 - 0.5e-3) ** 3)


def test_weight_decay_of_the_low_rank_back_end_reaches_the_weight_at_the_end_of_a_period():
    model, _ = double()
    start = model.down.weight.detach().clone()
    optimizer = LOZO(model.named_parameters(), lr=1e-3, interval=3, weight_decay=0.5, model=model)
    run(optimizer, lambda: model(torch.zeros(1, 1, dtype=torch.long)).sum() * 0, 2)
    assert torch.equal(model.down.weight, start)
    optimizer.merge()
    torch.testing.assert_close(model.down.weight.detach(), start * (1 - 0.5e-3) ** 2)


def test_weight_decay_of_either_back_end_ends_in_the_same_weight_also_across_a_state():
    """On a loss that is linear in the weight, slopes do not depend on what has decayed already."""
    layer, x, g = nn.Linear(9, 8, bias=False, dtype=torch.float64), gaussian(5, 9), gaussian(5, 8, seed=1)
    inplace, hooked, moved = layer, copy.deepcopy(layer), copy.deepcopy(layer)
    options = {"lr": 1e-2, "interval": 3, "weight_decay": 0.5}
    one = LOZO(inplace.parameters(), **options)
    two = LOZO(hooked.parameters(), model=hooked, **options)
    run(one, lambda: (g * inplace(x)).sum(), 5)
    run(two, lambda: (g * hooked(x)).sum(), 5)
    with torch.no_grad():
        moved.weight.copy_(hooked.weight)
    three = LOZO(moved.parameters(), **options)
    three.load_state_dict(copy.deepcopy(two.state_dict()))
    two.merge()
    for weight in (hooked.weight, moved.weight):
        torch.testing.assert_close(weight, inplace.weight, rtol=0, atol=1e-9)


@everyone
def test_it_learns(kind):
    X = problem(20, 20)
    optimizer = FAMILY[kind]([X], lr=2e-3)
    start = float(quadratic(X.detach()))
    run(optimizer, lambda: quadratic(X), 150)
    assert float(quadratic(X.detach())) < 0.9 * start


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "step", "budget": 6},
        {"merge": "weighted", "curvature_cap": 0.5},
        {"layerwise": True},
        {"orthogonalize": True, "ema": 0.5, "probes": 2},
        {"probe_update": "mean", "clip_c": 2.0},
        {"probe_update": "kept", "score": "random"},
        {"threshold": 3.0, "score": "energy"},
    ],
)
def test_each_variant_of_lozo_plus_descends_and_resumes(options):
    model = nn.ParameterList([nn.Parameter(gaussian(10, 12)), nn.Parameter(gaussian(9, 11)), nn.Parameter(gaussian(5))])

    def make(params):
        return LOZOPlus(params, lr=1e-3, max_rank=2, candidates=4, interval=5, **options)

    def closure(params):
        return lambda: sum(quadratic(p) for p in params)

    start = float(sum(quadratic(p.detach()) for p in model))
    optimizer = make(list(model))
    run(optimizer, closure(model), 7)
    twin = copy.deepcopy(model)
    resumed = make(list(twin))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, closure(model), 14)
    run(resumed, closure(twin), 14)
    assert all(torch.equal(p, q) for p, q in zip(model, twin, strict=True))
    assert float(sum(quadratic(p.detach()) for p in model)) < start


G20, START20 = gaussian(20, 20, seed=3), gaussian(20, 20)


def chosen(loss=None, **options):
    """A LOZO+ after its first step on 20 x 20 numbers; <G, X> has the same slopes wherever the probes lead."""
    X = nn.Parameter(START20.clone())
    options = {"lr": 1e-3, "max_rank": 3, "candidates": 6, "score": "energy", "restore": "exact"} | options
    optimizer = LOZOPlus([X], **options)
    optimizer.step(lambda: (G20 * X).sum() if loss is None else loss(X))
    return optimizer, X.detach() - START20


def along_probes(optimizer, candidates, probes=1):
    """Sum of c_i Z_i over probes of the first pool, on <G, X>."""
    block, total = optimizer.blocks[0], torch.zeros_like(START20)
    for i in candidates:
        for j in range(probes):
            optimizer.t, t = 0, optimizer.t
            left, right = optimizer._probe([block], i, j).factors[block]
            optimizer.t = t
            total += (G20 * (left @ right.mT)).sum() * left @ right.mT
    return total


def test_what_is_moved_along_the_probes():
    _, inner = chosen(probe_update="none")
    optimizer, _ = chosen()
    everything = along_probes(optimizer, range(6))
    for option, wanted in (
        ("all", everything),
        ("mean", everything / 6**0.5),
        ("kept", along_probes(optimizer, optimizer.last.kept)),
    ):
        torch.testing.assert_close(chosen(probe_update=option)[1] - inner, -1e-3 * wanted, rtol=1e-6, atol=1e-9)
    twice, moved = chosen(probes=2)
    inner = chosen(probes=2, probe_update="none")[1]
    torch.testing.assert_close(moved - inner, -1e-3 * along_probes(twice, range(6), 2) / 2, rtol=1e-6, atol=1e-9)


def test_a_candidate_s_energy_is_the_mean_over_its_probes():
    optimizer, _ = chosen(probes=2)
    block = optimizer.blocks[0]
    optimizer.t = 0
    pairs = [[optimizer._probe([block], i, j).factors[block] for j in range(2)] for i in range(6)]
    energies = [sum(float((G20 * (u @ v.mT)).sum()) ** 2 for u, v in two) / 2 for two in pairs]
    assert optimizer.last.tau == pytest.approx(sum(energies) / 6)


def test_a_smoothed_threshold_has_no_bias_from_its_start():
    taus = {}
    for ema in (None, 0.5):
        X = nn.Parameter(START20.clone())
        optimizer = LOZOPlus([X], lr=0.0, candidates=5, interval=1, carry=False, ema=ema, score="energy")
        taus[ema] = [info.tau for info in run(optimizer, lambda X=X: (G20 * X).sum(), 3)]
    a, b, c = taus[None]
    assert taus[0.5] == pytest.approx([a, (a + 2 * b) / 3, (a + 2 * b + 4 * c) / 7])


def test_orthogonal_columns_and_columns_of_one_length():
    right = chosen(orthogonalize=True, threshold=0.0)[0].right
    (V,) = right.values()
    torch.testing.assert_close(V.mT @ V, 20 * torch.eye(3, dtype=torch.float64))
    (V,) = chosen(threshold=0.0)[0].right.values()
    torch.testing.assert_close(V.square().sum(0), torch.full((3,), 20.0, dtype=torch.float64))


def test_the_cap_bounds_the_rate_by_the_curvature_of_what_was_kept():
    free, moved = chosen(quadratic, score="decrease", probe_update="none")
    capped, less = chosen(quadratic, score="decrease", probe_update="none", curvature_cap=0.1)
    assert capped._rate(capped.blocks[0]) == pytest.approx(0.1 / free.last.kappa)
    torch.testing.assert_close(less, moved * 0.1 / free.last.kappa / 1e-3)
    assert math.isnan(chosen()[0].last.kappa)  # energies need no curvature, and none was measured


def test_the_random_control_does_not_look_at_the_loss():
    kept = [chosen(lambda X, s=s: (gaussian(20, 20, seed=s) * X).sum(), score="random")[0].last.kept for s in range(4)]
    assert kept == kept[:1] * 4
    others = [chosen(lambda X, s=s: (gaussian(20, 20, seed=s) * X).sum())[0].last.kept for s in range(4)]
    assert others != others[:1] * 4


def test_layerwise_pools_keep_other_candidates_for_other_matrices_and_cost_a_pool_each():
    params = [problem(10, 12, seed=s) for s in range(3)]
    optimizer = LOZOPlus(params, lr=0.0, max_rank=2, candidates=6, layerwise=True, interval=5)
    optimizer.step(lambda: sum(quadratic(p) for p in params))
    assert optimizer.last.queries == 1 + 3 * 2 * 6 + 2
    assert len({tuple(ids) for ids in optimizer.kept.values()}) > 1


def test_weighted_merge_is_the_pools_best_guess_of_the_gradient():
    G = gaussian(40, 1, seed=3) @ gaussian(1, 40, seed=4)
    X = nn.Parameter(torch.zeros(40, 40, dtype=torch.float64))
    met = {}
    for merge in ("select", "weighted"):
        optimizer = LOZOPlus([X], lr=0.0, candidates=16, max_rank=16, interval=1, merge=merge, score="energy")
        values = []
        for _ in range(20):
            optimizer.step(lambda: (G * X).sum())
            values.append(alignment([G], [optimizer.right[optimizer.blocks[0]]]))
        met[merge] = sum(values) / len(values)
    assert met["weighted"] > 1.3 * met["select"] > 1.3


def test_step_mode_keeps_directions_until_enough_or_the_budget_is_spent():
    X = problem()
    optimizer = LOZOPlus([X], lr=1e-3, mode="step", max_rank=2, budget=5, threshold=1.0)
    queries = [info.queries for info in run(optimizer, lambda: quadratic(X), 30)]
    assert queries[0] == 4  # no threshold yet: the first two are kept
    assert set(queries) <= {4, 6, 8, 10}
    assert 10 in queries or 8 in queries


def test_clipping_bounds_the_move():
    X = nn.Parameter(torch.zeros(6, 6))
    size = [1.0] * 5 + [1e6]
    moves = []
    optimizer = LOZOPlus([X], lr=1e-6, max_rank=1, candidates=1, interval=100, clip_c=2.0, probe_update="none", eps=0.1)
    for s in size:
        before = X.detach().clone()
        optimizer.step(lambda s=s: s * X.sum())
        moves.append(float((X.detach() - before).norm()))
    assert moves[-1] < 50 * max(moves[:-1])


def test_accounting_of_queries():
    X = problem()
    optimizer = LOZOPlus([X], lr=1e-4, candidates=8, interval=10, max_rank=4)
    infos = run(optimizer, lambda: quadratic(X), 20)
    first, second = infos[0], infos[10]
    assert first.queries == 1 + 2 * 8 + 2
    assert second.queries == 1 + 2 * (8 + first.rank) + 2
    assert all(i.queries == 2 for i in infos[1:10])
    assert optimizer.total_queries == sum(i.queries for i in infos)
    assert first.tau > 0
    assert 1 <= first.rank == len(first.kept) <= 4


def test_n_dirs_averages():
    X, G = problem(), gaussian(12, 16, seed=3)
    optimizer = MeZO([X], lr=0.1, n_dirs=3, restore="exact")
    start = X.detach().clone()
    optimizer.step(lambda: (G * X).sum())
    assert optimizer.last.queries == 6
    probe = nn.Parameter(torch.zeros_like(start))
    estimate = torch.zeros_like(start)
    for i in range(3):
        torch.nn.init.zeros_(probe)
        with torch.no_grad():
            MeZO([probe]).blocks[0].add_noise(1.0, 0, "step", 0, i)
        z = probe.detach()
        estimate += (G * z).sum() * z / 3
    torch.testing.assert_close(X.detach(), start - 0.1 * estimate)


def test_suggested_rate_is_one_over_the_mean_curvature():
    X = problem(10, 12)
    optimizer = MeZO([X], lr=1.0)
    rate = optimizer.suggest_lr(lambda: quadratic(X), n=40)
    assert rate == pytest.approx(1 / 120, rel=0.1)
    assert torch.allclose(X, problem(10, 12))
    with pytest.raises(ValueError, match="no curvature"):
        optimizer.suggest_lr(lambda: X.sum())
    assert LOZO([X], rank=2).suggest_lr(lambda: quadratic(X), n=40) == pytest.approx(1 / 120, rel=0.3)


# Section 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LOZO(p, eps=0.0), "eps"),
        (lambda p: LOZO(p, rank=0), "rank"),
        (lambda p: LOZO(p, interval=0), "interval"),
        (lambda p: LOZO(p, lr=-1.0), "lr"),
        (lambda p: LOZO(p, momentum=1.0), "momentum"),
        (lambda p: LOZO(p, backend="lowrank"), "model="),
        (lambda p: LOZO(p, scaling="half"), "scaling"),
        (lambda p: LOZOPlus(p, threshold=-1.0), "threshold"),
        (lambda p: LOZOPlus(p, threshold=math.nan), "threshold"),
        (lambda p: LOZOPlus(p, candidates=0), "candidates"),
        (lambda p: LOZOPlus(p, score="best"), "score"),
        (lambda p: LOZOPlus(p, ema=1.0), "ema"),
        (lambda p: LOZOPlus(p, curvature_cap=0.0), "curvature_cap"),
        (lambda p: LOZOPlus(p, mode="step", momentum=0.9), "momentum"),
        (lambda p: MeZO(p, n_dirs=0), "n_dirs"),
        (lambda p: MeZO(p).suggest_lr(lambda: 1.0, n=0), "n must"),
        (lambda p: MeZO([]), "empty"),
        (lambda p: MeZO([p[0].requires_grad_(False)]), "frozen"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(make, message):
    with pytest.raises((ValueError, TypeCheckError), match=message):
        make([problem()])


def test_parameters_that_cannot_be_perturbed_are_refused():
    with pytest.raises(TypeError, match="complex"):
        MeZO([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    with pytest.raises(TypeError, match="sparse"):
        MeZO([torch.zeros(3, 3).to_sparse().requires_grad_()])


@everyone
def test_a_closure_that_is_missing_or_wrong_is_refused_and_changes_nothing(kind):
    X = problem()
    before = X.detach().clone()

    def backward():
        loss = quadratic(X)
        loss.backward()
        return loss

    def failing():
        if failing.calls:
            raise KeyboardInterrupt
        failing.calls += 1
        return 1.0

    failing.calls = 0
    optimizer = FAMILY[kind]([X], restore="exact")
    with pytest.raises(ValueError, match="closure"):
        optimizer.step()
    with pytest.raises(ValueError, match="backward"):
        optimizer.step(backward)
    with pytest.raises(ValueError, match="one number"):
        optimizer.step(lambda: X)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    assert torch.equal(X, before)
    optimizer.step(lambda: quadratic(X))


@everyone
def test_a_loss_that_is_not_finite_is_raised_or_skipped(kind):
    X = problem()
    before = X.detach().clone()
    optimizer = FAMILY[kind]([X], restore="exact")
    with pytest.raises(NonFinite, match="step 1"):
        optimizer.step(lambda: math.nan)
    assert torch.equal(X, before)
    skipping = FAMILY[kind]([X], restore="exact", on_nonfinite="skip", lr=0.1)
    skipping.step(lambda: torch.tensor(math.inf))
    assert torch.equal(X, before)
    with torch.no_grad():
        X[0, 0] = math.nan
    with pytest.raises(NonFinite, match="parameter 0 already holds"):
        optimizer.step(lambda: quadratic(X))


@pytest.mark.parametrize(
    "options", [{"probe_update": "kept"}, {"merge": "weighted"}, {"merge": "weighted", "ema": 0.5}]
)
def test_a_pool_without_a_finite_probe_leaves_the_weights_finite(options):
    X = problem()
    calls = itertools.count()
    optimizer = LOZOPlus([X], lr=1e-4, candidates=3, max_rank=2, **options)
    optimizer.step(lambda: math.nan if 1 <= next(calls) <= 6 else quadratic(X))
    assert X.isfinite().all()
    assert optimizer.last.rank == 1


def test_step_mode_drops_a_probe_that_is_not_finite():
    X = problem()
    calls = itertools.count()
    optimizer = LOZOPlus([X], lr=1e-4, mode="step", budget=4, max_rank=2, threshold=0.0)
    optimizer.step(lambda: math.nan if next(calls) == 0 else quadratic(X))
    assert optimizer.last.queries == 6
    assert math.isfinite(optimizer.last.c)


def test_queries_of_a_step_that_fails_count():
    X = problem()
    calls = itertools.count()
    optimizer = LOZOPlus([X], lr=1e-4, candidates=3, max_rank=2)
    with pytest.raises(NonFinite):
        optimizer.step(lambda: math.nan if next(calls) > 6 else quadratic(X))
    assert optimizer.total_queries == 1 + 2 * 3 + 2


def test_a_probe_that_is_not_finite_drops_its_candidate():
    X = problem()
    calls = itertools.count()
    optimizer = LOZOPlus([X], lr=1e-4, candidates=3, max_rank=3, threshold=0.0)
    optimizer.step(lambda: math.nan if next(calls) == 3 else quadratic(X))  # the second candidate's first probe
    assert optimizer.last.kept == [0, 2]
    assert X.isfinite().all()


@everyone
def test_no_slope_no_move_and_no_nan(kind):
    X = problem()
    before = X.detach().clone()
    optimizer = FAMILY[kind]([X], restore="exact")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(optimizer, lambda: torch.tensor(3.0), 4)
    assert torch.equal(X, before)


def test_equal_scores_keep_as_many_as_allowed():
    assert select_directions(torch.full((7,), 0.1, dtype=torch.float64), 1.0, 4)[0] == [0, 1, 2, 3]


def test_negative_and_vanishing_curvature():
    c = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    floored = candidate_scores(c, torch.tensor([-5.0, 6.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(floored, c.square() / (2 * torch.tensor([0.2, 6.0, 0.2], dtype=torch.float64)))
    flat = candidate_scores(c, torch.tensor([-1.0, -2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(flat, c.square())


def test_eps_below_the_resolution_warns():
    X = problem(dtype=torch.float32)
    optimizer = LOZOPlus([X], lr=1e-3, eps=1e-12, interval=1, candidates=2, max_rank=1)
    with pytest.warns(UserWarning, match="raise eps"):
        run(optimizer, lambda: quadratic(X) + 1e6, 3)


def test_curvature_below_the_rounding_of_the_loss_falls_back_to_energy_and_says_so():
    X = problem(dtype=torch.float32)
    optimizer = LOZOPlus([X], lr=1e-6, eps=1e-4, candidates=4, max_rank=1)
    with pytest.warns(UserWarning, match="squared slope"):
        optimizer.step(lambda: X.sum() * 100 + quadratic(X) * 1e-3)


def test_thin_matrices_and_vectors_move_densely():
    params = [problem(10, 1), problem(4, 9), problem(5, 9), nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(7))]
    optimizer = LOZO(params, rank=2)
    assert [b.rank for b in optimizer.blocks] == [0, 0, 2, 0, 0]
    optimizer.step(lambda: sum(quadratic(p) for p in params))
    groups = [{"params": [problem(20, 20)], "low_rank": False}, {"params": [problem(20, 20)], "rank": 4}]
    assert [b.rank for b in LOZO(groups).blocks] == [0, 4]
    with pytest.warns(UserWarning, match="twice the rank 4: all of them move densely"):
        LOZOPlus([problem(8, 64), problem(64, 8)])


def test_a_refresh_in_which_some_layers_are_silent_is_no_warning():
    params = [problem(seed=s) for s in range(5)]
    optimizer = LOZOPlus(params, lr=1e-3, candidates=2, max_rank=1, interval=1, layerwise=True, score="energy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(optimizer, lambda: quadratic(params[0]), 3)


def test_a_weight_that_is_read_without_its_layer_is_perturbed_in_place():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.read = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return nn.functional.linear(self.called(x), self.read.weight)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Odd()
    x = torch.randn(4, 6, generator=generator())
    optimizer = LOZO(model.named_parameters(), lr=1e-2, model=model)
    before = model.read.weight.clone()
    inplace = LOZO(model.named_parameters(), lr=1e-2)
    rates = [o.suggest_lr(lambda: model(x).square().mean()) for o in (optimizer, inplace)]
    assert rates[0] == pytest.approx(rates[1], rel=0.05)
    optimizer.step(lambda: model(x).square().mean())
    assert [b.name for b in optimizer.weights.slots] == ["called.weight"]
    assert not torch.equal(model.read.weight, before)


def test_a_layer_that_does_more_than_its_kind_is_perturbed_in_place():
    class Scaled(nn.Embedding):  # as Gemma's
        def forward(self, ids):
            return 3 * super().forward(ids)

    embed = Scaled(12, 8)
    optimizer = LOZO(embed.named_parameters(), lr=1e-2, model=embed)
    assert not optimizer.weights.slots
    optimizer.step(lambda: embed(torch.arange(12)).square().mean())
    tied = nn.ModuleList([nn.Embedding(12, 8), Scaled(12, 8)])
    tied[1].weight = tied[0].weight
    for model in (tied, nn.Embedding(12, 8, max_norm=1.0), nn.Conv2d(12, 16, 3, groups=2)):
        assert not LOZO(model.named_parameters(), model=model).weights.slots


def test_a_layer_called_on_one_vector_or_by_keyword():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(9, 8, dtype=torch.float64)

        def forward(self, x):
            return self.layer(input=x)

    model = Named()
    twin, x = copy.deepcopy(model), gaussian(9)
    hooked = LOZO(model.named_parameters(), lr=1e-3, model=model)
    inplace = LOZO(twin.named_parameters(), lr=1e-3)
    hooked.step(lambda: model(x).square().sum())
    inplace.step(lambda: twin(x).square().sum())
    assert list(hooked.weights.slots)
    assert hooked.last.c == pytest.approx(inplace.last.c, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("used_before", [False, True])
def test_a_compiled_model_takes_the_steps_of_a_plain_one(used_before, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its checks cannot be traced
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 9)).double()
    twin, x = copy.deepcopy(model), gaussian(4, 9)
    compiled = torch.compile(model, backend="eager")
    if used_before:  # its hooks are no longer looked for: weights then move in place
        with torch.no_grad():
            compiled(x)
    one = LOZO(model.named_parameters(), lr=1e-2, interval=2, model=model)
    two = LOZO(twin.named_parameters(), lr=1e-2, interval=2, model=twin)
    for _ in range(5):
        one.step(lambda: compiled(x).square().mean())
        two.step(lambda: twin(x).square().mean())
        assert one.last.c == pytest.approx(two.last.c, rel=1e-7)


def test_weights_are_untouched_while_the_low_rank_back_end_looks():
    model, loss = small(torch.bfloat16)
    optimizer = LOZO(model.named_parameters(), lr=1e-2, model=model)
    hashes = []

    def closure():
        hashes.append(tuple(float(b.param.double().sum()) for b in optimizer.weights.slots))
        return loss()

    run(optimizer, closure, 3)
    assert len(set(hashes)) == 1
    assert optimizer.state[model.down.weight]["A"].dtype == torch.float32


def test_channels_last_kernels_and_double_use():
    conv = nn.Conv2d(6, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 6, 5, 5, generator=generator())
    start = conv.weight.detach().clone()
    optimizer = LOZO(conv.parameters(), lr=1e-3, rank=2)
    run(optimizer, lambda: (conv(x) ** 2).mean(), 3)
    assert not torch.equal(conv.weight, start)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    update = (conv.weight.detach() - start).flatten(1).double()
    assert torch.linalg.matrix_rank(update, rtol=1e-3) <= 2


def test_a_query_is_the_mean_over_processes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.add_(3.0))
    optimizer = MeZO([problem()])
    optimizer.step(lambda: 1.0)
    assert optimizer.last.losses == [1.0, 1.0]
    assert optimizer.last.loss == 1.0
    optimizer.step(lambda: 5.0)
    assert optimizer.last.loss == 2.0


def test_streams_of_devices_that_hold_no_parameter_are_left_alone(monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("this seeds every accelerator"))
    MeZO([problem()]).step(lambda: 1.0)


def test_measure_and_step_apart_do_what_step_does():
    X, Y = problem(), problem()
    one, two = LOZO([X], lr=1e-3), LOZO([Y], lr=1e-3)
    one.step(lambda: quadratic(X))
    info = two.measure(lambda: quadratic(Y))
    with pytest.raises(ValueError, match="twice"):
        two.measure(lambda: quadratic(Y))
    assert two.step() == info.loss
    assert torch.equal(X, Y)


def test_states_of_other_optimisers_and_late_groups_are_refused():
    optimizer = LOZOPlus([problem()])
    with pytest.raises(ValueError, match="the state of LOZO, not of LOZOPlus"):
        optimizer.load_state_dict(LOZO([problem()]).state_dict())
    with pytest.raises(ValueError, match="the state of LOZOPlus, not of LOZO"):
        LOZO([problem()]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="the state of another optimiser"):
        MeZO([problem()]).load_state_dict(torch.optim.SGD([problem()], lr=1.0).state_dict())
    with pytest.raises(ValueError, match="new optimiser"):
        optimizer.add_param_group({"params": [problem()]})


def test_generators_of_different_keys_differ_and_of_equal_keys_agree():
    device = torch.device("cpu")
    keys = [("a", 1), ("a", 2), ("b", 1), (1, "a"), (11,), (1, 1)]
    seeds = [seeded(device, *key).initial_seed() for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert seeded(device, "a", 1).initial_seed() == seeds[0]


def test_noise_on_16_bits_is_rounded_once():
    start = gaussian(40).float()
    X, Y = nn.Parameter(start.bfloat16()), nn.Parameter(start.bfloat16().float())
    with torch.no_grad():
        for p in (X, Y):
            MeZO([p]).blocks[0].add_noise(1e-2, 5)
    assert torch.equal(X, Y.bfloat16())


def test_noise_in_pieces_is_noise_in_one(monkeypatch):
    X = nn.Parameter(torch.zeros(50, 40))
    optimizer = MeZO([X])
    monkeypatch.setattr("subspan.optim.zeroth_order.blocks._PIECE", 300)
    with torch.no_grad():
        optimizer.blocks[0].add_noise(2.0, 5)
    assert float(X.detach().std()) == pytest.approx(2, rel=0.06)
    assert torch.unique(X.detach()).numel() > 1990


def trainer(folder, kind, steps, resume=False, compute_loss_func=None, dropout=0.1, **arguments):
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    from subspan.optim import ZOTrainer

    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = BertConfig(
            vocab_size=30, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )  # fmt: skip
        model = BertForSequenceClassification(shape)
    rows = [{"input_ids": torch.randint(0, 30, (6,), generator=generator(i)), "labels": i % 2} for i in range(16)]
    options = {} if kind == "mezo" else {"model": model}
    made = ZOTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), max_steps=steps, save_steps=2, report_to=[],
            logging_steps=1, use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
            **{"per_device_train_batch_size": 4} | arguments,
        ),
        compute_loss_func=compute_loss_func,
        train_dataset=rows,
        optimizers=(FAMILY[kind](model.named_parameters(), **options), None),
    )  # fmt: skip
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.parametrize("kind", ["mezo", "lozo+"])
def test_trainer_resumes_bit_for_bit_and_saves_merged_weights(tmp_path, kind):
    whole = trainer(tmp_path / "a", kind, 5)
    optimizer = whole._zeroth_order()
    assert optimizer.t == 5
    assert [round(e["loss"], 4) for e in whole.state.log_history if "loss" in e][-1] == round(optimizer.last.loss, 4)
    trainer(tmp_path / "b", kind, 4)
    import shutil

    shutil.rmtree(tmp_path / "b" / "checkpoint-4")
    resumed = trainer(tmp_path / "b", kind, 5, resume=True)
    for made in (whole, resumed):
        made.save_model(str(tmp_path / "end"))
    assert resumed._zeroth_order().total_queries == optimizer.total_queries
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "end" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in whole.model.named_parameters())


def test_trainer_takes_micro_batches_as_one_batch(tmp_path):
    options = {"dropout": 0.0, "label_smoothing_factor": 0.1}
    whole = trainer(tmp_path / "a", "lozo", 2, gradient_accumulation_steps=2, **options)
    assert whole._zeroth_order().t == 2
    assert whole._zeroth_order().total_queries == 4 + 1
    one = trainer(tmp_path / "b", "lozo", 2, per_device_train_batch_size=8, **options)
    assert whole._zeroth_order().last.losses == pytest.approx(one._zeroth_order().last.losses, rel=1e-5)
    whole.model_accepts_loss_kwargs = whole.label_smoother = None  # a model that averages each micro-batch by itself
    rows = [whole.data_collator(whole.train_dataset[i : i + 2]) for i in (0, 2)]
    with torch.no_grad():
        for batch, ends in zip(rows, (False, True), strict=True):
            whole.accelerator.gradient_state._set_sync_gradients(ends)
            loss = whole.training_step(whole.model, batch, num_items_in_batch=4)
        alone = [float(whole.compute_loss(whole.model, {**batch})) for batch in rows]
    assert float(loss) == pytest.approx(sum(alone) / 2, rel=1e-3)


def test_trainer_asks_a_loss_that_takes_the_labels_as_often_as_it_likes(tmp_path):
    seen = []

    def errors(outputs, labels, num_items_in_batch):
        seen.append(labels.tolist())
        return (outputs.logits.argmax(-1) != labels).sum() / num_items_in_batch

    halves = trainer(tmp_path / "a", "lozo", 1, compute_loss_func=errors, dropout=0.0, gradient_accumulation_steps=2)
    assert len(seen) == 6
    assert len({len(labels) for labels in seen}) == 1
    whole = trainer(tmp_path / "b", "lozo", 1, compute_loss_func=errors, dropout=0.0, per_device_train_batch_size=8)
    assert halves._zeroth_order().last.losses == pytest.approx(whole._zeroth_order().last.losses)


def test_trainer_refuses_other_optimisers(tmp_path):
    from transformers import TrainingArguments

    from subspan.optim import ZOTrainer

    made = ZOTrainer(model=nn.Linear(2, 2), args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    made.create_optimizer()
    with pytest.raises(TypeError, match="MeZO"):
        made.save_model()
