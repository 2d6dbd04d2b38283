"""The seam where a method plugs into a run: one small class of hooks that by default change nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from subspan.surgery import BaseShift
from subspan.surgery.answers import on_device_of

if TYPE_CHECKING:
    from subspan.tune.config import Config
    from subspan.tune.tasks import Batch, CausalLM, Classification, Losses, Row


@dataclass
class Run:
    """What every part of a run may read, and the few things it may set."""

    config: "Config"
    folder: Path
    task: "Classification | CausalLM"
    train: Sequence["Row"]
    model: nn.Module
    say: Callable[[str], None]
    targets: list[str] = field(default_factory=list)
    shift: BaseShift | None = None
    resuming: bool = False
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    validation: Sequence["Row"] = ()

    def calibration(self, batch_size: int = 8) -> Iterator["Batch"]:
        """Batches of the first ``calibration_rows`` training rows (they are in random order), on the model's device."""
        rows = self.train[: self.config.calibration_rows]
        for at in range(0, len(rows), batch_size):
            yield on_device_of(self.model, self.task.collate(rows[at : at + batch_size]))

    def note(self, section: str, **facts: Any) -> None:
        """Record facts for the report and for ``summary.json``."""
        self.facts.setdefault(section, {}).update(facts)


class Part:
    """One method in a run. Override the hooks it needs; the recipe calls them in this order."""

    logs: tuple[str, ...] = ("loss", "learning_rate", "grad_norm")
    """Which of the trainer's figures have a meaning, and may be written to metrics.jsonl."""

    def prepare_base(self, run: Run) -> None:
        """The base model is loaded and bare: look at it, calibrate."""

    def lora_options(self, run: Run) -> dict[str, Any]:
        """Fields of peft's LoraConfig that this part sets."""
        return {}

    def prepare_adapter(self, run: Run) -> None:
        """The model that will be trained exists: write its start. If the base must change, set ``run.shift``."""

    def optimizer(self, run: Run) -> torch.optim.Optimizer | None:
        """The optimiser of the run, from the one part that brings it."""
        return None

    def batches(self, run: Run) -> Iterable[list[int]] | None:
        """Row numbers, one list a step, if the part draws the batches itself; the same ones at each iteration."""
        return None

    def around_step(self, run: Run) -> AbstractContextManager[Any]:
        """What holds during each forward and backward pass of training, whoever does it."""
        return nullcontext()

    def step(self, run: Run, model: nn.Module, batch: "Batch") -> Tensor | None:
        """Forward and backward of one batch, if the part does it itself; returns the mean loss for the log."""
        return None

    def losses(self, run: Run, model: nn.Module, batch: "Batch") -> "Losses | None":
        """The losses of a training batch, from a part that trains on something else than the task's own."""
        return None

    def figures(self) -> dict[str, float]:
        """What the progress and metrics.jsonl should show beside the loss."""
        return {}

    def save(self, folder: Path) -> None:
        """Write this part's state into a checkpoint."""

    def load(self, folder: Path) -> None:
        """Read it back."""

    def finish(self, run: Run) -> None:
        """Training is over: note what the report should say."""
