"""The estimate as an ordinary loss: ``loss.backward()``, accumulation, AMP, DDP and hooks work unchanged."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from subspan.optim.output_space.estimate import Options, Spec, prepared, run
from subspan.optim.output_space.scoring import Loss, Scorer
from subspan.optim.zeroth_order.blocks import seeded

Sigma = float | Tensor | str | Callable[[int], float]

# Above it the noise hardly ever changes a decision: nothing is learnt any more.
STARVED = 50.0
_FORGETTING = 0.99


class _Attach(torch.autograd.Function):
    """Values whose gradient with respect to the outputs is an estimate made beforehand."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        ctx.dtype = output.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = ctx.saved_tensors
        upstream = upstream.reshape(*upstream.shape, *(1,) * (grad.ndim - upstream.ndim))
        grad = (grad * upstream).to(ctx.dtype)
        if torch.is_grad_enabled():  # create_graph=True; ``once_differentiable`` would let a constant pass in silence
            grad = _Once.apply(grad.requires_grad_())
        return grad, None, None  # pyright: ignore[reportReturnType]


class _Once(torch.autograd.Function):
    """A gradient that is no function of anything."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("OutputSpaceLoss cannot be differentiated twice: its gradient is an estimate, not a formula")


@dataclass(frozen=True)
class GeometricSigma:
    """sigma falling geometrically from ``start`` to ``end`` over ``steps``, then constant."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.end > 0 and self.steps >= 1):
            raise ValueError(f"a geometric schedule needs positive ends and steps >= 1, got {self}")

    def __call__(self, step: int) -> float:
        return self.start * (self.end / self.start) ** min(step / self.steps, 1.0)


