"""Section 4's checks T1 to T20 (T18 in tests/linalg/test_subspace.py), bad input, and a run that learns."""

import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from subspan.data import DarcyGenerator
from subspan.models import (
    FullAttention,
    LRSAAttention,
    LRSABlock,
    LRSAOperator,
    PhysicsAttention,
    SpectralMixer,
    diagnose,
    effective_rank,
    mixing_kernel,
    pad_points,
    relative_l2,
    relative_l2_gradient,
    spectrum,
)
from subspan.models.lrsa.attention import (
    Attention,
    FeedForward,
    attention_weights,
    key_bias,
    make_norm,
    rotary_angles,
    rotate,
)
from subspan.models.lrsa.checks import check_arguments
from subspan.models.lrsa.operator import PositionEmbedding

SEEDS = st.integers(0, 2**16)
few = settings(deadline=None, max_examples=5)
EXACT = {"atol": 1e-12, "rtol": 1e-12}
# every option once, and the defaults
OPTIONS = [
    {},
    {"gated": True, "norm": "layer", "latent_attention": False},
    {"qk_norm": False, "latent_attention": "ffn", "ffn_ratio": 2.0},
    {"rotary": (-5.0, 3.0)},
]
PEERS = (FullAttention, PhysicsAttention)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=rng(seed))


def block(seed: int = 0, d: int = 16, heads: int = 4, latents: int = 5, **options) -> LRSABlock:
    """In float64, with gains and biases that are not one and zero."""
    made = LRSABlock(d, heads, latents, generator=rng(seed), **options).double()
    return shaken(made, seed)


