"""What trains: prompts made from the bank (3.3, 3.4), the gates (3.5), and both together as a maker of slots."""

from collections.abc import Mapping
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
    """g = sigmoid(W2 relu(W1 f + b1) + b2) (3.5)."""

    def __init__(self, sources: Mapping[str, int], width: int, reduction: int) -> None:
        super().__init__()
        # With one source its width sets the bottleneck, as released; several must meet in one, so the target's does.
        source = next(iter(sources.values())) if len(sources) == 1 else width
        self.visible = Visible(sources, _bottleneck(source, reduction))
        self.out = nn.Linear(_bottleneck(source, reduction), width)

    def forward(self, features: Features, present: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, gated = self.visible(features, present)
        return at_least_float32(self.out(hidden.relu())).sigmoid(), gated


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


class ContextualPrompts(nn.Module):
    """The prompts of all modalities, gated by sample.

    Args:
        banks: (depth, K, d) of each modality.
        config: the method's options.
        fused: one sequence for all modalities.
    """

    gate_sums: Tensor

    def __init__(self, banks: Banks, config: AOEPTConfig, fused: bool) -> None:
        super().__init__()
        self.config, self.modalities, self.fused = config, tuple(banks), fused
        widths = {name: bank.shape[-1] for name, bank in banks.items()}
        shared_gate = fused if config.gate_shared is None else config.gate_shared
        layers = range(1 if shared_gate else config.depth)

        def others(name: str) -> dict[str, int]:
            return {o: width for o, width in widths.items() if o != name}

        def gates(sources: Mapping[str, int], width: int) -> nn.ModuleList:
            return nn.ModuleList(Gate(sources, width, config.reduction) for _ in layers if config.gate)

        self.own, self.gates = nn.ModuleDict(), nn.ModuleDict()
        for name, bank in banks.items():
            if config.mcp == "reconstruct":
                sizes = others(name), widths[name], config.prompt_len, config.reduction
                self.own[name] = nn.ModuleList(Reconstruction(*sizes) for _ in range(config.depth))
                self.gates[name] = nn.ModuleList()
            else:
                self.own[name] = construct(bank, config)
                self.gates[name] = gates(others(name), widths[name])
        self.shared = self._shared(banks) if config.shared_len else nn.ModuleDict()
        self.shared_maps, self.shared_gates = nn.ModuleDict(), nn.ModuleDict()
        if config.shared_len:
            first = widths[self.modalities[0]]
            self.shared_queries = nn.Parameter(
                _normal(config.depth, config.shared_len, first if fused else _bottleneck(first, config.reduction))
            )
            for name in self.shared:
                self.shared_gates[name] = gates({"all": first} if fused else others(name), widths.get(name, first))
                if not fused:
                    self.shared_maps[name] = self._query_maps(_bottleneck(first, config.reduction), widths[name])
        # Running sum and count of the mean gate, by modality and layer: is a gate stuck?
        self.register_buffer("gate_sums", torch.zeros(2, len(widths), config.depth), persistent=False)
        self._built: tuple[tuple[int, ...], dict[str, Tensor]] | None = None

    def _shared(self, banks: Banks) -> nn.ModuleDict:
        """A single stream attends to all banks at once, towers each to their own."""
        memories = {"all": torch.cat(list(banks.values()), 1)} if self.fused else banks
        return nn.ModuleDict({name: BankAttention(bank, self.config.num_heads) for name, bank in memories.items()})

    def _query_maps(self, width: int, target: int) -> nn.ModuleList:
        return nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, target))
            for _ in range(self.config.depth)
        )

    # ------------------------------------------------------------------------------------------- prompts of no sample

    def build(self) -> dict[str, Tensor]:
        """The ungated prompts (depth, L, d) of each modality ("shared/..." for the shared ones), once for a step.

        In evaluation they are kept until a parameter changes.
        """
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            self._built = None
            return self._build()
        state = tuple(x for p in self.parameters() for x in (p._version, p.data_ptr()))
        if self._built is None or self._built[0] != state:
            self._built = state, self._build()
        return self._built[1]

    def _build(self) -> dict[str, Tensor]:
        built = {} if self.config.mcp == "reconstruct" else {name: make() for name, make in self.own.items()}
        for name, attention in self.shared.items():
            queries = self.shared_queries
            if name in self.shared_maps:
                queries = _by_layer(self.shared_maps[name], queries)
            built[f"shared/{name}"] = attention(queries)
        return built

    def diversity(self) -> dict[str, list[dict[str, float]]]:
        """By modality and layer: mean cosine of pairs of prompts, and the effective rank of the L tokens.

        Raises:
            ValueError: with mcp="reconstruct" there are no prompts without a sample.
        """
        if self.config.mcp == "reconstruct":
            raise ValueError("mcp='reconstruct' has no prompts without a sample, so no diversity")
        with torch.no_grad():
            built = {name: at_least_float32(tokens) for name, tokens in self.build().items() if name in self.own}
            return {name: [_diversity(tokens) for tokens in layers] for name, layers in built.items()}

    # -------------------------------------------------------------------------------------------- prompts of a sample

    def bind(self) -> SlotMaker:
        """What ``passes.run`` calls in every layer, around prompts built once."""
        built = self.build()

        def make(names: tuple[str, ...], layer: int, features: Features, present: Bool[Tensor, "b m"]) -> Slots:
            there = dict(zip(self.modalities, present.unbind(1), strict=True))
            own = {name: self._own(built, name, layer, features, there) for name in names}
            columns = [self.modalities.index(name) for name in names]
            tokens = mixed([own[name] for name in names], present[:, columns])
            if self.shared:
                tokens = torch.cat([self._shared_tokens(built, names[0], layer, features, there), tokens], 1)
            return Slots(tokens, own)

        return make

    def _own(
        self, built: Mapping[str, Tensor], name: str, layer: int, features: Features, there: Mapping[str, Tensor]
    ) -> Tensor:
        if name not in built:
            return cast(nn.ModuleList, self.own[name])[layer](features, there)
        gate = _layer_of(self.gates[name], layer)
        if gate is None:
            return built[name][layer].expand(len(there[name]), -1, -1)
        values, gated = gate(features, there)
        self._watch(name, layer, values, gated)
        return instantiate(built[name][layer], values, gated)

    def _shared_tokens(
        self, built: Mapping[str, Tensor], name: str, layer: int, features: Features, there: Mapping[str, Tensor]
    ) -> Tensor:
        if self.fused:
            name, anything = "all", torch.stack(list(there.values()), 1)
            total = torch.stack([f * there[m][:, None] for m, f in features.items()]).sum(0)
            features = {"all": total / anything.sum(1, keepdim=True).clamp(min=1)}
            there = {"all": anything.any(1)}
        tokens, gate = built[f"shared/{name}"][layer], _layer_of(self.shared_gates[name], layer)
        if gate is None:
            return tokens.expand(len(there[name]), -1, -1)
        return instantiate(tokens, *gate(features, there))

    @torch.no_grad()
    def _watch(self, name: str, layer: int, gate: Tensor, gated: Tensor) -> None:
        if self.training:
            sums = self.gate_sums[:, self.modalities.index(name), layer]
            sums += torch.stack([(gate.mean(1) * gated).sum(), gated.sum()]).to(sums.dtype)

    def mean_gates(self) -> dict[str, list[float]]:
        """The mean gate by modality and layer over the training samples since the last call (NaN without any)."""
        sums, counts = self.gate_sums.cpu()
        means = (sums / counts).tolist()
        self.gate_sums.zero_()
        return dict(zip(self.modalities, means, strict=True))


def _layer_of(modules: nn.Module, layer: int) -> nn.Module | None:
    """The layer's own, the one that all layers share, or none."""
    modules = cast(nn.ModuleList, modules)
    return modules[min(layer, len(modules) - 1)] if len(modules) else None


def _diversity(tokens: Float[Tensor, "L d"]) -> dict[str, float]:
    unit = normalize(tokens, dim=1)
    cosines = unit @ unit.T
    pairs = cosines[~torch.eye(len(unit), dtype=torch.bool, device=unit.device)]
    return {
        "cosine": float(pairs.mean()) if len(pairs) else 1.0,
        "effective_rank": float(effective_rank(torch.linalg.svdvals(tokens))),
    }
