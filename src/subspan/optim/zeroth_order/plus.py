"""LOZO+: the directions of a period are chosen by the loss instead of drawn blindly (source: see ``algebra``)."""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from subspan.optim.zeroth_order.algebra import (
    Scaling,
    Score,
    candidate_scores,
    select_directions,
    unit_columns,
)
from subspan.optim.zeroth_order.base import Common, Query, ZOOptimizer
from subspan.optim.zeroth_order.blocks import Block, Direction, seeded
from subspan.optim.zeroth_order.optimizers import LOZO


class LOZOPlus(LOZO):
    """LOZO whose V is selected: at the start of a period a pool of directions is probed on one batch, and those whose
    score reaches an adaptive threshold are kept for the next ``interval`` steps.

    A period costs 2 (candidates + carried) probes + 1 + 2 interval queries.

    Args:
        params: see ``LOZO``.
        lr: see ``LOZO``.
        max_rank: most directions kept.
        candidates: fresh directions in each pool.
        threshold: kept are scores of at least threshold times the pool's mean; 0 keeps the best ``max_rank``.
        score: "decrease" (descent of the ideal step), "energy" (squared slope) or "random" (a control).
        carry: kept directions compete again in the next pool.
        probe_update: the probes are estimates themselves: move along "all" of them, along the "kept" ones or "none";
            "mean" divides the sum by the square root of the pool's size, for large lr.
        probes: probes per candidate. More candidates are the better use of queries.
        ema: smooth the pool's mean over periods with this decay.
        normalize: columns of V have norm sqrt(n) exactly.
        orthogonalize: ... and are orthogonal.
        mode: "period", or "step": no reuse, each step probes rank-1 directions one by one and moves along those whose
            slope reaches the threshold, until ``max_rank`` are kept or ``budget`` are probed.
        budget: of mode "step"; by default ``candidates``.
        merge: "select", or "weighted": one direction, the kept ones weighted by their slopes. Better aligned and
            stiffer: only with a lower lr or a cap.
        layerwise: score each matrix's directions by themselves; costs as many times more probes.
        curvature_cap: g bounds lr by g / (mean curvature of the kept probes).
        clip_c: bounds |c| by this multiple of its running root mean square.
        interval: steps of a period.
        momentum: see ``LOZO``.
        bias_correction: see ``LOZO``.
        scaling: see ``LOZO``.
        common: ``Common``. A probe with NaN or infinity only drops its candidate, whatever ``on_nonfinite`` says.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        max_rank: int = 4,
        candidates: int = 16,
        threshold: float = 1.0,
        interval: int = 50,
        *,
        score: Score = "decrease",
        carry: bool = True,
        probe_update: Literal["all", "mean", "kept", "none"] = "all",
        probes: int = 1,
        ema: float | None = None,
        normalize: bool = True,
        orthogonalize: bool = False,
        mode: Literal["period", "step"] = "period",
        budget: int | None = None,
        merge: Literal["select", "weighted"] = "select",
        layerwise: bool = False,
        curvature_cap: float | None = None,
        clip_c: float | None = None,
        momentum: float = 0.0,
        bias_correction: bool = False,
        scaling: Scaling = "unit",
        **common: Unpack[Common],
    ) -> None:
        for name, value in (("candidates", candidates), ("probes", probes), ("budget", budget or candidates)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not threshold >= 0:
            raise ValueError(f"threshold must be at least 0, got {threshold}")
        if ema is not None and not 0 <= ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {ema}")
        for name, value, known in (
            ("score", score, ("decrease", "energy", "random")),
            ("probe_update", probe_update, ("all", "mean", "kept", "none")),
            ("mode", mode, ("period", "step")),
            ("merge", merge, ("select", "weighted")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
        if mode == "step" and momentum:
            raise ValueError(f"mode='step' keeps no direction from step to step: leave out momentum={momentum}")
        for name, bound in (("curvature_cap", curvature_cap), ("clip_c", clip_c)):
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} must be positive, got {bound}")
        self.candidates, self.threshold, self.max_rank = candidates, threshold, max_rank
        self.score: Score = score
        self.carry, self.probe_update, self.probes, self.ema = carry, probe_update, probes, ema
        self.normalize, self.orthogonalize, self.weighted = normalize, orthogonalize, merge == "weighted"
        self.mode, self.budget, self.layerwise = mode, budget or candidates, layerwise
        self.curvature_cap, self.clip_c = curvature_cap, clip_c
        self.coefficients: dict[Block, list[float]] = {}
        """With merge="weighted": what each kept candidate counts in V."""
        self._fresh = 0  # the number of the next fresh candidate
        self._cap = math.inf
        self._mute_pools = 0
        self._said_noise = False
        options: dict[str, Any] = {"momentum": momentum, "bias_correction": bias_correction, "scaling": scaling}
        super().__init__(params, lr, max_rank, interval, **options, **common)
        together = [self.matrices] if self.matrices else []
        self._pools = [[b] for b in self.matrices] if layerwise else together
        self._means = [_Average(ema or 0.0) for _ in self._pools]
        self._slopes, self._squares = _Average(0.9), _Average(0.9)

    def _refresh(self, query: Query) -> dict[str, Any]:
        if self.mode == "step" or self.t % self.interval or not self._pools:
            return {}
        self.merge()
        centre = query() if self.score == "decrease" or self.curvature_cap else math.nan
        fresh = list(range(self._fresh, self._fresh + self.candidates))
        self._fresh += self.candidates
        kept: dict[Block, list[int]] = {}
        moves, taus, curvatures, mute = [], [], [], True
        for blocks, mean in zip(self._pools, self._means, strict=True):
            pool = (self.kept.get(blocks[0], []) if self.carry else []) + fresh
            c, kappa = self._probe_pool(blocks, pool, centre, query)
            chosen, tau = self._choose(c, kappa, mean)
            ids = [pool[i] for i in chosen]
            kept |= dict.fromkeys(blocks, ids)
            # Where every probe failed, the candidate that is kept for want of a better one has no slope.
            slopes = c[chosen].mean(1).nan_to_num(0.0, 0.0, 0.0).tolist()
            self.coefficients |= {b: slopes for b in blocks}
            moves += self._probe_moves(blocks, pool, c, chosen)
            mute &= not c.any()
            taus.append(tau)
            curvatures += kappa[chosen].tolist()
        self._listen(mute)
        for direction, c in moves:  # (3.5, step 6)
            ZOOptimizer._move(self, direction, c)
        curvature = sum(curvatures) / len(curvatures) if math.isfinite(centre) else math.nan
        if self.curvature_cap:
            self._cap = self.curvature_cap / curvature if curvature > 0 else math.inf
        self._adopt(kept)
        ids = kept[self._pools[0][0]]
        return {"rank": len(ids), "tau": taus[0], "kept": ids, "kappa": curvature}

    def _probe(self, blocks: Sequence[Block], candidate: int, repetition: int) -> Direction:
        """Z = u v^T for each block, and noise on the dense ones where the whole model is probed (3.5, step 3)."""
        key: tuple[int | str, ...] = (self.seed, "pool", self.t, 0 if self.weighted else candidate, repetition)
        factors = {b: (b.left(1, *key), self._columns(b, [candidate])) for b in blocks}
        noise = {} if self.layerwise else dict.fromkeys((b for b in self.blocks if not b.rank), key)
        return Direction(factors, noise)

    def _probe_pool(
        self, blocks: Sequence[Block], pool: Sequence[int], centre: float, query: Query
    ) -> tuple[Tensor, Tensor]:
        """Slopes (p x probes) and mean curvatures (p) of a pool."""
        plus, minus = torch.empty(2, len(pool), self.probes, dtype=torch.float64)
        for i, candidate in enumerate(pool):
            for j in range(self.probes):
                plus[i, j], minus[i, j] = self.weights.evaluate(self._probe(blocks, candidate, j), self.eps, query)
        c = (plus - minus) / (2 * self.eps)
        if self.score != "decrease" and not self.curvature_cap:
            return c, torch.zeros(len(pool), dtype=torch.float64)
        kappa = ((plus + minus - 2 * centre) / self.eps**2).mean(1)
        return c, torch.where(kappa.abs() < self._curvature_noise(centre), 0.0, kappa)

    def _choose(self, c: Tensor, kappa: Tensor, mean: "_Average") -> tuple[list[int], float]:
        score: Score = self.score
        if score == "decrease" and (kappa == 0).sum() > len(kappa) / 2:
            score = "energy"
            if not self._said_noise:
                self._said_noise = True
                warnings.warn(
                    f"curvature at eps={self.eps} is below the rounding of the loss: directions are chosen by their "
                    "squared slope (said once)",
                    stacklevel=6,
                )
        generator = seeded(torch.device("cpu"), "score", self.seed, self.t)
        scores = candidate_scores(c.square().mean(1).sqrt(), kappa, score, generator)
        tau = None
        if self.ema is not None and (finite := scores[scores.isfinite()]).numel():
            tau = self.threshold * mean.update(float(finite.mean()))
        kept, tau = select_directions(scores, self.threshold, self.max_rank, tau)
        return sorted(kept), tau

    def _probe_moves(
        self, blocks: Sequence[Block], pool: Sequence[int], c: Tensor, chosen: Sequence[int]
    ) -> list[tuple[Direction, float]]:
        """The probes as estimates of the gradient: directions, and what to move along each."""
        if self.probe_update == "none":
            return []
        which = chosen if self.probe_update == "kept" else range(len(pool))
        which = [i for i in which if c[i].isfinite().all()]
        share = self.probes * (len(pool) ** 0.5 if self.probe_update == "mean" else 1.0)
        return [(self._probe(blocks, pool[i], j), float(c[i, j]) / share) for i in which for j in range(self.probes)]

    def _columns(self, block: Block, candidates: Sequence[int]) -> Tensor:
        right = block.right(self.seed, candidates)
        return unit_columns(right) if self.normalize else right

    def _basis(self, block: Block, candidates: Sequence[int]) -> Tensor:
        right = self._columns(block, candidates)
        if self.weighted:
            combined = right @ right.new_tensor(self.coefficients[block]).unsqueeze(1)
            right = unit_columns(combined) if combined.any() else right[:, :1]
        return unit_columns(right, orthogonal=True) if self.orthogonalize else right

    def _explore(self, query: Query) -> tuple[list[tuple[Direction, float]], float, float]:
        moves, loss, c = self._one_by_one(query) if self.mode == "step" else super()._explore(query)
        if self.clip_c and math.isfinite(c):
            bound = self.clip_c * math.sqrt(self._squares.value) if self._squares.weight else math.inf
            moves = [(direction, max(-bound, min(bound, slope))) for direction, slope in moves]
            self._squares.update(min(c**2, bound**2))
        return moves, loss, c

    def _one_by_one(self, query: Query) -> tuple[list[tuple[Direction, float]], float, float]:
        """Rank-1 directions of this step alone: those whose slope reaches the running mean times the threshold."""
        tried: list[tuple[Direction, float]] = []
        kept: list[tuple[Direction, float]] = []
        losses = []
        tau = self.threshold * self._slopes.value if self._slopes.weight else 0.0
        for number in range(self.t * self.budget, (self.t + 1) * self.budget):
            direction = self._probe(self.matrices, number, 0)
            c, loss = self._slope(direction, query)
            if not math.isfinite(c):
                continue
            tried.append((direction, c))
            losses.append(loss)
            if abs(c) >= tau:
                kept.append(tried[-1])
            if len(kept) == self.max_rank:
                break
        if not tried:
            return [], math.nan, math.nan
        self._slopes.update(sum(abs(c) for _, c in tried) / len(tried))
        moves = kept or [max(tried, key=lambda pair: abs(pair[1]))]
        return moves, sum(losses) / len(losses), sum(c for _, c in tried) / len(tried)

    def _move(self, direction: Direction, c: float) -> None:
        if self.mode == "step":
            ZOOptimizer._move(self, direction, c)
        else:
            super()._move(direction, c)

    def _rate(self, block: Block) -> float:
        return min(super()._rate(block), self._cap)

    def _listen(self, mute: bool) -> None:
        """Warn when perturbations of this size have stopped to change the loss at all."""
        self._mute_pools = self._mute_pools + 1 if mute else 0
        if self._mute_pools == 3:
            warnings.warn(
                f"in three pools no probe changed the loss: eps={self.eps} is below what the model's dtype resolves; "
                "raise eps",
                stacklevel=6,
            )

    def _numbers(self) -> dict[str, Any]:
        return super()._numbers() | {
            "fresh": self._fresh,
            "cap": self._cap,
            "mute_pools": self._mute_pools,
            "said_noise": self._said_noise,
            "coefficients": {b.index: list(v) for b, v in self.coefficients.items()},
            "averages": [a.pair() for a in (*self._means, self._slopes, self._squares)],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = self._numbers_in(state_dict)
        self._fresh, self._cap = numbers["fresh"], numbers["cap"]
        self._mute_pools, self._said_noise = numbers["mute_pools"], numbers["said_noise"]
        self.coefficients = {self.blocks[i]: list(v) for i, v in numbers["coefficients"].items()}
        for average, pair in zip((*self._means, self._slopes, self._squares), numbers["averages"], strict=True):
            average.total, average.weight = pair
        super().load_state_dict(state_dict)


class _Average:
    """An exponential moving average without the bias of its empty start."""

    def __init__(self, decay: float) -> None:
        self.decay, self.total, self.weight = decay, 0.0, 0.0

    @property
    def value(self) -> float:
        return self.total / self.weight

    def update(self, x: float) -> float:
        self.total = self.decay * self.total + (1 - self.decay) * x
        self.weight = self.decay * self.weight + (1 - self.decay)
        return self.value

    def pair(self) -> tuple[float, float]:
        return self.total, self.weight
