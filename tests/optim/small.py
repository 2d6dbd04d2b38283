"""Tiny models for the optimiser tests."""

import torch
import transformers as tf
from torch import nn

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def llama(seed: int = 0, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64, **options))


def tokens(rows: int = 4, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