class OutputSpaceLoss(nn.Module):
    """Any loss of the outputs, differentiable or not, as a training loss: OVLR.

    ``criterion(model(x), y).backward()`` evaluates ``loss`` at 2 ``pairs`` noisy copies of the outputs, and sends the
    score-function estimate of the smoothed loss's gradient through the network, in one backward pass. Noise depends
    on ``seed``, the rank of the process and the number of calls alone: torch's global random state is neither read nor
    moved, and a run resumed from ``state_dict`` goes on as it would have.

    Without gradients, or in eval mode, it returns the value only, and the number of calls stays.

    Args:
        loss: ``loss(out, target)``; see ``output_gradient``.
        sigma: scale of the noise: a number; a tensor that broadcasts against the outputs; a schedule, called with the
            number of training calls so far (``GeometricSigma``); or "relative:a", a times the running RMS of the
            outputs around their mean over an event (over everything, where an event is one number).
        reduction: "mean" over samples, weighted, "sum", or "none".
        value: what is returned and logged: "smoothed", the mean of the evaluations, which for a 0-1 loss lies above the
            clean loss near the boundary; or "clean", the loss at the outputs, one more evaluation.
        seed: of the noise.
        options: ``pairs``, ``estimator``, ``event_dims``, ``credit``, ... see ``Options``.

    Attributes:
        step: training calls so far; under gradient accumulation every micro-batch counts.
        last_sigma, last_ratio: the scale of the last call, and RMS of the outputs / sigma. A 0-1 loss does not mind
            larger logits, so a network can grow out of the noise: a warning is given when the ratio passes 50.

    Raises:
        NonFinite: a loss is NaN or infinite (``on_nonfinite="drop"`` leaves such pairs out), or an output is NaN.
        ValueError: outputs without ``requires_grad`` in training, sigma not positive, weights that are negative.

    Source: OVLR (ICML 2026, poster 64062).
    """

    def __init__(
        self,
        loss: Loss,
        *,
        sigma: Sigma = 1.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        value: Literal["smoothed", "clean"] = "smoothed",
        seed: int = 0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        if not callable(loss):
            raise TypeError(f"loss must be callable, got {type(loss).__name__}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        if value not in ("smoothed", "clean"):
            raise ValueError(f"value must be 'smoothed' or 'clean', got {value!r}")
        self.loss, self.reduction, self.value, self.seed = loss, reduction, value, seed
        self.spec = Spec(**options)
        self.sigma, self._relative = sigma, _relative(sigma)
        if self._relative is None and not callable(sigma) and not bool(torch.as_tensor(sigma).gt(0).all()):
            raise ValueError(f"sigma must be positive, got {sigma}")
        self.step = 0
        self.spread: float | None = None
        self.last_sigma = self.last_ratio = math.nan

    def forward(self, output: Tensor, target: Any = None, *, weight: Tensor | None = None) -> Tensor:
        """The loss of a batch; samples of weight 0 do not count, whatever their loss.

        Args:
            output: (\\*lead, \\*event), from the network. target: handed to the loss. weight: (\\*lead), >= 0.
        """
        if weight is not None and not bool(((weight >= 0) & weight.isfinite()).all()):
            raise ValueError("weights must be finite and not negative")
        values = self.per_sample(output, target, None if weight is None else weight > 0)
        if self.spec.credit == "batch" or self.reduction == "none":
            return values if weight is None else values * weight
        if weight is None:
            return values.sum() / (max(1, values.numel()) if self.reduction == "mean" else 1)
        total = (values * weight.to(values)).sum()
        mass = weight.to(values).sum()
        return total / mass.where(mass > 0, 1) if self.reduction == "mean" else total

    def per_sample(self, output: Tensor, target: Any = None, mask: Tensor | None = None) -> Tensor:
        """The loss of every sample (\\*lead), of the batch for ``credit="batch"``; ``mask`` False: does not count."""
        active = self.training and torch.is_grad_enabled()
        if active and not output.requires_grad:
            raise ValueError("the output does not require grad, so backward would do nothing; use torch.no_grad()")
        z, _, event = prepared(output, self.spec.event_dims)
        sigma = self._sigma(z, event, active)
        generator = seeded(z.device, "output space", "train" if active else "evaluate", self.seed, _rank(), self.step)
        if not active and self.value == "clean":
            return self._clean(z, target, mask)
        estimate, how = run(output, self.loss, target, sigma, self.spec, None, generator, mask)
        self.spec = replace(self.spec, vectorized=how)
        value = estimate.value if self.value == "smoothed" else self._clean(z, target, mask)
        if not active:
            return value
        self.step += 1
        return _Attach.apply(output, value, estimate.grad)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def _clean(self, z: Tensor, target: Any, mask: Tensor | None) -> Tensor:
        """The loss at the outputs themselves."""
        _, lead, event = prepared(z, self.spec.event_dims)
        spec = self.spec
        if z.numel() == 0:
            return z.new_zeros(() if spec.credit == "batch" else lead)
        how = False if spec.vectorized == "auto" else spec.vectorized
        scorer = Scorer.of(self.loss, target, lead, event, spec.credit, how, spec.as_numpy)
        with torch.autocast(z.device.type, enabled=False):
            losses = scorer(z.unsqueeze(0))[0].to(z.dtype)
        losses = losses.sum(-1) if spec.credit == "elementwise" else losses
        return losses if mask is None else losses.where(mask, 0)

    def _sigma(self, z: Tensor, event: int, active: bool) -> float | Tensor:
        """The scale of this call, and the bookkeeping of the outputs' size."""
        spread = _spread(z, event)
        if active and spread > 0:
            old = self.spread
            self.spread = spread if old is None else _FORGETTING * old + (1 - _FORGETTING) * spread
        if self._relative is not None:
            # Outputs that are still all equal have no scale of their own.
            sigma: Any = self._relative * (self.spread or spread or 1.0)
        else:
            sigma = self.sigma(self.step) if callable(self.sigma) else self.sigma
        self.last_sigma = float(sigma.mean()) if isinstance(sigma, Tensor) else float(sigma)
        starved = self.last_ratio > STARVED
        self.last_ratio = spread / self.last_sigma if self.last_sigma > 0 else math.inf
        if active and self.last_ratio > STARVED and not starved:
            warnings.warn(
                f"the outputs' RMS is {self.last_ratio:.0f} times sigma: noise hardly changes the loss now, so the "
                "gradient starves; raise sigma, use sigma='relative:a', or decay the last layer's weights",
                stacklevel=4,
            )
        return sigma

    def get_extra_state(self) -> Tensor:
        """Calls so far and running RMS, as a tensor so that any format can hold it."""
        return torch.tensor([self.step, math.nan if self.spread is None else self.spread], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        step, spread = state.tolist()
        self.step, self.spread = int(step), None if math.isnan(spread) else spread

    def extra_repr(self) -> str:
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return f"{name}, pairs={self.spec.pairs}, sigma={self.sigma}, estimator={self.spec.estimator!r}"


def _relative(sigma: Sigma) -> float | None:
    """a of "relative:a"."""
    if not isinstance(sigma, str):
        return None
    word, _, number = sigma.partition(":")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if word != "relative" or not 0 < value < math.inf:
        raise ValueError(f"sigma as a text must be 'relative:a' with a positive number a, got {sigma!r}")
    return value


def _spread(z: Tensor, event: int) -> float:
    """RMS of the outputs around their mean over an event; an event of one number has its mean taken over all."""
    if z.numel() == 0:
        return 0.0
    rows = z.view(-1, event) if event > 1 else z.view(1, -1)
    return float(rows.var(1, correction=0).mean().sqrt())


def _rank() -> int:
    """Processes that share a batch must not share their noise."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def compute_loss_func(
    criterion: OutputSpaceLoss, *, shift_labels: bool = False, ignore_index: int = -100
) -> Callable[..., Tensor]:
    """``transformers.Trainer(compute_loss_func=compute_loss_func(criterion))``: the criterion on ``outputs.logits``.

    Labels of ``ignore_index`` do not count. ``shift_labels`` is for causal language models, whose logits at a position
    belong to the next label. Micro-batches of an accumulated batch are weighed by their labels.
    """

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if shift_labels:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if labels.is_floating_point():
            mask, count = None, logits.new_tensor(len(labels))
            if num_items_in_batch is not None:  # the Trainer counts numbers, here a row is one item
                num_items_in_batch = num_items_in_batch / labels[0].numel()
        else:
            mask = labels != ignore_index
            labels, count = labels.where(mask, 0), mask.sum()
        if criterion.spec.credit == "batch":
            total = criterion.per_sample(logits, labels) * count
        else:
            total = criterion.per_sample(logits, labels, mask).sum()
        return total / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)

    return compute
