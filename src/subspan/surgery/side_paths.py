"""Low-rank factors beside a model's own layers, for a while: nothing in the module tree changes.

The layer then computes x Wᵀ + s (x B) Aᵀ, as a peft LoRA layer does in evaluation. It works on plain and quantised
models, and on peft models, whose own adapters are switched off meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from subspan.linalg import LowRank
from subspan.surgery.layers import base_layer, is_conv1d, matrix_layers


def plain_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The base model's Linear and Conv1D layers, by the name that they have without peft."""
    named = {name.removeprefix("base_model.model."): base_layer(m) for name, m in matrix_layers(model).items()}
    return {name: layer for name, layer in named.items() if isinstance(layer, nn.Linear) or is_conv1d(layer)}


@contextmanager
def side_paths(
    layers: Mapping[str, nn.Module], factors: Mapping[str, LowRank], scaling: Mapping[str, float]
) -> Iterator[None]:
    """Add s A Bᵀ to the layers that ``factors`` names, by forward hooks that end with the context.

    Gradients reach the factors where they require them.
    """
    with ExitStack() as stack:
        for name, z in factors.items():
            handle = layers[name].register_forward_hook(_beside(z, scaling[name]))
            stack.callback(handle.remove)
        yield


def _beside(z: LowRank, s: float) -> Callable[..., Tensor]:
    # With its long side in memory in one piece, B is read more than twice as fast. While factors train, each call lays
    # out the present values.
    laid_out = None if z.B.requires_grad else z.B.mT.contiguous()

    def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        b = z.B.mT.contiguous() if laid_out is None else laid_out
        return output + linear(s * linear(args[0].to(b.dtype), b), z.A).to(output.dtype)

    return add


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The base model in evaluation mode, nothing trainable, peft adapters off; all is put back at the end.

    Layers under gradient checkpointing stay in training mode, without which they would not checkpoint; what they hold
    is in evaluation mode, and their own dropout rates are 0. Raises ``ValueError`` where an adapter is merged into the
    base weights.
    """
    # On peft's layers this is a property; transformers' own models have a method of that name.
    tuned: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "disable_adapters", None), bool)]
    if merged := [m for m in tuned if getattr(m, "merged", False)]:
        raise ValueError(
            f"adapter {merged[0].merged_adapters} is merged into the base weights; call unmerge_adapter() first"
        )
    training = {m: m.training for m in model.modules()}
    trainable = {p: p.requires_grad for p in model.parameters()}
    off = [m for m in tuned if not m.disable_adapters]
    checkpoints = [m for m, mode in training.items() if mode and getattr(m, "gradient_checkpointing", False)]
    rates = [(m, k, v) for m in checkpoints for k, v in vars(m).items() if "drop" in k and isinstance(v, float)]
    try:
        model.eval()
        for module in checkpoints:
            module.training = True
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        for module in off:
            module.enable_adapters(False)
        for p in trainable:
            p.requires_grad_(False)
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
        for module in off:
            module.enable_adapters(True)
        for module, mode in training.items():
            module.training = mode
        for p, wanted in trainable.items():
            p.requires_grad_(wanted)
