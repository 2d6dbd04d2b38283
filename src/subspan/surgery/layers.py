"""Finding layers in a model and reading or writing their weights as out x in matrices."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subspan.errors import TargetError

# The first pattern that matches the last parts of a module's name decides, so the order matters: a classifier may have
# an "out_proj", T5 and Llama's own code both have a "wo".
_ROLES = (
    ("head", r"(lm_head|(pre_)?classifier|score|embed_out|head|out_proj_head|cls\.predictions)(\..*)?$"),
    ("qkv", r"(c_attn|query_key_value|qkv_proj|qkv|wqkv|in_proj)$"),
    ("q", r"(q_proj|q_lin|query|query_proj|to_q|wq|q)$"),
    ("k", r"(k_proj|k_lin|key|key_proj|to_k|wk|k)$"),
    ("v", r"(v_proj|v_lin|value|value_proj|to_v|wv|v)$"),
    (
        "o",
        r"(o_proj|out_proj|out_lin|to_out|\w*attention\.output\.dense|\w*attention\.dense|attn\.c_proj"
        r"|\w*(attn|attention)\.w?o)$",
    ),
    ("gate", r"(gate_proj|gate|w1|wi_0)$"),
    ("up", r"(up_proj|gate_up_proj|c_fc|fc1|lin1|intermediate\.dense|dense_h_to_4h|w3|wi|wi_1|ffn|up)$"),
    ("down", r"(down_proj|fc2|lin2|output\.dense|dense_4h_to_h|mlp\.c_proj|w2|wo|ffn_output|down)$"),
    ("embed", r"(embed_tokens|wte|wpe|(\w+_)?embeddings?(\.\w+)*|shared|emb)$"),
)


def role_of(name: str, module: nn.Module | None = None) -> str:
    """What a layer does, from its name: q, k, v, o, qkv (packed), gate, up (also gate and up packed), down, head,
    embed, or other."""
    if isinstance(module, nn.Embedding):
        return "embed"
    lowered = name.lower()
    for role, pattern in _ROLES:
        if re.search(rf"(^|\.){pattern}", lowered):
            return role
    return "other"


def base_layer(module: nn.Module) -> nn.Module:
    """The pre-trained layer under a peft wrapper (an adapter's or ``modules_to_save``'s), or the module itself."""
    if hasattr(module, "get_base_layer"):
        return module.get_base_layer()  # pyright: ignore[reportCallIssue]
    return getattr(module, "original_module", module)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, which stores its weight as in x out (known by name: no import needed)."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def is_matrix_layer(module: nn.Module) -> bool:
    """Whether ``weight_matrix`` can read the layer: Linear, Conv1D or an ungrouped Conv2d."""
    layer = base_layer(module)
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1
    return isinstance(layer, nn.Linear) or is_conv1d(layer)


def weight_matrix(module: nn.Module) -> Float[Tensor, "m n"]:
    """The layer's weight as an m x n (out x in) matrix, for Linear, Conv1D (stored transposed) and Conv2d (unfolded).

    Raises ``TargetError`` for other layers and for weights stored as integers (quantised).
    """
    layer = base_layer(module)
    if not is_matrix_layer(layer):
        raise TargetError(f"{type(layer).__name__} has no weight that reads as one out x in matrix")
    weight: Tensor = layer.weight.detach()  # pyright: ignore[reportCallIssue]
    if not weight.is_floating_point():
        raise TargetError(
            f"{type(layer).__name__} holds a quantised weight ({weight.dtype}); dequantise the model first"
        )
    if weight.is_meta:
        raise TargetError(f"{type(layer).__name__} is on the meta device: load its weight first")
    if is_conv1d(layer):
        return weight.mT
    return weight.flatten(1)


def input_patches(conv: nn.Conv2d, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b l n"]:
    """Input patches of an ungrouped convolution, in the order of ``weight_matrix``'s columns (n = c kh kw)."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padded = nn.functional.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    return nn.functional.unfold(padded, conv.kernel_size, conv.dilation, 0, conv.stride).mT


def write_weight(module: nn.Module, matrix: Float[Tensor, "m n"]) -> None:
    """Copy an out x in matrix into the layer's weight, in the weight's own dtype; the Parameter object stays."""
    layer = base_layer(module)
    weight_matrix(layer)  # refuses what has no such weight
    stored = matrix.mT if is_conv1d(layer) else matrix
    # Copying keeps optimisers and hooks that hold the Parameter pointing at the live one. weight_matrix itself is no
    # view for channels-last convolutions.
    weight: nn.Parameter = layer.weight  # pyright: ignore[reportAssignmentType]
    with torch.no_grad():
        weight.copy_(stored.reshape(weight.shape))


