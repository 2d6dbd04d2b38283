"""Compiled Turing machines: the checks T1 to T20, edge cases, and one run from file to page."""

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subspan.errors import ConfigError
from subspan.theory import (
    CompiledTransformer,
    ContextTooLong,
    MissingTransition,
    Segment,
    Step,
    TieLimit,
    TuringMachine,
    UnprintableOutput,
    VocabularyTooLarge,
    WrongToken,
    binary_addition,
    binary_counter,
    compile_machine,
    growth,
    load_compiled,
    measured_scale,
    needed_bits,
    paper_scale,
    random_machine,
    random_runs,
    required_scale,
    rewriter,
    scanner,
    segments,
    tie_limit,
    to_decoder,
)
from subspan.theory.turing.circuit import Circuit, code
from subspan.theory.turing.layers import Cache, Layer
from subspan.theory.turing.model import size_formulas
from subspan.theory.turing.numerics import FORMATS, Arithmetic, denoised, rounded
from subspan.theory.turing.runs import Follower
from subspan.theory.turing.tokens import Vocabulary, cot_length

LOW = {name: dtype for name, dtype in FORMATS.items() if name != "fp32"}
MODES = ("cot", "scot")


def longest(contexts: list[Segment]) -> int:
    return max(len(segment.tokens) for segment in contexts)


# ------------------------------------------------------------------------------------------------------------ section 4


def sized(small: object, full: object) -> pytest.MarkDecorator:
    """A smaller size by default, and the specification's for ``make test-slow``."""
    return pytest.mark.parametrize("size", [small, pytest.param(full, marks=pytest.mark.slow)])


@sized(6, 300)
def test_t1_every_claimed_token_of_random_machines_with_chain_of_thought(size: int) -> None:
    for machine, word in random_runs(size, random_state=0):
        least, steps = needed_bits(machine, word, "cot"), len(machine.run(word).steps)
        for bits in (least, least + 2, least + 4):
            found = compile_machine(machine, bits, factored_vocab=True).check(word)
            assert found.claimed >= steps + 2
            assert found.margin >= 1  # T6


@sized(5, 100)
def test_t2_every_claimed_token_of_random_machines_with_summaries(size: int) -> None:
    most = 0
    for machine, word in [*random_runs(size, least_steps=4, random_state=7), (binary_counter(), "m0000")]:
        bits = needed_bits(machine, word, "scot")
        model = compile_machine(machine, bits, "scot", factored_vocab=True)
        contexts = segments(machine, word, bits, "scot")
        most = max(most, len(contexts))
        found = model.verify(contexts)
        assert not found.mistakes
        assert found.margin >= 1
    assert most >= 5


@sized((4, 8), (4, 6, 8, 10, 12))
@pytest.mark.parametrize("mode", MODES)
def test_t3_sizes_equal_the_formulas(mode: str, size: tuple[int, ...]) -> None:
    for states, symbols, tapes in (
        (2, 2, 1),
        (5, 3, 1),
        (17, 2, 1),
        (3, 20, 1),
        (4, 3, 2),
        (9, 5, 2),
        (3, 2, 3),
        (2, 2, 4),
    ):
        machine = random_machine(tapes, states, symbols, random_state=0)
        for bits in size:
            model = CompiledTransformer(machine, bits, mode, factored_vocab=True)
            for row in model.size_report():
                if row["formula"] is not None:
                    assert row["measured"] == row["formula"], (states, symbols, tapes, bits, row)


def test_t3_a_partial_table_counts_its_entries() -> None:
    machine = binary_addition()
    entries = len(machine.transitions)
    assert entries < (len(machine.states) - 1) * len(machine.symbols) ** 2
    assert size_formulas(machine, 4, "cot")["hidden width d_ff"] == max(18 * 4 + 2, 14 * 2 * 4 + 8, entries + 1)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), bits=st.sampled_from([2, 4, 6, 8, 10]))
def test_t4_length_of_a_chain_of_thought(seed: int, bits: int) -> None:
    machine, word = next(random_runs(1, random_state=seed))
    run = machine.run(word)
    expected = cot_length(len(word), len(run.steps), len(run.final.output()), bits)
    try:
        (segment,) = segments(machine, word, bits, "cot")
        assert len(segment.tokens) == expected
    except ContextTooLong:
        assert expected > 2**bits


@pytest.mark.parametrize("mode", MODES)
def test_t4_vocabulary_and_its_codes(mode: str) -> None:
    for machine in (binary_addition(), binary_counter(), random_machine(3, 2, 2)):
        vocabulary = Vocabulary(machine, mode)
        assert vocabulary.size == size_formulas(machine, 4, mode)["vocabulary"]
        tokens = [vocabulary.decode(i) for i in range(vocabulary.size)]
        assert len(set(tokens)) == vocabulary.size
        assert [vocabulary.encode(token) for token in tokens] == list(range(vocabulary.size))


# T5: gadgets, exhaustively


def mlp(circuit: Circuit, x: torch.Tensor) -> torch.Tensor:
    """Apply the MLPs of all layers of a circuit without heads."""
    for layer in range(1, circuit.depth + 1):
        up, bias, down = circuit.mlp(layer)
        x = x + torch.relu(x @ up.T + bias) @ down.T
    return x


