"""The calibration pass: data through the model, moments out."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from subspan.errors import DataError, NonFinite, TargetError
from subspan.linalg import Covariance, Eigh, LowRank, SpikedCovariance, Subspace
from subspan.surgery.factors import base_fingerprint
from subspan.surgery.layers import find_targets, weight_matrix
from subspan.surgery.moments.objective import (
    Likelihood,
    LossFn,
    Objective,
    Positions,
    batch_size,
    is_plain_loss,
    to_device,
)
from subspan.surgery.moments.statistics import Corrected, FisherStats, Labels, LayerMoments
from subspan.surgery.moments.stream import Batch, Layer, Reduce, SecondMoment, Stream, calibrating

MAX_BATCHES = 128
# fp16 gradients underflow below 6e-8: the loss is scaled up before the backward pass and divided out in fp32.
_FP16_SCALE = 2.0**10


def collect_fisher(
    model: nn.Module,
    dataloader: Iterable[Any],
    targets: str | Iterable[str],
    *,
    fisher: Labels = "empirical",
    n_samples: int = 256,
    loss_fn: LossFn | Likelihood | None = None,
    max_dim: int = 4096,
    rank: int = 16,
    corrected: bool = False,
    gradient: bool = True,
    reduce: Reduce = "expand",
    positions: Positions = "attended",
    converged: float | None = 0.99,
    layers_per_pass: int | None = None,
    public: bool = False,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> FisherStats:
    """Run calibration batches through ``model`` and collect the moments of every target layer.

    The model must be the plain base model (before ``get_peft_model``). It runs in evaluation mode with frozen
    parameters; hooks, flags and random state are put back, also after an exception, and no ``.grad`` is touched.

    Args:
        model: returns logits (a tensor, a tuple or an object with ``.logits``).
        dataloader: batches as dicts with ``labels`` (-100 is left out), as (inputs..., labels), or as one tensor.
        targets: module names, suffixes, a regular expression or "all-linear", matched by peft's own rule.
        fisher: "empirical" takes the given labels, "mc" draws them from the model's prediction (the true Fisher),
            "exact" sums over the classes of a classifier (at most 16).
        n_samples: stop after this many examples (and after 128 batches), over all processes together.
        loss_fn: a likelihood (``Categorical``, ``Gaussian``, ``Bernoulli``; chosen by the labels when None) or, with
            "empirical", a function (outputs, batch) -> negative log-likelihood *summed* over examples.
        max_dim: sides wider than this keep a Nyström sketch of 4 rank + 16 columns in place of the whole matrix.
        rank: the adapter rank foreseen; sets sketch widths, the rule for early stopping and ``corrected``.
        corrected: a second pass measures the energies of the 4 rank leading pairs of directions (EKFAC).
        gradient: keep the mean gradient Gbar (m x n a layer), which signs the directions.
        reduce: "expand" counts every position; "sum" makes one row per example, for pooled classification heads.
        positions: "attended" counts all positions outside the padding, "labelled" only those that carry a label.
        converged: stop when the leading ``rank`` eigenvectors of up to 8 layers agree between two doublings of the data
            with a cosine above this in every direction; None never stops early.
        layers_per_pass: calibrate so many layers at a time, a pass over the data each, and keep only their leading
            eigenpairs (as wide layers do): caps memory.
        public: declare that the calibration data need no protection.
        dtype: of the sums, float32 or float64.

    Raises:
        DataError: an empty dataloader, or no labels where they are needed.
        TargetError: nothing matches, weights on the meta device, or layers that no gradient reaches.
        NonFinite: an input or gradient is not finite (names layer and batch).
        ValueError: the settings do not fit the data.
    """
    layers = _targets(model, targets)
    if fisher != "empirical" and is_plain_loss(loss_fn):
        raise ValueError(f"fisher={fisher!r} needs a likelihood that can be sampled; loss_fn is a plain function")
    if fisher not in ("empirical", "mc", "exact"):
        raise ValueError(f"fisher must be 'empirical', 'mc' or 'exact', got {fisher!r}")
    if (corrected or layers_per_pass) and iter(dataloader) is dataloader:
        raise ValueError("this needs several passes over the data, but the dataloader is an iterator; pass a list")
    parameters = [f"{name}.weight" for name, m in layers.items() if is_floating(m)]
    fingerprint = base_fingerprint(model, parameters)
    objective = Objective(model, fisher, loss_fn, positions, gradient, generator)
    size = 4 * rank + 16
    share = -(-n_samples // _world_size())

    # Every process draws the same test matrices, so that their images can be summed.
    seed = 0 if generator is None else generator.initial_seed()
    tests: dict[tuple[int, torch.device], Tensor] = {}

    def new_moment(dim: int, device: torch.device) -> SecondMoment:
        if dim <= max_dim:
            return SecondMoment(dim, None, dtype, device)
        if (dim, device) not in tests:
            source = torch.Generator().manual_seed(seed)
            draw = torch.randn(dim, min(size, dim), generator=source, dtype=dtype)
            tests[dim, device] = torch.linalg.qr(draw.to(device)).Q
        return SecondMoment(dim, tests[dim, device], dtype, device)

    names = list(layers)
    chunk = layers_per_pass or len(names)
    moments: dict[str, LayerMoments] = {}
    examples = 0
    for start in range(0, len(names), chunk):
        group = {name: layers[name] for name in names[start : start + chunk]}
        states = []
        for name, module in group.items():
            shape, device = _shape(module), _device(module)
            mean = torch.zeros(shape, dtype=dtype, device=device) if gradient else None
            states.append(Layer(name, module, shape, new_moment(shape[0], device), mean))
        stream = Stream(states, reduce, new_moment)
        examples = _run(stream, objective, dataloader, share, rank, converged)
        _reduce_processes(stream)
        _check_reached(states)
        # Without labels (mc, exact) no mean gradient was measured: that is not a gradient of zero.
        labelled = any(layer.gradient is not None and bool(layer.gradient.any()) for layer in states)
        found = _finish(states, rank, keep_gradient=labelled or fisher == "empirical")
        if corrected:
            found = _correct(found, states, stream, objective, dataloader, examples, rank)
        moments |= {n: _compress(m, size) for n, m in found.items()} if layers_per_pass else found
    return FisherStats(moments, fingerprint, fisher, examples, public, parameters)


def _targets(model: nn.Module, targets: str | Iterable[str]) -> dict[str, nn.Module]:
    if hasattr(model, "peft_config"):
        raise TargetError("calibrate the base model before get_peft_model (or load it again): this one holds adapters")
    found = find_targets(model, targets)
    unused = [n for n in found if isinstance(_parent(model, n), nn.MultiheadAttention)]
    if unused:
        warnings.warn(
            f"{', '.join(unused)}: nn.MultiheadAttention never calls these layers, so they cannot be calibrated and "
            "keep peft's initialisation",
            stacklevel=3,
        )
    found = {n: m for n, m in found.items() if n not in unused}
    if not found:
        raise TargetError("no target layer is left that calibration can reach")
    meta = [n for n, m in found.items() if _device(m).type == "meta"]
    if meta:
        raise TargetError(f"{meta[0]} is on the meta device: load the model's weights before calibration")
    return found


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _shape(module: nn.Module) -> tuple[int, int]:
    if is_floating(module):
        m, n = weight_matrix(module).shape
        return m, n
    layer: Any = module
    return layer.out_features, layer.in_features  # quantised: packed weights do not show their shape


def is_floating(module: nn.Module) -> bool:
    """Whether the layer's weight is not quantised."""
    weight: Any = module.weight
    return weight.is_floating_point()


