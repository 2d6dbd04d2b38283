"""How a step is taken: Muon for fine-tuning and what it does to a pre-trained model; steps without a gradient."""

from typing import TYPE_CHECKING, Any

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
from subspan.optim.output_space.black_box import HttpLoss, SubprocessLoss
from subspan.optim.output_space.closed_forms import expected_truncated_square, expected_zero_one
from subspan.optim.output_space.estimate import OutputGradient, output_gradient, suggest_pairs
from subspan.optim.output_space.loss import GeometricSigma, OutputSpaceLoss, compute_loss_func
from subspan.optim.output_space.losses import metric_loss, truncated_cross_entropy, truncated_square, zero_one
from subspan.optim.output_space.noise import top_coordinates
from subspan.optim.routing import (
    Route,
    build_muon_groups,
    muon_from_peft,
    optimizer_cls_and_kwargs,
    route_parameters,
)
from subspan.optim.study import StudyConfig, Task, digits_task, finetune, pretrain, run_study
from subspan.optim.zeroth_order.algebra import (
    alignment,
    candidate_scores,
    lge,
    query_gain,
    select_directions,
    transfer_momentum,
)
from subspan.optim.zeroth_order.base import StepInfo, ZOOptimizer, replay
from subspan.optim.zeroth_order.diagnosis import LayerDiagnosis, diagnose_directions
from subspan.optim.zeroth_order.optimizers import LOZO, MeZO
from subspan.optim.zeroth_order.plus import LOZOPlus

if TYPE_CHECKING:
    from subspan.optim.output_space.classifier import ZeroOneClassifier
    from subspan.optim.zeroth_order.trainer import ZOTrainer

__all__ = [
    "LOZO",
    "BestCell",
    "Estimate",
    "GeometricSigma",
    "HttpLoss",
    "LOZOPlus",
    "LayerDiagnosis",
    "MeZO",
    "MismatchTable",
    "MuonAdamW",
    "OutputGradient",
    "OutputSpaceLoss",
    "Route",
    "StepInfo",
    "StudyConfig",
    "StudyRow",
    "SubprocessLoss",
    "Task",
    "ZOOptimizer",
    "ZOTrainer",
    "ZeroOneClassifier",
    "alignment",
    "build_muon_groups",
    "candidate_scores",
    "compute_loss_func",
    "describe",
    "diagnose_directions",
    "digits_task",
    "expected_truncated_square",
    "expected_zero_one",
    "finetune",
    "fingerprint",
    "forgetting",
    "from_torch_muon",
    "lge",
    "metric_loss",
    "mismatch_table",
    "muon_from_peft",
    "muon_scale",
    "optimizer_cls_and_kwargs",
    "output_gradient",
    "pretrain",
    "query_gain",
    "replay",
    "route_parameters",
    "run_study",
    "select_directions",
    "suggest_pairs",
    "top_coordinates",
    "transfer_momentum",
    "truncated_cross_entropy",
    "truncated_square",
    "update_strength",
    "zero_one",
]


def __getattr__(name: str) -> Any:
    if name == "ZeroOneClassifier":  # scikit-learn takes a second to import
        from subspan.optim.output_space.classifier import ZeroOneClassifier

        return ZeroOneClassifier
    if name == "ZOTrainer":  # and transformers longer
        from subspan.optim.zeroth_order.trainer import ZOTrainer

        return ZOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
