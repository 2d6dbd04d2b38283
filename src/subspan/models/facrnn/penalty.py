"""How dependent groups of latent coordinates are: the partial correlation (PC) of an aggregated posterior.

Not the textbook's partial correlation coefficient but the total correlation of groups, KL(q(z) || prod_g q(z_g)). All
values are signed nats: an estimate from a batch may be negative, and is never clamped.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

Groups = tuple[tuple[int, ...], ...]
# their number, their sizes, or their members
GroupsLike = int | Sequence[Any]


def resolve_groups(groups: GroupsLike, n_components: int) -> Groups:
    """Groups of coordinates: from their number, their sizes ([3, 3]) or their members ([[0, 1], [2, 3, 4, 5]]).

    A number that does not divide ``n_components`` makes the first groups one larger.

    Raises:
        ValueError: this is no partition of range(n_components) into groups that are not empty.
    """
    wrong = ValueError(f"groups={groups!r} is no partition of range(n_components) with n_components={n_components}")
    if isinstance(groups, (int, np.integer)):
        if not 1 <= groups <= n_components:
            raise wrong
        small, larger = divmod(n_components, int(groups))
        groups = [small + (g < larger) for g in range(int(groups))]
    members: list[tuple[int, ...]] = []
    start = 0
    try:
        for group in groups:
            if isinstance(group, (int, np.integer)):
                members.append(tuple(range(start, start := start + int(group))))
            else:
                members.append(tuple(operator.index(k) for k in group))
    except TypeError:  # numbers that are not whole, or no numbers
        raise wrong from None
    if not all(members) or sorted(k for group in members for k in group) != list(range(n_components)):
        raise wrong
    return tuple(members)


def singletons(n_components: int) -> Groups:
    """Every coordinate its own group."""
    return tuple((k,) for k in range(n_components))


def partial_correlation(
    mu: Float[Tensor, "*s M K"],
    z: Float[Tensor, "*s M K"],
    log_std: Tensor | float,
    groups: GroupsLike,
    n_total: int | None = None,
    reduction: str = "mean",
) -> Float[Tensor, "..."]:
    """Importance-weighted estimate of PC from a batch: ``z[i]`` was drawn from component i, N(mu[i], std^2).

    Signed and differentiable in all of mu, z and log_std; computed in float32 or better. The estimated *densities* are
    unbiased over batches; their logarithms are not, and with ``n_total > M`` the estimate may be negative.

    Args:
        mu: means of M of the mixture's components, with any leading axes.
        z: a sample of each.
        log_std: logarithm of the components' standard deviation: a number, or one for each coordinate (*s, K).
        groups: number, sizes or members of the groups, as for ``resolve_groups``.
        n_total: how many components the mixture has (M by default, then nothing is estimated).
        reduction: "mean" over rows, or "none".

    Raises:
        ValueError: groups that are no partition, mu and z of different shape, n_total < M, or one row of a larger
            mixture (its weights are 0 / 0).

    Source: Li et al. 2025, arXiv 2502.02279 (optimal importance weights); arXiv 2511.13899.
    """
    if mu.shape != z.shape:  # broadcasting would pair samples with the components of others
        raise ValueError(f"mu has shape {tuple(mu.shape)} and z {tuple(z.shape)}: they must be the same")
    M, K = mu.shape[-2:]
    n = M if n_total is None else n_total
    groups = resolve_groups(groups, K)
    if n < M:
        raise ValueError(f"n_total={n} is less than the batch's {M} rows")
    if M == 1 < n:
        raise ValueError("a batch of one row says nothing about the other components; use batches of at least 2 rows")
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
    with torch.autocast(mu.device.type, enabled=False):  # a logsumexp of bfloat16 differences has lost the signal
        dtype = torch.promote_types(torch.promote_types(mu.dtype, z.dtype), torch.float32)
        log_std = torch.as_tensor(log_std, dtype=dtype, device=mu.device)
        if log_std.ndim:
            log_std = log_std.unsqueeze(-2)
        # In units of std the normal constants of log q and of sum_g log q_g are the same, and cancel.
        scale = torch.exp(-log_std)
        pointwise = _LogRatio.apply(z.to(dtype) * scale, mu.to(dtype) * scale, groups, n)
    return pointwise.mean(-1) if reduction == "mean" else pointwise


def total_correlation(
    mu: Float[Tensor, "*s M K"],
    z: Float[Tensor, "*s M K"],
    log_std: Tensor | float,
    n_total: int | None = None,
    reduction: str = "mean",
) -> Float[Tensor, "..."]:
    """``partial_correlation`` with every coordinate its own group."""
    return partial_correlation(mu, z, log_std, singletons(mu.shape[-1]), n_total, reduction)


class _LogRatio(torch.autograd.Function):
    """log q(z_i) - sum_g log q_g(z_i,g) for unit variances, with its derivative in closed form.

    With responsibilities R = softmax_j of the joint and R_g of group g, the derivative by the log kernel l_ijg is
    R_ij - R_g,ij, whose rows sum to zero. So (M, M, G) is all that is kept, and the way back is G small products.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, mu: Tensor, groups: Groups, n: int) -> Tensor:
        if len(groups) == 1:  # the two terms are the same
            ctx.groups = ()
            ctx.save_for_backward(z, mu)
            return torch.zeros(z.shape[:-1], dtype=z.dtype, device=z.device)
        M = mu.shape[-2]
        # Nothing depends on the origin, and the products of the way back lose least around it.
        centre = mu.mean(-2, keepdim=True)
        z, mu = z - centre, mu - centre
        kernels = log_kernels(z, mu, groups)
        if n > M:  # row i's own component has weight 1, as z_i was drawn from it (3.4)
            kernels += math.log((n - 1) / (M - 1))
            kernels.diagonal(dim1=-2, dim2=-1).sub_(math.log((n - 1) / (M - 1)))
        top = kernels.amax(-1, keepdim=True)
        shares = kernels.sub_(top).exp_()
        total = shares.sum(-1, keepdim=True)
        log_q = (top + total.log()).squeeze(-1) - math.log(n)
        shares /= total
        ctx.groups = groups
        ctx.save_for_backward(z, mu, shares[-1] - shares[:-1])
        return log_q[-1] - log_q[:-1].sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        z, mu, *rest = ctx.saved_tensors
        grad_z, grad_mu = torch.zeros_like(z), torch.zeros_like(mu)
        for g, members in enumerate(ctx.groups):
            k = _columns(members)
            flow = rest[0][g] * grads[0].unsqueeze(-1)
            grad_z[..., k] = flow @ mu[..., k]
            grad_mu[..., k] = flow.mT @ z[..., k] - flow.sum(-2).unsqueeze(-1) * mu[..., k]
        return grad_z, grad_mu, None, None


