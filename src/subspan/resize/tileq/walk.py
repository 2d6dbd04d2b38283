"""Through a decoder layer by layer, each calibrated on what the layers before it give once they are compressed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subspan.errors import TargetError
from subspan.resize.tileq.config import TileQConfig
from subspan.resize.tileq.experts import TileQExperts
from subspan.resize.tileq.layout import layout
from subspan.resize.tileq.moments import Moments, Recorder, recording
from subspan.resize.tileq.report import LayerReport, TileQReport
from subspan.resize.tileq.sources import Experts, activation, expert_weights, find_experts, read_experts
from subspan.surgery import replace_modules

Batch = Tensor | Mapping[str, Any]


class _Reached(Exception):
    """The last layer was called."""


@dataclass(frozen=True)
class Stage:
    """One layer's experts, as floats, with the moments of their inputs (None without calibration)."""

    layer: int
    name: str
    module: nn.Module
    experts: Experts
    moments: dict[str, Moments] | None
    unrouted: list[int] | None


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder's layers: the outermost list around all experts.

    Raises:
        TargetError: no experts are found (with what was seen), or they do not lie in one list of layers.
        ValueError: the experts are compressed already.
    """
    if any(isinstance(m, TileQExperts) for m in model.modules()):
        raise ValueError("the model's experts are compressed already")
    names = list(find_experts(model))
    if not names:
        seen = sorted({type(m).__name__ for m in model.modules() if type(m).__module__ != "torch.nn.modules.container"})
        raise TargetError(f"{type(model).__name__} has no experts that are known; its modules are {', '.join(seen)}")
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    around = {min((li for li in lists if n.startswith(f"{li}.")), key=len, default="") for n in names}
    if len(around) != 1 or "" in around:
        raise TargetError(f"experts must lie in one list of layers; found {', '.join(names)}")
    name = around.pop()
    return name, model.get_submodule(name)  # pyright: ignore[reportReturnType]


def prepared(model: nn.Module, batches: Sequence[Batch] | None, config: TileQConfig) -> list[Batch]:
    """The batches as a list, once it is certain that ``config`` fits them and all experts of the model.

    So that nothing is changed or written before what can be known is known. Raises as ``quantize_moe`` does.
    """
    layer_list(model)
    if isinstance(batches, Tensor | Mapping):
        raise TypeError("batches must be a list; put the single one into a list")
    batches = list(batches or [])
    if config.calibrated and not batches:
        raise ValueError(f"the quantizer {config.quantizer!r} needs calibration batches; 'rtn' does without")
    for name, module in find_experts(model).items():
        for projection, weights in expert_weights(name, module).items():
            q, p = weights[0].shape
            layout(projection, len(weights), q, p, config)
        activation(name, module)
    return batches


@torch.no_grad()
def layer_calls(
    model: nn.Module, layers: nn.ModuleList, batches: Sequence[Batch]
) -> tuple[list[Tensor], list[list[tuple[tuple[Any, ...], dict[str, Any]]]]]:
    """Hidden states before the first layer, and the other arguments of every layer's call, of each batch.

    No layer runs: masks, positions and the like do not depend on what the layers compute.
    """
    hidden: list[Tensor] = []
    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
    options = {"use_cache": False} if hasattr(model, "config") else {}

    def stub(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not calls[-1]:
            hidden.append(x)
        calls[-1].append((args, kwargs))
        if len(calls[-1]) == len(layers):
            raise _Reached
        return x

    own = [vars(layer).get("forward") for layer in layers]  # a hook of accelerate's, perhaps
    for layer in layers:
        layer.forward = stub
    try:
        for batch in batches:
            calls.append([])
            try:
                if isinstance(batch, Tensor):
                    model(batch, **options)
                else:
                    model(**{**batch, **options})
            except _Reached:
                pass
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
    return hidden, calls


@torch.no_grad()
def calibrated_layers(
    model: nn.Module,
    batches: Sequence[Batch],
    config: TileQConfig,
    *,
    prepare: Callable[[int], None] = lambda i: None,
    finish: Callable[[int], None] = lambda i: None,
) -> Iterator[Stage]:
    """The experts of one layer after the other, with moments; whoever iterates puts compressed ones in their place.

    A layer's outputs, computed after that, are the next one's inputs. Layers without dense experts are just run.

    Args:
        model: a decoder, whose layers may be empty until ``prepare``.
        batches: inputs of the model: token ids, or keyword arguments; none for no calibration.
        config: says which moments are needed.
        prepare: is called with a layer's number before its weights are used.
        finish: and after.
    """
    name, layers = layer_list(model)
    hidden, calls = layer_calls(model, layers, batches)
    full = config.quantizer in ("gptq", "gptvq")

    def run(layer: nn.Module, i: int) -> list[Tensor]:
        outputs = (layer(x, *args, **kwargs) for x, (args, kwargs) in zip(hidden, (c[i] for c in calls), strict=True))
        return [out[0] if isinstance(out, tuple) else out for out in outputs]

    for i, layer in enumerate(layers):
        prepare(i)
        modules = find_experts(layer)
        found = {n: read_experts(f"{name}.{i}.{n}", m) for n, m in modules.items()}
        recorders = {n: Recorder(f"{name}.{i}.{n}", experts, full) for n, experts in found.items()}
        if batches and found:
            with ExitStack() as open_hooks:
                for n, recorder in recorders.items():
                    open_hooks.enter_context(recording(modules[n], recorder))
                run(layer, i)
        for n, recorder in recorders.items():
            moments, unrouted = recorder.moments(config.unrouted) if batches else (None, None)
            yield Stage(i, recorder.name, modules[n], found[n], moments, unrouted)
        if batches and i + 1 < len(layers):
            hidden = run(layer, i)
        finish(i)


def compress_stage(stage: Stage, model: nn.Module, config: TileQConfig) -> LayerReport:
    """Put compressed experts in the place of one layer's."""
    new, fits = TileQExperts.from_float(stage.experts, stage.moments, config, stage.name)
    replace_modules(model, {stage.module: new.train(stage.module.training)})
    return LayerReport(stage.name, fits, stage.unrouted)


def quantize_moe(
    model: nn.Module,
    batches: Sequence[Batch] | None,
    config: TileQConfig | None = None,
    *,
    progress: Callable[[LayerReport], None] = lambda layer: None,
) -> TileQReport:
    """Compress all routed experts of a model, in place; routers, attention and shared experts stay as they are.

    Args:
        model: a decoder of transformers with mixture-of-experts layers, or one built alike.
        batches: calibration inputs: token ids, or keyword arguments of the model, without padding (every position
            counts); None with "rtn" only.
        config: how.
        progress: is called after each layer.

    Returns:
        A ``TileQReport``.

    Raises:
        TargetError: no experts, or experts of a kind that cannot be compressed: none stays dense silently.
        ValueError: compressed already; no calibration for a quantizer that needs it; sizes that do not fit.
        NonFinite: a weight or an input is not finite.
    """
    config = TileQConfig() if config is None else config
    batches = prepared(model, batches, config)
    report, training = TileQReport(), model.training
    model.eval()
    try:
        for stage in calibrated_layers(model, batches, config):
            report.layers.append(compress_stage(stage, model, config))
            progress(report.layers[-1])
    finally:
        model.train(training)
    all_compressed(model)
    return report


def all_compressed(model: nn.Module) -> None:
    """Raise ``TargetError`` where routed experts are dense still."""
    if left := find_experts(model):
        raise TargetError(f"these experts stayed dense: {', '.join(left)}")
