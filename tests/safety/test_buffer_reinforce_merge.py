"""Section 4 of the method's specification, the mathematics of the merge, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from subspan.linalg import LowRank
from subspan.safety import output_subspace, qr_merge
from subspan.safety.buffer_reinforce.merge import check_settings, damped

EXACT = {"rtol": 0.0, "atol": 1e-10}
BASES = ("svd", "gram", "qr")
shapes = st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
alphas = st.floats(0, 1)


def drawn(m, n, r_user, r_reinforce, seed):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return LowRank(normal(m, r_user), normal(n, r_user)), LowRank(normal(m, r_reinforce), normal(n, r_reinforce))


@settings(max_examples=20, deadline=None)
@given(shapes, st.sampled_from(BASES))
def test_t1_alpha_zero_adds(shape, basis):
    user, reinforce = drawn(*shape)
    merged = qr_merge(user, reinforce, alpha=0.0, weight=0.5, subspace=basis)
    torch.testing.assert_close(merged.dense(), 0.5 * (user.dense() + reinforce.dense()), **EXACT)
    assert merged.rank == user.rank + reinforce.rank


@settings(max_examples=30, deadline=None)
@given(shapes, st.sampled_from(BASES))
def test_t2_alpha_one_leaves_nothing_inside_the_users_subspace(shape, basis):
    user, reinforce = drawn(*shape)
    tau = 0.0
    q = output_subspace(user, tau, basis).Q
    change = damped(user, reinforce, 1.0, tau, basis).change
    torch.testing.assert_close(q.mT @ change.dense(), torch.zeros(q.shape[1], shape[1]).double(), **EXACT)
    assert abs(float(user.inner(change))) <= 1e-9 * float(user.norm() * reinforce.norm())


@settings(max_examples=20, deadline=None)
@given(shapes, st.floats(1e-4, 0.9))
def test_t2_truncation_bounds_the_inner_product(shape, tau):
    user, reinforce = drawn(*shape)
    change = damped(user, reinforce, 1.0, tau).change
    bound = math.sqrt(tau * user.rank) * user.norm() * reinforce.norm()
    assert abs(float(user.inner(change))) <= float(bound) + 1e-10


@settings(max_examples=30, deadline=None)
@given(shapes, alphas, st.sampled_from(BASES))
def test_t3_damping_inside_and_energy(shape, alpha, basis):
    user, reinforce = drawn(*shape)
    q = output_subspace(user, 0.01, basis).Q
    part = damped(user, reinforce, alpha, 0.01, basis)
    inside = q.mT @ reinforce.dense()
    torch.testing.assert_close(q.mT @ part.change.dense(), (1 - alpha) * inside, **EXACT)
    energy = reinforce.dense().square().sum()
    left = energy - alpha * (2 - alpha) * inside.square().sum()
    torch.testing.assert_close(part.change.dense().square().sum(), left, rtol=1e-10, atol=1e-10)
    assert part.removed_energy == pytest.approx(float(inside.square().sum() / energy), abs=1e-10)
    assert part.kept_rank == q.shape[1]


def test_t3_what_is_left_does_not_grow_with_alpha():
    user, reinforce = drawn(8, 7, 3, 2, 0)
    sizes = [float(damped(user, reinforce, a / 10, 0.01).change.norm()) for a in range(11)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


@settings(max_examples=20, deadline=None)
@given(shapes, alphas)
def test_t4_the_users_output_components_are_protected(shape, alpha):
    user, reinforce = drawn(*shape)
    q = output_subspace(user).Q
    h = torch.randn(shape[1], 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    merged = qr_merge(user, reinforce, alpha=alpha, weight=0.5)
    wanted = 0.5 * (q.mT @ user.dense() @ h + (1 - alpha) * q.mT @ reinforce.dense() @ h)
    torch.testing.assert_close(q.mT @ merged.dense() @ h, wanted, **EXACT)


@settings(max_examples=20, deadline=None)
@given(shapes, alphas, alphas)
def test_t5_two_half_steps_compose(shape, a, b):
    user, reinforce = drawn(*shape)
    space = output_subspace(user)
    twice = reinforce.damp_columns(space, b).damp_columns(space, a)
    once = reinforce.damp_columns(space, a + b - a * b)
    torch.testing.assert_close(twice.dense(), once.dense(), **EXACT)


@settings(max_examples=20, deadline=None)
@given(shapes, st.floats(0, 1))
def test_t6_svd_does_not_depend_on_the_gauge(shape, tau):
    user, reinforce = drawn(*shape)
    g = torch.Generator().manual_seed(shape[-1])
    u, _ = torch.linalg.qr(torch.randn(user.rank, user.rank, generator=g, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(user.rank, user.rank, generator=g, dtype=torch.float64))
    m = u @ torch.diag(torch.logspace(0, 3, user.rank, dtype=torch.float64)) @ v
    tau = min(tau, 0.3) * 1e-3  # away from ties between the threshold and a singular value
    plain, other = (qr_merge(z, reinforce, alpha=0.7, tau=tau).dense() for z in (user, user.regauge(m)))
    assert float((plain - other).norm()) <= 1e-8 * float(plain.norm())


def test_t6_gram_depends_on_it_unless_the_change_is_orthogonal():
    user, reinforce = drawn(8, 7, 3, 2, 5)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    merge = lambda z: qr_merge(z, reinforce, alpha=1.0, subspace="gram").dense()  # noqa: E731
    torch.testing.assert_close(merge(user.regauge(rotation)), merge(user), rtol=0, atol=1e-8)
    skew = torch.diag(torch.tensor([1.0, 1.0, 100.0], dtype=torch.float64))
    assert float((merge(user.regauge(skew)) - merge(user)).norm()) > 0.01


def test_t7_a_rank_deficient_user_loses_no_row_it_never_touched():
    user = LowRank(
        torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]).double(), torch.tensor([[1.0, 0], [0, 1], [0, 0]]).double()
    )
    reinforce = LowRank(torch.eye(3).double(), torch.arange(1.0, 10.0).reshape(3, 3).double())
    assert output_subspace(user).dim == 1
    torch.testing.assert_close(output_subspace(user).Q[:, 0].abs(), torch.tensor([1.0, 0, 0]).double(), **EXACT)
    rows = damped(user, reinforce, 1.0, 0.01).change.dense()
    torch.testing.assert_close(rows[1:], reinforce.dense()[1:], **EXACT)
    assert float(rows[0].norm()) < 1e-12
    plain = damped(user, reinforce, 1.0, 0.01, "qr").change.dense()
    assert float(plain[1].norm()) < 1e-12
    assert float(reinforce.dense()[1].norm()) > 1


def test_t8_the_threshold_compares_with_the_users_own_rank():
    """Two of three columns survive; with r_R = 2 the authors' file compared the count with 2 and kept all three."""
    g = torch.Generator().manual_seed(0)
    columns = torch.randn(6, 3, generator=g, dtype=torch.float64)
    rows = torch.diag(torch.tensor([1.0, 1.0, 1e-3], dtype=torch.float64))
    user = LowRank(columns, torch.cat([rows, torch.zeros(2, 3, dtype=torch.float64)]))
    _, reinforce = drawn(6, 5, 3, 2, 1)
    for basis in ("gram", "svd"):
        part = damped(user, reinforce, 1.0, 0.01, basis)
        assert part.kept_rank == 2
        left = columns[:, 2] - output_subspace(user, 0.01, basis).project(columns[:, 2])
        assert float(left.norm()) > 0.1


