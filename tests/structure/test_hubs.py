"""Hub detection: the exact facts of the joint minimax eigenspace (J1 to J14), the estimators, and bad input."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.base import clone

from subspan.linalg import orthonormalise
from subspan.structure import (
    IPCHD,
    JICHD,
    HubSet,
    NotIdentified,
    PooledHD,
    fit_populations,
    individual_hubs,
    intersect_hubs,
    joint_subspace,
    make_common_hub_ggm,
)
from subspan.structure.hubs.minimax import bottom_subspace, fantope_shares, maximise_on_simplex
from subspan.structure.hubs.rules import find_hubs, number_of_components, ratio_rule
from subspan.structure.hubs.stiefel import random_starts, subgradient_descent, traces

seeds = st.integers(0, 10_000)
problems = settings(max_examples=25, deadline=None, derandomize=True)


def matrices(seed: int, K: int, p: int, correlation: bool = True) -> torch.Tensor:
    """K sample covariances or correlations with some structure in common."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(p, p)) / np.sqrt(p)
    out = []
    for _ in range(K):
        x = rng.normal(size=(2 * p + 5, p)) @ (np.eye(p) + shared + 0.3 * rng.normal(size=(p, p)))
        out.append(np.corrcoef(x.T) if correlation else np.cov(x.T))
    return torch.from_numpy(np.array(out))


def sizes(seed: int) -> tuple[int, int, int]:
    """(K, p, s) for a seed."""
    rng = np.random.default_rng(seed + 1)
    p = int(rng.integers(4, 15))
    return int(rng.integers(2, 5)), p, int(rng.integers(1, p))


