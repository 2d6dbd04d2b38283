"""Edges of a graph as sorted keys, and how many neighbours of a node carry its label."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

Index = Int64[Tensor, "2 E"]
Labels = Int64[Tensor, " n"]
Known = Bool[Tensor, " n"]


class Edges(NamedTuple):
    """Distinct edges by ascending (receiver, sender): ``index`` has senders in row 0, receivers in row 1."""

    index: Index
    weight: Float64[Tensor, " E"]

    def keys(self, n: int) -> Int64[Tensor, " E"]:
        """receiver n + sender, ascending."""
        return self.index[1] * n + self.index[0]


def check_index(edge_index: Tensor, n: int, name: str = "edge_index") -> Int64[Tensor, "2 E"]:
    """The edges as int64.

    Raises:
        ValueError: not (2, E), not integer, or an index outside 0..n-1.
    """
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"{name} must have shape (2, E), got {tuple(edge_index.shape)}")
    if edge_index.is_floating_point() or edge_index.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got {edge_index.dtype}")
    if edge_index.numel():
        first, last = map(int, edge_index.aminmax())
        if first < 0 or last >= n:
            raise ValueError(f"{name} names nodes {first} to {last}, but there are {n}, from 0 on")
    return edge_index.long()


def check_labels(y: Tensor, n: int, name: str = "y") -> Int64[Tensor, " n"]:
    """Labels as int64 (n,); those below 0 are unknown.

    Raises:
        ValueError: not of shape (n,) or (n, 1), or not integer.
    """
    if y.shape not in {(n,), (n, 1)}:
        raise ValueError(f"{name} must have shape ({n},) or ({n}, 1), got {tuple(y.shape)}")
    if y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got {y.dtype}")
    return y.reshape(n).long()


def coalesce(edge_index: Index, edge_weight: Tensor | None, n: int) -> Edges:
    """Distinct edges in order; the weights of equal ones are added (1 each where no weights are given).

    Raises:
        ValueError: weights that are negative, not finite, or not one per edge.
    """
    keys = edge_index[1] * n + edge_index[0]
    if edge_weight is None:
        weight = torch.ones(keys.shape, dtype=torch.float64, device=keys.device)
    elif edge_weight.shape != keys.shape:
        raise ValueError(f"edge_weight must have shape ({len(keys)},), got {tuple(edge_weight.shape)}")
    else:
        weight = edge_weight.double()
        if not bool((torch.isfinite(weight) & (weight >= 0)).all()):
            raise ValueError("edge_weight must be finite and not negative")
    distinct, inverse = torch.unique(keys, return_inverse=True)
    total = torch.zeros(distinct.shape, dtype=torch.float64, device=keys.device).index_add_(0, inverse, weight)
    return Edges(torch.stack([distinct % n, distinct // n]), total)


def with_self_loops(edges: Edges, n: int) -> Edges:
    """The same with an edge of weight 1 from every node to itself where there is none."""
    present = edges.index[0, edges.index[0] == edges.index[1]]
    absent = torch.ones(n, dtype=torch.bool, device=present.device)
    absent[present] = False
    loops = absent.nonzero().flatten()
    return merge(edges, loops, loops, torch.ones(len(loops), dtype=torch.float64, device=loops.device), n)


def merge(
    edges: Edges, sender: Int64[Tensor, " K"], receiver: Int64[Tensor, " K"], weight: Float64[Tensor, " K"], n: int
) -> Edges:
    """Edges with others that they do not hold yet, in order."""
    index = torch.cat([edges.index, torch.stack([sender, receiver])], dim=1)
    order = (index[1] * n + index[0]).argsort()
    return Edges(index[:, order], torch.cat([edges.weight, weight])[order])


class Counts(NamedTuple):
    """For each edge: both ends known (``known``), with equal labels (``same``). For each node the number of such
    neighbours, ``d`` and ``s``, and h = s / d, nan where d = 0."""

    known: Bool[Tensor, " E"]
    same: Bool[Tensor, " E"]
    d: Int64[Tensor, " n"]
    s: Int64[Tensor, " n"]
    h: Float64[Tensor, " n"]


def count_neighbours(index: Index, y: Labels, valid: Known) -> Counts:
    """Neighbours are senders of distinct edges, themselves included where they have a loop. (spec 2)"""
    sender, receiver = index
    known = valid[sender] & valid[receiver]
    same = known & (y[sender] == y[receiver])
    d = torch.bincount(receiver[known], minlength=len(y))
    s = torch.bincount(receiver[same], minlength=len(y))
    return Counts(known, same, d, s, s.double() / d)


def node_homophily(
    edge_index: Tensor, y: Tensor, num_nodes: int, valid: Tensor | None = None
) -> tuple[Float64[Tensor, " n"], Int64[Tensor, " n"]]:
    """The share of each node's known neighbours that carry its label, and their number.

    Args:
        edge_index (2, E): senders and receivers; neighbours are the senders, each counted once.
        y (n,) or (n, 1): labels, below 0 where unknown.
        num_nodes: n.
        valid (n,): which labels are known; by default those not below 0.

    Returns:
        h (n,), nan (not 0) for nodes without a known neighbour or label, and the number of known neighbours (n,).

    Raises:
        ValueError: shapes or indices that do not fit.
    """
    labels = check_labels(y, num_nodes)
    if valid is not None and valid.shape != (num_nodes,):
        raise ValueError(f"valid must have shape ({num_nodes},), got {tuple(valid.shape)}")
    edges = coalesce(check_index(edge_index, num_nodes), None, num_nodes)
    counts = count_neighbours(edges.index, labels, labels >= 0 if valid is None else valid.bool() & (labels >= 0))
    return counts.h, counts.d