def log_kernels(z: Tensor, mu: Tensor, groups: Groups) -> Tensor:
    """-|z_i - mu_j|^2 / 2 within each group, and last over all coordinates: (G + 1, *s, M, n)."""
    out = z.new_zeros(len(groups) + 1, *z.shape[:-1], mu.shape[-2])
    columns, rows = z.mT.contiguous(), mu.mT.contiguous()
    for g, members in enumerate(groups):
        if len(members) <= 32:
            # One coordinate after the other: exact differences, and no temporary of M x n x K.
            for k in members:
                difference = columns[..., k, :, None] - rows[..., k, None, :]
                out[g].addcmul_(difference, difference, value=-0.5)
        else:  # the expanded square cancels, hence float64
            a, b = z[..., _columns(members)].double(), mu[..., _columns(members)].double()
            squares = a.square().sum(-1, keepdim=True) + b.square().sum(-1).unsqueeze(-2) - 2 * a @ b.mT
            out[g] = -0.5 * squares
    torch.sum(out[:-1], 0, out=out[-1])
    return out


def _columns(members: Sequence[int]) -> slice | list[int]:
    """Neighbours as a slice: it copies nothing."""
    first, last = members[0], members[-1] + 1
    return slice(first, last) if tuple(members) == tuple(range(first, last)) else list(members)


class Dependence(NamedTuple):
    """PC of the groups, what independent groups would have given (the null), their difference, and TC, in nats."""

    pc: float
    pc_null: float
    pc_excess: float
    tc: float


def aggregated_partial_correlation(
    mu: Float[Tensor, "n K"],
    log_std: Tensor | float,
    groups: GroupsLike,
    *,
    draws: int = 10,
    generator: torch.Generator | None = None,
    chunk: int | None = None,
) -> float:
    """PC of the whole mixture over n components, by ``draws`` samples of each (spec 3.5).

    Memory is that of ``chunk`` rows against all components in every group (by default a few megabytes).
    """
    groups = resolve_groups(groups, mu.shape[1])
    n, G = len(mu), len(groups)
    if G == 1:
        return 0.0
    scale = torch.exp(-torch.as_tensor(log_std, dtype=mu.dtype, device=mu.device))
    centres = (mu - mu.mean(0)) * scale
    rows = chunk or max(1, 2**20 // (n * (G + 1)))
    total = 0.0
    for _ in range(draws):
        where = mu.device if generator is None else generator.device
        noise = torch.randn(mu.shape, generator=generator, dtype=mu.dtype, device=where).to(mu.device)
        for z in (centres + noise).split(rows):
            log_q = log_kernels(z, centres, groups).logsumexp(-1) - math.log(n)
            total += float((log_q[-1] - log_q[:-1].sum(0)).double().sum())
    return total / (draws * n)


def dependence(
    mu: Float[Tensor, "n K"],
    log_std: Tensor | float,
    groups: GroupsLike,
    *,
    draws: int = 10,
    permutations: int = 5,
    generator: torch.Generator | None = None,
) -> Dependence:
    """PC beside its null: the mean over ``permutations`` in which every group's rows are shuffled on their own.

    A mixture over finitely many points has PC > 0 even where the groups are independent; only what exceeds the null is
    evidence of dependence. ``permutations=0`` leaves the null (and the excess) NaN.
    """
    if not torch.isfinite(mu).all():
        raise ValueError("mu holds NaN or infinite values")
    groups = resolve_groups(groups, mu.shape[1])

    def measure(mu: Tensor, groups: Groups) -> float:
        return aggregated_partial_correlation(mu, log_std, groups, draws=draws, generator=generator)

    pc = measure(mu, groups)
    nulls = [measure(_shuffled(mu, groups, generator), groups) for _ in range(permutations)]
    null = sum(nulls) / len(nulls) if nulls else math.nan
    return Dependence(pc, null, pc - null, measure(mu, singletons(mu.shape[1])))


def _shuffled(mu: Tensor, groups: Groups, generator: torch.Generator | None) -> Tensor:
    out = mu.clone()
    for members in groups:
        where = mu.device if generator is None else generator.device
        order = torch.randperm(len(mu), generator=generator, device=where).to(mu.device)
        out[:, _columns(members)] = mu[order][:, _columns(members)]
    return out
