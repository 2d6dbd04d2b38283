"""How large the scale must be on given runs, and how sizes grow with the context, beside the theory."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from subspan.theory.turing.decoder import decoder_parameters, exponent_bits
from subspan.theory.turing.machine import TuringMachine
from subspan.theory.turing.model import CompiledTransformer
from subspan.theory.turing.numerics import paper_scale, required_scale
from subspan.theory.turing.tokens import Mode, Segment


class Scale(NamedTuple):
    """A softmax scale c, and the same as the paper's c_p."""

    c: float
    c_p: float


def measured_scale(model: CompiledTransformer, contexts: Sequence[Segment], step: float = 0.25) -> Scale:
    """Smallest c on a grid with which every prediction of these contexts is right, coming down from above.

    The start is ln(16 n) or more, raised until it is right; then down in strides of 1 and at last of ``step``.

    Raises:
        ValueError: not a softmax model, or wrong tokens up to c = 200: then the scale is not what is wrong.
    """
    if model.how.attention != "softmax":
        raise ValueError("only a softmax model has a scale: call softmax() first")
    n = max(len(segment.tokens) for segment in contexts)

    def right(c: float) -> bool:
        return not model.arranged(replace(model.how, scale=c)).verify(contexts).mistakes

    c = step * math.ceil(math.log(16 * n) / step)
    while not right(c):
        c += 2
        if c > 200:
            raise ValueError("tokens are wrong at every scale up to 200: more ties than the weights carry?")
    for stride in (1.0, step):
        while c - stride > 0 and right(c - stride):
            c -= stride
    return Scale(c, paper_scale(c, 4 * model.bits - 1))


def growth(machine: TuringMachine, bits: Iterable[int], mode: Mode = "cot") -> list[dict[str, Any]]:
    """Sizes, parameters, scale and precision of the softmax form for contexts of 2^bits tokens; one row per r.

    The theory: depth and width O(log l), parameters O((log l)^3), c_p = O((log l)^(3/4)), and O(log log l) exponent
    bits for the attention weights.
    """
    rows = []
    for r in bits:
        length = 2**r
        model = CompiledTransformer(machine, r, mode, factored_vocab=True).softmax()
        sizes = {row["quantity"]: row["measured"] for row in model.size_report()}
        scale = required_scale(length)
        c_p = paper_scale(scale, sizes["key width d_k"])
        rows.append(
            {
                "bits": r,
                "context": length,
                "blocks": 2 * sizes["depth L"],
                "width": sizes["width d"],
                "parameters": decoder_parameters(model),
                "largest integer": sizes["largest weight or bias"],
                "c": scale,
                "c_p": c_p,
                "c_p / (ln l)^(3/4)": c_p / math.log(length) ** 0.75,
                "exponent bits": exponent_bits(length),
            }
        )
    return rows
