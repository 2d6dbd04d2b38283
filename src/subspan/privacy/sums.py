"""Clipped sums of per-example gradients, and the noisy mean that is released from them.

A step of both classes: ``begin`` at the parameters' present values; for every micro-batch ``take`` the back-propagated
layers, give ``norm_sq`` of the examples, ``add`` them with the engine's weights and ``forget`` them; then ``release``
sum / divisor plus noise into ``.grad``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.linalg import nearest_orthogonal
from subspan.privacy.starts import tangent_space, unbalanced
from subspan.surgery import FactorPair
from subspan.surgery.per_example import (
    ExampleGradients,
    LayerGradient,
    add_calls,
    as_stored,
    example_gradients,
)


def gaussian_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)


class LayerSum:
    """A plain layer in the ordinary Euclidean geometry: a classification head, or one LoRA factor of the baselines."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        bias = getattr(module, "bias", None)
        self.bias: nn.Parameter | None = bias if bias is not None and bias.requires_grad else None
        self._weight_examples: ExampleGradients | None = None
        self._bias_examples: Tensor | None = None
        self.begin()

    def layers(self) -> Mapping[str, nn.Module]:
        """The layers whose gradients it takes, by the name it is told."""
        return {self.name: self.module}

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The live Parameters whose ``.grad`` it releases."""
        found = {f"{self.name}.weight": self.module.weight}
        if self.bias is not None:
            found[f"{self.name}.bias"] = self.module.bias
        return found  # pyright: ignore[reportReturnType]

    def begin(self, canonical: bool = True) -> None:
        """Start a step; ``canonical`` concerns ``TangentSum``."""
        self._weight_sum: Tensor | None = None
        self._bias_sum: Tensor | None = None

    def take(self, layer: str, gradient: LayerGradient) -> None:
        self._weight_examples = add_calls(self._weight_examples, example_gradients(gradient.D, gradient.X))
        if self.bias is not None:
            b = gradient.D.sum(1)
            self._bias_examples = b if self._bias_examples is None else self._bias_examples + b

    def norm_sq(self) -> Float[Tensor, " b"] | None:
        """Squared norms of the examples taken and not forgotten (None if no gradient reached this layer)."""
        if self._weight_examples is None:
            return None
        total = self._weight_examples.norm_sq()
        return total if self._bias_examples is None else total + self._bias_examples.square().sum(1)

    def add(self, weights: Float[Tensor, " b"]) -> None:
        if self._weight_examples is not None:
            total = self._weight_examples.weighted_sum(weights)
            self._weight_sum = total if self._weight_sum is None else self._weight_sum + total
        if self._bias_examples is not None:
            total = weights @ self._bias_examples
            self._bias_sum = total if self._bias_sum is None else self._bias_sum + total

    def forget(self) -> None:
        self._weight_examples = self._bias_examples = None

    def signal(self) -> tuple[Tensor, int]:
        """Squared norm of the step's sum, and the number of coordinates that get noise."""
        parts = [part.square().sum() for part in (self._weight_sum, self._bias_sum) if part is not None]
        return sum(parts, torch.zeros(())), sum(p.numel() for p in self.parameters().values())

    def release(self, std: float, divisor: float, generator: torch.Generator) -> None:
        weight: nn.Parameter = self.module.weight  # pyright: ignore[reportAssignmentType]
        total = None if self._weight_sum is None else as_stored(self.module, self._weight_sum)
        for param, value in ((weight, total), (self.bias, self._bias_sum)):
            if param is not None:
                exact = torch.promote_types(param.dtype, torch.float32)
                mean = torch.zeros_like(param, dtype=exact) if value is None else value.to(exact) / divisor
                param.grad = (mean + std * gaussian_like(mean, generator)).to(param.dtype)


