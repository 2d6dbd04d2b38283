"""PSAHS as an estimator over two graphs: torch_geometric data, or anything with its attributes, in and out."""

import copy
import json
import math
import os
import warnings
import zlib
from numbers import Integral, Real
from pathlib import Path
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int64
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from subspan.structure.homophily.adjust import CANDIDATES, SHORTAGES, original_edges, with_edges
from subspan.structure.homophily.edges import check_index, check_labels, coalesce, node_homophily, with_self_loops
from subspan.structure.homophily.networks import DirGCN, two_layers
from subspan.structure.homophily.report import HomophilyReport, make_report, rewired
from subspan.structure.homophily.training import (
    PSEUDO,
    SELECTIONS,
    SIDES,
    Alternation,
    Domain,
    Networks,
    Schedule,
    Weighted,
    evaluated,
    fit_mlp,
    mean_of,
)


class PSAHS(BaseEstimator):
    """Node classification on an unlabelled target graph from a labelled source graph whose homophily differs.

    Both graphs are adjusted to a prescribed homophily: the source by its labels, once; the target by the pseudo-labels
    on which the GNN and a classifier without edges agree, again and again, always from its original edges. In between
    the GNN learns the source's labels and, by gradient reversal, not to tell the graphs apart.

    The target's labels are never read, except for ``selection="target_val"``.

    Args:
        hidden: width of the encoder, a :class:`DirGCN`, and of its output.
        layers: depth of the encoder.
        h0: the prescribed homophily, in (0, 1).
        rw_freq: epochs between adjustments of the target.
        lambda_max: strength of the alignment; 0 leaves it out. The paper's code has 1, which was worse wherever we
            tried both.
        pseudo: ``"sticky"`` keeps a pseudo-label until GNN and MLP agree on another; ``"fresh"`` forgets it when they
            no longer agree.
        selection: which parameters to keep: the ``"last"``, or those with the best score of ``"source_val"``,
            ``"agreement"`` (of GNN and MLP, plus source_val) or ``"target_val"``, which needs labels of the target
            (``val_mask`` and ``y``) and warns that the result is then not unsupervised. An adjusted source has edges
            drawn by the labels that source_val holds out: it is soon 1, and says little.
        epochs: steps on both whole graphs.
        lr: of Adam; it falls by a fifth every 50 epochs.
        encoder: any module called with (x, edge_index, edge_weight), instead of the :class:`DirGCN`; it is copied.
        mlp: a fitted module from attributes to logits, instead of the one fitted first; it is copied and frozen.
        sides: which graphs are adjusted.
        start_epoch: first epoch with pseudo-labels.
        candidates: see :func:`adjust_homophily`.
        on_shortage: see :func:`adjust_homophily`.
        self_loops: give every node an edge to itself; it counts as a neighbour of equal label.
        preset: ``"official"`` does what the released code does where it differs: lambda_max = 1, and its count of new
            edges. Then ``lambda_max`` is not looked at.
        seed: of everything random; torch's own generators are left as they were.
        device: where to compute.

    Attributes:
        networks_, mlp_: the trained modules; ``networks_.encoder`` is the encoder.
        source_, target_: copies of the data given, with adjusted ``edge_index`` and ``edge_weight``, the original edges
            in ``orig_edge_index``; ``target_.pseudo_y`` holds pseudo-labels, -1 where there is none.
        labels_ (m,), pseudo_labels_ (m,): predictions and pseudo-labels for the target.
        history_: per epoch loss, coverage, agreement, domain accuracy, source_val and, with a selection, its score.
            source_val is that of the training pass, with dropout.
        report_: a :class:`HomophilyReport`.
        n_classes_, n_features_in_: C and p.

    Source: Progressive Graph Structure Adjustment for Homophily Shift Adaptation, ICML 2026. ``lambda_max`` = 0.1,
    label-free selection and the diagnosis are ours.
    """

    _loop = Alternation  # the peers of the claim train otherwise

    @no_type_check  # scikit-learn wants a constructor that stores anything; fit says what is wrong
    def __init__(
        self,
        hidden: int = 128,
        layers: int = 2,
        h0: float = 0.6,
        rw_freq: int = 20,
        lambda_max: float = 0.1,
        pseudo: str = "sticky",
        selection: str = "last",
        epochs: int = 200,
        lr: float = 3e-3,
        encoder: nn.Module | None = None,
        mlp: nn.Module | None = None,
        sides: str = "both",
        start_epoch: int = 0,
        candidates: str = "random",
        on_shortage: str = "official",
        self_loops: bool = True,
        preset: str | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.hidden = hidden
        self.layers = layers
        self.h0 = h0
        self.rw_freq = rw_freq
        self.lambda_max = lambda_max
        self.pseudo = pseudo
        self.selection = selection
        self.epochs = epochs
        self.lr = lr
        self.encoder = encoder
        self.mlp = mlp
        self.sides = sides
        self.start_epoch = start_epoch
        self.candidates = candidates
        self.on_shortage = on_shortage
        self.self_loops = self_loops
        self.preset = preset
        self.seed = seed
        self.device = device

    # ------------------------------------------------------------------------------------------------------------ fit

    def fit(self, source: Any, target: Any, *, checkpoint: str | os.PathLike[str] | None = None) -> "PSAHS":
        """Train on a labelled source and an unlabelled target.

        Args:
            source: ``x`` (n, p), ``edge_index`` (2, E), ``y`` (n,); optionally ``edge_weight`` (E,), ``train_mask`` and
                ``val_mask`` (n,), without which 60 and 20 % of each class are drawn.
            target: ``x`` (m, p), ``edge_index``, optionally ``edge_weight``.
            checkpoint: a file to save the state in every ``rw_freq`` epochs; if it is there, training goes on from it
                exactly.

        Raises:
            ValueError: parameters out of range, graphs whose attributes differ in width or hold NaN, labels or indices
                that do not fit, fewer than two classes, no training nodes, or a checkpoint of another fit.
        """
        schedule = self._schedule()
        device = torch.device(self.device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            labelled = self._labelled_source(source)
            domains = labelled, self._domain(target, "target", labelled.x.dtype)
            self.n_classes_ = int(domains[0].y.max()) + 1
            if schedule.selection == "target_val":
                domains = domains[0], self._labelled_target(domains[1], target)
            self.n_features_in_, width = (domain.x.shape[1] for domain in domains)
            if width != self.n_features_in_:
                raise ValueError(f"source has {self.n_features_in_} attributes and target {width}: they must agree")
            mlp = copy.deepcopy(self.mlp) if self.mlp is not None else fit_mlp(domains[0], self.n_classes_)
            self.mlp_ = mlp.to(labelled.x).requires_grad_(False).eval()
            attribute_labels = evaluated(self.mlp_, lambda: self.mlp_(domains[1].x)).argmax(1)
            run = self._loop(domains, self._networks(domains[0]), attribute_labels, schedule)
            self._train(run, checkpoint)
        self.networks_, self.history_ = run.networks.eval(), run.history
        self.pseudo_labels_ = run.labels
        self.source_ = with_edges(source, *run.source)
        self.target_ = with_edges(target, *run.target)
        self.target_.pseudo_y = run.labels
        self._target_domain, self._target_graph = run.domains[1], run.target
        self.labels_ = run.target_logits().argmax(1)
        self.report_ = self._report(run)
        for message in self.report_.warnings:
            warnings.warn(message, stacklevel=2)
        return self

    def _train(self, run: Alternation, checkpoint: str | os.PathLike[str] | None) -> None:
        fingerprint = self._fingerprint(run.domains) if checkpoint is not None else ""
        if checkpoint is not None and Path(checkpoint).exists():
            run.load(checkpoint, fingerprint)
        while run.epoch < self.epochs:
            run.step()
            if checkpoint is not None and (run.epoch % self.rw_freq == 0 or run.epoch == self.epochs):
                run.save(checkpoint, fingerprint)
        run.finish()

    @torch.no_grad()
    def _report(self, run: Alternation) -> HomophilyReport:
        source, target = run.domains
        held, y = ~source.train, source.y

        def accuracy(logits: Tensor) -> float:
            return mean_of((logits.argmax(1) == y)[held])

        def gnn(graph: Weighted) -> float:
            return accuracy(run.networks.logits(source.x, graph))

        source_h, _ = node_homophily(source.edges.index, y, len(y))
        target_h, _ = node_homophily(target.edges.index, run.labels, len(target.x))
        matched = math.nan
        if bool(target_h.isfinite().any()):
            edges = rewired(source.edges, y, target_h, torch.Generator().manual_seed(self.seed))
            matched = gnn(self._graph_of(source._replace(edges=edges)))
        return make_report(
            source_h,
            target_h,
            accuracies={
                "mlp_source": accuracy(self.mlp_(source.x)),
                "gnn_source": gnn(self._graph_of(source)),
                "gnn_matched": matched,
                "gnn_adjusted_source": gnn(run.source),
            },
            adjustment=run.schedule.adjusted(target, run.labels, round=run.epoch)[1],
            coverage=mean_of(run.labels >= 0),
            history=run.history,
        )

    # -------------------------------------------------------------------------------------------------------- predict

    def predict(self, data: Any = None) -> Int64[Tensor, " n"]:
        """The class of every node: see :meth:`predict_proba`."""
        return self.predict_proba(data).argmax(1)

    @torch.no_grad()
    def predict_proba(self, data: Any = None) -> Float[Tensor, "n C"]:
        """Class probabilities of every node.

        Args:
            data: by default the target of ``fit``, on its last adjusted edges. Another graph is adjusted once, by the
                labels on which the GNN on its plain edges and the MLP agree (if ``sides`` has the target adjusted).

        Raises:
            ValueError: a graph that does not fit.
        """
        check_is_fitted(self, "networks_")
        domain = self._domain(self.target_ if data is None else data, "data", self._target_domain.x.dtype)
        if domain.x.shape[1] != self.n_features_in_:
            raise ValueError(f"data has {domain.x.shape[1]} attributes; the fit had {self.n_features_in_}")
        return self.networks_.logits(domain.x, self._graph_of(domain)).softmax(1)

    def _graph_of(self, domain: Domain) -> Weighted:
        """The edges to predict on."""
        known = self._target_domain
        if all(map(torch.equal, (domain.x, *domain.edges), (known.x, *known.edges))):
            return self._target_graph
        if self.sides not in ("both", "target"):
            return domain.plain()
        guess = self.networks_.logits(domain.x, domain.plain()).argmax(1)
        labels = torch.where(guess == self.mlp_(domain.x).argmax(1), guess, -1)
        return self._schedule().adjusted(domain, labels, round=0)[0]

    # --------------------------------------------------------------------------------------------------------- inside

    def _schedule(self) -> Schedule:
        for name in ("hidden", "layers", "rw_freq", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not (isinstance(self.start_epoch, Integral) and int(self.start_epoch) >= 0):
            raise ValueError(f"start_epoch must be an integer of at least 0, got {self.start_epoch!r}")
        if not isinstance(self.seed, Integral):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if not (isinstance(self.h0, Real) and 0 < float(self.h0) < 1):
            raise ValueError(f"h0 must lie between 0 and 1, got {self.h0!r}")
        for name in ("lambda_max", "lr"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and 0 <= float(value) < float("inf")):
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")
        for name, known in (
            ("pseudo", PSEUDO), ("selection", SELECTIONS), ("sides", SIDES), ("candidates", CANDIDATES),
            ("on_shortage", SHORTAGES),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.preset not in (None, "official"):
            raise ValueError(f"preset must be None or 'official', got {self.preset!r}")
        return Schedule(
            h0=float(self.h0), sides=self.sides, rw_freq=self.rw_freq, start_epoch=int(self.start_epoch),
            lambda_max=1.0 if self.preset == "official" else float(self.lambda_max), pseudo=self.pseudo,
            selection=self.selection, epochs=self.epochs, lr=float(self.lr), candidates=self.candidates,
            on_shortage=self.on_shortage, compat=self.preset, seed=int(self.seed),
        )  # fmt: skip

    def _domain(self, data: Any, name: str, dtype: torch.dtype | None = None) -> Domain:
        """The graph without its labels: those of the target are nobody's business.

        ``dtype``: of the attributes; by default float64 stays what it is, and all else becomes float32.
        """
        device = torch.device(self.device)
        x = getattr(data, "x", None)
        if not isinstance(x, Tensor) or not isinstance(getattr(data, "edge_index", None), Tensor):
            raise ValueError(
                f"{name} must have tensors x and edge_index, as torch_geometric.data.Data and subspan.data.Graph do; "
                f"got {type(data).__name__}"
            )
        if x.ndim != 2:
            raise ValueError(f"{name}.x must have shape (n, p), got {tuple(x.shape)}")
        x = x.to(device, dtype or (torch.float64 if x.dtype == torch.float64 else torch.float32))
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name}.x holds NaN or infinity in row {int((~x.isfinite()).any(1).nonzero()[0])}")
        n = len(x)
        index, weight = original_edges(data)
        weight = None if weight is None else weight.to(device)
        edges = coalesce(check_index(index.to(device), n, f"{name}.edge_index"), weight, n)
        nobody = torch.zeros(n, dtype=torch.bool, device=device)
        unknown = torch.full((n,), -1, dtype=torch.int64, device=device)
        return Domain(x, with_self_loops(edges, n) if self.self_loops else edges, unknown, nobody, nobody)

    def _labelled_source(self, data: Any) -> Domain:
        domain = self._domain(data, "source")
        if getattr(data, "y", None) is None:
            raise ValueError("source has no labels y")
        y = check_labels(data.y.to(domain.x.device), len(domain.x), "source.y")
        if not len(y) or int(y.min()) < 0 or int(y.max()) < 1:
            raise ValueError("source.y must hold labels 0, 1, ... of at least two classes, none of them negative")
        train = getattr(data, "train_mask", None)
        if train is None:
            train, val = split_by_class(y)
        else:
            train = _mask(train, y, "source.train_mask")
            val = getattr(data, "val_mask", None)
            val = ~train if val is None else _mask(val, y, "source.val_mask")
        if not bool(train.any()):
            raise ValueError("source has no training nodes: train_mask is False everywhere")
        if self.selection in ("source_val", "agreement") and not bool(val.any()):
            raise ValueError(f"selection={self.selection!r} needs validation nodes of the source: give it a val_mask")
        return domain._replace(y=y, train=train, val=val)

    def _labelled_target(self, domain: Domain, data: Any) -> Domain:
        if getattr(data, "y", None) is None or getattr(data, "val_mask", None) is None:
            raise ValueError("selection='target_val' needs y and val_mask of the target")
        warnings.warn(
            "selection='target_val' reads labels of the target: the result is not that of unsupervised adaptation",
            stacklevel=3,
        )
        y = check_labels(data.y.to(domain.x.device), len(domain.x), "target.y")
        val = _mask(data.val_mask, y, "target.val_mask") & (y >= 0)
        if not bool(val.any()):
            raise ValueError("selection='target_val' needs validation nodes of the target whose label is known")
        return domain._replace(y=y, val=val)

    def _networks(self, source: Domain) -> Networks:
        if self.encoder is None:
            encoder: nn.Module = DirGCN(source.x.shape[1], self.hidden, self.hidden, self.layers)
        else:
            encoder = copy.deepcopy(self.encoder)
        encoder = encoder.to(source.x)
        width = evaluated(encoder, lambda: encoder(source.x, *source.plain())).shape[1]
        return Networks(encoder, two_layers(width, 64, self.n_classes_), two_layers(width, 64, 1)).to(source.x)

    def _fingerprint(self, domains: tuple[Domain, Domain]) -> str:
        """Of the parameters, modules and graphs given, so that a checkpoint is never continued on others."""
        plain = int | float | str | None
        params = {k: v if isinstance(v, plain) else type(v).__name__ for k, v in self.get_params().items()}
        given = [
            *(tensor for d in domains for tensor in (d.x, *d.edges, d.y, d.train, d.val)),
            *(
                tensor
                for module in (self.encoder, self.mlp)
                if module is not None
                for tensor in module.state_dict().values()
            ),
        ]
        code = 0
        for tensor in given:
            code = zlib.crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy(), code)
        return json.dumps(params, sort_keys=True) + f" {code}"


def split_by_class(y: Int64[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Masks of 60 % (at least one) and 20 % of each class, drawn from torch's generator. (3.1)"""
    train, val = torch.zeros_like(y, dtype=torch.bool), torch.zeros_like(y, dtype=torch.bool)
    for label in y.unique():
        nodes = (y == label).nonzero().flatten()
        nodes = nodes[torch.randperm(len(nodes)).to(y.device)]
        first, second = max(1, round(0.6 * len(nodes))), round(0.8 * len(nodes))
        train[nodes[:first]] = True
        val[nodes[first:second]] = True
    return train, val


def homophily_report(source: Any, target: Any, *, mlp: nn.Module | None = None, **options: Any) -> HomophilyReport:
    """Measure before anything is adapted: does homophily shift, and does a GNN beat a classifier without edges?

    Fits a GNN on the source as it is, without adjustment and alignment.

    Args:
        source: as for :class:`PSAHS`.
        target: as for :class:`PSAHS`.
        mlp: as for :class:`PSAHS`.
        options: further parameters of :class:`PSAHS`, for example ``epochs`` or ``h0``.

    Raises:
        ValueError: as :meth:`PSAHS.fit`.
    """
    return PSAHS(mlp=mlp, **(options | {"sides": "none", "lambda_max": 0.0})).fit(source, target).report_


def _mask(mask: Tensor, y: Tensor, name: str) -> Tensor:
    if mask.shape != y.shape or mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean of shape {tuple(y.shape)}, got {mask.dtype} {tuple(mask.shape)}")
    return mask.to(y.device)
