"""Per-example gradients of linear layers from one backward pass.

For y = x Wᵀ the gradient of example i is D_iᵀ X_i: outputs' gradients D_i (T x p) against inputs X_i (T x q). The
recorder hands out D and X as soon as back-propagation reaches a layer, and computes no ordinary weight gradient.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from subspan.errors import TargetError
from subspan.linalg import LowRank
from subspan.surgery.layers import input_patches, is_matrix_layer


@dataclass(frozen=True)
class Stacked:
    """The p x q gradients of b examples with respect to one matrix, formed one by one: b p q numbers."""

    values: Float[Tensor, "b p q"]

    def norm_sq(self) -> Float[Tensor, " b"]:
        """Squared Frobenius norm of each example's gradient."""
        return torch.linalg.vector_norm(self.values.flatten(1), dim=1).square()

    def weighted_sum(self, weights: Float[Tensor, " b"]) -> Float[Tensor, "p q"]:
        """Sum over the examples of weight times gradient."""
        return (weights @ self.values.flatten(1)).view(self.values.shape[1:])

    def left_multiply(self, basis: Float[Tensor, "p k"]) -> "Stacked":
        """basisᵀ times each example's gradient."""
        return Stacked(basis.mT @ self.values)

    def dense(self) -> Float[Tensor, "b p q"]:
        return self.values


@dataclass(frozen=True)
class Ghost:
    """Gradients left_iᵀ right_i never formed: norms from T x T Gram matrices, sums from one product over all tokens."""

    left: Float[Tensor, "b t p"]
    right: Float[Tensor, "b t q"]

    def norm_sq(self) -> Float[Tensor, " b"]:
        """Squared norms, rounded up: clipping by them never lets an example exceed its bound."""
        if self.left.shape[1] == 1:
            return self.left.square().sum((1, 2)) * self.right.square().sum((1, 2))
        # |Dᵀ X|² = <D Dᵀ, X Xᵀ>: products of both signs. Where an example's tokens cancel each other, what is left may
        # be rounding; two dot products, of p and q terms, are off by at most (p + q) eps of their vectors' lengths.
        gram = (self.left @ self.left.mT) * (self.right @ self.right.mT)
        lengths = torch.linalg.vector_norm(self.left, dim=2) * torch.linalg.vector_norm(self.right, dim=2)
        rounding = (self.left.shape[2] + self.right.shape[2]) * torch.finfo(gram.dtype).eps
        return gram.sum((1, 2)).clamp(min=0) + rounding * lengths.sum(1).square()

    def weighted_sum(self, weights: Float[Tensor, " b"]) -> Float[Tensor, "p q"]:
        return (self.left * weights[:, None, None]).flatten(0, 1).mT @ self.right.flatten(0, 1)

    def left_multiply(self, basis: Float[Tensor, "p k"]) -> Stacked:
        return Stacked((self.left @ basis).mT @ self.right)

    def dense(self) -> Float[Tensor, "b p q"]:
        return self.left.mT @ self.right


ExampleGradients = Stacked | Ghost


def example_gradients(left: Float[Tensor, "b t p"], right: Float[Tensor, "b t q"]) -> ExampleGradients:
    """left_iᵀ right_i in the cheaper form.

    Forming a gradient costs T p q and keeps p q numbers; the ghost form costs T² (p + q) for its norm and keeps
    T (p + q). The second is smaller in both exactly when T (p + q) < p q.
    """
    t, p, q = left.shape[1], left.shape[2], right.shape[2]
    return Ghost(left, right) if t * (p + q) < p * q else Stacked(left.mT @ right)


def add_calls(a: ExampleGradients | None, b: ExampleGradients) -> ExampleGradients:
    """Gradients of a layer that was called more than once: the sum, example by example."""
    if a is None:
        return b
    if isinstance(a, Ghost) and isinstance(b, Ghost):
        return Ghost(torch.cat([a.left, b.left], 1), torch.cat([a.right, b.right], 1))
    return Stacked(a.dense() + b.dense())


class LayerGradient(NamedTuple):
    """One call of a layer, back-propagated: example i's weight gradient is Dᵢᵀ Xᵢ (float32 or better)."""

    D: Float[Tensor, "b t p"]
    X: Float[Tensor, "b t q"]

    def inner(self, z: LowRank) -> Float[Tensor, " b"]:
        """<Dᵢᵀ Xᵢ, z> of each example, without forming its gradient."""
        return ((self.D @ z.A) * (self.X @ z.B)).sum((1, 2))


def exact(x: Tensor) -> Tensor:
    """``x`` in float32 or better: in half precision an example's norm would be off by more than any clipping slack."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tokens(x: Tensor) -> Float[Tensor, "b t c"]:
    """b x ... x c as b x T x c."""
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


def layer_gradient(module: nn.Module, x: Tensor, d: Tensor) -> LayerGradient:
    """D and X of a Linear, a Conv1D or an ungrouped Conv2d (unfolded) from its input and its output's gradient."""
    if isinstance(module, nn.Conv2d):
        return LayerGradient(exact(d).flatten(2).mT, exact(input_patches(module, x)))
    return LayerGradient(_tokens(exact(d)), _tokens(exact(x)))