def shaken(module: nn.Module, seed: int) -> nn.Module:
    generator = rng(seed + 1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def operator(seed: int = 0, **options) -> LRSAOperator:
    settings = {"d": 16, "layers": 2, "heads": 4, "latents": 5} | options
    return shaken(LRSAOperator(2, 1, 1, generator=rng(seed), **settings).double(), seed)


def points(n: int = 9, b: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.rand(b, n, 2, dtype=torch.float64, generator=rng(seed)), normal(b, n, 1, seed=seed + 1)


# ------------------------------------------------------------------------------------------- section 4: what is exact


def test_the_block_is_the_seven_steps_written_out() -> None:
    made = block(ffn_ratio=2.0)
    p = {name: value.detach() for name, value in made.named_parameters()}

    def rms(x: Tensor, gain: str) -> Tensor:
        return p[gain] * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def ffn(x: Tensor, name: str) -> Tensor:
        hidden = x @ p[f"{name}.up.weight"].T + p[f"{name}.up.bias"]
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        return hidden @ p[f"{name}.out.weight"].T + p[f"{name}.out.bias"]

    def attend(name: str, source: Tensor, target: Tensor | None = None) -> Tensor:
        out = []
        for head in range(4):
            rows = slice(4 * head, 4 * head + 4)
            q = p[f"{name}.queries"][:, head] if target is None else target @ p[f"{name}.query.weight"][rows].T
            k, v = (source @ p[f"{name}.{what}.weight"][rows].T for what in ("key", "value"))
            logits = rms(q, f"{name}.query_norm.weight") @ rms(k, f"{name}.key_norm.weight").T / 2
            out.append(logits.softmax(-1) @ v)
        return torch.cat(out, -1) @ p[f"{name}.out.weight"].T + p[f"{name}.out.bias"]

    h = normal(9, 16)
    hn = rms(h, "norm.weight")
    z = attend("mixer.down", hn)
    z = z + ffn(rms(z, "mixer.norm1.weight"), "mixer.ffn1")
    tokens = rms(z, "mixer.norm2.weight")
    z = z + attend("mixer.latent", tokens, tokens)
    z = z + ffn(rms(z, "mixer.norm3.weight"), "mixer.ffn2")
    h = h + attend("mixer.up", rms(z, "mixer.norm4.weight"), hn)
    h = h + ffn(rms(h, "point_norm.weight"), "point")
    torch.testing.assert_close(made(normal(1, 9, 16))[0], h, **EXACT)


@pytest.mark.parametrize("options", OPTIONS)
@given(seed=SEEDS)
@few
def test_t1_the_block_is_equivariant_to_permutations_of_points(options, seed: int) -> None:
    made, h, pos = block(seed, **options), normal(2, 9, 16, seed=seed), normal(2, 9, 2, seed=seed)
    order = torch.randperm(9, generator=rng(seed))
    torch.testing.assert_close(made(h[:, order], pos=pos[:, order]), made(h, pos=pos)[:, order], **EXACT)


@given(seed=SEEDS)
@few
def test_t2_the_order_of_the_latents_does_not_matter(seed: int) -> None:
    made, h = block(seed), normal(2, 9, 16, seed=seed)
    before = made(h)
    with torch.no_grad():
        made.mixer.down.queries.copy_(made.mixer.down.queries[torch.randperm(5, generator=rng(seed))])
    torch.testing.assert_close(made(h), before, **EXACT)


@pytest.mark.parametrize("mixer", [None, "full"])
@given(seed=SEEDS)
@few
def test_t3_every_point_twice_changes_nothing(mixer, seed: int) -> None:
    made = block(seed, mixer=FullAttention(16, 4, generator=rng(seed)).double() if mixer else None)
    h = normal(2, 9, 16, seed=seed)
    torch.testing.assert_close(made(torch.cat([h, h], 1)), made(h).repeat(1, 2, 1), **EXACT)


@pytest.mark.parametrize("mixer", [None, FullAttention])
@given(seed=SEEDS, times=st.lists(st.integers(1, 4), min_size=6, max_size=6), scale=st.floats(1e-3, 1e3))
@few
def test_t4_a_mass_is_a_multiplicity_and_only_ratios_count(mixer, seed: int, times: list[int], scale: float) -> None:
    made = block(seed, mixer=mixer(16, 4, generator=rng(seed)).double() if mixer else None)
    h, m = normal(1, 6, 16, seed=seed), torch.tensor(times)
    weighted = made(h, mass=m.double()[None])
    repeated = made(h.repeat_interleave(m, 1))
    torch.testing.assert_close(weighted.repeat_interleave(m, 1), repeated, **EXACT)
    torch.testing.assert_close(made(h, mass=scale * m.double()[None]), weighted, **EXACT)


def test_t4_holds_for_physics_attention_up_to_what_it_adds_to_its_sums() -> None:
    made, h, m = (
        block(mixer=PhysicsAttention(16, 4, 3, generator=rng(0)).double()),
        normal(1, 6, 16),
        torch.arange(1, 7),
    )
    torch.testing.assert_close(
        made(h, mass=m.double()[None]).repeat_interleave(m, 1), made(h.repeat_interleave(m, 1)), atol=1e-4, rtol=0
    )


def test_t4_with_padding_the_mean_mass_is_that_of_the_valid_points() -> None:
    made, h = block(), normal(1, 6, 16)
    mass = torch.tensor([[1.0, 2.0, 3.0, 1.0, 1e4, 1e-9]], dtype=torch.float64)
    valid = torch.tensor([[True] * 4 + [False] * 2])
    expected = made(h[:, :4], mass=mass[:, :4])
    torch.testing.assert_close(made(h, mass=mass, valid=valid)[:, :4], expected, **EXACT)
    assert key_bias(mass, valid)[..., :4].exp().mean().item() == pytest.approx(1)


@pytest.mark.parametrize(
    "options", [*OPTIONS, {"point": "conv"}, {"mixer": FullAttention}, {"mixer": PhysicsAttention}]
)
@pytest.mark.parametrize("filling", [1e4, float("nan")])
def test_t5_padding_is_never_read(options, filling: float) -> None:
    grid = options.get("point") == "conv"
    if "mixer" in options:
        kind = options["mixer"]
        options = {"mixer": lambda depth: kind(16, 4, depth=depth, generator=rng(depth))}
    made = operator(**options)
    x, f = points(12)
    mass = torch.rand(2, 12, dtype=torch.float64, generator=rng(3)) + 0.5
    if grid:  # a 3 x 4 grid within one of 5 x 6: what is outside counts as zero, as beyond the border of an image
        inside = torch.zeros(5, 6, dtype=torch.bool)
        inside[:3, :4] = True
        place, shapes = inside.flatten().nonzero()[:, 0], [{"grid_shape": (3, 4)}, {"grid_shape": (5, 6)}]
    else:
        place, shapes = torch.arange(12), [{}, {}]
    size = 30 if grid else 17
    valid = torch.zeros(2, size, dtype=torch.bool)
    valid[:, place] = True
    wide = [torch.full((2, size, *t.shape[2:]), filling, dtype=torch.float64) for t in (x, f, mass)]
    for to, t in zip(wide, (x, f, mass), strict=True):
        to[:, place] = t
    for with_mass in (False, True):
        expected = made(x, f, mass=mass if with_mass else None, **shapes[0])
        got = made(wide[0], wide[1], mass=wide[2] if with_mass else None, valid=valid, **shapes[1])
        torch.testing.assert_close(got[:, place], expected, **EXACT)
        assert not got[~valid].any()


@pytest.mark.parametrize("mixer", [None, FullAttention, PhysicsAttention])
def test_t5_a_block_by_itself_reads_no_padding_either_way(mixer) -> None:
    made = block(mixer=mixer(16, 4, generator=rng(0)).double() if mixer else None)
    h, valid = normal(2, 9, 16), torch.arange(9).expand(2, -1) < torch.tensor([[5], [9]])
    gradients = []
    for filling in (0.0, torch.nan):
        filled = h.masked_fill(~valid.unsqueeze(-1), filling).requires_grad_()
        out = made(filled, valid=valid)[valid]
        gradients.append([out, *torch.autograd.grad(out.square().sum(), [filled, *made.parameters()])])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_t6_rank_per_head_is_at_most_m_and_of_the_sum_h_times_m_minus_1_plus_1() -> None:
    made, h = block(latents=5), normal(1, 64, 16)
    kernel = mixing_kernel(made, h)[0]
    torch.testing.assert_close(kernel.sum(-1), torch.ones(4, 64, dtype=torch.float64), **EXACT)
    assert torch.linalg.matrix_rank(kernel, rtol=1e-10).tolist() == [5] * 4
    assert torch.linalg.matrix_rank(kernel.sum(0), rtol=1e-10) == 17
    torch.testing.assert_close(spectrum(kernel, 6)[:, 5], torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    assert effective_rank(kernel, 1 - 1e-12).max() <= 5


def test_t6_the_peers_are_the_same_template() -> None:
    made = block(mixer=PhysicsAttention(16, 4, 3, generator=rng(0)).double())
    kernel = mixing_kernel(made, normal(1, 20, 16))[0]
    assert torch.linalg.matrix_rank(kernel, rtol=1e-10).tolist() == [3] * 4
    # frozen, it is what the forward pass does: token attention and value apart
    mixer, h = made.mixer, normal(1, 20, 16)
    v, u, g = mixer.factors(h)
    value = mixer.value(mixer.feature(h).unflatten(-1, (4, 4)).transpose(1, 2))
    torch.testing.assert_close(mixer.out((u @ g @ v @ value).transpose(1, 2).flatten(2)), mixer(h), **EXACT)
    with pytest.raises(TypeError, match="FullAttention does not mix through a bottleneck"):
        mixing_kernel(block(mixer=FullAttention(16, 4).double()), h)


@pytest.mark.parametrize("modes", [1, 3, 4])
def test_t6_a_fourier_layer_of_m_modes_has_rank_2m_minus_1_and_is_circular(modes: int) -> None:
    mixer = SpectralMixer(1, modes, dims=1, generator=rng(0)).double()
    kernel = mixer(torch.eye(16, dtype=torch.float64)[..., None])[..., 0].T
    assert torch.linalg.matrix_rank(kernel, rtol=1e-10) == 2 * modes - 1
    torch.testing.assert_close(kernel.roll((1, 1), (0, 1)), kernel, **EXACT)
    plane = SpectralMixer(2, modes, generator=rng(0)).double()
    h = normal(1, 8 * 9, 2)
    rolled = h.unflatten(1, (8, 9)).roll((2, 3), (1, 2)).flatten(1, 2)
    expected = plane(h, grid_shape=(8, 9)).unflatten(1, (8, 9)).roll((2, 3), (1, 2)).flatten(1, 2)
    torch.testing.assert_close(plane(rolled, grid_shape=(8, 9)), expected, **EXACT)


@given(seed=SEEDS)
@few
def test_t7_one_point_gives_its_value_and_one_latent_gives_the_same_to_all(seed: int) -> None:
    close = {"atol": 1e-14, "rtol": 1e-14}
    mixer = block(seed).mixer
    h = normal(1, 1, 16, seed=seed)
    expected = mixer.down.out(mixer.down.value(h)).expand(1, 5, 16)
    torch.testing.assert_close(mixer.down(h), expected, **close)
    delta = block(seed, latents=1).mixer(normal(2, 9, 16, seed=seed))
    torch.testing.assert_close(delta, delta[:, :1].expand_as(delta), **close)


def test_t8_logits_are_bounded_and_do_not_feel_the_size_of_the_keys() -> None:
    attention = Attention(16, 4, queries=5, generator=rng(0)).double()
    h = 1e5 * normal(1, 50, 16)
    q, k, _ = attention.project(h)
    assert (q @ k.mT / 2).abs().max() <= 2  # sqrt(d_h) = 2
    before = attention_weights(q, k)
    with torch.no_grad():
        attention.key.weight *= 1e6
    torch.testing.assert_close(attention_weights(*attention.project(h)[:2]), before, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"rotary": (-5.0, 3.0)}, {"blind_queries": True}])
@given(seed=SEEDS)
@few
def test_t9_every_query_point_stands_alone(options, seed: int) -> None:
    made = operator(seed, **options)
    x, f = points(9, seed=seed)
    more = points(7, seed=seed + 1)
    query_f = None if options.get("blind_queries") else more[1]
    mass = torch.rand(2, 9, dtype=torch.float64, generator=rng(seed)) + 0.1
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, 6:] = False
    given = {"mass": mass, "valid": valid}
    everywhere = made(x, f, query_x=more[0], query_f=query_f, **given)
    some = made(x, f, query_x=more[0][:, 2:5], query_f=None if query_f is None else query_f[:, 2:5], **given)
    torch.testing.assert_close(some, everywhere[:, 2:5], **EXACT)
    if query_f is not None:  # a query at an input point, knowing as much, gets that point's answer
        again = made(x, f, query_x=x[1:].expand(2, -1, -1), query_f=f[1:].expand(2, -1, -1), **given)
        torch.testing.assert_close(again[1], made(x, f, **given)[1], **EXACT)


