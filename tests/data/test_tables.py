"""Tables of numbers from files."""

import bz2
import io

import numpy as np
import pytest

from subspan.data import iterate_rows, read_numbers
from subspan.errors import DataError


def write(path, text):
    path.write_text(text, "utf-8")
    return path


def test_csv_tsv_and_compressed_ones(tmp_path):
    text = ",a,kind,b\n1,0.5,x,2\n2,-1e3,y,3\n"
    table = read_numbers(write(tmp_path / "t.csv", text), label="kind")
    np.testing.assert_array_equal(table.values, [[0.5, 2], [-1000, 3]])
    assert (table.names, table.labels) == (["a", "b"], ["x", "y"])
    (tmp_path / "t.tsv.bz2").write_bytes(bz2.compress(text.replace(",", "\t").encode()))
    table = read_numbers(tmp_path / "t.tsv.bz2", drop=["kind"])
    assert (table.names, table.labels) == (["a", "b"], None)
    assert table.values.shape == (2, 2)


def test_parquet(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": [1, 2], "kind": [0, 1], "b": [0.5, 1.5]}), tmp_path / "t.parquet")
    table = read_numbers(tmp_path / "t.parquet", label="kind")
    np.testing.assert_array_equal(table.values, [[1, 0.5], [2, 1.5]])
    assert table.labels == ["0", "1"]
    with pytest.raises(DataError, match="not a parquet file"):
        read_numbers(write(tmp_path / "bad.parquet", "no"))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,b\n1,two\n", {}, "column 'b': row 1 holds 'two', which is no number; leave the column out"),
        ("a,b\n1,2\n1,\n", {}, "column 'b': row 2 is empty"),
        ("a,b\n1,2\n", {"label": "kind"}, "no column 'kind'; it has a, b"),
        ("a,kind\n1,2\n", {"drop": ["kinds"]}, "no column 'kinds'; did you mean 'kind'"),
        ("a,kind\n1,\n", {"label": "kind"}, "column 'kind': row 1 is empty"),
        ("a,b\n", {}, "holds no numbers"),
        ("a,b\n", {"label": "g"}, "holds no numbers"),
        ("a\nx\n", {"label": "a"}, "holds no numbers"),
        ("a,b\n1\n", {}, "line 2: 1 cells for 2 columns"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, options, message):
    with pytest.raises(DataError, match=message):
        read_numbers(write(tmp_path / "t.csv", text), **options)


def test_rows_come_one_after_the_other(tmp_path, monkeypatch):
    rows = iterate_rows(write(tmp_path / "t.csv", "a,b\n1,x\n2\n"))
    assert next(rows) == {"a": "1", "b": "x"}  # before the malformed line is reached
    with pytest.raises(DataError, match="line 3: 1 cells for 2 columns"):
        next(rows)
    monkeypatch.setattr("sys.stdin", io.StringIO("a,b\n1,2\n"))
    assert list(iterate_rows("-")) == [{"a": "1", "b": "2"}]
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", None]}), tmp_path / "t.parquet")
    assert list(iterate_rows(tmp_path / "t.parquet")) == [{"a": 1, "b": "x"}, {"a": 2, "b": None}]


def test_unknown_formats_and_missing_files(tmp_path):
    with pytest.raises(DataError, match="should end in"):
        read_numbers(write(tmp_path / "t.xlsx", "a"))
    with pytest.raises(DataError, match="there is no file"):
        read_numbers(tmp_path / "none.csv")
