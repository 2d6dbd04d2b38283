"""MoRAM: continual learning by a growing bank of rank-1 associative memories in each linear layer."""

from subspan.adapters.moram.classifier import ContinualMoRAMClassifier
from subspan.adapters.moram.config import MoRAMConfig
from subspan.adapters.moram.layer import MoRAMLinear
from subspan.adapters.moram.metrics import cl_metrics
from subspan.adapters.moram.model import MoRAM, disable_moram, inject_moram, load_moram, save_moram
from subspan.adapters.moram.usage import LayerUsage

__all__ = [
    "ContinualMoRAMClassifier",
    "LayerUsage",
    "MoRAM",
    "MoRAMConfig",
    "MoRAMLinear",
    "cl_metrics",
    "disable_moram",
    "inject_moram",
    "load_moram",
    "save_moram",
]
