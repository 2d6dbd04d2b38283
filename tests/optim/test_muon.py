"""MuonAdamW: the theory of the spec's section 4 (T1-T4, T8-T12, T14), then its section 9."""

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from subspan.errors import NonFinite
from subspan.linalg import newton_schulz, polar, random_orthonormal
from subspan.optim import MuonAdamW, from_torch_muon, muon_scale
from subspan.optim.muon import _CHUNK_BYTES

SEEDS = st.integers(0, 2**31)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    p = nn.Parameter(gaussian(*shape, seed=seed).to(dtype))
    p.grad = gaussian(*shape, seed=seed + 1000).to(dtype)
    return p


def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[Tensor]:
    """Steps with gradients that depend only on the step and the parameter."""
    for step in range(start, start + steps):
        for i, p in enumerate(params):
            p.grad = gaussian(*p.shape, seed=97 * step + i).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


# ------------------------------------------------------------------------------------------- implicit bias (T1 - T4)


class Problem:
    """|(W0 + W A) x - y|² / 2 in W from W = 0; A, fixed, is the identity or a LoRA factor (then W is its partner)."""

    def __init__(self, seed: int, pretrained: bool = False, lora: bool = False) -> None:
        self.x, self.y = gaussian(5, seed=seed), gaussian(4, seed=seed + 10)
        self.w0 = gaussian(4, 5, seed=seed + 20) if pretrained or lora else torch.zeros(4, 5, dtype=torch.float64)
        a = gaussian(3, 5, seed=seed + 30) if lora else torch.eye(5, dtype=torch.float64)
        self.z, self.e = a @ self.x, self.y - self.w0 @ self.x
        self.w = nn.Parameter(torch.zeros(4, len(self.z), dtype=torch.float64))


def solve(use_muon: bool, problems: list[Problem], steps: int) -> list[Tensor]:
    """Steps of 1/t by ``MuonAdamW``: exact polar factors, or AdamW without memory, which is SignGD."""
    ways = {True: {"momentum": 0.0, "nesterov": False, "ns": "exact", "scale": "none"}, False: {"betas": (0.0, 0.0)}}
    params = [problem.w for problem in problems]
    optimizer = MuonAdamW([{"params": params, "use_muon": use_muon}], lr=1.0, eps=1e-300, **ways[use_muon])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    for _ in range(steps):
        for p in problems:
            p.w.grad = torch.outer(p.w.detach() @ p.z - p.e, p.z)
        optimizer.step()
        schedule.step()
    return [p.detach() for p in params]


@pytest.mark.slow
def test_t1_adam_side_bias_is_the_minimum_max_norm_solution() -> None:
    p = Problem(0)
    (w,) = solve(False, [p], 20_000)
    torch.testing.assert_close(w, torch.outer(p.y, p.x.sign()) / p.x.abs().sum(), atol=1e-3, rtol=0)
    assert float(w.abs().max()) == pytest.approx(float(p.y.abs().max() / p.x.abs().sum()), abs=1e-3)


