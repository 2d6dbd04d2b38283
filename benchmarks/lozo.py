"""Speed and memory of zeroth-order steps against two bare forward passes, a plain MeZO and, where installed, torchzero.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, turns interleaved, median
of the rounds. ``--quick`` repeats less.
"""

import argparse
import importlib.util

import torch
from torch import Tensor, nn

from subspan.optim import LOZO, LOZOPlus, MeZO
from timing import interleaved, median_ratio, peak_bytes, report

WIDTH, LAYERS, VOCABULARY, ROWS, TOKENS = 512, 4, 256, 8, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (f(h).unflatten(-1, (8, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """A decoder of 12.6 M parameters in its four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


class Task:
    """A model with the loss on one batch; each optimiser has its own, of equal weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS))

    def loss(self) -> Tensor:
        return nn.functional.cross_entropy(self.model(self.ids).flatten(0, 1), self.ids.roll(-1, 1).flatten())

    @torch.no_grad()
    def two_forwards(self) -> None:
        self.loss()
        self.loss()


class PlainMeZO:
    """The published procedure: one global seed a step, every parameter moved by its own draw, four passes."""

    def __init__(self, task: Task, lr: float, eps: float) -> None:
        self.task, self.lr, self.eps = task, lr, eps

    def perturb(self, seed: int, scale: float) -> None:
        torch.manual_seed(seed)
        for p in self.task.model.parameters():
            p.data.add_(torch.normal(0.0, 1.0, p.shape), alpha=scale)

    @torch.no_grad()
    def step(self) -> None:
        seed = int(torch.randint(0, 2**31, ()))
        self.perturb(seed, self.eps)
        plus = float(self.task.loss())
        self.perturb(seed, -2 * self.eps)
        minus = float(self.task.loss())
        self.perturb(seed, self.eps)
        self.perturb(seed, -self.lr * (plus - minus) / (2 * self.eps))


def stepper(make, **options):
    """A task, and a function that takes one step of an optimiser on it."""
    task = Task()
    optimizer = make(task.model.named_parameters(), lr=1e-6, **options)
    return task, lambda: optimizer.step(task.loss)


def speed(repeats: int) -> None:
    bare = Task()
    runs = {"two bare forwards": bare.two_forwards, "plain MeZO": PlainMeZO(Task(), 1e-6, 1e-3).step}
    runs["mezo"] = stepper(MeZO)[1]
    runs["lozo in place"] = stepper(LOZO, backend="inplace")[1]
    hooked = Task()
    low_rank = LOZO(hooked.model.named_parameters(), lr=1e-6, model=hooked.model)
    runs["lozo on outputs"] = lambda: low_rank.step(hooked.loss)
    if importlib.util.find_spec("torchzero"):
        import torchzero as tz

        task = Task()
        theirs = tz.Optimizer(task.model.parameters(), tz.m.MeZO(h=1e-3, distribution="gaussian"), tz.m.LR(1e-6))
        runs["torchzero"] = lambda: theirs.step(lambda backward=True: task.loss())
    times = interleaved(runs, repeats)
    bars = {"mezo": 2.1, "lozo in place": 1.65, "lozo on outputs": 1.15}
    for name, bar in bars.items():
        ratio = median_ratio(times, name, "two bare forwards")
        report(f"{name.replace(' ', '_')}_step", ratio, bar, "lower", "two bare forwards")
    report("lozo_over_mezo", median_ratio(times, "lozo in place", "mezo"), 0.85, "lower", "our MeZO")
    for name in ("plain MeZO", "torchzero"):
        if name in times:
            report("mezo_speed", median_ratio(times, name, "mezo"), 1.0, "higher", name)
            report("lozo_speed", median_ratio(times, name, "lozo on outputs"), 1.0, "higher", name)


def queries(rounds: int) -> None:
    """Seconds per query of LOZO+ over a whole period against LOZO's, both in place."""
    steps = 20
    made = {}
    for name, make, options in (
        ("lozo", LOZO, {"interval": steps, "rank": 4}),
        ("lozo+", LOZOPlus, {"interval": steps, "candidates": 8}),
    ):
        task = Task()
        made[name] = task, make(task.model.named_parameters(), lr=1e-6, backend="inplace", **options)

    def period(name: str):
        task, optimizer = made[name]
        for _ in range(steps):
            optimizer.step(task.loss)

    times = interleaved({name: lambda name=name: period(name) for name in made}, rounds)
    # LOZO asks 2 queries a step; LOZO+ counts its own, over the warm-up round too.
    for name, (_, optimizer) in made.items():
        each = optimizer.total_queries / (rounds + 1)
        times[name] = [t / each for t in times[name]]
    report("lozo_plus_per_query", median_ratio(times, "lozo+", "lozo"), 1.05, "lower", "LOZO, per query")


def memory() -> None:
    """What a step holds above a forward pass, against the bound 4 r sum(m + n) bytes + the largest parameter + 5 %."""
    for name, options in (("in_place", {"backend": "inplace"}), ("on_outputs", {})):
        task = Task()
        optimizer = LOZO(task.model.named_parameters(), lr=1e-6, rank=2, model=task.model, **options)
        optimizer.step(task.loss)
        forward = peak_bytes(task.two_forwards)
        step = peak_bytes(lambda task=task, optimizer=optimizer: optimizer.step(task.loss))
        factors = sum(4 * b.rank * sum(b.shape) for b in optimizer.blocks)
        largest = max(4 * b.param.numel() for b in optimizer.blocks)
        bound = forward * 1.05 + factors + largest
        report(f"peak_memory_{name}", step / bound, 1.0, "lower", "forward + 4 r sum(m+n) + largest + 5 %",
               over_forward=step / forward)  # fmt: skip


def against_adam() -> None:
    """What a LOZO step holds above the weights against what back-propagation with Adam holds."""
    trained = Task()
    adam = torch.optim.Adam(trained.model.parameters())

    def backward() -> None:
        adam.zero_grad()
        trained.loss().backward()
        adam.step()

    task = Task()
    optimizer = LOZO(task.model.named_parameters(), lr=1e-6, model=task.model)
    optimizer.step(task.loss)
    # The first step is Adam's own start: its gradients and moments are made within the measurement.
    ours, theirs = peak_bytes(lambda: optimizer.step(task.loss)), peak_bytes(backward)
    report("peak_memory_over_adam", ours / theirs, 0.5, "lower", "back-propagation with Adam, above the weights")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    speed(3 if quick else 25)
    queries(1 if quick else 5)
    memory()
    against_adam()


if __name__ == "__main__":
    main()
