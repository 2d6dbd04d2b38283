"""Dynamic facility location as a scikit-learn estimator."""

import itertools
import math
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float64, Int64
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from subspan.structure.facility.clusters import Changes, Clusters
from subspan.structure.facility.levels import Certificate, dual_scale, level
from subspan.structure.facility.oracles import Counters, Exact, Hash, Slots

# Tables have a row per level; more than this means that kappa is too near to 1 for the prices and distances given.
_MOST_LEVELS = 100_000
# Costs stay below this, so that no power of kappa above them overflows.
_HUGE = 1e300


class _Extremes(NamedTuple):
    """The greatest distance, the least weight and the greatest total weight that the present levels allow for."""

    farthest: float
    lightest: float
    heaviest: float


@dataclass(frozen=True)
class UpdateReport:
    """What one update did.

    Attributes:
        moved_ids: clients present before and after it that are served by another facility now.
        opened, closed: facility indices, net.
        seconds: wall time.
        levels_touched: levels that the sweep looked at.
    """

    moved_ids: list[Hashable]
    opened: list[int]
    closed: list[int]
    seconds: float
    levels_touched: int


class DynamicFacilityLocation(ClusterMixin, BaseEstimator):
    """Open facilities ("prototypes") for weighted clients that come and go, at prices that differ by facility.

    Keeps the cost low and moves few clients. The cost is the sum of the prices of open facilities and, over clients, of
    weight times Euclidean distance to the serving facility; how many are open follows from the prices. There are no
    capacities.

    Args:
        kappa: level base in (1, 16]; nearer to 1 is cheaper in cost, further moves fewer clients.
        oracle: ``"counters"`` misses no star and costs O(m) per level a client changes; ``"hash"`` looks only within
            cells of random partitions, O(n_tables max_probes); ``"exact"`` looks everywhere, O(n m) per level, and is
            the reference for the other two.
        gamma: cell diameter of the hash oracle in units of the star radius, at least 4.
        n_tables: partitions of the hash oracle; 1 is fast and misses stars.
        rule: ``"verify"`` or ``"cheapest"``; see :class:`~subspan.structure.facility.oracles.Hash`.
        max_probes: facilities per cell that the rule ``"verify"`` keeps in view, the cheapest first.
        slack: 1; s > 1 opens a star only when it is kappa^(s - 1) times better: fewer moves, no proven ratio.
        dtype: precision in which distances are kept; sums are in float64.
        reassign: ``"stable"`` reports each client at the facility that serves it, ``"nearest"`` at the nearest open one
            (never dearer, but it moves whenever one opens).
        random_state: seed of the partitions. Give one, or no two runs are alike. The hash oracle's guarantee is for
            streams that do not depend on it.

    Attributes:
        facilities_ (m, d), prices_ (m,): positions and opening prices.
        open_facilities_: indices of the open facilities, ascending.
        ids_: the clients' ids, in order of arrival; the arrays below follow it.
        assignment_: facility index of each client; an index means the same facility forever.
        labels_: the same as positions in ``open_facilities_`` (0, 1, ...), as scikit-learn has it.
        levels_: level of each client.
        cost_, opening_cost_, connection_cost_: the objective and its two parts.
        n_client_moves_, n_facility_moves_: recourse since ``fit``: clients moved; facilities opened or closed.
        last_update_: what the last call changed, an :class:`UpdateReport`.

    Source: the level structure of Bhattacharya, Lattanzi and Parotsidis (NeurIPS 2022) and the high-dimensional
    non-uniform algorithm of ICML 2026, known to us by its abstract; sweep, certificate and oracles are our design.
    """

    @no_type_check  # scikit-learn wants a constructor that stores anything; fit says what is wrong
    def __init__(
        self,
        kappa: float = 1.2,
        oracle: Literal["counters", "hash", "exact"] = "counters",
        gamma: float = 4.0,
        n_tables: int = 4,
        rule: Literal["verify", "cheapest"] = "verify",
        max_probes: int = 32,
        slack: int = 1,
        dtype: Literal["float64", "float32"] = "float64",
        reassign: Literal["stable", "nearest"] = "stable",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.kappa = kappa
        self.oracle = oracle
        self.gamma = gamma
        self.n_tables = n_tables
        self.rule = rule
        self.max_probes = max_probes
        self.slack = slack
        self.dtype = dtype
        self.reassign = reassign
        self.random_state = random_state

    # --------------------------------------------------------------------------------------------------- updates

    def fit(
        self, X: Any, y: Any = None, *, facilities: Any = None, opening_cost: Any = 1.0, ids: Any = None,
        sample_weight: Any = None,
    ) -> "DynamicFacilityLocation":  # fmt: skip
        """Start anew with facilities, and insert the rows of X.

        Args:
            X (n, d): clients; n may be 0 when facilities are given.
            facilities (m, d): where facilities may open; by default at the rows of X.
            opening_cost: their prices, one for all or (m,), positive.
            ids: hashable, unique; by default 0, 1, ...
            sample_weight (n,): positive; by default 1.

        Raises:
            ValueError: NaN, infinity, a price or weight that is not positive, no facility, shapes that do not fit, a
                parameter out of range, more than 100,000 levels, or sums that overflow.
        """
        self._check_parameters()
        X = validate_data(self, _plain(X), dtype="float64", ensure_min_samples=1 if facilities is None else 0)
        places = X if facilities is None else check_array(_plain(facilities), dtype="float64", input_name="facilities")
        if places.shape[1] != X.shape[1]:
            raise ValueError(f"facilities have {places.shape[1]} coordinates, but X has {X.shape[1]}")
        _check_squares(places, "facilities")
        self._start(places, self._prices(opening_cost, len(places)))
        self._insert(X, ids, sample_weight)
        self.n_client_moves_ = self.n_facility_moves_ = 0  # building is not recourse
        return self

    def partial_fit(
        self, X: Any, y: Any = None, *, ids: Any = None, sample_weight: Any = None
    ) -> "DynamicFacilityLocation":
        """Insert clients, with one mending at the end; before ``fit`` it is ``fit``.

        Args:
            X (n, d): clients; n may be 0.
            ids: hashable and not present now; by default counted on, past those that are present.
            sample_weight (n,): positive; by default 1.

        Raises:
            ValueError: as :meth:`fit`, or an id that is present.
        """
        if not hasattr(self, "_clusters"):
            return self.fit(X, ids=ids, sample_weight=sample_weight)
        self._insert(self._valid_rows(X), ids, sample_weight)
        return self

    def forget(self, ids: Iterable[Hashable]) -> "DynamicFacilityLocation":
        """Delete clients, with one mending at the end. Their ids may be used again.

        Raises:
            KeyError: an id that is not present (nothing is deleted then).
            ValueError: an id given twice.
            TypeError: one id instead of a list.
        """
        self._state()
        ids = _id_list(ids)
        if absent := [i for i in ids if i not in self._slot_of]:
            raise KeyError(f"client {absent[0]!r} is not present")
        if len(set(ids)) < len(ids):
            raise ValueError("an id is given twice")
        began = time.perf_counter()
        slots = np.array([self._slot_of.pop(i) for i in ids], dtype=np.int64)
        changes = self._clusters.remove(slots)
        for slot in slots.tolist():
            del self._id_of[slot]
        self._report(changes, began)
        return self

    def set_opening_cost(self, i: int, cost: float) -> "DynamicFacilityLocation":
        """Change the price of facility ``i``. With ``oracle="hash"`` this rebuilds all cells: O(n tables levels).

        Raises:
            IndexError: no such facility.
            ValueError: a price that is not positive and finite, or that needs more than 100,000 levels.
        """
        self._state()
        if not 0 <= i < len(self.facilities_):
            raise IndexError(f"there is no facility {i}; there are {len(self.facilities_)}")
        prices = self.prices_
        prices[i] = self._prices(cost, 1)[0]
        self._check_levels(prices, self._extremes)
        began = time.perf_counter()
        self._report(self._clusters.set_price(int(i), float(cost)), began)
        return self

    def compact(self) -> "DynamicFacilityLocation":
        """Forget the n x m distances, to compute them from the positions when needed: O(n d) memory, slower."""
        self._state()
        self._clusters.distances.compact()
        return self

    # --------------------------------------------------------------------------------------------------- answers

    def predict(self, X: Any) -> Int64[np.ndarray, "n"]:
        """Position in ``open_facilities_`` of the open facility nearest to each row; nothing changes.

        Raises:
            ValueError: nothing is open, or X does not fit.
        """
        self._state()
        X = self._valid_rows(X)
        if not len(self.open_facilities_):
            raise ValueError("no facility is open, because there are no clients: insert some first")
        distances = self._clusters.distances
        return distances.between(X - distances.origin)[:, self.open_facilities_].argmin(axis=1)

    def certificate(self) -> Certificate:
        """A lower bound on the cost of every solution, from this state's levels. (4) O(n m log n)."""
        self._state()
        slots = self._slots()
        if len(slots) == 0:
            return Certificate(0.0, 1.0, np.zeros(0), 1.0)
        clusters = self._clusters
        bids, weights = clusters.bids[slots], clusters.weights[slots]
        scale = dual_scale(clusters.rows(slots), weights, bids, clusters.prices)
        bound = float(scale * (weights @ bids))
        return Certificate(bound, self.cost_ / bound, scale * bids, scale)

    @property
    def facilities_(self) -> Float64[np.ndarray, "m d"]:
        return self._state().distances.places + self._state().distances.origin

    @property
    def prices_(self) -> Float64[np.ndarray, "m"]:
        return self._state().prices.copy()

    @property
    def open_facilities_(self) -> Int64[np.ndarray, "o"]:
        return self._state().open.copy()

    @property
    def ids_(self) -> list[Hashable]:
        self._state()
        return list(self._slot_of)

    @property
    def assignment_(self) -> Int64[np.ndarray, "n"]:
        slots = self._slots()
        if self.reassign == "nearest" and len(slots):
            return self._clusters.open[self._clusters.rows(slots)[:, self._clusters.open].argmin(axis=1)]
        return self._clusters.serving[slots]

    @property
    def labels_(self) -> Int64[np.ndarray, "n"]:
        return np.searchsorted(self._state().open, self.assignment_)

    @property
    def levels_(self) -> Int64[np.ndarray, "n"]:
        return self._clusters.level[self._slots()]

    @property
    def opening_cost_(self) -> float:
        return float(self._state().prices[self._state().open].sum())

    @property
    def connection_cost_(self) -> float:
        slots = self._slots()
        clusters = self._clusters
        own = clusters.own[slots]
        if self.reassign == "nearest" and len(slots):
            own = clusters.rows(slots)[:, clusters.open].min(axis=1)
        return float(clusters.weights[slots] @ own)

    @property
    def cost_(self) -> float:
        return self.opening_cost_ + self.connection_cost_

    # --------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly: parameters, arrays (copies), ids by slot and counts."""
        self._state()
        arrays = self._clusters.arrays() | {"places": self._clusters.distances.places.copy()}
        return {
            "params": {k: v for k, v in self.get_params().items() if k != "random_state"},
            "arrays": arrays | {"origin": self._clusters.distances.origin.copy()},
            "ids": list(self._slot_of),
            "slots": list(self._slot_of.values()),
            "counts": [self._n_seen, self.n_client_moves_, self.n_facility_moves_],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> "DynamicFacilityLocation":
        """Continue where :meth:`state_dict` was taken; parameters are taken from it, too.

        Raises:
            ValueError: keys are missing.
        """
        if missing := {"params", "arrays", "ids", "slots", "counts"} - set(state):
            raise ValueError(f"the state lacks {', '.join(sorted(missing))}")
        self.set_params(**state["params"])
        self._check_parameters()
        arrays = {name: np.asarray(array) for name, array in state["arrays"].items()}
        self._start(arrays["places"] + arrays["origin"], np.array(arrays["prices"]))
        distances = self._clusters.distances
        distances.origin, distances.places = np.array(arrays["origin"]), np.array(arrays["places"])
        distances.squares = np.einsum("md,md->m", distances.places, distances.places)
        self._clusters.restore(arrays)
        active = self._clusters.active()
        x, lightest = distances.positions[active] + distances.origin, self._clusters.weights[active].min(initial=1.0)
        self._extremes = self._widened(x, float(np.linalg.norm(x)), float(lightest), self._clusters.total)
        self._slot_of = dict(zip(state["ids"], state["slots"], strict=True))
        self._id_of = {slot: name for name, slot in self._slot_of.items()}
        self.n_features_in_ = distances.places.shape[1]
        self._n_seen, self.n_client_moves_, self.n_facility_moves_ = state["counts"]
        return self

    # --------------------------------------------------------------------------------------------------- inside

    def _check_parameters(self) -> None:
        if not (isinstance(self.kappa, Real) and 1 < float(self.kappa) <= 16):
            raise ValueError(f"kappa must be above 1 and at most 16, got {self.kappa!r}")
        if not (isinstance(self.gamma, Real) and 4 <= float(self.gamma) < np.inf):
            raise ValueError(f"gamma must be at least 4, got {self.gamma!r}")
        for name in ("n_tables", "max_probes", "slack"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for name, choices in (
            ("oracle", ("counters", "hash", "exact")), ("rule", ("verify", "cheapest")),
            ("dtype", ("float64", "float32")), ("reassign", ("stable", "nearest")),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def _valid_rows(self, X: Any) -> Float64[np.ndarray, "n d"]:
        """X as an array that fits. Plain arrays skip scikit-learn's checks, which take longer than an update."""
        rows = _plain(X)
        plain = type(rows) is np.ndarray and rows.dtype == np.float64 and rows.ndim == 2
        if plain and rows.shape[1] == self.n_features_in_ and np.isfinite(rows).all():
            return rows
        return np.asarray(validate_data(self, _plain(X), dtype="float64", ensure_min_samples=0, reset=False))

    def _prices(self, opening_cost: Any, m: int) -> Float64[np.ndarray, "m"]:
        prices = np.asarray(_plain(opening_cost), dtype=np.float64)
        if prices.ndim and prices.shape != (m,):
            raise ValueError(f"opening_cost has shape {prices.shape}; there are {m} facilities")
        prices = np.array(np.broadcast_to(prices, m))
        if not (np.isfinite(prices).all() and (prices > 0).all()):
            raise ValueError("opening_cost must be positive and finite for every facility")
        return prices

    def _start(self, places: Float64[np.ndarray, "m d"], prices: Float64[np.ndarray, "m"]) -> None:
        extent = float(np.linalg.norm(np.ptp(places, axis=0)))
        self._extremes = _Extremes(extent, 1.0, 1.0)
        self._check_levels(prices, self._extremes)
        clusters = Clusters(places, prices, kappa=float(self.kappa), slack=int(self.slack), dtype=np.dtype(self.dtype))
        if self.oracle == "hash":
            clusters.oracle = Hash(
                clusters, gamma=float(self.gamma), n_tables=self.n_tables, rule=self.rule, max_probes=self.max_probes,
                random=check_random_state(self.random_state),
            )  # fmt: skip
        else:
            clusters.oracle = Counters(clusters) if self.oracle == "counters" else Exact()
        self._clusters = clusters
        radius, offset = np.sqrt(clusters.distances.squares.max()), np.linalg.norm(clusters.distances.origin)
        self._reach = float(radius), float(offset)  # of the places around their middle, and of that from the origin
        self._slot_of: dict[Hashable, int] = {}  # in order of arrival
        self._id_of: dict[int, Hashable] = {}
        self._n_seen = self.n_client_moves_ = self.n_facility_moves_ = 0

    def _check_levels(self, prices: Float64[np.ndarray, "m"], extremes: "_Extremes") -> None:
        """Refuse what would need too many levels, or overflow, before anything changes."""
        farthest, lightest, heaviest = extremes
        if farthest > float(np.finfo(self.dtype).max):
            raise ValueError(f"distances up to {farthest:.2g} overflow {self.dtype}: choose a larger unit")
        highest = float(prices.max()) / lightest + farthest  # the most that one unit of weight can come to cost
        if not heaviest * highest < _HUGE:
            raise ValueError(f"a weight of {heaviest:.2g} times a cost of {highest:.2g} overflows: choose other units")
        log_kappa = float(np.log(self.kappa))
        span = level(highest, log_kappa) - level(float(prices.min()) / heaviest, log_kappa)
        if span > _MOST_LEVELS:
            raise ValueError(
                f"kappa={self.kappa} needs {span} levels for these prices, distances and weights; the most is "
                f"{_MOST_LEVELS}"
            )

    def _widened(self, X: Float64[np.ndarray, "n d"], norm: float, lightest: float, heaviest: float) -> "_Extremes":
        """The extremes with these clients (of this Frobenius norm, least weight, and weight with those present).

        The same where nothing goes beyond them. Distance and weight are doubled, so that they are seldom passed again.
        """
        known, (radius, offset) = self._extremes, self._reach
        farthest = radius + offset + norm  # quickly, and no less than the distance of any row to any facility
        if farthest > known.farthest and len(X):
            farthest = radius + float(np.linalg.norm(X - self._clusters.distances.origin, axis=1).max())
        if farthest <= known.farthest and lightest >= known.lightest and heaviest <= known.heaviest:
            return known
        return _Extremes(
            known.farthest if farthest <= known.farthest else 2 * farthest,
            min(lightest, known.lightest),
            known.heaviest if heaviest <= known.heaviest else 2 * heaviest,
        )

    def _insert(self, X: Float64[np.ndarray, "n d"], ids: Any, sample_weight: Any) -> None:
        counted = (i for i in itertools.count(self._n_seen) if i not in self._slot_of)
        names = list(itertools.islice(counted, len(X))) if ids is None else _id_list(ids)
        if len(names) != len(X):
            raise ValueError(f"{len(names)} ids were given for {len(X)} rows")
        if present := [name for name in names if name in self._slot_of]:
            raise ValueError(f"client {present[0]!r} is present already; forget it first")
        if len(set(names)) < len(names):
            raise ValueError("ids holds an id twice")
        norm = _check_squares(X, "X")
        weights = np.ones(len(X)) if sample_weight is None else _check_sample_weight(_plain(sample_weight), X)
        if not (weights > 0).all():
            raise ValueError("sample_weight must be positive; leave out clients of weight 0")
        weights = np.asarray(weights, np.float64)
        lightest, total = 1.0, float(len(X))
        if sample_weight is not None and len(X):
            with np.errstate(over="ignore"):  # of what is then refused
                lightest, total = float(weights.min()), float(weights.sum())
        extremes = self._widened(X, norm, lightest, self._clusters.total + total)
        if extremes is not self._extremes:
            self._check_levels(self._clusters.prices, extremes)
            self._extremes = extremes
        began = time.perf_counter()
        slots, changes = self._clusters.insert(X, weights)
        self._slot_of.update(zip(names, slots.tolist(), strict=True))
        self._id_of.update(zip(slots.tolist(), names, strict=True))
        self._n_seen += len(X)
        self._report(changes, began)

    def _report(self, changes: Changes, began: float) -> None:
        moved, opened, closed, touched = changes
        self.n_client_moves_ += len(moved)
        self.n_facility_moves_ += len(opened) + len(closed)
        names = [self._id_of[slot] for slot in moved.tolist()]
        self.last_update_ = UpdateReport(names, opened, closed, time.perf_counter() - began, touched)

    def _state(self) -> Clusters:
        if "_clusters" not in self.__dict__:  # asked first: scikit-learn's own check takes as long as half an update
            check_is_fitted(self, "_clusters")
        return self._clusters

    def _slots(self) -> Slots:
        self._state()
        return np.fromiter(self._slot_of.values(), np.int64, len(self._slot_of))


def _plain(values: Any) -> Any:
    """A torch tensor, of any device and floating type, as an array; anything else as it is."""
    return values.detach().cpu().double().numpy() if hasattr(values, "detach") else values


def _check_squares(x: Float64[np.ndarray, "n d"], name: str) -> float:
    """The Frobenius norm."""
    squares = float(np.vdot(x, x))
    if not math.isfinite(squares):
        raise ValueError(f"{name} holds coordinates whose squares overflow (about 1e154): choose a larger unit")
    return math.sqrt(squares)


def _id_list(ids: Any) -> list[Hashable]:
    """Ids as Python values, so that 3 and numpy's 3 are written alike."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise TypeError(f"ids must be a list of ids, got {ids!r}; write [{ids!r}] for one client")
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
