"""Iterative eigensolvers and spectral densities against whole decompositions, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subspan.linalg import (
    Subspace,
    lanczos,
    leading_eigh,
    leading_svd,
    random_orthonormal,
    randomized_svd,
    spectral_density,
    spectral_function,
)

SEEDS = st.integers(0, 2**31)


def symmetric(values: torch.Tensor, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    q = random_orthonormal(len(values), len(values), generator=g, dtype=values.dtype)
    return (q * values) @ q.mT, q


@settings(deadline=None, max_examples=15)
@given(m=st.integers(3, 40), n=st.integers(3, 40), seed=SEEDS, data=st.data())
def test_randomized_svd_is_exact_on_low_rank(m, n, seed, data):
    g = torch.Generator().manual_seed(seed)
    rank = data.draw(st.integers(1, min(m, n)))
    x = torch.randn(m, rank, generator=g, dtype=torch.float64) @ torch.randn(rank, n, generator=g, dtype=torch.float64)
    u, s, v = randomized_svd(x, rank, generator=g)
    torch.testing.assert_close((u * s) @ v.mT, x)
    for q in (u, v):
        torch.testing.assert_close(q.mT @ q, torch.eye(rank, dtype=torch.float64))
    assert (u.gather(0, u.abs().argmax(0, keepdim=True)) > 0).all()


class Products:
    """A matrix that only multiplies."""

    def __init__(self, x):
        self.x, self.shape, self.dtype, self.device = x, x.shape, x.dtype, x.device

    @property
    def mT(self):
        return Products(self.x.mT)

    def __matmul__(self, other):
        return self.x @ other


def test_randomized_svd_needs_products_only(generator):
    x = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    known = randomized_svd(x, 4, generator=torch.Generator().manual_seed(1))
    found = randomized_svd(Products(x), 4, generator=torch.Generator().manual_seed(1))
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b)


@settings(deadline=None, max_examples=15)
@given(n=st.integers(1, 8), seed=SEEDS)
def test_spectral_function_is_the_matrix_function_in_batches(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, n, n, generator=g, dtype=torch.float64)
    s = (x + x.mT) / 2
    torch.testing.assert_close(spectral_function(s, torch.exp), torch.linalg.matrix_exp(s))
    # A cut-off that depends on the whole spectrum, each matrix's own.
    top = spectral_function(s, lambda values: (values == values.amax(-1, keepdim=True)) * values)
    torch.testing.assert_close(top.diagonal(dim1=-2, dim2=-1).sum(-1), torch.linalg.eigvalsh(s)[..., -1])
    torch.testing.assert_close(s @ top, top @ s)


def test_randomized_svd_finds_a_slowly_decaying_spectrum(generator):
    u, v = (random_orthonormal(n, 60, generator=generator, dtype=torch.float64) for n in (120, 80))
    s = 1.0 / torch.arange(1, 61, dtype=torch.float64)
    found = randomized_svd((u * s) @ v.mT, 6, oversample=10, power=6, generator=generator)
    torch.testing.assert_close(found.S, s[:6], rtol=1e-6, atol=0)
    assert Subspace(found.U).principal_angles(Subspace(u[:, :6])).max() < 1e-4


@pytest.mark.parametrize("rank", [0, 9])
def test_randomized_svd_refuses_a_rank_that_does_not_exist(rank):
    with pytest.raises(ValueError, match=r"rank must lie between 1 and min\(m, n\) = 8"):
        randomized_svd(torch.ones(8, 12), rank)


def test_leading_svd_goes_from_exact_to_randomised_without_changing_the_answer(generator):
    for n in (60, 1100):
        u, v = (random_orthonormal(d, 40, generator=generator, dtype=torch.float64) for d in (n, n + 5))
        s = 0.8 ** torch.arange(40, dtype=torch.float64)
        found = leading_svd((u * s) @ v.mT, 5, generator=generator)
        torch.testing.assert_close(found.S[:5], s[:5], rtol=1e-8, atol=0)


SPECTRA = {
    "power law": lambda i: 1 / (i + 1),
    "exponential": lambda i: torch.exp(-i / 20),
    "five per cent gap": lambda i: torch.where(i < 10, 1.05, 1 - i / 700),
    "indefinite": lambda i: torch.where(i < 10, 3.0 - i / 10, -1.0 - i / 700),
    "outlier": lambda i: torch.where(i == 0, 1e4, 1 / (i + 1)),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("product", [False, True])
def test_leading_eigh_finds_the_subspace_of_the_whole_decomposition(name, product, generator):
    n, k = 600, 10
    values = SPECTRA[name](torch.arange(n, dtype=torch.float64))
    s, q = symmetric(values, generator)
    how = {"n": n, "like": s} if product else {}
    found = leading_eigh(s.matmul if product else s, k, generator=generator, **how)
    torch.testing.assert_close(found.values, values[:k], rtol=1e-4, atol=1e-6)
    assert Subspace(found.vectors).principal_angles(Subspace(q[:, :k])).max() < 1e-3
    torch.testing.assert_close(found.vectors.mT @ found.vectors, torch.eye(k, dtype=torch.float64))


@settings(deadline=None, max_examples=20)
@given(n=st.integers(1, 24), seed=SEEDS, data=st.data())
def test_leading_eigh_of_small_matrices_is_exact(n, seed, data):
    g = torch.Generator().manual_seed(seed)
    k = data.draw(st.integers(1, n))
    s, _ = symmetric(torch.randn(n, generator=g, dtype=torch.float64), g)
    found = leading_eigh(s, k)
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(s).flip(0)[:k])
    torch.testing.assert_close(s @ found.vectors, found.vectors * found.values)


@pytest.mark.parametrize("rank", [0, 3, 30])
def test_leading_eigh_survives_rank_deficiency(rank, generator):
    x = torch.randn(600, max(rank, 1), generator=generator, dtype=torch.float64) * (rank > 0)
    found = leading_eigh(x @ x.mT, 16, generator=generator)
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(x @ x.mT).flip(0)[:16], rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(found.vectors.mT @ found.vectors, torch.eye(16, dtype=torch.float64))


def test_leading_eigh_in_float32_reaches_the_angle_of_the_whole_decomposition(generator):
    values = 1 / (torch.arange(600, dtype=torch.float64) + 1)
    s, q = symmetric(values, generator)
    found = leading_eigh(s.float(), 16, generator=generator)
    assert Subspace(found.vectors.double()).principal_angles(Subspace(q[:, :16])).max() < 1e-3


def test_leading_eigh_does_not_return_what_did_not_converge(generator):
    values = torch.cat([torch.linspace(1.001, 1.0, 300), torch.linspace(0.9999, 0.5, 300)]).double()
    s, _ = symmetric(values, generator)
    with pytest.raises(RuntimeError, match=r"after 1 restarts"):
        leading_eigh(s.matmul, 8, n=600, like=s, tol=1e-9, max_restarts=1, generator=generator)
    whole = leading_eigh(s, 8, tol=1e-12, max_restarts=1, generator=generator)
    torch.testing.assert_close(whole.values, values[:8], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("k", "match"), [(0, "k must lie between 1 and n = 5"), (6, "k must lie between")])
def test_leading_eigh_refuses_impossible_ranks(k, match):
    with pytest.raises(ValueError, match=match):
        leading_eigh(torch.eye(5), k)
    with pytest.raises(ValueError, match="needs n="):
        leading_eigh(lambda x: x, 1)


@settings(deadline=None, max_examples=20)
@given(n=st.integers(2, 30), seed=SEEDS)
def test_lanczos_tridiagonalises(n, seed):
    g = torch.Generator().manual_seed(seed)
    s, _ = symmetric(torch.randn(n, generator=g, dtype=torch.float64), g)
    t = lanczos(s.mv, torch.randn(n, generator=g, dtype=torch.float64), n)
    torch.testing.assert_close(t.Q.mT @ t.Q, torch.eye(t.Q.shape[1], dtype=torch.float64))
    tri = torch.diag(t.diagonal) + torch.diag(t.offdiagonal, 1) + torch.diag(t.offdiagonal, -1)
    torch.testing.assert_close(t.Q.mT @ s @ t.Q, tri, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(t.ritz()[0], torch.linalg.eigvalsh(s), rtol=1e-6, atol=1e-8)


def test_lanczos_stops_where_the_krylov_space_ends(generator):
    s, q = symmetric(torch.tensor([3.0, 2.0, 1.0, 0.5]).double(), generator)
    t = lanczos(s.mv, q[:, 0] + q[:, 1], 4)
    assert t.Q.shape == (4, 2)
    torch.testing.assert_close(t.ritz()[0], torch.tensor([2.0, 3.0]).double())
    with pytest.raises(ValueError, match="start vector of lanczos is zero"):
        lanczos(s.mv, torch.zeros(4).double(), 2)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        lanczos(s.mv, q[:, 0], 0)


def test_spectral_density_integrates_to_one_and_sees_the_spectrum(generator):
    values = torch.cat([torch.full((150,), 1.0), torch.full((50,), 3.0)]).double()
    s, _ = symmetric(values, generator)
    grid = torch.linspace(-1, 5, 1201, dtype=torch.float64)
    density = spectral_density(s.mv, 200, grid, bandwidth=0.1, steps=10, probes=20, generator=generator)
    mass = torch.trapezoid(density, grid)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-3, atol=0)
    right = torch.trapezoid(density[grid > 2], grid[grid > 2])
    assert abs(float(right) - 0.25) < 0.05
    assert density[(grid > 1.6) & (grid < 2.4)].max() < 1e-3
