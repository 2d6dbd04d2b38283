"""The run folder: which run it holds, how far it is, and what it leaves behind."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subspan.errors import ConfigError
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

    def claim(self, config: Config, fresh: bool) -> bool:
        """Make the folder this run's own; returns whether it holds the same run, begun earlier.

        Raises ``ConfigError`` when it holds a run with another configuration.
        """
        if fresh:
            self._clear()
        if self.config.exists():
            other = load(self.config)
            mine, theirs = config.model_dump(mode="json"), other.model_dump(mode="json")
            differing = [k for k in mine if k != "output" and mine[k] != theirs[k]]
            if differing:
                raise ConfigError(
                    f"{self.path} already holds a run with another {', '.join(differing)}; "
                    "choose another output, or start over with --fresh"
                )
            return True
        if self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and is no run folder; choose another output")
        write_text(self.config, dump(config))
        return False

    def _clear(self) -> None:
        """Remove what a run writes, and nothing else."""
        for item in ("checkpoints", "adapter", "model", "twin", "logs"):
            shutil.rmtree(self.path / item, ignore_errors=True)
        for file in (self.metrics, self.start, self.before, self.summary, self.report, self.config):
            file.unlink(missing_ok=True)

    def finished(self) -> dict[str, Any] | None:
        """The summary of a finished run."""
        return json.loads(self.summary.read_text(encoding="utf-8")) if self.summary.exists() else None

    def finish(self, summary: dict[str, Any]) -> None:
        write_json(self.summary, summary)
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
