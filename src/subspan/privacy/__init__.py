"""What may the model reveal? Differentially private LoRA: PRISM, its peers, and one engine and accountant for all."""

from subspan.privacy.accounting import NoiseMultiplier, noise_multiplier
from subspan.privacy.baselines import Lamb, LoraRite, lora_plus_groups
from subspan.privacy.config import PrismConfig
from subspan.privacy.engine import PrismPrivacy
from subspan.privacy.prism import Prism
from subspan.privacy.sampling import PoissonBatchSampler, empty_safe, micro_batches
from subspan.privacy.starts import balanced_random_init, spectral_init

__all__ = [
    "Lamb",
    "LoraRite",
    "NoiseMultiplier",
    "PoissonBatchSampler",
    "Prism",
    "PrismConfig",
    "PrismPrivacy",
    "balanced_random_init",
    "empty_safe",
    "lora_plus_groups",
    "micro_batches",
    "noise_multiplier",
    "spectral_init",
]
