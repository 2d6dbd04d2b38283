"""From data of several populations to their correlation matrices: checks, transforms and regularisation (numpy)."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64


@dataclass(frozen=True)
class Populations:
    """Data of K populations on the same p variables: arrays of n_k x p, their names, and the names of the variables."""

    samples: list[np.ndarray]
    names: list[Any]
    features: list[str] | None

    @property
    def sizes(self) -> list[int]:
        return [len(x) for x in self.samples]


def check_populations(samples: Sequence[np.ndarray], names: Sequence[Any], features: list[str] | None) -> Populations:
    """Float64 copies that can be correlated.

    Raises:
        ValueError: fewer than two samples in a population, or a constant variable; the message names both.
    """
    label = features or [str(i) for i in range(samples[0].shape[1])]
    for x, name in zip(samples, names, strict=True):
        if len(x) < 2:
            raise ValueError(f"population {name} has 1 sample; a correlation needs at least 2")
        constant = np.flatnonzero((x == x[0]).all(axis=0))
        if len(constant):
            shown = ", ".join(label[i] for i in constant[:5]) + (", ..." if len(constant) > 5 else "")
            raise ValueError(f"constant in population {name}: {shown}; leave such variables out")
    return Populations([np.asarray(x, dtype=np.float64) for x in samples], list(names), features)


def aligned(frames: Sequence[Any]) -> tuple[list[Any], list[str] | None]:
    """The populations with equal columns in the order of the first; and their names, where all are data frames.

    Raises:
        ValueError: different or repeated columns, or data frames mixed with arrays.
    """
    if not any(hasattr(x, "columns") for x in frames):
        return list(frames), None
    if not all(hasattr(x, "columns") for x in frames):
        raise ValueError("some populations are data frames and some are arrays; give all as one kind")
    names = [[*map(str, x.columns)] for x in frames]
    first, ordered = names[0], []
    for k, (x, these) in enumerate(zip(frames, names, strict=True)):
        place = dict(zip(these, x.columns, strict=True))
        if len(place) < len(these):
            repeated = [name for name, count in Counter(these).items() if count > 1]
            raise ValueError(f"population {k} has several columns of one name: {', '.join(repeated[:5])}")
        if odd := sorted(set(first) ^ set(these)):
            raise ValueError(f"population {k} and population 0 have different columns: {', '.join(odd[:5])}")
        ordered.append(x[[place[name] for name in first]])
    return ordered, first


def normal_scores(x: Float64[np.ndarray, "n p"]) -> Float64[np.ndarray, "n p"]:
    """Phi^-1(rank / (n + 1)) of every column, ties sharing their mean rank (nonparanormal; Liu et al. 2009)."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    return ndtri(rankdata(x, axis=0) / (len(x) + 1))


def covariance(
    x: Float64[np.ndarray, "n p"],
    *,
    correlation: bool = True,
    nonparanormal: bool = False,
    shrinkage: str | None = None,
) -> Float64[np.ndarray, "p p"]:
    """Sample correlation (default) or covariance (divisor n) of the columns, shrunk to a multiple of I if asked.

    Raises:
        ValueError: an unknown shrinkage, or variances that are too large or too small for float64.
    """
    if nonparanormal:
        x = normal_scores(x)
    if correlation:
        x = np.ldexp(x, -np.frexp(np.abs(x).max(0))[1])  # to at most 1, exactly: squares neither over- nor underflow
    with np.errstate(over="ignore"):  # of what is then refused
        x = x - x.mean(0)
        variances = np.mean(x**2, axis=0)
    if not ((variances > 0) & np.isfinite(variances)).all():
        raise ValueError("variances over- or underflow float64: choose another unit, or correlation=True")
    if correlation:
        x /= np.sqrt(variances)
    if shrinkage is None:
        s = x.T @ x / len(x)
        if correlation:
            np.fill_diagonal(s, 1.0)
        return s
    from sklearn.covariance import ledoit_wolf, oas

    estimators = {"ledoit_wolf": ledoit_wolf, "oas": oas}
    if shrinkage not in estimators:
        raise ValueError(f"shrinkage must be None, 'ledoit_wolf' or 'oas', got {shrinkage!r}")
    return estimators[shrinkage](x, assume_centered=True)[0]


def check_covariance(s: np.ndarray, name: Any) -> Float64[np.ndarray, "p p"]:
    """A symmetric float64 copy.

    Raises:
        ValueError: not square, not finite, not symmetric, or an eigenvalue below -1e-8 of the largest.
    """
    s = np.array(s, dtype=np.float64)
    if s.ndim != 2 or s.shape[0] != s.shape[1]:
        raise ValueError(f"the matrix of population {name} has shape {s.shape}; it must be square")
    if not np.isfinite(s).all():
        raise ValueError(f"the matrix of population {name} holds NaN or infinite entries")
    if not np.allclose(s, s.T, rtol=1e-8, atol=1e-10 * np.abs(s).max()):
        raise ValueError(f"the matrix of population {name} is not symmetric")
    s = (s + s.T) / 2
    try:  # a third of the price of its eigenvalues, and enough for most
        np.linalg.cholesky(s + 1e-8 * np.abs(np.diag(s)).max() * np.eye(len(s)))
    except np.linalg.LinAlgError:
        eigenvalues = np.linalg.eigvalsh(s)
        if eigenvalues[0] < -1e-8 * eigenvalues[-1]:
            raise ValueError(
                f"the matrix of population {name} has the eigenvalue {eigenvalues[0]:.3g}: it is no covariance; to "
                "remove small correlations give threshold="
            ) from None
    return s


def thresholded(s: Float64[np.ndarray, "p p"], quantile: float) -> Float64[np.ndarray, "p p"]:
    """Off-diagonal entries smaller in magnitude than their ``quantile`` set to zero. The result may be indefinite."""
    if not 0 <= quantile < 1:
        raise ValueError(f"threshold is a quantile in [0, 1), got {quantile}")
    if len(s) < 2:
        return s
    size = np.abs(s)
    cut = np.quantile(size[~np.eye(len(s), dtype=bool)], quantile)
    return np.where((size >= cut) | np.eye(len(s), dtype=bool), s, 0.0)


def screened(matrices: Sequence[np.ndarray], sizes: Sequence[int], rule: str) -> Bool[np.ndarray, " p"]:
    """Variables to keep: in each population the min(p, floor(3n/4)) with the largest absolute correlation to another.

    One set for all: their union or their intersection.
    """
    if rule not in ("union", "intersection"):
        raise ValueError(f"screen must be None, 'union' or 'intersection', got {rule!r}")
    kept = []
    for s, n in zip(matrices, sizes, strict=True):
        p = len(s)
        scale = np.sqrt(np.diag(s))
        strength = np.abs(s) / np.outer(scale, scale)
        np.fill_diagonal(strength, 0.0)
        # stable: the first of equal ones
        order = np.argsort(-strength.max(0), kind="stable")[: max(1, min(p, 3 * n // 4))]
        kept.append(np.isin(np.arange(p), order))
    keep = np.any(kept, axis=0) if rule == "union" else np.all(kept, axis=0)
    if not keep.any():
        raise ValueError("no variable passes the screen in every population; use screen='union'")
    return keep


def warn_if_covariance(x: np.ndarray, name: Any) -> None:
    """Warn when a population's data look like a correlation matrix."""
    if x.shape[0] == x.shape[1] > 2 and np.allclose(np.diag(x), 1) and np.allclose(x, x.T):
        warnings.warn(
            f"population {name} is square and symmetric with ones on its diagonal: correlation matrices go to "
            "fit_covariances",
            UserWarning,
            stacklevel=4,
        )
