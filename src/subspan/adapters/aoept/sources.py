"""What trains: prompts made from the bank (3.3, 3.4), the gates (3.5), and both together as a maker of slots."""

import math
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool1d, gelu, layer_norm, normalize

from subspan.adapters.aoept.config import AOEPTConfig
from subspan.adapters.aoept.passes import Features, SlotMaker, Slots
from subspan.adapters.aoept.prompts import at_least_float32, attend, instantiate, mixed
from subspan.linalg import effective_rank

Banks = Mapping[str, Tensor]
START_STD = 0.02  # of queries and free tokens, as in the paper


def _normal(*shape: int) -> Tensor:
    return START_STD * torch.randn(shape)


def _bottleneck(width: int, reduction: int) -> int:
    return max(1, width // reduction)


def pooled(bank: Float[Tensor, "n K d"], length: int) -> Float[Tensor, "n L d"]:
    """Adaptive average over the prototype axis, K -> L; it depends on the bank's order."""
    return adaptive_avg_pool1d(bank.mT, length).mT


# ------------------------------------------------------------------------------------------------------- constructions


class BankAttention(nn.Module):
    """P = LayerNorm(O + Q) for all layers at once (3.3); the bank (n, K, d) is frozen, one norm serves all layers."""

    bank: Tensor

    def __init__(self, bank: Tensor, heads: int, kv_width: int | None = None) -> None:
        super().__init__()
        layers, _, width = bank.shape
        self.heads = heads
        self.register_buffer("bank", bank, persistent=False)
        self.norm = nn.LayerNorm(width)
        self.maps = nn.ModuleList()  # keys, values
        if kv_width:
            sizes = (width, kv_width), (kv_width, width)
            self.maps.extend(
                nn.ModuleList(nn.Sequential(*(nn.Linear(*s, bias=False) for s in sizes)) for _ in range(layers))
                for _ in range(2)
            )

    def forward(self, queries: Float[Tensor, "n L d"]) -> Float[Tensor, "n L d"]:
        keys, values = [_by_layer(maps, self.bank) for maps in self.maps] or (self.bank, self.bank)
        out = attend(queries, keys, values, self.heads) + at_least_float32(queries)
        with torch.autocast(out.device.type, enabled=False):
            weight, bias = self.norm.weight.to(out.dtype), self.norm.bias.to(out.dtype)
            return layer_norm(out, self.norm.normalized_shape, weight, bias, self.norm.eps)


def _by_layer(maps: nn.Module, x: Tensor) -> Tensor:
    """Each layer's own map on its rows of x (n, rows, d)."""
    x = x.to(next(maps.parameters()).dtype)
    return torch.stack([layer(rows) for layer, rows in zip(cast(nn.ModuleList, maps), x, strict=True)])


class AttentionPrompts(nn.Module):
    """L queries by layer attend to one modality's bank."""

    def __init__(self, queries: Tensor, attention: BankAttention) -> None:
        super().__init__()
        self.queries = nn.Parameter(queries)
        self.attention = attention

    def forward(self) -> Tensor:
        return self.attention(self.queries)


class MlpPrompts(nn.Module):
    """Every prototype through a small network of its layer, then pooled to L tokens."""

    bank: Tensor

    def __init__(self, bank: Tensor, length: int, hidden: int) -> None:
        super().__init__()
        layers, _, width = bank.shape
        self.length = length
        self.register_buffer("bank", bank, persistent=False)
        self.maps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(layers)
        )

    def forward(self) -> Tensor:
        return pooled(_by_layer(self.maps, self.bank), self.length)


