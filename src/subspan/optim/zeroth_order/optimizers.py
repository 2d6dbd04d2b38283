"""MeZO: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (NeurIPS 2023, arXiv 2305.17333).
LOZO: see ``algebra``.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from subspan.optim.zeroth_order.algebra import Scaling, scales, transfer_momentum
from subspan.optim.zeroth_order.base import Common, Query, ZOOptimizer
from subspan.optim.zeroth_order.blocks import Block, Direction


class MeZO(ZOOptimizer):
    """Zeroth-order SGD along one dense Gaussian direction, theta <- theta - lr c z.

    Args:
        params: parameters, named parameters or groups.
        lr: 1e-6 to 1e-7 for whole models, 5e-5 to 1e-4 (with eps 1e-2) for LoRA factors.
        n_dirs: directions averaged in a step, two evaluations each.
        common: ``Common``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        *,
        n_dirs: int = 1,
        **common: Unpack[Common],
    ) -> None:
        if n_dirs < 1:
            raise ValueError(f"n_dirs must be at least 1, got {n_dirs}")
        self.n_dirs = n_dirs
        super().__init__(params, lr, rank=1, low_rank=False, **common)

    def _explore(self, query: Query) -> tuple[list[tuple[Direction, float]], float, float]:
        directions = [self._direction("step", self.t, i) for i in range(self.n_dirs)]
        slopes = [self._slope(d, query) for d in directions]
        moves = [(d, c / self.n_dirs) for d, (c, _) in zip(directions, slopes, strict=True)]
        return moves, sum(f for _, f in slopes) / self.n_dirs, sum(c for _, c in moves)


