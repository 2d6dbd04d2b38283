"""The prototype bank: what each modality looks like in each layer of the frozen backbone (3.1, 3.2)."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from subspan.adapters.aoept.backbones import BackboneAdapter
from subspan.adapters.aoept.inputs import check_finite, embedded, missing_mask, split_batch
from subspan.adapters.aoept.passes import run
from subspan.adapters.aoept.sources import START_STD
from subspan.errors import BaseMismatch, DataError
from subspan.files import replacing
from subspan.surgery import base_fingerprint

AXES = "layer, prototype, channel"
MANY_ROWS = 50_000  # beyond this KMeans goes through mini-batches
HALF_BEYOND = 2 * 2**30  # bytes of collected rows above which they are kept in half precision


@dataclass(frozen=True)
class PrototypeBank:
    """Cluster centres of pooled features, by modality.

    ``centres`` maps a modality to (depth, K, D) in float32, largest clusters first; ``sizes`` to the rows in each
    cluster (depth, K), zero for a modality that training never showed. ``backbone`` identifies the frozen weights.
    """

    centres: Mapping[str, Float32[Tensor, "depth K d"]]
    sizes: Mapping[str, Tensor] = field(default_factory=dict)
    backbone: str = ""

    @property
    def depth(self) -> int:
        return next(iter(self.centres.values())).shape[0]

    def first_layers(self, depth: int) -> "PrototypeBank":
        """The bank of the first ``depth`` layers only.

        Raises:
            ValueError: more layers than there are.
        """
        if depth > self.depth:
            raise ValueError(f"the bank has {self.depth} layers, not {depth}: collect it with depth={depth}")
        cut = [{name: table[:depth] for name, table in part.items()} for part in (self.centres, self.sizes)]
        return PrototypeBank(cut[0], cut[1], self.backbone)

    @property
    def digest(self) -> bytes:
        """32 bytes that identify the centres: checkpoints refer to their bank by them."""
        digest = hashlib.sha256()
        for name, centres in sorted(self.centres.items()):
            digest.update(f"{name} {tuple(centres.shape)}".encode())
            digest.update(centres.detach().cpu().contiguous().numpy().tobytes())
        return digest.digest()

    @classmethod
    def collect(
        cls,
        backbone: BackboneAdapter,
        loader: Iterable[Mapping[str, Any]],
        *,
        n_prototypes: int = 256,
        depth: int = 6,
        normalize: bool = False,
        target_norm: float | None = None,
        split: str | None = None,
        allow_eval_rows: bool = False,
        device: torch.device | str | None = None,
        seed: int = 42,
    ) -> "PrototypeBank":
        """One pass of the frozen backbone over the training set, without prompts, then K-means by layer and modality.

        Args:
            backbone: the adapter.
            loader: batches as the model takes them; ``missing`` (B, modalities) may be among them, and ``ids``, by
                which the rows are then sorted, so that the bank does not depend on the loader's order.
            n_prototypes: K; fewer where a layer has fewer distinct rows.
            depth: layers 0 .. depth - 1.
            normalize: bring rows to unit length first.
            target_norm: rescale the centres to this length.
            split: name of the loader's split; by default the one its data set carries, if any.
            allow_eval_rows: collect from another split than a training one.
            device: where to run; by default where the backbone is.
            seed: of K-means.

        Raises:
            ValueError: a depth beyond the backbone's layers, an evaluation split, or NaN in a modality that is there.
            DataError: the loader is empty.
        """
        _check_split(loader, split, allow_eval_rows)
        deepest = min(map(backbone.n_layers, backbone.modalities))
        if not 1 <= depth <= deepest:
            raise ValueError(f"depth must lie between 1 and the {deepest} layers of the backbone, got {depth}")
        if n_prototypes < 1:
            raise ValueError(f"n_prototypes must be at least 1, got {n_prototypes}")
        rows = collect_rows(backbone, loader, depth, device)
        centres, sizes = {}, {}
        for name in backbone.modalities:
            if rows[name].ids:
                centres[name], sizes[name] = _fit(rows[name], n_prototypes, normalize, target_norm, seed, name)
                continue
            warnings.warn(f"no training sample has {name!r}: its prototypes are random", stacklevel=2)
            shape = depth, n_prototypes, backbone.width(name)
            centres[name] = START_STD * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            sizes[name] = torch.zeros(shape[:2], dtype=torch.int64)
        return cls(centres, sizes, backbone_fingerprint(backbone))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically."""
        from safetensors.torch import save_file

        tensors = {f"centres/{name}": table.contiguous() for name, table in self.centres.items()}
        tensors |= {f"sizes/{name}": table.contiguous() for name, table in self.sizes.items()}
        about = {"axes": AXES, "backbone": self.backbone, "modalities": json.dumps(list(self.centres))}
        with replacing(path) as part:
            save_file(tensors, part, metadata=about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PrototypeBank":
        """Read what ``save`` wrote.

        Raises:
            DataError: the file is no bank.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about.get("axes") != AXES:
                    raise DataError(f"{os.fspath(path)} is no prototype bank: its axes are {about.get('axes')!r}")
                tables = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"{os.fspath(path)} is no prototype bank: {error}") from error
        parts = [
            {name: tables[f"{kind}/{name}"] for name in json.loads(about["modalities"]) if f"{kind}/{name}" in tables}
            for kind in ("centres", "sizes")
        ]
        return cls(parts[0], parts[1], about["backbone"])

    def check(self, backbone: BackboneAdapter, depth: int) -> None:
        """Raise unless this bank is (depth, K, D) for every modality, and of this backbone.

        Raises:
            ValueError: another shape, or axes in another order.
            BaseMismatch: it was collected on other weights.
        """
        for name in backbone.modalities:
            if name not in self.centres:
                raise ValueError(f"the bank has no modality {name!r}; it has {', '.join(self.centres)}")
            shape, width = tuple(self.centres[name].shape), backbone.width(name)
            if len(shape) == 3 and shape[0] == depth and shape[2] == width:
                continue
            hint = "; collect it again, or cut it with bank.first_layers(depth)"
            if len(shape) == 3 and shape[1] == depth and shape[2] == width:
                hint = "; its first two axes are exchanged"
            raise ValueError(
                f"the bank of {name!r} must have shape (depth {depth}, prototypes, width {width}) in the order {AXES}, "
                f"got {shape}{hint}"
            )
        if self.backbone and self.backbone != backbone_fingerprint(backbone):
            raise BaseMismatch("the bank was collected on other backbone weights: collect it again on these")


def backbone_fingerprint(backbone: BackboneAdapter) -> str:
    """Of the frozen weights: what trains with the head may change."""
    module: Any = backbone
    trained = {id(p) for part in backbone.trained_modules() for p in part.parameters()}
    return base_fingerprint(module, [name for name, p in module.named_parameters() if id(p) not in trained])


def _check_split(loader: Any, split: str | None, allow: bool) -> None:
    if split is None:
        found = getattr(getattr(loader, "dataset", loader), "split", None)
        split = None if found is None else str(found)
    if split is not None and not split.startswith("train") and not allow:
        raise ValueError(
            f"the bank must not see the split {split!r}: prototypes of evaluation rows leak into the prompts; give "
            "training data, or allow_eval_rows=True if that is meant"
        )


# --------------------------------------------------------------------------------------------------------------- rows


class Rows:
    """Features (depth, D) of one sample after the other, kept in half precision once they are large."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.ids: list[Any] = []
        self.bytes = 0
        self.dtype: Any = np.float32

    def add(self, rows: Float32[np.ndarray, "b depth d"], ids: Sequence[Any]) -> None:
        self.parts.append(rows.astype(self.dtype))
        self.ids += ids
        self.bytes += self.parts[-1].nbytes
        if self.bytes > HALF_BEYOND and self.dtype == np.float32:
            self.dtype = np.float16
            self.parts = [part.astype(np.float16) for part in self.parts]
            self.bytes //= 2

    def layers(self) -> list[np.ndarray]:
        """(n, D) of each layer, sorted by id."""
        order = sorted(range(len(self.ids)), key=lambda row: self.ids[row])
        whole = np.concatenate(self.parts)[order]
        return [whole[:, layer] for layer in range(whole.shape[1])]


@torch.no_grad()
def collect_rows(
    backbone: BackboneAdapter, loader: Iterable[Mapping[str, Any]], depth: int, device: torch.device | str | None
) -> dict[str, Rows]:
    """f at the input of the first layers, of samples that have the modality.

    A single stream sees one modality at a time, all others blank, so that no rows mix them. (3.1)
    """
    module: Any = backbone
    was_training = module.training
    module.eval()
    place: Any = next(module.parameters()).device if device is None else device
    rows, seen = {name: Rows() for name in backbone.modalities}, 0
    try:
        for batch in loader:
            inputs, size = split_batch(backbone, batch, place)
            missing = missing_mask(backbone, inputs, batch.get("missing"), size, place)
            ids = batch.get("ids", range(seen, seen + size))
            ids = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else list(ids)
            if len(ids) != size:
                raise ValueError(f"a batch of {size} samples has {len(ids)} ids")
            seen += size
            check_finite(backbone, inputs, missing, ids)
            for names, hidden in _views(backbone, missing):
                features = _features(backbone, inputs, hidden, depth)
                for name in names:
                    there = (~missing[:, backbone.modalities.index(name)]).cpu().numpy()
                    chosen = features[name][there]
                    rows[name].add(chosen, [x for x, keep in zip(ids, there, strict=True) if keep])
    finally:
        module.train(was_training)
    if not seen:
        raise DataError("the loader gave no batch to collect prototypes from")
    return rows


def _views(backbone: BackboneAdapter, missing: Bool[Tensor, "b m"]) -> list[tuple[Sequence[str], Tensor]]:
    """Which modalities are read off which pass, and what is blank in it."""
    if not backbone.fused:
        return [(backbone.modalities, missing)]
    views = []
    for column, name in enumerate(backbone.modalities):
        others = torch.ones_like(missing)
        others[:, column] = missing[:, column]
        views.append(([name], others))
    return views


def _features(backbone: BackboneAdapter, inputs: Mapping[str, Tensor], missing: Tensor, depth: int) -> dict[str, Any]:
    streams = embedded(backbone, inputs, missing)
    tracked = run(backbone, streams, ~missing, track=depth, stop=depth - 1).features
    return {name: torch.stack([f[name] for f in tracked], 1).float().cpu().numpy() for name in backbone.modalities}


# ------------------------------------------------------------------------------------------------------------ clusters


def _fit(
    rows: Rows, n_prototypes: int, normalize: bool, target_norm: float | None, seed: int, name: str
) -> tuple[Tensor, Tensor]:
    layers = [layer.astype(np.float32) for layer in rows.layers()]
    if normalize:
        layers = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in layers]  # a zero row stays
    distinct = min(len(np.unique(x, axis=0)) for x in layers)
    if distinct < n_prototypes:
        warnings.warn(
            f"{name!r} has {distinct} distinct rows in some layer: its bank has {distinct} prototypes, not "
            f"{n_prototypes}",
            stacklevel=3,
        )
    fits = [clusters(x, min(n_prototypes, distinct), seed) for x in layers]
    centres, sizes = (torch.from_numpy(np.stack(part)) for part in zip(*fits, strict=True))
    if target_norm is not None:
        centres = centres * (target_norm / centres.norm(dim=-1, keepdim=True).clamp(min=1e-12))
    return centres, sizes


def clusters(x: Float32[np.ndarray, "n d"], k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Centres (k, d) in float32 and cluster sizes (k,), largest first, ties by the first channel."""
    from sklearn.cluster import KMeans, MiniBatchKMeans

    kind: Any = MiniBatchKMeans if len(x) > MANY_ROWS else KMeans
    fit = kind(k, n_init=10, max_iter=300, random_state=seed).fit(x)
    sizes = np.bincount(fit.labels_, minlength=k)
    order = np.lexsort((fit.cluster_centers_[:, 0], -sizes))
    return fit.cluster_centers_[order].astype(np.float32), sizes[order]
