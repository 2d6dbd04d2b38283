"""The main job: from a configuration to a run folder."""

import contextlib
import json
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from subspan.errors import ConfigError, DataError, MissingExtra
from subspan.files import write_json
from subspan.surgery import (
    BaseShift,
    base_fingerprint,
    base_layer,
    export_plain_lora,
    factor_pairs,
    find_targets,
    role_of,
)
from subspan.tune.config import Config
from subspan.tune.folder import RunFolder
from subspan.tune.loading import Rows, load_model, load_task
from subspan.tune.part import Part, Run
from subspan.tune.parts import assemble
from subspan.tune.sections import ZEROTH, Adapter
from subspan.tune.tasks import CausalLM, Classification, Row

if TYPE_CHECKING:
    from subspan.tune.trainer import Journal


@runtime_checkable
class Display(Protocol):
    """Where a run says what it does (the command line draws it; a library caller may pass nothing)."""

    def say(self, text: str) -> None: ...

    def progress(self, step: int, total: int, figures: dict[str, float]) -> None: ...

    def evaluated(self, done: int, total: int) -> None: ...


class Silent:
    """A display that shows nothing."""

    def say(self, text: str) -> None:
        pass

    def progress(self, step: int, total: int, figures: dict[str, float]) -> None:
        pass

    def evaluated(self, done: int, total: int) -> None:
        pass


def tune(config: Config, *, fresh: bool = False, display: Display | None = None) -> dict[str, Any]:
    """Fine-tune as ``config`` says; returns the summary that also lies in ``summary.json``.

    A run folder that holds the same configuration is continued from its last checkpoint, or, when the run is finished,
    its summary is returned. ``fresh`` starts over.

    Raises:
        SubspanError: a missing file, column or asset, a combination that cannot work, a NaN loss, a full disk; each
            with one sentence, and with what was written before left whole.
    """
    _require_extra(config.report_to)
    from accelerate import PartialState

    processes = PartialState(cpu=_computes_on_cpu())  # one, unless a launcher started several
    display = display if display and processes.is_main_process else Silent()
    if config.batch_size % (config.accumulate * processes.num_processes):
        raise ConfigError(
            f"batch_size={config.batch_size} does not divide into accumulate={config.accumulate} parts on each of "
            f"{processes.num_processes} processes"
        )
    folder = RunFolder(config.output)
    resuming = folder.holds(config, fresh)
    done = folder.finished() if resuming else None
    started = resuming and folder.start.exists()
    processes.wait_for_everyone()  # before the first of them writes what another would see
    if done is not None:
        kept = folder.adapter if config.adapter else folder.model
        if not kept.exists():
            raise ConfigError(f"the run in {folder.path} is finished, but {kept} is gone; --fresh trains again")
        display.say(f"the run in {folder.path} is finished; --fresh trains again")
        return done
    with folder.held() if processes.is_main_process else contextlib.nullcontext():
        summary = _run(config, folder, display, fresh, started, processes.is_main_process)
    processes.wait_for_everyone()
    return summary


def _run(
    config: Config, folder: RunFolder, display: Display, fresh: bool, started: bool, writes: bool
) -> dict[str, Any]:
    """What ``tune`` does once the folder is its own: train, train the twin too, and report."""
    began = time.perf_counter()
    with quiet():
        if config.continual:
            from subspan.tune.continual import train_stream

            summary = train_stream(config, folder, display, fresh)
        else:
            summary = _train(config, folder, display, fresh, started)
    summary["seconds"] = round(time.perf_counter() - began, 1)
    private = config.privacy
    if private is not None and private.twin:
        display.say("the same run without privacy, for comparison")
        twin = config.model_copy(
            update={"privacy": None, "output": config.output / "twin", "accumulate": _parts(config)}
        )
        twin_summary = tune(twin, fresh=fresh, display=display)
        summary["twin"] = {k: twin_summary[k] for k in ("before", "after", "seconds")}
    if writes:
        if config.continual:
            from subspan.tune.stream_report import write_stream_report as write_report
        else:
            from subspan.tune.report import write_report

        write_report(folder, config, summary)
        folder.finish(summary)
    return summary