@pytest.mark.parametrize("basis", ["svd", "gram"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_threshold_is_on_energies_relative_to_the_largest(basis, scale):
    columns = torch.linalg.qr(drawn(6, 5, 2, 2, 0)[0].A).Q
    for second, kept in ((0.2, 2), (0.05, 1)):  # tau = 0.01: energies of 0.04 and 0.0025 of the largest
        rows = torch.zeros(5, 2, dtype=torch.float64)
        rows[0, 0], rows[1, 1] = scale, scale * second
        assert output_subspace(LowRank(columns, rows), 0.01, basis).dim == kept


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 6))
def test_t11_a_saturated_row_sends_a_bounded_gradient(seed, vocabulary, tokens):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, 5, generator=g, dtype=torch.float64)
    w = (3 * torch.randn(vocabulary, 5, generator=g, dtype=torch.float64)).requires_grad_()
    y = torch.randint(vocabulary, (tokens,), generator=g)
    z = (h @ w.mT).detach().requires_grad_()
    each = nn.functional.cross_entropy(z, y, reduction="none")
    (dz,) = torch.autograd.grad(each.sum(), z)
    lost = each.detach()
    torch.testing.assert_close(dz.abs().sum(1), 2 * (1 - (-lost).exp()), rtol=0, atol=1e-12)
    lengths = dz.norm(dim=1)
    assert (lengths <= math.sqrt(2) * (1 - (-lost).exp()) + 1e-12).all()
    assert (lengths <= math.sqrt(2) * lost + 1e-12).all()
    loss = nn.functional.cross_entropy(h @ w.mT, y)
    (grad,) = torch.autograd.grad(loss, w)
    bound = math.sqrt(2) / tokens * ((1 - (-lost).exp()) * h.norm(dim=1)).sum()
    assert float(grad.norm()) <= float(bound) + 1e-12