@pytest.mark.slow
def test_t2_muon_side_bias_is_the_minimum_spectral_norm_solution() -> None:
    p = Problem(0)
    (w,) = solve(True, [p], 20_000)
    torch.testing.assert_close(w, torch.outer(p.y, p.x) / p.x.dot(p.x), atol=1e-3, rtol=0)
    assert float(torch.linalg.matrix_norm(w, 2)) == pytest.approx(float(p.y.norm() / p.x.norm()), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("use_muon", [False, True])
def test_t3_t4_the_correction_of_a_pretrained_start_and_the_lora_surrogate_solve_the_same_for_the_residual(
    use_muon: bool,
) -> None:
    problems = [Problem(2, pretrained=True), Problem(5, lora=True)]
    # Steps of 1/4000 end within the tolerance too, in a fifth of the time.
    for p, w in zip(problems, solve(use_muon, problems, 4000), strict=True):
        z, e = p.z, p.e
        expected = torch.outer(e, z) / z.dot(z) if use_muon else torch.outer(e, z.sign()) / z.abs().sum()
        torch.testing.assert_close(w, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("r", [1, 2, 3, 8, 64])
def test_t4_inflation_by_the_mismatched_optimizer_is_bounded_tightly(r: int) -> None:
    z = np.random.default_rng(r).standard_normal((100_000, r)) * np.random.default_rng(r + 1).pareto(1.0, (100_000, r))
    one, two, top = np.abs(z).sum(1), np.sqrt((z**2).sum(1)), np.abs(z).max(1)
    in_max_norm = top * one / two**2
    in_spectral_norm = np.sqrt((z != 0).sum(1)) * two / one
    assert in_max_norm.max() <= (1 + math.sqrt(r)) / 2 + 1e-12
    assert in_spectral_norm.max() <= math.sqrt(r) + 1e-12
    assert min(in_max_norm.min(), in_spectral_norm.min()) >= 1 - 1e-12  # a mismatch never helps
    worst = np.array([1.0, *[1 / (1 + math.sqrt(r))] * (r - 1)])
    attained = np.abs(worst).max() * np.abs(worst).sum() / (worst**2).sum()
    assert attained == pytest.approx((1 + math.sqrt(r)) / 2, abs=1e-12)
    spike = np.array([1.0, *[1e-9] * (r - 1)])
    assert math.sqrt(r) * np.linalg.norm(spike) / np.abs(spike).sum() == pytest.approx(math.sqrt(r), rel=1e-6)


# ------------------------------------------------------------------------------------------------ the step (T8 - T12)


@pytest.mark.parametrize("ns", ["quintic", "polar_express", "exact"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(4, 30), (30, 4), (6, 5)])
def test_step_follows_the_equations(ns: str, nesterov: bool, shape: tuple[int, int]) -> None:
    lr, decay, mu = 0.1, 0.3, 0.9
    p = parameter(*shape, dtype=torch.float64)
    optimizer = MuonAdamW([p], lr, decay, momentum=mu, nesterov=nesterov, ns=ns)
    w, m = p.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for step in range(3):
        g = gaussian(*shape, seed=step)
        m = mu * m + g
        u = g + mu * m if nesterov else m
        o = polar(u) if ns == "exact" else newton_schulz(u, 5, ns, fast=False)
        w = w * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(shape)) * o
        p.grad = g
        optimizer.step()
        torch.testing.assert_close(p.detach(), w, atol=1e-10, rtol=0)


@given(st.integers(0, 4), SEEDS)
@settings(deadline=None, max_examples=15)
def test_t8_batched_equals_per_parameter(extra: int, seed: int) -> None:
    shapes = [(4, 30), (30, 4), (4, 30), (6, 6), (3, 2, 2, 2), (4, 30)][: 2 + extra]
    trained = []
    for batched in (True, False):
        params = [parameter(*s, seed=seed + i) for i, s in enumerate(shapes)]
        trained.append(run(params, MuonAdamW(params, 0.1, batched=batched), 3))
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_t8_stacks_beyond_the_chunk_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for chunk in (2**20, 600):  # 600 bytes: one 4 x 30 matrix a piece
        monkeypatch.setitem(_CHUNK_BYTES, "cpu", chunk)
        params = [parameter(4, 30, seed=i) for i in range(5)]
        trained.append(run(params, MuonAdamW(params, 0.1), 2))
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("nesterov", [True, False])
def test_t9_sum_form_equals_lerp_form_and_both_are_recorded(nesterov: bool) -> None:
    trained = {}
    for form in ("sum", "lerp"):
        params = [parameter(4, 30), parameter(7, 5, seed=1)]
        optimizer = MuonAdamW(params, 0.1, momentum_form=form, nesterov=nesterov)
        trained[form] = run(params, optimizer, 5)
        assert optimizer.state_dict()["param_groups"][0]["momentum_form"] == form
    for a, b in zip(*trained.values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@given(m=st.integers(1, 20), n=st.integers(1, 20), seed=SEEDS)
@settings(deadline=None, max_examples=30)
def test_t10_exact_update_has_rms_of_a_fifth_of_the_rate(m: int, n: int, seed: int) -> None:
    p = nn.Parameter(torch.zeros(m, n, dtype=torch.float64))
    p.grad = gaussian(m, n, seed=seed)
    MuonAdamW([p], lr=0.01, ns="exact").step()
    assert float(p.detach().square().mean().sqrt()) == pytest.approx(0.2 * 0.01, rel=1e-6)


@given(m=st.integers(1, 20), n=st.integers(1, 20), seed=SEEDS)
@settings(deadline=None, max_examples=30)
def test_t10_newton_schulz_update_has_that_rms_within_the_range_of_its_values(m: int, n: int, seed: int) -> None:
    # The range of T5 is that of singular values from 0.01 of the Frobenius norm; smaller ones come out smaller.
    k, g = min(m, n), torch.Generator().manual_seed(seed)
    u, v = (random_orthonormal(d, k, generator=g, dtype=torch.float64) for d in (m, n))
    s = 0.05 ** torch.rand(k, generator=g, dtype=torch.float64)
    p = nn.Parameter(torch.zeros(m, n, dtype=torch.float64))
    p.grad = (u * s) @ v.mT
    MuonAdamW([p], lr=0.01).step()
    assert 0.2 * 0.01 * 0.68 <= float(p.detach().square().mean().sqrt()) <= 0.2 * 0.01 * 1.21


def test_scales_and_orientation() -> None:
    assert muon_scale((8, 200)) == pytest.approx(0.2 * math.sqrt(200))
    assert muon_scale((200, 2, 2, 2)) == pytest.approx(0.2 * math.sqrt(200))
    assert muon_scale((200, 8), "original") == 5.0
    assert muon_scale((8, 200), "original") == 1.0
    assert muon_scale((8, 200), "original", fan_in_fan_out=True) == 5.0
    assert muon_scale((8, 200), "none") == 1.0


@given(log_size=st.floats(-6, 6), steps=st.integers(1, 6), seed=SEEDS)
@settings(deadline=None, max_examples=25)
def test_t11_spectral_norm_of_a_step_is_bounded_whatever_the_gradient(log_size: float, steps: int, seed: int) -> None:
    p = parameter(5, 24, seed=seed, dtype=torch.float64)
    optimizer = MuonAdamW([p], lr=0.1)
    bound = 1.21 * 0.1 * muon_scale(p.shape)
    for step in range(steps):
        before = p.detach().clone()
        p.grad = 10**log_size * gaussian(5, 24, seed=seed + step) * gaussian(1, 24, seed=seed - step - 1).exp()
        optimizer.step()
        assert float(torch.linalg.matrix_norm(p.detach() - before, 2)) <= bound


def test_t11_merged_lora_change_is_bounded() -> None:
    a, b, s = parameter(3, 20, dtype=torch.float64), parameter(9, 3, seed=1, dtype=torch.float64), 2.0
    a0, b0 = a.detach().clone(), b.detach().clone()
    MuonAdamW([a, b], lr=0.1).step()
    two = lambda x: float(torch.linalg.matrix_norm(x.detach(), 2))  # noqa: E731
    da, db = 1.21 * 0.1 * muon_scale(a.shape), 1.21 * 0.1 * muon_scale(b.shape)
    assert two(s * (b @ a - b0 @ a0)) <= s * (db * two(a0) + two(b0) * da + db * da)


@pytest.mark.parametrize("c", [1e-3, 1e3])
def test_t12_multiplying_the_loss_leaves_the_trajectory_unchanged(c: float) -> None:
    trained = []
    for factor in (1.0, c):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12, bias=False), nn.Tanh(), nn.Linear(12, 4, bias=False))
        optimizer = MuonAdamW(model.parameters(), lr=0.02)
        x, y = gaussian(32, 6).float(), gaussian(32, 4, seed=1).float()
        for _ in range(10):
            optimizer.zero_grad()
            (factor * (model(x) - y).square().sum()).backward()
            optimizer.step()
        trained.append([p.detach() for p in model.parameters()])
    for p, q in zip(*trained, strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


def mixed() -> tuple[list[nn.Parameter], MuonAdamW]:
    params = [parameter(4, 30), parameter(30, 4, seed=1), parameter(5, 6, seed=2), parameter(7, seed=3)]
    groups = [{"params": params[:3], "use_muon": True}, {"params": params[3:], "use_muon": False}]
    return params, MuonAdamW(groups, lr=0.05, weight_decay=0.1)


def test_t14_resume_is_bit_exact() -> None:
    params, optimizer = mixed()
    whole = run(params, optimizer, 6)
    params, optimizer = mixed()
    run(params, optimizer, 3)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    params, optimizer = mixed()
    with torch.no_grad():
        for p, value in zip(params, saved["params"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved["optimizer"])
    for a, b in zip(run(params, optimizer, 3, start=3), whole, strict=True):
        assert torch.equal(a, b)


# --------------------------------------------------------------------------------------------------- torch's optimisers


def test_adamw_part_is_torch_adamw() -> None:
    ours, theirs = [parameter(3, 4), parameter(5, seed=1)], [parameter(3, 4), parameter(5, seed=1)]
    options = dict(lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    a = run(ours, MuonAdamW([{"params": ours, "use_muon": False}], **options), 5)
    b = run(theirs, torch.optim.AdamW(theirs, **options), 5)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("scale", [("original", None), ("match_rms", "match_rms_adamw")])
def test_muon_part_follows_torch_muon_up_to_its_bfloat16(scale: tuple[str, str | None]) -> None:
    ours, theirs = parameter(6, 9), parameter(6, 9)
    options = dict(lr=0.02, weight_decay=0.1)
    a = run([ours], MuonAdamW([ours], scale=scale[0], **options), 5)
    b = run([theirs], torch.optim.Muon([theirs], adjust_lr_fn=scale[1], **options), 5)
    torch.testing.assert_close(a[0], b[0], atol=0.02 * 5 * 0.03, rtol=0)
    assert not torch.equal(a[0], b[0])


@pytest.mark.parametrize("form", ["sum", "lerp"])
def test_from_torch_muon_continues_the_run(form: str) -> None:
    def fresh() -> list[nn.Parameter]:
        return [parameter(6, 9), parameter(9, 6, seed=1), parameter(5, seed=2)]

    old = fresh()
    muon = torch.optim.Muon(old[:2], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(old[2:], lr=0.01, betas=(0.8, 0.9), weight_decay=0.0)
    for step in range(4):
        for i, p in enumerate(old):
            p.grad = gaussian(*p.shape, seed=97 * step + i).float()
        muon.step()
        adamw.step()
    kept = [s["momentum_buffer"].clone() for s in muon.state.values()]
    new = from_torch_muon(muon, adamw, momentum_form=form)
    factor = 10.0 if form == "sum" else 1.0
    for p, before in zip(old[:2], kept, strict=True):
        torch.testing.assert_close(new.state[p]["momentum_buffer"], factor * before)
    # The twin goes on with torch's optimisers, from copies of their state.
    twin = [nn.Parameter(p.detach().clone()) for p in old]
    muon2 = torch.optim.Muon(twin[:2], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw2 = torch.optim.AdamW(twin[2:], lr=0.01, betas=(0.8, 0.9), weight_decay=0.0)
    muon2.load_state_dict(copy.deepcopy(muon.state_dict()))
    adamw2.load_state_dict(copy.deepcopy(adamw.state_dict()))
    for p, q in zip(twin, old, strict=True):
        p.grad = q.grad = gaussian(*q.shape, seed=5).float()
    for optimizer in (new, muon2, adamw2):
        optimizer.step()
    assert torch.equal(twin[2], old[2])
    for p, q in zip(twin[:2], old[:2], strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=0.02 * 0.02, rtol=0)  # torch iterates in bfloat16


def test_from_torch_muon_refuses_what_it_cannot_reproduce() -> None:
    with pytest.raises(ValueError, match="ns_coefficients"):
        from_torch_muon(torch.optim.Muon([parameter(2, 3)], ns_coefficients=(3.0, -4.0, 2.0)))
    with pytest.raises(ValueError, match="amsgrad"):
        from_torch_muon(torch.optim.Muon([parameter(2, 3)]), torch.optim.AdamW([parameter(3)], amsgrad=True))


# ------------------------------------------------------------------------------------------------- refusals (section 9)


def test_empty_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        MuonAdamW([])
    with pytest.raises(ValueError, match="every group is empty"):
        MuonAdamW([{"params": []}, {"params": []}])


def test_vectors_and_scalars_in_a_muon_group_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"norm\.weight .*1 dimension.*use_muon=False"):
        MuonAdamW([("layer.weight", parameter(2, 2)), ("norm.weight", parameter(2))])
    with pytest.raises(ValueError, match=r"parameter 0 .*0 dimension"):
        MuonAdamW([nn.Parameter(torch.tensor(1.0))])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": math.inf}, "lr must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"eps": -1e-8}, "eps must be"),
        ({"momentum": 1.0}, "momentum must lie"),
        ({"momentum": -0.1}, "momentum must lie"),
        ({"betas": (0.9, 1.0)}, "betas must lie"),
        ({"ns_steps": 0}, "ns_steps must lie"),
        ({"ns_steps": 100}, "ns_steps must lie"),
        ({"scale": "huge"}, "'huge'"),
        ({"momentum_form": "ema"}, "'ema'"),
        ({"ns_dtype": torch.int8}, "ns_dtype"),
        ({"state_dtype": torch.int32}, "state_dtype"),
    ],
)
def test_options_out_of_range_are_refused_and_leave_no_trace(option: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MuonAdamW([{"params": [parameter(2, 3)], **option}])
    optimizer = MuonAdamW([parameter(2, 3)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(2, 3)], **option})
    assert len(optimizer.param_groups) == 1


