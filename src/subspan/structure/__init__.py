"""What is hidden in my data?"""

from subspan.structure.facility.estimator import DynamicFacilityLocation, UpdateReport
from subspan.structure.facility.levels import Certificate, guaranteed_scale
from subspan.structure.hubs.estimators import (
    IPCHD,
    JICHD,
    HubDetector,
    PooledHD,
    fit_populations,
    individual_hubs,
    intersect_hubs,
)
from subspan.structure.hubs.minimax import JointSubspace, NotIdentified, joint_subspace
from subspan.structure.hubs.simulate import GGMData, HubSet, make_common_hub_ggm

__all__ = [
    "IPCHD",
    "JICHD",
    "Certificate",
    "DynamicFacilityLocation",
    "GGMData",
    "HubDetector",
    "HubSet",
    "JointSubspace",
    "NotIdentified",
    "PooledHD",
    "UpdateReport",
    "fit_populations",
    "guaranteed_scale",
    "individual_hubs",
    "intersect_hubs",
    "joint_subspace",
    "make_common_hub_ggm",
]
