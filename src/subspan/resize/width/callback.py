"""transformers' Trainer with a grown network."""

import warnings
from itertools import islice
from typing import Any

from torch import nn
from transformers import TrainerCallback

from subspan.resize.width.monitor import TrapMonitor, use_of_width
from subspan.surgery.answers import on_device_of


class TrapCallback(TrainerCallback):
    """Logs how far a grown network has left the trap, and after each evaluation what it knows in the new width.

    With the logs: ``trap/esc`` and ``trap/esc_GROUP``. With an evaluation: ``trap/use_of_width`` (loss of the fold less
    that of the network, on at most ``batches`` evaluation batches) and ``trap/verdict`` (0 trapped, 1 escaping, 2
    escaped). Warns when training starts from an exact clone. A resumed run counts changes from its checkpoint on.

    Args:
        factor: as the network was grown.
        ffn_factor: as the network was grown.
        batches: evaluation batches for ``use_of_width``.
        options: of ``TrapMonitor``.
    """

    def __init__(self, factor: int = 2, ffn_factor: int | None = None, batches: int = 8, **options: Any) -> None:
        self.factor, self.ffn_factor, self.batches, self.options = factor, ffn_factor, batches, options
        self.monitor: TrapMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.monitor = TrapMonitor(model, self.factor, self.ffn_factor, **self.options)
        if self.monitor.exact():
            warnings.warn(
                "this network is an exact clone: every optimiser that treats clones alike (SGD, Adam, Muon) keeps it "
                "equal to its seed, up to rounding; grow it with noise_db=40, or call asymmetric_state_reset",
                stacklevel=2,
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self.monitor is None or logs is None or "loss" not in logs:
            return
        row = self.monitor.record(state.global_step)
        self._add(state, logs, {key.replace("/", "_"): value for key, value in row.items() if key != "step"})

    def on_evaluate(
        self, args: Any, state: Any, control: Any, model: nn.Module, metrics: dict[str, float] | None = None,
        eval_dataloader: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if self.monitor is None or metrics is None or eval_dataloader is None:
            return
        training = model.training
        model.eval()
        used = use_of_width(model, lambda net: self._loss(net, eval_dataloader), self.factor, self.ffn_factor)
        model.train(training)
        if not self.monitor.history:
            self.monitor.record(state.global_step)
        rank = ("trapped", "escaping", "escaped").index(self.monitor.verdict())
        self._add(state, metrics, {"use_of_width": used, "verdict": rank})

    def _loss(self, net: nn.Module, loader: Any) -> float:
        losses = [float(net(**on_device_of(net, batch)).loss) for batch in islice(loader, self.batches)]
        return sum(losses) / max(1, len(losses))

    def _add(self, state: Any, logs: dict[str, float], figures: dict[str, float]) -> None:
        """Into what is logged, and into the history, which holds a copy."""
        named = {f"trap/{key}": float(value) for key, value in figures.items()}
        logs.update(named)
        if state.log_history:
            state.log_history[-1].update(named)
