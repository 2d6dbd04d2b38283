"""How the experts of a model are compressed."""

import math
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

Quantizer = Literal["gptq", "gptvq", "diag", "rtn"]
Sharing = Literal["expert", "row", "layer"]
Features = Literal["projector", "sketch", "vectors"]
Placement = Literal["best", "clusters", "index"]
Assignment = Literal["greedy", "hungarian"]
Solver = Literal["randomized", "svd", "r1svd"]
FactorDtype = Literal["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float16", "float32"]
Unrouted = Literal["layer_mean", "counterfactual", "identity"]

BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class TileQConfig:
    """Bits, correction, rotation and calibration of compressed experts.

    Attributes:
        bits: of a residual weight: 2, 3, 4 or 8.
        rank: of the tiled matrix of all experts of a projection (more than it has is cut down); 0 for no correction.
        grid: (rows, columns) of the experts; "square", or "auto": the shape that stores fewest numbers.
        quantizer: of the residual: "gptq"; "gptvq", vectors from a codebook; "diag", the scale of each group that the
            diagonal Hessian likes best; "rtn", rounding to nearest, which needs no calibration.
        group_size: consecutive weights of a row that share a scale; must divide the expert's input width.
        symmetric: the grid of values has no zero points.
        clip_search: try narrower ranges for each group and keep the one of least squared error ("diag" always does).
        scale_exponent: t of the activation scale m^t; 0 for none.
        scale_ratio_max: largest ratio of two scales of an expert.
        scale_sharing: of gate and up, whose projections fuse when their scales are shared by a grid row or the layer.
        down_scale_sharing: of down, whose inputs differ by expert anyway.
        placement: of experts on the grid: the "best" of all kinds of features and the index order, by "clusters" of
            ``features`` alone, or in "index" order.
        features: what is clustered, where ``placement`` is "clusters".
        assignment: of experts to cells, when a group has more experts than cells.
        solver: of the tiled singular value decomposition.
        factor_dtype: of the stored factors.
        outlier_limit: an expert whose corrected weights exceed it keeps no correction.
        rotation: permute the columns by importance and rotate all but the first by Hadamard blocks.
        rotation_block: longest such block.
        identity_block: columns that are not rotated.
        damping: added to the Hessian's diagonal, relative to its mean.
        unrouted: the Hessian of an expert that no token of the calibration chose: the mean of the "layer", that of
            the layer's tokens sent through it ("counterfactual"), or the "identity".
        seed: of everything random.
    """

    bits: int = 2
    rank: int = 32
    grid: tuple[int, int] | Literal["auto", "square"] = "auto"
    quantizer: Quantizer = "gptq"
    group_size: int = 128
    symmetric: bool = False
    clip_search: bool = False
    scale_exponent: float = 2.4
    scale_ratio_max: float = 1e5
    scale_sharing: Sharing = "layer"
    down_scale_sharing: Sharing = "expert"
    placement: Placement = "best"
    features: Features = "projector"
    assignment: Assignment = "greedy"
    solver: Solver = "randomized"
    factor_dtype: FactorDtype = "float8_e4m3fn"
    outlier_limit: float = 60.0
    rotation: bool = True
    rotation_block: int = 256
    identity_block: int = 256
    damping: float = 0.01
    unrouted: Unrouted = "layer_mean"
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = {int: Integral, float: Real, bool: bool}
        for name, field in self.__dataclass_fields__.items():
            if field.type in kinds and not isinstance(getattr(self, name), kinds[field.type]):
                raise ValueError(f"{name} must be of type {field.type.__name__}, got {getattr(self, name)!r}")
            known = get_args(field.type)
            if known and all(isinstance(k, str) for k in known) and getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {self.bits}")
        if self.rank < 0:
            raise ValueError(f"rank must be at least 1 (or 0 for no correction), got {self.rank}")
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        if self.grid not in ("auto", "square") and not (
            isinstance(self.grid, tuple)
            and len(self.grid) == 2
            and all(isinstance(n, int) and n > 0 for n in self.grid)
        ):
            raise ValueError(f"grid must be 'auto', 'square' or (rows, columns), got {self.grid!r}")
        if (n := self.rotation_block) < 1 or n & (n - 1):
            raise ValueError(f"rotation_block must be a power of two, got {n}")
        if self.identity_block < 0:
            raise ValueError(f"identity_block must not be negative, got {self.identity_block}")
        for name in ("scale_exponent", "damping"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not self.scale_ratio_max > 1:
            raise ValueError(f"scale_ratio_max must exceed 1, got {self.scale_ratio_max}")
        if not self.outlier_limit > 0:
            raise ValueError(f"outlier_limit must be positive, got {self.outlier_limit}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2^32), got {self.seed}")

    @property
    def calibrated(self) -> bool:
        """Whether the residual's quantizer needs calibration data."""
        return self.quantizer != "rtn"

    @property
    def vector_length(self) -> int:
        """Weights that share a code: 1, or for "gptvq" as many as keep the codebook within 256 entries."""
        return max(1, 8 // self.bits) if self.quantizer == "gptvq" else 1

    def sharing(self, projection: str) -> Sharing:
        return self.down_scale_sharing if projection == "down" else self.scale_sharing

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TileQConfig":
        grid = values.get("grid", "auto")
        return cls(**{**values, "grid": tuple(grid) if isinstance(grid, list) else grid})
