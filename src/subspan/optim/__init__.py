"""How a step is taken: Muon for fine-tuning, and what it does to a pre-trained model."""

from subspan.optim.interop import from_torch_muon
from subspan.optim.muon import MuonAdamW, muon_scale
from subspan.optim.routing import (
    Route,
    build_muon_groups,
    muon_from_peft,
    optimizer_cls_and_kwargs,
    route_parameters,
)

__all__ = [
    "MuonAdamW",
    "Route",
    "build_muon_groups",
    "from_torch_muon",
    "muon_from_peft",
    "muon_scale",
    "optimizer_cls_and_kwargs",
    "route_parameters",
]
