"""How a step is taken: Muon for fine-tuning and what it does to a pre-trained model; steps without a gradient."""

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
from subspan.optim.zeroth_order.algebra import alignment, query_gain
from subspan.optim.zeroth_order.optimizers import LOZO, MeZO, StepInfo, ZOOptimizer, replay
from subspan.optim.zeroth_order.plus import LOZOPlus

__all__ = [
    "LOZO",
    "BestCell",
    "Estimate",
    "LOZOPlus",
    "MeZO",
    "MismatchTable",
    "MuonAdamW",
    "Route",
    "StepInfo",
    "StudyConfig",
    "StudyRow",
    "Task",
    "ZOOptimizer",
    "alignment",
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
    "query_gain",
    "replay",
    "route_parameters",
    "run_study",
    "update_strength",
]
