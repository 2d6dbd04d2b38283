"""Claim: compiled machines run exactly on softmax transformers of low precision (Broesamle and Eckstein, ICML 2026).

Five parts: exactness on random machines, time against space, the law of the softmax scale, the limit on ties, and, as
an exploration, what a small decoder learns from chains of thought and from summaries.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.theory import (
    CompiledTransformer,
    Segment,
    TieLimit,
    TuringMachine,
    WrongToken,
    binary_addition,
    binary_counter,
    compile_machine,
    measured_scale,
    needed_bits,
    random_runs,
    required_scale,
    rewriter,
    segments,
)
from subspan.theory.turing.learnability import Study, accuracy
from subspan.theory.turing.numerics import FORMATS, Arithmetic, Denoise
from subspan.theory.turing.tokens import Mode

SEEDS = (0, 1, 2)
MODES: tuple[Mode, ...] = ("cot", "scot")
COUNTER = (4, 6, 8, 10)  # bits of the counter, part B
BUCKETS = ((1, 32), (33, 64), (65, 128), (129, 256))
LONGEST = "129-256"
DEPTHS = (1, 2, 4)
WITHIN = "1-32"  # the lengths that training sees
# Chosen on the validation numbers of seed 100; seeds 0 to 2 had been looked at before, so others are reported.
TOKENS, FRESH = 800_000, 1000
NEVER = 3001  # ties, part E: none of up to 3000 was wrong


def _longest(contexts: Sequence[Segment]) -> int:
    return max(len(segment.tokens) for segment in contexts)


# ------------------------------------------------------------------------------------------------------------------ A


def exactness(seed: int, smoke: bool, *, mode: Mode) -> list[Row]:
    """Share of random machines' runs with every claimed token right, by form."""
    right: dict[str, list[bool]] = {}
    for machine, word in random_runs(3 if smoke else 67, least_steps=5, random_state=seed):
        bits = needed_bits(machine, word, mode)
        base = compile_machine(machine, bits, mode, factored_vocab=True)
        contexts = segments(machine, word, bits, mode)
        n = _longest(contexts)
        forms = {"hardmax": base, **{f"sparse1, {c}": base.sparse1(c) for c in ("first", "last", "random")}}
        for name, dtype in FORMATS.items():
            scale = required_scale(n, 1.0, "mlp", dtype)
            forms[f"softmax {name}"] = base.arranged(Arithmetic("softmax", scale, dtype, dtype, "mlp"))
            forms[f"softmax {name}, c = 1"] = base.arranged(Arithmetic("softmax", 1.0, dtype, dtype, "mlp"))
            forms[f"softmax {name}, not denoised"] = base.arranged(Arithmetic("softmax", scale, dtype, dtype, None))
        for form, model in forms.items():
            right.setdefault(form, []).append(not model.verify(contexts).mistakes)
    return [Row(form, {"mode": mode}, "exact runs", seed, float(np.mean(runs))) for form, runs in right.items()]


# ------------------------------------------------------------------------------------------------------------------ B


def time_against_space(seed: int, smoke: bool) -> list[Row]:
    """Depth that a counter's run needs, with chain of thought and with summaries. Nothing is random: one seed."""
    if seed != SEEDS[0]:
        return []
    rows = []
    machine = binary_counter()
    for k in COUNTER[:2] if smoke else COUNTER:
        word = "m" + "0" * k
        for mode in MODES:
            bits = needed_bits(machine, word, mode)
            model = compile_machine(machine, bits, mode)
            contexts = segments(machine, word, bits, mode)
            measured = {
                "steps": len(machine.run(word).steps),
                "longest context": _longest(contexts),
                "position bits": bits,
                "depth": model.circuit.depth,
                "width": model.circuit.width,
                "wrong tokens": len(model.verify(contexts).mistakes),
            }
            rows += [Row(mode, {"k": k}, metric, seed, value) for metric, value in measured.items()]
    return rows


# ------------------------------------------------------------------------------------------------------------------ C


def _law_words(seed: int, smoke: bool) -> list[tuple[TuringMachine, str]]:
    """Counter and addition runs of about 30 to 2200 tokens. The first seed's counters start from zero."""
    rng = np.random.default_rng(seed)
    words: list[tuple[TuringMachine, str]] = []
    for k in (2, 3) if smoke else (2, 3, 4, 5, 6, 7, 8):
        start = np.zeros(k, int) if seed == SEEDS[0] else rng.integers(0, 2, k)
        start[-1] = 0  # at least half of the run is left
        words.append((binary_counter(), "m" + "".join(map(str, start))))
    for length in (2,) if smoke else (1, 3, 6):
        a, b = rng.integers(2 ** (length - 1), 2**length, 2)
        words.append((binary_addition(), f"{a:b}+{b:b}"))
    return words


