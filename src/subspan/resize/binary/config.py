"""How a binary layer is trained."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from subspan.resize.binary.estimators import AlphaGrad, Estimator, Transform


@dataclass(frozen=True)
class SurgeConfig:
    """How the gradient of binary layers is made.

    Attributes:
        mode: "ags" adds the gradient of a full-precision twin, scaled to ``eta`` times the norm of the straight-through
            gradient; "fixed" adds ``fixed_scale`` times it; "ste" adds nothing.
        eta: the share of the twin's gradient, relative to the straight-through one. Try 0.03, 0.1, 0.3 and 1.
        fixed_scale: lambda of mode "fixed".
        schedule: of ``eta`` over training, "constant" or "cosine" to zero (see ``set_progress``).
        eps: added to the norm that divides.
        granularity: one lambda for the "layer", each "sample" or each input "channel".
        reference: norm of the straight-through gradient with its mask ("clipped", as published) or without
            ("unclipped", which still compensates where every input is saturated).
        ema: decay of a running mean of the two norms, or None for those of the step alone.
        lambda_max: a guard: a twin of zeros would get ||g_b|| / eps.
        estimator: what stands in for the derivative of the sign; see ``derivative``.
        alpha: a scale per output "channel", the mean magnitude of its weights, or "none".
        alpha_grad: how the weights' gradient treats it; see ``weight_gradient``.
        transform: of the latent weights before their sign; see ``transformed``.
        tau: quantile of transform "recu".
        aux_init: the twin starts as a "copy" of the latent weights or at "random".
        aux_update: train the twin.
        share: take the latent weights themselves for the twin; no extra memory, and nothing more to train.
        debug: raise where an input is not finite (otherwise NaN goes on to the output).
    """

    mode: Literal["ags", "fixed", "ste"] = "ags"
    eta: float = 0.3
    fixed_scale: float = 1.0
    schedule: Literal["constant", "cosine"] = "constant"
    eps: float = 1e-8
    granularity: Literal["layer", "sample", "channel"] = "layer"
    reference: Literal["clipped", "unclipped"] = "clipped"
    ema: float | None = None
    lambda_max: float = 1e6
    estimator: Estimator = "clip"
    alpha: Literal["channel", "none"] = "channel"
    alpha_grad: AlphaGrad = "identity"
    transform: Transform = "none"
    tau: float = 0.99
    aux_init: Literal["copy", "random"] = "copy"
    aux_update: bool = True
    share: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        for name, field in self.__dataclass_fields__.items():
            known = get_args(field.type)
            if known and all(isinstance(k, str) for k in known) and getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        for name in ("eta", "fixed_scale"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name in ("eps", "lambda_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0.5 < self.tau <= 1:
            raise ValueError(f"tau must be in (0.5, 1], got {self.tau}")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema must be in [0, 1), got {self.ema}")
        if self.ema is not None and self.granularity != "layer":
            raise ValueError(f"ema smooths one pair of norms a layer; granularity {self.granularity!r} has many")

    @property
    def has_twin(self) -> bool:
        """Whether layers hold a weight of their own for the twin."""
        return self.mode != "ste" and not self.share

    def eta_at(self, progress: float) -> float:
        """``eta`` when this share of training is done."""
        return self.eta * (0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0)
