"""TileQ: the checks of the specification that have an exact answer, each by its number."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from subspan.linalg import Subspace, projection_kernel, random_orthonormal
from subspan.resize import (
    TileFactors,
    TileQConfig,
    TileQExperts,
    TileQLinear,
    activation_scale,
    bit_budget,
    fit_projection,
    lowrank_moe,
    place_experts,
    tile_factorize,
)
from subspan.resize.tileq.factors import TiledMatrix, weighted_errors
from subspan.resize.tileq.layout import layout
from subspan.resize.tileq.placement import _projector_embedding, index_order
from subspan.resize.tileq.quantizers import SHRINK, fit_codebook, fit_levels, gptq, gptvq, round_to_nearest
from subspan.resize.tileq.rotation import block_length, importance, rotate, rotate_back, rotate_hessian
from tests.resize.tileq_problems import inputs, moments_of, normal, small, some_experts

SEEDS = st.integers(0, 10_000)
EXACT = {"rtol": 1e-8, "atol": 1e-10}
fast = settings(deadline=None, max_examples=5)


def corrections(factors: TileFactors) -> torch.Tensor:
    return torch.stack([factors.correction(e) for e in range(len(factors.cells))])


def problem(k: int, q: int, p: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(k, q, p, seed=seed), activation_scale(inputs(k, 40, p, seed).abs().mean(1), 1.0)


# ---- scales


@fast
@given(seed=SEEDS, c=st.floats(1e-6, 1e6), t=st.floats(0, 3))
def test_t1_scales_are_centred_and_do_not_see_the_size_of_activations(seed, c, t):
    m = torch.exp(2 * normal(3, 17, seed=seed))
    s = activation_scale(m, t)
    torch.testing.assert_close(s.amax(-1) * s.amin(-1), torch.ones(3, dtype=s.dtype), rtol=1e-9, atol=0)
    torch.testing.assert_close(activation_scale(c * m, t), s, rtol=1e-9, atol=0)
    assert bool((s.amax(-1) / s.amin(-1) < 1e5).all())


def test_t1_the_exponent_falls_until_the_scales_are_tame():
    wide = torch.tensor([1.0, 1e3], dtype=torch.float64)
    s = activation_scale(wide)
    assert s.max() / s.min() == pytest.approx(1e3**1.6)  # 2.4, 2.2, 2.0 and 1.8 reach 1e5
    assert activation_scale(torch.tensor([1.0, 1e12])).tolist() == [1.0, 1.0]
    s = activation_scale(torch.tensor([1.0, 1e9]))
    assert s.max() / s.min() == pytest.approx(1e9**0.5)
    # one dead channel neither decides nor is decided upon
    with_dead, alive = (
        activation_scale(torch.tensor([0.0, 2.0, 8.0]), 1.0),
        activation_scale(torch.tensor([2.0, 8.0]), 1.0),
    )
    torch.testing.assert_close(with_dead, alive[[0, 0, 1]])
    assert activation_scale(torch.zeros(3)).tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="finite"):
        activation_scale(torch.tensor([1.0, torch.nan]))


# ---- factors


@fast
@given(seed=SEEDS, k=st.integers(2, 6))
def test_t2_eckart_young_and_what_leaks_into_empty_cells(seed, k):
    w, s = problem(k, 7, 5, seed)
    grid, cells = (2, 3), index_order(k, (2, 3))
    factors = tile_factorize(w, s, cells, grid, 4, solver="svd")
    tile = TiledMatrix(w, s, cells, grid)
    whole = torch.linalg.svdvals(tile.dense())
    empty = [(i, j) for i in range(2) for j in range(3) if (i, j) not in set(map(tuple, cells.tolist()))]
    leaked = sum(((factors.U[i] * factors.sigma) @ factors.V[j]).square().sum() for i, j in empty)
    tail = whole[4:].square().sum()
    torch.testing.assert_close(weighted_errors(w, s, factors).sum() + leaked, tail, **EXACT)


def test_t2_products_of_the_tiled_matrix_are_those_of_the_dense_one():
    w, s = problem(5, 7, 4)
    cells = torch.tensor([[0, 2], [1, 1], [1, 0], [0, 0], [1, 2]])
    tile = TiledMatrix(w, s, cells, (2, 3))
    dense = torch.zeros(8, 21, dtype=w.dtype)
    for e, (i, j) in enumerate(cells.tolist()):
        dense[4 * i : 4 * i + 4, 7 * j : 7 * j + 7] = s[e][:, None] * w[e].mT
    torch.testing.assert_close(tile.dense(), dense)
    x, y = normal(21, 3), normal(8, 2)
    torch.testing.assert_close(tile @ x, dense @ x)
    torch.testing.assert_close(tile.mT @ y, dense.mT @ y)


@pytest.mark.parametrize("solver", ["svd", "randomized", "r1svd"])
def test_t3_a_planted_grid_is_recovered_exactly(solver):
    # A common latent of rank 3: A_e = A_i diag B_j, cells permuted
    left, right = normal(3, 10, 3, seed=1), normal(3, 3, 12, seed=2)
    cells = index_order(9, (3, 3))[torch.randperm(9, generator=torch.Generator().manual_seed(0))]
    s = activation_scale(inputs(9, 40, 10).abs().mean(1), 1.0)
    w = torch.stack([(left[i] @ right[j] / s[e][:, None]).mT for e, (i, j) in enumerate(cells.tolist())])
    generator = torch.Generator().manual_seed(0)
    factors = tile_factorize(w, s, cells, (3, 3), 3, solver=solver, generator=generator)
    tight = 1e-8 if solver != "r1svd" else 1e-2  # eight rounds of power iteration a vector
    assert float((corrections(factors) - w).norm() / w.norm()) < tight
    if solver != "r1svd":
        shared = s[:1].expand(9, -1)
        same = w * s.unsqueeze(1) / shared.unsqueeze(1)
        for assignment, side in itertools.product(("greedy", "hungarian"), (0, 1)):
            found = place_experts(same, shared, (3, 3), 6, assignment=assignment)
            assert torch.equal(  # the same partition, whatever its labels
                cells[:, None, side] == cells[None, :, side], found[:, None, side] == found[None, :, side]
            )


def test_t3_rank_by_rank_later_vectors_repair_the_rounding_of_earlier_ones():
    w, s = problem(6, 24, 16)
    cells, kind, errors = index_order(6, (2, 3)), torch.float8_e5m2, []
    for storage in (kind, None):
        generator = torch.Generator().manual_seed(0)
        factors = tile_factorize(w, s, cells, (2, 3), 12, solver="r1svd", storage=storage, generator=generator)
        errors.append(float(weighted_errors(w, s, factors.stored(kind, torch.float64).working()).sum()))
    assert errors[0] < 0.998 * errors[1]


def test_t4_numbering_of_grid_rows_and_columns_does_not_matter():
    w, s = problem(8, 6, 5)
    cells = index_order(8, (3, 3))
    first = corrections(tile_factorize(w, s, cells, (3, 3), 4, solver="svd"))
    turned = torch.stack([torch.tensor([2, 0, 1])[cells[:, 0]], torch.tensor([1, 2, 0])[cells[:, 1]]], 1)
    torch.testing.assert_close(corrections(tile_factorize(w, s, turned, (3, 3), 4, solver="svd")), first, **EXACT)


def truncated(x: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def test_t5_one_column_one_row_and_one_expert_are_known_methods():
    w, s = problem(4, 6, 5)
    scaled = s.unsqueeze(-1) * w.mT  # k p q
    stacked = truncated(scaled.reshape(20, 6), 3).view(4, 5, 6)
    factors = tile_factorize(w, s, index_order(4, (4, 1)), (4, 1), 3, solver="svd")
    torch.testing.assert_close(corrections(factors), (stacked / s.unsqueeze(-1)).mT, **EXACT)
    beside = truncated(scaled.permute(1, 0, 2).reshape(5, 24), 3).view(5, 4, 6).permute(1, 0, 2)
    factors = tile_factorize(w, s, index_order(4, (1, 4)), (1, 4), 3, solver="svd")
    torch.testing.assert_close(corrections(factors), (beside / s.unsqueeze(-1)).mT, **EXACT)
    factors = tile_factorize(w[:1], s[:1], index_order(1, (1, 1)), (1, 1), 3, solver="svd")
    torch.testing.assert_close(corrections(factors)[0], (truncated(scaled[0], 3) / s[0][:, None]).mT, **EXACT)


def test_t6_error_falls_with_rank_to_nothing():
    w, s = problem(4, 6, 5)
    errors = [
        float(weighted_errors(w, s, tile_factorize(w, s, index_order(4, (2, 2)), (2, 2), r, solver="svd")).sum())
        for r in range(1, 11)
    ]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(errors))
    assert errors[-1] < 1e-12 * float(w.square().sum())
    more = tile_factorize(w, s, index_order(4, (2, 2)), (2, 2), 99, solver="randomized")
    assert more.sigma.shape == (10,)
    torch.testing.assert_close(corrections(more), w, rtol=1e-6, atol=1e-9)


@fast
@given(seed=SEEDS, rank=st.integers(1, 6))
def test_t7_private_factors_are_no_worse_than_shared_rows_and_those_than_a_grid(seed, rank):
    w, s = problem(6, 7, 6, seed)

    def error(of: list[int], grid: tuple[int, int]) -> float:
        factors = tile_factorize(w[of], s[of], index_order(len(of), grid), grid, rank, solver="svd")
        return float(weighted_errors(w[of], s[of], factors).sum())

    tiled, alone = error(list(range(6)), (2, 3)), sum(error([e], (1, 1)) for e in range(6))
    by_row = error([0, 1, 2], (1, 3)) + error([3, 4, 5], (1, 3))  # U shared, V private
    by_column = sum(error([e, e + 3], (2, 1)) for e in range(3))
    for shared in (by_row, by_column):
        assert alone <= shared + 1e-9
        assert shared <= tiled + 1e-9


# ---- the fused path


def fused_problem(k, p, q, seed, sharing, dtype=torch.float64):
    w, s = problem(k, q, p, seed)
    groups = {"expert": torch.arange(k), "layer": torch.zeros(k, dtype=torch.long), "row": index_order(k, (2, 3))[:, 0]}
    of = groups[sharing]
    factors = tile_factorize(w, s[: int(of.max()) + 1], index_order(k, (2, 3)), (2, 3), 4, groups=of, solver="svd")
    kept = torch.ones(k, dtype=torch.bool)
    kept[k // 2] = False
    return TileFactors(
        *(t.to(dtype) for t in (factors.U, factors.sigma, factors.V, factors.inverse_scales)), of, factors.cells, kept
    )


def check_paths(factors, path, x, chosen, weights, tolerance):
    """Against the reference path, and against the corrections themselves, row by row."""
    found, expected = (lowrank_moe(x, chosen, weights, factors, p) for p in (path, "reference"))
    t, k = chosen.shape
    assert found.shape == ((t, 7) if weights is not None else (t, k, 7))
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
    one_by_one = torch.zeros(t, k, 7, dtype=torch.float64)
    for token in range(t):
        for place in range(k):
            row = x[token, place] if x.ndim == 3 else x[token]
            one_by_one[token, place] = factors.correction(int(chosen[token, place])).double() @ row.double()
    plain = one_by_one if weights is None else (weights.double().unsqueeze(-1) * one_by_one).sum(1)
    assert float((found.double() - plain).norm()) <= max(tolerance, 1e-11) * float(plain.norm()) + 1e-300


@settings(deadline=None, max_examples=8)
@given(
    seed=SEEDS,
    t=st.integers(0, 9),
    k=st.integers(1, 4),
    sharing=st.sampled_from(["expert", "row", "layer"]),
    own=st.booleans(),
    mixed=st.booleans(),
    path=st.sampled_from(["auto", "dense", "grouped"]),
    dtype=st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]),
)
def test_t8_every_path_is_the_reference_for_any_routing(seed, t, k, sharing, own, mixed, path, dtype):
    """Experts twice in a token, experts without tokens, no tokens at all."""
    kind, tolerance = dtype
    factors = fused_problem(6, 5, 7, seed, sharing, torch.promote_types(kind, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, 6, (t, k), generator=generator)
    x = normal(*((t, k, 5) if own else (t, 5)), seed=seed).to(kind)
    weights = torch.rand(t, k, generator=generator).to(kind) if mixed else None
    check_paths(factors, path, x, chosen, weights, tolerance)


@pytest.mark.parametrize("sharing", ["expert", "row", "layer"])
def test_t8_every_combination_of_inputs_outputs_and_paths(sharing):
    factors = fused_problem(6, 5, 7, 0, sharing)
    for tokens, own, mixed, path in itertools.product(
        (3, 80), (False, True), (False, True), ("dense", "grouped", "auto")
    ):
        chosen = torch.randint(0, 6, (tokens, 2), generator=torch.Generator().manual_seed(tokens))
        x, weights = normal(*((tokens, 2, 5) if own else (tokens, 5))), normal(tokens, 2, seed=1) if mixed else None
        check_paths(factors, path, x, chosen, weights, 1e-12)


# ---- rotation


@fast
@given(seed=SEEDS, p=st.sampled_from([8, 24, 40, 64]), first=st.sampled_from([0, 8, 16, 64]))
def test_t9_permutation_and_rotation_are_orthogonal(seed, p, first):
    first = min(first, p)
    block = block_length(p, first, 16)
    r, x = normal(2, 5, p, seed=seed), normal(2, 9, p, seed=seed + 1)
    h = x.mT @ x
    order = importance(r, h.diagonal(dim1=-2, dim2=-1)).argsort(-1)
    turned = rotate(r, order.unsqueeze(1), first, block)
    hessian = rotate_hessian(h, order, first, block)
    torch.testing.assert_close(turned.norm(), r.norm(), rtol=1e-10, atol=0)
    trace = ((turned @ hessian) * turned).sum()
    torch.testing.assert_close(trace, ((r @ h) * r).sum(), rtol=1e-8, atol=0)
    torch.testing.assert_close(rotate(x, order.unsqueeze(1), first, block) @ turned.mT, x @ r.mT, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(rotate_back(turned[0], order[0], first, block), r[0], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(hessian[0], (y := rotate(x, order.unsqueeze(1), first, block))[0].mT @ y[0], **EXACT)


def test_t9_important_columns_come_first_and_blocks_are_as_long_as_fits():
    r = torch.tensor([[[1.0, 1.0, 1.0, 0.1]]])
    # large inputs first, then small residuals, then a channel that never fired, as if it were the faintest
    assert importance(r, torch.tensor([[4.0, 64.0, 0.0, 4.0]])).argsort(-1).tolist() == [[3, 1, 0, 2]]
    assert [block_length(p, 256, 256) for p in (1408, 2048, 256, 64, 300)] == [128, 256, 1, 1, 4]


# ---- placement


@fast
@given(seed=SEEDS)
def test_t10_the_kernel_of_projectors_knows_subspaces_only(seed):
    generator = torch.Generator().manual_seed(seed)
    q = [random_orthonormal(12, 3, generator=generator, dtype=torch.float64) for _ in range(4)]
    turns = [random_orthonormal(3, 3, generator=generator, dtype=torch.float64) for _ in range(4)]
    other = Subspace(q[0]).complement().Q[:, :3]
    kernel = projection_kernel(torch.stack([*q, other]))
    turned = projection_kernel(torch.stack([*(a @ b for a, b in zip(q, turns, strict=True)), other]))
    torch.testing.assert_close(kernel, turned, rtol=0, atol=1e-10)
    assert float(kernel[0, 0]) == pytest.approx(1, abs=1e-10)
    assert float(kernel[0, 4]) == pytest.approx(0, abs=1e-10)
    assert torch.linalg.eigvalsh(kernel).min() > -1e-10
    rows = torch.from_numpy(_projector_embedding(torch.stack([*q, other])))
    torch.testing.assert_close(rows @ rows.mT, kernel)


# ---- quantizers


def hessian_loss(e: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return ((e @ h) * e).sum((-2, -1))


def test_t11_gptq_beats_rounding_on_average_and_equals_it_for_a_diagonal_hessian():
    x = normal(20, 60, 16) @ normal(16, 16, seed=3)  # correlated channels
    w, h = normal(20, 8, 16, seed=1), x.mT @ x
    losses = [
        hessian_loss(w - found.decode(w.dtype), h).mean() for found in (gptq(w, h, 3, 16), round_to_nearest(w, 3, 16))
    ]
    assert losses[0] < 0.8 * losses[1]
    diagonal = torch.diag_embed(torch.rand(20, 16, generator=torch.Generator().manual_seed(0)).double() + 0.1)
    for group in (16, 4):
        a, b = gptq(w, diagonal, 3, group), round_to_nearest(w, 3, group)
        torch.testing.assert_close(a.decode(w.dtype), b.decode(w.dtype), rtol=1e-6, atol=1e-9)


def by_least_squares(w, h, step, quantize):
    """The sweep from its definition: as columns are fixed, all others go where tr(E H Eᵀ) is least."""
    h = h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    free, found = w.clone(), torch.zeros_like(w)
    for j in range(0, w.shape[1], step):
        done, rest = slice(0, j + step), slice(j + step, None)
        to_come = torch.linalg.inv(h[rest, rest])
        # what the columns cost when the rest makes up for them
        cost = h[j:, j:][:step, :step] - h[j : j + step, rest] @ to_come @ h[rest, j : j + step]
        found[:, j : j + step] = quantize(j, free[:, j:], cost)
        free[:, rest] = w[:, rest] + (w[:, done] - found[:, done]) @ h[done, rest] @ to_come
    return found


def test_t11_the_sweeps_are_what_least_squares_makes_of_every_step():
    x = normal(40, 16) @ normal(16, 16, seed=3)
    w, h = normal(8, 16, seed=1), x.mT @ x / 20
    levels = []

    def rounded(j, free, _):
        if j % 4 == 0:
            levels.append(fit_levels(free[:, :4], 3))
        return levels[-1].decode(levels[-1].encode(free[:, :1], 3), w.dtype)

    expected = by_least_squares(w, h, 1, rounded)
    torch.testing.assert_close(gptq(w[None], h[None], 3, 4).decode(w.dtype)[0], expected)

    codes = gptvq(w[None], h[None], 2, 2)  # 16 entries for 64 vectors
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(16, dtype=h.dtype)
    costs = torch.stack([1 / torch.linalg.inv(damped[j:, j:])[0, 0] for j in range(16)])  # of a column's error
    book, _ = fit_codebook(w.view(-1, 2), costs.view(8, 2).repeat(8, 1), 16)
    assert torch.equal(codes.codebook[0, 0, 0], book)
    entries = codes.codebook[0, 0, 0].double() * codes.scale[0, 0, 0].double()

    def nearest(j, free, cost):
        off = free[:, None, :2] - entries
        return entries[((off @ cost) * off).sum(-1).argmin(1)]

    torch.testing.assert_close(codes.decode(w.dtype)[0], by_least_squares(w, h, 2, nearest))


def test_t11_codebooks_are_fitted_where_errors_cost_most():
    v = normal(4000, 2)
    weights = torch.where(v[:, :1] > 0, 9.0, 1.0).double() * torch.tensor([4.0, 1.0]).double()
    book, scale = fit_codebook(v, weights, 16)
    plain, unit = fit_codebook(v, torch.ones_like(v), 16)

    def costs(entries):
        return (weights[:, None] * (v[:, None] - entries).square()).sum(-1)

    found = costs(book.double() * scale.double())
    assert found.amin(1).sum() < 0.8 * costs(plain.double() * unit.double()).amin(1).sum()
    # and there they stay: each is nearly the weighted mean of the vectors that choose it
    chosen = found.argmin(1)
    mass = torch.zeros(16, 2).double().index_add_(0, chosen, weights)
    means = torch.zeros(16, 2).double().index_add_(0, chosen, weights * v) / mass
    assert costs(means).amin(1).sum() > 0.99 * found.amin(1).sum()


def test_levels_span_the_larger_side_and_search_for_what_weighs_most():
    w = torch.tensor([[-3.0, 1.0], [3.0, -1.0], [1.0, 2.0]])
    for symmetric in (True, False):
        levels = fit_levels(w, 4, symmetric=symmetric)
        off = (levels.decode(levels.encode(w, 4), w.dtype) - w).abs().amax(-1)
        assert bool((off <= 0.51 * levels.scale.float()).all())
    w, diagonal = normal(3, 40, 8), torch.exp(2 * normal(3, 8, seed=1))
    searched, blind = (round_to_nearest(w, 2, 4, shares=SHRINK, diagonal=d).decode(w.dtype) for d in (diagonal, None))
    plain = round_to_nearest(w, 2, 4).decode(w.dtype)
    weighted = [((w - found).square() * diagonal.unsqueeze(1)).sum() for found in (searched, blind, plain)]
    assert weighted[0] < 0.9 * weighted[1]
    assert (w - blind).norm() < 0.95 * (w - plain).norm()


@pytest.mark.parametrize("quantizer", ["gptq", "diag", "rtn"])
def test_t12_each_bit_halves_the_error(quantizer):
    experts = some_experts(k=2)
    moments = moments_of(experts)["up"]
    errors = []
    for bits in (3, 4, 8):
        config = small(bits=bits, quantizer=quantizer, group_size=8)
        stored, _ = fit_projection("up", experts.weights["up"], moments, config)
        linear = TileQLinear("up", *experts.weights["up"].shape, config)
        linear.load_state_dict(stored)
        found = torch.stack([linear.dequantize(e) for e in range(2)])
        errors.append(float((found - experts.weights["up"]).norm() / experts.weights["up"].norm()))
    assert 1.7 <= errors[0] / errors[1] <= 2.4
    assert 1.7 <= (errors[1] / errors[2]) ** 0.25 <= 2.4  # four bits
    assert errors[-1] < 4e-3


# ---- storage


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"symmetric": True, "rank": 0, "rotation": False},
        {"quantizer": "gptvq", "bits": 2},
        {"quantizer": "gptvq", "bits": 4, "factor_dtype": "int8"},
        {"scale_sharing": "row", "down_scale_sharing": "layer", "grid": (2, 4), "factor_dtype": "float16"},
    ],
)
def test_t13_bits_are_the_bytes_that_are_written(changes, tmp_path):
    experts, config = some_experts(k=7), small(**changes)
    found, fits = TileQExperts.from_float(experts, moments_of(experts), config)
    state = found.state_dict()
    for fit in fits:
        own = sum(t.nbytes for name, t in state.items() if name.startswith(f"{fit.projection}."))
        assert fit.nbytes == own
        assert sum(fit.bits.values()) == pytest.approx(8 * own / fit.weights, rel=1e-12)
        k, q, p = fit.shape
        assert bit_budget(k, q, p, config, fit.projection) == fit.bits
    save_file(state, tmp_path / "x.safetensors")
    header = int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    assert (tmp_path / "x.safetensors").stat().st_size - header - 8 == sum(fit.nbytes for fit in fits)


def test_t13_the_budget_is_the_published_formula():
    """Qwen1.5-MoE's gate and Mixtral's w1 and w2, by the terms of the specification's section 3.8."""
    for k, q, p, grid, factors in (
        (60, 1408, 2048, (8, 8), 0.0409),
        (8, 14336, 4096, (4, 2), 0.0246),
        (8, 4096, 14336, (4, 2), 0.0357),
    ):
        budget = bit_budget(k, q, p, TileQConfig(grid=grid))
        m, n = grid
        assert budget["residual"] == 2
        assert budget["levels"] == pytest.approx((16 + 2) / 128)
        assert budget["factors"] == pytest.approx(32 * (m * p + n * q) * 8 / (k * p * q))
        assert budget["factors"] == pytest.approx(factors, abs=6e-5)
        assert budget["sigma"] == pytest.approx(32 * 32 / (k * p * q))
        assert budget["input scales"] == pytest.approx(16 * p / (k * p * q))
        assert budget["permutation"] == pytest.approx(16 / q)
    private = bit_budget(1, 1408, 2048, TileQConfig(grid=(1, 1)))["factors"]
    assert private == pytest.approx(0.3068, abs=6e-5)
    vectors = bit_budget(60, 1408, 2048, TileQConfig(quantizer="gptvq"))
    assert vectors["codebooks"] == pytest.approx((256 * 4 * 8 + 16) / (176 * 256))  # 176 divides 1408, 256 does not
    assert layout("gate", 60, 1408, 2048, TileQConfig()).grid == (6, 10)


