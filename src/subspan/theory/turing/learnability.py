"""Can a small decoder *learn* long computations, with a chain of thought or with summaries? (section 5 of the paper)

The paper trains on Sudoku searches, whose trace is a list of (cell, value) entries. Here a binary counter is written in
that form, at a size for a laptop: from cell 0 on, a 1 becomes 0 and carries to the next cell, a 0 becomes 1 and
ends the carry; the count ends when it first writes the target cell, which the prompt names. High cells were last
written long ago, so their value must be found by content, as a compiled machine finds it. Space is the number of
cells, time is exponential in it.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from subspan.theory.turing.tokens import Mode

INP, SUMM, STOP, PAD, ZERO, ONE = range(6)
FIRST_CELL = 6


class Count(NamedTuple):
    """The bits at the start, the target cell, the entries (cell, bit written), and whether the last is the target's."""

    bits: tuple[int, ...]
    target: int
    entries: tuple[tuple[int, int], ...]
    complete: bool


class Example(NamedTuple):
    """A context's tokens, and how many of them are the prompt."""

    tokens: list[int]
    prompt: int


def count(bits: Sequence[int], target: int, most: int) -> Count:
    """Count from these bits, lowest first, until the target is written; at most so many entries."""
    held, at = list(bits), 0
    entries: list[tuple[int, int]] = []
    while len(entries) < most and not (entries and entries[-1][0] == target):
        held[at] ^= 1
        entries.append((at, held[at]))
        at = 0 if held[at] else at + 1
    return Count(tuple(bits), target, tuple(entries), entries[-1][0] == target)


def contexts(run: Count, mode: Mode, every: int = 16) -> list[Example]:
    """A count as one context, or as contexts of ``every`` entries.

    The latter end with a summary, which begins the next: cells, target, place. What is cut off has no ending.
    """
    held, at, out = list(run.bits), 0, []
    length = len(run.entries)
    span = length if mode == "cot" else every
    head = [INP, *_state(held, run.target, at)]
    for start in range(0, length, span):
        stop = min(start + span, length)
        trace = []
        for cell, bit in run.entries[start:stop]:
            trace += [FIRST_CELL + cell, ZERO + bit]
            held[cell], at = bit, 0 if bit else cell + 1
        ending = [SUMM, *_state(held, run.target, at)] if stop - start == every and mode == "scot" else []
        if stop == length and run.complete:
            ending = [STOP]
        out.append(Example([*head, *trace, *ending], len(head)))
        head = ending
    return out


def _state(held: Sequence[int], target: int, at: int) -> list[int]:
    cells = [token for cell, bit in enumerate(held) for token in (FIRST_CELL + cell, ZERO + bit)]
    return [*cells, FIRST_CELL + target, FIRST_CELL + at]


class Starts(NamedTuple):
    """Numbers to count from, none in two of the three."""

    training: list[int]
    validation: list[int]
    test: list[int]


def split_starts(cells: int, training: int, rng: np.random.Generator) -> Starts:
    """So many of the 2^cells numbers for training; half of the others for validation, half for the test."""
    order = rng.permutation(2**cells).tolist()
    middle = training + (len(order) - training) // 2
    return Starts(order[:training], order[training:middle], order[middle:])


def draw(starts: Sequence[int], cells: int, most: int, rng: np.random.Generator) -> Iterator[Count]:
    """Counts from each of these numbers to a random target, at most so many entries, over and over."""
    while True:
        for n in starts:
            yield count([n >> b & 1 for b in range(cells)], int(rng.integers(cells)), most)


@dataclass(frozen=True)
class Study:
    """One training run: ``tokens`` are seen, whatever their form."""

    mode: Mode = "cot"
    layers: int = 2
    width: int = 64
    heads: int = 4
    cells: int = 10
    starts: int = 256  # numbers of the 2^cells that training counts from, each to one target
    cap: int = 32  # entries of a count that training sees
    tokens: int = 800_000
    batch_tokens: int = 1024
    lr: float = 4e-3
    bf16: bool = False


class Bf16(TorchFunctionMode):
    """What bf16 autocast computes, on machines without bf16 products: in float32, their operands and results rounded.

    Sums stay in float32, as bf16 hardware has them. The gradients of the casts round on the way back too. A step takes
    1.2 times as long as without; with torch's own autocast it took 6 times as long on such a machine.
    """

    PRODUCTS = (F.linear, F.scaled_dot_product_attention)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.PRODUCTS:
            return func(*args, **(kwargs or {}))
        args = [_as_bf16(arg) for arg in args]
        return _as_bf16(func(*args, **{name: _as_bf16(value) for name, value in (kwargs or {}).items()}))


