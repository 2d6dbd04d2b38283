"""What an operator accepts: shapes and types always, values unless asked not to look."""

import math
from typing import Any

import torch
from torch import Tensor


def check_arguments(
    model: Any,
    x: Tensor,
    f: Tensor | None,
    mass: Tensor | None,
    valid: Tensor | None,
    grid_shape: tuple[int, int] | None,
    query_x: Tensor | None,
    query_f: Tensor | None,
    t: Tensor | None,
) -> None:
    """Shapes and types, which cost nothing and which a compiler sees through."""
    for name, value in (("x", x), ("f", f), ("mass", mass), ("query_x", query_x), ("query_f", query_f), ("t", t)):
        if value is not None and not value.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {value.dtype}: convert it, for instance with .float()")
    if valid is not None and valid.dtype != torch.bool:
        raise TypeError(f"valid must be boolean, got {valid.dtype}: convert it with .bool()")
    _points("x", x, model.coord_dim)
    _function("f", f, x, model.in_channels, model.in_channels > 0)
    for name, value in (("mass", mass), ("valid", valid)):
        if value is not None and value.shape != x.shape[:2]:
            raise ValueError(f"{name} needs one entry per point, {_size(x[..., 0])}, got {_size(value)}")
    if grid_shape is not None and (min(grid_shape) < 1 or math.prod(grid_shape) != x.shape[1]):
        raise ValueError(f"a grid of shape {tuple(grid_shape)} holds {math.prod(grid_shape)} points, not {x.shape[1]}")
    if query_x is not None:
        _points("query_x", query_x, model.coord_dim)
        if query_x.shape[0] != x.shape[0]:
            raise ValueError(f"query_x is for {query_x.shape[0]} samples and x for {x.shape[0]}")
        _function("query_f", query_f, query_x, model.in_channels, model.query_lift is None and model.in_channels > 0)
        if grid_shape is not None:
            raise ValueError("query points are no part of a grid: give no grid_shape, and build with point='ffn'")
    elif query_f is not None:
        raise ValueError("query_f comes with query_x")
    if (t is None) != (model.time_lift is None):
        raise ValueError("times t are for an operator built with time=True" if t is not None else "give times t=")
    if t is not None and t.shape != x.shape[:1]:
        raise ValueError(f"t needs one time per sample, ({x.shape[0]},), got {_size(t)}")


def _points(name: str, x: Tensor, axes: int) -> None:
    if x.ndim != 3 or x.shape[-1] != axes or not x.shape[1]:
        raise ValueError(f"{name} must have shape (samples, points, {axes}) with one point at least, got {_size(x)}")


def _function(name: str, f: Tensor | None, x: Tensor, channels: int, needed: bool) -> None:
    if f is None:
        if needed:
            hint = "; or build with blind_queries=True" if name == "query_f" else ""
            raise ValueError(f"{name} is missing: the operator has {channels} input channels{hint}")
    elif not channels:
        raise ValueError(f"{name} was given, but the operator has no input channels")
    elif f.shape != (*x.shape[:2], channels):
        raise ValueError(f"{name} must have shape {(*x.shape[:2], channels)}, got {_size(f)}")


def check_values(
    x: Tensor,
    f: Tensor | None,
    mass: Tensor | None,
    valid: Tensor | None,
    query_x: Tensor | None,
    query_f: Tensor | None,
    t: Tensor | None,
) -> None:
    """Values, which cost a pass over the data and a wait for the device."""
    if valid is not None and not valid.any(-1).all():
        raise ValueError(f"sample {int(valid.any(-1).int().argmin())} has no valid point")
    if mass is not None:
        _name_first("mass must be positive and finite", (mass > 0) & mass.isfinite(), valid)
    for name, value, where in (
        ("x", x, valid),
        ("f", f, valid),
        ("query_x", query_x, None),
        ("query_f", query_f, None),
    ):
        if value is not None:
            _name_first(f"{name} must be finite", value.isfinite().all(-1), where)
    if t is not None:
        _name_first("t must be finite", t.isfinite()[:, None], None)


def _name_first(rule: str, good: Tensor, valid: Tensor | None) -> None:
    bad = ~good if valid is None else ~good & valid
    if bad.any():
        sample, point = bad.nonzero()[0].tolist()
        raise ValueError(f"{rule}, and is not in sample {sample} at point {point}")


def _size(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
