"""Tables of numbers from csv, tsv or parquet files."""

import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from subspan.data.text import _read_delimited, delimited_rows
from subspan.errors import DataError, MissingExtra


class NumberTable(NamedTuple):
    """Numbers (n rows, p columns), the columns' names, and each row's label where a label column was named."""

    values: Float64[np.ndarray, "n p"]
    names: list[str]
    labels: list[str] | None


def read_numbers(path: str | os.PathLike[str], *, label: str | None = None, drop: Sequence[str] = ()) -> NumberTable:
    """Read a table whose columns are numbers, except ``label`` and those to ``drop``.

    A column without a name (the row numbers that R and pandas write) is dropped too.

    Args:
        path: a ``.csv``, ``.tsv`` (both also ``.gz`` or ``.bz2``) or ``.parquet`` file with a header.
        label: a column of any type, returned as text.
        drop: columns to leave out.

    Raises:
        DataError: the file is missing, empty or malformed, a column does not exist, or a cell (it is named) no number.
        MissingExtra: a parquet file, and pyarrow is not installed.
    """
    path = Path(path).expanduser()
    columns = _columns(path)
    if not columns:
        raise DataError(f"{path} holds no numbers")
    for name in [*drop, *([label] if label is not None else [])]:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(list(columns)[:8])}"
            raise DataError(f"{path} has no column {name!r}; {hint}")
    names = [name for name in columns if name not in (label, "", *drop)]
    if not names or not len(columns[names[0]]):
        raise DataError(f"{path} holds no numbers")
    values = np.column_stack([_numbers(columns[name], f"{path}, column {name!r}") for name in names])
    if label is None:
        return NumberTable(values, names, None)
    labels = [str(value) if value is not None else "" for value in columns[label]]
    if "" in labels:
        raise DataError(f"{path}, column {label!r}: row {labels.index('') + 1} is empty")
    return NumberTable(values, names, labels)


def iterate_rows(source: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of a table by column name, one after the other, so that a stream may be longer than memory.

    Args:
        source: a file as in :func:`read_numbers`, or ``-`` for comma-separated lines on standard input.

    Raises:
        DataError: the file is missing or malformed.
        MissingExtra: a parquet file, and pyarrow is not installed.
    """
    if os.fspath(source) == "-":
        yield from delimited_rows(sys.stdin, ",", "standard input")
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    name = path.name.lower()
    if name.endswith(".parquet"):
        for batch in _parquet_batches(path):
            yield from batch.to_pylist()
        return
    delimiters = {".csv": ",", ".tsv": "\t"}
    suffix = Path(name.removesuffix(".gz").removesuffix(".bz2")).suffix
    if suffix not in delimiters:
        raise DataError(f"{path} has no known format; the name should end in .csv, .tsv or .parquet")
    try:
        yield from _read_delimited(path, delimiters[suffix])
    except (UnicodeDecodeError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    """The file's arrow record batches."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("parquet files need the package pyarrow: pip install pyarrow") from error
    try:
        yield from pyarrow.parquet.ParquetFile(path).iter_batches()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a parquet file: {error}") from error


def _columns(path: Path) -> dict[str, Sequence[Any]]:
    """The file's columns by name."""
    if path.name.lower().endswith(".parquet") and path.is_file():
        batches = list(_parquet_batches(path))
        names = batches[0].schema.names if batches else ()
        return {name: [cell for batch in batches for cell in batch[name].to_pylist()] for name in names}
    rows = list(iterate_rows(path))
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _numbers(cells: Sequence[Any], place: str) -> Float64[np.ndarray, " n"]:
    try:
        return np.array(cells, dtype=np.float64)
    except (TypeError, ValueError):
        pass
    for row, cell in enumerate(cells, 1):
        try:
            float(cell)
        except (TypeError, ValueError):
            shown = "is empty" if cell in (None, "") else f"holds {cell!r}, which is no number"
            raise DataError(f"{place}: row {row} {shown}; leave the column out, or name it as the label") from None
    raise DataError(f"{place} holds no plain numbers")
