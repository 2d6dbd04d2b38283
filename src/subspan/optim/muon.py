"""Muon for fine-tuning: orthogonalised momentum for matrices and AdamW for the rest, in one optimiser object.

"Can Muon Fine-tune Adam-Pretrained Models?" (Qu, Huang and Horvath, ICML 2026, arXiv 2605.10468), after Muon (Jordan et
al. 2024) with the RMS-matching scale of "Muon is Scalable for LLM Training" (Liu et al. 2025).

Why five steps of an iteration that does not converge are enough: the update needs singular values of one size, not of
size exactly one. A LoRA factor is 8 x 768 or so, hence the two tricks here: factors of one shape are stacked and
orthogonalised together, and the iteration runs on their small Gram matrices (``newton_schulz``'s fast path).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from subspan.errors import NonFinite
from subspan.linalg import NSMethod, newton_schulz
from subspan.optim.groups import check_group, name_in, nonfinite, restore_buffers

Scale = Literal["match_rms", "original", "none"]
MomentumForm = Literal["sum", "lerp"]

# Stacks beyond this are cut into pieces, because each costs twice its size in memory. On a CPU a stack larger than the
# cache gains no speed either.
_CHUNK_BYTES = {"cpu": 2**20}
_CHUNK_BYTES_ELSEWHERE = 64 * 2**20


def muon_scale(shape: Sequence[int], scale: Scale = "match_rms", fan_in_fan_out: bool = False) -> float:
    """Factor on the orthogonalised update of a parameter of this shape (flattened to rows x rest).

    ``match_rms``: 0.2 sqrt(max(m, n)), so that a full-rank update has RMS 0.2, about AdamW's. ``original``:
    sqrt(max(1, m/n)) for an m x n (out x in) weight; ``fan_in_fan_out`` says that it is stored in x out. ``none``: 1.
    """
    rows, cols = shape[0], math.prod(shape[1:])
    if scale == "match_rms":
        return 0.2 * math.sqrt(max(rows, cols))
    if scale == "original":
        return math.sqrt(max(1.0, cols / rows if fan_in_fan_out else rows / cols))
    return 1.0


def nesterov_stack(
    grads: Sequence[Tensor], buffers: Sequence[Tensor], momentum: float, nesterov: bool, form: MomentumForm
) -> Tensor:
    """Update the buffers of equally shaped parameters in place and return the updates as one stack of matrices.

    sum form: M <- mu M + G, U = G + mu M; lerp form: M <- mu M + (1 - mu) G, U = (1 - mu) G + mu M, which is (1 - mu)
    times the other and so orthogonalises to the same. Without ``nesterov``, U = M. The stack is fresh memory.
    """
    rows, grads, buffers = grads[0].shape[0], list(grads), list(buffers)
    if form == "sum":  # (3.1.1)
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)
    else:
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
    u = torch.stack([x.reshape(rows, -1) for x in (grads if nesterov else buffers)])
    if nesterov:
        matrices = [b.reshape(rows, -1) for b in buffers]
        if form == "sum":
            torch._foreach_add_(list(u.unbind()), matrices, alpha=momentum)
        else:
            torch._foreach_lerp_(list(u.unbind()), matrices, momentum)
    return u


class MuonAdamW(torch.optim.Optimizer):
    """Muon on the groups with ``use_muon`` (the default), AdamW on the others; one learning rate, one state dict.

    Args:
        params: parameters (or (name, parameter) pairs), or groups of them. ``build_muon_groups`` makes the groups of a
            model. Every option below may differ by group.
        lr: learning rate of both parts.
        weight_decay: decoupled decay of both parts, p <- p (1 - lr weight_decay).
        momentum: mu of the Muon part.
        nesterov: look ahead, U = G + mu M; else U = M.
        momentum_form: "sum" (M <- mu M + G) is Jordan's, "lerp" is torch's.
        ns: "quintic", "polar_express" or "exact"; see ``subspan.linalg.newton_schulz``. For parameters with one row (or
            rank-1 adapters) the quintic only normalises, to length 0.696; "exact" gives length 1.
        ns_steps: steps of the iteration.
        ns_dtype: dtype of the plain loop; None is bfloat16 on CUDA (as in the paper), the buffers' dtype elsewhere.
            Long matrices such as LoRA factors take the Gram path, which always runs in float32 or better.
        scale: see ``muon_scale``.
        betas: AdamW's decays.
        eps: AdamW's epsilon.
        state_dtype: dtype of all buffers; None is float32, or float64 for float64 parameters.
        batched: stack equal shapes; False orthogonalises one parameter at a time, which needs the least memory.
        error_if_nonfinite: raise ``NonFinite``, before anything changed, when a gradient holds NaN or Inf. Otherwise
            such parameters sit out the step (buffers untouched) and the first time there is a warning.

    Clipping the gradient's norm does not bound Muon's update; it only re-weights gradients between steps. Each step
    moves a weight by at most 1.21 lr scale in spectral norm, whatever the gradient.

    Give torch's ``OneCycleLR`` and ``CyclicLR`` ``cycle_momentum=False``: otherwise they cycle ``betas``, which only
    the AdamW part reads, and never ``momentum``.
    """

    _warned_nonfinite = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 5e-4,
        weight_decay: float = 0.0,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns: NSMethod = "quintic",
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        scale: Scale = "match_rms",
        momentum_form: MomentumForm = "sum",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        state_dtype: torch.dtype | None = None,
        batched: bool = True,
        error_if_nonfinite: bool = False,
    ) -> None:
        # All options live in the groups: torch pickles, copies and saves nothing else.
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "use_muon": True,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns": ns,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "scale": scale,
            "fan_in_fan_out": False,
            "momentum_form": momentum_form,
            "betas": betas,
            "eps": eps,
            "state_dtype": state_dtype,
            "batched": batched,
            "error_if_nonfinite": error_if_nonfinite,
        }
        super().__init__(params, defaults)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("MuonAdamW got no parameters: every group is empty")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with any of the constructor's options and ``use_muon``.

        Raises ``ValueError`` for options out of range, for parameters already present and for 0- or 1-D parameters in
        a Muon group, ``TypeError`` for parameters that are not real floating point. A refused group leaves no trace.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, params in [(group, self._usable(group)) for group in self.param_groups]:
            if group["use_muon"]:
                for bucket in _buckets(params, group):
                    self._muon_step(group, bucket)
            elif params:
                self._adamw_step(group, params)
        return loss

    def _usable(self, group: dict[str, Any]) -> list[Tensor]:
        """The group's parameters with a finite gradient."""
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if p.grad.layout != torch.strided:
                raise ValueError(
                    f"{name_in(group, p)} has a sparse gradient; MuonAdamW needs dense ones (sparse=False)"
                )
        bad = nonfinite([p.grad for p in params])
        if not bad:
            return params
        names = ", ".join(name_in(group, params[i]) for i in sorted(bad))
        if group["error_if_nonfinite"]:
            raise NonFinite(f"the gradient of {names} holds NaN or Inf; nothing was updated")
        if not self._warned_nonfinite:
            self._warned_nonfinite = True
            warnings.warn(f"MuonAdamW skips {names}: NaN or Inf in the gradient (said once)", stacklevel=4)
        return [p for i, p in enumerate(params) if i not in bad]

    def _buffers(self, params: list[Tensor], key: str, dtype: torch.dtype) -> list[Tensor]:
        for p in params:
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros_like(p, dtype=dtype)
        return [self.state[p][key] for p in params]

    def _muon_step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """One step of parameters of one shape, dtype and device."""
        p = params[0]
        dtype = state_dtype_of(group, p)
        grads = [q.grad.to(dtype) for q in params]  # pyright: ignore[reportOptionalMemberAccess]
        buffers = self._buffers(params, "momentum_buffer", dtype)
        u = nesterov_stack(grads, buffers, group["momentum"], group["nesterov"], group["momentum_form"])
        ns_dtype = group["ns_dtype"] or (torch.bfloat16 if p.is_cuda and dtype == torch.float32 else dtype)
        o = newton_schulz(u, group["ns_steps"], group["ns"], dtype=ns_dtype, overwrite=True)  # (3.1.2)
        updates = [x.reshape(p.shape) for x in o.unbind()]
        scale = muon_scale(p.shape, group["scale"], group["fan_in_fan_out"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        # (3.1.3-4) p <- p - lr scale (O + decay/scale p), so that half-precision parameters are rounded only once.
        if decay:
            torch._foreach_add_(updates, params, alpha=decay / scale)
        torch._foreach_add_(params, updates, alpha=-lr * scale)

    def _adamw_step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        dtypes = [state_dtype_of(group, p) for p in params]
        for p in params:
            self.state[p].setdefault("step", torch.zeros((), dtype=torch.float32))
        # A copy in the state's dtype where it differs: half-precision parameters are rounded once, at the end.
        work = [p.to(d) for p, d in zip(params, dtypes, strict=True)]
        adamw(
            work,
            [p.grad.to(d) for p, d in zip(params, dtypes, strict=True)],  # pyright: ignore[reportOptionalMemberAccess]
            [b for p, d in zip(params, dtypes, strict=True) for b in self._buffers([p], "exp_avg", d)],
            [b for p, d in zip(params, dtypes, strict=True) for b in self._buffers([p], "exp_avg_sq", d)],
            [],
            [self.state[p]["step"] for p in params],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for p, w in zip(params, work, strict=True):
            if w is not p:
                p.copy_(w)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the buffers keep their own dtype and are copied, so that a resumed run is bit-equal."""
        super().load_state_dict(state_dict)
        restore_buffers(self, state_dict)


def state_dtype_of(group: dict[str, Any], param: Tensor) -> torch.dtype:
    return group["state_dtype"] or torch.promote_types(param.dtype, torch.float32)


def _buckets(params: list[Tensor], group: dict[str, Any]) -> Iterator[list[Tensor]]:
    """Parameters of one shape, dtype and device together, in pieces."""
    by_kind: dict[Any, list[Tensor]] = {}
    for p in params:
        by_kind.setdefault((p.shape, p.dtype, p.device), []).append(p)
    for same in by_kind.values():
        matrix_bytes = same[0].numel() * state_dtype_of(group, same[0]).itemsize
        chunk = _CHUNK_BYTES.get(same[0].device.type, _CHUNK_BYTES_ELSEWHERE)
        size = max(1, chunk // max(1, matrix_bytes)) if group["batched"] else 1
        yield from (same[i : i + size] for i in range(0, len(same), size))
