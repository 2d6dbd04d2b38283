"""Machines to try things on: an adder, a counter, a rewriter that ties attention, and random ones."""

import itertools
from collections.abc import Iterator

import numpy as np

from subspan.theory.turing.machine import Step, TuringMachine

_Table = dict[tuple[str, tuple[str, ...]], Step]


def _table(lines: str) -> _Table:
    """Entries from lines "state read.. -> state write.. move..", everything separated by spaces."""
    table = {}
    for line in filter(None, map(str.strip, lines.splitlines())):
        before, after = line.split("->")
        (state, *read), (to, *rest) = before.split(), after.split()
        table[state, tuple(read)] = Step(to, tuple(rest[: len(read)]), tuple(rest[len(read) :]))
    return table


def binary_counter() -> TuringMachine:
    """Counts up to overflow. The input is ``m`` and k bits, lowest first; from k zeros it takes 2^(k+2) - (k+2) steps.

    The time is exponential in the space k + 2, which is what summaries are for.
    """
    table = _table("""
        back m -> add m R
        back 0 -> back 0 L
        add 1 -> add 0 R
        add 0 -> back 1 L
        add _ -> halt _ S
    """)
    return TuringMachine(table, "back", "halt", ["m", "0", "1"], "_")


def binary_addition() -> TuringMachine:
    """Adds two binary numbers, highest bit first: ``110+11`` becomes ``1001``. Two tapes.

    The first number moves to tape 2 (behind a mark ``s``) and is added to the second from the right; then the sum goes
    by way of tape 2 to the left end of tape 1.
    """
    table = _table("""
        plus _ _ -> add _ _ L L
        add s s -> pick s s R R
        add _ s -> pick _ s R R
        carry _ s -> pick 1 s S R
        pick _ _ -> home _ _ L L
        home s s -> place s s S R
        home _ s -> home _ s L S
        home s 0 -> home s 0 S L
        home s 1 -> home s 1 S L
        place s _ -> halt _ _ S S
        place _ _ -> halt _ _ S S
    """)
    for d in "01":
        table["start", (d, "_")] = Step("first", (d, "s"), ("S", "R"))
        table["first", (d, "_")] = Step("move", ("s", d), ("R", "R"))
        table["move", (d, "_")] = Step("move", ("_", d), ("R", "R"))
        table["plus", (d, "_")] = Step("plus", (d, "_"), ("R", "S"))
        table["pick", (d, "_")] = Step("pick", ("_", d), ("R", "R"))
        table["home", ("_", d)] = Step("home", ("_", d), ("L", "L"))
        for cell in "s_":
            table["place", (cell, d)] = Step("place", (d, "_"), ("R", "R"))
    table["move", ("+", "_")] = Step("plus", ("_", "_"), ("R", "S"))
    for carry, (a, b) in itertools.product((0, 1), itertools.product("01_", "01s")):
        state = ("add", "carry")[carry]
        if (a, b) == ("_", "s"):
            continue
        total = carry + (a == "1") + (b == "1")
        # an exhausted second number leaves tape 2 on its mark; an exhausted first one writes into the blanks before it
        to = ("add", "carry")[total // 2]
        table[state, (a, b)] = Step(to, (str(total % 2), b if b == "s" else "_"), ("L", "S" if b == "s" else "L"))
    return TuringMachine(table, "start", "halt", ["0", "1", "+"], "_")


def rewriter() -> TuringMachine:
    """One tape: rewrites cell 0 for ever, b once and then 0, 1, 0, 1.. Every step ties with all earlier ones.

    Each step depends on the tied cell, and a blank read by mistake shows as a second b.
    """
    table = _table("""
        go _ -> go b S
        go b -> go 0 S
        go 0 -> go 1 S
        go 1 -> go 0 S
    """)
    return TuringMachine(table, "go", "halt", ["0", "1"], "_")


def scanner() -> TuringMachine:
    """Two tapes: reads ``a`` after ``a`` while it rewrites one cell of tape 2, as ``rewriter`` does; then halts."""
    table = _table("""
        go a _ -> go a b R S
        go a b -> go b 0 R S
        go a 0 -> go a 1 R S
        go a 1 -> go b 0 R S
        go _ 0 -> halt _ 0 S S
        go _ 1 -> halt _ 1 S S
        go _ b -> halt _ b S S
        go _ _ -> halt _ _ S S
    """)
    return TuringMachine(table, "go", "halt", ["a", "b"], "_")


def random_machine(
    tapes: int = 1,
    states: int = 4,
    symbols: int = 3,
    *,
    halt_probability: float = 0.05,
    random_state: int | np.random.Generator = 0,
) -> TuringMachine:
    """A machine with a total random table: ``states`` counts the halting one, ``symbols`` the blank.

    Raises:
        ValueError: fewer than 2 states, 1 symbol or 1 tape.
    """
    if states < 2 or symbols < 1 or tapes < 1:
        raise ValueError(f"needs 2 states, 1 symbol and 1 tape at least, got {states}, {symbols} and {tapes}")
    rng = np.random.default_rng(random_state)
    running = [f"q{i}" for i in range(states - 1)]
    alphabet = [chr(ord("a") + i) for i in range(symbols - 1)]
    table: _Table = {}
    for state in running:
        for read in itertools.product(["_", *alphabet], repeat=tapes):
            to = "halt" if rng.random() < halt_probability else running[rng.integers(states - 1)]
            writes = tuple(["_", *alphabet][i] for i in rng.integers(symbols, size=tapes))
            moves = tuple("LSR"[i] for i in rng.integers(3, size=tapes))
            table[state, read] = Step(to, writes, moves)
    return TuringMachine(table, running[0], "halt", alphabet, "_")


def random_runs(
    count: int,
    *,
    max_tapes: int = 3,
    max_states: int = 10,
    max_symbols: int = 6,
    least_steps: int = 1,
    most_steps: int = 300,
    random_state: int | np.random.Generator = 0,
) -> Iterator[tuple[TuringMachine, list[str]]]:
    """Random machines, and words of up to 12 symbols on which they halt in time with an output that can be printed."""
    rng = np.random.default_rng(random_state)
    while count:
        sizes = [int(rng.integers(low, high + 1)) for low, high in ((1, max_tapes), (2, max_states), (2, max_symbols))]
        machine = random_machine(*sizes, random_state=rng)
        word = [str(symbol) for symbol in rng.choice(machine.input_alphabet, size=rng.integers(0, 13))]
        run = machine.run(word, most_steps)
        printable = set(run.final.output()) <= set(machine.input_alphabet)
        if run.halted and printable and len(run.steps) >= least_steps:
            count -= 1
            yield machine, word
