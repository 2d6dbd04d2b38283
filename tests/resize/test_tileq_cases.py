"""TileQ: what is refused, with which words, and the odd cases that must work (section 9)."""

import inspect
import logging
import warnings

import pytest
import torch
from torch import nn

from subspan.errors import NonFinite, TargetError
from subspan.resize import (
    Experts,
    Moments,
    TileQConfig,
    TileQExperts,
    TileQReport,
    bit_budget,
    fit_projection,
    lowrank_moe,
    place_experts,
    quantize_moe,
    read_experts,
    tile_factorize,
)
from subspan.resize.tileq.factors import encode
from subspan.resize.tileq.moments import Recorder, recording
from subspan.resize.tileq.packing import pack, packed_length, unpack
from subspan.resize.tileq.placement import greedy_cells, grid_shape, hungarian_cells, index_order
from subspan.resize.tileq.sources import find_experts, routed
from subspan.resize.tileq.walk import calibrated_layers, compress_stage, prepared
from tests.resize.tileq_problems import inputs, moments_of, normal, small, some_experts

# ---- a model that needs no transformers


class Fused(nn.Module):
    """Experts as transformers holds them."""

    def __init__(self, k: int = 4, d: int = 32, f: int = 32) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.1 * normal(k, 2 * f, d, seed=k, dtype=torch.float32))
        self.down_proj = nn.Parameter(0.1 * normal(k, d, f, seed=k + 1, dtype=torch.float32))
        self.act_fn = nn.functional.silu

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e, token, place in routed(top_k_index):
            gate, up = (hidden_states[token] @ self.gate_up_proj[e].mT).chunk(2, -1)
            y = (self.act_fn(gate) * up) @ self.down_proj[e].mT
            out.index_add_(0, token, y * top_k_weights[token, place, None])
        return out


