"""Speed and memory of Buffer-and-Reinforce against the dense route, plain LoRA, and Security Vector.

One JSON line per figure: {"name", "ratio", "bar", "better", "peer"}. One process, one thread, turns interleaved, median
of the rounds, in processor time. ``--quick`` repeats less, and takes a user's steps on ten of SmolLM2's thirty layers.
"""

import argparse
import time
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from subspan.linalg import LowRank
from subspan.safety import buffered, qr_merge
from timing import interleaved, median_ratio, peak_bytes, report

# The seven adapted matrices of a block of an 8B Llama (out x in); it has 32 blocks.
BLOCK = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))


def factors(m: int, n: int, r: int, seed: int) -> LowRank:
    g = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(m, r, generator=g), torch.randn(n, r, generator=g))


def dense_merge(user: LowRank, reinforce: LowRank) -> Tensor:
    """What one would write first: both products, a basis of the user's by SVD of the factors, a dense projection."""
    d_user, d_reinforce = user.A @ user.B.mT, reinforce.A @ reinforce.B.mT
    q = torch.linalg.qr(user.A).Q
    return 0.5 * d_user + 0.5 * (d_reinforce - 0.1 * q @ (q.mT @ d_reinforce))


def merging(repeats: int) -> None:
    user, reinforce = factors(4096, 4096, 32, 0), factors(4096, 4096, 32, 1)
    merged, dense = qr_merge(user, reinforce), dense_merge(user, reinforce)
    difference = float((merged.dense() - dense).norm() / dense.norm())
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: qr_merge(user, reinforce),
        "dense": lambda: dense_merge(user, reinforce),
    }
    times = interleaved(runs, repeats, clock=time.process_time)
    ratio = median_ratio(times, "dense", "ours")
    report("merge_4096_r32", ratio, 30.0, "higher", "dense products", relative_difference=difference)
    memory = peak_bytes(runs["ours"]) / peak_bytes(runs["dense"])
    report("merge_4096_r32_memory", memory, 0.03, "lower", "dense products")
    pairs = [(factors(m, n, 32, 0), factors(m, n, 32, 1)) for m, n in BLOCK]

    def block() -> None:
        for pair in pairs:
            qr_merge(*pair)

    seconds = sorted(interleaved({"block": block}, repeats, clock=time.process_time)["block"])[repeats // 2]
    report("merge_8B_seconds", 32 * seconds, 10.0, "lower", "seconds on one core, 32 blocks of seven matrices")


def smollm2(layers: int) -> nn.Module:
    """SmolLM2-135M's shape; what the weights are makes no difference to the time."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(shape)


def lora(r: int = 8) -> LoraConfig:
    return LoraConfig(r=r, lora_alpha=2 * r, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])


def batch(rows: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 49152, (rows, tokens), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :-8] = -100
    return {"input_ids": ids, "labels": labels}


def user_step(repeats: int, layers: int) -> None:
    model = get_peft_model(smollm2(layers), lora(), adapter_name="user")
    model.add_adapter("buffer", lora())
    model.set_adapter("user")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)
    data = batch(8, 48)
    model.train()

    def step() -> None:
        model(**data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    context = buffered(model)

    def with_buffer() -> None:
        context.switch(True)
        step()
        context.switch(False)

    context.attach()
    context.switch(False)
    times = interleaved({"buffered": with_buffer, "plain": step}, repeats, clock=time.process_time)
    report(
        "user_step_smollm2", median_ratio(times, "buffered", "plain"), 1.35, "lower", "plain LoRA step", layers=layers
    )
    held = sum(p.grad is not None for n, p in model.named_parameters() if ".buffer." in n)
    report("gradients_on_the_buffer", held, 0, "lower", "tensors")
    context.remove()


def buffer_step(repeats: int) -> None:
    """A step of training a buffer as published, and of Security Vector, which adds a divergence on ordinary rows."""
    model = get_peft_model(smollm2(8), lora(), adapter_name="buffer")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)
    data, ordinary = batch(8, 32), {"input_ids": batch(8, 32)["input_ids"], "logits_to_keep": 9}

    def finish(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def ours() -> None:
        finish(model(**data).loss)

    def vector() -> None:
        with torch.no_grad(), model.disable_adapter():
            base = model(**ordinary).logits.log_softmax(-1)
        near = model(**ordinary).logits.log_softmax(-1)
        divergence = nn.functional.kl_div(near, base, reduction="batchmean", log_target=True)
        finish(model(**data).loss + 0.01 * divergence)

    times = interleaved({"vector": vector, "ours": ours}, repeats, clock=time.process_time)
    report("buffer_step", median_ratio(times, "vector", "ours"), 1.5, "higher", "Security Vector")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, within 50 s on two cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    merging(5 if quick else 15)
    user_step(2 if quick else 6, 10 if quick else 30)
    buffer_step(2 if quick else 9)
