"""Adapt a model to data: one configuration in, one run folder out."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subspan.data import SentenceClassifier
    from subspan.tune.config import Config, load, parse
    from subspan.tune.dry_run import plan
    from subspan.tune.part import Part, Run
    from subspan.tune.recipe import tune

__all__ = ["Config", "Part", "Run", "SentenceClassifier", "load", "parse", "plan", "tune"]

# Loaded on first use: the configuration alone must not cost the import of torch.
_HOMES = {"Config": ".config", "load": ".config", "parse": ".config", "Part": ".part", "Run": ".part"}
_HOMES |= {"SentenceClassifier": "..data", "plan": ".dry_run", "tune": ".recipe"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