def as_stored(module: nn.Module, matrix: Float[Tensor, "m n"]) -> Tensor:
    """An out x in gradient in the shape in which the layer stores its weight."""
    weight = module.weight
    stored = matrix if isinstance(module, nn.Linear | nn.Conv2d) else matrix.mT
    return stored.reshape(weight.shape)  # pyright: ignore


def batch_statistics_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Batch normalisations: they mix the examples of a batch when ``mixes_examples``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def mixes_examples(layer: _BatchNorm) -> bool:
    """Whether the layer now normalises by the batch's own statistics: in training mode, or for want of running ones."""
    return layer.training or layer.running_mean is None


def check_supported(name: str, module: nn.Module) -> None:
    """Raise ``TargetError`` for a layer whose per-example gradients are not known here, naming it."""
    if not is_matrix_layer(module):
        raise TargetError(
            f"{name}: no per-example gradients for {type(module).__name__} (only Linear, Conv1D, Conv2d); freeze it"
        )


Notify = Callable[[Tensor, Tensor], None]
Consumer = Callable[[str, LayerGradient], None]


class _Tap(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands (input, output gradient) to the recorder.

    The anchor is a leaf every tapped output depends on: asking autograd for its gradient visits every tap, and skips
    the ordinary weight gradients. The input is saved like any activation, so checkpointing recomputes it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, anchor: Tensor, notify: Notify) -> Tensor:
        ctx.save_for_backward(x)
        ctx.notify = notify
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.notify(ctx.saved_tensors[0], d)
        return d, None, None, None


class ExampleRecorder:
    """Hooks on layers that give every example's share of the gradient.

    With ``allow_unused`` a layer that a forward pass skips counts as having zero gradient; otherwise that is an error.
    Batches must come first in every layer's input, and examples must not mix on their way: that one example's loss
    depends on that example alone cannot be checked here.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, allow_unused: bool = False) -> None:
        for name, module in layers.items():
            check_supported(name, module)
        self.layers, self.allow_unused = dict(layers), allow_unused
        self._anchor = torch.zeros((), requires_grad=True)
        self._called: set[str] = set()
        self._without_grad: set[str] = set()
        self._size = 0
        self._consume: Consumer | None = None
        # The hooks hold the recorder weakly, so that a model does not keep a forgotten recorder alive.
        me: weakref.ref[ExampleRecorder] = weakref.ref(self)  # pyright: ignore[reportAssignmentType]
        self._handles = [module.register_forward_hook(_hook(me, name)) for name, module in layers.items()]

    def remove(self) -> None:
        """Take the hooks off; the model is as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def backward(self, losses: Float[Tensor, " b"], consume: Consumer) -> None:
        """Back-propagate ``losses.sum()`` and hand D and X of each layer's calls to ``consume(name, gradient)``.

        No ``.grad`` is written. A layer that was called but on which the losses do not depend is not handed out: its
        gradient is zero.

        Raises:
            TargetError: a layer took no part in the forward pass, or its input does not have one row per loss, so that
                its examples cannot be told apart. The message names the layer.
        """
        fired: set[str] = set()

        def note(name: str, gradient: LayerGradient) -> None:
            fired.add(name)
            consume(name, gradient)

        self._size, self._consume = len(losses), note
        try:
            if losses.requires_grad:
                torch.autograd.grad(losses.sum(), self._anchor, allow_unused=True)
            for name in self.layers:
                if name not in fired and name not in self._called and not self.allow_unused:
                    raise TargetError(f"{name} has no per-example gradient: {self._why_uncalled(name)}")
        finally:
            self._consume = None
            self._called.clear()
            self._without_grad.clear()

    def _why_uncalled(self, name: str) -> str:
        if name in self._without_grad:
            return "it ran without gradients (under no_grad, or in reentrant checkpointing: set use_reentrant=False)"
        return "it took no part in the forward pass (is it the live module, and is its adapter active?)"

    def _tap(self, name: str, x: Tensor, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self._without_grad.add(name)
            return output
        self._called.add(name)
        return _Tap.apply(output, x.detach(), self._anchor, partial(self._notify, name))  # pyright: ignore

    def _notify(self, name: str, x: Tensor, d: Tensor) -> None:
        if self._consume is None:
            raise TargetError(
                f"{name}: this forward pass was recorded for per-example gradients, where loss.backward() would leave "
                "unclipped ones; use the recorder's (or engine's) backward on a vector of losses"
            )
        if x.shape[0] != self._size or d.shape[0] != self._size:
            raise TargetError(
                f"{name}: its input has {x.shape[0]} rows but there are {self._size} losses; every example must keep "
                "one row of the first dimension (token routing and packing mix them)"
            )
        with torch.no_grad(), torch.autocast(d.device.type, enabled=False):
            self._consume(name, layer_gradient(self.layers[name], x, d))


def _hook(recorder: "weakref.ref[ExampleRecorder]", name: str) -> Callable[..., Tensor]:
    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        me = recorder()
        return output if me is None else me._tap(name, args[0], output)

    return record