def scale_law(seed: int, smoke: bool) -> list[Row]:
    """Smallest scale with which all tokens are right, against ln n: snapping, the denoising MLP, and neither."""
    rows = []
    for number, (machine, word) in enumerate(_law_words(seed, smoke)):
        bits = needed_bits(machine, word, "cot")
        base = compile_machine(machine, bits, factored_vocab=True)
        contexts = segments(machine, word, bits, "cot")
        n = _longest(contexts)
        forms: tuple[tuple[str, str, Denoise | None], ...] = (
            ("snap, fp32", "fp32", "snap"),
            ("MLP, bf16", "bf16", "mlp"),
            ("not denoised, bf16", "bf16", None),
        )
        for form, dtype, denoise in forms:
            how = Arithmetic("softmax", 20.0, FORMATS[dtype], FORMATS[dtype], denoise)
            c, c_p = measured_scale(base.arranged(how), contexts)
            setting = {"run": number, "tokens": n}
            rows += [Row(form, setting, "scale", seed, c), Row(form, setting, "c_p", seed, c_p)]
        rows.append(Row("bound with snap, ln 4n", {"run": number, "tokens": n}, "scale", seed, math.log(4 * n)))
        rows.append(Row("bound with MLP, ln 16n", {"run": number, "tokens": n}, "scale", seed, math.log(16 * n)))
        rate = math.log(n) ** 0.75
        rows.append(Row("(ln n)^(3/4)", {"run": number, "tokens": n}, "c_p", seed, rate))
    return rows


# ------------------------------------------------------------------------------------------------------------------ E


def tie_limits(seed: int, smoke: bool) -> list[Row]:
    """Rewrites of one cell before the first wrong token, unguarded; and what the guard did at some counts."""
    if seed != SEEDS[0]:
        return []
    rows = []
    few, many = (400, 400) if smoke else (1100, 3000)
    cases: tuple[tuple[str, str | None, Denoise | None, int], ...] = (
        ("e4m3, selective", "e4m3", "mlp-selective", few),
        ("e4m3, full", "e4m3", "mlp-full", few),
        ("e4m3, snap", "e4m3", "snap", few),
        ("e5m2", "e5m2", "mlp", many),
        ("fp16", "fp16", "mlp", many),
        ("bf16", "bf16", "mlp", many),
        ("sparse1", None, None, many),
    )
    for form, dtype, denoise, steps in cases:
        base, contexts = _rewriting(steps)
        model = base.sparse1()
        if dtype is not None:
            model = base.softmax(dtype=FORMATS[dtype], denoise=denoise, tie_guard=False)
        mistakes = model.verify(contexts).mistakes
        ties = NEVER
        if mistakes:
            ties = sum(token.kind == "run" for token in contexts[0].tokens[: mistakes[0].position])
        rows.append(Row(form, {}, "ties at the first wrong token", seed, ties))
    silent = 0
    for steps in (200, 320, 350) if smoke else (200, 319, 320, 350, 1050):
        base, contexts = _rewriting(steps)
        for name, dtype in FORMATS.items():
            model = base.softmax(dtype=dtype)
            outcome = "exact"
            try:
                model.check("", max_steps=steps)
            except TieLimit:
                outcome = "refused"
            except WrongToken:  # a free run would not have said so
                outcome, silent = "wrong", silent + 1
            rows.append(Row(f"{name}, guarded", {"ties": steps}, outcome, seed, 1.0))
    rows.append(Row("guarded", {}, "silently wrong", seed, silent))
    return rows


def _rewriting(steps: int) -> tuple[CompiledTransformer, list[Segment]]:
    bits = needed_bits(rewriter(), "", "cot", steps)
    return compile_machine(rewriter(), bits), segments(rewriter(), "", bits, "cot", steps)


# ------------------------------------------------------------------------------------------------------------------ D


