"""Generated graphs have the homophily asked for; the real ones are what they are known to be."""

import numpy as np
import pytest
import torch

from subspan.data import Graph, blogcatalog, contextual_sbm, digits_graphs, homophilous_edges, shared_file
from subspan.errors import MissingAsset


def homophily(graph: Graph) -> float:
    """Share of edges between equal labels."""
    sender, receiver = graph.edge_index
    return float((graph.y[sender] == graph.y[receiver]).double().mean())


def check_simple_and_symmetric(edges: np.ndarray, n: int) -> None:
    keys = edges[0] * n + edges[1]
    assert len(np.unique(keys)) == len(keys)
    assert (edges[0] != edges[1]).all()
    assert set(keys) == set(edges[1] * n + edges[0])


@pytest.mark.parametrize("wanted", [0.0, 0.25, 0.8, 1.0])
def test_edges_have_the_homophily_and_degree_asked_for(wanted):
    y = np.random.default_rng(0).integers(4, size=4000)
    edges = homophilous_edges(y, wanted, 10.0, random_state=0)
    check_simple_and_symmetric(edges, 4000)
    same = y[edges[0]] == y[edges[1]]
    assert same.mean() == pytest.approx(wanted, abs=0.02 if 0 < wanted < 1 else 0)
    assert edges.shape[1] / 4000 == pytest.approx(10, abs=0.3)
    # other classes are met in proportion to their size
    other = np.bincount(y[edges[0]][~same], minlength=4)
    assert wanted == 1 or other.min() > 0.8 * other.max()


def test_classes_of_one_node_and_a_single_class_get_edges():
    assert homophilous_edges(np.array([0, 1]), 1.0, 2.0, random_state=0).shape == (2, 0)  # only itself to choose
    edges = homophilous_edges(np.array([0, 1, 1, 1]), 0.0, 20.0, random_state=0)
    assert {tuple(e) for e in edges.T.tolist()} == {(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)}
    assert homophilous_edges(np.zeros(5, np.int64), 0.0, 20.0, random_state=0).shape[1] > 0


@pytest.mark.parametrize(("wanted", "degree"), [(1.2, 5.0), (-0.1, 5.0), (0.5, 0.0)])
def test_bad_parameters_of_edges_are_refused(wanted, degree):
    with pytest.raises(ValueError, match=r"homophily must|degree must"):
        homophilous_edges(np.array([0, 1]), wanted, degree)


def test_contextual_sbm():
    means = np.array([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    graph = contextual_sbm(3000, means, homophily=0.3, degree=8.0, random_state=0)
    assert homophily(graph) == pytest.approx(0.3, abs=0.03)
    for label in (0, 1):
        mean = graph.x[graph.y == label].mean(0)
        torch.testing.assert_close(mean, torch.tensor(means[label]).float(), atol=0.1, rtol=0)
    again = contextual_sbm(3000, means, homophily=0.3, degree=8.0, random_state=0)
    assert torch.equal(again.edge_index, graph.edge_index)
    assert torch.equal(again.x, graph.x)


def test_digits_graphs_share_no_digit_and_the_source_is_standardised():
    source, target = digits_graphs((8.0, 2.0), (2.0, 5.0), noise=(0.0, 0.0), scale=1.0, random_state=1)
    assert (len(source.x), len(target.x)) == (898, 899)
    assert homophily(source) == pytest.approx(0.77, abs=0.05)
    assert homophily(target) == pytest.approx(0.29, abs=0.05)
    torch.testing.assert_close(source.x.mean(0), torch.zeros(64), atol=1e-5, rtol=0)
    assert set(source.x.std(0, correction=0).round(decimals=3).tolist()) == {0.0, 1.0}  # some pixels are never inked
    rows = {row.numpy().tobytes() for graph in (source, target) for row in graph.x}
    assert len(rows) == 1797
    check_simple_and_symmetric(target.edge_index.numpy(), 899)
    few = digits_graphs(0.5, 0.5, size=101, random_state=1)
    assert [len(graph.x) for graph in few] == [50, 51]


def test_blogcatalog():
    try:
        one, two = blogcatalog(n_components=8)
    except MissingAsset as error:
        pytest.skip(str(error))
    assert (one.x.shape, two.x.shape) == ((2300, 8), (2896, 8))
    assert (one.edge_index.shape[1], two.edge_index.shape[1]) == (66_942, 107_672)
    assert torch.bincount(one.y).tolist() == [399, 320, 419, 392, 377, 393]
    check_simple_and_symmetric(one.edge_index.numpy(), 2300)


def test_shared_files_are_found_above_the_working_folder_or_said_to_be_missing(tmp_path, monkeypatch):
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (tmp_path / "shared" / "data" / "here.txt").write_text("x")
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert shared_file("here.txt") == tmp_path / "shared" / "data" / "here.txt"
    with pytest.raises(MissingAsset, match="nowhere"):
        shared_file("nowhere.mat")