def bit_rows(bits: int) -> torch.Tensor:
    return torch.tensor([code(n, bits) for n in range(2**bits)], dtype=torch.float32)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_t5_minus_a_power_of_two_saturates(bits: int) -> None:
    for k in range(bits):
        c = Circuit({"a": bits, "b": bits})
        c.minus_power(1, c["a"], c["b"], k)
        c.minus_power(1, c["a"], c["a"], k)
        x = mlp(c, torch.cat([bit_rows(bits), torch.zeros(2**bits, bits)], 1))
        expected = torch.stack([bit_rows(bits)[max(0, n - 2**k)] for n in range(2**bits)])
        assert torch.equal(x[:, bits:], expected)
        assert torch.equal(x[:, :bits], expected)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_t5_minus(bits: int) -> None:
    c = Circuit({"a": bits, "b": bits, "flag": 1})
    c.minus(1, c["a"], c["b"], c["flag"])
    rows = bit_rows(bits)
    pairs = [(a, b) for b in range(2**bits) for a in range(b + 1)]
    x = torch.stack([torch.cat([rows[a], rows[b], torch.ones(1)]) for a, b in pairs])
    assert torch.equal(mlp(c, x)[:, bits : 2 * bits], torch.stack([rows[b - a] for a, b in pairs]))
    off = torch.cat([x[:, :-1], torch.zeros(len(x), 1)], 1)
    assert torch.equal(mlp(c, off), off)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_t5_move_with_both_ends(bits: int) -> None:
    c = Circuit({"a": bits, "move": 2, "b": bits, "flag": 1})
    c.move(1, c["a"], c["move"], c["b"], c["flag"])
    rows = bit_rows(bits)
    stale = rows.flip(0)
    for step, change in (((-1, -1), -1), ((1, -1), 0), ((1, 1), 1)):
        x = torch.cat([rows, torch.tensor([step] * 2**bits, dtype=torch.float32), stale, torch.ones(2**bits, 1)], 1)
        expected = torch.stack([rows[min(max(n + change, 0), 2**bits - 1)] for n in range(2**bits)])
        if change == 1:
            expected[-1] = rows[-1]  # R at the last position has no bit to set; contexts never reach it
        assert torch.equal(mlp(c, x)[:, bits + 2 : 2 * bits + 2], expected)


def test_t5_table_fires_on_its_key_only() -> None:
    c = Circuit({"a": 2, "flag": 1, "when": 1, "out": 2})
    keys = [*c["a"], *c["flag"]]
    entries = {(1, -1, 1): (1, -1), (1, 1, 0): (-1, 0), (-1, -1, 0): (0, 1)}
    c.table(1, keys, entries, c["out"], when=c["when"])
    for a, b, flag, when in itertools.product((-1, 1), (-1, 1), (0, 1), (0, 1)):
        x = mlp(c, torch.tensor([[a, b, flag, when, 0, 0]], dtype=torch.float32))
        assert x[0, 4:].tolist() == list(entries.get((a, b, flag), (0, 0)) if when else (0, 0))


@pytest.mark.parametrize("erase", [False, True])
def test_t5_copy_and_clear_under_all_conditions(erase: bool) -> None:
    c = Circuit({"a": 1, "out": 1, "on": 2, "off": 2})
    if erase:
        c.clear(1, c["a"], c["on"], c["off"])
    else:
        c.copy(1, c["a"], c["out"], c["on"], c["off"])
    for a, *flags in itertools.product((-1, 0, 1), *[(0, 1)] * 4):
        x = mlp(c, torch.tensor([[a, 0, *flags]], dtype=torch.float32))
        holds = flags == [1, 1, 0, 0]
        assert x[0, :2].tolist() == ([0.0 if holds else a, 0] if erase else [a, a if holds else 0.0])


