"""Does training use the new width? What the updates of a grown network say."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.linalg import effective_rank, singular_values, stable_rank
from subspan.resize.width.axes import Growth
from subspan.resize.width.model import trap_tensors
from subspan.resize.width.plan import layouts_of, unwrapped
from subspan.resize.width.tiling import clone_counts, escape_ratio, matrices
from subspan.surgery import role_of

Verdict = Literal["trapped", "escaping", "escaped"]


# Numbers in a matrix up to which equal shapes are measured together: there the calls cost more than the copy.
_SMALL = 2**16


class TrapMonitor:
    """Follows how far the hidden matrices of a grown network have left the trap.

    Every matrix is compared with what it was when the monitor was made; packed projections count as their parts.
    ``record(step)`` returns means by group (q, k, v, o, gate, up, down, ...) and over all matrices.

    Args:
        model: the wide network, before training.
        factor: as it was grown.
        ffn_factor: as it was grown.
        groups: "auto", by the layers' roles, or a function of a matrix's name.
        rank_every: effective and stable ranks of the changes are taken at multiples of this step.
        max_matrices: ranks are taken of this many matrices at most, spread over the network.
        updates: also keep the weights of the last ``record``, for the escape ratio of what changed since.
        gradients: also the escape ratio of the gradients that ``record`` finds.
        thresholds: below the first a network is "trapped", above the second "escaped".

    Raises:
        ValueError: as ``fold_width``, and where no matrix has clones.
    """

    def __init__(
        self,
        model: nn.Module,
        factor: int = 2,
        ffn_factor: int | None = None,
        *,
        groups: Literal["auto"] | Callable[[str], str] = "auto",
        rank_every: int = 200,
        max_matrices: int = 16,
        updates: bool = False,
        gradients: bool = False,
        thresholds: tuple[float, float] = (0.1, 0.5),
    ) -> None:
        self.model = unwrapped(model)
        _, _, layouts = layouts_of(self.model, Growth.of(factor, ffn_factor), wide=True)
        parameters = dict(self.model.named_parameters())
        counts = {n: clone_counts(lay) for n, lay in layouts.items() if lay.hidden and n in parameters}
        self._clones = {n: clones for n, clones in counts.items() if max(map(max, clones)) > 1}
        self._layouts = {n: layouts[n] for n in self._clones}
        if not self._layouts:
            raise ValueError("no hidden matrix of this network has clones: was it grown with these factors?")
        self._parameters = {name: parameters[name] for name in self._layouts}
        self.start = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._last = {name: x.clone() for name, x in self.start.items()} if updates else None
        self.rank_every, self.max_matrices, self.thresholds = rank_every, max_matrices, thresholds
        self.gradients = gradients
        self._parts = {
            name: [name if len(clones) == 1 else f"{name}[{i}]" for i in range(len(clones))]
            for name, clones in self._clones.items()
        }
        self.groups = {
            part: groups(part) if callable(groups) else _role(name, i, len(parts))
            for name, parts in self._parts.items()
            for i, part in enumerate(parts)
        }
        self.history: list[dict[str, float]] = []
        self.matrices: dict[str, dict[str, float]] = {}

    @torch.no_grad()
    def exact(self) -> bool:
        """Whether every matrix began inside the trap, so that no optimiser that treats clones alike can leave it."""
        return max(self._escapes(start=self.start)["start"].values()) < 1e-6

    def _change(self, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        changes = torch._foreach_sub([p.detach() for p in self._parameters.values()], list(start.values()))
        return dict(zip(self._parameters, changes, strict=True))

    def _views(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
        """Every part of every matrix: its name, the part as (a stack of) out x in matrices, its clones."""
        for name, x in tensors.items():
            yield from zip(self._parts[name], matrices(x, self._layouts[name]), self._clones[name], strict=True)

    def _escapes(self, **sets: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
        """Escape ratio of every part (the mean over a stack) in every set of tensors; one synchronisation for all."""
        alike: dict[Any, list[tuple[str, str, Tensor]]] = {}
        for key, tensors in sets.items():
            for name, x, clones in self._views(tensors):
                kind = (x.shape, x.dtype, x.device) if x.numel() <= _SMALL else (key, name)
                alike.setdefault((clones, kind), []).append((key, name, x))
        ratios = []
        for (clones, _), group in alike.items():
            x = torch.stack([x for *_, x in group]) if len(group) > 1 else group[0][2][None]
            ratios.append(escape_ratio(x, clones).flatten(1).mean(1) if x.ndim > 3 else escape_ratio(x, clones))
        out: dict[str, dict[str, float]] = {key: {} for key in sets}
        places = [(key, name) for group in alike.values() for key, name, _ in group]
        for (key, name), ratio in zip(places, torch.cat(ratios).tolist(), strict=True):
            out[key][name] = ratio
        return out

    @torch.no_grad()
    def record(self, step: int) -> dict[str, float]:
        """Figures of the network as it is now, kept in ``history`` too.

        ``esc``, ``esc/GROUP``: of the change since the start. ``esc_grad``: of the gradients (``gradients=True``).
        ``esc_update``: of the change since the last record (``updates=True``). At multiples of ``rank_every`` also
        ``effective_rank`` (exp of the entropy of the normalised singular values) and ``stable_rank`` of the change.
        """
        change = self._change(self.start)
        sets: dict[str, Mapping[str, Tensor]] = {"esc": change}
        if self.gradients:
            sets["esc_grad"] = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        if self._last is not None:
            sets["esc_update"] = self._change(self._last)
        measured = self._escapes(**sets)
        if self._last is not None:
            torch._foreach_copy_(list(self._last.values()), list(self._parameters.values()))
        if step % self.rank_every == 0:
            measured |= self._ranks(change)
        means = {key: statistics.fmean(values.values()) for key, values in measured.items() if values}
        row: dict[str, float] = {"step": step} | means
        for group in sorted(set(self.groups.values())):
            row[f"esc/{group}"] = statistics.fmean(v for n, v in measured["esc"].items() if self.groups[n] == group)
        self.matrices = {n: {k: v[n] for k, v in measured.items() if n in v} for n in self.groups}
        self.history.append(row)
        return row

    def _ranks(self, change: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
        """Of a stack of experts, the first stands for all."""
        views = [(name, x.flatten(end_dim=-3)[0] if x.ndim > 2 else x) for name, x, _ in self._views(change)]
        out: dict[str, dict[str, float]] = {"effective_rank": {}, "stable_rank": {}}
        for name, x in views[:: -(-len(views) // self.max_matrices)]:
            s = singular_values(x)
            # linalg's effective rank is of the energies s^2; that of the roots is of s itself, as in the paper's field.
            out["effective_rank"][name] = float(effective_rank(s.sqrt()))
            out["stable_rank"][name] = float(stable_rank(s))
        return out

    def verdict(self) -> Verdict:
        """Of the last record, by the median escape ratio over the matrices."""
        if not self.history:
            raise ValueError("nothing was recorded; call record(step) first")
        median = statistics.median(values["esc"] for values in self.matrices.values())
        low, high = self.thresholds
        return "trapped" if median < low else "escaped" if median > high else "escaping"

    def table(self) -> list[dict[str, Any]]:
        """One line per matrix of the last record: its name, group and figures."""
        return [{"matrix": name, "group": self.groups[name], **values} for name, values in self.matrices.items()]

    @torch.no_grad()
    def activations(self, run: Callable[[], Any]) -> dict[str, dict[str, float]]:
        """What the layers put out while ``run()`` calls the network on a probe batch.

        Returns name -> ``clone_distance`` (||h - C(mean of clones)|| / ||h||) and ``effective_rank`` of the outputs of
        every hidden layer that is a module of its own.
        """
        seen: dict[str, list[Tensor]] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, args, out: seen.setdefault(name, []).append(out.detach().float().flatten(0, -2))

        layers = {n: n.removesuffix(".weight") for n in self._layouts if n.endswith(".weight")}
        hooks = [self.model.get_submodule(layer).register_forward_hook(keep(n)) for n, layer in layers.items()]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        out = {}
        for name, outputs in seen.items():
            h, layout = torch.cat(outputs), self._layouts[name]
            # Clones lie along the columns of the outputs.
            parts = h.split([s.wide for s in layout.axes[layout.out or 0]], -1)
            counted = zip(parts, self._clones[name], strict=True)
            apart = [escape_ratio(part, (1, n)) * part.norm() for part, (n, _) in counted]
            distance = torch.stack(apart).norm() / h.norm().clamp(min=torch.finfo(h.dtype).tiny)  # 0 where h = 0
            rank = effective_rank(singular_values(h).sqrt())
            out[name] = {"clone_distance": float(distance), "effective_rank": float(rank)}
        return out


def _role(name: str, part: int, parts: int) -> str:
    """The layer's role; packed projections name their parts."""
    role = role_of(name.removesuffix(".weight"))
    packed = {("qkv", 3): ("q", "k", "v"), ("up", 2): ("gate", "up")}.get((role, parts))
    return packed[part] if packed else role


