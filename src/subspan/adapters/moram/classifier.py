"""A scikit-learn classifier that learns one domain after another and keeps the earlier ones."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from subspan.adapters.moram.bank import Read
from subspan.adapters.moram.config import MoRAMConfig
from subspan.adapters.moram.model import memory_of, wrap
from subspan.errors import NonFinite


def mlp(d: int, hidden: Sequence[int], classes: int, generator: torch.Generator, center: bool = True) -> nn.Sequential:
    """LayerNorm, Linear, GELU for each hidden width, then LayerNorm and Linear; drawn by ``generator``."""
    layers: list[nn.Module] = []
    for i, width in enumerate(hidden):
        norm = nn.LayerNorm(d) if i > 0 or center else nn.Identity()
        layers += [norm, _linear(d, width, generator), nn.GELU()]
        d = width
    return nn.Sequential(*layers, nn.LayerNorm(d), _linear(d, classes, generator))


def _linear(n: int, m: int, generator: torch.Generator) -> nn.Linear:
    """torch's own initialisation, from a generator."""
    layer = nn.Linear(n, m)
    bound = n**-0.5
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_((2 * torch.rand(p.shape, generator=generator) - 1) * bound)
    return layer


def train(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    cosine: bool,
    generator: torch.Generator,
) -> None:
    """Cross-entropy by AdamW without decay, on batches drawn with replacement."""
    model.train()
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if cosine else None
    for _ in range(steps):
        rows = torch.randint(len(y), (batch_size,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        if not torch.isfinite(loss):
            raise NonFinite(f"the loss is {float(loss.detach())}: scale the features, or lower the learning rate")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


class ContinualMoRAMClassifier(ClassifierMixin, BaseEstimator):
    """A small network whose hidden layers hold a memory: ``fit`` trains it on a first domain, ``partial_fit_task`` adds
    domains one by one, and ``predict`` never asks which domain a row is from.

    Args:
        hidden: widths of the hidden layers, each of which holds a memory.
        center: bring each row to mean 0 and variance 1 first. Keys tell rows apart by direction, which a mean that all
            share hides: right for many features of one kind (pixels, embeddings); for a few unlike columns scale them
            yourself and say False.
        r: atoms that each task appends to each layer.
        top_k: atoms a row reads in each layer; r by default.
        temperature: see ``MoRAMConfig``, as for the next two.
        threshold: score below which an atom stays silent.
        read: "auto", "dense" or "gather".
        base_steps: steps of ``fit``.
        base_lr: its learning rate.
        task_steps: steps of each ``partial_fit_task``.
        task_lr: its learning rate (cosine).
        batch_size: rows a step.
        random_state: seed.

    Attributes:
        classes_: labels that ``fit`` saw; later tasks may use these alone.
        tasks_: names of the tasks so far, ``fit`` not counted.
        network_: the torch network, with its memory at ``network_.moram``.

    Raises:
        ValueError: a task with labels that ``fit`` did not see, no hidden layer, or no steps or rows.
        NonFinite: training diverges.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (128, 128),
        center: bool = True,
        r: int = 8,
        top_k: int | None = None,
        temperature: float = 0.05,
        threshold: float | None = 0.2,
        read: Read = "auto",
        base_steps: int = 600,
        base_lr: float = 3e-3,
        task_steps: int = 300,
        task_lr: float = 5e-3,
        batch_size: int = 64,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.hidden = hidden
        self.center = center
        self.r = r
        self.top_k = top_k
        self.temperature = temperature
        self.threshold = threshold
        self.read: Read = read
        self.base_steps = base_steps
        self.base_lr = base_lr
        self.task_steps = task_steps
        self.task_lr = task_lr
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "ContinualMoRAMClassifier":
        """Train the network itself, which is frozen from then on. Forgets every task."""
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if not len(self.hidden):
            raise ValueError("hidden is empty: a memory needs at least one hidden layer")
        for name in ("base_steps", "task_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs at least two classes, and y has 1 class only: {self.classes_[0]}")
        config = MoRAMConfig(
            r=self.r,
            top_k=self.top_k,
            temperature=self.temperature,
            threshold=self.threshold,
            target_modules=(),
            read=self.read,
        )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.generator_ = torch.Generator().manual_seed(seed)
        net = mlp(X.shape[1], self.hidden, len(self.classes_), self.generator_, self.center)
        options = {"steps": self.base_steps, "lr": self.base_lr, "cosine": False}
        train(net, list(net.parameters()), *_tensors(X, labels), **options, **self._common())
        targets = {name: m for name, m in list(net.named_children())[:-1] if isinstance(m, nn.Linear)}
        self.network_ = wrap(net, targets, config)
        return self

    def partial_fit_task(self, X: Any, y: Any, name: str | None = None) -> "ContinualMoRAMClassifier":
        """Learn one more domain, in atoms of its own; one that fails leaves none. The very first call is ``fit``."""
        if not hasattr(self, "network_"):
            return self.fit(X, y)
        X, y = validate_data(self, X, y, dtype=np.float32, reset=False)
        labels = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if (new := self.classes_[labels] != y).any():
            raise ValueError(
                f"label {str(np.asarray(y)[new][0])!r} was not among those of fit "
                f"({', '.join(map(str, self.classes_))}): tasks may bring new domains, not new classes"
            )
        network = copy.deepcopy(self.network_)
        memory = memory_of(network)
        with memory.task(name, generator=self.generator_):
            options = {"steps": self.task_steps, "lr": self.task_lr, "cosine": True}
            train(network, memory.parameters(), *_tensors(X, labels), **options, **self._common())
        self.network_ = network
        return self

    def _common(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "generator": self.generator_}

    @property
    def tasks_(self) -> list[str]:
        check_is_fitted(self, "network_")
        return memory_of(self.network_).tasks

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities (n, classes), without knowing the domain."""
        check_is_fitted(self, "network_")
        X = validate_data(self, X, dtype=np.float32, reset=False)
        self.network_.eval()
        with torch.no_grad():
            return self.network_(torch.from_numpy(X)).softmax(-1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each row."""
        likeliest = self.predict_proba(X).argmax(1)
        return self.classes_[likeliest]


def _tensors(X: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(X), torch.from_numpy(labels)
