"""Models made wider, smaller, or one bit."""

from typing import TYPE_CHECKING, Any

from subspan.resize.binary.config import SurgeConfig
from subspan.resize.binary.fidelity import GradientMoments, smoothed_sign_loss
from subspan.resize.binary.joint import surge_conv2d, surge_linear
from subspan.resize.binary.layers import (
    BinaryConv1d,
    BinaryConv2d,
    BinaryLinear,
    binarize,
    clip_latent,
    load_twins,
    param_groups,
    set_progress,
    strip_aux,
)
from subspan.resize.binary.monitor import SurgeMonitor
from subspan.resize.binary.packed import PackedConv, PackedLinear, export_binary, load_packed, save_packed
from subspan.resize.tileq.checkpoint import compress_checkpoint, load_compressed, load_report, save_compressed
from subspan.resize.tileq.config import TileQConfig
from subspan.resize.tileq.experts import TileQExperts, TileQLinear
from subspan.resize.tileq.factors import TileFactors, tile_factorize
from subspan.resize.tileq.fit import fit_projection
from subspan.resize.tileq.fused import lowrank_moe
from subspan.resize.tileq.layout import bit_budget
from subspan.resize.tileq.moments import Moments
from subspan.resize.tileq.placement import place_experts
from subspan.resize.tileq.report import TileQReport
from subspan.resize.tileq.scales import activation_scale
from subspan.resize.tileq.sources import Experts, read_experts
from subspan.resize.tileq.texts import calibration_batches
from subspan.resize.tileq.walk import calibrated_layers, quantize_moe
from subspan.resize.width.checkpoint import GrowthSummary, grow_checkpoint
from subspan.resize.width.families import register_axes
from subspan.resize.width.model import WidthReport, axis_text, expand_width, fold_width, trap_projected
from subspan.resize.width.monitor import TrapMonitor, initial_alignment, use_of_width
from subspan.resize.width.optimizers import asymmetric_state_reset, expand_optimizer_state, suggest_lr
from subspan.resize.width.tiling import escape_ratio, trap_projection

if TYPE_CHECKING:
    from subspan.resize.binary.callback import SurgeCallback
    from subspan.resize.width.callback import TrapCallback

__all__ = [
    "BinaryConv1d",
    "BinaryConv2d",
    "BinaryLinear",
    "Experts",
    "GradientMoments",
    "GrowthSummary",
    "Moments",
    "PackedConv",
    "PackedLinear",
    "SurgeCallback",
    "SurgeConfig",
    "SurgeMonitor",
    "TileFactors",
    "TileQConfig",
    "TileQExperts",
    "TileQLinear",
    "TileQReport",
    "TrapCallback",
    "TrapMonitor",
    "WidthReport",
    "activation_scale",
    "asymmetric_state_reset",
    "axis_text",
    "binarize",
    "bit_budget",
    "calibrated_layers",
    "calibration_batches",
    "clip_latent",
    "compress_checkpoint",
    "escape_ratio",
    "expand_optimizer_state",
    "expand_width",
    "export_binary",
    "fit_projection",
    "fold_width",
    "grow_checkpoint",
    "initial_alignment",
    "load_compressed",
    "load_packed",
    "load_report",
    "load_twins",
    "lowrank_moe",
    "param_groups",
    "place_experts",
    "quantize_moe",
    "read_experts",
    "register_axes",
    "save_compressed",
    "save_packed",
    "set_progress",
    "smoothed_sign_loss",
    "strip_aux",
    "suggest_lr",
    "surge_conv2d",
    "surge_linear",
    "tile_factorize",
    "trap_projected",
    "trap_projection",
    "use_of_width",
]


def __getattr__(name: str) -> Any:
    if name == "SurgeCallback":  # transformers is imported when it is asked for
        from subspan.resize.binary.callback import SurgeCallback

        return SurgeCallback
    if name == "TrapCallback":
        from subspan.resize.width.callback import TrapCallback

        return TrapCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
