"""What an adapter is for, its files, and the guard that keeps a buffer out of them.

A trained buffer is a jailbroken adapter: it belongs to the provider and to no artefact of a user's.
"""

import hashlib
import json
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from subspan.errors import BaseMismatch, SafetyError, first_line
from subspan.files import write_json
from subspan.surgery import check_base, export_plain_lora, factor_pairs

Role = Literal["buffer", "reinforce", "user", "final"]


def role_of_adapter(model: Any, name: str) -> Role | None:
    """What ``mark_role`` or ``load_adapter`` said this adapter is for."""
    return getattr(model, "subspan_roles", {}).get(name)


def mark_role(model: Any, name: str, role: Role) -> None:
    """Say what an adapter is for. From then on ``model.save_pretrained`` leaves out a buffer, also in checkpoints."""
    # By name, and on the model: adapters may share one configuration object.
    model.subspan_roles = {**getattr(model, "subspan_roles", {}), name: role}
    if role == "buffer" and "save_pretrained" not in vars(model):
        # A bound method, so that a copy of the model guards itself.
        model.save_pretrained = MethodType(_save_without_buffers, model)


def _save_without_buffers(
    model: Any, save_directory: str | Path, *args: Any, selected_adapters: list[str] | None = None, **options: Any
) -> None:
    buffers = [name for name in model.peft_config if role_of_adapter(model, name) == "buffer"]
    if asked := set(buffers) & set(selected_adapters or ()):
        raise SafetyError(_refusal(sorted(asked)[0], save_directory))
    kept = (
        [name for name in model.peft_config if name not in buffers] if selected_adapters is None else selected_adapters
    )
    type(model).save_pretrained(model, save_directory, *args, selected_adapters=kept, **options)


def _refusal(name: str, path: str | Path) -> str:
    return (
        f"{name!r} is a buffer, an adapter that was made to comply: it is not written to {path}; a provider who wants "
        "it on disk calls save_adapter(..., allow_buffer=True)"
    )


@torch.no_grad()
def adapter_digest(model: nn.Module, name: str) -> str:
    """A digest of an adapter's factors, by value: the same after saving, and loading in a wider dtype."""
    digest = hashlib.blake2b(digest_size=16)
    for pair in factor_pairs(model, name):
        for param in (pair.param_A, pair.param_B):
            digest.update(f"{pair.name} {tuple(param.shape)} {pair.scaling}".encode())
            digest.update(param.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_adapter(
    model: Any, path: str | Path, adapter: str, role: Role | None = None, *, allow_buffer: bool = False
) -> None:
    """Write one adapter as an ordinary peft LoRA, with its role and the fingerprint of its base beside it.

    Args:
        model: the peft model.
        path: a folder, made if need be.
        adapter: the adapter's name in the model.
        role: what it is for; by default what it was trained or loaded as.
        allow_buffer: a buffer is written only so.

    Raises:
        SafetyError: the adapter is a buffer and ``allow_buffer`` is not set.
    """
    role = role or role_of_adapter(model, adapter)
    if role == "buffer" and not allow_buffer:
        raise SafetyError(_refusal(adapter, path))
    export_plain_lora(model, path, adapter_name=adapter)
    write_json(Path(path) / "role.json", {"role": role, "digest": adapter_digest(model, adapter)})


def load_adapter(model: Any, path: str | Path, adapter: str, role: Role | None = None) -> str:
    """Load an adapter frozen beside those the model has, and return its digest.

    Args:
        model: a peft model on the base that the adapter was made for.
        path: a folder that ``save_adapter``, ``subspan tune`` or peft wrote.
        adapter: the name it gets.
        role: what it must be; by default whatever its folder says.

    Raises:
        SafetyError: it is another kind of adapter, or its factors are not those that were saved.
        BaseMismatch: it was made for another base model.
    """
    path = Path(path)
    if not (path / "adapter_config.json").is_file():
        raise SafetyError(f"{path} holds no adapter (no adapter_config.json): give the folder of the {role or adapter}")
    record = json.loads((path / "role.json").read_text(encoding="utf-8")) if (path / "role.json").is_file() else {}
    written = record.get("role")
    if role and written and written != role:
        raise SafetyError(f"the adapter in {path} was made as a {written}, not as a {role}")
    if (path / "base.json").is_file():
        check_base(model, path)
    trains = model.training
    try:
        result = model.load_adapter(str(path), adapter, torch_device=str(next(model.parameters()).device))
    except RuntimeError as error:
        raise BaseMismatch(
            f"the adapter in {path} was made for a base model of other shapes: {first_line(error)}"
        ) from error
    model.train(trains)  # loading switched to eval
    if strays := [*result.missing_keys, *(k for k in result.unexpected_keys if ".lora_" in k)]:
        raise BaseMismatch(f"the adapter in {path} was made for another base model: {strays[0]} has no counterpart")
    if role := role or written:
        mark_role(model, adapter, role)
    digest = adapter_digest(model, adapter)
    if record.get("digest", digest) != digest:
        raise SafetyError(f"the factors in {path} are not those that were saved there: take the original files")
    return digest
