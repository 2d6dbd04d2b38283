"""Calling a loss, whatever it is, on many noisy outputs at once, one by one, or through torch.vmap."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.optim.output_space.losses import losses_of

Loss = Callable[..., Any]
Credit = Literal["sample", "elementwise", "batch"]
Vectorized = bool | Literal["auto", "vmap"]


@dataclass(frozen=True)
class Scorer:
    """``scorer(points)`` calls the loss on n perturbed outputs (n x \\*output) and gives n losses per unit of credit.

    A unit is what one loss belongs to: a sample ("sample", losses n x \\*lead), a group of an event's coordinates
    ("elementwise", n x \\*lead x G) or the batch ("batch", n).
    """

    loss: Loss
    target: Any
    lead: tuple[int, ...]
    event: int
    credit: Credit
    how: Vectorized
    as_numpy: bool
    seed: int | None = None

    @classmethod
    def of(
        cls, loss: Loss, target: Any, lead: tuple[int, ...], event: int, credit: Credit, how: Vectorized, as_numpy: bool
    ) -> "Scorer":
        known = getattr(getattr(loss, "func", loss), "vectorized", None)  # partial keeps the function in .func
        how = known if how == "auto" and known is not None else how
        own = takes_generator(loss)
        return cls(loss, target, lead, event, credit, False if own else how, as_numpy, 0 if own else None)

    def __call__(self, points: Tensor, first: int = 0) -> Tensor:
        """Losses of points number ``first``, ``first`` + 1, ...; the number only seeds losses that draw themselves."""
        if self.how == "vmap":
            losses = torch.vmap(self._ask)(points)
        elif self.how is True:
            losses = losses_of(self._ask(points), points.device)
        else:
            each = [losses_of(self._ask(p, first + i), points.device) for i, p in enumerate(points)]
            losses = torch.stack(each)
        return self._checked(losses, len(points))

    def _ask(self, out: Tensor, number: int = 0) -> Any:
        more: dict[str, Any] = {}
        if self.seed is not None:
            # The same stream for both signs of a pair: their difference then holds little of the loss's own noise.
            more["generator"] = torch.Generator(out.device).manual_seed(self.seed + number)
        given = [out] if self.target is None else [out, self.target]
        if self.as_numpy:
            given = [x.cpu().numpy() if isinstance(x, Tensor) else x for x in given]
        return self.loss(*given, **more)

    def _checked(self, losses: Tensor, n: int) -> Tensor:
        got, wanted = tuple(losses.shape), (n, *self.lead)
        if self.credit == "batch":
            wanted = (n,)
        elif self.credit == "elementwise":
            fits = got[:-1] == wanted and got[-1] > 0 and self.event % got[-1] == 0
            if not fits:
                raise ValueError(
                    f"credit='elementwise' needs losses of shape {(*wanted, 'G')} with G dividing the {self.event} "
                    f"coordinates of an event, got {got}"
                )
            return losses
        if got != wanted:
            hint = "; a loss of the whole batch needs credit='batch'" if got == (n,) else ""
            raise ValueError(f"the loss of {n} perturbed outputs must have the shape {wanted}, got {got}{hint}")
        return losses

    def settled(self, probe: Float[Tensor, "two *output"]) -> "Scorer":
        """With ``how="auto"``: the fastest way that gives what a plain loop gives on two points."""
        if self.how != "auto":
            return self
        loop = replace(self, how=False)
        truth = loop(probe)
        for how in (True, "vmap"):
            if how == "vmap" and self.as_numpy:
                continue
            other = replace(self, how=how)
            if _agrees(other, probe, truth):
                return other
        warnings.warn(
            "this loss gives other values for stacked outputs than for one at a time, so it is called once for each "
            "perturbation; vectorized=False silences this",
            stacklevel=4,
        )
        return loop


def _agrees(scorer: Scorer, probe: Tensor, truth: Tensor) -> bool:
    try:
        found = scorer(probe)
    except Exception:  # whatever a loss does with a shape that it was not written for
        return False
    if found.shape != truth.shape:
        return False
    # Other orders of summation may move a float32 loss by this much.
    return bool(torch.allclose(found.double(), truth.double(), rtol=1e-4, atol=1e-6, equal_nan=True))


def takes_generator(loss: Loss) -> bool:
    """Whether a stochastic loss asks for its own ``generator``."""
    try:
        return "generator" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