def test_integers_and_complex_numbers_are_refused() -> None:
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(TypeError, match="real floating-point"):
            MuonAdamW([torch.zeros(2, 2, dtype=dtype)])


def test_the_same_parameter_twice_is_refused() -> None:
    p = parameter(2, 3)
    with pytest.raises(ValueError, match="more than one parameter group"):
        MuonAdamW([{"params": [p]}, {"params": [p]}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch only warns
        with pytest.raises(ValueError, match="twice"):
            MuonAdamW([p, p])


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"table .*sparse"):
        MuonAdamW([{"params": [("table", embedding.weight)], "use_muon": False}]).step()


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_are_skipped_with_one_warning(use_muon: bool, bad: float) -> None:
    good, ill = parameter(3, 20), parameter(3, 20, seed=1)
    optimizer = MuonAdamW([{"params": [("good", good), ("ill", ill)], "use_muon": use_muon}], 0.1, 0.1)
    optimizer.step()
    before, state = ill.detach().clone(), copy.deepcopy(optimizer.state[ill])
    healthy = good.detach().clone()
    ill.grad[0, 0] = bad
    with pytest.warns(UserWarning, match="skips ill"):
        optimizer.step()
    assert torch.equal(ill, before)
    assert all(torch.equal(v, optimizer.state[ill][k]) for k, v in state.items())
    assert not torch.equal(good, healthy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_nonfinite_gradients_raise_before_anything_changes_when_asked() -> None:
    good, ill = parameter(3, 20), parameter(3, seed=1)
    ill.grad[1] = math.nan
    optimizer = MuonAdamW(
        [{"params": [("good", good)]}, {"params": [("ill", ill)], "use_muon": False}], error_if_nonfinite=True
    )
    before = good.detach().clone()
    with pytest.raises(NonFinite, match="ill"):
        optimizer.step()
    assert torch.equal(good, before)


def test_huge_finite_gradients_are_not_mistaken_for_infinite_ones() -> None:
    p = parameter(300, 200, dtype=torch.float16)
    p.grad = torch.full((300, 200), 300.0, dtype=torch.float16)
    assert not p.grad.norm().isfinite()  # beyond float16
    before = p.detach().clone()
    MuonAdamW([p], 0.1).step()
    assert not torch.equal(p, before)
    assert p.isfinite().all()


# ------------------------------------------------------------------------------------------------------- keeps working


def test_parameters_without_gradient_wait_and_join_later() -> None:
    p, late = parameter(3, 20), parameter(3, 20, seed=1)
    late.grad = None
    late.requires_grad_(False)
    optimizer = MuonAdamW([p, late], 0.1)
    before = late.detach().clone()
    optimizer.step()
    assert torch.equal(late, before)
    assert late not in optimizer.state
    late.requires_grad_(True)
    late.grad = gaussian(3, 20).float()
    optimizer.step()
    assert not torch.equal(late, before)


def test_zero_gradient_moves_nothing_but_decay_applies() -> None:
    for use_muon in (True, False):
        p = parameter(3, 20)
        p.grad = torch.zeros(3, 20)
        before = p.detach().clone()
        MuonAdamW([{"params": [p], "use_muon": use_muon}], 0.1, 0.5).step()
        torch.testing.assert_close(p.detach(), 0.95 * before)


def test_first_lora_step_with_b_zero_leaves_a_alone() -> None:
    a, b = nn.Parameter(gaussian(3, 20).float()), nn.Parameter(torch.zeros(9, 3))
    optimizer = MuonAdamW([a, b], 0.1)
    start = a.detach().clone()
    x, y = gaussian(8, 20).float(), gaussian(8, 9, seed=1).float()
    (x @ a.mT @ b.mT - y).square().mean().backward()
    optimizer.step()
    assert torch.equal(a, start)
    assert b.detach().norm() > 0


def test_vanishing_gradient_is_attenuated_by_eps_not_amplified() -> None:
    p = parameter(3, 20)
    before = p.detach().clone()
    p.grad = 1e-12 * p.grad / p.grad.norm()
    MuonAdamW([p], 0.1, momentum=0.0, nesterov=False).step()
    # 1e-12 / 1e-7 times the quintic's slope at zero, 485, instead of about 1.
    assert float(torch.linalg.matrix_norm(p.detach() - before, 2)) < 0.1 * muon_scale(p.shape) * 0.006


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (12, 5), (2, 3, 4), (4, 2, 3, 3), (4, 2, 2, 2, 2)])
def test_rows_columns_high_ranks_and_convolutions_work(shape: tuple[int, ...]) -> None:
    p = parameter(*shape)
    before = p.detach().clone()
    MuonAdamW([p], 0.1, scale="none").step()
    moved = (p.detach() - before).flatten(1) / -0.1
    expected = newton_schulz(p.grad.flatten(1))
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=0)
    if 1 in (moved.shape[0], moved.shape[1]):
        assert float(moved.norm()) == pytest.approx(0.6964, abs=1e-4)
        q = parameter(*shape)
        start = q.detach().clone()
        MuonAdamW([q], 0.1, scale="none", ns="exact").step()
        assert float((q.detach() - start).norm()) == pytest.approx(0.1, abs=1e-5)


