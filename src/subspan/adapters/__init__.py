"""What is trained, and from where."""

from typing import TYPE_CHECKING, Any

from subspan.adapters.aoept.backbones import BackboneAdapter, ClipAdapter, Stream, ViltAdapter
from subspan.adapters.aoept.bank import PrototypeBank
from subspan.adapters.aoept.classifier import MissingModalityClassifier
from subspan.adapters.aoept.config import AOEPTConfig
from subspan.adapters.aoept.missing import missing_table
from subspan.adapters.aoept.model import AOEPTModel, AOEPTOutput
from subspan.adapters.aoept.nm2i import NM2IReport, coded_nm2i, gaussian_information, gaussian_nm2i, nm2i
from subspan.adapters.aoept.towers import TokenEmbedding, TorchTowersAdapter, Tower, contrastive_pretrain, make_towers
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
from subspan.adapters.moram import (
    ContinualMoRAMClassifier,
    LayerUsage,
    MoRAM,
    MoRAMConfig,
    MoRAMLinear,
    cl_metrics,
    disable_moram,
    inject_moram,
    load_moram,
    save_moram,
)
from subspan.surgery import FisherStats, collect_fisher

if TYPE_CHECKING:
    from subspan.adapters.aoept.callback import GateCallback
    from subspan.adapters.moram.callback import MoRAMCallback

__all__ = [
    "AOEPTConfig",
    "AOEPTModel",
    "AOEPTOutput",
    "BackboneAdapter",
    "ClipAdapter",
    "ContinualMoRAMClassifier",
    "Directions",
    "FisherStats",
    "GateCallback",
    "InitReport",
    "LayerReport",
    "LayerSpectrum",
    "LayerUsage",
    "MissingModalityClassifier",
    "MoRAM",
    "MoRAMCallback",
    "MoRAMConfig",
    "MoRAMLinear",
    "NM2IReport",
    "PrototypeBank",
    "RankAllocation",
    "Stream",
    "TokenEmbedding",
    "TorchTowersAdapter",
    "Tower",
    "ViltAdapter",
    "alignment_scores",
    "allocate_ranks",
    "cl_metrics",
    "coded_nm2i",
    "collect_fisher",
    "contrastive_pretrain",
    "directions",
    "disable_moram",
    "fisher_init",
    "fisher_spectrum",
    "gaussian_information",
    "gaussian_nm2i",
    "inject_moram",
    "load_moram",
    "make_towers",
    "missing_table",
    "nm2i",
    "save_moram",
]


def __getattr__(name: str) -> Any:
    if name == "GateCallback":  # needs transformers
        from subspan.adapters.aoept.callback import GateCallback

        return GateCallback
    if name == "MoRAMCallback":  # needs transformers
        from subspan.adapters.moram.callback import MoRAMCallback

        return MoRAMCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
