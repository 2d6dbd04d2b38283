"""Deterministic multi-tape Turing machines and their direct simulator: the answer key of everything else here.

Tapes are one-sided: cell 0 is the leftmost, and a move to the left from it stays there.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from subspan.errors import ConfigError, SubspanError

Word = str | Sequence[str]


class MissingTransition(SubspanError):
    """A machine reached a state and symbols for which its table has no entry."""


class Step(NamedTuple):
    """One entry's right-hand side: the next state, and what each tape's head writes and where it goes."""

    state: str
    writes: tuple[str, ...]
    moves: tuple[str, ...]


class Configuration:
    """What a machine holds between two steps: its state, its tapes (lists of cells) and its heads.

    ``space`` is 1 + the largest head position after any step so far, and at least the length of the input.
    """

    def __init__(self, state: str, tapes: list[list[str]], heads: list[int], blank: str, space: int) -> None:
        self.state, self.tapes, self.heads, self.blank, self.space = state, tapes, heads, blank, space

    def symbol(self, tape: int, cell: int) -> str:
        cells = self.tapes[tape]
        return cells[cell] if cell < len(cells) else self.blank

    def read(self) -> tuple[str, ...]:
        """The symbols under the heads."""
        return tuple(self.symbol(k, head) for k, head in enumerate(self.heads))

    def apply(self, step: Step) -> None:
        """Write, then move, in place."""
        for k, (symbol, move) in enumerate(zip(step.writes, step.moves, strict=True)):
            head, cells = self.heads[k], self.tapes[k]
            cells.extend([self.blank] * (head + 1 - len(cells)))
            cells[head] = symbol
            self.heads[k] = max(0, head + {"L": -1, "S": 0, "R": 1}[move])
        self.state = step.state
        self.space = max(self.space, 1 + max(self.heads))

    def output(self) -> tuple[str, ...]:
        """Tape 1 without its trailing blanks."""
        cells = self.tapes[0]
        end = len(cells)
        while end and cells[end - 1] == self.blank:
            end -= 1
        return tuple(cells[:end])


@dataclass(frozen=True)
class MachineRun:
    """What the simulator saw. ``heads[i]`` are the head positions after step i; ``output`` is None unless it halted."""

    word: tuple[str, ...]
    steps: tuple[Step, ...]
    heads: tuple[tuple[int, ...], ...]
    halted: bool
    final: Configuration

    @property
    def output(self) -> str | None:
        return "".join(self.final.output()) if self.halted else None

    @property
    def space(self) -> int:
        return self.final.space


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    to: str
    write: list[str]
    move: list[str]


class _File(BaseModel):
    """A machine file: ``transitions`` is state -> the symbols read, separated by spaces -> entry."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    initial: str
    halting: str
    blank: str
    input_alphabet: list[str]
    transitions: dict[str, dict[str, _Entry]]


