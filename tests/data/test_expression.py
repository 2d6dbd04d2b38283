"""Real gene expression, where its Debian packages are installed."""

import numpy as np
import pytest

from subspan.data import Expression, golub, leukemia_all
from subspan.data.expression import _from_r
from subspan.errors import MissingAsset


def or_skip(load) -> Expression:
    try:
        return load()
    except MissingAsset as error:
        pytest.skip(str(error))


def test_golub():
    data = or_skip(golub)
    assert data.values.shape == (38, 3051)
    assert data.subtypes == {"leukaemia": ["ALL"] * 27 + ["AML"] * 11}
    # zyxin, one of the published markers, is higher in AML
    zyxin = data.values[:, data.genes.index("X95735_at")]
    assert zyxin[27:].mean() - zyxin[:27].mean() > 1
    # pre-processing standardised every sample
    np.testing.assert_allclose(data.values.mean(1), 0, atol=1e-4)


def test_leukemia_all():
    data = or_skip(leukemia_all)
    assert data.values.shape == (128, 12625)
    assert [data.subtypes["lineage"].count(x) for x in "BT"] == [95, 33]
    assert data.subtypes["molecular"].count("BCR/ABL") == 37
    # CD3D (38319_at) marks T cells
    t_cell = np.array(data.subtypes["lineage"]) == "T"
    marker = data.values[:, data.genes.index("38319_at")]
    assert marker[t_cell].mean() - marker[~t_cell].mean() > 3


def test_the_most_variable_genes_keep_their_order():
    data = Expression(np.array([[0.0, 5, 1], [0, -5, 3]]), ["flat", "wild", "mild"], {"kind": ["a", "b"]})
    assert data.most_variable(2).genes == ["wild", "mild"]
    np.testing.assert_array_equal(data.most_variable(1).values, [[5], [-5]])


@pytest.mark.parametrize("where", ["", None])
def test_what_is_missing_is_named(where, monkeypatch):
    if where is not None:
        monkeypatch.setenv("PATH", where)  # no R at all
    with pytest.raises(MissingAsset, match="apt install r-bioc-none"):
        _from_r("library(none)", "r-bioc-none")
