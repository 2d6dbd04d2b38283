"""Which sample lacks what: one fixed table for all splits (3.9)."""

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from subspan.errors import MissingExtra

if TYPE_CHECKING:
    from pandas import DataFrame


def missing_table(
    ids: Sequence[Hashable],
    *,
    kind: str,
    missing_rate: float,
    seed: int,
    modalities: Sequence[str] = ("text", "image"),
) -> "DataFrame":
    """A table of booleans, True where the modality is missing: a row for each id, a column for each modality.

    ``torch.tensor(table.loc[ids].to_numpy())`` is what the model takes as ``missing``; ``table.sum()`` counts them.

    Args:
        ids: samples of all splits, each once. Their order does not matter.
        kind: the modality that some samples lose, or "both": every modality is lost by an equal share of the samples,
            and no sample loses two.
        missing_rate: share of the samples that lose something, in [0, 1]; 0.7 means that 70 % of them are incomplete.
        seed: of the draw.
        modalities: the columns, in the backbone's order.

    Raises:
        ValueError: a rate outside [0, 1], an unknown kind, or an id that occurs twice.
        MissingExtra: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra("missing tables need pandas: pip install 'subspan[tune]'") from error
    if not 0 <= missing_rate <= 1:
        raise ValueError(f"missing_rate must lie in [0, 1], got {missing_rate}")
    if kind not in (*modalities, "both"):
        raise ValueError(f"kind must be one of {', '.join(modalities)} or both, got {kind!r}")
    ids = list(ids)
    if len(set(ids)) < len(ids):
        raise ValueError("ids must be distinct: one occurs twice")
    losing = list(modalities) if kind == "both" else [kind]
    # Plain int(n * rate) would lose one of 29 samples in 100 to rounding.
    each = math.floor(len(ids) * missing_rate / len(losing) + 1e-9)
    order = sorted(range(len(ids)), key=lambda row: str(ids[row]))
    drawn = np.random.default_rng(seed).permutation(order)
    missing = np.zeros((len(ids), len(modalities)), dtype=bool)
    for place, name in enumerate(losing):
        missing[drawn[place * each : (place + 1) * each], list(modalities).index(name)] = True
    return pd.DataFrame(missing, index=pd.Index(ids, name="id"), columns=list(modalities))
