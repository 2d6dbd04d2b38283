"""What trains in the OVLR claim: small networks, their batches, and evolution strategies on all weights, the peer."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


def network(seed: int, *widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class WeightNoise:
    """Antithetic evolution strategies on all weights, the peer in d dimensions: one forward pass per evaluation.

    ``loss`` gives one number for each of the stacked outputs (pairs x B x K).
    """

    def __init__(self, model: nn.Module, loss: Loss, pairs: int, sigma: float, seed: int) -> None:
        self.model, self.loss, self.pairs, self.sigma = model, loss, pairs, sigma
        self.params = {name: p.detach() for name, p in model.named_parameters()}
        self.generator = torch.Generator().manual_seed(seed)

    def gradient(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Estimates for each parameter from 2 ``pairs`` losses of the batch."""
        noise = {n: torch.randn(self.pairs, *p.shape, generator=self.generator) for n, p in self.params.items()}

        def score(sign: int) -> Tensor:
            moved = {n: p + sign * self.sigma * noise[n] for n, p in self.params.items()}
            run = torch.vmap(lambda q: torch.func.functional_call(self.model, q, (x,)))
            return self.loss(run(moved), y)

        with torch.no_grad():
            weight = (score(1) - score(-1)) / (2 * self.sigma * self.pairs)
        return [torch.einsum("m,m...->...", weight, e) for e in noise.values()]

    def backward(self, x: Tensor, y: Tensor) -> None:
        for p, g in zip(self.model.parameters(), self.gradient(x, y), strict=True):
            p.grad = g


@dataclass
class Training:
    """A network, its optimiser and the order of its batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: Tensor
    y: Tensor
    batch: int
    seed: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def run(self, loss: "Loss | WeightNoise", epochs: int) -> None:
        for _ in range(epochs):
            for rows in torch.randperm(len(self.y), generator=self.generator).split(self.batch):
                self.optimizer.zero_grad()
                if isinstance(loss, WeightNoise):
                    loss.backward(self.x[rows], self.y[rows])
                else:
                    loss(self.model(self.x[rows]), self.y[rows]).backward()
                self.optimizer.step()


def mean_of(loss: Loss) -> Loss:
    """Over the batch, also of stacked outputs."""
    return lambda out, y: loss(out, y).mean(-1)
