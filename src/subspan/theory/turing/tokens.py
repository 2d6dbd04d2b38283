"""Runs of a machine as token sequences, with chain-of-thought or with summaries, and their vocabulary."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from subspan.errors import SubspanError
from subspan.theory.turing.machine import Configuration, Step, TuringMachine, Word

Mode = Literal["cot", "scot"]
MOVES = ("L", "S", "R")
COT_MARKS = ("inp", "einp", "outp", "eoutp", "pos", "epos")
SCOT_MARKS = ("summ", "esumm")


class ContextTooLong(SubspanError):
    """A context has more tokens than the position registers can count."""


class UnprintableOutput(SubspanError):
    """A machine halted with a symbol on tape 1 that is not in its input alphabet."""


class Token(NamedTuple):
    """A token: its kind, and the value of each of its fields.

    Kinds: the delimiters; ``symbol`` (s); ``run`` (state, symbols written.., moves..); ``bits`` (-1 or 1 for each
    tape); ``tape`` (symbols.., head here? ..); ``state`` (q).
    """

    kind: str
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "bits":
            return "bits " + "".join("1" if bit == 1 else "0" for bit in self.values)
        if self.kind == "tape":
            half = len(self.values) // 2
            cells = zip(self.values[:half], self.values[half:], strict=True)
            return "tape " + " ".join(f"[{s}]" if here else str(s) for s, here in cells)
        return " ".join(map(str, (self.kind, *self.values)))


class Segment(NamedTuple):
    """One context: its tokens, and how many are the prompt. Predictions are claimed from the prompt's end on."""

    tokens: list[Token]
    prompt: int


@dataclass(frozen=True)
class Kind:
    """A kind of token, the values that its fields may take, and the index of its first token."""

    name: str
    fields: tuple[tuple[Any, ...], ...]
    first: int

    @property
    def size(self) -> int:
        return math.prod(len(values) for values in self.fields)


class Vocabulary:
    """Every token of a machine, numbered kind by kind; within a kind by its fields, the first counting most.

    Nothing is stored per token, so that a vocabulary of any size costs nothing.
    """

    def __init__(self, machine: TuringMachine, mode: Mode) -> None:
        K, symbols, states = machine.tapes, machine.symbols, machine.states
        fields: dict[str, tuple[tuple[Any, ...], ...]] = dict.fromkeys(COT_MARKS, ())
        fields["symbol"] = (machine.input_alphabet,)
        fields["run"] = (states, *[symbols] * K, *[MOVES] * K)
        fields["bits"] = ((-1, 1),) * K
        if mode == "scot":
            fields |= dict.fromkeys(SCOT_MARKS, ())
            fields["state"] = (states,)
            fields["tape"] = (*[symbols] * K, *[(False, True)] * K)
        self.kinds: dict[str, Kind] = {}
        self.size = 0
        for name, values in fields.items():
            self.kinds[name] = Kind(name, values, self.size)
            self.size += self.kinds[name].size
        self._places = {n: [{v: i for i, v in enumerate(f)} for f in kind.fields] for n, kind in self.kinds.items()}

    def encode(self, token: Token) -> int:
        """The index of a token; ``KeyError`` for one that the machine does not have."""
        kind, index = self.kinds[token.kind], 0
        for places, value in zip(self._places[token.kind], token.values, strict=True):
            index = index * len(places) + places[value]
        return kind.first + index

    def decode(self, index: int) -> Token:
        """The token of an index."""
        if not 0 <= index < self.size:
            raise ValueError(f"there is no token {index}: the vocabulary has {self.size}")
        kind = max((kind for kind in self.kinds.values() if kind.first <= index and kind.size), key=lambda k: k.first)
        rest, values = index - kind.first, []
        for field in reversed(kind.fields):
            rest, place = divmod(rest, len(field))
            values.append(field[place])
        return Token(kind.name, tuple(reversed(values)))

    def encode_all(self, tokens: Sequence[Token]) -> Int[Tensor, " n"]:
        return torch.tensor([self.encode(token) for token in tokens], dtype=torch.long)


# ------------------------------------------------------------------------------------------------------------ sequences


