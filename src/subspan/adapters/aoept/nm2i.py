"""NM2I: do the prompts know anything about the modality that is missing? (3.10; the estimators are ours)"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subspan.adapters.aoept.inputs import embedded, missing_mask, split_batch
from subspan.adapters.aoept.model import AOEPTModel
from subspan.adapters.aoept.passes import run

Estimator = Literal["ami", "gauss"]
Stage = Literal["insert", "output"]
Matrix = Float[np.ndarray, "n d"]

CONSTANT = 1e-6  # columns that vary less are float noise, in which K-means would find clusters
SHUFFLES = 20


@dataclass(frozen=True)
class NM2IReport:
    """Means over layers, and the values by layer, all in [0, 1] up to chance.

    ``value`` between the prompts and the missing modality's features; ``ceiling`` the same for the visible features,
    of which the prompts are a function; ``floor`` for the prompts with shuffled samples.
    """

    value: float
    ceiling: float
    floor: float
    by_layer: Mapping[str, Sequence[float]]
    estimator: Estimator
    samples: int


@torch.no_grad()
def nm2i(
    model: AOEPTModel,
    complete_loader: Iterable[Mapping[str, Any]],
    *,
    modality: str,
    estimator: Estimator = "ami",
    stage: Stage = "insert",
    n_clusters: int = 10,
    seed: int = 0,
) -> NM2IReport:
    """Information of the prompts about a modality that is hidden from the model, but known to us.

    X is the mean of the modality's prompts (or of their slots after the layer) in samples from which the modality was
    taken; Y its pooled features in the frozen backbone without prompts, given this modality alone.

    Args:
        model: trained.
        complete_loader: batches of test samples that have every modality.
        modality: the one to hide.
        estimator: "ami", adjusted mutual information of K-means codes; "gauss", from canonical correlations.
        stage: "insert", the prompts of each sample; "output", their slots after the layer.
        n_clusters: codes of "ami".
        seed: of clusters and shuffles.

    Raises:
        ValueError: an unknown modality, estimator or stage, a model without prompts, incomplete samples, or so few that
            any two codings agree (below two for a cluster; below 20 for "gauss").
    """
    backbone = model.backbone
    if modality not in backbone.modalities:
        raise ValueError(f"modality must be one of {', '.join(backbone.modalities)}, got {modality!r}")
    for name, value, kinds in (("estimator", estimator, Estimator), ("stage", stage, Stage)):
        if value not in get_args(kinds):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, got {value!r}")
    if model.prompts is None:
        raise ValueError("the model has no prompts: depth or prompt_len is 0")
    was_training = model.training
    model.eval()
    parts = [_layers(model, batch, modality, stage) for batch in complete_loader]
    model.train(was_training)
    samples, least = sum(len(x[0]) for x, *_ in parts), 2 * n_clusters if estimator == "ami" else 20
    if samples < least:
        raise ValueError(f"{samples} samples are too few for this estimate: it takes at least {least}")
    kinds = [[np.concatenate(layer) for layer in zip(*kind, strict=True)] for kind in zip(*parts, strict=True)]
    reduce, compare = _ESTIMATORS[estimator]
    x, visible, y = ([reduce(layer, n_clusters, seed) for layer in kind] for kind in kinds)
    shuffled = np.random.default_rng(seed).permutation(samples)
    by_layer = {
        "value": [compare(a, b, seed) for a, b in zip(x, y, strict=True)],
        "ceiling": [compare(a, b, seed) for a, b in zip(visible, y, strict=True)],
        "floor": [compare(a, b[shuffled], seed) for a, b in zip(x, y, strict=True)],
    }
    means = {name: float(np.mean(values)) for name, values in by_layer.items()}
    return NM2IReport(**means, by_layer=by_layer, estimator=estimator, samples=samples)


def _layers(
    model: AOEPTModel, batch: Mapping[str, Any], modality: str, stage: Stage
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """X, the visible features at the gate and Y of one batch, by layer."""
    backbone, device = model.backbone, model.device
    inputs, size = split_batch(backbone, batch, device)
    if bool(missing_mask(backbone, inputs, batch.get("missing"), size, device).any()):
        raise ValueError("nm2i hides the modality itself: give it samples that have every modality")
    column = backbone.modalities.index(modality)
    hidden = torch.zeros(size, len(backbone.modalities), dtype=torch.bool, device=device)
    hidden[:, column] = True
    steps = [step for step in model.trace(inputs, hidden).steps if step.modality == modality]
    alone = ~hidden if backbone.fused else torch.zeros_like(hidden)
    depth = model.options.depth
    truth = run(backbone, embedded(backbone, inputs, alone), ~alone, track=depth, stop=depth - 1).features
    others = [name for name in backbone.modalities if name != modality]
    return (
        [_numpy((step.prompts if stage == "insert" else step.slots_out).mean(1)) for step in steps],
        [_numpy(torch.cat([step.gated_by[name] for name in others], 1)) for step in steps],
        [_numpy(features[modality]) for features in truth],
    )


def _numpy(x: Tensor) -> np.ndarray:
    return x.cpu().double().numpy()  # not every device has float64


# ---------------------------------------------------------------------------------------------------------- estimators


def coded_nm2i(x: Matrix, y: Matrix, *, n_clusters: int = 10, seed: int = 0) -> float:
    """Adjusted mutual information of the K-means codes of x and y: 0 for chance, 1 for the same codes.

    A constant x or y is one code and gives exactly 0.
    """
    return _agreement(_codes(x, n_clusters, seed), _codes(y, n_clusters, seed), seed)


def gaussian_information(x: Matrix, y: Matrix) -> float:
    """I = -1/2 sum_j ln(1 - rho_j^2) in nats, from the canonical correlations rho of x and y (3.10).

    Exact for Gaussian data up to sampling error; invariant to invertible linear maps of x and of y.
    """
    return _information(*(scores / np.linalg.norm(scores, axis=0) for scores in (_components(x), _components(y))))


def gaussian_nm2i(x: Matrix, y: Matrix, *, seed: int = 0) -> float:
    """1 - exp(-2 I / q) in [0, 1], with I corrected by the mean over row shuffles, on at most n / 20 components."""
    return _gaussian(_scores(x), _scores(y), seed)


def _codes(z: np.ndarray, n_clusters: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans

    if np.ptp(z, axis=0).max() < CONSTANT:
        return np.zeros(len(z), dtype=np.int64)
    clusters = min(n_clusters, len(np.unique(z, axis=0)))
    return KMeans(clusters, n_init=cast(Any, 10), random_state=seed).fit_predict(z)


def _agreement(a: np.ndarray, b: np.ndarray, _: int) -> float:
    from sklearn.metrics import adjusted_mutual_info_score

    # One code says nothing; scikit-learn calls two such codings identical.
    return 0.0 if min(len(np.unique(a)), len(np.unique(b))) < 2 else float(adjusted_mutual_info_score(a, b))


def _components(z: np.ndarray, limit: int | None = None) -> np.ndarray:
    """Scores of the leading principal components; none of a constant z."""
    if np.ptp(z, axis=0).max() < CONSTANT:
        return z[:, :0]
    u, s, _ = np.linalg.svd(z - z.mean(0), full_matrices=False)
    kept = min(limit or len(s), int((s > s[0] * 1e-10).sum()))
    return u[:, :kept] * s[:kept]


def _scores(z: np.ndarray, *_: int) -> np.ndarray:
    """Principal components of unit length, at most one for 20 samples."""
    scores = _components(z, max(1, len(z) // 20))
    return scores / np.linalg.norm(scores, axis=0)


def _information(x: np.ndarray, y: np.ndarray) -> float:
    """Of orthonormal columns, whose canonical correlations are the singular values of x^T y."""
    if min(x.shape[1], y.shape[1]) == 0:
        return 0.0
    rho = np.linalg.svd(x.T @ y, compute_uv=False)
    # Identical directions would have infinite information: double precision stops at 1 - rho^2 = 1e-12.
    return float(-0.5 * np.log(np.maximum(1 - np.square(rho), 1e-12)).sum())


def _gaussian(x: np.ndarray, y: np.ndarray, seed: int) -> float:
    q = min(x.shape[1], y.shape[1])
    if q == 0:
        return 0.0
    rng = np.random.default_rng(seed)
    chance = np.mean([_information(x, y[rng.permutation(len(y))]) for _ in range(SHUFFLES)])
    information = _information(x, y) - chance  # may fall below 0 where there is none
    return float(1 - np.exp(-2 * max(0.0, information) / q))


# estimator -> what it keeps of a matrix, and how it compares two
_ESTIMATORS: dict[str, tuple[Callable[..., np.ndarray], Callable[[np.ndarray, np.ndarray, int], float]]] = {
    "ami": (_codes, _agreement),
    "gauss": (_scores, _gaussian),
}