def _device(module: nn.Module) -> torch.device:
    weight: Any = module.weight
    return weight.device


def _run(
    stream: Stream,
    objective: Objective,
    dataloader: Iterable[Any],
    limit: int,
    rank: int,
    converged: float | None,
) -> int:
    """One pass over at most ``limit`` examples (to the end of a batch); returns how many this process saw."""
    model = objective.model
    weight = next(model.parameters())
    scale = _FP16_SCALE if weight.dtype == torch.float16 else 1.0
    examples = check_at = 0
    before: list[Tensor] = []
    with calibrating(model):
        handles = [stream.hook(layer) for layer in stream.layers]
        try:
            for index, raw in enumerate(dataloader):
                batch = to_device(raw, weight.device)
                stream.batch = Batch(index, scale=scale)
                _send_back(stream, objective, batch)
                if stream.sink is None:
                    stream.absorb_inputs()
                stream.batch = Batch(index)
                examples += batch_size(batch)
                if examples >= limit or index + 1 >= MAX_BATCHES:
                    break
                if converged is not None and stream.sink is None and examples >= check_at:
                    after = _leading_subspaces(stream.layers, rank)
                    if before and all(_agree(a, b) > converged for a, b in zip(before, after, strict=True)):
                        break
                    before, check_at = after, 2 * examples
        finally:
            stream.batch = Batch(0)
            for handle in handles:
                handle.remove()
    if examples == 0:
        raise DataError("the calibration dataloader is empty: it gave no batch")
    return examples


