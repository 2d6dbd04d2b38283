"""Ratios of section 10: steps with the penalty, stacked networks, evaluation in chunks, a loop over rows."""

import argparse
import math

import torch

from subspan.models.facrnn.network import LowRankRNN
from subspan.models.facrnn.penalty import aggregated_partial_correlation, partial_correlation
from subspan.models.facrnn.series import lag_index
from subspan.models.facrnn.training import Rows, Schedule, Training, stack
from timing import interleaved, median_ratio, peak_bytes, report

GROUPS = ((0, 1, 2), (3, 4, 5))


def training(groups: int, members: int) -> Training:
    """N = 20, K = 6, 8 batches of M = 128 an epoch."""
    generators = [torch.Generator().manual_seed(i) for i in range(members)]
    networks = [LowRankRNN(20, 6, groups, encoder_std=0.5, generator=g) for g in generators]
    x = torch.randn(1024, 20, generator=generators[0])
    rows = Rows(x, torch.cat([x.tanh(), torch.zeros(1, 20)]), lag_index([1024], 1), None, None, str)
    return Training(stack(networks), rows, Schedule(1, 128, 3e-3, 0.01, 20.0, 0.0), generators)


def steps(repeats: int) -> None:
    runs = {
        "plain": training(1, 1).epoch,
        "grouped": training(2, 1).epoch,
        "five": training(2, 5).epoch,
    }
    times = interleaved(runs, repeats)
    report("step_two_groups", median_ratio(times, "grouped", "plain"), 3.0, "lower", "the same step without groups")
    report("step_five_stacked", median_ratio(times, "five", "grouped"), 4.0, "lower", "one network's step")


def plain_penalty(mu: torch.Tensor, z: torch.Tensor, std: float, n: int) -> torch.Tensor:
    """The straightforward version: an (M, M, K) temporary, differentiated by autograd."""
    M = len(mu)
    kernels = -0.5 * ((z[:, None] - mu) / std).square() - math.log(std) - 0.5 * math.log(2 * math.pi)
    weights = torch.full((M, M), math.log((n - 1) / (M - 1))).fill_diagonal_(0.0)
    log_q = (kernels.sum(-1) + weights).logsumexp(1) - math.log(n)
    parts = [(kernels[..., list(g)].sum(-1) + weights).logsumexp(1) - math.log(n) for g in GROUPS]
    return (log_q - sum(parts)).mean()


def double_loop(mu: torch.Tensor, z: torch.Tensor, std: float, n: int) -> torch.Tensor:
    """Row by row in Python, vectorised over nothing but the coordinates."""
    M, total = len(mu), torch.zeros(())
    for i in range(M):
        logs = []
        for j in range(M):
            square = -0.5 * ((z[i] - mu[j]) / std).square()
            weight = 0.0 if i == j else math.log((n - 1) / (M - 1))
            logs.append(torch.stack([square.sum() + weight, *(square[list(g)].sum() + weight for g in GROUPS)]))
        log_q = torch.stack(logs).logsumexp(0) - math.log(n)
        total = total + log_q[0] - log_q[1:].sum()
    return total / M


def penalty(repeats: int) -> None:
    generator = torch.Generator().manual_seed(0)
    mu, z = torch.randn(2, 128, 6, generator=generator).requires_grad_().unbind(0)
    std, n = 0.5, 1000

    def ours() -> None:
        partial_correlation(mu, z, math.log(std), GROUPS, n).backward(retain_graph=True)

    def plain() -> None:
        plain_penalty(mu, z, std, n).backward(retain_graph=True)

    gap = partial_correlation(mu, z, math.log(std), GROUPS, n) - plain_penalty(mu, z, std, n)
    assert gap.abs().item() < 1e-4, "the two are not the same"
    times = interleaved({"ours": ours, "plain": plain}, repeats)
    report("penalty_and_gradient", median_ratio(times, "plain", "ours"), 1.0, "higher", "(M, M, K) under autograd")
    with torch.no_grad():
        runs = {
            "ours": lambda: partial_correlation(mu, z, math.log(std), GROUPS, n),
            "loop": lambda: double_loop(mu, z, std, n),
        }
        loop = interleaved(runs, 2)
    report("penalty_forward", median_ratio(loop, "loop", "ours"), 3.0, "higher", "a double loop over rows in Python")


def evaluation(repeats: int) -> None:
    mu = torch.randn(2000, 6, generator=torch.Generator().manual_seed(0))

    def run(chunk: int | None) -> float:
        generator = torch.Generator().manual_seed(0)
        return aggregated_partial_correlation(mu, math.log(0.5), GROUPS, generator=generator, chunk=chunk)

    times = interleaved({"chunked": lambda: run(None), "whole": lambda: run(2000)}, repeats)
    report("evaluation_in_chunks", median_ratio(times, "chunked", "whole"), 1.3, "lower", "all rows at once")
    report("evaluation_peak_mb", peak_bytes(lambda: run(None)) / 1e6, 200.0, "lower", "the bar, in MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 50 s on two cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    steps(15 if quick else 60)
    penalty(50 if quick else 300)
    evaluation(3 if quick else 9)
