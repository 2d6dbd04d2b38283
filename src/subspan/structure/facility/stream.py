"""A stream of inserts and deletes from a table, kept as open facilities: what ``subspan facilities`` runs.

Columns: ``op`` (insert, delete or price; insert where the column is missing), ``id`` (the row's number where it is
missing; a facility's index for op price), ``weight``, ``price`` (for op price); every other column is a coordinate,
except one without a name (the row numbers that R and pandas write).
"""

import csv
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from subspan.data import NumberTable, iterate_rows, read_numbers
from subspan.errors import ConfigError, DataError, SubspanError
from subspan.files import replacing, write_json, write_text
from subspan.structure.facility.estimator import DynamicFacilityLocation

_SHOW_EVERY = 0.25  # seconds
RESERVED = ("op", "id", "weight", "price", "")
_OWN = ("facility", "clients")  # columns of the facilities.csv that a run writes, which may be another's places


@dataclass(frozen=True)
class Standing:
    """How things stand after some rows of the stream."""

    rows: int
    clients: int
    open: int
    cost: float
    client_moves: int
    facility_moves: int
    seconds: float  # spent on updates


@dataclass(frozen=True)
class StreamConfig:
    """What a run folder belongs to.

    Attributes:
        source: csv, tsv or parquet file, or ``-`` for csv on standard input.
        facilities: table of places, with an optional column ``price``, such as the ``facilities.csv`` of another run;
            without it the first ``first`` inserted rows are the places.
        first: how many.
        price: of every facility, unless the table has prices.
        window: delete the oldest client beyond this many.
        options: parameters of :class:`DynamicFacilityLocation`.
    """

    source: str
    facilities: str | None
    first: int
    price: float | None
    window: int | None
    options: Mapping[str, Any]


def run_stream(
    config: StreamConfig,
    *,
    out: str | os.PathLike[str] = "runs/facilities",
    every: int = 5000,
    fresh: bool = False,
    progress: Callable[[Standing], None] | None = None,
) -> dict[str, Any]:
    """Apply a stream row by row, and write what is open and who is served where.

    ``out`` then holds ``facilities.csv`` (open facilities), ``clients.csv`` (id and facility index), ``metrics.jsonl``
    (a line every ``every`` rows), ``summary.json`` and ``state.safetensors``. The state is saved every ``every`` rows
    and when the run ends or is interrupted. The same call then continues exactly: after the last row applied of a file,
    or with the next line that arrives on standard input.

    Returns:
        The content of ``summary.json``: the last :class:`Standing`, and the proven ratio.

    Raises:
        DataError: a row or column that does not fit (it is named), or an empty stream.
        ConfigError: ``out`` holds another run or a damaged one (``fresh=True`` replaces it), or no price is given.
        ValueError: parameters out of range.
    """
    if every < 1 or config.first < 1 or (config.window is not None and config.window < 1):
        raise ValueError("every, first and window must be at least 1")
    run = _Run(config, Path(out), every, progress)
    if not fresh:
        run.load()
    try:
        run.consume()
    except (KeyboardInterrupt, SubspanError):
        if run.rows:
            run.save()  # everything up to the row before
        raise
    run.save()
    if progress:
        progress(run.standing())
    return run.finish()


class _WholeRows:
    """Ctrl-C while a row is applied waits until it is: what is then saved is a whole state."""

    def __enter__(self) -> "_WholeRows":
        self.holding = self.interrupted = False
        main = threading.current_thread() is threading.main_thread()
        self.before = signal.signal(signal.SIGINT, self._interrupt) if main else None
        return self

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _interrupt(self, *_: object) -> None:
        if not self.holding:
            raise KeyboardInterrupt
        self.interrupted = True

    @contextmanager
    def held(self) -> Iterator[None]:
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
        if self.interrupted:
            raise KeyboardInterrupt


