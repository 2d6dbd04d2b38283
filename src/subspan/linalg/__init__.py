"""Tensors in, tensors out: the algebra every method shares. It knows no model and no file."""

from subspan.linalg.kronecker import (
    Covariance,
    DenseCovariance,
    FisherSVD,
    KroneckerCovariance,
    SpikedCovariance,
    nystrom,
)
from subspan.linalg.lowrank import SVD, LowRank, TangentSpace, TangentVector, fix_signs
from subspan.linalg.orthogonal import (
    NSMethod,
    nearest_orthogonal,
    newton_schulz,
    ns_coefficients,
    orthonormalise,
    polar,
    polar_express_coeffs,
    procrustes,
    random_orthonormal,
)
from subspan.linalg.spectra import (
    Eigh,
    Lanczos,
    lanczos,
    leading_eigh,
    leading_svd,
    randomized_svd,
    spectral_density,
    spectral_function,
)
from subspan.linalg.subspace import Subspace, effective_rank, singular_values, spectral_entropy, stable_rank

__all__ = [
    "SVD",
    "Covariance",
    "DenseCovariance",
    "Eigh",
    "FisherSVD",
    "KroneckerCovariance",
    "Lanczos",
    "LowRank",
    "NSMethod",
    "SpikedCovariance",
    "Subspace",
    "TangentSpace",
    "TangentVector",
    "effective_rank",
    "fix_signs",
    "lanczos",
    "leading_eigh",
    "leading_svd",
    "nearest_orthogonal",
    "newton_schulz",
    "ns_coefficients",
    "nystrom",
    "orthonormalise",
    "polar",
    "polar_express_coeffs",
    "procrustes",
    "random_orthonormal",
    "randomized_svd",
    "singular_values",
    "spectral_density",
    "spectral_entropy",
    "spectral_function",
    "stable_rank",
]
