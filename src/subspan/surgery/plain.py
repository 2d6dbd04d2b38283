"""Whether an adapter is no more than s A Bᵀ on linear layers, so that algebra on its factors says all about it."""

from typing import Any

from torch import nn

from subspan.errors import TargetError


def check_plain_lora(model: Any, adapter_name: str = "default") -> None:
    """Raise ``TargetError``, with the module, where an adapter does more than add s A Bᵀ to linear layers.

    Refused are other kinds than LoRA, variants of it such as DoRA, a bias, LoRA on embeddings, and ``modules_to_save``.
    """
    from peft import PeftType

    if adapter_name not in model.peft_config:
        raise TargetError(f"the model has no adapter {adapter_name!r}; it has {', '.join(model.peft_config)}")
    config = model.peft_config[adapter_name]
    if config.peft_type != PeftType.LORA:
        raise TargetError(f"adapter {adapter_name!r} is a {config.peft_type.value}, not a LoRA: it has no s A Bᵀ")
    remedy = "train it as plain LoRA"
    if config.bias != "none":
        raise TargetError(f"adapter {adapter_name!r} trains biases (bias={config.bias!r}): {remedy}")
    for name, module in model.named_modules():
        if adapter_name in getattr(module, "lora_embedding_A", ()):
            raise TargetError(f"{name}: adapter {adapter_name!r} adapts an embedding: {remedy}, on linear layers")
        whole = getattr(module, "modules_to_save", None)  # peft's models and configurations have the word too
        if isinstance(whole, nn.ModuleDict) and adapter_name in whole:
            raise TargetError(f"{name}: adapter {adapter_name!r} trains this module whole (modules_to_save): {remedy}")
        if adapter_name in getattr(module, "trainable_tokens_delta", ()):
            raise TargetError(f"{name}: adapter {adapter_name!r} trains tokens: {remedy}")
        if variant := getattr(module, "lora_variant", {}).get(adapter_name):
            kind = type(variant).__name__.removesuffix("LinearVariant")
            raise TargetError(f"{name}: adapter {adapter_name!r} is {kind}, more than s A Bᵀ: {remedy}")
        if getattr(module, "lora_bias", {}).get(adapter_name):
            raise TargetError(f"{name}: adapter {adapter_name!r} has a bias (lora_bias): {remedy}")
