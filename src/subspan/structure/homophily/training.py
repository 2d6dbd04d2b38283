"""Adversarial training in turn with the adjustment of the target, as a state that can be saved."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from subspan.files import replacing
from subspan.structure.homophily.adjust import AdjustReport, adjust_homophily
from subspan.structure.homophily.edges import Edges
from subspan.structure.homophily.networks import attribute_mlp, reverse

SIDES, PSEUDO = ("both", "source", "target", "none"), ("sticky", "fresh")
SELECTIONS = ("last", "source_val", "agreement", "target_val")


Weighted = tuple[Tensor, Tensor]  # edges and their weights


class Domain(NamedTuple):
    """One graph: attributes, original edges (loops included), labels (-1 where unknown) and two sets of nodes."""

    x: Float[Tensor, "n p"]
    edges: Edges
    y: Int64[Tensor, " n"]
    train: Bool[Tensor, " n"]
    val: Bool[Tensor, " n"]

    def plain(self) -> Weighted:
        """The original edges and their weights, in the type of the attributes."""
        return self.edges.index, self.edges.weight.to(self.x.dtype)


@dataclass(frozen=True)
class Schedule:
    """What is adjusted, when, and how strongly the domains are aligned. See :class:`~subspan.structure.PSAHS`."""

    h0: float
    sides: str
    rw_freq: int
    start_epoch: int
    lambda_max: float
    pseudo: str
    selection: str
    epochs: int
    lr: float
    candidates: str
    on_shortage: str
    compat: str | None
    seed: int

    def reversal(self, epoch: int) -> float:
        """lambda_e = lambda_max min(1.5 (e + 1) / E, 1). (3.6)"""
        return self.lambda_max * min(1.5 * (epoch + 1) / self.epochs, 1.0)

    def rate(self, epoch: int) -> float:
        """The learning rate falls by a fifth every 50 epochs."""
        return self.lr * 0.8 ** (epoch // 50)

    def adjusts_target(self, epoch: int) -> bool:
        return self.sides in ("both", "target") and epoch >= self.start_epoch and (epoch - 1) % self.rw_freq == 0

    def adjusted(self, domain: Domain, labels: Tensor, round: int) -> tuple[Weighted, AdjustReport]:
        """The domain's original edges, adjusted by these labels."""
        new = adjust_homophily(
            domain.edges.index, labels, self.h0, edge_weight=domain.edges.weight, candidates=self.candidates,
            on_shortage=self.on_shortage, compat=self.compat, seed=self.seed, round=round, dtype=domain.x.dtype,
        )  # fmt: skip
        return (new.edge_index, new.edge_weight), new.report


class Networks(nn.Module):
    """Encoder, class head, and domain head behind the reversal."""

    def __init__(self, encoder: nn.Module, classes: nn.Module, domain: nn.Module) -> None:
        super().__init__()
        self.encoder, self.classes, self.domain = encoder, classes, domain

    def logits(self, x: Tensor, graph: Weighted) -> Float[Tensor, "n C"]:
        return self.classes(self.encoder(x, *graph))


@torch.no_grad()
def evaluated(module: nn.Module, run: Any) -> Tensor:
    """``run()`` with the module in evaluation mode and no gradient."""
    mode = module.training
    module.eval()
    try:
        return run()
    finally:
        module.train(mode)


def mean_of(hits: Tensor) -> float:
    """Share of True; nan of nothing."""
    return float(hits.double().mean())


def fit_mlp(domain: Domain, n_classes: int, *, epochs: int = 300, lr: float = 7e-3) -> nn.Module:
    """The classifier on attributes alone, trained on the source and frozen. (3.5)"""
    mlp = attribute_mlp(domain.x.shape[1], n_classes).to(domain.x)
    optimizer = torch.optim.Adam(mlp.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.8)
    x, y = domain.x[domain.train], domain.y[domain.train]
    for _ in range(epochs):
        optimizer.zero_grad()
        cross_entropy(mlp(x), y).backward()
        optimizer.step()
        scheduler.step()
    return mlp.requires_grad_(False).eval()


