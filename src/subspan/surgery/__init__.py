"""The only room that touches module trees: finding layers, reading and writing weights, factor pairs, statistics."""

from subspan.surgery.factors import (
    BaseShift,
    FactorPair,
    base_fingerprint,
    check_base,
    export_plain_lora,
    factor_pairs,
    shift_base,
)
from subspan.surgery.layers import (
    Owned,
    base_layer,
    find_targets,
    is_matrix_layer,
    matrix_layers,
    owned_parameters,
    packed_rows,
    role_of,
    weight_matrix,
    write_weight,
)

__all__ = [
    "BaseShift",
    "FactorPair",
    "Owned",
    "base_fingerprint",
    "base_layer",
    "check_base",
    "export_plain_lora",
    "factor_pairs",
    "find_targets",
    "is_matrix_layer",
    "matrix_layers",
    "owned_parameters",
    "packed_rows",
    "role_of",
    "shift_base",
    "weight_matrix",
    "write_weight",
]
