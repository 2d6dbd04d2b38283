"""What MoRAM is measured against, plainly: other ways to learn tasks one after the other in the same linear layers.

Each is a ``Learner``: it wraps the target layers of a network, opens a task, says which parameters train and what
penalty is added to the loss, and closes the task.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subspan.adapters import MoRAM, MoRAMConfig, cl_metrics
from subspan.adapters.moram.model import memory_of, wrap
from subspan.surgery import replace_modules


class Pair(nn.Module):
    """One LoRA pair: keys uniform on +-1/sqrt(d_in), values zero, scale 1."""

    def __init__(self, base: nn.Linear, r: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = base.in_features**-0.5
        self.A = nn.Parameter((2 * torch.rand(r, base.in_features, generator=generator) - 1) * bound)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.A.T @ self.B.T


class Pairs(nn.Module):
    """A frozen linear layer and a list of LoRA pairs. Those listed in ``chosen`` are summed; with a router row per pair
    (``routed``) the two best ones are mixed by a softmax over their two logits, token by token."""

    def __init__(self, base: nn.Linear, routed: bool = False) -> None:
        super().__init__()
        self.base, self.routed = base, routed
        self.pairs = nn.ModuleList()
        self.router = nn.ParameterList()
        self.chosen: Sequence[int] = ()

    def add(self, r: int, generator: torch.Generator) -> None:
        self.pairs.append(Pair(self.base, r, generator))
        if self.routed:
            bound = self.base.in_features**-0.5
            self.router.append(nn.Parameter((2 * torch.rand(self.base.in_features, generator=generator) - 1) * bound))
        self.chosen = range(len(self.pairs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if not self.routed:
            for i in self.chosen:
                y = y + self.pairs[i](x)
            return y
        if len(self.pairs) == 0:
            return y
        logits = x @ torch.stack(list(self.router)).T
        best = logits.topk(min(2, len(self.pairs)), -1)
        gates = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))
        for i, pair in enumerate(self.pairs):
            y = y + gates[..., i : i + 1] * pair(x)
        return y


class Learner:
    """Sequential LoRA: one pair of rank ``r`` that every task goes on training.

    Args:
        net: the network, which the learner changes in place.
        targets: names of its linear layers.
        r: rank of what a task adds.
        tasks: how many tasks there will be.
    """

    routed = False

    def __init__(self, net: nn.Module, targets: Sequence[str], r: int, tasks: int) -> None:
        self.net, self.r, self.tasks = net.requires_grad_(False), r, tasks
        self.layers = [Pairs(net.get_submodule(name), self.routed) for name in targets]  # pyright: ignore[reportArgumentType]
        replace_modules(net, {layer.base: layer for layer in self.layers})
        self.task = -1

    def begin(self, generator: torch.Generator) -> None:
        self.task += 1
        if self.task == 0:  # as many parameters as the others have at the end
            for layer in self.layers:
                layer.add(self.r * self.tasks, generator)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def penalty(self) -> Tensor | float:
        return 0.0

    def end(self) -> None:
        pass

    def choose(self, task: int) -> None:
        """Before scoring ``task``; only a learner with an oracle listens."""


class Incremental(Learner):
    """A fresh pair of rank r per task; earlier ones are frozen, and all are summed."""

    def begin(self, generator: torch.Generator) -> None:
        self.task += 1
        for layer in self.layers:
            layer.pairs.requires_grad_(False)
            layer.add(self.r, generator)


class OLoRA(Incremental):
    """Incremental, with a penalty on the overlap of the new A with the old ones (Wang et al. 2023: sum |A_t A_iᵀ|)."""

    def __init__(self, *args: Any, weight: float = 0.5) -> None:
        super().__init__(*args)
        self.weight = weight

    def penalty(self) -> Tensor | float:
        total: Tensor | float = 0.0
        for layer in self.layers:
            *old, new = (p for name, p in layer.pairs.named_parameters() if name.endswith("A"))
            if old:
                total = total + (torch.cat(tuple(old)) @ new.T).abs().sum()
        return self.weight * total


class Oracle(Incremental):
    """A pair per task, and at scoring somebody says which task a row is from: an upper reference, no competitor."""

    def begin(self, generator: torch.Generator) -> None:
        super().begin(generator)
        self.choose(self.task)

    def choose(self, task: int) -> None:
        for layer in self.layers:
            layer.chosen = [task] if task < len(layer.pairs) else []


class MixtureOfLoRA(Incremental):
    """A rank-r expert and a router row per task; two experts are mixed for each token. Old router rows are frozen."""

    routed = True
    rows_stay = True

    def begin(self, generator: torch.Generator) -> None:
        super().begin(generator)
        for layer in self.layers:
            for row in list(layer.router)[:-1]:
                row.requires_grad_(not self.rows_stay)


class RoutersAllTrain(MixtureOfLoRA):
    """The same with every router row trainable."""

    rows_stay = False


class Full(Learner):
    """Fine-tuning of all weights of the network, task after task."""

    def __init__(self, net: nn.Module, targets: Sequence[str], r: int, tasks: int) -> None:
        self.net, self.task, self.layers = net.requires_grad_(True), -1, []

    def begin(self, generator: torch.Generator) -> None:
        self.task += 1


class Memory(Learner):
    """MoRAM behind the same interface."""

    def __init__(self, net: nn.Module, targets: Sequence[str], r: int, tasks: int, **options: Any) -> None:
        config = MoRAMConfig(r=r, target_modules=(), **options)
        self.net = wrap(net, {name: net.get_submodule(name) for name in targets}, config)
        self.memory: MoRAM = memory_of(net)

    def begin(self, generator: torch.Generator) -> None:
        self.memory.begin_task(generator=generator)

    def end(self) -> None:
        self.memory.end_task()


def stream(
    learner: Learner,
    batches: Sequence[Callable[[int], Tensor]],
    scores: Callable[[int], tuple[float, float]],
    *,
    steps: int,
    lr: float,
    generator: torch.Generator,
    after: Callable[[int], None] | None = None,
) -> list[list[tuple[float, float]]]:
    """Learn tasks in order; row i holds (validation, test) accuracy of every task after task i.

    ``batches[t](step)`` is the training loss of one batch of task t. A new AdamW per task, cosine rate, no decay.
    """
    table = []
    for task, loss_of in enumerate(batches):
        learner.begin(generator)
        memory = getattr(learner, "memory", None)
        optimizer = torch.optim.AdamW(learner.parameters(), lr=lr, weight_decay=0.0, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        learner.net.train()
        for step in range(steps):
            if memory is not None:
                memory.set_progress(step / steps)
            optimizer.zero_grad()
            (loss_of(step) + learner.penalty()).backward()
            optimizer.step()
            schedule.step()
        learner.end()
        learner.net.eval()
        with torch.no_grad():
            row = []
            for other in range(len(batches)):
                learner.choose(other)
                row.append(scores(other))
            learner.choose(task)
        table.append(row)
        if after is not None:
            after(task)
    return table


Make = Callable[[nn.Module, Sequence[str], int, int], Learner]


class Variant(NamedTuple):
    """A method at one setting."""

    make: Make
    lr: float
    config: str


def over(make: Make, lrs: Sequence[float]) -> list[Variant]:
    return [Variant(make, lr, f"lr {lr:g}") for lr in lrs]


def memory(lr: float, tau: float) -> Variant:
    return Variant(partial(Memory, temperature=tau, threshold=0.2), lr, f"lr {lr:g}, tau {tau:g}")


def figures(table: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """OP, forgetting and just-learned of both splits."""
    out = {}
    for at, split in enumerate(("validation", "test")):
        found = cl_metrics([[cell[at] for cell in row] for row in table])
        names = {"op": "last", "forgetting": "forgetting", "just_learned": "just_learned"}
        out |= {f"{split}_{name}": found[key] for name, key in names.items()}
    return out
