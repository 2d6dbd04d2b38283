"""Hub detectors as scikit-learn estimators: joint (JIC-HD), pooled, and one population at a time (IPC-HD)."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from sklearn.base import BaseEstimator, clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from subspan.linalg import SVD, fix_signs
from subspan.structure.hubs.minimax import JointSubspace, NotIdentified, bottom_subspace, joint_subspace
from subspan.structure.hubs.rules import find_hubs, number_of_components
from subspan.structure.hubs.samples import (
    Populations,
    aligned,
    check_covariance,
    check_populations,
    covariance,
    screened,
    thresholded,
    warn_if_covariance,
)
from subspan.structure.hubs.stiefel import random_starts, subgradient_descent, traces

_CHECKS: dict[str, Any] = {"dtype": np.float64, "ensure_min_samples": 2}


class HubDetector(BaseEstimator, ABC):
    """What the detectors share: from data to matrices, and from a subspace to hubs. Not used by itself.

    A variable's influence is the diagonal of a matrix M with 0 <= M <= I and trace s: its squared loading on the s
    directions of smallest variance. Small variance means large conditional dependence, and hubs carry most of that.

    Args:
        n_components: s. A number, "sqrt/2", "sqrt" or "1.5sqrt" (of the number p of variables), "ratio" (where the
            inverse eigenvalues drop most, else "sqrt") or "ratio/5" (else p/5). Too many is safer than too few, except
            for ``JICHD`` where some populations share hubs that others lack.
        correlation: work on correlations; False keeps variances, which changes who is a hub.
        nonparanormal: replace each column by the normal scores of its ranks.
        threshold: zero the off-diagonal entries below this quantile of their magnitudes (the authors use 0.7). What
            becomes indefinite stays so: a ridge common to all would change nothing, one for each population alone would
            let the most indefinite one decide.
        screen: keep the min(p, 3n/4) variables with the largest correlation to another, in any ("union") or every
            ("intersection") population; the others get influence 0.
        shrinkage: "ledoit_wolf" or "oas".
        rule: "2sd": influence above its mean plus ``c`` standard deviations; "top": the ``n_hubs`` largest; "gap":
            above the largest drop.
        c: see ``rule``.
        n_hubs: see ``rule``.
        device: where to decompose matrices; it must know float64.

    Attributes:
        influence_: (p,) in [0, 1], with sum s.
        hubs_: indices, by falling influence. ``hub_names_`` are their column names.
        threshold_: the influence that hubs had to exceed ("2sd") or reach.
        components_: (s, p) orthonormal directions, by rising variance in S(w). Where the data leave a common null space
            of dimension m > s, all m of it: no s of them are better than others.
        shares_: eigenvalues of M, ``eigenvectors_`` its eigenvectors as rows.
        weights_: (K,) weight of each population in S(w).
        populations_: their names, in that order. ``n_samples_`` their sizes, where known.
        objective_, dual_bound_, gap_: what was reached, and that no subspace can reach less than the bound.
        components_objective_: max_k tr(V S_k Vᵀ) of ``components_``; more than ``objective_`` where M is no projector.
        n_components_: s.
        n_iter_: eigendecompositions (or steps, for solver "subgradient").
    """

    def __init__(
        self,
        n_components: int | str = "ratio",
        *,
        correlation: bool = True,
        nonparanormal: bool = False,
        threshold: float | None = None,
        screen: str | None = None,
        shrinkage: str | None = None,
        rule: str = "2sd",
        c: float = 2.0,
        n_hubs: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.n_components = n_components
        self.correlation = correlation
        self.nonparanormal = nonparanormal
        self.threshold = threshold
        self.screen = screen
        self.shrinkage = shrinkage
        self.rule = rule
        self.c = c
        self.n_hubs = n_hubs
        self.device = device

    def fit(self, X: Any, y: Any = None, *, groups: Any = None) -> "HubDetector":
        """Find the hubs.

        Args:
            X: samples (n, p), with ``groups`` naming the population of each row (one population without it); or a list
                of K arrays or data frames, one for each population, data frames matched by column name.
            y: ignored; present for scikit-learn's interface. Populations are given by ``groups=``.
            groups: n labels.

        Raises:
            ValueError: NaN or infinite entries, a constant variable, fewer than two samples in a population,
                populations with different variables, or more components than variables.
        """
        data = self._populations(X, groups)
        matrices = [
            covariance(x, correlation=self.correlation, nonparanormal=self.nonparanormal, shrinkage=self.shrinkage)
            for x in data.samples
        ]
        return self._fit(matrices, data.sizes, data.names)

    def fit_covariances(
        self, matrices: Sequence[np.ndarray], n_samples: Sequence[int] | None = None, names: Sequence[Any] | None = None
    ) -> "HubDetector":
        """Find the hubs from K covariance or correlation matrices (p, p), which are used as they are.

        ``nonparanormal``, ``correlation`` and ``shrinkage`` need the data and are not applied; ``screen`` needs
        ``n_samples``.

        Raises:
            ValueError: matrices that are not square, symmetric, finite, of one size and positive semidefinite.
        """
        names = list(range(len(matrices))) if names is None else list(names)
        for title, given in (("names", names), ("n_samples", n_samples)):
            if given is not None and len(given) != len(matrices):
                raise ValueError(f"{title} has {len(given)} entries for {len(matrices)} matrices")
        checked = [check_covariance(s, name) for s, name in zip(matrices, names, strict=True)]
        if not checked:
            raise ValueError("no population was given")
        if len({len(s) for s in checked}) > 1:
            raise ValueError(f"the matrices have different sizes: {', '.join(str(len(s)) for s in checked)}")
        if self.screen and n_samples is None:
            raise ValueError("screen= depends on the sample sizes; give n_samples=")
        self.n_features_in_ = len(checked[0])
        return self._fit(checked, None if n_samples is None else list(n_samples), names)

    def stability(
        self,
        X: Any,
        groups: Any = None,
        *,
        n_splits: int = 50,
        fraction: float = 0.5,
        random_state: Any = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Float64[np.ndarray, " p"]:
        """How often each variable is a hub when each population is subsampled without replacement.

        A variable that a subsample leaves constant is not selected there; a warning counts such subsamples.

        Args:
            X: as for ``fit``; the fitted estimator keeps no data.
            groups: as for ``fit``.
            n_splits: subsamples.
            fraction: share of each population to draw.
            random_state: seed or ``RandomState``.
            progress: called with (done, total) after each.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
        if n_splits < 1:
            raise ValueError(f"n_splits must be at least 1, got {n_splits}")
        rng = check_random_state(random_state)
        data = clone(self)._populations(X, groups)
        counts = np.zeros(data.samples[0].shape[1])
        unclear = lacking = 0
        for split in range(n_splits):
            part = [x[rng.permutation(len(x))[: max(2, round(fraction * len(x)))]] for x in data.samples]
            varied = np.flatnonzero(np.all([(x != x[0]).any(axis=0) for x in part], axis=0))
            lacking += len(varied) < len(counts)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if len(varied):
                    counts[varied[clone(self).fit([x[:, varied] for x in part]).hubs_]] += 1
            unclear += any(issubclass(w.category, NotIdentified) for w in caught)
            if progress is not None:
                progress(split + 1, n_splits)
        if lacking:
            said = f"{lacking} of {n_splits} subsamples left a variable constant, which counts as not selected there"
            warnings.warn(said, UserWarning, stacklevel=2)
        if unclear:
            warnings.warn(f"{unclear} of {n_splits} subsamples left a common null space", NotIdentified, stacklevel=2)
        return counts / n_splits

    @property
    def projector_(self) -> Float64[np.ndarray, "p p"]:
        """M, formed when asked for."""
        check_is_fitted(self, "shares_")
        return (self.eigenvectors_.T * self.shares_) @ self.eigenvectors_

    # ------------------------------------------------------------------------------------------------------- inside

    @abstractmethod
    def _solve(self, S: Tensor, s: int, sizes: list[int] | None) -> JointSubspace:
        """The subspace of s directions for the K matrices S (K, p, p)."""

    def _checked(self, X: Any) -> np.ndarray:
        return validate_data(self, X, **_CHECKS)  # pyright: ignore[reportReturnType]

    def _populations(self, X: Any, groups: Any) -> Populations:
        data = check_populations(*self._split(X, groups))
        for x, name in zip(data.samples, data.names, strict=True):
            warn_if_covariance(x, name)
        return data

    def _split(self, X: Any, groups: Any) -> tuple[list[np.ndarray], list[Any], list[str] | None]:
        """The samples of each population, the populations' names and the variables' names, if they have any."""
        if isinstance(X, list | tuple) and (len(X) == 0 or np.ndim(X[0]) == 2):
            if not X:
                raise ValueError("no population was given: X is an empty list")
            if groups is not None:
                raise ValueError("X is a list of populations already; groups= is for one array of all rows")
            frames, features = aligned(X)
            first = self._checked(frames[0])
            samples = [first]
            for k, x in enumerate(frames[1:], 1):
                samples.append(check_array(x, input_name=f"population {k}", **_CHECKS))
                if samples[-1].shape[1] != first.shape[1]:
                    raise ValueError(
                        f"population {k} has {samples[-1].shape[1]} variables and population 0 has {first.shape[1]}"
                    )
            return samples, list(range(len(samples))), features
        x = self._checked(X)
        features = [*map(str, self.feature_names_in_)] if hasattr(self, "feature_names_in_") else None
        if groups is None:
            return [x], ["all"], features
        labels = np.asarray(groups)
        if labels.shape != (len(x),):
            raise ValueError(f"groups has shape {labels.shape} for {len(x)} rows of X")
        names = list(dict.fromkeys(labels.tolist()))
        return [x[labels == name] for name in names], names, features

    def _fit(self, matrices: list[np.ndarray], sizes: list[int] | None, names: list[Any]) -> "HubDetector":
        p = len(matrices[0])
        keep = screened(matrices, sizes, self.screen) if self.screen and sizes else np.ones(p, dtype=bool)
        kept = np.flatnonzero(keep)
        matrices = [s[np.ix_(kept, kept)] for s in matrices]
        if self.threshold is not None:
            matrices = [thresholded(s, self.threshold) for s in matrices]
        ratio = isinstance(self.n_components, str) and self.n_components.startswith("ratio")
        spectrum = np.linalg.eigvalsh(np.mean(matrices, axis=0)) if ratio else None
        s = number_of_components(self.n_components, len(kept), spectrum)
        S = torch.from_numpy(np.stack(matrices)).to(self.device)
        found = self._solve(S, s, sizes)

        basis = fix_signs(SVD(found.basis, found.shares, found.basis)).U
        self.eigenvectors_ = np.zeros((len(found.shares), p))
        self.eigenvectors_[:, kept] = basis.mT.cpu().numpy()
        self.shares_ = found.shares.cpu().numpy()
        self.components_ = self.eigenvectors_[: found.null_dim or s]
        self.influence_ = np.clip(self.shares_ @ self.eigenvectors_**2, 0.0, 1.0)  # rounding may leave 1 + 1e-16
        self.components_objective_ = found.primal if found.null_dim else float(traces(S, basis[:, :s]).max())
        self.hubs_, self.threshold_ = find_hubs(self.influence_, rule=self.rule, c=self.c, n_hubs=self.n_hubs)
        self.hub_names_ = self._names()[self.hubs_]
        self.weights_ = found.weights
        self.populations_ = names
        self.n_samples_ = sizes
        self.objective_, self.dual_bound_, self.gap_ = found.primal, found.dual, found.gap
        self.n_components_ = s
        self.n_iter_ = found.eigh_calls
        return self

    def _names(self) -> np.ndarray:
        """Column names, or x0, x1, ... as scikit-learn writes them."""
        if hasattr(self, "feature_names_in_"):
            return np.asarray(self.feature_names_in_, dtype=object)
        return np.asarray([f"x{i}" for i in range(self.n_features_in_)], dtype=object)


