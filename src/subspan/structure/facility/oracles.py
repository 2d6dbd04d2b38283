"""Which closed facility could open more cheaply? Three ways to notice: look at all, running sums, random partitions.

A client j at level lev is *eligible* at the radius levels q from first(j) = L(min_i d_ji) up to, but not including,
lev - slack + 1. There it offers w_j (kappa^q - d_ji)^+ to facility i, and a star at i blocks once the offers reach the
price f_i. (3) The running oracles keep sums of offers and name the facilities that a change has brought up to their
price; the sweep then looks at those stars exactly. So an oracle may name too many; only ``Hash`` may name too few.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64, Int64

from subspan.structure.facility.levels import level

# Running sums lose digits over many updates: what comes this near to its price is named, the exact look decides; and
# sums that may have lost more than half of that margin are taken anew.
_NEAR = 1 - 1e-6
WORN = 5e-7
_EPS = float(np.finfo(np.float64).eps)
# Tables reach this many levels further than asked, so that a wandering stream extends them rarely.
_MARGIN = 8
# Clients whose offers are summed at once when a table is built anew: bounds the memory of the temporaries.
_BLOCK = 256

Slots = Int64[np.ndarray, "n"]
# (radius level, facility) of stars to look at, as two arrays of equal length
Hits = tuple[np.ndarray, np.ndarray]
NO_HITS: Hits = (np.zeros(0, np.int64), np.zeros(0, np.int64))


@runtime_checkable
class Clients(Protocol):
    """What an oracle sees of the structure."""

    kappa: float
    prices: Float64[np.ndarray, "m"]
    weights: Float64[np.ndarray, "cap"]

    def rows(self, slots: Slots) -> Float[np.ndarray, "n m"]:
        """Distances of these clients to all facilities."""
        ...

    def facility_row(self, facility: int) -> Float[np.ndarray, "m"]:
        """Distances of one facility to all facilities."""
        ...

    def active(self) -> Slots:
        """Slots in use."""
        ...

    def eligible(self, slots: Slots) -> tuple[Slots, Slots]:
        """Radius levels (from, up to but not including) at which each client is eligible now."""
        ...


@runtime_checkable
class Oracle(Protocol):
    """Kept up to date by the structure, which calls ``shift`` before it changes a level."""

    scans: bool  # True: the sweep visits every level and looks at every facility
    error: float  # what rounding may have taken from a sum by now, in units of the price

    def admit(self, slots: Slots) -> None:
        """New clients, not yet eligible anywhere."""
        ...

    def shift(self, slots: Slots, start: Slots, stop: Slots, sign: int) -> Hits:
        """Clients become eligible (+1), or cease to be (-1), at radius levels start <= q < stop, each its own.

        Stars that the change brings up to their price are named; a fall names none.
        """
        ...

    def repriced(self) -> Hits:
        """Prices have changed: all stars that reach theirs."""
        ...

    def renew(self) -> Hits:
        """Take all sums anew, and name all stars that reach their price."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """What cannot be computed again."""
        ...

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Continue exactly where these arrays were taken, with the same clients."""
        ...


def _span(start: Slots, stop: Slots) -> tuple[int, int]:
    """The least and the greatest level; of one client, by far the most frequent case, without a search."""
    return (int(start[0]), int(stop[0])) if len(start) == 1 else (int(start.min()), int(stop.max()))


def _rounding(shares: Float[np.ndarray, "p"]) -> float:
    """What sums of these sizes, in units of their price, may lose to rounding when they rise and fall again."""
    return 2 * _EPS * float(shares.max(initial=1.0))


def _eligible_blocks(clients: Clients) -> Iterator[tuple[Slots, Slots, Slots]]:
    """All eligible clients with the levels where they are, some at a time."""
    active = clients.active()
    start, stop = clients.eligible(active)
    some = np.flatnonzero(start < stop)
    for i in range(0, len(some), _BLOCK):
        block = some[i : i + _BLOCK]
        yield active[block], start[block], stop[block]


