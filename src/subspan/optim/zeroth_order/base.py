"""What zeroth-order optimisers share: two evaluations of the loss along a random direction, and a step along it.

Memory is that of the forward pass: directions are drawn again from numbers whenever they are needed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from subspan.errors import NonFinite
from subspan.optim.groups import restore_buffers
from subspan.optim.zeroth_order.blocks import Block, Direction, seeded
from subspan.optim.zeroth_order.perturbed import Restore, Weights
from subspan.surgery import is_conv1d, parameter_owners

Closure = Callable[[], Tensor | float]
Backend = Literal["auto", "inplace", "lowrank"]


@dataclass(frozen=True)
class StepInfo:
    """One step: what was measured, and what it cost."""

    loss: float
    """Mean of the two evaluations, F(X) up to a term of order eps^2."""
    c: float
    """Slope along the direction, (F(X + eps Z) - F(X - eps Z)) / (2 eps)."""
    queries: int
    """Evaluations of the loss in this step."""
    losses: list[float] = field(repr=False)
    """Their values, in order: what ``replay`` needs."""
    rates: list[float] = field(repr=False)
    """The learning rate of each group."""
    in_place: list[str] = field(repr=False)
    """Blocks whose layer the model never calls: the first step finds them, at the cost of one query."""
    rank: int = 0
    tau: float = math.nan
    kept: list[int] = field(default_factory=list)
    """LOZO+, at a refresh: how many directions were kept, the threshold, and the candidates' numbers."""
    kappa: float = math.nan
    """LOZO+, at a refresh: mean curvature along the kept probes."""


@dataclass
class Query:
    """The user's closure, counted, checked, and with one stream of random numbers (dropout) throughout a step."""

    closure: Closure
    key: tuple[int, int]
    devices: list[torch.device]
    losses: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        accelerators = [d for d in self.devices if d.type != "cpu"]
        kind = accelerators[0].type if accelerators else "cuda"
        seed = seeded(torch.device("cpu"), "closure", *self.key).initial_seed()
        with torch.random.fork_rng(accelerators, device_type=kind):
            # torch.manual_seed would also move the streams of devices that were not forked.
            torch.default_generator.manual_seed(seed)
            for device in accelerators:
                getattr(torch, kind).default_generators[device.index].manual_seed(seed)
            try:
                loss = self.closure()
            except RuntimeError as error:
                if "does not require grad" in str(error):
                    raise ValueError("the closure must return the loss without calling backward") from error
                raise
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"the closure must return one number, got a tensor of shape {tuple(loss.shape)}")
        value = _mean_over_processes(float(loss))
        self.losses.append(value)
        return value


def _mean_over_processes(value: float) -> float:
    """One number a query crosses between processes; all of them draw the same directions."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    backend = torch.distributed.get_backend()
    total = torch.tensor(value, dtype=torch.float64, device="cuda" if backend == "nccl" else "cpu")
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


class Common(TypedDict, total=False):
    """Options of every optimiser here."""

    eps: float
    """Radius of the finite difference (1e-3)."""
    weight_decay: float
    """Decoupled, p <- p (1 - lr weight_decay). With the low-rank back end a matrix itself decays at the end of a period
    and what it has collected at each step."""
    seed: int
    """Of all directions (0)."""
    model: nn.Module | None
    """The model, for the low-rank back end and to recognise transformers' Conv1D."""
    backend: Backend
    """"inplace" moves the weights and back; "lowrank" (with "auto" wherever ``model`` is given and its layers allow)
    adds a low-rank term to layer outputs and collects a period's update as A V^T in float32. The weight then lags
    behind: call ``merge()`` before saving the model."""
    restore: Restore
    """"exact" keeps a copy of the weights during a step, "arith" undoes the perturbation by arithmetic; "auto" copies
    16-bit weights and those with lr 0."""
    on_nonfinite: Literal["raise", "skip"]
    """Raise ``NonFinite`` at a loss that is NaN or infinite, or skip the step."""


