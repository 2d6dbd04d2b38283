"""Losses, and what a trained block's mixing looks like."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from subspan.linalg import LowRank, energy_rank
from subspan.models.lrsa.attention import relative_mass
from subspan.models.lrsa.mixers import LowRankMixer, LRSAAttention, zero_invalid
from subspan.models.lrsa.operator import LRSABlock, LRSAOperator


def relative_l2(
    pred: Float[Tensor, "b n c"],
    true: Float[Tensor, "b n c"],
    valid: Bool[Tensor, "b n"] | None = None,
    mass: Float[Tensor, "b n"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over samples of |pred - true| / |true|, in float32 or better, over valid points and weighted by mass.

    Give fields in their own units: standardised ones have another norm. A true field of zeros gives infinity or NaN.
    """
    if pred.shape != true.shape:  # broadcasting would find an error of its own
        raise ValueError(f"pred has shape {tuple(pred.shape)} and true {tuple(true.shape)}: they must be the same")
    dtype = torch.promote_types(true.dtype, torch.float32)
    weight = torch.ones(true.shape[:2], dtype=dtype, device=true.device) if mass is None else mass.to(dtype)
    weight = relative_mass(weight, valid).unsqueeze(-1)
    error, size = pred.to(dtype) - true.to(dtype), true.to(dtype)
    if valid is not None:
        error, size = (x.masked_fill(~valid.unsqueeze(-1), 0) for x in (error, size))
    return ((weight * error.square()).sum((1, 2)) / (weight * size.square()).sum((1, 2))).sqrt().mean()


def relative_l2_gradient(
    pred: Float[Tensor, "b n c"], true: Float[Tensor, "b n c"], grid_shape: tuple[int, int]
) -> Float[Tensor, ""]:
    """``relative_l2`` of the forward differences on a grid; 0.1 of it is a usual addition for Darcy flow."""

    def differences(x: Tensor) -> Tensor:
        grid = x.unflatten(1, grid_shape)
        return torch.cat([grid.diff(dim=1).flatten(1, 2), grid.diff(dim=2).flatten(1, 2)], 1)

    return relative_l2(differences(pred), differences(true))


# ---------------------------------------------------------------------------------------------------------- diagnostics


def mixing_kernel(block: LRSABlock, h: Float[Tensor, "b n d"], **points: Tensor | None) -> Float[Tensor, "b h n n"]:
    """U G V of every head with frozen weights (G = I for ``LRSAAttention``), formed: N² numbers. Rows sum to one.

    ``points`` are mass, valid and pos of the block's forward. The rank, M at most, is that of one head's linear mixing:
    what happens between the latent tokens, and the block as a whole, is not linear.
    """
    if not isinstance(block.mixer, LowRankMixer):
        raise TypeError(f"{type(block.mixer).__name__} does not mix through a bottleneck")
    v, u, g = block.mixer.factors(block.norm(h), **points)
    return u @ (v if g is None else g @ v)


def spectrum(kernel: Float[Tensor, "*b n n"], k: int) -> Float[Tensor, "*b k"]:
    """The k largest singular values."""
    return torch.linalg.svdvals(kernel)[..., :k]


def effective_rank(kernel: Float[Tensor, "*b n n"], energy: float = 0.99) -> Tensor:
    """Smallest k such that the first k squared singular values hold this share of all; ``linalg.energy_rank``."""
    return energy_rank(torch.linalg.svdvals(kernel), energy)


class LayerDiagnosis(NamedTuple):
    """One block: the mean rank that holds 99 % of its heads' mixing, and how its latents read.

    ``entropy`` is that of Down's weights over that of the uniform weights on the valid points (mean; 1 is a plain
    average), ``dead`` the share of latents above 0.99 in all heads: they are averages and add nothing to each other.
    """

    rank: float
    latents: int
    entropy: float
    dead: float


@torch.no_grad()
def diagnose(
    model: LRSAOperator,
    x: Float[Tensor, "b n p"],
    f: Float[Tensor, "b n c"] | None = None,
    *,
    mass: Float[Tensor, "b n"] | None = None,
    valid: Bool[Tensor, "b n"] | None = None,
    grid_shape: tuple[int, int] | None = None,
    t: Float[Tensor, " b"] | None = None,
) -> list[LayerDiagnosis]:
    """Look at every block of an operator on data: is M, the one number that its user must choose, too large or small?

    The arguments are those of the operator's forward. When ranks are near M, try more latents; when latents are dead,
    fewer do.
    """
    points = {"mass": mass, "valid": valid, "pos": zero_invalid(x, valid)}
    count = torch.full((len(x),), x.shape[1], device=x.device) if valid is None else valid.sum(-1)
    h = model.embed(x, f, valid=valid, t=t)
    found = []
    for block in model.blocks:
        if not isinstance(block, LRSABlock) or not isinstance(block.mixer, LRSAAttention):
            raise TypeError(f"only LRSAAttention has latents to look at, got {type(block.mixer).__name__}")
        down, up, _ = block.mixer.factors(block.norm(h), **points)
        rank = energy_rank(LowRank(up, down.mT).svd().S, 0.99)
        entropy = torch.special.entr(down).sum(-1) / count.clamp(min=2).log()[:, None, None]
        found.append(
            LayerDiagnosis(
                rank.double().mean().item(),
                down.shape[-2],
                entropy.mean().item(),
                (entropy > 0.99).all(1).double().mean().item(),
            )
        )
        h = block(h, **points, grid_shape=grid_shape)
    return found