def _parts(config: Config) -> int:
    """Equal parts of a batch that hold no more rows than a private forward pass does."""
    assert config.privacy is not None
    size, limit = config.batch_size, config.privacy.physical_batch
    return next(k for k in range(1, size + 1) if size % k == 0 and size // k <= limit)


def _train(config: Config, folder: RunFolder, display: Display, fresh: bool, started: bool) -> dict[str, Any]:
    """The run itself; every process computes, the main one alone writes (a checkpoint's optimiser state apart)."""
    from accelerate import PartialState
    from transformers import set_seed

    from subspan.tune.trainer import Journal, latest_checkpoint

    display.say(f"reading {config.data.source}")
    task, rows = load_task(config)
    display.say(f"loading {config.model}")
    set_seed(config.seed)
    processes = PartialState()
    model = load_model(config, rows.labels).to(processes.device)
    check_fit(config, task, rows, model)
    if processes.is_main_process:
        folder.open(config, fresh, rows.digest(), base_fingerprint(model))
    processes.wait_for_everyone()
    if full := sum(len(r["input_ids"]) >= config.max_length for r in rows.train):
        display.say(
            f"{full} of {len(rows.train)} training rows fill max_length={config.max_length}: longer ones are cut"
        )
    parts = assemble(config)
    run = Run(config, folder.path, task, rows.train, model, display.say, resuming=started, validation=rows.validation)
    sizes = {"train": len(rows.train), "validation": len(rows.validation), "test": len(rows.test)}
    run.note("data", **sizes, test_rows_also_in_train=rows.repeated(), labels=rows.labels)
    prepare(run, parts, folder)
    model = run.model
    run.note("adapter" if config.adapter else "model", **parameter_counts(model))

    def evaluate(split: list[Row]) -> dict[str, float]:
        return score(task, run.model, split, config.batch_size, display)

    journal = Journal(
        folder.metrics,
        lambda: evaluate(rows.validation),
        config.evaluate_every,
        display.progress,
        parts,
        writes=processes.is_main_process,
    )
    last = latest_checkpoint(folder.path)
    if last is None:
        display.say(f"scoring {len(rows.test)} held-out rows before training")
        before = evaluate(rows.test)
        if processes.is_main_process:
            folder.metrics.unlink(missing_ok=True)
            write_json(folder.before, before)
        journal.write({"step": 0, **{f"test_{k}": v for k, v in before.items()}})
    else:
        before = json.loads(folder.before.read_text(encoding="utf-8"))
        journal.rewind(int(last.name.rsplit("-", 1)[1]))
        display.say(f"continuing from {last.name}")
    fit(run, parts, journal, last)
    display.say(f"scoring {len(rows.test)} held-out rows after training")
    after = evaluate(rows.test)
    journal.write({"step": config.max_steps, **{f"test_{k}": v for k, v in after.items()}})
    display.say(f"writing the {'adapter' if config.adapter else 'model'} and the report")
    if processes.is_main_process:
        if config.adapter:
            export_plain_lora(model, folder.adapter, run.shift)
        else:
            save_whole(model, task.tokenizer, folder.model)
    from subspan.tune.report import layer_table

    layers = layer_table(factor_pairs(model), run.shift) if config.adapter else []
    if config.merged and processes.is_main_process:
        save_whole(model.merge_and_unload(), task.tokenizer, folder.model)  # pyright: ignore[reportCallIssue]
    return {"before": before, "after": after, "steps": config.max_steps, "facts": run.facts, "layers": layers}


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


def save_whole(model: Any, tokenizer: Any, path: Path) -> None:
    """The whole model and its tokenizer, as ``from_pretrained`` reads them; the folder appears when it is complete."""
    staging = path.with_name(f".{path.name}.part")
    for folder in (staging, path):
        shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(path)


def head_names(model: nn.Module) -> list[str]:
    """Names of the output layers that an adapter should leave alone: they are trained whole, or tied to embeddings."""
    return [n for n, m in model.named_modules() if n and role_of(n, m) == "head" and not list(m.children())]


@torch.no_grad()
def score(
    task: Classification | CausalLM, model: nn.Module, rows: Sequence[Row], batch_size: int, display: Display
) -> dict[str, float]:
    """Mean loss per target, and accuracy where the labels are a closed set. Draws no random number."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    total = count = correct = 0.0
    for at in range(0, len(rows), batch_size):
        batch = {k: v.to(device) for k, v in task.collate([rows[i] for i in order[at : at + batch_size]]).items()}
        scored = task.score(model, batch)
        total += float(scored.losses.total.sum())
        count += float(scored.losses.count.sum())
        correct += float(scored.correct.sum()) if scored.correct is not None else 0.0
        display.evaluated(min(at + batch_size, len(rows)), len(rows))
    model.train(training)
    figures = {"loss": total / max(count, 1.0)}
    if task.labels:
        figures = {"accuracy": correct / len(rows), **figures}
    return figures


def parameter_counts(model: nn.Module) -> dict[str, int]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


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
        use_cpu=_computes_on_cpu(),
        remove_unused_columns=False,
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _computes_on_cpu() -> bool:
    """Whether there is nothing else, or a launcher asked for it (``accelerate launch --cpu``)."""
    from accelerate.utils import parse_flag_from_env

    return not torch.accelerator.is_available() or bool(parse_flag_from_env("ACCELERATE_USE_CPU"))


def computes_in_bfloat16() -> bool:
    """Whether products in bfloat16 are fast here; elsewhere they are emulated, many times slower than float32."""
    if not _computes_on_cpu() and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    return bool(features.get("amx_bf16") or features.get("avx512_bf16"))


def _require_extra(report_to: Sequence[str]) -> None:
    from importlib.util import find_spec

    if absent := [name for name in report_to if find_spec(name) is None]:
        raise MissingExtra(f"report_to: {', '.join(absent)} is not installed: pip install {' '.join(absent)}")
    missing = [name for name in ("transformers", "peft", "accelerate", "datasets") if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"subspan tune needs {', '.join(missing)}: pip install 'subspan[tune]'")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Libraries' own progress bars and advice off; warnings about real trouble stay."""
    import datasets
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), datasets.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
            warnings.filterwarnings("ignore", category=UserWarning, module=r"(opacus|peft)\.")
            # A GGUF file has no config.json; peft looks for one to see whether the vocabulary was changed.
            warnings.filterwarnings("ignore", message="Could not find a config file")
            yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
        if not bars:
            datasets.enable_progress_bars()
