"""From the float experts of a projection to what is stored: scales, placement, factors, and the residual's codes."""

import logging
import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.resize.tileq.config import TileQConfig
from subspan.resize.tileq.factors import TileFactors, tile_factorize, weighted_errors
from subspan.resize.tileq.layout import SCALE, Layout, bits_by_term, layout
from subspan.resize.tileq.moments import Moments
from subspan.resize.tileq.packing import pack
from subspan.resize.tileq.placement import candidates
from subspan.resize.tileq.quantizers import SHRINK, Codes, VectorCodes, gptq, gptvq, round_to_nearest
from subspan.resize.tileq.rotation import importance, rotate, rotate_hessian
from subspan.resize.tileq.scales import activation_scale, pooled

_log = logging.getLogger(__name__)

# Bytes of Hessians and residuals that are worked on at once.
_AT_ONCE = 2**28


@dataclass
class Fit:
    """How a projection came out.

    Attributes:
        projection: "gate", "up" or "down".
        shape: (K, q, p).
        placement: the kind that was kept.
        placement_errors: weighted error of the factors, relative, by kind of placement.
        output_error: of the compressed projection on the calibration inputs, relative to its output; None without.
            With "rtn" and "diag" as if channels were uncorrelated: they collect the Hessian's diagonal only.
        dropped: experts whose correction was an outlier.
        bits: per weight, by term.
        nbytes: of all that is stored.
    """

    projection: str
    shape: tuple[int, int, int]
    placement: str | None = None
    placement_errors: dict[str, float] = field(default_factory=dict)
    output_error: float | None = None
    dropped: list[int] = field(default_factory=list)
    bits: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def weights(self) -> int:
        """Their number."""
        return math.prod(self.shape)


def fit_factors(
    weights: Float[Tensor, "k q p"], moments: Moments, config: TileQConfig, projection: str, plan: Layout, fit: Fit
) -> TileFactors:
    """Stored factors at the placement of least weighted error."""
    k, sharing, dtype = len(weights), config.sharing(projection), getattr(torch, config.factor_dtype)

    def scales(groups: Tensor, size: int) -> Tensor:
        mean = pooled(moments.mean_abs, moments.count, groups, size)
        return activation_scale(mean, config.scale_exponent, config.scale_ratio_max)

    every, one = torch.arange(k, device=weights.device), torch.zeros(k, dtype=torch.long, device=weights.device)
    # Rows share a scale only once they are known; until then the layer's stands for it.
    common = scales(every, k) if sharing == "expert" else scales(one, 1)[one]
    total = sum(float((w * s).square().sum()) for w, s in zip(weights, common, strict=True)) or 1.0
    best: TileFactors | None = None
    for kind, cells in candidates(weights, common, plan.grid, config).items():
        cells = cells.to(weights.device)
        groups = {"expert": every, "layer": one, "row": cells[:, 0]}[sharing]
        own = scales(groups, plan.grid[0]) if sharing == "row" else common[:1] if sharing == "layer" else common
        generator = torch.Generator().manual_seed(config.seed)
        found = tile_factorize(
            weights, own, cells, plan.grid, config.rank, groups=groups, solver=config.solver, storage=dtype,
            generator=generator,
        ).stored(dtype, SCALE)  # fmt: skip
        fit.placement_errors[kind] = float(weighted_errors(weights, common, found).sum() / total) ** 0.5
        if best is None or fit.placement_errors[kind] < fit.placement_errors[str(fit.placement)]:
            best, fit.placement = found, kind
    assert best is not None
    return best


def without_outliers(
    weights: Float[Tensor, "k q p"], factors: TileFactors, limit: float, name: str, fit: Fit
) -> tuple[Float[Tensor, "k q p"], TileFactors]:
    """Residuals, and the factors without the corrections that leave values beyond the limit, or none at all."""
    dtype = torch.promote_types(weights.dtype, torch.float32)
    residual = torch.stack([w.to(dtype) - factors.correction(e) for e, w in enumerate(weights)])
    tame = residual.abs().flatten(1).amax(1) <= limit  # false for NaN
    fit.dropped = (~tame).nonzero().flatten().tolist()
    if fit.dropped:
        residual[~tame] = weights[~tame].to(dtype)
        _log.warning("%s: no correction for experts %s, it leaves outliers", name, ", ".join(map(str, fit.dropped)))
    return residual, replace(factors, kept=factors.kept & tame)


def quantized(
    residual: Float[Tensor, "k q p"], hessian: Float[Tensor, "k p p"], config: TileQConfig
) -> Codes | VectorCodes:
    """Codes of residuals that are already rotated, by the quantizer of ``config``."""
    if config.quantizer == "gptvq":
        return gptvq(residual, hessian, config.bits, config.vector_length, damping=config.damping)
    shares = SHRINK if config.clip_search or config.quantizer == "diag" else (1.0,)
    if config.quantizer == "gptq":
        return gptq(
            residual, hessian, config.bits, config.group_size, symmetric=config.symmetric, damping=config.damping,
            shares=shares,
        )  # fmt: skip
    diagonal = hessian.diagonal(dim1=-2, dim2=-1) if config.quantizer == "diag" else None
    return round_to_nearest(residual, config.bits, config.group_size, config.symmetric, shares, diagonal)


