"""Trials of different length as rows, and the history of each row within its own trial."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


class Trials(NamedTuple):
    """Rows of all trials, the trials' lengths, and the form in which they came."""

    rows: Any
    lengths: list[int]
    form: Literal["flat", "stacked", "list"]

    def restore(self, rows: np.ndarray) -> Any:
        """Values of the rows in the form the trials came in."""
        if self.form == "flat":
            return rows
        if self.form == "stacked":
            return rows.reshape(len(self.lengths), -1, rows.shape[-1])
        return np.split(rows, np.cumsum(self.lengths)[:-1])

    def locate(self, row: int) -> str:
        """'trial 2, bin 5'."""
        ends = np.cumsum(self.lengths)
        trial = int(np.searchsorted(ends, row, side="right"))
        return f"trial {trial}, bin {row - int(ends[trial]) + self.lengths[trial]}"


def to_trials(X: Any, trial_lengths: Sequence[int] | None = None, name: str = "X") -> Trials:
    """(T, N), (trials, T, N), a list of (T_i, N), or rows (sum T_i, N) with ``trial_lengths``.

    Raises:
        ValueError: trial lengths that do not fit, or beside an X that has trials of its own.
    """
    if isinstance(X, (list, tuple)) and len(X) and all(np.ndim(trial) == 2 for trial in X):
        arrays = [np.asarray(trial) for trial in X]
        if len({array.shape[1] for array in arrays}) > 1:
            raise ValueError(f"the trials of {name} have different numbers of channels")
        found = Trials(np.concatenate(arrays), [len(array) for array in arrays], "list")
    elif getattr(X, "ndim", 0) == 3:
        array = np.asarray(X)
        found = Trials(array.reshape(-1, array.shape[-1]), [array.shape[1]] * len(array), "stacked")
    else:
        shape = getattr(X, "shape", None) or np.asarray(X).shape
        lengths = shape[:1] if trial_lengths is None else trial_lengths
        return Trials(X, [int(length) for length in lengths], "flat")
    if trial_lengths is not None:
        raise ValueError(f"trial_lengths= is for rows (T, N); this {name} has trials of its own")
    return found


def lag_index(lengths: Sequence[int], lags: int, *, edge: bool = False) -> Int[Tensor, "n L"]:
    """For each row the rows 1..L bins before it; before its trial's start row n, or with ``edge`` the trial's first.

    So no history crosses from one trial into another. The table it indexes has a row n of zeros.
    """
    position = torch.cat([torch.arange(length) for length in lengths])
    start = torch.arange(len(position)) - position
    lag = torch.arange(1, lags + 1)
    inside = position.unsqueeze(1) >= lag
    outside = start.unsqueeze(1) if edge else torch.full((1, 1), len(position))
    return torch.where(inside, torch.arange(len(position)).unsqueeze(1) - lag, outside)


def convolve(
    table: Float[Tensor, "rows N"], index: Int[Tensor, "*b L"], psi: Float[Tensor, "*s L"]
) -> Float[Tensor, "*b N"]:
    """u = sum_l psi_l h(t - l): ``table`` holds h = sigma(x) and a last row of zeros, psi_1 the most recent bin's."""
    weights = psi.reshape(*psi.shape[:-1], *[1] * (index.ndim - psi.ndim), psi.shape[-1])
    u = torch.zeros((), dtype=table.dtype, device=table.device)
    for l in range(psi.shape[-1]):
        u = u + weights[..., l, None] * table[index[..., l]]
    return u


def history_kernel(kernel: Any, lags: int) -> Float[Tensor, "L"]:
    """The weights psi of the last L bins, the most recent first.

    "exp": neighbouring lags differ by a factor e (the authors'); "uniform"; or the weights themselves.

    Raises:
        ValueError: weights that are negative, of another number, or do not sum to 1.
    """
    if isinstance(kernel, str):
        if kernel not in ("exp", "uniform"):
            raise ValueError(f"kernel must be 'exp', 'uniform' or {lags} weights, got {kernel!r}")
        exponent = -torch.arange(lags, dtype=torch.float64) * (kernel == "exp")
        return torch.softmax(exponent, 0).float()
    psi = torch.as_tensor(np.asarray(kernel, dtype=np.float64))
    if psi.shape != (lags,):
        raise ValueError(f"kernel has shape {tuple(psi.shape)}, but lags={lags} needs {lags} weights")
    if not (psi >= 0).all() or abs(float(psi.sum()) - 1) > 1e-6:
        raise ValueError(f"kernel must be weights >= 0 that sum to 1, got {psi.tolist()}; try kernel / kernel.sum()")
    return psi.float()