def stiefel(seed: int, p: int, s: int) -> torch.Tensor:
    return orthonormalise(torch.randn(p, s, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def simplex(seed: int, K: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(K)))


def dual(S: torch.Tensor, w: torch.Tensor, s: int) -> float:
    return float(torch.linalg.eigvalsh(torch.tensordot(w, S, 1))[:s].sum())


def leaves(hub: float) -> list[float]:
    return [hub] + [(1 - hub) / 5] * 5


@pytest.fixture(scope="module")
def data():
    return make_common_hub_ggm(100, 150, random_state=3)


# ------------------------------------------------------------------------------------------------- section 4, J1 to J14


@problems
@given(seed=seeds)
def test_j1_turning_v_changes_neither_f_nor_the_influence(seed):
    K, p, s = sizes(seed)
    S, V, Q = matrices(seed, K, p), stiefel(seed, p, s), stiefel(seed + 1, s, s)
    torch.testing.assert_close(traces(S, V @ Q), traces(S, V), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((V @ Q).square().sum(1), V.square().sum(1), rtol=1e-12, atol=1e-12)


@problems
@given(seed=seeds)
def test_j2_influence_lies_in_0_1_and_sums_to_s(seed):
    K, p, s = sizes(seed)
    omega = joint_subspace(matrices(seed, K, p), s).influence()
    assert float(omega.min()) >= -1e-9
    assert float(omega.max()) <= 1 + 1e-9
    assert float(omega.sum()) == pytest.approx(s, abs=1e-9)


@problems
@given(seed=seeds)
def test_j3_weak_duality_and_a_gap_that_certifies(seed):
    K, p, s = sizes(seed)
    S = matrices(seed, K, p, correlation=bool(seed % 2))
    assert float(traces(S, stiefel(seed, p, s)).max()) >= dual(S, simplex(seed, K), s) - 1e-12
    found = joint_subspace(S, s)
    assert found.gap <= 1e-5 * (1 + found.primal)
    # the certificate is what it says it is: both ends recomputed from what was returned
    M = found.projector()
    assert float((S * M).sum((1, 2)).max()) == pytest.approx(found.primal, rel=1e-9)
    assert dual(S, torch.from_numpy(found.weights), s) == pytest.approx(found.dual, rel=1e-9)
    assert float(traces(S, stiefel(seed, p, s)).max()) >= found.dual - 1e-12


@problems
@given(seed=seeds, K=st.sampled_from([1, 3]))
def test_j4_one_population_or_equal_ones_give_ipc(seed, K):
    _, p, s = sizes(seed)
    S = matrices(seed, 1, p)
    found, alone = joint_subspace(S.expand(K, p, p).contiguous(), s), bottom_subspace(S[0], s)
    e = torch.linalg.eigvalsh(S[0])
    assert found.primal == pytest.approx(float(e[:s].sum()), abs=1e-6)
    # where the s-th eigenvalue is nearly tied with the next, the share of either is a matter of mu
    if float(e[s] - e[s - 1]) > 2e-5 * float(e[-1]):
        torch.testing.assert_close(found.influence(), alone.influence(), rtol=0, atol=1e-6)


@problems
@given(seed=seeds, shift=st.floats(-2, 50), factor=st.floats(0.01, 100))
@example(seed=13, shift=30.0, factor=0.02)  # M is fractional here, and so depends on what mu is relative to
def test_j5_shifts_add_c_s_and_scales_multiply_without_moving_m(seed, shift, factor):
    K, p, s = sizes(seed)
    S = matrices(seed, K, p)
    found = joint_subspace(S, s)
    moved = joint_subspace(factor * (S + shift * torch.eye(p)), s)
    assert moved.primal == pytest.approx(factor * (found.primal + shift * s), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(moved.projector(), found.projector(), rtol=0, atol=1e-6)


@problems
@given(seed=seeds)
def test_j6_permutations_are_followed(seed):
    K, p, s = sizes(seed)
    rng = np.random.default_rng(seed)
    S, order, names = matrices(seed, K, p), rng.permutation(p), rng.permutation(K)
    found = joint_subspace(S, s)
    moved = joint_subspace(S[:, order][:, :, order].contiguous(), s)
    torch.testing.assert_close(moved.influence(), found.influence()[order], rtol=0, atol=1e-6)
    renamed = joint_subspace(S[names].contiguous(), s)
    np.testing.assert_allclose(renamed.weights, found.weights[names], atol=1e-6)
    torch.testing.assert_close(renamed.influence(), found.influence(), rtol=0, atol=1e-6)


def test_j7_all_directions_give_the_identity_and_no_hub():
    S = matrices(3, 3, 7)
    torch.testing.assert_close(joint_subspace(S, 7).projector(), torch.eye(7, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = JICHD(7).fit_covariances(list(S.numpy()))
    np.testing.assert_allclose(fitted.influence_, np.ones(7))
    assert len(fitted.hubs_) == 0


@problems
@given(seed=seeds)
def test_j8_a_mean_of_the_others_changes_nothing(seed):
    K, p, s = sizes(seed)
    S = matrices(seed, K, p)
    found = joint_subspace(S, s)
    more = joint_subspace(torch.cat([S, torch.tensordot(simplex(seed, K), S, 1)[None]]), s)
    assert more.primal == pytest.approx(found.primal, abs=1e-5)
    torch.testing.assert_close(more.projector(), found.projector(), rtol=0, atol=1e-5)


@problems
@given(seed=seeds)
@example(seed=316)  # here the value of the dual is exact long before the primal is
def test_j9_another_population_never_lowers_the_optimum(seed):
    K, p, s = sizes(seed)
    S = matrices(seed, K + 1, p)
    fewer, all_ = joint_subspace(S[:K].contiguous(), s, tol=1e-8), joint_subspace(S, s, tol=1e-8)
    assert all_.primal >= fewer.primal - 1e-7


@problems
@given(seed=seeds)
def test_j10_complementary_slackness(seed):
    K, p, s = sizes(seed)
    S = matrices(seed, K, p)
    S[0] = S[1] - 0.05 * torch.eye(p)  # below S_1 for every M: it must drop out
    found = joint_subspace(S, s)
    reached = (S * found.projector()).sum((1, 2)).numpy()
    assert (reached[found.weights > 1e-4] >= found.primal - 1e-4).all()
    assert found.weights[0] < 1e-4


@problems
@given(seed=seeds)
def test_j11_common_bottom_eigenvectors_are_found(seed):
    K, p, s = sizes(seed)
    rng = np.random.default_rng(seed)
    U = stiefel(seed, p, p)
    values = np.concatenate([rng.uniform(0.1, 1, (K, s)), rng.uniform(1.1, 3, (K, p - s))], axis=1)
    S = (U * torch.from_numpy(values)[:, None]) @ U.mT
    torch.testing.assert_close(joint_subspace(S, s).projector(), U[:, :s] @ U[:, :s].mT, rtol=0, atol=1e-6)


@problems
@given(seed=seeds)
def test_j12_row_norms_bound_the_influence(seed):
    _, p, s = sizes(seed)
    theta = make_common_hub_ggm(p, 2, 1, 1, hub_sets=[], random_state=seed).precision[0]
    l, U = np.linalg.eigh(theta)
    l, U = l[::-1], U[:, ::-1]
    if l[s - 1] - l[s] < 1e-9 or l[s - 1] - l[-1] < 1e-9:
        return
    omega = bottom_subspace(torch.from_numpy(np.linalg.inv(theta)), s).influence().numpy()
    np.testing.assert_allclose(omega, (U[:, :s] ** 2).sum(1), atol=1e-8)
    r2 = (theta**2).sum(1)
    assert ((r2 - l[s] ** 2) / (l[0] ** 2 - l[s] ** 2) <= (U[:, :s] ** 2).sum(1) + 1e-10).all()
    assert ((U[:, :s] ** 2).sum(1) <= (r2 - l[-1] ** 2) / (l[s - 1] ** 2 - l[-1] ** 2) + 1e-10).all()


@problems
@given(seed=seeds, size=st.floats(1e-6, 1e-1))
def test_j13_stability_under_perturbation(seed, size):
    K, p, s = sizes(seed)
    S = matrices(seed, K, p)
    noise = torch.from_numpy(np.random.default_rng(seed).normal(size=(K, p, p)))
    other = S + size * (noise + noise.mT)
    found, moved = joint_subspace(S, s, mu=1e-5), joint_subspace(other, s, mu=1e-5)
    e = torch.linalg.eigvalsh(torch.tensordot(torch.from_numpy(found.weights), S, 1))
    delta = float(e[s] - e[s - 1])
    eps = float(torch.linalg.matrix_norm(other - S, 2).max())
    distance = float(torch.linalg.matrix_norm(moved.projector() - found.projector()))
    # both are known up to their gaps, which move M by at most sqrt(2 gap / delta) each
    slack = sum(np.sqrt(2 * f.gap / delta) for f in (found, moved))
    assert distance <= 2 * np.sqrt(s * eps / delta) + slack


@problems
@given(seed=seeds)
def test_j14_correlations_reach_at_most_s_and_independence_has_no_direction(seed):
    K, p, s = sizes(seed)
    assert joint_subspace(matrices(seed, K, p), s).primal <= s + 1e-9
    same = joint_subspace(2.5 * torch.eye(p, dtype=torch.float64).expand(K, p, p).contiguous(), s)
    torch.testing.assert_close(same.influence(), torch.full((p,), s / p, dtype=torch.float64))
    assert same.primal == pytest.approx(2.5 * s)


def test_c1_a_double_bottom_eigenvalue_is_shared():
    S = torch.diag_embed(torch.tensor([[1.0, 4.0, 10.0], [4.0, 1.0, 10.0]], dtype=torch.float64))
    found = joint_subspace(S, 1)
    np.testing.assert_allclose(found.weights, [0.5, 0.5])
    assert (found.primal, found.dual) == pytest.approx((2.5, 2.5))
    np.testing.assert_allclose(found.influence(), [0.5, 0.5, 0.0], atol=1e-9)


def test_c1_asymmetric_needs_the_smoothing_to_vanish():
    # by hand: S(w) = diag(w + 5 (1 - w), 4 w + 2 (1 - w), 10), whose first two are equal at w = 1/2; then M =
    # diag(m, 1 - m, 0) with m + 4 (1 - m) = 5 m + 2 (1 - m), so m = 1/3 and the value is 3
    S = torch.diag_embed(torch.tensor([[1.0, 4.0, 10.0], [5.0, 2.0, 10.0]], dtype=torch.float64))
    found = joint_subspace(S, 1)
    assert (found.primal, found.dual) == pytest.approx((3.0, 3.0), abs=1e-5)
    np.testing.assert_allclose(found.influence(), [1 / 3, 2 / 3, 0.0], atol=1e-4)


@pytest.mark.parametrize(("correlation", "hub"), [(False, 0.5), (True, 0.756074)])
def test_c2_a_star_and_what_standardising_does_to_it(correlation, hub):
    theta = 2 * np.eye(6)
    theta[0, 1:] = theta[1:, 0] = 0.8
    sigma = np.linalg.inv(theta)
    if correlation:
        sigma /= np.sqrt(np.outer(np.diag(sigma), np.diag(sigma)))
    np.testing.assert_allclose(IPCHD(1).fit_covariances([sigma]).influence_, leaves(hub), atol=1e-6)


# ---------------------------------------------------------------------------------------------------- the parts, alone


@problems
@given(seed=seeds, mu=st.sampled_from([1e-6, 1e-3, 0.1, 10.0]))
def test_shares_are_the_projection_onto_the_capped_simplex(seed, mu):
    rng = np.random.default_rng(seed)
    p = int(rng.integers(2, 20))
    s = int(rng.integers(1, p + 1))
    e = torch.from_numpy(np.sort(np.round(rng.normal(size=p), int(rng.integers(0, 4)))))  # with ties
    g = fantope_shares(e, s, mu)
    assert float(g.sum()) == pytest.approx(s, abs=1e-9)
    assert 0 <= float(g.min()) <= float(g.max()) <= 1
    # optimal: e + mu g is the same wherever 0 < g < 1, not larger where g = 1, not smaller where g = 0
    level = e + mu * g
    low = float(level[g > 0].max())
    assert (level[g < 1] >= low - 1e-9).all()


@problems
@given(seed=seeds)
def test_the_quadratic_on_the_simplex_satisfies_its_optimality_conditions(seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 12))
    root = rng.normal(size=(k, int(rng.integers(1, k + 2))))
    g, H, w = rng.normal(size=k), -root @ root.T, rng.dirichlet(np.ones(k))
    y = maximise_on_simplex(g, H, w)
    assert y.min() >= 0
    assert y.sum() == pytest.approx(1)
    slope = g + H @ (y - w)
    assert slope.max() - y @ slope <= 1e-8 * (1 + np.abs(slope).max())


@pytest.mark.parametrize(("K", "p", "s"), [(60, 12, 3), (8, 6, 2), (5, 6, 2)])
def test_many_populations_in_few_variables(K, p, s):
    found = joint_subspace(matrices(5, K, p), s)
    assert found.gap <= 1e-5 * (1 + found.primal)


def test_shrunk_matrices_with_large_tied_eigenspaces_are_solved():
    """As shrinkage leaves them when n < p: low rank plus a different multiple of I each."""
    rng = np.random.default_rng(0)
    roots = [rng.normal(size=(40, 8)), rng.normal(size=(40, 5))]
    S = torch.from_numpy(np.array([x @ x.T / 8 + c * np.eye(40) for x, c in zip(roots, (0.3, 0.5), strict=True)]))
    found = joint_subspace(S, 6)
    assert found.gap <= 1e-5 * (1 + found.primal)
    assert found.primal == pytest.approx(3.0, rel=1e-4)  # six directions from the 35 where the second is 0.5
    assert found.weights[1] > 0.99


def test_the_solver_needs_few_eigendecompositions():
    assert joint_subspace(matrices(0, 3, 60), 7).eigh_calls <= 12


def test_the_authors_solver_descends_to_above_the_bound_and_polish_reaches_below_rounding():
    S = matrices(3, 5, 6)  # M is fractional here: rounding it costs
    found = joint_subspace(S, 2)
    V = found.basis[:, :2]
    rounded = float(traces(S, V).max())
    assert rounded > found.primal + 0.1
    reference = random_starts(S, 2, starts=3, generator=torch.Generator().manual_seed(0))
    polished = subgradient_descent(S, V, bound=found.dual)
    assert found.dual <= polished.value < rounded
    assert found.dual <= reference.value < float(traces(S, stiefel(0, 6, 2)).max())
    assert len(reference.values) == 500
    assert reference.value == reference.values[-1]
    assert float(traces(S, reference.V).max()) == pytest.approx(reference.value)


def test_the_authors_steps_are_taken_as_published():
    """Seven steps in plain numpy: largest trace, tangent projection, 0.1 / log(t + 2), polar factor."""
    S, start = matrices(1, 3, 6), stiefel(1, 6, 2)
    V = start.numpy()
    for t in range(2, 9):
        k = int(np.argmax([np.trace(V.T @ s @ V) for s in S.numpy()]))
        u = 2 * S[k].numpy() @ V
        left, _, right = np.linalg.svd(V - 0.1 / np.log(t + 2) * (u - V @ (V.T @ u + u.T @ V) / 2), full_matrices=False)
        V = left @ right
    run = subgradient_descent(S, start, steps=8)  # eight values, seven steps between them
    np.testing.assert_allclose(run.V.numpy(), V, atol=1e-12)
    assert len(run.values) == 8
    assert float(run.lead.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("choice", "p", "s"),
    [("sqrt", 100, 10), ("sqrt/2", 100, 5), ("1.5sqrt", 100, 15), ("sqrt", 2, 1), ("sqrt/2", 1, 1), (7, 9, 7)],
)
def test_number_of_components(choice, p, s):
    assert number_of_components(choice, p) == s


def test_the_ratio_rule_finds_a_clear_drop_and_admits_an_unclear_one():
    e = np.concatenate([[0.1, 0.11, 0.12], np.linspace(1, 2, 17)])
    assert ratio_rule(e) == 3
    assert number_of_components("ratio", 20, e) == 3
    flat = np.linspace(1, 2, 20)
    assert ratio_rule(flat) is None
    assert number_of_components("ratio", 20, flat) == 4
    assert number_of_components("ratio/5", 25, np.linspace(1, 2, 25)) == 5
    # an indefinite spectrum is lifted by twice its lowest value first: -1 -> 1, 0 -> 2, 0.2 -> 2.2
    assert ratio_rule(np.concatenate([[-1.0, 0.0, 0.2], np.linspace(0.3, 1, 17)])) == 1
    assert ratio_rule(np.zeros(10)) is None


@pytest.mark.parametrize("n", [60, 80, 100])
def test_the_ratio_rule_passes_over_the_null_space_of_few_samples(n, data):
    S = np.corrcoef(data.X[0][:n].T)  # of 100 variables: n - 1 eigenvalues are not zero
    assert ratio_rule(np.linalg.eigvalsh(S)) is None
    fitted = IPCHD("ratio/5") if n == 100 else IPCHD("ratio")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(data.X[0][:n])
    assert fitted.n_components_ == (20 if n == 100 else 10)
    assert [w.category for w in caught] == ([] if n == 100 else [NotIdentified])


def test_hub_rules():
    omega = np.array([0.1, 0.9, 0.1, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    sd = omega.std(ddof=1)
    hubs, bound = find_hubs(omega, c=1.5)
    assert hubs.tolist() == [1, 3]
    assert bound == pytest.approx(omega.mean() + 1.5 * sd)
    assert find_hubs(omega, rule="gap")[0].tolist() == [1, 3]
    assert find_hubs(omega, rule="top", n_hubs=4)[0].tolist() == [1, 3, 0, 2]  # ties by index
    assert find_hubs(np.full(5, 0.2))[0].tolist() == []
    assert find_hubs(np.full(5, 0.2), rule="gap")[0].tolist() == []
    assert find_hubs(np.ones(1))[0].tolist() == []


# --------------------------------------------------------------------------------------------------------- simulation


def test_the_simulation_follows_the_design():
    data = make_common_hub_ggm(100, (30, 40, 50), 3, 5, random_state=0)
    assert [x.shape for x in data.X] == [(30, 100), (40, 100), (50, 100)]
    assert [i.tolist() for i in data.individual] == [[*range(25 * k, 25 * k + 5)] for k in (1, 2, 3)]
    lowest = [np.linalg.eigvalsh(theta)[0] for theta in data.precision]
    assert min(lowest) == pytest.approx(2)
    off = [theta - np.diag(np.diag(theta)) for theta in data.precision]
    edges = [theta != 0 for theta in off]
    magnitudes = np.abs(off[0][edges[0]])
    assert 4 <= magnitudes.min() < magnitudes.max() <= 5
    degree = np.array([edge.sum(0) for edge in edges])
    assert (degree[:, :5] > 25).all()  # hubs everywhere, and with the same edges
    np.testing.assert_array_equal(edges[0][:5, :25], edges[1][:5, :25])
    for k in range(3):
        own, foreign = data.individual[k], [i for j in range(3) if j != k for i in data.individual[j]]
        assert (degree[k, own] > 30).all()
        assert not edges[k][np.ix_(own, foreign)].any()
        # elsewhere these variables meet common hubs only
        assert not edges[(k + 1) % 3][np.ix_(own, range(5, 100))].any()


def test_partial_hubs_share_their_edges_and_seeds_decide():
    sets = [HubSet(range(25, 30), [0, 1], (0.7, 0.9), (1.0, 2.0))]
    data = make_common_hub_ggm(60, 20, 3, 4, hub_sets=sets, random_state=1)
    theta = [t - np.diag(np.diag(t)) for t in data.precision]
    np.testing.assert_array_equal(theta[0], theta[1])
    assert (theta[2][25:30, 4:] == 0).all()
    partial = np.abs(theta[0][25:30, 30:])
    assert 1 <= partial[partial > 0].min() <= partial.max() <= 2
    assert [i.tolist() for i in data.individual] == [[*range(25, 30)]] * 2 + [[]]
    again = make_common_hub_ggm(60, 20, 3, 4, hub_sets=sets, random_state=1)
    np.testing.assert_array_equal(data.X[2], again.X[2])
    gaussian = make_common_hub_ggm(60, 20, 1, 4, hub_sets=[], gaussian_weights=True, random_state=1).precision[0]
    assert np.abs(gaussian - np.diag(np.diag(gaussian))).max() > 5


def test_samples_have_the_stated_precision():
    data = make_common_hub_ggm(10, 200_000, 1, 1, hub_sets=[], random_state=0)
    np.testing.assert_allclose(np.cov(data.X[0].T) @ data.precision[0], np.eye(10), atol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 79}, "hubs up to variable 79 do not fit in p = 79"),
        ({"hub_sets": [HubSet([4, 30], [0])]}, "not to the common hubs"),
        ({"hub_sets": [HubSet([30], [0]), HubSet([30], [1])]}, "one hub set only"),
        ({"n": [10, 20]}, "n has 2 sizes for 3 populations"),
    ],
)
def test_designs_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        make_common_hub_ggm(**({"p": 100, "n": 10} | change))


# --------------------------------------------------------------------------------------------------------- estimators


CHECKS = """
import warnings
warnings.simplefilter("ignore")
from sklearn.utils.estimator_checks import check_estimator
from subspan.structure import IPCHD, JICHD, PooledHD
for detector in (JICHD(), PooledHD(), IPCHD()):
    results = check_estimator(detector)  # raises where a check fails
    assert sum(result["status"] == "passed" for result in results) >= 40
"""


@pytest.mark.slow
def test_scikit_learns_own_checks():
    """In a process without beartype, which would refuse the nonsense that one check gives the constructor."""
    subprocess.run([sys.executable, "-c", CHECKS], check=True)


def test_the_common_hubs_of_three_populations(data):
    fitted = JICHD().fit(data.X)
    assert set(fitted.hubs_.tolist()) == set(data.common.tolist())
    assert fitted.n_components_ == 10
    assert fitted.components_.shape == (10, 100)
    np.testing.assert_allclose(fitted.components_ @ fitted.components_.T, np.eye(10), atol=1e-10)
    np.testing.assert_allclose(np.diag(fitted.projector_), fitted.influence_, atol=1e-12)
    assert fitted.weights_.sum() == pytest.approx(1)
    assert fitted.gap_ <= 1e-5 * (1 + fitted.objective_)
    assert fitted.hub_names_.tolist() == [f"x{i}" for i in fitted.hubs_]
    assert (np.diff(fitted.influence_[fitted.hubs_]) <= 0).all()
    assert (fitted.influence_[fitted.hubs_] > fitted.threshold_).all()


def test_directions_are_ordered_by_variance_and_signed(data):
    few = [x[:, :20] for x in data.X[:2]]
    for solver in ("exact", "stiefel", "subgradient"):
        fitted = JICHD(solver=solver, random_state=0).fit(few)
        mean = np.tensordot(fitted.weights_, [np.corrcoef(x.T) for x in few], 1)
        inside = fitted.components_ @ mean @ fitted.components_.T
        np.testing.assert_allclose(inside, np.diag(np.diag(inside)), atol=1e-8)
        assert (np.diff(np.diag(inside)) >= -1e-9).all()
        largest = np.abs(fitted.components_).argmax(1)
        assert (fitted.components_[np.arange(4), largest] > 0).all()


def test_groups_and_lists_say_the_same_and_nothing_is_random(data):
    rng = np.random.default_rng(0)
    names = np.repeat(["a", "b", "c"], [len(x) for x in data.X])
    order = rng.permutation(len(names))
    stacked = JICHD().fit(np.concatenate(data.X)[order], groups=names[order])
    listed = JICHD().fit(data.X)
    np.testing.assert_allclose(stacked.influence_, listed.influence_, atol=1e-9)
    np.testing.assert_array_equal(JICHD().fit(data.X).influence_, listed.influence_)
    assert set(stacked.populations_) == {"a", "b", "c"}
    assert stacked.n_samples_ == [150] * 3


def test_solvers_agree_and_the_reference_is_reproducible(data):
    few = [x[:, :20] for x in data.X]
    exact = JICHD().fit(few)
    stiefel_, reference = (JICHD(solver=s, random_state=1).fit(few) for s in ("stiefel", "subgradient"))
    assert exact.objective_ <= stiefel_.objective_ + 1e-6
    assert stiefel_.components_objective_ == pytest.approx(stiefel_.objective_, rel=1e-12)
    assert stiefel_.objective_ == pytest.approx(exact.objective_, rel=1e-4)
    assert exact.objective_ < reference.objective_ < 1.3 * exact.objective_
    assert reference.dual_bound_ <= exact.objective_ + 1e-9
    assert reference.objective_path_.shape == (500,)
    again = JICHD(solver="subgradient", random_state=1).fit(few)
    np.testing.assert_array_equal(again.influence_, reference.influence_)


def test_covariances_give_what_their_data_give(data):
    S = [np.corrcoef(x.T) for x in data.X]
    fitted = JICHD().fit_covariances(S, n_samples=[150] * 3, names=["a", "b", "c"])
    np.testing.assert_allclose(fitted.influence_, JICHD().fit(data.X).influence_, atol=1e-9)
    assert fitted.populations_ == ["a", "b", "c"]
    covariances = [np.cov(x.T, bias=True) for x in data.X]
    np.testing.assert_allclose(
        JICHD().fit_covariances(covariances).influence_, JICHD(correlation=False).fit(data.X).influence_, atol=1e-9
    )
    assert JICHD().fit_covariances(S).n_samples_ is None


def test_one_population_is_ipc(data):
    joint, alone = JICHD("sqrt").fit(data.X[0]), IPCHD("sqrt").fit(data.X[0])
    np.testing.assert_allclose(joint.influence_, alone.influence_, atol=1e-9)
    assert joint.weights_.tolist() == [1.0]


def test_pooled_weights():
    data = make_common_hub_ggm(30, (40, 80), 2, 3, hub_sets=[], random_state=0)
    pooled = PooledHD(4, weighting="n_samples").fit(data.X)
    np.testing.assert_allclose(pooled.weights_, [1 / 3, 2 / 3])
    mean = (np.corrcoef(data.X[0].T) + 2 * np.corrcoef(data.X[1].T)) / 3
    np.testing.assert_allclose(pooled.influence_, IPCHD(4).fit_covariances([mean]).influence_, atol=1e-9)
    with pytest.raises(ValueError, match="needs n_samples="):
        PooledHD(weighting="n_samples").fit_covariances([mean])


def test_individual_hubs_and_the_intersection_of_separate_fits():
    data = make_common_hub_ggm(100, 10_000, random_state=0)
    fits = fit_populations(IPCHD("sqrt", rule="top", n_hubs=10), data.X)
    assert intersect_hubs(fits.values()).tolist() == data.common.tolist()
    alone = individual_hubs(fits, data.common)
    assert {k: set(v.tolist()) for k, v in alone.items()} == {k: set(data.individual[k].tolist()) for k in range(3)}
    with pytest.raises(ValueError, match="no fit to intersect"):
        intersect_hubs([])


def test_nonparanormal_undoes_monotone_transformations(data):
    bent = [np.exp(x) for x in data.X]
    scores = JICHD(nonparanormal=True).fit(data.X)
    np.testing.assert_allclose(JICHD(nonparanormal=True).fit(bent).influence_, scores.influence_, atol=1e-9)
    assert np.abs(JICHD().fit(bent).influence_ - scores.influence_).max() > 1e-3


@pytest.mark.filterwarnings("ignore:population .* has weight")
def test_regularisation_reaches_the_solver(data):
    """The public code passes the unthresholded matrix on; here it must matter."""
    few = [x[:40] for x in data.X]
    plain = JICHD().fit(few).influence_
    for change in ({"threshold": 0.7}, {"shrinkage": "oas"}, {"shrinkage": "ledoit_wolf"}, {"screen": "union"}):
        assert np.abs(JICHD(**change).fit(few).influence_ - plain).max() > 1e-3, change
    S = np.corrcoef(few[0].T)
    size = np.abs(S[~np.eye(100, dtype=bool)])
    cut = np.where((np.abs(S) >= np.quantile(size, 0.7)) | np.eye(100, dtype=bool), S, 0)
    e, U = np.linalg.eigh(cut)
    assert e[0] < -0.1  # indefinite, and allowed: a ridge would not move its eigenvectors
    np.testing.assert_allclose(IPCHD(10, threshold=0.7).fit(few[0]).influence_, (U[:, :10] ** 2).sum(1), atol=1e-8)


def test_screening_keeps_one_set_for_all():
    data = make_common_hub_ggm(100, 60, random_state=0)
    strongest = [np.abs(np.corrcoef(x.T) - np.eye(100)).max(0).argsort()[::-1][:45] for x in data.X]
    for rule, kept in (("union", set.union), ("intersection", set.intersection)):
        fitted = JICHD(2, screen=rule).fit(data.X)
        assert set(np.flatnonzero(fitted.influence_)) <= kept(*map(set, strongest))
        assert fitted.influence_.sum() == pytest.approx(2)
    assert len(fitted.influence_) == 100


def test_stability_counts_selections(data):
    frequency = JICHD().stability(data.X, n_splits=6, random_state=0)
    assert frequency.shape == (100,)
    assert frequency[:5].min() >= 0.5
    assert frequency[5:].mean() < 0.05
    np.testing.assert_array_equal(frequency * 6, np.round(frequency * 6))
    seen = []
    names = np.repeat([0, 1, 2], 150)
    again = JICHD().stability(
        np.concatenate(data.X), names, n_splits=6, random_state=0, progress=lambda *x: seen.append(x)
    )
    np.testing.assert_array_equal(again, frequency)
    assert seen == [(i, 6) for i in range(1, 7)]


def test_stability_outlives_a_half_that_leaves_a_variable_constant(data):
    rare = [x.copy() for x in data.X]
    rare[1][:, 0] = 0.0  # a hub, and a count that is seldom not zero
    rare[1][7, 0] = 1.0
    with pytest.warns(UserWarning, match="of 6 subsamples left a variable constant") as caught:
        frequency = JICHD().stability(rare, n_splits=6, random_state=0)
    without = int(str(caught[0].message).split()[0])
    assert 0 < without < 6
    assert frequency[0] <= 1 - without / 6
    assert frequency[1:5].min() >= 0.5


def test_a_fitted_detector_pickles_and_clones(data):
    fitted = JICHD(c=1.5).fit(data.X)
    back = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(back.projector_, fitted.projector_)
    assert clone(fitted).get_params() == fitted.get_params()
    assert not any(isinstance(value, torch.Tensor) for value in vars(fitted).values())


def test_data_frames_are_matched_by_name(data):
    pd = pytest.importorskip("pandas")
    names = [f"gene{i}" for i in range(100)]
    frames = [pd.DataFrame(x, columns=names) for x in data.X]
    frames[1] = frames[1][names[::-1]]
    fitted = JICHD().fit(frames)
    np.testing.assert_allclose(fitted.influence_, JICHD().fit(data.X).influence_, atol=1e-9)
    assert set(fitted.hub_names_) == {f"gene{i}" for i in range(5)}
    fits = fit_populations(IPCHD("sqrt"), frames)
    assert all(name.startswith("gene") for fit in fits.values() for name in fit.hub_names_)
    with pytest.raises(ValueError, match="population 2 and population 0 have different columns: gene0, other"):
        JICHD().fit([*frames[:2], frames[2].rename(columns={"gene0": "other"})])
    with pytest.raises(ValueError, match="population 1 has several columns of one name: gene1"):
        JICHD().fit([frames[0], frames[1].rename(columns={"gene0": "gene1"})])
    with pytest.raises(ValueError, match="some are arrays"):
        JICHD().fit([frames[0], data.X[1]])


# ------------------------------------------------------------------------------------------------- section 9, bad input


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (lambda: JICHD().fit([noise(9, 4), noise(9, 5)]), "population 1 has 5 variables and population 0 has 4"),
        (lambda: JICHD().fit([noise(9, 4), np.full((9, 4), np.nan)]), "population 1 contains NaN"),
        (lambda: JICHD().fit([noise(9, 4), noise(9, 4) * [1, 0, 1, 1]]), "constant in population 1: 1;"),
        (lambda: JICHD().fit([noise(9, 4), noise(1, 4)]), "population 1|minimum of 2"),
        (lambda: JICHD().fit(noise(9, 4), groups=[0] * 8 + [1]), "population 1 has 1 sample"),
        (lambda: JICHD().fit(noise(9, 4), groups=[0] * 8), r"groups has shape \(8,\) for 9 rows"),
        (lambda: JICHD().fit([noise(9, 4)], groups=[0] * 9), "list of populations already"),
        (lambda: JICHD().fit([]), "empty list"),
        (lambda: JICHD().fit_covariances([]), "no population"),
        (lambda: JICHD(5).fit(noise(9, 4)), "between 1 and the number of variables, 4; got 5"),
        (lambda: JICHD(0).fit(noise(9, 4)), "got 0"),
        (lambda: JICHD("root").fit(noise(9, 4)), "n_components must be an integer or one of 'sqrt/2'"),
        (lambda: JICHD(True).fit(noise(9, 4)), "got True"),
        (lambda: JICHD(solver="mirror").fit(noise(9, 4)), "solver must be"),
        (lambda: JICHD(rule="3sd").fit(noise(9, 4)), "rule must be"),
        (lambda: JICHD(rule="top").fit(noise(9, 4)), "needs n_hubs between 1 and the number of variables, 4; got None"),
        (lambda: JICHD(shrinkage="ridge").fit(noise(9, 4)), "shrinkage must be"),
        (lambda: JICHD(threshold=1.0).fit(noise(9, 4)), "quantile"),
        (lambda: JICHD(screen="any").fit(noise(9, 4)), "screen must be"),
        (lambda: PooledHD(weighting="size").fit(noise(9, 4)), "weighting must be"),
        (lambda: IPCHD().fit([noise(9, 4)] * 2), "one population and got 2"),
        (lambda: JICHD().fit_covariances([noise(4, 4)]), "population 0 is not symmetric"),
        (lambda: JICHD().fit_covariances([noise(4, 3)]), "must be square"),
        (lambda: JICHD().fit_covariances([np.diag([1.0, -0.1])]), "has the eigenvalue -0.1"),
        (lambda: JICHD().fit_covariances([np.diag([1.0, np.inf])]), "NaN or infinite"),
        (lambda: JICHD().fit_covariances([np.eye(3), np.eye(4)]), "different sizes: 3, 4"),
        (lambda: JICHD(screen="union").fit_covariances([np.eye(3)]), "give n_samples="),
        (lambda: JICHD().fit_covariances([np.eye(3)] * 2, n_samples=[5]), "n_samples has 1 entries for 2 matrices"),
        (lambda: JICHD().fit_covariances([np.eye(3)] * 2, names="abc"), "names has 3 entries for 2 matrices"),
        (lambda: JICHD(mu=-1.0).fit([noise(9, 4)] * 2), "mu must be positive and finite, got -1"),
        (lambda: JICHD(mu=0.0).fit([noise(9, 4)] * 2), "mu must be positive"),
        (lambda: JICHD(c=np.nan).fit(noise(9, 4)), "c must be a finite number of standard deviations, got nan"),
        (lambda: JICHD(correlation=False).fit(noise(9, 4) * 1e200), "variances over- or underflow float64"),
        (lambda: JICHD(correlation=False).fit(noise(9, 4) * [1, 1, 1e-170, 1]), "variances over- or underflow"),
        (lambda: JICHD().stability(noise(9, 4), fraction=1.0), "fraction must"),
        (lambda: JICHD().stability(noise(9, 4), n_splits=0), "n_splits must"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(fit, message):
    with pytest.raises(ValueError, match=message):
        fit()


def test_a_correlation_matrix_passed_as_data_is_noticed():
    S = np.corrcoef(noise(50, 6).T)
    for fit, name in (
        (lambda: JICHD().fit(S), "all"),
        (lambda: JICHD().fit([noise(50, 6), S]), "1"),
        (lambda: JICHD().fit(np.concatenate([S, noise(50, 6)]), groups=["a"] * 6 + ["b"] * 50), "a"),
    ):
        with pytest.warns(UserWarning, match=f"population {name} is square .* go to fit_covariances"):
            fit()


@pytest.mark.parametrize("unit", [1e-320, 1e-170, 1e200, 1e307])
def test_units_do_not_matter_to_correlations(unit):
    x = np.round(noise(40, 5), 3)
    scaled = x * [1, unit, 1, 1, 1]
    tolerance = 1e-9 if unit > 1e-300 else 0.05  # subnormal numbers have few digits
    np.testing.assert_allclose(JICHD(2).fit(scaled).influence_, JICHD(2).fit(x).influence_, atol=tolerance)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_few_variables(p):
    fitted = JICHD().fit([noise(20, p), noise(30, p) + 1])
    assert fitted.influence_.sum() == pytest.approx(1)


def test_duplicated_variables_singular_matrices_and_single_precision():
    x = [noise(50, 5), noise(50, 5)[::-1] + noise(50, 5)]
    twice = [np.concatenate([a, a[:, :1]], axis=1) for a in x]
    fitted = JICHD(1).fit(twice)
    np.testing.assert_allclose(fitted.influence_, [0.5, 0, 0, 0, 0, 0.5], atol=1e-9)
    assert fitted.objective_ == pytest.approx(0, abs=1e-9)
    single = JICHD(2).fit([a.astype(np.float32) for a in x])
    assert single.influence_.dtype == np.float64
    np.testing.assert_allclose(single.influence_, JICHD(2).fit(x).influence_, atol=1e-5)


def test_independent_variables_give_no_or_few_hubs():
    x = [np.random.default_rng(k).normal(size=(500, 60)) for k in range(3)]
    assert len(JICHD().fit(x).hubs_) <= 4


@pytest.mark.parametrize("detector", [JICHD(4), PooledHD(4), IPCHD(4)], ids=lambda d: type(d).__name__)
def test_a_common_null_space_is_shared_equally_and_said(detector):
    x = noise(9, 40)
    X = x if isinstance(detector, IPCHD) else [x, noise(18, 40)[9:]]
    rank = 8 if isinstance(detector, IPCHD) else 16
    with pytest.warns(NotIdentified, match=f"dimension {40 - rank} > 4 .*threshold="):
        fitted = detector.fit(X)
    S = [np.corrcoef(a.T) for a in (X if isinstance(X, list) else [X])]
    e, U = np.linalg.eigh(np.mean(S, axis=0))
    null = U[:, e < 1e-9]
    np.testing.assert_allclose(fitted.projector_, 4 / null.shape[1] * null @ null.T, atol=1e-8)
    assert fitted.components_.shape == (40 - rank, 40)
    assert (fitted.objective_, fitted.gap_) == (0.0, 0.0)


def test_indefinite_matrices_that_cancel_are_no_common_null_space():
    a = torch.zeros(4, 4, dtype=torch.float64)
    a[0, 1] = a[1, 0] = 1.0
    S = torch.stack([a, -a]) + torch.diag(torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = joint_subspace(S, 1)
    assert found.null_dim == 0
    assert found.gap <= 1e-5


def test_a_small_population_that_is_not_heard_is_named():
    data = make_common_hub_ggm(100, (400, 400, 30), random_state=0)
    with pytest.warns(UserWarning, match="population 2 has weight 0.0.. and only 30 samples for 100 variables"):
        fitted = JICHD().fit(data.X)
    assert fitted.weights_[2] < 0.08
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        JICHD().fit(data.X[:2])
