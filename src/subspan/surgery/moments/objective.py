"""From a batch to the losses whose gradients calibration needs: predictive distributions, labels and masks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from subspan.errors import DataError
from subspan.surgery.moments.statistics import Labels

Positions = Literal["attended", "labelled"]

# Exact enumeration costs one backward pass a class.
MAX_CLASSES = 16


@runtime_checkable
class Likelihood(Protocol):
    """A predictive distribution given a model's outputs."""

    def nll(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Negative log-likelihood summed over examples (and positions)."""
        ...

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Labels drawn from the predictive distribution."""
        ...


def _wide(x: Tensor) -> Tensor:
    """Half precision as float32; wider types as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _source(outputs: Tensor, generator: torch.Generator | None) -> torch.device:
    """Where labels are drawn: on the generator's device, so that one seed gives the same labels on every machine."""
    return outputs.device if generator is None else generator.device


@dataclass(frozen=True)
class Categorical:
    """Softmax over the last axis; integer labels, of which -100 is left out."""

    def nll(self, outputs: Tensor, labels: Tensor) -> Tensor:
        kept = labels != -100
        return nn.functional.cross_entropy(_wide(outputs[kept]), labels[kept], reduction="sum")

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        p = _wide(outputs).softmax(-1).flatten(0, -2).to(_source(outputs, generator))
        return torch.multinomial(p, 1, generator=generator).view(outputs.shape[:-1]).to(outputs.device)


@dataclass(frozen=True)
class Gaussian:
    """Independent normal targets of known ``variance`` around the outputs (regression)."""

    variance: float = 1.0

    def nll(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels.view_as(outputs)).square().sum() / (2 * self.variance)

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        where = _source(outputs, generator)
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=where)
        return outputs + self.variance**0.5 * noise.to(outputs.device)


@dataclass(frozen=True)
class Bernoulli:
    """Independent logits (multi-label classification)."""

    def nll(self, outputs: Tensor, labels: Tensor) -> Tensor:
        wide = _wide(outputs)
        return nn.functional.binary_cross_entropy_with_logits(wide, labels.to(wide), reduction="sum")

    def sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        p = _wide(outputs).sigmoid().to(_source(outputs, generator))
        return torch.bernoulli(p, generator=generator).to(outputs.device)


# Gets (the model's outputs, the batch) and returns the summed negative log-likelihood.
LossFn = Callable[[Any, Any], Tensor]


def is_plain_loss(loss: LossFn | Likelihood | None) -> TypeIs[LossFn]:
    """Whether ``loss`` is a function (which cannot draw labels) and not a likelihood."""
    return loss is not None and not hasattr(loss, "nll")


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, Mapping):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_device(v, device) for v in value]
    return value


def _split(batch: Any) -> tuple[list[Any], dict[str, Any], Tensor | None]:
    """Positional and keyword arguments of the model, and the labels, of a dict, an (inputs..., labels) or a tensor."""
    if isinstance(batch, Mapping):
        inputs = dict(batch)
        return [], inputs, inputs.pop("labels", None)
    if isinstance(batch, list):
        return (batch[:-1], {}, batch[-1]) if len(batch) > 1 else (batch, {}, None)
    return [batch], {}, None


def batch_size(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list) else [batch]
    return next(v.shape[0] for v in values if isinstance(v, Tensor))


def _logits(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple) and isinstance(outputs[0], Tensor):
        return outputs[0]
    return getattr(outputs, "logits", None)


