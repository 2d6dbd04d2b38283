"""Facility location from scratch, to compare with: greedy, online, optimal, and the nearest facility.

Each takes the distances (n clients x m facilities) and prices (m), and returns the facility of every client;
:func:`cost` prices it.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from subspan.errors import SubspanError


class Optimum(NamedTuple):
    """An optimal solution."""

    cost: float
    assignment: Int64[np.ndarray, "n"]


def cost(
    distances: Float[np.ndarray, "n m"],
    prices: Float[np.ndarray, "m"],
    assignment: Int64[np.ndarray, "n"],
    weights: Float[np.ndarray, "n"] | None = None,
) -> float:
    """Prices of the facilities that serve somebody, plus the weighted distances."""
    paid = distances[np.arange(len(assignment)), assignment]
    return float(prices[np.unique(assignment)].sum() + (paid if weights is None else weights * paid).sum())


def nearest(distances: Float[np.ndarray, "n m"]) -> Int64[np.ndarray, "n"]:
    """Every client at its nearest facility, whatever the prices."""
    return distances.argmin(axis=1)


def jms_greedy(
    distances: Float[np.ndarray, "n m"],
    prices: Float[np.ndarray, "m"],
    weights: Float[np.ndarray, "n"] | None = None,
) -> Int64[np.ndarray, "n"]:
    """The greedy star algorithm of Jain, Mahdian, Markakis, Saberi and Vazirani (2003), a 1.861-approximation.

    Again and again the star of least average cost is taken: a facility and the clients, not served yet, that it serves
    best; an open facility costs nothing more. O(open (m n)) after sorting.
    """
    n, m = distances.shape
    w = np.ones(n) if weights is None else weights
    order = np.argsort(distances, axis=0)
    near = np.take_along_axis(distances, order, axis=0)
    assignment = np.full(n, -1)
    opened = np.zeros(0, np.int64)
    while (waiting := assignment < 0).any():
        weight = np.cumsum(np.where(waiting, w, 0.0)[order], axis=0)
        paid = np.cumsum(np.where(waiting, w, 0.0)[order] * near, axis=0)
        average = (prices + paid) / np.where(weight > 0, weight, np.nan)
        average[~waiting[order]] = np.inf  # a star ends with a client that waits
        average[:, opened] = np.inf
        last, i = np.unravel_index(int(np.nanargmin(average)), (n, m))
        # Whoever an open facility serves at no more than this average is the cheaper star and goes first. Taking
        # clients away only makes the other stars dearer, so all of them go at once.
        if len(opened):
            best = distances[:, opened].argmin(axis=1)
            first = waiting & (distances[np.arange(n), opened[best]] <= average[last, i])
            if first.any():
                assignment[first] = opened[best[first]]
                continue
        star = order[: last + 1, i]
        assignment[star[waiting[star]]] = i
        opened = np.append(opened, i)
    return assignment


def meyerson(
    distances: Float[np.ndarray, "n m"], prices: Float[np.ndarray, "m"], random_state: np.random.RandomState
) -> Int64[np.ndarray, "n"]:
    """Online facility location of Meyerson (2001) with non-uniform prices: clients in order, nobody moves, none leaves.

    Prices are rounded down to powers of two, which makes classes. Going up in price, let D be the client's distance to
    what is open or of a lower class, and D' < D that to class c: its nearest facility of class c opens with probability
    (D - D') / price.
    """
    classes = np.floor(np.log2(prices)).astype(int)
    kinds = np.unique(classes)
    opened = np.zeros(len(prices), dtype=bool)
    assignment = np.zeros(len(distances), np.int64)
    for j, row in enumerate(distances):
        if not opened.any():
            opened[np.argmin(prices + row)] = True
        else:
            reach = row[opened].min()
            for kind in kinds:
                own = np.flatnonzero(classes == kind)
                i = own[row[own].argmin()]
                if row[i] < reach:
                    opened[i] |= random_state.uniform() < (reach - row[i]) / 2.0**kind
                    reach = row[i]
        assignment[j] = np.flatnonzero(opened)[row[opened].argmin()]
    return assignment


def milp_optimum(
    distances: Float[np.ndarray, "n m"],
    prices: Float[np.ndarray, "m"],
    weights: Float[np.ndarray, "n"] | None = None,
    *,
    integral: bool = True,
) -> Optimum:
    """The optimum by mixed-integer programming (HiGHS through scipy); with ``integral=False`` its linear relaxation.

    The assignment of a relaxation is the largest share of each client.

    Raises:
        SubspanError: the solver did not finish.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    n, m = distances.shape
    edges = np.arange(n * m)
    client, facility = np.divmod(edges, m)
    w = np.ones(n) if weights is None else weights
    objective = np.concatenate([(w[:, None] * distances).ravel(), prices])
    served = sparse.csr_array((np.ones(n * m), (client, edges)), shape=(n, n * m + m))
    ones = np.ones(n * m)
    within_open = sparse.csr_array(
        (np.concatenate([ones, -ones]), (np.tile(edges, 2), np.concatenate([edges, n * m + facility]))),
        shape=(n * m, n * m + m),
    )
    solution = milp(
        objective,
        constraints=[LinearConstraint(served, 1, 1), LinearConstraint(within_open, -np.inf, 0)],
        integrality=np.concatenate([np.zeros(n * m), np.ones(m)]) if integral else None,
        bounds=Bounds(0, 1),
    )
    if solution.x is None:
        raise SubspanError(f"the optimum was not found: {solution.message}")
    return Optimum(float(solution.fun), solution.x[: n * m].reshape(n, m).argmax(axis=1))
