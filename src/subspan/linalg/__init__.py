"""Tensors in, tensors out: the algebra every method shares. It knows no model and no file."""

from subspan.linalg.lowrank import SVD, LowRank, TangentSpace, TangentVector, fix_signs
from subspan.linalg.orthogonal import nearest_orthogonal, orthonormalise, polar, procrustes, random_orthonormal
from subspan.linalg.spectra import Eigh, Lanczos, lanczos, leading_eigh, randomized_svd, spectral_density
from subspan.linalg.subspace import Subspace, effective_rank, spectral_entropy, stable_rank

__all__ = [
    "SVD",
    "Eigh",
    "Lanczos",
    "LowRank",
    "Subspace",
    "TangentSpace",
    "TangentVector",
    "effective_rank",
    "fix_signs",
    "lanczos",
    "leading_eigh",
    "nearest_orthogonal",
    "orthonormalise",
    "polar",
    "procrustes",
    "random_orthonormal",
    "randomized_svd",
    "spectral_density",
    "spectral_entropy",
    "stable_rank",
]
