"""Generated problems whose right answer is known."""

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor


class MisalignedMap(NamedTuple):
    """A pretrained linear map, the map to reach, and noisy samples of the latter: ``outputs ~ inputs @ target.T``."""

    weight: Float64[Tensor, "m n"]
    target: Float64[Tensor, "m n"]
    inputs: Float64[Tensor, "N n"]
    outputs: Float64[Tensor, "N m"]


def misaligned_linear_map(
    *, n_in: int = 64, n_out: int = 48, rank: int = 4, n_samples: int = 2000, generator: torch.Generator
) -> MisalignedMap:
    """A map that is strong where the data is weak, and must change where the data is strong (float64).

    With orthonormal Q (n_in x n_in), the inputs have variance 1 along the first eight columns of Q and 0.01 along the
    others. The weight has singular value 10 along the last eight columns of Q and 0.5 along the columns before them.
    The target adds 2 O (Q_8 c)^T, of the given rank, with orthonormal O and c; outputs carry noise of deviation 0.05.
    A start from the weight's leading singular directions therefore looks away from all there is to learn.

    Source: the motivating case of "Learning in the Fisher Subspace" (Feng, Lin & Kao, ICML 2026), in our construction.

    Raises:
        ValueError: sizes for which these directions do not exist.
    """
    strong = 8
    if not (rank <= strong and strong <= n_out <= n_in and 2 * strong <= n_in):
        raise ValueError(
            f"needs rank <= {strong} <= n_out <= n_in and n_in >= {2 * strong}; "
            f"got rank {rank}, n_out {n_out}, n_in {n_in}"
        )

    def orthonormal(rows: int, columns: int) -> Tensor:
        return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=generator)).Q

    directions = orthonormal(n_in, n_in)
    singular = torch.full((n_out,), 0.5, dtype=torch.float64)
    singular[-strong:] = 10.0
    # n_out input directions: the first ones, which hold the data, and the last eight
    right = torch.cat([directions[:, : n_out - strong], directions[:, -strong:]], dim=1)
    weight = orthonormal(n_out, n_out) * singular @ right.T
    target = weight + 2.0 * orthonormal(n_out, rank) @ (directions[:, :strong] @ orthonormal(strong, rank)).T

    deviation = torch.full((n_in,), 0.1, dtype=torch.float64)
    deviation[:strong] = 1.0
    draws = torch.randn(n_samples, n_in, dtype=torch.float64, generator=generator)
    inputs = draws * deviation @ directions.T
    noise = torch.randn(n_samples, n_out, dtype=torch.float64, generator=generator)
    return MisalignedMap(weight, target, inputs, inputs @ target.T + 0.05 * noise)