def test_channels_last_and_other_noncontiguous_gradients_give_the_same() -> None:
    plain, strided = parameter(4, 3, 5, 5), parameter(4, 3, 5, 5)
    strided.data = strided.data.contiguous(memory_format=torch.channels_last)
    strided.grad = strided.grad.contiguous(memory_format=torch.channels_last)
    for p in (plain, strided):
        MuonAdamW([p], 0.1).step()
    torch.testing.assert_close(plain.detach(), strided.detach())
    p, q = parameter(6, 9), parameter(6, 9)
    q.grad = q.grad.mT.contiguous().mT
    for x in (p, q):
        MuonAdamW([x], 0.1).step()
    torch.testing.assert_close(p.detach(), q.detach())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 20), (6, 6)])
def test_gradient_and_buffer_are_never_changed_by_the_iteration(
    nesterov: bool, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    # torch 2.13's Muon normalises the momentum buffer in place for bfloat16 parameters without Nesterov.
    for state_dtype in (None, dtype):
        p = parameter(*shape, dtype=dtype)
        grad = p.grad.clone()
        optimizer = MuonAdamW([p], 0.01, nesterov=nesterov, state_dtype=state_dtype, ns_dtype=dtype)
        optimizer.step()
        assert torch.equal(p.grad, grad)
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], grad.to(state_dtype or torch.float32))


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_have_float32_buffers_that_survive_resume(use_muon: bool, dtype: torch.dtype) -> None:
    def fresh() -> tuple[list[nn.Parameter], MuonAdamW]:
        params = [parameter(3, 20, dtype=dtype)]
        return params, MuonAdamW([{"params": params, "use_muon": use_muon}], 0.05, 0.1)

    params, optimizer = fresh()
    whole = run(params, optimizer, 4)[0]
    params, optimizer = fresh()
    middle = run(params, optimizer, 2)[0]
    saved = optimizer.state_dict()
    params, optimizer = fresh()
    params[0].data.copy_(middle)
    optimizer.load_state_dict(saved)
    buffers = [v for k, v in optimizer.state[params[0]].items() if k != "step"]
    assert {b.dtype for b in buffers} == {torch.float32}
    assert torch.equal(run(params, optimizer, 2, start=2)[0], whole)


