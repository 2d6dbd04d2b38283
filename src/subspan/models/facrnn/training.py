"""Training one network, or a stack of them at once, with checkpoints that continue bit for bit."""

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from subspan.errors import ConfigError, NonFinite
from subspan.files import replacing
from subspan.models.facrnn.network import LowRankRNN, negative_log_likelihood, objective
from subspan.models.facrnn.series import convolve

TERMS = ("loss", "rec", "kl", "pc", "bd")


@dataclass(frozen=True)
class Schedule:
    """How long and how fast; ``warmup`` epochs lead ``beta`` up from 0 in a line."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    beta: float
    alpha: float
    warmup: int = 0


@dataclass(frozen=True)
class Rows:
    """What is trained on: bins x, where their histories lie in the table of sigma(x), inputs, and what counts.

    ``where`` names a row for errors.
    """

    x: Float[Tensor, "n N"]
    table: Float[Tensor, "rows N"]
    index: Int[Tensor, "n L"]
    eta: Float[Tensor, "n N"] | None
    observed: Bool[Tensor, "n N"] | None
    where: Callable[[int], str]


def stack(networks: Sequence[LowRankRNN]) -> LowRankRNN:
    """One network whose parameters are those of all, along a new first axis."""
    out = copy.deepcopy(networks[0])
    every = [dict(network.named_parameters()) for network in networks]
    for name, parameter in out.named_parameters():
        parameter.data = torch.stack([parameters[name].detach() for parameters in every])
    return out


def unstack(network: LowRankRNN) -> list[LowRankRNN]:
    """The networks of a stack."""

    def member(i: int) -> LowRankRNN:
        out = copy.deepcopy(network)
        for parameter in out.parameters():
            parameter.grad = None
            parameter.data = parameter.data[i].clone()
        return out

    return [member(i) for i in range(len(network.r))]


class Training:
    """Epochs of AdamW on a stack of networks; member i draws batches and noise from ``generators[i]`` alone.

    So a member's run is the same in whatever company it trains. ``curves`` holds, for each finished epoch, the mean of
    each of ``TERMS`` over batches: (epochs, terms, members).
    """

    def __init__(
        self, network: LowRankRNN, rows: Rows, schedule: Schedule, generators: Sequence[torch.Generator]
    ) -> None:
        self.network, self.rows, self.schedule, self.generators = network, rows, schedule, list(generators)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, schedule.lr, weight_decay=schedule.weight_decay, fused=True)
        self.curves: list[np.ndarray] = []
        # a history that does not change is computed once
        self._u = None if network.log_psi.requires_grad else convolve(rows.table, rows.index, network.psi[0].detach())

    def epoch(self) -> None:
        """One pass over all rows in batches. A last batch of one row joins the one before it: PC needs two.

        Raises:
            NonFinite: the loss is no longer finite; the message names the first bin to blame.
        """
        n, size, K = len(self.rows.x), self.schedule.batch_size, self.network.log_std.shape[-1]
        device = self.rows.x.device
        orders = torch.stack([torch.randperm(n, generator=g) for g in self.generators]).to(device)
        noise = torch.stack([torch.randn(n, K, generator=g) for g in self.generators]).to(device)
        ends = [*range(size, n - (n % size == 1 and n > size), size), n]
        warm = min(1.0, (len(self.curves) + 1) / (self.schedule.warmup + 1))
        sums = torch.zeros(len(TERMS), len(self.generators), device=device)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            rows = orders[:, start:end]
            terms = self._step(rows, noise[:, start:end], self.schedule.beta * warm)
            for k, name in enumerate(TERMS):
                if name in terms:
                    sums[k] += terms[name].detach()
        self.curves.append((sums / len(ends)).cpu().numpy())

    def _step(self, index: Tensor, eps: Tensor, beta: float) -> dict[str, Tensor]:
        rows = self.rows
        u = convolve(rows.table, rows.index[index], self.network.psi) if self._u is None else self._u[index]
        terms = objective(
            self.network,
            u,
            rows.x[index],
            eps,
            beta=beta,
            alpha=self.schedule.alpha,
            n_total=len(rows.x),
            eta=None if rows.eta is None else rows.eta[index],
            observed=None if rows.observed is None else rows.observed[index],
        )
        total = terms["loss"].sum()
        if not torch.isfinite(total):
            raise self._blame(index, u)
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.network.r.clamp_(min=self.network.min_log_std)
        return terms

    @torch.no_grad()
    def _blame(self, index: Tensor, u: Tensor) -> NonFinite:
        """The entry with the largest (or no) likelihood: the parameters are still those of a finite loss."""
        network, rows = self.network, self.rows
        a = network.decode(network.encode(u), None if rows.eta is None else rows.eta[index])
        nll = negative_log_likelihood(rows.x[index], a, network.r, network.likelihood, network.link)
        nll = torch.where(torch.isfinite(nll), nll, torch.inf)
        member, row, channel = np.unravel_index(int(nll.argmax()), nll.shape)
        return NonFinite(
            f"the loss became infinite or NaN in epoch {len(self.curves)} (restart {member}); the least likely value "
            f"is at {rows.where(int(index[member, row]))}, channel {channel}: lower lr={self.schedule.lr} or rescale X"
        )

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def save(self, path: str | os.PathLike[str], fingerprint: dict[str, Any]) -> None:
        """Everything the next epoch depends on. ``fingerprint`` says what run this is."""
        tensors = {f"network.{k}": v.detach() for k, v in self.network.named_parameters()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{k}": v for k, v in state.items()}
        tensors |= {f"generator.{i}": g.get_state() for i, g in enumerate(self.generators)}
        tensors["curves"] = torch.from_numpy(np.array(self.curves, dtype=np.float32))
        with replacing(path) as part:
            save_file({k: v.contiguous().clone() for k, v in tensors.items()}, part, {"run": json.dumps(fingerprint)})

    def load(self, path: str | os.PathLike[str], fingerprint: dict[str, Any]) -> None:
        """Continue from there.

        Raises:
            ConfigError: the checkpoint is of another run, or damaged.
        """
        try:
            with safe_open(path, framework="pt") as file:
                found = json.loads((file.metadata() or {}).get("run", "{}"))
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ConfigError(f"{os.fspath(path)} is no checkpoint, or damaged ({error}): remove it") from error
        if found != json.loads(json.dumps(fingerprint)):
            differ = [k for k in fingerprint if found.get(k) != fingerprint[k]]
            raise ConfigError(f"{os.fspath(path)} is of a run with another {', '.join(differ)}; give a new path")
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(tensors[f"network.{name}"])
        state: dict[int, dict[str, Tensor]] = {}
        for key in tensors:
            if key.startswith("optimizer."):
                _, i, name = key.split(".")
                state.setdefault(int(i), {})[name] = tensors[key]
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        for i, generator in enumerate(self.generators):
            generator.set_state(tensors[f"generator.{i}"])
        self.curves = list(tensors["curves"].numpy())
