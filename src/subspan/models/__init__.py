"""Networks that mix through a bottleneck."""

from subspan.models.facrnn.alignment import AlignmentReport, align_groups, best_partition, connectivity_scores
from subspan.models.facrnn.estimator import FacRNN, Identifiability
from subspan.models.facrnn.network import LowRankRNN, encoder_from_recurrence, objective
from subspan.models.facrnn.penalty import (
    Dependence,
    dependence,
    partial_correlation,
    resolve_groups,
    total_correlation,
)
from subspan.models.facrnn.readouts import Readout, ica_readout, svd_readout
from subspan.models.facrnn.report import latent_page, trajectory_figure
from subspan.models.lrsa.measures import (
    LayerDiagnosis,
    diagnose,
    effective_rank,
    mixing_kernel,
    relative_l2,
    relative_l2_gradient,
    spectrum,
)
from subspan.models.lrsa.mixers import Factors, FullAttention, LRSAAttention, PhysicsAttention, SpectralMixer
from subspan.models.lrsa.operator import LRSABlock, LRSAOperator
from subspan.models.lrsa.ragged import pad_points

__all__ = [
    "AlignmentReport",
    "Dependence",
    "FacRNN",
    "Factors",
    "FullAttention",
    "Identifiability",
    "LRSAAttention",
    "LRSABlock",
    "LRSAOperator",
    "LayerDiagnosis",
    "LowRankRNN",
    "PhysicsAttention",
    "Readout",
    "SpectralMixer",
    "align_groups",
    "best_partition",
    "connectivity_scores",
    "dependence",
    "diagnose",
    "effective_rank",
    "encoder_from_recurrence",
    "ica_readout",
    "latent_page",
    "mixing_kernel",
    "objective",
    "pad_points",
    "partial_correlation",
    "relative_l2",
    "relative_l2_gradient",
    "resolve_groups",
    "spectrum",
    "svd_readout",
    "total_correlation",
    "trajectory_figure",
]
