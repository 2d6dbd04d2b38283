"""transformers' Trainer with binary layers."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from subspan.resize.binary.layers import clip_latent, set_progress
from subspan.resize.binary.monitor import SurgeMonitor


class SurgeCallback(TrainerCallback):
    """After each step: clamp the latent weights and tell the layers how far training is; with the logs: what was seen.

    Args:
        latent_clip: limit of ``clip_latent``; None leaves the weights alone.
        monitor: log the mean of lambda, the cosine of the two gradients and the saturated share over all layers.
    """

    def __init__(self, latent_clip: float | None = 1.5, monitor: bool = False) -> None:
        self.latent_clip, self.monitored = latent_clip, monitor
        self.monitor: SurgeMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        set_progress(model, state.global_step / state.max_steps)
        if self.monitored:
            self.monitor = SurgeMonitor(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.latent_clip is not None:
            clip_latent(model, self.latent_clip)
        set_progress(model, state.global_step / state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self.monitor is None or logs is None:
            return
        layers = list(self.monitor.read().values())
        for figure in ("scale", "cosine", "saturated", "flipped") if layers else ():
            mean = sum(layer[figure] for layer in layers) / len(layers)
            logs[f"surge_{figure}"] = state.log_history[-1][f"surge_{figure}"] = mean  # the history holds a copy

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
