"""A small harness for the optimiser mismatch: pre-train, fine-tune {full, LoRA} x {AdamW, Muon} over rates and seeds.

The same path serves the 64-pixel digits here and a language model: a ``Task`` says what is trained on what.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from subspan.data import digits
from subspan.optim.mismatch import StudyRow, update_strength
from subspan.optim.muon import MuonAdamW
from subspan.optim.routing import build_muon_groups


@dataclass(frozen=True)
class Task:
    """What one seed of a study trains.

    Attributes:
        model: the untrained model.
        batches: ("source" or "target", generator) -> endless training batches.
        loss: (model, batch) -> scalar.
        evaluate: model -> metrics, among them ``score`` (reported) and ``validation`` (selects the learning rate).
        lora: keyword arguments of ``peft.LoraConfig``.
        adamw_pattern: names of parameters Muon should leave to AdamW (see ``route_parameters``).
    """

    model: nn.Module
    batches: Callable[[str, torch.Generator], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    lora: Mapping[str, Any]
    adamw_pattern: str | None = None


@dataclass(frozen=True)
class StudyConfig:
    """A study. ``lrs`` maps "full-adamw", "lora-muon" and so on to a grid; a missing key falls back to "default".

    ``task`` makes the ``Task`` of a seed. Schedules are cosine with ``warmup`` (a fraction of the steps), gradients are
    clipped to ``clip``.
    """

    task: Callable[[int], Task]
    lrs: Mapping[str, Sequence[float]]
    pretrain: Sequence[str] = ("adamw", "muon")
    modes: Sequence[str] = ("full", "lora")
    optimizers: Sequence[str] = ("adamw", "muon")
    seeds: Sequence[int] = (0, 1, 2)
    pretrain_lr: Mapping[str, float] = field(default_factory=lambda: {"adamw": 1e-3, "muon": 3e-3})
    pretrain_steps: int = 800
    steps: int = 150
    weight_decay: float = 0.0
    warmup: float = 0.03
    clip: float = 1.0

    def grid(self, mode: str, optimizer: str) -> Sequence[float]:
        return self.lrs.get(f"{mode}-{optimizer}") or self.lrs["default"]


# Makes an optimiser of the trainable parameters of a model at a learning rate.
OptimizerFactory = Callable[[nn.Module, float], torch.optim.Optimizer]


def make_optimizer(
    name: str | OptimizerFactory,
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    adamw_pattern: str | None = None,
) -> torch.optim.Optimizer:
    """ "muon" (``MuonAdamW`` with its routing), "adamw" (torch's, with its default betas) or what a factory makes."""
    if callable(name):
        return name(model, lr)
    if name == "muon":
        return MuonAdamW(build_muon_groups(model, lr, weight_decay, adamw_pattern=adamw_pattern))
    if name == "adamw":
        params = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay)
    raise ValueError(f"optimizer must be 'adamw' or 'muon', got {name!r}")


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    steps: int,
    warmup: float = 0.03,
    clip: float = 1.0,
) -> None:
    """``steps`` steps with warm-up, cosine decay to zero and clipping of the gradient norm."""
    rising = max(1, round(warmup * steps))

    def rate(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * (step - rising) / max(1, steps - rising)))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    model.train()
    for _ in range(steps):
        loss(model, next(batches)).backward()
        nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


def pretrain(task: Task, optimizer: str, lr: float, steps: int, generator: torch.Generator) -> nn.Module:
    """A copy of the task's model, all of it trained on the source."""
    model = copy.deepcopy(task.model)
    opt = make_optimizer(optimizer, model, lr, adamw_pattern=task.adamw_pattern)
    train(model, opt, task.batches("source", generator), task.loss, steps)
    return model


