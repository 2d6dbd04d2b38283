"""Speed and memory of private training against Opacus, and of PRISM's parts against their plain forms.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. Shapes are those of the specification: 8 LoRA
layers of 1024 x 1024 at r = 16, 32 examples of 64 tokens. ``--quick`` repeats less.
"""

import argparse
import statistics
import time
import warnings

import torch
from torch import Tensor, nn

from subspan.linalg import LowRank, TangentVector, random_orthonormal
from subspan.privacy import PrismConfig, PrismPrivacy
from timing import interleaved, median_ratio, peak_bytes, report

WIDTH, RANK, LAYERS, BATCH, TOKENS = 1024, 16, 8, 32, 64


def best_ratio(times: dict[str, list[float]], top: str, bottom: str) -> float:
    """Ratio of the fastest rounds, for functions so short that a busy machine's pauses decide the other rounds."""
    return min(times[top]) / min(times[bottom])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(Stack(), LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear"))  # pyright: ignore


def example_losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean((1, 2))


class OpacusStep:
    """Today's way: GradSampleModule hooks and DPOptimizer around AdamW."""

    def __init__(self, x: Tensor) -> None:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.x = x
        self.model = GradSampleModule(adapted(), loss_reduction="mean")
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = DPOptimizer(
            torch.optim.AdamW(parameters, 1e-3), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        example_losses(self.model, self.x).mean().backward()
        self.optimizer.step()


class PrismStep:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.engine = PrismPrivacy(
            adapted(), PrismConfig(noise_multiplier=1.0), dataset_size=1000, expected_batch_size=BATCH, steps=10**6
        )
        self.optimizer = self.engine.optimizer(lr=1e-3)
        self.back: list[float] = []
        self.tail: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        self.engine.backward(example_losses(self.engine.model, self.x))
        middle = time.perf_counter()
        self.optimizer.step()
        self.back.append(middle - start)
        self.tail.append(time.perf_counter() - middle)


def whole_step(quick: bool) -> None:
    x = torch.randn(BATCH, TOKENS, WIDTH)
    opacus, prism = OpacusStep(x), PrismStep(x)
    plain = adapted()

    def forward_backward() -> None:
        example_losses(plain, x).mean().backward()

    times = interleaved(
        {"opacus": opacus.step, "prism": prism.step, "plain": forward_backward}, repeats=3 if quick else 15
    )
    ratio = median_ratio(times, "prism", "opacus")
    report("private_step", ratio, 1.3, "lower", "Opacus GradSampleModule + DPOptimizer(AdamW)",
           seconds=statistics.median(times["prism"]))  # fmt: skip
    tail = statistics.median(t / f for t, f in zip(prism.tail[1:], times["plain"], strict=True))
    report("optimizer_tail", tail, 0.25, "lower", "forward and backward of the same model, non-private")
    memory = peak_bytes(prism.step) / peak_bytes(opacus.step)
    report("peak_memory", memory, 1.15, "lower", "Opacus GradSampleModule hooks")


def random_z(m: int, n: int) -> LowRank:
    return LowRank(*(random_orthonormal(k, RANK) * 0.1 for k in (m, n)))


def sum_then_lift(quick: bool) -> None:
    z = [random_z(WIDTH, WIDTH) for _ in range(LAYERS)]
    spaces = [x.tangent() for x in z]
    gA, gB = (torch.randn(LAYERS, BATCH, WIDTH, RANK) for _ in "AB")
    alpha = torch.rand(BATCH)

    def weighted(g: Tensor) -> Tensor:
        return (alpha @ g.flatten(1)).view(WIDTH, RANK)

    def ours() -> list[tuple[Tensor, Tensor]]:
        return [s.lift(s.coordinates(weighted(a), weighted(b))) for s, a, b in zip(spaces, gA, gB, strict=True)]

    def lift_each() -> list[tuple[Tensor, Tensor]]:
        lifts = (s.lift(s.coordinates(a, b)) for s, a, b in zip(spaces, gA, gB, strict=True))
        return [(weighted(dA), weighted(dB)) for dA, dB in lifts]

    for (a, _), (b, _) in zip(ours(), lift_each(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)
    times = interleaved({"ours": ours, "each": lift_each}, repeats=5 if quick else 30)
    report("sum_then_lift", best_ratio(times, "each", "ours"), 2.0, "higher", "lifting every example's gradient")


def sampler(quick: bool) -> None:
    space = random_z(2048, 2048).tangent()

    def ours() -> TangentVector:
        return space.gaussian()

    def dense() -> Tensor:
        noise = torch.randn(2048, 2048)
        u, v = space.U, space.V
        rest = noise - u @ (u.mT @ noise)
        return noise - (rest - (rest @ v) @ v.mT)

    def twenty() -> None:  # one draw is so short that the page faults after freeing dense's 16 MB would decide its time
        for _ in range(20):
            ours()

    times = interleaved({"ours": twenty, "dense": dense}, repeats=8 if quick else 50)
    report("sampler_time", 20 * best_ratio(times, "dense", "ours"), 20.0, "higher", "projecting a dense Gaussian")
    memory = peak_bytes(dense) / peak_bytes(ours)
    report("sampler_memory", memory, 20.0, "higher", "projecting a dense Gaussian")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, within 50 s")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    with torch.no_grad():
        sum_then_lift(quick)
        sampler(quick)
    whole_step(quick)


if __name__ == "__main__":
    main()