class FreePrompts(nn.Module):
    """Tokens that train from where they start."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = nn.Parameter(tokens.clone())

    def forward(self) -> Tensor:
        return self.tokens


def construct(bank: Tensor, config: AOEPTConfig) -> nn.Module:
    """The prompts of one modality: a module without inputs that gives (depth, L, d)."""
    (layers, prototypes, width), length = bank.shape, config.prompt_len
    if config.mcp == "mlp":
        return MlpPrompts(bank, length, _bottleneck(width, config.reduction))
    if config.mcp == "init":
        return FreePrompts(pooled(bank, length))
    if config.mcp == "random":
        return FreePrompts(_normal(layers, length, width))
    queries = _normal(layers, length, width)
    if config.query_init == "bank":
        chosen = torch.randint(prototypes, (layers, length, 1)).expand(-1, -1, width)
        queries = (bank.cpu() - bank.cpu().mean(1, keepdim=True)).gather(1, chosen)
    kv_width = _bottleneck(width, config.reduction) if config.kv_bottleneck else None
    return AttentionPrompts(queries, BankAttention(bank, config.num_heads, kv_width))


# ---------------------------------------------------------------------------------------------- visible modalities


class Visible(nn.Module):
    """The modalities that are there, brought to one width: the mean of a linear map of each.

    Returns the mean (B, hidden), and (B,) whether there was any.
    """

    def __init__(self, sources: Mapping[str, int], hidden: int) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({name: nn.Linear(width, hidden) for name, width in sources.items()})

    def forward(self, features: Features, present: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        there = torch.stack([present[name] for name in self.maps], 1)
        each = torch.stack([self._map(name, features[name]) for name in self.maps], 1)
        total = torch.where(there[..., None], each, 0.0).sum(1)
        return total / there.sum(1, keepdim=True).clamp(min=1), there.any(1)  # of none: 0, which is not used

    def _map(self, name: str, f: Tensor) -> Tensor:
        layer = cast(nn.Linear, self.maps[name])
        return layer(f.to(layer.weight.dtype))


class Gate(nn.Module):
    """g = sigmoid(W2 relu(W1 f + b1) + b2), by which a sample's prompts are made from those of all (3.5)."""

    seen: Tensor

    def __init__(self, sources: Mapping[str, int], width: int, reduction: int) -> None:
        super().__init__()
        # With one source its width sets the bottleneck, as released; several must meet in one, so the target's does.
        source = next(iter(sources.values())) if len(sources) == 1 else width
        self.visible = Visible(sources, _bottleneck(source, reduction))
        self.out = nn.Linear(_bottleneck(source, reduction), width)
        self.register_buffer("seen", torch.zeros(2), persistent=False)  # sum of mean gates, and of how many samples

    def forward(self, prompt: Float[Tensor, "L d"], features: Features, present: Mapping[str, Tensor]) -> Tensor:
        hidden, gated = self.visible(features, present)
        gate = at_least_float32(self.out(hidden.relu())).sigmoid()
        if self.training:
            with torch.no_grad():
                self.seen += torch.stack([(gate.mean(1) * gated).sum(), gated.sum()]).to(self.seen.dtype)
        return instantiate(prompt, gate, gated)

    def mean(self) -> float:
        """Of the training samples since the last call; NaN without any."""
        total, count = self.seen.tolist()
        self.seen.zero_()
        return total / count if count else math.nan


class Reconstruction(nn.Module):
    """L tokens as a function of the visible features: the paper's ablation of the bank."""

    def __init__(self, sources: Mapping[str, int], width: int, length: int, reduction: int) -> None:
        super().__init__()
        self.length = length
        self.visible = Visible(sources, _bottleneck(width, reduction))
        self.out = nn.Linear(_bottleneck(width, reduction), length * width)

    def forward(self, features: Features, present: Mapping[str, Tensor]) -> Tensor:
        return self.out(gelu(self.visible(features, present)[0])).unflatten(1, (self.length, -1))


# ------------------------------------------------------------------------------------------------------------- together


def _gates(sources: Mapping[str, int], width: int, config: AOEPTConfig, fused: bool) -> nn.ModuleList:
    """One for each layer, one for all of them, or none."""
    single = fused if config.gate_shared is None else config.gate_shared
    count = 0 if not config.gate else 1 if single else config.depth
    return nn.ModuleList(Gate(sources, width, config.reduction) for _ in range(count))


def _of_sample(
    prompt: Float[Tensor, "L d"], gates: nn.Module, layer: int, features: Features, there: Mapping[str, Tensor]
) -> Float[Tensor, "b L d"]:
    gates = cast(nn.ModuleList, gates)
    if not len(gates):
        return prompt.expand(len(next(iter(there.values()))), -1, -1)
    return gates[min(layer, len(gates) - 1)](prompt, features, there)


class SharedPrompts(nn.Module):
    """Tokens of which all modalities share the queries.

    For towers, small maps bring the queries to each width, where they attend to that modality's bank, with gates as its
    own prompts have. For a single stream they attend to all banks at once, gated by the mean of the visible features.
    """

    def __init__(self, banks: Banks, config: AOEPTConfig, fused: bool) -> None:
        super().__init__()
        widths = {name: bank.shape[-1] for name, bank in banks.items()}
        first = next(iter(widths.values()))
        width = first if fused else _bottleneck(first, config.reduction)
        self.fused = fused
        self.queries = nn.Parameter(_normal(config.depth, config.shared_len, width))
        self.maps, self.attention, self.gates = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        if fused:
            self.attention["all"] = BankAttention(torch.cat(list(banks.values()), 1), config.num_heads)
            self.gates["all"] = _gates({"all": first}, first, config, fused)
            return
        for name, bank in banks.items():
            sizes = (width, width), (width, widths[name])
            self.maps[name] = nn.ModuleList(
                nn.Sequential(nn.Linear(*sizes[0]), nn.GELU(), nn.Linear(*sizes[1])) for _ in range(config.depth)
            )
            self.attention[name] = BankAttention(bank, config.num_heads)
            self.gates[name] = _gates({o: w for o, w in widths.items() if o != name}, widths[name], config, fused)

    def forward(self) -> dict[str, Tensor]:
        """The ungated tokens (depth, L, d), by modality; "all" for a single stream."""
        queries = {name: _by_layer(maps, self.queries) for name, maps in self.maps.items()}
        return {name: attention(queries.get(name, self.queries)) for name, attention in self.attention.items()}

    def of_sample(
        self, built: Mapping[str, Tensor], name: str, layer: int, features: Features, there: Mapping[str, Tensor]
    ) -> Tensor:
        if self.fused:
            present = torch.stack(list(there.values()), 1)
            total = torch.stack([features[m] * is_there[:, None] for m, is_there in there.items()]).sum(0)
            features = {"all": total / present.sum(1, keepdim=True).clamp(min=1)}
            name, there = "all", {"all": present.any(1)}
        return _of_sample(built[name][layer], self.gates[name], layer, features, there)


