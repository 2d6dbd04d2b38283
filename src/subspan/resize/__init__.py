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

if TYPE_CHECKING:
    from subspan.resize.binary.callback import SurgeCallback

__all__ = [
    "BinaryConv1d",
    "BinaryConv2d",
    "BinaryLinear",
    "GradientMoments",
    "PackedConv",
    "PackedLinear",
    "SurgeCallback",
    "SurgeConfig",
    "SurgeMonitor",
    "binarize",
    "clip_latent",
    "export_binary",
    "load_packed",
    "load_twins",
    "param_groups",
    "save_packed",
    "set_progress",
    "smoothed_sign_loss",
    "strip_aux",
    "surge_conv2d",
    "surge_linear",
]


def __getattr__(name: str) -> Any:
    if name == "SurgeCallback":  # transformers is imported when it is asked for
        from subspan.resize.binary.callback import SurgeCallback

        return SurgeCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
