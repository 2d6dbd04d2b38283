"""FacRNN: the scikit-learn estimator around the network."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from subspan.errors import ConfigError
from subspan.models.facrnn.alignment import AlignmentReport, align_groups
from subspan.models.facrnn.network import LowRankRNN, predictive_log_likelihood, scott_std
from subspan.models.facrnn.penalty import Dependence, dependence, resolve_groups
from subspan.models.facrnn.series import Trials, convolve, lag_index, to_trials
from subspan.models.facrnn.training import TERMS, Rows, Schedule, Training, stack, unstack


class Series(NamedTuple):
    """Checked data: the trials, all their rows, inputs, masked entries, and the rows that count."""

    trials: Trials
    x: Float[np.ndarray, "n N"]
    eta: Float[np.ndarray, "n N"] | None
    masked: Any
    kept: Any

    def values(self) -> Float[np.ndarray, "n N"]:
        """x with harmless zeros where it is masked."""
        return self.x if self.masked is None else np.where(self.masked, 0.0, self.x)


class Identifiability(NamedTuple):
    """What a fit can be trusted with: dependence between its groups, and agreement of the restarts.

    Attributes:
        dependence: PC, its null, their difference, and TC.
        agreement: mean R^2 of each restart's groups (rows) on every other's (columns), up to what is not identified.
        subspace_agreement: the same without groups, K coordinates on K: what remains when only the split is arbitrary.
    """

    dependence: Dependence
    agreement: Float[np.ndarray, "R R"]
    subspace_agreement: Float[np.ndarray, "R R"]


class FacRNN(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Latent trajectories in independent groups, and the low-rank connectivity that splits with them.

    X is (T, N), (trials, T, N), a list of (T_i, N), or rows with ``trial_lengths=``; histories never cross trials.
    ``groups=1`` is the ordinary low-rank RNN, ``groups=n_components`` the fully factorised model, ``alpha > 0`` with
    ``beta=0`` the block-diagonal baseline (bdRNN).

    Args:
        n_components: K, the rank of W.
        groups: number, sizes ([3, 3]) or members ([[0, 1], [2, 3, 4, 5]]) of the groups.
        beta: weight of the partial correlation between groups.
        alpha: weight of the entries of J = B A outside the groups' blocks.
        block_recurrence: make those entries zero by construction (two-step bdRNN: B = J A⁺).
        lags: L, bins of history.
        kernel: "exp", "uniform" or L weights, the most recent bin's first. ``learn_kernel`` starts from there.
        pad: bins before a trial are silent ("zero"), like its first bin ("edge"), or its first L bins do not count
            ("drop").
        nonlinearity: sigma of the history, "tanh" or "identity". ``sqrt_counts`` takes square roots first.
        likelihood: "gaussian" or "poisson" (counts).
        link: "identity" or "relu" (rates) for gaussian; "softplus" or "exp" for poisson.
        hidden: width of a hidden layer in encoder and decoder; then there is no connectivity.
        encoder_std: "scott" (n_ref^(-1 / (K + 4))), a number, or "learned" (one for each coordinate, from there).
        n_ref: of Scott's rule; the number of bins that count by default.
        min_std: floor of a channel's deviation (gaussian), in the units of X.
        epochs: passes over the bins.
        batch_size: bins a step, of any trials.
        lr: of AdamW.
        weight_decay: of AdamW.
        warmup: epochs over which beta rises from 0.
        n_restarts: networks trained at once from different starts; the one with the smallest training loss is kept.
        checkpoint: a file, written every 100 epochs and at the end, from which a fit goes on where it exists.
        device: where to train.
        random_state: of starts, batches and noise.

    Attributes:
        components_: A, (N, K). connectivity_: W, (N, N). sub_connectivities_: (G, N, N). (Without ``hidden``.)
        groups_: the partition.
        network_: the ``LowRankRNN``. restarts_: all of them, by rising training loss.
        loss_curve_: mean loss of each epoch. loss_terms_: its parts by name.
        restart_losses_: what restarts were ranked by, the mean over the last twentieth of the epochs.
        encoder_std_: (K,).

    Source: Li et al., A Factorized Low-Rank RNN Framework, ICML 2026, arXiv 2511.13899.
    """

    def __init__(
        self,
        n_components: int = 6,
        groups: Any = 2,
        beta: float = 20.0,
        alpha: float = 0.0,
        block_recurrence: bool = False,
        lags: int = 1,
        kernel: Any = "exp",
        learn_kernel: bool = False,
        pad: str = "zero",
        nonlinearity: str = "tanh",
        sqrt_counts: bool = False,
        likelihood: str = "gaussian",
        link: str | None = None,
        hidden: int | None = None,
        encoder_std: Any = "scott",
        n_ref: int | None = None,
        min_std: float = 1e-3,
        epochs: int = 1500,
        batch_size: int = 128,
        lr: float = 3e-3,
        weight_decay: float = 0.01,
        warmup: int = 0,
        n_restarts: int = 1,
        checkpoint: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        random_state: Any = 0,
    ) -> None:
        self.n_components = n_components
        self.groups = groups
        self.beta = beta
        self.alpha = alpha
        self.block_recurrence = block_recurrence
        self.lags = lags
        self.kernel = kernel
        self.learn_kernel = learn_kernel
        self.pad = pad
        self.nonlinearity = nonlinearity
        self.sqrt_counts = sqrt_counts
        self.likelihood = likelihood
        self.link = link
        self.hidden = hidden
        self.encoder_std = encoder_std
        self.n_ref = n_ref
        self.min_std = min_std
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.n_restarts = n_restarts
        self.checkpoint = checkpoint
        self.device = device
        self.random_state = random_state

    # ------------------------------------------------------------------------------------------------------ fit

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        inputs: Any = None,
        trial_lengths: Sequence[int] | None = None,
        mask: Any = None,
    ) -> "FacRNN":
        """Fit by ``epochs`` passes over the bins.

        Args:
            X: the recording.
            y: ignored; present for scikit-learn's interface.
            inputs: eta, known input to every channel, in the form of X.
            trial_lengths: of the rows of a (T, N) X.
            mask: in the form of X, true for entries that are not to be predicted. Where they are finite they still are
                history; where not, their channel's mean is. A bin masked as a whole does not count at all.

        Raises:
            ValueError: arguments or data that cannot be used; the message names them.
            NonFinite: training diverged; the message names the bin.
            ConfigError: the checkpoint is damaged, of another fit, or beyond ``epochs``.
        """
        series = self._series(X, inputs, trial_lengths, mask, reset=True)
        n, N = int(series.kept.sum()), series.x.shape[1]
        self.groups_ = resolve_groups(self.groups, self.n_components)
        self._check_options(n)
        seeds = check_random_state(self.random_state).randint(2**31 - 1, size=self.n_restarts)
        generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        # Scott's rule presumes latents of unit variance; the KL term to N(0, I) sees to that
        scott = scott_std(self.n_ref or n, self.n_components)
        networks = [
            LowRankRNN(
                N,
                self.n_components,
                self.groups,
                lags=self.lags,
                kernel=self.kernel,
                learn_kernel=self.learn_kernel,
                nonlinearity=self.nonlinearity,
                sqrt_counts=self.sqrt_counts,
                likelihood=self.likelihood,
                link=self.link,
                encoder_std=scott if isinstance(self.encoder_std, str) else self.encoder_std,
                learn_std=self.encoder_std == "learned",
                hidden=self.hidden,
                block_recurrence=self.block_recurrence,
                min_std=self.min_std,
                generator=generator,
            )
            for generator in generators
        ]
        schedule = Schedule(
            self.epochs, self.batch_size, self.lr, self.weight_decay, self.beta, self.alpha, self.warmup
        )
        training = Training(stack(networks).to(self.device), self._rows(series, networks[0]), schedule, generators)
        self._run(training, series)
        self._keep(training)
        return self

    def _check_options(self, n: int) -> None:
        for name, least in (("epochs", 0), ("batch_size", 1), ("n_restarts", 1), ("warmup", 0), ("n_ref", 1)):
            value = getattr(self, name)
            if name == "n_ref" and value is None:
                continue
            if not isinstance(value, (int, np.integer)) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        for name in ("beta", "alpha", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.beta > 0 and len(self.groups_) > 1 and min(self.batch_size, n) < 2:
            raise ValueError(f"beta > 0 needs batches of at least 2 rows; batch_size={self.batch_size}, rows={n}")
        if isinstance(self.encoder_std, str) and self.encoder_std not in ("scott", "learned"):
            raise ValueError(f"encoder_std must be 'scott', 'learned' or a number, got {self.encoder_std!r}")
        blocks = self.alpha > 0 or self.block_recurrence
        if blocks and self.hidden:
            raise ValueError("alpha > 0 needs linear maps; leave hidden=None")
        if blocks and self.nonlinearity != "identity":
            warnings.warn(
                f"J = B A moves the latents only where nonlinearity='identity', not {self.nonlinearity!r}: its blocks "
                "do not make groups independent",
                stacklevel=3,
            )

    def _run(self, training: Training, series: Series) -> None:
        path = None if self.checkpoint is None else Path(self.checkpoint)
        fingerprint: dict[str, Any] = {}
        if path:
            left_out = {"epochs", "checkpoint", "device"}
            fingerprint = {k: repr(v) for k, v in self.get_params().items() if k not in left_out}
            parts = [series.x, series.eta, series.masked, np.array(series.trials.lengths)]
            data = b"".join(np.ascontiguousarray(part).tobytes() for part in parts if part is not None)
            fingerprint["data"] = hashlib.sha256(data).hexdigest()
            if path.exists():
                training.load(path, fingerprint)
                if len(training.curves) > self.epochs:
                    raise ConfigError(
                        f"{path} holds {len(training.curves)} epochs, more than epochs={self.epochs}; give a new path"
                    )
        while len(training.curves) < self.epochs:
            training.epoch()
            if path and (len(training.curves) % 100 == 0 or len(training.curves) == self.epochs):
                training.save(path, fingerprint)

    def _keep(self, training: Training) -> None:
        curves = np.array(training.curves).reshape(-1, len(TERMS), self.n_restarts)
        self.n_iter_ = len(curves)
        last = curves[-max(1, len(curves) // 20) :, 0].mean(0) if len(curves) else np.zeros(self.n_restarts)
        order = np.argsort(last, kind="stable")
        networks = unstack(training.network)
        self.restarts_ = [networks[i].requires_grad_(False) for i in order]
        self.restart_losses_ = last[order]
        self.network_ = self.restarts_[0]
        self.loss_curve_ = curves[:, 0, order[0]]
        self.loss_terms_ = {name: curves[:, k, order[0]] for k, name in enumerate(TERMS) if k}
        self.encoder_std_ = self.network_.log_std.exp().cpu().numpy()
        self._n_features_out = self.n_components
        for name in ("components_", "connectivity_", "sub_connectivities_"):
            self.__dict__.pop(name, None)  # of an earlier fit with other options
        if self.network_.linear:
            self.components_ = self.network_.A.cpu().numpy()
            self.connectivity_ = self.network_.connectivity().cpu().numpy()
            subs = [self.network_.sub_connectivity(g) for g in range(len(self.groups_))]
            self.sub_connectivities_ = torch.stack(subs).cpu().numpy()

    # ------------------------------------------------------------------------------------------------------ use

    def transform(
        self, X: Any, *, inputs: Any = None, trial_lengths: Sequence[int] | None = None, mask: Any = None
    ) -> Any:
        """Latent means mu of every bin, in the form of X with K columns. A bin's depend on the bins before it only."""
        check_is_fitted(self)
        series = self._series(X, inputs, trial_lengths, mask)
        with torch.inference_mode():
            mu = self.network_.encode(self._history(series, self.network_))
        return series.trials.restore(mu.cpu().numpy())

    def reconstruct(
        self, X: Any, *, inputs: Any = None, trial_lengths: Sequence[int] | None = None, mask: Any = None
    ) -> Any:
        """The mean of every bin at z = mu, predicted from the bins before it, in the form of X."""
        check_is_fitted(self)
        series = self._series(X, inputs, trial_lengths, mask)
        with torch.inference_mode():
            _, mean = self.network_(self._history(series, self.network_), self._tensor(series.eta))
        return series.trials.restore(mean.cpu().numpy())

    def history(
        self, X: Any, *, trial_lengths: Sequence[int] | None = None, mask: Any = None
    ) -> Float[np.ndarray, "n N"]:
        """u of the bins that count, as rows."""
        check_is_fitted(self)
        series = self._series(X, None, trial_lengths, mask)
        return self._history(series, self.network_).double().cpu().numpy()[series.kept]

    def score(
        self,
        X: Any,
        y: Any = None,
        *,
        inputs: Any = None,
        trial_lengths: Sequence[int] | None = None,
        mask: Any = None,
        draws: int = 64,
    ) -> float:
        """Mean log-likelihood of a bin given those before it, in nats; larger is better.

        Exact for gaussian with the identity link. Otherwise the latent noise is integrated by ``draws`` samples with a
        fixed seed, a lower bound on average.
        """
        check_is_fitted(self)
        series = self._series(X, inputs, trial_lengths, mask)
        kept = torch.from_numpy(np.flatnonzero(series.kept)).to(self.device)
        observed = None if series.masked is None else torch.from_numpy(~series.masked).to(self.device)[kept]
        eta = None if series.eta is None else self._tensor(series.eta)[kept]
        with torch.inference_mode():
            u = self._history(series, self.network_)[kept]
            x = self._tensor(series.values())[kept]
            values = predictive_log_likelihood(
                self.network_, u, x, eta=eta, observed=observed, draws=draws, generator=torch.Generator().manual_seed(0)
            )
        return float(values.double().mean())

    def partial_correlation(
        self,
        X: Any,
        *,
        null: bool = True,
        trial_lengths: Sequence[int] | None = None,
        mask: Any = None,
        draws: int = 10,
        permutations: int = 5,
    ) -> Dependence:
        """PC between the groups over the bins of X that count, its null, and TC (3.5), with a fixed seed."""
        check_is_fitted(self)
        mu = self._means(X, trial_lengths, mask, self.network_)
        return dependence(
            mu,
            self.network_.log_std,
            self.groups_,
            draws=draws,
            permutations=permutations if null else 0,
            generator=torch.Generator().manual_seed(0),
        )

    def identifiability(
        self, X: Any, *, trial_lengths: Sequence[int] | None = None, mask: Any = None
    ) -> Identifiability:
        """Can the groups be believed? Dependence beside its null, and whether restarts found the same groups.

        Raises:
            ValueError: ``n_restarts`` was 1.
        """
        check_is_fitted(self)
        if len(self.restarts_) < 2:
            raise ValueError("one fit cannot be compared with itself; fit with n_restarts=3 or more")
        found = [self._means(X, trial_lengths, mask, network).double().cpu().numpy() for network in self.restarts_]

        def agreement(groups: Any) -> np.ndarray:
            return np.array([[align_groups(b, a, groups, groups).r2 for b in found] for a in found])

        dependent = self.partial_correlation(X, trial_lengths=trial_lengths, mask=mask)
        return Identifiability(dependent, agreement(self.groups_), agreement(1))

    def align(
        self,
        X: Any,
        z_true: Any,
        groups_true: Any,
        *,
        trial_lengths: Sequence[int] | None = None,
        mask: Any = None,
    ) -> AlignmentReport:
        """``align_groups`` of this model's latents on X with known ones (a row for each bin that counts)."""
        check_is_fitted(self)
        mu = self._means(X, trial_lengths, mask, self.network_)
        return align_groups(mu.double().cpu().numpy(), np.asarray(z_true), self.groups_, groups_true)

    # ---------------------------------------------------------------------------------------------------- data

    def _means(self, X: Any, trial_lengths: Any, mask: Any, network: LowRankRNN) -> Tensor:
        series = self._series(X, None, trial_lengths, mask)
        with torch.inference_mode():
            return network.encode(self._history(series, network))[torch.from_numpy(series.kept).to(self.device)]

    def _tensor(self, values: np.ndarray | None) -> Any:
        return None if values is None else torch.from_numpy(values.astype(np.float32)).to(self.device)

    def _table(self, series: Series, network: LowRankRNN) -> Tensor:
        """sigma(x) of every row, and a row of zeros for what was before."""
        x = np.where(np.isfinite(series.x), series.x, self._fill)
        h = network.sigma(self._tensor(x))
        return torch.cat([h, h.new_zeros(1, h.shape[1])])

    def _history(self, series: Series, network: LowRankRNN) -> Tensor:
        index = lag_index(series.trials.lengths, self.lags, edge=self.pad == "edge").to(self.device)
        return convolve(self._table(series, network), index, network.psi)

    def _rows(self, series: Series, network: LowRankRNN) -> Rows:
        kept = np.flatnonzero(series.kept)
        index = lag_index(series.trials.lengths, self.lags, edge=self.pad == "edge")
        masked = None if series.masked is None else series.masked[kept]
        return Rows(
            x=self._tensor(series.values()[kept]),
            table=self._table(series, network.to(self.device)),
            index=index[torch.from_numpy(kept)].to(self.device),
            eta=None if series.eta is None else self._tensor(series.eta[kept]),
            observed=torch.from_numpy(~masked).to(self.device) if masked is not None and masked.any() else None,
            where=lambda row: series.trials.locate(int(kept[row])),
        )

    def _series(
        self, X: Any, inputs: Any, trial_lengths: Sequence[int] | None, mask: Any, reset: bool = False
    ) -> Series:
        trials = to_trials(X, trial_lengths)
        # finiteness is looked at below, where the place can be named
        x: Any = validate_data(self, trials.rows, reset=reset, dtype=np.float64, ensure_all_finite=False)
        if not isinstance(self.lags, (int, np.integer)) or self.lags < 1:
            raise ValueError(f"lags={self.lags!r} must be a positive integer")
        if self.pad not in ("zero", "edge", "drop"):
            raise ValueError(f"pad must be 'zero', 'edge' or 'drop', got {self.pad!r}")
        if sum(trials.lengths) != len(x):
            raise ValueError(f"trial_lengths sum to {sum(trials.lengths)}, but X has n_samples = {len(x)} rows")
        if min(trials.lengths) <= self.lags:
            raise ValueError(
                f"lags={self.lags} needs longer trials; the shortest (of {len(trials.lengths)}) has "
                f"n_samples = {min(trials.lengths)}"
            )
        masked = None
        if mask is not None:
            masked = np.asarray(to_trials(mask, trial_lengths, "mask").rows, dtype=bool)
            if masked.shape != x.shape:
                raise ValueError(f"mask has shape {masked.shape} as rows, X {x.shape}")
        self._check_values(x, masked, trials)
        eta = None
        if inputs is not None:
            eta = np.asarray(to_trials(inputs, trial_lengths, "inputs").rows, dtype=np.float64)
            if eta.shape != x.shape:
                raise ValueError(f"inputs have shape {eta.shape} as rows, X {x.shape}")
            if not np.isfinite(eta).all():
                row, channel = np.argwhere(~np.isfinite(eta))[0]
                raise ValueError(f"inputs hold NaN or infinity at {trials.locate(int(row))}, channel {channel}")
        kept = np.ones(len(x), dtype=bool) if masked is None else ~masked.all(1)
        if self.pad == "drop":
            position = np.concatenate([np.arange(length) for length in trials.lengths])
            kept &= position >= self.lags
        if not kept.any():
            raise ValueError("mask leaves no bin that counts")
        if reset:
            seen = np.isfinite(x)
            self._fill = np.where(seen, x, 0.0).sum(0) / np.maximum(seen.sum(0), 1)
        return Series(trials, x, eta, masked, kept)

    def _check_values(self, x: np.ndarray, masked: np.ndarray | None, trials: Trials) -> None:
        def first(wrong: np.ndarray) -> str | None:
            if masked is not None:
                wrong = wrong & ~masked
            if not wrong.any():
                return None
            row, channel = np.argwhere(wrong)[0]
            return f"{x[row, channel]} at {trials.locate(int(row))}, channel {channel}"

        if place := first(~np.isfinite(x)):
            raise ValueError(f"X holds NaN or infinity: {place}; leave such entries out with mask=~np.isfinite(X)")
        if self.likelihood == "poisson" and (place := first((x < 0) | (x != np.round(x)))):
            raise ValueError(
                f"likelihood='poisson' takes counts, but X holds {place}; Negative values in data are none"
            )
        if self.sqrt_counts and (place := first(x < 0)):
            raise ValueError(f"sqrt_counts=True takes values >= 0, but X holds {place}")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        tags.input_tags.positive_only = self.likelihood == "poisson" or self.sqrt_counts
        return tags
