"""How a memory is used on data: weights by atom and task, silent tokens, maps, and atoms nobody needs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.adapters.moram.bank import Routing, dense_read, kept, responses, route, spread
from subspan.adapters.moram.layer import MoRAMLinear


@dataclass
class LayerUsage:
    """Means over the tokens seen by one layer (in evaluation).

    ``weight``: mixture weight of each atom (R), after the gate; ``task_weight``: their sums by task; ``silenced``:
    share of the weight that the gate took away; ``silent``: share of tokens that read nothing; ``live``: atoms that
    take part; ``tokens``: how many were seen; ``largest``: the largest weight that any token gave an atom (R);
    ``strongest``: the largest magnitude of a response (R).
    """

    weight: Float[Tensor, " r"]
    task_weight: Float[Tensor, " t"]
    silenced: float
    silent: float
    live: int
    tokens: int
    largest: Float[Tensor, " r"]
    strongest: Float[Tensor, " r"]


@dataclass
class _Sums:
    atoms: int
    tokens: int = 0
    silent: float = 0.0
    weight: Tensor = field(default_factory=lambda: torch.zeros(0))
    largest: Tensor = field(default_factory=lambda: torch.zeros(0))
    strongest: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        self.weight, self.largest, self.strongest = (torch.zeros(self.atoms, dtype=torch.float64) for _ in range(3))

    def add(self, p: Tensor, routing: Routing, mask: Tensor | None) -> None:
        w = spread(routing.index, routing.weight, p.shape[-1])
        if mask is not None and mask.shape == w.shape[:-1]:
            w, p = w[mask], p[mask]
        w, p = (t.flatten(0, -2).cpu().double() for t in (w, p.abs()))  # not every device has float64
        if not len(w):
            return
        live = slice(0, w.shape[-1])
        self.tokens += len(w)
        self.silent += float((w.sum(-1) == 0).sum())
        self.weight[live] += w.sum(0)
        self.largest[live] = torch.maximum(self.largest[live], w.amax(0))
        self.strongest[live] = torch.maximum(self.strongest[live], p.amax(0))


@contextmanager
def observed(model: nn.Module, layers: Mapping[str, MoRAMLinear], see: Callable[..., None]) -> Iterator[None]:
    """Evaluation mode without gradients, with ``see(name, x, p, routing)`` called at each layer."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for name, layer in layers.items():
        layer.observer = lambda x, p, routing, name=name: see(name, x, p, routing)
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers.values():
            layer.observer = None
        for module, mode in modes.items():
            module.training = mode


