"""Samples with different numbers of points, as one batch."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad_points(samples: Sequence[Tensor]) -> tuple[Float[Tensor, "b n *c"], Bool[Tensor, "b n"]]:
    """Stack samples (n_i, c) or masses (n_i,) with zeros behind, and say which points are real: ``valid``."""
    padded = pad_sequence(list(samples), batch_first=True)
    count = torch.tensor([len(sample) for sample in samples], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device) < count[:, None]
