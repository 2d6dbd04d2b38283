"""From a machine to the heads and neurons of a transformer that runs it (Broesamle and Eckstein, ICML 2026).

The construction is the one of the authors' public code. A token's residual stream holds its own fields, its position,
and registers that later layers fill:

1. flags: input or output symbol, and pointers to earlier tokens by position;
2. to L1: a position block's last token collects the head positions from the bits before it;
3. to L2: run tokens pass the head positions on, each by its own move;
4. to L3: for every tape the *latest* token that wrote the cell under the head, by binary search over positions;
5. the last four: the symbol there, the transition table, and what to write next.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subspan.theory.turing.circuit import Circuit, Neuron, Pattern, code
from subspan.theory.turing.machine import TuringMachine
from subspan.theory.turing.tokens import MOVES, Mode, Vocabulary

MOVE_CODE = {"L": (-1, -1), "S": (1, -1), "R": (1, 1)}


class Stages(NamedTuple):
    """Layers at which the construction's parts end."""

    heads_read: int  # L1
    heads_known: int  # L2
    cells_found: int  # L3
    depth: int


def stages(bits: int) -> Stages:
    """L1 = r/2 + 1, L2 = L1 + r + 2, L3 = L2 + r + 1 and the depth L = L3 + 4 = 5r/2 + 8."""
    first = bits // 2 + 1
    second = first + bits + 2
    third = second + bits + 1
    return Stages(first, second, third, third + 4)


def bit_length(count: int) -> int:
    """Bits of the largest index of ``count`` things; 1 also for a single one."""
    return max(1, (count - 1).bit_length())


def registers(machine: TuringMachine, bits: int, mode: Mode) -> dict[str, int]:
    """Names and sizes of the registers; their sum is the width d."""
    K, r, q, g = machine.tapes, bits, bit_length(len(machine.states)), bit_length(len(machine.symbols))
    sizes = {"position": r, "state": q, "const": 1}
    per_tape = {"bit": 1, "symbol": g, "move": 2, "head": r, "cell": r, "fetched_bit_a": 1, "fetched_bit_b": 1}
    sizes |= dict.fromkeys(["outp_position", "pointer_a", "pointer_b", "previous", "block_pointer"], r)
    per_tape |= {"fetched_head": r, "token": r, "latest": r, "read": g, "block_head": r, "next_bit": 1}
    sizes |= {"block_state": q, "new_state": q, "output_symbol": g}
    per_tape |= {"new_symbol": g, "new_move": 2, "written": 1, "higher": 1}
    flags = [
        "is_inp",
        "is_einp",
        "is_outp",
        "is_eoutp",
        "is_pos",
        "is_epos",
        "is_run",
        "is_symbol",
        "is_bits",
        "not_inp",
    ]
    flags += ["seen_outp", "is_input", "is_output", "halted", "block_full", "write_pos", "write_epos"]
    flags += ["read_blank", "write_eoutp", "write_symbol"]
    if mode == "scot":
        sizes |= {"prompt_end": r, "summ_position": r, "final_state": q, "write_state": q}
        per_tape |= {"final_head": r, "tape_symbol": g, "tape_head": 1, "head_here": 1, "next_head": 1}
        flags += ["is_summ", "is_esumm", "is_tape", "is_state", "seen_einp", "seen_esumm", "ending_summ", "prompt_tape"]
        flags += ["ending_tape", "length_cap", "write_summ", "more_tape", *(f"equal_{i}" for i in range(r - 2))]
    sizes |= {f"{name}_{k}": size for name, size in per_tape.items() for k in range(1, K + 1)}
    return sizes | dict.fromkeys(flags, 1)


def build(machine: TuringMachine, bits: int, mode: Mode) -> Circuit:
    """All heads and neurons.

    Raises:
        ValueError: bits that are odd, below 2, or below 4 with summaries.
    """
    least = 2 if mode == "cot" else 4
    if bits < least or bits % 2:
        raise ValueError(f"bits must be even and at least {least} for mode={mode!r}, got {bits}")
    c, at = Circuit(registers(machine, bits, mode)), stages(bits)
    tapes = range(1, machine.tapes + 1)
    _flags_and_pointers(c, tapes)
    _output_cells(c, tapes)
    _heads_from_block(c, tapes, bits)
    _heads_along_run(c, tapes, bits, at)
    _latest_writes(c, tapes, bits, at)
    _position_block(c, tapes, bits, at)
    _transition(c, machine, at)
    _emission(c, tapes, at)
    if mode == "scot":
        _prompt_and_ending(c, tapes)
        _length_cap(c, tapes, bits, at)
        _resume(c, tapes)
        _write_summary(c, tapes, at)
    return c


