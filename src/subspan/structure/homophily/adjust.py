"""Edit the edges into each node until its homophily is the prescribed one (equations numbered as in our spec)."""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from subspan.structure.homophily.edges import (
    Edges,
    Labels,
    check_index,
    check_labels,
    coalesce,
    count_neighbours,
    merge,
    with_self_loops,
)

CANDIDATES, SHORTAGES = ("random", "homophilous"), ("official", "solve")


@dataclass(frozen=True)
class AdjustReport:
    """What an adjustment did.

    Attributes:
        adjusted: nodes below the prescribed homophily.
        added: new edges.
        short: adjusted nodes for which the graph did not hold enough candidates.
        mean_alpha: mean strength over adjusted nodes (0 if there are none).
        worst_gap: largest |h' - h0| over adjusted nodes that were not short; rounding only, if all weights were 1.
    """

    adjusted: int
    added: int
    short: int
    mean_alpha: float
    worst_gap: float


class Adjustment(NamedTuple):
    """Edges by ascending (receiver, sender), their weights, and a report."""

    edge_index: Int64[Tensor, "2 E"]
    edge_weight: Float[Tensor, " E"]
    report: AdjustReport


# ------------------------------------------------------------------------------------------------------ the formulas


def strength(h: Float64[Tensor, "*n"], h0: float) -> Float64[Tensor, "*n"]:
    """alpha = (h0 - h) / (1 - h0 h) = tanh(atanh h0 - atanh h). (3.2)"""
    return (h0 - h) / (1 - h0 * h)


def strength_when_short(
    d: Int64[Tensor, "*n"], s: Int64[Tensor, "*n"], q: Int64[Tensor, "*n"], h0: float
) -> Float64[Tensor, "*n"]:
    """The alpha that reaches h0 with q new edges: (h0 d - s) / (s + q - h0 (2 s - d + q)), in [0, 1) by itself. (3.3)

    With s = q = 0 no alpha reaches it: the formula would give 1, which cuts all edges into the node; 0 leaves it alone.
    """
    alpha = (h0 * d.double() - s) / (s + q - h0 * (2 * s - d + q).double())
    return torch.where(s + q > 0, alpha, 0.0)


def weighted_homophily(index: Int64[Tensor, "2 E"], weight: Tensor, y: Labels) -> Float64[Tensor, " n"]:
    """h' = (weight of edges from equal labels) / (weight of edges from known labels) into each node; nan if none."""
    counts = count_neighbours(index, y, y >= 0)
    receiver, weight = index[1], weight.double()
    total = torch.zeros(len(y), dtype=torch.float64, device=weight.device)
    same = total.index_add(0, receiver, weight * counts.same)
    return same / total.index_add(0, receiver, weight * counts.known)


# ------------------------------------------------------------------------------------------- draws keyed by the node