def test_half_precision_is_rounded_once() -> None:
    p, q = parameter(3, 20, dtype=torch.bfloat16), parameter(3, 20, dtype=torch.bfloat16)
    q = nn.Parameter(q.detach().float())
    q.grad = p.grad.float()
    for x in (p, q):
        MuonAdamW([x], 0.01, 0.1).step()
    assert torch.equal(p.detach(), q.detach().bfloat16())


def test_loading_copies_the_state() -> None:
    params, optimizer = mixed()
    run(params, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other_params, other = mixed()
    other.load_state_dict(saved)
    frozen = copy.deepcopy(saved)
    run(other_params, other, 1)
    for key, state in saved["state"].items():
        assert all(torch.equal(v, frozen["state"][key][k]) for k, v in state.items())


def test_deepcopy_and_pickle_continue_alike() -> None:
    params, optimizer = mixed()
    run(params, optimizer, 2)
    clones = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = run(params, optimizer, 2, start=2)
    for clone in clones:
        theirs = [p for g in clone.param_groups for p in g["params"]]
        for a, b in zip(run(theirs, clone, 2, start=2), expected, strict=True):
            assert torch.equal(a, b)


def test_closure_runs_with_gradients_and_returns_the_loss() -> None:
    p = nn.Parameter(gaussian(3, 20).float())
    optimizer = MuonAdamW([p], 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first


def test_added_groups_train_with_their_own_options() -> None:
    p, q, v = parameter(3, 20), parameter(3, 20), parameter(4)
    optimizer = MuonAdamW([p], 0.1, scale="none")
    optimizer.add_param_group({"params": [q], "lr": 0.2})
    optimizer.add_param_group({"params": [v], "use_muon": False})
    starts = [x.detach().clone() for x in (p, q, v)]
    optimizer.step()
    moved = [x.detach() - s for x, s in zip((p, q, v), starts, strict=True)]
    torch.testing.assert_close(moved[1], 2 * moved[0], atol=1e-6, rtol=0)
    assert moved[2].abs().max() > 0


def test_schedulers_reach_every_group() -> None:
    params, optimizer = mixed()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    run(params, optimizer, 1)
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.0, 0.0]
    before = [p.detach().clone() for p in params]
    assert all(torch.equal(a, b) for a, b in zip(run(params, optimizer, 1, start=1), before, strict=True))


@pytest.mark.parametrize("cycle_momentum", [False, True])
def test_one_cycle_schedule_cycles_the_rate_and_leaves_the_momentum(cycle_momentum: bool) -> None:
    params, optimizer = mixed()
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=4, pct_start=0.5, cycle_momentum=cycle_momentum
    )
    seen = []
    for step in range(4):
        seen.append([(g["lr"], g["momentum"], g["betas"]) for g in optimizer.param_groups])
        run(params, optimizer, 1, start=step)
        schedule.step()
    for group in zip(*seen, strict=True):  # of Muon, then of AdamW
        rates, momenta, betas = zip(*group, strict=True)
        assert rates[0] < rates[1] > rates[2] > rates[3]
        assert rates[1] == pytest.approx(0.1)
        assert set(momenta) == {0.95}
        # torch cycles the first beta instead where an optimiser has betas; only the AdamW part reads it.
        assert (len(set(betas)) > 1) == cycle_momentum
        assert cycle_momentum or set(betas) == {(0.9, 0.95)}


