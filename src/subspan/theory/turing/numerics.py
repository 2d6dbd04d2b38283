"""From hardmax to softmax with rounding: scales, the denoiser, and how many tied maximisers a weight format carries.

Letters in brackets are those of the derivation on the method's page: a row's softmax differs from its hardmax by at
most 2 (n - 1) e^(-c g) in l1, rounding at most doubles a distance to -1, 0 or 1, and k tied maximisers get weights 1/k,
which no scale makes representable.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.errors import SubspanError

Attention = Literal["hardmax", "softmax", "sparse1"]
Denoise = Literal["mlp", "mlp-selective", "mlp-full", "snap"]
Choice = Literal["first", "last", "random"]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


class TieLimit(SubspanError):
    """More tied maximisers than the format of the attention weights carries."""


@dataclass(frozen=True)
class Arithmetic:
    """How attention weighs, and what is rounded to which format. ``dtype`` None rounds nothing."""

    attention: Attention = "hardmax"
    scale: float | None = None
    dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = None
    denoise: Denoise | None = None
    choice: Choice = "last"
    tie_guard: bool = True

    @property
    def selective(self) -> bool:
        """Whether the denoiser runs only on coordinates that a head of the layer wrote."""
        return self.denoise == "mlp-selective" or (self.denoise == "mlp" and self.dtype not in FP8)


def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x at the nearest values of ``dtype`` (ties to even), in its own dtype."""
    return x if dtype is None or dtype == x.dtype else x.to(dtype).to(x.dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding in the normal range."""
    return torch.finfo(dtype).eps / 2


def smallest_weight(dtype: torch.dtype) -> float:
    """Smallest positive value that attention weights may use: subnormals too, except in bf16 and wider.

    Kernels flush the subnormals of the wide formats; at 1e-38 they are of no use either.
    """
    info = torch.finfo(dtype)
    return info.tiny if info.tiny < 1e-30 else info.tiny * info.eps


def tie_limit(dtype: torch.dtype) -> int:
    """k_safe = 0.625/s - 1: with so many tied maximisers the rounded weights 1/k still sum to less than 5/4 (3.6 f).

    For formats with subnormals it is exact: one more tie first gives 5/4. Where 1/k stays normal (bf16, fp32) it is the
    number of ties at which it no longer does.
    """
    s = smallest_weight(dtype)
    return math.ceil(0.625 / s) - 1 if s > 1e-30 else int(1 / s)


def required_scale(
    n: int, g: float = 1.0, denoise: Denoise | None = "mlp", weight_dtype: torch.dtype = torch.float32
) -> float:
    """Smallest scale c for which the derivation holds on contexts of n tokens (3.6 e).

    With the denoising MLP the window is 1/4: 2 (2 (n - 1) e^(-c g) + u_w) < 1/4, so c = ln(16 n / (1 - 8 u_w)) / g. For
    e5m2 that is void (8 u_w = 1); ln(32 n) was enough in every run. Snapping has the window 1/2, less what rounding
    takes on both sides of it: ln(4 n / (1 - 4 u_w)) / g, in 8-bit weights at least 8 (measured, no bound).

    Raises:
        ValueError: n below 1, g not positive, or no denoising, for which there is no closed form.
    """
    if n < 1 or g <= 0:
        raise ValueError(f"needs n >= 1 and a separation g > 0, got {n} and {g}")
    if denoise is None:
        raise ValueError("there is no closed form without denoising: give the scale, or see measured_scale")
    u = unit_roundoff(weight_dtype)
    if denoise == "snap":
        return max(math.log(4 * n / (1 - 4 * u)) / g, 8.0 if weight_dtype in FP8 else 0.0)
    return math.log(16 * n / max(1 - 8 * u, 0.5)) / g


def paper_scale(scale: float, key_width: int) -> float:
    """c_p: W_Q and W_K are both multiplied by it in a layer that divides by sqrt(d_k), so c = c_p^2 / sqrt(d_k)."""
    return math.sqrt(scale * math.sqrt(key_width))


def check_scale(scale: float, needed: float | None) -> None:
    if not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"scale must be finite and positive, got {scale}")
    if needed is not None and scale < needed:
        warnings.warn(
            f"scale {scale:.3g} is below {needed:.3g}, from which the derivation holds: tokens may be wrong",
            stacklevel=3,
        )


def check_format(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point dtype, got {dtype}")


# ------------------------------------------------------------------------------------------------------------ denoising

# f(x) = sum of slope_in: relu(sign x - threshold) * slope; x + f(x) is 0, +-1 or a line of slope 2 between (3.6 d)
DENOISER = (  # (sign, threshold, slope)
    (1.0, 0.25, 2.0),
    (1.0, 0.75, -2.0),
    (-1.0, 0.25, -2.0),
    (-1.0, 0.75, 2.0),
    (1.0, 0.0, -1.0),
    (-1.0, 0.0, 1.0),
)


def denoised(x: Float[Tensor, "*n"], dtype: torch.dtype | None = None) -> Float[Tensor, "*n"]:
    """x + f(x) with six neurons per coordinate, hidden values and result rounded to ``dtype`` (3.6 d).

    0 on [-1/4, 1/4], +-1 from 3/4 on; in between errors are doubled.
    """
    sign, threshold, slope = (x.new_tensor(column) for column in zip(*DENOISER, strict=True))
    column = (-1, *[1] * x.dim())  # neurons first: rows of coordinates stay contiguous
    hidden = rounded(torch.relu(x * sign.view(column) - threshold.view(column)), dtype)
    f = torch.tensordot(slope, hidden, 1)
    return rounded(x + f, dtype)


def snapped(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """The nearest of -1, 0 and 1."""
    return x.round().clamp(-1, 1)
