"""Can a small decoder *learn* long computations, with a chain of thought or with summaries? (section 5 of the paper)

The paper trains on Sudoku searches, whose trace is a list of (cell, value) entries. Here a binary counter is written in
that form, at a size for a laptop: from cell 0 on, a 1 becomes 0 and carries to the next cell, a 0 becomes 1 and
ends the carry; the count ends when it first writes the target cell, which the prompt names. High cells were last
written long ago, so their value must be found by content, as a compiled machine finds it. Space is the number of
cells, time is exponential in it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from subspan.theory.turing.tokens import Mode

INP, SUMM, STOP, PAD, ZERO, ONE = range(6)
FIRST_CELL = 6


class Count(NamedTuple):
    """The bits at the start, the target cell, and the entries (cell, bit written) until it is written."""

    bits: tuple[int, ...]
    target: int
    entries: tuple[tuple[int, int], ...]


class Example(NamedTuple):
    """A context's tokens, and how many of them are the prompt."""

    tokens: list[int]
    prompt: int


def count(bits: Sequence[int], target: int) -> Count:
    """Count from these bits, lowest first."""
    held, at, entries = list(bits), 0, []
    while True:
        held[at] ^= 1
        entries.append((at, held[at]))
        if at == target:
            return Count(tuple(bits), target, tuple(entries))
        at = 0 if held[at] else at + 1


def contexts(run: Count, mode: Mode, most: int | None = None, every: int = 16) -> list[Example]:
    """The first ``most`` entries of a count (all by default), as one context or as contexts of ``every`` entries.

    The latter end with a summary, which begins the next: cells, target, place. What is cut off has no ending.
    """
    held, at, out = list(run.bits), 0, []
    length = min(most or len(run.entries), len(run.entries))
    span = length if mode == "cot" else every
    head = [INP, *_state(held, run.target, at)]
    for start in range(0, length, span):
        stop = min(start + span, length)
        trace = []
        for cell, bit in run.entries[start:stop]:
            trace += [FIRST_CELL + cell, ZERO + bit]
            held[cell], at = bit, 0 if bit else cell + 1
        ending = [SUMM, *_state(held, run.target, at)] if stop - start == every and mode == "scot" else []
        if stop == len(run.entries):
            ending = [STOP]
        out.append(Example([*head, *trace, *ending], len(head)))
        head = ending
    return out


def _state(held: Sequence[int], target: int, at: int) -> list[int]:
    cells = [token for cell, bit in enumerate(held) for token in (FIRST_CELL + cell, ZERO + bit)]
    return [*cells, FIRST_CELL + target, FIRST_CELL + at]


def counts(cells: int, random_state: int) -> list[Count]:
    """Every start and target of so many cells, in random order."""
    starts = [(n, target) for n in range(2**cells) for target in range(cells)]
    order = np.random.default_rng(random_state).permutation(len(starts))
    return [count([starts[i][0] >> b & 1 for b in range(cells)], starts[i][1]) for i in order]


@dataclass(frozen=True)
class Study:
    """One training run: ``tokens`` are seen, whatever their form."""

    mode: Mode = "cot"
    layers: int = 2
    width: int = 64
    heads: int = 4
    cells: int = 8
    cap: int = 32  # entries of a count that training sees
    tokens: int = 1_500_000
    batch_tokens: int = 1024
    lr: float = 4e-3
    bf16: bool = False


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
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, study.lr, total_steps=steps, pct_start=0.05)
    longest = max(len(e.tokens) for e in examples)
    rows = max(1, study.batch_tokens // longest)
    model.train()
    for _ in range(steps):
        picked = torch.randint(len(examples), (rows,), generator=generator).tolist()
        ids, claimed = padded([examples[i] for i in picked])
        with torch.autocast("cpu", torch.bfloat16) if study.bf16 else nullcontext():
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
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            best = model(input_ids=ids).logits.argmax(-1)
        right = ((best[:, :-1] == ids[:, 1:]) | ~claimed).all(-1).tolist()
        for (i, _), ok in zip(part, right, strict=True):
            good[i] &= ok
    return good


def accuracy(study: Study, buckets: Sequence[tuple[int, int]], tests: int, seed: int) -> dict[str, Any]:
    """Train on the first ``cap`` entries of four counts in five; the share solved of the others, by number of entries.

    So every prompt is of a kind seen in training, and what is new in a longer count is its length only.
    """
    found = counts(study.cells, seed)
    training = [e for i, run in enumerate(found) if i % 5 for e in contexts(run, study.mode, study.cap)]
    model = train(study, training, torch.Generator().manual_seed(seed))
    out = {}
    for low, high in buckets:
        fresh = [w for w in found[::5] if low <= len(w.entries) <= high][:tests]
        right = solved(model, fresh, study.mode, study.bf16)
        out[f"{low}-{high}"] = float(np.mean(right)) if right else float("nan")
    return out
