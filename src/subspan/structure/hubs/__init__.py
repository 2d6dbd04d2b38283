"""Hub variables of Gaussian graphical models, common to several populations, without estimating a graph.

JIC-HD (Joint Inverse Components for Hub Detection): Sánchez Gómez et al., ICML 2026. IPC-HD, for one population:
Sánchez Gómez, Mo, Zhao and Liu, Hub Detection in Gaussian Graphical Models, JASA 2025, arXiv 2505.23707.
"""

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
    "GGMData",
    "HubDetector",
    "HubSet",
    "JointSubspace",
    "NotIdentified",
    "PooledHD",
    "fit_populations",
    "individual_hubs",
    "intersect_hubs",
    "joint_subspace",
    "make_common_hub_ggm",
]
