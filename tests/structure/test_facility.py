"""facility: the checks of section 4, then bad input and what must keep working, resume, and a stream of real images."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from sklearn.utils.estimator_checks import parametrize_with_checks

from subspan.structure import DynamicFacilityLocation, guaranteed_scale
from subspan.structure.facility import reference
from subspan.structure.facility.clusters import CLOSED
from subspan.structure.facility.levels import dual_scale, level

ORACLES = ("exact", "counters", "hash")
few = settings(max_examples=7, deadline=None)


def build(seed=0, m=12, d=2, n=0, spread=3.0, prices=None, **options):
    """An estimator over random facilities and n first clients, and the generator that continues."""
    rng = np.random.default_rng(seed)
    places = spread * rng.normal(size=(m, d))
    prices = rng.uniform(0.5, 15.0, m) if prices is None else prices
    model = DynamicFacilityLocation(**{"oracle": "exact", "random_state": 0} | options)
    model.fit(spread * rng.normal(size=(n, d)), facilities=places, opening_cost=prices)
    return model, rng


def stream(model, rng, steps, *, weighted=False, spread=3.0, p_insert=0.6):
    """Random inserts and deletes; yields after every one."""
    d = model.n_features_in_
    for _ in range(steps):
        if not model.ids_ or rng.random() < p_insert:
            weight = rng.uniform(0.2, 5.0, 1) if weighted else None
            model.partial_fit(spread * rng.normal(size=(1, d)), sample_weight=weight)
        else:
            model.forget([model.ids_[rng.integers(len(model.ids_))]])
        yield model


def problem(model):
    """The distances, prices and weights of the present state, computed here."""
    clusters, slots = model._clusters, model._slots()
    x = clusters.distances.positions[slots] + clusters.distances.origin
    return cdist(x, model.facilities_), model.prices_, clusters.weights[slots]


def broken(model, *, stars=True, tolerance=1e-6):
    """The invariants of the module docstring that the state breaks, by brute force over all facilities and levels."""
    D, f, w = problem(model)
    kappa, critical = model.kappa, model._clusters.critical
    out = []
    if not model.ids_:
        return [] if (critical == CLOSED).all() else ["I1: open without clients"]
    phi, lev = model._clusters.serving[model._slots()], model.levels_
    d = D[np.arange(len(phi)), phi]
    if (critical[phi] == CLOSED).any() or (lev < critical[phi]).any():
        out.append("I1")
    for i in np.flatnonzero(critical != CLOSED):
        inner = (phi == i) & (lev == critical[i])
        if not inner.any():
            out.append(f"I1: {i} has no critical member")
        if f[i] + w[inner] @ d[inner] > w[inner].sum() * kappa ** float(critical[i]) * (1 + tolerance):
            out.append(f"I2: {i}")
    if (d > kappa ** lev.astype(float) * (1 + tolerance)).any():
        out.append("I3")
    if stars:
        lowest = min(level(float(f.min() / w.sum()), math.log(kappa)), int(lev.min())) - 2
        for k in range(lowest, int(lev.max()) + 1):
            radius = kappa ** float(k)
            within = (lev[:, None] > k) & (radius * (1 - tolerance) >= D)
            weight, cost = w @ within, f + w @ (within * D)
            out += [f"I4: join {i} at {k}" for i in np.flatnonzero((critical <= k) & within.any(axis=0))]
            blocks = (critical > k) & (weight > 0) & (cost <= weight * radius * (1 - tolerance))
            out += [f"I4: star {i} at {k}" for i in np.flatnonzero(blocks)]
    return out


# ------------------------------------------------------------------------------------------------------------ section 4


@few
@given(
    seed=st.integers(0, 10_000), d=st.sampled_from([1, 2, 8]), kappa=st.sampled_from([1.05, 1.2, 2.0, 7.0]),
    weighted=st.booleans(), oracle=st.sampled_from(["exact", "counters"]),
)  # fmt: skip
def test_t1_every_state_is_nice(seed, d, kappa, weighted, oracle):
    model, rng = build(seed, d=d, kappa=kappa, oracle=oracle)
    for _ in stream(model, rng, 30, weighted=weighted):
        assert broken(model) == []


@few
@given(
    seed=st.integers(0, 10_000), rule=st.sampled_from(["verify", "cheapest"]), slack=st.sampled_from([1, 3]),
    n_tables=st.sampled_from([1, 4]), dtype=st.sampled_from(["float64", "float32"]),
)  # fmt: skip
def test_t1_the_hash_oracle_keeps_the_first_three_invariants(seed, rule, slack, n_tables, dtype):
    model, rng = build(seed, oracle="hash", rule=rule, slack=slack, n_tables=n_tables, dtype=dtype)
    for _ in stream(model, rng, 30):
        assert broken(model, stars=False, tolerance=1e-6 if dtype == "float64" else 1e-4) == []


def test_t1_the_hash_oracle_leaves_no_client_beside_a_cheaper_open_facility():
    model, rng = build(4, m=30, oracle="hash", n_tables=1)
    for _ in stream(model, rng, 150):
        assert not [problem for problem in broken(model) if "join" in problem]


@few
@given(seed=st.integers(0, 10_000), kappa=st.sampled_from([1.2, 2.0]), slack=st.sampled_from([1, 2, 4]))
def test_running_sums_and_looking_everywhere_go_through_the_same_states(seed, kappa, slack):
    models = [build(seed, kappa=kappa, slack=slack, oracle=oracle) for oracle in ("exact", "counters")]
    for exact, counters in zip(*(stream(model, rng, 60) for model, rng in models), strict=True):
        assert exact.assignment_.tolist() == counters.assignment_.tolist()
        assert exact.levels_.tolist() == counters.levels_.tolist()
        assert exact.last_update_.moved_ids == counters.last_update_.moved_ids


@few
@given(seed=st.integers(0, 10_000), oracle=st.sampled_from(ORACLES), weighted=st.booleans())
def test_t2_the_levels_pay_for_the_cost(seed, oracle, weighted):
    model, rng = build(seed, oracle=oracle)
    for _ in stream(model, rng, 30, weighted=weighted):
        _, _, w = problem(model)
        assert model.cost_ <= w @ model.kappa ** model.levels_.astype(float) * (1 + 1e-9)


@few
@given(seed=st.integers(0, 10_000), kappa=st.sampled_from([1.05, 1.2, 1.5, 2.0]), weighted=st.booleans())
def test_t3_t8_the_certificate_is_at_least_the_guarantee_and_at_most_the_optimum(seed, kappa, weighted):
    model, rng = build(seed, kappa=kappa, m=8)
    for _ in stream(model, rng, 25, weighted=weighted):
        pass
    if model.ids_:
        certificate = model.certificate()
        relaxed = reference.milp_optimum(*problem(model), integral=False).cost
        optimum = reference.milp_optimum(*problem(model)).cost
        assert certificate.scale >= guaranteed_scale(kappa) - 1e-6
        assert model.cost_ * guaranteed_scale(kappa) <= relaxed * (1 + 1e-7)
        assert certificate.lower_bound <= relaxed * (1 + 1e-7) <= optimum * (1 + 2e-7)
        assert certificate.ratio == pytest.approx(model.cost_ / certificate.lower_bound)


@pytest.mark.parametrize(("kappa", "ratio"), [(1.05, 2.580), (1.2, 3.104), (1.5, 4.276), (2.0, 6.606)])
def test_t3_the_constants(kappa, ratio):
    assert 1 / guaranteed_scale(kappa) == pytest.approx(ratio, abs=1e-3)


def test_t3_the_dual_scale_is_the_largest():
    rng = np.random.default_rng(3)
    D, w, bids, f = rng.random((30, 7)), rng.random(30) + 0.1, rng.random(30) + 0.1, rng.random(7) + 0.1
    scale = dual_scale(D, w, bids, f)

    def worst(s):
        return np.max(w @ np.maximum(s * bids[:, None] - D, 0) - f)

    assert worst(scale) == pytest.approx(0.0, abs=1e-12)
    assert worst(scale * 1.001) > 0


@few
@given(seed=st.integers(0, 10_000), q=st.integers(-40, 40), oracle=st.sampled_from(ORACLES))
def test_t4_scale_shifts_the_levels_and_nothing_else(seed, q, oracle):
    factor, states = 2.0**q, []
    for scale in (1.0, factor):
        rng = np.random.default_rng(seed)
        model = DynamicFacilityLocation(kappa=2.0, oracle=oracle, random_state=0)
        places, prices, x = rng.normal(size=(10, 3)), rng.uniform(0.5, 9, 10), rng.normal(size=(40, 3))
        model.fit(scale * x[:20], facilities=scale * places, opening_cost=scale * prices)
        model.partial_fit(scale * x[20:]).forget(range(10, 25))
        states.append((model.assignment_.tolist(), model.levels_ - (q if scale == factor else 0), model.cost_ / scale))
    assert states[0][0] == states[1][0]
    assert states[0][1].tolist() == states[1][1].tolist()
    assert states[0][2] == pytest.approx(states[1][2], rel=1e-9)


@few
@given(seed=st.integers(0, 10_000), oracle=st.sampled_from(ORACLES))
def test_t5_rotation_and_translation_change_nothing(seed, oracle):
    rng = np.random.default_rng(seed)
    places, prices, x = rng.normal(size=(10, 4)), rng.uniform(0.5, 9, 10), rng.normal(size=(40, 4))
    turn, shift = np.linalg.qr(rng.normal(size=(4, 4))).Q, 5 * rng.normal(size=4)
    states = []
    for move in (lambda a: a, lambda a: a @ turn + shift):
        model = DynamicFacilityLocation(oracle=oracle, random_state=0)
        model.fit(move(x[:20]), facilities=move(places), opening_cost=prices)
        model.partial_fit(move(x[20:])).forget(range(10, 25))
        states.append((model.cost_, model.assignment_.tolist()))
    assert states[0][0] == pytest.approx(states[1][0], rel=1e-9)
    assert states[0][1] == states[1][1]


@pytest.mark.parametrize("oracle", ["exact", "counters"])
def test_t6_tiny_prices_put_everyone_at_the_nearest_facility(oracle):
    # Levels tell distances apart that differ by a factor kappa: as near to 1 as the nearest two facilities demand.
    model, rng = build(1, m=20, oracle=oracle, prices=np.full(20, 1e-7), kappa=1.003)
    for _ in stream(model, rng, 40):
        D, f, _ = problem(model)
        assert model.assignment_.tolist() == D.argmin(axis=1).tolist()
        assert model.connection_cost_ == pytest.approx(D.min(axis=1).sum(), rel=1e-9)
        assert model.opening_cost_ == pytest.approx(f[np.unique(D.argmin(axis=1))].sum())


@pytest.mark.parametrize("oracle", ORACLES)
class TestT6Limits:
    def test_tiny_prices_put_everyone_within_kappa_of_the_nearest(self, oracle):
        model, rng = build(1, m=20, oracle=oracle, prices=np.full(20, 1e-7), kappa=1.5)
        for _ in stream(model, rng, 60):
            D, _, _ = problem(model)
            assert (D[np.arange(len(D)), model.assignment_] <= 1.5 * (D.min(axis=1) + 1e-7)).all()

    def test_huge_prices_open_one_facility(self, oracle):
        model, rng = build(1, oracle=oracle, prices=np.linspace(5e4, 6e4, 12))
        for _ in stream(model, rng, 60):
            assert len(model.open_facilities_) == (1 if model.ids_ else 0)

    def test_one_facility_costs_its_price_and_the_distances(self, oracle):
        model, rng = build(1, m=1, oracle=oracle)
        for _ in stream(model, rng, 40):
            D, f, _ = problem(model)
            assert model.cost_ == pytest.approx(f[0] + D.sum() if len(D) else 0.0, rel=1e-12)

    def test_the_dearer_of_two_facilities_at_one_place_stays_closed(self, oracle):
        rng = np.random.default_rng(2)
        places = np.repeat(rng.normal(size=(6, 2)), 2, axis=0)
        model = DynamicFacilityLocation(oracle=oracle, random_state=0)
        model.fit(np.zeros((0, 2)), facilities=places, opening_cost=np.tile([1.0, 1.5], 6))
        for _ in stream(model, rng, 80, spread=1.0):
            assert not (model.open_facilities_ % 2).any()

    def test_a_single_client_is_served_at_the_least_cost(self, oracle):
        model, rng = build(3, oracle=oracle)
        for _ in stream(model, rng, 200, p_insert=0.5, weighted=True):
            D, f, w = problem(model)
            if len(D) == 1:
                assert model.cost_ == pytest.approx(float((f + w * D[0]).min()), rel=1e-12)


@few
@given(seed=st.integers(0, 10_000))
def test_t7_insert_and_delete_leave_the_bound_and_the_invariants(seed):
    model, rng = build(seed, n=15)
    model.partial_fit(9 * rng.normal(size=(1, 2)), ids=["passer-by"]).forget(["passer-by"])
    assert broken(model) == []
    assert model.cost_ * guaranteed_scale(1.2) <= reference.milp_optimum(*problem(model), integral=False).cost * (
        1 + 1e-7
    )


@few
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([4.0, 6.0]), d=st.sampled_from([1, 3]))
def test_t9_cells_are_smaller_than_gamma_radii(seed, gamma, d):
    model, _ = build(seed, m=15, d=d, n=40, oracle="hash", gamma=gamma)
    D, _, _ = problem(model)
    x = model._clusters.distances.positions[model._slots()]
    apart = cdist(x, x)
    hash_, low, high = model._clusters.oracle, -10, 20
    radii = hash_.cell_radii(low, high)
    cells = np.stack([hash_.centres(row, radii) for row in D])
    for q in range(low, high):
        radius = 1.2**q
        for names in cells[:, :, q - low].T:
            together = (names[:, None] == names) & (names < 15)[:, None]
            assert (apart[together] < gamma * radius).all()
            # whoever has a facility within the radius has a cell, because R >= radius
            assert ((names < 15) | (D.min(axis=1) > radius)).all()


def test_t10_equal_seeds_and_updates_give_equal_states_whatever_the_ids():
    class Id:
        """Hashes by address: another order in every run."""

    states = []
    for name in (lambda i: i, lambda i: f"client {i}", lambda i: Id()):
        model, rng = build(5, oracle="hash", m=20)
        present = []
        for i in range(120):
            if not present or rng.random() < 0.6:
                present.append(name(i))
                model.partial_fit(3 * rng.normal(size=(1, 2)), ids=[present[-1]])
            else:
                model.forget([present.pop(rng.integers(len(present)))])
        states.append((model.assignment_.tolist(), model.levels_.tolist(), model.cost_, model.n_client_moves_))
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("seed", range(2))
def test_t11_many_tables_come_to_the_exact_cost(seed):
    exact, rng = build(seed, m=30, d=4)
    tables, rng_too = build(seed, m=30, d=4, oracle="hash", n_tables=64)
    costs = [
        (a.cost_, b.cost_)
        for a, b in zip(
            stream(exact, rng, 250, p_insert=0.75), stream(tables, rng_too, 250, p_insert=0.75), strict=True
        )
    ]
    exact_cost, table_cost = np.sum(costs, axis=0)
    assert table_cost == pytest.approx(exact_cost, rel=0.01)


# ------------------------------------------------------------------------------------------------------- what may vary


@few
@given(
    seed=st.integers(0, 10_000), oracle=st.sampled_from(["exact", "counters"]), kappa=st.sampled_from([1.2, 2.0])
)  # fmt: skip
def test_batches_and_price_changes_leave_nice_states(seed, oracle, kappa):
    model, rng = build(seed, oracle=oracle, kappa=kappa, n=20)
    for _ in range(12):
        model.partial_fit(3 * rng.normal(size=(rng.integers(0, 8), 2)))
        assert broken(model) == []
        model.forget(rng.choice(model.ids_, min(len(model.ids_), rng.integers(0, 8)), replace=False).tolist())
        assert broken(model) == []
        model.set_opening_cost(int(rng.integers(12)), float(rng.uniform(0.01, 30.0)))
        assert broken(model) == []


def test_the_hash_oracle_sees_new_prices_and_batches():
    model, _ = build(2, oracle="hash", n=100, m=20)
    exact, _ = build(2, oracle="exact", n=100, m=20)
    assert model.cost_ == pytest.approx(exact.cost_, rel=0.05)  # one batch into an empty structure
    i = int(np.setdiff1d(np.arange(20), model.open_facilities_)[0])
    model.set_opening_cost(i, 1e-3)
    assert i in model.open_facilities_
    model.set_opening_cost(i, 1e4)
    assert i not in model.open_facilities_
    assert broken(model, stars=False) == []


def test_a_higher_slack_moves_fewer_clients_and_keeps_who_could_join():
    moves = []
    for slack in (1, 5):
        model, rng = build(0, m=40, slack=slack, oracle="counters", prices=np.random.default_rng(0).uniform(2, 60, 40))
        for _ in stream(model, rng, 400, p_insert=0.55):
            assert not [b for b in broken(model) if "I4: star" not in b]
        moves.append(model.n_client_moves_)
    assert moves[1] < moves[0] / 2


def test_the_cheapest_rule_opens_only_what_is_much_better():
    costs = {}
    for rule in ("verify", "cheapest"):
        model, rng = build(1, m=20, oracle="hash", rule=rule)
        costs[rule] = np.mean([m.cost_ for m in stream(model, rng, 150, p_insert=0.8)])
    assert costs["verify"] < costs["cheapest"] < (1 + 4.0) * costs["verify"]


@pytest.mark.parametrize("oracle", ["exact", "counters"])
def test_a_client_whose_own_facility_will_do_does_not_move_to_a_nearer_one(oracle):
    model = DynamicFacilityLocation(kappa=2.0, oracle=oracle)
    model.fit(np.array([[1.4]]), facilities=np.array([[0.0], [3.0]]), opening_cost=[0.5, 0.1])
    model.partial_fit(np.array([[0.0], [3.0]]))
    assert model.assignment_.tolist() == [1, 0, 1]  # at distance 1.6, where 1.4 is of the same level
    model._clusters._place(model._slots()[:1], np.array([1]), np.array([2]))  # as after its cluster was lifted
    model._clusters._sweep()
    assert model.assignment_.tolist() == [1, 0, 1]
    assert model.levels_.tolist() == [1, -1, -3]


def test_reassigning_to_the_nearest_never_costs_more():
    stable, _ = build(3, n=80, oracle="counters")
    nearest, _ = build(3, n=80, oracle="counters", reassign="nearest")
    D, _, _ = problem(nearest)
    assert nearest.assignment_.tolist() == nearest.open_facilities_[D[:, nearest.open_facilities_].argmin(1)].tolist()
    assert nearest.connection_cost_ == pytest.approx(D[:, nearest.open_facilities_].min(axis=1).sum())
    assert nearest.cost_ < stable.cost_
    assert nearest.opening_cost_ == stable.opening_cost_


def test_compact_forgets_distances_and_goes_on_alike():
    full, rng = build(3, n=40, oracle="hash")
    compact, rng_too = build(3, n=40, oracle="hash")
    compact.compact()
    assert compact._clusters.distances.kept is None
    for a, b in zip(stream(full, rng, 60), stream(compact, rng_too, 60), strict=True):
        assert a.assignment_.tolist() == b.assignment_.tolist()
    assert compact.certificate().ratio == pytest.approx(full.certificate().ratio)


def test_labels_report_and_prediction_agree():
    model, rng = build(0, oracle="counters", n=30)
    assert np.array_equal(model.open_facilities_[model.labels_], model.assignment_)
    before = dict(zip(model.ids_, model.assignment_.tolist(), strict=True))
    opened = set(model.open_facilities_.tolist())
    moves = facility_moves = 0
    for _ in stream(model, rng, 120):
        after = dict(zip(model.ids_, model.assignment_.tolist(), strict=True))
        moved = [i for i in after if i in before and after[i] != before[i]]
        now = set(model.open_facilities_.tolist())
        assert sorted(model.last_update_.moved_ids) == moved
        assert model.last_update_.opened == sorted(now - opened)
        assert model.last_update_.closed == sorted(opened - now)
        moves, facility_moves = moves + len(moved), facility_moves + len(now ^ opened)
        before, opened = after, now
    assert (model.n_client_moves_, model.n_facility_moves_) == (moves, facility_moves)
    assert moves > 0
    places = model.facilities_[model.open_facilities_]
    assert model.predict(places).tolist() == list(range(len(places)))


def test_weights_count_as_that_many_clients():
    rng = np.random.default_rng(0)
    places, x, w = rng.normal(size=(8, 2)), rng.normal(size=(20, 2)), rng.integers(1, 4, 20)
    options = dict(facilities=places, opening_cost=rng.uniform(1, 5, 8))
    weighted = DynamicFacilityLocation(oracle="counters").fit(x, sample_weight=w, **options)
    repeated = DynamicFacilityLocation(oracle="counters").fit(np.repeat(x, w, axis=0), **options)
    assert weighted.cost_ == pytest.approx(repeated.cost_)
    assert weighted.certificate().lower_bound == pytest.approx(repeated.certificate().lower_bound)


# ---------------------------------------------------------------------------------------------------------- peers


def test_greedy_opens_the_cheapest_star_first_and_stays_within_its_ratio():
    rng = np.random.default_rng(5)
    for _ in range(20):
        D, f, w = rng.random((15, 6)), rng.uniform(0.1, 2.0, 6), rng.uniform(0.5, 2.0, 15)
        greedy = reference.cost(D, f, reference.jms_greedy(D, f, w), w)
        optimum = reference.milp_optimum(D, f, w)
        assert reference.cost(D, f, optimum.assignment, w) == pytest.approx(optimum.cost)
        assert optimum.cost * (1 - 1e-9) <= greedy <= 1.861 * optimum.cost
    D = np.array([[1.0, 5.0], [1.0, 5.0], [9.0, 2.0]])
    assert reference.jms_greedy(D, np.array([1.0, 4.0])).tolist() == [0, 0, 1]
    assert reference.jms_greedy(D, np.array([1.0, 90.0])).tolist() == [0, 0, 0]


def test_meyerson_serves_every_client_at_its_nearest_open_facility_and_opens_more_where_it_is_cheap():
    rng = np.random.default_rng(6)
    D = rng.random((200, 10))
    few_open = np.unique(reference.meyerson(D, np.full(10, 50.0), np.random.RandomState(0)))
    many_open = np.unique(reference.meyerson(D, np.full(10, 0.01), np.random.RandomState(0)))
    assert len(few_open) < len(many_open) == 10
    assert reference.nearest(D).tolist() == D.argmin(axis=1).tolist()


def test_the_optimum_is_that_of_all_subsets():
    rng = np.random.default_rng(7)
    D, f = rng.random((9, 5)), rng.uniform(0.1, 1.5, 5)
    subsets = [np.flatnonzero([bits >> i & 1 for i in range(5)]) for bits in range(1, 32)]
    best = min(f[s].sum() + D[:, s].min(axis=1).sum() for s in subsets)
    assert reference.milp_optimum(D, f).cost == pytest.approx(best)
    assert reference.milp_optimum(D, f, integral=False).cost <= best + 1e-9


# ------------------------------------------------------------------------------------------------------------ section 9


@pytest.mark.parametrize(
    ("options", "fit", "message"),
    [
        ({"kappa": 1.0}, {}, "kappa must be above 1"),
        ({"kappa": 16.5}, {}, "kappa must be above 1 and at most 16, got 16.5"),
        ({"gamma": 3.9}, {}, "gamma must be at least 4, got 3.9"),
        ({"n_tables": 0}, {}, "n_tables must be an integer of at least 1, got 0"),
        ({"max_probes": 0}, {}, "max_probes"),
        ({"slack": 0}, {}, "slack"),
        ({"oracle": "magic"}, {}, "oracle must be one of counters, hash, exact, got 'magic'"),
        ({"rule": "magic"}, {}, "rule must be"),
        ({"dtype": "float16"}, {}, "dtype must be"),
        ({"reassign": "never"}, {}, "reassign must be"),
        ({}, {"opening_cost": 0.0}, "opening_cost must be positive and finite"),
        ({}, {"opening_cost": [1.0, -1.0, 1.0]}, "opening_cost must be positive"),
        ({}, {"opening_cost": [1.0, np.nan, 1.0]}, "opening_cost must be positive and finite"),
        ({}, {"opening_cost": [1.0, 1.0]}, r"opening_cost has shape \(2,\); there are 3 facilities"),
        ({}, {"facilities": np.zeros((0, 2))}, "0 sample"),
        ({}, {"facilities": np.zeros((3, 5))}, "facilities have 5 coordinates, but X has 2"),
        ({}, {"facilities": np.full((3, 2), np.inf)}, "facilities contains infinity"),
        ({}, {"facilities": np.full((3, 2), 1e160)}, "facilities holds coordinates whose squares overflow"),
        ({}, {"sample_weight": [1.0, 0.0, 1.0, 1.0]}, "sample_weight must be positive"),
        ({}, {"ids": [1, 2, 3]}, "3 ids were given for 4 rows"),
        ({}, {"ids": [1, 2, 3, 1]}, "ids holds an id twice"),
        ({"kappa": 1.0001}, {"opening_cost": [1e-9, 1.0, 1e9]}, "kappa=1.0001 needs .* levels"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(options, fit, message):
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=message):
        DynamicFacilityLocation(**options).fit(
            rng.normal(size=(4, 2)), **{"facilities": rng.normal(size=(3, 2)), "opening_cost": 1.0} | fit
        )


def test_updates_that_do_not_fit_change_nothing():
    model, _ = build(0, n=5)
    before = pickle.dumps(model.state_dict())
    for wrong in (np.full((1, 2), np.nan), np.full((1, 2), np.inf), np.zeros((1, 3))):
        with pytest.raises(ValueError, match=r"NaN|infinity|features"):
            model.partial_fit(wrong)
    with pytest.raises(ValueError, match="X holds coordinates whose squares overflow"):
        model.partial_fit(np.full((1, 2), -1e160))
    with pytest.raises(ValueError, match="client 3 is present already"):
        model.partial_fit(np.zeros((2, 2)), ids=[9, 3])
    with pytest.raises(KeyError, match="client 'nobody' is not present"):
        model.forget([1, "nobody"])
    with pytest.raises(ValueError, match="twice"):
        model.forget([1, 1])
    with pytest.raises(ValueError, match="opening_cost"):
        model.set_opening_cost(0, -1.0)
    with pytest.raises(IndexError, match="there is no facility 12; there are 12"):
        model.set_opening_cost(12, 1.0)
    with pytest.raises(TypeError, match=r"ids must be a list of ids, got 'visitor'; write \['visitor'\] for one"):
        model.forget("visitor")
    with pytest.raises(TypeError):  # the tests' type checker comes first
        model.forget(3)
    assert pickle.dumps(model.state_dict()) == before


@pytest.mark.parametrize(
    ("options", "insert", "message"),
    [
        ({"kappa": 1 + 2e-5}, {"X": [[1e3, 0.0]]}, r"needs \d+ levels for these prices, distances and weights"),
        ({"kappa": 1 + 1e-4}, {"X": [[0.0, 0.0]], "sample_weight": [1e9]}, r"needs \d+ levels"),
        ({"dtype": "float32"}, {"X": [[1e39, 0.0]]}, r"distances up to 2e\+39 overflow float32"),
        ({}, {"X": [[0.0, 0.0]] * 2, "sample_weight": [1e308, 1e308]}, "a weight of inf times .* overflows"),
        ({}, {"X": [[0.0, 0.0]], "sample_weight": [1e-307]}, r"a cost of 1e\+30\d overflows"),
    ],
)
def test_clients_beyond_the_levels_or_the_numbers_are_refused_before_anything_changes(options, insert, message):
    model = DynamicFacilityLocation(random_state=0, **options)
    model.fit([[0.0, 1.0]], facilities=[[0.0, 0.0], [0.0, 2.0]], opening_cost=[1.0, 1.001])
    before = pickle.dumps(model.state_dict())
    with pytest.raises(ValueError, match=message):
        model.partial_fit(np.array(insert["X"]), sample_weight=insert.get("sample_weight"))
    assert pickle.dumps(model.state_dict()) == before
    twin = DynamicFacilityLocation().load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=message):
        twin.partial_fit(np.array(insert["X"]), sample_weight=insert.get("sample_weight"))


def test_a_price_beyond_the_levels_is_refused_before_anything_changes():
    model = DynamicFacilityLocation(kappa=1 + 1e-4).fit([[0.0, 1.0]], facilities=[[0.0, 0.0], [0.0, 2.0]])
    before = pickle.dumps(model.state_dict())
    with pytest.raises(ValueError, match=r"needs \d+ levels"):
        model.set_opening_cost(0, 1e-9)
    assert pickle.dumps(model.state_dict()) == before


def test_default_ids_pass_over_those_that_are_present():
    model = DynamicFacilityLocation().fit(np.zeros((2, 1)), ids=[2, 3]).partial_fit(np.ones((2, 1)))
    assert model.ids_ == [2, 3, 4, 5]
    assert model.partial_fit(np.ones((1, 1))).ids_[-1] == 6


@pytest.mark.parametrize("oracle", ORACLES)
class TestKeepsWorking:
    def test_without_clients(self, oracle):
        model, rng = build(0, oracle=oracle)
        assert (model.cost_, len(model.open_facilities_), model.ids_) == (0.0, 0, [])
        assert model.certificate().ratio == 1.0
        with pytest.raises(ValueError, match="no facility is open"):
            model.predict(np.zeros((1, 2)))
        model.partial_fit(np.zeros((0, 2)))
        model.partial_fit(rng.normal(size=(3, 2)), ids=["a", "b", "c"]).forget(["c", "a", "b"])
        assert (model.cost_, len(model.open_facilities_)) == (0.0, 0)
        model.partial_fit(rng.normal(size=(2, 2)), ids=["b", "a"])  # ids again, at other places
        assert model.ids_ == ["b", "a"]
        assert broken(model, stars=oracle != "hash") == []

    def test_on_top_of_facilities_and_of_each_other(self, oracle):
        places = np.repeat(np.arange(4.0)[:, None], 2, axis=0)  # each twice
        model = DynamicFacilityLocation(oracle=oracle, random_state=0)
        model.fit(np.repeat(places, 3, axis=0), facilities=places, opening_cost=0.5)
        assert broken(model, stars=oracle != "hash") == []
        assert model.connection_cost_ == 0.0
        assert model.opening_cost_ == 2.0

    @pytest.mark.parametrize("d", [1, 50])
    def test_in_one_dimension_and_in_more_than_there_are_facilities(self, oracle, d):
        model, rng = build(0, m=6, d=d, oracle=oracle)
        for _ in stream(model, rng, 40):
            assert broken(model, stars=oracle != "hash") == []

    def test_with_prices_from_1e_9_to_1e9(self, oracle):
        model, rng = build(0, oracle=oracle, prices=10.0 ** np.linspace(-9, 9, 12))
        for _ in stream(model, rng, 60):
            assert broken(model, stars=oracle != "hash") == []

    def test_with_weights_from_1e_6_to_1e13_that_leave_again(self, oracle):
        # Running sums keep nothing of a small client once a huge one came and went, unless they are taken anew.
        model, rng = build(0, oracle=oracle)
        for _ in range(150):
            if not model.ids_ or rng.random() < 0.55:
                model.partial_fit(3 * rng.normal(size=(1, 2)), sample_weight=10.0 ** rng.uniform(-6, 13, 1))
            else:
                heaviest = rng.random() < 0.7
                model.forget([model.ids_[int(problem(model)[2].argmax()) if heaviest else 0]])
            assert broken(model, stars=oracle != "hash") == []

    def test_with_equal_prices(self, oracle):
        model, rng = build(0, oracle=oracle, prices=np.full(12, 3.0))
        for _ in stream(model, rng, 60):
            assert broken(model, stars=oracle != "hash") == []

    def test_far_from_the_origin(self, oracle):
        rng = np.random.default_rng(0)
        x, places = rng.normal(size=(30, 3)), rng.normal(size=(5, 3))
        near = DynamicFacilityLocation(oracle=oracle, random_state=0).fit(x, facilities=places)
        far = DynamicFacilityLocation(oracle=oracle, random_state=0).fit(x + 1e6, facilities=places + 1e6)
        assert far.assignment_.tolist() == near.assignment_.tolist()
        assert far.cost_ == pytest.approx(near.cost_, rel=1e-8)

    def test_after_pickling_and_from_a_state_bit_for_bit(self, oracle):
        model, rng = build(1, m=25, oracle=oracle, n=10)
        for _ in stream(model, rng, 60, weighted=True):
            pass
        model.set_opening_cost(3, 7.0)
        resumed = [pickle.loads(pickle.dumps(model)), DynamicFacilityLocation().load_state_dict(model.state_dict())]
        rngs = [pickle.loads(pickle.dumps(rng)) for _ in range(2)]
        streams = [stream(m, r, 60, weighted=True) for m, r in zip([model, *resumed], [rng, *rngs], strict=True)]
        for a, b, c in zip(*streams, strict=True):
            assert a.assignment_.tolist() == b.assignment_.tolist() == c.assignment_.tolist()
            assert a.cost_ == b.cost_ == c.cost_
            assert a.ids_ == b.ids_ == c.ids_
        states = [m.state_dict() for m in (model, *resumed)]
        for name, array in states[0]["arrays"].items():
            assert np.array_equal(array, states[1]["arrays"][name], equal_nan=True), name
            assert np.array_equal(array, states[2]["arrays"][name], equal_nan=True), name
        assert states[0]["counts"] == states[2]["counts"]


def test_a_state_that_lacks_something_is_refused():
    model, _ = build(0)
    with pytest.raises(ValueError, match="the state lacks arrays"):
        DynamicFacilityLocation().load_state_dict({k: v for k, v in model.state_dict().items() if k != "arrays"})


@pytest.mark.parametrize("kind", [np.float16, np.float32, torch.float32, torch.bfloat16, "strided", list])
def test_clients_of_other_kinds(kind):
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=(20, 3)) * 8) / 8  # exact in half precision
    places, options = x[::4], dict(oracle="counters")
    expected = DynamicFacilityLocation(**options).fit(x, facilities=places)
    if kind is list:
        given = x.tolist()
    elif kind == "strided":
        given = np.repeat(np.asfortranarray(x), 2, axis=1)[:, ::2]
    elif isinstance(kind, torch.dtype):
        given = torch.tensor(x, dtype=kind, requires_grad=True)
    else:
        given = x.astype(kind)
    model = DynamicFacilityLocation(**options).fit(given, facilities=places)
    assert model.assignment_.tolist() == expected.assignment_.tolist()
    assert model.cost_ == expected.cost_


def test_single_precision_keeps_distances_in_half_the_memory():
    model, rng = build(0, m=20, oracle="counters", dtype="float32", n=50)
    assert model._clusters.distances.kept.dtype == np.float32
    double, _ = build(0, m=20, oracle="counters", n=50)
    assert model.cost_ == pytest.approx(double.cost_, rel=1e-5)
    for _ in stream(model, rng, 60):
        assert broken(model, tolerance=1e-4) == []


def test_near_duplicates_keep_their_digits():
    places = np.array([[1000.0, 0.0], [0.0, 0.0]])
    model = DynamicFacilityLocation(oracle="exact").fit(
        places[:1] + np.array([[1e-7, 0.0]]), facilities=places, opening_cost=1e-9
    )
    assert model.connection_cost_ == pytest.approx(1e-7, rel=1e-6)


def test_a_wandering_stream_outlives_its_tables():
    model, rng = build(0, m=15, oracle="hash")
    exact, rng_too = build(0, m=15, oracle="counters")
    for scale in (1.0, 30.0, 1e-3, 1.0):  # levels far above and below those of the first clients
        for a, b in zip(stream(model, rng, 30, spread=scale), stream(exact, rng_too, 30, spread=scale), strict=True):
            assert broken(a, stars=False) == []
            assert broken(b) == []
            assert a.cost_ == pytest.approx(b.cost_, rel=0.2)


# ---------------------------------------------------------------------------------------------------- scikit-learn


CANNOT_APPLY = {
    "check_sample_weight_equivalence_on_dense_data": "weights of 0 are refused: leave the client out",
}


@parametrize_with_checks(
    [DynamicFacilityLocation(), DynamicFacilityLocation(oracle="hash", n_tables=1, random_state=0)],
    expected_failed_checks=lambda estimator: CANNOT_APPLY,
)
def test_it_is_a_scikit_learn_estimator(estimator, check):
    check(estimator)


# ------------------------------------------------------------------------------------------------------- end to end


def test_a_window_over_real_images_stays_near_the_optimum_and_moves_few():
    from sklearn.datasets import load_digits

    x = load_digits().data
    places, clients = x[:50], x[50:650]
    prices = np.random.default_rng(0).uniform(0, 100 * cdist(clients, places).min(axis=1).mean(), 50)
    model = DynamicFacilityLocation(random_state=0).fit(np.zeros((0, 64)), facilities=places, opening_cost=prices)
    ratios = []
    for j, row in enumerate(clients):
        model.partial_fit(row[None], ids=[j])
        if j >= 200:
            model.forget([j - 200])
        if j % 150 == 149:
            ratios.append(model.cost_ / reference.milp_optimum(*problem(model)).cost)
    assert np.mean(ratios) <= 1.08
    assert max(ratios) <= 1 / guaranteed_scale(1.2)
    assert model.n_client_moves_ / 1000 <= 0.3