def learning(seed: int, smoke: bool, *, mode: Mode, layers: int, bf16: bool) -> list[Row]:
    """Share of fresh counts that a trained decoder writes without one mistake, by length. Exploratory."""
    study = Study(mode, layers, tokens=4_096 if smoke else TOKENS, bf16=bf16)
    found = accuracy(study, BUCKETS, 10 if smoke else 100, FRESH + seed)
    setting = {"layers": layers, "arithmetic": "bf16" if bf16 else "fp32"}
    rows = []
    for entries, x in found.items():
        values = {"counts solved": x.solved, "standard error": x.standard_error, "contexts seen": x.seen}
        rows += [Row(f"learned, {mode}", setting | {"entries": entries}, name, seed, v) for name, v in values.items()]
    return rows


def cells(smoke: bool) -> list[Cell]:
    out = [Cell(f"exactness, {mode}", exactness, {"mode": mode}) for mode in MODES]
    out += [Cell("time against space", time_against_space), Cell("scale law", scale_law), Cell("ties", tie_limits)]
    for mode, bf16 in (("cot", False), ("scot", False), ("cot", True)):
        for layers in (1,) if smoke else DEPTHS:
            params = {"mode": mode, "layers": layers, "bf16": bf16}
            out.append(Cell(f"learning, {mode}, {layers} layers{', bf16' * bf16}", learning, params))
    return out


# ----------------------------------------------------------------------------------------------------------- statements


def worst_share(r: Results) -> float:
    """Smallest share of exact runs among the forms that should be exact."""
    return min(row.value for row in r.where(metric="exact runs") if not row.method.endswith(("c = 1", "not denoised")))


def weak_share(r: Results) -> float:
    """Largest share of exact runs at c = 1 of any format, mode and seed."""
    return max(row.value for row in r.where(metric="exact runs") if row.method.endswith("c = 1"))


def largest_k(r: Results) -> int:
    return max(int(row.setting["k"]) for row in r.where("cot", "depth"))


def depth_saved(r: Results) -> float:
    k = largest_k(r)
    return float(r.values("cot", "depth", k=k)[0] - r.values("scot", "depth", k=k)[0])


def summary_bits_growth(r: Results) -> float:
    bits = [row.value for row in r.where("scot", "position bits")]
    return max(bits) - min(bits)


def above_bound(form: str, bound: str, worst: Callable[[list[float]], float]) -> Callable[[Results], float]:
    """Bound minus measured over all runs and seeds."""

    def measure(r: Results) -> float:
        bounds = {(row.seed, row.setting["run"]): row.value for row in r.where(bound, "scale")}
        return worst([bounds[row.seed, row.setting["run"]] - row.value for row in r.where(form, "scale")])

    return measure


def slope(form: str) -> Callable[[Results], float]:
    """Of the measured scale against ln n, all runs and seeds."""

    def measure(r: Results) -> float:
        rows = list(r.where(form, "scale"))
        logs = np.log([float(row.setting["tokens"]) for row in rows])
        return float(np.polyfit(logs, [row.value for row in rows], 1)[0])

    return measure


def denoising_saves(r: Results) -> float:
    """Smallest difference of the scale needed without and with the denoising MLP, on runs of 40 tokens and more."""
    needed = {(row.seed, row.setting["run"]): row.value for row in r.where("MLP, bf16", "scale")}
    plain = [row for row in r.where("not denoised, bf16", "scale") if float(row.setting["tokens"]) >= 40]
    return min(row.value - needed[row.seed, row.setting["run"]] for row in plain)


def first_wrong(form: str) -> Callable[[Results], float]:
    return lambda r: float(r.values(form, "ties at the first wrong token")[0])


def others_never(r: Results) -> float:
    return min(first_wrong(form)(r) for form in ("bf16", "fp16", "e5m2", "sparse1"))


def solved(r: Results, mode: str, entries: str, layers: int, arithmetic: str = "fp32") -> float:
    return float(
        r.values(f"learned, {mode}", "counts solved", layers=layers, arithmetic=arithmetic, entries=entries).mean()
    )


def summaries_help(r: Results) -> float:
    """Counts solved in the longest bucket, summaries minus chain of thought, at the largest depth."""
    return solved(r, "scot", LONGEST, DEPTHS[-1]) - solved(r, "cot", LONGEST, DEPTHS[-1])


def precision_gap(r: Results) -> float:
    """Largest difference that bf16 makes to the counts solved within the lengths of training, over depths."""
    return max(abs(solved(r, "cot", WITHIN, n) - solved(r, "cot", WITHIN, n, "bf16")) for n in DEPTHS)


