"""Speed and memory of an audit of SmolLM2-135M-Instruct against the dense formula, one row at a time.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. CPU time of one thread unless the name says
otherwise. ``--quick`` repeats less.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from subspan.linalg import LowRank
from subspan.safety import Direction, SafetyRisk
from subspan.safety.sqsd.audit import load_causal_lm, load_tokenizer
from subspan.safety.sqsd.projection import FactorGradients, FactorStep, Projected
from subspan.safety.sqsd.tokens import Tokens
from subspan.surgery import find_targets, plain_layers, undisturbed
from subspan.surgery.answers import answer_batch, answer_logits, target_losses
from subspan.surgery.per_example import ExampleRecorder
from timing import interleaved, median_ratio, peak_bytes, report

MODEL = "asset:smollm2-135m-instruct"
ANSWER = 12  # tokens


def rows(count: int, tokens: int, seed: int = 0) -> list[Tokens]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        ids = torch.randint(100, 40000, (tokens,), generator=generator).tolist()
        out.append(Tokens(ids, [-100] * (tokens - ANSWER) + ids[-ANSWER:]))
    return out


def random_direction(layers: dict[str, nn.Module], seed: int, rank: int = 8) -> Direction:
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, layer in layers.items():
        m, n = layer.weight.shape
        factors[name] = LowRank(*(0.02 * torch.randn(k, rank, generator=generator) for k in (m, n)))
    return Direction(factors, dict.fromkeys(factors, 2.0), f"seed {seed}")


def formula() -> None:
    """One module's cosine from gradients of its factors: 4096 x 4096 and SmolLM2's 576 x 1536, r = 8."""
    generator = torch.Generator().manual_seed(0)
    for (m, n), bar in (((4096, 4096), 100.0), ((576, 1536), 5.0)):
        a, b, p, q = (torch.randn(k, 8, generator=generator) for k in (m, n, m, n))
        g = FactorGradients(torch.randn(1, m, 8, generator=generator), torch.randn(1, n, 8, generator=generator))
        step = FactorStep(LowRank(a, b), 1.0, [LowRank(p, q)])
        v = p @ q.mT

        def dense(g: Any = g, a: Tensor = a, b: Tensor = b, v: Tensor = v) -> Tensor:
            dw = -(g.A[0] @ b.mT + a @ g.B[0].mT)
            return (dw * v).sum() / (dw.norm() * v.norm())

        times = interleaved(
            {"dense": dense, "factored": lambda step=step, g=g: step.project_gradients(g)}, 9, time.process_time
        )
        report(f"formula_{m}x{n}", median_ratio(times, "dense", "factored"), bar, "higher", "dense formula")


class DenseAudit:
    """The plain way: peft's LoRA, one row's backward pass, dense updates, and cosines with dense directions."""

    def __init__(self, model: nn.Module, danger: Direction, safety: Direction, state: Direction) -> None:
        from peft import LoraConfig, get_peft_model

        names = list(danger.factors)
        self.model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=names)).eval()  # pyright: ignore
        modules = dict(self.model.named_modules())
        self.layers: dict[str, Any] = {n: modules[f"base_model.model.{n}"] for n in names}
        for name, layer in self.layers.items():
            layer.lora_A["default"].weight.data = state.factors[name].B.mT.clone()
            layer.lora_B["default"].weight.data = state.factors[name].A.clone()
        self.directions = [{n: d.factors[n].dense() for n in names} for d in (danger, safety)]

    def score(self, row: Tokens) -> float:
        labels = torch.tensor([row.labels])
        logits = self.model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits
        nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:]).backward()
        total = 0.0
        for name, layer in self.layers.items():
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            with torch.no_grad():
                dw = -(b.grad @ a + b @ a.grad)
                for sign, direction in zip((1, -1), self.directions, strict=True):
                    v = direction[name]
                    total += sign * float((dw * v).sum() / (dw.norm() * v.norm()))
            a.grad = b.grad = None
        return total


def whole(repeats: int, count: int) -> None:
    model = load_causal_lm(MODEL)
    tokenizer = load_tokenizer(MODEL)
    wanted = set(find_targets(model, "all-linear"))
    layers = {n: m for n, m in plain_layers(model).items() if n in wanted}
    danger, safety, state = (random_direction(layers, k) for k in (1, 2, 3))
    risk = SafetyRisk(model, danger, safety, tokenizer=tokenizer, init=state)
    some = rows(count, 40)
    true_steps = risk._steps

    class Nothing:
        """In place of the score's arithmetic."""

        def project(self, D: Tensor, X: Tensor) -> Projected:
            zero = D.new_zeros(len(D))
            return Projected(zero[:, None].expand(-1, 2), zero, zero)

    nothing = [dict.fromkeys(steps, Nothing()) for steps in true_steps]
    with undisturbed(model):
        recorder = ExampleRecorder({n: layers[n] for n in risk.names})

        def audit(steps: Any, batch: int) -> None:
            risk._steps = steps
            for at in range(0, count, batch):
                risk.terms_of(some[at : at + batch], recorder)

        times = interleaved(
            {
                "batched": lambda: audit(true_steps, count),
                "without arithmetic": lambda: audit(nothing, count),
                "one by one": lambda: audit(true_steps, 1),
            },
            repeats,
            time.process_time,
        )
        arithmetic = median_ratio(times, "batched", "without arithmetic") - 1
        report("score_arithmetic_share", arithmetic, 0.05, "lower", "forward and backward alone")
        report("batching_alone", median_ratio(times, "one by one", "batched"), 1.5, "higher", "ours at batch 1")
        peak = peak_bytes(lambda: audit(true_steps, count))
        recorder.remove()
    seconds = sorted(times["batched"])[len(times["batched"]) // 2]
    # 6 minutes on two cores
    report("cpu_minutes_of_1000_rows_40_tokens", seconds / count * 1000 / 60, 12.0, "lower", "one thread", rows=count)
    peer = DenseAudit(model, danger, safety, state)
    few = min(count, 4)

    def dense() -> None:
        for row in some[:few]:
            peer.score(row)

    spent = interleaved({"dense": dense}, max(1, repeats // 2), time.process_time)["dense"]
    ratio = sorted(spent)[len(spent) // 2] / few / (seconds / count)
    report("whole_audit", ratio, 3.0, "higher", "peft and dense updates, batch 1")
    batch = answer_batch([{"input_ids": r.input_ids, "labels": r.labels} for r in some], 0)
    optimizer = torch.optim.AdamW([p for p in peer.model.parameters() if p.requires_grad])

    def training_step() -> None:
        target_losses(*answer_logits(peer.model, batch)).per_row().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    training_step()  # the optimiser's state exists before
    report("peak_memory", peak / peak_bytes(training_step), 1.2, "lower", "a LoRA training step on the same batch")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 50 s on two cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    formula()
    whole(1 if quick else 5, 8 if quick else 16)
