"""Scores of a model that learns tasks one after the other."""

from collections.abc import Sequence
from typing import Literal

import numpy as np


def cl_metrics(
    scores: Sequence[Sequence[float]] | np.ndarray,
    variant: Literal["standard", "trace", "xtail"] = "standard",
    zero_shot: Sequence[float] | np.ndarray | None = None,
) -> dict[str, float]:
    """Summaries of the matrix R, where ``R[i][j]`` is the score on task j after training on task i (both in order).

    * ``last``: mean over tasks after the last (also called OP); ``average``: mean over the whole matrix.
    * ``just_learned``: mean of the diagonal.
    * ``transfer``: mean over tasks of the scores *before* the task was trained.
    * ``bwt``: mean over all but the last task of ``R[T-1][j] - R[j][j]``; ``forgetting`` is its negative.
    * with ``zero_shot``, the scores of the base model: ``zero_shot``, their mean, and ``retention``, ``transfer`` minus
      the mean zero-shot score of the same tasks, that is, what training on others did to tasks not yet seen.

    Figures that need two tasks are NaN for one.

    Args:
        scores: T x T.
        variant: "trace" counts no gain as backward transfer, divides by all T tasks and states it as a positive loss
            (the tables of TRACE); "xtail" leaves scores of exactly zero out of ``transfer`` (the script of X-TAIL).
        zero_shot: T scores.

    Raises:
        ValueError: the matrix is not square, or ``zero_shot`` has another length.
    """
    R = np.asarray(scores, dtype=float)
    if R.ndim != 2 or R.shape[0] != R.shape[1] or len(R) == 0:
        raise ValueError(f"scores must be a square matrix (task trained x task scored), got shape {R.shape}")
    if variant not in ("standard", "trace", "xtail"):
        raise ValueError(f"variant={variant!r} is not one of standard, trace, xtail")
    T, nan = len(R), float("nan")
    change = R[-1] - R.diagonal()
    if variant == "trace":
        bwt = abs(float(np.minimum(change, 0.0).mean()))
        forgetting = bwt
    else:
        bwt = float(change[:-1].mean()) if T > 1 else nan
        forgetting = -bwt
    before = [R[:j, j] for j in range(1, T)]
    if variant == "xtail":
        before = [column[column != 0] for column in before]
        before = [column for column in before if len(column)]
    out = {
        "last": float(R[-1].mean()),
        "average": float(R.mean()),
        "just_learned": float(R.diagonal().mean()),
        "transfer": float(np.mean([column.mean() for column in before])) if before else nan,
        "bwt": bwt,
        "forgetting": forgetting,
    }
    if zero_shot is not None:
        base = np.asarray(zero_shot, dtype=float)
        if base.shape != (T,):
            raise ValueError(f"zero_shot must hold one score for each of {T} tasks, got shape {base.shape}")
        out["zero_shot"] = float(base.mean())
        out["retention"] = out["transfer"] - float(base[1:].mean()) if T > 1 else nan
    return out
