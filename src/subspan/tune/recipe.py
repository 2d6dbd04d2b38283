"""The main job: from a configuration to a run folder."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from subspan.errors import ConfigError, MissingExtra
from subspan.tune.config import Config
from subspan.tune.display import Display, Silent
from subspan.tune.folder import RunFolder
from subspan.tune.machine import computes_on_cpu, quiet


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

    processes = PartialState(cpu=computes_on_cpu())  # one, unless a launcher started several
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
            from subspan.tune.single import train_single

            summary = train_single(config, folder, display, fresh, started)
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


def _require_extra(report_to: Sequence[str]) -> None:
    from importlib.util import find_spec

    if absent := [name for name in report_to if find_spec(name) is None]:
        raise MissingExtra(f"report_to: {', '.join(absent)} is not installed: pip install {' '.join(absent)}")
    missing = [name for name in ("transformers", "peft", "accelerate", "datasets") if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"subspan tune needs {', '.join(missing)}: pip install 'subspan[tune]'")
