"""The directed graph convolution over weighted edges, the heads, and gradient reversal (spec 3.4, 3.5)."""

import warnings
from itertools import pairwise
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn


class Propagation:
    """The normalised adjacency A~ = D_out^-1/2 A D_in^-1/2 of weighted directed edges, ready to multiply. (3.4)

    A[i, j] is the weight of the edge from i to j. Nodes of degree 0 get 0. Sums and products are in float32 (float64
    for weights of that type) whatever the activations' type.
    """

    def __init__(self, edge_index: Int64[Tensor, "2 E"], edge_weight: Float[Tensor, " E"], n: int) -> None:
        sender, receiver = edge_index
        weight = edge_weight.to(torch.promote_types(edge_weight.dtype, torch.float32))
        scale = [
            torch.zeros(n, dtype=weight.dtype, device=weight.device).index_add_(0, end, weight).rsqrt()
            for end in (sender, receiver)
        ]
        left, right = (torch.where(s.isfinite(), s, 0.0) for s in scale)
        weight = left[sender] * weight * right[receiver]
        self.forward = _compressed(sender, receiver, weight, n)
        self.backward = _compressed(receiver, sender, weight, n)

    def out(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """A~ x: what a node's edges lead to."""
        return cast(Tensor, _Multiply.apply(x, self.forward, self.backward))

    def into(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """A~ᵀ x: what sends edges to a node."""
        return cast(Tensor, _Multiply.apply(x, self.backward, self.forward))


def _compressed(rows: Int64[Tensor, " E"], columns: Int64[Tensor, " E"], values: Tensor, n: int) -> Tensor:
    order = (rows * n + columns).argsort()
    ends = torch.bincount(rows, minlength=n).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, columns[order], values[order], (n, n), check_invariants=False)


class _Multiply(torch.autograd.Function):
    """A sparse matrix times a dense one; the gradient uses the transpose that is there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, transpose: Tensor) -> Tensor:
        ctx.transpose = transpose
        return _product(matrix, x)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None, None]:
        return _product(ctx.transpose, *grad), None, None


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # it would sum over edges in half precision
        return (matrix @ x.to(matrix.dtype)).to(x.dtype)


class DirGCNLayer(nn.Module):
    """beta (A~ x W1 + b1) + (1 - beta) (A~ᵀ x W2 + b2), multiplied in the order that is cheaper. (3.4)"""

    def __init__(self, in_features: int, out_features: int, beta: float = 0.5, learn_beta: bool = False) -> None:
        super().__init__()
        self.out, self.into = nn.Linear(in_features, out_features), nn.Linear(in_features, out_features)
        if learn_beta:
            self.beta = nn.Parameter(torch.tensor(float(beta)))
        else:
            self.register_buffer("beta", torch.tensor(float(beta)))

    def forward(self, x: Float[Tensor, "n p"], graph: Propagation) -> Float[Tensor, "n q"]:
        if self.out.in_features > self.out.out_features:
            along = graph.out(nn.functional.linear(x, self.out.weight)) + self.out.bias
            against = graph.into(nn.functional.linear(x, self.into.weight)) + self.into.bias
        else:
            along, against = self.out(graph.out(x)), self.into(graph.into(x))
        beta = self.beta.to(along.dtype)
        return beta * along + (1 - beta) * against


class DirGCN(nn.Module):
    """A Dir-GNN over weighted edges: layers with ReLU and dropout, all their outputs side by side, then linear. (3.4)

    Args:
        in_features: p.
        hidden: width of the layers.
        out_features: width of what comes out.
        layers: K.
        beta: weight of the direction from sender to receiver; ``learn_beta`` trains it, in every layer its own.
        dropout: after every layer.

    Source: Rossi et al., Edge Directionality Improves Learning on Heterophilic Graphs, LoG 2023; jumping knowledge.
    """

    def __init__(
        self, in_features: int, hidden: int = 128, out_features: int = 128, layers: int = 2, beta: float = 0.5,
        learn_beta: bool = False, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        widths = [in_features, *[hidden] * layers]
        self.layers = nn.ModuleList(DirGCNLayer(a, b, beta, learn_beta) for a, b in pairwise(widths))
        self.join = nn.Linear(hidden * layers, out_features)
        self.dropout = nn.Dropout(dropout)
        self._recent: list[tuple[Tensor, Tensor, int, Propagation]] = []

    def forward(
        self, x: Float[Tensor, "n p"], edge_index: Int64[Tensor, "2 E"], edge_weight: Float[Tensor, " E"]
    ) -> Float[Tensor, "n q"]:
        graph = self.propagation(edge_index, edge_weight, len(x))
        found = []
        for layer in self.layers:
            x = self.dropout(layer(x, graph).relu())
            found.append(x)
        return self.join(torch.cat(found, dim=1))

    def propagation(self, edge_index: Tensor, edge_weight: Tensor, n: int) -> Propagation:
        """The normalised adjacency; those of the last two graphs (source and target) are kept."""
        version = edge_index._version + edge_weight._version  # counts writes in place
        for known_index, known_weight, known_version, graph in self._recent:
            if known_index is edge_index and known_weight is edge_weight and known_version == version:
                return graph
        graph = Propagation(edge_index, edge_weight, n)
        self._recent = [*self._recent[-1:], (edge_index, edge_weight, version, graph)]
        return graph


def two_layers(in_features: int, hidden: int, out_features: int) -> nn.Sequential:
    """A head: linear, ReLU, linear."""
    return nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(), nn.Linear(hidden, out_features))


def attribute_mlp(in_features: int, n_classes: int, dropout: float = 0.1) -> nn.Sequential:
    """The classifier that sees no edges: p-128-64-C. (3.5)"""
    return nn.Sequential(
        nn.Linear(in_features, 128), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(128, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, n_classes),
    )  # fmt: skip


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad[0], None


def reverse(x: Float[Tensor, "*s"], strength: float) -> Float[Tensor, "*s"]:
    """x, with a gradient of -strength times what comes back (Ganin et al., JMLR 2016)."""
    return cast(Tensor, _Reverse.apply(x, strength))
