"""The mathematics of AOEPT: tensors in, tensors out. Numbers are those of the documentation's equations."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention


def at_least_float32(x: Tensor) -> Tensor:
    """Statistics and softmaxes are not taken in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_mean(h: Float[Tensor, "b s d"], mask: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b d"]:
    """f (3.1): the mean over content tokens, in float32 or better; zero for a row without any."""
    h = at_least_float32(h)
    if mask is None:
        return h.mean(1)
    # A row that is all padding has no mean: its denominator of 0 becomes 1.
    return torch.where(mask[..., None], h, 0.0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def attend(
    queries: Float[Tensor, "n L d"],
    keys: Float[Tensor, "n K d"],
    values: Float[Tensor, "n K d"],
    heads: int,
) -> Float[Tensor, "n L d"]:
    """O (3.3): multi-head attention of every layer's queries over its prototypes, without projections."""

    def split(x: Tensor) -> Tensor:
        return at_least_float32(x).unflatten(-1, (heads, -1)).transpose(1, 2)

    with torch.autocast(queries.device.type, enabled=False):
        out = scaled_dot_product_attention(split(queries), split(keys), split(values))
    return out.transpose(1, 2).flatten(-2)


def instantiate(
    prompt: Float[Tensor, "L d"], gate: Float[Tensor, "b d"], gated: Bool[Tensor, " b"]
) -> Float[Tensor, "b L d"]:
    """P_i = g_i * P (3.5); exactly P where there is nothing to gate with."""
    return torch.where(gated[:, None], gate, 1.0)[:, None] * prompt


def mixed(prompts: Sequence[Float[Tensor, "b L d"]], present: Bool[Tensor, "b m"]) -> Float[Tensor, "b L d"]:
    """What fills the slots of one sequence: the mean over the modalities a sample lacks, or over all if none."""
    if len(prompts) == 1:
        return prompts[0]
    weights = torch.where(present.all(1, keepdim=True), True, ~present).to(prompts[0].dtype)
    weights = weights / weights.sum(1, keepdim=True)
    return torch.stack([w[:, None, None] * p for w, p in zip(weights.unbind(1), prompts, strict=True)]).sum(0)


def consistency_terms(
    prompts: Float[Tensor, "n b d"],
    features: Float[Tensor, "n b d"],
    present: Bool[Tensor, " b"],
    scale: Float[Tensor, ""],
    labels: Int64[Tensor, " b"] | None = None,
) -> Float[Tensor, " n"]:
    """One term for every layer (3.7): which sample's features belong to this sample's mean prompt?

    Rows and columns of samples that lack the modality count nowhere; with fewer than two others the terms are 0. No
    gradient reaches ``features``. ``labels``: positives are all samples of the class.
    """
    with torch.autocast(prompts.device.type, enabled=False):
        u = normalize(at_least_float32(prompts), dim=-1)
        z = normalize(at_least_float32(features.detach()), dim=-1)
        logits = scale.to(u.dtype) * (u @ z.mT)
        # A finite floor: rows without any column would be NaN at -inf, and their gradient with them.
        log_p = logits.masked_fill(~present, torch.finfo(u.dtype).min).log_softmax(-1)
    if labels is None:
        loss = -log_p.diagonal(dim1=-2, dim2=-1)
    else:
        positives = (labels[:, None] == labels) & present
        loss = -torch.where(positives, log_p, 0.0).sum(-1) / positives.sum(-1).clamp(min=1)
    count = present.sum()
    return torch.where(present & (count >= 2), loss, 0.0).sum(-1) / count.clamp(min=1)


# CLIP's bound on the sharpness of its logits; without one the softmax may saturate until nothing is learnt.
MAX_LOG_SCALE = math.log(100.0)


def bounded_scale(kappa: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """exp(kappa), at most 100. The gradient passes the bound, or kappa could never come back below it."""
    kappa = at_least_float32(kappa)
    return (kappa + (kappa.clamp(max=MAX_LOG_SCALE) - kappa).detach()).exp()
