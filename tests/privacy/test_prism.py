"""The adaptive rule and the optimizer: T9, T13, section 3.3 and the edge cases of section 9."""

import copy
import itertools
import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor, nn

from subspan.errors import NonFinite
from subspan.linalg import SVD, LowRank, random_orthonormal, spectral_function
from subspan.privacy import Prism, balanced_random_init, spectral_init
from subspan.privacy.prism import (
    Moments,
    Rule,
    adaptive_direction,
    adaptive_side,
    eigenvalue_floor,
    horizontalise,
    inverse_root,
    noise_moment,
    refill,
)
from subspan.surgery import factor_pairs, shift_base
from tests.privacy.small import adapted, data, losses_of

D = torch.float64
FEW = settings(max_examples=30, deadline=None)
SIZES = st.tuples(st.integers(1, 4), st.integers(0, 6), st.integers(0, 6), st.integers(0, 2**31 - 1))


def random_z(sizes: tuple[int, int, int, int], balanced: bool = False) -> tuple[LowRank, torch.Generator]:
    r, dm, dn, seed = sizes
    g = torch.Generator().manual_seed(seed)
    u, v = (random_orthonormal(k, r, generator=g, dtype=D) for k in (r + dm, r + dn))
    z = LowRank.from_svd(SVD(u, torch.logspace(0, -1, r, dtype=D), v))
    if balanced:
        q = random_orthonormal(r, r, generator=g, dtype=D)
        return LowRank(z.A @ q, z.B @ q), g
    return z.regauge(torch.randn(r, r, generator=g, dtype=D) + 3 * torch.eye(r, dtype=D)), g


