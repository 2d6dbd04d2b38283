"""The corrections of all chosen experts of a batch of tokens, without a pair of thin products per expert."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subspan.resize.tileq.factors import TileFactors

Path = Literal["auto", "dense", "grouped", "reference"]

# Up to so many rows times grid rows one product with every row's factor is quicker than one product per grid row.
_FEW = 128


def lowrank_moe(
    x: Float[Tensor, "t p"] | Float[Tensor, "t k p"],
    chosen: Int[Tensor, "t k"],
    weights: Float[Tensor, "t k"] | None,
    factors: TileFactors,
    path: Path = "auto",
) -> Tensor:
    """sum_k w_tk L_e x_tk over the experts e of each token (t x q), or without ``weights`` each L_e x_tk (t x k x q).

    In the factors' dtype, whatever comes in: x a overflows in half precision on models with large scales.

    Args:
        x: inputs that all experts of a token share, or one for each.
        chosen: experts of each token; one may be chosen twice.
        weights: routing weights.
        factors: of the projection, in a dtype that multiplies (``TileFactors.working``).
        path: project by one "dense" product with the factors of all grid rows, "grouped" by one for each row, whichever
            should be quicker ("auto"), or expert by expert ("reference").
    """
    dtype = factors.sigma.dtype
    x = x.to(dtype)
    if path == "reference":
        each = _one_by_one(x, chosen, factors)
        return each if weights is None else (weights.to(dtype).unsqueeze(-1) * each).sum(1)
    t, k = chosen.shape
    (m, n), rank = factors.grid, factors.rank
    if x.ndim == 2 and not factors.one_scale:
        x = x.unsqueeze(1).expand(t, k, -1)
    few = (t if x.ndim == 2 else t * k) * m <= _FEW
    if path == "auto":
        path = "dense" if few or (x.ndim == 2 and m <= 2 * k) else "grouped"
    if weights is None:
        z = _kept(_projected(x, chosen, factors, path), chosen, factors).flatten(0, 1)
        columns = factors.cells[:, 1][chosen].flatten()
        if not few:
            return _by_group(z * factors.sigma, columns, factors.V).view(t, k, factors.V.shape[2])
        wide = z.new_zeros(t * k, n, rank)
        wide[torch.arange(t * k, device=x.device), columns] = z
        return (wide.flatten(1) @ factors.deep).view(t, k, factors.V.shape[2])
    # In rank space the experts of a grid column add up before its V is read.
    weights = _kept(weights.to(dtype), chosen, factors)
    if path == "dense" and x.ndim == 2:
        mix = x.new_zeros(t, n * m).scatter_add_(1, factors.places.take(chosen), weights)
        mixed = torch.bmm(mix.view(t, n, m), (x @ factors.wide).view(t, m, rank))
    else:
        z = weights.unsqueeze(-1) * _projected(x, chosen, factors, path)
        rows = factors.cells[:, 1][chosen] + n * torch.arange(t, device=x.device).unsqueeze(1)
        mixed = z.new_zeros(t * n, rank).index_add_(0, rows.flatten(), z.flatten(0, 1))
    return mixed.view(t, n * rank) @ factors.deep


def _kept(values: Tensor, chosen: Tensor, factors: TileFactors) -> Tensor:
    """Zero for experts without a correction (t x k, or t x k x R)."""
    if factors.all_kept:
        return values
    return values * factors.kept[chosen].view(*chosen.shape, *(1,) * (values.ndim - 2))


def _projected(x: Tensor, chosen: Tensor, factors: TileFactors, path: Path) -> Tensor:
    """(a_e x) U of each token's experts, t x k x R."""
    (t, k), (m, p, rank) = chosen.shape, factors.U.shape
    rows = factors.cells[:, 0][chosen]
    if not factors.one_scale:
        x = x * factors.inverse_scales[factors.groups[chosen]]
    if path == "dense":
        every = (x @ factors.wide).view(t, 1 if x.ndim == 2 else k, m, rank).expand(t, k, m, rank)
        return every.gather(2, rows.view(t, k, 1, 1).expand(t, k, 1, rank)).squeeze(2)
    x = x * factors.inverse_scales[0] if factors.one_scale else x
    pairs = x.unsqueeze(1).expand(t, k, p) if x.ndim == 2 else x
    return _by_group(pairs.reshape(-1, p), rows.flatten(), factors.U).view(t, k, rank)


def _by_group(x: Float[Tensor, "s a"], group: Int[Tensor, " s"], factor: Float[Tensor, "g a b"]) -> Tensor:
    """Each row times the factor of its group: one product per group."""
    out = x.new_empty(len(x), factor.shape[2])
    for g, own in enumerate(factor):
        rows = (group == g).nonzero().squeeze(1)
        out.index_copy_(0, rows, x[rows] @ own)  # sorting all rows first moves them twice
    return out


def _one_by_one(x: Tensor, chosen: Tensor, factors: TileFactors) -> Tensor:
    out = x.new_zeros(*chosen.shape, factors.V.shape[2])
    for e in chosen.unique().tolist():
        token, place = torch.where(chosen == e)
        rows = x[token] if x.ndim == 2 else x[token, place]
        i, j = factors.cells[e].tolist()
        z = (rows * factors.inverse_scales[factors.groups[e]]) @ factors.U[i]
        out[token, place] = factors.kept[e] * ((z * factors.sigma) @ factors.V[j])
    return out
