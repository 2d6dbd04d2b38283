"""A scikit-learn classifier for arrays of tokens whose modalities may be missing."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, no_type_check

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from subspan.adapters.aoept.bank import PrototypeBank
from subspan.adapters.aoept.config import AOEPTConfig
from subspan.adapters.aoept.model import AOEPTModel
from subspan.adapters.aoept.towers import TorchTowersAdapter, contrastive_pretrain, make_towers


class MissingModalityClassifier(ClassifierMixin, BaseEstimator):
    """AOEPT on small towers, or on yours, for samples that lack modalities in ``fit`` and in ``predict``.

    X is a mapping from modality to n entries: arrays (S, F) of tokens of one shape, or None where the sample lacks the
    modality (one array (n, S, F) where none does). Or X is a plain matrix (n, p): its columns fall into modalities,
    every column is a token, and NaN is a cell that is not there; a modality without any cell is missing.

    Without ``backbone`` small towers are pre-trained here on the complete training rows, by which of them belong
    together (no labels are read), and then frozen.

    Args:
        columns: for a plain matrix, the columns of each modality; by default "first" is the first half of them and
            "second" the rest.
        backbone: pre-trained ``TorchTowersAdapter`` for the mapping's modalities; a copy is used, whose last norms and
            projections train with the head.
        width: of the towers made here.
        layers: of the towers made here.
        pretrain_steps: of their contrastive pre-training.
        prompt_len: see ``AOEPTConfig``, as the options down to ``on_all_missing``.
        depth: layers with prompts.
        num_heads: of the attention over the bank, and of the towers made here.
        reduction: bottleneck of the gates.
        alpha: weight of the consistency loss.
        mcp: construction of the prompts.
        query_init: start of the queries.
        on_all_missing: "prior" classifies a sample without any modality by the training set's prototypes; the default
            refuses it.
        n_prototypes: of the bank, by layer and modality.
        epochs: passes over the data.
        batch_size: rows a step.
        lr: peak of the one-cycle schedule of AdamW.
        weight_decay: of AdamW.
        random_state: of everything that is drawn.
        device: where to compute.

    Attributes:
        model_: the trained ``AOEPTModel``. bank_: its prototypes.
        classes_, n_features_in_ (of a plain matrix): as usual in scikit-learn.
        loss_curve_: mean loss of each epoch.
    """

    @no_type_check  # scikit-learn wants a constructor that stores anything; fit says what is wrong
    def __init__(
        self,
        columns: Mapping[str, Sequence[int]] | None = None,
        backbone: TorchTowersAdapter | None = None,
        width: int = 32,
        layers: int = 3,
        pretrain_steps: int = 250,
        prompt_len: int = 4,
        depth: int = 2,
        num_heads: int = 4,
        reduction: int = 4,
        alpha: float = 0.05,
        mcp: str = "attention",
        query_init: str = "normal",
        on_all_missing: str = "error",
        n_prototypes: int = 32,
        epochs: int = 20,
        batch_size: int = 128,
        lr: float = 1e-2,
        weight_decay: float = 0.01,
        random_state: Any = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.columns = columns
        self.backbone = backbone
        self.width = width
        self.layers = layers
        self.pretrain_steps = pretrain_steps
        self.prompt_len = prompt_len
        self.depth = depth
        self.num_heads = num_heads
        self.reduction = reduction
        self.alpha = alpha
        self.mcp = mcp
        self.query_init = query_init
        self.on_all_missing = on_all_missing
        self.n_prototypes = n_prototypes
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> "MissingModalityClassifier":
        """Train on X and labels y (n,).

        Raises:
            ValueError: parameters out of range, fewer than two classes, arrays of different shapes, NaN in a token, or
                a sample without any modality.
        """
        config = self._config()
        inputs, missing = self._inputs(X, reset=True)
        y = column_or_1d(y, warn=True)
        check_consistent_length(missing, y)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs two classes at least; y holds 1 class: {self.classes_[0]!r}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        backbone = self._backbone(inputs, missing, generator)
        batches = list(self._batches(inputs, missing, torch.arange(len(missing))))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*distinct rows")  # small data has small banks
            self.bank_ = PrototypeBank.collect(
                backbone, batches, n_prototypes=self.n_prototypes, depth=max(1, self.depth), seed=seed
            )
        self.model_ = AOEPTModel(backbone, self.bank_, config, num_labels=len(self.classes_), generator=generator).to(
            self.device
        )
        self._train(inputs, missing, torch.from_numpy(codes).to(self.device), generator)
        # In float64 a sample's scores do not depend on which others are scored beside it.
        self.model_.eval().double()
        return self

    def _train(self, inputs: Mapping[str, Tensor], missing: Tensor, labels: Tensor, generator: torch.Generator) -> None:
        trained = [p for p in self.model_.parameters() if p.requires_grad]
        steps = self.epochs * -(-len(labels) // self.batch_size)
        optimizer = torch.optim.AdamW(trained, self.lr, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps + 1)
        self.model_.train()
        self.loss_curve_: list[float] = []
        for _ in range(self.epochs):
            total = 0.0
            for batch in self._batches(inputs, missing, torch.randperm(len(labels), generator=generator)):
                rows = batch.pop("rows")
                loss = self.model_(**batch, labels=labels[rows]).loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                schedule.step()
                total += float(loss.detach()) * len(rows)
            self.loss_curve_.append(total / len(labels))
            self.model_.check_gates()

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities (n, classes).

        Raises:
            ValueError: X is not of the shape of the fit, or a sample lacks every modality.
        """
        check_is_fitted(self, "model_")
        inputs, missing = self._inputs(X, reset=False)
        parts = []
        with torch.no_grad():
            for batch in self._batches(inputs, missing, torch.arange(len(missing))):
                del batch["rows"]
                double = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
                parts.append(self.model_(**double).logits.softmax(1))
        return torch.cat(parts).cpu().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class (n,)."""
        codes = self.predict_proba(X).argmax(1)
        return self.classes_[codes]

    # --------------------------------------------------------------------------------------------------------- inside

    def _config(self) -> AOEPTConfig:
        for name in ("width", "layers", "n_prototypes", "epochs", "batch_size"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not isinstance(self.pretrain_steps, Integral) or int(self.pretrain_steps) < 0:
            raise ValueError(f"pretrain_steps must be an integer of at least 0, got {self.pretrain_steps!r}")
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")
        return AOEPTConfig(
            prompt_len=self.prompt_len, depth=self.depth, mcp=self.mcp, num_heads=self.num_heads,
            reduction=self.reduction, alpha=self.alpha, query_init=self.query_init,
            on_all_missing=self.on_all_missing,
        )  # fmt: skip

    def _backbone(
        self, inputs: Mapping[str, Tensor], missing: Tensor, generator: torch.Generator
    ) -> TorchTowersAdapter:
        if self.backbone is not None:
            if set(self.backbone.modalities) != set(self._shapes):
                known = ", ".join(self.backbone.modalities)
                raise ValueError(f"the backbone has modalities {known}; X has {', '.join(self._shapes)}")
            return copy.deepcopy(self.backbone).to(self.device)
        backbone = make_towers(
            self._shapes, width=self.width, layers=self.layers, heads=self.num_heads, generator=generator
        ).to(self.device)
        complete = ~missing.any(1)
        if int(complete.sum()) < 2:
            warnings.warn("fewer than two complete rows: the towers stay as they were drawn", stacklevel=3)
        elif self.pretrain_steps:
            rows = {name: x[complete] for name, x in inputs.items()}
            contrastive_pretrain(
                backbone, rows, steps=self.pretrain_steps, batch_size=self.batch_size, generator=generator
            )
        return backbone

    def _batches(self, inputs: Mapping[str, Tensor], missing: Tensor, order: Tensor) -> Iterator[dict[str, Tensor]]:
        for rows in order.to(missing.device).split(self.batch_size):
            yield {name: x[rows] for name, x in inputs.items()} | {"missing": missing[rows], "rows": rows}

    def _inputs(self, X: Any, reset: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of the towers in float32, and what is missing, in the backbone's order of modalities."""
        if isinstance(X, Mapping) and not issparse(X):  # one of scipy's sparse formats is a dictionary
            tables, missing = self._from_mapping(X, reset)
        else:
            tables, missing = self._from_matrix(X, reset)
        tensors = {name: torch.from_numpy(table).to(self.device) for name, table in tables.items()}
        return tensors, torch.from_numpy(missing).to(self.device)

    def _from_matrix(self, X: Any, reset: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
        X = validate_data(self, X, dtype=np.float32, ensure_all_finite="allow-nan", reset=reset)  # pyright: ignore
        if reset:
            self._columns = self.columns or self._halves(X.shape[1])
            self._shapes = {name: (len(chosen), 1) for name, chosen in self._columns.items()}
        tables, missing = {}, []
        for name, chosen in self._columns.items():
            cells = X[:, list(chosen)]
            there = ~np.isnan(cells)
            missing.append(~there.any(1))
            tables |= {name: np.where(there, cells, np.float32(0))[..., None], f"{name}_mask": there}
        return tables, np.stack(missing, 1)

    @staticmethod
    def _halves(width: int) -> dict[str, list[int]]:
        if width < 2:
            raise ValueError(f"two modalities need two columns; X has {width} feature(s), n_features = {width}")
        return {"first": list(range(width // 2)), "second": list(range(width // 2, width))}

    def _from_mapping(self, X: Mapping[str, Any], reset: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
        if reset:
            self._shapes = {name: self._shape(name, entries) for name, entries in X.items()}
        if list(X) != list(self._shapes):
            raise ValueError(f"X must hold {', '.join(self._shapes)} in this order, got {', '.join(X)}")
        check_consistent_length(*X.values())
        tables, missing = {}, []
        for name, entries in X.items():
            table = np.zeros((len(entries), *self._shapes[name]), dtype=np.float32)
            there = np.array([entry is not None for entry in entries])
            for row, entry in enumerate(entries):
                if entry is not None:
                    table[row] = self._tokens(name, row, entry)
            tables[name], absent = table, ~there
            missing.append(absent)
        return tables, np.stack(missing, 1)

    def _tokens(self, name: str, row: int, entry: Any) -> np.ndarray:
        tokens = np.asarray(entry, dtype=np.float32)
        if tokens.shape != self._shapes[name]:
            raise ValueError(f"{name!r} of sample {row} has shape {tokens.shape}; the others {self._shapes[name]}")
        if not np.isfinite(tokens).all():
            raise ValueError(f"{name!r} of sample {row} holds NaN or infinity: give None where it is missing")
        return tokens

    @staticmethod
    def _shape(name: str, entries: Any) -> tuple[int, int]:
        found = next((np.shape(entry) for entry in entries if entry is not None), None)
        if found is None:
            raise ValueError(f"no sample has {name!r}: leave the modality out")
        if len(found) != 2:
            raise ValueError(f"{name!r} must hold arrays (tokens, features), got one of shape {found}")
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags
