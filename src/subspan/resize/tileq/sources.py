"""Experts as models hold them, fused or in a list, read as one stack of matrices for each projection."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import NonFinite, TargetError

# Names of gate, up and down in lists of experts: Mixtral's own code, and everyone else's.
_NAMES = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True)
class Experts:
    """The float experts of a layer: weights (K x out x in) by projection, "gate" (if there is one), "up" and "down"."""

    weights: dict[str, Tensor]
    act: Callable[[Tensor], Tensor]

    @property
    def count(self) -> int:
        return len(self.weights["down"])

    def inner(self, e: int, x: Float[Tensor, "n d"]) -> Float[Tensor, "n f"]:
        """What expert e's down projection reads."""
        up = x @ self.weights["up"][e].mT
        return self.act(x @ self.weights["gate"][e].mT) * up if "gate" in self.weights else self.act(up)


def is_experts(name: str, module: nn.Module) -> bool:
    """Whether a module is the routed experts of a layer, by its name or its class's; shared ones are not."""
    kind = type(module).__name__
    named = name.rsplit(".", 1)[-1] == "experts" or (kind.endswith("Experts") and "Shared" not in kind)
    return named and next(module.parameters(), None) is not None


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of every layer's routed experts that are still dense.

    Raises:
        TargetError: experts that two places share.
    """
    found = {n: m for n, m in model.named_modules(remove_duplicate=False) if is_experts(n, m)}
    inside = tuple(f"{name}." for name in found)
    found = {n: m for n, m in found.items() if not n.startswith(inside)}
    owners: dict[int, str] = {}
    for name, module in found.items():
        for param in module.parameters():
            first = owners.setdefault(id(param), name)
            if first != name:
                raise TargetError(f"{name} shares weights with {first}; give each layer a copy of its own first")
    return found


def expert_weights(name: str, module: nn.Module) -> dict[str, Tensor | Sequence[Tensor]]:
    """One matrix (out x in) for each expert, by projection, as the module holds them; also on the meta device.

    Raises:
        TargetError: of a kind that is not known, named.
        ValueError: experts of different shapes.
    """
    return _listed(name, module) if isinstance(module, nn.ModuleList) else _fused(name, module)


def read_experts(name: str, module: nn.Module) -> Experts:
    """The weights of one layer's experts.

    Raises:
        TargetError: of a kind that is not known, named; weights on the meta device.
        NonFinite: an expert has weights that are not finite.
        ValueError: experts of different shapes.
    """
    held = expert_weights(name, module)
    if any(w.is_meta for ws in held.values() for w in ws):
        raise TargetError(f"{name} is on the meta device: load its weights first")
    weights = {role: ws if isinstance(ws, Tensor) else torch.stack(list(ws)) for role, ws in held.items()}
    for projection, w in weights.items():
        finite = torch.isfinite(w).flatten(1).all(1)
        if not bool(finite.all()):
            bad = (~finite).nonzero().flatten().tolist()
            raise NonFinite(f"{name}: {projection} of expert {', '.join(map(str, bad))} holds NaN or infinity")
    return Experts(weights, activation(name, module))


def activation(name: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The activation function of a layer's experts."""
    source = module[0] if isinstance(module, nn.ModuleList) else module
    act = getattr(source, "act_fn", getattr(source, "act", None))
    if act is None:
        raise TargetError(f"{name}: {type(source).__name__} has no act_fn; its activation is not known")
    return act


def _listed(name: str, experts: nn.ModuleList) -> dict[str, Tensor | Sequence[Tensor]]:
    for names in _NAMES:
        layers: list[list[Any]] = [[getattr(expert, n, None) for n in names] for expert in experts]
        if not all(isinstance(layer, nn.Linear) and layer.bias is None for row in layers for layer in row):
            continue
        weights = {role: [row[i].weight.detach() for row in layers] for i, role in enumerate(("gate", "up", "down"))}
        for role, ws in weights.items():
            if len({w.shape for w in ws}) > 1:
                raise ValueError(
                    f"{name}: experts differ in the shape of {role}: {sorted({tuple(w.shape) for w in ws})}"
                )
        return {**weights}
    known = " or ".join(", ".join(names) for names in _NAMES)
    raise TargetError(f"{name}: a list of {type(experts[0]).__name__} without linear layers {known} (and no bias)")


def _fused(name: str, module: nn.Module) -> dict[str, Tensor | Sequence[Tensor]]:
    """From 3-D parameters, gate and up in one or up alone, outputs x inputs or transposed."""
    kind = type(module).__name__
    params = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
    gated = "gate_up_proj" in params
    first, down = params.get("gate_up_proj" if gated else "up_proj"), params.get("down_proj")
    reasons = {
        "no 3-D gate_up_proj (or up_proj) and down_proj": first is None
        or down is None
        or not first.ndim == down.ndim == 3,
        "experts without weights": first is not None and down is not None and len(first) != len(down),
        "a forward without top_k_index": "top_k_index" not in inspect.signature(module.forward).parameters,
        "biases": getattr(module, "has_bias", False) or any(n.endswith("bias") for n in params),
        "interleaved gate and up": not getattr(module, "is_concatenated", True),
        "a norm after each expert": getattr(module, "has_post_expert_norm", False),
        "a gate of its own": getattr(type(module), "_apply_gate", _plain_gate).__name__
        not in ("_default_apply_gate", "_plain_gate"),
    }
    for reason, applies in reasons.items():
        if applies:
            has = ", ".join(f"{n} {tuple(p.shape)}" for n, p in params.items()) or "no parameters"
            raise TargetError(f"{name}: {kind} has {reason}, which cannot be compressed; it holds {has}")
    assert first is not None
    assert down is not None
    twice = 2 if gated else 1
    plain = first.shape[1] == twice * down.shape[2] and first.shape[2] == down.shape[1]
    turned = first.shape[2] == twice * down.shape[1] and first.shape[1] == down.shape[2]
    transposed = getattr(module, "is_transposed", turned if plain != turned else None)
    if transposed is None:
        raise TargetError(
            f"{name}: {kind}'s {tuple(first.shape)} and {tuple(down.shape)} could be outputs x inputs or transposed; "
            "set is_transposed on the module"
        )
    if transposed:
        first, down = first.mT, down.mT
    parts = dict(zip(("gate", "up"), first.chunk(2, 1), strict=True)) if gated else {"up": first}
    return {**parts, "down": down}


def _plain_gate() -> None:
    """Stands for a class without a gate of its own."""


def routed(chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert that was chosen (t x k), with the tokens and the places among their k where it was."""
    for e in chosen.unique().tolist():
        token, place = torch.where(chosen == e)
        yield e, token, place
