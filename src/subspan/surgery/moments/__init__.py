"""Second moments of a model's layers on calibration data: inputs, output gradients and the mean gradient.

For a layer y = W x, position t of the data gives an input x_t and the gradient g_t of *one* example's negative
log-likelihood with respect to y_t. The collector streams S_X = mean x xᵀ, S_Y = mean g gᵀ and Gbar = mean g xᵀ;
S_X ⊗ S_Y approximates the layer's Fisher matrix (K-FAC, Martens and Grosse 2015).
"""

from subspan.surgery.moments.collect import collect_fisher
from subspan.surgery.moments.objective import Bernoulli, Categorical, Gaussian, Likelihood
from subspan.surgery.moments.statistics import Corrected, FisherStats, LayerMoments

__all__ = [
    "Bernoulli",
    "Categorical",
    "Corrected",
    "FisherStats",
    "Gaussian",
    "LayerMoments",
    "Likelihood",
    "collect_fisher",
]
