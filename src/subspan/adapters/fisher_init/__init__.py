"""Fisher-guided LoRA initialisation: start the adapter where the model's predictions are most sensitive.

After "Learning in the Fisher Subspace: A Guided Initialization for LoRA Fine-Tuning" (Feng, Lin and Kao, ICML 2026,
arXiv 2605.01046). Only its abstract and first page could be read; modes, signs, scale and allocation are a design of
our own from K-FAC (Martens and Grosse 2015), EKFAC (George et al. 2018), PiSSA, EVA, LoRA-GA and FWSVD.

A perturbation Z of an m x n weight costs about E(Z)/2 nats, with E(Z) = tr(S_Y Z S_X Zᵀ) the Fisher energy (S_X, S_Y
the second moments of inputs and output gradients). For orthonormal u_k and v_k the sum of E(u_k v_kᵀ) is largest for
the leading eigenvectors of S_Y and S_X, paired in order.
"""

from subspan.adapters.fisher_init.allocation import (
    LayerSpectrum,
    RankAllocation,
    allocate_ranks,
    fisher_spectrum,
)
from subspan.adapters.fisher_init.directions import Directions, alignment_scores, directions
from subspan.adapters.fisher_init.start import InitReport, LayerReport, fisher_init

__all__ = [
    "Directions",
    "InitReport",
    "LayerReport",
    "LayerSpectrum",
    "RankAllocation",
    "alignment_scores",
    "allocate_ranks",
    "directions",
    "fisher_init",
    "fisher_spectrum",
]
