"""The optimisers a run can name."""

import torch

from subspan.tune.part import Part, Run


class AdamW(Part):
    """torch's AdamW on every trainable parameter."""

    def optimizer(self, run: Run) -> torch.optim.Optimizer:
        trainable = [p for p in run.model.parameters() if p.requires_grad]
        run.note("optimiser", name="AdamW", lr=run.config.lr)
        return torch.optim.AdamW(trainable, lr=run.config.lr, weight_decay=run.config.weight_decay)


class Muon(Part):
    """Muon on the factors, AdamW on what is no matrix (heads, magnitudes)."""

    def optimizer(self, run: Run) -> torch.optim.Optimizer:
        from subspan.optim import MuonAdamW, build_muon_groups

        groups = build_muon_groups(run.model, lr=run.config.lr, weight_decay=run.config.weight_decay)
        run.note("optimiser", name="Muon (factors) and AdamW (the rest)", lr=run.config.lr)
        return MuonAdamW(groups)