@pytest.mark.parametrize("basis", BASES)
def test_t14_zero_adapters_and_more_rank_than_rows(basis):
    user, reinforce = drawn(6, 5, 3, 2, 0)
    nothing = LowRank(torch.zeros(6, 3).double(), user.B)
    kept = qr_merge(nothing, reinforce, alpha=1.0, subspace=basis)
    torch.testing.assert_close(kept.dense(), 0.5 * reinforce.dense(), **EXACT)
    kept = qr_merge(user, LowRank(torch.zeros(6, 2).double(), reinforce.B), alpha=1.0, subspace=basis)
    torch.testing.assert_close(kept.dense(), 0.5 * user.dense(), **EXACT)
    user, reinforce = drawn(2, 6, 4, 3, 1)
    part = damped(user, reinforce, 1.0, 0.0, basis)
    assert part.kept_rank == 2
    assert float(part.change.norm()) < 1e-10


def test_the_flat_variant_removes_one_vector_and_keeps_the_rank():
    user, reinforce = drawn(6, 5, 3, 2, 3)
    du, dr = user.dense(), reinforce.dense()
    for alpha in (0.0, 0.4, 1.0):
        wanted = dr - alpha * (dr * du).sum() / ((du * du).sum() + 1e-8) * du
        merged = qr_merge(user, reinforce, alpha=alpha, weight=(0.7, 0.2), variant="flat")
        torch.testing.assert_close(merged.dense(), 0.7 * du + 0.2 * wanted, **EXACT)
        assert merged.rank == 5
    along = (dr * du).sum() / du.norm()
    share = damped(user, reinforce, 1.0, 0.01, variant="flat").removed_energy
    assert share == pytest.approx(float((along / dr.norm()) ** 2))
    nothing = LowRank(torch.zeros(6, 3).double(), user.B)
    torch.testing.assert_close(qr_merge(nothing, reinforce, variant="flat").dense(), 0.5 * dr, **EXACT)


def test_half_precision_is_merged_in_float32():
    user, reinforce = drawn(6, 5, 3, 2, 3)
    halves = [LowRank(z.A.bfloat16(), z.B.bfloat16()) for z in (user, reinforce)]
    merged = qr_merge(*halves, alpha=1.0)
    assert merged.A.dtype == torch.float32
    wanted = qr_merge(*(LowRank(z.A.double(), z.B.double()) for z in halves), alpha=1.0)
    torch.testing.assert_close(merged.dense().double(), wanted.dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": -0.1}, r"alpha .* \[0, 1\], got -0.1"),
        ({"alpha": 1.1}, r"alpha .* got 1.1"),
        ({"tau": 1.0}, r"tau .* \[0, 1\), got 1.0"),
        ({"tau": -1e-3}, "tau"),
    ],
)
def test_settings_out_of_range_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        qr_merge(*drawn(4, 4, 2, 2, 0), **options)


@pytest.mark.parametrize("name", ["subspace", "variant", "missing"])
def test_no_misspelt_name_becomes_another_one(name):
    names = {"subspace": "svd", "variant": "qr", "missing": "drop"}
    check_settings(0.1, 0.01, **names)
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got 'flatt'"):
        check_settings(0.1, 0.01, **names | {name: "flatt"})


def test_shapes_and_factors_are_checked():
    user, reinforce = drawn(4, 5, 2, 2, 0)
    with pytest.raises(ValueError, match=r"the user's change is \(4, 5\), the reinforcing one \(3, 5\)"):
        qr_merge(user, LowRank(reinforce.A[:3], reinforce.B))
    broken = reinforce.A.clone()
    broken[0, 0] = math.nan
    with pytest.raises(ValueError, match="reinforcing factors hold NaN"):
        qr_merge(user, LowRank(broken, reinforce.B))
