"""How a fine-tuning run drifts along a danger and a safety direction, checkpoint by checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from subspan.errors import TargetError
from subspan.linalg import LowRank
from subspan.safety.sqsd.direction import Direction
from subspan.surgery import FactorPair, factor_pairs, plain_layers, weight_matrix

Update = LowRank | Tensor


def update_cosines(update: Mapping[str, Update], direction: Direction) -> dict[str, float]:
    """cos(W_k - W_0, V) of each layer that both have; 0 where either is zero. An update is dense or in factors."""
    out = {}
    for name, z in direction.factors.items():
        if name not in update:
            continue
        moved = update[name]
        like = moved.A if isinstance(moved, LowRank) else moved
        v = LowRank(z.A.to(like), z.B.to(like))
        if isinstance(moved, LowRank):
            dot, norm = moved.inner(v), moved.norm()
        else:
            dot, norm = ((moved @ v.B) * v.A).sum(), torch.linalg.matrix_norm(moved)
        length = float(norm * v.norm())
        out[name] = float(dot) / length if length > 0 else 0.0
    return out


class DriftCallback(TrainerCallback):
    """Logs how far training has moved along danger and safety: the sum over layers of cos(W_k - W_0, V), and of each
    interval's own step.

    ``history`` holds one record per measurement, and transformers' logs get the same figures (``drift_danger``,
    ``drift_safety``, ``step_danger``, ``step_safety``). Adapters are followed through their factors; without an adapter
    the trained weights of the layers that the directions name are, at the price of two copies of them.

    Args:
        danger: where dangerous training moves the model.
        safety: where safe training moves it.
        every: steps between two measurements.
        adapter_name: which adapter of a peft model is trained.
    """

    def __init__(self, danger: Direction, safety: Direction, every: int = 10, adapter_name: str = "default") -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.directions = {"danger": danger, "safety": safety}
        self.every, self.adapter_name = every, adapter_name
        self.history: list[dict[str, float]] = []
        self._start: dict[str, Update] = {}
        self._last: dict[str, Update] = {}
        self._pairs: list[FactorPair] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if hasattr(model, "peft_config"):
            self._pairs = factor_pairs(model, self.adapter_name)
        else:
            wanted = set(self.directions["danger"].factors) | set(self.directions["safety"].factors)
            layers = plain_layers(model)
            self._layers = {n: m for n, m in layers.items() if n in wanted and m.weight.requires_grad}
        self._start = self._last = self._now()
        if not any(name in direction.factors for direction in self.directions.values() for name in self._start):
            raise TargetError("none of the layers that are trained has a danger or a safety direction")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            now = self._now()
            record: dict[str, float] = {"step": state.global_step}
            for name, direction in self.directions.items():
                record[f"drift_{name}"] = sum(update_cosines(_minus(now, self._start), direction).values())
                record[f"step_{name}"] = sum(update_cosines(_minus(now, self._last), direction).values())
            self.history.append(record)
            self._last = now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and self.history:
            logs |= {k: v for k, v in self.history[-1].items() if k != "step"}

    def _now(self) -> dict[str, Update]:
        """A copy of what is trained: factors with their scaling, or weights."""
        if self._pairs:
            low = {p.name: (p.low_rank(), p.scaling) for p in self._pairs}
            return {name: LowRank(z.A * s, z.B.clone()) for name, (z, s) in low.items()}
        return {name: weight_matrix(layer).float().clone() for name, layer in self._layers.items()}


def _minus(now: Mapping[str, Update], before: Mapping[str, Update]) -> dict[str, Update]:
    out: dict[str, Update] = {}
    for name, z in now.items():
        old = before[name]
        if isinstance(z, LowRank) and isinstance(old, LowRank):
            out[name] = LowRank.merge([z, old], [1.0, -1.0])
        else:
            assert isinstance(z, Tensor)
            assert isinstance(old, Tensor)
            out[name] = z - old
    return out