def segments(machine: TuringMachine, word: Word, bits: int, mode: Mode, max_steps: int = 1_000_000) -> list[Segment]:
    """The contexts that a compiled model must produce: one with chain-of-thought, one per summary otherwise.

    A machine that has not halted after ``max_steps`` steps gives a last context that ends with that step.

    Raises:
        MissingTransition: the machine has no entry for what it reached.
        UnprintableOutput: the output holds a symbol that is not in the input alphabet.
        ContextTooLong: a context holds more than 2^bits tokens, or a head went beyond 2^bits cells.
    """
    configuration = machine.start(word)
    steps = machine.steps(configuration)
    prompt = [Token("inp"), *(Token("symbol", (s,)) for s in machine.word(word)), Token("einp")]
    out: list[Segment] = []
    taken = 0
    while True:
        cap = 3 * (len(prompt) - 1) if mode == "scot" else math.inf
        trace, taken = _trace(steps, configuration, machine.halting, bits, cap, taken, max_steps)
        halted = configuration.state == machine.halting
        if halted:
            ending = [Token("outp"), *_output_tokens(machine, configuration), Token("eoutp")]
        else:
            ending = _summary(configuration) if mode == "scot" and taken < max_steps else []
        out.append(Segment([*prompt, *trace, *ending], len(prompt)))
        _check_length(out[-1].tokens, configuration, bits, mode)
        if halted or taken >= max_steps:
            return out
        prompt = ending


def _trace(
    steps: Iterator[Step],
    configuration: Configuration,
    halting: str,
    bits: int,
    cap: float,
    taken: int,
    max_steps: int,
) -> tuple[list[Token], int]:
    """Run tokens until the machine halts, the trace holds ``cap`` tokens or ``max_steps`` are taken.

    A block of position bits follows every ``bits`` steps, except the last.
    """
    trace: list[Token] = []
    since = 0
    while taken < max_steps:
        step = next(steps)
        trace.append(Token("run", (step.state, *step.writes, *step.moves)))
        taken += 1
        since += 1
        if step.state == halting or len(trace) >= cap:
            break
        if since == bits and taken < max_steps:
            places = [tuple(1 if head >> b & 1 else -1 for head in configuration.heads) for b in range(bits)]
            trace += [Token("pos"), *(Token("bits", place) for place in places), Token("epos")]
            since = 0
    return trace, taken


def _summary(configuration: Configuration) -> list[Token]:
    tapes = range(len(configuration.tapes))
    cells = [
        Token(
            "tape",
            (*(configuration.symbol(k, cell) for k in tapes), *(configuration.heads[k] == cell for k in tapes)),
        )
        for cell in range(configuration.space)
    ]
    return [Token("summ"), *cells, Token("state", (configuration.state,)), Token("esumm")]


def _output_tokens(machine: TuringMachine, configuration: Configuration) -> list[Token]:
    output = configuration.output()
    for symbol in output:
        if symbol not in machine.input_alphabet:
            raise UnprintableOutput(
                f"the output holds {symbol!r}, which is not in the input alphabet: let the machine erase or replace it"
            )
    return [Token("symbol", (symbol,)) for symbol in output]


def _check_length(tokens: Sequence[Token], configuration: Configuration, bits: int, mode: Mode) -> None:
    longest = max(len(tokens), configuration.space if mode == "scot" else 0)
    if longest > 2**bits:
        raise ContextTooLong(
            f"a context of {longest} tokens does not fit {bits} position bits (2^{bits} = {2**bits}): "
            f"bits={even_bits(longest)} is enough"
        )


def even_bits(length: int) -> int:
    """Smallest even r >= 2 with length <= 2^r."""
    return max(2, 2 * math.ceil(math.log2(max(length, 2)) / 2))


def needed_bits(machine: TuringMachine, word: Word, mode: Mode, max_steps: int = 1_000_000) -> int:
    """Smallest number of position bits (even; at least 4 with summaries) with which every context fits.

    Contexts depend on the bits themselves (a position block holds one token per bit), hence the search. Raises as
    ``segments``.
    """
    bits = 2 if mode == "cot" else 4
    while True:
        try:
            segments(machine, word, bits, mode, max_steps)
        except ContextTooLong:
            bits += 2
        else:
            return bits


def cot_length(word: int, steps: int, output: int, bits: int) -> int:
    """Tokens of a chain-of-thought run: n + 2 + J (2r + 2) + (t - r J) + m + 2 with J = ceil(t/r) - 1 (3.1)."""
    blocks = -(-steps // bits) - 1
    return word + 2 + blocks * (2 * bits + 2) + (steps - bits * blocks) + output + 2
