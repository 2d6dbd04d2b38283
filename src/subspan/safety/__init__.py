"""Is it still aligned afterwards?"""

from typing import TYPE_CHECKING, Any

from subspan.safety.buffer_reinforce.adapters import (
    Choice,
    MergeReport,
    Scores,
    choose_merge,
    merge_reinforced,
)
from subspan.safety.buffer_reinforce.attach import buffered
from subspan.safety.buffer_reinforce.merge import output_subspace, qr_merge
from subspan.safety.buffer_reinforce.roles import adapter_digest, load_adapter, mark_role, save_adapter
from subspan.safety.buffer_reinforce.score import SafetyScores, safety_gradient_score
from subspan.safety.buffer_reinforce.stages import (
    Fit,
    Gate,
    StageReport,
    train_buffer,
    train_reinforce,
    train_user,
)
from subspan.safety.sqsd.audit import audit
from subspan.safety.sqsd.direction import Direction, Steering
from subspan.safety.sqsd.risk import SafetyRisk
from subspan.safety.sqsd.table import RiskTable

if TYPE_CHECKING:
    from subspan.safety.buffer_reinforce.callback import BufferReinforceCallback
    from subspan.safety.sqsd.drift import DriftCallback

__all__ = [
    "BufferReinforceCallback",
    "Choice",
    "Direction",
    "DriftCallback",
    "Fit",
    "Gate",
    "MergeReport",
    "RiskTable",
    "SafetyRisk",
    "SafetyScores",
    "Scores",
    "StageReport",
    "Steering",
    "adapter_digest",
    "audit",
    "buffered",
    "choose_merge",
    "load_adapter",
    "mark_role",
    "merge_reinforced",
    "output_subspace",
    "qr_merge",
    "safety_gradient_score",
    "save_adapter",
    "train_buffer",
    "train_reinforce",
    "train_user",
]


def __getattr__(name: str) -> Any:
    if name == "BufferReinforceCallback":  # imports transformers
        from subspan.safety.buffer_reinforce.callback import BufferReinforceCallback

        return BufferReinforceCallback
    if name == "DriftCallback":  # so does this
        from subspan.safety.sqsd.drift import DriftCallback

        return DriftCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