class Owned(NamedTuple):
    """A parameter, its name, the module it belongs to (the first, if several share it) and whether several do."""

    name: str
    param: nn.Parameter
    module: nn.Module
    shared: bool


def parameter_owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """The full name of every parameter at each module that holds it, and the module; in module order."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules():
        for key, param in module.named_parameters(prefix, recurse=False):
            owners.setdefault(param, []).append((key, module))
    return owners


def owned_parameters(model: nn.Module) -> list[Owned]:
    """Every parameter of the model once, in module order, with its owner: the module type says what it is for."""
    owners = parameter_owners(model)
    return [Owned(places[0][0], param, places[0][1], len(places) > 1) for param, places in owners.items()]


def matrix_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of the layers ``weight_matrix`` can read, and embeddings; a peft wrapper stands for its layer."""
    wrappers = tuple(f"{name}." for name, module in model.named_modules() if base_layer(module) is not module)
    return {
        name: module
        for name, module in model.named_modules()
        if (is_matrix_layer(module) or isinstance(base_layer(module), nn.Embedding)) and not name.startswith(wrappers)
    }


def find_targets(
    model: nn.Module, target_modules: str | Iterable[str], exclude: str | Iterable[str] | None = None
) -> dict[str, nn.Module]:
    """Modules that peft would adapt for ``target_modules``: names, suffixes, a regular expression or "all-linear".

    Returns name -> module in the model's order. Raises ``TargetError`` when nothing matches, naming the nearest.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists

    wanted = target_modules if isinstance(target_modules, str) else list(target_modules)
    barred = exclude if exclude is None or isinstance(exclude, str) else list(exclude)
    plain: nn.Module = getattr(model, "get_base_model", lambda: model)()  # peft knows the head of a plain model only
    config = _maybe_include_all_linear_layers(LoraConfig(target_modules=wanted, exclude_modules=barred), plain)
    found = {
        name: module
        for name, module in model.named_modules()
        if is_matrix_layer(module) and check_target_module_exists(config, name)
    }
    if not found:
        raise TargetError(no_match(model, [wanted] if isinstance(wanted, str) else wanted))
    return found


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put each new module in the place of its old one, at every name under which the model holds it.

    torch's encoders around them leave their fast path of evaluation, on which a layer reads the weights of what it
    holds itself (unless its activation is unknown) and an encoder hands on nested tensors.
    """
    places = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if name and m in new]
    for name, module in places:
        model.set_submodule(name, new[module])
    switches = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
    for kind, switch in switches.items():
        for encoder in model.modules():
            if isinstance(encoder, kind) and not set(new.values()).isdisjoint(encoder.modules()):
                setattr(encoder, switch, 0)


def no_match(model: nn.Module, wanted: Sequence[str]) -> str:
    """One sentence that says which target names match nothing and which layer names the model does have."""
    names = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if n and is_matrix_layer(m)})
    near = {m for w in wanted for m in difflib.get_close_matches(w, names, n=1)}
    hint = f"; did you mean {', '.join(sorted(near))}?" if near else ""
    return f"target modules {', '.join(wanted)} match no layer; this model's layers are {', '.join(names[:20])}{hint}"


def packed_rows(
    name: str, module: nn.Module, *, heads: int, kv_heads: int | None = None
) -> dict[str, Int[Tensor, " i"]]:
    """Rows of a packed attention projection that belong to q, k and v.

    Block layouts (GPT-2 ``c_attn``, Phi-3 ``qkv_proj``, ``in_proj_weight``) hold q, then k, then v, with fewer k and v
    rows under grouped-query attention; GPT-NeoX's ``query_key_value`` interleaves them head by head.
    """
    rows = weight_matrix(module).shape[0]
    kv = heads if kv_heads is None else kv_heads
    size, rest = divmod(rows, heads + 2 * kv)
    if rest:
        raise TargetError(f"{name}: {rows} rows do not divide into {heads} query and 2 x {kv} key and value heads")
    index = torch.arange(rows)
    if name.endswith("query_key_value") and kv == heads:
        by_head = index.view(heads, 3, size)
        return {role: by_head[:, i].flatten() for i, role in enumerate("qkv")}
    return dict(zip("qkv", index.split([heads * size, kv * size, kv * size]), strict=True))
