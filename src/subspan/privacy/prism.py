"""PRISM: a LoRA step that depends on the update Z = A Bᵀ alone, not on the factors that happen to store it.

Shihao Wang and Xueru Zhang, "PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA", ICML 2026, arXiv
2606.00944. The geometry (tangent projection, lift, sampler, retraction) is ``subspan.linalg.LowRank``; here is the
adaptive direction and the optimizer that applies it. Everything it does is post-processing of a released gradient.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from subspan.errors import NonFinite
from subspan.linalg import SVD, LowRank, TangentSpace, orthonormalise, procrustes, spectral_function
from subspan.privacy.starts import tangent_space, unbalanced
from subspan.surgery import FactorPair

log = logging.getLogger(__name__)

# Most numbers of one stacked quantity (first moments, say): it bounds the memory of a step, 16 MiB in float32.
_BUCKET = 2**22
_MOMENTS = ("first_A", "first_B", "second_A", "second_B", "frame")

Precond = Literal["rank_space", "whitened"]
Floor = Literal["scalar", "geometry", "none"]
Horizontal = Literal["both", "pre_moment", "pre_retract", "none"]


# ------------------------------------------------------------------------------------------------------- mathematics


class Grams(NamedTuple):
    """M = AᵀA and N = BᵀB with their eigenvalues and eigenvectors, all r x r."""

    M: Tensor
    N: Tensor
    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, z: LowRank) -> "Grams":
        both = torch.stack([z.A.mT @ z.A, z.B.mT @ z.B])
        return cls(both[0], both[1], *torch.linalg.eigh(both))


def horizontalise(z: LowRank, dA: Tensor, dB: Tensor, grams: Grams | None = None) -> tuple[Tensor, Tensor]:
    """The representative (dA, dB) of the same dZ = dA Bᵀ + A dBᵀ with the least |dA|² + |dB|²: Aᵀ dA = dBᵀ B."""
    _, _, (mu, nu), (p, q) = Grams.of(z) if grams is None else grams
    # (3.3) M Om + Om N = dBᵀ B - Aᵀ dA; the clamp keeps a collapsed pair of directions from dividing by zero
    denominator = (mu.unsqueeze(-1) + nu.unsqueeze(-2)).clamp(min=1e-12)
    om = p @ (p.mT @ (dB.mT @ z.B - z.A.mT @ dA) @ q / denominator) @ q.mT
    return dA + z.A @ om, dB - z.B @ om.mT


def inverse_root(
    v: Float[Tensor, "*b r r"], *, eps: float, floor: Float[Tensor, "*b"], cond_max: float
) -> Float[Tensor, "*b r r"]:
    """(3.3) v^{-1/2} for symmetric v, eigenvalues raised by ``eps``, to ``floor`` and to the largest / ``cond_max``.

    Small eigenvalues are raised; large ones are never capped, because capping would amplify the noise in them.
    """

    def root(w: Tensor) -> Tensor:
        w = torch.maximum(w.clamp(min=0) + eps, floor.unsqueeze(-1))
        return torch.maximum(w, w.amax(-1, keepdim=True) / cond_max).rsqrt()

    return spectral_function((v + v.mT) / 2, root)


def _of_gram(gram: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """f of a Gram matrix, whose eigenvalues are kept above round-off of the largest."""
    least = torch.finfo(gram.dtype).eps
    return spectral_function(gram, lambda s: f(torch.maximum(s, least * s.amax(-1, keepdim=True))))


def noise_moment(gram: Float[Tensor, "*b r r"], rows: int, *, horizontal: bool, whitened: bool) -> Tensor:
    """E[dAᵀ dA] / m for a unit Gaussian tangent vector, lifted in a balanced gauge with AᵀA = BᵀB = ``gram``.

    m = ``rows``; the same holds for dB with n. The part outside col(A) gives (m - r) / m N⁻¹. The r x r part inside is
    shared by both factors: in halves by the plain lift (r / 4 N⁻¹), by the Sylvester weights if horizontalised.
    """
    r = gram.shape[-1]

    def energy(s: Tensor) -> Tensor:
        shared = (s.unsqueeze(-2) / (s.unsqueeze(-1) + s.unsqueeze(-2))).square().sum(-2) if horizontal else r / 4
        return (rows - r + shared) / rows * (torch.ones_like(s) if whitened else 1 / s)

    return _of_gram(gram, energy)


def eigenvalue_floor(
    kind: Floor, *, factor: float, noise_std: float, gram: Float[Tensor, "*b r r"], share: float
) -> Float[Tensor, "*b"]:
    """(3.3) Lower bound of the second moment's eigenvalues, in units of the released noise tau² = ``noise_std``².

    ``gram`` is the other factor's Gram matrix and ``share`` the fraction of its inverse that the noise has here:
    (m - r) / m for A, 1 for B. "geometry" follows the mean noise energy tr(gram⁻¹) / r where that is larger.
    """
    base = torch.full(gram.shape[:-2], factor * noise_std**2, dtype=gram.dtype, device=gram.device)
    if kind == "none":
        return torch.zeros_like(base)
    if kind == "scalar":
        return base
    mean = _of_gram(gram, torch.reciprocal).diagonal(dim1=-2, dim2=-1).mean(-1)
    return torch.maximum(base, base * share * mean)


class Moments(NamedTuple):
    """Running means of one factor's direction (m x r) and of its Gram matrix per row (r x r)."""

    first: Tensor
    second: Tensor


