"""One data set on one model: from the bare base to the adapter and its scores."""

import json
from typing import Any

from subspan.files import write_json
from subspan.surgery import base_fingerprint, export_plain_lora, factor_pairs
from subspan.tune.config import Config
from subspan.tune.display import Display
from subspan.tune.fitting import check_fit, fit, parameter_counts, prepare, save_whole, score
from subspan.tune.folder import RunFolder
from subspan.tune.loading import load_model, load_task
from subspan.tune.part import Run
from subspan.tune.parts import assemble
from subspan.tune.tasks import Row


def train_single(config: Config, folder: RunFolder, display: Display, fresh: bool, started: bool) -> dict[str, Any]:
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
