"""The gradient of a smoothed loss with respect to a network's outputs, from evaluations of the loss alone.

OVLR: "Efficient, Scalable, and Robust Training via Output-Level Variance-Reduced Likelihood Ratio" (ICML 2026, poster
64062). Only its abstract was readable; (3.1) is the score-function identity it rests on, everything marked [design] in
the method's page is this project's. Equation numbers are those of docs/methods/ovlr.md.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from jaxtyping import Bool
from torch import Tensor

from subspan.errors import NonFinite
from subspan.optim.output_space.noise import Draws, Law, check_basis
from subspan.optim.output_space.scoring import Credit, Loss, Scorer, Vectorized

Estimator = Literal["antithetic", "plain", "loo", "forward", "orthogonal", "sphere"]
MIRRORED: dict[str, Law] = {"antithetic": "gaussian", "orthogonal": "orthogonal", "sphere": "sphere"}
ONE_SIDED = ("plain", "loo", "forward")

# Noise and perturbed outputs are made in pieces of this many numbers unless ``chunk`` says otherwise.
_PIECE = 2**20


@dataclass(frozen=True)
class OutputGradient:
    """What the loss says about the outputs."""

    grad: Tensor
    """Like the output, per sample (not divided by the batch): estimates the gradient of E l(z + sigma eps)."""
    value: Tensor
    """Mean of the evaluations, per sample (per batch for ``credit="batch"``): estimates E l(z + sigma eps)."""
    evaluations: int
    """Noisy (and clean) outputs scored; what ``vectorized="auto"`` tried first is not counted."""
    stderr: Tensor | None = None
    """Standard error of each coordinate of ``grad``, on demand. A stochastic loss's own variance, which adds its share
    v / (2 sigma^2 M) to a coordinate, is in it."""
    draws: int = 0
    """Independent terms that ``grad`` is the mean of: pairs, or single draws for one-sided estimators."""


class Options(TypedDict, total=False):
    """How to estimate; defaults in brackets."""

    pairs: int
    """M (16). One-sided estimators take 2 M draws, the same number of evaluations."""
    estimator: Estimator
    """"antithetic" (pairs z +- sigma eps, the default), "plain", "loo" (plain minus the mean of the other losses),
    "forward" (plain minus the clean loss; one more evaluation), "orthogonal" (antithetic with orthogonal draws) or
    "sphere" (and of constant length: another smoothing law, exact for linear and quadratic losses at M a multiple of
    K)."""
    event_dims: int
    """Trailing dimensions that get noise jointly (1); with 0 every number is its own event."""
    credit: Credit
    """"sample" (losses n x *lead, the default); "elementwise" for losses n x *lead x G, the g-th belonging to the g-th
    of G equal groups of an event's coordinates; "batch" for n losses of the whole batch."""
    invariance: Literal["shift"] | None
    """"shift" projects the estimate to sum 0 over an event (a group): for losses with l(z + c) = l(z) (None)."""
    basis: Tensor | None
    """Noise only in the span of orthonormal columns (K x r), or on r coordinates of each event (int64, *lead x r; see
    ``top_coordinates``): estimates the gradient's part there (None)."""
    chunk: int | None
    """Draws held at once; memory is about chunk x *output x 12 bytes. It cannot change the result."""
    vectorized: Vectorized
    """Whether the loss takes stacked outputs: True, False, "vmap", or "auto": what agrees with a loop on two points."""
    on_nonfinite: Literal["raise", "drop"]
    """"raise" ``NonFinite``, or "drop" the pair and divide by what is left, sample by sample."""
    as_numpy: bool
    """Hand over numpy arrays (False)."""


