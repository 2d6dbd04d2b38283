"""When a twin's gradient helps: bias and variance of g_b + lambda g_a, and a network whose true gradient is known."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class GradientMoments:
    """First and second moments of a straight-through gradient g_b and a twin's g_a about the true gradient g*.

    Attributes:
        bias: delta_b = g* - E g_b.
        straight: mu_b = E g_b.
        twin: mu_a = E g_a.
        var_straight: tr Var g_b.
        var_twin: tr Var g_a.
        covariance: tr Cov(g_b, g_a); the paper takes 0.
    """

    bias: Float[Tensor, " d"]
    straight: Float[Tensor, " d"]
    twin: Float[Tensor, " d"]
    var_straight: float
    var_twin: float
    covariance: float = 0.0

    @classmethod
    def of(
        cls, straight: Float[Tensor, "n d"], twin: Float[Tensor, "n d"], truth: Float[Tensor, " d"]
    ) -> "GradientMoments":
        """From n samples of both gradients."""
        mu_b, mu_a = straight.mean(0), twin.mean(0)
        b, a = straight - mu_b, twin - mu_a
        n = len(straight)
        return cls(truth - mu_b, mu_b, mu_a, *(float((u * v).sum() / n) for u, v in ((b, b), (a, a), (b, a))))

    def mse(self, scale: float) -> float:
        """E ||g_b + lambda g_a - g*||^2."""
        miss = (scale * self.twin - self.bias).square().sum().item()
        return miss + self.var_straight + 2 * scale * self.covariance + scale**2 * self.var_twin

    def best_scale(self) -> float:
        """lambda* = (<delta_b, mu_a> - tr Cov) / (||mu_a||^2 + tr Var g_a), the minimiser of ``mse`` (Theorem 5.3)."""
        return ((self.bias @ self.twin).item() - self.covariance) / (self.twin.square().sum().item() + self.var_twin)

    def best_eta(self) -> float:
        """eta with lambda* = eta ||mu_b|| / ||mu_a||: beta c / (1 + rho) for uncorrelated noise (Corollary 5.4)."""
        return self.best_scale() * (self.twin.norm() / self.straight.norm()).item()

    def gain(self) -> float:
        """mse(0) - mse(lambda*), never negative."""
        return self.best_scale() ** 2 * (self.twin.square().sum().item() + self.var_twin)


def smoothed_sign_loss(
    x: Float[Tensor, " d"], readout: Float[Tensor, "k d"], target: Float[Tensor, " k"], noise: float
) -> tuple[Tensor, Float[Tensor, " d"]]:
    """E ||V sign(x + tau xi) - t||^2 / 2 over xi ~ N(0, I), and its gradient in x, both in closed form.

    With m_i = 2 Phi(x_i / tau) - 1 the signs have independent means m, so the loss is that of m plus
    sum_i (V^T V)_ii (1 - m_i^2) / 2, and dm_i/dx_i = 2 phi(x_i / tau) / tau.
    """
    scaled = x / noise
    mean = torch.erf(scaled / math.sqrt(2))
    gram = readout.mT @ readout
    loss = 0.5 * (readout @ mean - target).square().sum() + 0.5 * (gram.diagonal() * (1 - mean.square())).sum()
    coupled = gram @ mean - gram.diagonal() * mean
    slope = 2 * torch.exp(-0.5 * scaled.square()) / (noise * math.sqrt(2 * math.pi))
    return loss, (coupled - readout.mT @ target) * slope
