"""The analysis of a table of numbers: its table, its network, its page."""

import csv

import numpy as np
import pytest

from subspan.data import golub
from subspan.errors import DataError, MissingAsset
from subspan.structure import JICHD, make_common_hub_ggm
from subspan.structure.hubs.report import analyse_table, hub_edges


def write(path, X, names=None):
    names = names or [f"v{i}" for i in range(X[0].shape[1])]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", *names])
        for k, x in enumerate(X):
            writer.writerows([f"s{k}", *row] for row in x.tolist())
    return path


@pytest.fixture(scope="module")
def data():
    return make_common_hub_ggm(80, 300, random_state=1)


@pytest.fixture(scope="module")
def table(data, tmp_path_factory):
    return write(tmp_path_factory.mktemp("hubs") / "data.csv", data.X)


def test_from_file_to_table_and_page(data, table, tmp_path):
    seen = []
    found = analyse_table(
        table, group="site", stability=4, random_state=0, out=tmp_path, progress=lambda *x: seen.append(x)
    )
    assert set(found.detector.hub_names_) == {f"v{i}" for i in range(5)}
    assert seen[-1] == (4, 4)
    # the hubs of single populations: no other variables than those planted, and some of them in each
    for k, name in enumerate(["s0", "s1", "s2"]):
        assert 0 < len(set(found.individual[name]) & set(data.individual[k])) == len(found.individual[name])
    with (tmp_path / "hubs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 80
    assert [row["variable"] for row in rows if row["hub"] == "1"] == found.detector.hub_names_.tolist()
    influence = [float(row["influence"]) for row in rows]
    assert influence == sorted(influence, reverse=True)
    assert sum(influence) == pytest.approx(found.detector.n_components_)
    assert rows[0]["selected"] == str(found.frequency[found.detector.hubs_[0]])
    assert {row["hub only in"] for row in rows} == {"", "s0", "s1", "s2"}
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "Hubs of data.csv" in page
    assert page.count("<svg") == 2
    summary = found.summary()
    assert summary["hubs"] == found.detector.hub_names_.tolist()
    assert sum(p["weight"] for p in summary["populations"]) == pytest.approx(1)
    assert [p["samples"] for p in summary["populations"]] == [300] * 3
    assert summary["lower_bound"] <= summary["objective"] + 1e-9


def test_one_population_and_no_hub(tmp_path):
    path = write(tmp_path / "t.csv", [np.random.default_rng(0).normal(size=(50, 6))])
    found = analyse_table(path, drop=["site"], c=50.0, out=tmp_path)
    assert found.detector.hubs_.tolist() == []
    assert found.individual == {}
    assert found.table()[0] == ["variable", "influence", "hub"]
    assert "0 of 6 variables are hubs" in (tmp_path / "report.html").read_text("utf-8")
    assert found.summary()["threshold"] > 1


def test_what_was_warned_of_is_on_the_page(data, tmp_path):
    path = write(tmp_path / "t.csv", [x[:20] for x in data.X[:2]])
    found = analyse_table(path, group="site", out=tmp_path)
    assert any("common null space" in text for text in found.warnings)
    assert "common null space" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x, DataError, "no column 'sites'"),
        (lambda x: np.where(np.arange(80) == 7, 1.0, x), ValueError, "constant in population s0: v7"),
        (lambda x: x[:1], ValueError, "population s0 has 1 sample"),
        (lambda x: spoiled(x, np.nan), DataError, "t.csv, column 'v7': row 4 holds nan; leave out"),
        (lambda x: spoiled(x, -np.inf), DataError, "t.csv, column 'v7': row 4 holds -inf"),
    ],
)
def test_bad_tables_are_named_by_their_columns(data, tmp_path, change, error, message):
    path = write(tmp_path / "t.csv", [change(data.X[0]), data.X[1]])
    with pytest.raises(error, match=message):
        analyse_table(path, group="sites" if "sites" in message else "site")


def spoiled(x, value):
    return np.where((np.arange(len(x))[:, None] == 3) & (np.arange(80) == 7), value, x)


def test_edges_join_each_hub_to_its_nearest_in_m_with_the_sign_of_partial_correlation():
    # hub 0 with edges to 1, 2, 3; the edge to 3 has the other sign
    theta = np.eye(8)
    theta[0, 1:4] = theta[1:4, 0] = [0.5, 0.45, -0.4]
    fitted = JICHD(1, rule="top", n_hubs=1).fit_covariances([np.linalg.inv(theta)])
    edges = hub_edges(fitted, per_hub=3)
    assert [edge[:2] for edge in edges] == [(0, 1), (0, 2), (0, 3)]
    assert [np.sign(edge[2]) for edge in edges] == [-1, -1, 1]
    assert edges[0][2] == pytest.approx(-fitted.projector_[0, 1])


def test_real_gene_expression_with_subtypes():
    try:
        data = golub().most_variable(100)
    except MissingAsset as error:
        pytest.skip(str(error))
    fitted = JICHD(nonparanormal=True, screen="union").fit(data.values, groups=data.subtypes["leukaemia"])
    assert fitted.populations_ == ["ALL", "AML"]
    assert fitted.n_samples_ == [27, 11]
    assert fitted.gap_ <= 1e-5 * (1 + fitted.objective_)
    assert 0 < len(fitted.hubs_) < 20
