"""What each expert's inputs look like, from the tokens that the router sends it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subspan.errors import NonFinite
from subspan.resize.tileq.config import Unrouted
from subspan.resize.tileq.sources import Experts, routed

# Tokens of the layer that are kept to be sent through experts that the router never chose.
_KEPT = 1024


@dataclass(frozen=True)
class Moments:
    """Of the inputs of a projection, by expert.

    Attributes:
        count: tokens seen.
        mean_abs: m, the mean absolute input (K x p).
        hessian: H = 2 XᵀX / n, whole (K x p x p) or its diagonal (K x p).
    """

    count: Int[Tensor, " k"]
    mean_abs: Float[Tensor, "k p"]
    hessian: Float[Tensor, "k *p"]

    @property
    def diagonal(self) -> Float[Tensor, "k p"]:
        return self.hessian if self.hessian.ndim == 2 else self.hessian.diagonal(dim1=-2, dim2=-1)

    @property
    def unseen(self) -> Tensor:
        """Experts whose Hessian is zero: no token, or none but zeros, reached them."""
        return ~(self.diagonal > 0).any(-1)

    @classmethod
    def of(cls, inputs: Sequence[Float[Tensor, "n p"]], *, full: bool = True) -> "Moments":
        """From each expert's inputs."""
        dtype = torch.promote_types(inputs[0].dtype, torch.float32)
        sums = Sums(len(inputs), inputs[0].shape[1], full, dtype, inputs[0].device)
        for e, x in enumerate(inputs):
            sums.add(e, x)
        return sums.moments()

    @classmethod
    def blank(cls, experts: int, p: int, dtype: torch.dtype, device: torch.device) -> "Moments":
        """Of experts about whose inputs nothing is known: scales 1, H = I."""
        ones = torch.ones(experts, p, dtype=dtype, device=device)
        return cls(torch.zeros(experts, dtype=torch.long, device=device), torch.zeros_like(ones), ones)

    def filled(self, policy: Unrouted) -> "Moments":
        """With a Hessian for the unseen: the mean of the layer's, weighted by tokens, or the identity."""
        unseen = self.unseen
        if not bool(unseen.any()):
            return self
        like = (
            torch.ones_like(self.hessian[0])
            if self.hessian.ndim == 2
            else torch.eye(self.hessian.shape[-1]).to(self.hessian)
        )
        if policy != "identity" and not bool(unseen.all()):
            counts = self.count.to(self.hessian.dtype)
            like = torch.tensordot(counts / counts.sum(), self.hessian, 1)
        hessian = self.hessian.clone()
        hessian[unseen] = like
        return replace(self, hessian=hessian)


class Sums:
    """Running sums behind ``Moments``, in float32 or better."""

    def __init__(self, experts: int, p: int, full: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.count = torch.zeros(experts, dtype=torch.long, device=device)
        self.absolute = torch.zeros(experts, p, dtype=dtype, device=device)
        self.second = torch.zeros((experts, p, p) if full else (experts, p), dtype=dtype, device=device)

    def add(self, e: int, x: Float[Tensor, "n p"]) -> None:
        x = x.to(self.absolute.dtype)
        self.count[e] += len(x)
        self.absolute[e] += x.abs().sum(0)
        if self.second.ndim == 3:
            self.second[e].addmm_(x.mT, x)
        else:
            self.second[e] += x.square().sum(0)

    def moments(self) -> Moments:
        """The means; the sums are spent."""
        n = self.count.clamp(min=1).to(self.absolute.dtype)  # the sums of an expert without tokens are zero
        second = self.second.mul_(2 / n.view(-1, *(1,) * (self.second.ndim - 1)))
        return Moments(self.count, self.absolute / n.unsqueeze(1), second)


class Recorder:
    """Sums of the inputs of gate and up, and of down, over the tokens that reach each expert."""

    def __init__(self, name: str, experts: Experts, full: bool) -> None:
        self.name, self.experts = name, experts
        down = experts.weights["down"]
        dtype = torch.promote_types(down.dtype, torch.float32)
        k, d, f = down.shape
        self.outer, self.inner = (Sums(k, p, full, dtype, down.device) for p in (d, f))
        self.tokens: list[Tensor] = []

    def add(self, e: int, x: Float[Tensor, "n d"]) -> None:
        """These rows were sent to expert e."""
        if not bool(torch.isfinite(x).all()):
            raise NonFinite(f"{self.name}: an input of expert {e} is not finite")
        self.outer.add(e, x)
        self.inner.add(e, self.experts.inner(e, x))

    def keep(self, x: Float[Tensor, "n d"]) -> None:
        room = _KEPT - sum(map(len, self.tokens))
        if room > 0:
            self.tokens.append(x[:room].clone())

    def moments(self, policy: Unrouted) -> tuple[dict[str, Moments], list[int]]:
        """Moments by projection, and the experts that no token chose."""
        unrouted = (self.outer.count == 0).nonzero().flatten().tolist()
        if policy == "counterfactual" and self.tokens:
            for e in unrouted:
                self.add(e, torch.cat(self.tokens))
        outer, inner = (sums.moments().filled(policy) for sums in (self.outer, self.inner))
        return {name: inner if name == "down" else outer for name in self.experts.weights}, unrouted


@contextmanager
def recording(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """While open, what the experts read goes to the recorder: behind the gather, whichever kernel multiplies."""

    @torch.no_grad()
    def fused(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given["hidden_states"].flatten(0, -2)
        recorder.keep(x)
        for e, token, _ in routed(given["top_k_index"].flatten(0, -2)):
            recorder.add(e, x[token])

    def single(e: int) -> Callable[..., None]:
        @torch.no_grad()
        def read(_: nn.Module, args: tuple[Any, ...]) -> None:
            recorder.keep(args[0].flatten(0, -2))
            recorder.add(e, args[0].flatten(0, -2))

        return read

    if isinstance(module, nn.ModuleList):
        handles = [expert.register_forward_pre_hook(single(e)) for e, expert in enumerate(module)]
    else:
        handles = [module.register_forward_pre_hook(fused, with_kwargs=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
