"""How a step is taken: Muon for fine-tuning, and what it does to a pre-trained model."""

from subspan.optim.interop import from_torch_muon
from subspan.optim.mismatch import (
    BestCell,
    Estimate,
    MismatchTable,
    StudyRow,
    describe,
    fingerprint,
    forgetting,
    mismatch_table,
    update_strength,
)
from subspan.optim.muon import MuonAdamW, muon_scale
from subspan.optim.routing import (
    Route,
    build_muon_groups,
    muon_from_peft,
    optimizer_cls_and_kwargs,
    route_parameters,
)
from subspan.optim.study import StudyConfig, Task, digits_task, finetune, pretrain, run_study

__all__ = [
    "BestCell",
    "Estimate",
    "MismatchTable",
    "MuonAdamW",
    "Route",
    "StudyConfig",
    "StudyRow",
    "Task",
    "build_muon_groups",
    "describe",
    "digits_task",
    "finetune",
    "fingerprint",
    "forgetting",
    "from_torch_muon",
    "mismatch_table",
    "muon_from_peft",
    "muon_scale",
    "optimizer_cls_and_kwargs",
    "pretrain",
    "route_parameters",
    "run_study",
    "update_strength",
]
