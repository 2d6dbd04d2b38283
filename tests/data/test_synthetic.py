"""The misaligned map has the geometry its docstring promises."""

import pytest
import torch

from subspan.data import misaligned_linear_map


def test_the_weight_is_strong_where_the_data_is_weak(generator):
    task = misaligned_linear_map(n_samples=20_000, generator=generator)
    _, singular, right = torch.linalg.svd(task.weight)
    torch.testing.assert_close(singular[:8], torch.full((8,), 10.0, dtype=torch.float64))
    torch.testing.assert_close(singular[8:], torch.full((40,), 0.5, dtype=torch.float64))
    variances, axes = torch.linalg.eigh(task.inputs.T @ task.inputs / len(task.inputs))
    assert (variances[-8:] - 1).abs().max() < 0.1
    assert (variances[:-8] - 0.01).abs().max() < 0.002
    overlap = right[:8] @ axes[:, -8:]  # weight's leading input directions against the data's
    assert overlap.norm() < 0.05


def test_the_target_differs_by_a_map_of_the_given_rank_inside_the_strong_data_directions(generator):
    task = misaligned_linear_map(rank=3, n_samples=20_000, generator=generator)
    change = task.target - task.weight
    torch.testing.assert_close(torch.linalg.svdvals(change)[:3], torch.full((3,), 2.0, dtype=torch.float64))
    assert torch.linalg.matrix_rank(change) == 3
    strong = torch.linalg.eigh(task.inputs.T @ task.inputs).eigenvectors[:, -8:]
    assert (change - change @ strong @ strong.T).norm() < 0.05 * change.norm()
    noise = task.outputs - task.inputs @ task.target.T
    assert noise.std().item() == pytest.approx(0.05, rel=0.01)


def test_the_generator_decides():
    draws = [misaligned_linear_map(n_samples=5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0].outputs, draws[1].outputs)
    assert not torch.equal(draws[0].outputs, draws[2].outputs)


@pytest.mark.parametrize("sizes", [{"rank": 9}, {"n_out": 7}, {"n_out": 65}, {"n_in": 15, "n_out": 10}])
def test_impossible_sizes_are_refused(sizes, generator):
    with pytest.raises(ValueError, match="needs rank <= 8"):
        misaligned_linear_map(**sizes, generator=generator)
