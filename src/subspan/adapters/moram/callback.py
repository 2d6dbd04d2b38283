"""The memory inside transformers' Trainer."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from subspan.adapters.moram.model import memory_of


class MoRAMCallback(TrainerCallback):
    """Keeps a ``Trainer`` and a memory in step: one task must be open, its end is gated where ``threshold_warmup`` asks
    for it, and each checkpoint also holds the memory (``load_moram(base, "checkpoint-100/moram")``).

    Raises ``ValueError`` at the start of training when no task is open.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if memory_of(model).open_task is None:
            raise ValueError("no task is open: train inside `with model.moram.task(name):`")

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        memory_of(model).set_progress(state.global_step / max(state.max_steps, 1))

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            memory_of(model).save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "moram")
