"""Layers of the compiled decoder: heads that select coordinates, attention in three arithmetics, and the MLP."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subspan.theory.turing.circuit import Circuit, Head
from subspan.theory.turing.numerics import Arithmetic, Choice, denoised, rounded, snapped

# Query rows of one block: with it the scores of a block stay in a core's cache, and later keys are never touched.
_ROWS = 128


class Cache:
    """Keys and values of the tokens seen so far, one growing buffer per layer."""

    def __init__(self) -> None:
        self.length = 0
        self._buffers: dict[int, Tensor] = {}

    def extend(self, layer: int, kv: Float[Tensor, "b h m w"]) -> Float[Tensor, "b h n w"]:
        """Store what m new tokens bring, and give what all n tokens so far brought."""
        end = self.length + kv.shape[2]
        held = self._buffers.get(layer)
        if held is None or held.shape[2] < end:
            grown = kv.new_empty(*kv.shape[:2], max(2 * end, 64), kv.shape[3])
            if held is not None:
                grown[:, :, : self.length] = held[:, :, : self.length]
            held = self._buffers[layer] = grown
        held[:, :, self.length : end] = kv
        return held[:, :, :end]


class Layer(nn.Module):
    """Heads that select coordinates, then an MLP. Selections are gathered, not multiplied: they are 0/1 matrices.

    Repeated pairs of a head's queries and keys are summed once with their multiplicity, and widths are padded to the
    layer's largest, so that all heads are one product.
    """

    gather: Tensor
    times: Tensor
    slots: Tensor
    out: Tensor

    def __init__(self, index: int, circuit: Circuit, layer: int) -> None:
        super().__init__()
        self.index = index
        self.heads: list[Head] = circuit.heads.get(layer, [])
        pairs = [_multiplicities(head) for head in self.heads]
        keys = max((len(p) for p in pairs), default=0)
        values = max((len(head.v) for head in self.heads), default=0)
        one = circuit["const"][0]
        gather: list[list[int]] = []
        times: list[list[int]] = []
        for head, counted in zip(self.heads, pairs, strict=True):
            spare = [one] * (keys - len(counted))  # padded queries are multiplied by 0
            q, k = [qa for qa, _ in counted], [ka for _, ka in counted]
            times.append([*counted.values(), *(0 for _ in spare)])
            # the last column of the values is the constant 1: it counts a row's maximisers
            gather.append([*q, *spare, *k, *spare, *head.v, *[one] * (values + 1 - len(head.v))])
        out = [c for head in self.heads for c in head.out]
        slots = [h * values + a for h, head in enumerate(self.heads) for a in range(len(head.v))]
        if len(set(out)) != len(out):
            raise ValueError(f"layer {layer}: two heads write one coordinate")
        self.widths = (keys, keys + values + 1)
        self.padded = len(slots) < len(self.heads) * values
        self.register_buffer("gather", torch.tensor(gather, dtype=torch.long).flatten())
        self.register_buffer("times", torch.tensor(times, dtype=torch.float32).view(len(times), 1, keys))
        self.register_buffer("slots", torch.tensor(slots, dtype=torch.long))
        self.register_buffer("out", torch.tensor(out, dtype=torch.long))
        up, bias, down = circuit.mlp(layer)
        self.up, self.down = fixed_linear(up, bias), fixed_linear(down)

    def forward(self, x: Float[Tensor, "b n d"], how: Arithmetic, cache: Cache | None = None) -> Float[Tensor, "b n d"]:
        """(3.6 a): attention, denoising, MLP, each rounded where ``how`` says so."""
        if self.heads:
            x = self._attend(x, how, cache)
        if how.denoise in ("mlp", "mlp-full") and not how.selective:
            x = denoised(x, how.dtype)
        elif how.denoise == "snap":
            x = snapped(x)
        if self.up.out_features:
            hidden = rounded(torch.relu(self.up(x)), how.dtype)
            x = rounded(x + self.down(hidden), how.dtype)
        return x

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, and keys beside values: [b, heads, n, width]."""
        b, n, _ = x.shape
        picked = x.index_select(-1, self.gather).view(b, n, len(self.heads), -1).transpose(1, 2)
        q, kv = picked.split(self.widths, -1)
        return q * self.times, kv

    def _attend(self, x: Tensor, how: Arithmetic, cache: Cache | None) -> Tensor:
        q, kv = self._split(x)
        before = 0
        if cache is not None:
            before = cache.length
            kv = cache.extend(self.index, kv)
        k, v = kv.split((self.widths[0], self.widths[1] - self.widths[0]), -1)
        n = q.shape[2]
        mixed = []
        for start in range(0, n, _ROWS):
            stop = min(start + _ROWS, n)
            seen = before + stop
            mixed.append(_mix(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], before + start, how))
        heads = (mixed[0] if len(mixed) == 1 else torch.cat(mixed, 2)).transpose(1, 2).flatten(2)
        if self.padded:
            heads = heads.index_select(-1, self.slots)
        if how.attention != "softmax" and how.denoise is None:
            return x.index_add(-1, self.out, heads)
        new = rounded(x.index_select(-1, self.out) + rounded(heads, how.dtype), how.dtype)
        return x.index_copy(-1, self.out, denoised(new, how.dtype) if how.selective else new)

    def weights(self, x: Float[Tensor, "b n d"], how: Arithmetic, last: int | None = None) -> Float[Tensor, "b h m n"]:
        """The attention weights of the ``last`` tokens, or of all, to look at."""
        q, kv = self._split(x)
        first = 0 if last is None else max(0, x.shape[1] - last)
        scores = _causal_scores(q[:, :, first:], kv[..., : self.widths[0]], first)
        if how.attention == "softmax":
            return _softmax(scores, how)
        if how.attention == "sparse1":
            return torch.zeros_like(scores).scatter_(-1, _one_maximiser(scores, how.choice)[..., None], 1.0)
        maximal = _maximisers(scores)
        return maximal / maximal.sum(-1, keepdim=True)