class Rule(NamedTuple):
    """The numbers of the adaptive rule (3.3); what they mean is said at ``Prism``."""

    betas: tuple[float, float]
    eps: float
    cond_max: float
    noise_std: float
    precond: Precond
    floor: Floor
    floor_factor: float
    debias: bool
    horizontal: Horizontal
    delayed: bool


def adaptive_side(
    d: Float[Tensor, "*b m r"],
    moments: Moments,
    t: Float[Tensor, "*b"],
    gram: Float[Tensor, "*b r r"],
    share: float,
    rule: Rule,
) -> tuple[Tensor, Moments]:
    """(3.3) One factor's preconditioned direction, and its updated moments. ``t`` counts steps from 1."""
    b1, b2 = rule.betas
    whitened = rule.precond == "whitened"
    seen = gram
    if whitened:  # in d gram^{1/2} the noise is tau² I, so the scalar floor is exact
        d = d @ _of_gram(gram, torch.sqrt)
        seen = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    rows, n = d.shape[-2], t[..., None, None]
    first = b1 * moments.first + (1 - b1) * d
    second = b2 * moments.second + (1 - b2) * (d.mT @ d) / rows
    mhat = first / (1 - b1**n)
    vhat = second / (1 - b2**n)
    if rule.delayed:  # the root of v_{t-1} does not depend on this step's noise
        vhat = torch.where(n > 1, moments.second / (1 - b2 ** (n - 1).clamp(min=1)), vhat)
    if rule.debias:
        horizontal = rule.horizontal in ("both", "pre_moment")
        noise = noise_moment(gram, rows, horizontal=horizontal, whitened=whitened)
        vhat = vhat - rule.noise_std**2 * noise
    floor = eigenvalue_floor(rule.floor, factor=rule.floor_factor, noise_std=rule.noise_std, gram=seen, share=share)
    direction = mhat @ inverse_root(vhat, eps=rule.eps, floor=floor, cond_max=rule.cond_max)
    if whitened:
        direction = direction @ _of_gram(gram, torch.rsqrt)
    return direction, Moments(first, second)


def adaptive_direction(
    z: LowRank, dA: Tensor, dB: Tensor, a: Moments, b: Moments, t: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Moments, Moments]:
    """(3.3) The DP-aware adaptive direction (UA, UB) from a lifted gradient at balanced ``z``."""
    grams = Grams.of(z)
    if rule.horizontal in ("both", "pre_moment"):
        dA, dB = horizontalise(z, dA, dB, grams)
    m, r = z.A.shape[-2:]
    uA, a = adaptive_side(dA, a, t, grams.N, (m - r) / m, rule)
    uB, b = adaptive_side(dB, b, t, grams.M, 1.0, rule)
    if rule.horizontal in ("both", "pre_retract"):
        uA, uB = horizontalise(z, uA, uB, grams)
    return uA, uB, a, b


def canonical_gauge(
    z: LowRank, space: TangentSpace, frame: Float[Tensor, "*b r r"], stale: Tensor
) -> tuple[LowRank, TangentSpace]:
    """Where ``stale``, the same Z in the gauge (U S^{1/2} Q, V S^{1/2} Q), Q = ``frame``; elsewhere as stored.

    The rank-space rule is equivariant under rotations only, so its factors must be balanced (3.3); Q keeps the moment
    buffers' meaning when someone rescaled the stored factors between two steps.
    """
    balanced = LowRank.from_svd(SVD(space.U, space.S, space.V))
    where = stale[..., None, None]
    z = LowRank(torch.where(where, balanced.A @ frame, z.A), torch.where(where, balanced.B @ frame, z.B))
    return z, replace(space, TA=space.U.mT @ z.A, TB=space.V.mT @ z.B)