# --------------------------------------------------------------------------------------------------- chain of thought


def _flags_and_pointers(c: Circuit, tapes: Sequence[int]) -> None:
    """Layers 1 and 2: input or output symbol; the cell of input symbols; pointers one and two tokens back."""
    c.exists(1, "is_outp", "seen_outp")
    symbol, seen = c["is_symbol"], c["seen_outp"]
    c.table(1, [*symbol, *seen], {(1, 1): (1,)}, c["is_output"])
    c.table(1, [*symbol, *seen], {(1, 0): (1,)}, c["is_input"])
    c.minus_power(1, c["position"], c["cell_1"], 0, symbol, seen)
    c.copy(1, c["position"], c["outp_position"], c["is_outp"])
    for pointer, k in (("pointer_a", 0), ("pointer_b", 1), ("previous", 0)):
        c.minus_power(1, c["position"], c[pointer], k)
    for k in tapes:
        c.copy(2, c["position"], c[f"token_{k}"], c["is_run"])
    c.copy(2, c["position"], c["token_1"], c["is_input"])


def _output_cells(c: Circuit, tapes: Sequence[int]) -> None:
    """Layers 2 to r + 2: output symbol i asks for cell i of tape 1 (outp itself for cell 0, by its embedding)."""
    c.broadcast(2, "is_outp", "outp_position")
    c.copy(2, c["position"], c["head_1"], c["is_output"])
    c.minus(3, c["outp_position"], c["head_1"], c["is_output"])


