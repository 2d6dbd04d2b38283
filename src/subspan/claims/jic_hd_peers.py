"""Peers of the jic_hd claim that estimate whole graphs: penalised Gaussian likelihoods by ADMM, in float64 numpy.

All minimise sum_k (tr S_k Theta_k - log det Theta_k) + penalty; they differ in the penalty's proximal step. Penalties
leave the diagonal alone.
"""

from collections.abc import Callable

import numpy as np

Prox = Callable[[np.ndarray, float], np.ndarray]


def soft(x: np.ndarray, level: np.ndarray | float) -> np.ndarray:
    return np.sign(x) * np.maximum(np.abs(x) - level, 0.0)


def off_diagonal(prox: Prox) -> Prox:
    def step(x: np.ndarray, t: float) -> np.ndarray:
        out = prox(x, t)
        diagonal = np.arange(x.shape[-1])
        out[..., diagonal, diagonal] = x[..., diagonal, diagonal]
        return out

    return step


def likelihood_step(S: np.ndarray, target: np.ndarray, rho: float) -> np.ndarray:
    """argmin tr S Theta - log det Theta + (rho/2)|Theta - target|², for each k."""
    e, u = np.linalg.eigh(rho * target - S)
    return (u * ((e + np.sqrt(e**2 + 4 * rho)) / (2 * rho))[:, None]) @ np.swapaxes(u, 1, 2)


def admm(S: np.ndarray, prox: Prox, *, rho: float = 1.0, steps: int = 200, tol: float = 1e-4) -> np.ndarray:
    """Theta (K x p x p) with the penalty whose proximal step is ``prox``."""
    Z = np.stack([np.diag(1 / np.diag(s)) for s in S])
    U = np.zeros_like(Z)
    for _ in range(steps):
        theta = likelihood_step(S, Z - U, rho)
        last, Z = Z, prox(theta + U, 1 / rho)
        U += theta - Z
        if max(np.abs(theta - Z).max(), np.abs(Z - last).max()) < tol:
            break
    return Z


def ridge_inverse(S: np.ndarray, ridge: float = 0.1) -> np.ndarray:
    """The plainest estimate of all: inverses of the correlations, shrunk by a fixed ridge that nobody tuned."""
    return np.linalg.inv((1 - ridge) * S + ridge * np.eye(S.shape[-1]))


def graphical_lasso(S: np.ndarray, lam: float, weights: np.ndarray | float = 1.0) -> np.ndarray:
    """Each population alone (Friedman et al. 2008), optionally with a weight for each entry."""
    return admm(S, off_diagonal(lambda x, t: soft(x, t * lam * weights)))


def hub_weighted(S: np.ndarray, lam: float) -> np.ndarray:
    """Hub-weighted graphical lasso (McGillivray et al. 2020): entries of heavy rows of a first estimate are cheap.

    The first estimate is ``ridge_inverse``; weights are 1 / (|theta_ij| |theta_i|_1 |theta_j|_1)^(1/2), scaled to
    median 1.
    """
    p = S.shape[-1]
    first = ridge_inverse(S)
    first[:, np.arange(p), np.arange(p)] = 0.0
    heavy = np.abs(first).sum(1)
    weights = 1 / np.sqrt(np.maximum(np.abs(first), 1e-6) * heavy[:, :, None] * heavy[:, None, :])
    return graphical_lasso(S, lam, weights / np.median(weights, axis=(1, 2), keepdims=True))


def joint(S: np.ndarray, lam: float, share: float) -> np.ndarray:
    """Joint graphical lasso with the group penalty (Danaher et al. 2014); ``share`` of lam goes to single entries.

    share = 0 is the group-sparse covariance of Varoquaux et al. (2010).
    """

    def prox(x: np.ndarray, t: float) -> np.ndarray:
        x = soft(x, t * lam * share)
        norm = np.sqrt((x**2).sum(0))
        level = t * lam * (1 - share) * np.sqrt(len(x))
        return x * np.maximum(1 - level / np.maximum(norm, 1e-12), 0.0)

    return admm(S, off_diagonal(prox))


def hub_graphical_lasso(S: np.ndarray, lam: float, column: float, *, rho: float = 2.5, steps: int = 200) -> np.ndarray:
    """Column norms (K x p) of V in Theta = Z + V + Vᵀ (Tan et al. 2014, their ADMM): hubs are heavy columns.

    Penalties lam |Z|_1 + lam |V|_1 + column sum_j |V_j|_2, off the diagonal.
    """
    K, p, _ = S.shape
    eye = np.eye(p, dtype=bool)
    V, V2, W1, W2, W3 = (np.zeros((K, p, p)) for _ in range(5))
    theta2 = Z2 = np.tile(np.eye(p), (K, 1, 1))
    for _ in range(steps):
        theta = likelihood_step(S, theta2 - W1, rho)
        Z = np.where(eye, Z2 - W3, soft(Z2 - W3, lam / rho))
        C = V2 - W2
        shrunk = soft(np.where(eye, 0.0, C), lam / rho)
        norm = np.sqrt((shrunk**2).sum(1, keepdims=True))
        V = np.where(eye, C, shrunk * np.maximum(1 - column / (rho * np.maximum(norm, 1e-12)), 0.0))
        # the copies: theta2 = V2 + V2ᵀ + Z2, nearest to (theta, V, Z) + (W1, W2, W3)
        transposed = np.swapaxes(V + W2, 1, 2)
        gamma = rho / 6 * (theta + W1 - (V + W2) - transposed - (Z + W3))
        theta2 = theta + W1 - gamma / rho
        V2 = (gamma + np.swapaxes(gamma, 1, 2)) / rho + V + W2
        Z2 = gamma / rho + Z + W3
        W1, W2, W3 = W1 + theta - theta2, W2 + V - V2, W3 + Z - Z2
    return np.sqrt((np.where(eye, 0.0, V) ** 2).sum(1))


def row_strength(theta: np.ndarray) -> np.ndarray:
    """Sum of the magnitudes of each row off the diagonal (K x p)."""
    return np.abs(theta).sum(-1) - np.abs(np.diagonal(theta, axis1=-2, axis2=-1))