def fixed_linear(weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None = None) -> nn.Linear:
    """A linear layer that is not trained."""
    # on the meta device first: nothing is drawn that would be overwritten
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _multiplicities(head: Head) -> dict[tuple[int, int], int]:
    counted: dict[tuple[int, int], int] = {}
    for pair in zip(head.q, head.k, strict=True):
        counted[pair] = counted.get(pair, 0) + 1
    return counted


def _mix(q: Tensor, k: Tensor, v: Tensor, first: int, how: Arithmetic) -> Tensor:
    """What the rows of a block receive, [b, heads, rows, values]; ``first`` is the position of its first row."""
    scores = _causal_scores(q, k, first)
    if how.attention == "softmax":
        return _softmax(scores, how) @ v[..., :-1]
    if how.attention == "sparse1":
        chosen = _one_maximiser(scores, how.choice)[..., None]
        return v.gather(2, chosen.expand(*chosen.shape[:3], v.shape[-1] - 1))
    # sums of integers are exact in any order, so that one division rounds: prefix and incremental runs agree bit by bit
    sums = _maximisers(scores) @ v
    return sums[..., :-1] / sums[..., -1:]


def _causal_scores(q: Tensor, k: Tensor, first: int) -> Tensor:
    """Scores of rows at positions first, first + 1, ... against all keys; -inf for later ones. Exact small integers."""
    scores = q @ k.transpose(-1, -2)
    rows = q.shape[2]
    if rows > 1:
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., first:].masked_fill_(later, -torch.inf)
    return scores


def _maximisers(scores: Tensor) -> Tensor:
    """1 where a row is maximal, else 0; in place."""
    return scores.ge_(scores.amax(-1, keepdim=True))


def _softmax(scores: Tensor, how: Arithmetic) -> Tensor:
    """omega(softmax(c S)) in place; the scores are exact, so that tied maximisers stay tied (3.6 a)."""
    return rounded(torch.softmax(scores.mul_(how.scale or 1.0), -1), how.weight_dtype)


def _one_maximiser(scores: Tensor, choice: Choice) -> Int[Tensor, "b h m"]:
    """Index of one maximiser of each row: where it matters scores differ by 1, so less than 1/2 only breaks ties."""
    n = scores.shape[-1]
    if choice == "random":
        # the choice must not matter; a generator of its own keeps runs reproducible and the caller's untouched
        generator = torch.Generator(scores.device).manual_seed(n)
        return (scores + torch.rand(scores.shape, generator=generator, device=scores.device) / 2).argmax(-1)
    ramp = torch.arange(n, device=scores.device, dtype=scores.dtype) / (2 * n)
    return (scores.add_(ramp) if choice == "last" else scores.sub_(ramp)).argmax(-1)