class JICHD(HubDetector):
    """Hubs common to several populations: the joint minimax eigenspace (JIC-HD, Sánchez Gómez et al., ICML 2026).

    Finds M with the smallest max_k <S_k, M> among 0 <= M <= I, tr M = s. One population gives IPC-HD.

    Args:
        solver: "exact" (convex, deterministic, with a certificate), "stiefel" (the same, polished into one subspace
            where M is fractional), or "subgradient" (the authors': 10 random starts of 500 steps, for reproduction).
        mu: regularisation of the exact solver, see ``joint_subspace``.
        tol: gap at which it stops lowering ``mu``.
        random_state: for the starts of "subgradient".

    The other parameters are those of ``HubDetector``.

    Attributes:
        objective_path_: f at each step of the best start (solver "subgradient" only).
    """

    def __init__(
        self,
        n_components: int | str = "sqrt",
        *,
        solver: str = "exact",
        correlation: bool = True,
        nonparanormal: bool = False,
        threshold: float | None = None,
        screen: str | None = None,
        shrinkage: str | None = None,
        rule: str = "2sd",
        c: float = 2.0,
        n_hubs: int | None = None,
        mu: float = 1e-3,
        tol: float = 1e-6,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        super().__init__(
            n_components,
            correlation=correlation,
            nonparanormal=nonparanormal,
            threshold=threshold,
            screen=screen,
            shrinkage=shrinkage,
            rule=rule,
            c=c,
            n_hubs=n_hubs,
            device=device,
        )
        self.solver = solver
        self.mu = mu
        self.tol = tol
        self.random_state = random_state

    def _solve(self, S: Tensor, s: int, sizes: list[int] | None) -> JointSubspace:
        if self.solver not in ("exact", "stiefel", "subgradient"):
            raise ValueError(f"solver must be 'exact', 'stiefel' or 'subgradient', got {self.solver!r}")
        if self.solver == "subgradient":
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
            run = random_starts(S, s, starts=10, generator=torch.Generator().manual_seed(seed))
            self.objective_path_ = np.array(run.values)
            return _subspace(S, run.V, run.lead.cpu().numpy(), run.value, steps=len(run.values))
        found = bottom_subspace(S[0], s) if len(S) == 1 else joint_subspace(S, s, mu=self.mu, tol=self.tol)
        if self.solver == "stiefel" and len(S) > 1 and not found.null_dim:
            run = subgradient_descent(S, found.basis[:, :s], bound=found.dual)
            found = _subspace(S, run.V, found.weights, run.value, steps=found.eigh_calls)
        return found

    def _fit(self, matrices: list[np.ndarray], sizes: list[int] | None, names: list[Any]) -> "HubDetector":
        super()._fit(matrices, sizes, names)
        for name, n, weight in zip(names, sizes or (), self.weights_, strict=bool(sizes)):
            if n < self.n_features_in_ and weight < 0.25 / len(names):
                warnings.warn(
                    f"population {name} has weight {weight:.3f} and only {n} samples for {self.n_features_in_} "
                    "variables: so few make small eigenvalues by themselves, and it has hardly been heard. Use "
                    "shrinkage=, or equal sample sizes",
                    UserWarning,
                    stacklevel=3,
                )
        return self


def _subspace(S: Tensor, V: Tensor, w: np.ndarray, value: float, steps: int) -> JointSubspace:
    """The projector on span V, rotated so that Vᵀ S(w) V is diagonal and ascending; certified by w."""
    mean = torch.tensordot(torch.as_tensor(w).to(S), S, 1)
    _, rotation = torch.linalg.eigh(V.mT @ mean @ V)
    dual = float(torch.linalg.eigvalsh(mean)[: V.shape[1]].sum())
    return JointSubspace(V @ rotation, torch.ones_like(V[0]), w, value, dual, steps)


class PooledHD(HubDetector):
    """Hubs of a fixed mean of the populations' matrices: the plainest competitor of ``JICHD``, and often as good.

    ``weighting``: "equal" (w_k = 1/K) or "n_samples" (w_k = n_k / n). ``objective_`` is <S(w), M>. The other parameters
    are those of ``HubDetector``.
    """

    def __init__(
        self,
        n_components: int | str = "sqrt",
        *,
        weighting: str = "equal",
        correlation: bool = True,
        nonparanormal: bool = False,
        threshold: float | None = None,
        screen: str | None = None,
        shrinkage: str | None = None,
        rule: str = "2sd",
        c: float = 2.0,
        n_hubs: int | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(
            n_components,
            correlation=correlation,
            nonparanormal=nonparanormal,
            threshold=threshold,
            screen=screen,
            shrinkage=shrinkage,
            rule=rule,
            c=c,
            n_hubs=n_hubs,
            device=device,
        )
        self.weighting = weighting

    def _solve(self, S: Tensor, s: int, sizes: list[int] | None) -> JointSubspace:
        if self.weighting == "equal":
            w = np.full(len(S), 1 / len(S))
        elif self.weighting == "n_samples":
            if sizes is None:
                raise ValueError("weighting='n_samples' needs n_samples=")
            w = np.asarray(sizes) / np.sum(sizes)
        else:
            raise ValueError(f"weighting must be 'equal' or 'n_samples', got {self.weighting!r}")
        found = bottom_subspace(torch.tensordot(torch.as_tensor(w).to(S), S, 1), s)
        return JointSubspace(found.basis, found.shares, w, found.primal, found.dual, found.eigh_calls, found.null_dim)


class IPCHD(HubDetector):
    """Hubs of one population: the bottom eigenspace of its correlation (IPC-HD; Sánchez Gómez et al., JASA 2025).

    For each of several populations use ``fit_populations``. The parameters are those of ``HubDetector``.
    """

    def _solve(self, S: Tensor, s: int, sizes: list[int] | None) -> JointSubspace:
        if len(S) > 1:
            raise ValueError(
                f"IPCHD looks at one population and got {len(S)}; use JICHD, or fit_populations(IPCHD(), ...)"
            )
        return bottom_subspace(S[0], s)


def fit_populations(estimator: HubDetector, X: Any, groups: Any = None) -> dict[Any, HubDetector]:
    """A fitted copy of ``estimator`` for each population alone, by its name; ``X`` and ``groups`` as for ``fit``."""
    data = clone(estimator)._populations(X, groups)
    fits = {}
    for name, x in zip(data.names, data.samples, strict=True):
        fits[name] = clone(estimator).fit(x)
        if data.features is not None:
            fits[name].feature_names_in_ = np.asarray(data.features, dtype=object)
            fits[name].hub_names_ = fits[name]._names()[fits[name].hubs_]
    return fits


def intersect_hubs(fits: Iterable[HubDetector]) -> Int64[np.ndarray, " h"]:
    """Variables that are hubs in every fit, ascending: the paper's baseline for common hubs."""
    sets = [set(fit.hubs_.tolist()) for fit in fits]
    if not sets:
        raise ValueError("there is no fit to intersect")
    return np.array(sorted(set.intersection(*sets)), dtype=np.int64)


def individual_hubs(fits: Mapping[Any, HubDetector], common: Sequence[int] | np.ndarray) -> dict[Any, np.ndarray]:
    """For each population the hubs of its own fit that are not ``common``, by falling influence."""
    return {name: fit.hubs_[~np.isin(fit.hubs_, common)] for name, fit in fits.items()}