def separations(model: CompiledTransformer, segment: Segment) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of the registers that heads write, and the separations of the claimed rows."""
    names = {c: name for name, coords in model.circuit.registers.items() for c in coords}
    ids = model.encode([segment.tokens])
    for layer, x in zip(model.layers, model.states(ids), strict=False):
        for head in layer.heads:
            scores = (x[0][:, list(head.q)] @ x[0][:, list(head.k)].T).tril()
            later = torch.ones_like(scores).triu(1).bool()
            scores = scores.masked_fill(later, -torch.inf)[segment.prompt - 1 : -1]
            top = scores.amax(-1, keepdim=True)
            second = scores.masked_fill(scores == top, -torch.inf).amax(-1)
            yield names[head.out[0]].rstrip("0123456789").rstrip("_"), top[:, 0] - second


@pytest.mark.parametrize("mode", MODES)
def test_t6_separations(mode: str) -> None:
    machine, word = binary_counter(), "m000"
    model = compile_machine(machine, mode=mode, for_input=word)
    least: dict[str, float] = {}
    for segment in segments(machine, word, model.bits, mode):
        for name, gaps in separations(model, segment):
            least[name] = min(least.get(name, math.inf), gaps.min().item())
    lookups = ("fetched_bit_a", "fetched_bit_b", "fetched_head", "block_full", "write_epos", "block_state", "next_bit")
    assert {least[name] for name in lookups} == {2}
    assert {least[name] for name in ("written", "higher", "read", "seen_outp", "outp_position")} == {1}
    if mode == "scot":
        assert least["next_head"] == 1
    assert min(least.values()) == 1


@sized(10, 1)
def test_t7_softmax_with_snapping_is_hardmax_from_ln_4n_on(size: int) -> None:
    machine = binary_counter()
    for word in ("m0", "m001", "m0000"):
        (segment,) = segments(machine, word, 8, "cot")
        base, n = compile_machine(machine, 8), len(segment.tokens)
        for c in (math.log(4 * n), *range(math.ceil(math.log(4 * n)), 51, size), 50):
            soft = base.arranged(Arithmetic("softmax", float(c), torch.float32, torch.float32, "snap"))
            assert not soft.verify([segment]).mistakes, (word, c)
    (segment,) = segments(machine, "m00", 8, "cot")
    assert 30 <= len(segment.tokens) <= 50
    weak = compile_machine(machine, 8).arranged(Arithmetic("softmax", 1.0, torch.float32, torch.float32, "snap"))
    assert weak.verify([segment]).mistakes


@sized((2, (4,)), (25, (4, 6, 7)))
@pytest.mark.parametrize("name", LOW)
def test_t8_low_precision_activations_and_weights(name: str, size: tuple[int, tuple[int, ...]]) -> None:
    machines, counters = size
    cases = [(m, w, "cot") for m, w in random_runs(machines, least_steps=3, random_state=21)]
    cases += [(binary_counter(), "m" + "0" * k, "cot") for k in counters]  # 142, 554 and 1097 tokens
    cases += [(binary_counter(), "m0000", "scot"), (binary_addition(), "110+11", "scot")]
    wrong_at_one = 0
    for machine, word, mode in cases:
        base = compile_machine(machine, mode=mode, for_input=word, factored_vocab=True)
        contexts = segments(machine, word, base.bits, mode)
        n = longest(contexts)
        for c, denoise in ((math.log(16 * n), "mlp"), (max(math.log(4 * n), 8.0), "snap")):
            low = base.arranged(Arithmetic("softmax", c, LOW[name], LOW[name], denoise))
            assert not low.verify(contexts).mistakes, (word, mode, n, c, denoise)
        weak = base.arranged(Arithmetic("softmax", 1.0, LOW[name], LOW[name], "mlp"))
        wrong_at_one += len(weak.verify(contexts).mistakes)
    assert wrong_at_one > 100


@pytest.mark.parametrize("form", ["hardmax", "softmax", "sparse1"])
def test_t9_causality(form: str) -> None:
    base = compile_machine(binary_counter(), 6)
    model = {"hardmax": base, "softmax": base.softmax(), "sparse1": base.sparse1()}[form]
    (segment,) = segments(base.machine, "m00", 6, "cot")
    ids = base.encode([segment.tokens])
    logits = model(ids)
    for j in range(0, ids.shape[1], 5):
        changed = ids.clone()
        changed[0, j] = (ids[0, j] + 3) % base.vocabulary.size
        after = model(changed)
        assert torch.equal(after[0, :j], logits[0, :j])
        assert not torch.equal(after[0, j:], logits[0, j:])


def test_t9_a_prefix_run_equals_an_incremental_one() -> None:
    model = compile_machine(binary_counter(), 8)
    (segment,) = segments(model.machine, "m0000", 8, "cot")
    ids = model.encode([segment.tokens])
    whole = model.stream(ids)[0]
    cache, parts, start = Cache(), [], 0
    for size in (5, 1, 1, 30, 1, 104):
        parts.append(model.stream(ids[:, start : start + size], cache)[0])
        start += size
    pieces = torch.cat(parts)
    integral = (whole == whole.round()).all(-1)
    assert integral[segment.prompt - 1 :].all()
    assert torch.equal(pieces[integral], whole[integral])
    assert torch.allclose(pieces, whole, atol=1e-5)


@sized(6, 200)
@pytest.mark.parametrize("mode", MODES)
def test_t10_free_running_addition(mode: str, size: int) -> None:
    pairs = np.random.default_rng(3).integers(0, 256, size=(size, 2))
    words = [f"{a:b}+{b:b}" for a, b in pairs]
    bits = max(needed_bits(binary_addition(), word, mode) for word in words)
    model = compile_machine(binary_addition(), bits, mode, factored_vocab=True)
    runs = model.run_batch(words)
    assert [int(run.output or "x", 2) for run in runs] == pairs.sum(1).tolist()
    assert [run.output for run in runs] == [model.machine.run(word).output for word in words]
    assert min(run.margin for run in runs) >= 1


def eraser(tapes: int = 1) -> TuringMachine:
    """Erases its input (tape 1), leaving the other tapes blank."""
    rest = ("_",) * (tapes - 1)
    table = {("go", (s, *rest)): Step("go", ("_", *rest), ("R",) + ("S",) * (tapes - 1)) for s in "ab"}
    table["go", ("_", *rest)] = Step("halt", ("_", *rest), ("S",) * tapes)
    return TuringMachine(table, "go", "halt", ["a", "b"], "_")


def stepper(steps: int) -> TuringMachine:
    """Halts after exactly this many steps and leaves its input as it is."""
    table = {(f"q{i}", s): (f"q{i + 1}" if i + 1 < steps else "halt", s, "S") for i in range(steps) for s in "a_"}
    return TuringMachine.from_table(table, initial="q0", halting="halt", input_alphabet="a")


@pytest.mark.parametrize("mode", MODES)
def test_t11_empty_words_and_block_edges(mode: str) -> None:
    for machine, word, output in (
        (eraser(), "", ""),
        (eraser(), "abba", ""),
        (eraser(3), "ab", ""),
        (stepper(1), "a", "a"),
        (stepper(1), "", ""),
        *((stepper(t), "aa", "aa") for t in (4, 5, 8, 9)),
    ):
        for bits in {needed_bits(machine, word, mode), 6}:
            if bits < needed_bits(machine, word, mode):
                continue
            model = compile_machine(machine, bits, mode, factored_vocab=True)
            model.check(word)
            assert model.run(word).output == output


@pytest.mark.parametrize("mode", MODES)
def test_t12_weights_are_small_integers(mode: str) -> None:
    model = compile_machine(binary_addition(), 8, mode)
    tensors = [p for p in model.parameters() if p.numel()]
    assert all(torch.equal(p, p.round()) for p in tensors)
    weights = [p for layer in model.layers for p in (layer.up.weight, layer.down.weight)]
    assert max(p.abs().max() for p in weights) <= 2
    conditions = 3  # the most conditions of one gadget
    assert max(layer.up.bias.abs().max() for layer in model.layers) <= 4 * 8 + conditions
    assert {int(layer.times.max()) for layer in model.layers if layer.heads} <= set(range(1, 4 * 8))
    soft = model.softmax(scale=20.0)
    assert soft.layers[0].up.weight is model.layers[0].up.weight
    decoder = to_decoder(compile_machine(binary_counter(), 4, mode).softmax(scale=20.0))
    largest = max(block.qkv.weight.max().item() for block in decoder.blocks)
    assert largest == pytest.approx(paper_scale(20.0, 4 * 4 - 1))


@pytest.mark.parametrize("mode", MODES)
def test_t13_names_do_not_matter(mode: str) -> None:
    machine = binary_addition()
    states = {q: f"z{hash_}" for hash_, q in enumerate(reversed(machine.states))}
    symbols = {s: f"<{s}>" for s in machine.symbols}
    renamed = machine.renamed(states.__getitem__, symbols.__getitem__)
    # another order of the table gives other codes
    order = dict(reversed(list(renamed.transitions.items())))
    other = TuringMachine(order, renamed.initial, renamed.halting, renamed.input_alphabet[::-1], renamed.blank)
    assert other.states != renamed.states
    word = "1+11"
    ours = compile_machine(machine, mode=mode, for_input=word, factored_vocab=True).run(word)

    def rename(value: object) -> object:
        return states.get(value, symbols.get(value, value)) if isinstance(value, str) else value  # type: ignore[arg-type]

    # no state and symbol share a name here, and moves are left alone
    assert not (set(states) | set("LSR")) & set(symbols)
    expected = [(t.kind, tuple(map(rename, t.values))) for t in ours.tokens]
    for twin in (renamed, other):
        theirs = compile_machine(twin, mode=mode, for_input=[symbols[s] for s in word], factored_vocab=True)
        assert [tuple(t) for t in theirs.run([symbols[s] for s in word]).tokens] == expected


def test_t14_softmax_rows_are_as_near_to_hardmax_as_the_bound_says() -> None:
    model = compile_machine(binary_counter(), 8).double()
    (segment,) = segments(model.machine, "m0000", 8, "cot")
    ids = model.encode([segment.tokens])
    n = ids.shape[1]
    assert n >= 100
    tightest = 0.0
    for layer, x in zip(model.layers, model.states(ids), strict=False):
        if not layer.heads:
            continue
        hard = layer.weights(x, Arithmetic())
        for c in (1.0, 2.0, 4.0, 8.0, 16.0):
            soft = layer.weights(x, Arithmetic("softmax", c))
            distance = (soft - hard).abs().sum(-1)[0]
            for h, head in enumerate(layer.heads):
                scores = x[0][:, list(head.q)] @ x[0][:, list(head.k)].T
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
                top = scores.amax(-1, keepdim=True)
                g = top[:, 0] - scores.masked_fill(scores == top, -torch.inf).amax(-1)
                rows = torch.arange(n)
                bound = 2 * rows * torch.exp(-c * g)
                bound[g == torch.inf] = 0.0
                assert (distance[h] <= bound + 1e-12).all()
                if c == 8:
                    tightest = max(tightest, (distance[h] / bound.clamp(min=1e-300))[bound > 0].max().item())
    assert 0.5 <= tightest <= 1


def representable(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a format, as float32."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype).float().nan_to_num(0.0, 0.0, 0.0)
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float().nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", FORMATS)
def test_t15_denoising_is_exact_on_its_windows(name: str) -> None:
    dtype = FORMATS[name]
    x = torch.linspace(-1.25, 1.25, 10**6) if name == "fp32" else representable(dtype)
    for low, high, target in ((-1.25, -0.75, -1.0), (-0.25, 0.25, 0.0), (0.75, 1.25, 1.0)):
        window = x[(x >= low) & (x <= high)]
        assert len(window) >= (4 if dtype.itemsize == 1 else 97)
        assert torch.equal(denoised(window, dtype), torch.full_like(window, target))
    reach = {"e4m3": 4.0, "e5m2": 2.0}.get(name, 64.0)
    far = x if name != "fp32" else torch.linspace(0.75, 64, 10**5)
    far = far[(far.abs() >= 0.75) & (far.abs() <= reach)]
    assert torch.equal(denoised(far, dtype), far.sign())
    inside = x[x.abs() <= reach]
    assert torch.equal(denoised(-inside, dtype), -denoised(inside, dtype))
    between = torch.tensor([0.3, 0.5, 0.6])
    assert torch.allclose(denoised(between), 2 * (between - 0.25))


@pytest.mark.parametrize("name", LOW)
def test_t16_rounding_at_most_doubles_a_distance(name: str, generator: torch.Generator) -> None:
    x = 4 * torch.rand(10**5, generator=generator) - 2
    near = torch.cat([x, 1 + (x / 100), x * 2.0**-12])
    for target in (-1.0, 0.0, 1.0):
        before, after = (near - target).abs(), (rounded(near, LOW[name]) - target).abs()
        assert (after <= 2 * before).all()
        assert (after > before).any()


@sized(3, 25)
@pytest.mark.parametrize("choice", ["first", "last", "random"])
def test_t17_one_maximiser_is_enough(choice: str, size: int) -> None:
    cases = [(m, w, "cot") for m, w in random_runs(size, least_steps=3, random_state=5)] + [
        (binary_counter(), "m0000", "cot")
    ]
    cases += [(binary_counter(), "m0000", "scot"), (rewriter(), "", "cot")]
    for machine, word, mode in cases:
        bits = needed_bits(machine, word, mode, 120)
        contexts = segments(machine, word, bits, mode, 120)
        model = compile_machine(machine, bits, mode, factored_vocab=True).sparse1(choice)
        assert not model.verify(contexts).mistakes
    assert len(segments(binary_counter(), "m0000", 6, "scot")) >= 5


def test_t17_choices_differ_where_there_are_ties() -> None:
    model = compile_machine(rewriter(), 8)
    (segment,) = segments(rewriter(), "", 8, "cot", 40)
    ids = model.encode([segment.tokens])
    layer = next(layer for layer in model.layers if any(h.out == (model.circuit["written_1"][0],) for h in layer.heads))
    x = next(x for i, x in enumerate(model.states(ids)) if i == layer.index)
    first, last, random = (layer.weights(x, Arithmetic("sparse1", choice=c)) for c in ("first", "last", "random"))
    assert (first.sum(-1) == 1).all()
    positions = torch.arange(ids.shape[1], dtype=torch.float32)
    assert (first @ positions <= random @ positions).all()
    assert (random @ positions <= last @ positions).all()
    assert not torch.equal(first, last)


@pytest.mark.parametrize("mode", MODES)
def test_t18_plain_blocks_equal_the_softmax_form(mode: str) -> None:
    base = compile_machine(binary_counter(), mode=mode, for_input="m000")
    model = base.softmax()
    decoder = to_decoder(model)
    assert len(decoder.blocks) == 5 * model.bits + 16
    contexts = segments(model.machine, "m000", model.bits, mode)
    ids = model.encode([contexts[0].tokens])
    x = model.embed(ids)
    for i, layer in enumerate(model.layers):
        plain = decoder.blocks[2 * i + 1](decoder.blocks[2 * i](x))
        x = layer(x, model.how)
        assert torch.allclose(plain, x, atol=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        for segment in contexts:
            ids = model.encode([segment.tokens])
            best = decoder.to(dtype)(ids)[0].float().argmax(-1)
            assert torch.equal(best[segment.prompt - 1 : -1], ids[0, segment.prompt :])


def test_t18_the_papers_scale_grows_as_its_rate() -> None:
    ratios = []
    for n in (10**2, 10**3, 10**4, 10**5, 10**6):
        r = 2 * math.ceil(math.log2(n) / 2)
        ratios.append(paper_scale(required_scale(n), 4 * r - 1) / math.log(n) ** 0.75)
    assert all(1.5 <= ratio <= 2.2 for ratio in ratios)
    assert ratios == sorted(ratios, reverse=True)
    assert (ratios[0], ratios[-1]) == pytest.approx((2.04, 1.69), abs=0.01)
    assert paper_scale(7.0, 31) ** 2 / math.sqrt(31) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("name", "smallest", "largest", "first_high", "low", "zero"),
    [("e4m3", 0.668, 1.998, 320, (342, 384), 1024), ("e5m2", 0.667, 2.000, 40_960, (43_691, 49_152), 131_072)],
)
def test_t19_sums_of_rounded_ties(
    name: str, smallest: float, largest: float, first_high: int, low: tuple[int, int], zero: int
) -> None:
    k = torch.arange(1, zero + 10, dtype=torch.float64)
    sums = k * (1 / k).to(FORMATS[name]).double()
    assert sums[: zero - 1].min() == pytest.approx(smallest, abs=1e-3)
    assert sums.max() == pytest.approx(largest, abs=2e-3)
    high = torch.nonzero(sums >= 1.25)[0, 0].item() + 1
    below = torch.nonzero(sums[: zero - 1] <= 0.75)[:, 0] + 1
    assert high == first_high == tie_limit(FORMATS[name]) + 1
    assert (below.min().item(), below.max().item(), len(below)) == (*low, low[1] - low[0] + 1)
    assert torch.nonzero(sums == 0)[0, 0].item() + 1 == zero


def test_t19_formats_with_room_for_ties() -> None:
    k = torch.arange(1, 200_001, dtype=torch.float32)
    for name, spread in (("fp16", 0.006), ("bf16", 0.004)):
        sums = k.double() * rounded(1 / k, FORMATS[name]).double()
        assert (sums - 1).abs().max() <= spread + 5e-4
    assert tie_limit(torch.float16) == pytest.approx(1.05e7, rel=0.01)
    assert tie_limit(torch.bfloat16) > 8e37


def test_t19_too_many_ties_are_refused_and_wrong_without_the_guard() -> None:
    machine, word = scanner(), "a" * 360
    bits = needed_bits(machine, word, "cot")
    base = compile_machine(machine, bits, factored_vocab=True)
    contexts = segments(machine, word, bits, "cot")
    guarded = base.softmax(dtype=torch.float8_e4m3fn)
    with pytest.raises(TieLimit, match=r"320 times.*319 ties.*sparse1"):
        guarded.check(word)
    follower, tokens = Follower(machine, "aaaa", tie_limit=3), segments(machine, "aaaa", 6, "cot")[0].tokens[6:]
    assert not any(follower.feed(token) for token in tokens[:3])
    assert follower.feed(tokens[3])  # nothing may follow
    assert "4 times" in str(follower.error)
    unguarded = base.softmax(dtype=torch.float8_e4m3fn, denoise="mlp-selective", tie_guard=False)
    assert unguarded.verify(contexts).mistakes


@pytest.mark.slow
def test_t19_the_ways_out_carry_as_many_ties() -> None:
    word = "a" * 360
    base = compile_machine(scanner(), for_input=word, factored_vocab=True)
    base.softmax(dtype=torch.float8_e4m3fn).check("a" * 300)
    for safe in (
        base.softmax(dtype=torch.bfloat16),
        base.softmax(dtype=torch.float8_e4m3fn, weight_dtype=torch.float32, denoise="snap"),
        base.sparse1(),
    ):
        safe.check(word)


def test_t19_the_first_wrong_token_comes_at_342_ties() -> None:
    steps = 360
    bits = needed_bits(rewriter(), "", "cot", steps)
    base = compile_machine(rewriter(), bits)
    contexts = segments(rewriter(), "", bits, "cot", steps)
    selective = base.softmax(dtype=torch.float8_e4m3fn, denoise="mlp-selective", tie_guard=False)
    first = selective.verify(contexts).mistakes[0].position
    assert sum(token.kind == "run" for token in contexts[0].tokens[:first]) == 342
    full = base.softmax(dtype=torch.float8_e4m3fn, tie_guard=False)
    assert not full.verify(contexts).mistakes


@pytest.mark.parametrize("name", LOW)
def test_t20_selective_and_full_denoising_agree(name: str) -> None:
    for machine, word, mode in ((binary_counter(), "m0000", "cot"), (binary_addition(), "11+101", "scot")):
        base = compile_machine(machine, mode=mode, for_input=word)
        contexts = segments(machine, word, base.bits, mode)
        for segment in contexts:
            ids = base.encode([segment.tokens])
            predicted = []
            for denoise in ("mlp-selective", "mlp-full"):
                model = base.softmax(dtype=LOW[name], denoise=denoise)
                predicted.append(model.predict(model.stream(ids)[0, segment.prompt - 1 : -1])[0])
            assert torch.equal(*predicted)


@pytest.mark.parametrize("mode", MODES)
def test_t20_one_head_writes_a_coordinate_of_a_layer(mode: str) -> None:
    for tapes, bits in itertools.product((1, 2, 3), (4, 6, 8)):
        model = CompiledTransformer(random_machine(tapes, 3, 3), bits, mode, factored_vocab=True)
        for heads in model.circuit.heads.values():
            out = [c for head in heads for c in head.out]
            assert len(out) == len(set(out))
    circuit = Circuit({"const": 1, "a": 1})
    for _ in range(2):
        circuit.head(1, circuit["const"], circuit["const"], circuit["a"], circuit["a"])
    with pytest.raises(ValueError, match="two heads write one coordinate"):
        Layer(0, circuit, 1)


# ---------------------------------------------------------------------------------------------- section 9: what is re


def table(**changes: object) -> dict[str, object]:
    entries = {("q", "a"): ("halt", "a", "S")}
    return {"transitions": entries, "initial": "q", "halting": "halt", "input_alphabet": "a", "blank": "_"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blank": "a"}, "blank 'a' must not be in the input alphabet"),
        ({"halting": "q"}, "initial state 'q' is the halting one"),
        ({"transitions": {("q", "a"): ("q", ("a", "a"), "S")}}, "writes 2 symbols but the machine has 1 tapes"),
        ({"transitions": {("q", "a"): ("q", "a", "S"), ("q", ("a", "b")): ("q", "a", "S")}}, "reads 2 symbols"),
        ({"transitions": {("q", "a"): ("q", "a", "X")}}, "move 'X' is not one of L, S, R"),
        ({"transitions": {("q", "a"): ("q", "a", "S"), ("halt", "a"): ("q", "a", "S")}}, "'halt' is the halting state"),
        ({"transitions": {}}, "no transitions"),
    ],
)
def test_bad_machines_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = table(**changes)
    with pytest.raises(ValueError, match=message):
        TuringMachine.from_table(arguments.pop("transitions"), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bits", "mode"), [(3, "cot"), (0, "cot"), (2, "scot"), (7, "scot")])
def test_bad_bits_are_refused(bits: int, mode: str) -> None:
    with pytest.raises(ValueError, match=f"even and at least .*got {bits}"):
        compile_machine(binary_counter(), bits, mode)
    with pytest.raises(ValueError, match="give bits, or for_input"):
        compile_machine(binary_counter())
    with pytest.raises((ValueError, TypeError), match=r"'cot'.*'scot'"):  # the tests' type checker comes first
        compile_machine(binary_counter(), 4, "summary")  # type: ignore[arg-type]


def test_two_bits_and_four_heads() -> None:
    model = compile_machine(stepper(1), 2)
    assert max(map(len, model.circuit.heads.values())) == 4
    with pytest.raises(ContextTooLong):
        model.check("a")
    with pytest.raises(ValueError, match="at least 4"):
        compile_machine(stepper(1), 2, "scot")


@pytest.mark.parametrize("mode", MODES)
def test_contexts_beyond_the_position_bits_say_what_is_needed(mode: str) -> None:
    model = compile_machine(binary_counter(), 4, mode)
    with pytest.raises(ContextTooLong, match=r"does not fit 4 position bits.*bits=6 is enough"):
        model.check("m0" if mode == "cot" else "m" + "0" * 8)
    with pytest.raises(ContextTooLong, match="compile with bits="):
        model.run("m" + "0" * 8)
    with pytest.raises(ContextTooLong):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_output_outside_the_input_alphabet_names_the_symbol() -> None:
    machine = TuringMachine.from_table(
        {("q", "a"): ("halt", "x", "S")}, initial="q", halting="halt", input_alphabet="a"
    )
    with pytest.raises(UnprintableOutput, match="'x'"):
        compile_machine(machine, 6).check("a")


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_transition_is_the_same_error_from_machine_and_model(mode: str) -> None:
    machine = TuringMachine.from_table(
        {("q", "a"): ("p", "a", "R"), ("p", "a"): ("q", "a", "R")}, initial="q", halting="halt", input_alphabet="a"
    )
    errors = []
    model = compile_machine(machine, 6, mode)
    for action in (machine.run, model.run, model.check):
        with pytest.raises(MissingTransition) as error:
            action("aaa")
        errors.append(str(error.value))
    assert set(errors) == {"no transition from state 'p' on '_': add it to the table"}


@pytest.mark.parametrize("mode", MODES)
def test_one_bad_word_of_a_batch_leaves_the_others(mode: str, monkeypatch) -> None:
    table = {("q", "a"): ("q", "a", "R"), ("q", "_"): ("halt", "_", "S"), ("q", "b"): ("p", "b", "R")}
    machine = TuringMachine.from_table(table, initial="q", halting="halt", input_alphabet="ab")
    model = compile_machine(machine, 6 if mode == "cot" else 4, mode)
    good, lost, long, fine = model.run_batch(["aa", "abb", "a" * (62 if mode == "cot" else 14), ""])
    assert (good.output, good.error, fine.output) == ("aa", None, "")
    assert isinstance(lost.error, MissingTransition)
    assert isinstance(long.error, ContextTooLong)
    assert not lost.complete
    assert "[b]" in lost.text()  # it can be looked at up to there
    monkeypatch.setattr("subspan.theory.turing.model.tie_limit", lambda dtype: 5)
    tied, free = compile_machine(scanner(), 6).softmax().run_batch(["aaaaaa", "a"])
    assert isinstance(tied.error, TieLimit)
    assert free.complete


def test_a_machine_that_does_not_halt_is_not_compiled_for_an_input(monkeypatch) -> None:
    monkeypatch.setattr("subspan.theory.turing.model._MOST_STEPS", 2000)
    with pytest.raises(ValueError, match="does not halt on for_input within 2,000 steps: give bits"):
        compile_machine(rewriter(), for_input="")


def test_words_outside_the_alphabet_are_refused() -> None:
    with pytest.raises(ValueError, match="holds 'x'"):
        compile_machine(binary_counter(), 4).run("mx")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        compile_machine(binary_counter(), 4).softmax(scale)


def test_bad_arithmetic_is_refused_and_weak_scales_warned_of() -> None:
    base = compile_machine(binary_counter(), 4)
    with pytest.raises(TypeError, match=r"weight_dtype.*int8"):
        base.softmax(weight_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"dtype.*int32"):
        base.softmax(dtype=torch.int32)
    with pytest.raises(ValueError, match="'auto' with denoising"):
        base.softmax(denoise=None)
    with pytest.raises((ValueError, TypeError), match=r"'?mlp'?, '?mlp-selective"):  # the type checker comes first
        base.softmax(denoise="foo")  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError), match=r"'first'.*'last'.*'random'"):
        base.sparse1("middle")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"scale 3 is below 5\.55"):
        base.softmax(3.0)
    with pytest.raises(ValueError, match="plain blocks"):
        to_decoder(base)
    with pytest.raises(ValueError, match="has no tables"):
        to_decoder(compile_machine(binary_counter(), 4, factored_vocab=True).softmax())
    with pytest.raises(ValueError, match="no closed form"):
        required_scale(100, denoise=None)


def test_a_weak_scale_makes_check_name_the_first_token() -> None:
    with pytest.warns(UserWarning, match="below"):
        weak = compile_machine(binary_counter(), 8).softmax(1.0)
    with pytest.raises(WrongToken, match=r"token \d+ of context 0 should be .* the model says"):
        weak.check("m0000")


def test_a_large_vocabulary_is_refused_unless_factored(monkeypatch) -> None:
    monkeypatch.setattr("subspan.theory.turing.model._MAX_VOCABULARY", 1000)
    machine = random_machine(3, 3, 3, random_state=1)
    with pytest.raises(VocabularyTooLarge, match=r"2,203 tokens, more than 1,000: pass factored_vocab=True"):
        compile_machine(machine, 4)
    model = compile_machine(machine, 4, factored_vocab=True)
    with pytest.raises(ValueError, match="use predict"):
        model(torch.zeros(1, 3, dtype=torch.long))


# ------------------------------------------------------------------------------------------- section 9: what keeps wo


@pytest.mark.parametrize("mode", MODES)
def test_a_factored_vocabulary_changes_nothing(mode: str) -> None:
    word = "11+10"
    dense = compile_machine(binary_addition(), mode=mode, for_input=word)
    factored = compile_machine(binary_addition(), mode=mode, for_input=word, factored_vocab=True)
    assert factored.embedding is None
    for segment in segments(dense.machine, word, dense.bits, mode):
        ids = dense.encode([segment.tokens])
        assert torch.equal(dense.embed(ids), factored.embed(ids))
        logits = dense(ids)[0, segment.prompt - 1 : -1]
        best, margin = factored.predict(factored.stream(ids)[0, segment.prompt - 1 : -1])
        assert torch.equal(best, logits.argmax(-1))
        top = logits.topk(2).values
        assert torch.equal(margin, top[:, 0] - top[:, 1])


def test_four_tapes_one_symbol_and_odd_names() -> None:
    lonely = TuringMachine.from_table({("q", "_"): ("halt", "_", "R")}, initial="q", halting="halt", input_alphabet="")
    assert (len(lonely.states), len(lonely.symbols)) == (2, 1)
    machines = (random_machine(4, 3, 2, halt_probability=0.3, random_state=seed) for seed in range(100))
    runs = ((machine, machine.run("aaa", 300)) for machine in machines)
    wide = next(m for m, r in runs if r.halted and len(r.steps) > 5 and set(r.final.output()) <= {"a"})
    names = {
        ("inp", "state"): ("state", "inp", "R"),
        ("state", "inp"): ("state", "state", "R"),
        ("state", "_"): ("run", "_", "S"),
    }
    odd = TuringMachine.from_table(names, initial="inp", halting="run", input_alphabet=["state", "inp", "state"])
    assert odd.input_alphabet == ("state", "inp")
    for mode in MODES:
        assert compile_machine(lonely, 4, mode).run("").output == ""
        assert compile_machine(odd, 6, mode).run(["state", "inp"]).output == "inpstate"
        compile_machine(wide, mode=mode, for_input="aaa", factored_vocab=True).check("aaa")


@pytest.mark.parametrize("mode", MODES)
def test_a_machine_that_never_halts_gives_a_partial_run(mode: str) -> None:
    model = compile_machine(rewriter(), 8, mode)
    run = model.run("", max_tokens=60)
    assert (run.complete, run.output) == (False, None)
    assert len(run.tokens) == 60
    direct = segments(rewriter(), "", 8, mode, max_steps=run.steps)
    assert direct[-1].tokens[: len(run.segments[-1].tokens)] == run.segments[-1].tokens[: len(direct[-1].tokens)]


def test_float64_and_padded_batches_say_the_same() -> None:
    model = compile_machine(binary_counter(), 8)
    contexts = [segments(model.machine, word, 8, "cot")[0] for word in ("m0", "m000", "m0000")]
    together = model.verify(contexts)
    assert not together.mistakes
    assert together.claimed == sum(len(s.tokens) - s.prompt for s in contexts)
    assert not compile_machine(binary_counter(), 8).double().verify(contexts).mistakes


COMPILED = """
import torch
from subspan.theory import binary_counter, compile_machine, segments

