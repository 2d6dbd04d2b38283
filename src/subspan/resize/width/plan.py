"""From a network to the layout of each of its tensors: what is known about it, and what is refused."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from subspan.resize.width.axes import (
    FFN,
    Family,
    Growth,
    Layout,
    Rule,
    Sizes,
    count,
    find_rule,
    gauge,
    seed_for,
)
from subspan.resize.width.families import family_of
from subspan.resize.width.tiling import add_noise, clone_counts, expand_tensor
from subspan.surgery import base_layer


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside torch.compile's, DDP's or DataParallel's wrapper."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # pyright: ignore[reportAssignmentType]
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


@dataclass(frozen=True)
class Plan:
    """The layouts of a network's tensors, by name (a tensor with two names has two), and how they are filled.

    Attributes:
        model: the network that was read.
        layouts: of parameters and persistent buffers.
        ties: name -> first name of the same parameter, for every further name.
        untie: the tied table becomes two.
    """

    model: nn.Module
    family: Family
    growth: Growth
    sizes: Sizes
    layouts: dict[str, Layout]
    ties: dict[str, str]
    untie: bool
    scheme: str = "clone"
    noise_db: float | None = None
    noise: str = "row"

    def written(self) -> dict[str, Layout]:
        """The tensors the wide network holds, by name; those that stay tied once."""
        return {name: layout for name, layout in self.layouts.items() if self.untie or name not in self.ties}

    def expanded(self) -> Iterator[tuple[str, Tensor]]:
        """One wide tensor after the other. Raises ``ValueError``, with the name, for NaN and infinite weights."""
        tensors = state(self.model)
        for name, layout in self.written().items():
            yield name, self.expand(tensors[name].detach(), layout)

    def expand(self, x: Tensor, layout: Layout) -> Tensor:
        if x.numel() and not torch.stack(torch.aminmax(x)).isfinite().all():  # one pass, no copy
            raise ValueError(f"{layout.name} holds NaN or Inf; a wide network would spread them to every unit")
        out = expand_tensor(x, layout, self.scheme)
        if self.noisy(layout):
            add_noise(out, layout, self.noise_db or 0.0, self.noise, seed_for(layout.name, self.growth.seed))
        return out.clone() if out is x else out

    def noisy(self, layout: Layout) -> bool:
        """Whether this tensor gets noise: hidden layers with cloned inputs do; tables, heads, norms, biases do not."""
        return self.noise_db is not None and layout.hidden and clone_counts(layout)[0][1] > 1

    def new_size(self, kind: str, old: int, wide: bool) -> int:
        """Of an axis (or its number of heads) in the wide network, or in the seed."""
        segment = self.sizes.segment(kind, old)
        return segment.wide if wide else segment.size

    def config(self, wide: bool = True) -> Any:
        """The configuration of the wide network, or of the seed."""
        read = self.sizes.config
        config: Any = copy.deepcopy(read)
        for kind, attribute in self.family.counts.items():
            setattr(config, attribute, self.new_size(kind, count(read, kind, attribute), wide))
        if self.untie:
            config.tie_word_embeddings = False
        return config


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under every name they have; shared, not copied."""
    return model.state_dict(keep_vars=True)


def layouts_of(model: nn.Module, growth: Growth, *, wide: bool = False) -> tuple[Family, Sizes, dict[str, Layout]]:
    """Family, sizes and layouts (without factors) of a network; ``wide`` says that it has grown already.

    Raises ``ValueError`` for tensors without a rule, with their names, and for shapes that do not fit the sizes.
    """
    if hasattr(model, "peft_config") or any(base_layer(m) is not m for m in model.modules()):
        raise ValueError("the network carries an adapter; merge it first (peft: model.merge_and_unload())")
    family = family_of(model)
    tensors, parameters = state(model), dict(model.named_parameters(remove_duplicate=False))
    for name, x in parameters.items():
        if hasattr(x, "quant_state") or not x.is_floating_point() or x.itemsize < 2:
            raise ValueError(f"{name} is quantised ({x.dtype}); load the network unquantised")
    sizes = Sizes(family, growth, getattr(model, "config", None) if family.counts else None, wide)
    layouts, missing = {}, []
    for name, x in tensors.items():
        rule = find_rule(family.rules, name, x.ndim)
        if name not in parameters and (x.ndim == 0 or not x.is_floating_point()):  # counters and masks
            rule = Rule((((1, "fixed"),),) * x.ndim)
        if rule is None:
            missing.append(name)
        else:
            layouts[name] = sizes.layout(name, tuple(x.shape), rule)
    if missing:
        raise ValueError(
            f"no axis rule for {', '.join(missing)} of {type(model).__name__}; add them with register_axes"
        )
    kinds = {s.kind for layout in layouts.values() for axis in layout.axes for s in axis}
    if growth.ffn_factor != growth.factor and kinds.isdisjoint(FFN):
        raise ValueError(f"ffn_factor is {growth.ffn_factor}, but no rule of {type(model).__name__} names an ffn axis")
    return family, sizes, layouts


