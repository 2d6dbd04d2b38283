"""What growing means to an optimiser: its state, its learning rate, and recipes that leave the trap."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subspan.resize.width.axes import Layout
from subspan.resize.width.plan import unwrapped, wide_plan
from subspan.resize.width.tiling import expand_tensor

# Power of the gradient in each buffer that torch's optimisers and MuonAdamW keep.
_POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1}


def lr_multipliers(layout: Layout, optimizer: str) -> float:
    """Factor on the seed's learning rate that folding a trapped run of the wide network amounts to (section 3.8).

    With the gain g of a tensor, W~ = g tile(W) / r_in, a gradient block is the seed's over r_out g, so SGD moves the
    fold by r_in / (r_out g^2), Adam and signs by r_in / g, an isotropic step by sqrt(r_in / r_out) for hidden matrices.
    "muon" is the step scaled by the root of the longer side (``MuonAdamW``'s default), "muon_unscaled" the bare one.
    """
    isotropic = layout.hidden and len(layout.axes) == 2  # stacks of experts are no matrices: AdamW trains them
    known: dict[str, Callable[[], float]] = {
        "sgd": lambda: layout.r_in / (layout.r_out * layout.gain**2),
        "adamw": lambda: layout.r_in / layout.gain,
        "muon_unscaled": lambda: math.sqrt(layout.r_in / layout.r_out) if isotropic else known["adamw"](),
        "muon": lambda: (
            known["muon_unscaled"]() * math.sqrt(max(layout.wide_shape) / max(layout.seed_shape))
            if isotropic
            else known["adamw"]()
        ),
    }
    name = {"adam": "adamw", "lion": "adamw", "sign": "adamw"}.get(optimizer.lower(), optimizer.lower())
    if name not in known:
        raise ValueError(f"unknown optimizer {optimizer!r}; known are {', '.join(known)} (lion counts as adamw)")
    return known[name]()


def suggest_lr(
    seed_lr: float,
    model: nn.Module,
    optimizer: str = "adamw",
    *,
    factor: int = 2,
    ffn_factor: int | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups of a wide network at the rates that move its fold as ``seed_lr`` moved the seed.

    Exact while the network is trapped, without weight decay and clipping: AdamW on a clone doubles the seed-equivalent
    rate of hidden layers (factor 2), so it gets half here.

    Args:
        seed_lr: the seed's learning rate.
        model: the wide network.
        optimizer: "sgd" (with momentum or without), "adamw", "muon" or "muon_unscaled".
        factor: as the network was grown.
        ffn_factor: as the network was grown.

    Returns:
        Groups with ``lr`` and named ``params``, one per rate, for any torch optimiser.
    """
    found = wide_plan(model, factor, ffn_factor)
    groups: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, p in found.model.named_parameters():
        if p.requires_grad:
            groups.setdefault(seed_lr / lr_multipliers(found.layouts[name], optimizer), []).append((name, p))
    return [{"params": params, "lr": lr} for lr, params in groups.items()]


@torch.no_grad()
def expand_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, big: nn.Module, factor: int = 2, ffn_factor: int | None = None
) -> dict[str, Any]:
    """The seed's optimiser state in the wide size, for ``load_state_dict`` of the same optimiser over ``big``.

    A gradient block of the exact clone is the seed's over r_out, so first moments and momenta are cloned over r_out,
    second moments over its square, and steps copied. For Adam the continuation is exact in the trap up to its epsilon,
    which would have to be divided by r_out as well. A head that was untied gets the state of the shared table, which
    mixes the gradients of both and is the best there is.

    Args:
        optimizer: of the seed, over parameters of ``model``.
        model: the seed.
        big: the grown network.
        factor: as it was grown.
        ffn_factor: as it was grown.

    Returns:
        A state dict with the seed's groups in the seed's order; an untied head comes after the others of the group of
        its embedding. ``param_names`` of each group says which parameter stands where.

    Raises:
        ValueError: a parameter is no parameter of ``model``, or a buffer is of an unknown kind.
    """
    model, big = unwrapped(model), unwrapped(big)
    found, names = wide_plan(big, factor, ffn_factor), {p: n for n, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in big.named_parameters()}
    owners = {n: names[p] for n, p in model.named_parameters(remove_duplicate=False)}
    groups, states, number = [], {}, 0
    for group in optimizer.param_groups:
        if strange := [tuple(p.shape) for p in group["params"] if p not in names]:
            raise ValueError(f"the optimiser holds a parameter of shape {strange[0]} that is not the seed's")
        mine = [names[p] for p in group["params"]]
        untied = [n for n in shapes if n not in mine and owners.get(n) in mine]
        for name in [*mine, *untied]:
            source = model.get_parameter(owners[name])
            states[number] = {
                key: _grown_buffer(key, value, found.layouts[name], source)
                for key, value in optimizer.state.get(source, {}).items()
            }
            number += 1
        placed = list(range(number - len(mine) - len(untied), number))
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append(options | {"params": placed, "param_names": [*mine, *untied]})
    return {"state": {k: v for k, v in states.items() if v}, "param_groups": groups}


def _grown_buffer(key: str, value: Any, layout: Layout, source: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value.clone() if isinstance(value, Tensor) else value
    if key not in _POWERS or value.shape != source.shape:
        raise ValueError(f"the optimiser's buffer {key!r} of {layout.name} is of a kind that cannot be grown; known "
                         f"are {', '.join(_POWERS)}")  # fmt: skip
    power = _POWERS[key]
    # Undo the rule's 1 / r_in and gain on the weights; a gradient has 1 / (r_out gain) instead.
    bare = Layout(layout.name, layout.axes, layout.out, None)
    return expand_tensor(value, bare) / (layout.r_out * layout.gain) ** power


@torch.no_grad()
def asymmetric_state_reset(
    optimizer: torch.optim.Optimizer, model: nn.Module, factor: int = 2, ffn_factor: int | None = None
) -> int:
    """Keep the moments of the first clone of every unit and zero those of the others, in place.

    Clones that were equal then take different steps, so that even an exact clone leaves the trap (the idea is
    SPARKLING's, arXiv 2602.02472; the details are ours). Warm the learning rate up again afterwards, because a zeroed
    second moment makes the next steps of Adam large: ``torch.optim.lr_scheduler.LinearLR``.

    Args:
        optimizer: over parameters of ``model``, with state (loaded from ``expand_optimizer_state``, or after a step).
        model: the wide network.
        factor: as it was grown.
        ffn_factor: as it was grown.

    Returns:
        The number of tensors that were reset.

    Raises:
        ValueError: the optimiser holds no state, so there is nothing that could differ.
    """
    found = wide_plan(model, factor, ffn_factor)
    done = 0
    for name, p in found.model.named_parameters():
        layout = found.layouts[name]
        if not layout.hidden or layout.out is None:
            continue
        for value in optimizer.state.get(p, {}).values():
            if isinstance(value, Tensor) and value.shape == p.shape:
                for part in value.split([s.wide for s in layout.axes[layout.out]], layout.out):
                    size = part.shape[layout.out] // layout.r_out
                    part.narrow(layout.out, size, part.shape[layout.out] - size).zero_()
                done += 1
    if not done:
        raise ValueError("the optimiser holds no moments yet: load expand_optimizer_state's, or take a step first")
    return done
