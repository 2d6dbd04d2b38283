"""Runs of a compiled model: followed token by token, and shown in the terminal or as a page."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from subspan.errors import SubspanError
from subspan.pages import Code, Curve, Figure, Page, Section, Table, Text, curves
from subspan.theory.turing.compiler import codes, stages
from subspan.theory.turing.machine import Configuration, MissingTransition, Step, TuringMachine, Word
from subspan.theory.turing.numerics import TieLimit
from subspan.theory.turing.tokens import Segment, Token

if TYPE_CHECKING:
    from subspan.theory.turing.model import CompiledTransformer


class WrongToken(SubspanError):
    """A model predicted another token than the machine's run has."""


@dataclass(frozen=True)
class Mistake:
    """The model said ``got`` where the run has ``expected``, at this position of this context."""

    segment: int
    position: int
    expected: Token
    got: Token


@dataclass(frozen=True)
class Verification:
    """How many predictions are claimed to be right, those that are not, and the smallest margin of a logit."""

    claimed: int
    mistakes: tuple[Mistake, ...]
    margin: float


class Follower:
    """Reads tokens as they come and keeps what they say: the tapes, the output, and how often each cell was written.

    ``ties`` is the largest number of writes of one cell in this context: no attention row whose result is used has more
    tied maximisers. ``error`` says why nothing can follow: the table has no entry, or there are too many ties.
    """

    def __init__(self, machine: TuringMachine, word: Word, tie_limit: int | None = None) -> None:
        self.machine, self.tie_limit = machine, tie_limit
        self.word = machine.word(word)
        self.configuration = machine.start(word)
        self.steps, self.margin = 0, math.inf
        self.output: list[str] | None = None
        self.finished = False
        self.error: SubspanError | None = None
        self.done: list[Segment] = []
        self._open([Token("inp"), *(Token("symbol", (s,)) for s in self.word), Token("einp")])
        for cell in range(len(self.word)):
            self._write(0, cell)
        self._look_ahead()

    def _open(self, prompt: list[Token]) -> None:
        self.tokens, self.prompt = list(prompt), len(prompt)
        self.writes: list[Counter[int]] = [Counter() for _ in range(self.machine.tapes)]
        self.ties = 0

    def _write(self, tape: int, cell: int) -> None:
        self.writes[tape][cell] += 1
        self.ties = max(self.ties, self.writes[tape][cell])
        if self.tie_limit is not None and self.ties > self.tie_limit:
            self.error = TieLimit(
                f"one cell was written {self.ties} times in a context, more than the {self.tie_limit} ties that these "
                "weights carry: use sparse1(), weight_dtype=torch.bfloat16, or denoise='snap' with float32 weights"
            )

    @property
    def segments(self) -> list[Segment]:
        """The contexts so far; the last may be unfinished."""
        return [*self.done, Segment(self.tokens, self.prompt)] if self.tokens else self.done

    def _look_ahead(self) -> None:
        try:
            self.machine.next_step(self.configuration)
        except MissingTransition as error:
            self.error = error

    def feed(self, token: Token, margin: float = math.inf) -> bool:
        """Take the next token; True if it ends the context, or nothing can follow."""
        self.tokens.append(token)
        self.margin = min(self.margin, margin)
        if token.kind == "run":
            self._run_token(token)
        elif token.kind == "outp":
            self.output = []
        elif token.kind == "symbol" and self.output is not None:
            self.output.append(token.values[0])
        elif token.kind == "eoutp":
            self.finished = True
            self.done.append(Segment(self.tokens, self.prompt))
            self.tokens = []
            return True
        elif token.kind == "esumm":
            self.done.append(Segment(self.tokens, self.prompt))
            marks = [i for i, t in enumerate(self.tokens) if t.kind == "summ" and i >= self.prompt]
            self._resume(self.tokens[marks[0] if marks else -1 :])
            return True
        return self.error is not None

    def _run_token(self, token: Token) -> None:
        K = self.machine.tapes
        step = Step(token.values[0], token.values[1 : K + 1], token.values[K + 1 :])
        for tape, head in enumerate(self.configuration.heads):
            self._write(tape, head)
        self.configuration.apply(step)
        self.steps += 1
        if step.state != self.machine.halting and self.error is None:
            self._look_ahead()

    def _resume(self, summary: list[Token]) -> None:
        """Start the next context from what a summary says, which need not be what the machine did."""
        K = self.machine.tapes
        cells = [t.values for t in summary if t.kind == "tape"]
        heads = [next((i for i, values in enumerate(cells) if values[K + k]), 0) for k in range(K)]
        state = next((t.values[0] for t in summary if t.kind == "state"), self.configuration.state)
        tapes = [[values[k] for values in cells] for k in range(K)]
        self.configuration = Configuration(state, tapes, heads, self.machine.blank, len(cells))
        self._open(summary)
        for cell in range(len(cells)):
            for tape in range(K):
                self._write(tape, cell)


