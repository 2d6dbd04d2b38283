"""Noise on the outputs, drawn one by one from the caller's generator: how the draws are chunked cannot change them."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from subspan.linalg import orthonormalise

Law = Literal["gaussian", "orthogonal", "sphere"]

# A block of orthogonal draws costs K^3 per sample and is held whole.
MAX_ORTHOGONAL = 512


class Draws:
    """``count`` draws of noise shaped like the outputs, independent between events of ``event`` coordinates.

    Laws: "gaussian", independent N(0, I). "orthogonal", the draws of an event come in Haar-random orthogonal frames,
    each scaled by its own chi radius, so that every single draw is still N(0, I). "sphere", the same with the constant
    radius sqrt(event).

    ``basis`` keeps the noise in a subspace: an orthonormal P (event x r), eps = P xi, or the numbers of r coordinates
    for each event (events x r).
    """

    def __init__(
        self,
        like: Tensor,
        event: int,
        count: int,
        law: Law,
        generator: torch.Generator | None,
        basis: Tensor | None = None,
    ) -> None:
        self.like, self.event, self.law, self.generator, self.basis = like, event, law, generator, basis
        self.left = count
        self.events = like.numel() // event
        self.dim = event if basis is None else basis.shape[-1]
        self._frames: list[Tensor] = []
        if law != "gaussian" and self.dim > MAX_ORTHOGONAL:
            raise ValueError(
                f"estimator={law!r} takes events of at most {MAX_ORTHOGONAL} dimensions, not {self.dim}; "
                "use 'antithetic', or a basis"
            )

    def take(self, m: int) -> Float[Tensor, "m *output"]:
        """The next m draws."""
        eps = self.like.new_empty(m, self.events, self.dim)
        for draw in eps:
            if self.law == "gaussian":
                draw.normal_(generator=self.generator)
            else:
                draw.copy_(self._orthogonal())
            self.left -= 1
        if self.basis is not None and self.basis.is_floating_point():
            eps = eps @ self.basis.mT
        elif self.basis is not None:
            inside = self.basis.reshape(1, self.events, self.dim).expand(m, -1, -1)
            eps = eps.new_zeros(m, self.events, self.event).scatter_(-1, inside, eps)
        return eps.view(m, *self.like.shape)

    def _orthogonal(self) -> Float[Tensor, "events dim"]:
        """The next direction of the current frame; the last frame holds only as many as are still asked for."""
        if not self._frames:
            k = min(self.dim, self.left)
            frame = orthonormalise(self._normal(self.dim, k)).mT
            radius = self.dim**0.5 if self.law == "sphere" else self._normal(k, self.dim).norm(dim=-1, keepdim=True)
            self._frames = list((frame * radius).unbind(1))
        return self._frames.pop(0)

    def _normal(self, rows: int, columns: int) -> Float[Tensor, "events rows columns"]:
        return self.like.new_empty(self.events, rows, columns).normal_(generator=self.generator)


def check_basis(basis: Tensor, lead: tuple[int, ...], event: int) -> Tensor:
    """An orthonormal (event x r) matrix or int64 coordinates (\\*lead x r), or a ValueError that says what is wrong."""
    r = basis.shape[-1] if basis.ndim else 0
    if not 1 <= r <= event:
        raise ValueError(f"basis must have between 1 and {event} columns, the size of an event, not {r}")
    if not basis.is_floating_point():
        if basis.dtype != torch.int64 or tuple(basis.shape[:-1]) != lead:
            raise ValueError(
                f"coordinates as a basis must be int64 of shape {(*lead, 'r')}, "
                f"not {basis.dtype} of shape {tuple(basis.shape)}"
            )
        ordered = basis.sort(-1).values
        if basis.numel() and (ordered[..., 0].min() < 0 or ordered[..., -1].max() >= event):
            raise ValueError(f"coordinates of a basis lie between 0 and {event - 1}")
        if (ordered.diff(dim=-1) == 0).any():
            raise ValueError("coordinates of a basis must differ from each other within an event")
        return basis
    if basis.ndim != 2 or basis.shape[0] != event:
        raise ValueError(f"basis must have the shape ({event}, r), got {tuple(basis.shape)}")
    gap = float((basis.mT @ basis - torch.eye(r, dtype=basis.dtype, device=basis.device)).abs().max())
    if not gap <= 1e-4:
        raise ValueError(f"the columns of basis must be orthonormal, but P'P differs from I by {gap:.2g}: take its Q")
    return basis


def top_coordinates(logits: Float[Tensor, "*lead K"], target: Tensor, r: int) -> Tensor:
    """The label's coordinate and the r - 1 largest others (\\*lead x r, int64): a ``basis`` for large vocabularies."""
    marked = logits.detach().scatter(-1, target.unsqueeze(-1), torch.inf)
    return marked.topk(r, dim=-1).indices