def _heads_from_block(c: Circuit, tapes: Sequence[int], bits: int) -> None:
    """Layers 2 to L1: epos reads two bit tokens a layer, from the highest down."""
    for j in range(1, bits // 2 + 1):
        layer = j + 1
        for k in tapes:
            for pointer, fetched, bit in (
                ("pointer_a", "fetched_bit_a", bits - 2 * j + 1),
                ("pointer_b", "fetched_bit_b", bits - 2 * j),
            ):
                register = c[f"{fetched}_{k}"]
                c.lookup(layer, pointer, c[f"bit_{k}"], register)
                c.copy(layer, register, c[f"head_{k}"][bit : bit + 1], c["is_epos"])
                c.clear(layer, register)
        for pointer in (c["pointer_a"], c["pointer_b"]):
            c.minus_power(layer, pointer, pointer, 1)


def _heads_along_run(c: Circuit, tapes: Sequence[int], bits: int, at: Stages) -> None:
    """Layers L1 + 1 to L2 - 1: r + 1 rounds, so that positions pass from einp or epos through r run tokens into pos."""
    for j in range(1, bits + 2):
        layer = at.heads_read + j
        for k in tapes:
            head, fetched = c[f"head_{k}"], c[f"fetched_head_{k}"]
            c.lookup(layer, "previous", head, fetched)
            c.move(layer, fetched, c[f"move_{k}"], head, c["is_run"])
            c.clear(layer, head, c["is_pos"])
            c.copy(layer, fetched, head, c["is_pos"])
            if j <= bits:
                c.clear(layer, fetched)
    for k in tapes:  # the cell that a run token wrote is the position before its move
        c.clear(at.heads_known, c[f"cell_{k}"], c["is_run"])
        c.copy(at.heads_known, c[f"fetched_head_{k}"], c[f"cell_{k}"], c["is_run"])


def _latest_writes(c: Circuit, tapes: Sequence[int], bits: int, at: Stages) -> None:
    """Layers L2 + 1 to L3: binary search, from the top bit, for the position of the last write of the head's cell."""
    for k in tapes:
        c.match(at.heads_known + 1, f"head_{k}", f"cell_{k}", f"written_{k}")
        token, latest = c[f"token_{k}"], c[f"latest_{k}"]
        higher, written = c[f"higher_{k}"], c[f"written_{k}"]
        for j in range(bits):
            layer, b = at.heads_known + 1 + j, bits - 1 - j
            # a write of this cell with the bits found so far and bit b set scores r + j + 1, inp r + j
            q = [*c[f"head_{k}"], *c["const"] * (bits + j + 1), *latest[b + 1 :]]
            key = [*c[f"cell_{k}"], *c["is_inp"] * (bits + j), *token[b:]]
            c.head(layer, q, key, c["not_inp"], higher)
            c.table(layer, [*higher, *written], {(1, 1): (1,), (0, 1): (-1,)}, latest[b : b + 1])
            c.clear(layer, higher)
        # a token without a found position attends to inp, whose symbol is empty
        q, key = [*latest, *c["const"]], [*token, *c["is_inp"]]
        c.head(at.cells_found, q, key, c[f"symbol_{k}"], c[f"read_{k}"])


def _position_block(c: Circuit, tapes: Sequence[int], bits: int, at: Stages) -> None:
    """Layers L2 to L3: the p-th token after pos says bit p; after r run tokens comes pos, after r bits epos."""
    back = c["block_pointer"]
    for k in tapes:
        head = c[f"head_{k}"]
        c.copy(at.heads_known, head, c[f"block_head_{k}"], c["is_pos"])
        c.copy(at.heads_known, head[:1], c[f"next_bit_{k}"], c["is_pos"])
    c.minus_power(at.heads_known, c["position"], back, 0)
    for p in range(1, bits):
        layer = at.heads_known + p
        for k in tapes:
            c.lookup(layer, "block_pointer", c[f"block_head_{k}"][p : p + 1], c[f"next_bit_{k}"])
        c.minus_power(layer, back, back, 0)
    full = at.heads_known + bits - 1
    c.lookup(full, "block_pointer", c["is_run"], c["block_full"])
    c.table(full, [*c["block_full"], *c["is_run"], *c["halted"]], {(1, 1, 0): (1,)}, c["write_pos"])
    c.lookup(full + 1, "block_pointer", c["is_pos"], c["write_epos"])
    c.minus_power(full + 1, back, back, 1)
    c.lookup(at.cells_found, "block_pointer", c["state"], c["block_state"])
    c.clear(at.cells_found, c["state"], c["is_epos"])
    c.copy(at.cells_found, c["block_state"], c["state"], c["is_epos"])


def _transition(c: Circuit, machine: TuringMachine, at: Stages) -> None:
    """Layers L3 and L3 + 1: blank where nothing was written, then one neuron per entry of the table."""
    tapes = range(1, machine.tapes + 1)
    state_code, symbol_code = codes(machine.states), codes(machine.symbols)
    blank = symbol_code[machine.blank]
    for k in tapes:
        keys = [*c[f"written_{k}"], *c["is_pos"], *c["is_bits"], *c["is_input"]]
        c.table(at.cells_found, keys, {(0, 0, 0, 0): blank}, c[f"read_{k}"])
    keys = [*c["state"], *itertools.chain(*(c[f"read_{k}"] for k in tapes))]
    out = [*c["new_state"], *_new(c, "new_symbol", tapes), *_new(c, "new_move", tapes)]
    entries: dict[Pattern, Pattern] = {}
    for (state, read), step in machine.transitions.items():
        key = (*state_code[state], *itertools.chain(*(symbol_code[s] for s in read)))
        written = itertools.chain(*(symbol_code[s] for s in step.writes), *(MOVE_CODE[m] for m in step.moves))
        entries[key] = (*state_code[step.state], *written)
    c.table(at.cells_found + 1, keys, entries, out)
    c.table(at.cells_found + 1, c["read_1"], {blank: (1,)}, c["read_blank"])


def _emission(c: Circuit, tapes: Sequence[int], at: Stages) -> None:
    """Layers L3 + 2 to L3 + 4: no new run token where something else comes next; the next output symbol or eoutp."""
    for register in _new_run(c, tapes):
        c.clear(at.cells_found + 2, register, c["halted"])
        c.clear(at.cells_found + 2, register, c["write_pos"])
    keys = [*c["is_output"], *c["is_outp"], *c["read_blank"]]
    c.table(at.cells_found + 2, keys, {(1, 0, 1): (1,), (0, 1, 1): (1,)}, c["write_eoutp"])
    c.table(at.cells_found + 3, [*c["seen_outp"], *c["write_eoutp"]], {(1, 0): (1,)}, c["write_symbol"])
    c.copy(at.cells_found + 4, c["read_1"], c["output_symbol"], c["write_symbol"])


def _new(c: Circuit, name: str, tapes: Sequence[int]) -> list[int]:
    return list(itertools.chain(*(c[f"{name}_{k}"] for k in tapes)))


def _new_run(c: Circuit, tapes: Sequence[int]) -> list[list[int]]:
    return [c["new_state"], _new(c, "new_symbol", tapes), _new(c, "new_move", tapes)]


# ------------------------------------------------------------------------------------------------------------ summaries


def _prompt_and_ending(c: Circuit, tapes: Sequence[int]) -> None:
    """Layers 1 and 2: summ and tape tokens of the prompt against those of the ending; a prompt's summ acts as inp."""
    c.exists(1, "is_einp", "seen_einp")
    c.exists(1, "is_esumm", "seen_esumm")
    seen = [*c["seen_einp"], *c["seen_esumm"]]
    ending = {(1, 1, 0): (1,), (1, 0, 1): (1,), (1, 1, 1): (1,)}
    c.table(1, [*c["is_summ"], *seen], ending, c["ending_summ"])
    c.table(1, [*c["is_summ"], *seen], {(1, 0, 0): (1,)}, c["is_inp"])
    c.table(1, [*c["is_summ"], *seen], {(1, 0, 0): (-1,)}, c["not_inp"])
    c.table(1, [*c["is_tape"], *seen], {(1, 0, 0): (1,)}, c["prompt_tape"])
    c.table(1, [*c["is_tape"], *seen], ending, c["ending_tape"])
    for mark in ("is_einp", "is_esumm"):
        c.copy(1, c["position"], c["prompt_end"], c[mark])
    inp = c["is_inp"]
    q = [*c["const"] * 2, *c["is_einp"] * 2, *c["is_esumm"] * 2]
    c.head(2, q, [*c["is_einp"], *c["is_esumm"], *inp * 4], c["prompt_end"], c["prompt_end"])
    for k in tapes:  # the prompt's tape tokens are the first writes of their cells
        c.minus_power(2, c["position"], c[f"cell_{k}"], 0, c["prompt_tape"])
        c.copy(2, c["position"], c[f"token_{k}"], c["prompt_tape"])


def _length_cap(c: Circuit, tapes: Sequence[int], bits: int, at: Stages) -> None:
    """Layers 2 to 4: a flag exactly at position 4 * prompt end, kept from there on; run tokens then write summ."""
    position, end = c["position"], c["prompt_end"]
    for i in range(bits - 2):
        c.table(2, [position[i + 2], end[i]], {(-1, -1): (1,), (1, 1): (1,)}, c[f"equal_{i}"])
    equal = [c[f"equal_{i}"][0] for i in range(bits - 2)]
    zeros = [*position[:2], *end[-2:]]
    inputs = dict.fromkeys(equal, 1) | dict.fromkeys(zeros, -1)
    c.add(3, [Neuron(inputs, -bits - 1, {c["length_cap"][0]: 1})])
    c.broadcast(4, "length_cap", "length_cap")
    c.table(4, [*c["is_run"], *c["length_cap"], *c["halted"]], {(1, 1, 0): (1,)}, c["write_summ"])
    c.clear(at.heads_known + bits, c["write_pos"], c["write_summ"])
    for register in _new_run(c, tapes):
        c.clear(at.cells_found + 2, register, c["write_summ"])
        c.clear(at.cells_found + 2, register, c["is_state"])


def _resume(c: Circuit, tapes: Sequence[int]) -> None:
    """Layer 3: esumm takes the heads from the tape tokens marked with them, and the state from the state token."""
    q = [*c["is_esumm"] * 2, *c["const"]]
    for k in tapes:
        c.head(3, q, [*c[f"head_here_{k}"] * 2, *c["is_inp"]], c[f"cell_{k}"], c[f"head_{k}"])
    c.head(3, q, [*c["is_state"] * 2, *c["is_inp"]], c["state"], c["state"])


def _write_summary(c: Circuit, tapes: Sequence[int], at: Stages) -> None:
    """The ending: every token asks for the cell at its distance from summ, on all tapes, while there is something."""
    ending = (c["ending_summ"], c["ending_tape"])
    c.copy(2, c["position"], c["summ_position"], c["ending_summ"])
    c.broadcast(3, "ending_summ", "summ_position")
    for k in tapes:
        for flag in ending:
            c.copy(3, c["position"], c[f"head_{k}"], flag)
            c.minus(4, c["summ_position"], c[f"head_{k}"], flag)

    L2 = at.heads_known
    c.lookup(L2, "previous", c["state"], c["final_state"])
    c.clear(L2 + 1, c["final_state"], unless=c["ending_summ"])
    c.broadcast(L2 + 2, "ending_summ", "final_state")
    for k in tapes:
        c.lookup(L2, "previous", c[f"head_{k}"], c[f"final_head_{k}"])
        c.clear(L2 + 1, c[f"final_head_{k}"], unless=c["ending_summ"])
        c.match(L2 + 2, f"head_{k}", f"final_head_{k}", f"next_head_{k}")
    any_of = [c[f"{name}_{k}"][0] for name in ("written", "next_head") for k in tapes]
    more = c["more_tape"]
    total = dict.fromkeys(any_of, 1)  # relu(s) - relu(s - 1) = min(s, 1)
    c.add(L2 + 3, [Neuron(total, 0, {more[0]: 1}), Neuron(total, -1, {more[0]: -1})])
    for flag in ending:
        c.copy(L2 + 4, c["final_state"], c["write_state"], flag, unless=more)
        for k in tapes:
            c.copy(at.cells_found + 1, c[f"read_{k}"], c[f"tape_symbol_{k}"], [*flag, *more])
            here = {(0,): (-1,), (1,): (1,)}
            c.table(at.cells_found + 1, c[f"next_head_{k}"], here, c[f"tape_head_{k}"], [*flag, *more])


# --------------------------------------------------------------------------------------------------------------- tokens


def codes(names: Sequence[str]) -> dict[str, Pattern]:
    """The binary code of each name: that of its index."""
    return {name: code(i, bit_length(len(names))) for i, name in enumerate(names)}


class TokenTable:
    """A vector for every token of a vocabulary: its kind's base plus one row for the value of each of its fields."""

    def __init__(self, vocabulary: Vocabulary, base: Mapping[str, Tensor], fields: Mapping[str, list[Tensor]]) -> None:
        self.vocabulary, self.base, self.fields = vocabulary, dict(base), dict(fields)

    def dense(self) -> Float[Tensor, "v d"]:
        """All vectors as one table."""
        rows = []
        for kind in self.vocabulary.kinds:
            table = self.base[kind][None]
            for field in self.fields[kind]:
                table = (table[:, None] + field).flatten(0, 1)
            rows.append(table)
        return torch.cat(rows)

    def rows(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n d"]:
        """The vectors of some tokens, without the table."""
        out = torch.zeros(*ids.shape, len(self.base["inp"]), dtype=self.base["inp"].dtype, device=ids.device)
        for name, kind in self.vocabulary.kinds.items():
            mine = (ids >= kind.first) & (ids < kind.first + kind.size)
            rest = ids[mine] - kind.first
            out[mine] = self.base[name]
            for field in reversed(self.fields[name]):
                out[mine] += field[rest % len(field)]
                rest = rest // len(field)
        return out

    def best(self, x: Float[Tensor, "n d"]) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
        """arg-max over all tokens of vector . x, and by how much it leads: field by field, exact, without the table."""
        scores, leads, ids = [], [], []
        for name, kind in self.vocabulary.kinds.items():
            if not kind.size:
                continue
            score = x @ self.base[name]
            lead = torch.full_like(score, torch.inf)
            index = torch.zeros(len(x), dtype=torch.long, device=x.device)
            for field in self.fields[name]:
                top = (x @ field.T).topk(min(2, len(field)))
                score = score + top.values[:, 0]
                index = index * len(field) + top.indices[:, 0]
                if len(field) > 1:
                    lead = torch.minimum(lead, top.values[:, 0] - top.values[:, 1])
            scores.append(score)
            leads.append(lead)
            ids.append(kind.first + index)
        score, lead = torch.stack(scores, 1), torch.stack(leads, 1)
        first = score.topk(2)
        at = first.indices[:, :1]
        # the runner-up is the best of another kind, or the winner with one field changed
        margin = torch.minimum(first.values[:, 0] - first.values[:, 1], lead.gather(1, at)[:, 0])
        return torch.stack(ids, 1).gather(1, at)[:, 0], margin

    def to(self, like: Tensor) -> "TokenTable":
        base = {kind: vector.to(like) for kind, vector in self.base.items()}
        return TokenTable(self.vocabulary, base, {k: [f.to(like) for f in fields] for k, fields in self.fields.items()})


def embeddings(c: Circuit, machine: TuringMachine, vocabulary: Vocabulary) -> TokenTable:
    """What each token starts with (the position's coordinates stay empty)."""
    K, scot = machine.tapes, "summ" in vocabulary.kinds
    state_code, symbol_code = codes(machine.states), codes(machine.symbols)
    start = {"state": state_code[machine.initial]} | {f"head_{k}": code(0, len(c["position"])) for k in range(1, K + 1)}
    extra: dict[str, dict[str, Pattern]] = {"einp": start, "outp": {"head_1": start["head_1"]}}
    base = {}
    for kind in vocabulary.kinds:
        own = {"const": (1,), f"is_{kind}": (1,), "not_inp": (int(kind != "inp"),), **extra.get(kind, {})}
        base[kind] = _vector(c, own)
    write = [_rows(c, f"symbol_{k}", machine.symbols, symbol_code) for k in range(1, K + 1)]
    states = _rows(c, "state", machine.states, state_code)
    halting = states + _rows(c, "halted", machine.states, {machine.halting: (1,)})
    fields: dict[str, list[Tensor]] = {kind: [] for kind in vocabulary.kinds}
    fields["symbol"] = [_rows(c, "symbol_1", machine.input_alphabet, symbol_code)]
    fields["run"] = [halting, *write, *(_rows(c, f"move_{k}", MOVES, MOVE_CODE) for k in range(1, K + 1))]
    fields["bits"] = [_rows(c, f"bit_{k}", (-1, 1), {-1: (-1,), 1: (1,)}) for k in range(1, K + 1)]
    if scot:
        fields["state"] = [states]
        heads = [_rows(c, f"head_here_{k}", (False, True), {True: (1,)}) for k in range(1, K + 1)]
        fields["tape"] = [*write, *heads]
    return TokenTable(vocabulary, base, fields)


def unembeddings(c: Circuit, machine: TuringMachine, vocabulary: Vocabulary) -> TokenTable:
    """What each token's logit reads."""
    tapes, scot = range(1, machine.tapes + 1), "summ" in vocabulary.kinds
    state_code, symbol_code = codes(machine.states), codes(machine.symbols)
    flag = {"outp": "halted", "pos": "write_pos", "epos": "write_epos", "eoutp": "write_eoutp"}
    flag |= {"summ": "write_summ", "esumm": "is_state"}
    base = {kind: _vector(c, {flag[kind]: (1,)} if kind in flag else {}) for kind in vocabulary.kinds}
    fields: dict[str, list[Tensor]] = {kind: [] for kind in vocabulary.kinds}
    fields["symbol"] = [_rows(c, "output_symbol", machine.input_alphabet, symbol_code)]
    fields["run"] = [
        _rows(c, "new_state", machine.states, state_code),
        *(_rows(c, f"new_symbol_{k}", machine.symbols, symbol_code) for k in tapes),
        *(_rows(c, f"new_move_{k}", MOVES, MOVE_CODE) for k in tapes),
    ]
    fields["bits"] = [_rows(c, f"next_bit_{k}", (-1, 1), {-1: (-1,), 1: (1,)}) for k in tapes]
    if scot:
        fields["state"] = [_rows(c, "write_state", machine.states, state_code)]
        symbols = [_rows(c, f"tape_symbol_{k}", machine.symbols, symbol_code) for k in tapes]
        heads = [_rows(c, f"tape_head_{k}", (False, True), {False: (-1,), True: (1,)}) for k in tapes]
        fields["tape"] = [*symbols, *heads]
    return TokenTable(vocabulary, base, fields)


def _vector(c: Circuit, values: Mapping[str, Pattern]) -> Tensor:
    out = torch.zeros(c.width)
    for name, value in values.items():
        out[c[name]] = torch.tensor(value, dtype=out.dtype)
    return out


def _rows(c: Circuit, register: str, names: Sequence, code_of: Mapping) -> Tensor:
    """One row per name: its code in the register, nothing for a name without a code."""
    out = torch.zeros(len(names), c.width)
    for i, name in enumerate(names):
        if name in code_of:
            out[i, c[register]] = torch.tensor(code_of[name], dtype=out.dtype)
    return out
