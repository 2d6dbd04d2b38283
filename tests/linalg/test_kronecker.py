"""Kronecker-factored covariances against dense matrices, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subspan.linalg import (
    DenseCovariance,
    KroneckerCovariance,
    LowRank,
    SpikedCovariance,
    Subspace,
    nystrom,
    random_orthonormal,
)

SIZES = st.integers(2, 9)
SEEDS = st.integers(0, 2**31)


def psd(n: int, rank: int, g: torch.Generator) -> torch.Tensor:
    x = torch.randn(n, rank, generator=g, dtype=torch.float64)
    return x @ x.mT / rank


def dense(n: int, g: torch.Generator, rank: int | None = None) -> DenseCovariance:
    return DenseCovariance(psd(n, rank or n + 2, g))


def spiked(n: int, g: torch.Generator) -> SpikedCovariance:
    k = max(1, n // 2)
    values = torch.rand(k, generator=g, dtype=torch.float64).sort(descending=True).values + 1.0
    return SpikedCovariance(values, random_orthonormal(n, k, generator=g, dtype=torch.float64), values.new_tensor(0.3))


def column_stacked(z: torch.Tensor) -> torch.Tensor:
    return z.mT.flatten()


@settings(deadline=None, max_examples=25)
@given(m=SIZES, n=SIZES, seed=SEEDS, kind=st.sampled_from([dense, spiked]))
def test_t1_energy_is_the_quadratic_form_of_the_kronecker_product(m, n, seed, kind):
    g = torch.Generator().manual_seed(seed)
    f = KroneckerCovariance(kind(n, g), kind(m, g))
    z = torch.randn(m, n, generator=g, dtype=torch.float64)
    expected = column_stacked(z) @ torch.kron(f.X.dense(), f.Y.dense()) @ column_stacked(z)
    torch.testing.assert_close(f.energy(z), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(column_stacked(f.apply(z)), f.dense() @ column_stacked(z))
    torch.testing.assert_close(f.trace, f.dense().trace())


@settings(deadline=None, max_examples=15)
@given(m=SIZES, n=SIZES, seed=SEEDS)
def test_energy_of_factors_is_that_of_their_product(m, n, seed):
    g = torch.Generator().manual_seed(seed)
    f = KroneckerCovariance(dense(n, g), spiked(m, g))
    a, b = (torch.randn(d, 2, generator=g, dtype=torch.float64) for d in (m, n))
    torch.testing.assert_close(f.energy(LowRank(a, b)), f.energy(a @ b.mT))
    each = torch.stack([f.energy(torch.outer(a[:, k], b[:, k])) for k in range(2)])
    torch.testing.assert_close(f.pair_energies(a, b), each)


@settings(deadline=None, max_examples=20)
@given(n=SIZES, seed=SEEDS, p=st.sampled_from([-1.0, -0.5, 0.5, 2.0]), kind=st.sampled_from([dense, spiked]))
def test_powers_act_on_the_spectrum(n, seed, p, kind):
    c = kind(n, torch.Generator().manual_seed(seed)).damped(0.1)
    values, vectors = torch.linalg.eigh(c.dense())
    torch.testing.assert_close(c.power(p).dense(), (vectors * values**p) @ vectors.mT, rtol=1e-8, atol=1e-9)


def test_a_negative_power_of_a_singular_covariance_is_the_pseudo_inverse(generator):
    c = dense(7, generator, rank=3)
    torch.testing.assert_close(c.power(-1.0).dense(), torch.linalg.pinv(c.matrix, hermitian=True), rtol=1e-8, atol=1e-9)
    flat = SpikedCovariance(torch.tensor([2.0, 1.0]), torch.eye(5)[:, :2], torch.tensor(0.0))
    torch.testing.assert_close(flat.power(-1.0).dense(), torch.diag(torch.tensor([0.5, 1.0, 0.0, 0.0, 0.0])))


@settings(deadline=None, max_examples=20)
@given(n=SIZES, seed=SEEDS, kind=st.sampled_from([dense, spiked]))
def test_summaries_agree_with_the_dense_matrix(n, seed, kind):
    c = kind(n, torch.Generator().manual_seed(seed))
    values = torch.linalg.eigvalsh(c.dense())
    torch.testing.assert_close(c.trace, values.sum())
    torch.testing.assert_close(c.effective_rank(), values.sum() ** 2 / values.square().sum())
    lead = c.leading(max(1, n // 2))
    torch.testing.assert_close(lead.values, values.flip(0)[: max(1, n // 2)])
    torch.testing.assert_close(c.form(lead.vectors), lead.values)


def test_a_zero_covariance_has_rank_zero():
    zero = torch.zeros(3, 3, dtype=torch.float64)
    assert DenseCovariance(zero).effective_rank() == 0
    assert DenseCovariance(zero).power(-0.5).matrix.abs().max() == 0


def test_damping_follows_the_factored_tikhonov_rule(generator):
    f = KroneckerCovariance(dense(5, generator), dense(4, generator))
    damping = 0.07
    a, b = f.X.trace / 5, f.Y.trace / 4
    pi, root_gamma = (a / b).sqrt(), damping * (a * b).sqrt()
    damped = f.damped(damping)
    torch.testing.assert_close(damped.X.dense(), f.X.dense() + pi * root_gamma * torch.eye(5))
    torch.testing.assert_close(damped.Y.dense(), f.Y.dense() + root_gamma / pi * torch.eye(4))


@settings(deadline=None, max_examples=25)
@given(m=SIZES, n=SIZES, seed=SEEDS, data=st.data())
def test_t6_weighted_eckart_young(m, n, seed, data):
    g = torch.Generator().manual_seed(seed)
    rank = data.draw(st.integers(1, min(m, n)))
    f = KroneckerCovariance(dense(n, g).damped(0.05), dense(m, g).damped(0.05))
    w = torch.randn(m, n, generator=g, dtype=torch.float64)
    best, d = f.truncate(w, rank)
    tail = d[rank:].square().sum()
    torch.testing.assert_close(f.energy(w - best.dense()), tail, rtol=1e-9, atol=1e-9 * float(d[0] ** 2))
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    plain = (u[:, :rank] * s[:rank]) @ vh[:rank]
    assert f.energy(w - plain) >= tail * (1 - 1e-9) - 1e-12
    torch.testing.assert_close(best.A.mT @ best.A, best.B.mT @ best.B)


def test_the_full_natural_step_is_the_inverse_applied(generator):
    f = KroneckerCovariance(dense(5, generator), spiked(4, generator)).damped(0.1)
    g = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    expected = torch.linalg.solve(f.dense(), column_stacked(g)).reshape(5, 4).mT
    torch.testing.assert_close(f.natural_step(g, 4).low_rank.dense(), expected)


@settings(deadline=None, max_examples=15)
@given(seed=SEEDS, rank=st.integers(1, 8))
def test_nystrom_recovers_a_matrix_of_low_rank(seed, rank):
    g = torch.Generator().manual_seed(seed)
    s = psd(30, rank, g)
    test = random_orthonormal(30, 12, generator=g, dtype=torch.float64)
    e = nystrom(s @ test, test)
    torch.testing.assert_close((e.vectors * e.values) @ e.vectors.mT, s, rtol=1e-5, atol=1e-6 * float(s.trace()))


def test_nystrom_finds_the_leading_subspace_of_a_decaying_spectrum(generator):
    q = random_orthonormal(200, 200, generator=generator, dtype=torch.float64)
    values = 0.7 ** torch.arange(200, dtype=torch.float64)
    test = random_orthonormal(200, 48, generator=generator, dtype=torch.float64)
    e = nystrom((q * values) @ (q.mT @ test), test)
    assert Subspace(e.vectors[:, :8]).principal_angles(Subspace(q[:, :8])).max() < 1e-3
    c = SpikedCovariance.with_trace(e, values.sum())
    torch.testing.assert_close(c.trace, values.sum())


@settings(deadline=None, max_examples=25)
@given(n=st.integers(2, 12), seed=SEEDS, data=st.data())
def test_a_flat_rest_conserves_the_trace_and_the_order(n, seed, data):
    c = dense(n, torch.Generator().manual_seed(seed))
    flattened = SpikedCovariance.with_trace(c.leading(data.draw(st.integers(1, n - 1))), c.trace)
    torch.testing.assert_close(flattened.trace, c.trace)
    assert (flattened.values >= flattened.floor).all()
    assert flattened.floor >= 0


def test_nystrom_of_zero_is_zero():
    test = torch.eye(6)[:, :3]
    e = nystrom(torch.zeros(6, 3), test)
    assert e.values.abs().max() == 0
    torch.testing.assert_close(e.vectors.mT @ e.vectors, torch.eye(3))


def test_a_sketch_does_not_answer_beyond_what_it_kept(generator):
    with pytest.raises(ValueError, match="only 3 leading eigenpairs were kept, 4 are wanted"):
        spiked(6, generator).leading(4)
