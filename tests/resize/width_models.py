"""Small networks of every family that can be grown."""

import torch
import transformers as tf

_SIZE = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 50}
_LLAMA = _SIZE | {"num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0}
_MOE = _LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WIDER = {"head_dim": 8}

CAUSAL = {
    "llama": lambda: tf.LlamaConfig(**_LLAMA),
    "llama-mha-bias-tied": lambda: tf.LlamaConfig(
        **_LLAMA | {"num_key_value_heads": 4}, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral-mqa": lambda: tf.MistralConfig(**_LLAMA | {"num_key_value_heads": 1}),
    "phi3": lambda: tf.Phi3Config(**_LLAMA),
    "qwen2": lambda: tf.Qwen2Config(**_LLAMA),
    "qwen3-tied": lambda: tf.Qwen3Config(**_LLAMA, **_WIDER, tie_word_embeddings=True),
    "gemma": lambda: tf.GemmaConfig(**_LLAMA, **_WIDER),
    "gemma2": lambda: tf.Gemma2Config(**_LLAMA, **_WIDER),
    "gemma3": lambda: tf.Gemma3TextConfig(**_LLAMA, **_WIDER),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**_SIZE, intermediate_size=24),
    "gpt2": lambda: tf.GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=50),
    "opt": lambda: tf.OPTConfig(**_SIZE, ffn_dim=24, word_embed_proj_dim=16),
    "opt-post-norm": lambda: tf.OPTConfig(**_SIZE, ffn_dim=24, word_embed_proj_dim=8, do_layer_norm_before=False),
    "mixtral": lambda: tf.MixtralConfig(**_LLAMA, num_local_experts=4),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**_MOE, num_experts=4, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**_MOE, **_WIDER, num_experts=4),
    "olmoe": lambda: tf.OlmoeConfig(**_LLAMA, num_experts=4, num_experts_per_tok=2),
}
_BERT = _SIZE | {"intermediate_size": 24}
_VIT = {k: v for k, v in _BERT.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4}
OTHERS = {
    "bert-mlm": lambda: tf.BertForMaskedLM(tf.BertConfig(**_BERT)),
    "bert-classifier": lambda: tf.BertForSequenceClassification(tf.BertConfig(**_BERT)),
    "bert-bare": lambda: tf.BertModel(tf.BertConfig(**_BERT)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**_VIT)),
    "vit-mim": lambda: tf.ViTForMaskedImageModeling(tf.ViTConfig(**_VIT)),
    "llama-classifier": lambda: tf.LlamaForSequenceClassification(CAUSAL["llama"]()),
}
ALL = (*CAUSAL, *OTHERS)


def network(name, dtype=torch.float32, **changes):
    """Random, with norms and biases that are not at their start."""
    torch.manual_seed(0)
    if name in CAUSAL:
        config = CAUSAL[name]()
        for key, value in changes.items():
            setattr(config, key, value)
        model = tf.AutoModelForCausalLM.from_config(config)
    else:
        model = OTHERS[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model.to(dtype).eval()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)
