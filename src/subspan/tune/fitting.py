"""The steps that every run takes: checks, the adapter, training, scoring, whole models."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from subspan.errors import ConfigError, DataError
from subspan.surgery import BaseShift, base_layer, factor_pairs, find_targets, role_of
from subspan.surgery.answers import on_device_of
from subspan.tune.config import Config
from subspan.tune.display import Display
from subspan.tune.folder import RunFolder
from subspan.tune.loading import Rows
from subspan.tune.machine import computes_in_bfloat16, computes_on_cpu
from subspan.tune.part import Part, Run
from subspan.tune.sections import ZEROTH, Adapter
from subspan.tune.tasks import CausalLM, Classification, Row

if TYPE_CHECKING:
    from subspan.tune.trainer import Journal


def check_fit(config: Config, task: Classification | CausalLM, rows: Rows, model: nn.Module) -> None:
    """Raise ``ConfigError`` where this model cannot be trained on these rows as ``config`` says."""
    if config.adapter:
        checked_targets(model, config.adapter)
    if config.batch_size // config.accumulate > len(rows.train):
        raise ConfigError(f"batch_size={config.batch_size} exceeds the {len(rows.train)} training rows")
    if config.privacy and config.privacy.delta * len(rows.train) >= 1:
        raise DataError(
            f"privacy.delta={config.privacy.delta:g} with {len(rows.train)} training rows would allow a mechanism that "
            f"publishes one row as it is; choose delta well below {1 / len(rows.train):.2g}"
        )
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    longest = max(len(r["input_ids"]) for part in (rows.train, rows.validation, rows.test) for r in part)
    if limit and longest > limit:
        raise ConfigError(
            f"a row has {longest} tokens and {config.model} reads at most {limit}: set max_length={limit}"
        )
    if isinstance(task, CausalLM) and not _reads_forward(model):
        raise ConfigError(
            f"{config.model} reads its texts in both directions: as a causal-lm it would see the answers; use task: "
            "classification"
        )


@torch.no_grad()
def _reads_forward(model: nn.Module) -> bool:
    """Whether what a language model says after a token does not depend on the next one."""
    device = next(model.parameters()).device
    if device.type == "meta":
        return True
    training = model.training
    model.eval()
    ids = torch.tensor([[3, 4], [3, 5]], device=device)
    first, second = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 0].float()
    model.train(training)
    return torch.allclose(first, second, rtol=1e-3, atol=1e-3)


def checked_targets(base: nn.Module, wanted: Adapter) -> dict[str, nn.Module]:
    """The layers an adapter goes on. Raises ``ConfigError`` for a rank above a layer's, ``TargetError`` for none."""
    targets = find_targets(base, wanted.targets, exclude=head_names(base))
    for name, module in targets.items():
        weight: Any = base_layer(module).weight
        limit = min(weight.shape[0], weight[0].numel())
        if wanted.r > limit:
            raise ConfigError(f"adapter.r={wanted.r} exceeds the smaller side of {name} ({limit}); lower r")
    return targets


def head_names(model: nn.Module) -> list[str]:
    """Names of the output layers that an adapter should leave alone: they are trained whole, or tied to embeddings."""
    return [n for n, m in model.named_modules() if n and role_of(n, m) == "head" and not list(m.children())]


def lora_config(wanted: Adapter, targets: list[str], peft_task: str, **options: Any) -> Any:
    """The adapter as peft is told of it."""
    from peft import LoraConfig

    return LoraConfig(
        r=wanted.r,
        lora_alpha=wanted.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=wanted.dropout,
        target_modules=targets,
        use_dora=wanted.dora,
        use_rslora=wanted.rslora,
        task_type=peft_task,
        **options,
    )


