"""A scikit-learn classifier trained on the error rate itself."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, no_type_check

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from subspan.optim.output_space.closed_forms import expected_zero_one
from subspan.optim.output_space.loss import OutputSpaceLoss
from subspan.optim.output_space.losses import zero_one


class ZeroOneClassifier(ClassifierMixin, BaseEstimator):
    """A network trained by OVLR on the 0-1 loss, after a short start with cross-entropy: robust to wrong labels.

    A wrong label costs at most 1 wherever its sample lies, so that a minority of them does not pull the network. From
    a cold start a class that is never predicted has no signal and stays dead; hence ``warmup_frac``, and
    ``dead_classes_`` to look at. Scale the features first (``make_pipeline(StandardScaler(), ZeroOneClassifier())``).

    Args:
        hidden: widths of the hidden layers (ReLU between).
        epochs: passes over the data.
        batch_size: rows a step; batches are shuffled.
        lr: of AdamW.
        weight_decay: of AdamW.
        sigma: scale of the noise on the logits, see ``OutputSpaceLoss``.
        pairs: antithetic pairs of noise, see ``OutputSpaceLoss``.
        warmup_loss: "ce" (cross-entropy) or any differentiable ``loss(logits, y) -> scalar``.
        warmup_frac: share of the steps trained on it, in [0, 1].
        module: called with (features, classes), makes another network than the default one.
        random_state: of the start, the batches and the noise.
        device: where to compute.

    Attributes:
        module_: the trained network. classes_, n_features_in_: as usual in scikit-learn.
        loss_curve_: mean loss of each epoch: of the warm-up's loss first, then the smoothed error rate.
        dead_classes_: classes that the network predicts for no training sample though some have them; a warning says
            so.

    Source: OVLR (ICML 2026, poster 64062); the warm start and the diagnosis are this project's.
    """

    @no_type_check  # scikit-learn wants a constructor that stores anything; fit says what is wrong
    def __init__(
        self,
        hidden: tuple[int, ...] = (64,),
        epochs: int = 60,
        batch_size: int = 64,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        sigma: float = 1.0,
        pairs: int = 16,
        warmup_loss: str | Callable[[Tensor, Tensor], Tensor] = "ce",
        warmup_frac: float = 0.05,
        module: Callable[[int, int], nn.Module] | None = None,
        random_state: Any = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.sigma = sigma
        self.pairs = pairs
        self.warmup_loss = warmup_loss
        self.warmup_frac = warmup_frac
        self.module = module
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> "ZeroOneClassifier":
        """Train on X (n, p) and labels y (n,).

        Raises:
            ValueError: parameters out of range, fewer than two classes, or data that scikit-learn refuses.
        """
        X, y = validate_data(self, X, y, dtype=np.float32)  # pyright: ignore[reportGeneralTypeIssues]
        check_classification_targets(y)
        self._check_parameters()
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"ZeroOneClassifier needs at least two classes; y holds one class, {self.classes_[0]!r}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        x, target = self._tensor(X), torch.from_numpy(codes).to(self.device)
        self.module_ = self._network(seed).to(self.device)
        self._train(x, target, seed)
        # In float64 a sample's scores do not depend on which others are scored beside it.
        self.module_.eval().double()
        predicted = np.unique(self._logits(x).argmax(1).cpu().numpy())
        self.dead_classes_ = np.delete(self.classes_, predicted)
        if len(self.dead_classes_):
            names = ", ".join(map(str, self.dead_classes_))
            warnings.warn(
                f"the network never predicts the classes {names}: such a class has no 0-1 signal; raise warmup_frac or "
                "sigma",
                stacklevel=2,
            )
        return self

    def _check_parameters(self) -> None:
        for name in ("epochs", "batch_size", "pairs"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for name, low, high in (("warmup_frac", 0, 1), ("weight_decay", 0, np.inf), ("lr", 0, np.inf)):
            value = getattr(self, name)
            if not isinstance(value, Real) or not low <= float(value) <= high:
                raise ValueError(f"{name} must lie between {low} and {high}, got {value!r}")
        if self.warmup_loss != "ce" and not callable(self.warmup_loss):
            raise ValueError(f"warmup_loss must be 'ce' or a function of (logits, y), got {self.warmup_loss!r}")

    def _network(self, seed: int) -> nn.Module:
        # Layers draw their start from torch's global generator; the fork keeps the caller's stream as it is.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.module is not None:
                return self.module(self.n_features_in_, len(self.classes_))
            widths = (self.n_features_in_, *self.hidden, len(self.classes_))
            layers: list[nn.Module] = []
            for a, b in pairwise(widths):
                layers += [nn.Linear(a, b), nn.ReLU()]
            return nn.Sequential(*layers[:-1])

    def _train(self, x: Tensor, y: Tensor, seed: int) -> None:
        criterion = OutputSpaceLoss(zero_one, sigma=self.sigma, pairs=self.pairs, invariance="shift", seed=seed)
        warmup: Any = cross_entropy if self.warmup_loss == "ce" else self.warmup_loss
        optimizer = torch.optim.AdamW(self.module_.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        generator = torch.Generator().manual_seed(seed)
        steps = self.epochs * -(-len(y) // self.batch_size)
        rising, step = round(self.warmup_frac * steps), 0
        self.loss_curve_: list[float] = []
        for _ in range(self.epochs):
            total = 0.0
            for rows in torch.randperm(len(y), generator=generator).to(y.device).split(self.batch_size):
                loss = (warmup if step < rising else criterion)(self.module_(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(rows)
                step += 1
            self.loss_curve_.append(total / len(y))

    def _tensor(self, X: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(X)).to(self.device)

    @torch.no_grad()
    def _logits(self, x: Tensor) -> Tensor:
        return self.module_(x.double())

    def _scores(self, X: Any) -> Tensor:
        check_is_fitted(self, "module_")
        return self._logits(self._tensor(validate_data(self, X, dtype=np.float32, reset=False)))  # pyright: ignore[reportArgumentType]

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits (n, classes); for two classes the second's minus the first's (n,)."""
        z = self._scores(X)
        return (z[:, 1] - z[:, 0] if z.shape[1] == 2 else z).cpu().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The class of the largest logit (n,)."""
        codes = self._scores(X).argmax(1).cpu().numpy()
        return self.classes_[codes]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability that each class has the largest logit under the noise of training (n, classes).

        This is what the smoothed error rate is made of; with wrong training labels it is no calibrated posterior.
        """
        z = self._scores(X)
        labels = torch.arange(z.shape[1], device=z.device)
        wins = [1 - expected_zero_one(z, k.expand(len(z)), self.sigma) for k in labels]
        p = torch.stack(wins, 1)
        return (p / p.sum(1, keepdim=True)).cpu().numpy()