def finetune(
    task: Task,
    base: nn.Module,
    mode: str,
    optimizer: str | OptimizerFactory,
    lr: float,
    steps: int,
    generator: torch.Generator,
    *,
    weight_decay: float = 0.0,
    warmup: float = 0.03,
    clip: float = 1.0,
    peft_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A copy of ``base`` trained on the target: all of it ("full") or through an adapter ("lora").

    ``peft_options`` (for example ``use_dora=True``) are added to the task's LoRA configuration.
    """
    model = copy.deepcopy(base)
    if mode == "lora":
        from peft import LoraConfig, get_peft_model

        # peft draws A from torch's global generator; the fork keeps the caller's stream as it is.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            model = get_peft_model(model, LoraConfig(**{**task.lora, **(peft_options or {})}))  # pyright: ignore[reportArgumentType]
    elif mode != "full":
        raise ValueError(f"mode must be 'full' or 'lora', got {mode!r}")
    opt = make_optimizer(optimizer, model, lr, weight_decay, task.adamw_pattern)
    train(model, opt, task.batches("target", generator), task.loss, steps, warmup, clip)
    return model


def run_study(config: StudyConfig, on_row: Callable[[StudyRow], Any] | None = None) -> list[StudyRow]:
    """Every combination of the configuration; ``mismatch_table`` reads the rows.

    A row's metrics are the task's, those before fine-tuning with the prefix ``initial_``, and the mean ``cosd`` over
    layers. ``on_row`` sees each row as it is done (to print or save it).
    """
    rows = []
    for seed in config.seeds:
        task = config.task(seed)
        for before in config.pretrain:
            generator = torch.Generator().manual_seed(seed)
            base = pretrain(task, before, config.pretrain_lr[before], config.pretrain_steps, generator)
            initial = {f"initial_{k}": v for k, v in task.evaluate(base).items()}
            for mode in config.modes:
                for optimizer in config.optimizers:
                    for lr in config.grid(mode, optimizer):
                        # The same seed for all: the runs see the same batches and start from the same A.
                        generator = torch.Generator().manual_seed(1000 + seed)
                        model = finetune(
                            task, base, mode, optimizer, lr, config.steps, generator,
                            weight_decay=config.weight_decay, warmup=config.warmup, clip=config.clip,
                        )  # fmt: skip
                        strength = update_strength(model, base)
                        cosd = sum(r["cosd"] for r in strength) / len(strength)
                        metrics = {**task.evaluate(model), **initial, "cosd": cosd}
                        rows.append(StudyRow(before, mode, optimizer, lr, seed, metrics))
                        if on_row is not None:
                            on_row(rows[-1])
    return rows


def digits_task(seed: int, pretrain_rows: int = 1000, finetune_rows: int = 200, test_rows: int = 400) -> Task:
    """scikit-learn's 8 x 8 digits: the source is upright, the target rotated by 90 degrees; a 64-192x4-10 MLP.

    Splits depend on the seed; rows left over validate. LoRA (r = 8, s = 2) adapts the four hidden layers and the head
    stays frozen. Metrics: accuracy ``score`` (target test), ``validation`` (target), ``source`` (upright test), and
    the target's test cross-entropy ``loss``.
    """
    generator = torch.Generator().manual_seed(seed)
    data = digits()
    images, labels = 2 * torch.from_numpy(data.images) - 1, torch.from_numpy(data.labels)
    upright, rotated = images.flatten(1), torch.rot90(images, 1, (1, 2)).flatten(1)
    order = torch.randperm(len(images), generator=generator)
    source, tuning, rest = order.split([pretrain_rows, finetune_rows, len(order) - pretrain_rows - finetune_rows])
    test, validation = rest[:test_rows], rest[test_rows:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(64, 192), *(nn.Linear(192, 192) for _ in range(3))]
        hidden = nn.Sequential(*(step for layer in layers for step in (layer, nn.GELU())))
        model = nn.Sequential()
        model.add_module("hidden", hidden)
        model.add_module("head", nn.Linear(192, 10))

    def batches(which: str, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        x, rows = (upright, source) if which == "source" else (rotated, tuning)
        while True:
            pick = rows[torch.randint(len(rows), (64,), generator=generator)]
            yield x[pick], labels[pick]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        def accuracy(x: Tensor, rows: Tensor) -> float:
            return float((model(x[rows]).argmax(-1) == labels[rows]).float().mean())

        return {
            "score": accuracy(rotated, test),
            "validation": accuracy(rotated, validation),
            "source": accuracy(upright, test),
            "loss": float(loss(model, (rotated[test], labels[test]))),
        }

    lora = {"r": 8, "lora_alpha": 16, "target_modules": r"hidden\.[0246]"}
    return Task(model, batches, loss, evaluate, lora)
