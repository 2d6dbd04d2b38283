"""Hooks on the target layers, and the running sums they feed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import NonFinite, TargetError
from subspan.linalg import Covariance, DenseCovariance, SpikedCovariance, nystrom
from subspan.surgery.layers import input_patches

Reduce = Literal["expand", "sum"]


class SecondMoment:
    """A running sum of rowsᵀ rows, whole (lower block triangle) or as its image of a fixed random test matrix."""

    # Four column panels of the lower triangle cost 10/16 of the full product.
    PANELS = 4

    def __init__(self, dim: int, test: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        self.test = test
        shape = (dim, dim) if test is None else tuple(test.shape)
        self.sum = torch.zeros(shape, dtype=dtype, device=device)
        self.trace = torch.zeros((), dtype=dtype, device=device)
        self.positions = 0

    def panels(self) -> Iterator[slice]:
        width = -(-self.sum.shape[0] // self.PANELS)
        return (slice(start, start + width) for start in range(0, self.sum.shape[0], width))

    def add(self, rows: Float[Tensor, "t d"]) -> None:
        self.positions += rows.shape[0]
        self.trace += torch.linalg.vector_norm(rows).square()
        if self.test is not None:
            self.sum.addmm_(rows.mT, rows @ self.test)
            return
        for panel in self.panels():
            self.sum[panel.start :, panel].addmm_(rows[:, panel.start :].mT, rows[:, panel])

    def clone(self) -> "SecondMoment":
        twin = SecondMoment(self.sum.shape[0], self.test, self.sum.dtype, self.sum.device)
        twin.sum.copy_(self.sum)
        twin.trace.copy_(self.trace)
        twin.positions = self.positions
        return twin

    def mean(self, positions: int) -> Covariance:
        """The sum over ``positions`` (those without rows count as zero rows); the sum goes on."""
        return self.clone().spent(positions)

    def spent(self, positions: int) -> Covariance:
        """The same in the sum's own memory: nothing may be added afterwards."""
        mean = self.sum.div_(max(positions, 1))
        if self.test is not None:
            return SpikedCovariance.with_trace(nystrom(mean, self.test), self.trace / max(positions, 1))
        for panel in self.panels():
            mean[panel, panel.stop :] = mean[panel.stop :, panel].mT
        return DenseCovariance(mean)


@dataclass
class Layer:
    """A target layer during the stream. ``x`` is shared by layers that read the same tensors."""

    name: str
    module: nn.Module
    shape: tuple[int, int]
    y: SecondMoment
    gradient: Tensor | None
    x: SecondMoment | None = None
    ran: bool = False
    reached: bool = False

    @property
    def positions(self) -> int:
        return 0 if self.x is None else self.x.positions


def _rows(module: nn.Module, t: Tensor, mask: Tensor | None, reduce: Reduce, *, gradient: bool) -> Tensor:
    """A layer's input (or output gradient) as T x d rows: one per valid position, or one per example (``sum``).

    Convolutions give unfolded patches. With ``reduce="sum"`` an example's row is the sum of its gradients or the mean
    of its inputs.
    """
    if isinstance(module, nn.Conv2d):
        t = t.flatten(2).mT if gradient else input_patches(module, t)
    elif mask is not None and t.ndim == 2 and t.shape[0] == mask.numel():
        t = t.view(*mask.shape, -1)  # tokens that the model flattened
    if t.ndim < 3:
        return t.reshape(-1, t.shape[-1])
    t = t.flatten(1, -2)
    if mask is None or mask.shape != t.shape[:2]:
        return t.flatten(0, 1) if reduce == "expand" else t.sum(1) if gradient else t.mean(1)
    if reduce == "expand":
        return t[mask]
    total = (t * mask.unsqueeze(-1)).sum(1)
    return total if gradient else total / mask.sum(1, keepdim=True).clamp(min=1)


def _geometry(module: nn.Module) -> tuple[Any, ...]:
    """What besides the input tensor decides a layer's rows."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size, module.stride, module.padding, module.dilation, module.padding_mode
    return ()


@dataclass
class _Call:
    """One forward call of a layer: its input, that input's version when it was read, and whether gradient came back."""

    x: Tensor
    version: int
    reached: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        # The tensor is held until the batch ends, so its address identifies it.
        return self.x.data_ptr(), self.version, tuple(self.x.shape), self.x.stride()


@dataclass
class Batch:
    """What the hooks must know of the batch and the backward pass in hand."""

    index: int
    mask: Tensor | None = None
    scale: float = 1.0
    adds: frozenset[str] = frozenset()  # "fisher": to S_Y, "labels": to Gbar
    calls: dict[str, list[_Call]] = field(default_factory=dict)


