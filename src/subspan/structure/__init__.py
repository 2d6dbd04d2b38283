"""What is hidden in my data?"""

from subspan.structure.facility.estimator import DynamicFacilityLocation, UpdateReport
from subspan.structure.facility.levels import Certificate, guaranteed_scale
from subspan.structure.homophily.adjust import AdjustReport, HomophilyAdjust, adjust_homophily
from subspan.structure.homophily.edges import node_homophily
from subspan.structure.homophily.estimator import PSAHS, homophily_report
from subspan.structure.homophily.networks import DirGCN
from subspan.structure.homophily.report import HomophilyReport
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
    "PSAHS",
    "AdjustReport",
    "Certificate",
    "DirGCN",
    "DynamicFacilityLocation",
    "GGMData",
    "HomophilyAdjust",
    "HomophilyReport",
    "HubDetector",
    "HubSet",
    "JointSubspace",
    "NotIdentified",
    "PooledHD",
    "UpdateReport",
    "adjust_homophily",
    "fit_populations",
    "guaranteed_scale",
    "homophily_report",
    "individual_hubs",
    "intersect_hubs",
    "joint_subspace",
    "make_common_hub_ggm",
    "node_homophily",
]
