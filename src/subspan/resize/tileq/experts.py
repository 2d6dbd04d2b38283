"""Compressed experts as a module: buffers only, in the place of a model's own experts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subspan.resize.tileq.config import TileQConfig
from subspan.resize.tileq.factors import TileFactors
from subspan.resize.tileq.fit import Fit, fit_projection
from subspan.resize.tileq.fused import Path, lowrank_moe
from subspan.resize.tileq.layout import layout
from subspan.resize.tileq.moments import Moments
from subspan.resize.tileq.packing import unpack
from subspan.resize.tileq.quantizers import Codes, VectorCodes
from subspan.resize.tileq.rotation import rotate, rotate_back
from subspan.resize.tileq.sources import Experts, routed

Routes = Sequence[tuple[int, Tensor, Tensor]]


class TileQLinear(nn.Module):
    """One projection of all experts: packed codes of the residuals, and the factors of the corrections they share."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    codebook: Tensor
    codebook_scale: Tensor
    U: Tensor
    sigma: Tensor
    V: Tensor
    inverse_scales: Tensor
    cells: Tensor
    kept: Tensor
    order: Tensor

    def __init__(self, projection: str, experts: int, q: int, p: int, config: TileQConfig, device: Any = None) -> None:
        super().__init__()
        self.projection, self.config, self.weight_shape = projection, config, (experts, q, p)
        self.plan = layout(projection, experts, q, p, config)
        for name, (shape, dtype) in self.plan.buffers.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))
        self._factors: TileFactors | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TileQLinear":
        """To another device, but never to another dtype: that of a model's weights is not that of codes and factors."""
        self._factors = None

        def moved(t: Tensor) -> Tensor:
            new = fn(t)
            return new if new.dtype == t.dtype else t.to(new.device)

        return super()._apply(moved, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._factors = None
        super()._load_from_state_dict(*args, **kwargs)

    def factors(self) -> TileFactors | None:
        """The corrections' factors in float32, made at the first call; None at rank 0."""
        if self._factors is None and self.config.rank:
            cells = self.cells.long()
            every = torch.arange(len(cells), device=cells.device)
            groups = {"expert": every, "row": cells[:, 0], "layer": torch.zeros_like(every)}
            sharing = groups[self.config.sharing(self.projection)]
            self._factors = TileFactors(
                self.U, self.sigma, self.V, self.inverse_scales, sharing, cells, self.kept
            ).working()
        return self._factors

    def residual(self, e: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "q p"]:
        """Expert e's residual, in the rotated basis."""
        p, config = self.weight_shape[2], self.config
        if config.quantizer == "gptvq":
            index = unpack(self.codes[e], config.bits * config.vector_length, p // config.vector_length)
            return VectorCodes(index, self.codebook[e], self.codebook_scale[e]).decode(dtype)
        scale = self.scale[e]
        if config.symmetric:
            zero = torch.full_like(scale, 2 ** (config.bits - 1), dtype=torch.uint8)
        else:
            zero = unpack(self.zero[e], config.bits, scale.numel()).view(scale.shape)
        return Codes(unpack(self.codes[e], config.bits, p), scale, zero).decode(dtype)

    def rotated(self, e: int, x: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
        """Inputs in the basis of expert e's residual."""
        if not self.config.rotation:
            return x
        return rotate(x, self.order[e].long(), self.plan.first, self.plan.block)

    def correction(self, e: int) -> Float[Tensor, "q p"]:
        """L_e."""
        factors = self.factors()
        return (
            torch.zeros(self.weight_shape[1:], device=self.codes.device) if factors is None else factors.correction(e)
        )

    def dequantize(self, e: int) -> Float[Tensor, "q p"]:
        """The whole weight of expert e, deq(Q_e) Dᵀ Pᵀ + L_e, in float32."""
        residual = self.residual(e)
        if self.config.rotation:
            residual = rotate_back(residual, self.order[e].long(), self.plan.first, self.plan.block)
        return residual + self.correction(e)

    def forward(
        self, x: Tensor, chosen: Int[Tensor, "t k"], routes: Routes, weights: Tensor | None = None, path: Path = "auto"
    ) -> Tensor:
        """What_e x of each token's experts (t x k x q), or with routing ``weights`` their mixture (t x q).

        Args:
            x: t x p, or t x k x p where each expert of a token has an input of its own.
            chosen: experts of each token.
            routes: the same by expert, from ``routed``.
            weights: t x k.
            path: of the correction, see ``lowrank_moe``.
        """
        t, k = chosen.shape
        q = self.weight_shape[1]
        out = x.new_zeros((t, k, q) if weights is None else (t, q))
        for e, token, place in routes:
            rows = x[token] if x.ndim == 2 else x[token, place]
            y = self.rotated(e, rows) @ self.residual(e, x.dtype).mT
            if weights is None:
                out[token, place] = y.to(out.dtype)  # autocast multiplies in another one
            else:
                out.index_add_(0, token, y.to(out.dtype) * weights[token, place].unsqueeze(-1).to(out.dtype))
        factors = self.factors()
        return out if factors is None else (out + lowrank_moe(x, chosen, weights, factors, path)).to(x.dtype)


class TileQExperts(nn.Module):
    """A drop-in for the experts of a mixture-of-experts layer, fused (called) or a list (indexed).

    ``forward(hidden_states, top_k_index, top_k_weights)`` is that of transformers' experts; ``experts[e](x)`` is that
    of a list of experts. Gradients reach the inputs; there is nothing to train.
    """

    gate: TileQLinear | None
    up: TileQLinear
    down: TileQLinear

    def __init__(
        self, shapes: dict[str, tuple[int, int, int]], act: Callable[[Tensor], Tensor], config: TileQConfig,
        device: Any = None,
    ) -> None:  # fmt: skip
        """Empty, for ``load_state_dict``; ``shapes`` are (K, out, in) by projection: gate (or none), up, down."""
        super().__init__()
        self.config, self.shapes, self.act = config, shapes, act
        self.path: Path = "auto"
        for name in ("gate", "up", "down"):
            self.register_module(name, TileQLinear(name, *shapes[name], config, device) if name in shapes else None)

    @classmethod
    def from_float(
        cls, experts: Experts, moments: dict[str, Moments] | None, config: TileQConfig, name: str = "experts"
    ) -> tuple["TileQExperts", list[Fit]]:
        """Compress the experts of one layer; also returns how each projection came out.

        Args:
            experts: from ``read_experts``.
            moments: of the inputs of each projection; None for rounding to nearest without calibration.
            config: how.
            name: for messages.
        """
        shapes = {p: (w.shape[0], w.shape[1], w.shape[2]) for p, w in experts.weights.items()}
        out = cls(shapes, experts.act, config, experts.weights["down"].device)
        fits = []
        for projection, weights in experts.weights.items():
            stored, fit = fit_projection(
                projection, weights, None if moments is None else moments[projection], config, name
            )
            # strict: what was computed is what the layout says is stored
            out.get_submodule(projection).load_state_dict(stored)
            fits.append(fit)
        return out, fits

    @property
    def projections(self) -> dict[str, TileQLinear]:
        return {name: self.get_submodule(name) for name in self.shapes}  # pyright: ignore[reportReturnType]

    def _inner(self, x: Tensor, chosen: Tensor, routes: Routes) -> Tensor:
        up = self.up(x, chosen, routes, path=self.path)
        return self.act(up) if self.gate is None else self.act(self.gate(x, chosen, routes, path=self.path)) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, chosen = hidden_states.flatten(0, -2), top_k_index.flatten(0, -2)
        routes = list(routed(chosen))
        inner = self._inner(x, chosen, routes)
        out = self.down(inner, chosen, routes, top_k_weights.flatten(0, -2), self.path)
        return out.view(hidden_states.shape)

    def _single(self, e: int, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chosen = torch.full((len(rows), 1), e, device=x.device)
        out = self(rows, chosen, torch.ones_like(chosen, dtype=x.dtype))
        return out.view(x.shape)

    def __len__(self) -> int:
        return self.shapes["down"][0]

    def __getitem__(self, e: int) -> Callable[[Tensor], Tensor]:
        if not -len(self) <= int(e) < len(self):
            raise IndexError(f"there are {len(self)} experts, got index {int(e)}")
        return partial(self._single, int(e) % len(self))

    def dequantize(self, e: int) -> dict[str, Tensor]:
        """The whole weights of expert e, in float32, by projection."""
        return {name: linear.dequantize(e) for name, linear in self.projections.items()}

    def correction(self, e: int) -> dict[str, Tensor]:
        """The low-rank parts of expert e's weights, by projection."""
        return {name: linear.correction(e) for name, linear in self.projections.items()}