# splitmix64's increment and multipliers as int64: torch's integers wrap around, which is arithmetic modulo 2^64.
_GOLDEN, _M1, _M2 = (k - (1 << 64) for k in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(z: Int64[Tensor, "*n"]) -> Int64[Tensor, "*n"]:
    """splitmix64's finaliser, a bijection of 64-bit words that looks random."""
    z = (z ^ _shifted(z, 30)) * _M1
    z = (z ^ _shifted(z, 27)) * _M2
    return z ^ _shifted(z, 31)


def _shifted(z: Int64[Tensor, "*n"], bits: int) -> Int64[Tensor, "*n"]:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # torch's shift copies the sign


def _keys(nodes: Int64[Tensor, " n"], seed: int, round: int) -> Int64[Tensor, " n"]:
    """A random word for each (seed, round, node)."""
    word = torch.tensor(seed % (1 << 63), dtype=torch.int64, device=nodes.device)
    return _mix(_mix(_mix(word * _GOLDEN) + round) + nodes)


def permuted(position: Int64[Tensor, " n"], size: Int64[Tensor, " n"], key: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Where each position goes in the permutation of 0..size-1 that its key names, with nothing stored.

    A Feistel network permutes 0..2^b-1 for the least b that covers the size; what falls outside is permuted again until
    it falls inside ("cycle walking": fewer than two rounds on the mean). All orders are equally likely as far as
    chi-square tests of 200,000 draws tell; small sizes need more rounds for that.
    """
    bits = torch.frexp((size - 1).clamp_min(1).double()).exponent.long()
    low = bits // 2
    low_mask, high_mask = (1 << low) - 1, (1 << (bits - low)) - 1
    out = position.clone()
    for walking, rounds in (((size <= 32).nonzero().flatten(), 10), ((size > 32).nonzero().flatten(), 4)):
        while len(walking):
            k, lm, hm, shift = key[walking], low_mask[walking], high_mask[walking], low[walking]
            left, right = out[walking] >> shift, out[walking] & lm
            for step in range(rounds):
                right = right ^ (_mix(k + ((left << 5) | (2 * step))) & lm)
                left = left ^ (_mix(k + ((right << 5) | (2 * step + 1))) & hm)
            out[walking] = moved = (left << shift) | right
            walking = walking[moved >= size[walking]]
    return out


class Blocks(NamedTuple):
    """Known nodes in ``order`` by class; the class of label c holds ``size[c]`` of them from ``first[c]`` on."""

    order: Int64[Tensor, " v"]
    first: Int64[Tensor, " C"]
    size: Int64[Tensor, " C"]


def class_blocks(y: Labels, valid: Tensor, rank: Tensor | None = None) -> Blocks:
    """Within a class by falling ``rank`` (nan last), ties and everything else by ascending node."""
    nodes = valid.nonzero().flatten()
    if rank is not None:
        nodes = nodes[rank[nodes].nan_to_num(-1.0).argsort(descending=True, stable=True)]
    size = torch.bincount(y[nodes])
    return Blocks(nodes[y[nodes].argsort(stable=True)], size.cumsum(0) - size, size)


def choose_candidates(
    edges: Edges, y: Labels, blocks: Blocks, nodes: Int64[Tensor, " k"], wanted: Int64[Tensor, " k"],
    same: Int64[Tensor, " k"], keys: Int64[Tensor, " k"] | None,
) -> tuple[Int64[Tensor, " K"], Int64[Tensor, " K"]]:  # fmt: skip
    """For each node ``wanted`` distinct members of its class, neither itself nor among its ``same`` equal neighbours.

    They are the first that qualify: in a random order of its own if the nodes have ``keys``, else in the blocks' order.
    Enough must exist. Returns senders and receivers.
    """
    n, size = len(y), blocks.size[y[nodes]]
    drawn = torch.minimum(wanted + same + 1, size)  # of so many at most same + 1 are dropped
    owner = torch.repeat_interleave(torch.arange(len(nodes), device=nodes.device), drawn)
    position = _counted(drawn, owner)
    if keys is not None:
        position = permuted(position, size[owner], keys[owner])
    receiver = nodes[owner]
    sender = blocks.order[blocks.first[y[receiver]] + position]
    present, key = edges.keys(n), receiver * n + sender
    place = torch.searchsorted(present, key).clamp_max(len(present) - 1)  # the last place stands for "beyond"
    free = (sender != receiver) & (present[place] != key)
    sender, receiver, owner = sender[free], receiver[free], owner[free]
    first = _counted(torch.bincount(owner, minlength=len(nodes)), owner) < wanted[owner]
    return sender[first], receiver[first]


def _counted(lengths: Int64[Tensor, " k"], owner: Int64[Tensor, " K"]) -> Int64[Tensor, " K"]:
    """0, 1, ... within each run of equal owners; runs are ``lengths`` long."""
    return torch.arange(len(owner), device=owner.device) - (lengths.cumsum(0) - lengths)[owner]


# --------------------------------------------------------------------------------------------------- the adjustment


def adjust_homophily(
    edge_index: Tensor,
    y: Tensor,
    h0: float = 0.6,
    *,
    edge_weight: Tensor | None = None,
    candidates: str = "random",
    on_shortage: str = "official",
    compat: str | None = None,
    seed: int = 0,
    round: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Adjustment:
    """Edit the edges into every node of a homophily below h0 so that its weighted homophily becomes h0.

    With d known neighbours, s of them of its own label, h = s / d: edges from equal labels get weight 1 + alpha, those
    from different known labels 1 - alpha, and d - s new edges of weight alpha come from nodes of its label that are not
    its neighbours yet. (3.2) All other edges keep their weight. O(E log E), all nodes at once.

    Args:
        edge_index (2, E): senders and receivers; equal edges become one, their weights added.
        y (n,) or (n, 1): labels, below 0 where unknown. Edges with an unknown end keep their weight.
        h0: the prescribed homophily, in (0, 1).
        edge_weight (E,): multiplied, not overwritten; h counts neighbours whatever their weights.
        candidates: ``"random"``, or the ones of highest homophily first (ties by index).
        on_shortage: when a class has too few candidates, keep alpha ("official") or solve for the one that reaches h0.
        compat: ``"official"`` counts new edges as the released code does: truncated, and from all neighbours, known or
            not. h0 is then missed.
        seed: names the draw, with ``round``: a node's draw depends on them and on its index, on nothing else.
        round: number of the refinement.
        dtype: of the weights returned; they are computed in float64.

    Raises:
        ValueError: an argument outside its range, or shapes and indices that do not fit.

    Source: PSAHS, ICML 2026 (source and target adjustment); solving when short is ours.
    """
    if not 0 < h0 < 1:
        raise ValueError(f"the prescribed homophily must lie between 0 and 1, got {h0!r}")
    for name, value, known in (
        ("candidates", candidates, CANDIDATES), ("on_shortage", on_shortage, SHORTAGES),
        ("compat", compat, (None, "official")),
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    n = y.shape[0] if y.ndim else 0
    y = check_labels(y, n)
    edges = coalesce(check_index(edge_index, n), edge_weight, n)
    valid = y >= 0
    known, same, d, s, h = count_neighbours(edges.index, y, valid)
    # A quotient of integers rounds to the very number that h0 is, if they are equal; a product h0 d does not.
    low = (h < h0).nonzero().flatten()

    blocks = class_blocks(y, valid, h if candidates == "homophilous" else None)
    wanted = (d - s)[low]
    if compat == "official":
        wanted = (torch.bincount(edges.index[1], minlength=n) * (1 - h))[low].long()
    loop = torch.zeros(n, dtype=torch.int64, device=y.device)
    loop[edges.index[0, edges.index[0] == edges.index[1]]] = 1
    q = torch.minimum(wanted, blocks.size[y[low]] - s[low] - (1 - loop[low]))
    short = q < wanted

    alpha = torch.zeros(n, dtype=torch.float64, device=y.device)
    alpha[low] = strength(h[low], h0)
    if on_shortage == "solve":
        alpha[low[short]] = strength_when_short(d[low], s[low], q, h0)[short]

    a = alpha[edges.index[1]]
    factor = torch.where(same, 1 + a, torch.where(known, 1 - a, 1.0))
    keys = _keys(low, seed, round) if candidates == "random" else None
    sender, receiver = choose_candidates(edges, y, blocks, low, q, s[low], keys)
    out = merge(Edges(edges.index, edges.weight * factor), sender, receiver, alpha[receiver], n)
    reached = weighted_homophily(out.index, out.weight, y)[low[~short]]
    report = AdjustReport(
        adjusted=len(low),
        added=len(sender),
        short=int(short.sum()),
        mean_alpha=float(alpha[low].mean()) if len(low) else 0.0,
        worst_gap=float((reached - h0).abs().max()) if len(reached) else 0.0,
    )
    return Adjustment(out.index, out.weight.to(dtype), report)


class HomophilyAdjust:
    """A transform of graph data, in the shape of ``torch_geometric.transforms``: see :func:`adjust_homophily`.

    Works on ``torch_geometric.data.Data`` and, without torch_geometric, on anything with ``edge_index`` and ``y``.

    Args:
        target: the prescribed homophily.
        candidates: as in :func:`adjust_homophily`.
        on_shortage: as in :func:`adjust_homophily`.
        compat: as in :func:`adjust_homophily`.
        self_loops: give every node an edge to itself first; it counts as a neighbour of equal label.
        seed: of the random candidates; None draws one from torch's generator at each call.

    Attributes:
        report_: the :class:`AdjustReport` of the last call.
    """

    def __init__(
        self,
        target: float = 0.6,
        candidates: str = "random",
        on_shortage: str = "official",
        self_loops: bool = True,
        seed: int | None = None,
        compat: str | None = None,
    ) -> None:
        self.target = target
        self.candidates, self.on_shortage, self.compat = candidates, on_shortage, compat
        self.self_loops, self.seed = self_loops, seed

    def __call__(self, data: Any, labels: Tensor | None = None) -> Any:
        """A shallow copy with adjusted ``edge_index`` and ``edge_weight``; what it was given stays as it is.

        The original edges are kept in ``orig_edge_index`` (and ``orig_edge_weight``). Data that has them already is
        adjusted from them, so adjustments never accumulate.

        Args:
            data: with ``edge_index``, optionally ``edge_weight``, and ``y`` unless labels are given.
            labels (n,): labels or pseudo-labels, below 0 where unknown.

        Raises:
            ValueError: no labels at all, or as :func:`adjust_homophily`.
        """
        y = labels if labels is not None else getattr(data, "y", None)
        if y is None:
            raise ValueError("the data has no y: pass labels=, for example pseudo-labels with -1 where unknown")
        index, weight = original_edges(data)
        n = y.shape[0] if y.ndim else 0
        edges = coalesce(check_index(index, n), weight, n)
        if self.self_loops:
            edges = with_self_loops(edges, n)
        dtype = torch.float32 if weight is None else weight.dtype
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        new = adjust_homophily(
            edges.index, y, self.target, edge_weight=edges.weight, candidates=self.candidates,
            on_shortage=self.on_shortage, compat=self.compat, seed=seed, dtype=dtype,
        )  # fmt: skip
        self.report_ = new.report
        return with_edges(data, new.edge_index, new.edge_weight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(target={self.target})"


def original_edges(data: Any) -> tuple[Tensor, Tensor | None]:
    """The edges and weights that the data came with, before any adjustment."""
    index = getattr(data, "orig_edge_index", None)
    if index is not None:
        return index, getattr(data, "orig_edge_weight", None)
    return data.edge_index, getattr(data, "edge_weight", None)


def with_edges(data: Any, edge_index: Tensor, edge_weight: Tensor) -> Any:
    """A shallow copy of the data with these edges, its original ones set aside."""
    index, weight = original_edges(data)
    out = copy.copy(data)
    out.orig_edge_index, out.orig_edge_weight = index, weight
    out.edge_index, out.edge_weight = edge_index, edge_weight
    return out