model = compile_machine(binary_counter(), 6).softmax(dtype=torch.bfloat16)
ids = model.encode([segments(model.machine, "m00", 6, "cot")[0].tokens])
assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(ids), model(ids))
"""


@pytest.mark.slow
def test_torch_compile_takes_the_model_whole() -> None:
    # in a process of its own: the compiler cannot trace the tests' type checker
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


@pytest.mark.parametrize("mode", MODES)
def test_files_give_the_same_model(mode: str, tmp_path) -> None:
    model = compile_machine(binary_addition(), 8, mode).softmax(dtype=torch.bfloat16)
    model.save(tmp_path / "adder")
    assert sorted(p.name for p in (tmp_path / "adder").iterdir()) == ["machine.json", "model.safetensors"]
    twin = load_compiled(tmp_path / "adder")
    assert (twin.how, twin.bits, twin.mode) == (model.how, model.bits, model.mode)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    assert twin.run("10+1").output == "11"
    exact = compile_machine(binary_counter(), 6).softmax(dtype=torch.float64)
    exact.save(tmp_path / "double")
    assert load_compiled(tmp_path / "double").how == exact.how


YAML = """
initial: go
halting: done
blank: _
input_alphabet: [0, 1]
transitions:
  go:
    0: {to: go, write: [1], move: [R]}
    1: {to: go, write: [0], move: [R]}
    _: {to: done, write: [_], move: [S]}