class ZOOptimizer(torch.optim.Optimizer, ABC):
    """What MeZO, LOZO and LOZO+ share: ``step(closure)``, where the closure returns the loss of the current batch.

    The closure runs without autograd, and several times a step with the same dropout masks; the global random state is
    left as it was. ``measure(closure)`` does the evaluations and ``step()`` the move, for trainers that keep the two
    apart. Groups may differ in ``lr``, ``weight_decay``, ``rank``, ``low_rank=False`` (dense directions) and
    ``fan_in_fan_out`` (weights stored inputs x outputs).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        rank: int,
        low_rank: bool,
        *,
        eps: float = 1e-3,
        weight_decay: float = 0.0,
        seed: int = 0,
        model: nn.Module | None = None,
        backend: Backend = "auto",
        restore: Restore = "auto",
        on_nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        if not 0 < eps < math.inf:
            raise ValueError(f"eps must be a positive number, got {eps}")
        if backend not in ("auto", "inplace", "lowrank"):
            raise ValueError(f"backend must be 'auto', 'inplace' or 'lowrank', got {backend!r}")
        if backend == "lowrank" and model is None:
            raise ValueError("backend='lowrank' works on the outputs of layers: pass model=")
        if restore not in ("auto", "exact", "arith"):
            raise ValueError(f"restore must be 'auto', 'exact' or 'arith', got {restore!r}")
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}")
        defaults = {"lr": lr, "weight_decay": weight_decay, "rank": rank, "low_rank": low_rank, "fan_in_fan_out": False}
        super().__init__(params, defaults)
        self.eps, self.seed, self.on_nonfinite = eps, seed, on_nonfinite
        self.t = 0
        """Steps taken."""
        self.total_queries = 0
        self.last: StepInfo | None = None
        self._settled: list[str] | None = None
        self._pending: tuple[list[tuple[Direction, float]], StepInfo] | None = None
        self.blocks = self._make_blocks(model)
        if not self.blocks:
            raise ValueError("there is no parameter to train: every one is frozen")
        self.weights = Weights(self.blocks, None if backend == "inplace" else model, restore)

    def _make_blocks(self, model: nn.Module | None) -> list[Block]:
        owners = parameter_owners(model) if model is not None else {}
        blocks = []
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                places = owners.get(p, [])
                name = places[0][0] if places else group.get("param_names", {i: f"parameter {len(blocks)}"})[i]
                _check(p, name)
                if p.requires_grad:
                    transposed = group["fan_in_fan_out"] or any(is_conv1d(m) for _, m in places)
                    blocks.append(Block(len(blocks), name, p, group, _rank_of(p, group), transposed))
        return blocks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimiser is built: directions are numbered by parameter. Raises ``ValueError`` else."""
        if hasattr(self, "blocks"):
            raise ValueError("zeroth-order directions are numbered by parameter: build a new optimiser")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for key in ("lr", "weight_decay"):
            if not 0 <= group[key] < math.inf:
                raise ValueError(f"{key} must be a finite number of at least 0, got {group[key]}")
        if group["rank"] < 1:
            raise ValueError(f"rank must be at least 1, got {group['rank']}")

    @torch.no_grad()
    def measure(self, closure: Closure) -> StepInfo:
        """Evaluate the loss along the next direction(s); ``step()`` then moves. Weights are as before afterwards, but
        for the start of a period of LOZO+, which has moved along its probes, also where the step itself then fails.

        Raises:
            NonFinite: the loss is NaN or infinite (unless ``on_nonfinite="skip"``).
            ValueError: the closure returns no single number, or calls backward.
        """
        if self._pending is not None:
            raise ValueError("measure was called twice without a step in between")
        devices = list({b.param.device for b in self.blocks})
        query = Query(closure, (self.seed, self.t), devices)
        before = self._settle(Query(closure, (self.seed, self.t), devices))
        try:
            facts = self._refresh(query)
            moves, loss, c = self._explore(query)
        finally:
            queries = before + len(query.losses)
            self.total_queries += queries
        if not math.isfinite(c):
            if self.on_nonfinite == "raise":
                raise NonFinite(f"the loss is {loss} in step {self.t + 1}; {self._suspect()}")
            moves = []
        rates = [float(g["lr"]) for g in self.param_groups]
        info = StepInfo(loss, c, queries, query.losses, rates, self._settled or [], **facts)
        self._pending = moves, info
        return info

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step on the closure's batch, or the move that ``measure`` prepared; returns the loss (a plain number)."""
        if closure is not None:
            self.measure(closure)
        if self._pending is None:
            raise ValueError("step needs a closure that returns the loss (or a measure(closure) before it)")
        moves, info = self._pending
        self._pending = None
        if moves:
            self._decay()
        for direction, c in moves:
            self._move(direction, c)
        self.t += 1
        self.last = info
        return info.loss

    def _settle(self, query: Query) -> int:
        """Once a run: find out which weights must move in place. Returns the evaluations it took."""
        if self._settled is not None or not self.weights.slots:
            return 0
        self._settled = self.weights.silent(query)
        self.weights.in_place(self._settled)
        return 1

    def _refresh(self, query: Query) -> dict[str, Any]:
        """What happens before the direction of a step is drawn; facts for ``StepInfo``."""
        return {}

    @abstractmethod
    def _explore(self, query: Query) -> tuple[list[tuple[Direction, float]], float, float]:
        """Directions to move along with their slopes, the loss, and the mean slope."""

    def _slope(self, direction: Direction, query: Query) -> tuple[float, float]:
        """(c, mean loss) along a direction."""
        plus, minus = self.weights.evaluate(direction, self.eps, query)
        return (plus - minus) / (2 * self.eps), (plus + minus) / 2

    def _rate(self, block: Block) -> float:
        return float(block.group["lr"])

    def _decay(self) -> None:
        for block in self.blocks:
            if rate := self._rate(block) * block.group["weight_decay"]:
                block.param.mul_(1 - rate)

    def _move(self, direction: Direction, c: float) -> None:
        """X <- X - lr c Z."""
        for block in direction.blocks():
            if rate := self._rate(block):
                direction.add(block, -rate * c)

    def _suspect(self) -> str:
        bad = [b.name for b in self.blocks if not b.param.isfinite().all()]
        if bad:
            return f"{', '.join(bad[:3])} already holds NaN or infinity: load an earlier state"
        return "the weights are finite: lower eps or lr, or look at this batch"

    def suggest_lr(self, closure: Closure, n: int = 8) -> float:
        """A learning rate at the edge of stability, 1 / (mean positive curvature along n random directions).

        Costs 2 n + 1 queries (not counted) and changes nothing. Raises ``ValueError`` where no direction curves up.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        curvatures = []
        with torch.no_grad():
            query = Query(closure, (self.seed, self.t), list({b.param.device for b in self.blocks}))
            self._settle(query)
            centre = query()
            for i in range(n):
                plus, minus = self.weights.evaluate(self._direction("suggest", i), self.eps, query)
                curvatures.append((plus + minus - 2 * centre) / self.eps**2)
        mean = sum(max(k, 0.0) for k in curvatures) / n
        if not mean > self._curvature_noise(centre):
            raise ValueError(f"no curvature was measured at eps={self.eps}: the loss is flat here, or eps too small")
        return 1 / mean

    def _curvature_noise(self, loss: float) -> float:
        """What rounding makes of a second difference, in the arithmetic of the coarsest parameter."""
        return 4 * max(torch.finfo(b.param.dtype).eps for b in self.blocks) * abs(loss) / self.eps**2

    def _direction(self, *key: int | str) -> Direction:
        """A fresh direction of all blocks, of unit scale."""
        factors = {}
        for block in self.blocks:
            if block.rank:
                left = block.left(block.rank, self.seed, *key) * block.rank**-0.5
                factors[block] = left, block.gaussian(block.shape[1], block.rank, "probe", self.seed, *key)
        return Direction(factors, {b: (self.seed, *key) for b in self.blocks if not b.rank})

    def merge(self) -> None:
        """Write what has been collected beside the weights into them; there is nothing without a low-rank back end."""

    # State: numbers, and what the blocks accumulate. Directions are drawn again.

    def _numbers(self) -> dict[str, Any]:
        kind = type(self).__name__
        counts = {"t": self.t, "total_queries": self.total_queries, "seed": self.seed, "settled": self._settled}
        return {"kind": kind, **counts}

    def _numbers_in(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        kind = state_dict.get("zeroth_order", {}).get("kind", "another optimiser")
        if kind != type(self).__name__:
            raise ValueError(f"this is the state of {kind}, not of {type(self).__name__}")
        return state_dict["zeroth_order"]

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the counters under "zeroth_order". Between ``measure`` and ``step`` there is no state."""
        return {**super().state_dict(), "zeroth_order": self._numbers()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a run, bit for bit. Raises ``ValueError`` for the state of another kind of optimiser."""
        numbers = self._numbers_in(state_dict)
        super().load_state_dict(state_dict)
        restore_buffers(self, state_dict)
        for block in self.blocks:  # torch replaces the groups
            block.group = next(g for g in self.param_groups if any(p is block.param for p in g["params"]))
        self.t, self.total_queries, self.seed = numbers["t"], numbers["total_queries"], numbers["seed"]
        self._settled = numbers["settled"]
        self.weights.in_place(self._settled or [])


def _check(param: Tensor, name: str) -> None:
    if param.layout != torch.strided:
        raise TypeError(f"{name} is sparse; zeroth-order steps need dense parameters")
    if not param.is_floating_point():
        raise TypeError(f"{name} has dtype {param.dtype}; zeroth-order steps need real floating-point parameters")


def _rank_of(param: Tensor, group: dict[str, Any]) -> int:
    """0 (dense) for vectors and thin matrices: a 10 x 1 matrix at rank 1 has three times a dense draw's variance."""
    if not group["low_rank"] or param.ndim < 2 or param.numel() == 0:
        return 0
    smaller = min(param.shape[0], param[0].numel())
    return group["rank"] if smaller > 2 * group["rank"] else 0


def replay(optimizer: ZOOptimizer, log: Iterable[StepInfo]) -> None:
    """Repeat a recorded run from its base weights without one forward pass: a step is its losses and its rates.

    ``optimizer`` is built as that of the run was, on the weights the run began with; ``log`` holds ``optimizer.last``
    of each of its steps. The weights end bitwise equal (same device, one thread).
    """
    for info in log:
        optimizer._settled = info.in_place
        optimizer.weights.in_place(info.in_place)
        for group, rate in zip(optimizer.param_groups, info.rates, strict=True):
            group["lr"] = rate
        optimizer.step(iter(info.losses).__next__)
