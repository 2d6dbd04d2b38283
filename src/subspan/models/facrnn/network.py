"""The low-rank recurrent network seen as a VAE: encoder of the history, decoder of the next bin, and its objective."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subspan.models.facrnn.penalty import Groups, GroupsLike, partial_correlation, resolve_groups
from subspan.models.facrnn.series import history_kernel

NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "identity": lambda x: x}
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda a: a,
    "relu": torch.relu,
    "softplus": F.softplus,
    "exp": torch.exp,
}
LIKELIHOODS = {"gaussian": ("identity", "relu"), "poisson": ("softplus", "exp")}  # and their links, default first


class Affine(nn.Module):
    """``nn.Linear`` whose parameters may have leading axes: a stack of networks is one network with an axis more."""

    def __init__(self, n_in: int, n_out: int, generator: torch.Generator | None) -> None:
        super().__init__()
        bound = 1 / math.sqrt(n_in)  # as nn.Linear starts

        def uniform(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))

        self.weight, self.bias = uniform(n_out, n_in), uniform(n_out)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return F.linear(x, self.weight, self.bias)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


class BlockEncoder(Affine):
    """An encoder whose recurrence J = B A is block-diagonal by construction: B = J A⁺ (the two-step bdRNN)."""

    inside: Tensor

    def __init__(self, decoder: Affine, inside: Bool[Tensor, "K K"], generator: torch.Generator | None) -> None:
        n_channels, n_components = decoder.weight.shape
        super().__init__(n_channels, n_components, generator)
        # starts with the blocks of the J that a free B has
        self.recurrence = nn.Parameter((self.weight @ decoder.weight).detach())
        del self.weight
        self.register_buffer("inside", inside)
        self._decoder = (decoder,)  # in a tuple: it is not a part of the encoder

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return encoder_from_recurrence(self._decoder[0].weight, self.recurrence * self.inside)


def encoder_from_recurrence(A: Float[Tensor, "*s N K"], J: Float[Tensor, "*s K K"]) -> Float[Tensor, "*s K N"]:
    """B = J A⁺, for which B A = J where A has full column rank (the second step of bdRNN)."""
    return J @ torch.linalg.pinv(A)


class LowRankRNN(nn.Module):
    """x(t) = link(A z(t) + c + eta(t)) + noise with z(t) = B u(t) + d + s e, where u(t) = sum_l psi_l sigma(x(t-l)).

    With linear maps the connectivity is W = A B of rank K, the sum of its groups' sub-circuits W_g = A_g B_g.

    Args:
        n_channels: N.
        n_components: K, at most N.
        groups: number, sizes or members of the groups of latent coordinates.
        lags: L, how many bins u looks back.
        kernel: "exp", "uniform" or L weights psi, the most recent bin's first.
        learn_kernel: start psi there and learn it (softmax of free logits).
        nonlinearity: sigma, "tanh" or "identity"; ``sqrt_counts`` takes square roots first.
        likelihood: "gaussian" (with a learnt deviation for each channel) or "poisson".
        link: of the mean: "identity" or "relu" for gaussian, "softplus" or "exp" for poisson; None takes the first.
        encoder_std: s.
        learn_std: learn s, one for each latent coordinate.
        hidden: width of one hidden ReLU layer in encoder and decoder; then there is no connectivity.
        block_recurrence: J = B A is block-diagonal by construction.
        min_std: floor of the channels' deviation: constant channels would send it to zero and the loss to -inf.
        generator: of the starting weights (as ``nn.Linear`` draws them).

    Attributes:
        A: (N, K). B: (K, N). c: (N,). d: (K,). r: (N,) log deviations. psi: (L,). groups: the partition.

    Source: Li et al., ICML 2026, arXiv 2511.13899, section 3.
    """

    inside: Tensor

    def __init__(
        self,
        n_channels: int,
        n_components: int,
        groups: GroupsLike = 1,
        *,
        lags: int = 1,
        kernel: str | Sequence[float] = "exp",
        learn_kernel: bool = False,
        nonlinearity: str = "tanh",
        sqrt_counts: bool = False,
        likelihood: str = "gaussian",
        link: str | None = None,
        encoder_std: float = 1.0,
        learn_std: bool = False,
        hidden: int | None = None,
        block_recurrence: bool = False,
        min_std: float = 1e-3,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= n_components <= n_channels:
            raise ValueError(
                f"n_components={n_components} must lie between 1 and the channels: n_features = {n_channels}"
            )
        for name, value, known in (
            ("nonlinearity", nonlinearity, NONLINEARITIES),
            ("likelihood", likelihood, LIKELIHOODS),
            ("link", LIKELIHOODS.get(likelihood, "?")[0] if link is None else link, LIKELIHOODS.get(likelihood, ())),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        if block_recurrence and hidden:
            raise ValueError("block_recurrence=True needs linear maps; leave hidden=None")
        for name, value in (("encoder_std", encoder_std), ("min_std", min_std)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.groups: Groups = resolve_groups(groups, n_components)
        self.lags, self.nonlinearity, self.sqrt_counts, self.likelihood = lags, nonlinearity, sqrt_counts, likelihood
        self.link = LIKELIHOODS[likelihood][0] if link is None else link
        self.min_log_std = math.log(min_std)
        widths = [n_channels, *([hidden] if hidden else []), n_components]
        inward = list(itertools.pairwise(widths))
        self.encoder = nn.ModuleList(Affine(i, o, generator) for i, o in inward)
        self.decoder = nn.ModuleList(Affine(o, i, generator) for i, o in reversed(inward))
        inside = torch.zeros(n_components, n_components, dtype=torch.bool)
        for members in self.groups:
            inside[torch.tensor(members)[:, None], torch.tensor(members)] = True
        self.register_buffer("inside", inside)
        if block_recurrence:
            self.encoder[0] = BlockEncoder(cast(Affine, self.decoder[0]), inside, generator)
        self.r = nn.Parameter(torch.full((n_channels,), -1.0))
        log_std = torch.full((n_components,), math.log(encoder_std))
        self.log_std = nn.Parameter(log_std, requires_grad=learn_std)
        psi = history_kernel(kernel, lags)
        # a weight of zero would never leave it
        floor = psi.clamp_min(1e-6) if learn_kernel else psi
        self.log_psi = nn.Parameter(floor.log(), requires_grad=learn_kernel)

    # ------------------------------------------------------------------------------------------------ the two maps

    def sigma(self, x: Tensor) -> Tensor:
        return NONLINEARITIES[self.nonlinearity](x.clamp_min(0).sqrt() if self.sqrt_counts else x)

    def encode(self, u: Float[Tensor, "*b M N"]) -> Float[Tensor, "*b M K"]:
        """mu = B u + d."""
        return _through(self.encoder, u)

    def decode(self, z: Float[Tensor, "*b M K"], eta: Tensor | None = None) -> Float[Tensor, "*b M N"]:
        """The mean's argument A z + c + eta, before the link."""
        a = _through(self.decoder, z)
        return a if eta is None else a + eta

    def mean(self, a: Tensor) -> Tensor:
        """The link."""
        return LINKS[self.link](a)

    def forward(
        self, u: Float[Tensor, "*b M N"], eta: Float[Tensor, "*b M N"] | None = None
    ) -> tuple[Float[Tensor, "*b M K"], Float[Tensor, "*b M N"]]:
        """Latent means mu and the mean of x at z = mu."""
        mu = self.encode(u)
        return mu, self.mean(self.decode(mu, eta))

    # ---------------------------------------------------------------------------------------------- what it consists of

    @property
    def psi(self) -> Tensor:
        return torch.softmax(self.log_psi, -1)

    @property
    def linear(self) -> bool:
        return len(self.encoder) == 1

    @property
    def A(self) -> Tensor:
        return self._map(self.decoder, "A").weight

    @property
    def B(self) -> Tensor:
        return self._map(self.encoder, "B").weight

    @property
    def c(self) -> Tensor:
        return self._map(self.decoder, "c").bias

    @property
    def d(self) -> Tensor:
        return self._map(self.encoder, "d").bias

    def connectivity(self) -> Float[Tensor, "*s N N"]:
        """W = A B; W[i, j] is the effect of channel j on channel i.

        Raises:
            ValueError: the maps are MLPs.
        """
        return self.A @ self.B

    def sub_connectivity(self, g: int) -> Float[Tensor, "*s N N"]:
        """W_g = A_g B_g of group g; they sum to W.

        Raises:
            ValueError: the maps are MLPs, or there is no such group.
        """
        if not 0 <= g < len(self.groups):
            raise ValueError(f"there is no group {g}; the groups are 0 to {len(self.groups) - 1}")
        k = list(self.groups[g])
        return self.A[..., :, k] @ self.B[..., k, :]

    def background(self) -> Float[Tensor, "*s N"]:
        """b = A d + c."""
        return (self.A @ self.d.unsqueeze(-1)).squeeze(-1) + self.c

    def latent_recurrence(self) -> Float[Tensor, "*s K K"]:
        """J = B A, which moves the latents where sigma is the identity."""
        return self.B @ self.A

    def _map(self, layers: nn.ModuleList, what: str) -> Affine:
        if not self.linear:
            raise ValueError(f"{what} exists for linear maps only: this network has hidden layers and no connectivity")
        return cast(Affine, layers[0])

    # ----------------------------------------------------------------------------------------------------- generation

    @torch.no_grad()
    def simulate(
        self,
        x0: Float[Tensor, "*b L N"],
        steps: int,
        eta: Float[Tensor, "*b steps N"] | None = None,
        noise: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[Float[Tensor, "*b steps N"], Float[Tensor, "*b steps K"]]:
        """Run freely from L bins: (x, z) of the ``steps`` bins after them, with or without both noises.

        Without noise x is the mean (a rate for poisson).
        """
        if x0.shape[-2] != self.lags:
            raise ValueError(f"x0 holds {x0.shape[-2]} bins, but lags={self.lags}")
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1")
        if eta is not None and eta.shape[-2] != steps:
            raise ValueError(f"eta holds {eta.shape[-2]} bins, but steps={steps}")
        psi = self.psi.flip(-1).unsqueeze(-1)  # oldest bin first, as x0
        recent = self.sigma(x0)
        xs, zs = [], []
        for t in range(steps):
            z = self.encode((psi * recent).sum(-2, keepdim=True))
            if noise:
                z = z + self.log_std.exp() * torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
            x = self.mean(self.decode(z, None if eta is None else eta[..., t : t + 1, :]))
            if noise and self.likelihood == "poisson":
                x = torch.poisson(x, generator=generator)
            elif noise:
                x = x + self.r.exp() * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            recent = torch.cat([recent[..., 1:, :], self.sigma(x)], -2)
            xs.append(x)
            zs.append(z)
        return torch.cat(xs, -2), torch.cat(zs, -2)


def _through(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers[:-1]:
        x = torch.relu(layer(x))
    return layers[-1](x)


# ----------------------------------------------------------------------------------------------------- the objective


def scott_std(n: int, n_components: int) -> float:
    """Scott's bandwidth of n points in K dimensions, n^(-1 / (K + 4))."""
    return n ** (-1 / (n_components + 4))


def negative_log_likelihood(
    x: Float[Tensor, "*b N"],
    a: Float[Tensor, "*b N"],
    r: Float[Tensor, "*s N"],
    likelihood: str,
    link: str,
) -> Float[Tensor, "*b N"]:
    """-log p(x | a) of every entry, in nats, constants included; ``a`` is the mean's argument, r the log deviation."""
    with torch.autocast(a.device.type, enabled=False):
        a = a.to(torch.promote_types(a.dtype, torch.float32))
        if likelihood == "poisson":
            if link == "exp":
                rate, log_rate = a.exp(), a
            else:
                rate = F.softplus(a)
                # far below zero softplus(a) is exp(a), and vanishes where its logarithm does not
                log_rate = torch.where(a < -15, a, rate.clamp_min(1e-7).log())
            return rate - x * log_rate + torch.lgamma(x + 1)
        r = r.unsqueeze(-2)
        return (x - LINKS[link](a)).square() * (0.5 * torch.exp(-2 * r)) + (r + 0.5 * math.log(2 * math.pi))


def kl_to_prior(mu: Float[Tensor, "*b M K"], log_std: Float[Tensor, "*s K"]) -> Float[Tensor, "*b M"]:
    """KL(N(mu, s^2) || N(0, I)) of every row."""
    mu = mu.to(torch.promote_types(mu.dtype, torch.float32))
    constant = (torch.exp(2 * log_std) - 1 - 2 * log_std).sum(-1, keepdim=True)
    return 0.5 * (mu.square().sum(-1) + constant)


def block_diagonal_penalty(J: Float[Tensor, "*s K K"], inside: Bool[Tensor, "K K"]) -> Float[Tensor, "*s"]:
    """Mean over all K^2 entries of J^2 outside the groups' blocks."""
    return J.masked_fill(inside, 0.0).square().mean((-2, -1))


def objective(
    network: LowRankRNN,
    u: Float[Tensor, "*s M N"],
    x: Float[Tensor, "*s M N"],
    eps: Float[Tensor, "*s M K"],
    *,
    beta: float,
    alpha: float,
    n_total: int,
    eta: Tensor | None = None,
    observed: Bool[Tensor, "*s M N"] | None = None,
) -> dict[str, Float[Tensor, "*s"]]:
    """The loss of a batch (3.3) and its parts, in nats per bin: sums over channels, means over rows.

    Args:
        network: one, or a stack (then every tensor has the leading axis).
        u: history. x: the bins. eps: standard normal draws, one for each row.
        beta: weight of the partial correlation. alpha: of the off-diagonal blocks of J.
        n_total: rows in all batches together.
        eta: known input. observed: entries that count.
    """
    mu = network.encode(u)
    z = mu + network.log_std.exp().unsqueeze(-2) * eps
    nll = negative_log_likelihood(x, network.decode(z, eta), network.r, network.likelihood, network.link)
    if observed is not None:
        nll = nll * observed
    terms = {"rec": nll.sum(-1).mean(-1), "kl": kl_to_prior(mu, network.log_std).mean(-1)}
    loss = terms["rec"] + terms["kl"]
    if beta and len(network.groups) > 1:
        terms["pc"] = partial_correlation(mu, z, network.log_std, network.groups, n_total)
        loss = loss + beta * terms["pc"]
    if alpha:
        terms["bd"] = block_diagonal_penalty(network.latent_recurrence(), network.inside)
        loss = loss + alpha * terms["bd"]
    return {"loss": loss, **terms}


def predictive_log_likelihood(
    network: LowRankRNN,
    u: Float[Tensor, "n N"],
    x: Float[Tensor, "n N"],
    *,
    eta: Tensor | None = None,
    observed: Tensor | None = None,
    draws: int = 64,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "n"]:
    """log p(x(t) | u(t)) of every row, with the latent noise integrated out; masked entries are marginalised."""
    mu, std = network.encode(u), network.log_std.exp()
    weight = torch.ones_like(x) if observed is None else observed.to(x.dtype)
    if network.link == "identity" and network.linear:
        # x ~ N(A mu + c + eta, A S² Aᵀ + D) by the matrix inversion lemma, with the precision D⁻¹ of what is observed
        precision = weight * torch.exp(-2 * network.r)
        error = x - network.decode(mu, eta)
        loadings = network.A * std
        inner = torch.einsum("nk,tn,nl->tkl", loadings, precision, loadings) + torch.eye(len(std), device=x.device)
        root = torch.linalg.cholesky(inner)
        pulled = torch.linalg.solve_triangular(root, (precision * error @ loadings).unsqueeze(-1), upper=False)
        quadratic = (precision * error.square()).sum(-1) - pulled.square().sum((-2, -1))
        logdet = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 2 * (weight * network.r).sum(-1)
        return -0.5 * (quadratic + logdet + weight.sum(-1) * math.log(2 * math.pi))
    logs = []
    for _ in range(draws):
        noise = torch.randn(mu.shape, generator=generator, dtype=mu.dtype).to(mu.device)
        a = network.decode(mu + std * noise, eta)
        logs.append(-(weight * negative_log_likelihood(x, a, network.r, network.likelihood, network.link)).sum(-1))
    return torch.stack(logs).logsumexp(0) - math.log(draws)
