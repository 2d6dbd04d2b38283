"""Poisson batches: every record joins every batch independently, so a batch may be empty."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler, default_collate


class PoissonBatchSampler(Sampler[list[int]]):
    """``steps`` batches of record numbers; each record is in each with probability ``sample_rate``.

    Every batch has its own seed, all drawn from ``generator`` at the start (from the operating system without one), so
    batch k is the same however many were read ahead, and a run resumes with ``start=k`` and the saved seeds. (Torch's
    generator on the CPU keeps the low 32 bits of a seed.)
    """

    def __init__(
        self,
        num_examples: int,
        sample_rate: float,
        steps: int,
        *,
        generator: torch.Generator | None = None,
        start: int = 0,
    ) -> None:
        if num_examples < 1:
            raise ValueError(f"num_examples must be at least 1, got {num_examples}")
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}")
        if not 0 <= start <= steps:
            raise ValueError(f"start must lie between 0 and steps = {steps}, got {start}")
        self.num_examples, self.sample_rate, self.steps, self.start = num_examples, sample_rate, steps, start
        generator = entropy_generator() if generator is None else generator
        self.seeds = torch.randint(2**62, (steps,), generator=generator, device=generator.device).cpu()

    def batch(self, step: int) -> list[int]:
        """Record numbers of one batch, ascending."""
        # float64: with 24 bits, a small sample rate would be off by more than the accountant's precision
        generator = torch.Generator().manual_seed(int(self.seeds[step]))
        draw = torch.rand(self.num_examples, generator=generator, dtype=torch.float64)
        return (draw < self.sample_rate).nonzero().flatten().tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batch(step) for step in range(self.start, self.steps))

    def __len__(self) -> int:
        return self.steps - self.start

    def state_dict(self) -> dict[str, Any]:
        return {"seeds": self.seeds.clone(), "num_examples": self.num_examples, "sample_rate": self.sample_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over another run's seeds; raises ``ValueError`` if that run sampled differently."""
        ours = (self.num_examples, self.sample_rate, self.steps)
        theirs = (state["num_examples"], state["sample_rate"], len(state["seeds"]))
        if ours != theirs:
            raise ValueError(
                f"the saved batches were drawn for (num_examples, sample_rate, steps) = {theirs}, this run has {ours}"
            )
        self.seeds = torch.as_tensor(state["seeds"]).clone()


def entropy_generator() -> torch.Generator:
    """A generator seeded by the operating system."""
    generator = torch.Generator()
    generator.seed()
    return generator


Collate = Callable[[list[Any]], Any]


def empty_safe(collate: Collate | None, dataset: Sequence[Any]) -> Collate:
    """A collate function that makes an empty batch of the right structure from an empty list.

    Only the structure of the first record is used (names, dtypes, trailing shapes), never its values.
    """
    inner: Collate = default_collate if collate is None else collate

    def call(records: list[Any]) -> Any:
        return inner(records) if records else rows(inner([dataset[0]]), slice(0, 0))

    return call


def batch_rows(batch: Any) -> int:
    """Number of records in a batch: the length of its first tensor or list."""
    if isinstance(batch, Tensor):
        return batch.shape[0]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        if batch and isinstance(batch[0], Tensor | list | tuple | dict):
            return batch_rows(batch[0])
        return len(batch)
    raise TypeError(f"cannot tell how many records a {type(batch).__name__} holds")


def rows(batch: Any, index: slice) -> Any:
    """The records ``index`` of a batch of tensors, lists, tuples and dicts, nested as they are."""
    if isinstance(batch, Tensor):
        return batch[index]
    if isinstance(batch, Mapping):
        return {key: rows(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(rows(value, index) for value in batch))
    if isinstance(batch, list | tuple):
        if batch and isinstance(batch[0], Tensor | list | tuple | dict):
            return type(batch)(rows(value, index) for value in batch)
        return batch[index]
    raise TypeError(f"cannot split a batch that holds a {type(batch).__name__}; use tensors, lists and dicts")


def micro_batches(batch: Any, limit: int | None) -> Iterator[Any]:
    """Parts of a batch of at most ``limit`` records; none for an empty batch."""
    size = batch_rows(batch)
    step = size if limit is None else limit
    for at in range(0, size, max(step, 1)):
        yield rows(batch, slice(at, at + step))
