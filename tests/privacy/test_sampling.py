"""Poisson batches."""

import math

import pytest
import torch

from subspan.privacy import PoissonBatchSampler, empty_safe


def test_every_record_joins_independently_with_the_rate() -> None:
    sampler = PoissonBatchSampler(200, 0.3, 400, generator=torch.Generator().manual_seed(0))
    member = torch.zeros(400, 200)
    for step, batch in enumerate(sampler):
        member[step, batch] = 1
    n = member.numel()
    assert abs(float(member.mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / n)
    sizes = member.sum(1)
    assert abs(float(sizes.var()) - 200 * 0.21) < 4 * 200 * 0.21 * math.sqrt(2 / 400)
    centred = member - 0.3
    correlation = (centred[:, 0::2] * centred[:, 1::2]).mean() / 0.21
    assert abs(float(correlation)) < 4 / math.sqrt(n / 2)


def test_batches_do_not_depend_on_reading_ahead_and_resume() -> None:
    whole = PoissonBatchSampler(50, 0.2, 10, generator=torch.Generator().manual_seed(5))
    batches = list(whole)
    assert list(whole) == batches
    assert whole.batch(7) == batches[7]
    assert len(whole) == 10
    late = PoissonBatchSampler(50, 0.2, 10, generator=torch.Generator().manual_seed(8), start=6)
    late.load_state_dict(whole.state_dict())
    assert list(late) == batches[6:]
    assert len(late) == 4
    with pytest.raises(ValueError, match="were drawn for"):
        PoissonBatchSampler(51, 0.2, 10).load_state_dict(whole.state_dict())


def test_empty_batches_happen_and_a_full_rate_takes_everyone() -> None:
    assert [] in list(PoissonBatchSampler(3, 0.05, 20, generator=torch.Generator().manual_seed(0)))
    assert list(PoissonBatchSampler(3, 1.0, 2)) == [[0, 1, 2]] * 2
    assert list(PoissonBatchSampler(1000, 0.5, 1)) != list(PoissonBatchSampler(1000, 0.5, 1))


def test_bad_arguments_are_refused() -> None:
    for arguments, message in (
        ((0, 0.5, 1), "num_examples"), ((5, 0.0, 1), "sample_rate"), ((5, 1.1, 1), "sample_rate"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            PoissonBatchSampler(*arguments)
    with pytest.raises(ValueError, match="start"):
        PoissonBatchSampler(5, 0.5, 3, start=4)


def test_empty_safe_keeps_the_structure_and_shows_no_record() -> None:
    rows = [{"x": torch.full((2,), float(i)), "y": i, "t": "s"} for i in range(3)]
    collate = empty_safe(None, rows)
    assert collate(rows)["x"].shape == (3, 2)
    empty = collate([])
    assert empty["x"].shape == (0, 2)
    assert empty["y"].dtype == torch.int64
    assert empty["y"].shape == (0,)
    assert empty["t"] == []
