"""What can be done with scores: windows, weights, files, the page."""

import math

import numpy as np
import pytest

from subspan.errors import DataError
from subspan.safety import RiskTable


def table(scores, **columns):
    records = [
        {
            "row": i,
            "hash": f"h{i}",
            "score": s,
            "danger": s,
            "safety": 0.0 if s is not None else None,
            "loss": 1.0 + i,
            "grad_norm": float(i),
            "n_answer_tokens": 3,
            "se": 0.1,
            "reason": "" if s is not None else "the answer is empty",
            **{k: v[i - 1] for k, v in columns.items()},
        }
        for i, s in enumerate(scores, 1)
    ]
    return RiskTable.of(
        records, {"settings": {"state": "zero"}, "modules": {"layers.0.q_proj": {"mean": 1.0, "share": 1.0}}}
    )


def test_t10_windows_follow_the_linspace_rule_and_ties_keep_their_order():
    scores = np.random.default_rng(0).permutation(103).astype(float)
    found = table(scores.tolist()).windows(5, 20)
    order = np.argsort(-scores)
    for window, start in zip(found, [0, 20, 41, 62, 83], strict=True):
        assert window.tolist() == order[start : start + 20].tolist()
    ties = table([1.0, 2.0, 1.0, 2.0, None, 1.0])
    assert ties.ranking.tolist() == [1, 3, 0, 2, 5]
    many = table([float(i % 3) for i in range(300)]).ranking.reshape(3, 100)
    assert (np.diff(many) == 3).all()
    assert [w.tolist() for w in ties.windows(2, 3)] == [[1, 3, 0], [0, 2, 5]]
    with pytest.raises(ValueError, match="5 scored rows give no 2 windows of 6"):
        ties.windows(2, 6)


def test_weights_are_the_sigmoid_of_robust_z_scores():
    found = table([0.0, 1.0, 2.0, 3.0, 100.0, None]).weights()
    assert found[2] == found[5] == 0.5
    assert found[0] == pytest.approx(1 / (1 + math.exp(-2 / 1.4826)))
    assert found[4] < 1e-20
    assert (np.diff(found[:5]) < 0).all()
    assert table([5.0, 5.0, 5.0, 9.0]).weights().tolist() == [0.5] * 4
    assert table([None, None]).weights().tolist() == [0.5] * 2


def test_dropping_the_top_keeps_rows_without_a_score():
    assert table([3.0, None, 9.0, 1.0]).without_top(0.25).tolist() == [0, 1, 3]
    assert table([3.0, 9.0, 1.0]).without_top(0.6).tolist() == [2]
    assert table([3.0, None]).without_top(0.0).tolist() == [0, 1]
    with pytest.raises(ValueError, match="must lie in"):
        table([1.0]).without_top(1.0)


def test_standardised_terms_have_equal_weight():
    found = table([1.0, 2.0, 4.0]).standardised()["score"]
    assert abs(found.mean()) < 1e-12
    assert found.std() == pytest.approx(1.0)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_files_come_back_as_they_were(tmp_path, suffix):
    found = table([1.5, None, -2.0], source=["web", "", "chat"])
    path = tmp_path / f"scores.{suffix}"
    found.write(path)
    back = RiskTable.read(path)
    assert list(back.columns) == list(found.columns)
    for name in found.columns:
        np.testing.assert_array_equal(back[name], found[name])
    assert back.facts == found.facts
    with pytest.raises(ValueError, match=r"\.parquet or \.csv"):
        found.write(tmp_path / "scores.xlsx")
    (tmp_path / "other.csv").write_text("row,score\n1,2\n")
    with pytest.raises(DataError, match="no column hash"):
        RiskTable.read(tmp_path / "other.csv")


def test_the_page_warns_of_what_explains_the_ranking_and_hides_texts(tmp_path):
    found = table([float(i) for i in range(40)], source=["a"] * 20 + ["b"] * 20)
    texts = [f"secret {i}" for i in range(40)]
    found.report(tmp_path / "hidden.html")
    found.report(tmp_path / "shown.html", texts)
    hidden, shown = ((tmp_path / f"{n}.html").read_text() for n in ("hidden", "shown"))
    assert "Warning: loss and grad norm" in hidden
    assert "secret" not in hidden
    assert "secret 39" in shown
    assert found.by_source()["b"]["in_riskiest_tenth"] == 1.0
    assert int(found.faint().sum()) == 2
    found.plot(tmp_path / "scores.svg")
    assert "window 5" in (tmp_path / "scores.svg").read_text()
    with pytest.raises(ValueError, match=r"end in \.svg"):
        found.plot(tmp_path / "scores.png")
    table([None, None]).report(tmp_path / "none.html")
    assert "No row could be scored" in (tmp_path / "none.html").read_text()
