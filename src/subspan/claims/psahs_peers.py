"""The peers that PSAHS is measured against, plainly: reweighted edges, other propagation, other filters, other graphs.

All train with the same loop, heads, optimiser and alignment as PSAHS; only what the paper of each is about differs.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from subspan.data import Graph
from subspan.structure import PSAHS
from subspan.structure.homophily.networks import Propagation
from subspan.structure.homophily.training import Alternation


class _Reweighting(Alternation):
    """From half of the epochs on, every ``rw_freq`` epochs, source edges get the class connections of the target."""

    share = 0.8  # of the new weight in an edge's weight: pygda's default

    def step(self) -> None:
        if self.epoch >= self.schedule.epochs // 2 and self.epoch % self.schedule.rw_freq == 0:
            source, target = self.domains
            guess = self.target_logits().argmax(1)
            C = int(source.y.max()) + 1  # the guesses may leave a class out
            ours, theirs = (class_connections(d.edges.index, y, C) for d, y in ((source, source.y), (target, guess)))
            ratio = torch.where(ours > 0, theirs / ours.clamp_min(1e-12), 1.0)
            sender, receiver = source.edges.index
            weight = 1 - self.share + self.share * ratio[source.y[sender], source.y[receiver]]
            self.source = source.edges.index, weight.to(source.x.dtype)
        super().step()


def class_connections(index: Tensor, y: Tensor, C: int) -> Tensor:
    """Edges between each two of C classes, per pair of nodes (0 where a class is empty)."""
    edges = torch.bincount(y[index[0]] * C + y[index[1]], minlength=C * C).reshape(C, C).double()
    size = torch.bincount(y, minlength=C).double()
    return edges / (size[:, None] * size).clamp_min(1.0)


class StruRW(PSAHS):
    """Structural re-weighting (Liu et al., ICML 2023); its adversarial form for ``lambda_max`` > 0, else ERM's."""

    _loop = _Reweighting


class Filters(nn.Module):
    """What the encoders below share: dropout, and the normalised adjacency of the last graphs seen."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.seen: list[tuple[Any, Propagation]] = []

    def propagation(self, key: Any, edges: Tensor, weight: Tensor, n: int) -> Propagation:
        for known, graph in self.seen:
            if known is key:
                return graph
        graph = Propagation(edges, weight, n)
        self.seen = [*self.seen[-3:], (key, graph)]
        return graph


class Asymmetric(Filters):
    """A2GNN's encoder (Liu et al., AAAI 2024): linear layers, each followed by steps of propagation.

    It has none on the source, which is given without edges between different nodes: :func:`without_edges`.
    """

    def __init__(self, in_features: int, width: int, hops: int = 1) -> None:
        super().__init__()
        self.first, self.second, self.hops = nn.Linear(in_features, width), nn.Linear(width, width), hops

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        graph = self.propagation(edge_index, edge_index, edge_weight, len(x))
        for layer in (self.first, self.second):
            x = layer(x)
            for _ in range(self.hops):
                x = graph.into(x)
            x = self.dropout(x.relu())
        return x


def without_edges(source: Graph) -> Graph:
    """The source as A2GNN sees it; PSAHS adds an edge from each node to itself."""
    return replace(source, edge_index=source.edge_index[:, :0])


class Mixed(Filters):
    """Mixed filters after HGDA (Fang et al., ICML 2025): low-pass A~ x, all-pass x, high-pass x - A~ x side by side."""

    def __init__(self, in_features: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3 * in_features, width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        graph = self.propagation(edge_index, edge_index, edge_weight, len(x))
        for layer in (self.first, self.second):
            smooth = (graph.into(x) + graph.out(x)) / 2
            x = self.dropout(layer(torch.cat([smooth, x, x - smooth], 1)).relu())
        return x


class Rebuilt(Filters):
    """Rebuilt graphs after RSGDA (Fang et al., 2026): low-pass on the graph of the ten nearest by attributes, which
    stands for the homophilic variant, and high-pass on the given edges, for the heterophilic one.
    """

    def __init__(self, in_features: int, width: int) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(in_features, width), nn.Linear(in_features, width)
        self.join = nn.Linear(2 * width, width)
        self.graphs: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        given = self.propagation(edge_index, edge_index, edge_weight, len(x))
        edges = self.nearest(x)
        near = self.propagation(edges, edges, torch.ones(edges.shape[1], dtype=x.dtype), len(x))
        low, high = self.near(x), self.far(x)
        low = (near.into(low) + near.out(low)) / 2
        high = high - (given.into(high) + given.out(high)) / 2
        return self.join(self.dropout(torch.cat([low, high], 1).relu()))

    def nearest(self, x: Tensor, k: int = 10) -> Tensor:
        """From the k most similar nodes (cosine) into each node; kept for the last graphs seen."""
        for known, edges in self.graphs:
            if known is x:
                return edges
        rows = nn.functional.normalize(x)
        sender = (rows @ rows.T).topk(min(k + 1, len(x)), dim=1).indices  # itself is the most similar
        edges = torch.stack([sender.flatten(), torch.arange(len(x)).repeat_interleave(sender.shape[1])])
        self.graphs = [*self.graphs[-1:], (x, edges)]
        return edges
