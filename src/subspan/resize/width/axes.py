"""What each axis of a stored tensor is, and what it becomes when a network grows.

A rule names a tensor's axes in the order in which they are stored, with an arrow from the input axis to the output
axis: ``"ffn <- residual"`` is a linear layer's weight (out x in), ``"residual -> ffn"`` the same in transformers'
Conv1D (in x out), ``"vocab -> residual"`` an embedding and ``"residual"`` a norm's weight or a bias. Parts of a packed
axis are joined by ``+`` (``"heads+heads+heads <- residual"``); each is cloned as a whole. ``"3*heads"`` is one part,
three times as long as the heads' axis. Axes further from the arrow lie outside: ``"experts ffn <- residual"``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

# "width" is a hidden width of its own (an MLP's); the others have one size throughout a network.
FFN = ("ffn", "moe_ffn", "shared_ffn")
GROWING = ("residual", "heads", "kv_heads", *FFN, "embed", "width")
FIXED = ("vocab", "class", "pos", "patch", "experts", "head_dim", "fixed")

_PART = re.compile(r"(?:(\d+)\*)?(\w+)")


@dataclass(frozen=True)
class Rule:
    """A parsed rule: (repeats, kind) of the parts of each axis, and which axes are the output and the input."""

    axes: tuple[tuple[tuple[int, str], ...], ...]
    out: int | None = None
    inp: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Read a rule. Raises ``ValueError``, with the rule, for an unknown kind of axis or two arrows."""
        sides = re.split(r"(<-|->)", text)
        if len(sides) not in (1, 3):
            raise ValueError(f"the axis rule {text!r} has more than one arrow")
        names = text.replace("<-", " ").replace("->", " ").split()
        axes = tuple(tuple(_part(part, text) for part in name.split("+")) for name in names)
        if len(sides) == 1:
            growing = [i for i, axis in enumerate(axes) if any(kind in GROWING for _, kind in axis)]
            return cls(axes, out=growing[0] if growing else None)
        left = len(sides[0].split())
        ends = (left - 1, left) if sides[1] == "<-" else (left, left - 1)
        if not 0 < left < len(axes):
            raise ValueError(f"the axis rule {text!r} needs an axis on both sides of its arrow")
        return cls(axes, *ends)

    def vector(self) -> "Rule":
        """Of the bias that goes with this weight: its output axis."""
        return self if self.out is None else Rule((self.axes[self.out],), out=0)


def _part(text: str, rule: str) -> tuple[int, str]:
    match = _PART.fullmatch(text)
    if not match or match[2] not in GROWING + FIXED:
        raise ValueError(f"unknown axis {text!r} in the rule {rule!r}; axes are: {', '.join(GROWING + FIXED)}")
    return int(match[1] or 1), match[2]


def find_rule(rules: Mapping[str, str], name: str, ndim: int) -> Rule | None:
    """The first rule whose pattern matches a tensor's name, or the name of the layer that holds it."""
    layer, _, leaf = name.rpartition(".")
    for pattern, text in rules.items():
        if fnmatchcase(name, pattern) or (leaf in ("weight", "bias", *_STATISTICS) and fnmatchcase(layer, pattern)):
            rule = Rule.parse(text)
            return rule.vector() if ndim == 1 else rule
    return None


_STATISTICS = ("running_mean", "running_var")  # of batch normalisation


