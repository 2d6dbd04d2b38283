"""What is hidden in my data?"""

from subspan.structure.facility import Certificate, DynamicFacilityLocation, UpdateReport, guaranteed_scale
from subspan.structure.hubs import (
    IPCHD,
    JICHD,
    GGMData,
    HubDetector,
    HubSet,
    JointSubspace,
    NotIdentified,
    PooledHD,
    fit_populations,
    individual_hubs,
    intersect_hubs,
    joint_subspace,
    make_common_hub_ggm,
)

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
