"""Speed and memory of MuonAdamW against torch's Muon, a plain float32 loop, and AdamW.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, turns interleaved, median
of the rounds. ``--quick`` repeats less.
"""

import argparse
import math
import statistics

import torch
from torch import Tensor, nn

from subspan.linalg import ns_coefficients
from subspan.optim import MuonAdamW, muon_from_peft
from timing import interleaved, median_ratio, peak_bytes, report

# (rank, long side, number of factors, least speed-up over torch.optim.Muon)
FACTORS = ((8, 768, 144, 2.5), (16, 1024, 192, 1.3), (64, 768, 144, 1.15))


def lora_factors(rank: int, side: int, count: int) -> list[nn.Parameter]:
    """Alternately A (rank x side) and B (side x rank), with gradients."""
    g = torch.Generator().manual_seed(0)
    params = []
    for i in range(count):
        shape = (rank, side) if i % 2 == 0 else (side, rank)
        p = nn.Parameter(0.02 * torch.randn(shape, generator=g))
        p.grad = torch.randn(shape, generator=g)
        params.append(p)
    return params


class LoopMuon:
    """Muon as in its first publication: one parameter after the other, five products each, here in float32."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        self.params, self.lr = params, lr
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        for p, m in zip(self.params, self.buffers, strict=True):
            m.mul_(0.95).add_(p.grad)
            o = self.newton_schulz(p.grad.add(m, alpha=0.95))
            p.add_(o, alpha=-self.lr * 0.2 * math.sqrt(max(p.shape)))

    @staticmethod
    def newton_schulz(x: Tensor) -> Tensor:
        tall = x.shape[0] > x.shape[1]
        x = x.mT if tall else x
        x = x / (x.norm() + 1e-7)
        for a, b, c in ns_coefficients("quintic", 5):
            s = x @ x.mT
            x = a * x + (b * s + c * s @ s) @ x
        return x.mT if tall else x


def milliseconds(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def steps(repeats: int) -> None:
    for rank, side, count, bar in FACTORS:
        sets = [lora_factors(rank, side, count) for _ in range(4)]
        optimizers = {
            "ours": MuonAdamW(sets[0], lr=1e-3),
            "torch.optim.Muon": torch.optim.Muon(sets[1], lr=1e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            "float32 loop": LoopMuon(sets[2], lr=1e-3),
            "torch.optim.AdamW": torch.optim.AdamW(sets[3], lr=1e-3),
        }
        times = interleaved({name: o.step for name, o in optimizers.items()}, repeats)
        spent = {"ours_ms": milliseconds(times["ours"]), "adamw_ms": milliseconds(times["torch.optim.AdamW"])}
        name = f"step_r{rank}_q{side}_n{count}"
        report(name, median_ratio(times, "torch.optim.Muon", "ours"), bar, "higher", "torch.optim.Muon", **spent)
        report(f"{name}_vs_loop", median_ratio(times, "float32 loop", "ours"), 1.0, "higher", "float32 loop", **spent)


def tiny_gpt() -> nn.Module:
    """GPT-2 with d = 64 and two layers, and LoRA of rank 8 on all its projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=128, **still))
    targets = ["c_attn", "c_proj", "c_fc"]
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=True))


def training_step(repeats: int) -> None:
    x = torch.randint(0, 256, (16, 128), generator=torch.Generator().manual_seed(0))
    models = {name: tiny_gpt() for name in ("muon", "adamw")}
    optimizers: dict[str, torch.optim.Optimizer] = {
        "muon": muon_from_peft(models["muon"], lr=1e-3),
        "adamw": torch.optim.AdamW([p for p in models["adamw"].parameters() if p.requires_grad], lr=1e-3),
    }

    def step(name: str) -> None:
        models[name](input_ids=x, labels=x).loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    times = interleaved({name: (lambda name=name: step(name)) for name in models}, 4 * repeats)
    ratio = median_ratio(times, "muon", "adamw")
    report("training_step_gpt_d64", ratio, 1.3, "lower", "torch.optim.AdamW", ours_ms=milliseconds(times["muon"]))


def memory() -> None:
    for name, params in (
        ("lora_r8_q768_n144", lora_factors(8, 768, 144)),
        ("full_512x512_n4", lora_factors(512, 512, 4)),
    ):
        optimizer = MuonAdamW(params, lr=1e-3)
        optimizer.step()
        shapes = [p.shape for p in params]
        largest = max(4 * math.prod(s) * shapes.count(s) for s in shapes)
        report(f"extra_memory_{name}", peak_bytes(optimizer.step) / largest, 2.0, "lower", "largest stacked group")
    params = lora_factors(8, 768, 144)
    adamw = torch.optim.AdamW(params)
    adamw.step()
    ours = MuonAdamW(params)
    ours.step()
    held = [sum(v.numel() for s in o.state.values() for v in s.values()) for o in (ours, adamw)]
    report("state_size", held[0] / held[1], 0.5, "lower", "torch.optim.AdamW")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 50 s on two cores")
    repeats = 3 if parser.parse_args().quick else 7
    torch.set_num_threads(1)
    steps(repeats)
    training_step(repeats)
    memory()