def refill(z: LowRank, scale: Float[Tensor, "*b"], seed: int) -> tuple[LowRank, Tensor]:
    """Give lost directions of a sign-fixed balanced Z back: orthonormal, of size 1e-4 of the largest, free of data.

    A direction is lost when its singular value is below 1e-7 of the largest (or below round-off, where that is more).
    ``scale`` stands in for the largest where Z is zero. Returns Z and which of the batch lost any.
    """
    s = z.A.square().sum(-2)
    top = torch.maximum(s[..., :1], scale.unsqueeze(-1) * torch.finfo(s.dtype).eps)
    lost = s < max(1e-7, 8 * torch.finfo(s.dtype).eps) * top
    if not bool(lost.any()):
        return z, lost.any(-1)
    generator = torch.Generator().manual_seed(seed)
    mask, root = lost.unsqueeze(-2), s.clamp(min=torch.finfo(s.dtype).tiny).sqrt().unsqueeze(-2)

    def completed(f: Tensor) -> Tensor:
        fresh = torch.randn(f.shape, generator=generator, dtype=f.dtype).to(f.device)
        return orthonormalise(torch.where(mask, fresh, f / root))

    s = torch.where(lost, 1e-4 * torch.maximum(s[..., :1], 1e-4 * scale.unsqueeze(-1)), s)
    return LowRank.from_svd(SVD(completed(z.A), s, completed(z.B))), lost.any(-1)


# --------------------------------------------------------------------------------------------------------- optimizer


