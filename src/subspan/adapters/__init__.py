"""What is trained, and from where."""

from subspan.adapters.fisher_init import (
    Directions,
    InitReport,
    LayerReport,
    LayerSpectrum,
    RankAllocation,
    alignment_scores,
    allocate_ranks,
    directions,
    fisher_init,
    fisher_spectrum,
)
from subspan.surgery import FisherStats, collect_fisher

__all__ = [
    "Directions",
    "FisherStats",
    "InitReport",
    "LayerReport",
    "LayerSpectrum",
    "RankAllocation",
    "alignment_scores",
    "allocate_ranks",
    "collect_fisher",
    "directions",
    "fisher_init",
    "fisher_spectrum",
]
