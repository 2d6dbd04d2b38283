"""Peers of PRISM on the factors themselves, for the same engine: LoRA+, LAMB and LoRA-RITE.

``naive`` and ``ffa`` are methods of the engine (they change what is clipped and noised); these change the optimizer.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from subspan.privacy.prism import inverse_root
from subspan.surgery import FactorPair


def lora_plus_groups(pairs: Iterable[FactorPair], lr: float, ratio: float = 16.0) -> list[dict[str, Any]]:
    """Parameter groups of LoRA+ (Hayou, Ghosh and Yu 2024): ``lora_B`` learns ``ratio`` times as fast as ``lora_A``."""
    pairs = list(pairs)
    return [
        {"params": [p.param_B for p in pairs], "lr": lr},
        {"params": [p.param_A for p in pairs], "lr": ratio * lr},
    ]


def _states(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], nn.Parameter, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield group, p, optimizer.state[p]


class Lamb(Optimizer):
    """LAMB (You et al. 2020): Adam whose step is scaled to the norm of each parameter (1 where that is zero)."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, p, state in _states(self):
            b1, b2 = group["betas"]
            if not state:
                state |= {"step": torch.zeros(()), "first": torch.zeros_like(p), "second": torch.zeros_like(p)}
            state["step"] += 1
            state["first"].lerp_(p.grad, 1 - b1)
            state["second"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            t = float(state["step"])
            update = state["first"] / (1 - b1**t) / ((state["second"] / (1 - b2**t)).sqrt() + group["eps"])
            size, length = p.norm(), update.norm()
            trust = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
            p.sub_(group["lr"] * trust * update)
        return loss


class LoraRite(Optimizer):
    """LoRA-RITE (Yen et al. 2025, arXiv 2410.20265): each factor is preconditioned in the other's orthonormal basis.

    With B = U R (QR) the gradient G U = gA R⁻¹ does not depend on how B is scaled; moments are carried from one basis
    to the next by P = Uᵀ U_previous, and what P loses of the second moment is kept as a multiple of the identity. It
    needs factors of full rank (not peft's zero start).
    """

    def __init__(
        self,
        pairs: Iterable[FactorPair],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self._pairs = list(pairs)
        params = [p for pair in self._pairs for p in (pair.param_A, pair.param_B)]
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        (group,) = self.param_groups
        for pair in self._pairs:
            z, gA, gB = pair.low_rank(), pair.grad_A(), pair.grad_B()
            if gA is None or gB is None:
                continue
            dA = self._direction(self.state[pair.param_A], gA.to(z.A.dtype), z.B, group)
            dB = self._direction(self.state[pair.param_B], gB.to(z.A.dtype), z.A, group)
            pair.param_A.sub_((group["lr"] * dA).reshape(pair.param_A.shape))
            pair.param_B.sub_((group["lr"] * dB.mT).reshape(pair.param_B.shape))
        return loss

    @staticmethod
    def _direction(state: dict[str, Any], g: Tensor, other: Tensor, group: dict[str, Any]) -> Tensor:
        b1, b2 = group["betas"]
        u, r = torch.linalg.qr(other)
        bar = torch.linalg.solve(r, g, left=False)
        if not state:
            state |= {
                "step": torch.zeros(()), "basis": u, "first": torch.zeros_like(bar),
                "second": torch.zeros_like(r), "escaped": torch.zeros(()).to(r),
            }  # fmt: skip
        state["step"] += 1
        carry = u.mT @ state["basis"]
        old, carried = state["second"], carry @ state["second"] @ carry.mT
        lost = (torch.linalg.eigvalsh(old) - torch.linalg.eigvalsh(carried)).abs().amax()
        state["escaped"] = b2 * (state["escaped"] + lost)
        state["second"] = b2 * carried + (1 - b2) * bar.mT @ bar
        t = float(state["step"])
        eye = torch.eye(r.shape[0], dtype=r.dtype, device=r.device)
        v = (state["second"] + state["escaped"] * eye) / (1 - b2**t)
        root = inverse_root(v, eps=group["eps"], floor=torch.zeros_like(state["escaped"]), cond_max=1e8)
        state["first"] = b1 * state["first"] @ carry.mT + (1 - b1) * bar @ root
        state["basis"] = u
        return torch.linalg.solve(r, (state["first"] / (1 - b1**t)).mT).mT  # M R⁻ᵀ