class LOZO(ZOOptimizer):
    """Zeroth-order SGD along low-rank directions U V^T, with V kept for ``interval`` steps; LOZO-M with ``momentum``.

    Args:
        params: parameters, named parameters or groups. Vectors, and matrices with min(m, n) <= 2 rank, move densely.
        lr: learning rate; with scaling "unit" or "paper" it means the same as MeZO's.
        rank: columns of U and V.
        interval: steps between draws of V.
        momentum: beta of LOZO-M, on the matrices. Its memory is mostly within a period: see ``transfer_momentum``.
        bias_correction: let the momentum begin at zero and divide by 1 - beta^k, as Adam does, in place of beginning
            with the whole of the first estimate.
        scaling: "unit" (U V^T / sqrt(r) in probe and update), "paper" (update divided by r) or "reference" (never
            divided: its lr is worth r times the paper's).
        common: ``Common``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        rank: int = 2,
        interval: int = 50,
        *,
        momentum: float = 0.0,
        bias_correction: bool = False,
        scaling: Scaling = "unit",
        **common: Unpack[Common],
    ) -> None:
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        if scaling not in ("unit", "paper", "reference"):
            raise ValueError(f"scaling must be 'unit', 'paper' or 'reference', got {scaling!r}")
        self.interval, self.momentum, self.bias_correction = interval, momentum, bias_correction
        self.scaling: Scaling = scaling
        self.right: dict[Block, Tensor] = {}
        """V of each matrix in this period, n x r."""
        self.kept: dict[Block, list[int]] = {}
        """The candidates it consists of."""
        super().__init__(params, lr, rank, low_rank=True, **common)
        if not self.matrices:
            warnings.warn(
                f"no parameter is a matrix with sides longer than twice the rank {rank}: all of them move densely, as "
                "with MeZO; lower the rank",
                stacklevel=2,
            )

    @property
    def matrices(self) -> list[Block]:
        return [b for b in self.blocks if b.rank]

    def _refresh(self, query: Query) -> dict[str, Any]:
        if self.t % self.interval:
            return {}
        period = self.t // self.interval
        self._adopt({b: [period * b.rank + j for j in range(b.rank)] for b in self.matrices})
        return {"rank": max((b.rank for b in self.matrices), default=0)}

    def _adopt(self, kept: dict[Block, list[int]]) -> None:
        """Begin a period: merge what the last one collected, and carry the momentum over to the new V."""
        self.merge()
        self.kept = kept
        for block, candidates in kept.items():
            new = self._basis(block, candidates)
            if "N" in self.state[block.param]:
                self.state[block.param]["N"] = transfer_momentum(self.state[block.param]["N"], self.right[block], new)
            self.right[block] = new

    def _basis(self, block: Block, candidates: Sequence[int]) -> Tensor:
        return block.right(self.seed, candidates)

    def _explore(self, query: Query) -> tuple[list[tuple[Direction, float]], float, float]:
        factors = {}
        for block in self.matrices:
            right = self.right[block]
            probe, _ = scales(self.scaling, right.shape[1])
            factors[block] = block.left(right.shape[1], self.seed, "step", self.t) * probe, right
        noise = {b: (self.seed, "step", self.t) for b in self.blocks if not b.rank}
        direction = Direction(factors, noise)
        c, loss = self._slope(direction, query)
        return [(direction, c)], loss, c

    def _decay(self) -> None:
        for block in self.blocks:
            rate = self._rate(block) * block.group["weight_decay"]
            if rate and block not in self.weights.slots:
                block.param.mul_(1 - rate)
            elif rate:
                state = self.state[block.param]
                state["decay"] = state.get("decay", 1.0) * (1 - rate)
                if "A" in state:
                    state["A"].mul_(1 - rate)

    def _move(self, direction: Direction, c: float) -> None:
        for block in direction.blocks():
            rate = self._rate(block)
            if block not in direction.factors:
                if rate:
                    direction.add(block, -rate * c)
                continue
            left, right = direction.factors[block]
            _, update = scales(self.scaling, right.shape[1])
            state = self.state[block.param]
            if self.momentum:
                left, c_left = self._remember(state, c * left), 1.0
            else:
                c_left = c
            if not rate:
                continue
            if block in self.weights.slots:
                state["A"] = state.get("A", torch.zeros_like(left)).add(left, alpha=-rate * update * c_left)
                self.weights.slots[block].total = state["A"], right
            else:
                block.add_product(left, right, -rate * update * c_left)

    def _remember(self, state: dict[str, Any], new: Tensor) -> Tensor:
        """(3.4) N <- beta N + (1 - beta) c U; the first step takes c U whole, or the empty start's bias is undone."""
        beta = self.momentum
        if self.bias_correction:
            state["k"] = state.get("k", 0) + 1
            state["N"] = state.get("N", torch.zeros_like(new)) * beta + (1 - beta) * new
            return state["N"] / (1 - beta ** state["k"])
        state["N"] = state["N"] * beta + (1 - beta) * new if "N" in state else new
        return state["N"]

    @torch.no_grad()
    def merge(self) -> None:
        """Write what the period has collected beside the weights (low-rank back end) into them. Safe at any time."""
        for block, slot in self.weights.slots.items():
            state = self.state[block.param]
            if (decay := state.pop("decay", 1.0)) != 1:
                block.param.mul_(decay)
            if (collected := state.pop("A", None)) is not None:
                block.add_product(collected, self.right[block], 1.0)
            slot.total = None

    def _numbers(self) -> dict[str, Any]:
        return super()._numbers() | {"kept": {b.index: ids for b, ids in self.kept.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        kept = state_dict["zeroth_order"]["kept"]
        self.kept = {self.blocks[i]: list(ids) for i, ids in kept.items()}
        self.right = {b: self._basis(b, ids) for b, ids in self.kept.items()}
        for block in self.right:
            state = self.state[block.param]
            if "A" in state and block not in self.weights.slots:
                with torch.no_grad():  # collected by the other back end
                    block.param.mul_(state.pop("decay", 1.0))
                    block.add_product(state.pop("A"), self.right[block], 1.0)
            elif "A" in state:
                self.weights.slots[block].total = state["A"], self.right[block]
