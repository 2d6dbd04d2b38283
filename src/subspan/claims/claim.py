"""What a method claims, as data: cells to run, rows they give, statements that must come out.

A claim file (``claims/<slug>.py``) defines ``CLAIM``; tables, plots and verdicts are made from it by one runner.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from subspan.errors import SubspanError


class MissingResults(SubspanError):
    """A statement asks for rows that were not measured."""


@dataclass(frozen=True)
class Row:
    """One measured number: ``method`` at ``setting`` scored ``value`` on ``metric`` with ``seed``."""

    method: str
    setting: Mapping[str, float | int | str]
    metric: str
    seed: int
    value: float | int


@dataclass(frozen=True)
class Cell:
    """One unit of a sweep: ``run(seed, smoke, **params)`` gives the rows of one seed.

    ``run`` is a function of a module (workers import it by name); ``params`` hold JSON values only, because finished
    cells are recognised by them when a sweep resumes.
    """

    name: str
    run: Callable[..., list[Row]]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """The rows of a sweep, and the questions that statements ask of them."""

    rows: Sequence[Row]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def methods(self) -> list[str]:
        """Methods in the order of their first row."""
        return list(dict.fromkeys(row.method for row in self.rows))

    def where(self, method: str | None = None, metric: str | None = None, **setting: Any) -> "Results":
        """The rows of this method and metric whose setting holds every given value."""
        return Results(
            [
                row
                for row in self.rows
                if method in (None, row.method)
                and metric in (None, row.metric)
                and all(key in row.setting and row.setting[key] == value for key, value in setting.items())
            ]
        )

    def values(self, method: str, metric: str, **setting: Any) -> np.ndarray:
        """The values ordered by seed, one per seed.

        Raises:
            MissingResults: nothing was measured there.
            ValueError: the setting does not single out one row per seed.
        """
        found = sorted(self.where(method, metric, **setting), key=lambda row: row.seed)
        if not found:
            asked = ", ".join([f"method={method!r}", f"metric={metric!r}", *(f"{k}={v!r}" for k, v in setting.items())])
            raise MissingResults(f"no rows for {asked}; measured methods: {', '.join(self.methods()) or 'none'}")
        seeds = [row.seed for row in found]
        if len(set(seeds)) < len(seeds):
            keys = sorted({key for row in found for key in row.setting} - set(setting))
            raise ValueError(f"{method!r} has several {metric!r} rows per seed: also fix {', '.join(keys)}")
        return np.array([row.value for row in found], dtype=np.float64)

    def select(self, method: str, by: str, over: str, maximize: bool = True, **setting: Any) -> "Results":
        """The method's rows (all metrics) at the value of ``over`` whose mean ``by`` over seeds is best.

        ``by`` should be a *validation* metric, so that what is reported was not chosen on the test split. A value
        with a NaN among its seeds loses to every other; ties go to the value measured first.
        """
        rows = self.where(method, **setting)
        candidates = dict.fromkeys(row.setting[over] for row in rows if row.metric == by and over in row.setting)
        if not candidates:
            raise MissingResults(f"no {by!r} rows of method {method!r} over {over!r} to select by")
        means = {value: float(np.mean(self.values(method, by, **setting, **{over: value}))) for value in candidates}
        sign = 1.0 if maximize else -1.0
        best = max(means, key=lambda value: -math.inf if math.isnan(means[value]) else sign * means[value])
        chosen: dict[str, Any] = {over: best}
        return rows.where(**chosen)

    def summary(self) -> list[dict[str, Any]]:
        """Mean, standard deviation (ddof 1; 0 for one seed) and n of every method, setting and metric.

        ``values`` maps each seed to its value, so that a summary holds everything that was measured.
        """
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.method, tuple(sorted(row.setting.items())), row.metric), []).append(row)
        return [
            {
                "method": method,
                "setting": dict(rows[0].setting),
                "metric": metric,
                "mean": float(np.mean([row.value for row in rows])),
                "std": float(np.std([row.value for row in rows], ddof=1)) if len(rows) > 1 else 0.0,
                "n": len(rows),
                "values": {str(row.seed): float(row.value) for row in sorted(rows, key=lambda row: row.seed)},
            }
            for (method, _, metric), rows in groups.items()
        ]

    @classmethod
    def from_summary(cls, summary: Sequence[Mapping[str, Any]]) -> "Results":
        """The rows that gave this summary (a null value reads as NaN)."""
        return cls(
            [
                Row(line["method"], line["setting"], line["metric"], int(seed), math.nan if value is None else value)
                for line in summary
                for seed, value in line["values"].items()
            ]
        )


@dataclass(frozen=True)
class Verdict:
    """How a statement came out. ``measured`` is None, and ``problem`` says why, when it could not be measured."""

    text: str
    holds: bool
    measured: float | None
    required: float
    relation: Literal[">=", "<="]
    problem: str | None = None


@dataclass(frozen=True)
class Statement:
    """``measure(results)`` must be ``>=`` or ``<=`` the ``required`` number."""

    text: str
    measure: Callable[[Results], float]
    required: float
    relation: Literal[">=", "<="] = ">="

    def judge(self, results: Results) -> Verdict:
        """Measure and compare. Whatever goes wrong in ``measure`` makes the statement not hold, with a reason."""
        try:
            measured = float(self.measure(results))
            problem = None if math.isfinite(measured) else f"measured {measured}"
        except Exception as error:  # one broken statement must not hide the others
            measured, problem = math.nan, f"not measured: {type(error).__name__}: {error}"
        if problem:
            return Verdict(self.text, False, None, self.required, self.relation, problem)
        holds = measured >= self.required if self.relation == ">=" else measured <= self.required
        return Verdict(self.text, holds, measured, self.required, self.relation)


@dataclass(frozen=True)
class Plot:
    """A figure of one metric: a line per method against the setting ``over``, or a bar per method without it.

    ``where`` keeps the rows with these setting values; ``methods`` keeps these methods (all by default).
    """

    title: str
    metric: str
    over: str | None = None
    where: Mapping[str, float | int | str] = field(default_factory=dict)
    methods: Sequence[str] = ()
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Claim:
    """A method's claim: ``cells(smoke)`` run for every seed, and the statements judged on the rows.

    ``smoke=True`` asks for the same path in seconds; its numbers prove nothing. ``notes`` are printed below the tables
    (honest negatives, what was not reproduced).
    """

    slug: str
    title: str
    source: str
    cells: Callable[[bool], list[Cell]]
    statements: Sequence[Statement]
    seeds: Sequence[int]
    smoke_seeds: Sequence[int] = (0,)
    plots: Sequence[Plot] = ()
    notes: str = ""
