"""Dynamic facility location: prototypes that stay good and stable while clients come and go."""

from subspan.structure.facility import reference
from subspan.structure.facility.estimator import DynamicFacilityLocation, UpdateReport
from subspan.structure.facility.levels import Certificate, guaranteed_scale

__all__ = ["Certificate", "DynamicFacilityLocation", "UpdateReport", "guaranteed_scale", "reference"]