def _send_back(stream: Stream, objective: Objective, batch: Any) -> None:
    """Forward, and each loss backward into the hooks. The graph, whose hooks hold the inputs, ends with this call."""
    stream.batch.mask, losses = objective.losses(batch)
    upcoming = next(losses, None)
    while upcoming is not None:
        stream.batch.adds, loss = upcoming
        if not bool(torch.isfinite(loss)):
            raise NonFinite(f"the loss of calibration batch {stream.batch.index} is {float(loss)}")
        if not loss.requires_grad:
            raise TargetError(_unreached([layer.name for layer in stream.layers]))
        upcoming = next(losses, None)
        (loss * stream.batch.scale).backward(retain_graph=upcoming is not None)


def _leading_subspaces(layers: Sequence[Layer], rank: int) -> list[Tensor]:
    """Leading eigenvectors of up to 8 layers, spread evenly over the model."""
    step = -(-len(layers) // 8)
    bases = []
    for layer in layers[::step]:
        for moment in (layer.x, layer.y):
            if moment is not None:
                mean = moment.mean(layer.positions)
                bases.append(mean.leading(min(rank, mean.dim)).vectors)
            else:
                bases.append(layer.y.sum.new_zeros(layer.shape[1], 1))
    return bases


def _agree(a: Tensor, b: Tensor) -> float:
    """Smallest cosine of the principal angles."""
    return float(torch.linalg.svdvals(a.mT @ b).min()) if a.shape == b.shape else 0.0


def _unreached(names: Sequence[str]) -> str:
    return (
        f"the loss sends no gradient to {len(names)} target layer(s): {', '.join(names)}; leave them out of the "
        "targets or use a loss that depends on them"
    )


# "experts.3." (Mixtral, Qwen, DeepSeek) and "experts.expert_3." (Switch): only such layers may go without tokens.
_EXPERT = re.compile(r"(?<![^.])(\w*experts\.(?:\w+_)?)\d+(?![^.])")


def _siblings(layer: Layer) -> tuple[str, tuple[int, int]]:
    """The same for the experts of one block, which differ only in their number; a dense layer stands alone."""
    return _EXPERT.sub(r"\1#", layer.name), layer.shape


def _check_reached(layers: Sequence[Layer]) -> None:
    lost = [layer.name for layer in layers if layer.ran and not layer.reached]
    if lost:
        raise TargetError(_unreached(lost))
    alive = {_siblings(layer) for layer in layers if layer.positions}
    idle = [layer.name for layer in layers if not layer.positions and _siblings(layer) not in alive]
    if idle:
        raise TargetError(f"target layers never ran on the calibration data: {', '.join(idle)}")


def _finish(layers: Sequence[Layer], rank: int, *, keep_gradient: bool) -> dict[str, LayerMoments]:
    """Means of the sums, in place; an expert that saw few tokens is shrunk towards the mean of its siblings."""
    families: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        families.setdefault(_siblings(layer), []).append(layer)
    shrunk: dict[str, tuple[Covariance, Covariance]] = {}
    for layer in layers:
        family = families[_siblings(layer)]
        if layer.positions < 4 * rank and layer.positions < max(other.positions for other in family):
            shrunk[layer.name] = _shrunk(layer, family, 4 * rank)
    if shrunk:
        warnings.warn(
            f"{len(shrunk)} layers saw fewer than {4 * rank} tokens ({', '.join([*shrunk][:4])}...): their statistics "
            "are shrunk towards their siblings'; use more calibration data",
            stacklevel=3,
        )
    means: dict[int, Covariance] = {}
    moments = {}
    for layer in layers:
        if layer.name in shrunk:
            x, y = shrunk[layer.name]
        else:
            assert layer.x is not None  # _check_reached left no such layer without inputs
            if id(layer.x) not in means:
                means[id(layer.x)] = layer.x.spent(layer.positions)
            x, y = means[id(layer.x)], layer.y.spent(layer.positions)
        mean = layer.gradient.div_(max(layer.positions, 1)) if keep_gradient and layer.gradient is not None else None
        moments[layer.name] = LayerMoments(x, y, mean, layer.positions)
    return moments


def _shrunk(layer: Layer, family: Sequence[Layer], enough: int) -> tuple[Covariance, Covariance]:
    """w S + (1 - w) S_family with w = T / enough; sums and sketches are linear, so they mix before the mean."""
    weight, total = layer.positions / enough, sum(other.positions for other in family)

    def mix(own: SecondMoment | None, others: Sequence[SecondMoment]) -> Covariance:
        mixed = others[0].clone()
        for part in ("sum", "trace"):
            pooled = sum(getattr(o, part) for o in others) * ((1 - weight) / total)
            mine = 0.0 if own is None or not layer.positions else getattr(own, part) * (weight / layer.positions)
            getattr(mixed, part).copy_(pooled + mine)
        return mixed.spent(1)

    x = mix(layer.x, [other.x for other in family if other.x is not None])
    return x, mix(layer.y, [other.y for other in family])


def _correct(
    moments: Mapping[str, LayerMoments],
    layers: Sequence[Layer],
    stream: Stream,
    objective: Objective,
    dataloader: Iterable[Any],
    limit: int,
    rank: int,
) -> dict[str, LayerMoments]:
    """Second pass: the energies of all pairs of the leading 4 rank directions, Lam[j, k] = mean (u_jᵀ g)² (v_kᵀ x)²."""
    bases: dict[str, tuple[Eigh, Eigh]] = {}
    energies: dict[str, Tensor] = {}
    for name, layer in moments.items():
        y, x = (c.leading(min(4 * rank, c.dim)) for c in (layer.outputs, layer.inputs))
        bases[name] = y, x
        energies[name] = y.values.new_zeros(y.values.shape[0], x.values.shape[0])

    def sink(layer: Layer, x: Tensor, g: Tensor) -> None:
        if "fisher" in second.batch.adds:
            u, v = bases[layer.name]
            energies[layer.name].addmm_((g @ u.vectors).square().mT, (x @ v.vectors).square())

    second = Stream(layers, stream.reduce, stream.new_moment, sink)
    _run(second, objective, dataloader, limit, rank, None)
    corrected = {}
    for name, layer in moments.items():
        (y, x), energy = bases[name], energies[name]
        _all_reduce(energy)
        energy = energy / max(layer.positions, 1)
        size = torch.linalg.norm(energy)
        error = float(torch.linalg.norm(energy - torch.outer(y.values, x.values)) / size) if bool(size > 0) else 0.0
        corrected[name] = replace(layer, corrected=Corrected(y.vectors, x.vectors, energy, error))
    return corrected


def _compress(layer: LayerMoments, size: int) -> LayerMoments:
    """Only the ``size`` leading eigenpairs of each side, and the mean gradient between them."""

    def spiked(c: Covariance) -> SpikedCovariance:
        return (
            c if isinstance(c, SpikedCovariance) else SpikedCovariance.with_trace(c.leading(min(size, c.dim)), c.trace)
        )

    x, y = spiked(layer.inputs), spiked(layer.outputs)
    gradient = layer.gradient
    if isinstance(gradient, Tensor):
        gradient = LowRank(y.vectors, Subspace(x.vectors).project(gradient.mT @ y.vectors))
    return replace(layer, inputs=x, outputs=y, gradient=gradient)


# ---------------------------------------------------------------------------------------------------- many processes


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _world_size() -> int:
    return torch.distributed.get_world_size() if _distributed() else 1


def _all_reduce(t: Tensor) -> None:
    if _distributed():
        torch.distributed.all_reduce(t)


def _reduce_processes(stream: Stream) -> None:
    """Sum every moment over the processes of a data-parallel run."""
    if not _distributed():
        return
    ids: dict[int, int] = {}
    mine = [ids.setdefault(id(layer.x), len(ids)) for layer in stream.layers]
    everyone: list[Any] = [None] * _world_size()
    torch.distributed.all_gather_object(everyone, mine)
    # Layers share a sum where they do in every process.
    shared: dict[tuple[int, ...], SecondMoment] = {}
    for layer, key in zip(stream.layers, zip(*everyone, strict=True), strict=True):
        if key not in shared:
            own = layer.x or stream.new_moment(layer.shape[1], layer.y.sum.device)
            shared[key] = own.clone()
        layer.x = shared[key]
    for moment in (*shared.values(), *(layer.y for layer in stream.layers)):
        count = torch.tensor([float(moment.positions)], dtype=torch.float64, device=moment.sum.device)
        for part in (moment.sum, moment.trace, count):
            _all_reduce(part)
        moment.positions = int(count)
    for layer in stream.layers:
        if layer.gradient is not None:
            _all_reduce(layer.gradient)
        flags = torch.tensor([float(layer.ran), float(layer.reached)], device=layer.y.sum.device)
        _all_reduce(flags)
        layer.ran, layer.reached = (flags > 0).tolist()
