"""A model with a memory in its linear layers: injection, tasks, statistics, files."""

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subspan.adapters.moram.config import MoRAMConfig
from subspan.adapters.moram.layer import MoRAMLinear
from subspan.adapters.moram.usage import LayerUsage, activation_maps, compact, usage
from subspan.errors import BaseMismatch, DataError, TargetError
from subspan.files import replacing, write_json
from subspan.surgery import (
    base_fingerprint,
    find_targets,
    is_conv1d,
    no_match,
    replace_modules,
    split_attention,
)

WEIGHTS, SETTINGS = "moram.safetensors", "moram.json"


class TrainedCopy(nn.Module):
    """A module that trains whole, in a copy, so that the original can be had back."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        # Under peft's name for it, by which other parts of a training run tell heads from factors.
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module).requires_grad_(True)})
        self.enabled = True

    @property
    def trained(self) -> nn.Module:
        return self.modules_to_save["default"]

    @property
    def weight(self) -> Any:
        return (self.trained if self.enabled else self.original_module).weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.trained if self.enabled else self.original_module)(*args, **kwargs)


class MoRAM:
    """The memory of a model, at ``model.moram``: it opens and closes tasks, measures, and writes files.

    ``layers`` maps names to ``MoRAMLinear``; ``tasks`` are the names of the tasks so far; ``open_task`` is the one in
    training, or None.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, MoRAMLinear], config: MoRAMConfig) -> None:
        self.model, self.layers, self.config = model, dict(layers), config
        self.copies = {name: m for name, m in model.named_modules() if isinstance(m, TrainedCopy)}
        self.tasks: list[str] = []
        self.open_task: str | None = None

    # ------------------------------------------------------------------------------------------------------------ tasks

    def begin_task(
        self, name: str | None = None, r: int | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Freeze everything learned before and append ``r`` fresh atoms to each layer. Build a new optimiser then.

        Args:
            name: by default "task 1", "task 2", ...
            r: atoms for this task; ``config.r`` by default.
            generator: a CPU generator for the keys.

        Raises:
            ValueError: a task is open already, the name was used, or r < 1.
        """
        name = name or f"task {len(self.tasks) + 1}"
        r = self.config.r if r is None else r
        if self.open_task is not None:
            raise ValueError(f"task {self.open_task!r} is still open: call end_task() before task {name!r} begins")
        if name in self.tasks:
            raise ValueError(f"there was a task {name!r} already; tasks: {', '.join(self.tasks)}")
        if r < 1:
            raise ValueError(f"r={r}: a task needs at least 1 atom")
        for layer in self.layers.values():
            layer.bank.grow(len(self.tasks), r, self.config.scale(r), generator)
        self.tasks.append(name)
        self.open_task = name
        self.set_progress(0.0)

    def end_task(self) -> None:
        """Freeze the atoms of the open task; the model computes what it did before. Appends nothing.

        Raises:
            ValueError: no task is open.
        """
        if self.open_task is None:
            raise ValueError("no task is open: call begin_task() first")
        if not any(layer.bank.awake() for layer in self.layers.values()):
            warnings.warn(
                f"no atom of task {self.open_task!r} was trained; each task needs a new optimiser, built from "
                "moram.parameters() after begin_task()",
                stacklevel=2,
            )
        for layer in self.layers.values():
            layer.bank.freeze()
            layer.gate_in_training = False
        self.open_task = None

    @contextmanager
    def task(
        self, name: str | None = None, r: int | None = None, generator: torch.Generator | None = None
    ) -> Iterator["MoRAM"]:
        """``begin_task`` on entry, ``end_task`` on exit. After an exception the task stays open, to be gone on with."""
        self.begin_task(name, r, generator)
        yield self
        self.end_task()

    def parameters(self) -> list[nn.Parameter]:
        """What trains now: the open task's atoms, and the modules to save."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def set_progress(self, share: float) -> None:
        """Tell how much of the open task's training is done, in [0, 1]; ``threshold_warmup`` gates its end."""
        gate = self.config.threshold_warmup > 0 and share >= 1 - self.config.threshold_warmup
        for layer in self.layers.values():
            layer.gate_in_training = gate

    def growth(self) -> list[dict[str, Any]]:
        """A row per task: its atoms over all layers, the values it trained, and the values stored up to it."""
        rows, stored = [], 0
        for number, name in enumerate(self.tasks):
            atoms = {n: int((layer.bank.task_of_atom == number).sum()) for n, layer in self.layers.items()}
            size = sum(count * (self.layers[n].bank.d_in + self.layers[n].bank.d_out + 1) for n, count in atoms.items())
            stored += size
            rows.append({"task": name, "atoms": sum(atoms.values()), "values": size, "stored": stored})
        return rows

    def configure(self, **options: Any) -> None:
        """Change how the memory is read (``temperature``, ``threshold``, ``top_k``, ...), not what it holds."""
        self.config = replace(self.config, **options)
        for layer in self.layers.values():
            layer.config = self.config

    @contextmanager
    def disabled(self) -> Iterator[nn.Module]:
        """Within, the model is the base model: every memory, and every module to save, steps aside."""
        parts: list[Any] = [*self.layers.values(), *self.copies.values()]
        before = [part.enabled for part in parts]
        for part in parts:
            part.enabled = False
        try:
            yield self.model
        finally:
            for part, was in zip(parts, before, strict=True):
                part.enabled = was

    def merge_and_unload(self) -> None:
        """Not possible. Raises ValueError."""
        raise ValueError(
            "a memory cannot be merged into the base weights: which atoms a token reads depends on the token; keep it "
            "beside the base model (save_moram, load_moram)"
        )

    # ------------------------------------------------------------------------------------------------------- statistics

    def stats(self, loader: Iterable[Any], forward: Callable[[Any], Any] | None = None) -> dict[str, LayerUsage]:
        """How the memory is used on these batches, layer by layer.

        Args:
            loader: batches. A mapping is passed as keywords, a tuple or list by its first entry; where a mapping holds
                an ``attention_mask`` of the shape of a layer's tokens, padding is not counted.
            forward: what to call with a batch instead.
        """
        return usage(self.model, self.layers, len(self.tasks), loader, forward)

    def activations(self, batch: Any, forward: Callable[[Any], Any] | None = None) -> dict[str, Tensor]:
        """Weight of every atom (columns, oldest first) for every token of the batch (rows), in each layer."""
        return activation_maps(self.model, self.layers, batch, forward)

    def compact(
        self, loader: Iterable[Any], tol: float = 0.0, forward: Callable[[Any], Any] | None = None
    ) -> dict[str, list[int]]:
        """Drop atoms that no calibration token reads, as long as no output of their layer changes by more than ``tol``.

        Atoms that are read by nobody still count in the norm of the responses, so that without them all scores rise a
        little; hence the tolerance. Of each task one atom stays. Returns what was dropped (indices before), by layer.

        Args:
            loader: calibration batches, as for ``stats``; they are gone through twice.
            tol: largest change of an entry of a layer's output.
            forward: as for ``stats``.

        Raises:
            ValueError: a task is open.
        """
        if self.open_task is not None:
            raise ValueError(f"task {self.open_task!r} is open: a memory is compacted between tasks")
        return compact(self.model, self.layers, list(loader), tol, forward)

    # ------------------------------------------------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write the memory as it is, an open task included: each layer's A, B, scale and task_of_atom, and settings."""
        from safetensors.torch import save_file

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            bank = layer.bank
            new_keys = [] if bank.new_keys is None else [bank.new_keys.detach()]
            new_values = [] if bank.new_values is None else [bank.new_values.detach()]
            tensors[f"{name}.A"] = torch.cat([bank.keys, *new_keys])
            tensors[f"{name}.B"] = torch.cat([bank.values, *new_values]).mT.contiguous()
            tensors[f"{name}.scale"], tensors[f"{name}.task_of_atom"] = bank.scale, bank.task_of_atom
        for name, part in self.copies.items():
            tensors |= {f"{name}.modules_to_save.{k}": v for k, v in part.trained.state_dict().items()}
        with replacing(path / WEIGHTS) as part:
            save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, part, metadata={"format": "pt"})
        fingerprint, names = self._base()
        settings = {"config": self.config.to_dict(), "tasks": self.tasks, "open_task": self.open_task}
        write_json(path / SETTINGS, settings | {"base": {"fingerprint": fingerprint, "parameters": names}})

    def _base(self) -> tuple[str, list[str]]:
        """A digest of the adapted layers' base weights (those that are not stored as integers)."""
        names = [f"{name}.weight" for name, layer in self.layers.items() if layer.weight.is_floating_point()]
        return base_fingerprint(self.model, names), names

    def load(self, path: str | Path) -> None:
        """Read what ``save`` wrote for this model and these targets, in place of what the memory holds.

        Raises:
            BaseMismatch: it was written for another base model.
            DataError: the files are missing or malformed.
            ValueError: a layer has other sizes there.
        """
        from safetensors.torch import load_file

        settings, path = read_settings(path), Path(path)
        tensors = load_file(path / WEIGHTS)
        fingerprint, names = self._base()
        if settings["base"]["parameters"] == names and settings["base"]["fingerprint"] != fingerprint:
            raise BaseMismatch(f"the memory in {path} was made for other base weights; load the original base model")
        tasks, open_task = list(settings["tasks"]), settings["open_task"]
        for name, layer in self.layers.items():
            if f"{name}.A" not in tensors:
                raise BaseMismatch(f"the memory in {path} has no layer {name!r}: it was made for other targets")
            parts = [tensors[f"{name}.{key}"] for key in ("A", "B", "scale", "task_of_atom")]
            _fill(layer, name, parts, len(tasks), open_task is not None)
        for name, part in self.copies.items():
            prefix = f"{name}.modules_to_save."
            part.trained.load_state_dict(
                {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            )
        self.tasks, self.open_task = tasks, open_task


@torch.no_grad()
def _fill(layer: MoRAMLinear, name: str, parts: list[Tensor], tasks: int, is_open: bool) -> None:
    """Put stored atoms into a layer's bank; parameters of an open task are written in place where they fit."""
    A, B, scale, of_task = parts
    bank = layer.bank
    if A.shape != (len(scale), bank.d_in) or B.shape != (bank.d_out, len(scale)) or of_task.shape != scale.shape:
        raise ValueError(
            f"{name} takes {bank.d_in} inputs and gives {bank.d_out} outputs; the file has keys {tuple(A.shape)} and "
            f"values {tuple(B.shape)}"
        )
    if of_task.unique().tolist() != list(range(tasks)) or (of_task.diff() < 0).any():
        raise ValueError(f"{name}: the task ids of the stored atoms are not 0 to {tasks - 1} in order, without a gap")
    frozen = int((of_task < tasks - 1).sum()) if is_open else len(scale)
    keys, values = A.to(bank.keys), B.mT.contiguous().to(bank.values)
    held = (bank.new_keys, bank.new_values)
    bank.keys, bank.values = keys[:frozen].clone(), values[:frozen].clone()
    bank.scale, bank.task_of_atom = scale.to(bank.scale), of_task.to(bank.task_of_atom)
    bank.woken = False
    if not is_open:
        bank.new_keys = bank.new_values = None
    elif held[0] is not None and held[1] is not None and held[0].shape == keys[frozen:].shape:
        held[0].copy_(keys[frozen:])
        held[1].copy_(values[frozen:])
    else:
        bank.new_keys, bank.new_values = nn.Parameter(keys[frozen:].clone()), nn.Parameter(values[frozen:].clone())


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of a saved memory. Raises ``DataError`` where there are none."""
    file = Path(path) / SETTINGS
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"there is no memory in {path}: {error}") from error


# ------------------------------------------------------------------------------------------------------------ injection


def wrap(model: nn.Module, targets: Mapping[str, nn.Module], config: MoRAMConfig) -> nn.Module:
    """Freeze ``model``, put a ``MoRAMLinear`` around each target, and give it its ``moram``."""
    model.requires_grad_(False)
    layers = {name: MoRAMLinear(module, config) for name, module in targets.items()}
    for layer in layers.values():
        layer.train(layer.base_layer.training)
    replace_modules(model, {layer.base_layer: layer for layer in layers.values()})
    whole = _modules_to_save(model, config, layers)
    replace_modules(model, {module: TrainedCopy(module) for module in whole.values()})
    model.moram = MoRAM(model, layers, config)  # pyright: ignore[reportArgumentType]
    return model


def _modules_to_save(model: nn.Module, config: MoRAMConfig, layers: Mapping[str, MoRAMLinear]) -> dict[str, nn.Module]:
    wanted = config.modules_to_save or ()
    whole = {
        name: module
        for name, module in model.named_modules()
        if any(name == w or name.endswith(f".{w}") for w in wanted)
    }
    for w in wanted:
        if not any(name == w or name.endswith(f".{w}") for name in whole):
            raise TargetError(no_match(model, [w]).replace("target modules", "modules_to_save"))
    if both := [name for name in layers if any(name == w or name.startswith(f"{w}.") for w in whole)]:
        raise TargetError(f"{both[0]} cannot both hold a memory and train whole: take it out of one of the lists")
    return whole


def inject_moram(model: nn.Module, config: MoRAMConfig | None = None) -> nn.Module:
    """Give linear layers of ``model`` a memory, in place; returns the model, frozen, with ``model.moram``.

    Every packed ``nn.MultiheadAttention`` is first taken apart into q, k, v and out projections (exactly), because it
    multiplies with its weights past any wrapper. Nothing is computed differently until ``model.moram.begin_task()``.

    Raises:
        TargetError: no layer matches, or a matching one is no linear layer, or the model itself.
        ValueError: the model has a memory already.
    """
    config = config or MoRAMConfig()
    if hasattr(model, "moram"):
        raise ValueError("this model has a memory already: begin its next task with model.moram.begin_task()")
    split_attention(model)
    wanted = config.target_modules
    targets = find_targets(model, wanted, exclude=list(config.modules_to_save or ()) or None)
    if "" in targets:
        raise TargetError("the model is itself a linear layer, which nothing can take the place of: put it in a module")
    if odd := [n for n, m in targets.items() if not (isinstance(m, nn.Linear) or is_conv1d(m))]:
        raise TargetError(f"{odd[0]} is a {type(targets[odd[0]]).__name__}; a memory goes on linear layers")
    return wrap(model, targets, config)


def save_moram(model: nn.Module, path: str | Path) -> None:
    """Write the memory of ``model`` into a folder (safetensors and json). An open task is saved as open.

    Raises ``ValueError`` for a model without a memory.
    """
    memory_of(model).save(path)


def load_moram(base: nn.Module, path: str | Path) -> nn.Module:
    """Give ``base`` the memory that ``save_moram`` wrote; returns the model, bit for bit as it was saved.

    Raises:
        BaseMismatch: it was made for another base model.
        DataError: no memory lies there.
        ValueError: layers of other sizes, or task ids with a gap.
    """
    config = MoRAMConfig(**read_settings(path)["config"])
    model = inject_moram(base, config)
    memory_of(model).load(path)
    return model


@contextmanager
def disable_moram(model: nn.Module) -> Iterator[nn.Module]:
    """Within, ``model`` computes exactly what its base model does."""
    with memory_of(model).disabled() as base:
        yield base


def memory_of(model: nn.Module) -> MoRAM:
    """``model.moram``. Raises ``ValueError`` where there is none."""
    memory = getattr(model, "moram", None)
    if not isinstance(memory, MoRAM):
        raise ValueError("this model has no memory: call inject_moram(model, MoRAMConfig(...)) first")
    return memory
