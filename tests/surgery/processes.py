"""What one process of a data-parallel calibration does, in a module that is quick to import."""

import itertools
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from subspan.surgery import collect_fisher

DOUBLE = torch.float64


def mlp(seed: int = 0, sizes: tuple[int, ...] = (6, 9, 4)) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def labelled(n: int = 8, seed: int = 0, classes: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g, dtype=DOUBLE), torch.randint(classes, (n,), generator=g)


def collect_part(rank: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=Path(path, "port").read_text())
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    x, y = labelled()
    part = slice(0, 5) if rank == 0 else slice(5, 8)
    stats = collect_fisher(mlp(), [(x[part], y[part])], ["0", "2"], dtype=DOUBLE, converged=None)
    if rank == 1:
        stats.save(f"{path}/stats.safetensors")
    sketch = collect_fisher(
        mlp(), [(x[part], y[part])], ["0", "2"], dtype=DOUBLE, converged=None, max_dim=5, rank=1, corrected=True
    )
    if rank == 0:
        sketch.save(f"{path}/sketch.safetensors")
    torch.distributed.destroy_process_group()
