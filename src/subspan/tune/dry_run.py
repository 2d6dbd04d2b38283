"""What a run would take, without running it."""

from typing import Any

from subspan.tune.config import Config
from subspan.tune.sections import ZEROTH


def plan(config: Config) -> dict[str, Any]:
    """Parameter counts, steps, an estimate of memory in GiB and, under privacy, the noise; reads data, no weights."""
    from peft import LoraConfig, get_peft_model

    from subspan.tune.fitting import check_fit, checked_targets, parameter_counts
    from subspan.tune.loading import load_model, load_task
    from subspan.tune.machine import quiet

    if config.continual:
        return _plan_stream(config)
    with quiet():
        task, rows = load_task(config)
        base = load_model(config, rows.labels, meta=True)
    check_fit(config, task, rows, base)
    shape: Any = base.config
    targets: dict[str, Any] = {}
    if config.adapter:
        targets = checked_targets(base, config.adapter)
        lora = LoraConfig(r=config.adapter.r, target_modules=list(targets), task_type=task.peft_task)
        counts = parameter_counts(get_peft_model(base, lora))  # pyright: ignore[reportArgumentType]
    else:
        counts = parameter_counts(base)
    lengths = [len(r["input_ids"]) for r in rows.train]
    rows_at_once = config.privacy.physical_batch if config.privacy else config.batch_size // config.accumulate
    tokens = rows_at_once * max(lengths)
    # Per token and layer about 34 hidden sizes of two bytes are kept for the backward pass (Korthikanti et
    # al. 2022), here of four; AdamW holds two numbers per trained value, the gradient is a third.
    # Without a backward pass one layer's are held at a time, and nothing per trained value.
    forward_only = config.optimizer in ZEROTH
    activations = 34 * shape.hidden_size * (1 if forward_only else shape.num_hidden_layers) * tokens * 2
    memory = 4 * counts["parameters"] + (0 if forward_only else 12) * counts["trained"] + activations
    facts: dict[str, Any] = {
        **counts,
        "targets": len(targets),
        "train_rows": len(rows.train),
        "validation_rows": len(rows.validation),
        "test_rows": len(rows.test),
        "steps": config.max_steps,
        "epochs": round(config.max_steps * config.batch_size / len(rows.train), 2),
        "mean_tokens": round(sum(lengths) / len(lengths), 1),
        "memory_gib": float(f"{memory / 2**30:.3g}"),
    }
    if config.privacy is not None:
        from subspan.tune.parts.private import noise

        facts |= noise(config, len(rows.train))
    return facts


def _plan_stream(config: Config) -> dict[str, Any]:
    """The whole stream: its tasks' plans joined, and for a memory what it will hold at the end."""
    from subspan.tune.continual import load_tasks, task_configs
    from subspan.tune.fitting import check_fit, checked_targets
    from subspan.tune.loading import load_model
    from subspan.tune.machine import quiet

    stream, wanted = config.continual, config.adapter
    assert stream is not None
    assert wanted is not None
    configs = task_configs(config)
    with quiet():
        tasks, labels = load_tasks(configs)
        base = load_model(config, labels, meta=True)
    for own, (task, rows) in zip(configs, tasks, strict=True):
        check_fit(own, task, rows, base)
    plans = [plan(own) for own in configs]
    joined = {k: sum(p[k] for p in plans) for k in ("train_rows", "validation_rows", "test_rows", "steps")}
    facts = {"tasks": len(plans), **plans[0], **joined, "memory_gib": max(p["memory_gib"] for p in plans)}
    for only_one in ("epochs", "mean_tokens"):
        facts.pop(only_one)
    if stream.method == "moram":
        shapes: list[Any] = [base.get_submodule(name).weight.shape for name in checked_targets(base, wanted)]
        facts["stored"] = len(plans) * sum(wanted.r * (m + n + 1) for m, n in shapes)
    return facts
