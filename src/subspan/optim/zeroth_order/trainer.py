"""transformers' Trainer with forward passes only."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from subspan.optim.zeroth_order.base import ZOOptimizer


class ZOTrainer(Trainer):
    """A ``Trainer`` for ``optimizers=(LOZO(model.named_parameters(), model=model), None)``.

    Only the training step differs: it evaluates the loss, and the optimiser's own step moves. Callbacks, evaluation,
    resume, schedules and gradient accumulation (one mean over the micro-batches) are the Trainer's. ``save_model``
    merges first. A schedule with warm-up begins at a rate of 0, where weights are kept as a copy: prefer none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: list[dict[str, Any]] = []

    def _zeroth_order(self) -> ZOOptimizer:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if not isinstance(optimizer, ZOOptimizer):
            raise TypeError(f"optimizers= must begin with MeZO, LOZO or LOZOPlus, not {type(optimizer).__name__}")
        return optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        self._held.append(dict(self._prepare_inputs(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        held, self._held = self._held, []
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        summed = counted or self.compute_loss_func is not None

        def closure() -> Tensor:
            # compute_loss may take the labels out of its inputs, and is called more than once.
            losses: list[Any] = [self.compute_loss(model, {**b}, num_items_in_batch=num_items_in_batch) for b in held]
            total = torch.stack(losses).sum()
            return total if summed else total / len(held)

        return torch.tensor(self._zeroth_order().measure(closure).loss, device=self.args.device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's, of merged weights; a checkpoint keeps what is not merged with the optimiser."""
        if not _internal_call:
            self._zeroth_order().merge()
        super().save_model(output_dir, _internal_call)