def _chunk(
    residual: Float[Tensor, "c q p"], hessian: Tensor, config: TileQConfig, plan: Layout
) -> tuple[dict[str, Tensor], Tensor]:
    """Packed codes of some experts, and tr(E H Eᵀ) of the errors E that they leave."""
    h = torch.diag_embed(hessian) if hessian.ndim == 2 else hessian
    stored: dict[str, Tensor] = {}
    if config.rotation:
        order = importance(residual, h.diagonal(dim1=-2, dim2=-1)).argsort(dim=-1, stable=True)
        residual = rotate(residual, order.unsqueeze(1), plan.first, plan.block)
        h = rotate_hessian(h, order, plan.first, plan.block)
        stored["order"] = order.to(plan.buffers["order"].dtype)
    found = quantized(residual, h, config)
    if isinstance(found, VectorCodes):
        stored |= {"codebook": found.codebook, "codebook_scale": found.scale}
        stored["codes"] = pack(found.index, config.bits * config.vector_length)
    else:
        stored |= {"codes": pack(found.codes, config.bits), "scale": found.scale}
        if "zero" in plan.buffers:
            stored["zero"] = pack(found.zero.flatten(1), config.bits)
    return stored, energy(residual - found.decode(residual.dtype), h)


def energy(w: Float[Tensor, "k q p"], hessian: Float[Tensor, "k *p"]) -> Float[Tensor, ""]:
    """sum_e tr(W_e H_e W_eᵀ), H whole or its diagonal: half the mean squared output."""
    if hessian.ndim == 2:
        return (w.square() * hessian.unsqueeze(1)).sum()
    return torch.stack([((x @ h) * x).sum() for x, h in zip(w.to(hessian.dtype), hessian, strict=True)]).sum()


def fit_projection(
    projection: str,
    weights: Float[Tensor, "k q p"],
    moments: Moments | None,
    config: TileQConfig,
    name: str = "experts",
) -> tuple[dict[str, Tensor], Fit]:
    """All that is stored for the experts of one projection.

    Args:
        projection: "gate", "up" or "down".
        weights: W_e (K x q x p).
        moments: of their inputs; None for rounding to nearest without calibration.
        config: how.
        name: of the experts, for messages.

    Raises:
        ValueError: sizes that do not fit; a quantizer that needs moments and has none, or only their diagonal.
    """
    k, q, p = weights.shape
    plan = layout(projection, k, q, p, config)
    dtype = torch.promote_types(weights.dtype, torch.float32)
    if moments is None:
        if config.calibrated:
            raise ValueError(f"the quantizer {config.quantizer!r} needs calibration data; 'rtn' does without")
        known, moments = False, Moments.blank(k, p, dtype, weights.device)
    else:
        known, moments = True, moments.filled(config.unrouted)
        if config.quantizer in ("gptq", "gptvq") and moments.hessian.ndim == 2:
            raise ValueError(f"the quantizer {config.quantizer!r} needs whole Hessians, got their diagonals")
    fit = Fit(projection, (k, q, p), nbytes=sum(b.nbytes for b in plan.buffers.values()))
    stored: dict[str, Tensor] = {}
    residual = weights.to(dtype)
    if config.rank:
        factors = fit_factors(weights, moments, config, projection, plan, fit)
        residual, factors = without_outliers(weights, factors, config.outlier_limit, f"{name}, {projection}", fit)
        missing = plan.buffers["sigma"].shape[0] - len(factors.sigma)  # a solver may find a smaller rank
        stored = {
            "U": _padded(factors.U, missing, 2), "sigma": _padded(factors.sigma, missing, 0),
            "V": _padded(factors.V, missing, 1), "inverse_scales": factors.inverse_scales,
            "cells": factors.cells.to(torch.int16), "kept": factors.kept,
        }  # fmt: skip
    residual = residual * (moments.diagonal > 0).unsqueeze(1)  # a channel that never fired says nothing
    size = max(1, _AT_ONCE // ((3 * p * p + 4 * q * p) * dtype.itemsize))
    parts, lost = [], torch.zeros((), dtype=dtype, device=weights.device)
    for r, h in zip(residual.split(size), moments.hessian.to(dtype).split(size), strict=True):
        part, off = _chunk(r, h, config, plan)
        parts.append(part)
        lost += off
    stored |= {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    if known:
        whole = float(energy(weights, moments.hessian))
        fit.output_error = (float(lost) / whole) ** 0.5 if whole > 0 else 0.0
    fit.bits = bits_by_term(plan.buffers, fit.weights)
    return stored, fit


def _padded(x: Tensor, missing: int, dim: int) -> Tensor:
    """With this many zeros more along ``dim``."""
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
