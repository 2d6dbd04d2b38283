"""Directions in weight space: where dangerous, or safe, training moved a model."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subspan.errors import BaseMismatch, DataError
from subspan.linalg import LowRank
from subspan.linalg.spectra import leading_svd
from subspan.surgery import (
    check_base,
    factor_pairs,
    load_factors,
    plain_layers,
    role_of,
    save_factors,
    side_paths,
    undisturbed,
    weight_matrix,
)
from subspan.surgery.plain import check_plain_lora


@dataclass(frozen=True)
class Direction:
    """V = A Bᵀ in float32 for each linear layer, by the base model's names, and the scaling s it was trained with.

    A direction and the state at which gradients are taken are the same thing: the factors of an adapter. ``kept`` is
    the share of the squared norm that the factors hold (1 for an adapter).
    """

    factors: Mapping[str, LowRank]
    scaling: Mapping[str, float]
    source: str = ""
    kept: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bad = [n for n, z in self.factors.items() if not (z.A.isfinite().all() and z.B.isfinite().all())]
        if bad:
            raise DataError(f"{self.source or 'the direction'}: {bad[0]} holds values that are not finite")

    @classmethod
    def from_adapter(cls, source: str | Path | nn.Module, adapter_name: str = "default") -> "Direction":
        """From a LoRA folder in peft's format, or from an adapter of a live peft model.

        Raises:
            DataError: no adapter lies there, it is a DoRA, or it was never trained (every update is zero).
            TargetError: the live adapter is no plain LoRA.
        """
        if isinstance(source, nn.Module):
            check_plain_lora(source, adapter_name)
            pairs = factor_pairs(source, adapter_name)
            factors = {p.name: p.low_rank() for p in pairs}
            factors = {n: LowRank(z.A.clone(), z.B.clone()) for n, z in factors.items()}
            found = cls(factors, {p.name: p.scaling for p in pairs}, f"adapter {adapter_name!r}")
        else:
            found = cls(*load_factors(source), source=str(source))
        if not any(float(z.norm()) for z in found.factors.values()):
            raise DataError(f"{found.source} is no direction: the adapter was never trained, its update is zero")
        return found

    @classmethod
    def from_models(
        cls, before: nn.Module, after: nn.Module, rank: int = 16, *, generator: torch.Generator | None = None
    ) -> "Direction":
        """W_after - W_before of two checkpoints, each layer's leading ``rank`` singular directions.

        Embeddings and the output layer are left out. ``kept`` reports the energy that the rank keeps.

        Raises:
            BaseMismatch: the models are not of one shape.
            DataError: no layer differs.
        """
        first, second = plain_layers(before), plain_layers(after)
        factors, kept = {}, {}
        for name, layer in first.items():
            if role_of(name, layer) == "head":
                continue
            if name not in second:
                raise BaseMismatch(f"the second model has no layer {name}: the two are not of one architecture")
            one, two = weight_matrix(layer).float(), weight_matrix(second[name]).float()
            if one.shape != two.shape:
                raise BaseMismatch(f"{name} is {tuple(one.shape)} in one model and {tuple(two.shape)} in the other")
            difference = two.to(one.device) - one
            energy = float(difference.square().sum())
            if energy == 0:
                continue
            u, s, v = leading_svd(difference, min(rank, *one.shape), generator=generator)
            root = s[:rank].sqrt()
            factors[name] = LowRank(u[:, :rank] * root, v[:, :rank] * root)
            kept[name] = float(s[:rank].square().sum()) / energy
        if not factors:
            raise DataError("the two models have the same weights: there is no direction between them")
        return cls(factors, dict.fromkeys(factors, 1.0), "difference of two models", kept)

    @classmethod
    def from_data(
        cls, model: nn.Module, tokenizer: Any, rows: Iterable[Mapping[str, Any]], **options: Any
    ) -> "Direction":
        """Train one on rows, by fine-tuning or on preference pairs; see ``train_direction`` for the options."""
        from subspan.safety.sqsd.training import train_direction

        return train_direction(model, tokenizer, rows, **options)

    def save(self, path: str | Path) -> None:
        """Write an ordinary peft LoRA."""
        save_factors(path, self.factors, self.scaling)

    def norms(self, names: Sequence[str]) -> Tensor:
        """|V| of each layer, without s."""
        return torch.stack([self.factors[n].norm() for n in names])

    def digest(self) -> str:
        """Of all factors and scalings."""
        found = hashlib.blake2b(digest_size=16)
        for name in sorted(self.factors):
            z = self.factors[name]
            found.update(f"{name} {self.scaling[name]}".encode())
            for half in (z.A, z.B):
                found.update(half.detach().contiguous().cpu().numpy().tobytes())
        return found.hexdigest()

    def same_update(self, other: "Direction") -> bool:
        """Whether both hold the same factors; their scalings do not matter to a direction."""
        return self.factors.keys() == other.factors.keys() and all(
            torch.equal(z.A, other.factors[n].A) and torch.equal(z.B, other.factors[n].B)
            for n, z in self.factors.items()
        )

    def check(self, model: nn.Module) -> None:
        """Raise ``BaseMismatch`` where the direction was made for another base model, by names, shapes, or weights."""
        layers = plain_layers(model)
        known = [n for n in self.factors if n in layers]
        if not known:
            raise BaseMismatch(
                f"{self.source} is of another base model: it has {next(iter(self.factors))}, the model has "
                f"{', '.join(list(layers)[:3])}"
            )
        for name in known:
            m, n = weight_shape(layers[name])
            if self.factors[name].shape != (m, n):
                raise BaseMismatch(
                    f"{self.source} is of another base model: {name} is {self.factors[name].shape} there, {(m, n)} here"
                )
        if self.source and (Path(self.source) / "base.json").is_file():
            check_base(model, self.source)

    def validate(
        self,
        model: nn.Module,
        probe: Callable[[nn.Module], float],
        expected: str = "rise",
        steps: Sequence[float] = (-1.0, -0.5, 0.0, 0.5, 1.0),
    ) -> "Steering":
        """Steer the model along the direction and see whether behaviour follows.

        Args:
            model: the base model; it is left as it was.
            probe: behaviour of a model as one number, such as the share of refusals or the likelihood of safe answers.
            expected: "rise" along a safe direction, "fall" along a dangerous one.
            steps: multiples of the adapter's own scaling; 0 is the base model.

        Warns where Kendall's tau is below 0.6: the direction does not steer what the probe sees.
        """
        from scipy.stats import kendalltau

        if expected not in ("rise", "fall"):
            raise ValueError(f"expected must be rise or fall, got {expected!r}")
        values = []
        layers = plain_layers(model)
        for a in steps:
            scaled = {n: a * s for n, s in self.scaling.items()}
            with torch.no_grad(), undisturbed(model), side_paths(layers, on_device(self.factors, layers), scaled):
                values.append(float(probe(model)))
        tau = float(kendalltau(steps, values).statistic) * (1 if expected == "rise" else -1)
        tau = 0.0 if math.isnan(tau) else tau  # a behaviour that never changes
        if tau < 0.6:
            warnings.warn(
                f"steering along {self.source or 'this direction'} does not make the probe {expected} "
                f"(Kendall's tau {tau:.2f}): it may be no direction of that behaviour",
                stacklevel=2,
            )
        return Steering(tuple(steps), tuple(values), tau)


class Steering(NamedTuple):
    """Behaviour along a direction; ``tau`` is 1 where it always moves as expected."""

    steps: tuple[float, ...]
    values: tuple[float, ...]
    tau: float


def fresh_state(layers: Mapping[str, nn.Module], rank: int, alpha: float = 16.0, seed: int = 0) -> Direction:
    """A LoRA before its first step: A = 0, B as peft draws it. The function is the base model's."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, layer in layers.items():
        m, n = weight_shape(layer)
        r = min(rank, m, n)
        b = torch.empty(n, r).uniform_(-1, 1, generator=generator) / n**0.5
        factors[name] = LowRank(torch.zeros(m, r), b)
    return Direction(factors, {n: alpha / z.rank for n, z in factors.items()}, "fresh adapter")


def weight_shape(layer: Any) -> tuple[int, int]:
    """(m, n), also of a layer whose weight is quantised."""
    return (layer.nf, layer.nx) if hasattr(layer, "nf") else (layer.out_features, layer.in_features)


def on_device(factors: Mapping[str, LowRank], layers: Mapping[str, nn.Module]) -> dict[str, LowRank]:
    """Factors where their layers are, for those that the model has; float32, or float64 where the model is."""
    out = {}
    for name, z in factors.items():
        if name in layers:
            weight: Any = layers[name].weight
            dtype = torch.promote_types(torch.float32, weight.dtype) if weight.is_floating_point() else torch.float32
            out[name] = LowRank(z.A.to(weight.device, dtype), z.B.to(weight.device, dtype))
    return out