def _as_bf16(x: Any) -> Any:
    return x.bfloat16().float() if isinstance(x, Tensor) and x.is_floating_point() else x


def decoder(study: Study, generator: torch.Generator) -> nn.Module:
    """A GPT-NeoX (rotary positions), as in the paper, from transformers."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=FIRST_CELL + study.cells,
        hidden_size=study.width,
        intermediate_size=4 * study.width,
        num_hidden_layers=study.layers,
        num_attention_heads=study.heads,
        max_position_embeddings=2048,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = GPTNeoXForCausalLM(config)
    for p in model.parameters():  # drawn again from the caller's generator: the constructor uses the global one
        if p.dim() > 1:
            with torch.no_grad():
                p.normal_(0.0, config.initializer_range, generator=generator)
    return model


def train(study: Study, examples: Sequence[Example], generator: torch.Generator) -> nn.Module:
    """AdamW with warm-up and cosine; the loss is on what follows the prompt. Batches hold ``batch_tokens`` tokens."""
    model = decoder(study, generator)
    optimizer = torch.optim.AdamW(model.parameters(), study.lr, weight_decay=0.01)
    steps = study.tokens // study.batch_tokens
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, study.lr, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    longest = max(len(e.tokens) for e in examples)
    rows = max(1, study.batch_tokens // longest)
    model.train()
    for _ in range(steps):
        picked = torch.randint(len(examples), (rows,), generator=generator).tolist()
        ids, claimed = padded([examples[i] for i in picked])
        with Bf16() if study.bf16 else nullcontext():
            logits = model(input_ids=ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1][claimed].float(), ids[:, 1:][claimed])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def padded(examples: Sequence[Example]) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b m"]]:
    """Ids padded on the right, and which next-token predictions count (m = n - 1)."""
    n = max(len(e.tokens) for e in examples)
    ids = torch.full((len(examples), n), PAD)
    claimed = torch.zeros(len(examples), n - 1, dtype=torch.bool)
    for row, mask, example in zip(ids, claimed, examples, strict=True):
        row[: len(example.tokens)] = torch.tensor(example.tokens)
        mask[example.prompt - 1 : len(example.tokens) - 1] = True
    return ids, claimed


@torch.no_grad()
def solved(model: nn.Module, runs: Sequence[Count], mode: Mode, bf16: bool = False) -> list[bool]:
    """Whether each count is written without one mistake: all right with the true prefix is all right writing freely."""
    owners = [(i, e) for i, w in enumerate(runs) for e in contexts(w, mode)]
    good = [True] * len(runs)
    for start in range(0, len(owners), 64):
        part = owners[start : start + 64]
        ids, claimed = padded([e for _, e in part])
        with Bf16() if bf16 else nullcontext():
            best = model(input_ids=ids).logits.argmax(-1)
        right = ((best[:, :-1] == ids[:, 1:]) | ~claimed).all(-1).tolist()
        for (i, _), ok in zip(part, right, strict=True):
            good[i] &= ok
    return good


class Accuracy(NamedTuple):
    """Of ``tests`` counts the share written without one mistake, and the share of their contexts seen in training."""

    solved: float
    tests: int
    seen: float

    @property
    def standard_error(self) -> float:
        return float(np.sqrt(self.solved * (1 - self.solved) / self.tests))


def accuracy(
    study: Study, buckets: Sequence[tuple[int, int]], tests: int, seed: int, *, validation: bool = False
) -> dict[str, Accuracy]:
    """Train on the first ``cap`` entries of counts, and try counts from other numbers, by their number of entries.

    Numbers, not (number, target) pairs, are divided between training and tests, because counts from one number to
    several targets share their beginning. Longer counts are new in their length besides. ``validation`` tries the
    numbers on which settings may be chosen.
    """
    rng = np.random.default_rng(seed)
    starts = split_starts(study.cells, study.starts, rng)
    training = [
        example
        for run in islice(draw(starts.training, study.cells, study.cap, rng), study.starts)
        for example in contexts(run, study.mode)
    ]
    known = {tuple(example.tokens) for example in training}
    model = train(study, training, torch.Generator().manual_seed(seed))
    most = max(high for _, high in buckets)
    drawn = draw(starts.validation if validation else starts.test, study.cells, most, rng)
    out = {}
    for low, high in buckets:
        runs = list(islice((w for w in drawn if w.complete and low <= len(w.entries) <= high), tests))
        examples = [tuple(e.tokens) for w in runs for e in contexts(w, study.mode)]
        right = solved(model, runs, study.mode, study.bf16)
        out[f"{low}-{high}"] = Accuracy(float(np.mean(right)), tests, float(np.mean([e in known for e in examples])))
    return out
