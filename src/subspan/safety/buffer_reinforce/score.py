"""The safety gradient score: does a row's step move a layer with or against the direction of refusing?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import TargetError
from subspan.linalg import LowRank
from subspan.surgery import base_layer, factor_pairs
from subspan.surgery.answers import Batch, answer_logits, on_device_of, target_losses
from subspan.surgery.per_example import ExampleRecorder, LayerGradient, example_gradients

_EPS = 1e-8  # the authors' floor under the norm of the direction


@dataclass(frozen=True)
class SafetyScores:
    """Per row and layer: the score, and the Frobenius norm of the row's gradient."""

    layers: tuple[str, ...]
    scores: Float[Tensor, "rows layers"]
    gradient_norms: Float[Tensor, "rows layers"]

    def by_kind(self, kinds: Sequence[str]) -> dict[str, dict[str, tuple[float, float]]]:
        """Mean score and mean gradient norm of every layer, for each kind of row (one name a row)."""
        if len(kinds) != len(self.scores):
            raise ValueError(f"{len(kinds)} kinds were given for {len(self.scores)} rows")
        found = {}
        for kind in dict.fromkeys(kinds):
            rows = torch.tensor([k == kind for k in kinds])
            means = zip(self.scores[rows].mean(0).tolist(), self.gradient_norms[rows].mean(0).tolist(), strict=True)
            found[kind] = dict(zip(self.layers, means, strict=True))
        return found


def direction_score(direction: LowRank, gradient: LayerGradient) -> Float[Tensor, " b"]:
    """<-G_i, V> / (|V| + 1e-8) of each row on factors (3.5): G_i is never formed.

    Args:
        direction: V = A Bᵀ (m x n), the weight change of an adapter that was trained to refuse.
        gradient: inputs X (b x t x n) and output gradients D (b x t x m) of the layer.
    """
    return -gradient.inner(direction) / (direction.norm() + _EPS)


def safety_gradient_score(
    model: Any,
    batches: Sequence[Batch],
    direction: str | Mapping[str, LowRank] = "reinforce",
    losses: Callable[[nn.Module, Batch], Float[Tensor, " b"]] | None = None,
) -> SafetyScores:
    """Score of every row at every adapted layer; negative: a descent step on the row moves away from refusing.

    Measured at the weights as they are: call it with the buffer on and off, or before and after a run, to compare.

    Args:
        model: a model whose layers hold a LoRA called ``direction``, active or not; or any, with changes given.
        batches: rows of ``input_ids``, ``attention_mask`` and ``labels``, padded on the left.
        direction: an adapter of the model that was trained to refuse, or weight changes by layer name.
        losses: loss of each row of a batch; by default the mean cross-entropy of its answer tokens.

    Returns:
        Scores in the order of the rows, in units of the loss per unit of weight change.

    Raises:
        TargetError: no such adapter or layer, or a layer that a forward pass uses twice.
    """
    if isinstance(direction, str):
        pairs = factor_pairs(model, direction)
        changes = {p.name: p.low_rank().scale(p.scaling) for p in pairs}
        layers = {p.name: base_layer(p.layer) for p in pairs}
    else:
        changes = dict(direction)
        layers = {name: base_layer(model.get_submodule(name)) for name in changes}
    losses = losses or _answer_losses
    columns = {name: i for i, name in enumerate(layers)}
    parts: list[tuple[Tensor, Tensor]] = []
    recorder = ExampleRecorder(layers, allow_unused=True)
    try:
        for batch in batches:
            values = losses(model, batch)
            scores, squares = (torch.zeros(len(values), len(layers), dtype=torch.float64) for _ in range(2))

            fired: set[str] = set()

            def note(
                name: str, gradient: LayerGradient, scores: Any = scores, squares: Any = squares, fired: Any = fired
            ) -> None:
                if name in fired:
                    raise TargetError(f"{name} is used twice in one forward pass: the norm of its gradient is no sum")
                fired.add(name)
                at, v = columns[name], changes[name]
                v = LowRank(v.A.to(gradient.D), v.B.to(gradient.X))
                scores[:, at] = direction_score(v, gradient).cpu().double()
                squares[:, at] = example_gradients(gradient.D, gradient.X).norm_sq().cpu().double()

            recorder.backward(values, note)
            parts.append((scores, squares.sqrt()))
    finally:
        recorder.remove()
    if not parts:
        raise ValueError("there is no batch to score")
    return SafetyScores(tuple(layers), *(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _answer_losses(model: nn.Module, batch: Batch) -> Tensor:
    return target_losses(*answer_logits(model, on_device_of(model, batch))).per_row()
