"""Section 4 of the prism specification (T1-T5, T8, T14) and the rest of LowRank, in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subspan.linalg import LowRank, Subspace, random_orthonormal

D = torch.float64
FEW = settings(max_examples=30, deadline=None)
SIZES = st.tuples(st.integers(1, 4), st.integers(0, 7), st.integers(0, 7), st.integers(0, 2**31 - 1))


def random_low_rank(m: int, n: int, r: int, g: torch.Generator, cond: float = 10.0) -> LowRank:
    """A random Z with singular values between 1 and 1/cond, in a random gauge."""
    s = torch.logspace(0, -math.log10(cond), r, dtype=D)
    u, v = (random_orthonormal(k, r, generator=g, dtype=D) for k in (m, n))
    return LowRank(u * s, v).regauge(torch.randn(r, r, generator=g, dtype=D) + 3 * torch.eye(r, dtype=D))


def setup(sizes: tuple[int, int, int, int]) -> tuple[LowRank, Tensor, torch.Generator]:
    r, dm, dn, seed = sizes
    g = torch.Generator().manual_seed(seed)
    z = random_low_rank(r + dm, r + dn, r, g)
    return z, torch.randn(*z.shape, generator=g, dtype=D), g


def dense_projection(z: LowRank, G: Tensor) -> Tensor:
    pa = z.A @ torch.linalg.pinv(z.A)
    pb = z.B @ torch.linalg.pinv(z.B)
    return pa @ G + G @ pb - pa @ G @ pb


def close(a: Tensor, b: Tensor, tol: float = 1e-10) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tol * max(1.0, float(b.abs().max())), (a, b)


@FEW
@given(SIZES)
def test_t1_lift_identity_and_projection(sizes: tuple[int, int, int, int]) -> None:
    z, G, g = setup(sizes)
    space = z.tangent()
    PG = dense_projection(z, G)
    v = space.coordinates(G @ z.B, G.mT @ z.A)
    dA, dB = space.lift(v)
    close(dA @ z.B.mT + z.A @ dB.mT, PG)
    # the paper's closed form of the lift
    inv_n, inv_m = torch.linalg.inv(z.B.mT @ z.B), torch.linalg.inv(z.A.mT @ z.A)
    gA = G @ z.B @ inv_n
    close(dA, gA - 0.5 * z.A @ torch.linalg.pinv(z.A) @ gA, 1e-8)
    gB = G.mT @ z.A @ inv_m
    close(dB, gB - 0.5 * z.B @ torch.linalg.pinv(z.B) @ gB, 1e-8)
    # idempotent and self-adjoint
    close(space.project(G), PG)
    close(space.project(space.project(G)), PG)
    H = torch.randn(*z.shape, generator=g, dtype=D)
    close((space.project(G) * H).sum(), (G * space.project(H)).sum())
    # the lift is horizontal for tr(dAᵀdA N) + tr(dBᵀdB M)
    N, M = z.B.mT @ z.B, z.A.mT @ z.A
    close(z.A.mT @ dA @ N, M @ dB.mT @ z.B, 1e-8)


@FEW
@given(SIZES)
def test_t2_norm_three_ways(sizes: tuple[int, int, int, int]) -> None:
    z, G, _ = setup(sizes)
    space = z.tangent()
    v = space.coordinates(G @ z.B, G.mT @ z.A)
    dA, dB = space.lift(v)
    M, N = z.A.mT @ z.A, z.B.mT @ z.B
    three = ((dA.mT @ dA) * N).sum() + ((dB.mT @ dB) * M).sum() + 2 * ((z.A.mT @ dA) * (z.B.mT @ dB).mT).sum()
    dense = dense_projection(z, G).square().sum()
    close(v.norm_sq(), dense)
    close(three, dense, 1e-10)
    # |G V|² + |Gᵀ U|² - |Uᵀ G V|², the form of the hot path
    gv, gu = G @ space.V, G.mT @ space.U
    close(gv.square().sum() + gu.square().sum() - (space.U.mT @ gv).square().sum(), dense)


@FEW
@given(SIZES, st.sampled_from([D, torch.float32]))
def test_t3_gauge_leaves_everything_intrinsic_unchanged(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    z, G, g = setup(sizes)
    z = z.balance()
    r = z.rank
    q1, q2 = (random_orthonormal(r, r, generator=g, dtype=D) for _ in "12")
    other = z.regauge(q1 @ torch.diag(torch.logspace(0, 3, r, dtype=D)) @ q2)  # condition number 1e3
    results = []
    for x in (z, other):
        x = LowRank(x.A.to(dtype), x.B.to(dtype))
        space = x.tangent()
        v = space.coordinates(G.to(dtype) @ x.B, G.to(dtype).mT @ x.A)
        dA, dB = space.lift(v)
        dZ = dA @ x.B.mT + x.A @ dB.mT
        results.append((v.norm_sq().sqrt(), space.dense(v), dZ, x.retract(dA, dB, -0.1).dense()))
    for a, b in zip(*results, strict=True):
        assert float(torch.linalg.norm(a - b)) <= (1e-8 if dtype == D else 1e-3) * float(torch.linalg.norm(b))


@FEW
@given(SIZES)
def test_t4_sampler_covariance_is_the_projector(sizes: tuple[int, int, int, int]) -> None:
    z, _, _ = setup(sizes)
    space = z.tangent()
    m, n = z.shape
    r = z.rank

    def response(i: int) -> torch.Tensor:
        """What the sampler makes of the i-th unit vector in place of its normal numbers."""
        place = i

        def unit(*shape: int, **_: object) -> torch.Tensor:
            nonlocal place
            x = torch.zeros(*shape, dtype=D)
            if 0 <= place < x.numel():
                x.view(-1)[place] = 1
            place -= x.numel()
            return x

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn", unit)
            return space.dense(space.gaussian()).flatten()

    linear = torch.stack([response(i) for i in range(r * (m + n + r))], 1)
    cov = linear @ linear.mT
    basis = torch.eye(m * n, dtype=D).view(m * n, m, n)
    projector = space.project(basis).flatten(1).mT
    close(cov, projector)
    eig = torch.linalg.eigvalsh(cov)
    assert int((eig > 0.5).sum()) == space.dim == r * (m + n - r)
    close(eig, (eig > 0.5).to(D))


def test_t5_energy_of_the_noise_is_chi_square(generator: torch.Generator) -> None:
    z = random_low_rank(7, 5, 2, generator)
    space = z.tangent()
    k, d = 20000, space.dim
    many = LowRank(z.A.expand(k, -1, -1), z.B.expand(k, -1, -1))
    wide = type(space)(*(x.expand(k, *x.shape) for x in (space.U, space.S, space.V, space.TA, space.TB)))
    energy = wide.gaussian(generator).norm_sq()
    assert many.A.shape[0] == len(energy) == k
    assert abs(float(energy.mean()) - d) <= 4 * math.sqrt(2 * d / k)
    # variance of a sample variance of chi-square(d): (mu4 - sigma^4)/k with mu4 = 12 d (d + 4)
    spread = math.sqrt((12 * d * (d + 4) - 4 * d * d) / k)
    assert abs(float(energy.var()) - 2 * d) <= 4 * spread


@FEW
@given(SIZES, st.floats(0.01, 0.5))
def test_t8_retraction_is_the_truncated_svd(sizes: tuple[int, int, int, int], step: float) -> None:
    z, G, _ = setup(sizes)
    space = z.tangent()
    dA, dB = space.lift(space.coordinates(G @ z.B, G.mT @ z.A))
    moved = z.dense() + step * space.project(G)
    u, s, vh = torch.linalg.svd(moved, full_matrices=False)
    r = z.rank
    new = z.retract(dA, dB, step)
    close(new.dense(), (u[:, :r] * s[:r]) @ vh[:r], 1e-9)
    close(new.A.mT @ new.A, new.B.mT @ new.B, 1e-9)


def test_t8_retraction_is_second_order(generator: torch.Generator) -> None:
    z = random_low_rank(9, 7, 3, generator)
    space = z.tangent()
    v = space.gaussian(generator)
    dA, dB = space.lift(v)
    errors = [
        float(torch.linalg.norm(z.retract(dA, dB, eta).dense() - z.dense() - eta * space.dense(v)))
        for eta in (2e-4, 1e-4, 5e-5)
    ]
    for larger, smaller in itertools.pairwise(errors):
        assert 3.6 <= larger / smaller <= 4.4


def test_t14_full_rank_square_projection_is_the_identity(generator: torch.Generator) -> None:
    z = random_low_rank(4, 4, 4, generator)
    G = torch.randn(4, 4, generator=generator, dtype=D)
    close(z.tangent().project(G), G)


@FEW
@given(SIZES)
def test_coordinates_round_trips(sizes: tuple[int, int, int, int]) -> None:
    z, _, g = setup(sizes)
    space = z.tangent()
    v = space.gaussian(g)
    for back in (
        space.coordinates(*space.factor_gradients(v)),
        space.coordinates_of_lift(*space.lift(v)),
        space.coordinates_of(space.dense(v)),
    ):
        for a, b in zip(back, v, strict=True):
            close(a, b, 1e-9)


def test_tangent_is_a_function_of_z(generator: torch.Generator) -> None:
    z = random_low_rank(6, 5, 3, generator)
    other = z.regauge(-torch.eye(3, dtype=D)[[2, 0, 1]])
    for a, b in zip(z.tangent().gaussian(torch.Generator().manual_seed(1)),
                    other.tangent().gaussian(torch.Generator().manual_seed(1)), strict=True):  # fmt: skip
        close(a, b)


def test_tangent_refuses_rank_deficiency() -> None:
    for A, B in [(torch.ones(4, 2), torch.randn(3, 2)), (torch.zeros(4, 2), torch.randn(3, 2)),
                 (torch.randn(2, 3), torch.randn(4, 3))]:  # fmt: skip
        with pytest.raises(ValueError, match="rank deficient"):
            LowRank(A, B).tangent()


def test_batches_agree_with_single_matrices(generator: torch.Generator) -> None:
    zs = [random_low_rank(6, 5, 2, generator) for _ in range(3)]
    batch = LowRank(torch.stack([z.A for z in zs]), torch.stack([z.B for z in zs]))
    space = batch.tangent()
    v = space.gaussian(generator)
    dA, dB = space.lift(v)
    new = batch.retract(dA, dB, 0.3)
    aligned = new.align_to(batch)
    for i, z in enumerate(zs):
        close(batch.norm()[i], z.norm())
        close(batch.imbalance()[i], z.imbalance())
        single = z.tangent()
        close(space.U[i], single.U)
        close(v.norm_sq()[i], torch.stack([part[i].square().sum() for part in v]).sum())
        alone = z.retract(dA[i], dB[i], 0.3)
        close(new.A[i], alone.A)
        close(aligned.A[i], alone.align_to(z).A)


@FEW
@given(SIZES)
def test_algebra_agrees_with_dense(sizes: tuple[int, int, int, int]) -> None:
    z, _, g = setup(sizes)
    other = LowRank(torch.randn(z.shape[0], 2, generator=g, dtype=D), torch.randn(z.shape[1], 2, generator=g, dtype=D))
    Z, Y = z.dense(), other.dense()
    close((z + other).dense(), Z + Y)
    close(z.scale(-2.5).dense(), -2.5 * Z)
    close(z.norm(), torch.linalg.norm(Z))
    close(z.inner(other), (Z * Y).sum())
    merged = LowRank.merge([z, other], weights=[0.5, 2.0])
    close(merged.dense(), 0.5 * Z + 2 * Y)
    u, s, vh = torch.linalg.svd(0.5 * Z + 2 * Y, full_matrices=False)
    k = min(2, len(s))
    close(LowRank.merge([z, other], [0.5, 2.0], rank=k).dense(), (u[:, :k] * s[:k]) @ vh[:k], 1e-9)
    balanced = z.balance()
    close(balanced.dense(), Z)
    close(balanced.imbalance(), torch.zeros((), dtype=D))
    svd = z.svd()
    close((svd.U * svd.S) @ svd.V.mT, Z)
    assert bool((svd.U.gather(0, svd.U.abs().argmax(0, keepdim=True)) >= 0).all())
    q = random_orthonormal(z.shape[0], 1, generator=g, dtype=D)
    close(z.damp_columns(Subspace(q), 0.7).dense(), Z - 0.7 * q @ (q.mT @ Z))
    assert z.column_space().dim == z.row_space().dim == z.rank


def test_align_to_undoes_a_rotation(generator: torch.Generator) -> None:
    z = random_low_rank(6, 5, 3, generator)
    turned = z.regauge(random_orthonormal(3, 3, generator=generator, dtype=D))
    close(turned.align_to(z).A, z.A)
    close(turned.align_to(z).B, z.B)


def test_truncate_pads_missing_directions(generator: torch.Generator) -> None:
    z = LowRank(torch.randn(2, 2, generator=generator, dtype=D), torch.randn(5, 2, generator=generator, dtype=D))
    wide = z.truncate(4)
    assert wide.rank == 4
    close(wide.dense(), z.dense())
    with pytest.raises(ValueError, match="rank must be at least 1"):
        z.truncate(0)


def test_mismatched_factors_are_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        LowRank(torch.zeros(3, 2), torch.zeros(4, 3))
    with pytest.raises(ValueError, match="shapes"):
        _ = LowRank(torch.zeros(3, 2), torch.zeros(4, 2)) + LowRank(torch.zeros(3, 2), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="at least one"):
        LowRank.merge([])