def depth_over_precision(r: Results) -> float:
    """What 4 layers solve more than 1, minus what precision changes; within the lengths of training."""
    return solved(r, "cot", WITHIN, DEPTHS[-1]) - solved(r, "cot", WITHIN, DEPTHS[0]) - precision_gap(r)


STATEMENTS = (
    Statement("A: all runs of random machines are exact: hardmax, sparse1, softmax in five formats", worst_share, 1.0),
    Statement("A: with c = 1 fewer than half of the runs are, in any format", weak_share, 0.5, "<="),
    Statement("B: at k = 10 summaries save at least 15 layers", depth_saved, 15.0),
    Statement("B: from k = 4 to 10 summaries need at most one step of r more", summary_bits_growth, 2.0, "<="),
    Statement(
        "C: with snap no run needs more than ln 4n", above_bound("snap, fp32", "bound with snap, ln 4n", min), 0.0
    ),
    Statement(
        "C: with the MLP no run needs more than ln 16n", above_bound("MLP, bf16", "bound with MLP, ln 16n", min), 0.0
    ),
    Statement("C: ln 4n is at most 2.5 too large", above_bound("snap, fp32", "bound with snap, ln 4n", max), 2.5, "<="),
    Statement("C: ln 16n is at most 3.5 too large", above_bound("MLP, bf16", "bound with MLP, ln 16n", max), 3.5, "<="),
    Statement("C: slope of the scale against ln n with the MLP, at least", slope("MLP, bf16"), 0.5),
    Statement("C: slope of the scale against ln n with the MLP, at most", slope("MLP, bf16"), 1.5, "<="),
    Statement("C: without denoising the scale must be at least 2 larger, from 40 tokens on", denoising_saves, 2.0),
    Statement("E: e4m3 selective is right up to 341 ties", first_wrong("e4m3, selective"), 342.0),
    Statement("E: and wrong at 342", first_wrong("e4m3, selective"), 342.0, "<="),
    Statement("E: e4m3 full is first wrong between 1021 and 1025 ties: at least", first_wrong("e4m3, full"), 1021.0),
    Statement("E: at most", first_wrong("e4m3, full"), 1025.0, "<="),
    Statement("E: e4m3 with snap: at least", first_wrong("e4m3, snap"), 1021.0),
    Statement("E: at most, with snap", first_wrong("e4m3, snap"), 1025.0, "<="),
    Statement("E: bf16, fp16, e5m2 and sparse1 are right up to 3000 ties", others_never, float(NEVER)),
    Statement(
        "E: with the guard nothing is silently wrong", lambda r: r.values("guarded", "silently wrong")[0], 0.0, "<="
    ),
    Statement("D, exploratory: summaries solve 20 points more of the longest counts", summaries_help, 0.2),
    Statement(
        "D, exploratory: bf16 changes at most 5 points within training lengths, 1, 2, 4 layers",
        precision_gap,
        0.05,
        "<=",
    ),
    Statement("D, exploratory: 4 layers against 1 gain more than that", depth_over_precision, 0.0),
)

NOTES = """The scale for e5m2 (and for snapping in 8-bit weights) is empirical; the others have an argument.
Part D trains on 0.8 million tokens (the paper: 20 billion) of a task of the paper's form. It is an exploration: what it
shows about depth, precision and summaries holds for this task and budget only. Its bf16 is emulated (products of
rounded operands, summed in float32 and rounded), because this machine has no bf16 products."""

CLAIM = Claim(
    slug="expressivity",
    title="Softmax transformers of low precision run Turing machines, exactly",
    source="Broesamle and Eckstein, The Expressive Power of Low Precision Softmax Transformers with (Summarized) "
    "Chain-of-Thought, ICML 2026, arXiv 2605.18079",
    cells=cells,
    statements=STATEMENTS,
    seeds=SEEDS,
    smoke_seeds=(0,),
    plots=(
        Plot("Depth for a counter of k bits", "depth", over="k"),
        Plot("Longest context for a counter of k bits", "longest context", over="k", log_y=True),
        Plot("Scale c needed, against the tokens of a run", "scale", over="tokens", log_x=True),
        Plot("The same as the paper's c_p, beside its rate", "c_p", over="tokens", log_x=True),
        Plot("Rewrites of one cell before the first wrong token", "ties at the first wrong token"),
    ),
    notes=NOTES,
)
