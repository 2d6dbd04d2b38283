"""Which layers are looked at, and passes over the data that a kill does not undo."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subspan.errors import ConfigError, TargetError
from subspan.files import write_json
from subspan.surgery import base_layer, matrix_layers, no_match, parameter_owners
from subspan.theory.collapse.statistics import Captured, Forward, Sums, accumulate

Progress = Callable[[int, int | None], None]


def checked_layers(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The layers of these names in the model's order, if each has a weight matrix of its own; by default all such.

    Raises:
        TargetError: no layer, an unknown name, a module without a weight matrix, or a weight that several layers share.
    """
    names = [names] if isinstance(names, str) else names
    layers = {name: _called(module) for name, module in matrix_layers(model).items()}
    known = {name: m for name, m in layers.items() if not isinstance(base_layer(m), nn.Embedding)}
    if unknown := [name for name in names or () if name not in known]:
        raise TargetError(no_match(model, unknown))
    owners = parameter_owners(model)
    shared = {name: owners[base_layer(m).weight] for name, m in known.items()}  # pyright: ignore[reportArgumentType]
    shared = {name: [key for key, _ in places] for name, places in shared.items() if len(places) > 1}
    for name in names or ():
        if name in shared:
            other = next(key for key in shared[name] if key != f"{name}.weight")
            raise TargetError(f"{name} shares its weight with {other}; its curvature is not that of one layer")
    chosen = {n: m for n, m in known.items() if (n not in shared if names is None else n in names)}
    if not chosen:
        raise TargetError("there is no layer to look at: name one that has a weight matrix of its own")
    return chosen


def _called(module: nn.Module) -> nn.Module:
    """What runs in a layer's place: under peft's ``modules_to_save`` the trained copy."""
    saved: Any = getattr(module, "modules_to_save", {})
    active = [name for name in getattr(module, "active_adapters", ()) if name in saved]
    return saved[active[0]] if active else module


class Passes:
    """Runs passes over the data; what they summed so far lies in ``state``, if that is given.

    Args:
        model: the classifier.
        layers: by name.
        loader: batches.
        forward_fn: (model, batch) -> (logits, labels).
        count: how many passes there will be.
        state: a folder.
        settings: what the sums depend on; a folder with sums of other settings is refused.
        save_every: seconds between two writes.
        progress: called with the batches done and to do, over all passes.

    Raises:
        ConfigError: ``state`` holds sums of other settings.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        loader: Iterable[Any],
        forward_fn: Forward,
        count: int,
        *,
        state: Path | None,
        settings: Mapping[str, Any],
        save_every: float,
        progress: Progress | None,
    ) -> None:
        self.model, self.layers, self.loader, self.forward_fn = model, layers, loader, forward_fn
        self.state, self.save_every, self.progress = state, save_every, progress
        self.total = count * len(loader) if hasattr(loader, "__len__") else None  # pyright: ignore[reportArgumentType]
        self.done = 0
        if state is not None:
            self._claim(state / "settings.json", settings)

    @staticmethod
    def _claim(path: Path, settings: Mapping[str, Any]) -> None:
        if not path.exists():
            write_json(path, settings)
        began = json.loads(path.read_text(encoding="utf-8"))
        if other := [key for key in settings if began.get(key) != settings[key]]:
            raise ConfigError(
                f"{path.parent} holds sums of a call that differs in {', '.join(other)}; choose another folder, or "
                "remove it"
            )

    def __call__(self, name: str, measure: Callable[[Captured], Mapping[str, Tensor]]) -> Sums:
        """One pass, from its beginning or from where an earlier process left it."""
        path = None if self.state is None else self.state / f"{name}.safetensors"
        device = next(self.model.parameters()).device
        sums = Sums.load(path, device) if path is not None and path.exists() else Sums()
        before, saved = self.done, time.monotonic()

        def after(sums: Sums) -> None:
            nonlocal saved
            self.done = before + sums.batches
            if path is not None and time.monotonic() - saved >= self.save_every:
                sums.save(path)
                saved = time.monotonic()
            if self.progress is not None:
                self.progress(self.done, self.total)

        accumulate(self.model, self.layers, self.loader, measure, forward_fn=self.forward_fn, sums=sums, after=after)
        self.done = before + sums.batches
        if path is not None:
            sums.save(path)
        return sums