@dataclass(frozen=True)
class Run:
    """What a compiled model wrote by itself. ``output`` is None and ``complete`` False if it came to no end.

    ``error`` says why, unless the tokens were used up (``run`` raises it, ``run_batch`` leaves it here).
    """

    model: "CompiledTransformer" = field(repr=False)
    word: tuple[str, ...]
    segments: tuple[Segment, ...] = field(repr=False)
    steps: int
    margin: float
    output: str | None
    complete: bool
    error: SubspanError | None = None

    @property
    def tokens(self) -> list[Token]:
        """All tokens; a summary, which ends one context and begins the next, stands once."""
        rest = [token for segment in self.segments[1:] for token in segment.tokens[segment.prompt :]]
        return [*self.segments[0].tokens, *rest]

    def registers_at(self, layer: int, position: int, segment: int = -1) -> dict[str, Any]:
        """What each register holds after a layer (0: the embedding): numbers, names, flags; empty ones are left out.

        Raises:
            IndexError: there is no such layer or position.
        """
        held, depth = len(self.segments[segment].tokens), len(self.model.layers)
        if not (0 <= layer <= depth and 0 <= position < held):
            raise IndexError(f"layers go from 0 to {depth} and positions to {held - 1}, got {layer} and {position}")
        with torch.no_grad():
            states = self.model.states(self.model.encode([self.segments[segment].tokens[: position + 1]]))
            x = next(x for i, x in enumerate(states) if i == layer)
        return read_registers(self.model, x[0, position].tolist())

    @property
    def trace(self) -> list[dict[str, Any]]:
        """The registers after the last layer, for each token of the last context."""
        with torch.no_grad():
            x = self.model.stream(self.model.encode([self.segments[-1].tokens]))
        return [read_registers(self.model, row) for row in x[0].tolist()]

    def reads(self, position: int, segment: int = -1) -> list[tuple[int, str, list[int]]]:
        """(layer, register written, positions attended to) of every head whose value this token received.

        Positions with at least half of the largest weight count; heads whose values there are all zero are left out.
        """
        model = self.model
        rows: list[tuple[int, str, list[int]]] = []
        names = {c: name for name, coords in model.circuit.registers.items() for c in coords}
        with torch.no_grad():
            states = model.states(model.encode([self.segments[segment].tokens[: position + 1]]))
            for layer, x in zip(model.layers, states, strict=False):
                if not layer.heads:
                    continue
                weights = layer.weights(x, model.how, last=1)[0, :, 0]
                for head, row in zip(layer.heads, weights, strict=True):
                    at = torch.nonzero(row >= row.max() / 2)[:, 0]
                    if x[0, at][:, list(head.v)].any():
                        rows.append((layer.index + 1, names[head.out[0]], at.tolist()))
        return rows

    # ------------------------------------------------------------------------------------------------------- showing it

    def text(self) -> str:
        """The run for the terminal: a line per step with the tapes, the heads in brackets."""
        lines = []
        for number, (name, configuration) in enumerate(self._configurations()):
            tapes = "   ".join(_tape(configuration, k) for k in range(self.model.machine.tapes))
            lines.append(f"{number:>5}  {configuration.state:<12} {tapes}   {name}".rstrip())
        ending = f"output {self.output!r}" if self.complete else "stopped before the end"
        lines.append(f"{self.steps} steps, {len(self.tokens)} tokens in {len(self.segments)} contexts; {ending}")
        return "\n".join(lines)

    def _configurations(self) -> list[tuple[str, Configuration]]:
        """What the tokens say about the machine after each step; a summary is noted where it was written."""
        machine = self.model.machine
        follower = Follower(machine, self.word)
        seen = [("", _copy(follower.configuration))]
        for segment in self.segments:
            for token in segment.tokens[segment.prompt :]:
                follower.feed(token)
                if token.kind == "run":
                    seen.append(("", _copy(follower.configuration)))
                elif token.kind == "esumm":
                    seen[-1] = ("summary", seen[-1][1])
        return seen

    def page(self, max_rows: int = 400) -> Page:
        """The run as one self-contained page: tapes, heads, tokens, and which earlier tokens each head read."""
        heads = [c.heads for _, c in self._configurations()]
        lines = {
            f"tape {k + 1}": Curve(range(len(heads)), [head[k] for head in heads])
            for k in range(self.model.machine.tapes)
        }
        text = self.text().splitlines()
        if len(text) > max_rows:
            half = max_rows // 2
            text = [*text[:half], f"... {len(text) - 2 * half} lines left out ...", *text[-half:]]
        figure = Figure(curves(lines, xlabel="step", ylabel="head"), "Head positions.")
        sizes = [[row["quantity"], row["measured"], row["formula"]] for row in self.model.size_report()]
        return Page(
            f"A transformer runs on {''.join(self.word) or 'the empty word'}",
            [
                Section("Result", [Table(["", "value"], self._facts())]),
                Section("Tapes", [figure, Code("\n".join(text))]),
                Section("Tokens", [Table(["position", "token", "read from"], self._token_rows(max_rows))]),
                self._inside(),
                Section("Sizes", [Table(["quantity", "measured", "formula"], sizes)]),
            ],
            lead="Every token was predicted by the compiled network; the tapes are what the tokens say.",
        )

    def _facts(self) -> list[list[Any]]:
        model = self.model
        return [
            ["input", "".join(self.word)],
            ["output", self.output],
            ["steps", self.steps],
            ["tokens", len(self.tokens)],
            ["contexts", len(self.segments)],
            ["smallest logit margin", self.margin],
            ["mode", model.mode],
            ["position bits", model.bits],
            ["attention", model.how.attention],
            ["activations", str(model.how.dtype or "exact")],
        ]

    def _inside(self) -> Section:
        """What the last run token read, and what it holds at the end."""
        tokens = self.segments[-1].tokens
        position = max((i for i, t in enumerate(tokens) if t.kind == "run"), default=len(tokens) - 1)
        reads = [[layer, name, _positions(at), _shown(at, tokens)] for layer, name, at in self.reads(position)]
        held = self.registers_at(len(self.model.layers), position)
        return Section(
            f"Inside token {position}",
            [
                Text(f"{tokens[position]}: position {position} of the last context."),
                Table(["layer", "register", "positions read", "tokens read"], reads),
                Table(["register", "at the end"], [[name, str(value)] for name, value in held.items()]),
            ],
        )

    def _token_rows(self, max_rows: int) -> list[list[Any]]:
        """The last context, with the token that each tape's symbol was read from (the latest write of that cell)."""
        tokens, model = self.segments[-1].tokens, self.model
        start = max(0, len(tokens) - max_rows)
        at, names = stages(model.bits).cells_found, [f"read_{k}" for k in range(1, model.machine.tapes + 1)]
        with torch.no_grad():
            states = model.states(model.encode([tokens]))
            before = next(x for i, x in enumerate(states) if i == at - 1)
            layer = model.layers[at - 1]
            weights = layer.weights(before, model.how, last=max_rows)[0]
        coords = [model.circuit[name][0] for name in names]
        chosen = [weights[h].argmax(-1).tolist() for h, head in enumerate(layer.heads) if head.out[0] in coords]
        rows = []
        for i in range(start, len(tokens)):
            found = {row[i - start] for row in chosen} - {0}  # position 0 means: never written
            rows.append([i, str(tokens[i]), ", ".join(f"{j}: {tokens[j]}" for j in sorted(found)) or None])
        return rows


