"""A step on the 0-1 loss by noise on the outputs against one on cross-entropy, and against noise on the weights.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, turns interleaved, median
of the rounds. ``--quick`` repeats less.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from subspan.optim import OutputSpaceLoss, output_gradient, zero_one
from timing import interleaved, median_ratio, peak_bytes, report

ROWS, CLASSES = 256, 10


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 784, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def stepper(loss: Callable[..., torch.Tensor]) -> Callable[[], None]:
    """One training step of plain SGD, forward to update."""
    model, (x, y) = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


class WeightNoise:
    """Antithetic evolution strategies on the weights: a forward pass for every evaluation, noise in d dimensions."""

    def __init__(self, pairs: int, sigma: float = 0.02, lr: float = 1e-3) -> None:
        self.model, (self.x, self.y) = network(), batch()
        self.pairs, self.sigma, self.lr = pairs, sigma, lr

    @torch.no_grad()
    def step(self) -> None:
        params = list(self.model.parameters())
        grads = [torch.zeros_like(p) for p in params]
        for _ in range(self.pairs):
            noise = [torch.randn_like(p) for p in params]
            ends = []
            for scale in (self.sigma, -2 * self.sigma):
                for p, e in zip(params, noise, strict=True):
                    p.add_(e, alpha=scale)
                ends.append(float(zero_one(self.model(self.x), self.y).mean()))
            for p, e, g in zip(params, noise, grads, strict=True):
                p.add_(e, alpha=self.sigma)
                g.add_(e, alpha=(ends[0] - ends[1]) / (2 * self.sigma * self.pairs))
        for p, g in zip(params, grads, strict=True):
            p.add_(g, alpha=-self.lr)


def speed(rounds: int) -> None:
    runs = {"bp": stepper(cross_entropy)}
    for pairs in (16, 64):
        runs[f"ovlr {pairs}"] = stepper(OutputSpaceLoss(zero_one, pairs=pairs, invariance="shift"))
    times = interleaved(runs, rounds)
    for pairs, bar in ((16, 1.15), (64, 1.30)):
        report(f"step_{pairs}_pairs", median_ratio(times, f"ovlr {pairs}", "bp"), bar, "lower",
               "step on cross-entropy by back-propagation")  # fmt: skip


def against_weights(rounds: int) -> None:
    runs = {
        "outputs": stepper(OutputSpaceLoss(zero_one, pairs=16, invariance="shift")),
        "weights": WeightNoise(16).step,
    }
    ratio = median_ratio(interleaved(runs, rounds), "weights", "outputs")
    report(
        "weight_noise_over_output_noise", ratio, 10.0, "higher", "evolution strategies on the weights, 32 evaluations"
    )


def memory() -> None:
    """What an estimate holds at once against chunk x B x K x 12 bytes."""
    z, y = torch.randn(ROWS, CLASSES), batch()[1]
    for chunk, pairs in ((16, 16), (16, 256), (256, 256)):
        held = peak_bytes(lambda c=chunk, p=pairs: output_gradient(z, zero_one, y, sigma=1.0, pairs=p, chunk=c))
        bound = chunk * ROWS * CLASSES * 12
        report(f"peak_memory_{pairs}_pairs_chunk_{chunk}", held / bound, 1.0, "lower", "chunk x B x K x 12 bytes")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    speed(15 if quick else 60)
    against_weights(2 if quick else 8)
    memory()


if __name__ == "__main__":
    main()