class Exact:
    """Looks at every facility at every level in every sweep: the reference, O(levels n m)."""

    scans = True
    error = 0.0

    def admit(self, slots: Slots) -> None:
        pass

    def shift(self, slots: Slots, start: Slots, stop: Slots, sign: int) -> Hits:
        return NO_HITS

    def repriced(self) -> Hits:
        return NO_HITS

    def renew(self) -> Hits:
        return NO_HITS

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        pass


class Counters:
    """Running sums of the offers to every facility at every level: exact, O(m) per client and level changed.

    The 2022 algorithm counts clients in buckets of rounded distance; these sums cost the same and are not rounded.
    """

    scans = False

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.bottom = 0
        self.offers = np.zeros((0, len(clients.prices)))
        self.error = 0.0

    def admit(self, slots: Slots) -> None:
        pass

    def shift(self, slots: Slots, start: Slots, stop: Slots, sign: int) -> Hits:
        low, high = _span(start, stop)
        self._reach(low, high)
        radii = self.clients.kappa ** np.arange(low, high, dtype=np.float64)
        rows, weights = self.clients.rows(slots), sign * self.clients.weights[slots]
        table = self.offers[low - self.bottom : high - self.bottom]
        if len(slots) == 1:  # all its levels at once
            table += weights * np.maximum(radii[:, None] - rows, 0.0)
        else:
            for q, radius, offers in zip(range(low, high), radii, table, strict=True):
                here = (start <= q) & (q < stop)
                offers += weights[here] @ np.maximum(radius - rows[here], 0.0)
        if sign < 0:
            return NO_HITS
        where, facilities = np.nonzero(table >= _NEAR * self.clients.prices)
        self.error += _rounding(table[where, facilities] / self.clients.prices[facilities])
        return where + low, facilities

    def _reach(self, low: int, high: int) -> None:
        """Make room for radius levels low <= q < high; where nobody was eligible the sums are 0."""
        if len(self.offers) == 0:
            self.bottom = low
        below = self.bottom - low + _MARGIN if low < self.bottom else 0
        top = self.bottom + len(self.offers)
        above = high - top + _MARGIN if high > top else 0
        if below or above:
            self.offers = np.pad(self.offers, ((below, above), (0, 0)))
            self.bottom -= below

    def repriced(self) -> Hits:
        where, facilities = np.nonzero(self.offers >= _NEAR * self.clients.prices)
        return where + self.bottom, facilities

    def renew(self) -> Hits:
        self.offers[:] = 0.0
        for block in _eligible_blocks(self.clients):
            self.shift(*block, 1)
        self.error = 0.0
        return self.repriced()

    def arrays(self) -> dict[str, np.ndarray]:
        return {"offers": self.offers, "bottom": np.array([self.bottom]), "error": np.array([self.error])}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        self.offers, self.bottom = np.array(arrays["offers"]), int(arrays["bottom"][0])
        self.error = float(arrays["error"][0])


