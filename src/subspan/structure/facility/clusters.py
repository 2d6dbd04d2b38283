"""The state of dynamic facility location, and the ascending sweep that makes it nice again after a change.

The state is *nice* (docs/methods/facility.md) when

* (I1) every client's facility is open, every open facility has a client at its critical level, and lev >= crit;
* (I2) f_i + sum of w d over i's critical members <= their weight times kappa^crit(i);
* (I3) d(j, phi(j)) <= kappa^lev(j);
* (I4) no client at a level above k lies within kappa^k of a facility open at or below k, and no closed facility (or one
  open above k) would pay for itself with the clients above k within kappa^k of it: no star blocks.

Source: Bhattacharya, Lattanzi and Parotsidis, NeurIPS 2022 (levels, stars). The ascending order is ours, and ends
because a star at level k only takes clients from above k, and later levels never touch clients at or below k.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64

from subspan.structure.facility.distances import Distances
from subspan.structure.facility.levels import EXACT_POWER, level, levels
from subspan.structure.facility.oracles import WORN, Hits, Oracle, Slots

FREE = -(2**40)  # the level of a slot without a client: below every level, so never eligible
CLOSED = 2**40  # the critical level of a closed facility: above every level
# A sum this far below its limit needs no exact look, whatever digits it lost.
_SAFE = 1 - 1e-6


class Agenda:
    """What the sweep has still to look at, by level."""

    def __init__(self) -> None:
        self.heap: list[int] = []
        self.queued: set[int] = set()
        self.clusters: dict[int, set[int]] = {}  # facilities whose critical members may not pay any more
        self.joins: dict[int, list[np.ndarray]] = {}  # clients that an open facility could serve at this level
        self.stars: dict[int, set[int]] = {}  # closed facilities that may block at this level

    def push(self, k: int) -> None:
        if k not in self.queued:
            self.queued.add(k)
            heapq.heappush(self.heap, k)

    def pop(self) -> int | None:
        if not self.heap:
            return None
        k = heapq.heappop(self.heap)
        self.queued.remove(k)
        return k

    def cluster(self, k: int, facility: int) -> None:
        self.clusters.setdefault(k, set()).add(facility)
        self.push(k)

    def star(self, k: int, facility: int) -> None:
        self.stars.setdefault(k, set()).add(facility)
        self.push(k)

    def join(self, k: int, slots: np.ndarray) -> None:
        self.joins.setdefault(k, []).append(slots)
        self.push(k)


class Changes(NamedTuple):
    """What an update did to clients present before and after, and to facilities."""

    moved: Slots
    opened: list[int]
    closed: list[int]
    levels_touched: int


class Clusters:
    """Facilities, clients in numbered slots, and who serves whom.

    Args:
        places: facility positions.
        prices: opening prices, positive.
        kappa: level base, above 1.
        slack: 1, or more for stars that must be kappa^(slack - 1) times better before they open.
        dtype: precision in which distances are kept.
    """

    oracle: Oracle

    def __init__(
        self, places: Float64[np.ndarray, "m d"], prices: Float64[np.ndarray, "m"], *, kappa: float, slack: int,
        dtype: np.dtype,
    ) -> None:  # fmt: skip
        m = len(places)
        self.distances = Distances(places, dtype)
        self.prices, self.kappa, self.slack = prices, kappa, slack
        self.log_kappa = float(np.log(kappa))
        self.tolerance = 1e-5 if dtype == np.float32 else 1e-9
        self.critical = np.full(m, CLOSED)
        self.sizes = np.zeros(m, np.int64)
        # Weight, and weighted distance, of a facility's critical members; NaN where it was not kept up to date.
        self.inner = np.full((m, 2), np.nan)
        self._list_open()
        self.weights = np.zeros(0)
        self.serving = np.zeros(0, np.int64)  # phi; -1 in free slots
        self.level = np.zeros(0, np.int64)
        self.bids = np.zeros(0)  # kappa^level; 0 in free slots
        self.own = np.zeros(0)  # distance to the serving facility
        self.first = np.zeros(0, np.int64)  # L(distance to the nearest facility)
        self.free: list[int] = []
        self.n_clients = 0
        self.total = 0.0  # weight
        self.covered = 0.0  # weight for which ``floor`` is low enough
        self.floor = CLOSED
        self._begin()

    # ------------------------------------------------------------------------------------------ what the oracles see

    def rows(self, slots: Slots) -> Float[np.ndarray, "n m"]:
        return self.distances.rows(slots)

    def facility_row(self, facility: int) -> Float[np.ndarray, "m"]:
        return self.distances.between(self.distances.places[facility : facility + 1])[0]

    def active(self) -> Slots:
        return np.flatnonzero(self.serving >= 0)

    def eligible(self, slots: Slots) -> tuple[Slots, Slots]:
        return np.maximum(self.first[slots], self.floor), self.level[slots] - (self.slack - 1)

    # --------------------------------------------------------------------------------------------------- updates

    def insert(self, x: Float64[np.ndarray, "n d"], weights: Float64[np.ndarray, "n"]) -> tuple[Slots, Changes]:
        """Add clients, and mend; returns their slots."""
        self._begin()
        slots = self._allocate(len(x))
        if len(x) == 0:
            return slots, self._changes(0)
        self._newcomers = slots
        rows = self.distances.put(slots, x)
        self.weights[slots] = weights
        self.first[slots] = levels(rows.min(axis=1), self.log_kappa)
        self.n_clients += len(x)
        self.total += float(weights.sum())
        self._lower_floor()
        self.oracle.admit(slots)
        waiting = slots
        if len(self.open) == 0:
            self._open_for(int(slots[0]), rows[0])
            waiting, rows = slots[1:], rows[1:]
        if len(waiting):
            near = rows[:, self.open]
            best = near.argmin(axis=1)
            self._seat(waiting, rows, self.open[best], np.maximum(near.min(axis=1), self.open_bids[best]))
        return slots, self._changes(self._sweep())

    def remove(self, slots: Slots) -> Changes:
        """Take clients away, and mend."""
        self._begin()
        if len(slots) == 0:
            return self._changes(0)
        self._leave(slots, *self.eligible(slots))
        facilities = self.serving[slots]
        inner = self.level[slots] == self.critical[facilities]
        self._add_inner(slots[inner], -1)
        np.add.at(self.sizes, facilities, -1)
        for i in set(facilities[inner].tolist()):
            self.agenda.cluster(int(self.critical[i]), i)
        self.serving[slots], self.level[slots], self.bids[slots], self.own[slots] = -1, FREE, 0.0, 0.0
        self.free.extend(slots[::-1].tolist())
        self.n_clients -= len(slots)
        self.total = self.total - float(self.weights[slots].sum()) if self.n_clients else 0.0
        self._close_empty(facilities)
        return self._changes(self._sweep())

    def set_price(self, facility: int, price: float) -> Changes:
        """Change one opening price, and mend. With the hash oracle all cells are built anew."""
        self._begin()
        self.prices[facility] = price
        self.covered = 0.0
        self._lower_floor()
        self._note_stars(self.oracle.repriced())
        if self.oracle.scans and self.n_clients:
            self.agenda.push(int(self.eligible(self.active())[0].min()))
        if self.critical[facility] != CLOSED:
            self.agenda.cluster(int(self.critical[facility]), facility)
        return self._changes(self._sweep())

    def _allocate(self, count: int) -> Slots:
        if count > len(self.free):
            old = len(self.weights)
            new = max(2 * old, old + count - len(self.free), 16)
            self.distances.grow(new)
            for name, fill in (("weights", 0), ("serving", -1), ("level", FREE), ("bids", 0), ("own", 0), ("first", 0)):
                array = getattr(self, name)
                setattr(self, name, np.append(array, np.full(new - old, fill, array.dtype)))
            self.free = [*range(new - 1, old - 1, -1), *self.free]
        return np.array([self.free.pop() for _ in range(count)], dtype=np.int64)

    def _lower_floor(self) -> None:
        """Radius levels below L(min f / weight) hold no star that pays for itself: nobody is eligible there."""
        if self.total <= self.covered:
            return
        self.covered = 2.0 * self.total
        floor = level(float(self.prices.min()) / self.covered, self.log_kappa)
        if floor >= self.floor:
            return
        active = self.active()
        levels_below = np.minimum(self.floor + self.slack - 1, self.level[active])
        self._enter(active, np.maximum(self.first[active], floor), levels_below)
        self.floor = floor

    # --------------------------------------------------------------------------------------------------- the sweep

    def _sweep(self) -> int:
        """Mend the state from the lowest level that may be broken upwards; returns how many levels were looked at."""
        touched = 0
        while (k := self._next_level()) is not None:
            touched += 1
            clusters = sorted(self.agenda.clusters.pop(k, ()))
            for i in np.flatnonzero(self.critical == k).tolist() if self.oracle.scans else clusters:
                self._raise(i, k)
            joins = [np.flatnonzero(self.level > k)] if self.oracle.scans else self.agenda.joins.pop(k, [])
            if joins:
                self._join(np.unique(np.concatenate(joins)), k)
            stars = range(len(self.prices)) if self.oracle.scans else sorted(self.agenda.stars.pop(k, ()))
            if stars:
                self._open_stars(stars, k)
            if self.oracle.scans and k < max(self.level.max(), self.critical[self.open].max(initial=FREE)):
                self.agenda.push(k + 1)
        if self.n_clients == 1:
            self._serve_alone()
        return touched

    def _next_level(self) -> int | None:
        """The lowest level on the agenda; at its end, what too much rounding may have hidden comes up."""
        if not self.agenda.heap and self.oracle.error > WORN:
            self._note_stars(self.oracle.renew())
        return self.agenda.pop()

    def _raise(self, i: int, k: int) -> None:
        """Lift a cluster whose critical members do not pay at level k, merging the ordinary ones of the next level."""
        if self.critical[i] != k:
            return
        limit = self.kappa ** float(k)
        weight, paid = self.inner[i]
        if self.prices[i] + paid <= weight * limit * _SAFE:  # false for NaN
            return
        members = np.flatnonzero(self.serving == i)
        inner = members[self.level[members] <= k]
        weights = self.weights[inner]
        weight, paid = float(weights.sum()), float(weights @ self.own[inner])
        self.inner[i] = weight, paid
        if len(inner) and self.prices[i] + paid <= weight * limit * (1 + self.tolerance):  # (I2)
            return
        # Without critical members nothing keeps the cluster from the level of its lowest ordinary ones.
        self._set_critical(i, k + 1 if len(inner) else int(self.level[members].min()))
        if len(inner):
            self._place(inner, np.full(len(inner), i), np.full(len(inner), k + 1))
        self.agenda.cluster(int(self.critical[i]), i)

    def _join(self, slots: Slots, k: int) -> None:
        """Clients above k within kappa^k of a facility open at or below k move there: to their own, or the nearest."""
        slots = slots[self.level[slots] > k]
        ready = self.open[self.critical[self.open] <= k]
        if len(slots) == 0:
            return
        near = self.distances.block(slots, ready)
        radius = self.kappa ** (k + EXACT_POWER)  # L(d) <= k
        within = near <= radius
        own = self.serving[slots]
        stays = (self.critical[own] <= k) & (self.own[slots] <= radius)
        joins = stays | within.any(axis=1)
        if len(ready):
            nearest = ready[np.where(within, near, np.inf).argmin(axis=1)]
            self._place(slots[joins], np.where(stays, own, nearest)[joins], np.full(int(joins.sum()), k))
        if not self.oracle.scans:  # the facility it had in view was closed, or lifted, meanwhile
            self._note_joins(slots[~joins], self.distances.block(slots[~joins], self.open), above=k)

    def _open_stars(self, facilities: Iterable[int], k: int) -> None:
        """Open the blocking star of least average cost, until none blocks at level k. (3)"""
        candidates = np.array([i for i in facilities if self.critical[i] > k], dtype=np.int64)
        radius = self.kappa ** float(k - self.slack + 1)
        while len(candidates):
            above = np.flatnonzero(self.level > k)
            near = self.distances.block(above, candidates)
            within = near <= radius * (1 + self.tolerance)
            weights = np.where(within, self.weights[above, None], 0.0)
            weight = weights.sum(axis=0)
            cost = self.prices[candidates] + (weights * near).sum(axis=0, dtype=np.float64)
            blocks = (weight > 0) & (cost <= weight * radius * (1 + self.tolerance))
            if not blocks.any():
                return
            average = np.where(blocks, cost / np.where(blocks, weight, 1.0), np.inf)
            best = int(np.lexsort((candidates, self.prices[candidates], average))[0])
            # With slack the star pays within a smaller radius than it then serves.
            served = near[:, best] <= self.kappa ** float(k) * (1 + self.tolerance)
            self._open_star(int(candidates[best]), k, above[served])
            blocks[best] = False
            candidates = candidates[blocks]  # the others only lost clients: what does not block now will not

    def _open_star(self, i: int, k: int, slots: Slots) -> None:
        self._set_critical(i, k)
        self._place(slots, np.full(len(slots), i), np.full(len(slots), k))
        if self.oracle.scans:
            return
        # Whoever is above its level of reach from here joins when the sweep comes to that level.
        column = self.distances.column(i)
        reach = np.maximum(column, self.kappa ** float(k))
        slots = np.flatnonzero(reach * self.kappa <= self.bids * (1 + 1e-6))
        self._schedule(slots, levels(reach[slots], self.log_kappa))

    def _serve_alone(self) -> None:
        """A single client is served by the best facility outright."""
        slots = self.active()
        row = self.rows(slots)[0]
        w = float(self.weights[slots[0]])
        served = self.serving[slots[0]]
        if self.prices[served] + w * row[served] > float((self.prices + w * row).min()) * (1 + self.tolerance):
            self._open_for(int(slots[0]), row)

    # --------------------------------------------------------------------------------------------------- state changes

    def _open_for(self, slot: int, row: Float[np.ndarray, "m"]) -> None:
        """Open the facility that serves this client, alone or new, at least cost."""
        weight = self.weights[slot]
        cost = self.prices + weight * row
        i = int(np.lexsort((np.arange(len(cost)), self.prices, cost))[0])
        slots, average = np.array([slot]), cost[i : i + 1] / weight
        self._set_critical(i, level(float(average[0]), self.log_kappa))
        if self.serving[slot] < 0:
            self._seat(slots, row[None], np.array([i]), average)
        else:
            self._place(slots, np.array([i]), self.critical[i : i + 1])

    def _seat(
        self, slots: Slots, rows: Float[np.ndarray, "n m"], facilities: Int64[np.ndarray, "n"],
        reach: Float64[np.ndarray, "n"],
    ) -> None:  # fmt: skip
        """Give newcomers an open facility, at the level of max(d, kappa^crit)."""
        new = levels(reach, self.log_kappa)
        self._enter(slots, np.maximum(self.first[slots], self.floor), new)
        self.own[slots] = rows[np.arange(len(slots)), facilities]
        self.serving[slots], self.level[slots], self.bids[slots] = facilities, new, self.kappa ** new.astype(np.float64)
        np.add.at(self.sizes, facilities, 1)
        self._add_inner(slots[new == self.critical[facilities]], 1)
        if self.oracle.scans:
            self.agenda.push(int(np.maximum(self.first[slots], self.floor).min()))
        else:
            self._note_joins(slots, rows[:, self.open])

    def _place(self, slots: Slots, facilities: Int64[np.ndarray, "n"], new: Int64[np.ndarray, "n"]) -> None:
        """Give clients another facility, another level, or both."""
        old, before = self.level[slots], self.serving[slots]
        start, old_stop = self.eligible(slots)
        new_stop = new - (self.slack - 1)
        self._enter(slots, np.maximum(start, old_stop), new)
        self._leave(slots, np.maximum(start, new_stop), old_stop)
        self.serving[slots], self.level[slots], self.bids[slots] = facilities, new, self.kappa ** new.astype(np.float64)
        self.inner[facilities] = self.inner[before] = np.nan  # taken anew when needed
        moved = before != facilities
        if moved.any():
            self._history.append((slots[moved], before[moved]))
            self.own[slots] = self.rows(slots)[np.arange(len(slots)), facilities]
            np.add.at(self.sizes, facilities[moved], 1)
            np.add.at(self.sizes, before[moved], -1)
            for i in set(before[moved & (old == self.critical[before])].tolist()):
                self.agenda.cluster(int(self.critical[i]), i)
            self._close_empty(before[moved])
        raised = slots[new > old]
        if len(raised) and self.oracle.scans:
            self.agenda.push(int(old.min()))
        elif len(raised):
            self._note_joins(raised, self.distances.block(raised, self.open))

    def _enter(self, slots: Slots, start: Slots, new: Int64[np.ndarray, "n"]) -> None:
        """Clients on their way to these levels become eligible from ``start`` on."""
        stop = new - (self.slack - 1)
        some = np.flatnonzero(start < stop)
        if len(some):
            self._note_stars(self.oracle.shift(slots[some], start[some], stop[some], 1))

    def _leave(self, slots: Slots, start: Slots, stop: Slots) -> None:
        """Clients cease to be eligible at start <= q < stop."""
        some = np.flatnonzero(start < stop)
        if len(some):
            self.oracle.shift(slots[some], start[some], stop[some], -1)

    def _add_inner(self, slots: Slots, sign: int) -> None:
        """Add critical members to, or take them from, the sums of their clusters."""
        weights = self.weights[slots]
        paid = weights * self.own[slots]
        for i, w, d in zip(self.serving[slots].tolist(), weights.tolist(), paid.tolist(), strict=True):
            self.inner[i] += sign * w, sign * d
            if sign < 0 and self.inner[i, 0] < 1e-6 * w:  # what remains is rounding: taken anew when needed
                self.inner[i] = np.nan

    def _note_stars(self, hits: Hits) -> None:
        for q, i in zip(*hits, strict=True):
            self.agenda.star(int(q) + self.slack - 1, int(i))

    def _note_joins(self, slots: Slots, near: Float[np.ndarray, "n o"], above: int = FREE) -> None:
        """Schedule the clients that some open facility, at these distances, could serve at a lower level."""
        if len(slots):
            reach = np.maximum(near, self.open_bids).min(axis=1)
            self._schedule(slots, np.maximum(levels(reach, self.log_kappa), above + 1))

    def _schedule(self, slots: Slots, reach: Int64[np.ndarray, "n"]) -> None:
        lower = reach < self.level[slots]
        if lower.any():
            slots, reach = slots[lower], reach[lower]
            for k in np.unique(reach).tolist():
                self.agenda.join(k, slots[reach == k])

    def _set_critical(self, i: int, k: int) -> None:
        """Open i, or bring it to another level; its sums begin anew."""
        if self.critical[i] == CLOSED:
            self._opened_before.setdefault(i, False)
        self.critical[i], self.inner[i] = k, 0.0 if self.sizes[i] == 0 else np.nan
        self._list_open()

    def _close_empty(self, facilities: Int64[np.ndarray, "n"]) -> None:
        empty = [i for i in set(facilities.tolist()) if self.sizes[i] == 0]
        for i in empty:
            self._opened_before.setdefault(i, True)
            self.critical[i], self.inner[i] = CLOSED, np.nan
        if empty:
            self._list_open()

    def _list_open(self) -> None:
        self.open = np.flatnonzero(self.critical != CLOSED)
        self.open_bids = self.kappa ** self.critical[self.open].astype(np.float64)

    # --------------------------------------------------------------------------------------------------- bookkeeping

    def _begin(self) -> None:
        self.agenda = Agenda()
        self._history: list[tuple[np.ndarray, np.ndarray]] = []  # clients and where they were served until then
        self._newcomers = np.zeros(0, np.int64)
        self._opened_before: dict[int, bool] = {}  # facilities opened or closed, and whether they were open

    def _changes(self, touched: int) -> Changes:
        """What differs between now and the beginning of the update, whatever happened in between."""
        moved = np.zeros(0, np.int64)
        if not self._history and not self._opened_before:
            return Changes(moved, [], [], touched)
        if self._history:
            slots = np.concatenate([slots for slots, _ in self._history])
            slots, first = np.unique(slots, return_index=True)
            before = np.concatenate([before for _, before in self._history])[first]
            here = (self.serving[slots] >= 0) & ~np.isin(slots, self._newcomers)
            moved = slots[here & (self.serving[slots] != before)]
        changed = [i for i, was in sorted(self._opened_before.items()) if was == (self.critical[i] == CLOSED)]
        opened = [i for i in changed if not self._opened_before[i]]
        return Changes(moved, opened, [i for i in changed if self._opened_before[i]], touched)

    _ARRAYS = ("prices", "critical", "sizes", "inner", "weights", "serving", "level", "bids", "own", "first")

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything needed to continue, as copies; the seating of clients in slots included."""
        out = {name: getattr(self, name).copy() for name in self._ARRAYS}
        out["free"] = np.array(self.free, np.int64)
        out["weight"] = np.array([self.total, self.covered])
        out["floor"] = np.array([self.floor])
        out["positions"] = self.distances.positions.copy()
        if self.distances.kept is not None:
            out["distances"] = self.distances.kept.copy()
        return out | {f"oracle_{name}": np.array(array) for name, array in self.oracle.arrays().items()}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        for name in self._ARRAYS:
            setattr(self, name, np.array(arrays[name]))
        self._list_open()
        self.free = np.asarray(arrays["free"]).tolist()
        self.n_clients = len(self.weights) - len(self.free)
        self.total, self.covered = (float(x) for x in arrays["weight"])
        self.floor = int(arrays["floor"][0])
        self.distances.positions = np.array(arrays["positions"])
        self.distances.kept = np.array(arrays["distances"]) if "distances" in arrays else None
        prefix = "oracle_"
        self.oracle.restore({k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)})
