"""How well a period's directions meet the true gradient: one backward pass, which training itself never takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from subspan.linalg import stable_rank
from subspan.optim.zeroth_order.algebra import alignment
from subspan.optim.zeroth_order.blocks import Block
from subspan.optim.zeroth_order.optimizers import LOZO


@dataclass(frozen=True)
class LayerDiagnosis:
    """One matrix with gradient G (m x n) and the directions V (n x r) of this period; NaN where G is zero."""

    alpha: float
    """|G V|^2 / (r |G|^2): 1 on average for random V, up to n / r for chosen ones."""
    cosine: float
    """Between G and the period's mean update G V V^T."""
    stable_rank: float
    """|G|_F^2 / |G|_2^2: choosing directions pays where it is near 1."""


def diagnose_directions(optimizer: LOZO, closure: Callable[[], Tensor]) -> dict[str, LayerDiagnosis]:
    """Compare the directions that LOZO or LOZO+ uses now with the gradient of ``closure``'s loss, matrix by matrix.

    Changes nothing and takes the memory of back-propagation.

    Args:
        optimizer: one that has taken a step.
        closure: returns the loss as a tensor, without calling backward.

    Raises:
        ValueError: no step has been taken, or the loss has no gradient.
    """
    if not optimizer.right:
        raise ValueError("there are no low-rank directions yet: take a step first")
    with torch.enable_grad():
        loss = closure()
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: a diagnosis needs a loss that can be differentiated")
        gradients = torch.autograd.grad(loss, [b.param for b in optimizer.right], allow_unused=True)
    return {
        block.name: _compare(block, gradient, right)
        for (block, right), gradient in zip(optimizer.right.items(), gradients, strict=True)
    }


def _compare(block: Block, gradient: Tensor | None, right: Tensor) -> LayerDiagnosis:
    if gradient is None or not gradient.any():
        return LayerDiagnosis(math.nan, math.nan, math.nan)
    G = gradient.flatten(1).to(right.dtype)
    G = G.mT if block.transposed else G
    met = G @ right
    cosine = met.square().sum() / (G.norm() * (met @ right.mT).norm())
    return LayerDiagnosis(alignment([G], [right]), float(cosine), float(stable_rank(torch.linalg.svdvals(G))))
