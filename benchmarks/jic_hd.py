"""Speed of JIC-HD's exact solver against the authors' subgradient method, graphical lassos and its own lower bound.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, turns interleaved, median
of the rounds. ``--quick`` repeats less and leaves p = 400 against the reference out.
"""

import argparse

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.covariance import graphical_lasso

from subspan.structure import JICHD, joint_subspace, make_common_hub_ggm
from subspan.structure.hubs.minimax import fantope_shares
from timing import interleaved, median_ratio, report


def correlations(p: int) -> tuple[np.ndarray, int]:
    """K = 3, n = p in the paper's design, and s = floor(sqrt p)."""
    data = make_common_hub_ggm(p, p, random_state=0)
    return np.array([np.corrcoef(x.T) for x in data.X]), int(p**0.5)


def reference(S: np.ndarray, s: int, starts: int, seed: int = 0) -> float:
    """The authors' Riemannian subgradient method in plain numpy: 500 steps of 0.1 / log(t + 2), best final value."""
    rng = np.random.default_rng(seed)
    finals = []
    for _ in range(starts):
        V, _ = np.linalg.qr(rng.normal(size=(S.shape[1], s)))
        for t in range(2, 501):
            k = int(np.argmax([np.trace(V.T @ m @ V) for m in S]))
            u = 2 * S[k] @ V
            u -= V @ (V.T @ u + u.T @ V) / 2
            left, _, right = np.linalg.svd(V - 0.1 / np.log(t + 2) * u, full_matrices=False)
            V = left @ right
        finals.append(max(np.trace(V.T @ m @ V) for m in S))
    return min(finals)


def slsqp_calls(S: np.ndarray, s: int) -> int:
    """Eigendecompositions that scipy's SLSQP needs on the same smoothed dual, as the plain way to solve it."""
    calls = 0

    def negative(w: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal calls
        calls += 1
        e, u = np.linalg.eigh(np.tensordot(w, S, 1))
        g = fantope_shares(torch.from_numpy(e), s, 1e-3).numpy()
        a = u[:, g > 0]
        gradient = np.array([((m @ a) * a).sum(0) @ g[g > 0] for m in S])
        return -(w @ gradient + 5e-4 * (g**2).sum()), -gradient

    K = len(S)
    simplex = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(K)}
    start, options = np.full(K, 1 / K), {"ftol": 1e-12}
    minimize(negative, start, jac=True, method="SLSQP", bounds=[(0, 1)] * K, constraints=[simplex], options=options)
    return calls


def against_the_reference(p: int, starts: int, repeats: int) -> None:
    S, s = correlations(p)
    matrices = torch.from_numpy(S)
    found = joint_subspace(matrices, s)
    runs = {"ours": lambda: joint_subspace(matrices, s), "reference": lambda: reference(S, s, starts)}
    times = interleaved(runs, repeats)
    # the reference's time grows with its starts; it is scaled to the authors' ten
    report(
        f"solve_p{p}", median_ratio(times, "reference", "ours") * 10 / starts, 10.0, "higher", "subgradient, 10 starts"
    )
    report(f"objective_p{p}", found.primal / reference(S, s, starts), 1.0, "lower", f"subgradient, {starts} starts")
    report(f"gap_p{p}", found.gap / (1 + found.primal) / 1e-5, 1.0, "lower", "1e-5 (1 + objective)")
    report(f"eigh_calls_p{p}", found.eigh_calls / 25, 1.0, "lower", "25 calls", calls=found.eigh_calls)
    report(f"slsqp_calls_p{p}", slsqp_calls(S, s) / found.eigh_calls, 1.0, "higher", "SLSQP on the same dual")


def against_one_eigh(p: int, bar: float, repeats: int) -> None:
    data = make_common_hub_ggm(p, p, random_state=0)
    S, _ = correlations(p)
    times = interleaved({"fit": lambda: JICHD().fit(data.X), "eigh": lambda: np.linalg.eigh(S[0])}, repeats)
    report(f"fit_p{p}", median_ratio(times, "fit", "eigh"), bar, "lower", "numpy.linalg.eigh")


def against_graphical_lassos(repeats: int) -> None:
    data = make_common_hub_ggm(100, 100, random_state=0)
    S, _ = correlations(100)
    runs = {
        "fit": lambda: JICHD().fit(data.X),
        "lasso": lambda: [graphical_lasso(m, alpha=0.1) for m in S],
    }
    times = interleaved(runs, repeats)
    report("fit_p100_vs_glasso", median_ratio(times, "lasso", "fit"), 10.0, "higher", "3 graphical_lasso, alpha 0.1")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 50 s on two cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    against_one_eigh(100, 40.0, 15 if quick else 41)
    against_one_eigh(400, 25.0, 5 if quick else 15)
    against_graphical_lassos(3 if quick else 7)
    against_the_reference(100, 2 if quick else 10, 2 if quick else 5)
    against_the_reference(200, 1 if quick else 10, 1 if quick else 3)
    if not quick:
        against_the_reference(400, 2, 3)
