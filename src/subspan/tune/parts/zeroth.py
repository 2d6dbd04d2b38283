"""Training with forward passes only, in the memory of a forward pass."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from subspan.errors import NonFinite
from subspan.files import write_json
from subspan.tune.memory import PeakMemory
from subspan.tune.part import Part, Run
from subspan.tune.parts.optimisers import heads_apart, rates
from subspan.tune.sections import Zeroth

if TYPE_CHECKING:
    from subspan.optim import ZOOptimizer
    from subspan.tune.tasks import Batch


class ZerothOrder(Part):
    """MeZO, LOZO or LOZO+ on every trainable parameter, and what it costs beside scoring the same model."""

    logs = ("loss", "learning_rate")

    def __init__(self, name: str, options: Zeroth) -> None:
        self.name, self.options = name, options
        self.held: list[Batch] = []
        self.peak = PeakMemory()
        self.inference: float | None = None

    def prepare_adapter(self, run: Run) -> None:
        self.peak.reset()  # the next thing that happens is the scoring of held-out rows

    def optimizer(self, run: Run) -> "ZOOptimizer":
        from subspan.optim import LOZO, LOZOPlus, MeZO

        self.inference = self.peak.mebibytes()
        self.peak.reset()
        wanted, config = self.options, run.config
        trainable = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = []
        for decay, members in (
            (config.weight_decay, [(name, p) for name, p in trainable if p.ndim > 1]),
            (0.0, [(name, p) for name, p in trainable if p.ndim < 2]),
        ):
            groups += [{"params": members, "lr": config.lr, "weight_decay": decay}] if members else []
        groups = heads_apart(run, groups)
        common: dict[str, Any] = {"lr": config.lr, "eps": wanted.eps, "seed": config.seed, "model": run.model}
        low_rank = {"interval": wanted.interval, "momentum": wanted.momentum}
        rank = wanted.rank or (2 if self.name == "lozo" else 4)
        if wanted.rank is None and config.adapter is not None:
            # In a factor of r rows a direction of r / 2 columns or more would be drawn densely.
            rank = min(rank, (config.adapter.r - 1) // 2)
        if self.name == "mezo":
            self.made: ZOOptimizer = MeZO(groups, **common)
        elif self.name == "lozo":
            self.made = LOZO(groups, rank=rank, **low_rank, **common)
        else:
            chosen = {"candidates": wanted.candidates, "threshold": wanted.threshold}
            self.made = LOZOPlus(groups, max_rank=rank, **chosen, **low_rank, **common)
        run.note("optimiser", name=self.name, eps=wanted.eps, **rates(run))
        if self.name != "mezo":
            run.note("optimiser", rank=rank)
        return self.made

    def step(self, run: Run, model: nn.Module, batch: "Batch") -> Tensor:
        device = batch["input_ids"].device
        self.held.append(batch)
        if len(self.held) < run.config.accumulate:
            return torch.zeros((), device=device)
        held, self.held = self.held, []

        def closure() -> Tensor:
            losses = [run.task.losses(model, part) for part in held]
            return torch.stack([x.total.sum() for x in losses]).sum() / sum(x.count.sum() for x in losses)

        try:
            loss = self.made.measure(closure).loss
        except NonFinite:
            loss = torch.nan  # the trainer stops, and says which rows these were
        return torch.tensor(loss, device=device)

    def figures(self) -> dict[str, float]:
        return {"queries": self.made.total_queries}

    def save(self, folder: Path) -> None:
        write_json(folder / "inference.json", {"mebibytes": self.inference})

    def load(self, folder: Path) -> None:
        self.inference = json.loads((folder / "inference.json").read_text(encoding="utf-8"))["mebibytes"]

    def finish(self, run: Run) -> None:
        self.made.merge()
        run.note("optimiser", queries=self.made.total_queries)
        training = self.peak.mebibytes()
        if training is not None and self.inference:
            run.note(
                "memory",
                peak_while_scoring_mib=round(self.inference),
                peak_while_training_mib=round(training),
                ratio=round(training / self.inference, 3),
            )
