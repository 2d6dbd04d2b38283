"""What an audit found: one line per row, and what can be done with it (ranking, windows, weights, files)."""

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from subspan.errors import DataError
from subspan.files import replacing, write_json, write_text

COLUMNS = ("row", "hash", "score", "danger", "safety", "loss", "grad_norm", "n_answer_tokens", "se", "reason")
_TEXT, _WHOLE = ("hash", "reason", "source"), ("row", "n_answer_tokens")


@dataclass(frozen=True)
class RiskTable:
    """Scores by row (rows count from 1, in the order of the data), with the facts of the audit that made them.

    ``score`` is high where a step on the row moves the model along the danger direction and away from the safe one. It
    is NaN for a row that could not be scored, and ``reason`` says why.
    """

    columns: Mapping[str, np.ndarray]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], facts: Mapping[str, Any] | None = None) -> "RiskTable":
        """From records with the keys of ``COLUMNS`` (and perhaps ``source``); None is NaN."""
        names = [*COLUMNS, *(["source"] if records and "source" in records[0] else [])]
        columns = {name: _column(name, [r.get(name) for r in records]) for name in names}
        return cls(columns, facts or {})

    def __len__(self) -> int:
        return len(self.columns["row"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def ranking(self) -> np.ndarray:
        """Places of the scored rows from the highest score to the lowest; ties keep the order of the data."""
        order = np.argsort(-self["score"], kind="stable")
        return order[np.isfinite(self["score"][order])]

    def windows(self, k: int = 5, size: int = 1000) -> list[np.ndarray]:
        """Places of ``k`` windows of ``size`` rows at equal distances in the ranking, the riskiest first (3.6).

        Raises:
            ValueError: fewer scored rows than ``size``.
        """
        order = self.ranking
        if k < 1 or not 1 <= size <= len(order):
            raise ValueError(f"{len(order)} scored rows give no {k} windows of {size}; ask for a smaller size")
        return [order[start : start + size] for start in np.linspace(0, len(order) - size, k).astype(int)]

    def weights(self) -> np.ndarray:
        """Weights in (0, 1) for training, sigmoid(-(score - median) / (1.4826 MAD)): 1/2 at the median (3.6).

        A row without score weighs 1/2, and so does every row where half of the scores or more are equal.
        """
        score = self["score"]
        if not np.isfinite(score).any():
            return np.full(len(score), 0.5)
        centre = np.nanmedian(score)
        spread = 1.4826 * np.nanmedian(np.abs(score - centre))
        deviation = np.zeros_like(score) if spread == 0 else np.nan_to_num((score - centre) / spread)
        # beyond 700 the exponential overflows, where the weight is 0 in float64 anyway
        return 1 / (1 + np.exp(np.clip(deviation, -700, 700)))

    def without_top(self, share: float) -> np.ndarray:
        """Places of the rows that remain when the riskiest ``share`` is dropped, in the order of the data.

        Rows without a score remain: they have no answer to learn from.
        """
        if not 0 <= share < 1:
            raise ValueError(f"the share to drop must lie in [0, 1), got {share}")
        dropped = self.ranking[: round(share * len(self))]
        return np.setdiff1d(np.arange(len(self)), dropped)

    def standardised(self) -> "RiskTable":
        """The same rows with the difference of z-scored terms as score, for terms of unequal spread."""
        terms = [self[name] - np.nanmean(self[name]) for name in ("danger", "safety")]
        spread = [float(np.nanstd(t)) or 1.0 for t in terms]
        return replace(self, columns={**self.columns, "score": terms[0] / spread[0] - terms[1] / spread[1]})

    def faint(self) -> np.ndarray:
        """Which rows lie below the 5th percentile of the gradient norm.

        Their scores are the direction of next to nothing; an adaptive optimiser may still move far on them.
        """
        norms = self["grad_norm"]
        known = norms[np.isfinite(norms)]
        return norms < np.quantile(known, 0.05) if len(known) else np.zeros(len(norms), dtype=bool)

    def correlations(self) -> dict[str, float]:
        """Spearman's correlation of the score with answer length, loss and gradient norm; NaN where one is constant."""
        from scipy.stats import rankdata

        out = {}
        known = np.isfinite(self["score"])
        for name in ("n_answer_tokens", "loss", "grad_norm"):
            a, b = rankdata(self["score"][known]), rankdata(self[name][known])
            varied = len(a) > 1 and a.std() > 0 and b.std() > 0
            out[name] = float(np.corrcoef(a, b)[0, 1]) if varied else math.nan
        return out

    def by_source(self) -> dict[str, dict[str, float]]:
        """Rows, mean score and share among the riskiest tenth, of each value of the column ``source``."""
        if "source" not in self.columns:
            return {}
        riskiest = set(self.ranking[: max(1, len(self) // 10)].tolist())
        out = {}
        for name in dict.fromkeys(self["source"].tolist()):
            places = np.flatnonzero(self["source"] == name)
            inside = sum(int(place) in riskiest for place in places)
            scores = self["score"][places]
            mean = float(np.nanmean(scores)) if np.isfinite(scores).any() else math.nan
            out[name] = {"rows": len(places), "score": mean, "in_riskiest_tenth": inside / len(riskiest)}
        return out

    # ---------------------------------------------------------------------------------------------------------- files

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.parquet`` or ``.csv`` file, and the facts beside it as ``.json``; each whole or not at all."""
        path = checked_format(path)
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            arrays = {n: pa.array(v.tolist(), from_pandas=True) for n, v in self.columns.items()}
            with replacing(path) as part:
                pq.write_table(pa.table(arrays), part)
        else:
            with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(self.columns)
                writer.writerows(zip(*(v.tolist() for v in self.columns.values()), strict=True))
        write_json(path.with_suffix(".json"), _finite(dict(self.facts)))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RiskTable":
        """Read what ``write`` wrote.

        Raises:
            DataError: there is no such file, or it holds no scores.
        """
        from subspan.data import load_text

        path = checked_format(path)
        data = load_text(path)
        if missing := [name for name in COLUMNS if name not in data.column_names]:
            raise DataError(f"{path} holds no scores of an audit: it has no column {missing[0]}")
        columns = {name: _column(name, list(data[name])) for name in data.column_names}
        beside = path.with_suffix(".json")
        facts = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        return cls(columns, facts)

    def plot(self, path: str | os.PathLike[str], windows: int = 5, size: int | None = None) -> None:
        """Write the histogram of scores, with the windows marked, as an SVG file."""
        from subspan.safety.sqsd.page import score_histogram

        if Path(path).suffix != ".svg":
            raise ValueError(f"plots are SVG: the name should end in .svg, got {os.fspath(path)}")
        svg = score_histogram(self, windows, size)
        write_text(path, svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1))

    def report(self, path: str | os.PathLike[str], texts: Sequence[str] | None = None, top: int = 20) -> None:
        """Write the self-contained page of the audit; ``texts`` shows the riskiest rows' text (hidden otherwise)."""
        from subspan.safety.sqsd.page import risk_page

        risk_page(self, texts, top).write(path)


def checked_format(path: str | os.PathLike[str]) -> Path:
    """The path, if its name ends in .parquet or .csv; ``ValueError`` otherwise."""
    if Path(path).suffix not in (".parquet", ".csv"):
        raise ValueError(f"scores are written as .parquet or .csv, got {os.fspath(path)}")
    return Path(path)


def _column(name: str, values: Sequence[Any]) -> np.ndarray:
    if name in _TEXT:
        return np.array(["" if v is None else str(v) for v in values], dtype=object)
    if name in _WHOLE:
        return np.array([int(v) for v in values], dtype=np.int64)
    return np.array([math.nan if v is None or v == "" else float(v) for v in values], dtype=np.float64)


def _finite(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
