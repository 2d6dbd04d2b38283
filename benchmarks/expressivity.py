"""Speed of compiled Turing machines against a plain model in the manner of the authors' code, and of the conversion.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, turns interleaved, median
of the rounds. ``--quick`` repeats less.

The plain model loops over heads, builds a mask for each, and predicts one token from the whole prefix; its compiler
makes a dense row per neuron and concatenates after every gadget. It is written here from that description, on our heads
and neurons, and predicts the same tokens.
"""

import argparse
import statistics
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from subspan.theory import (
    CompiledTransformer,
    Token,
    TuringMachine,
    binary_counter,
    compile_machine,
    random_machine,
    segments,
)
from subspan.theory.turing import compiler
from subspan.theory.turing.circuit import Circuit, Coords, Neuron
from subspan.theory.turing.numerics import Arithmetic
from subspan.theory.turing.tokens import Vocabulary
from timing import interleaved, median_ratio, peak_bytes, report

WORD = "m000000"  # 248 steps, 554 tokens, 33 layers


class PlainModel:
    """A head at a time, a mask for each, everything again for every token."""

    def __init__(self, model: CompiledTransformer) -> None:
        self.model = model
        assert model.embedding is not None
        assert model.unembedding is not None
        self.embedding, self.unembedding = model.embedding.weight, model.unembedding.weight
        self.index = {model.vocabulary.decode(i): i for i in range(model.vocabulary.size)}

    def forward(self, tokens: list[Token]) -> Tensor:
        x = self.embedding[torch.tensor([self.index[token] for token in tokens])].clone()
        bits = self.model.bits
        for i in range(len(tokens)):
            x[i, :bits] = torch.tensor([1.0 if i >> b & 1 else -1.0 for b in range(bits)])
        for layer in self.model.layers:
            if layer.heads:
                change = torch.zeros_like(x)
                for head in layer.heads:
                    scores = x[:, list(head.q)] @ x[:, list(head.k)].T
                    mask = torch.tril(torch.ones(len(tokens), len(tokens), dtype=torch.bool))
                    scores = scores.masked_fill(~mask, float("-inf"))
                    maximal = scores == scores.amax(-1, keepdim=True)
                    weights = maximal.to(x.dtype) / maximal.sum(-1, keepdim=True).clamp(min=1).to(x.dtype)
                    change[:, list(head.out)] += weights @ x[:, list(head.v)]
                x = x + change
            x = x + layer.down(torch.relu(layer.up(x)))
        return x

    def predict_all(self, tokens: list[Token]) -> Tensor:
        return (self.forward(tokens) @ self.unembedding.T).argmax(-1)

    def predict_next(self, tokens: list[Token]) -> int:
        return int((self.unembedding @ self.forward(tokens)[-1]).argmax())


class PlainCircuit(Circuit):
    """Dense rows, concatenated into new layers after every gadget."""

    def __init__(self, registers: dict[str, int]) -> None:
        super().__init__(registers)
        self.linear: dict[int, tuple[nn.Linear, nn.Linear]] = {}

    def add(
        self, layer: int, neurons: Iterable[Neuron], when: Coords = (), unless: Coords = (), times: int = 1
    ) -> None:
        held = len(self.neurons.get(layer, []))
        super().add(layer, neurons, when, unless, times)
        ups, downs, biases = [], [], []
        for neuron in self.neurons[layer][held:]:
            up, down = torch.zeros(self.width), torch.zeros(self.width)
            for c, weight in neuron.inputs.items():
                up[c] = weight
            for c, weight in neuron.outputs.items():
                down[c] = weight
            ups.append(up)
            downs.append(down)
            biases.append(float(neuron.bias))
        up, down, bias = torch.stack(ups), torch.stack(downs).T, torch.tensor(biases)
        if layer in self.linear:
            first, second = self.linear[layer]
            up, down = torch.cat([first.weight.data, up]), torch.cat([second.weight.data, down], 1)
            bias = torch.cat([first.bias.data, bias])
        first, second = nn.Linear(self.width, len(up)), nn.Linear(len(up), self.width, bias=False)
        first.weight.data.copy_(up)
        first.bias.data.copy_(bias)
        second.weight.data.copy_(down)
        self.linear[layer] = (first, second)


def plain_compile(machine: TuringMachine, bits: int) -> PlainCircuit:
    """The same gadgets through ``PlainCircuit``, and both token tables written token by token."""
    ours, compiler.Circuit = compiler.Circuit, PlainCircuit  # type: ignore[misc]
    try:
        circuit = compiler.build(machine, bits, "cot")
    finally:
        compiler.Circuit = ours
    vocabulary = Vocabulary(machine, "cot")
    for table in (compiler.embeddings, compiler.unembeddings):
        rows = table(circuit, machine, vocabulary)
        written = torch.zeros(vocabulary.size, circuit.width)
        for i in range(vocabulary.size):
            token = vocabulary.decode(i)
            kind = vocabulary.kinds[token.kind]
            written[i] = rows.base[token.kind]
            for values, value, field in zip(kind.fields, token.values, rows.fields[token.kind], strict=True):
                row = field[values.index(value)]
                nonzero = row.nonzero()[:, 0]
                written[i, nonzero] = row[nonzero]
    return circuit


