"""A small network with LoRA on every layer, and steps of it: shared by the tests of this room."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from subspan.linalg import LowRank
from subspan.privacy import PrismConfig, PrismPrivacy

N, L = 120, 30
LAYERS = ["0", "2", "4"]


def network(dtype: torch.dtype = torch.float64, hidden: int = 12) -> nn.Module:
    g = torch.Generator().manual_seed(7)
    model = nn.Sequential(
        nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 4)
    ).to(dtype)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype) / math.sqrt(p.shape[-1])
    return model


def adapted(dtype: torch.dtype = torch.float64, r: int = 3, **options: Any) -> Any:
    config = LoraConfig(r=r, lora_alpha=2 * r, target_modules=options.pop("target_modules", LAYERS), **options)
    torch.manual_seed(0)  # peft draws lora_A from the global generator
    return get_peft_model(network(dtype), config, autocast_adapter_dtype=False)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(N, 8, generator=g, dtype=torch.float64).to(dtype)
    return x, (x[:, :4]).argmax(1)


def records(dtype: torch.dtype = torch.float64) -> Sequence[Any]:
    x, y = data(dtype)
    return list(zip(x, y, strict=True))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def engine(model: Any, steps: int = 6, sigma: float | None = 1.0, seed: int = 1, **options: Any) -> PrismPrivacy:
    # RDP: the PRV accountant costs a second per question, and what is tested here does not depend on it
    cfg = PrismConfig(**{"noise_multiplier": sigma, "target_delta": 1e-3, "accountant": "rdp", **options})
    return PrismPrivacy(
        model, cfg, dataset_size=N, expected_batch_size=L, steps=steps, generator=torch.Generator().manual_seed(seed)
    )


def train(priv: PrismPrivacy, optimizer: torch.optim.Optimizer, until: int | None = None) -> list[float]:
    """The planned steps (up to ``until``) on the Poisson batches of a fixed seed; mean losses by batch."""
    x, y = data(next(priv.model.parameters()).dtype)
    sampler = priv.sampler(torch.Generator().manual_seed(2), start=priv.steps_done)
    seen = []
    for step, batch in enumerate(sampler, priv.steps_done):
        if step == until:
            break
        for part in priv.micro_batches({"x": x[batch], "y": y[batch]}):
            losses = losses_of(priv.model, **part)
            seen.append(float(losses.detach().mean()))
            priv.backward(losses)
        optimizer.step()
    return seen


def factors(priv: PrismPrivacy) -> list[LowRank]:
    return [LowRank(pair.A.double().clone(), pair.B.double().clone()) for pair in priv.factor_pairs]


def dense_gradients(x: Tensor, y: Tensor, unhooked: PrismPrivacy | None = None) -> list[list[Tensor]]:
    """d loss_i / d Z per example and pair, through the effective weight, at the start of ``engine(adapted())``."""
    if unhooked is None:
        unhooked = engine(adapted())
        unhooked.close()
    pairs = unhooked.factor_pairs
    grads: list[list[Tensor]] = []
    for i in range(len(x)):
        extra = [torch.zeros(*pair.shape[:2], dtype=x.dtype, requires_grad=True) for pair in pairs]
        handles = [
            pair.layer.register_forward_hook(
                lambda m, args, out, e=e, s=pair.scaling: out + s * nn.functional.linear(args[0], e)
            )
            for pair, e in zip(pairs, extra, strict=True)
        ]
        loss = losses_of(unhooked.model, x[i : i + 1], y[i : i + 1]).sum()
        grads.append(list(torch.autograd.grad(loss, extra)))
        for handle in handles:
            handle.remove()
    return grads