def run(model: nn.Module, batch: Any, forward: Callable[[Any], Any] | None) -> None:
    if forward is not None:
        forward(batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        model(batch[0] if isinstance(batch, tuple | list) else batch)


def _mask(batch: Any) -> Tensor | None:
    found = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return None if found is None else found.bool()


def usage(
    model: nn.Module,
    layers: Mapping[str, MoRAMLinear],
    tasks: int,
    loader: Iterable[Any],
    forward: Callable[[Any], Any] | None = None,
) -> dict[str, LayerUsage]:
    """See ``MoRAM.stats``."""
    sums = {name: _Sums(len(layer.bank)) for name, layer in layers.items()}
    mask: Tensor | None = None

    def see(name: str, x: Tensor, p: Tensor, routing: Routing) -> None:
        sums[name].add(p, routing, mask)

    with observed(model, layers, see):
        for batch in loader:
            mask = _mask(batch)
            run(model, batch, forward)
    out = {}
    for name, layer in layers.items():
        s, bank = sums[name], layer.bank
        mean = s.weight / max(s.tokens, 1)
        by_task = torch.zeros(tasks, dtype=mean.dtype).index_add_(0, bank.task_of_atom.cpu(), mean)
        share = s.silent / max(s.tokens, 1)
        whole = 1.0 if layer.config.mixing == "softmax" else kept(layer.config.k, int(bank.live.sum()))
        silenced = 1.0 - float(mean.sum()) / whole if s.tokens and whole else 0.0
        out[name] = LayerUsage(mean, by_task, silenced, share, int(bank.live.sum()), s.tokens, s.largest, s.strongest)
    return out


def activation_maps(
    model: nn.Module, layers: Mapping[str, MoRAMLinear], batch: Any, forward: Callable[[Any], Any] | None = None
) -> dict[str, Tensor]:
    """See ``MoRAM.activations``."""
    maps: dict[str, list[Tensor]] = {name: [] for name in layers}

    def see(name: str, x: Tensor, p: Tensor, routing: Routing) -> None:
        maps[name].append(spread(routing.index, routing.weight, p.shape[-1]).flatten(0, -2))

    with observed(model, layers, see):
        run(model, batch, forward)
    return {name: torch.cat(parts) for name, parts in maps.items() if parts}


def compact(
    model: nn.Module,
    layers: Mapping[str, MoRAMLinear],
    batches: list[Any],
    tol: float,
    forward: Callable[[Any], Any] | None = None,
) -> dict[str, list[int]]:
    """See ``MoRAM.compact``."""
    tasks = max((int(layer.bank.task_of_atom.max()) + 1 for layer in layers.values() if len(layer.bank)), default=0)
    seen = usage(model, layers, tasks, batches, forward)
    order = {name: _unread(layers[name], use) for name, use in seen.items()}
    # Of the atoms nobody reads the weakest go first: try all of them, and the weakest 1, 2, 4, ...
    sizes = {name: {len(atoms), *(1 << i for i in range(len(atoms).bit_length()))} for name, atoms in order.items()}
    worst = {name: dict.fromkeys(sizes[name], 0.0) for name in order}

    def see(name: str, x: Tensor, p: Tensor, routing: Routing) -> None:
        layer = layers[name]
        before = _read(layer, x, None)
        for size in sizes[name]:
            change = (_read(layer, x, _without(layer, order[name][:size])) - before).abs()
            worst[name][size] = max(worst[name][size], float(change.max()) if change.numel() else 0.0)

    with observed(model, layers, see):
        for batch in batches:
            run(model, batch, forward)
    dropped = {}
    for name, layer in layers.items():
        size = max((size for size, change in worst[name].items() if change <= tol), default=0)
        dropped[name] = sorted(order[name][:size])
        if size:
            layer.bank.keep(_without(layer, dropped[name]))
    return dropped


def _unread(layer: MoRAMLinear, use: LayerUsage) -> list[int]:
    """Atoms that no token read, the weakest response first; of a task with no others its strongest stays."""
    atoms = [i for i in use.strongest.argsort().tolist() if use.largest[i] == 0] if use.tokens else []
    of_task = layer.bank.task_of_atom.tolist()
    for task in set(of_task):
        own = [i for i in atoms if of_task[i] == task]
        if own and len(own) == of_task.count(task):
            atoms.remove(own[-1])
    return atoms


def _without(layer: MoRAMLinear, atoms: list[int]) -> Tensor:
    stays = torch.ones(len(layer.bank), dtype=torch.bool)
    stays[atoms] = False
    return stays.nonzero()[:, 0].to(layer.bank.keys.device)


def _read(layer: MoRAMLinear, x: Tensor, atoms: Tensor | None) -> Tensor:
    """What the bank adds in evaluation, with these atoms alone."""
    bank, config = layer.bank, layer.config
    keys, values, scale = bank.keys, bank.values, bank.scale
    if atoms is not None:
        keys, values, scale = keys[atoms], values[atoms], scale[atoms]
    options: dict[str, Any] = {"score": config.score, "normalize": config.normalize, "mixing": config.mixing}
    index, weight, p = route(responses(x, keys), config.k, config.temperature, config.threshold, **options)
    return dense_read(index, weight * scale[index] * p, values)