class Prism(Optimizer):
    """Adaptive descent on the manifold of rank-r updates, in any gauge of the stored LoRA factors.

    It reads the ``.grad`` of both factors of each pair: after ``loss.backward()`` this is non-private Riemannian Adam;
    under ``PrismPrivacy`` the engine leaves a clipped and noised gradient there.

    Args:
        pairs: ``factor_pairs(model)``, or groups ``{"pairs": [...], "lr": ...}``. Both factors must have full column
            rank (not peft's zero start): ``spectral_init`` and ``balanced_random_init`` give such starts.
        lr: learning rate eta.
        betas: decay of the first and second moment.
        eps: added to the second moment's eigenvalues.
        noise_std: tau = sigma C / L of the released gradient (``PrismPrivacy.noise_std``); 0 without privacy.
        adaptive: False for plain Riemannian gradient descent, without moments.
        precond: "rank_space" (the paper) keeps moments of (dA, dB); "whitened" those of (dA N^{1/2}, dB M^{1/2}).
        floor: lower bound of second-moment eigenvalues, see ``eigenvalue_floor``.
        floor_factor: f, in units of tau².
        debias: subtract the noise's expected second moment first.
        cond_max: largest condition number of the preconditioner's second moment.
        horizontal: where the minimum-norm representative of dZ is taken.
        delayed: precondition with the previous step's second moment.
        weight_decay: decoupled decay of Z.
        trust_ratio: scale the update to |Z|_F (LAMB).
        update_cap: largest |dZ|_F before the learning rate, or None.
        dense: further parameters (a classification head), trained by AdamW in the same object.
        dense_lr: their learning rate (default: ``lr``).

    The defaults are those of the authors' released runs. The class defaults of their code differ: floor="geometry",
    floor_factor=1, debias=True, horizontal="none".
    """

    def __init__(
        self,
        pairs: Iterable[FactorPair] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        noise_std: float = 0.0,
        adaptive: bool = True,
        precond: Precond = "rank_space",
        floor: Floor = "scalar",
        floor_factor: float = 0.5,
        debias: bool = False,
        cond_max: float = 1e4,
        horizontal: Horizontal = "both",
        delayed: bool = False,
        weight_decay: float = 0.0,
        trust_ratio: bool = False,
        update_cap: float | None = None,
        dense: Iterable[nn.Parameter] = (),
        dense_lr: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "noise_std": noise_std, "adaptive": adaptive,
            "precond": precond, "floor": floor, "floor_factor": floor_factor, "debias": debias, "cond_max": cond_max,
            "horizontal": horizontal, "delayed": delayed, "weight_decay": weight_decay, "trust_ratio": trust_ratio,
            "update_cap": update_cap, "kind": "pairs",
        }  # fmt: skip
        _check(defaults)
        self._pairs: dict[int, FactorPair] = {}
        groups = _as_groups(pairs)
        for group in groups:
            members = group.pop("pairs")
            group["params"] = [p for pair in members for p in (pair.param_A, pair.param_B)]
            self._pairs |= {id(pair.param_A): pair for pair in members}
        if dense := list(dense):
            groups.append({"params": dense, "kind": "dense", "lr": lr if dense_lr is None else dense_lr})
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of every pair that has a gradient. ``closure`` recomputes the loss, as in every torch optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["kind"] == "dense":
                _adamw(group, self.state)
                continue
            for bucket in self._buckets(group):
                self._step_bucket(bucket, group)
        return loss

    def _buckets(self, group: dict[str, Any]) -> list[list[FactorPair]]:
        """Pairs with a gradient, equal shapes, dtypes and devices together: they are stepped as one batch."""
        buckets: dict[Any, list[FactorPair]] = {}
        for p in group["params"][::2]:
            pair = self._pairs[id(p)]
            missing = [pair.param_A.grad is None, pair.param_B.grad is None]
            if any(missing) and not all(missing):
                raise ValueError(f"{pair.name}: only one of the two factors has a gradient; PRISM needs both")
            if not any(missing):
                buckets.setdefault((pair.shape, p.dtype, p.device), []).append(pair)
        parts = []
        for ((m, n, r), _, _), pairs in buckets.items():
            size = max(1, _BUCKET // ((m + n) * r))
            parts += [pairs[i : i + size] for i in range(0, len(pairs), size)]
        return parts

    def _state(self, pair: FactorPair, dtype: torch.dtype) -> dict[str, Tensor]:
        state = self.state[pair.param_A]
        if not state:
            m, n, r = pair.shape
            eye = torch.eye(r, dtype=dtype, device=pair.param_A.device)
            state |= {
                "step": torch.zeros(()),
                "first_A": eye.new_zeros(m, r), "first_B": eye.new_zeros(n, r),
                "second_A": torch.zeros_like(eye), "second_B": torch.zeros_like(eye),
                "frame": eye,
            }  # fmt: skip
        return state

    def _step_bucket(self, pairs: list[FactorPair], group: dict[str, Any]) -> None:
        work = torch.promote_types(pairs[0].param_A.dtype, torch.float32)
        states = [self._state(pair, work) for pair in pairs]

        def stacked(tensors: Sequence[Tensor]) -> Tensor:
            # one module alone needs no batch dimension: batched products are slower
            return tensors[0].to(work) if len(tensors) == 1 else torch.stack([t.to(work) for t in tensors])

        def each(x: Tensor) -> Sequence[Tensor]:
            return [x] if len(pairs) == 1 else x.unbind()

        z = LowRank(stacked([p.A for p in pairs]), stacked([p.B for p in pairs]))
        gA, gB = (stacked([f(p) for p in pairs]) for f in (FactorPair.grad_A, FactorPair.grad_B))  # pyright: ignore
        finite = torch.isfinite(gA.sum((-2, -1)) + gB.sum((-2, -1)))
        if not bool(finite.all()):
            bad = pairs[int(finite.int().argmin())]
            raise NonFinite(f"{bad.name}: the gradient of its LoRA factors is NaN or infinite; the step was not taken")
        first_A, first_B, second_A, second_B, frame = (stacked([s[key] for s in states]) for key in _MOMENTS)
        t = stacked([s["step"] for s in states]).to(z.A.device) + 1

        space = tangent_space(z, ", ".join(pair.name for pair in pairs))
        gradient = space.coordinates(gA, gB)
        z, space = canonical_gauge(z, space, frame, (t == 1) | unbalanced(z, pairs[0].param_A.dtype))
        uA, uB = space.lift(gradient)
        a, b = Moments(first_A, second_A), Moments(first_B, second_B)
        if group["adaptive"]:
            rule = Rule(**{key: group[key] for key in Rule._fields})
            uA, uB, a, b = adaptive_direction(z, uA, uB, a, b, t, rule)
        uA, uB = self._scaled(space, uA, uB, group)
        if decay := group["weight_decay"]:  # Z is the tangent vector (A/2, B/2)
            uA, uB = uA + decay / 2 * z.A, uB + decay / 2 * z.B

        new, lost = refill(z.retract(uA, uB, -float(group["lr"])), space.S[..., 0], seed=int(t.max()))  # (3.4)
        # The rotation that brings the new factors nearest to the old ones: moments keep their meaning.
        frame = procrustes(torch.cat([new.A, new.B], -2), torch.cat([z.A, z.B], -2))
        new = LowRank(new.A @ frame, new.B @ frame)
        for pair, state, A, B, gone in zip(pairs, states, each(new.A), each(new.B), each(lost), strict=True):
            if bool(gone):
                log.warning("%s lost rank; a data-free direction of 1e-4 of its norm was put back", pair.name)
            pair.write(LowRank(A, B))
            state["step"] += 1
        for key, value in zip(_MOMENTS, (a.first, b.first, a.second, b.second, frame), strict=True):
            for state, mine in zip(states, each(value), strict=True):
                state[key] = mine.clone() if len(pairs) > 1 else mine  # a view would keep the whole batch alive

    @staticmethod
    def _scaled(space: TangentSpace, uA: Tensor, uB: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Trust ratio and cap of |dZ|_F: post-processing."""
        if not group["trust_ratio"] and group["update_cap"] is None:
            return uA, uB
        norm = space.coordinates_of_lift(uA, uB).norm_sq().sqrt()
        scale = torch.ones_like(norm)
        if group["trust_ratio"]:
            size = torch.linalg.vector_norm(space.S, dim=-1)
            scale = torch.where(norm > 0, size / norm.clamp(min=torch.finfo(norm.dtype).tiny), scale)
        if group["update_cap"] is not None:
            scale = torch.minimum(scale, group["update_cap"] / norm.clamp(min=torch.finfo(norm.dtype).tiny))
        return uA * scale[..., None, None], uB * scale[..., None, None]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but moments stay in float32: torch would round them to the dtype of half-precision factors."""
        super().load_state_dict(state_dict)
        order = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            for key, value in saved.items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[order[index]][key] = value.detach().clone().to(order[index].device)


def _as_groups(pairs: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(pairs)
    if not given:
        raise ValueError("Prism got no factor pairs; pass factor_pairs(model)")
    groups: list[dict[str, Any]] = [{"pairs": given}]
    if all(isinstance(g, dict) for g in given):
        groups = [dict(g) for g in given]
    seen: set[int] = set()
    for group in groups:
        group["pairs"] = list(group["pairs"])
        for pair in group["pairs"]:
            if not isinstance(pair, FactorPair):
                raise TypeError(f"Prism takes FactorPair objects, from factor_pairs(model); got {type(pair).__name__}")
            if {id(pair.param_A), id(pair.param_B)} & seen:
                raise ValueError(f"{pair.name}: its factors are shared with another module; PRISM needs one Z each")
            seen |= {id(pair.param_A), id(pair.param_B)}
            m, n, r = pair.shape
            if r > min(m, n):
                raise ValueError(f"{pair.name}: rank {r} exceeds min(m, n) = {min(m, n)}")
    return groups


def _check(d: dict[str, Any]) -> None:
    for key in ("lr", "eps", "noise_std", "floor_factor", "weight_decay"):
        if not d[key] >= 0:
            raise ValueError(f"{key} must not be negative, got {d[key]}")
    if not all(0 <= b < 1 for b in d["betas"]):
        raise ValueError(f"betas must lie in [0, 1), got {d['betas']}")
    if not d["cond_max"] >= 1:
        raise ValueError(f"cond_max must be at least 1, got {d['cond_max']}")
    if d["update_cap"] is not None and not d["update_cap"] > 0:
        raise ValueError(f"update_cap must be positive, got {d['update_cap']}")
    for key, allowed in (("precond", Precond), ("floor", Floor), ("horizontal", Horizontal)):
        if d[key] not in allowed.__args__:
            raise ValueError(f"{key} must be one of {', '.join(allowed.__args__)}; got {d[key]!r}")


def _adamw(group: dict[str, Any], states: Any) -> None:
    """torch's AdamW on a group of ordinary parameters."""
    params = [p for p in group["params"] if p.grad is not None]
    for p in params:
        if not states[p]:
            states[p] |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    if params:
        adamw(
            params, [p.grad for p in params], [states[p]["exp_avg"] for p in params],
            [states[p]["exp_avg_sq"] for p in params], [], [states[p]["step"] for p in params],
            amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
