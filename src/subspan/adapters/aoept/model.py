"""The module one trains: a frozen backbone, prompts for what is missing, and a head."""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from subspan.adapters.aoept.backbones import BackboneAdapter
from subspan.adapters.aoept.bank import PrototypeBank
from subspan.adapters.aoept.config import AOEPTConfig, ProblemType
from subspan.adapters.aoept.inputs import check_finite, embedded, missing_mask, split_batch
from subspan.adapters.aoept.passes import Prompting, Step, run
from subspan.adapters.aoept.prompts import MAX_LOG_SCALE, at_least_float32, bounded_scale, consistency_terms
from subspan.adapters.aoept.seeding import seeded
from subspan.adapters.aoept.sources import START_STD, ContextualPrompts
from subspan.errors import BaseMismatch, DataError
from subspan.files import replacing, write_json

PATIENCE = 100  # training steps with kappa at its bound before a warning
DEAD_GATE, USELESS_GATE = 0.02, 0.98


class AOEPTOutput(dict[str, Tensor]):
    """``loss`` (with labels), ``logits``, and ``aux_loss`` (in training) as keys and as attributes, None if absent.

    It needs no transformers, and their Trainer reads it as one of their own outputs.
    """

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in ("loss", "logits", "aux_loss"):
            raise AttributeError(name)
        return self.get(name)


class Traced(NamedTuple):
    """``pooled`` (B, width) for the head, ``steps`` of every prompted layer, ``present`` (B, modalities)."""

    pooled: Tensor
    steps: list[Step]
    present: Tensor


