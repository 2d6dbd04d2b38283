"""Which parameters of a model Muon should train, and optimisers made from that."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from subspan.errors import TargetError
from subspan.optim.muon import MuonAdamW, Scale, muon_scale
from subspan.surgery import Owned, base_layer, is_matrix_layer, owned_parameters, role_of

_LORA_FACTOR = re.compile(r"\.lora_(embedding_)?[AB](\.|$)")
_ROUTER = re.compile(r"(^|\.)(router|gate|gating)(\.|$)")
_EMBEDDING_NAME = re.compile(r"(^|[._])(embed\w*|wte|wpe|pos_emb\w*|cls_token|class_token)(\.|$)")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes, and why. ``fan_in_fan_out``: the weight is stored in x out."""

    name: str
    param: nn.Parameter
    use_muon: bool
    reason: str
    fan_in_fan_out: bool = False


def route_parameters(
    model: nn.Module, *, lora_everywhere: bool = True, adamw_pattern: str | None = None
) -> list[Route]:
    """Send each trainable parameter to Muon or AdamW: by the type of its module first, by its name second.

    Muon trains LoRA factors and the weights of Linear, Conv and attention layers. AdamW trains embeddings, the output
    head, routers, norms, biases, DoRA magnitudes, ``modules_to_save`` copies, tied weights and whatever else is no
    layer's weight matrix.

    Args:
        lora_everywhere: also send the LoRA factors of embeddings and of the head to Muon (False: to AdamW, as the
            paper's Llama scripts do).
        adamw_pattern: a regular expression; parameters whose name it matches anywhere go to AdamW. Use it for an
            output head with a name of your own.

    Raises ``TargetError`` for a quantised weight that is set trainable.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    routes = []
    for owned in owned_parameters(model):
        if not owned.param.requires_grad:
            continue
        if not owned.param.is_floating_point() or hasattr(owned.param, "quant_state"):
            raise TargetError(
                f"{owned.name} is a quantised weight set trainable; freeze it and train an adapter instead"
            )
        if adamw_pattern is not None and re.search(adamw_pattern, owned.name):
            use_muon, reason = False, "adamw_pattern"
        else:
            use_muon, reason = _route(model, owned, output, lora_everywhere)
        transposed = type(owned.module).__name__ == "Conv1D" and not isinstance(owned.module, nn.Conv1d)
        routes.append(Route(owned.name, owned.param, use_muon, reason, use_muon and transposed))
    return routes


def _route(model: nn.Module, owned: Owned, output: nn.Module | None, lora_everywhere: bool) -> tuple[bool, str]:
    name, param, module, shared = owned
    factor = _LORA_FACTOR.search(name)
    if ".modules_to_save." in name:
        return False, "modules_to_save"
    if param.ndim < 2:
        return False, "vector or scalar"
    if factor:
        layer_name = name[: factor.start()]
        layer = base_layer(model.get_submodule(layer_name))
        if not lora_everywhere and (_is_embedding(layer_name, layer) or _is_head(layer_name, layer, output)):
            return False, "LoRA factor of an embedding or head"
        return True, "LoRA factor"
    if shared:
        return False, "tied weight"
    path = name.rpartition(".")[0]
    if isinstance(module, nn.MultiheadAttention):
        return True, "attention projection"
    if _is_embedding(path, module):
        return False, "embedding"
    if not (is_matrix_layer(module) or isinstance(module, nn.modules.conv._ConvNd)):
        return False, f"not the weight matrix of a layer ({type(module).__name__})"
    if _is_head(path, module, output):
        return False, "output head"
    if _ROUTER.search(path) or "Router" in type(module).__name__:
        return False, "router"
    return True, "hidden weight matrix"


def _is_embedding(path: str, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding) or bool(_EMBEDDING_NAME.search(path.lower()))


def _is_head(path: str, layer: nn.Module, output: nn.Module | None) -> bool:
    return (output is not None and layer is base_layer(output)) or role_of(path) == "head"


def build_muon_groups(
    model: nn.Module,
    lr: float = 5e-4,
    weight_decay: float = 0.0,
    *,
    scale: Scale = "match_rms",
    lora_everywhere: bool = True,
    adamw_pattern: str | None = None,
    report: Callable[[str], Any] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for ``MuonAdamW``: "muon", "adamw" and, for vectors, "adamw_no_decay".

    Every trainable parameter is in exactly one group, with its name. ``report=print`` shows each one's shape, group,
    scale and the reason. The other options are those of ``route_parameters``. Raises ``ValueError`` if nothing is
    trainable.
    """
    routes = route_parameters(model, lora_everywhere=lora_everywhere, adamw_pattern=adamw_pattern)
    groups: dict[str, dict[str, Any]] = {}
    lines = []
    for r in routes:
        label = "muon" if r.use_muon else ("adamw" if r.param.ndim >= 2 else "adamw_no_decay")
        key = f"{label}_fan_in_fan_out" if r.fan_in_fan_out else label
        group = groups.setdefault(key, {"params": [], "name": key, "lr": lr, "use_muon": r.use_muon})
        group["weight_decay"] = 0.0 if label == "adamw_no_decay" else weight_decay
        if r.use_muon:
            group |= {"scale": scale, "fan_in_fan_out": r.fan_in_fan_out}
        group["params"].append((r.name, r.param))
        factor = f" x {muon_scale(r.param.shape, scale, r.fan_in_fan_out):.3g}" if r.use_muon else ""
        lines.append(f"{r.name}  {tuple(r.param.shape)}  {key}{factor}  ({r.reason})")
    placed = [id(p) for group in groups.values() for _, p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if not placed:
        raise ValueError("the model has no trainable parameter; add an adapter or set requires_grad")
    if len(placed) != len(set(placed)) or set(placed) != trainable:
        raise RuntimeError("routing lost or doubled a parameter; please report this model")
    if report is not None:
        report("\n".join(lines))
    return list(groups.values())


def muon_from_peft(model: nn.Module, lr: float = 5e-4, weight_decay: float = 0.0, **options: Any) -> MuonAdamW:
    """``MuonAdamW`` on the trainable parameters of a peft model (or any other), routed by ``build_muon_groups``.

    ``options`` are those of either. Keep the warm-up of your schedule: LoRA starts from B = 0, so the first gradients
    of A are zero or tiny, and Muon brings them to full size.
    """
    routing = {k: options.pop(k) for k in ("scale", "lora_everywhere", "adamw_pattern", "report") if k in options}
    return MuonAdamW(build_muon_groups(model, lr, weight_decay, **routing), lr, weight_decay, **options)


def optimizer_cls_and_kwargs(**kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """For ``transformers.Trainer(..., optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(lr=5e-4))``.

    The Trainer builds the optimiser itself, once the model is where it belongs. ``kwargs`` are ``muon_from_peft``'s.
    """
    return (lambda: muon_from_peft), kwargs