class TangentSum:
    """A LoRA module in the tangent space of its Z = A Bᵀ: what PRISM clips, sums and noises.

    An example's gradient G is held as G V and Gᵀ U. With B = V TB, G V = Dᵀ (a TB⁻¹) where a is lora_A's output, and
    Gᵀ U = Xᵀ (d TA⁻¹) where d is the gradient there: the change of coordinates acts on T x r tensors, not on gradients.
    """

    def __init__(self, pair: FactorPair) -> None:
        self.pair, self.name = pair, pair.name
        self._up, self._down = f"{pair.name}.lora_B", f"{pair.name}.lora_A"
        self._gv: ExampleGradients | None = None
        self._gu: ExampleGradients | None = None
        self.begin()

    def layers(self) -> Mapping[str, nn.Module]:
        layer, adapter = self.pair.layer, self.pair.adapter
        return {self._up: layer.lora_B[adapter], self._down: layer.lora_A[adapter]}  # pyright: ignore

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {f"{self._up}.weight": self.pair.param_A, f"{self._down}.weight": self.pair.param_B}

    def begin(self, canonical: bool = True) -> None:
        """Start a step in the sign-fixed singular basis of Z (``canonical``), or in the factors' own if balanced.

        The noise is drawn in a basis. The singular basis is a function of Z, so at the first step the draw is the same
        in every gauge; but it jumps where singular values cross or a sign rule ties, and there rounding would decide
        which noise is drawn. Balanced factors, as PRISM stores them, have the basis A (AᵀA)^{-1/2} that cannot jump.
        """
        dtype = torch.promote_types(self.pair.param_A.dtype, torch.float32)
        z = self.pair.low_rank(dtype)
        space = tangent_space(z, self.name)
        if not canonical and not bool(unbalanced(z, self.pair.param_A.dtype)):
            q = nearest_orthogonal(space.TA)  # TA = S^{1/2} Q
            space = replace(space, U=space.U @ q, V=space.V @ q, TA=q.mT @ space.TA, TB=q.mT @ space.TB)
        self.space = space
        self._inverse_A, self._inverse_B = self.space.inverses
        self._sums = (torch.zeros_like(self.space.U), torch.zeros_like(self.space.V))

    def take(self, layer: str, gradient: LayerGradient) -> None:
        D, X = gradient
        if layer == self._up:
            self._gv = add_calls(self._gv, example_gradients(D, X @ self._inverse_B))
        else:
            self._gu = add_calls(self._gu, example_gradients(X, D @ self._inverse_A))

    def norm_sq(self) -> Float[Tensor, " b"] | None:
        # (3.1) |P(G)|² = |X|² + |Up|² + |Vp|² = |G V|² + |Gᵀ U|² - |Vᵀ Gᵀ U|². The last term is at most the first, so
        # nothing cancels; taken from Gᵀ U itself it bounds what is summed even where half precision makes G V disagree.
        if self._gv is None or self._gu is None:
            return None
        inside = self._gu.left_multiply(self.space.V).norm_sq()
        return self._gv.norm_sq() + (self._gu.norm_sq() - inside).clamp(min=0)

    def add(self, weights: Float[Tensor, " b"]) -> None:
        if self._gv is not None and self._gu is not None:
            gv, gu = self._sums
            self._sums = (gv + self._gv.weighted_sum(weights), gu + self._gu.weighted_sum(weights))

    def forget(self) -> None:
        self._gv = self._gu = None

    def signal(self) -> tuple[Tensor, int]:
        return self.space.split(*self._sums).norm_sq(), self.space.dim

    def release(self, std: float, divisor: float, generator: torch.Generator) -> None:
        gv, gu = self._sums
        mean = self.space.split(gv / divisor, gu / divisor)
        noisy = mean.add(self.space.gaussian(generator), std)
        gA, gB = self.space.factor_gradients(noisy)
        for param, g in ((self.pair.param_A, gA), (self.pair.param_B, gB.mT)):
            param.grad = g.reshape(param.shape).to(param.dtype)


def factor_sums(pair: FactorPair, *, both: bool) -> Iterator[LayerSum]:
    """The two factors as plain layers (the ``naive`` baseline), or ``lora_B`` alone (``ffa``)."""
    layer, adapter = pair.layer, pair.adapter
    yield LayerSum(f"{pair.name}.lora_B", layer.lora_B[adapter])  # pyright: ignore
    if both:
        yield LayerSum(f"{pair.name}.lora_A", layer.lora_A[adapter])  # pyright: ignore


GradientSum = TangentSum | LayerSum
