"""Scores on their way to a file: appended batch by batch, so that a killed audit goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subspan.errors import ConfigError, DataError

Record = dict[str, Any]


def row_hash(row: Mapping[str, Any]) -> str:
    """A digest of a row's values, whatever the order of its columns."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def settings_hash(settings: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


class Journal:
    """Lines of JSON beside the file that will hold the scores: the settings first, then a line for each batch.

    A line that a kill cut short is dropped. Without ``path`` everything is kept in memory. ``shares`` holds, for each
    module, the sum over rows of its contribution, and of its contribution times the row's score.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], modules: int, resume: bool) -> None:
        self.path, self.settings, self.digest = path, dict(settings), settings_hash(settings)
        self.records: dict[int, Record] = {}
        self.shares = np.zeros((2, modules))
        if path is None:
            return
        if path.exists() and resume:
            self._read(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": self.settings, "digest": self.digest}) + "\n", encoding="utf-8")

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.decode("utf-8").splitlines()
        if not lines:
            raise DataError(f"{path} is no journal of an audit; remove it to start over")
        began = json.loads(lines[0])
        refuse_other_settings(path, began, self.settings, self.digest)
        for line in lines[1:]:
            batch = json.loads(line)
            self._take(batch["rows"], np.array(batch["shares"]))
        if len(whole) < len(text):
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def _take(self, rows: Sequence[Record], shares: np.ndarray) -> None:
        self.records.update({record["row"]: record for record in rows})
        if shares.size:
            self.shares += shares

    def add(self, rows: Sequence[Record], shares: np.ndarray | None = None) -> None:
        """Take the records of a batch; they are on disk when this returns."""
        found = np.zeros((0, 0)) if shares is None else shares
        self._take(rows, found)
        if self.path is not None:
            line = json.dumps({"rows": list(rows), "shares": found.tolist()})
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())

    def done(self, number: int, digest: str) -> bool:
        """Whether this row is scored. Raises ``DataError`` where another row stood in its place."""
        record = self.records.get(number)
        if record is not None and record["hash"] != digest:
            raise DataError(
                f"row {number} is not the one that was scored before; restore the data, or start over (--fresh, "
                "resume=False)"
            )
        return record is not None


def refuse_other_settings(path: Path, began: Mapping[str, Any], settings: Mapping[str, Any], digest: str) -> None:
    """Raise ``ConfigError`` unless ``began`` (settings and digest) are these settings; the message names one."""
    if began["digest"] != digest:
        before = began["settings"]
        changed = next((k for k in settings if before.get(k) != settings[k]), "settings")
        raise ConfigError(
            f"{path} holds scores of other settings ({changed}: {before.get(changed)!r} there, "
            f"{settings.get(changed)!r} here); choose another file, or start over (--fresh, resume=False)"
        )
