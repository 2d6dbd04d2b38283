"""Small image sets that need no network, and the domain shift built from one of them."""

import gzip
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from subspan.data.assets import asset_path


class Images(NamedTuple):
    """Images with values in [0, 1] and their classes."""

    images: Float32[np.ndarray, "n h w"]
    labels: Int64[np.ndarray, " n"]


def mnist5k() -> Images:
    """5,000 MNIST digits of 28 x 28 pixels, 500 per class and sorted by class, from the asset ``mnist5k``.

    Raises:
        MissingAsset: the asset is not installed.
    """
    with gzip.open(asset_path("mnist5k"), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    pixels = table[:, :-1].reshape(-1, 28, 28).astype(np.float32) / np.float32(255)
    return Images(pixels, table[:, -1].astype(np.int64))


def digits() -> Images:
    """scikit-learn's 1,797 digits of 8 x 8 pixels (grey levels 0 to 16, here divided by 16)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return Images((data.images / 16).astype(np.float32), data.target.astype(np.int64))


class Part(NamedTuple):
    """Flattened images ``x`` and classes ``y``."""

    x: Float32[np.ndarray, "n 64"]
    y: Int64[np.ndarray, " n"]


class DomainShift(NamedTuple):
    """Upright digits to pretrain on, and other digits rotated by 90 degrees to adapt to.

    ``source_test`` holds the test digits upright: what the model still knows of the source domain.
    """

    pretrain: Part
    train: Part
    validation: Part
    test: Part
    source_test: Part


def digits_domain_shift(
    *,
    n_pretrain: int,
    n_train: int,
    n_validation: int,
    n_test: int,
    scale: Literal["unit", "symmetric"] = "unit",
    random_state: int,
) -> DomainShift:
    """Disjoint parts of scikit-learn's digits, all but ``pretrain`` and ``source_test`` rotated by 90 degrees.

    Args:
        n_pretrain: upright digits.
        n_train: rotated digits to adapt on.
        n_validation: rotated digits to choose settings on; 0 gives an empty part.
        n_test: rotated digits to report on.
        scale: pixel values in [0, 1] (``"unit"``) or [-1, 1] (``"symmetric"``).
        random_state: seed of the split.

    Raises:
        ValueError: a negative size, or more digits than the 1,797 there are.
    """
    sizes = [n_pretrain, n_train, n_validation, n_test]
    images, labels = digits()
    if min(sizes) < 0 or sum(sizes) > len(labels):
        raise ValueError(f"sizes {sizes} must be 0 or more and sum to at most {len(labels)}, got {sum(sizes)}")
    if scale == "symmetric":
        images = 2 * images - 1
    rotated = np.rot90(images, axes=(1, 2))
    order = np.random.default_rng(random_state).permutation(len(labels))
    rows = np.split(order, np.cumsum(sizes))[:4]

    def part(source: np.ndarray, chosen: np.ndarray) -> Part:
        return Part(source[chosen].reshape(len(chosen), 64), labels[chosen])

    pretrain, train, validation, test = rows
    return DomainShift(
        pretrain=part(images, pretrain),
        train=part(rotated, train),
        validation=part(rotated, validation),
        test=part(rotated, test),
        source_test=part(images, test),
    )
