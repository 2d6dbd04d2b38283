"""What a private run promises, as data."""

import math
from dataclasses import dataclass
from typing import Literal

from subspan.privacy.accounting import Mechanism
from subspan.surgery import BaseShift

Method = Literal["prism", "naive", "ffa"]


@dataclass(frozen=True)
class PrismConfig:
    """What is promised and how.

    Args:
        target_epsilon: the budget that the planned steps spend; sigma follows from it.
        target_delta: delta of the guarantee.
        noise_multiplier: sigma itself, instead of ``target_epsilon``; 0 trains without privacy.
        max_grad_norm: C, the bound of each example's gradient norm over all modules together.
        method: "prism" clips and noises in the tangent space; "naive" on both factors; "ffa" trains lora_B alone.
        init: start of the factors: "spectral" (default of prism), "balanced_random", "keep" (default of the others), or
            the ``BaseShift`` of a run to resume.
        accountant: "prv" or "rdp" (Opacus).
        max_physical_batch: most examples per forward pass of ``micro_batches``; memory only.
        public_data: allow a peft start that looked at data, because that data is public.
        allow_unused: modules that a forward pass skips count as zero gradient instead of an error.
        diagnostics: keep clip fractions, norms and signal-to-noise ratios in ``PrismPrivacy.diagnostics``. They are
            NOT private.
    """

    target_epsilon: float | None = None
    target_delta: float = 1e-5
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    method: Method = "prism"
    init: Literal["spectral", "balanced_random", "keep"] | BaseShift | None = None
    accountant: Mechanism = "prv"
    max_physical_batch: int | None = None
    public_data: bool = False
    allow_unused: bool = False
    diagnostics: bool = False

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give either target_epsilon or noise_multiplier")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be finite and not negative, got {self.noise_multiplier}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {self.max_grad_norm}")
        if self.noise_multiplier != 0 and not math.isfinite(self.max_grad_norm):
            raise ValueError("max_grad_norm must be finite under noise: the noise is proportional to it")
        if self.max_physical_batch is not None and self.max_physical_batch < 1:
            raise ValueError(f"max_physical_batch must be at least 1, got {self.max_physical_batch}")
        if self.method not in ("prism", "naive", "ffa"):
            raise ValueError(f"method must be prism, naive or ffa, got {self.method!r}")
        if self.init not in ("spectral", "balanced_random", "keep", None) and not isinstance(self.init, BaseShift):
            raise ValueError(f"init must be spectral, balanced_random, keep or a BaseShift, got {self.init!r}")