class Alternation:
    """The loop of 3.10, one epoch a :meth:`step`: pseudo-labels, adjustment, one step of Adam.

    ``labels`` (n_t,) are the pseudo-labels yhat, ``source`` and ``target`` the current graphs as (edges, weights).
    """

    def __init__(
        self,
        domains: tuple[Domain, Domain],
        networks: Networks,
        attribute_labels: Int64[Tensor, " m"],
        schedule: Schedule,
    ) -> None:
        self.domains, self.networks, self.schedule = domains, networks, schedule
        self.attribute_labels = attribute_labels
        self.optimizer = torch.optim.Adam(networks.parameters(), lr=schedule.lr)
        self.epoch = 0
        self.labels = torch.full_like(attribute_labels, -1)
        self.history: list[dict[str, float]] = []
        self.best: tuple[float, dict[str, Tensor]] | None = None
        self.source, self.target = domains[0].plain(), domains[1].plain()
        if schedule.sides in ("both", "source"):
            self.source, _ = schedule.adjusted(domains[0], domains[0].y, round=0)

    def target_logits(self) -> Float[Tensor, "m C"]:
        return evaluated(self.networks, lambda: self.networks.logits(self.domains[1].x, self.target))

    def step(self) -> None:
        """One epoch. What is recorded belongs to the parameters before the step."""
        schedule, seen = self.schedule, self.target
        guess = self.target_logits().argmax(1)
        agree = guess == self.attribute_labels
        if self.epoch >= schedule.start_epoch:
            kept = self.labels if schedule.pseudo == "sticky" else torch.full_like(self.labels, -1)
            self.labels = torch.where(agree, guess, kept)
        if schedule.adjusts_target(self.epoch):
            self.target, _ = schedule.adjusted(self.domains[1], self.labels, round=self.epoch)

        self.networks.train()
        loss, logits, domain_accuracy = self.loss()
        self.record(agree, guess, logits.detach(), domain_accuracy, float(loss.detach()), seen)
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = schedule.rate(self.epoch)
        self.optimizer.step()
        self.epoch += 1

    def loss(self) -> tuple[Tensor, Tensor, float]:
        """CE(source) + BCE(domain of source, 0) + BCE(domain of target, 1), the latter two behind the reversal. (3.6)

        Also gives the source's logits and the domain head's accuracy, the mean over the two graphs.
        """
        source, target = self.domains
        here = self.networks.encoder(source.x, *self.source)
        logits = self.networks.classes(here)
        loss = cross_entropy(logits[source.train], source.y[source.train])
        if self.schedule.lambda_max == 0:  # the domain head would learn for nobody
            return loss, logits, math.nan
        there = self.networks.encoder(target.x, *self.target)
        strength = self.schedule.reversal(self.epoch)
        domain = [self.networks.domain(reverse(z, strength)).flatten() for z in (here, there)]
        for label, z in enumerate(domain):
            loss = loss + binary_cross_entropy_with_logits(z, torch.full_like(z, label))
        return loss, logits, (mean_of(domain[0] < 0) + mean_of(domain[1] >= 0)) / 2

    def record(
        self, agree: Tensor, guess: Tensor, logits: Tensor, domain_accuracy: float, loss: float,
        graph: Weighted,
    ) -> None:  # fmt: skip
        """Note where training stands, and keep the parameters if their score is the best so far."""
        source, target = self.domains
        line = {
            "epoch": self.epoch,
            "loss": loss,
            "coverage": mean_of(self.labels >= 0),
            "agreement": mean_of(agree),
            "domain_accuracy": domain_accuracy,
            "source_val": mean_of(logits[source.val].argmax(1) == source.y[source.val]),
        }
        if self.schedule.selection != "last":
            line["score"] = {
                "source_val": line["source_val"],
                "agreement": line["agreement"] + line["source_val"],
                "target_val": mean_of(guess[target.val] == target.y[target.val]),
            }[self.schedule.selection]
            if self.best is None or line["score"] > self.best[0]:
                kept = {name: value.detach().clone() for name, value in self.networks.state_dict().items()}
                self.best = line["score"], kept | {"edges": graph[0], "weights": graph[1]}
        self.history.append(line)

    def finish(self) -> None:
        """Go back to the best parameters and their graph, where a selection was asked for."""
        if self.best is not None:
            state = dict(self.best[1])
            self.target = state.pop("edges"), state.pop("weights")
            self.networks.load_state_dict(state)

    # ------------------------------------------------------------------------------------------------------ resume

    def save(self, path: str | os.PathLike[str], fingerprint: str) -> None:
        """Everything needed to continue exactly, in one safetensors file."""
        from safetensors.torch import save_file

        tensors = {f"networks.{name}": value for name, value in self.networks.state_dict().items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in state.items()}
        tensors |= {f"rng.{i}": state for i, state in enumerate(_random_states(self.attribute_labels.device))}
        tensors |= {"labels": self.labels, "edges": self.target[0], "weights": self.target[1]}
        if self.best is not None:
            tensors |= {f"best.{name}": value for name, value in self.best[1].items()}
        about = {
            "epoch": self.epoch, "history": self.history, "fingerprint": fingerprint,
            "score": None if self.best is None else self.best[0],
        }  # fmt: skip
        with replacing(path) as part:
            whole = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
            save_file(whole, part, metadata={"about": json.dumps(about)})

    def load(self, path: str | os.PathLike[str], fingerprint: str) -> None:
        """Continue where :meth:`save` was called.

        Raises:
            ValueError: the file is damaged, or of another run (other parameters, modules or graphs).
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(Path(path), "pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                tensors = {name: file.get_tensor(name).to(self.labels.device) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is no checkpoint, or damaged ({error}): remove it, or name another") from error
        if about.get("fingerprint") != fingerprint:
            raise ValueError(f"{path} belongs to a fit with other parameters or graphs: remove it, or name another")
        self.networks.load_state_dict(_below("networks.", tensors))
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in _below("optimizer.", tensors).items():
            number, _, field = name.partition(".")
            state.setdefault(int(number), {})[field] = value.cpu() if field == "step" else value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        self.epoch, self.history = about["epoch"], about["history"]
        self.labels, self.target = tensors["labels"], (tensors["edges"], tensors["weights"])
        if about["score"] is not None:
            self.best = about["score"], _below("best.", tensors)
        _restore_random(_below("rng.", tensors), self.labels.device)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _restore_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["0"].cpu())
    if "1" in states:
        torch.cuda.set_rng_state(states["1"].cpu(), device)