def initial_alignment(change: Float[Tensor, "m k"], start: Float[Tensor, "m k"], rank: int | None = None) -> float:
    """||U Uᵀ dW V Vᵀ||² / ||dW||², the share of a change inside the leading singular subspaces of where it started.

    For networks whose clones are not known.

    Args:
        change: dW.
        start: the matrix before training.
        rank: of the subspaces; by default the numerical rank of ``start``, to 1e-6 of its largest singular value.
    """
    u, s, vh = torch.linalg.svd(start.float(), full_matrices=False)
    k = int((s > 1e-6 * s[:1]).sum()) if rank is None else rank
    inside = u[:, :k].mT @ change.float() @ vh[:k].mT
    total = change.float().square().sum()
    return float(inside.square().sum() / total) if bool(total > 0) else 0.0


@torch.no_grad()
def use_of_width(
    model: nn.Module,
    loss: Callable[[nn.Module], float],
    factor: int = 2,
    ffn_factor: int | None = None,
) -> float:
    """Loss of the fold minus loss of the network: what it knows in the new dimensions, 0 in the trap.

    The weights are replaced by their trap projection while ``loss`` runs once more, and put back.

    Args:
        model: the wide network.
        loss: of a network on data of your choice.
        factor: as it was grown.
        ffn_factor: as it was grown.
    """
    net = unwrapped(model)
    full = loss(model)
    kept = {name: p.detach().clone() for name, p in net.state_dict().items()}
    try:
        net.load_state_dict(trap_tensors(net, factor, ffn_factor), strict=False)
        return loss(model) - full
    finally:
        net.load_state_dict(kept)