@FEW
@given(SIZES)
def test_t9_horizontalise_keeps_dz_and_has_least_norm(sizes: tuple[int, int, int, int]) -> None:
    z, g = random_z(sizes)
    dA, dB = torch.randn(z.A.shape, generator=g, dtype=D), torch.randn(z.B.shape, generator=g, dtype=D)
    hA, hB = horizontalise(z, dA, dB)
    torch.testing.assert_close(hA @ z.B.mT + z.A @ hB.mT, dA @ z.B.mT + z.A @ dB.mT, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(hB.mT @ z.B, z.A.mT @ hA, rtol=1e-9, atol=1e-9)
    assert float(hA.square().sum() + hB.square().sum()) <= float(dA.square().sum() + dB.square().sum()) * (1 + 1e-9)
    again = horizontalise(z, hA, hB)
    torch.testing.assert_close(again[0], hA, rtol=1e-9, atol=1e-9)


@FEW
@given(SIZES, st.floats(0.1, 10.0), st.sampled_from(["rank_space", "whitened"]), st.booleans(), st.booleans())
def test_t13_floor_bounds_the_direction(
    sizes: tuple[int, int, int, int], tau: float, precond: Any, small: bool, delayed: bool
) -> None:
    z, g = random_z(sizes, balanced=True)
    f, r = 0.5, z.rank
    d = torch.randn(z.A.shape, generator=g, dtype=D) * (1e-9 if small else 1e3) * tau
    gram = z.B.mT @ z.B
    rule = Rule((0.9, 0.999), 0.0, 1e4, tau, precond, "scalar", f, False, "none", delayed)
    zero = Moments(torch.zeros_like(d), torch.zeros(r, r, dtype=D))
    moments = zero
    whiten = spectral_function(gram, torch.sqrt) if precond == "whitened" else torch.eye(r, dtype=D)
    for t in range(1, 4):
        u, moments = adaptive_side(d / t, moments, torch.tensor(float(t), dtype=D), gram, 1.0, rule)
        mhat = moments.first / (1 - 0.9**t)
        size = torch.linalg.norm(u @ whiten)
        assert float(size) <= float(torch.linalg.norm(mhat)) / (math.sqrt(f) * tau) * (1 + 1e-6)
        if small:  # every eigenvalue lies below the floor
            torch.testing.assert_close(u @ whiten, mhat / (math.sqrt(f) * tau), rtol=1e-6, atol=0)
    expected = sum(0.1 * 0.9 ** (3 - t) * d / t for t in (1, 2, 3)) @ whiten
    torch.testing.assert_close(moments.first, expected, rtol=1e-9, atol=0)


def test_t13_floors_vanish_with_the_noise() -> None:
    gram = torch.diag(torch.tensor([4.0, 0.25], dtype=D))
    for kind in ("scalar", "geometry", "none"):
        assert float(eigenvalue_floor(kind, factor=1.0, noise_std=0.0, gram=gram, share=1.0)) == 0
    values = [
        float(eigenvalue_floor(kind, factor=0.5, noise_std=2.0, gram=gram, share=share))
        for kind, share in (("none", 1.0), ("scalar", 1.0), ("geometry", 1.0), ("geometry", 0.1))
    ]
    # mean of the inverse eigenvalues is (1/4 + 4) / 2; the geometry floor is never below the scalar one
    assert values == pytest.approx([0.0, 2.0, 2.0 * 2.125, 2.0])


def test_inverse_root_raises_small_eigenvalues_and_caps_none() -> None:
    e = random_orthonormal(4, 4, generator=torch.Generator().manual_seed(0), dtype=D)
    v = (e * torch.tensor([-1.0, 1e-9, 1.0, 1e4], dtype=D)) @ e.mT
    root = inverse_root(v, eps=0.0, floor=torch.tensor(1e-6, dtype=D), cond_max=1e6)
    w = torch.linalg.eigvalsh(root).flip(0).pow(-2)
    torch.testing.assert_close(w, torch.tensor([1e-2, 1e-2, 1.0, 1e4], dtype=D), rtol=1e-6, atol=0)
    root = inverse_root(v, eps=0.0, floor=torch.tensor(0.5, dtype=D), cond_max=1e6)
    torch.testing.assert_close(torch.linalg.eigvalsh(root).amax(), torch.tensor(0.5**-0.5, dtype=D))


@FEW
@given(SIZES, st.booleans(), st.booleans())
def test_debias_subtracts_exactly_the_noise_of_the_lift(
    sizes: tuple[int, int, int, int], horizontal: bool, whitened: bool
) -> None:
    """E[dAᵀ dA] / m over unit tangent noise, summed over an orthonormal basis of the tangent space, no sampling."""
    z, _ = random_z(sizes, balanced=True)
    space, (m, n) = z.tangent(), z.shape
    basis = torch.linalg.eigh(space.project(torch.eye(m * n, dtype=D).view(-1, m, n)).flatten(1))
    vectors = basis.eigenvectors[:, basis.eigenvalues > 0.5].mT.reshape(-1, m, n)
    dA, dB = space.lift(space.coordinates_of(vectors))
    if horizontal:
        dA, dB = horizontalise(z, dA, dB)
    for d, gram, rows in ((dA, z.B.mT @ z.B, m), (dB, z.A.mT @ z.A, n)):
        if whitened:
            s, e = torch.linalg.eigh(gram)
            d = d @ ((e * s.sqrt()) @ e.mT)
        expected = (d.mT @ d).sum(0) / rows
        got = noise_moment(gram, rows, horizontal=horizontal, whitened=whitened)
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


def test_delayed_uses_the_previous_second_moment_from_the_second_step_on() -> None:
    g = torch.Generator().manual_seed(0)
    d1, d2 = (torch.randn(5, 2, generator=g, dtype=D) for _ in "12")
    gram = torch.eye(2, dtype=D)
    rule = Rule((0.9, 0.99), 0.0, math.inf, 0.0, "rank_space", "none", 0.5, False, "none", True)
    zero = Moments(torch.zeros(5, 2, dtype=D), torch.zeros(2, 2, dtype=D))
    u1, moments = adaptive_side(d1, zero, torch.tensor(1.0, dtype=D), gram, 1.0, rule)
    floor = torch.zeros((), dtype=D)
    v1 = d1.mT @ d1 / 5
    torch.testing.assert_close(u1, d1 @ inverse_root(v1, eps=0.0, floor=floor, cond_max=math.inf))
    u2, _ = adaptive_side(d2, moments, torch.tensor(2.0, dtype=D), gram, 1.0, rule)
    mhat = (0.9 * 0.1 * d1 + 0.1 * d2) / (1 - 0.9**2)
    torch.testing.assert_close(u2, mhat @ inverse_root(v1, eps=0.0, floor=floor, cond_max=math.inf))


def test_whitened_rule_commutes_with_every_gauge_at_the_first_step() -> None:
    z, g = random_z((3, 4, 2, 5))
    R = torch.randn(3, 3, generator=g, dtype=D)
    dZ = []
    for x in (z, z.regauge(R)):
        space = x.tangent()
        v = space.gaussian(torch.Generator().manual_seed(1))
        uA, uB = space.lift(v)
        rule = Rule((0.9, 0.999), 1e-8, 1e4, 0.1, "whitened", "scalar", 0.5, False, "none", False)
        t = torch.ones((), dtype=D)
        out = []
        for d, gram in ((uA, x.B.mT @ x.B), (uB, x.A.mT @ x.A)):
            zero = Moments(torch.zeros_like(d), torch.zeros(3, 3, dtype=D))
            out.append(adaptive_side(d, zero, t, gram, 1.0, rule)[0])
        dZ.append(out[0] @ x.B.mT + x.A @ out[1].mT)
    torch.testing.assert_close(dZ[0], dZ[1], rtol=1e-8, atol=1e-9)


def reference(A: Tensor, B: Tensor, gradients: list[Tensor], lr: float, tau: float) -> list[Tensor]:
    """Section 3.3 and 3.4 with the released constants, by inverses, Kronecker solves and dense matrices."""
    (m, r), n = A.shape, len(B)
    u, s, vh = torch.linalg.svd(A @ B.mT, full_matrices=False)
    A, B = u[:, :r] * s[:r].sqrt(), vh[:r].mT * s[:r].sqrt()
    mA, mB, vA, vB = torch.zeros_like(A), torch.zeros_like(B), torch.zeros(r, r, dtype=D), torch.zeros(r, r, dtype=D)
    eye, seen = torch.eye(r, dtype=D), []

    def least(dA: Tensor, dB: Tensor) -> tuple[Tensor, Tensor]:
        sylvester = torch.kron(A.mT @ A, eye) + torch.kron(eye, B.mT @ B)
        om = torch.linalg.solve(sylvester, (dB.mT @ B - A.mT @ dA).flatten()).view(r, r)
        return dA + A @ om, dB - B @ om.mT

    def root(v: Tensor) -> Tensor:
        w, e = torch.linalg.eigh(v)
        w = (w.clamp(min=0) + 1e-8).clamp(min=0.5 * tau**2)
        return (e / w.clamp(min=float(w.max()) / 1e4).sqrt()) @ e.mT

    for t, G in enumerate(gradients, 1):
        M, N = A.mT @ A, B.mT @ B
        dA, dB = G @ B @ N.inverse(), G.mT @ A @ M.inverse()
        dA, dB = dA - A @ M.inverse() @ A.mT @ dA / 2, dB - B @ N.inverse() @ B.mT @ dB / 2
        dA, dB = least(dA, dB)
        mA, mB = 0.9 * mA + 0.1 * dA, 0.9 * mB + 0.1 * dB
        vA, vB = 0.999 * vA + 0.001 * dA.mT @ dA / m, 0.999 * vB + 0.001 * dB.mT @ dB / n
        c1, c2 = 1 - 0.9**t, 1 - 0.999**t
        uA, uB = least(mA / c1 @ root(vA / c2), mB / c1 @ root(vB / c2))
        u, s, vh = torch.linalg.svd(A @ B.mT - lr * (uA @ B.mT + A @ uB.mT), full_matrices=False)
        newA, newB = u[:, :r] * s[:r].sqrt(), vh[:r].mT * s[:r].sqrt()
        p, _, qh = torch.linalg.svd(newA.mT @ A + newB.mT @ B)
        A, B = newA @ p @ qh, newB @ p @ qh
        seen.append(A @ B.mT)
    return seen


@pytest.mark.parametrize("tau", [0.0, 0.05, 3.0])
def test_several_steps_are_those_of_a_plain_reference(tau: float) -> None:
    _, pairs = start()
    pair = pairs[0]
    m, n, _ = pair.shape
    g = torch.Generator().manual_seed(0)
    gradients = [torch.randn(m, n, generator=g, dtype=D) for _ in range(5)]
    expected = reference(pair.A.clone(), pair.B.clone(), gradients, 0.05, tau)
    opt = Prism([pair], 0.05, noise_std=tau)
    for G, z in zip(gradients, expected, strict=True):
        pair.param_A.grad, pair.param_B.grad = G @ pair.B, (G.mT @ pair.A).mT.contiguous()
        opt.step()
        torch.testing.assert_close(pair.low_rank(D).dense(), z, rtol=1e-8, atol=1e-8)


def test_the_defaults_are_those_of_the_released_runs() -> None:
    released = {
        "betas": (0.9, 0.999), "eps": 1e-8, "adaptive": True, "precond": "rank_space", "floor": "scalar",
        "floor_factor": 0.5, "debias": False, "cond_max": 1e4, "horizontal": "both", "delayed": False,
        "weight_decay": 0.0, "trust_ratio": False, "update_cap": None,
    }  # fmt: skip
    defaults = Prism(start()[1]).defaults
    assert {key: defaults[key] for key in released} == released


def test_the_geometry_floor_has_its_share_on_each_side() -> None:
    """A: (m - r) / m of the mean inverse eigenvalue, B: all of it; with tiny gradients the floors alone remain."""
    z, g = random_z((2, 5, 3, 1), balanced=True)
    (m, _), r, tau = z.shape, z.rank, 0.7
    rule = Rule((0.9, 0.999), 0.0, 1e4, tau, "rank_space", "geometry", 0.5, False, "none", False)
    dA, dB = (1e-9 * torch.randn(f.shape, generator=g, dtype=D) for f in (z.A, z.B))
    zero = [Moments(torch.zeros_like(d), torch.zeros(r, r, dtype=D)) for d in (dA, dB)]
    uA, uB, *_ = adaptive_direction(z, dA, dB, *zero, torch.ones((), dtype=D), rule)
    mean = float(torch.linalg.inv(z.A.mT @ z.A).trace()) / r
    for u, d, share in ((uA, dA, (m - r) / m), (uB, dB, 1.0)):
        torch.testing.assert_close(u, d / math.sqrt(0.5 * tau**2 * max(1.0, share * mean)), rtol=1e-6, atol=0)
    assert mean * (m - r) / m > 1  # or the share could not be seen


# ----------------------------------------------------------------------------------------------- without an engine


def start(dtype: torch.dtype = D, **options: Any) -> tuple[nn.Module, list]:
    model = adapted(dtype, **options)
    pairs = factor_pairs(model)
    spectral_init(pairs, torch.Generator().manual_seed(0))
    shift_base(model, pairs)
    return model, pairs


def fit(model: nn.Module, opt: torch.optim.Optimizer, steps: int, schedule: Any = None) -> list[float]:
    x, y = data(next(model.parameters()).dtype)
    seen = []
    for _ in range(steps):
        opt.zero_grad()
        loss = losses_of(model, x, y).mean()
        loss.backward()
        opt.step()
        if schedule is not None:
            schedule.step()
        seen.append(float(loss.detach()))
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precond": "whitened"},
        {"floor": "geometry", "noise_std": 0.01},
        {"floor": "none", "horizontal": "none"},
        {"debias": True, "noise_std": 0.001},
        {"delayed": True, "horizontal": "pre_moment"},
        {"trust_ratio": True, "lr": 0.05},
        {"update_cap": 0.5},
        {"weight_decay": 0.1, "horizontal": "pre_retract"},
        {"adaptive": False, "lr": 0.3},
    ],
)
def test_learns_without_privacy_under_every_option(options: dict) -> None:
    model, pairs = start()
    opt = Prism(pairs, **{"lr": 0.05, **options})
    losses = fit(model, opt, 40)
    assert losses[-1] < 0.7 * losses[0]
    for pair in pairs:
        assert float(pair.low_rank(D).imbalance()) < 1e-9