def test_t14_scaled_weights_give_scaled_corrections_at_the_same_places():
    w, s = problem(6, 8, 6)
    places = [place_experts(c * w, s, (2, 3), 4) for c in (1.0, 8.0)]
    assert torch.equal(*places)
    one, eight = (corrections(tile_factorize(c * w, s, places[0], (2, 3), 4, solver="svd")) for c in (1.0, 8.0))
    torch.testing.assert_close(eight, 8 * one, **EXACT)


@pytest.mark.parametrize("changes", [{}, {"quantizer": "gptvq", "bits": 2}, {"symmetric": True, "bits": 4}])
def test_t15_saved_and_loaded_experts_answer_bitwise_the_same(changes, tmp_path):
    experts = some_experts(k=5)
    found, _ = TileQExperts.from_float(experts, moments_of(experts), small(**changes, identity_block=16))
    save_file(found.state_dict(), tmp_path / "x.safetensors")
    again = TileQExperts(found.shapes, experts.act, found.config, "meta")
    again.load_state_dict(load_file(tmp_path / "x.safetensors"), assign=True)
    x, chosen = normal(11, 32, dtype=torch.float32), torch.randint(0, 5, (11, 2))
    weights = torch.rand(11, 2)
    assert torch.equal(found(x, chosen, weights), again(x, chosen, weights))
