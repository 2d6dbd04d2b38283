"""Buffer-and-Reinforce as a callback of transformers' Trainer."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from subspan.files import write_json
from subspan.safety.buffer_reinforce.adapters import MergeReport, merge_reinforced
from subspan.safety.buffer_reinforce.attach import buffered


class BufferReinforceCallback(TrainerCallback):
    """Puts the buffer on when training begins, takes it off when it ends, and merges then.

    Checkpoints hold the user's adapter and never the buffer, whose digest alone is kept in ``output_dir/buffer.json``:
    a run that resumes refuses another one. Evaluation within training sees the buffered model; what will be released
    is scored after training.

    Args:
        model: the peft model that the Trainer trains.
        buffer: name of the provider's adapter.
        user: name of the adapter that trains.
        reinforce: name of the adapter to merge at the end; None merges nothing.
        into: name of the merged adapter.
        merge: further arguments of ``merge_reinforced``.
    """

    def __init__(
        self,
        model: Any,
        buffer: str = "buffer",
        user: str = "user",
        reinforce: str | None = None,
        into: str = "final",
        **merge: Any,
    ) -> None:
        self.model, self.names = model, (buffer, user, reinforce, into)
        self.merge = merge
        self.report: MergeReport | None = None
        self.attached: buffered | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        buffer, user, _, _ = self.names
        record = Path(args.output_dir) / "buffer.json"
        resumed = state.global_step > 0 and record.is_file()
        digest = json.loads(record.read_text(encoding="utf-8"))["digest"] if resumed else None
        self.attached = buffered(self.model, buffer, user, digest=digest)
        self.attached.attach()
        if args.should_save:
            write_json(record, {"digest": self.attached.digest})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.attached is not None:
            self.attached.remove()
        _, user, reinforce, into = self.names
        if reinforce is not None:
            self.report = merge_reinforced(self.model, user, reinforce, into, **self.merge)
