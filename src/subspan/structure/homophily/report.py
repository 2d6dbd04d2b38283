"""What can be said of two graphs, and of a fit, without any label of the target (spec 3.8)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from subspan.structure.homophily.adjust import AdjustReport, class_blocks
from subspan.structure.homophily.edges import Edges, Labels, coalesce


@dataclass(frozen=True)
class HomophilyReport:
    """How far the graphs are from each other, and whether the edges help at all.

    Attributes:
        source_h, target_h (n,): homophily of every node, the target's by pseudo-labels; nan where nothing is known.
        wasserstein: Wasserstein-1 distance between the two distributions; nan if the target has no pseudo-labels.
        coverage: share of target nodes with a pseudo-label, on which GNN and MLP agreed.
        exhausted: share of the target nodes below the prescribed homophily whose class lacks candidates.
        mlp_source: accuracy of the classifier without edges on the source nodes that were not trained on.
        gnn_source: that of the GNN, when the source is treated as an unlabelled graph would be.
        gnn_matched: the same after the source's edges were drawn anew so that its homophily is distributed as the
            target's; nan if the target has no pseudo-labels.
        gnn_adjusted_source: accuracy of the GNN on the source adjusted by its labels, those held out included: no
            measure of anything to come.
        warnings: what to be careful about.
    """

    source_h: Float64[Tensor, " n"]
    target_h: Float64[Tensor, " m"]
    wasserstein: float
    coverage: float
    exhausted: float
    mlp_source: float
    gnn_source: float
    gnn_matched: float
    gnn_adjusted_source: float
    warnings: list[str] = field(default_factory=list)

    def histogram(self, bins: int = 10) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"]]:
        """Nodes of source and target in equal bins of [0, 1]."""
        source, target = (
            torch.histc(h[h.isfinite()].double(), bins, 0.0, 1.0).long() for h in (self.source_h, self.target_h)
        )
        return source, target

    def summary(self) -> dict[str, Any]:
        """Numbers only, for json."""
        source, target = self.histogram()
        return {
            "source_homophily": float(self.source_h.nanmean()),
            "target_homophily": float(self.target_h.nanmean()),
            "source_histogram": source.tolist(),
            "target_histogram": target.tolist(),
            **{
                name: getattr(self, name)
                for name in (
                    "wasserstein", "coverage", "exhausted", "mlp_source", "gnn_source", "gnn_matched",
                    "gnn_adjusted_source", "warnings",
                )
            },
        }  # fmt: skip


def make_report(
    source_h: Tensor, target_h: Tensor, accuracies: Mapping[str, float], adjustment: AdjustReport, coverage: float,
    history: Sequence[Mapping[str, float]],
) -> HomophilyReport:  # fmt: skip
    """Measure and warn."""
    from scipy.stats import wasserstein_distance

    known = [h[h.isfinite()].cpu().numpy() for h in (source_h, target_h)]
    said = []
    mlp, gnn = accuracies["mlp_source"], accuracies["gnn_matched"]
    if mlp >= gnn:
        said.append(
            "on held-out source nodes, with edges as homophilous as the target's, the classifier without edges is at "
            f"least as good as the GNN ({mlp:.3f} and {gnn:.3f}): expect that on the target; compare mlp_ with predict"
        )
    if coverage == 0:
        said.append("GNN and MLP agree on no target node, so the target was not adjusted")
    if collapsed(history):
        said.append(
            "the domain head guesses (accuracy 0.5) while held-out source accuracy or agreement falls: alignment has "
            "destroyed the classes; lower lambda_max"
        )
    return HomophilyReport(
        source_h=source_h,
        target_h=target_h,
        wasserstein=float(wasserstein_distance(*known)) if all(map(len, known)) else float("nan"),
        coverage=coverage,
        exhausted=adjustment.short / max(adjustment.adjusted, 1),
        warnings=said,
        **accuracies,
    )


def rewired(
    edges: Edges, y: Labels, target_h: Float64[Tensor, " m"], generator: torch.Generator
) -> Edges:  # fmt: skip
    """The same nodes, labels, loops and about as many edges, with the homophily of another graph.

    Each node draws its share of equal neighbours from the finite values of ``target_h``. Each edge keeps its receiver,
    whose share decides whether a node of its class or of another, drawn uniformly, becomes the sender. Edges that go
    both ways still do: one end, chosen by chance, then draws the other.
    """
    n, blocks = len(y), class_blocks(y, y >= 0)

    def uniform(k: int) -> Tensor:
        return torch.rand(k, dtype=torch.float64, generator=generator).to(y.device)

    sender, receiver = edges.index
    loops = sender == receiver
    degree = torch.bincount(receiver, minlength=n)
    loop = torch.bincount(receiver[loops], minlength=n)
    finite = target_h[target_h.isfinite()]
    share = finite[(uniform(n) * len(finite)).long()]
    share = (share * degree - loop) / (degree - loop)  # a loop counts as an equal neighbour

    both_ways = torch.equal((sender * n + receiver).sort().values, edges.keys(n))
    drawn = sender < receiver if both_ways else ~loops
    into, weight = receiver[drawn], edges.weight[drawn]
    if both_ways:
        into = torch.where(uniform(len(into)) < 0.5, into, sender[drawn])
    own, begin = blocks.size[y[into]], blocks.first[y[into]]
    same = (uniform(len(into)) < share[into]) | (own == n)
    # positions by class: within the own block, or anywhere else, counted as if that block were not there
    inside = begin + (uniform(len(into)) * own).long()
    outside = (uniform(len(into)) * (n - own)).long()
    place = torch.where(same, inside, outside + torch.where(outside >= begin, own, 0))
    new = torch.stack([blocks.order[place], into])
    if both_ways:
        new, weight = torch.cat([new, new.flip(0)], 1), weight.repeat(2)
    kept = edges.index[:, loops]
    return coalesce(torch.cat([kept, new], 1), torch.cat([edges.weight[loops], weight]), n)


def collapsed(history: Sequence[Mapping[str, float]]) -> bool:
    """What we saw with lambda_max = 1 (3.10): in the last fifth of the epochs the domain accuracy is within 0.03 of one
    half, and source accuracy or agreement at least 0.1 below its best fifth.
    """
    fifth = len(history) // 5
    if fifth < 2:
        return False

    def means(name: str) -> np.ndarray:
        values = [line[name] for line in history]
        return np.array([np.mean(values[len(values) - (k + 1) * fifth :][:fifth]) for k in range(5)])

    falls = max(float(m[1:].max() - m[0]) for m in (means("source_val"), means("agreement")))
    return bool(abs(means("domain_accuracy")[0] - 0.5) < 0.03) and falls >= 0.1