class One(nn.Module):
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (
            nn.Linear(d, f, bias=False),
            nn.Linear(d, f, bias=False),
            nn.Linear(f, d, bias=False),
        )
        self.act_fn = nn.functional.silu

    def forward(self, x):
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Router and experts, fused or in a list."""

    def __init__(self, experts: nn.Module, k: int, d: int, used: int) -> None:
        super().__init__()
        self.experts, self.used = experts, used
        self.router = nn.Linear(d, k, bias=False)

    def forward(self, x):
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1)[:, : self.used].topk(2, -1)
        if isinstance(self.experts, Fused | TileQExperts) and not isinstance(self.experts, nn.ModuleList):
            return x + self.experts(flat, chosen, weights).view(x.shape)
        out = torch.zeros_like(flat)
        for e, token, place in routed(chosen):
            out.index_add_(0, token, self.experts[e](flat[token]) * weights[token, place, None])
        return x + out.view(x.shape)


class Decoder(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def decoder(k: int = 4, d: int = 32, used: int | None = None, layers: int = 2) -> Decoder:
    torch.manual_seed(0)
    return Decoder([Block(Fused(k, d), k, d, used or k) for _ in range(layers)])


def batches(d: int = 32, count: int = 2) -> list[torch.Tensor]:
    return list(normal(count, 3, 40, d, dtype=torch.float32))


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, "rank must be at least 1"),
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8, got 5"),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"rotation_block": 48}, "rotation_block must be a power of two, got 48"),
        ({"identity_block": -1}, "identity_block must not be negative"),
        ({"scale_exponent": -1.0}, "scale_exponent must be finite"),
        ({"scale_ratio_max": 1.0}, "scale_ratio_max must exceed 1"),
        ({"quantizer": "awq"}, "unknown quantizer 'awq'; known: gptq, gptvq, diag, rtn"),
        ({"factor_dtype": "float4"}, "unknown factor_dtype 'float4'"),
        ({"grid": "round"}, "grid must be 'auto', 'square'"),
        ({"grid": (2, 3, 4)}, r"grid must be .* got \(2, 3, 4\)"),
        ({"grid": (0, 9)}, r"grid must be .* got \(0, 9\)"),
        ({"grid": (1.5, 8)}, r"grid must be .* got \(1.5, 8\)"),
        ({"bits": 2.0}, "bits must be of type int, got 2.0"),
        ({"damping": "small"}, "damping must be of type float, got 'small'"),
        ({"rotation": "maybe"}, "rotation must be of type bool, got 'maybe'"),
        ({"seed": -1}, "seed must lie in"),
        ({"outlier_limit": -1.0}, "outlier_limit must be positive"),
    ],
)
def test_configurations_that_cannot_work_are_refused(changes, message):
    config = TileQConfig()
    for name, value in changes.items():
        object.__setattr__(config, name, value)  # past the type checks of the test run
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


def test_sizes_that_do_not_fit_are_refused():
    w, s = normal(4, 6, 5), torch.ones(4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        tile_factorize(w, s, index_order(4, (2, 2)), (2, 2), 0)
    with pytest.raises(ValueError, match="2 x 1 has no room for 4 experts"):
        tile_factorize(w, s, index_order(4, (2, 2)), (2, 1), 2)
    for cells in (torch.zeros(4, 2, dtype=torch.long), index_order(4, (2, 2)) + 1):
        with pytest.raises(ValueError, match="4 different places on a grid of 2 x 2"):
            tile_factorize(w, s, cells, (2, 2), 2)
    with pytest.raises(ValueError, match="1 x 3 has no room for 4"):
        bit_budget(4, 64, 64, small(grid=(1, 3)))
    with pytest.raises(ValueError, match="up has 48 inputs, which group_size 32 does not divide; 48, 24, 16 do"):
        bit_budget(4, 64, 48, small(), "up")
    with pytest.raises(ValueError, match="vectors of 4 do not divide"):
        bit_budget(4, 64, 66, small(bits=2, quantizer="gptvq"))


def test_calibration_that_is_missing_or_short_is_refused():
    experts = some_experts()
    with pytest.raises(ValueError, match="'gptq' needs calibration data; 'rtn' does without"):
        fit_projection("up", experts.weights["up"], None, small())
    half = Moments.of(list(inputs(6, 40, 32, dtype=torch.float32)), full=False)
    with pytest.raises(ValueError, match="'gptvq' needs whole Hessians"):
        fit_projection("up", experts.weights["up"], half, small(quantizer="gptvq", bits=2))
    with pytest.raises(ValueError, match="needs calibration batches"):
        quantize_moe(decoder(), [], small())


def test_a_model_compressed_twice_or_without_experts_is_refused():
    model = decoder()
    quantize_moe(model, batches(), small())
    with pytest.raises(ValueError, match="compressed already"):
        quantize_moe(model, batches(), small())
    with pytest.raises(TargetError, match=r"Sequential has no experts.*Linear"):
        quantize_moe(nn.Sequential(nn.Linear(3, 3)), batches(), small())
    with pytest.raises(TargetError, match="one list of layers"):
        quantize_moe(nn.Sequential(Block(Fused(), 4, 32, 4)), batches(), small())


def test_experts_that_cannot_be_compressed_fail_loudly():
    """None stays dense silently."""
    model = decoder()
    model.layers[1].experts.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 64))
    with pytest.raises(TargetError, match=r"layers.1.experts: Fused has biases.*gate_up_proj_bias \(4, 64\)"):
        quantize_moe(model, batches(), small())
    uneven_model = decoder()
    uneven_model.layers[1].experts = Fused(4, 32, 48)
    with pytest.raises(ValueError, match="down has 48 inputs, which group_size 32 does not divide"):
        quantize_moe(uneven_model, batches(), small())
    assert isinstance(model.layers[0].experts, Fused)  # what can be known is known before anything changes
    assert isinstance(uneven_model.layers[0].experts, Fused)
    with pytest.raises(TypeError, match="batches must be a list"):
        inspect.unwrap(prepared)(decoder(), batches()[0], small())  # past the type checks of the test run
    idle = Fused()
    idle.down_proj = nn.Parameter(idle.down_proj[:3].detach())
    with pytest.raises(TargetError, match="experts without weights"):
        read_experts("experts", idle)

    class Sorted(Fused):
        def forward(self, hidden_states):
            return hidden_states

    with pytest.raises(TargetError, match="a forward without top_k_index"):
        read_experts("experts", Sorted())

    class SharedExperts(Fused):
        """Always on, and left alone."""

    assert list(find_experts(nn.ModuleDict({"shared": SharedExperts(), "experts": Fused()}))) == ["experts"]

    class StrangeExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.ones(3))

    with pytest.raises(TargetError, match=r"StrangeExperts has no 3-D gate_up_proj.*theta \(3,\)"):
        quantize_moe(Decoder([Block(StrangeExperts(), 4, 32, 4)]), batches(), small())
    plain = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
    with pytest.raises(TargetError, match="a list of Linear without linear layers w1, w3, w2 or gate_proj"):
        read_experts("experts", plain)
    uneven = nn.ModuleList([One(32, 32), One(32, 64)])
    with pytest.raises(ValueError, match=r"experts differ in the shape of gate: \[\(32, 32\), \(64, 32\)\]"):
        read_experts("experts", uneven)
    with pytest.raises(TargetError, match="meta device"):
        read_experts("experts", Fused().to("meta"))
    shared = decoder()
    shared.layers[1].experts = shared.layers[0].experts
    with pytest.raises(TargetError, match=r"layers.1.experts shares weights with layers.0.experts"):
        quantize_moe(shared, batches(), small())


def test_weights_and_inputs_that_are_not_finite_name_the_expert():
    broken = Fused()
    with torch.no_grad():
        broken.down_proj[2, 0, 0] = torch.nan
    with pytest.raises(NonFinite, match="down of expert 2 holds NaN"):
        read_experts("experts", broken)
    model, x = decoder(), batches()
    x[0][0, 0, 0] = torch.inf
    with pytest.raises(NonFinite, match=r"layers.0.experts: an input of expert \d is not finite"):
        quantize_moe(model, x, small())


# ---- layouts


def test_transposed_weights_are_read_and_ambiguous_ones_refused():
    plain = Fused(d=32, f=64)
    turned = Fused(d=32, f=64)
    turned.gate_up_proj = nn.Parameter(plain.gate_up_proj.mT.contiguous())
    turned.down_proj = nn.Parameter(plain.down_proj.mT.contiguous())
    a, b = read_experts("a", plain), read_experts("b", turned)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in ("gate", "up", "down"))
    ungated = Fused()
    del ungated.gate_up_proj
    ungated.up_proj, ungated.down_proj = nn.Parameter(normal(2, 8, 4)), nn.Parameter(normal(2, 4, 8))
    ungated.act_fn = torch.relu
    with pytest.raises(TargetError, match="could be outputs x inputs or transposed; set is_transposed"):
        read_experts("c", ungated)
    ungated.is_transposed = False
    assert set(read_experts("c", ungated).weights) == {"up", "down"}


def test_lists_of_experts_and_fused_ones_come_out_the_same():
    fused = decoder()
    listed = decoder()
    for block in listed.layers:
        experts = nn.ModuleList([One(32, 32) for _ in range(4)])
        with torch.no_grad():
            for e, one in enumerate(experts):
                gate, up = block.experts.gate_up_proj[e].chunk(2)
                for layer, w in ((one.w1, gate), (one.w3, up), (one.w2, block.experts.down_proj[e])):
                    layer.weight.copy_(w)
        block.experts = experts
    x = batches()
    torch.testing.assert_close(fused(x[0]), listed(x[0]))
    reports = [quantize_moe(model, x, small()) for model in (fused, listed)]
    torch.testing.assert_close(fused(x[0]), listed(x[0]))
    assert reports[0].nbytes == reports[1].nbytes
    assert [len(b.experts) for b in listed.layers] == [4, 4]
    with pytest.raises(IndexError, match="there are 4 experts, got index 4"):
        listed.layers[0].experts[4]


def test_experts_without_a_gate_compress_too():
    weights = {"up": 0.1 * normal(3, 64, 32, dtype=torch.float32), "down": 0.1 * normal(3, 32, 64, dtype=torch.float32)}
    experts = Experts(weights, torch.relu)
    found, fits = TileQExperts.from_float(experts, moments_of(experts), small(bits=8))
    assert [fit.projection for fit in fits] == ["up", "down"]
    x = normal(5, 32, dtype=torch.float32)
    expected = experts.inner(1, x) @ weights["down"][1].mT
    assert float((found[1](x) - expected).norm() / expected.norm()) < 0.02


# ---- what must work


@pytest.mark.parametrize("k", [1, 7])
def test_one_expert_and_a_prime_number_of_them(k):
    experts = some_experts(k=k, f=32)
    found, fits = TileQExperts.from_float(experts, moments_of(experts), small(grid="square"))
    assert found.up.plan.grid == ((1, 1) if k == 1 else (3, 3))
    assert max(fit.output_error for fit in fits) < 0.25


def test_rank_beyond_the_tile_is_cut_down_and_more_than_an_expert_has_is_legal():
    plan = TileQExperts(dict.fromkeys(("up", "down"), (4, 32, 32)), torch.relu, small(rank=48, grid="square"))
    assert plan.up.sigma.shape == (48,)
    plan = TileQExperts(dict.fromkeys(("up", "down"), (4, 32, 32)), torch.relu, small(rank=99, grid="square"))
    assert plan.up.sigma.shape == (64,)


def test_identical_experts_need_no_more_than_one_and_make_no_noise():
    one = 0.1 * normal(1, 64, 32, dtype=torch.float32).expand(6, -1, -1).contiguous()
    moments = moments_of(some_experts())["up"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = small(rank=32, scale_exponent=0.0, factor_dtype="float32", placement="best")
        _, fit = fit_projection("up", one, moments, config)
    assert fit.placement_errors[fit.placement] < 1e-5


def test_an_expert_of_zeros_and_channels_that_never_fire():
    experts = some_experts()
    experts.weights["up"][2] = 0
    x = inputs(6, 100, 32, dtype=torch.float32)
    x[:, :, 5] = 0
    moments = Moments.of(list(x))
    for rotation in (True, False):
        config = small(rotation=rotation)
        stored, fit = fit_projection("up", experts.weights["up"], moments, config)
        assert fit.output_error < 0.2
        assert all(bool(torch.isfinite(t.float()).all()) for t in stored.values())
        found = TileQExperts({"up": (6, 64, 32), "down": (6, 32, 64)}, torch.relu, config).up
        found.load_state_dict(stored)
        # of a channel that never fired only the correction is left
        torch.testing.assert_close(found.dequantize(0)[:, 5], found.correction(0)[:, 5], atol=1e-6, rtol=0)


def test_what_stands_in_for_the_inputs_of_an_expert_without_tokens():
    fused, x = Fused(), normal(20, 32, dtype=torch.float32)
    experts, chosen = read_experts("e", fused), torch.randint(0, 3, (20, 2))

    def found(policy):
        recorder = Recorder("e", experts, True)
        with recording(fused, recorder):
            fused(x, chosen, torch.ones(20, 2))
        return recorder.moments(policy)[0]["up"]

    mean, identity, sent = (found(policy) for policy in ("layer_mean", "identity", "counterfactual"))
    once = torch.cat([x[token] for _, token, _ in routed(chosen)])
    torch.testing.assert_close(mean.hessian[3], 2 * once.mT @ once / len(once))
    torch.testing.assert_close(identity.hessian[3], torch.eye(32))
    torch.testing.assert_close(sent.hessian[3], 2 * x.mT @ x / 20)
    assert [int(m.count[3]) for m in (mean, identity, sent)] == [0, 0, 20]
    torch.testing.assert_close(mean.hessian[:3], sent.hessian[:3])
    assert mean.filled("identity") is mean  # filled once, it is left alone


@pytest.mark.parametrize("policy", ["layer_mean", "counterfactual", "identity"])
def test_experts_without_tokens_are_compressed_and_reported(policy):
    model = decoder(k=4, used=3)
    before = [read_experts("", b.experts).weights["up"].clone() for b in model.layers]
    report = quantize_moe(model, batches(), small(unrouted=policy))
    assert report.unrouted == {"layers.0.experts": [3], "layers.1.experts": [3]}
    for w, block in zip(before, model.layers, strict=True):
        found = block.experts.dequantize(3)["up"]
        assert 0 < float((found - w[3]).norm() / w[3].norm()) < 0.25


def test_one_expert_that_takes_every_token_and_a_batch_of_one():
    model = decoder(k=2, used=2)
    with torch.no_grad():
        for block in model.layers:
            block.router.weight.zero_()
    report = quantize_moe(model, [batches()[0][:1, :1]], small())
    assert bool(torch.isfinite(model(batches()[0])).all())
    assert report.bits_per_weight > 3


def test_no_tokens_and_a_token_that_chooses_an_expert_twice():
    experts = some_experts()
    found, _ = TileQExperts.from_float(experts, moments_of(experts), small())
    none = found(torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    assert none.shape == (0, 32)
    x = normal(3, 32, dtype=torch.float32)
    twice = found(x, torch.full((3, 2), 4), torch.full((3, 2), 0.5))
    torch.testing.assert_close(twice, found[4](x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_and_inputs(dtype):
    experts = some_experts(dtype=dtype)
    found, _ = TileQExperts.from_float(experts, moments_of(some_experts()), small(bits=8))
    x = normal(5, 32).to(dtype)
    y, expected = found[2](x), experts.inner(2, x) @ experts.weights["down"][2].mT
    assert y.dtype == dtype
    assert float((y - expected).float().norm() / expected.float().norm()) < 0.05
    sigma = found.up.sigma.clone()
    moved = found.to(dtype)  # a change of the model's dtype changes neither codes nor factors
    assert moved.up.U.dtype == torch.float8_e4m3fn
    assert torch.equal(moved.up.sigma, sigma)
    assert torch.equal(moved[2](x), y)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = moved[2](x.float())
    assert float((mixed - expected).float().norm() / expected.float().norm()) < 0.05


def test_large_scales_do_not_overflow_half_precision():
    x, chosen = torch.full((2, 4), 1000.0, dtype=torch.float16), torch.tensor([[0], [1]])
    w, s = 1e-3 * normal(2, 6, 4, dtype=torch.float32), torch.full((2, 4), 1 / 300)
    factors = tile_factorize(w, s, index_order(2, (1, 2)), (1, 2), 4, solver="svd")
    assert not bool(torch.isfinite(x * 300).any())
    found = lowrank_moe(x, chosen, None, factors)
    torch.testing.assert_close(found[:, 0], torch.einsum("ep,eqp->eq", x.float(), w), rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_inputs():
    experts = some_experts()
    found, _ = TileQExperts.from_float(experts, moments_of(experts), small(identity_block=16))
    x = normal(4, 32, dtype=torch.float32).requires_grad_()
    found[1](x).square().sum().backward()
    dense = found.dequantize(1)
    y = x.detach().requires_grad_()
    out = (found.act(y @ dense["gate"].mT) * (y @ dense["up"].mT)) @ dense["down"].mT
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    assert not list(found.parameters())


def test_outliers_lose_their_correction_with_one_warning(caplog):
    experts = some_experts()
    with caplog.at_level(logging.WARNING):
        stored, fit = fit_projection("up", experts.weights["up"], moments_of(experts)["up"], small(outlier_limit=0.05))
    assert fit.dropped == list(range(6))
    assert [r.getMessage() for r in caplog.records] == [
        "experts, up: no correction for experts 0, 1, 2, 3, 4, 5, it leaves outliers"
    ]
    assert not stored["kept"].any()
    plain, _ = fit_projection("up", experts.weights["up"], moments_of(experts)["up"], small(rank=0))
    assert all(torch.equal(stored[name], t) for name, t in plain.items())


def test_without_rotation_it_is_gptq_on_the_residual():
    from subspan.resize.tileq.quantizers import gptq

    experts = some_experts()
    moments = moments_of(experts)["up"]
    stored, _ = fit_projection("up", experts.weights["up"], moments, small(rotation=False, rank=0))
    expected = gptq(experts.weights["up"], moments.hessian, 3, 32)
    assert torch.equal(unpack(stored["codes"], 3, 32), expected.codes)
    assert "order" not in stored


def test_the_same_seed_gives_the_same_bytes_and_best_is_never_worse_than_index_order():
    experts = some_experts(k=9)
    moments = moments_of(experts)
    (a, fa), (b, _) = (TileQExperts.from_float(experts, moments, small(placement="best")) for _ in range(2))
    first, second = (list(x.state_dict().values()) for x in (a, b))
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(first, second, strict=True))
    plain, _ = TileQExperts.from_float(experts, moments, small(placement="index", grid=(3, 3)))
    assert torch.equal(plain.up.cells, index_order(9, (3, 3)).to(torch.int16))
    assert index_order(5, (2, 3)).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    for fit in fa:
        assert set(fit.placement_errors) == {"index", "projector", "sketch"}
        assert fit.placement_errors[fit.placement] == min(fit.placement_errors.values())


# ---- parts


def test_stored_factors_use_the_range_of_their_type():
    x = torch.logspace(-3, 0, 50).expand(3, -1).T.contiguous() * torch.tensor([1e-3, 1.0, 7.0])  # a scale a column
    for dtype, precision in ((torch.float8_e4m3fn, 1 / 16), (torch.float8_e5m2, 1 / 8)):
        codes, c = encode(x, (0,), dtype)
        assert float((codes.float() / c / x - 1).abs().max()) <= precision  # half a step: nothing is subnormal
    codes, c = encode(x, (0,), torch.int8)
    assert codes.amax(0).tolist() == [127] * 3
    assert float((codes / c - x).abs().max() / x.max()) <= 0.5 / 127 + 1e-6


def test_grids():
    assert grid_shape(7, 8, 8, "square") == (3, 3)
    assert grid_shape(60, 2048, 1408, "square") == (8, 8)
    for k, p, q in ((60, 2048, 1408), (8, 4096, 14336), (7, 3, 5)):
        m, n = grid_shape(k, p, q)
        assert m * n >= k
        assert m * p + n * q == min(a * p + b * q for a in range(1, k + 1) for b in range(1, k + 1) if a * b >= k)


def test_greedy_takes_the_nearest_free_cell_and_the_best_assignment_is_no_worse():
    import numpy as np

    rows, columns = np.array([0, 0, 0, 2]), np.array([0, 0, 0, 2])
    # (0, 0) is taken: (0, 1) and (1, 0) are as near, the smaller row wins
    assert greedy_cells(rows, columns, (3, 3)).tolist() == [[0, 0], [0, 1], [1, 0], [2, 2]]
    everyone = [(i, j) for i in range(4) for j in range(4)]
    wanted = np.zeros(16, dtype=np.int64)
    nearest = sorted(everyone, key=lambda cell: (sum(cell), max(cell), *cell))
    assert list(map(tuple, greedy_cells(wanted, wanted, (4, 4)).tolist())) == nearest
    rng = np.random.default_rng(0)
    for _ in range(5):
        a, b = rng.normal(size=(9, 3)), rng.normal(size=(9, 3))

        def total(cells, a=a, b=b):
            e = np.arange(9)
            return (a[e, cells[:, 0]] + b[e, cells[:, 1]]).sum()

        best = hungarian_cells(a, b, (3, 3)).numpy()
        assert len({tuple(c) for c in best.tolist()}) == 9
        assert total(best) >= total(greedy_cells(a.argmax(1), b.argmax(1), (3, 3)).numpy()) - 1e-12


@pytest.mark.parametrize("kind", ["projector", "sketch", "vectors"])
@pytest.mark.parametrize("assignment", ["greedy", "hungarian"])
def test_every_placement_is_one_expert_a_cell(kind, assignment):
    w, s = normal(5, 6, 4), torch.ones(5, 4, dtype=torch.float64)
    cells = place_experts(w, s, (3, 2), 4, kind=kind, assignment=assignment)
    assert len({tuple(c) for c in cells.tolist()}) == 5
    assert bool((cells < torch.tensor([3, 2])).all())


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8])
def test_packed_codes_come_back(width):
    codes = torch.randint(0, 2**width, (3, 29), generator=torch.Generator().manual_seed(width))
    packed = pack(codes, width)
    assert packed.shape == (3, packed_length(29, width))
    assert torch.equal(unpack(packed, width, 29), codes.to(torch.uint8))


def test_the_recorder_sees_what_experts_see():
    fused = Fused()
    experts = read_experts("e", fused)
    recorder = Recorder("e", experts, True)
    x, chosen = normal(20, 32, dtype=torch.float32), torch.randint(0, 3, (20, 2))
    with recording(fused, recorder):
        fused(x, chosen, torch.ones(20, 2))
        fused(hidden_states=x, top_k_index=chosen, top_k_weights=torch.ones(20, 2))
    fused(x, chosen, torch.ones(20, 2))  # outside: not counted
    moments, unrouted = recorder.moments("layer_mean")
    assert unrouted == [3]
    seen = torch.cat([x[(chosen == 1).nonzero()[:, 0]]] * 2)
    known = Moments.of([seen])
    torch.testing.assert_close(known.hessian[0], 2 * seen.mT @ seen / len(seen))
    assert int(moments["up"].count[1]) == len(seen)
    torch.testing.assert_close(moments["gate"].hessian[1], known.hessian[0])
    torch.testing.assert_close(moments["up"].mean_abs[1], seen.abs().mean(0))
    torch.testing.assert_close(moments["down"].hessian[1], Moments.of([experts.inner(1, seen)]).hessian[0])


def test_a_layer_is_calibrated_on_what_the_compressed_ones_before_it_give():
    class Shifted(Block):
        def forward(self, x, shift):
            return super().forward(x) + shift

    class Shifting(Decoder):
        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x, 0.5 * i)
            return x

    torch.manual_seed(0)
    model, x = Shifting([Shifted(Fused(), 4, 32, 4) for _ in range(3)]), batches()
    model.layers[1].forward = own = model.layers[1].forward  # as hooks of accelerate's do
    for stage in calibrated_layers(model, x, small(bits=2, rank=0)):
        before = torch.cat(x).flatten(0, -2)
        for i, layer in enumerate(model.layers[: stage.layer]):
            before = layer(before, 0.5 * i)
        moments = stage.moments["up"]
        seen = (moments.mean_abs * moments.count[:, None]).sum(0)
        torch.testing.assert_close(seen, 2 * before.detach().abs().sum(0))  # two experts a token
        compress_stage(stage, model, small(bits=2, rank=0))
    assert [vars(layer).get("forward") for layer in model.layers] == [None, own, None]


@pytest.mark.parametrize(
    "changes",
    [{"scale_sharing": kind} for kind in ("expert", "row", "layer")]
    + [{"symmetric": True}, {"quantizer": "gptvq", "bits": 2}, {"rotation": False, "factor_dtype": "int8"}],
)
def test_the_error_that_is_reported_is_that_of_what_is_stored(changes):
    experts, config = some_experts(), small(**changes, grid=(3, 2), identity_block=16)
    moments = moments_of(experts)
    found, fits = TileQExperts.from_float(experts, moments, config)
    for fit in fits:
        w, h = experts.weights[fit.projection], moments[fit.projection].hessian
        off = w - torch.stack([found.dequantize(e)[fit.projection] for e in range(6)])
        expected = (((off @ h) * off).sum() / ((w @ h) * w).sum()).sqrt()
        assert fit.output_error == pytest.approx(float(expected), rel=1e-4)


def test_the_report_reads_back_and_adds_up(tmp_path):
    model = decoder()
    report = quantize_moe(model, batches(), small())
    assert sum(report.bits.values()) == pytest.approx(report.bits_per_weight)
    stored = sum(t.nbytes for n, t in model.state_dict().items() if ".experts." in n)
    assert report.nbytes == stored
    assert report.weights == 2 * 4 * 3 * 32 * 32
    assert TileQReport.from_json(report.to_json()) == report
    assert len(report.to_dataframe()) == 6
    report.save(tmp_path / "report.json")
    assert (tmp_path / "report.json").is_file()
    quiet = quantize_moe(decoder(), None, small(quantizer="rtn"))
    assert quiet.layers[0].unrouted is None
    assert quiet.layers[0].fits[0].output_error is None
