"""Graphs for node classification: two parts of BlogCatalog, and generators with a known homophily."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subspan.data.shared import shared_file

Labels = Int64[np.ndarray, " n"]


@dataclass
class Graph:
    """A graph under the attribute names of ``torch_geometric.data.Data``; ``Data(**vars(graph))`` makes one of it.

    ``x`` (n, p) attributes; ``edge_index`` (2, E) sender and receiver of each edge; ``y`` (n,) labels, -1 where
    unknown; ``edge_weight`` (E,); ``train_mask`` and ``val_mask`` (n,).
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor | None = None
    edge_weight: Tensor | None = None
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None


def homophilous_edges(
    y: Labels,
    homophily: float | tuple[float, float],
    degree: float,
    *,
    random_state: Any = None,
) -> Int64[np.ndarray, "2 E"]:
    """Every node draws max(1, Poisson(degree / 2)) partners, each of its own class with probability h, else of another.

    Edges go both ways, each once, and never from a node to itself.

    Args:
        y: classes.
        homophily: h of all nodes, or (a, b): each node draws its own from Beta(a, b). Partners draw, too, so the
            homophily that comes out is spread less than that.
        degree: about the mean number of neighbours.
        random_state: seed or ``RandomState``.

    Raises:
        ValueError: a homophily outside [0, 1], or a degree that is not positive.
    """
    from sklearn.utils import check_random_state

    rng = check_random_state(random_state)
    n = len(y)
    if isinstance(homophily, tuple):
        chance = rng.beta(*homophily, size=n)
    elif 0 <= homophily <= 1:
        chance = np.full(n, float(homophily))
    else:
        raise ValueError(f"homophily must be in [0, 1], or the two parameters of a Beta law; got {homophily!r}")
    if not degree > 0:
        raise ValueError(f"degree must be positive, got {degree!r}")
    sender = np.repeat(np.arange(n), np.maximum(1, rng.poisson(degree / 2, size=n)))
    order = np.argsort(y, kind="stable")
    size = np.bincount(y)
    first = np.cumsum(size) - size
    own, begin = size[y[sender]], first[y[sender]]
    # positions in the order by class: within the own block, or anywhere else, counted as if that block were not there
    same = (rng.uniform(size=len(sender)) < chance[sender]) | (own == n)
    place = begin + (rng.uniform(size=len(sender)) * own).astype(np.int64)
    other = (rng.uniform(size=len(sender)) * (n - own)).astype(np.int64)
    place = np.where(same, place, other + np.where(other >= begin, own, 0))
    receiver = order[place]
    keys = np.concatenate([receiver * n + sender, sender * n + receiver])
    keys = np.unique(keys[keys // n != keys % n])
    return np.stack([keys % n, keys // n])


def contextual_sbm(
    n: int,
    means: Float[np.ndarray, "C p"],
    *,
    homophily: float | tuple[float, float],
    degree: float = 10.0,
    random_state: Any = None,
) -> Graph:
    """A contextual stochastic block model: C classes of equal chance, x = means[y] + N(0, I), edges by class.

    Two calls with the same means, or with shifted ones, make a source and a target.

    Source: Deshpande et al., Contextual Stochastic Block Models, NeurIPS 2018; edges by :func:`homophilous_edges`.

    Raises:
        ValueError: as :func:`homophilous_edges`.
    """
    from sklearn.utils import check_random_state

    rng = check_random_state(random_state)
    y = rng.randint(len(means), size=n)
    x = means[y] + rng.normal(size=(n, means.shape[1]))
    return _graph(x, homophilous_edges(y, homophily, degree, random_state=rng), y)


def digits_graphs(
    source: float | tuple[float, float],
    target: float | tuple[float, float],
    *,
    noise: tuple[float, float] = (3.0, 4.0),
    scale: float = 0.85,
    degree: float = 12.0,
    size: int = 1797,
    random_state: Any = None,
) -> tuple[Graph, Graph]:
    """Random halves of scikit-learn's digits as source and target (898 and 899 nodes), with edges drawn by class.

    Source attributes are X + noise[0] N(0, 1), target attributes scale X + noise[1] N(0, 1), both standardised by the
    source; ``source``, ``target`` and ``degree`` are those of :func:`homophilous_edges`. ``size`` digits are used.
    """
    from sklearn.datasets import load_digits
    from sklearn.utils import check_random_state

    rng = check_random_state(random_state)
    digits: Any = load_digits()
    order = rng.permutation(len(digits.data))[:size]
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    x = [
        factor * digits.data[half] + spread * rng.normal(size=(len(half), digits.data.shape[1]))
        for half, factor, spread in zip(halves, (1.0, scale), noise, strict=True)
    ]
    mean, deviation = x[0].mean(0), x[0].std(0)
    deviation[deviation == 0] = 1.0  # pixels that are never inked stay 0
    graphs = []
    for values, half, homophily in zip(x, halves, (source, target), strict=True):
        y = digits.target[half]
        edges = homophilous_edges(y, homophily, degree, random_state=rng)
        graphs.append(_graph((values - mean) / deviation, edges, y))
    return graphs[0], graphs[1]


def blogcatalog(n_components: int | None = 256) -> tuple[Graph, Graph]:
    """Blog1 (2,300 nodes) and Blog2 (2,896): disjoint parts of BlogCatalog, six groups, 8,189 word counts.

    Counts become log(1 + count) in rows of norm 1; with ``n_components`` both parts are projected on that many leading
    right singular vectors of the two together (no label is used).

    Raises:
        MissingAsset: ``shared/data/graphs/Blog1.mat`` or ``Blog2.mat`` is not there.
    """
    from scipy.io import loadmat
    from scipy.sparse import csr_matrix, vstack
    from sklearn.preprocessing import normalize
    from sklearn.utils.extmath import randomized_svd

    parts = [loadmat(shared_file(f"graphs/Blog{k}.mat")) for k in (1, 2)]
    words = [normalize(csr_matrix(part["attrb"].astype(np.float64)).log1p()) for part in parts]
    if n_components is None:
        x = [part.toarray() for part in words]
    else:
        right = randomized_svd(vstack(words), n_components, random_state=0)[2].T
        x = [part @ right for part in words]
    graphs = []
    for part, values in zip(parts, x, strict=True):
        edges = part["network"].tocoo()
        index = np.stack([edges.row, edges.col]).astype(np.int64)
        graphs.append(_graph(values, index, part["group"].argmax(1).astype(np.int64)))
    return graphs[0], graphs[1]


def _graph(x: np.ndarray, edges: np.ndarray, y: np.ndarray) -> Graph:
    return Graph(torch.from_numpy(x).float(), torch.from_numpy(edges), torch.from_numpy(y).long())
