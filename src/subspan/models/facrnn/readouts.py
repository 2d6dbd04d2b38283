"""Other bases for the latents of a fitted network: singular vectors of W (LINT's read-out), and ICA."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float
from sklearn.decomposition import FastICA

from subspan.linalg import LowRank
from subspan.models.facrnn.penalty import Groups

if TYPE_CHECKING:
    from subspan.models.facrnn.estimator import FacRNN


class Readout(NamedTuple):
    """A basis: W = A B as before, and latents z = B u + d."""

    A: Float[np.ndarray, "N K"]
    B: Float[np.ndarray, "K N"]
    d: Float[np.ndarray, "K"]

    def latents(self, u: Float[np.ndarray, "n N"]) -> Float[np.ndarray, "n K"]:
        """Of histories, as ``FacRNN.history`` gives them."""
        return u @ self.B.T + self.d

    def sub_connectivities(self, groups: Groups) -> Float[np.ndarray, "G N N"]:
        """W_g = A_g B_g for a partition of the coordinates."""
        return np.array([self.A[:, list(k)] @ self.B[list(k)] for k in groups])


def svd_readout(model: "FacRNN") -> Readout:
    """W = U S Vᵀ: A' = U S, B' = Vᵀ, and no bias (Valente et al. 2022). Signs are fixed.

    Raises:
        ValueError: the network has hidden layers.
    """
    network = model.network_
    svd = LowRank(network.A.detach().double(), network.B.detach().double().mT).svd()
    return Readout((svd.U * svd.S).cpu().numpy(), svd.V.mT.cpu().numpy(), np.zeros(len(svd.S)))


def ica_readout(model: "FacRNN", X: Any, *, random_state: Any = 0, max_iter: int = 1000, **series: Any) -> Readout:
    """FastICA of the encoder means on X: with unmixing C and mixing M, A' = A M and B' = C B.

    ``series`` are ``trial_lengths=`` and ``mask=``, as for ``FacRNN.fit``; bins masked as a whole are left out.

    Raises:
        ValueError: the network has hidden layers.
    """
    A, B, d = (getattr(model.network_, name).detach().double().cpu().numpy() for name in "ABd")
    mu = model.history(X, **series) @ B.T + d
    ica = FastICA(whiten="unit-variance", max_iter=max_iter, random_state=random_state).fit(mu)
    return Readout(A @ ica.mixing_, ica.components_ @ B, ica.components_ @ (d - ica.mean_))
