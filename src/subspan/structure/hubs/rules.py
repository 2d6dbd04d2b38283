"""How many directions, and which variables are hubs (numpy)."""

import numpy as np
from jaxtyping import Float64, Int64

_MULTIPLES = {"sqrt/2": 0.5, "sqrt": 1.0, "1.5sqrt": 1.5}


def number_of_components(choice: int | str, p: int, eigenvalues: Float64[np.ndarray, " p"] | None = None) -> int:
    """The s that ``choice`` means for p variables.

    A number; "sqrt/2", "sqrt" or "1.5sqrt" (floor of that multiple of the root of p, at least 1); or "ratio" and
    "ratio/5", which read the ``eigenvalues`` (ascending) by ``ratio_rule`` and fall back on floor(sqrt p) and
    floor(p/5).
    """
    if isinstance(choice, str):
        if choice in _MULTIPLES:
            return max(1, int(_MULTIPLES[choice] * np.sqrt(p)))
        if choice in ("ratio", "ratio/5"):
            assert eigenvalues is not None
            fallback = int(np.sqrt(p)) if choice == "ratio" else p // 5
            return ratio_rule(eigenvalues) or max(1, fallback)
    elif isinstance(choice, int | np.integer) and not isinstance(choice, bool):
        if not 1 <= choice <= p:
            raise ValueError(f"n_components must lie between 1 and the number of variables, {p}; got {choice}")
        return int(choice)
    known = ", ".join(repr(name) for name in (*_MULTIPLES, "ratio", "ratio/5"))
    raise ValueError(f"n_components must be an integer or one of {known}; got {choice!r}")


def ratio_rule(eigenvalues: Float64[np.ndarray, " p"], clear: float = 1.5) -> int | None:
    """Where the inverse eigenvalues drop most: the index of the largest ratio of consecutive ones, or None if unclear.

    Among the first floor(p/2) - 1 ratios (1/e_i) / (1/e_{i+1}) of ascending e, the largest must exceed ``clear`` times
    the second largest. Negative eigenvalues are first lifted by -2 e_min (IPC-HD; arXiv 2505.23707). A singular matrix
    has no clear drop.
    """
    e = eigenvalues + max(0.0, -2 * float(eigenvalues[0]))
    count = len(e) // 2 - 1
    # nothing to compare, or a singular matrix, whose first ratios are rounding (of either sign, so positive by now)
    if count < 2 or e[0] <= 1e-10 * np.abs(eigenvalues).mean():
        return None
    ratios = e[1 : count + 1] / e[:count]
    second, first = np.sort(ratios)[-2:]
    return int(ratios.argmax()) + 1 if first > clear * second else None


def find_hubs(
    influence: Float64[np.ndarray, " p"], *, rule: str = "2sd", c: float = 2.0, n_hubs: int | None = None
) -> tuple[Int64[np.ndarray, " h"], float]:
    """Indices of the hubs, by falling influence (ties by index), and the influence they had to exceed or reach.

    "2sd": above the mean plus ``c`` standard deviations (divisor p - 1). "top": the ``n_hubs`` largest. "gap": all
    above the largest ratio between consecutive sorted influences among the upper half. Equal influences give no hub,
    except by "top".
    """
    p = len(influence)
    if not np.isfinite(c):
        raise ValueError(f"c must be a finite number of standard deviations, got {c}")
    order = np.argsort(-influence, kind="stable")
    if rule == "2sd":
        sd = float(np.std(influence, ddof=1)) if p > 1 else 0.0
        # the mean is s/p; a spread that is only rounding is no spread
        bound = float(influence.mean()) + (c * sd if sd > 1e-9 else np.inf)
        return order[: int((influence > bound).sum())], bound
    if rule == "top":
        if n_hubs is None or not 1 <= n_hubs <= p:
            raise ValueError(f"rule='top' needs n_hubs between 1 and the number of variables, {p}; got {n_hubs}")
        return order[:n_hubs], float(influence[order[n_hubs - 1]])
    if rule == "gap":
        ranked = np.maximum(influence[order], 1e-12)  # variables that were screened out have none
        ratios = ranked[: max(1, p // 2)] / ranked[1 : max(1, p // 2) + 1] if p > 1 else np.ones(1)
        count = int(ratios.argmax()) + 1 if ratios.max() > 1 + 1e-9 else 0
        return order[:count], float(ranked[count - 1]) if count else np.inf
    raise ValueError(f"rule must be '2sd', 'top' or 'gap', got {rule!r}")
