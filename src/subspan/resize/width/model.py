"""Growing and folding whole networks in memory."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subspan.errors import FunctionChanged
from subspan.resize.width.axes import Growth, Layout
from subspan.resize.width.optimizers import lr_multipliers
from subspan.resize.width.plan import Plan, plan, rebuilt, state, unwrapped, wide_plan
from subspan.resize.width.tiling import expand_tensor, fold_tensor

__all__ = ["WidthReport", "expand_width", "fold_width", "trap_projected"]


@dataclass(frozen=True)
class WidthReport:
    """What ``expand_width`` did.

    Attributes:
        max_abs_err: largest difference of the two networks' outputs on the probe; None if none was compared.
        max_rel_err: the same, relative to the largest output.
        axis_table: one line per tensor: name, seed and wide shape, axes with their factors, noise in dB.
        layouts: axes of every tensor of the wide network.
        noise_db: of the symmetry-breaking noise; None for an exact clone.
    """

    max_abs_err: float | None
    max_rel_err: float | None
    axis_table: list[dict[str, Any]]
    layouts: Mapping[str, Layout]
    noise_db: float | None

    def lr_multipliers(self, optimizer: str = "adamw") -> dict[str, float]:
        """Name -> factor on the seed-equivalent learning rate; see ``suggest_lr``."""
        return {name: lr_multipliers(layout, optimizer) for name, layout in self.layouts.items()}

    def table(self) -> str:
        """The axis table as text, equal layers together."""
        return axis_text(self.axis_table)


def axis_table(found: Plan) -> list[dict[str, Any]]:
    """One line per tensor of the wide network."""
    return [
        {
            "name": name,
            "seed": list(layout.seed_shape),
            "wide": list(layout.wide_shape),
            "axes": layout.describe(),
            "noise_db": found.noise_db if found.noisy(layout) else None,
        }
        for name, layout in found.written().items()
    ]


def axis_text(table: list[dict[str, Any]]) -> str:
    """The lines with layer numbers replaced by a star, equal ones once, with their number."""
    groups: dict[tuple[str, ...], int] = {}
    for line in table:
        name = ".".join("*" if part.isdigit() else part for part in line["name"].split("."))
        sizes = " -> ".join("x".join(map(str, line[size])) or "scalar" for size in ("seed", "wide"))
        noise = "exact" if line["noise_db"] is None else f"{line['noise_db']:g} dB"
        key = (name, line["axes"], sizes, noise)
        groups[key] = groups.get(key, 0) + 1
    lines = [("tensor", "axes", "shape", "noise", ""), *((*key, f"{n} times") for key, n in groups.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def expand_width(
    model: nn.Module,
    factor: int = 2,
    ffn_factor: int | float | None = None,
    *,
    scheme: str = "clone",
    noise_db: float | None = 40.0,
    noise: str = "row",
    untie: bool = True,
    split: str = "even",
    generator: torch.Generator | None = None,
    verify: Any = True,
) -> tuple[nn.Module, WidthReport]:
    """A wider network that computes the same: units are cloned, and clones share what they send on.

    Source: HyperCloning (arXiv 2409.12903) for the cloning rules, Net2Net (arXiv 1511.05641) for fractional
    ``ffn_factor``; section 3 of the specification for the rest.

    Args:
        model: a transformers network of a known family, an ``nn.Sequential`` of linear layers, norms and activations,
            or a network described by ``register_axes``. Wrappers of torch.compile and DDP are taken off. It stays as
            it is.
        factor: of the residual width and the number of heads (and of every hidden width of a chain).
        ffn_factor: of the feed-forward width; ``factor`` by default. A fraction clones single units at random.
        scheme: "clone", or "diagonal" (I_n (x) W), which needs equal factors everywhere.
        noise_db: signal-to-noise ratio of the symmetry-breaking noise; None for exact clones, which no optimiser that
            treats clones alike can ever tell apart.
        noise: "row", or "balanced", which is preserved in the backward pass too and so breaks nothing (for teaching).
        untie: give a tied head a table of its own; False keeps the tie and scales the norm before the head.
        split: shares of clones drawn for a fractional ``ffn_factor``: "even", or "random" (Dirichlet).
        generator: of noise and draws; equal seeds give equal networks, in whatever order tensors are visited. None
            is a fixed seed.
        verify: compare the outputs of both on a batch of inputs (a tensor, or keyword arguments), on random ones
            (True), or not at all (False).

    Returns:
        The wide network and a report.

    Raises:
        ValueError: the factors cannot be, no layer can take the noise, a tensor has no axis rule, weights are
            quantised, shared or not finite, or the network carries an adapter.
        FunctionChanged: the outputs differ by more than rounding.
    """
    model = unwrapped(model)
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device)) if generator is not None else 0
    growth = Growth.of(factor, ffn_factor, split, seed)
    found = plan(model, growth, scheme=scheme, noise_db=noise_db, noise=noise, untie=untie)
    with torch.no_grad():
        big = rebuilt(found, found.expanded())
    errors = compare(model, big, verify, noisy=noise_db is not None) if verify is not False else (None, None)
    return big, WidthReport(*errors, axis_table(found), found.written(), noise_db)


@torch.no_grad()
def fold_width(model: nn.Module, factor: int = 2, ffn_factor: int | float | None = None) -> nn.Module:
    """The seed-size network that a wide one represents by its part inside the trap: n times the mean of the blocks.

    ``fold_width(expand_width(m)[0])`` computes what m does. Sums over input clones, means over all others.

    Args:
        model: a network that was grown, trained or not.
        factor: as it was grown.
        ffn_factor: as it was grown; a whole number.

    Raises:
        ValueError: as for ``expand_width``, and for widths that are no multiples.
    """
    found = wide_plan(model, factor, ffn_factor)
    tensors = state(found.model)
    small = {name: fold_tensor(tensors[name].detach(), layout) for name, layout in found.written().items()}
    return rebuilt(found, ((name, x.clone()) for name, x in small.items()), wide=False)


@torch.no_grad()
def trap_projected(model: nn.Module, factor: int = 2, ffn_factor: int | float | None = None) -> nn.Module:
    """A copy of a wide network with every tensor replaced by the clones of its fold.

    It computes what ``fold_width(model)`` does, in the wide shape. Arguments and errors as there.
    """
    model = unwrapped(model)
    out = copy.deepcopy(model)
    tensors = state(out)
    for name, projected in trap_tensors(model, factor, ffn_factor).items():
        tensors[name].copy_(projected)
    return out


@torch.no_grad()
def trap_tensors(model: nn.Module, factor: int, ffn_factor: int | float | None = None) -> dict[str, Tensor]:
    """Name -> clones of the fold of every tensor of a wide network."""
    found = wide_plan(model, factor, ffn_factor)
    tensors = state(model)
    return {
        name: expand_tensor(fold_tensor(tensors[name].detach(), layout), layout)
        for name, layout in found.written().items()
    }


# --------------------------------------------------------------------------------------------------------------- parity

# Largest relative difference of outputs that rounding explains, without and with noise, by dtype.
TOLERANCE = {
    torch.float64: (1e-6, 1e-6),  # transformers' norms compute in float32
    torch.float32: (1e-5, 2e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (1e-1, 1e-1),  # SmolLM2's own outputs move by 0.04 when it is rounded to bfloat16
}


@torch.no_grad()
def compare(seed: nn.Module, big: nn.Module, inputs: Any = True, *, noisy: bool) -> tuple[float | None, float | None]:
    """Largest absolute and relative difference of outputs; (None, None) where no inputs can be made up.

    Raises ``FunctionChanged`` when it is more than rounding.
    """
    batch = _probe(seed) if inputs is True else inputs
    if batch is None:
        return None, None
    modes = [(m, m.training) for net in (seed, big) for m in net.modules()]
    try:
        a, b = (_output(net.eval(), batch).double() for net in (seed, big))
        if a.shape != b.shape:  # the residual stream itself, cloned
            a = a.repeat(*[1] * (a.ndim - 1), b.shape[-1] // a.shape[-1])
    finally:
        for module, training in modes:
            module.training = training
    worst = float((a - b).abs().max())
    relative = worst / max(float(a.abs().max()), torch.finfo(torch.float32).tiny)
    dtype = next(p.dtype for p in seed.parameters() if p.is_floating_point())
    allowed = TOLERANCE.get(dtype, TOLERANCE[torch.float32])[noisy]
    if not relative <= allowed:
        raise FunctionChanged(
            f"the wide network's outputs differ by {relative:.1e} of the largest, more than {allowed:.0e}: an axis "
            "rule is wrong, or the network mixes units in a way that no rule describes"
        )
    return worst, relative


def _output(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch) if isinstance(batch, Mapping) else model(batch)
    if isinstance(out, Tensor):
        return out
    return next((out[key] for key in ("logits", "last_hidden_state") if key in out), out[0])


def _probe(model: nn.Module) -> Any:
    """Random inputs for a network that says what it takes."""
    generator = torch.Generator().manual_seed(0)
    config: Any = getattr(model, "config", None)
    p = next(model.parameters())
    if hasattr(config, "vocab_size"):
        tokens = min(16, getattr(config, "max_position_embeddings", 16) or 16)
        ids = torch.randint(config.vocab_size, (2, tokens), generator=generator)
        return {"input_ids": ids.to(p.device)}
    if hasattr(config, "image_size"):
        size = config.image_size
        pixels = torch.randn(2, config.num_channels, size, size, generator=generator)
        return {"pixel_values": pixels.to(p)}
    if isinstance(model, nn.Sequential) and isinstance(model[0], nn.Linear):
        return torch.randn(8, p.shape[1], generator=generator).to(p)
    return None