def test_generators_and_gradient_accumulation() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
    twin = copy.deepcopy(model)
    x = gaussian(8, 4).float()
    for net, parts in ((model, 1), (twin, 4)):
        optimizer = MuonAdamW((p for p in net.parameters()), 0.05)
        for _ in range(3):
            optimizer.zero_grad()
            for piece in x.chunk(parts):
                (net(piece).square().mean() / parts).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


def test_grad_scaler_and_clipping_fit_in() -> None:
    p = nn.Parameter(gaussian(3, 20).float())
    optimizer = MuonAdamW([p], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = p.detach().clone()
    scaler.scale(p.square().sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([p], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(p, before)


def extra_bytes(shape: tuple[int, int], count: int, **options: object) -> int:
    params = [parameter(*shape, seed=i) for i in range(count)]
    optimizer = MuonAdamW(params, 0.1, **options)
    optimizer.step()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        optimizer.step()
    level = peak = 0
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def test_extra_memory_is_twice_the_stack_and_the_small_grams() -> None:
    stack, grams = 8 * 64 * 96 * 4, 8 * 64 * 64 * 4
    assert stack < extra_bytes((64, 96), 8) <= 2 * stack + 2 * grams + 4096
    assert extra_bytes((64, 96), 8, batched=False) <= (2 * stack + 2 * grams) / 8 + 4096
    lora = 100 * 8 * 768 * 4  # more than a piece
    assert extra_bytes((8, 768), 100) <= 1.2 * lora