class Hash:
    """Running sums for the few cheapest facilities of each client's own cell in random partitions of the space.

    Partition t has the facilities as centres, in a random order, and a radius factor beta_t in [1/2, 1). At radius
    level q the cell of a point is named by the first centre within R = beta_t (gamma / 2) kappa^q of it: cells are less
    than gamma kappa^q across (Calinescu, Karloff and Rabani), and a ball of radius kappa^q lies within one with
    probability m^{-O(1 / gamma)} (Mendel and Naor). (6) A client costs O(tables m) once and O(tables probes) per level
    changed.

    ``rule="verify"`` sums the offers to the ``max_probes`` cheapest facilities of a cell. ``rule="cheapest"``, the
    theory's, weighs cells whose gamma + 1 radii fit into kappa^q: however its clients lie, each offers at least
    kappa^q / (1 + gamma), about, to the cheapest facility of the cell. It finds only stars that are that much better.
    """

    scans = False

    def __init__(
        self,
        clients: Clients,
        *,
        gamma: float,
        n_tables: int,
        rule: str,
        max_probes: int,
        random: np.random.RandomState,
    ) -> None:
        m = len(clients.prices)
        self.clients, self.gamma = clients, gamma
        self.orders = np.stack([random.permutation(m) for _ in range(n_tables)])
        self.names = np.pad(self.orders, ((0, 0), (0, 1)), constant_values=m)  # none comes after the last
        self.betas = random.uniform(0.5, 1.0, n_tables)
        self.weighs = rule == "cheapest"
        self.n_probes = 1 if self.weighs else max_probes
        self.shrunk = level(1 + gamma, float(np.log(clients.kappa))) if self.weighs else 0
        self.bottom = self.top = 0  # radius levels with cells
        self.cell_of = np.zeros((n_tables, 0, m + 1), np.int32)  # by table, level and centre; 0 where nothing is probed
        self.cells = np.zeros((0, n_tables, 0), np.int32)  # by slot, table and level
        self.newcomers = np.zeros(0, np.int64)  # admitted last, and perhaps not among the active clients yet
        self.starts, self.counts = np.zeros(1, np.int64), np.zeros(1, np.int64)  # by cell: its part of the arrays below
        self.probes = np.zeros(0, np.int64)  # cell by cell, its cheapest facilities
        self.levels, self.radii = (
            np.zeros(0, np.int64),
            np.zeros(0),
        )  # their radius levels, and what can be offered there
        self.asked, self.offers = np.zeros(0), np.zeros(0)  # their prices, and the sums
        self.error = 0.0

    def cell_radii(self, low: int, high: int) -> Float64[np.ndarray, "t q"]:
        """R of each table at radius levels low <= q < high. (6)"""
        radii = self.clients.kappa ** np.arange(low - self.shrunk, high - self.shrunk, dtype=np.float64)
        return self.betas[:, None] * self.gamma / 2 * radii

    def centres(self, row: Float[np.ndarray, "m"], radii: Float64[np.ndarray, "t q"]) -> Int64[np.ndarray, "t q"]:
        """The first centre within R of a point with these distances, which names its cell; m for none. (6)"""
        ahead = -np.minimum.accumulate(row[self.orders], axis=1)  # minus the nearest so far: rises along the order
        tables = zip(self.names, ahead, -radii, strict=True)
        return np.array([name[nearest.searchsorted(radius)] for name, nearest, radius in tables])

    def admit(self, slots: Slots) -> None:
        self.newcomers = slots
        needed = int(slots.max()) + 1
        if needed > len(self.cells):
            more = max(needed, 2 * len(self.cells)) - len(self.cells)
            self.cells = np.pad(self.cells, ((0, more), (0, 0), (0, 0)))
        self._find_cells(slots)

    def _find_cells(self, slots: Slots) -> None:
        if self.top == self.bottom:
            return
        radii = self.cell_radii(self.bottom, self.top)
        block = (np.arange(radii.size) * self.cell_of.shape[2]).reshape(radii.shape)
        for slot, row in zip(slots, self.clients.rows(slots), strict=True):
            self.cells[slot] = self.cell_of.take(block + self.centres(row, radii))

    def shift(self, slots: Slots, start: Slots, stop: Slots, sign: int) -> Hits:
        low, high = _span(start, stop)
        if low < self.bottom or high > self.top:
            empty = self.top == self.bottom
            bottom = low - _MARGIN if empty or low < self.bottom else self.bottom
            top = high + _MARGIN if empty or high > self.top else self.top
            self._build(bottom, top)
        probed = self._add(slots, start, stop, sign)
        return self._reached(probed) if sign > 0 else NO_HITS

    def _reached(self, probed: Int64[np.ndarray, "p"]) -> Hits:
        share = self.offers[probed] / self.asked[probed]
        reached = share >= _NEAR
        self.error += _rounding(share[reached])
        hits = probed[reached]
        return self.levels[hits], self.probes[hits]

    def _add(self, slots: Slots, start: Slots, stop: Slots, sign: int) -> Int64[np.ndarray, "p"]:
        """Add the offers at all probed facilities of the clients' cells, and say which sums these are."""
        low, high = _span(start, stop)
        cells = self.cells[slots, :, low - self.bottom : high - self.bottom]
        if len(slots) > 1:
            steps = np.arange(low, high)
            inside = (start[:, None] <= steps) & (steps < stop[:, None])
            cells = np.where(inside[:, None, :], cells, 0)
        counts = self.counts[cells.ravel()]
        ends = np.cumsum(counts)
        probed = np.arange(ends[-1]) + np.repeat(self.starts[cells.ravel()] - (ends - counts), counts)
        rows, weights, facilities = self.clients.rows(slots), sign * self.clients.weights[slots], self.probes[probed]
        if len(slots) == 1:  # no sum twice
            offers = self.radii[probed] if self.weighs else np.maximum(self.radii[probed] - rows[0][facilities], 0.0)
            self.offers[probed] += weights * offers
        else:
            client = np.repeat(np.arange(len(slots)), counts.reshape(len(slots), -1).sum(axis=1))
            offers = self.radii[probed] - (0.0 if self.weighs else rows[client, facilities])
            np.add.at(self.offers, probed, weights[client] * np.maximum(offers, 0.0))
        return probed

    def _build(self, bottom: int, top: int) -> None:
        """Partitions for bottom <= q < top, and the sums of all eligible clients in them: O(m^2 tables)."""
        self.bottom, self.top = bottom, top
        m, n_tables, n_levels = len(self.clients.prices), len(self.orders), top - bottom
        rows = [self.clients.facility_row(i) for i in range(m)]
        radii = self.cell_radii(bottom, top)
        centre = np.stack([self.centres(row, radii) for row in rows])
        apart = np.concatenate([row[c].ravel() for row, c in zip(rows, centre, strict=True)])
        key = ((np.arange(n_tables * n_levels) * (m + 1)).reshape(n_tables, n_levels) + centre).ravel()
        facility = np.repeat(np.arange(m), n_tables * n_levels)
        # Cell by cell, the cheapest first; of equal prices the nearest to the centre.
        order = np.lexsort((facility, apart, self.clients.prices[facility], key))
        keys, starts, counts = np.unique(key[order], return_index=True, return_counts=True)
        rank = np.arange(len(key)) - np.repeat(starts, counts)
        self.probes = facility[order][rank < self.n_probes]
        self.counts = np.append(0, np.minimum(counts, self.n_probes))
        self.starts = np.cumsum(self.counts) - self.counts
        self.levels = np.repeat(np.append(0, keys // (m + 1) % n_levels + bottom), self.counts)
        self.radii = self.clients.kappa ** (self.levels - self.shrunk).astype(np.float64)
        self.asked, self.offers = self.clients.prices[self.probes], np.zeros(len(self.probes))
        self.cell_of = np.zeros((n_tables, n_levels, m + 1), np.int32)
        self.cell_of.ravel()[keys] = np.arange(1, len(keys) + 1)
        self.cells = np.zeros((len(self.cells), n_tables, n_levels), np.int32)
        self._find_cells(np.union1d(self.clients.active(), self.newcomers))
        for block in _eligible_blocks(self.clients):
            self._add(*block, 1)
        self.error = 0.0

    def repriced(self) -> Hits:
        self._build(self.bottom, self.top)
        return self._reached(np.arange(len(self.offers)))

    def renew(self) -> Hits:
        self.offers[:] = 0.0
        for block in _eligible_blocks(self.clients):
            self._add(*block, 1)
        hits = self._reached(np.arange(len(self.offers)))
        self.error = 0.0
        return hits

    def arrays(self) -> dict[str, np.ndarray]:
        window, error = np.array([self.bottom, self.top, len(self.cells)]), np.array([self.error])
        return {"orders": self.orders, "betas": self.betas, "window": window, "offers": self.offers, "error": error}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        self.orders, self.betas = np.array(arrays["orders"]), np.array(arrays["betas"])
        self.names = np.pad(self.orders, ((0, 0), (0, 1)), constant_values=self.orders.shape[1])
        bottom, top, length = (int(x) for x in arrays["window"])
        self.cells = np.zeros((length, len(self.orders), 0), np.int32)
        if top > bottom:
            self._build(bottom, top)
        self.offers, self.error = np.array(arrays["offers"]), float(arrays["error"][0])  # rounding included