def seed_for(name: str, base: int) -> torch.Generator:
    """A generator of this name's own, so that what it draws does not depend on which others came before."""
    digest = blake2b(f"{base}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)


@dataclass(frozen=True)
class Drawn:
    """Clones of single units (Net2Net): the unit behind each of the new ones, and its share of what the unit sent."""

    index: Tensor
    share: Tensor

    @classmethod
    def draw(cls, size: int, wide: int, split: str, generator: torch.Generator) -> "Drawn":
        """Every unit once, the rest at random; shares that sum to one per unit, equal or drawn ("random")."""
        more = torch.randint(size, (wide - size,), generator=generator)
        index = torch.cat([torch.arange(size), more])
        # Normalised exponentials are Dirichlet(1).
        raw = torch.ones(wide, dtype=torch.float64)
        if split == "random":
            raw.exponential_(generator=generator)
        return cls(index, raw / raw.new_zeros(size).index_add_(0, index, raw)[index])


@dataclass(frozen=True)
class Segment:
    """A part of an axis: its kind, its size in the seed, and its clones (whole, or of single units)."""

    kind: str
    size: int
    times: int = 1
    drawn: Drawn | None = None

    @property
    def wide(self) -> int:
        return self.size * self.times if self.drawn is None else len(self.drawn.index)

    @property
    def grows(self) -> bool:
        return self.wide > self.size


@dataclass(frozen=True)
class Layout:
    """One tensor's axes: what each part of them becomes.

    Attributes:
        name: of the tensor.
        axes: parts of each axis, in the order in which they are stored.
        out: index of the output axis.
        inp: index of the input axis; only clones along it are divided.
        gain: further factor on the tensor in the wide network.
        offset: what the network adds to the tensor before use (1 in Gemma's norms), which ``gain`` multiplies too.
    """

    name: str
    axes: tuple[tuple[Segment, ...], ...]
    out: int | None = None
    inp: int | None = None
    gain: float = 1.0
    offset: float = 0.0

    @property
    def seed_shape(self) -> tuple[int, ...]:
        return tuple(sum(s.size for s in axis) for axis in self.axes)

    @property
    def wide_shape(self) -> tuple[int, ...]:
        return tuple(sum(s.wide for s in axis) for axis in self.axes)

    def _times(self, axis: int | None) -> int:
        times = {s.times for s in self.axes[axis]} if axis is not None else {1}
        if len(times) > 1 or (axis is not None and any(s.drawn for s in self.axes[axis])):
            raise ValueError(f"{self.name} has no single factor along its axis {axis}: not every unit has equal clones")
        return times.pop()

    @property
    def r_out(self) -> int:
        """Clones along the output axis."""
        return self._times(self.out)

    @property
    def r_in(self) -> int:
        """Clones along the input axis."""
        return self._times(self.inp)

    @property
    def hidden(self) -> bool:
        """Whether this is the weight of a layer between two axes that can grow."""
        ends = [self.axes[i] for i in (self.out, self.inp) if i is not None]
        return len(ends) == 2 and all(s.kind in GROWING for axis in ends for s in axis)

    def describe(self) -> str:
        """The axes and their factors, as in "heads x2 <- residual x2"."""
        names = ["+".join(_clones(s) for s in axis) for axis in self.axes]
        if self.out is None or self.inp is None:
            return " ".join(names)
        arrow = "<-" if self.out < self.inp else "->"
        at = max(self.out, self.inp)
        return " ".join([*names[:at], arrow, *names[at:]])


def _clones(s: Segment) -> str:
    return f"{s.kind} {s.size}->{s.wide}" if s.drawn else f"{s.kind} x{s.times}" if s.grows else s.kind


@dataclass(frozen=True)
class Family:
    """What networks of one architecture have in common, as data.

    Attributes:
        rules: pattern of names -> rule; the first match counts. A pattern of a layer's name serves weight and bias.
        counts: kind of axis -> attribute of the configuration that holds its size (for heads: their number).
        final_norm: pattern of the norm before a head that may be tied to the embedding; None forbids keeping the tie.
        scaled_embedding: the network multiplies embeddings by the root of its width.
        norm_offset: what the network adds to its norms' weights.
        resize: called with the new network and ``size(kind, old)``, to set what no tensor's shape says.
    """

    rules: Mapping[str, str]
    counts: Mapping[str, str] = field(default_factory=dict)
    final_norm: str | None = None
    scaled_embedding: bool = False
    norm_offset: float = 0.0
    resize: Callable[[Any, Callable[[str, int], int]], None] | None = None


@dataclass(frozen=True)
class Growth:
    """Factors of the residual axis and of the feed-forward one, how a fraction of the latter is filled, and the seed
    of everything drawn."""

    factor: int
    ffn_factor: int | float
    split: str = "even"
    seed: int = 0

    @classmethod
    def of(
        cls,
        factor: int | float,
        ffn_factor: int | float | None = None,
        split: str = "even",
        seed: int = 0,
    ) -> "Growth":
        """Checked. Raises ``ValueError`` for factors that cannot be."""
        ffn = factor if ffn_factor is None else ffn_factor
        if isinstance(factor, bool) or not isinstance(factor, int):
            raise ValueError(
                f"factor must be a whole number, got {factor!r}: a norm over a fraction of clones would change; only "
                "ffn_factor may be fractional"
            )
        if factor < 1 or (factor == 1 and not ffn > 1):
            raise ValueError(f"factor must be at least 2 (or 1 with ffn_factor above 1), got {factor}")
        if not 1 <= ffn < float("inf"):
            raise ValueError(f"ffn_factor must be at least 1 and finite, got {ffn}")
        if split not in ("even", "random"):
            raise ValueError(f"split must be 'even' or 'random', got {split!r}")
        return cls(factor, int(ffn) if float(ffn).is_integer() else ffn, split, seed)

    def times(self, kind: str, config: Any = None) -> int | float:
        """Factor of an axis. One key head serves all queries, before and after; so does a fixed embedding width."""
        if kind in FFN:
            return self.ffn_factor
        if kind not in GROWING:
            return 1
        if config is not None and kind == "kv_heads" and getattr(config, "num_key_value_heads", None) == 1:
            return 1
        if config is not None and kind == "embed" and config.word_embed_proj_dim != config.hidden_size:
            return 1
        return self.factor


class Sizes:
    """Sizes in the seed and clones of every kind of axis, of a network with a configuration or without."""

    def __init__(self, family: Family, growth: Growth, config: Any = None, wide: bool = False) -> None:
        self.growth, self.config, self.wide = growth, config, wide
        self.known: dict[str, tuple[int, str]] = {}  # kind -> size as stored, and who says so
        self._parts: dict[tuple[str, int], Segment] = {}
        if config is None:
            return
        for kind, attribute in family.counts.items():
            size = count(config, kind, attribute) * (head_dim(config) if kind in ("heads", "kv_heads") else 1)
            self.known[kind] = (size, f"the configuration's {attribute}")
        if "heads" in self.known:
            self.known.setdefault("kv_heads", self.known["heads"])

    def segment(self, kind: str, stored: int) -> Segment:
        """The part of ``stored`` units, with its clones; drawn ones are the same wherever the part occurs."""
        times = self.growth.times(kind, self.config)
        if isinstance(times, int):
            size, rest = divmod(stored, times) if self.wide else (stored, 0)
            if rest:
                raise ValueError(f"a {kind} axis of {stored} does not hold {times} clones of equal size")
            return Segment(kind, size, times)
        if self.wide:
            raise ValueError(f"only whole clones can be folded; ffn_factor {times} is no whole number")
        if (kind, stored) not in self._parts:
            wide = round(stored * times)
            drawn = Drawn.draw(stored, wide, self.growth.split, seed_for(f"{kind} {stored}", self.growth.seed))
            self._parts[kind, stored] = Segment(kind, stored, 1, drawn if wide > stored else None)
        return self._parts[kind, stored]

    def layout(self, name: str, shape: tuple[int, ...], rule: Rule) -> Layout:
        """The layout of a tensor of this shape. Raises ``ValueError`` where the shape is not what the sizes say."""
        if len(rule.axes) != len(shape):
            raise ValueError(f"{name} has shape {shape}, but its axis rule has {len(rule.axes)} axes")
        axes = tuple(
            self._axis(name, i, stored, parts) for i, (stored, parts) in enumerate(zip(shape, rule.axes, strict=True))
        )
        return Layout(name, axes, rule.out, rule.inp)

    def _axis(self, name: str, at: int, stored: int, parts: tuple[tuple[int, str], ...]) -> tuple[Segment, ...]:
        kinds = {kind for _, kind in parts}
        if len(parts) == 1 and parts[0][1] in (*FIXED, "width"):
            return (self.segment(parts[0][1], stored),)
        if len(kinds) == 1 and (total := sum(n for n, _ in parts)) and stored % total == 0:
            (kind,) = kinds
            self.known.setdefault(kind, (stored // total, name))
        if unknown := kinds - self.known.keys():
            raise ValueError(f"{name}: the sizes of its parts {', '.join(sorted(unknown))} are nowhere to be read")
        sizes = [n * self.known[kind][0] for n, kind in parts]
        if sum(sizes) != stored:
            said = "; ".join(f"{k} is {self.known[k][0]} by {self.known[k][1]}" for k in sorted(kinds))
            raise ValueError(f"axis {at} of {name} is {stored}, its parts come to {sum(sizes)} ({said})")
        return tuple(self.segment(kind, size) for size, (_, kind) in zip(sizes, parts, strict=True))


def head_dim(config: Any) -> int:
    """Of attention heads, which never changes."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def count(config: Any, kind: str, attribute: str) -> int:
    """What a configuration says; GPT-2's unset feed-forward width is four times the residual one."""
    value: int | None = getattr(config, attribute, None)
    if value is None and kind == "ffn":
        return 4 * config.hidden_size
    if value is None:
        raise ValueError(f"the configuration has no {attribute}, which is the size of its {kind} axis")
    return value


def gauge(layout: Layout, family: Family, growth: Growth, *, tied: bool) -> Layout:
    """The layout with the factors that scaled and tied embeddings ask for.

    A network that multiplies its embedding by the root of its width gets c = 1/sqrt(n) on the table, others c = 1. A
    head that stays tied to the table sums n clones where an untied one would take their mean: the norm before it takes
    1 / (c n). Nothing else changes, so norms keep their epsilon.
    """
    n = growth.factor
    c = n**-0.5 if family.scaled_embedding else 1.0
    if layout.inp is not None and layout.axes[layout.inp][0].kind == "vocab":
        return replace(layout, gain=c)
    if tied and family.final_norm and fnmatchcase(layout.name, family.final_norm):
        return replace(layout, gain=1 / (c * n), offset=family.norm_offset)
    return layout
