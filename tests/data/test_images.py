"""Small image sets and the rotated-digits domain shift."""

import numpy as np
import pytest

from subspan.data import ASSETS, digits, digits_domain_shift, installed, mnist5k

SIZES = {"n_pretrain": 500, "n_train": 1000, "n_validation": 100, "n_test": 197}


def test_digits():
    data = digits()
    assert data.images.shape == (1797, 8, 8)
    assert (data.images.min(), data.images.max()) == (0.0, 1.0)
    assert set(data.labels) == set(range(10))


def test_mnist5k():
    if not installed()["mnist5k"]:
        pytest.skip(ASSETS["mnist5k"].install_command)
    data = mnist5k()
    assert data.images.shape == (5000, 28, 28)
    assert (data.images.min(), data.images.max()) == (0.0, 1.0)
    np.testing.assert_array_equal(np.bincount(data.labels), [500] * 10)
    # a zero has ink around an empty middle, a one has ink in the middle
    middle = data.images[:, 12:16, 12:16].mean((1, 2))
    assert middle[data.labels == 0].mean() < 0.1 < 0.5 < middle[data.labels == 1].mean()


def test_parts_are_disjoint_and_rotated():
    shift = digits_domain_shift(**SIZES, random_state=0)
    assert [len(part.y) for part in shift] == [500, 1000, 100, 197, 197]
    images = digits().images
    upright = [*shift.pretrain.x.reshape(-1, 8, 8)]
    turned = [image for part in shift[1:4] for image in part.x.reshape(-1, 8, 8)]
    # turning the rotated parts back gives, with the upright part, every digit exactly once
    back = sorted(image.tobytes() for image in [*upright, *(np.rot90(image, -1) for image in turned)])
    assert back == sorted(image.tobytes() for image in images)
    np.testing.assert_array_equal(
        np.rot90(shift.source_test.x.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64), shift.test.x
    )
    np.testing.assert_array_equal(shift.source_test.y, shift.test.y)


def test_labels_follow_their_images():
    label_of = {image.tobytes(): label for image, label in zip(*digits(), strict=True)}
    shift = digits_domain_shift(**SIZES, random_state=3)
    for image, label in zip(*shift.train, strict=True):
        assert label_of[np.rot90(image.reshape(8, 8), -1).tobytes()] == label


def test_the_seed_decides_and_symmetric_scale_spans_minus_one_to_one():
    first, same, other = (digits_domain_shift(**SIZES, random_state=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.train.x, same.train.x)
    assert not np.array_equal(first.train.y, other.train.y)
    symmetric = digits_domain_shift(**SIZES, scale="symmetric", random_state=0)
    np.testing.assert_array_equal(symmetric.test.x, 2 * first.test.x - 1)


@pytest.mark.parametrize("change", [{"n_test": 198}, {"n_train": -1}])
def test_impossible_sizes_are_refused(change):
    with pytest.raises(ValueError, match="sum to at most 1797"):
        digits_domain_shift(**SIZES | change, random_state=0)
