"""How a classifier's logits move with the weights of its layers: Jacobians by back-propagation, inputs by hooks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import TargetError
from subspan.surgery.layers import base_layer
from subspan.surgery.per_example import check_supported, exact, layer_gradient


class LayerJacobian(NamedTuple):
    """One layer in one batch: logit k of example b moves by the sum over t of A[k, b, t] dW X[b, t].

    Locations t are the positions of a layer that works token by token, the patches of a convolution, and the calls of a
    layer that is called several times. float32 or better.
    """

    A: Float[Tensor, "k b t p"]
    X: Float[Tensor, "b t q"]


class _Tap:
    """Records a layer's inputs and adds a leaf of zeros to its outputs, whose gradient is that of the output.

    A leaf of its own survives a ReLU in place, and frozen parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.inputs, self.zeros = base_layer(module), [], []
        self.handles = [
            self.module.register_forward_pre_hook(self.before, with_kwargs=True),
            self.module.register_forward_hook(self.after),
        ]

    def before(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        self.inputs.append((args[0] if args else next(iter(kwargs.values()))).detach())

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        zeros = torch.zeros_like(output, requires_grad=True)
        self.zeros.append(zeros)
        return output + zeros


@contextmanager
def tapped(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, _Tap]]:
    """Hooks on the layers while the context lasts."""
    taps: dict[str, _Tap] = {}
    try:
        for name, module in layers.items():
            check_supported(name, base_layer(module))
            taps[name] = _Tap(module)
        yield taps
    finally:
        for tap in taps.values():
            for handle in tap.handles:
                handle.remove()


def logit_jacobians(
    forward: Callable[[], Float[Tensor, "b k"]], layers: Mapping[str, nn.Module]
) -> tuple[Float[Tensor, "b k"], dict[str, LayerJacobian]]:
    """Logits, and the Jacobian of every layer, from one forward pass and K backward passes that all layers share.

    Nothing that is returned holds a graph, no ``.grad`` is written and the hooks come off, also after an exception.

    Args:
        forward: runs the model and gives its logits; in evaluation mode, so that examples do not mix.
        layers: Linear, Conv1D or ungrouped Conv2d modules by name.

    Raises:
        TargetError: a layer of another kind, or one that took no part in the forward pass.
        ValueError: the logits are not one vector per example.
    """
    with torch.enable_grad(), tapped(layers) as taps:
        logits = forward()
        if logits.ndim != 2:
            raise ValueError(f"logits must have shape (batch, classes), got {tuple(logits.shape)}")
        for name, tap in taps.items():
            if not tap.zeros:
                raise TargetError(f"{name} took no part in the forward pass (is it called as a module?)")
            if any(x.shape[0] != len(logits) for x in tap.inputs):
                raise TargetError(
                    f"{name}: its input has {tap.inputs[0].shape[0]} rows for {len(logits)} examples; every example "
                    "must keep one row of the first dimension"
                )
        gradients = iter(_all_rows(logits, [zeros for tap in taps.values() for zeros in tap.zeros]))
        return exact(logits.detach()), {name: _layer(tap, gradients) for name, tap in taps.items()}


def _layer(tap: _Tap, gradients: Iterator[Tensor]) -> LayerJacobian:
    """Calls follow each other along the locations."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        split = torch.vmap(lambda d: tuple(layer_gradient(tap.module, x, d)), out_dims=(0, None))  # pyright: ignore
        A, X = split(next(gradients))
        return A, X

    parts = zip(*map(both, tap.inputs), strict=True)
    return LayerJacobian(*(half[0] if len(half) == 1 else torch.cat(half, -2) for half in parts))


def _all_rows(logits: Float[Tensor, "b k"], leaves: list[Tensor]) -> list[Tensor]:
    """d logits[:, k].sum() / d leaf for all k at once (k x leaf); zero where the logits do not depend on a leaf."""
    b, k = logits.shape
    ones = torch.eye(k, dtype=logits.dtype, device=logits.device)[:, None].expand(k, b, k)
    try:
        found = torch.autograd.grad(logits, leaves, ones, is_grads_batched=True, retain_graph=True, allow_unused=True)
    except RuntimeError:  # an operation whose backward pass cannot be batched: one logit after the other
        rows = [torch.autograd.grad(logits, leaves, one, retain_graph=True, allow_unused=True) for one in ones]
        found = [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
    return [leaf.new_zeros(k, *leaf.shape) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
