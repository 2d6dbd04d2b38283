"""Shape annotations are checked while testing: every jaxtyping signature in subspan runs under beartype."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  (the hook looks the checker up by name)

install_import_hook("subspan", "tests.typecheck.checked")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# The same examples in every run: what fails here fails everywhere. `--hypothesis-profile=explore` draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same")


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh, seeded torch generator."""
    return torch.Generator().manual_seed(0)
