"""Cost of calibration and of the Fisher start against a plain training step, a whole eigendecomposition and LoRA-GA.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, turns interleaved, median
of the rounds. ``--quick`` repeats less.
"""

import argparse
import copy
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subspan.adapters import collect_fisher, fisher_init
from subspan.linalg import Subspace, leading_eigh, random_orthonormal
from timing import interleaved, median_ratio, report


def deep(width: int, layers: int) -> nn.Sequential:
    """Linear layers with an activation between them."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))


def half_square(outputs: Tensor, batch: Any = None) -> Tensor:
    return outputs.square().sum() / 2


def calibration(repeats: int, quick: bool) -> None:
    """Eight 1024 x 1024 layers, 2048 tokens a batch, against forward, backward and weight gradients."""
    model, x = deep(1024, 8), torch.randn(2048, 1024)
    targets = [str(2 * i) for i in range(8)]
    count = 2  # batches in a pass: setting up and finishing is shared among them

    def plain() -> None:
        for _ in range(count):
            half_square(model(x)).backward()
            for p in model.parameters():
                p.grad = None

    def ours(gradient: bool) -> None:
        collect_fisher(
            model, [x] * count, targets, loss_fn=half_square, gradient=gradient, n_samples=10**9, converged=None
        )

    peer = "forward and backward with weight gradients"
    runs = {"ours": lambda: ours(True), "plain": plain} | ({} if quick else {"no gbar": lambda: ours(False)})
    times = interleaved(runs, repeats)
    report("calibration_batch", median_ratio(times, "ours", "plain"), 1.6, "lower", peer)
    if not quick:
        report("calibration_batch_without_mean_gradient", median_ratio(times, "no gbar", "plain"), 1.6, "lower", peer)


class Heads(nn.Module):
    """Three narrow projections of one wide input: almost all the work is S_X."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(1024, 16) for _ in range(3))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        copies = (x, x, x) if self.shared else (x, x.clone(), x.clone())
        return self.q(copies[0]) + self.k(copies[1]) + self.v(copies[2])


def sharing(repeats: int) -> None:
    x = torch.randn(2048, 1024)

    def pass_over(model: nn.Module) -> None:
        collect_fisher(
            model, [x] * 4, ["q", "k", "v"], loss_fn=half_square, gradient=False, n_samples=10**9, converged=None
        )

    together, apart = Heads(True), Heads(False)
    times = interleaved({"shared": lambda: pass_over(together), "apart": lambda: pass_over(apart)}, repeats)
    report("input_work_saved_by_sharing", 1 - median_ratio(times, "shared", "apart"), 0.4, "higher", "q, k, v apart")


def decomposition(repeats: int) -> None:
    """n = 2048, r = 16, float32, a gap of exactly five per cent below the sixteenth eigenvalue."""
    n, r = 2048, 16
    i = torch.arange(n, dtype=torch.float64)
    flat = torch.where(i < r, 1.05, 1 - 0.9 * i / n)  # the hardest: sixteen equal ones on a slowly falling floor
    power = 1 / (i + 1)
    power[r:] *= power[r - 1] / 1.05 / power[r]
    q = random_orthonormal(n, n, generator=torch.Generator().manual_seed(0))
    for name, values in (("flat", flat), ("power_law", power)):
        s = (q * values.float()) @ q.mT
        s = (s + s.mT) / 2
        found: dict[str, Tensor] = {}

        def ours(s: Tensor = s, found: dict[str, Tensor] = found) -> None:
            found["ours"] = leading_eigh(s, r, generator=torch.Generator().manual_seed(0)).vectors

        def whole(s: Tensor = s, found: dict[str, Tensor] = found) -> None:
            found["whole"] = torch.linalg.eigh(s).eigenvectors[:, -r:]

        times = interleaved({"whole": whole, "ours": ours}, repeats)
        angle = float(Subspace(found["ours"]).principal_angles(Subspace(found["whole"])).max())
        report(f"leading_eigh_{name}", median_ratio(times, "whole", "ours"), 5, "higher", "torch.linalg.eigh")
        report(f"leading_eigh_{name}_angle", angle, 1e-3, "lower", "torch.linalg.eigh")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512, intermediate_size=1408, num_hidden_layers=3, num_attention_heads=8, vocab_size=4000,
            max_position_embeddings=256,
        )
    ).eval()  # fmt: skip


def initialisation(repeats: int) -> None:
    """From a base model and batches to a started adapter, on a small Llama: 4 batches of 4 x 128 tokens, r = 16."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import LoraGAConfig
    from peft.tuners.lora.loraga import preprocess_loraga

    base = llama()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    g = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        ids = torch.randint(4000, (4, 128), generator=g)
        batches.append({"input_ids": ids, "labels": ids})

    def fisher() -> None:
        model = copy.deepcopy(base)
        stats = collect_fisher(model, batches, targets, n_samples=16, rank=16, converged=None)
        fisher_init(get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=targets)), stats)

    def lora_ga() -> None:
        model = copy.deepcopy(base)
        common: dict[str, Any] = {"r": 16, "lora_alpha": 16, "target_modules": targets, "init_lora_weights": "lora_ga"}
        config = LoraConfig(**common, lora_ga_config=LoraGAConfig())
        preprocess_loraga(model, config, train_step=lambda: [model(**b).loss.backward() for b in batches] and None)
        get_peft_model(model, config)

    times = interleaved({"fisher": fisher, "lora_ga": lora_ga}, repeats)
    report("total_initialisation", median_ratio(times, "fisher", "lora_ga"), 2, "lower", "peft LoRA-GA")


class Watch(TorchDispatchMode):
    """Peak bytes of the tensor storages that were created inside and are alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                key = storage.data_ptr()
                if key and key not in old and key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def memory() -> None:
    """Peak of a pass beyond the activations and gradients of a plain one, per byte of one group's 4 (n² + m²)."""
    width, count = 768, 8
    model, x = deep(width, count), torch.randn(256, width)
    targets = [str(2 * i) for i in range(count)]
    with Watch() as plain:
        for p in model.parameters():
            p.requires_grad_(False)
        half_square(model(x.clone().requires_grad_())).backward()
    for name, gradient, bound in (("", False, 4 * 2 * width**2), ("_with_mean_gradient", True, 4 * 3 * width**2)):
        with Watch() as ours:
            stats = collect_fisher(
                model, [x] * 3, targets, loss_fn=half_square, gradient=gradient, n_samples=10**9, converged=None
            )
        assert len(stats.layers) == count
        ratio = (ours.peak - plain.peak) / (count * bound)
        report(f"peak_memory{name}", ratio, 1.1, "lower", "4 (n² + m²) bytes a layer" + (" + 4 m n" * gradient))
        del stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 50 s on two cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    decomposition(1 if quick else 9)
    sharing(3 if quick else 9)
    memory()
    initialisation(1 if quick else 5)
    calibration(1 if quick else 5, quick)


if __name__ == "__main__":
    main()
