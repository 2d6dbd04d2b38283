"""Rows to tokens and batches to losses, apart from training."""

import pytest
import torch

from subspan.tune.config import Config
from subspan.tune.loading import load_model, load_task
from subspan.tune.tasks import by_length, trimmed


@pytest.mark.parametrize("task", ["classification", "causal-lm"])
def test_sorting_and_trimming_a_padded_batch_changes_no_rows_loss(settings, task):
    config = Config.model_validate(settings(task))
    kind, rows = load_task(config)
    model = load_model(config, rows.labels).double().eval()
    batch = kind.collate(rows.train[:12])
    whole = kind.losses(model, batch).per_row()
    ordered = by_length(batch)
    lengths = ordered["attention_mask"].sum(1)
    assert lengths.tolist() == sorted(batch["attention_mask"].sum(1).tolist())
    assert lengths[0] < lengths[-1]
    short = trimmed({k: v[:3] for k, v in ordered.items()})
    assert short["input_ids"].shape[1] == lengths[2] < batch["input_ids"].shape[1]
    parts = [trimmed({k: v[i : i + 3] for k, v in ordered.items()}) for i in range(0, 12, 3)]
    split = torch.cat([kind.losses(model, part).per_row() for part in parts])
    place = batch["attention_mask"].sum(1).argsort(stable=True)
    torch.testing.assert_close(split, whole[place])
