"""transformers' Trainer with checkpoints that are whole or absent, batches that can be replayed, and a stop at NaN."""

import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from subspan.errors import DataError, NonFinite, SubspanError, first_line
from subspan.files import write_text
from subspan.tune.part import Part, Run
from subspan.tune.tasks import Batch


class ShuffledBatches:
    """Row numbers of every batch of a run, in a fixed order: each pass over the data is a new seeded permutation.

    Rows are sorted by length within windows of ``window`` batches, so that little of a batch is padding. All batches
    are of one size: the rows that are left at the end of a pass wait for the next.
    """

    drop_last = False  # with ``batch_size``, what accelerate asks of a sampler whose batches it shares out

    def __init__(self, lengths: Sequence[int], batch_size: int, batches: int, seed: int, window: int = 8) -> None:
        if batch_size > len(lengths):
            raise DataError(f"a batch of {batch_size} rows cannot be drawn from {len(lengths)} training rows")
        self.lengths, self.batch_size, self.batches, self.seed, self.window = lengths, batch_size, batches, seed, window

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        made = 0
        while True:
            order = torch.randperm(len(self.lengths), generator=generator).tolist()
            order = order[: len(order) - len(order) % self.batch_size]
            for start in range(0, len(order), self.window * self.batch_size):
                part = sorted(order[start : start + self.window * self.batch_size], key=self.lengths.__getitem__)
                chunks = [part[i : i + self.batch_size] for i in range(0, len(part), self.batch_size)]
                for k in torch.randperm(len(chunks), generator=generator).tolist():
                    if made == self.batches:
                        return
                    made += 1
                    yield chunks[k]


