"""Networks that mix through a bottleneck."""

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
    "Factors",
    "FullAttention",
    "LRSAAttention",
    "LRSABlock",
    "LRSAOperator",
    "LayerDiagnosis",
    "PhysicsAttention",
    "SpectralMixer",
    "diagnose",
    "effective_rank",
    "mixing_kernel",
    "pad_points",
    "relative_l2",
    "relative_l2_gradient",
    "spectrum",
]