"""


def test_machine_files(tmp_path) -> None:
    path = tmp_path / "invert.yaml"
    path.write_text(YAML, encoding="utf-8")
    machine = TuringMachine.from_yaml(path)
    assert machine.run("0110").output == "1001"
    again = TuringMachine.from_dict(machine.to_dict())
    assert (again.transitions, again.states, again.symbols) == (machine.transitions, machine.states, machine.symbols)
    for bad, message in (
        (YAML.replace("halting: done", ""), "halting: Field required"),
        (YAML.replace("move: [S]", "moves: [S]"), "move"),
        (YAML.replace("halting: done", "halting: yes"), "quotes"),
        ("- a", "no mapping"),
        ("initial: [", r"invert\.yaml cannot be read as YAML"),
        (YAML + '    "0": {to: done, write: [_], move: [S]}\n', "the key '0' stands twice"),
    ):
        path.write_text(bad, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            TuringMachine.from_yaml(path)
    path.write_text(YAML + '    " 0": {to: done, write: [_], move: [S]}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="two transitions from 'go' on '0': keep one"):
        TuringMachine.from_yaml(path)
    with pytest.raises(ValueError, match="two transitions from 'q' on 'a'"):
        TuringMachine.from_table(
            {("q", "a"): ("halt", "a", "S"), ("q", ("a",)): ("halt", "_", "S")},
            initial="q",
            halting="halt",
            input_alphabet="a",
        )
    spaced = TuringMachine.from_table(
        {("q", "a b"): ("halt", "_", "S")}, initial="q", halting="halt", input_alphabet=["a b"]
    )
    with pytest.raises(ValueError, match="holds a space"):
        spaced.to_dict()


def test_measured_scales_stay_below_the_bounds() -> None:
    base = compile_machine(binary_counter(), 8)
    contexts = segments(base.machine, "m000", 8, "cot")
    n = longest(contexts)
    measured = {d: measured_scale(base.softmax(denoise=d), contexts) for d in ("mlp", "snap")}
    assert measured["mlp"].c <= math.log(16 * n)
    assert measured["snap"].c <= math.log(4 * n)
    assert measured["snap"].c > 2
    assert measured["mlp"].c_p == pytest.approx(paper_scale(measured["mlp"].c, 31))
    none = measured_scale(base.softmax(20.0, dtype=torch.bfloat16, denoise=None), contexts)
    assert none.c >= measured["mlp"].c + 2
    with pytest.raises(ValueError, match="call softmax"):
        measured_scale(base, contexts)


def test_growth_follows_the_theory() -> None:
    rows = growth(binary_counter(), range(4, 15, 2))
    assert [row["blocks"] for row in rows] == [5 * row["bits"] + 16 for row in rows]
    slopes = [
        math.log(b["parameters"] / a["parameters"]) / math.log(b["bits"] / a["bits"])
        for a, b in itertools.pairwise(rows)
    ]
    assert slopes == sorted(slopes)
    assert 2 < slopes[0] < slopes[-1] < 3
    decoder = to_decoder(compile_machine(binary_counter(), 4).softmax())
    assert rows[0]["parameters"] == sum(p.numel() for block in decoder.blocks for p in block.parameters())


FORMS = [
    *(("sparse1", choice) for choice in ("first", "last", "random")),
    *(("softmax", "bf16", denoise) for denoise in ("mlp", "mlp-full", "snap", None)),
    *(("softmax", name, "mlp") for name in ("fp32", "e4m3")),
    *(pytest.param(("softmax", name, "mlp"), marks=pytest.mark.slow) for name in ("fp16", "e5m2")),
]


@pytest.mark.parametrize("form", [("hardmax",), *FORMS], ids=str)
def test_a_single_run_in_numpy_writes_what_a_batch_in_torch_writes(form: tuple[str, ...]) -> None:
    # ``stepper.py`` says once more what ``layers.py`` says: this holds them together
    word = "m0"
    for mode in MODES:
        base = compile_machine(binary_counter(), 6, mode, factored_vocab=True)
        model = base.sparse1(form[1]) if form[0] == "sparse1" else base
        if form[0] == "softmax":
            model = base.softmax(12.0, FORMATS[form[1]], denoise=form[2])
        single, (batched, _) = model.run(word), model.run_batch([word, word])
        assert single.tokens == batched.tokens
        assert single.margin == pytest.approx(batched.margin, abs=1e-5)
        assert single.output == model.machine.run(word).output
        # and every number on the way, not only those that make a token
        ids = model.encode([single.segments[0].tokens])
        alone, together = model._advance(1)(ids), model._advance(2)(ids.repeat(2, 1))
        assert torch.allclose(alone[0], together[0], atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize("mode", MODES)
def test_a_run_can_be_looked_at(mode: str, tmp_path) -> None:
    model = compile_machine(binary_counter(), 8, mode).softmax(dtype=torch.bfloat16)
    run = model.run("m01")
    direct = model.machine.run("m01")
    assert (run.output, run.steps, run.complete) == (direct.output, len(direct.steps), True)
    text = run.text()
    assert "m [1] 1" in text
    assert text.endswith(f"output {direct.output!r}")
    last = len(run.segments[-1].tokens) - 1
    position = next(i for i, t in enumerate(run.segments[-1].tokens) if t.kind == "run")
    held = run.registers_at(len(model.layers), position)
    token = run.segments[-1].tokens[position]
    assert (held["state"], held["symbol_1"], held["move_1"]) == token.values
    assert held["position"] == position
    following = run.segments[-1].tokens[position + 1]
    if following.kind == "run":
        assert (held["new_state"], held["new_symbol_1"], held["new_move_1"]) == following.values
    assert len(run.trace) == last + 1
    for layer, at in ((99, 0), (-1, 0), (0, 999)):
        with pytest.raises(IndexError, match=f"layers go from 0 to {len(model.layers)} and positions to {last}"):
            run.registers_at(layer, at)
    reads = run.reads(position)
    assert all(0 < layer <= len(model.layers) and max(at) <= position for layer, _, at in reads)
    assert any(name == "read_1" for _, name, _ in reads)
    run.page().write(tmp_path / "run.html")
    html = (tmp_path / "run.html").read_text("utf-8")
    for part in ("m01", "Head positions", "read_1", "depth L"):
        assert part in html