class _Rows(torch.utils.data.Dataset):
    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class TuneTrainer(Trainer):
    """Trains ``run.model`` on ``run.train``; parts may bring the optimiser, the batches and the step."""

    loss_is_scaled_for_ga = True  # losses below are divided by the targets of the whole accumulated batch

    def __init__(self, run: Run, parts: Sequence[Part], **kwargs: Any) -> None:
        self.run, self.parts = run, parts
        self._staging: Path | None = None
        super().__init__(model=run.model, train_dataset=_Rows(run.train), data_collator=run.task.collate, **kwargs)
        # The task computes the loss; this makes Trainer count the targets of a whole accumulated batch.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = run.task.loss_shifts

    def get_train_dataloader(self) -> DataLoader:
        config = self.run.config
        own = next((b for p in self.parts if (b := p.batches(self.run)) is not None), None)
        if own is None:
            lengths = [len(r["input_ids"]) for r in self.run.train]
            size, steps = config.batch_size // config.accumulate, self.args.max_steps * config.accumulate
            own = ShuffledBatches(lengths, size, steps, config.seed)
        self._order: Any = own
        loader = DataLoader(_Rows(self.run.train), batch_sampler=self._order, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = next(o for p in self.parts if (o := p.optimizer(self.run)) is not None)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        with ExitStack() as around:
            for part in self.parts:
                around.enter_context(part.around_step(self.run))
            return self._step(model, inputs, num_items_in_batch)

    def _step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any) -> Tensor:
        for part in self.parts:
            model.train()
            try:
                loss = part.step(self.run, model, self._prepare_inputs(inputs))
            except NonFinite as error:
                self._stop(str(error))
            if loss is not None:
                return self._finite(loss)
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        own = (x for p in self.parts if (x := p.losses(self.run, model, inputs)) is not None)
        losses = next(own, None) or self.run.task.losses(model, inputs)
        if num_items_in_batch is None:
            return self._finite(losses.mean())
        # DistributedDataParallel averages over processes, but the count is of all of them.
        return self._finite(losses.total.sum() / num_items_in_batch * self.accelerator.num_processes)

    def _finite(self, loss: Tensor) -> Tensor:
        value = loss.detach().item()
        if not math.isfinite(value):
            self._stop(f"the loss is {value}")
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is not None and not math.isfinite(float(norm)):
            self._stop(f"the gradient norm is {float(norm)}")
        return norm

    def _stop(self, what: str) -> NoReturn:
        step, per_step = self.state.global_step, self.run.config.accumulate
        drawn = [i for batch in islice(self._order, step * per_step, (step + 1) * per_step) for i in batch]
        rows = ", ".join(str(self.run.train[i]["row"]) for i in drawn)
        last = latest_checkpoint(self.run.folder)
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written yet"
        raise NonFinite(
            f"{what} in step {step + 1} (rows {rows} of {self.run.config.data.source}): training stops before the "
            f"weights are touched; {kept}. Look at these rows, or start over with a lower lr and --fresh"
        )

    # A checkpoint is written beside its place and renamed: a kill at any moment leaves the old ones whole.

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        home = self.run.folder / "checkpoints"
        self._staging = home / ".partial"
        if self.args.should_save:
            shutil.rmtree(self._staging, ignore_errors=True)
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                for part in self.parts:
                    part.save(self._staging / name)
                _settle(self._staging / name)
                shutil.rmtree(home / name, ignore_errors=True)
                (self._staging / name).rename(home / name)
        except (OSError, RuntimeError, SafetensorError) as error:
            last = latest_checkpoint(self.run.folder)
            free = shutil.disk_usage(self.run.folder).free / 2**20
            raise SubspanError(
                f"could not write {name} ({first_line(error)}; {free:.0f} MiB are free on this disk); "
                + (f"the last good one, {last}, is intact" if last else "there was none before")
            ) from error
        finally:
            if self.args.should_save:
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        if self.args.should_save:
            for old in _checkpoints(self.run.folder)[:-2]:
                shutil.rmtree(old, ignore_errors=True)

    # A memory is saved and read by itself: the base model around it is not ours to write.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        memory = getattr(self.model, "moram", None)
        if memory is None:
            super()._save(output_dir, state_dict)
        elif output_dir is not None and self.args.should_save:
            memory.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        memory = getattr(self.model, "moram", None)
        if memory is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            memory.load(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            for part in self.parts:
                part.load(Path(checkpoint))


def _settle(folder: Path) -> None:
    """Have the disk hold a folder's files before its rename makes them count."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _checkpoints(folder: Path) -> list[Path]:
    found = (folder / "checkpoints").glob("checkpoint-*")
    return sorted(found, key=lambda p: int(p.name.rsplit("-", 1)[1]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    return next((path for path in reversed(_checkpoints(folder)) if _readable(path)), None)


def _readable(checkpoint: Path) -> bool:
    """Whether every tensor file is whole: a power cut may leave one truncated behind a name that counts."""
    try:
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, "pt"):
                pass
        for path in (*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    return False
    except (OSError, SafetensorError, zipfile.BadZipFile):
        return False
    return True


class Journal(TrainerCallback):
    """Writes metrics.jsonl as training goes, evaluates on the validation rows, and reports progress."""

    def __init__(
        self,
        path: Path,
        evaluate: Callable[[], dict[str, float]] | None,
        every: int | None,
        progress: Callable[[int, int, dict[str, float]], None],
        parts: Sequence[Part] = (),
        writes: bool = True,
    ) -> None:
        self.path, self.evaluate, self.every, self.progress, self.parts = path, evaluate, every, progress, parts
        self.writes = writes
        self.logged = [k for k in Part.logs if all(k in p.logs for p in parts)]

    def write(self, record: dict[str, Any]) -> None:
        if not self.writes:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]

    def rewind(self, step: int) -> None:
        """Forget what a run that resumes at ``step`` writes again: later steps, and the final score."""
        if not self.writes:
            return
        final = [r for r in self.read() if r["step"] > 0 and any(k.startswith("test_") for k in r)]
        kept = [r for r in self.read() if r["step"] <= step and r not in final]
        write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress(state.global_step, state.max_steps, {})
        if self.evaluate and self.every and state.global_step % self.every == 0:
            scores = self.evaluate()
            self.write({"step": state.global_step, **{f"validation_{k}": v for k, v in scores.items()}})
            self.progress(state.global_step, state.max_steps, {f"validation {k}": v for k, v in scores.items()})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        kept = {k: logs[k] for k in self.logged if k in logs}
        for part in self.parts:
            kept |= part.figures()
        self.write({"step": state.global_step, **kept})
        self.progress(state.global_step, state.max_steps, {k: v for k, v in kept.items() if k != "grad_norm"})
