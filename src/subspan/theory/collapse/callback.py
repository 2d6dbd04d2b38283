"""Spectra and collapse through training, in a plain loop or under transformers' Trainer."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from subspan.theory.collapse.report import SpectrumReport
from subspan.theory.collapse.spectra import collapse_spectra


class CollapseSpectraCallback:
    """``callback(model, step)`` after each step or epoch keeps a report of every tenth, say, and of the first.

    Args:
        loader: the data to look at, read anew each time.
        layers: names; all by default.
        every: calls whose step is a multiple of this are kept.
        **options: of ``collapse_spectra``.
    """

    def __init__(
        self, loader: Iterable[Any], layers: Sequence[str] | None = None, *, every: int = 10, **options: Any
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.loader, self.layers, self.every, self.options = loader, layers, every, options
        self.history: dict[int, SpectrumReport] = {}

    def __call__(self, model: nn.Module, step: int) -> SpectrumReport | None:
        """The report, when this step is looked at."""
        if step % self.every and step != 1:
            return None
        self.history[step] = collapse_spectra(model, self.loader, self.layers, **self.options)
        return self.history[step]

    def to_pandas(self) -> Any:
        """One row per step and layer."""
        import pandas

        tables = [report.to_pandas() for report in self.history.values()]
        return pandas.concat(tables, keys=list(self.history), names=["step", "layer"])

    def for_trainer(self) -> Any:
        """A ``TrainerCallback`` that calls this one after the Trainer's steps."""
        from transformers import TrainerCallback

        watch = self

        class Watch(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
                watch(model, state.global_step)

        return Watch()
