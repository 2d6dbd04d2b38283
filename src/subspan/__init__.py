"""Learning through the few directions that matter.

Each room is a subpackage, loaded on first use: ``import subspan`` stays light.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "adapters",
    "claims",
    "data",
    "inspect",
    "linalg",
    "models",
    "optim",
    "pages",
    "privacy",
    "resize",
    "safety",
    "structure",
    "surgery",
    "theory",
    "tune",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
