"""What an injected memory looks like."""

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from subspan.adapters.moram.bank import Mixing, Read, Score

# Where small banks collapsed in our sweep (docs/methods/moram.md): the gate asks for a score that a cold softmax,
# trained without the gate, gives to few atoms.
_FRAGILE = 10.0


@dataclass(frozen=True)
class MoRAMConfig:
    """Options of ``inject_moram``. The defaults are robust on small banks; the paper's are in brackets.

    Args:
        r: atoms that each task appends to each adapted layer. [16 for CLIP, 8 for language models]
        top_k: atoms that a token reads; r by default. Below 2 it is 2.
        temperature: of the softmax over scores. [0.01 for CLIP, 0.03 for language models]
        threshold: score below which an atom stays silent in evaluation; None or 0: no gate. [0.2]
        alpha: output scale times r; r by default, that is, scale 1. [r, and 2r for language models]
        dropout: on what the keys see, in training. [0, and 0.1 for language models]
        target_modules: as for peft: names, suffixes, a regular expression, or "all-linear".
        read: "dense" multiplies with all values, "gather" reads the kept rows; "auto" chooses by the share kept.
        modules_to_save: names or suffixes of modules (a head) that train whole, in a copy, through all tasks.
        threshold_warmup: share of a task's steps, at its end, in which training is gated too. [0]
        score: "signed", or "abs": rank atoms by the magnitude of their response. [signed]
        normalize: divide responses by their norm over the live atoms. [True]
        mixing: "softmax", or "hard", weight 1 for every kept atom. [softmax]

    Raises:
        ValueError: a value outside its range.
    """

    r: int = 8
    top_k: int | None = None
    temperature: float = 0.05
    threshold: float | None = 0.2
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: str | Sequence[str] = ("q_proj", "v_proj")
    read: Read = "auto"
    modules_to_save: Sequence[str] | None = None
    threshold_warmup: float = 0.0
    score: Score = "signed"
    normalize: bool = True
    mixing: Mixing = "softmax"

    def __post_init__(self) -> None:
        if not isinstance(self.r, Integral) or self.r < 1:
            raise ValueError(f"r={self.r}: a task needs at least 1 atom")
        if self.top_k is not None and (not isinstance(self.top_k, Integral) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k}: a token reads at least 1 atom")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must lie in [0, 1], as scores do (None: no gate)")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha} must be positive")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        if not 0 <= self.threshold_warmup <= 1:
            raise ValueError(f"threshold_warmup={self.threshold_warmup} is a share of the steps, in [0, 1]")
        for name, known in (
            ("read", ("auto", "dense", "gather")),
            ("score", ("signed", "abs")),
            ("mixing", ("softmax", "hard")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.threshold and not self.normalize:
            raise ValueError("threshold compares scores of norm 1: with normalize=False set threshold=None")
        # Stored as plain integers and tuples, so that configurations compare equal after a round through json.
        object.__setattr__(self, "r", int(self.r))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", int(self.top_k))
        if not isinstance(self.target_modules, str):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        if self.modules_to_save is not None:
            object.__setattr__(self, "modules_to_save", tuple(self.modules_to_save))
        if self.top_k == 1:
            warnings.warn("top_k=1 reads 2 atoms: one alone has weight 1 whatever its score", stacklevel=3)
        if self.threshold and self.mixing == "softmax" and self.threshold / self.temperature > _FRAGILE:
            warnings.warn(
                f"threshold={self.threshold} with temperature={self.temperature} leaves small banks silent; raise "
                "temperature, or lower threshold",
                stacklevel=3,
            )

    @property
    def k(self) -> int:
        """Atoms a token reads, where the bank has as many."""
        return self.top_k or self.r

    def scale(self, r: int) -> float:
        """The output scale of a task with r atoms."""
        return 1.0 if self.alpha is None else self.alpha / r

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