class TuringMachine:
    """A deterministic machine with one-sided tapes. Build it with ``from_table``, ``from_dict`` or ``from_yaml``.

    ``states`` begins with the initial one and ``symbols`` with the blank and the input alphabet; their order is the
    order of their binary codes.
    """

    def __init__(
        self,
        transitions: Mapping[tuple[str, tuple[str, ...]], Step],
        initial: str,
        halting: str,
        input_alphabet: Sequence[str],
        blank: str,
    ) -> None:
        if not transitions:
            raise ValueError("the table has no transitions: the machine could take no step")
        if initial == halting:
            raise ValueError(f"the initial state {initial!r} is the halting one: a run needs at least one step")
        if blank in input_alphabet:
            raise ValueError(f"the blank {blank!r} must not be in the input alphabet")
        tapes = len(next(iter(transitions))[1])
        for (state, read), step in transitions.items():
            _check_entry(state, read, step, tapes, halting)
        # grouped by state, as machine files are: the order of names, and so the codes, survives a file
        order = dict.fromkeys(q for q, _ in transitions)
        self.transitions = {key: step for q in order for key, step in transitions.items() if key[0] == q}
        self.initial, self.halting, self.blank, self.tapes = initial, halting, blank, tapes
        self.input_alphabet = tuple(dict.fromkeys(input_alphabet))
        steps = self.transitions.values()
        self.states = tuple(dict.fromkeys([initial, *order, *(step.state for step in steps), halting]))
        symbols = itertools.chain((s for _, read in self.transitions for s in read), *(step.writes for step in steps))
        self.symbols = tuple(dict.fromkeys([blank, *self.input_alphabet, *symbols]))

    @classmethod
    def from_table(
        cls,
        transitions: Mapping[tuple[str, Word], tuple[str, Word, Word]],
        *,
        initial: str,
        halting: str,
        input_alphabet: Word,
        blank: str = "_",
    ) -> "TuringMachine":
        """A machine from {(state, read): (next state, written, moves)}; moves are "L", "S" or "R".

        With one tape ``read``, ``written`` and ``moves`` are plain strings, with several they are tuples.

        Raises:
            ValueError: entries of different arity, two for one state and symbols, an unknown move, a transition from
                the halting state, a blank in the input alphabet, or an initial state that halts.
        """
        table = _table(
            (state, _symbols(read), Step(to, _symbols(write), _symbols(move)))
            for (state, read), (to, write, move) in transitions.items()
        )
        return cls(table, initial, halting, list(input_alphabet), blank)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TuringMachine":
        """A machine from the content of a machine file (see ``from_yaml``).

        Raises:
            ConfigError: unknown, missing or repeated keys, or values that are not text.
            ValueError: as ``from_table``.
        """
        try:
            file = _File.model_validate(_as_text(data))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"machine file, {where}: {first['msg']}; put symbols and states in quotes") from error
        table = _table(
            (state, tuple(read.split()), Step(entry.to, tuple(entry.write), tuple(entry.move)))
            for state, row in file.transitions.items()
            for read, entry in row.items()
        )
        return cls(table, file.initial, file.halting, file.input_alphabet, file.blank)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> "TuringMachine":
        """A machine from a YAML file with ``initial``, ``halting``, ``blank``, ``input_alphabet`` and ``transitions``::

            transitions:
              carry:
                "1 _": {to: carry, write: ["0", "_"], move: [L, S]}

        Raises as ``from_dict``.
        """
        try:
            data = yaml.load(Path(path).read_text("utf-8"), _Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path} holds no mapping: a machine file has initial, halting, blank and transitions")
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """The content of a machine file; ``from_dict`` reads it back."""
        if spaced := [symbol for symbol in self.symbols if not symbol or symbol.split() != [symbol]]:
            raise ValueError(f"the symbol {spaced[0]!r} is empty or holds a space, which a machine file cannot say")
        rows: dict[str, dict[str, Any]] = {}
        for (state, read), step in self.transitions.items():
            entry = {"to": step.state, "write": list(step.writes), "move": list(step.moves)}
            rows.setdefault(state, {})[" ".join(read)] = entry
        return {
            "initial": self.initial,
            "halting": self.halting,
            "blank": self.blank,
            "input_alphabet": list(self.input_alphabet),
            "transitions": rows,
        }

    def renamed(self, states: Callable[[str], str], symbols: Callable[[str], str]) -> "TuringMachine":
        """The same machine under other names (each map one-to-one)."""
        table = {
            (states(q), tuple(map(symbols, read))): Step(states(s.state), tuple(map(symbols, s.writes)), s.moves)
            for (q, read), s in self.transitions.items()
        }
        alphabet = [symbols(s) for s in self.input_alphabet]
        return TuringMachine(table, states(self.initial), states(self.halting), alphabet, symbols(self.blank))

    def word(self, word: Word) -> tuple[str, ...]:
        """The word's symbols; a string is read character by character.

        Raises:
            ValueError: a symbol that is not in the input alphabet.
        """
        symbols = tuple(word)
        for symbol in symbols:
            if symbol not in self.input_alphabet:
                raise ValueError(f"the word holds {symbol!r}; the input alphabet is {', '.join(self.input_alphabet)}")
        return symbols

    def start(self, word: Word) -> Configuration:
        """The configuration before the first step."""
        cells = list(self.word(word))
        blank_tapes: list[list[str]] = [[] for _ in range(self.tapes - 1)]
        return Configuration(self.initial, [cells, *blank_tapes], [0] * self.tapes, self.blank, len(cells))

    def next_step(self, configuration: Configuration) -> Step:
        """The table's entry for a configuration.

        Raises:
            MissingTransition: there is none.
        """
        read = configuration.read()
        step = self.transitions.get((configuration.state, read))
        if step is None:
            shown = ", ".join(map(repr, read))
            raise MissingTransition(f"no transition from state {configuration.state!r} on {shown}: add it to the table")
        return step

    def steps(self, configuration: Configuration) -> Iterator[Step]:
        """Run ``configuration`` on, in place, until it halts; give each step after it was applied."""
        while configuration.state != self.halting:
            step = self.next_step(configuration)
            configuration.apply(step)
            yield step

    def run(self, word: Word, max_steps: int = 1_000_000) -> MachineRun:
        """Simulate directly, for at most ``max_steps`` steps.

        Raises:
            MissingTransition: the table has no entry for what was reached.
            ValueError: the word is not over the input alphabet.
        """
        configuration = self.start(word)
        steps, heads = [], []
        for step in itertools.islice(self.steps(configuration), max_steps):
            steps.append(step)
            heads.append(tuple(configuration.heads))
        halted = configuration.state == self.halting
        return MachineRun(self.word(word), tuple(steps), tuple(heads), halted, configuration)


def _symbols(word: Word) -> tuple[str, ...]:
    return (word,) if isinstance(word, str) else tuple(word)


def _table(entries: Iterable[tuple[str, tuple[str, ...], Step]]) -> dict[tuple[str, tuple[str, ...]], Step]:
    table: dict[tuple[str, tuple[str, ...]], Step] = {}
    for state, read, step in entries:
        if (state, read) in table:
            raise ValueError(f"two transitions from {state!r} on {', '.join(map(repr, read))}: keep one")
        table[state, read] = step
    return table


class _Loader(yaml.SafeLoader):
    """YAML in which no key may stand twice: the last would win in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _as_text(value: Any) -> Any:
    """YAML reads an unquoted 0 as a number, also as a key; it is a symbol here. Booleans stay, and are refused."""
    if isinstance(value, Mapping):
        texts = {_as_text(key): _as_text(item) for key, item in value.items()}
        if len(texts) < len(value):
            raise ConfigError(f"machine file: two of the keys {', '.join(map(repr, value))} are the same text")
        return texts
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_entry(state: str, read: tuple[str, ...], step: Step, tapes: int, halting: str) -> None:
    where = f"transition from {state!r} on {', '.join(map(repr, read))}"
    if state == halting:
        raise ValueError(f"{where}: {halting!r} is the halting state, remove the entry")
    for part, values in (("reads", read), ("writes", step.writes), ("moves", step.moves)):
        if len(values) != tapes or not tapes:
            raise ValueError(f"{where}: {part} {len(values)} symbols but the machine has {tapes} tapes")
    for move in step.moves:
        if move not in ("L", "S", "R"):
            raise ValueError(f"{where}: move {move!r} is not one of L, S, R")