class _Run:
    def __init__(
        self, config: StreamConfig, out: Path, every: int, progress: Callable[[Standing], None] | None
    ) -> None:
        self.config, self.out, self.every, self.progress = config, out, every, progress
        self.rows = 0
        self.seconds = 0.0
        self.names: list[str] = []  # of the coordinates
        self.model: DynamicFacilityLocation | None = None
        self.present: dict[str, None] = {}  # ids in order of arrival, to find the oldest in no time
        self.log: list[str] = []

    # -------------------------------------------------------------------------------------------------------- rows

    def consume(self) -> None:
        rows = iterate_rows(self.config.source)
        if self.config.source != "-":
            for _ in range(self.rows):
                next(rows, None)
        shown, checked = time.perf_counter(), False
        with _WholeRows() as between_rows:
            if self.model is None:
                rows = self._start(rows)
            for row in rows:
                if not checked:
                    checked = self._check_columns(row)
                began = time.perf_counter()
                with between_rows.held(), self._naming(self.rows + 1):
                    self._apply(row)
                    self.rows += 1
                now = time.perf_counter()
                self.seconds += now - began
                if self.progress and now - shown > _SHOW_EVERY:
                    self.progress(self.standing())
                    shown = now
                if self.rows % self.every == 0:
                    self.save()

    @contextmanager
    def _naming(self, row: int) -> Iterator[None]:
        """Say which row does not fit."""
        try:
            yield
        except (ValueError, KeyError, IndexError) as error:
            source = "standard input" if self.config.source == "-" else self.config.source
            reason = error.args[0] if isinstance(error, KeyError) else error
            raise DataError(f"{source}, row {row}: {reason}") from error

    def _start(self, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Build the estimator from the table of places, or from the first rows, which are then given back."""
        config, read = self.config, list[dict[str, Any]]()
        if config.facilities is None:
            found: list[np.ndarray] = []
            while len(found) < config.first and (row := next(rows, None)) is not None:
                read.append(row)
                self.names = self.names or [name for name in row if name not in RESERVED]
                with self._naming(len(read)):
                    if _operation(row) == "insert":
                        found.append(_numbers(row, self.names))
            if not found or not self.names:
                raise DataError(f"{config.source} inserts nothing")
            places, prices = np.stack(found), None
        else:
            table = _read_places(config.facilities)
            columns = dict(zip(table.names, table.values.T, strict=True))
            prices = columns.pop("price", None)
            self.names = list(columns)
            if not columns:
                raise DataError(f"{config.facilities} holds no coordinates")
            places = np.stack(list(columns.values()), axis=1)
        if prices is None and config.price is None:
            typical = float(np.median(np.linalg.norm(places - places.mean(axis=0), axis=1)))
            raise ConfigError(
                f"no price is given; places lie about {typical:.3g} from their middle, so that a facility priced "
                f"{20 * typical:.3g} would pay for itself with some twenty clients"
            )
        model = DynamicFacilityLocation(**config.options)
        nobody = np.zeros((0, len(self.names)))
        self.model = model.fit(nobody, facilities=places, opening_cost=config.price if prices is None else prices)
        return chain(read, rows)

    def _check_columns(self, row: Mapping[str, Any]) -> bool:
        """Refuse columns that the places do not have: left out in silence they would change every distance."""
        if odd := [name for name in row if name not in (*RESERVED, *self.names)]:
            raise DataError(
                f"{self.config.source} has the column {odd[0]!r}, but the places have {', '.join(self.names)}: leave "
                "it out, or add it to the places"
            )
        return True

    def _apply(self, row: Mapping[str, Any]) -> None:
        assert self.model is not None
        operation, name = _operation(row), str(row.get("id", self.rows + 1))
        if operation == "insert":
            weight = None if row.get("weight") in (None, "") else _numbers(row, ["weight"])
            self.model.partial_fit(_numbers(row, self.names)[None], ids=[name], sample_weight=weight)
            self.present[name] = None
            if self.config.window is not None and len(self.present) > self.config.window:
                self._forget(next(iter(self.present)))
        elif operation == "delete":
            self._forget(name)
        else:
            self.model.set_opening_cost(int(name), float(_numbers(row, ["price"])[0]))

    def _forget(self, name: str) -> None:
        assert self.model is not None
        self.model.forget([name])
        del self.present[name]

    # -------------------------------------------------------------------------------------------------------- folder

    def standing(self) -> Standing:
        model = self.model
        assert model is not None
        return Standing(
            self.rows, len(self.present), len(model.open_facilities_), model.cost_, model.n_client_moves_,
            model.n_facility_moves_, round(self.seconds, 3),
        )  # fmt: skip

    def load(self) -> None:
        """Continue the run that the folder holds, if it holds one."""
        from safetensors import SafetensorError, safe_open

        path = self.out / "state.safetensors"
        if not path.exists():
            return
        try:
            with safe_open(path, "numpy") as file:
                saved = json.loads(file.metadata()["run"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            if saved["config"] != asdict(self.config):
                mine = asdict(self.config)
                differing = [name for name in mine if saved["config"].get(name) != mine[name]]
                raise ConfigError(
                    f"{self.out} holds a run with another {', '.join(differing)}; start over, or choose a folder"
                )
            self.rows, self.seconds, self.names = saved["rows"], saved["seconds"], saved["names"]
            self.model = DynamicFacilityLocation(**self.config.options)
            self.model.load_state_dict(saved["state"] | {"arrays": arrays})
            metrics = self.out / "metrics.jsonl"
            lines = metrics.read_text("utf-8").splitlines() if metrics.exists() else []
            self.log = [line for line in lines if json.loads(line)["rows"] <= self.rows]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.out} holds a damaged run ({error}); start over with --fresh") from error
        self.present = dict.fromkeys(self.model.ids_)

    def save(self) -> None:
        """One file with everything, so that it is always whole; then the metrics."""
        from safetensors.numpy import save_file

        if self.model is None:
            return
        state = self.model.state_dict()
        run = {"config": asdict(self.config), "rows": self.rows, "seconds": self.seconds, "names": self.names}
        run["state"] = {name: value for name, value in state.items() if name != "arrays"}
        arrays = {name: np.ascontiguousarray(array) for name, array in state["arrays"].items()}
        with replacing(self.out / "state.safetensors") as part:
            save_file(arrays, part, metadata={"run": json.dumps(run)})
        line = json.dumps(asdict(self.standing()))
        if not self.log or json.loads(self.log[-1])["rows"] < self.rows:
            self.log.append(line)
        write_text(self.out / "metrics.jsonl", "".join(f"{line}\n" for line in self.log))

    def finish(self) -> dict[str, Any]:
        model = self.model
        assert model is not None
        assignment = model.assignment_
        counts = np.bincount(assignment, minlength=len(model.facilities_))
        prices, places = model.prices_, model.facilities_
        rows = [[i, prices[i], counts[i], *places[i].tolist()] for i in model.open_facilities_.tolist()]
        write_text(self.out / "facilities.csv", _csv(["facility", "price", "clients", *self.names], rows))
        pairs = [list(pair) for pair in zip(self.present, assignment.tolist(), strict=True)]
        write_text(self.out / "clients.csv", _csv(["id", "facility"], pairs))
        summary = asdict(self.standing()) | {"proven_ratio": model.certificate().ratio, "out": str(self.out)}
        write_json(self.out / "summary.json", summary)
        return summary


def _read_places(path: str) -> NumberTable:
    """The numbers of a table of places: its coordinates, and their prices where it has any."""
    names = list(next(iterate_rows(path), {}))
    unread = {*RESERVED, *(_OWN if set(_OWN) <= set(names) else ())} - {"price"}
    return read_numbers(path, drop=[name for name in names if name in unread])


def _operation(row: Mapping[str, Any]) -> str:
    operation = row.get("op", "insert")
    if operation not in ("insert", "delete", "price"):
        raise ValueError(f"op must be insert, delete or price, got {operation!r}")
    return operation


def _numbers(row: Mapping[str, Any], names: list[str]) -> Float64[np.ndarray, "d"]:
    values = np.empty(len(names))
    for i, name in enumerate(names):
        try:
            values[i] = float(row[name])
        except (KeyError, TypeError, ValueError):
            held = f"holds {row[name]!r}, which is no number" if name in row else "is missing"
            raise ValueError(f"column {name!r} {held}") from None
    return values


def _csv(columns: list[str], rows: list[list[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([columns, *rows])
    return out.getvalue()
