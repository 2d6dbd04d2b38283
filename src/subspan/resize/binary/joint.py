"""The joint backward pass: straight-through gradient plus the scaled gradient of a full-precision twin.

The published form adds and subtracts the twin's output, f_b - sg(lambda f_a) + lambda f_a. In floating point that is
not f_b, it costs a second forward pass, and it cannot know the norms that lambda is made of. One autograd function
per layer computes f_b alone, and all gradients in its backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from subspan.resize.binary.config import SurgeConfig
from subspan.resize.binary.estimators import derivative, filter_scale, per_channel, sign, weight_gradient

_PUBLISHED = SurgeConfig()


class Dense:
    """x W^T over the last dimension, and its two transposes."""

    channel_dim = -1

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    def input_grad(self, g: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return g @ weight

    def weight_grad(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class Convolution:
    """A convolution, padded with zeros (after the sign: a padded place adds nothing), and its two transposes."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    channel_dim = 1

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        conv = (torch.conv1d, torch.conv2d)[len(self.stride) - 1]
        return conv(x, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def _transposed(self, g: Tensor, x: Tensor, weight: Tensor, of_input: bool) -> Tensor:
        none, wanted = [0] * len(self.stride), [of_input, not of_input, False]
        grads = torch.ops.aten.convolution_backward(
            g, x, weight, None, self.stride, self.padding, self.dilation, False, none, self.groups, wanted
        )
        return grads[0 if of_input else 1]

    def input_grad(self, g: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return self._transposed(g, x, weight, of_input=True)

    def weight_grad(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._transposed(g, x, weight, of_input=False)


def norm(g: Float[Tensor, "*s"], granularity: str, channel_dim: int) -> Tensor:
    """||g||_2 in float32 or better: of all of it, of each sample or of each channel, in a shape that multiplies g."""
    # Sums of more than 2^24 squares lose their last terms in float32.
    wide = torch.float64 if g.dtype == torch.float64 or g.numel() > 2**24 else torch.float32
    if granularity == "layer":
        return torch.linalg.vector_norm(g, dtype=wide)
    kept = 0 if granularity == "sample" else channel_dim % g.ndim
    return torch.linalg.vector_norm(g, dim=[d for d in range(g.ndim) if d != kept], keepdim=True, dtype=wide)


def compensation(
    g_ref: Float[Tensor, "*s"],
    g_a: Float[Tensor, "*s"],
    config: SurgeConfig,
    *,
    channel_dim: int = -1,
    progress: float = 0.0,
    running: Tensor | None = None,
) -> Tensor:
    """lambda = eta ||g_b|| / (||g_a|| + eps), at most ``lambda_max``; or the constant of mode "fixed".

    ``running`` holds (sum of the weights, smoothed ||g_b||, smoothed ||g_a||) and is updated in place, unless a norm
    is not finite (a gradient scaler looking for its scale).
    """
    if config.mode == "fixed":
        return torch.tensor(config.fixed_scale, dtype=torch.promote_types(g_a.dtype, torch.float32), device=g_a.device)
    b, a = (norm(g, config.granularity, channel_dim) for g in (g_ref, g_a))
    if running is not None and config.ema is not None:
        seen = torch.stack([torch.ones_like(b), b, a]).to(running)
        running.copy_(torch.where(seen.isfinite().all(), torch.lerp(seen, running, config.ema), running))
        total = running[0].clamp_min(torch.finfo(running.dtype).tiny)  # zero until a finite norm was seen
        b, a = running[1] / total, running[2] / total
    return (config.eta_at(progress) * b / (a + config.eps)).clamp_max(config.lambda_max)  # (3.3)


@dataclass(frozen=True)
class Observed:
    """What a backward pass of one layer saw."""

    scale: Tensor
    straight: Tensor
    twin: Tensor
    saturated: Tensor


@dataclass
class Call:
    """All of a layer's call that is not a tensor to differentiate."""

    operator: Dense | Convolution
    config: SurgeConfig
    progress: float = 0.0
    running: Tensor | None = None
    record: Callable[[Observed], None] | None = None


class _Surge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, twin: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
        config = call.config
        signs = sign(x)
        # Where only signs and the clip mask are needed again, one byte keeps both: +-2 inside [-1, 1], +-1 outside.
        coded = config.estimator in ("clip", "identity") and not ctx.needs_input_grad[2]
        kept = (signs * (1 + (x.abs() <= 1))).to(torch.int8) if coded else x
        ctx.save_for_backward(kept, weight, twin)
        ctx.call = call
        alpha = filter_scale(weight) if config.alpha == "channel" else None
        return scaled_output(call.operator(signs, sign(weight)), alpha, bias, call.operator.channel_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        operator, config = call.operator, call.config
        kept, weight, twin = ctx.saved_tensors
        for_x, for_weight, for_twin, for_bias, _ = ctx.needs_input_grad
        # Under autocast the output, and so g, is of another dtype than the input and the parameters. Signs and masks
        # are the input's own: in half precision 1.0001 would be 1, and -1e-9 would be 0.
        coded = kept.dtype == torch.int8
        if coded:
            kept = (2 - (kept.abs() == 2).to(g.dtype)).mul_(kept.sign())
        x = kept.to(g.dtype)
        alpha = filter_scale(weight) if config.alpha == "channel" else None
        binary = sign(weight)
        grad_x = grad_weight = grad_twin = grad_bias = None
        if for_bias:
            grad_bias = g.sum([d for d in range(g.ndim) if d != operator.channel_dim % g.ndim])
        if for_weight:
            grad = operator.weight_grad(g, sign(kept).to(g.dtype), binary.to(g.dtype))
            grad_weight = weight_gradient(grad.to(weight.dtype), weight, alpha, config.alpha_grad)
        if for_x or for_twin:
            quantised = (binary if alpha is None else per_channel(alpha, binary) * binary).to(g.dtype)
            whole = operator.input_grad(g, quantised, x)
            slope = derivative(kept, config.estimator, call.progress)
            grad_x = whole if slope is None else whole * slope.to(g.dtype)  # g_b
            if twin is not None and config.mode != "ste":
                g_a = operator.input_grad(g, twin.to(g.dtype), x)
                scale = compensation(
                    grad_x if config.reference == "clipped" else whole,
                    g_a,
                    config,
                    channel_dim=operator.channel_dim,
                    progress=call.progress,
                    running=call.running,
                )
                if call.record is not None:
                    call.record(Observed(scale, grad_x, g_a, kept.abs() > 1))
                if for_twin:
                    # lambda f_a = op(lambda x, W_a): one lambda may wait until after the sum.
                    one = scale.ndim == 0
                    grad_twin = operator.weight_grad(g, x if one else (scale * x).to(g.dtype), twin.to(g.dtype))
                    grad_twin = grad_twin.to(twin.dtype).mul_(scale) if one else grad_twin
                wide = torch.promote_types(g.dtype, torch.float32)  # lambda may be beyond half precision's range
                grad_x = grad_x + (scale * g_a.to(wide)).to(g.dtype)  # (3.2)
            elif call.record is not None:
                call.record(Observed(torch.zeros(()), grad_x, torch.zeros_like(grad_x), kept.abs() > 1))
        return (grad_x if for_x else None), grad_weight, grad_twin, grad_bias, None


def scaled_output(y: Tensor, alpha: Tensor | None, bias: Tensor | None, channel_dim: int) -> Tensor:
    """alpha y + bias by output channel. The packed layers do the same on the same integers y."""
    shape = (-1,) if channel_dim == -1 else (-1, *(1,) * (y.ndim - 2))
    if alpha is not None:
        y = y * alpha.to(y.dtype).view(shape)
    return y if bias is None else y + bias.to(y.dtype).view(shape)


def require_floating(x: Tensor) -> None:
    """Binary layers, packed or not, answer in their input's dtype."""
    if not x.is_floating_point():
        raise TypeError(f"a binary layer takes floating-point inputs, got {x.dtype}")


def surge(x: Tensor, weight: Tensor, twin: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    """The output of a binary layer, alpha op(sign x, sign W) + bias, with SURGE's gradient behind it."""
    config = call.config
    require_floating(x)
    if config.share and config.mode != "ste":
        twin = weight.detach()
    if twin is not None and twin.shape != weight.shape:
        raise ValueError(f"the twin's weight is {tuple(twin.shape)}, the layer's {tuple(weight.shape)}")
    if config.debug and not x.isfinite().all():
        raise ValueError("the input of a binary layer holds NaN or infinity")
    return _Surge.apply(x, weight, twin, bias, call)  # pyright: ignore[reportReturnType]


def surge_linear(
    x: Float[Tensor, "*b p"],
    weight: Float[Tensor, "q p"],
    twin: Float[Tensor, "q p"] | None,
    bias: Float[Tensor, " q"] | None = None,
    config: SurgeConfig = _PUBLISHED,
) -> Float[Tensor, "*b q"]:
    """A binary linear layer with the joint gradient (Huang et al., ICML 2026, equations of section 3.2).

    Args:
        x: real inputs.
        weight: latent weights W_b; only their signs and mean magnitudes reach the output.
        twin: W_a of the full-precision twin, which never reaches the output; None trains straight through.
        bias: added as it is.
        config: how the gradient is made.

    Raises:
        TypeError: x is not floating point.
        ValueError: the shapes of the two weights differ.
    """
    return surge(x, weight, twin, bias, Call(Dense(), config))


def surge_conv2d(
    x: Float[Tensor, "b c h w"],
    weight: Float[Tensor, "q d i j"],
    twin: Float[Tensor, "q d i j"] | None,
    bias: Float[Tensor, " q"] | None = None,
    config: SurgeConfig = _PUBLISHED,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Float[Tensor, "b q y x"]:
    """``surge_linear`` for a two-dimensional convolution, padded with zeros after the sign."""
    operator = Convolution((stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)
    return surge(x, weight, twin, bias, Call(operator, config))
