"""Training on accuracy, or on any function of the logits, in place of cross-entropy."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from subspan.errors import ConfigError
from subspan.files import write_json
from subspan.tune.part import Part, Run
from subspan.tune.sections import Objective
from subspan.tune.tasks import Classification, Losses

if TYPE_CHECKING:
    from subspan.tune.tasks import Batch

# A label counts as predicted if it was within about this many batches.
_MEMORY = 100


class OutputObjective(Part):
    """Cross-entropy for a share of the steps, then the objective by noise on the logits; and which labels died."""

    def __init__(self, options: Objective) -> None:
        from subspan.optim import truncated_cross_entropy, zero_one

        self.options = options
        known: dict[str, Callable[..., Any]] = {
            "zero-one": zero_one,
            "truncated": partial(truncated_cross_entropy, cap=options.cap),
        }
        self.function = known.get(options.loss) or imported(options.loss.removeprefix("python:"))
        self.criterion: Any = None
        self.calls = 0
        self.predicted: Tensor | None = None
        self._held: list[float] | None = None  # the criterion's state in a checkpoint, until the criterion is made

    def losses(self, run: Run, model: nn.Module, batch: "Batch") -> Losses | None:
        rising = round(self.options.warmup * run.config.max_steps) * run.config.accumulate
        self.calls += 1
        if self.calls <= rising:
            return None
        assert isinstance(run.task, Classification)
        logits, labels = run.task.logits(model, batch), batch["labels"]
        self._watch(logits)
        criterion = self._criterion(run, logits, labels)
        values = criterion.per_sample(logits, labels)
        ones = torch.ones_like(labels, dtype=values.dtype)
        # The value of a batch counts as that of each of its rows, so that batches of one step average.
        return Losses(values * ones, ones)

    def _criterion(self, run: Run, logits: Tensor, labels: Tensor) -> Any:
        """Made at the first batch: whether a function scores rows or batches is seen from what it returns."""
        from subspan.optim import OutputSpaceLoss

        if self.criterion is None:
            options: dict[str, Any] = {"credit": "sample"}
            if self.options.loss == "zero-one":
                options["invariance"] = "shift"
            elif self.options.loss.startswith("python:"):
                with torch.no_grad():
                    whole = torch.as_tensor(self.function(logits.detach(), labels)).ndim == 0
                options = {"credit": "batch", "vectorized": False} if whole else options
            wanted = self.options
            self.criterion = OutputSpaceLoss(
                self.function, pairs=wanted.pairs, sigma=wanted.sigma, seed=run.config.seed, **options
            )
            self._restore()
        return self.criterion

    def _watch(self, logits: Tensor) -> None:
        counts = torch.bincount(logits.argmax(-1), minlength=logits.shape[-1]).double().cpu()
        old = torch.zeros_like(counts) if self.predicted is None else self.predicted
        self.predicted = old * (1 - 1 / _MEMORY) + counts

    def figures(self) -> dict[str, float]:
        return {} if self.criterion is None else {"sigma": self.criterion.last_sigma}

    def save(self, folder: Path) -> None:
        state = None if self.criterion is None else self.criterion.get_extra_state().tolist()
        predicted = None if self.predicted is None else self.predicted.tolist()
        write_json(folder / "objective.json", {"calls": self.calls, "state": state, "predicted": predicted})

    def load(self, folder: Path) -> None:
        held = json.loads((folder / "objective.json").read_text(encoding="utf-8"))
        self.calls, self._held = held["calls"], held["state"]
        if held["predicted"] is not None:
            self.predicted = torch.tensor(held["predicted"], dtype=torch.float64)

    def _restore(self) -> None:
        if self._held is not None:
            self.criterion.set_extra_state(torch.tensor(self._held, dtype=torch.float64))

    def finish(self, run: Run) -> None:
        wanted = self.options
        run.note("objective", loss=wanted.loss, pairs=wanted.pairs, sigma=wanted.sigma, warmup=wanted.warmup)
        if self.criterion is None or self.predicted is None:
            return
        run.note("objective", evaluations_a_step=2 * wanted.pairs * run.config.accumulate)
        # Less than half a row in the memory of some hundred batches.
        dead = [name for name, n in zip(run.task.labels, self.predicted.tolist(), strict=True) if n < 0.5]
        run.note("objective", labels_never_predicted=dead)
        if dead:
            run.say(f"the model no longer predicts {', '.join(dead)}: raise objective.warmup or objective.sigma")


def imported(name: str) -> Callable[..., Any]:
    """The function ``module.function``, also from a file in the working directory."""
    module, _, function = name.rpartition(".")
    if not module:
        raise ConfigError(f"objective: python:{name} must name a module and a function, as in python:my_metrics.loss")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ConfigError(f"objective: python:{name} cannot be imported: {error}") from None
    except AttributeError:
        raise ConfigError(f"objective: python:{name}: the module {module} has no {function}") from None
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise ConfigError(f"objective: python:{name} is no function of (logits, labels)")
    return found
