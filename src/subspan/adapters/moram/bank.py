"""The mathematics of MoRAM, and the bank of atoms that one layer holds.

Lu et al., "Little by Little: Continual Learning via Incremental Mixture of Rank-1 Associative Memory Experts", ICML
2026 (arXiv 2506.21035). An atom is a key k_i and a value v_i; the response p_i = k_i . x is both how relevant the atom
is to a token and how strongly it is read. Numbers in comments are steps of the algorithm on the method's page.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Read = Literal["auto", "dense", "gather"]
Score = Literal["signed", "abs"]
Mixing = Literal["softmax", "hard"]

# Responses whose norm is below this have no direction that could be trusted; scores then fade to zero instead of NaN.
EPS = 1e-8
# From so many atoms per kept one, reading k value rows beats one product with all of them (measured on a CPU thread at
# d = 768: 7 % at 4, 20 % at 8, 26 % at 16; at 2 they tie).
GATHER_FROM = 4


class Routing(NamedTuple):
    """Of each token: the atoms it keeps (k of them, in no order), their mixture weights and their raw responses."""

    index: Int[Tensor, "*b k"]
    weight: Float[Tensor, "*b k"]
    response: Float[Tensor, "*b k"]


def kept(top_k: int, atoms: int) -> int:
    """How many atoms a token keeps: at least two where there are two, because one alone always has weight 1."""
    return min(max(top_k, 2), atoms)


def responses(x: Float[Tensor, "*b n"], keys: Float[Tensor, "r n"]) -> Float[Tensor, "*b r"]:
    """p = A x, in float32 or better whatever the dtypes."""
    exact = torch.promote_types(torch.promote_types(x.dtype, keys.dtype), torch.float32)
    return nn.functional.linear(x.to(exact), keys.to(exact))  # (2)


def route(
    p: Float[Tensor, "*b r"],
    top_k: int,
    temperature: float,
    threshold: float | None = None,
    *,
    score: Score = "signed",
    normalize: bool = True,
    mixing: Mixing = "softmax",
) -> Routing:
    """Which atoms each token reads, and how much of each.

    Args:
        p: raw responses of the live atoms (at least one).
        top_k: atoms to keep.
        temperature: of the softmax over the kept scores.
        threshold: kept atoms that score less get weight 0, and nothing is renormalised; None or 0 is no gate.
        score: rank by the signed response (the paper), or by its magnitude.
        normalize: divide responses by their norm over the atoms (the paper).
        mixing: "softmax" (the paper), or "hard", weight 1 for every kept atom.
    """
    k = kept(top_k, p.shape[-1])
    ranked = p.abs() if score == "abs" else p
    if k == p.shape[-1]:
        best, index = ranked, torch.arange(k, device=p.device).expand(p.shape)
    else:
        best, index = ranked.topk(k, sorted=False)  # (4): division by the norm changes no order
    s = best
    if normalize:
        s = best / torch.linalg.vector_norm(p, dim=-1, keepdim=True).clamp_min(EPS)  # (3)
    w = torch.softmax(s / temperature, -1) if mixing == "softmax" else torch.ones_like(s)  # (5)
    if threshold:
        w = w * (s >= threshold)  # (6)
    return Routing(index, w, p.gather(-1, index) if score == "abs" else best)


def spread(index: Int[Tensor, "*b k"], coefficient: Float[Tensor, "*b k"], atoms: int) -> Float[Tensor, "*b r"]:
    """Coefficients of the kept atoms at their places among all atoms, zero elsewhere."""
    if index.shape[-1] == atoms:
        return coefficient  # nothing was left out: the index counts up
    return coefficient.new_zeros(*coefficient.shape[:-1], atoms).scatter(-1, index, coefficient)


def dense_read(
    index: Int[Tensor, "*b k"], coefficient: Float[Tensor, "*b k"], values: Float[Tensor, "r m"]
) -> Float[Tensor, "*b m"]:
    """Sum of coefficient_i v_i by one product with all values."""
    return spread(index, coefficient, len(values)).to(values.dtype) @ values  # (7)


def gather_read(
    index: Int[Tensor, "*b k"], coefficient: Float[Tensor, "*b k"], values: Float[Tensor, "r m"]
) -> Float[Tensor, "*b m"]:
    """The same sum from the k kept value rows of each token alone."""
    k, m = index.shape[-1], values.shape[-1]
    flat = nn.functional.embedding_bag(
        index.reshape(-1, k), values, mode="sum", per_sample_weights=coefficient.reshape(-1, k).to(values.dtype)
    )  # (7)
    return flat.view(*index.shape[:-1], m)


def read_path(read: Read, atoms: int, k: int) -> Literal["dense", "gather"]:
    """The path that "auto" stands for where k of so many atoms are kept."""
    if read != "auto":
        return read
    return "gather" if atoms >= GATHER_FROM * k else "dense"


def read_values(
    index: Int[Tensor, "*b k"], coefficient: Float[Tensor, "*b k"], values: Sequence[Tensor], read: Read
) -> Float[Tensor, "*b m"]:
    """Read from one table of values, or from a frozen and a trainable one without joining them (or their gradients)."""
    atoms = sum(map(len, values))
    path = read_path(read, atoms, index.shape[-1])
    if len(values) == 1:
        return (gather_read if path == "gather" else dense_read)(index, coefficient, values[0])
    frozen, fresh = values
    full = spread(index, coefficient, atoms).to(fresh.dtype)
    from_fresh = full[..., len(frozen) :] @ fresh
    if path == "dense":
        return full[..., : len(frozen)] @ frozen + from_fresh
    old = index < len(frozen)
    return gather_read(index.clamp(max=len(frozen) - 1), coefficient * old, frozen) + from_fresh


class MemoryBank(nn.Module):
    """The atoms of one layer: frozen ones of finished tasks as buffers, those of the task in training as parameters.

    ``keys`` (F x d_in) and ``values`` (F x d_out) are frozen; ``new_keys`` and ``new_values`` (r rows) train, and are
    None between tasks. ``scale`` and ``task_of_atom`` cover both, oldest first. A bank is float32 or better.

    Fresh atoms hold values of exactly zero. They would dilute the scores of all others while giving nothing, so they
    take part in training, and in evaluation only once a step of the optimiser has made a value differ from zero.
    """

    def __init__(self, d_in: int, d_out: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.d_in, self.d_out = d_in, d_out
        options = {"device": device, "dtype": torch.promote_types(dtype, torch.float32)}
        self.register_buffer("keys", torch.empty(0, d_in, **options))
        self.register_buffer("values", torch.empty(0, d_out, **options))
        self.register_buffer("scale", torch.empty(0, **options))
        self.register_buffer("task_of_atom", torch.empty(0, dtype=torch.long, device=device))
        self.new_keys: nn.Parameter | None = None
        self.new_values: nn.Parameter | None = None
        self.woken = False

    def __len__(self) -> int:
        return len(self.scale)

    @property
    def frozen(self) -> int:
        """Atoms of finished tasks."""
        return len(self.keys)

    @property
    def live(self) -> Bool[Tensor, " r"]:
        """Which atoms take part now."""
        everyone = self.new_keys is None or self.training or self.awake()
        return torch.arange(len(self), device=self.keys.device) < (len(self) if everyone else self.frozen)

    def awake(self) -> bool:
        """Whether training has moved a value of the open task. Looks at the values until it has, and not again."""
        if not self.woken and self.new_values is not None:
            self.woken = bool(self.new_values.detach().any())
        return self.woken

    def train(self, mode: bool = True) -> "MemoryBank":
        super().train(mode)
        if not mode:
            self.awake()  # once per switch: no forward pass has to wait for the device
        return self

    def grow(self, task: int, r: int, scale: float, generator: torch.Generator | None = None) -> None:
        """Append r trainable atoms: keys uniform on +-1/sqrt(d_in) (Kaiming with a = sqrt 5), values zero."""
        keys = (2 * torch.rand(r, self.d_in, generator=generator, dtype=self.keys.dtype) - 1) / math.sqrt(self.d_in)
        self.open(keys.to(self.keys.device), self.values.new_zeros(r, self.d_out), scale, task)

    def open(self, keys: Float[Tensor, "r n"], values: Float[Tensor, "r m"], scale: float, task: int) -> None:
        """Append these atoms as the ones in training."""
        self.new_keys, self.new_values = nn.Parameter(keys), nn.Parameter(values)
        self.scale = torch.cat([self.scale, self.scale.new_full((len(keys),), scale)])
        self.task_of_atom = torch.cat([self.task_of_atom, self.task_of_atom.new_full((len(keys),), task)])
        self.woken = False

    @torch.no_grad()
    def freeze(self) -> None:
        """Move the atoms in training to the frozen ones; each keeps its scale, so that nothing computed changes."""
        if self.new_keys is None or self.new_values is None:
            return
        self.keys = torch.cat([self.keys, self.new_keys])
        self.values = torch.cat([self.values, self.new_values])
        self.new_keys = self.new_values = None

    def keep(self, atoms: Int[Tensor, " q"]) -> None:
        """Drop all other atoms of a bank whose tasks are all finished."""
        for name in ("keys", "values", "scale", "task_of_atom"):
            setattr(self, name, getattr(self, name)[atoms].contiguous())

    def tables(self) -> tuple[list[Tensor], list[Tensor]]:
        """Live keys and values. Frozen and trainable ones stay apart in training, where only the latter need gradients.

        In evaluation they are one product each, so that freezing changes not even how sums are rounded.
        """
        if self.new_keys is None or self.new_values is None or not (self.training or self.awake()):
            return [self.keys], [self.values]
        if not self.frozen:
            return [self.new_keys], [self.new_values]
        keys, values = [self.keys, self.new_keys], [self.values, self.new_values]
        return (keys, values) if self.training else ([torch.cat(keys)], [torch.cat(values)])

    def extra_repr(self) -> str:
        fresh = len(self) - self.frozen
        return f"d_in={self.d_in}, d_out={self.d_out}, frozen={self.frozen}" + (f", training={fresh}" if fresh else "")
