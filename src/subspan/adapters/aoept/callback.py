"""What the method has to say at the end of an epoch, for ``transformers.Trainer``."""

from typing import Any

from transformers import TrainerCallback


class GateCallback(TrainerCallback):
    """Warns after an epoch in which a gate was stuck open or shut (``AOEPTModel.check_gates``)."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        getattr(model, "module", model).check_gates()
