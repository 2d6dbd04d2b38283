"""What a parameter group may hold, and which gradients are fit to use."""

import math
from typing import Any

import torch
from torch import Tensor

from subspan.linalg import ns_coefficients


def check_group(group: dict[str, Any]) -> None:
    params = group["params"]
    if len(set(params)) < len(params):
        twice = next(p for p in params if sum(q is p for q in params) > 1)
        raise ValueError(f"{name_in(group, twice)} appears twice in one parameter group")
    for p in params:
        if not p.is_floating_point():
            raise TypeError(
                f"{name_in(group, p)} has dtype {p.dtype}; MuonAdamW trains real floating-point parameters (dequantise "
                "the weight, or train an adapter on it)"
            )
        if group["use_muon"] and p.ndim < 2:
            raise ValueError(
                f"{name_in(group, p)} has {p.ndim} dimension(s), but Muon orthogonalises matrices; put it into a group "
                "with use_muon=False, as build_muon_groups(model) does"
            )
    for key in ("lr", "weight_decay", "eps"):
        if not 0 <= group[key] < math.inf:
            raise ValueError(f"{key} must be a finite number of at least 0, got {group[key]}")
    for key, value in (("momentum", group["momentum"]), *(("betas", beta) for beta in group["betas"])):
        if not 0 <= value < 1:
            raise ValueError(f"{key} must lie in [0, 1), got {group[key]}")
    if not 1 <= group["ns_steps"] < 100:
        raise ValueError(f"ns_steps must lie between 1 and 99, got {group['ns_steps']}")
    if group["ns"] != "exact":
        ns_coefficients(group["ns"], 1)  # raises for an unknown method
    if group["scale"] not in ("match_rms", "original", "none"):
        raise ValueError(f"scale must be 'match_rms', 'original' or 'none', got {group['scale']!r}")
    if group["momentum_form"] not in ("sum", "lerp"):
        raise ValueError(f"momentum_form must be 'sum' or 'lerp', got {group['momentum_form']!r}")
    for key in ("ns_dtype", "state_dtype"):
        if group[key] is not None and not group[key].is_floating_point:
            raise ValueError(f"{key} must be a floating-point dtype, got {group[key]}")


def name_in(group: dict[str, Any], param: Tensor) -> str:
    index = next(i for i, p in enumerate(group["params"]) if p is param)
    names = group.get("param_names")
    return f"{names[index] if names else f'parameter {index} of its group'} (shape {tuple(param.shape)})"


def nonfinite(grads: list[Tensor]) -> set[int]:
    """Indices of gradients that hold NaN or Inf, with one device synchronisation when there are none."""
    if not grads:
        return set()
    norms = torch.stack([n.to(grads[0].device, torch.float32) for n in torch._foreach_norm(grads)])
    suspects = (~norms.isfinite()).nonzero().flatten().tolist()
    return {i for i in suspects if not grads[i].isfinite().all()}  # the norm alone may overflow


def restore_buffers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """After torch's ``load_state_dict``: buffers in their own dtype, and copied, so that a resumed run is bit-equal."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for key, p in zip(keys, params, strict=True):
        for name, value in state_dict["state"].get(key, {}).items():
            if isinstance(value, Tensor):
                device = value.device if name == "step" else p.device
                optimizer.state[p][name] = value.to(device, copy=True)