class ContextualPrompts(nn.Module):
    """The prompts of all modalities, gated by sample.

    Args:
        banks: (depth, K, d) of each modality.
        config: the method's options.
        fused: one sequence for all modalities.
    """

    def __init__(self, banks: Banks, config: AOEPTConfig, fused: bool) -> None:
        super().__init__()
        self.config, self.modalities = config, tuple(banks)
        widths = {name: bank.shape[-1] for name, bank in banks.items()}
        self.own, self.gates = nn.ModuleDict(), nn.ModuleDict()
        for name, bank in banks.items():
            others = {o: width for o, width in widths.items() if o != name}
            if config.mcp == "reconstruct":
                sizes = others, widths[name], config.prompt_len, config.reduction
                self.own[name] = nn.ModuleList(Reconstruction(*sizes) for _ in range(config.depth))
            else:
                self.own[name] = construct(bank, config)
                self.gates[name] = _gates(others, widths[name], config, fused)
        self.shared = SharedPrompts(banks, config, fused) if config.shared_len else None
        self._kept: tuple[tuple[int, ...], tuple[dict[str, Tensor], dict[str, Tensor]]] | None = None

    # ------------------------------------------------------------------------------------------- prompts of no sample

    def build(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The ungated prompts (depth, L, d), own and shared, by modality, once for a step.

        In evaluation they are kept until a parameter changes.
        """
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            self._kept = None
            return self._build()
        state = tuple(x for p in self.parameters() for x in (p._version, p.data_ptr()))
        if self._kept is None or self._kept[0] != state:
            self._kept = state, self._build()
        return self._kept[1]

    def _build(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        own = {name: make() for name, make in self.own.items() if name in self.gates}
        return own, {} if self.shared is None else self.shared()

    def diversity(self) -> dict[str, list[dict[str, float]]]:
        """By modality and layer: mean cosine of pairs of prompts, and the effective rank of the L tokens.

        Raises:
            ValueError: with mcp="reconstruct" there are no prompts without a sample.
        """
        if self.config.mcp == "reconstruct":
            raise ValueError("mcp='reconstruct' has no prompts without a sample, so no diversity")
        with torch.no_grad():
            return {name: [_diversity(at_least_float32(x)) for x in own] for name, own in self.build()[0].items()}

    def mean_gates(self) -> dict[str, list[float]]:
        """Of the training samples since the last call, by modality and layer (one, where layers share it)."""
        return {name: [gate.mean() for gate in cast(Iterable[Gate], gates)] for name, gates in self.gates.items()}

    # -------------------------------------------------------------------------------------------- prompts of a sample

    def bind(self) -> SlotMaker:
        """What ``passes.run`` calls in every layer, around prompts built once."""
        built, shared = self.build()

        def make(names: tuple[str, ...], layer: int, features: Features, present: Bool[Tensor, "b m"]) -> Slots:
            there = dict(zip(self.modalities, present.unbind(1), strict=True))
            own = {name: self._own(built, name, layer, features, there) for name in names}
            tokens = mixed(list(own.values()), torch.stack([there[name] for name in names], 1))
            if self.shared is not None:
                tokens = torch.cat([self.shared.of_sample(shared, names[0], layer, features, there), tokens], 1)
            return Slots(tokens, own)

        return make

    def _own(
        self, built: Mapping[str, Tensor], name: str, layer: int, features: Features, there: Mapping[str, Tensor]
    ) -> Tensor:
        if name not in built:
            return cast(nn.ModuleList, self.own[name])[layer](features, there)
        return _of_sample(built[name][layer], self.gates[name], layer, features, there)


def _diversity(tokens: Float[Tensor, "L d"]) -> dict[str, float]:
    unit = normalize(tokens, dim=1)
    cosines = unit @ unit.T
    pairs = cosines[~torch.eye(len(unit), dtype=torch.bool, device=unit.device)]
    return {
        "cosine": float(pairs.mean()) if len(pairs) else 1.0,
        "effective_rank": float(effective_rank(torch.linalg.svdvals(tokens))),
    }