@given(seed=SEEDS)
@few
def test_t10_heads_stay_within_the_hull_of_their_values(seed: int) -> None:
    mixer, h = block(seed).mixer, normal(1, 12, 16, seed=seed)
    for attention, source, target in ((mixer.down, h, None), (mixer.up, mixer.compress(h), h)):
        q, k, v = attention.project(source, target)
        out = scaled_dot_product_attention(q, k, v)
        slack = 1e-15 * v.abs().amax()  # rounding of weights that sum to one
        assert (out.amax(2) <= v.amax(2) + slack).all()
        assert (out.amin(2) >= v.amin(2) - slack).all()


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"point": "conv"}])
def test_t11_without_output_matrices_the_block_is_the_identity(options) -> None:
    made, h = block(**options), normal(2, 12, 16)
    for layer in (made.mixer.up.out, made.point.out):
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
    assert torch.equal(made(h, grid_shape=(3, 4)), h)


@pytest.mark.parametrize("bias", [None, "mask", "mass"])
def test_t12_the_fused_kernel_equals_the_formed_softmax(bias) -> None:
    mixer, h = block().mixer, normal(2, 9, 16).requires_grad_()
    mass, valid = torch.rand(2, 9, dtype=torch.float64, generator=rng(0)) + 0.1, torch.ones(2, 9, dtype=torch.bool)
    valid[:, 7:] = False
    bias = None if bias is None else key_bias(None if bias == "mask" else mass, valid)
    q, k, v = mixer.down.project(h)
    fused = mixer.down(h, bias=bias)
    formed = mixer.down.out((attention_weights(q, k, bias) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(fused, formed, atol=1e-10, rtol=0)
    weight = normal(2, 5, 16, seed=4)
    gradients = [torch.autograd.grad((weight * out).sum(), [h, *mixer.down.parameters()]) for out in (fused, formed)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_t13_gradcheck() -> None:
    made = block(d=4, heads=2, latents=3)
    h = normal(1, 5, 4).requires_grad_()
    mass = (torch.rand(1, 5, dtype=torch.float64, generator=rng(0)) + 0.1).requires_grad_()
    names = ["mixer.down.queries", "mixer.up.key_norm.weight"]
    parameters = [made.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def run(h: Tensor, mass: Tensor, *values: Tensor) -> Tensor:
        replaced = dict(zip(names, values, strict=True))
        return torch.func.functional_call(made, replaced, (h,), {"mass": mass})

    assert torch.autograd.gradcheck(run, (h, mass, *parameters))


def test_t14_samples_of_a_batch_do_not_meet() -> None:
    made, (x, f) = operator(), points(9, b=8)
    torch.testing.assert_close(made(x[3:4], f[3:4]), made(x, f)[3:4], **EXACT)


@pytest.mark.parametrize("train", [True, False])
def test_t15_inputs_are_left_alone(train: bool) -> None:
    made = operator().train(train)
    x, f = points(9)
    mass, valid = torch.ones(2, 9, dtype=torch.float64) / 3, torch.ones(2, 9, dtype=torch.bool)
    valid[:, 5:] = False
    given = [x, f, mass, valid]
    before = [t.clone() for t in given]
    made(x, f, mass=mass, valid=valid, query_x=x, query_f=f)
    h = normal(2, 9, 16)
    copy = h.clone()
    made.blocks[0](h)
    assert all(torch.equal(a, b) for a, b in zip([*given, h], [*before, copy], strict=True))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("d", "heads", "latents"), [(128, 8, 64), (32, 2, 16)])
def test_t16_parameters_as_counted_by_hand(d: int, heads: int, latents: int) -> None:
    made = LRSABlock(d, heads, latents, ffn_ratio=2.0)
    assert count(made) == 23 * d**2 + latents * d + 18 * d + 6 * (d // heads)
    if d == 128:
        assert count(made) == 387_424
    grid = LRSABlock(d, heads, latents, "conv", ffn_ratio=2.0)
    assert count(grid) - count(made) == 9 * d**2 + d + 2 * d - 2 * d  # plus conv and its bias, norm, minus one bias


def test_t16_the_reference_mixers_have_the_sizes_of_the_specified_experiments() -> None:
    # without the final LayerNorm of those experiments, 2 d
    def size(d: int, heads: int, **options) -> int:
        mixer = options.pop("mixer", None)
        return count(LRSAOperator(2, 1, 1, d, 3, heads, 16, mixer=mixer, **options)) + 2 * d

    def physics(d: int, heads: int) -> int:
        return size(d, heads, mixer=lambda depth: PhysicsAttention(d, heads, 16, depth=depth), norm="layer")

    assert [size(32, 4), size(32, 2), size(32, 4, qk_norm=False)] == [56_337, 56_481, 56_193]
    assert [physics(32, 4), physics(56, 4), physics(56, 2)] == [18_237, 52_785, 58_743]


def test_t17_the_poisson_kernel_has_the_known_errors_of_low_rank() -> None:
    n = 63
    beside = torch.ones(n - 1, dtype=torch.float64)
    inverse = torch.linalg.inv(2 * torch.eye(n, dtype=torch.float64) - beside.diag(1) - beside.diag(-1))
    continuum = torch.arange(1, 100_001, dtype=torch.float64) ** -2
    expected = {
        1: (0.27614142, 0.27579267),
        2: (0.13583209, 0.13533457),
        4: (0.05813079, 0.05744272),
        8: (0.02324801, 0.02231734),
        16: (0.00945096, 0.00827251),
    }
    for s, column in ((spectrum(inverse, n), 0), (continuum, 1)):
        energy = s.square()
        for m, errors in expected.items():
            assert (energy[m:].sum() / energy.sum()).sqrt().item() == pytest.approx(errors[column], abs=1e-7)


def test_t19_a_grid_keeps_its_order_and_its_size_is_checked() -> None:
    made, h = block(point="conv", latents=1), normal(1, 35, 16)
    changed = h.clone()
    changed[:, 2 * 7 + 3] += 1.0
    with torch.no_grad():  # only the convolution tells points apart
        made.mixer.up.out.weight.zero_()
    moved = (made(changed, grid_shape=(5, 7)) - made(h, grid_shape=(5, 7))).abs().sum(-1)[0].view(5, 7) > 1e-9
    expected = torch.zeros(5, 7, dtype=torch.bool)
    expected[1:4, 2:5] = True
    assert torch.equal(moved, expected)
    for shape in ((6, 6), None):
        with pytest.raises(ValueError, match="35 points"):
            made(h, grid_shape=shape)


def test_t20_half_precision_holds_where_column_sums_do_not() -> None:
    h = 1e3 * torch.randn(1, 4096, 32, generator=rng(0))
    for dtype in (torch.float16, torch.bfloat16):
        made = LRSABlock(32, 2, 16, generator=rng(0)).to(dtype)
        values = h.to(dtype).requires_grad_()
        out = made(values)
        (out.float().square().mean() / 1e6).backward()
        assert out.isfinite().all()
        assert all(p.grad.isfinite().all() for p in [values, *made.parameters()])
    peer = PhysicsAttention(4, 1, 2, generator=rng(0)).half()
    nn.init.zeros_(peer.slice.weight)
    many = torch.ones(1, 200_000, 4, dtype=torch.float16)
    assert peer._slices(many).sum(-2).isinf().all()
    assert not peer.factors(many).V.any()  # the tokens are zero
    mixer = LRSAAttention(4, 1, 2, generator=rng(0)).half()
    assert mixer.factors(many).V.sum(-1).float() == pytest.approx(torch.ones(1, 1, 2), rel=1e-3)
    assert mixer.compress(many).abs().min() > 0


# --------------------------------------------------------------------------------------------- section 9: what is odd


def shapes(made: LRSAOperator, x: Tensor, f: Tensor | None = None, **given) -> None:
    """What forward asks first; asked apart, because in this test run a checker would speak before it."""
    check_arguments(made, x, f, *(given.get(k) for k in ("mass", "valid", "grid_shape", "query_x", "query_f", "t")))


def test_bad_arguments_are_refused_in_one_sentence() -> None:
    x, f = points()
    made = operator()
    ones = torch.ones(2, 9, dtype=torch.float64)
    nan = f.clone()
    nan[1, 4] = torch.nan
    zero = ones.clone()
    zero[1, 2] = 0.0
    nowhere = torch.ones(2, 9, dtype=torch.bool)
    nowhere[1] = False
    cases = [
        (ValueError, "multiple of the number of heads", lambda: LRSABlock(16, 3)),
        (ValueError, "at least one latent", lambda: LRSABlock(16, 4, 0)),
        (ValueError, "heads of width 4 or more", lambda: block(d=8, rotary=(-5.0, 3.0))(normal(2, 9, 8), pos=x)),
        (ValueError, "pass pos=", lambda: block(rotary=(-5.0, 3.0))(normal(1, 3, 16))),
        (ValueError, "f is missing", lambda: shapes(made, x)),
        (ValueError, "no input channels", lambda: shapes(LRSAOperator(2, 0, 1, 16, 1, 4), x, f)),
        (ValueError, r"shape \(samples, points, 2\).* got \(2, 9, 1\)", lambda: shapes(made, f, f)),
        (ValueError, r"shape \(2, 9, 1\), got \(2, 9, 2\)", lambda: shapes(made, x, x)),
        (ValueError, "holds 10 points, not 9", lambda: made(x, f, grid_shape=(2, 5))),
        (ValueError, "holds 9 points", lambda: made(x, f, grid_shape=(-3, -3))),
        (ValueError, "no grid of shape None", lambda: operator(point="conv")(x, f)),
        (ValueError, "ffn_ratio=0.01 leaves", lambda: operator(ffn_ratio=0.01)),
        (ValueError, "ffn_ratio=-1.0 leaves", lambda: operator(point="conv", ffn_ratio=-1.0)),
        (ValueError, "mass must be positive.*sample 1 at point 2", lambda: made(x, f, mass=zero)),
        (ValueError, "mass must be positive", lambda: made(x, f, mass=ones * torch.nan)),
        (ValueError, "mass needs one entry per point", lambda: shapes(made, x, f, mass=ones[:, :5])),
        (ValueError, "sample 1 has no valid point", lambda: made(x, f, valid=nowhere)),
        (ValueError, "f must be finite, and is not in sample 1 at point 4", lambda: made(x, nan)),
        (ValueError, "x must be finite", lambda: made(x / 0, f)),
        (ValueError, "query_x must be finite.*sample 0 at point 0", lambda: made(x, f, query_x=x / 0, query_f=f)),
        (ValueError, "query_f must be finite.*sample 1 at point 4", lambda: made(x, f, query_x=x, query_f=nan)),
        (ValueError, "t must be finite", lambda: operator(time=True)(x, f, t=ones[:, 0] / 0)),
        (TypeError, "x must be floating point, got torch.int64", lambda: shapes(made, x.long(), f)),
        (TypeError, "valid must be boolean", lambda: shapes(made, x, f, valid=ones)),
        (ValueError, "query_f is missing.*blind_queries", lambda: shapes(made, x, f, query_x=x)),
        (ValueError, "query_f comes with query_x", lambda: shapes(made, x, f, query_f=f)),
        (ValueError, "for 1 samples", lambda: shapes(made, x, f, query_x=x[:1], query_f=f[:1])),
        (ValueError, "no part of a grid", lambda: made(x, f, query_x=x, query_f=f, grid_shape=(3, 3))),
        (ValueError, "built with time=True", lambda: shapes(made, x, f, t=ones[:, 0])),
        (ValueError, "give times", lambda: shapes(operator(time=True), x, f)),
        (ValueError, "one time per sample", lambda: shapes(operator(time=True), x, f, t=ones[0])),
        (ValueError, "no masses", lambda: SpectralMixer(16)(normal(2, 9, 16), mass=ones)),
        (ValueError, "does not hold 12 modes", lambda: SpectralMixer(16)(normal(2, 9, 16).float(), grid_shape=(3, 3))),
    ]  # fmt: skip
    for error, message, run in cases:
        with pytest.raises(error, match=message):
            run()
    assert made(x, nan, check=False).isnan().any()


@pytest.mark.parametrize(("n", "b", "latents"), [(1, 1, 5), (3, 2, 8), (9, 1, 1)])
def test_odd_sizes_work(n: int, b: int, latents: int) -> None:
    made, (x, f) = operator(latents=latents), points(n, b)
    assert made(x, f).shape == (b, n, 1)
    assert made(torch.zeros_like(x), f).isfinite().all()  # all points at one place
    strided = torch.stack([x, x], -1)[..., 0]
    assert not strided.is_contiguous()
    torch.testing.assert_close(made(strided, f), made(x, f), **EXACT)
    torch.testing.assert_close(made(x, f, mass=torch.full((b, n), 0.3).double()), made(x, f), atol=1e-6, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(made.eval()(x, f), made(x, f), **EXACT)


def test_weights_move_to_a_model_used_on_other_points_and_frozen_latents_stay() -> None:
    first, second, (x, f) = operator(0), operator(1), points(9)
    first(x, f)
    second.load_state_dict(first.state_dict())
    x, f = points(31, seed=5)
    assert torch.equal(first(x, f), second(x, f))
    for made in second.blocks:
        made.mixer.down.queries.requires_grad_(False)
    second(x, f).sum().backward()
    assert second.blocks[0].mixer.down.queries.grad is None
    assert second.blocks[0].mixer.down.key.weight.grad.abs().sum() > 0


def test_recomputing_the_blocks_changes_no_gradient() -> None:
    x, f = points(9)
    gradients = []
    for checkpoint in (False, True):
        made, calls = operator(checkpoint=checkpoint), []
        made.blocks[0].mixer.register_forward_hook(lambda *_, calls=calls: calls.append(0))
        made(x, f, mass=torch.rand(2, 9, generator=rng(0)).double() + 1).square().sum().backward()
        gradients.append([p.grad for p in made.parameters()])
        assert len(calls) == 1 + checkpoint
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_with_masks_and_masses(dtype) -> None:
    made = LRSAOperator(2, 1, 1, 32, 2, 2, 8, rotary=(-5.0, 3.0), generator=rng(0))
    x, f = (t.float() for t in points(40))
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[0, 30:] = False
    given = {"mass": torch.rand(2, 40, generator=rng(1)) + 0.1, "valid": valid}
    exact = made(x, f, **given)
    with torch.autocast("cpu", dtype):
        rounded = made(x, f, **given)
    assert rounded.dtype == dtype
    assert (rounded.float() - exact).norm() < 0.05 * exact.norm()
    rounded.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in made.parameters())
    whole = made.to(dtype)(x.to(dtype), f.to(dtype), **given)
    assert (whole.float() - exact).norm() < 0.05 * exact.norm()


PLAIN = """
import torch
from subspan.models import LRSAAttention, LRSABlock, LRSAOperator, relative_l2
model = LRSAOperator(2, 1, 1, 16, 1, 2, 4, rotary=(-5.0, 3.0), generator=torch.Generator().manual_seed(0))
compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="eager")
for n in (20, 33):
    x, f = torch.rand(2, n, 2), torch.rand(2, n, 1)
    valid = torch.ones(2, n, dtype=torch.bool)
    valid[0, 15:] = False
    given = dict(mass=torch.rand(2, n) + 0.1, valid=valid, query_x=x[:, :7], query_f=f[:, :7])
    torch.testing.assert_close(compiled(x, f, **given), model(x, f, **given), atol=1e-5, rtol=1e-5)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "a new number of points must not compile again"
torch.export.export(LRSAAttention(16, 2, 4), (torch.rand(2, 20, 16),))
grid = LRSAOperator(2, 1, 1, 16, 1, 2, 4, point="conv", time=True)
x, f, more = torch.rand(2, 20, 2), torch.rand(2, 20, 1), dict(grid_shape=(4, 5), t=torch.rand(2))
exported = torch.export.export(grid, (x, f), more)
torch.testing.assert_close(exported.module()(x, f, **more), grid(x, f, **more))
for wrong in (torch.rand(2, 20), torch.rand(2, 1, 1)):
    try:
        relative_l2(f, wrong)
    except ValueError as error:
        assert "must be the same" in str(error)
    else:
        raise AssertionError(wrong.shape)
for wrong in (dict(point="grid"), dict(norm="batch"), dict(latent_attention="mlp")):
    try:
        LRSABlock(16, 4, **wrong)
    except ValueError as error:
        assert all(key in str(error) for key in wrong)
    else:
        raise AssertionError(wrong)
print("done")
"""


@pytest.mark.slow
def test_without_the_shape_checker_it_compiles_in_one_graph_for_any_number_of_points_exports_and_refuses() -> None:
    # a process of its own: the checker that this test run installs would break the graph and catch the wrong words
    ran = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True)
    assert ran.stdout.strip() == "done", ran.stderr


GRID = """
import torch
from subspan.models.lrsa.operator import GridFeedForward
part = GridFeedForward(4, generator=torch.Generator().manual_seed(0))
compiled = torch.compile(part, dynamic=True, fullgraph=True)
for shape in ((4, 5), (3, 7)):
    found = []
    for run in (part, compiled):
        x = torch.linspace(-1, 1, shape[0] * shape[1] * 4).view(1, -1, 4).requires_grad_()
        run(x, shape).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's default compiler needs c++")
def test_the_point_update_on_grids_of_any_size_trains_under_the_default_compiler() -> None:
    ran = subprocess.run([sys.executable, "-c", GRID], capture_output=True, text=True)
    assert ran.stdout.strip() == "done", ran.stderr


def test_a_mixer_fits_into_a_sequence() -> None:
    network = nn.Sequential(nn.LayerNorm(16), LRSAAttention(16, 2, 4), nn.Linear(16, 1))
    assert network(torch.rand(2, 7, 16)).shape == (2, 7, 1)


def test_the_same_generator_gives_the_same_weights_and_every_block_its_own() -> None:
    a, b = LRSAOperator(2, 1, 1, 64, 4, 4, generator=rng(0)), LRSAOperator(2, 1, 1, 64, 4, 4, generator=rng(0))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    queries = a.blocks[0].mixer.down.queries.reshape(64, 64)
    torch.testing.assert_close(queries @ queries.T, torch.eye(64), atol=1e-5, rtol=0)
    for depth, made in enumerate(a.blocks):
        mixer = made.mixer
        for layer in (part.out for part in (mixer.down, mixer.ffn1, mixer.latent, mixer.ffn2, mixer.up, made.point)):
            assert layer.weight.std().item() == pytest.approx((2 * 64 * (depth + 1)) ** -0.5, rel=0.05)
            assert layer.weight.abs().max() <= 3 * (2 * 64 * (depth + 1)) ** -0.5
        assert mixer.down.key.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


def test_one_switch_removes_one_part() -> None:
    plain, without, replaced = (block(latent_attention=kind) for kind in (True, False, "ffn"))
    own = count(plain.mixer.latent) + count(plain.mixer.norm2)
    assert count(plain) - count(without) == own
    assert {*dict(plain.named_children())} == {*dict(without.named_children())}
    assert abs(count(replaced) - count(plain)) < 0.1 * own


def test_positions_are_embedded_in_the_stated_order() -> None:
    x = torch.tensor([[0.25, 0.5]], dtype=torch.float16)
    f = torch.pi * torch.tensor([0.5, 2.0])
    x32 = x.float()
    expected = torch.cat([x32, (x32.T * f).sin().reshape(1, 4), (x32.T * f).cos().reshape(1, 4)], 1)
    embedding = PositionEmbedding(2, 2, (-1, 1))
    torch.testing.assert_close(embedding.half()(x), expected)
    assert embedding.width == 10
    assert PositionEmbedding(3, 6, include=False).width == 36


def test_rotations_compose_and_leave_products_to_differences() -> None:
    x, y = normal(1, 2, 5, 7), normal(1, 2, 5, 7, seed=1)  # three pairs, and one channel that stays
    a, b = rotary_angles(normal(1, 5, 1), 7, (-1.0, 1.0)), rotary_angles(normal(1, 5, 1, seed=1), 7, (-1.0, 1.0))
    assert a.shape == (1, 1, 5, 3)
    torch.testing.assert_close(a[..., 0] * 4, a[..., 2], **EXACT)
    torch.testing.assert_close(rotate(rotate(x, a), b), rotate(x, a + b), **EXACT)
    products = [(rotate(x, p) * rotate(y, q)).sum(-1) for p, q in ((a, b), (a - b, torch.zeros_like(b)))]
    torch.testing.assert_close(*products, **EXACT)
    assert (rotate(x, a)[..., :6] - x[..., :6]).abs().min() > 0
    assert torch.equal(rotate(x, a)[..., 6], x[..., 6])


def test_every_sample_has_its_time_and_a_network_can_lift_and_project() -> None:
    made = operator(time=True, lift_hidden=8, head_hidden=12, output_norm=True)
    x, f = points()
    at = [made(x, f, t=torch.full((2,), t, dtype=torch.float64)) for t in (0.1, 0.9)]
    assert (at[0] - at[1]).abs().max() > 1e-3
    each = made(x, f, t=torch.tensor([0.1, 0.9], dtype=torch.float64))
    torch.testing.assert_close(each, torch.stack([at[0][0], at[1][1]]), **EXACT)
    bare = operator(layers=0, lift_hidden=8, head_hidden=12, output_norm=True)
    h = bare.embed(x, f)
    assert [layer.out_features for layer in (bare.lift.network[0], bare.head[0])] == [8, 12]
    h = bare.output_norm.weight * h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(bare(x, f), bare.head(h), **EXACT)


def test_the_other_forms_of_parts_written_out() -> None:
    gated = FeedForward(8, 2.5, gated=True).double()
    assert gated.up.out_features == 32  # 20, up to a multiple of 16
    x = normal(3, 8)
    gate = gated.gate(x)
    expected = gated.out(gate * (1 + torch.erf(gate / 2**0.5)) / 2 * gated.up(x))
    torch.testing.assert_close(gated(x), expected, **EXACT)
    for kind, centre in (("rms", 0.0), ("layer", 1.0)):
        small = 1e-3 * x
        small_ = small - centre * small.mean(-1, keepdim=True)
        scale = (small_.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(make_norm(kind, 8).double()(small), small_ / scale, **EXACT)
    bias = key_bias(torch.tensor([[1.0, 1e-9]], dtype=torch.float64), None)
    assert bias[0, 0, 0].exp().tolist() == pytest.approx([2, 1e-6])


def test_rotary_turns_the_keys_of_down_and_the_queries_of_up() -> None:
    mixer = block(rotary=(-1.0, 2.0)).mixer
    h, pos = normal(1, 9, 16), normal(1, 9, 2)
    angles = rotary_angles(pos, 4, (-1.0, 2.0))
    q, k, v = mixer.down.project(h)
    z = mixer.down.out((attention_weights(q, rotate(k, angles)) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer.down(h, source_angles=angles), z, **EXACT)
    z = mixer.compress(h, pos=pos)
    q, k, v = mixer.up.project(mixer.norm4(z), h)
    out = mixer.up.out((attention_weights(rotate(q, angles), k) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer(h, pos=pos), out, **EXACT)
    assert (mixer.compress(h, pos=2 * pos) - z).abs().max() > 1e-3


def test_a_fourier_layer_keeps_the_lowest_modes_of_both_signs() -> None:
    mixer = SpectralMixer(1, 3, generator=rng(0)).double()
    i, j = torch.meshgrid(torch.arange(8.0), torch.arange(9.0), indexing="ij")
    for k, kept in (
        ((2, 2), True),
        ((-2, 2), True),
        ((2, 0), True),
        ((3, 0), False),
        ((-3, 1), False),
        ((0, 3), False),
    ):
        wave = (2 * torch.pi * (k[0] * i / 8 + k[1] * j / 9)).cos().double().view(1, 72, 1)
        assert bool(mixer(wave, grid_shape=(8, 9)).abs().max() > 1e-3) == kept


def test_without_input_channels_there_is_nothing_to_give() -> None:
    assert LRSAOperator(3, 0, 2, 16, 1, 4)(torch.rand(1, 6, 3)).shape == (1, 6, 2)


# ------------------------------------------------------------------------------------------------- losses, diagnostics


def test_relative_l2_by_hand() -> None:
    true = torch.tensor([[[3.0], [4.0]], [[1.0], [0.0]]])
    pred = true + torch.tensor([[[1.0], [0.0]], [[0.0], [2.0]]])
    assert relative_l2(pred, true).item() == pytest.approx((1 / 5 + 2) / 2)
    assert relative_l2(pred.half(), true.half()).dtype == torch.float32
    valid = torch.tensor([[True, True], [True, False]])
    assert relative_l2(pred.masked_fill(~valid[..., None], torch.nan), true, valid).item() == pytest.approx(0.1)
    mass = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    assert relative_l2(pred[:1], true[:1], mass=mass[:1]).item() == pytest.approx((2 / 34) ** 0.5)
    grid = torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 4, 1)
    assert relative_l2_gradient(grid + 5, grid, (2, 2)) == 0
    assert relative_l2_gradient(2 * grid, grid, (2, 2)) == 1
    grid = torch.arange(6.0).view(1, 6, 1)  # three differences of 3 between its rows, four of 1 within them
    ridge, step = torch.tensor([0.0, 1, 0]).repeat(2), torch.tensor([0.0, 0, 0, 1, 1, 1])
    assert relative_l2_gradient(grid + ridge.view(1, 6, 1), grid, (2, 3)) == pytest.approx((4 / 31) ** 0.5)
    assert relative_l2_gradient(grid + step.view(1, 6, 1), grid, (2, 3)) == pytest.approx((3 / 31) ** 0.5)


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4))
@few
def test_ragged_samples_are_answered_as_if_alone(sizes: list[int]) -> None:
    samples = [points(n, b=1, seed=n) for n in sizes]
    x, valid = pad_points([x[0] for x, _ in samples])
    f, _ = pad_points([f[0] for _, f in samples])
    masses = [1 + x[0, :, 0] for x, _ in samples]
    mass, _ = pad_points(masses)
    assert valid.sum(1).tolist() == sizes
    made = operator()
    out = made(x, f, valid=valid, mass=mass)
    for row, ((x_one, f_one), mass_one) in enumerate(zip(samples, masses, strict=True)):
        torch.testing.assert_close(out[row : row + 1, : sizes[row]], made(x_one, f_one, mass=mass_one[None]), **EXACT)


def test_graphs_of_torch_geometric() -> None:
    data = pytest.importorskip("torch_geometric.data", reason="needs torch_geometric (the extra 'graph')")
    graphs = [(x[0], f[0]) for x, f in (points(n, b=1, seed=n) for n in (4, 9))]
    batch = data.Batch.from_data_list([data.Data(pos=x, x=f) for x, f in graphs])
    out = operator().from_batch(batch)
    expected = torch.cat([operator()(x[None], f[None])[0] for x, f in graphs])
    torch.testing.assert_close(out, expected, **EXACT)


def test_diagnosis_sees_dead_latents_and_the_rank_of_what_is_mixed() -> None:
    made, (x, f) = operator(layers=1, latents=5), points(40)
    (layer,) = diagnose(made, x, f)
    kernel = mixing_kernel(made.blocks[0], made.embed(x, f))
    assert layer.rank == pytest.approx(effective_rank(kernel, 0.99).double().mean().item())
    assert layer.latents == 5
    assert layer.dead == 0
    with torch.no_grad():
        made.blocks[0].mixer.down.query_norm.weight.zero_()  # all logits zero: plain averages
    (layer,) = diagnose(made, x, f, valid=torch.arange(40).expand(2, -1) < torch.tensor([[20], [40]]))
    assert (layer.rank, layer.dead) == (1, 1)
    assert layer.entropy == pytest.approx(1)
    assert len(diagnose(operator(point="conv"), x, f, grid_shape=(5, 8))) == 2
    with pytest.raises(TypeError, match="PhysicsAttention"):
        diagnose(operator(mixer=lambda depth: PhysicsAttention(16, 4)), x, f)


# ---------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.slow
def test_it_learns_darcy_flow_and_answers_on_a_finer_grid() -> None:
    flow = DarcyGenerator(9, random_state=0).sample(96)
    x = (2 * flow.coords - 1).expand(96, -1, -1)
    f, u = flow.a[..., None] / 4.5 - 5 / 3, flow.u[..., None]
    model = LRSAOperator(2, 1, 1, 16, 2, 2, 8, generator=rng(0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=120)
    generator = rng(1)
    for _ in range(120):
        rows = torch.randint(80, (16,), generator=generator)
        loss = relative_l2(u.std() * model(x[rows], f[rows]), u[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.inference_mode():
        error = relative_l2(u.std() * model(x[80:], f[80:]), u[80:])
        mean = relative_l2(u[:80].mean(0).expand(16, -1, -1), u[80:])
        fine = DarcyGenerator(17, random_state=0).sample(96)
        answer = model((2 * fine.coords - 1).expand(16, -1, -1), fine.a[80:, :, None] / 4.5 - 5 / 3)
        finer = relative_l2(u.std() * answer, fine.u[80:, :, None])
    assert error < 0.7 * mean
    assert finer < 1.6 * error