def read_registers(model: "CompiledTransformer", x: Sequence[float]) -> dict[str, Any]:
    """The registers of one state by name: numbers, states, symbols, moves, flags; empty registers are left out."""
    machine = model.machine
    by_code = {"state": machine.states, "symbol": machine.symbols}
    names: dict[str, dict[tuple[float, ...], str]]
    names = {key: {(*c,): name for name, c in codes(values).items()} for key, values in by_code.items()}
    moves: dict[tuple[float, ...], str] = {(-1, -1): "L", (1, -1): "S", (1, 1): "R"}
    out: dict[str, Any] = {}
    for name, coords in model.circuit.registers.items():
        held = tuple(x[c] for c in coords)
        if not any(held):
            continue
        stem = name.rstrip("0123456789").rstrip("_")
        if any(value not in (-1, 0, 1) for value in held) or 0 in held:
            out[name] = held  # mixed by a tie at a token whose result is never used
        elif stem.endswith("state"):
            out[name] = names["state"].get(held, held)
        elif stem.endswith("symbol") or stem == "read":
            out[name] = names["symbol"].get(held, held)
        elif stem.endswith("move"):
            out[name] = moves.get(held, held)
        elif stem.endswith("bit") or stem == "tape_head":
            out[name] = int(held[0] == 1)
        elif len(held) == 1:
            out[name] = held[0] == 1
        else:
            out[name] = sum(1 << b for b, value in enumerate(held) if value == 1)
    return out


def _copy(c: Configuration) -> Configuration:
    return Configuration(c.state, [list(tape) for tape in c.tapes], list(c.heads), c.blank, c.space)


def _tape(configuration: Configuration, k: int) -> str:
    head = configuration.heads[k]
    end = max(len(configuration.tapes[k]), head + 1)
    cells = (configuration.symbol(k, cell) for cell in range(end))
    return "".join(f"[{s}]" if cell == head else f" {s} " for cell, s in enumerate(cells))


def _positions(at: list[int]) -> str:
    return ", ".join(map(str, at[:4])) + (f" and {len(at) - 4} more" if len(at) > 4 else "")


def _shown(at: list[int], tokens: list[Token]) -> str:
    return str(tokens[at[0]]) if len(at) == 1 else f"{tokens[at[0]]}, .."
