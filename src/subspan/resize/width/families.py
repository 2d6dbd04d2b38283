"""The axes of the architectures that can be grown, as one table; others are registered or, for chains, inferred."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from subspan.resize.width.axes import Family, Rule

_CAUSAL_HEADS = {"lm_head": "vocab <- residual", "score": "class <- residual", "classifier": "class <- residual",
                 "qa_outputs": "class <- residual"}  # fmt: skip

_LLAMA = _CAUSAL_HEADS | {
    "*embed_tokens": "vocab -> residual",
    "*.q_proj": "heads <- residual",
    "*.k_proj": "kv_heads <- residual",
    "*.v_proj": "kv_heads <- residual",
    "*.qkv_proj": "heads+kv_heads+kv_heads <- residual",
    "*.o_proj": "residual <- heads",
    "*.gate_proj": "ffn <- residual",
    "*.up_proj": "ffn <- residual",
    "*.gate_up_proj": "ffn+ffn <- residual",
    "*.down_proj": "residual <- ffn",
    "*.q_norm": "head_dim",
    "*.k_norm": "head_dim",
    "*norm": "residual",
}

_MOE = {
    "*.gate": "experts <- residual",
    "*.experts.gate_up_proj": "experts moe_ffn+moe_ffn <- residual",
    "*.experts.down_proj": "experts residual <- moe_ffn",
    "*.shared_expert_gate": "fixed <- residual",
    "*.shared_expert.gate_proj": "shared_ffn <- residual",
    "*.shared_expert.up_proj": "shared_ffn <- residual",
    "*.shared_expert.down_proj": "residual <- shared_ffn",
}

_GPT2 = _CAUSAL_HEADS | {
    "*wte": "vocab -> residual",
    "*wpe": "pos -> residual",
    "*.c_attn": "residual -> heads+heads+heads",
    "*.attn.c_proj": "heads -> residual",
    "*.c_fc": "residual -> ffn",
    "*.mlp.c_proj": "ffn -> residual",
    "*ln_?": "residual",
}

_NEOX = _CAUSAL_HEADS | {
    "*embed_in": "vocab -> residual",
    "*.query_key_value": "3*heads <- residual",
    "*.attention.dense": "residual <- heads",
    "*.dense_h_to_4h": "ffn <- residual",
    "*.dense_4h_to_h": "residual <- ffn",
    "*norm": "residual",
}

_OPT = {
    "lm_head": "vocab <- embed",
    "score": "class <- embed",
    "qa_outputs": "class <- embed",
    "*embed_tokens": "vocab -> embed",
    "*embed_positions": "pos -> residual",
    "*project_in": "residual <- embed",
    "*project_out": "embed <- residual",
    "*.[qkv]_proj": "heads <- residual",
    "*.out_proj": "residual <- heads",
    "*.fc1": "ffn <- residual",
    "*.fc2": "residual <- ffn",
    "*norm": "residual",
}

_BERT = {
    "*word_embeddings": "vocab -> residual",
    "*position_embeddings": "pos -> residual",
    "*token_type_embeddings": "pos -> residual",
    "*.query": "heads <- residual",
    "*.key": "heads <- residual",
    "*.value": "heads <- residual",
    "*.attention.output.dense": "residual <- heads",
    "*.intermediate.dense": "ffn <- residual",
    "*.output.dense": "residual <- ffn",
    "*pooler.dense": "residual <- residual",
    "*.transform.dense": "residual <- residual",
    "*LayerNorm": "residual",
    "cls.predictions.decoder": "vocab <- residual",
    "cls.predictions.bias": "vocab",
    "cls.seq_relationship": "class <- residual",
    "classifier": "class <- residual",
    "qa_outputs": "class <- residual",
}

_VIT = {
    "*cls_token": "fixed fixed residual",
    "*mask_token": "fixed fixed residual",
    "*position_embeddings": "fixed pos residual",
    "*patch_embeddings.projection": "residual <- patch patch patch",
    "*.[qkv]_proj": "heads <- residual",
    "*.o_proj": "residual <- heads",
    "*.fc1": "ffn <- residual",
    "*.fc2": "residual <- ffn",
    "*layernorm*": "residual",
    "*pooler.dense": "residual <- residual",
    "classifier": "class <- residual",
    "decoder.0": "class <- residual fixed fixed",
}

_BASE = {"residual": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size"}
_GROUPED = _BASE | {"kv_heads": "num_key_value_heads"}
_QWEN_MOE = _GROUPED | {"moe_ffn": "moe_intermediate_size"}

_llama = Family(_LLAMA, _GROUPED, "model.norm.*")
_gemma = Family(_LLAMA, _GROUPED, "model.norm.*", scaled_embedding=True, norm_offset=1.0)
_encoder = Family(_BERT, _BASE)

# model_type of a transformers configuration -> family.
FAMILIES: Mapping[str, Family] = {
    "llama": _llama,
    "mistral": _llama,
    "phi3": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "mixtral": Family(_MOE | _LLAMA, _GROUPED | {"moe_ffn": "intermediate_size"}, "model.norm.*"),
    "olmoe": Family(
        _MOE | _LLAMA | {"*.q_norm": "heads", "*.k_norm": "kv_heads"},
        _GROUPED | {"moe_ffn": "intermediate_size"},
        "model.norm.*",
    ),
    "qwen2_moe": Family(
        _MOE | _LLAMA, _QWEN_MOE | {"shared_ffn": "shared_expert_intermediate_size"}, "model.norm.*"
    ),
    "qwen3_moe": Family(_MOE | _LLAMA, _QWEN_MOE, "model.norm.*"),
    "gpt_neox": Family(_NEOX, _BASE, "gpt_neox.final_layer_norm.*"),
    "gpt2": Family(_GPT2, _BASE | {"ffn": "n_inner"}, "transformer.ln_f.*"),
    "opt": Family(_OPT, _BASE | {"ffn": "ffn_dim", "embed": "word_embed_proj_dim"}, "model.decoder.final_layer_norm.*"),
    "bert": _encoder,
    "vit": Family(_VIT, _BASE),
}  # fmt: skip

_REGISTERED: dict[str, Family] = {}


def register_axes(
    name: str,
    rules: Mapping[str, str | tuple[str, ...]],
    *,
    final_norm: str | None = None,
    resize: Callable[[Any, Callable[[str, int], int]], None] | None = None,
) -> None:
    """Say what the axes of a network of your own are, so that it can be grown, folded and watched.

    Args:
        name: of the module's class; subclasses count too. Registering it again replaces the rules.
        rules: shell pattern of parameter names, or of the names of the layers that hold them -> axes, such as
            ``"heads <- residual"`` for a linear layer (see the page on width expansion); a pair (out, in) says the
            same. The first match counts. Growing axes are residual, heads, kv_heads, ffn and width (a hidden width
            of its own); fixed ones vocab, class, pos, patch, experts, head_dim and fixed.
        final_norm: pattern of the norm before the head; needed to keep a head tied to the embedding.
        resize: called with the new network and ``size(kind, old)``, which gives an axis's new size. It sets what is
            in no tensor's shape, as in ``net.heads = size("heads", net.heads)``; the sizes that torch's own layers
            keep are set already.

    Raises:
        ValueError: a rule names an unknown axis.
    """
    plain = {k: " <- ".join(v) if isinstance(v, tuple) else v for k, v in rules.items()}
    for text in plain.values():
        Rule.parse(text)
    _REGISTERED[name] = Family(plain, final_norm=final_norm, resize=resize)


def family_of(model: nn.Module) -> Family:
    """The family of a network: registered by its class, of its transformers configuration, or a chain's.

    Raises ``ValueError`` for any other, with the remedy.
    """
    for cls in type(model).__mro__:
        if cls.__name__ in _REGISTERED:
            return _REGISTERED[cls.__name__]
    kind: Any = getattr(getattr(model, "config", None), "model_type", None)
    if kind in FAMILIES:
        return FAMILIES[kind]
    if isinstance(model, nn.Sequential):
        return _chain(model)
    raise ValueError(
        f"no axis rules for {type(model).__name__}{f' (model_type {kind!r})' if kind else ''}; known are "
        f"{', '.join(FAMILIES)} and nn.Sequential; describe others with register_axes"
    )


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)
_MIXING = ("Softmax", "LogSoftmax", "Softmin", "Softmax2d", "GLU", "MultiheadAttention")


def _elementwise(module: nn.Module) -> bool:
    kind = type(module)
    known = kind.__module__ == "torch.nn.modules.activation" and kind.__name__ not in _MIXING
    return known or isinstance(module, nn.Identity | nn.Dropout)


def _chain(model: nn.Sequential) -> Family:
    """Rules of a chain of linear layers, norms and activations: the first input and the last output stay."""
    layers: dict[str, Any] = dict(model._modules)  # under all their names: an activation may stand twice
    linear = [i for i, m in layers.items() if isinstance(m, nn.Linear)]
    if len(linear) < 2:
        raise ValueError("an nn.Sequential needs two nn.Linear layers at least: the width between them is what grows")
    first, last = linear[0], linear[-1]
    rules: dict[str, str] = {}
    norms: list[str] = []
    inside = False
    for i, module in layers.items():
        inside = i != last and (inside or i == first)
        if i in linear:
            rules[i] = f"{'fixed' if i == last else 'width'} <- {'fixed' if i == first else 'width'}"
        elif isinstance(module, _NORMS) and (isinstance(module, nn.BatchNorm1d) or len(module.normalized_shape) == 1):
            rules[i] = "width" if inside else "fixed"
            norms += [i] * inside
        elif isinstance(module, nn.PReLU):
            rules[i] = "width" if inside and module.num_parameters > 1 else "fixed"
        elif (inside and not _elementwise(module)) or next(module.parameters(), None) is not None:
            raise ValueError(f"layer {i} of the nn.Sequential, {type(module).__name__}, has no axis rule; chains hold "
                             "linear layers, norms and elementwise activations")  # fmt: skip

    def resize(new: Any, size: Callable[[str, int], int]) -> None:
        """Norms without weights say their size nowhere else."""
        for i in norms:
            norm, wide = layers[i], new.get_submodule(i)
            if isinstance(norm, nn.BatchNorm1d):
                wide.num_features = size("width", norm.num_features)
            else:
                wide.normalized_shape = (size("width", norm.normalized_shape[0]),)

    return Family(rules, resize=resize)