def ties_of(model: nn.Module, layouts: dict[str, Layout]) -> dict[str, str]:
    """Further names of shared parameters that grow. Raises ``ValueError`` unless they are embedding and head."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    ties = {}
    for first, *more in names.values():
        for name in more:
            ends = {_fixed_end(layouts[n]) for n in (first, name)}
            grows = layouts[first].wide_shape != layouts[first].seed_shape
            if grows and ends != {"in", "out"}:
                raise ValueError(
                    f"{first} and {name} share one parameter; only an embedding and the head may (copy the module)"
                )
            ties[name] = first
    return ties


def _fixed_end(layout: Layout) -> str:
    """Which axis of a matrix is fixed: "in" for embeddings, "out" for heads."""
    if layout.inp is None or layout.out is None or layout.hidden:
        return ""
    return "in" if layout.axes[layout.inp][0].kind in ("vocab", "pos") else "out"


def plan(
    model: nn.Module,
    growth: Growth,
    *,
    scheme: str = "clone",
    noise_db: float | None = 40.0,
    noise: str = "row",
    untie: bool = True,
    wide: bool = False,
) -> Plan:
    """Everything that growing (or folding, ``wide``) needs to know. Raises ``ValueError`` for what cannot be done."""
    if scheme not in ("clone", "diagonal"):
        raise ValueError(f"scheme must be 'clone' or 'diagonal', got {scheme!r}")
    if noise not in ("row", "balanced"):
        raise ValueError(f"noise must be 'row' or 'balanced', got {noise!r}")
    if isinstance(noise_db, bool) or (noise_db is not None and not abs(noise_db) < float("inf")):
        raise ValueError(f"noise_db must be finite, or None for exact clones, got {noise_db}")
    family, sizes, plain = layouts_of(model, growth, wide=wide)
    ties = ties_of(model, plain)
    # A table that does not grow (a fixed embedding width, ffn_factor alone) stays tied.
    moving = {first for first in ties.values() if plain[first].wide_shape != plain[first].seed_shape}
    keeps = bool(moving) and not untie
    if keeps and (family.final_norm is None or not any(fnmatchcase(n, family.final_norm) for n in plain)):
        raise ValueError(
            "a tied embedding can be kept only before a final norm (pre-norm networks); this one has none: use "
            "untie=True, or leave out --keep-tie"
        )
    layouts = {name: gauge(layout, family, growth, tied=keeps) for name, layout in plain.items()}
    found = Plan(model, family, growth, sizes, layouts, ties, bool(moving) and untie, scheme, noise_db, noise)
    if noise_db is not None and growth.split == "even" and not any(map(found.noisy, layouts.values())):
        raise ValueError(
            "no layer of this network can take noise (it needs a cloned input, and an output that is no fixed axis), "
            "so clones would stay equal whatever trains them; noise_db=None, or --exact, grows it all the same"
        )
    return found


def wide_plan(model: nn.Module, factor: int, ffn_factor: int | float | None = None) -> Plan:
    """Of a network that was grown by these factors. A tie it still has was kept."""
    return plan(unwrapped(model), Growth.of(factor, ffn_factor), noise_db=None, untie=False, wide=True)


def rebuilt(found: Plan, tensors: Iterable[tuple[str, Tensor]], *, wide: bool = True) -> nn.Module:
    """A network of the wide (or the seed's) size that holds these tensors; parameters keep ``requires_grad``."""
    model = found.model
    if found.sizes.config is not None:
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):  # buffers such as RoPE's frequencies are computed
            new: Any = type(model)(found.config(wide))
        if hasattr(model, "generation_config"):
            new.generation_config = copy.deepcopy(model.generation_config)
    else:
        shared: dict[int, Any] = {id(p): p for p in model.parameters()}  # replaced below, so not copied
        new = copy.deepcopy(model, shared)
    old = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in tensors:
        _put(new, name, nn.Parameter(tensor, old[name].requires_grad) if name in old else tensor)
    if not found.untie:
        for name, first in found.ties.items():
            _put(new, name, new.get_parameter(first))
    if found.sizes.config is None:
        _set_sizes(new)
        if found.family.resize is not None:
            found.family.resize(new, lambda kind, old: found.new_size(kind, old, wide))
    return new.train(model.training)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)


def _set_sizes(model: nn.Module) -> None:
    """What torch's layers keep of their parameters' shapes."""
    for module in model.modules():
        layer: Any = module
        weight: Any = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        if isinstance(module, nn.Linear):
            layer.out_features, layer.in_features = weight.shape
        elif isinstance(module, nn.Embedding):
            layer.num_embeddings, layer.embedding_dim = weight.shape
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            layer.normalized_shape = tuple(weight.shape)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            layer.num_features = len(weight)
        elif isinstance(module, nn.modules.conv._ConvNd):
            layer.out_channels, layer.in_channels = weight.shape[0], weight.shape[1] * layer.groups
        elif isinstance(module, nn.PReLU):
            layer.num_parameters = len(weight)