def prepare(run: Run, parts: Sequence[Part], folder: RunFolder) -> None:
    """From the bare base to the started model; on resume the recorded start is repeated instead of computed."""
    from accelerate import PartialState

    wanted = run.config.adapter
    run.targets = list(checked_targets(run.model, wanted)) if wanted else []
    if not run.resuming:
        for part in parts:
            part.prepare_base(run)
    if wanted:
        _attach_adapter(run, wanted, parts, folder)
    for part in parts:
        part.prepare_adapter(run)
    if run.shift is not None and not run.resuming and PartialState().is_main_process:
        run.shift.save(folder.start)


def _attach_adapter(run: Run, wanted: Adapter, parts: Sequence[Part], folder: RunFolder) -> None:
    from peft import get_peft_model

    options: dict[str, Any] = {}
    for part in parts:
        options |= part.lora_options(run)
    lora = lora_config(wanted, run.targets, run.task.peft_task, **options)
    run.model = get_peft_model(run.model, lora)  # pyright: ignore[reportArgumentType]
    if run.resuming:
        run.shift = BaseShift.load(folder.start)
        run.shift.apply(run.model)
        for pair in factor_pairs(run.model):
            pair.write(run.shift.start[pair.name])


def fit(run: Run, parts: Sequence[Part], journal: "Journal", last: Path | None) -> None:
    """Train ``run.model`` for the configured steps, or for those that are left after the checkpoint ``last``."""
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from subspan.tune.trainer import TuneTrainer

    set_seed(run.config.seed)
    trainer = TuneTrainer(run, parts, args=training_arguments(run.config), callbacks=[journal])
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    for part in parts:
        part.finish(run)


def training_arguments(config: Config) -> Any:
    from accelerate import PartialState
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(config.output / "checkpoints"),
        max_steps=config.max_steps,
        per_device_train_batch_size=config.batch_size // config.accumulate,
        # A batch is shared out among the processes, not one given to each; accelerate asks more of samplers then.
        accelerator_config={"split_batches": PartialState().num_processes > 1},
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.lr,
        lr_scheduler_type=config.schedule if config.schedule != "constant" else "constant_with_warmup",
        warmup_steps=round(config.warmup * config.max_steps),
        # Private steps clip each row by itself; without gradients there is nothing to clip.
        max_grad_norm=0.0 if config.privacy or config.optimizer in ZEROTH else config.max_grad_norm,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        logging_first_step=True,
        save_strategy="steps",
        save_steps=config.checkpoint_every,
        eval_strategy="no",
        report_to=list(config.report_to) or "none",
        run_name=config.output.name,
        seed=config.seed,
        bf16=computes_in_bfloat16(),
        use_cpu=computes_on_cpu(),
        remove_unused_columns=False,
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=torch.cuda.is_available(),
    )


@torch.no_grad()
def score(
    task: Classification | CausalLM, model: nn.Module, rows: Sequence[Row], batch_size: int, display: Display
) -> dict[str, float]:
    """Mean loss per target, and accuracy where the labels are a closed set. Draws no random number."""
    training = model.training
    model.eval()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    total = count = correct = 0.0
    for at in range(0, len(rows), batch_size):
        batch = task.collate([rows[i] for i in order[at : at + batch_size]])
        scored = task.score(model, on_device_of(model, batch))
        total += float(scored.losses.total.sum())
        count += float(scored.losses.count.sum())
        correct += float(scored.correct.sum()) if scored.correct is not None else 0.0
        display.evaluated(min(at + batch_size, len(rows)), len(rows))
    model.train(training)
    figures = {"loss": total / max(count, 1.0)}
    if task.labels:
        figures = {"accuracy": correct / len(rows), **figures}
    return figures


def save_whole(model: Any, tokenizer: Any, path: Path) -> None:
    """The whole model and its tokenizer, as ``from_pretrained`` reads them; the folder appears when it is complete."""
    staging = path.with_name(f".{path.name}.part")
    for folder in (staging, path):
        shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(path)


def parameter_counts(model: nn.Module) -> dict[str, int]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
