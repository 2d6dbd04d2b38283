"""Levels, and the certificate: the mathematics of dynamic facility location, in functions of arrays.

Source: the level structure of Bhattacharya, Lattanzi and Parotsidis, *Efficient and Stable Fully Dynamic Facility
Location*, NeurIPS 2022, which the high-dimensional algorithm of ICML 2026 builds on. Numbers refer to docs/methods.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

# Exact powers of kappa must not be pushed up one level by rounding in the logarithm.
EXACT_POWER = 1e-9
_TINY = float(np.finfo(np.float64).tiny)


def level(value: float, log_kappa: float) -> int:
    """L(v), the smallest integer l with v <= kappa^l; zero counts as the smallest positive float. (1)"""
    return math.ceil(math.log(max(value, _TINY)) / log_kappa - EXACT_POWER)


def levels(values: Float[np.ndarray, "*n"], log_kappa: float) -> Int64[np.ndarray, "*n"]:
    """:func:`level` of every value."""
    return np.ceil(np.log(np.maximum(values.astype(np.float64, copy=False), _TINY)) / log_kappa - EXACT_POWER).astype(
        np.int64
    )


def guaranteed_scale(kappa: float) -> float:
    """s*(kappa): in every nice state s* kappa^lev is dual feasible, so the cost is at most OPT / s*. (5)

    1 / s* is 3.104 at kappa = 1.2 and tends to 1 + sqrt(2) as kappa tends to 1. The bound is our own (checked on
    thousands of states, docs/methods/facility.md), and needs ``slack=1`` and an oracle that misses no star.
    """
    return (math.sqrt((kappa + 1) ** 2 + 4) - (kappa + 1)) / (2 * kappa)


@dataclass(frozen=True)
class Certificate:
    """A proof of how good the present state is.

    Attributes:
        lower_bound: no choice of facilities, not even a fractional one, costs less.
        ratio: cost / lower_bound, an upper bound on cost / OPT (1 when nothing is to be paid).
        alpha: what each client pays in the dual solution, per unit of its weight, in the order of ``ids_``.
        scale: the largest s for which s kappa^lev is dual feasible; ``alpha`` is s kappa^lev.
    """

    lower_bound: float
    ratio: float
    alpha: Float64[np.ndarray, "n"]
    scale: float


def dual_scale(
    distances: Float[np.ndarray, "n m"],
    weights: Float64[np.ndarray, "n"],
    bids: Float64[np.ndarray, "n"],
    prices: Float64[np.ndarray, "m"],
) -> float:
    """The largest s with sum_j w_j (s bid_j - d_ji)^+ <= f_i for every facility i. (4)

    The sum is the maximum over client sets S of sum_S w (s bid - d), so s is the minimum over i and S of
    (f_i + sum_S w d) / sum_S w bid; for each i the minimum is attained by a prefix of the clients ordered by d / bid.
    """
    order = np.argsort(distances / bids[:, None], axis=0)
    paid = np.cumsum(np.take_along_axis(weights[:, None] * distances, order, axis=0), axis=0, dtype=np.float64)
    bid = np.cumsum((weights * bids)[order], axis=0)
    return float(np.min((prices + paid) / bid))