@dataclass(frozen=True)
class Spec:
    """The options with their defaults, checked."""

    pairs: int = 16
    estimator: Estimator = "antithetic"
    event_dims: int = 1
    credit: Credit = "sample"
    invariance: Literal["shift"] | None = None
    basis: Tensor | None = None
    chunk: int | None = None
    vectorized: Vectorized = "auto"
    on_nonfinite: Literal["raise", "drop"] = "raise"
    as_numpy: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("estimator", (*MIRRORED, *ONE_SIDED)),
            ("credit", ("sample", "elementwise", "batch")),
            ("invariance", (None, "shift")),
            ("vectorized", (True, False, "auto", "vmap")),
            ("on_nonfinite", ("raise", "drop")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")
        for name, least in (("pairs", 1), ("chunk", 1), ("event_dims", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.invariance is not None and self.basis is not None:
            raise ValueError(
                "invariance='shift' does not go with a basis: the gradient's part in a subspace need not sum to 0"
            )


def output_gradient(
    output: Tensor,
    loss: Loss,
    target: Any = None,
    *,
    sigma: float | Tensor,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    mask: Bool[Tensor, "*lead"] | None = None,
    stderr: bool = False,
    **options: Unpack[Options],
) -> OutputGradient:
    """Estimate the gradient of E l(z + sigma eps, y) with respect to z by evaluating l alone.

    ``loss(out, target)`` (``loss(out)`` without a target) gets n perturbed outputs (n x \\*output, float32 or better,
    detached) if it is vectorized, else one at a time, and returns a loss per sample: n x \\*lead, where \\*lead is the
    output's shape without its event dimensions. No gradient flows through it. If it has a parameter ``generator`` it is
    handed one, with the same stream for both signs of a pair.

    Args:
        output: z, (\\*lead, \\*event), floating point.
        loss: any callable: piecewise constant, numpy, a metric, another process.
        target: y, handed to the loss as it is.
        sigma: scale of the noise, > 0; a tensor broadcasts against the output (anisotropic smoothing).
        noise: (M, \\*output), taken in place of the draws: for tests and common random numbers.
        generator: of the noise, on the output's device (torch's global one by default).
        mask: (\\*lead), False where a sample does not count; its loss may be NaN, its gradient is 0.
        stderr: also estimate the standard error of each coordinate. For "orthogonal" and "sphere", whose draws are not
            independent, it is an upper estimate.
        options: see ``Options``.

    Raises:
        NonFinite: a loss is NaN or infinite, or the output is NaN.
        TypeError: the output is not floating point.
        ValueError: an option out of range, or a loss of another shape.
    """
    estimate, _ = run(output, loss, target, sigma, Spec(**options), noise, generator, mask, stderr)
    return estimate


def run(
    output: Tensor,
    loss: Loss,
    target: Any,
    sigma: float | Tensor,
    spec: Spec,
    noise: Tensor | None,
    generator: torch.Generator | None,
    mask: Tensor | None = None,
    stderr: bool = False,
) -> tuple[OutputGradient, Vectorized]:
    """``output_gradient``, and how the loss was called in the end."""
    z, lead, event = prepared(output, spec.event_dims)
    check_sigma(sigma, z)
    basis = _checked_basis(spec, sigma, z, lead, event)
    count = spec.pairs * (1 if spec.estimator in MIRRORED else 2) if noise is None else len(noise)
    if noise is not None and (noise.shape[1:] != z.shape or count < 1):
        raise ValueError(f"noise must have the shape (M, {', '.join(map(str, z.shape))}), got {tuple(noise.shape)}")
    if spec.estimator == "loo" and count < 2:
        raise ValueError("estimator='loo' compares with the other draws and needs at least two")
    if mask is not None and (spec.credit == "batch" or tuple(mask.shape) != lead):
        raise ValueError(f"a mask or weight needs credit per sample and the shape {lead}, got {tuple(mask.shape)}")
    if z.numel() == 0:
        value = z.new_zeros(() if spec.credit == "batch" else lead)
        return OutputGradient(torch.zeros_like(z), value, 0, torch.zeros_like(z) if stderr else None), spec.vectorized
    _refuse_nan(z, lead, mask)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        scorer = Scorer.of(loss, target, lead, event, spec.credit, spec.vectorized, spec.as_numpy)
        if scorer.how == "auto":
            scorer = scorer.settled(torch.stack([z, perturbed(z, _probe(z, generator), sigma, 1)]))
        if scorer.seed is not None:
            seed = int(torch.randint(2**62, (), generator=generator, device=z.device))
            scorer = replace(scorer, seed=seed)
        law = MIRRORED.get(spec.estimator, "gaussian")
        source = noise if noise is not None else Draws(z, event, count, law, generator, basis)
        size = spec.chunk or max(1, _PIECE // z.numel())
        sums = _Sums(z, sigma, spec, mask, stderr)
        for first, eps in _pieces(source, count, size, z):
            sums.add(scorer, eps, first)
        return sums.finish(count), scorer.how


def _refuse_nan(z: Tensor, lead: tuple[int, ...], mask: Tensor | None) -> None:
    """A network that has diverged must not pass for one that is wrong now and then: an argmax of NaN is a class too."""
    bad = z.view(*lead, -1).isnan().any(-1)
    bad = bad if mask is None else bad & mask
    if bad.any():
        raise NonFinite(f"the outputs of {int(bad.sum())} of {bad.numel()} samples are NaN before any noise is added")


def _checked_basis(spec: Spec, sigma: float | Tensor, z: Tensor, lead: tuple[int, ...], event: int) -> Tensor | None:
    if spec.basis is None:
        return None
    basis = check_basis(spec.basis.to(z.device), lead, event)
    if not basis.is_floating_point():
        return basis
    if isinstance(sigma, Tensor) and sigma.numel() > 1:
        raise ValueError("a basis takes one sigma for all coordinates; got a tensor of several")
    return basis.to(z.dtype)


def _probe(z: Tensor, generator: torch.Generator | None) -> Tensor:
    """A direction to try the loss along; the generator, of which it is drawn from a copy, stays where it is."""
    probe = torch.Generator(z.device)
    if generator is not None:
        probe.set_state(generator.get_state())
    return torch.randn(z.shape, generator=probe, device=z.device, dtype=z.dtype)


def _pieces(source: Tensor | Draws, count: int, size: int, z: Tensor) -> Iterator[tuple[int, Tensor]]:
    for first in range(0, count, size):
        m = min(size, count - first)
        yield first, source[first : first + m].to(z) if isinstance(source, Tensor) else source.take(m)


def prepared(output: Tensor, event_dims: int) -> tuple[Tensor, tuple[int, ...], int]:
    """z in float32 or better (16 bits round small noise away), the shape before its event, and the event's size."""
    if not output.is_floating_point():
        raise TypeError(f"outputs must be floating point, got {output.dtype}")
    if event_dims > output.ndim:
        raise ValueError(f"event_dims={event_dims} exceeds the {output.ndim} dimensions of the output")
    z = output.detach().to(torch.promote_types(output.dtype, torch.float32)).contiguous()
    cut = z.ndim - event_dims
    return z, tuple(z.shape[:cut]), math.prod(z.shape[cut:])


def check_sigma(sigma: float | Tensor, z: Tensor) -> None:
    """Positive, finite, and no wider than the output."""
    if isinstance(sigma, Tensor):
        if not _fits(sigma, z):
            raise ValueError(f"sigma of shape {tuple(sigma.shape)} does not broadcast to outputs {tuple(z.shape)}")
        fine = bool(((sigma > 0) & sigma.isfinite()).all())
    else:
        fine = 0 < sigma < math.inf
    if not fine:
        raise ValueError(f"sigma must be positive and finite, got {sigma}")


def _fits(sigma: Tensor, z: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(sigma.shape, z.shape) == z.shape
    except RuntimeError:
        return False


def perturbed(z: Tensor, eps: Tensor, sigma: float | Tensor, sign: int) -> Tensor:
    """z + sign sigma eps without another temporary."""
    if isinstance(sigma, Tensor):
        return torch.addcmul(z, eps, sigma.to(z), value=sign)
    return torch.add(z, eps, alpha=sign * sigma)


class _Sums:
    """Running sums over draws, for each unit of credit; ``finish`` makes the estimate of them."""

    def __init__(self, z: Tensor, sigma: float | Tensor, spec: Spec, mask: Tensor | None, stderr: bool) -> None:
        self.z, self.sigma, self.spec, self.mask, self.stderr = z, sigma, spec, mask, stderr
        self.mirrored = spec.estimator in MIRRORED
        self.evaluations = 0
        self.units = 0

    def _start(self, losses: Tensor, scorer: Scorer, first: int) -> None:
        """The shapes are known once the first losses are."""
        self.shape = losses.shape[1:]
        self.units = max(1, losses[0].numel())
        self.count = losses.new_zeros(self.units, dtype=self.z.dtype)
        self.value = torch.zeros_like(self.count)
        self.grad = self.z.new_zeros(self.units, self.z.numel() // self.units)
        self.noise = torch.zeros_like(self.grad)
        self.moments = [torch.zeros_like(self.grad) for _ in range(3 if self.stderr else 0)]
        self.counted = self._counted()
        # What is subtracted from the losses of one-sided draws. "loo" subtracts their mean at the end: until then any
        # constant near it keeps the digits, and one of them makes a constant loss exactly 0.
        self.base = torch.zeros_like(losses[0].view(-1))
        if self.spec.estimator == "forward":
            self.base = scorer(self.z.unsqueeze(0), first).to(losses.dtype).view(-1)
            self._finite(self.base.unsqueeze(0))
            self.evaluations += 1
        elif self.spec.estimator == "loo":
            self.base = losses[0].reshape(-1).nan_to_num(0.0, 0.0, 0.0)

    def _counted(self) -> Tensor | None:
        """The mask for units, where a sample has several."""
        if self.mask is None:
            return None
        groups = self.units // max(1, self.mask.numel())
        return self.mask.reshape(-1).repeat_interleave(groups)

    def add(self, scorer: Scorer, eps: Tensor, first: int) -> None:
        """One chunk of draws: evaluate, reduce, forget."""
        plus = self._losses(scorer, eps, first, 1)
        if not self.units:
            self._start(plus, scorer, first)
        m = len(eps)
        plus = plus.reshape(m, -1)
        if self.mirrored:
            minus = self._losses(scorer, eps, first, -1).reshape(m, -1)
            weight, level = (plus - minus) / 2, (plus + minus) / 2  # (3.1)
        else:
            weight, level = plus - self.base, plus
        finite = self._finite(weight + level)
        weight, level = (x.where(finite, 0).to(self.z.dtype) for x in (weight, level))
        self.count += finite.sum(0)
        self.value += level.sum(0)
        eps = eps.view(m, self.units, -1)
        self.grad += torch.einsum("mu,muk->uk", weight, eps)
        if self.spec.estimator == "loo":
            self.noise += torch.einsum("mu,muk->uk", finite.to(self.z.dtype), eps)
        if self.stderr:
            power = self._projected(self._over_sigma(eps)).view_as(eps).square()
            for moment, factor in zip(self.moments, (weight.square(), weight, finite.to(weight.dtype)), strict=True):
                moment += torch.einsum("mu,muk->uk", factor, power)

    def _losses(self, scorer: Scorer, eps: Tensor, first: int, sign: int) -> Tensor:
        losses = scorer(perturbed(self.z, eps, self.sigma, sign), first)
        self.evaluations += len(eps)
        # Differences are taken in the better precision of the loss's own and the outputs'.
        return losses.to(torch.promote_types(losses.dtype, self.z.dtype))

    def _finite(self, losses: Tensor) -> Tensor:
        """Which losses count (m x units): finite and not masked."""
        finite = losses.isfinite()
        if self.counted is not None:
            finite = finite | ~self.counted
        if self.spec.on_nonfinite == "raise" and not finite.all():
            bad = (~finite).any(0).nonzero().view(-1)
            raise NonFinite(
                f"the loss of {len(bad)} of {self.units} samples is not finite under noise (the first is number "
                f"{int(bad[0])}): on_nonfinite='drop' leaves such pairs out"
            )
        return finite if self.counted is None else finite & self.counted

    def finish(self, count: int) -> OutputGradient:
        kept = self.count
        weighed = kept if self.counted is None else kept[self.counted]
        if (weighed == 0).any():
            warnings.warn("every pair of some samples was dropped: their gradient is 0", stacklevel=4)
        mean = self.value / kept.clamp(min=1)
        grad, per = self.grad, kept.clamp(min=1).unsqueeze(1)
        centre = torch.zeros_like(per)
        if self.spec.estimator == "loo":
            # 1/N sum_i (l_i - mean of the others) eps_i = 1/(N-1) sum_i (l_i - mean) eps_i
            centre = (mean - self.base.to(mean.dtype)).unsqueeze(1)
            grad, per = grad - centre * self.noise, (per - 1).clamp(min=1)
        grad = self._projected(self._over_sigma((grad / per).unsqueeze(0))).view_as(self.z)
        error = self._stderr(grad, centre) if self.stderr else None
        return OutputGradient(grad, self._per_sample(mean), self.evaluations, error, count)

    def _stderr(self, grad: Tensor, centre: Tensor) -> Tensor:
        """From sum w^2 e^2 about the centre, e = eps / sigma projected, of each coordinate."""
        second, first, power = self.moments
        count = self.count.unsqueeze(1)
        second = ((second - 2 * centre * first + centre.square() * power) / count.clamp(min=1)).view_as(self.z)
        spare = (count - 1).expand_as(power).reshape(self.z.shape)
        return ((second - grad.square()).clamp(min=0) / spare.clamp(min=0)).sqrt()

    def _per_sample(self, mean: Tensor) -> Tensor:
        """Groups of a sample add up."""
        value = mean.view(self.shape)
        return value.sum(-1) if self.spec.credit == "elementwise" else value

    def _over_sigma(self, x: Tensor) -> Tensor:
        """x / sigma for x of shape (m, units, size)."""
        if isinstance(self.sigma, Tensor):
            return x.view(len(x), *self.z.shape) / self.sigma.to(self.z)
        return x / self.sigma

    def _projected(self, x: Tensor) -> Tensor:
        """Without its mean over each event, or group of an event (3.4)."""
        if self.spec.invariance is None:
            return x
        size = math.prod(self.z.shape[self.z.ndim - self.spec.event_dims :])
        if self.spec.credit == "elementwise":
            size //= self.shape[-1]
        rows = x.reshape(len(x), -1, size)
        return rows - rows.mean(-1, keepdim=True)


def suggest_pairs(estimate: OutputGradient, cosine: float) -> int:
    """Pairs at which one sample's estimate has about this cosine with the smoothed gradient.

    cos^2 = |g|^2 / (|g|^2 + V / M) with V the variance of one pair, averaged over the samples of ``estimate``, which
    must have been made with ``stderr=True``. Behind a network the batch averages too, and far fewer do.

    Raises:
        ValueError: no standard errors, a cosine outside (0, 1), or a gradient that the noise hides.
    """
    if not 0 < cosine < 1:
        raise ValueError(f"cosine must lie between 0 and 1, got {cosine}")
    if estimate.stderr is None or estimate.draws < 2:
        raise ValueError("suggest_pairs needs an estimate of at least two pairs with stderr=True")
    variance = float(estimate.stderr.square().sum())
    signal = float(estimate.grad.square().sum()) - variance  # |estimate|^2 holds its own variance
    if signal <= 0:
        raise ValueError(f"{estimate.draws} pairs are too few to tell the gradient from noise: estimate with more")
    needed = cosine**2 / (1 - cosine**2) * variance * estimate.draws / signal
    return max(1, math.ceil(needed))
