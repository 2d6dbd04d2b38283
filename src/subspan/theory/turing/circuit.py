"""Heads and neurons over named registers of a residual stream whose entries are -1, 0 or 1.

A number is held as its bits, lowest first, +1 for one and -1 for zero; an empty register holds zeros; flags are 0 or 1.
Every gadget adds to one layer (attention first, then the MLP) and keeps the entries in {-1, 0, 1}. Conditions: ``when``
lists coordinates that must be 1, ``unless`` flags that must be 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Coords = Sequence[int]
Pattern = tuple[int, ...]


class Head(NamedTuple):
    """Score(i, j) = sum_a x[i, q_a] x[j, k_a]; the weights mix x[j, v] and add it to x[i, out]."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]


class Neuron(NamedTuple):
    """relu(inputs . x + bias), added to x along ``outputs``."""

    inputs: Mapping[int, int]
    bias: int
    outputs: Mapping[int, int]


def code(number: int, width: int) -> Pattern:
    """The bits of a number, lowest first, as -1 and 1."""
    if not 0 <= number < 2**width:
        raise ValueError(f"{number} does not fit {width} bits")
    return tuple(1 if number >> b & 1 else -1 for b in range(width))


class Circuit:
    """Registers with their coordinates, and the heads and neurons of each layer (numbered from 1)."""

    def __init__(self, registers: Mapping[str, int]) -> None:
        self.registers: dict[str, list[int]] = {}
        self.width = 0
        for name, size in registers.items():
            self.registers[name] = list(range(self.width, self.width + size))
            self.width += size
        self.heads: dict[int, list[Head]] = {}
        self.neurons: dict[int, list[Neuron]] = {}

    def __getitem__(self, name: str) -> list[int]:
        return self.registers[name]

    @property
    def depth(self) -> int:
        return max([0, *self.heads, *self.neurons])

    # --------------------------------------------------------------------------------------------------------- heads

    def head(self, layer: int, q: Coords, k: Coords, v: Coords, out: Coords) -> None:
        if len(q) != len(k) or len(v) != len(out):
            raise ValueError(
                f"queries and keys ({len(q)}, {len(k)}) or values and outputs ({len(v)}, {len(out)}) differ"
            )
        self.heads.setdefault(layer, []).append(Head(tuple(q), tuple(k), tuple(v), tuple(out)))

    def exists(self, layer: int, flag: str, out: str) -> None:
        """``out`` := 1 from the first token with ``flag`` on."""
        self.head(layer, self["const"], self[flag], self[flag], self[out])

    def broadcast(self, layer: int, flag: str, register: str) -> None:
        """Later tokens receive the flagged token's register; it attends to ``inp`` itself and so adds nothing twice."""
        q = [*self["const"], *self[flag], *self[flag]]
        k = [*self[flag], *self["is_inp"], *self["is_inp"]]
        self.head(layer, q, k, self[register], self[register])

    def lookup(self, layer: int, pointer: str, source: Coords, out: Coords) -> None:
        """``out`` += what stands in ``source`` at the token whose position is ``pointer``."""
        self.head(layer, self[pointer], self["position"], source, out)

    def match(self, layer: int, a: str, b: str, out: str) -> None:
        """``out`` := 1 iff a token so far has ``b`` equal to this token's ``a``; else ``inp`` wins by one."""
        extra = len(self[a]) - 1
        q, k = [*self[a], *self["const"] * extra], [*self[b], *self["is_inp"] * extra]
        self.head(layer, q, k, self["not_inp"], self[out])

    # ------------------------------------------------------------------------------------------------------- neurons

    def add(
        self, layer: int, neurons: Iterable[Neuron], when: Coords = (), unless: Coords = (), times: int = 1
    ) -> None:
        """``times`` of each neuron; every condition that fails lowers what it sees by one or more."""
        mine = self.neurons.setdefault(layer, [])
        for neuron in neurons:
            weights = dict(neuron.inputs)
            for c in when:
                weights[c] = weights.get(c, 0) + 1
            for c in unless:
                weights[c] = weights.get(c, 0) - 1
            mine += [Neuron(weights, neuron.bias - len(when), neuron.outputs)] * times

    def copy(self, layer: int, src: Coords, dst: Coords, when: Coords = (), unless: Coords = (), sign: int = 1) -> None:
        """dst += src under the conditions, else += 0; ``dst`` must be empty before."""
        pairs = [(s, d, e) for s, d in zip(src, dst, strict=True) for e in (1, -1)]
        self.add(layer, [Neuron({s: e}, 0, {d: sign * e}) for s, d, e in pairs], when, unless)

    def clear(self, layer: int, target: Coords, when: Coords = (), unless: Coords = ()) -> None:
        """target := 0 under the conditions."""
        self.copy(layer, target, target, when, unless, sign=-1)

    def table(
        self,
        layer: int,
        keys: Coords,
        entries: Mapping[Pattern, Pattern],
        out: Coords,
        when: Coords = (),
        unless: Coords = (),
    ) -> None:
        """out += the entry of what ``keys`` hold. A key of 0 is for flags only: a -1 there would fire wrongly."""
        neurons = []
        for pattern, values in entries.items():
            inputs = {c: 1 if value == 1 else -1 for c, value in zip(keys, pattern, strict=True)}
            outputs = {c: value for c, value in zip(out, values, strict=True) if value}
            neurons.append(Neuron(inputs, 1 - sum(map(abs, pattern)), outputs))
        self.add(layer, neurons, when, unless)

    def minus_power(self, layer: int, src: Coords, dst: Coords, k: int, when: Coords = (), unless: Coords = ()) -> None:
        """dst := max(0, src - 2^k); in place if ``src`` is ``dst``, else ``dst`` must be empty before."""
        if src is not dst:
            self.copy(layer, src, dst, when, unless)
        neurons = []
        for b in range(k, len(src)):  # borrow: the lowest 1 at or above k becomes 0, the zeros below it 1
            inputs = {src[i]: -1 for i in range(k, b)} | {src[b]: 1}
            neurons.append(Neuron(inputs, k - b, {dst[i]: 1 for i in range(k, b)} | {dst[b]: -1}))
        for b in range(k):  # nothing to borrow from: the low bits become 0
            inputs = {src[i]: -1 for i in range(k, len(src))} | {src[b]: 1}
            neurons.append(Neuron(inputs, k - len(src), {dst[b]: -1}))
        self.add(layer, neurons, when, unless, times=2)

    def minus(self, layer: int, subtrahend: Coords, minuend: Coords, when: Coords = ()) -> None:
        """minuend -= subtrahend (not larger), in one layer per bit from ``layer`` on."""
        for b, bit in enumerate(subtrahend):
            self.minus_power(layer + b, minuend, minuend, b, [*when, bit])

    def move(self, layer: int, src: Coords, step: Coords, dst: Coords, when: Coords = ()) -> None:
        """dst := src moved by the move code ``step`` (L = (-1, -1), S = (1, -1), R = (1, 1)); L stays at 0."""
        self.clear(layer, dst, when)
        self.copy(layer, src, dst, when)
        neurons = []
        for sign in (1, -1):  # R: the lowest 0 becomes 1, the ones below it 0; L is the mirror image
            for b in range(len(src)):
                inputs = dict.fromkeys(step, sign) | {src[i]: sign for i in range(b)} | {src[b]: -sign}
                neurons.append(Neuron(inputs, -b - 2, {dst[i]: -sign for i in range(b)} | {dst[b]: sign}))
        self.add(layer, neurons, when, times=2)

    # ------------------------------------------------------------------------------------------------------- matrices

    def mlp(self, layer: int) -> tuple[Float[Tensor, "f d"], Float[Tensor, " f"], Float[Tensor, "d f"]]:
        """W1, b1 and W2 of a layer."""
        neurons = self.neurons.get(layer, [])
        up, down = torch.zeros(len(neurons), self.width), torch.zeros(self.width, len(neurons))
        _fill(up, [(i, c, w) for i, n in enumerate(neurons) for c, w in n.inputs.items()])
        _fill(down, [(c, i, w) for i, n in enumerate(neurons) for c, w in n.outputs.items()])
        return up, torch.tensor([float(n.bias) for n in neurons]), down


def _fill(matrix: Tensor, entries: list[tuple[int, int, int]]) -> None:
    if entries:
        rows, columns, values = torch.tensor(entries).T
        matrix[rows, columns] = values.to(matrix.dtype)
