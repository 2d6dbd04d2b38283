"""Taking over a run that was started with torch's own optimisers."""

from typing import Any

import torch

from subspan.linalg import ns_coefficients
from subspan.optim.muon import MuonAdamW, state_dtype_of


def from_torch_muon(muon: torch.optim.Muon, adamw: torch.optim.AdamW | None = None, **options: Any) -> MuonAdamW:
    """A ``MuonAdamW`` with the parameters, settings and state of a ``torch.optim.Muon`` and, for the rest, an AdamW.

    Load checkpoints into the torch optimisers first. torch keeps its momentum in lerp form; the sum form's buffers are
    1/(1 - momentum) times as large. ``options`` are MuonAdamW's. Raises ``ValueError`` for settings it does not have.
    """
    groups = [_muon_group(g) for g in muon.param_groups]
    groups += [_adamw_group(g) for g in (adamw.param_groups if adamw else [])]
    new = MuonAdamW(groups, **options)
    for group in new.param_groups:
        factor = 1 / (1 - group["momentum"]) if group["momentum_form"] == "sum" else 1.0
        for p in group["params"]:
            state = (muon if group["use_muon"] else adamw).state.get(p, {})  # pyright: ignore[reportOptionalMemberAccess]
            for name, value in state.items():
                dtype = value.dtype if name == "step" else state_dtype_of(group, p)
                new.state[p][name] = value.to(dtype, copy=True)
                if name == "momentum_buffer":
                    new.state[p][name].mul_(factor)
    return new


def _muon_group(group: dict[str, Any]) -> dict[str, Any]:
    triple = ns_coefficients("quintic", 1)[0]
    if tuple(group["ns_coefficients"]) != triple:
        raise ValueError(f"ns_coefficients {group['ns_coefficients']} are not the quintic's {triple}")
    scale = "match_rms" if group["adjust_lr_fn"] == "match_rms_adamw" else "original"
    return _taken(group, "momentum", "nesterov", "ns_steps") | {"use_muon": True, "scale": scale}


def _adamw_group(group: dict[str, Any]) -> dict[str, Any]:
    if group["amsgrad"] or group["maximize"]:
        raise ValueError("an AdamW with amsgrad or maximize has no counterpart in MuonAdamW")
    return _taken(group, "betas", "eps") | {"use_muon": False}


def _taken(group: dict[str, Any], *keys: str) -> dict[str, Any]:
    names = group.get("param_names")
    params = list(zip(names, group["params"], strict=True)) if names else list(group["params"])
    # initial_lr is what a scheduler that continues from last_epoch looks for.
    return {"params": params} | {k: group[k] for k in ("lr", "weight_decay", "initial_lr", *keys) if k in group}
