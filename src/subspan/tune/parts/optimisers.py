"""The optimisers a run can name."""

from typing import Any

import torch

from subspan.tune.part import Part, Run


class AdamW(Part):
    """torch's AdamW on every trainable parameter."""

    def optimizer(self, run: Run) -> torch.optim.Optimizer:
        lr = run.config.lr
        trainable = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]
        run.note("optimiser", name="AdamW", **rates(run))
        groups = heads_apart(run, [{"params": trainable, "lr": lr}])
        return torch.optim.AdamW(groups, lr=lr, weight_decay=run.config.weight_decay)


class Muon(Part):
    """Muon on the factors, AdamW on what is no matrix (heads, magnitudes)."""

    def optimizer(self, run: Run) -> torch.optim.Optimizer:
        from subspan.optim import MuonAdamW, build_muon_groups

        groups = build_muon_groups(run.model, lr=run.config.lr, weight_decay=run.config.weight_decay)
        run.note("optimiser", name="Muon (factors) and AdamW (the rest)", **rates(run))
        return MuonAdamW(heads_apart(run, groups))


def rates(run: Run) -> dict[str, float]:
    """The learning rates, for the report."""
    return {key: rate for key in ("lr", "head_lr") if (rate := getattr(run.config, key)) is not None}


def heads_apart(run: Run, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same groups of named parameters with the heads' in groups of their own, at ``head_lr``."""
    if run.config.head_lr is None:
        return groups
    split = []
    for group in groups:
        for inside, lr in ((False, group["lr"]), (True, run.config.head_lr)):
            params = [named for named in group["params"] if (".modules_to_save." in named[0]) == inside]
            split += [{**group, "params": params, "lr": lr}] if params else []
    return split
