"""What can be said of two graphs, and of a fit, without any label of the target (spec 3.8)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from subspan.structure.homophily.adjust import AdjustReport


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
        mlp_matched, gnn_matched: the same with source nodes weighted so that their homophily is distributed as the
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
    mlp_matched: float
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
                    "wasserstein", "coverage", "exhausted", "mlp_source", "gnn_source", "mlp_matched", "gnn_matched",
                    "gnn_adjusted_source", "warnings",
                )
            },
        }  # fmt: skip


def make_report(
    source_h: Tensor, target_h: Tensor, *, held_h: Tensor, mlp: Tensor, gnn: Tensor, leaky: Tensor,
    adjustment: AdjustReport, coverage: float, history: Sequence[Mapping[str, float]],
) -> HomophilyReport:  # fmt: skip
    """Measure and warn. ``mlp``, ``gnn`` and ``leaky`` say for each held-out source node whether it was classified."""
    from scipy.stats import wasserstein_distance

    known = [h[h.isfinite()].cpu().numpy() for h in (source_h, target_h)]
    accuracies = {
        "mlp_source": float(mlp.double().mean()),
        "gnn_source": float(gnn.double().mean()),
        "mlp_matched": matched(mlp, held_h, target_h),
        "gnn_matched": matched(gnn, held_h, target_h),
        "gnn_adjusted_source": float(leaky.double().mean()),
    }
    said = []
    if accuracies["mlp_matched"] >= accuracies["gnn_matched"]:
        said.append(
            "on held-out source nodes with neighbourhoods like the target's the classifier without edges is at least "
            f"as good as the GNN ({accuracies['mlp_matched']:.3f} and {accuracies['gnn_matched']:.3f}): it may be "
            "better on the target, too; compare mlp_ with predict"
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


def matched(correct: Tensor, h: Float64[Tensor, " k"], target_h: Float64[Tensor, " m"], bins: int = 5) -> float:
    """Accuracy over nodes of homophily ``h``, weighted so that its histogram becomes that of ``target_h``.

    Bins that hold no node are left out; nan if that leaves none.
    """

    def histogram(values: Tensor, weights: Tensor | None = None) -> Tensor:
        finite = values.isfinite()
        place = (values[finite] * bins).long().clamp_max(bins - 1)  # h = 1 belongs to the last bin
        return torch.bincount(place, None if weights is None else weights[finite].double(), minlength=bins).double()

    nodes, share = histogram(h), histogram(target_h)
    share = torch.where(nodes > 0, share, 0.0)
    accuracy = histogram(h, correct) / nodes.clamp_min(1.0)
    return float((share @ accuracy) / share.sum())


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
