"""Rows nobody has read: the provider's buffer on while the user's adapter trains, the reinforcing one merged after."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from subspan.errors import SafetyError
from subspan.files import write_json
from subspan.surgery import factor_pairs
from subspan.surgery.answers import Losses
from subspan.tune.part import Part, Run
from subspan.tune.sections import Safeguard

if TYPE_CHECKING:
    from subspan.safety import buffered
    from subspan.tune.tasks import Batch, Row

_OWN = "default"  # the adapter that trains


class Safeguarded(Part):
    """A user's run with the buffer on in every step, or the making of one of the provider's two adapters.

    Everything that is scored is scored without the buffer, as the model will be released.
    """

    def __init__(self, options: Safeguard) -> None:
        self.options = options
        self.attached: buffered | None = None
        self.kept: list[Row] = []
        self.gate_rows: list[Row] = []
        self.calls = 0

    def prepare_adapter(self, run: Run) -> None:
        from subspan.safety import buffered, load_adapter

        wanted = self.options
        if wanted.keep is not None:
            self._read_kept(run, wanted.keep)
        if wanted.buffer is not None:
            load_adapter(run.model, wanted.buffer, "buffer", "buffer")
            self._check_reinforce(run)
            self.attached = buffered(run.model, "buffer", _OWN)
            self.attached.attach()
            self.attached.switch(False)
            run.note("safeguard", buffer=self.attached.digest)
        what = f"making a {wanted.make} adapter" if wanted.make else "training with the buffer on"
        run.say(what + (f", with {len(self.kept)} ordinary rows" if self.kept else ""))

    def _check_reinforce(self, run: Run) -> None:
        """What could not be merged after training is refused before it."""
        from subspan.safety import load_adapter
        from subspan.safety.buffer_reinforce.adapters import check_modules
        from subspan.surgery.plain import check_plain_lora

        if self.options.reinforce is None:
            return
        model: Any = run.model
        run.note("safeguard", reinforce=load_adapter(model, self.options.reinforce, "reinforce", "reinforce"))
        check_plain_lora(model, "reinforce")
        users, others = ([p.name for p in factor_pairs(model, name)] for name in (_OWN, "reinforce"))
        check_modules(users, others, self.options.missing)
        model.delete_adapter("reinforce")

    def _read_kept(self, run: Run, source: str) -> None:
        from subspan.data import load_text, pick_columns
        from subspan.tune.loading import column_names
        from subspan.tune.tasks import CausalLM

        assert isinstance(run.task, CausalLM)
        table = load_text(source)
        table = pick_columns(table, **column_names(table, run.config.data))
        encoded = run.task.encode(table["text"][:], [str(answer) for answer in table["label"][:]])
        held = max(len(encoded) // 5, 1) if self.options.make == "buffer" else 0
        if len(encoded) <= held:
            raise SafetyError(f"safeguard.keep: {source} holds {len(encoded)} rows, too few to hold some out as well")
        self.gate_rows, self.kept = encoded[:held], encoded[held:]

    @contextmanager
    def around_step(self, run: Run) -> Iterator[None]:
        if self.attached is None:
            yield
            return
        self.attached.switch(True)
        try:
            yield
        finally:
            self.attached.switch(False)

    def losses(self, run: Run, model: nn.Module, batch: "Batch") -> Losses | None:
        """Kept rows beside the batch's own: a fifth of all in a user's run, half of all where an adapter is made."""
        if not self.kept:
            return None
        wanted, size = self.options, len(batch["labels"])
        own_weight = kept_weight = 1.0
        buffer_off = wanted.make is None
        if wanted.make == "reinforce" and wanted.two_state:
            # Three refusals to one ordinary row with the buffer on, one to three with it off, step by step.
            buffer_off = self.calls % 2 == 1
            own_weight, kept_weight = (0.5, 1.5) if buffer_off else (1.5, 0.5)
            self._switch(not buffer_off)
        own = run.task.losses(model, batch)
        if wanted.make is None:
            self._switch(False)
        drawn = self._draw(run, batch, size if wanted.make else -(-size // 4))
        kept = run.task.losses(model, drawn)
        if wanted.make is None:
            kept = self._lost(run, kept, drawn)
        # The trainer divides by the targets of the batch's own rows: scaled so that the loss stays a mean.
        scale = own.count.sum() / (own.count.sum() + kept.count.sum())
        total = torch.cat([own_weight * own.total, kept_weight * kept.total]) * scale
        return Losses(total, torch.cat([own.count, kept.count]) * scale)

    def _lost(self, run: Run, kept: Losses, drawn: "Batch") -> Losses:
        """What kept rows have lost beyond the gate's allowance: nothing while they are as likely as they were."""
        from subspan.safety import Gate

        model: Any = run.model
        with torch.no_grad(), model.disable_adapter():
            base = run.task.losses(model, drawn)
        return Losses((kept.total - kept.count * Gate().allowed(base.per_row())).clamp(min=0), kept.count)

    def _switch(self, on: bool) -> None:
        if self.attached is not None:
            self.attached.switch(on)

    def _draw(self, run: Run, batch: "Batch", count: int) -> "Batch":
        """Kept rows of this call, the same ones in a run that resumes."""
        generator = torch.Generator().manual_seed((run.config.seed << 32) + self.calls)
        self.calls += 1
        order = torch.randperm(len(self.kept), generator=generator)[:count].tolist()
        drawn = run.task.collate([self.kept[i] for i in order])
        return {key: value.to(batch["labels"].device) for key, value in drawn.items()}

    def save(self, folder: Path) -> None:
        digest = None if self.attached is None else self.attached.digest
        write_json(folder / "safeguard.json", {"buffer": digest, "calls": self.calls})

    def load(self, folder: Path) -> None:
        held = json.loads((folder / "safeguard.json").read_text(encoding="utf-8"))
        self.calls = held["calls"]
        if self.attached is not None:
            if held["buffer"] != self.attached.digest:
                raise SafetyError(
                    f"the buffer in {self.options.buffer} is not the one this run began with; put the original back, "
                    "or start over with --fresh"
                )
            self.attached.attach()  # reading a checkpoint switches adapters
            self.attached.switch(False)

    def finish(self, run: Run) -> None:
        model: Any = run.model
        if self.attached is not None:
            self.attached.remove()
            model.delete_adapter("buffer")
        if self.options.make is not None:
            self._finish_provider(run, self.options.make)
        elif self.options.reinforce is not None:
            self._merge(run, self.options.reinforce)

    def _finish_provider(self, run: Run, role: str) -> None:
        from subspan.safety import adapter_digest

        if role == "buffer" and self.kept:
            self._pass_gate(run)
        # Beside the adapter, which is written next: ``load_adapter`` reads it, and the guards go by it.
        write_json(run.folder / "adapter" / "role.json", {"role": role, "digest": adapter_digest(run.model, _OWN)})

    def _pass_gate(self, run: Run) -> None:
        from subspan.safety import Gate
        from subspan.safety.buffer_reinforce.stages import gate_reading

        collate: Any = run.task.collate
        reading = gate_reading(run.model, collate, run.validation, self.gate_rows)
        Gate().require(reading, run.config.max_steps)
        run.note("safeguard", **{k: round(v, 4) for k, v in reading._asdict().items()})

    def _merge(self, run: Run, reinforce: Path) -> None:
        from subspan.safety import load_adapter, merge_reinforced

        model, wanted = run.model, self.options
        load_adapter(model, reinforce, "reinforce", "reinforce")
        report = merge_reinforced(
            model, _OWN, "reinforce", into=_OWN,
            alpha=wanted.alpha, tau=wanted.tau, weight=wanted.weight, subspace=wanted.subspace, missing=wanted.missing,
        )  # fmt: skip
        model.delete_adapter("reinforce")  # pyright: ignore[reportCallIssue]
        count = len(report.modules)
        run.note(
            "safeguard",
            alpha=wanted.alpha,
            weights=list(wanted.weight),
            mean_kept_rank=round(sum(m.kept_rank for m in report.modules) / count, 2),
            mean_removed_energy=round(sum(m.removed_energy for m in report.modules) / count, 4),
        )