def teacher_forced(repeats: int) -> None:
    model = compile_machine(binary_counter(), 10)
    contexts = segments(model.machine, WORD, 10, "cot")
    (segment,) = contexts
    plain = PlainModel(model)
    expected = torch.tensor([plain.index[t] for t in segment.tokens])
    got = plain.predict_all(segment.tokens)
    assert torch.equal(got[segment.prompt - 1 : -1], expected[segment.prompt :])
    assert not model.verify(contexts).mistakes
    runs = {"ours": lambda: model.verify(contexts), "plain": lambda: plain.predict_all(segment.tokens)}
    times = interleaved(runs, repeats)
    report(
        "teacher_forced_554_tokens",
        median_ratio(times, "plain", "ours"),
        2.0,
        "higher",
        "plain model",
        ours_ms=1e3 * statistics.median(times["ours"]),
    )


def free_running(repeats: int) -> None:
    """500 tokens; the plain model is timed at every 50th prefix and its time summed up, which takes it long enough."""
    model = compile_machine(binary_counter(), 10)
    (segment,) = segments(model.machine, WORD, 10, "cot")
    plain = PlainModel(model)
    prefixes = [segment.tokens[:n] for n in range(25 + segment.prompt, 500 + segment.prompt, 50)]
    runs = {
        "ours": lambda: model.run(WORD, max_tokens=500 + segment.prompt),
        "plain": lambda: [plain.predict_next(prefix) for prefix in prefixes],
    }
    times = interleaved(runs, max(1, repeats // 3))
    ratio = 50 * median_ratio(times, "plain", "ours")
    seconds = statistics.median(times["ours"])
    report("free_running_500_tokens", ratio, 15.0, "higher", "plain model, sampled prefixes", ours_s=seconds)


def compiling(repeats: int) -> None:
    machine = random_machine(2, 6, 8, random_state=0)
    assert len(machine.transitions) == 320
    runs = {"ours": lambda: compile_machine(machine, 8), "plain": lambda: plain_compile(machine, 8)}
    times = interleaved(runs, max(1, repeats // 2))
    ratio = median_ratio(times, "plain", "ours")
    report("compile_320_entries_r8", ratio, 5.0, "higher", "plain compiler", ours_s=statistics.median(times["ours"]))


def conversion(repeats: int) -> None:
    """What softmax, rounding and denoising add to the hardmax form, and one maximiser to free-running softmax."""
    base = compile_machine(binary_counter(), 10)
    contexts = segments(base.machine, WORD, 10, "cot")
    forms = {
        "hardmax, snap": base.arranged(Arithmetic("hardmax", denoise="snap")),
        "selective bf16": base.softmax(dtype=torch.bfloat16),
        "full bf16": base.softmax(dtype=torch.bfloat16, denoise="mlp-full"),
        "selective fp32": base.softmax(),
        "softmax bf16, snap": base.softmax(dtype=torch.bfloat16, denoise="snap"),
    }
    ids = base.encode([contexts[0].tokens])
    times = interleaved({name: (lambda m=model: m.stream(ids)) for name, model in forms.items()}, 2 * repeats)
    for name, peer in (("bf16", "hardmax, snap"), ("fp32", "hardmax, snap"), ("bf16", "softmax bf16, snap")):
        ratio = median_ratio(times, f"selective {name}", peer)
        title = f"selective_{name}_over_{peer.replace(', ', '_').replace(' ', '_')}"
        report(title, ratio, 1.3, "lower", peer, full_denoising=median_ratio(times, "full bf16", peer))
    runs = {"sparse1": base.sparse1(), "softmax": base.softmax(), "softmax bf16": base.softmax(dtype=torch.bfloat16)}
    times = interleaved({n: (lambda m=m: m.run(WORD, max_tokens=200)) for n, m in runs.items()}, max(2, repeats // 2))
    for peer in ("softmax", "softmax bf16"):
        ratio = median_ratio(times, "sparse1", peer)
        report(f"sparse1_free_running_over_{peer.replace(' ', '_')}", ratio, 1.0, "lower", peer)


def memory() -> None:
    model = compile_machine(binary_counter(), 12)
    (segment,) = segments(model.machine, "m00000000", 12, "cot")
    ids = model.encode([segment.tokens])
    block = 4 * ids.shape[1] ** 2
    peak = peak_bytes(lambda: model.stream(ids))
    report(f"peak_memory_{ids.shape[1]}_tokens", peak / block, 3.0, "lower", "one n x n score block, three heads")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 50 s on two cores")
    repeats = 3 if parser.parse_args().quick else 7
    torch.set_num_threads(1)
    with torch.no_grad():
        teacher_forced(repeats)
        compiling(repeats)
        conversion(repeats)
        memory()
        free_running(repeats)