def _is_causal(model: nn.Module) -> bool:
    """Whether position t of the logits predicts label t + 1 (a decoder-only language model of transformers)."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    return getattr(model, "loss_type", "none") in (None, "ForCausalLM")


def _likelihood_of(model: nn.Module, labels: Tensor | None) -> Likelihood:
    if labels is None or not labels.is_floating_point():
        return Categorical()
    config = getattr(model, "config", None)
    multi = getattr(config, "problem_type", None) == "multi_label_classification"
    return Bernoulli() if multi else Gaussian()


@dataclass
class Objective:
    """How the loss of a batch is formed, and how often its backward pass runs."""

    model: nn.Module
    fisher: Labels
    loss_fn: LossFn | Likelihood | None
    positions: Positions
    wants_gradient: bool
    generator: torch.Generator | None

    def losses(self, batch: Any) -> tuple[Tensor | None, Iterator[tuple[frozenset[str], Tensor]]]:
        """The mask of valid positions, and the losses to send backward with what each of them adds to."""
        args, inputs, labels = _split(batch)
        mask = inputs.get("attention_mask")
        mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        config = getattr(self.model, "config", None)
        if getattr(config, "is_encoder_decoder", False) and labels is not None:
            inputs["labels"] = labels
        outputs = self.model(*args, **inputs)
        both = frozenset({"fisher", "labels"})
        if is_plain_loss(self.loss_fn):
            return _unless_full(mask), iter([(both, self.loss_fn(outputs, batch))])
        logits = _logits(outputs)
        if logits is None:
            return _unless_full(mask), iter([(both, self._scaled_mean(args, inputs, labels))])
        if _is_causal(self.model) and labels is not None and logits.ndim == 3:
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        token_labels = labels is not None and logits.ndim == 3 and labels.shape == logits.shape[:2]
        if self.positions == "labelled" and token_labels:
            labelled = labels != -100
            mask = labelled if mask is None else mask & labelled
        return _unless_full(mask), self._passes(logits, labels, mask)

    def _passes(
        self, logits: Tensor, labels: Tensor | None, mask: Tensor | None
    ) -> Iterator[tuple[frozenset[str], Tensor]]:
        law = (
            _likelihood_of(self.model, labels) if self.loss_fn is None or is_plain_loss(self.loss_fn) else self.loss_fn
        )
        if self.fisher == "empirical":
            if labels is None:
                raise DataError("the calibration batches hold no labels; add them or use fisher='mc'")
            yield frozenset({"fisher", "labels"}), law.nll(logits, labels)
            return
        if self.wants_gradient and labels is not None:
            yield frozenset({"labels"}), law.nll(logits, labels)
        if self.fisher == "mc":
            drawn = law.sample(logits.detach(), self.generator)
            if labels is not None and isinstance(law, Categorical) and labels.shape == drawn.shape:
                drawn = drawn.masked_fill(labels == -100, -100)
            elif mask is not None and drawn.shape == mask.shape:
                drawn = drawn.masked_fill(~mask, -100)
            yield frozenset({"fisher"}), law.nll(logits, drawn)
            return
        classes = logits.shape[-1]
        if logits.ndim != 2 or not isinstance(law, Categorical) or classes > MAX_CLASSES:
            raise ValueError(
                f"fisher='exact' enumerates a classifier's classes, at most {MAX_CLASSES}, but the logits have shape "
                f"{tuple(logits.shape)}; use fisher='mc'"
            )
        log_p = _wide(logits).log_softmax(-1)
        # A gradient scaled by sqrt(p) enters S_Y with weight p.
        root = log_p.detach().exp().sqrt()
        for k in range(classes):
            yield frozenset({"fisher"}), -(root[:, k] * log_p[:, k]).sum()

    def _scaled_mean(self, args: list[Any], inputs: dict[str, Any], labels: Tensor | None) -> Tensor:
        """A model that returns only its mean loss: multiply by the number of averaged positions."""
        if self.fisher != "empirical" or labels is None:
            raise ValueError("this model returns no logits: only fisher='empirical' with labels can be used")
        loss = self.model(*args, **{**inputs, "labels": labels}).loss
        counted = labels[:, 1:] if _is_causal(self.model) and labels.ndim == 2 else labels
        return loss * (counted != -100).sum()


def _unless_full(mask: Tensor | None) -> Tensor | None:
    """No mask at all where every position is valid: rows are then taken without copying."""
    return None if mask is None or bool(mask.all()) else mask