class AOEPTModel(nn.Module):
    """A classifier on a frozen multimodal backbone whose inputs may lack modalities, in training and afterwards.

    Prompts, gates, the consistency loss's scale and the head train, and of the backbone what its adapter names (last
    norms, projections, pooler). Backbone and bank stay as they are; the backbone stays in evaluation mode.

    Args:
        backbone: ``ClipAdapter``, ``ViltAdapter``, ``TorchTowersAdapter`` or one of your own.
        bank: from ``PrototypeBank.collect`` on this backbone; None only where no bank is needed (depth 0, or
            mcp "random" or "reconstruct").
        config: options.
        num_labels: classes.
        problem_type: "single_label_classification" (labels (B,) of classes) or "multi_label_classification" (labels
            (B, classes) of zeros and ones).
        generator: of the start; torch's global one by default.

    Raises:
        ValueError: a depth beyond the layers, heads that do not divide a width, a bank of another shape, or options
            that do not fit the backbone.
        BaseMismatch: the bank was collected on other weights.

    Source: AOEPT (Lang et al., ICML 2026, arXiv 2605.24816).
    """

    bank_digest: Tensor
    at_bound: Tensor
    # The Trainer takes a forward with **inputs for one that divides its loss by the number of accumulated batches.
    accepts_loss_kwargs = False

    def __init__(
        self,
        backbone: BackboneAdapter,
        bank: PrototypeBank | None,
        config: AOEPTConfig | None = None,
        *,
        num_labels: int,
        problem_type: ProblemType = "single_label_classification",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        config = AOEPTConfig() if config is None else config
        if problem_type not in get_args(ProblemType):
            raise ValueError(f"problem_type must be one of {', '.join(get_args(ProblemType))}, got {problem_type!r}")
        if num_labels < 1:
            raise ValueError(f"num_labels must be at least 1, got {num_labels}")
        _check_fit(backbone, bank, config)
        self.options, self.num_labels, self.problem_type = config, num_labels, problem_type
        self.backbone = cast(Any, backbone)
        self.backbone.requires_grad_(False).eval()
        for part in backbone.trained_modules():
            part.requires_grad_(True)
        digest = bytes(32) if bank is None or not config.slots else bank.digest
        self.register_buffer("bank_digest", torch.tensor(list(digest), dtype=torch.uint8))
        self.register_buffer("at_bound", torch.zeros((), dtype=torch.int64), persistent=False)
        with seeded(generator):
            self.prompts = None
            if config.slots:
                self.prompts = ContextualPrompts(_banks(backbone, bank, config), config, backbone.fused)
            self.head = _head(backbone, num_labels)
        active = config.alpha > 0 and config.slots > 0
        self.kappa = nn.Parameter(torch.tensor(MAX_LOG_SCALE), requires_grad=active)
        self.checkpointing, self._steps = False, 0
        self.register_state_dict_post_hook(_leave_out_frozen)
        self.register_load_state_dict_pre_hook(_check_and_fill)

    # ------------------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        missing: Tensor | None = None,
        labels: Tensor | None = None,
        ids: Sequence[Any] | None = None,
        **inputs: Tensor,
    ) -> AOEPTOutput:
        """Classify a batch.

        Args:
            input_ids: input of CLIP and ViLT, as the four that follow.
            attention_mask: True at tokens of the text.
            pixel_values: images.
            pixel_mask: True at pixels of the image (ViLT).
            token_type_ids: of the text (ViLT).
            missing: (B, modalities) bool, True where a sample lacks a modality; whatever its inputs hold there is
                replaced before anything reads it. By default nothing is missing but what is not given.
            labels: see ``problem_type``.
            ids: names of the samples, for messages.
            inputs: of other backbones, by name.

        Raises:
            TypeError: ``missing`` is not boolean, or an input is not the backbone's.
            ValueError: shapes that do not fit, a sample without any modality, or NaN in a modality that is there.
        """
        known = [name for modality in self.backbone.modalities for name in self.backbone.input_names(modality)]
        if unknown := [name for name in inputs if name not in known]:
            raise TypeError(f"unknown input {unknown[0]!r}; this backbone takes {', '.join(known)}")
        named = {
            "input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values,
            "pixel_mask": pixel_mask, "token_type_ids": token_type_ids, **inputs,
        }  # fmt: skip
        traced = self.trace(named, missing, ids=ids)
        logits = self.head(traced.pooled.to(next(self.head.parameters()).dtype))
        out = AOEPTOutput(logits=logits)
        if labels is None:
            return out
        labels = labels.to(logits.device)
        out["loss"] = self._task_loss(logits, labels)
        if self.training and self.kappa.requires_grad:
            out["aux_loss"] = self._consistency(traced, labels)
            out["loss"] = out["loss"] + self.options.alpha * out["aux_loss"]
            self._watch_scale()
        return out

    def trace(self, inputs: Mapping[str, Any], missing: Tensor | None, *, ids: Sequence[Any] | None = None) -> Traced:
        """One pass up to the head; arguments and errors as for the module itself."""
        device = self.device
        given, size = split_batch(self.backbone, inputs, device)
        absent = missing_mask(self.backbone, given, missing, size, device)
        if not torch.compiler.is_compiling():  # a compiled graph cannot look at values
            check_finite(self.backbone, given, absent, range(size) if ids is None else ids)
            if self.options.on_all_missing == "error" and bool(absent.all(1).any()):
                rows = absent.all(1).nonzero().flatten().tolist()
                names = ", ".join(str(row if ids is None else ids[row]) for row in rows[:5])
                raise ValueError(f"samples {names} lack every modality: leave them out, or set on_all_missing='prior'")
        options = self.options
        streams = embedded(self.backbone, given, absent, options.slots if options.prompt_positions != "none" else 0)
        prompting = None
        if self.prompts is not None:
            prompting = Prompting(self.prompts.bind(), options.depth, options.order, options.insert)
        outcome = run(self.backbone, streams, ~absent, prompting, checkpointing=self.checkpointing and self.training)
        if self.backbone.fused:
            first, content = self.backbone.modalities[0], torch.cat(list(outcome.content.values()), 1)
            pooled = self.backbone.pool(first, content, streams[first])
        else:
            pooled = torch.cat([self.backbone.pool(m, outcome.content[m], streams[m]) for m in streams], 1)
        return Traced(pooled, outcome.steps, ~absent)

    def _task_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.problem_type == "multi_label_classification":
            return binary_cross_entropy_with_logits(at_least_float32(logits), labels.to(at_least_float32(logits).dtype))
        return cross_entropy(at_least_float32(logits), labels)

    def _consistency(self, traced: Traced, labels: Tensor) -> Tensor:
        """The mean of the terms that exist (3.7); 0, with its graph, if there are none."""
        positives = labels if self.options.supcon_labels and self.problem_type.startswith("single") else None
        scale, terms, exist = bounded_scale(self.kappa), [], []
        for column, name in enumerate(self.backbone.modalities):
            steps = [step for step in traced.steps if step.modality == name]
            u = torch.stack([step.prompts.mean(1) for step in steps])
            z = torch.stack([step.features_out for step in steps])
            present = traced.present[:, column]
            terms.append(consistency_terms(u, z, present, scale, positives))
            exist.append((present.sum() >= 2).expand(len(steps)))
        # A modality without two samples counts in no mean, but every process keeps the same graph.
        return torch.cat(terms).sum() / torch.cat(exist).sum().clamp(min=1)

    @property
    def device(self) -> torch.device:
        return self.bank_digest.device

    # -------------------------------------------------------------------------------------------------- what to watch

    def prompt_diversity(self) -> dict[str, list[dict[str, float]]]:
        """By modality and layer: mean cosine of pairs of prompts ("cosine"), and their "effective_rank"."""
        return {} if self.prompts is None else self.prompts.diversity()

    def check_gates(self) -> dict[str, list[float]]:
        """Mean gates by modality and layer since the last call; warns of those below .02 or above .98.

        Call it after every epoch, or let ``GateCallback`` do so in a Trainer.
        """
        means = {} if self.prompts is None else self.prompts.mean_gates()
        for name, layers in means.items():
            for layer, mean in enumerate(layers):
                if mean < DEAD_GATE or mean > USELESS_GATE:
                    state = "prompts are switched off" if mean < DEAD_GATE else "the gate does nothing"
                    warnings.warn(f"the mean gate of {name!r} in layer {layer} is {mean:.3f}: {state}", stacklevel=2)
        return means

    @torch.no_grad()
    def _watch_scale(self) -> None:
        at_bound = self.kappa > MAX_LOG_SCALE + 1e-4  # beyond where it starts, whose rounding may lie above
        self.at_bound.copy_(torch.where(at_bound, self.at_bound + 1, 0))
        self._steps += 1
        # Looked at once in a while only, so that a device is not waited for in every step.
        if self._steps % PATIENCE == 0 and not torch.compiler.is_compiling() and int(self.at_bound) >= PATIENCE:
            warnings.warn(
                f"the scale of the consistency loss has been at its bound of 100 for {int(self.at_bound)} steps: lower "
                "alpha or the learning rate",
                stacklevel=3,
            )

    # ----------------------------------------------------------------------------------------- modes, files, trainers

    def train(self, mode: bool = True) -> "AOEPTModel":
        """The frozen backbone never leaves evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        """Recompute every layer in the backward pass; the Trainer calls this with ``gradient_checkpointing=True``."""
        self.checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.checkpointing = False

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write what was trained to ``model.safetensors`` and the options to ``config.json``; no backbone, no bank."""
        from safetensors.torch import save_file

        with replacing(Path(folder, "model.safetensors")) as part:
            save_file({name: x.contiguous() for name, x in self.state_dict().items()}, part)
        about = {"num_labels": self.num_labels, "problem_type": self.problem_type, "options": asdict(self.options)}
        write_json(Path(folder, "config.json"), about)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], backbone: BackboneAdapter, bank: PrototypeBank | None
    ) -> "AOEPTModel":
        """What ``save`` wrote, on the backbone and the bank it was trained with.

        Raises:
            BaseMismatch: another bank, or a bank of another backbone.
            DataError: the folder does not hold such a model.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            about = json.loads(Path(folder, "config.json").read_text("utf-8"))
            state = load_file(Path(folder, "model.safetensors"))
        except (OSError, json.JSONDecodeError, SafetensorError) as error:
            raise DataError(f"{os.fspath(folder)} holds no saved model: {error}") from error
        options = AOEPTConfig(**about["options"])
        model = cls(backbone, bank, options, num_labels=about["num_labels"], problem_type=about["problem_type"])
        model.load_state_dict(state)
        return model.eval()


# ------------------------------------------------------------------------------------------------------------ building


def _check_fit(backbone: BackboneAdapter, bank: PrototypeBank | None, config: AOEPTConfig) -> None:
    for name in backbone.modalities:
        if config.depth > backbone.n_layers(name):
            raise ValueError(f"depth {config.depth} exceeds the {backbone.n_layers(name)} layers of {name!r}")
        if config.mcp == "attention" and config.slots and backbone.width(name) % config.num_heads:
            raise ValueError(f"num_heads={config.num_heads} does not divide {name!r}'s width {backbone.width(name)}")
    if config.prompt_len == 0 and config.shared_len:
        raise ValueError("shared prompts need prompts of their own beside them: set prompt_len above 0")
    if config.slots and bank is None and config.mcp not in ("random", "reconstruct"):
        raise ValueError(f"mcp={config.mcp!r} is made of a bank: give the one of PrototypeBank.collect")
    if config.slots and bank is not None:
        bank.check(backbone, config.depth)


def _banks(backbone: BackboneAdapter, bank: PrototypeBank | None, config: AOEPTConfig) -> dict[str, Tensor]:
    if bank is None:  # only its shape is looked at
        return {name: torch.zeros(config.depth, 1, backbone.width(name)) for name in backbone.modalities}
    return {name: bank.centres[name].clone() for name in backbone.modalities}


def _head(backbone: BackboneAdapter, num_labels: int) -> nn.Module:
    """As released (3.8): one linear map for towers, two with a norm between for a single stream."""
    if backbone.fused:
        width = backbone.pooled_width(backbone.modalities[0])
        return nn.Sequential(
            nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.GELU(), nn.Linear(2 * width, num_labels)
        )
    head = nn.Linear(sum(map(backbone.pooled_width, backbone.modalities)), num_labels)
    nn.init.normal_(head.weight, std=START_STD)
    nn.init.zeros_(head.bias)
    return head


# --------------------------------------------------------------------------------------------------------- checkpoints


def _frozen(model: AOEPTModel) -> dict[str, Tensor]:
    """The entries of the backbone that no training changes."""
    trained = {id(p) for part in model.backbone.trained_modules() for p in part.parameters()}
    entries = model.backbone.state_dict(keep_vars=True)
    return {f"backbone.{name}": x for name, x in entries.items() if id(x) not in trained}


def _leave_out_frozen(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in _frozen(cast(AOEPTModel, model)):
        state.pop(prefix + name, None)


def _check_and_fill(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A checkpoint refers to its bank by a digest and holds no frozen backbone: the one that is there stays."""
    model = cast(AOEPTModel, model)
    digest = state.get(f"{prefix}bank_digest")
    if digest is not None and not torch.equal(digest.cpu(), model.bank_digest.cpu()):
        raise BaseMismatch("the checkpoint was trained with another prototype bank: load the bank it was saved with")
    for name, x in _frozen(model).items():
        state.setdefault(prefix + name, x)