class Stream:
    """Hooks on the target layers that feed the sums.

    ``sink`` receives (layer, x rows, g rows) in place of the sums, for the second pass of the corrected variant.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        reduce: Reduce,
        new_moment: Callable[[int, torch.device], SecondMoment],
        sink: Callable[[Layer, Tensor, Tensor], None] | None = None,
    ) -> None:
        self.layers = layers
        self.reduce: Reduce = reduce
        self.new_moment = new_moment
        self.sink = sink
        self.batch = Batch(0)

    def hook(self, layer: Layer) -> Any:
        def forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            layer.ran = True
            # Reentrant checkpointing runs the layer once without a graph and again in the backward pass.
            if not torch.is_grad_enabled():
                return output
            if not output.requires_grad:
                output = _start_of_graph(output)  # the first layers of a frozen model
            x = (args[0] if args else next(iter(kwargs.values()))).detach()
            call = _Call(x, x._version)
            self.batch.calls.setdefault(layer.name, []).append(call)
            # Checkpointing without reentry fires this hook again on recomputation, but gradient reaches only the first
            # call's output: counting in the backward pass counts once.
            output.register_hook(lambda g: self.receive(layer, call, g))
            return output

        return layer.module.register_forward_hook(forward, with_kwargs=True)

    def rows(self, layer: Layer, t: Tensor, *, gradient: bool) -> Tensor:
        rows = _rows(layer.module, t, self.batch.mask, self.reduce, gradient=gradient)
        return rows.to(layer.y.sum.dtype)

    def receive(self, layer: Layer, call: _Call, g: Tensor) -> None:
        batch = self.batch
        if call.x._version != call.version:
            raise TargetError(
                f"the input of {layer.name} was changed in place after the layer read it; use an out-of-place operation"
            )
        call.reached = layer.reached = True
        rows = self.rows(layer, g, gradient=True)
        if batch.scale != 1.0:
            rows = rows / batch.scale
        if not bool(torch.isfinite(rows.sum())):
            raise NonFinite(f"the gradient at {layer.name} is not finite in calibration batch {batch.index}")
        if self.sink is not None:
            self.sink(layer, self.rows(layer, call.x, gradient=False), rows)
            return
        if "fisher" in batch.adds:
            layer.y.add(rows)
        if "labels" in batch.adds and layer.gradient is not None:
            layer.gradient.addmm_(rows.mT, self.rows(layer, call.x, gradient=False))

    def absorb_inputs(self) -> None:
        """Add the batch's inputs once for each set of layers that has always read the same tensors."""
        groups: dict[tuple[Any, ...], list[Layer]] = {}
        seen = {n: [c for c in calls if c.reached] for n, calls in self.batch.calls.items()}
        for layer in self.layers:
            key = (id(layer.x), _geometry(layer.module), *(c.key for c in seen.get(layer.name, ())))
            groups.setdefault(key, []).append(layer)
        plan, taken = [], set()
        for members in groups.values():
            calls, moment = seen.get(members[0].name, []), members[0].x
            if moment is None:
                if not calls:
                    continue
                moment = self.new_moment(members[0].shape[1], members[0].y.sum.device)
            elif id(moment) in taken:
                moment = moment.clone()  # its layers no longer read the same tensors
            taken.add(id(moment))
            plan.append((moment, members, calls))
        for moment, members, calls in plan:
            for call in calls:
                moment.add(self.rows(members[0], call.x, gradient=False))
            if not bool(torch.isfinite(moment.trace)):
                raise NonFinite(f"the input of {members[0].name} is not finite in calibration batch {self.batch.index}")
            for layer in members:
                layer.x = moment


def _start_of_graph(output: Tensor) -> Tensor:
    """The same values, requiring grad. A copy of a leaf, because leaves cannot be changed in place (by a ReLU, say)."""
    return output.detach().requires_grad_().clone()


def _start_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return _start_of_graph(output)


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, frozen parameters and an embedding output that starts the graph; everything is put back."""
    training = {m: m.training for m in model.modules()}
    flags = {p: p.requires_grad for p in model.parameters()}
    rng = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    embeddings = _input_embeddings(model)
    handle = None
    try:
        model.eval()
        for p in flags:
            p.requires_grad_(False)
        if embeddings is not None:
            # With gradient checkpointing the blocks' inputs must require grad.
            handle = embeddings.register_forward_hook(_start_hook)
        with torch.enable_grad():
            yield
    finally:
        if handle is not None:
            handle.remove()
        for module, flag in training.items():
            module.training = flag
        for p, flag in flags.items():
            p.requires_grad_(flag)
        torch.set_rng_state(rng)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _input_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        found = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None