def test_works_with_a_scheduler_and_a_closure() -> None:
    model, pairs = start()
    opt = Prism(pairs, 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
    fit(model, opt, 20, schedule)
    assert opt.param_groups[0]["lr"] < 1e-8
    x, y = data()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = losses_of(model, x, y).mean()
        loss.backward()
        return loss

    assert float(opt.step(closure)) == pytest.approx(float(closure()), abs=1e-6)


@pytest.mark.parametrize("dtype", [D, torch.float32, torch.bfloat16])
def test_state_dict_round_trip_is_bit_equal(dtype: torch.dtype) -> None:
    model, pairs = start(dtype)
    opt = Prism(pairs, 0.05)
    fit(model, opt, 3)
    twin = copy.deepcopy(model)
    other = Prism(factor_pairs(twin), 0.7)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert fit(model, opt, 4) == fit(twin, other, 4)
    state = next(iter(other.state.values()))
    assert state["first_A"].dtype == torch.promote_types(dtype, torch.float32)


def test_half_precision_factors_learn() -> None:
    model, pairs = start(torch.bfloat16)
    losses = fit(model, Prism(pairs, 0.1), 40)
    assert losses[-1] < 0.8 * losses[0]


def test_equal_shapes_are_stepped_together_as_they_would_be_alone() -> None:
    model, pairs = start()
    twin = copy.deepcopy(model)
    together, alone = Prism(pairs, 0.05), Prism([{"pairs": [p]} for p in factor_pairs(twin)], 0.05)
    assert fit(model, together, 4) == pytest.approx(fit(twin, alone, 4), rel=1e-12)


def test_groups_have_their_own_rates() -> None:
    model, pairs = start()
    frozen = pairs[0].low_rank(D).dense()
    moving = pairs[1].low_rank(D).dense()
    fit(model, Prism([{"pairs": pairs[:1], "lr": 0.0}, {"pairs": pairs[1:]}], 0.05), 3)
    torch.testing.assert_close(pairs[0].low_rank(D).dense(), frozen)
    assert float((pairs[1].low_rank(D).dense() - moving).abs().max()) > 1e-3


def test_a_head_is_trained_by_adamw_in_the_same_object() -> None:
    model, pairs = start(target_modules=["0", "2"], modules_to_save=["4"])
    head = [p for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n]
    twin = copy.deepcopy(model)
    opt = Prism(pairs, 0.0, dense=head, dense_lr=0.02)
    assert [g["lr"] for g in opt.param_groups] == [0.0, 0.02]
    reference = torch.optim.AdamW(
        [p for n, p in twin.named_parameters() if p.requires_grad and ".lora_" not in n], 0.02, weight_decay=0.0
    )
    assert fit(model, opt, 5) == pytest.approx(fit(twin, reference, 5), rel=1e-9)


def test_someone_who_rescales_the_stored_factors_between_steps_changes_nothing() -> None:
    model, pairs = start()
    twin = copy.deepcopy(model)
    plain, edited = Prism(pairs, 0.05), Prism(factor_pairs(twin), 0.05)
    fit(model, plain, 4), fit(twin, edited, 4)
    g = torch.Generator().manual_seed(3)
    for pair in factor_pairs(twin):
        pair.write(pair.low_rank(D).regauge(torch.randn(3, 3, generator=g, dtype=D)))
    assert fit(twin, edited, 4) == pytest.approx(fit(model, plain, 4), rel=1e-8)


def test_update_cap_and_trust_ratio_bound_the_step() -> None:
    for options, expected in (
        ({"update_cap": 1e-3}, lambda z: 1e-3),
        ({"trust_ratio": True}, lambda z: float(z.norm())),
    ):
        model, pairs = start()
        before = [LowRank(p.A.clone(), p.B.clone()) for p in pairs]
        fit(model, Prism(pairs, 1e-3, **options), 1)
        for z, pair in zip(before, pairs, strict=True):
            moved = float((pair.low_rank(D).dense() - z.dense()).norm())
            assert moved == pytest.approx(1e-3 * expected(z), rel=0.01)


def test_a_small_step_moves_the_factors_little_so_that_moments_keep_their_meaning() -> None:
    model = adapted()
    pairs = factor_pairs(model)
    balanced_random_init(pairs, generator=torch.Generator().manual_seed(0))  # equal singular values: no preferred frame
    opt = Prism(pairs, 1e-7)
    fit(model, opt, 3)
    before = [LowRank(p.A.clone(), p.B.clone()) for p in pairs]
    fit(model, opt, 1)
    for z, pair in zip(before, pairs, strict=True):
        assert float((pair.A - z.A).norm()) < 1e-2 * float(z.A.norm())
        assert float((pair.B - z.B).norm()) < 1e-2 * float(z.B.norm())


def test_weight_decay_shrinks_z_itself() -> None:
    model, pairs = start()
    before = [p.low_rank(D).dense().clone() for p in pairs]
    for pair in pairs:
        pair.param_A.grad, pair.param_B.grad = torch.zeros_like(pair.param_A), torch.zeros_like(pair.param_B)
    Prism(pairs, 0.1, weight_decay=0.5).step()
    for z, pair in zip(before, pairs, strict=True):
        torch.testing.assert_close(pair.low_rank(D).dense(), 0.95 * z)
    del model


def test_lost_rank_is_refilled_without_looking_at_data(caplog: pytest.LogCaptureFixture) -> None:
    g = torch.Generator().manual_seed(0)
    u, v = (random_orthonormal(k, 3, generator=g, dtype=D) for k in (6, 5))
    z = LowRank.from_svd(SVD(u, torch.tensor([2.0, 1.0, 1e-9], dtype=D), v))
    filled, lost = refill(z, torch.tensor(2.0, dtype=D), seed=4)
    again, _ = refill(z, torch.tensor(2.0, dtype=D), seed=4)
    assert bool(lost)
    torch.testing.assert_close(filled.svd().S, torch.tensor([2.0, 1.0, 2e-4], dtype=D))
    torch.testing.assert_close(filled.truncate(2).dense(), z.truncate(2).dense())
    assert torch.equal(filled.A, again.A)
    empty, lost = refill(LowRank(torch.zeros(6, 3, dtype=D), torch.zeros(5, 3, dtype=D)), torch.tensor(2.0, dtype=D), 0)
    assert bool(lost) and bool(empty.svd().S[-1] > 0)  # noqa: PT018
    kept, lost = refill(filled, torch.tensor(2.0, dtype=D), seed=4)
    assert not bool(lost) and kept is filled  # noqa: PT018

    # a step that lands exactly on rank 2: the whole update of the last direction is taken away
    model, pairs = start()
    pair = pairs[0]
    svd = pair.low_rank(D).svd()
    space = pair.low_rank(D).tangent()
    G = (svd.U[:, 2:] * svd.S[2]) @ svd.V[:, 2:].mT
    pair.param_A.grad, pair.param_B.grad = G @ pair.B, (G.mT @ pair.A).mT.contiguous()
    with caplog.at_level(logging.WARNING):
        Prism([pair], 1.0, adaptive=False).step()
    assert "lost rank" in caplog.text
    assert float(pair.low_rank(D).svd().S[-1]) == pytest.approx(1e-4 * float(svd.S[0]))
    del model, space


def test_a_missing_or_bad_gradient_is_never_silent() -> None:
    model, pairs = start()
    x, y = data()
    losses_of(model, x, y).mean().backward()
    opt = Prism(pairs, 0.05)
    pairs[1].param_B.grad = None
    with pytest.raises(ValueError, match="2: only one of the two factors has a gradient"):
        opt.step()
    pairs[1].param_B.grad = torch.full_like(pairs[1].param_B, math.nan)
    before = [p.A.clone() for p in pairs]
    with pytest.raises(NonFinite, match="2: the gradient"):
        opt.step()
    assert torch.equal(pairs[1].A, before[1])
    for pair in pairs:  # no gradient at all: nothing to do, as in every torch optimizer
        pair.param_A.grad = pair.param_B.grad = None
    opt.step()
    assert all(torch.equal(p.A, b) for p, b in zip(pairs[1:], before[1:], strict=True))


def test_pefts_zero_start_is_refused_by_name() -> None:
    model = adapted()
    losses_of(model, *data()).mean().backward()
    with pytest.raises(ValueError, match=r"^0: .*peft's default start has B = 0.*spectral_init"):
        Prism(factor_pairs(model), 0.05).step()


def test_bad_arguments_are_refused() -> None:
    _, pairs = start()
    bad: list[tuple[dict, str]] = [
        ({"lr": -0.1}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"eps": -1.0}, "eps"),
        ({"noise_std": -1.0}, "noise_std"),
        ({"cond_max": 0.5}, "cond_max"), ({"update_cap": 0.0}, "update_cap"), ({"precond": "x"}, "precond"),
        ({"floor": "x"}, "floor"), ({"horizontal": "x"}, "horizontal"),
    ]  # fmt: skip
    for options, message in bad:
        with pytest.raises((ValueError, TypeCheckError), match=message):
            Prism(pairs, **options)
    with pytest.raises(ValueError, match="no factor pairs"):
        Prism([])
    with pytest.raises((TypeError, TypeCheckError), match="FactorPair"):
        Prism(list(itertools.chain.from_iterable((p.param_A, p.param_B) for p in pairs)))
    with pytest.raises(ValueError, match="shared with another module"):
        Prism([pairs[0], pairs[0]])


def test_quantised_or_too_thin_bases_are_refused_by_the_spectral_start() -> None:
    model = adapted(r=9)
    with pytest.raises(ValueError, match="rank 9 exceeds"):
        spectral_init(factor_pairs(model))
    _, pairs = start()
    base = pairs[0].layer.get_base_layer()
    base.weight.requires_grad_(False)
    base.weight.data = base.weight.data.to(torch.int8)
    with pytest.raises(Exception, match="dequantise"):
        spectral_init(pairs)
