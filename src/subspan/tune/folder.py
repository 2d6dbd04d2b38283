"""The run folder: which run it holds, how far it is, and what it leaves behind."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from subspan.errors import BaseMismatch, ConfigError
from subspan.files import write_json, write_text
from subspan.tune.config import Config, dump, load


@dataclass(frozen=True)
class RunFolder:
    """Paths inside ``output``: config.yaml, metrics.jsonl, checkpoints/, adapter/, summary.json, report.html."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """The whole model, where no adapter was asked for."""
        return self.path / "model"

    @property
    def start(self) -> Path:
        """What was taken out of the base before the first step (only for starts that edit the base)."""
        return self.path / "start.safetensors"

    @property
    def before(self) -> Path:
        return self.path / "before.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tasks(self) -> Path:
        """A folder for each task of a stream, with its curves and what was saved after it."""
        return self.path / "tasks"

    @property
    def stream(self) -> Path:
        """The scores of all tasks after each that is finished."""
        return self.path / "stream.json"

    @property
    def identity(self) -> Path:
        """Digests of the rows and of the base model that the run began with."""
        return self.path / "identity.json"

    @property
    def lock(self) -> Path:
        """Held by the process that writes here; the system lets go of it when that process ends, however it ends."""
        return self.path / ".lock"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the folder. Raises ``ConfigError`` where one is at work in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.lock)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"another run is at work in {self.path}: wait until it ends, or choose another output"
            ) from None
        try:
            yield
        finally:
            if [*self.path.iterdir()] == [self.lock]:  # a mistake in the configuration leaves nothing behind
                shutil.rmtree(self.path)
            lock.release()

    def holds(self, config: Config, fresh: bool) -> bool:
        """Whether the folder holds this run, begun earlier, to be continued. Changes nothing.

        Raises ``ConfigError`` when it holds a run with another configuration (unless ``fresh``), or other files.
        """
        recorded = self._recorded()
        if recorded is None:
            if self.path.exists() and (not self.path.is_dir() or any(p != self.lock for p in self.path.iterdir())):
                raise ConfigError(f"{self.path} is not empty and is no run folder; choose another output")
            return False
        if fresh:
            return False
        mine, theirs = (_flat(c.model_dump(mode="json")) for c in (config, recorded))
        differing = [k for k in mine | theirs if k != "output" and mine.get(k) != theirs.get(k)]
        if differing:
            changes = ", ".join(f"{k}: {theirs.get(k)!r} there, {mine.get(k)!r} here" for k in differing[:3])
            raise ConfigError(
                f"{self.path} already holds a run with another configuration ({changes}); choose another output, or "
                "start over with --fresh"
            )
        return True

    def open(self, config: Config, fresh: bool, rows: str, base: str) -> None:
        """Make the folder this run's own, now that its rows and base model (digests) are known to be usable.

        Raises ``ConfigError`` or ``BaseMismatch`` when the run began with other rows or another base model.
        """
        if fresh:
            self._clear()
        if not self.config.exists():
            write_text(self.config, dump(config))
        if not self.identity.exists():
            write_json(self.identity, {"rows": rows, "base": base})
        began = json.loads(self.identity.read_text(encoding="utf-8"))
        if began["rows"] != rows:
            raise ConfigError(
                f"the rows of {config.data.source} are no longer those the run in {self.path} began with; restore the "
                "file, or start over with --fresh"
            )
        if began["base"] != base:
            raise BaseMismatch(
                f"the weights of {config.model} are not those the run in {self.path} began with; load the original "
                "base, or start over with --fresh"
            )

    def _recorded(self) -> Config | None:
        """The configuration that lies here; None where there is none, or a file of that name that is no such thing."""
        try:
            return load(self.config)
        except ConfigError:
            return None

    def _clear(self) -> None:
        """Remove what a run writes, and nothing else."""
        for item in ("checkpoints", "adapter", "model", "twin", "tasks", "audit", "logs"):
            shutil.rmtree(self.path / item, ignore_errors=True)
        for file in (
            self.metrics,
            self.start,
            self.before,
            self.stream,
            self.summary,
            self.report,
            self.identity,
            self.config,
        ):
            file.unlink(missing_ok=True)

    def finished(self) -> dict[str, Any] | None:
        """The summary of a finished run."""
        return json.loads(self.summary.read_text(encoding="utf-8")) if self.summary.exists() else None

    def finish(self, summary: dict[str, Any]) -> None:
        write_json(self.summary, summary)
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
