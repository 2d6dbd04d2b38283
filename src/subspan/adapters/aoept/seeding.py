"""Modules draw their start from torch's global generator; here it can be a generator of the caller's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(generator: torch.Generator | None) -> Iterator[None]:
    """What is drawn inside follows from ``generator``, and the global stream is left where it was (None: as usual)."""
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
        yield
