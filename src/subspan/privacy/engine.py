"""One engine for private LoRA training: sampling, per-example clipping, noise, accounting and export."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from subspan.errors import NonFinite, PrivacyError
from subspan.privacy.accounting import Mechanism, make_accountant, noise_multiplier, spent
from subspan.privacy.config import Method, PrismConfig
from subspan.privacy.prism import Prism
from subspan.privacy.sampling import Collate, PoissonBatchSampler, empty_safe, entropy_generator, micro_batches
from subspan.privacy.starts import balanced_random_init, spectral_init
from subspan.privacy.sums import GradientSum, LayerSum, TangentSum, factor_sums
from subspan.surgery import BaseShift, FactorPair, export_plain_lora, factor_pairs, shift_base
from subspan.surgery.factors import data_start
from subspan.surgery.layers import is_matrix_layer, owned_parameters
from subspan.surgery.per_example import ExampleRecorder, LayerGradient, batch_statistics_layers, mixes_examples

# Norms and sums are rounded separately in float32; this much is given away so that the bound C holds for the sum.
_SLACK = 1e-6
# peft starts that look at training data (EVA, CorDA, LoRA-GA): without noise they leak it.
_DATA_STARTS = ("eva", "corda", "lora_ga")


class PrismPrivacy:
    """Private training of the adapter of a peft model, and of any trainable linear layer beside it.

    ::

        priv = PrismPrivacy(model, cfg, dataset_size=N, expected_batch_size=L, steps=T)
        opt = priv.optimizer(lr=1e-3)
        for batch in priv.loader(dataset, collate_fn):
            for part in priv.micro_batches(batch):      # none if the batch is empty
                priv.backward(losses_of(model, part))   # a vector: one loss per example
            opt.step()                                  # clipped mean + noise -> .grad -> update; one accountant step
        priv.epsilon(); priv.export("adapter/")

    The guarantee is for adding or removing one record. ``dataset_size`` counts as public. The divisor of the mean is
    L = ``expected_batch_size`` always, and a step with an empty batch is a step of pure noise.

    ``zero_grad`` is not needed: ``.grad`` belongs to the engine, which overwrites it at every step, and raises if
    anything else put a gradient there.

    Attributes:
        factor_pairs, dense_parameters: what is trained.
        sample_rate, steps, sigma, accountant_name, noise_std: q, T, the noise multiplier, the accountant and
            tau = sigma C / L, the noise of the released mean per coordinate.
        shift: what the start took out of the base weights; save it to resume.
        steps_done: releases so far.
        diagnostics: one dict per step if asked for; not private.

    Args:
        model: a peft model whose ``adapter_name`` is active. Move it to its device *before*.
        cfg: see ``PrismConfig``.
        dataset_size: number of training records.
        expected_batch_size: L = q N.
        steps: planned optimiser steps T; a further one is refused if the budget was a target epsilon.
        generator: noise, and the random part of the start. Without one it is seeded by the operating system. Torch's
            generators are not cryptographic; a secure one (torchcsprng) can be passed here.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: PrismConfig,
        *,
        dataset_size: int,
        expected_batch_size: float | int,
        steps: int,
        adapter_name: str = "default",
        generator: torch.Generator | None = None,
    ) -> None:
        if dataset_size < 1 or not 0 < expected_batch_size <= dataset_size:
            raise ValueError(
                f"expected_batch_size must lie in (0, dataset_size], got {expected_batch_size} of {dataset_size}"
            )
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size() > 1:
            raise PrivacyError("private training runs in one process; start it without a distributed launcher")
        self.model, self.cfg, self.adapter_name = model, cfg, adapter_name
        self.dataset_size, self.expected_batch_size, self.steps = dataset_size, float(expected_batch_size), steps
        self.sample_rate = expected_batch_size / dataset_size
        self.generator = entropy_generator() if generator is None else generator

        # Everything that can refuse the run does so before the model is touched.
        self.accountant_name: Mechanism = cfg.accountant
        if cfg.target_epsilon is not None:
            self.sigma, self.accountant_name = noise_multiplier(
                cfg.target_epsilon, cfg.target_delta, self.sample_rate, steps, cfg.accountant
            )
        else:
            self.sigma = float(cfg.noise_multiplier or 0.0)
        self.accountant = make_accountant(self.accountant_name)
        self.noise_std = self.sigma * cfg.max_grad_norm / self.expected_batch_size if self.sigma > 0 else 0.0
        self.factor_pairs = factor_pairs(model, adapter_name)
        _check_pairs(self.factor_pairs, cfg.method)
        _check_start(model, self.factor_pairs, cfg)
        self.shift: BaseShift | None = None
        self._start(_child(self.generator))
        if cfg.method == "ffa":
            for pair in self.factor_pairs:
                pair.param_B.requires_grad_(False)
        self._sums = self._make_sums()
        self._owner = {name: s for s in self._sums for name in s.layers()}
        self._parameters = {name: p for s in self._sums for name, p in s.parameters().items()}
        self._batch_norms = batch_statistics_layers(model)
        layers = {name: module for s in self._sums for name, module in s.layers().items()}
        self._recorder = ExampleRecorder(layers, allow_unused=cfg.allow_unused)

        self.steps_done = 0
        self.diagnostics: list[dict[str, Any]] | None = [] if cfg.diagnostics else None
        self._notes: list[Tensor] = []
        self._begun = False
        self._written: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._before: dict[str, Tensor] | None = None
        self._moved = False
        self._handles: list[Any] = []

    # ---------------------------------------------------------------------------------------------------- set-up

    def _start(self, generator: torch.Generator) -> None:
        init = self.cfg.init or ("spectral" if self.cfg.method == "prism" else "keep")
        if isinstance(init, BaseShift):
            init.apply(self.model)
            for pair in self.factor_pairs:
                pair.write(init.start[pair.name])
            self.shift = init
        elif init != "keep":
            (spectral_init if init == "spectral" else balanced_random_init)(self.factor_pairs, generator=generator)
            self.shift = shift_base(self.model, self.factor_pairs)

    def _make_sums(self) -> list[GradientSum]:
        method = self.cfg.method
        sums: list[GradientSum] = []
        for pair in self.factor_pairs:
            sums += [TangentSum(pair)] if method == "prism" else factor_sums(pair, both=method == "naive")
        covered = {id(p) for s in sums for p in s.parameters().values()}
        frozen = {id(p.param_B) for p in self.factor_pairs if method == "ffa"}
        heads: dict[int, LayerSum] = {}
        for owned in owned_parameters(self.model):
            if not owned.param.requires_grad or id(owned.param) in covered | frozen:
                continue
            if ".lora_" in owned.name or not is_matrix_layer(owned.module) or owned.shared:
                reason = (
                    "it belongs to another adapter, an embedding or a LoRA bias" if ".lora_" in owned.name
                    else "it is shared by several modules" if owned.shared
                    else f"a {type(owned.module).__name__} has no per-example gradients here"
                )  # fmt: skip
                raise PrivacyError(
                    f"{owned.name} is trainable but cannot be trained privately: {reason}; set requires_grad to False"
                )
            heads.setdefault(id(owned.module), LayerSum(owned.name.rpartition(".")[0], owned.module))
        for head in heads.values():
            if not head.module.weight.requires_grad:  # pyright: ignore
                raise PrivacyError(f"{head.name}: its bias is trainable but its weight is not; freeze or free both")
        self.dense_parameters = [p for h in heads.values() for p in h.parameters().values()]
        return [*sums, *heads.values()]

    def sampler(self, generator: torch.Generator | None = None, start: int = 0) -> PoissonBatchSampler:
        """Poisson batches of record numbers, one for each of the planned steps."""
        return PoissonBatchSampler(self.dataset_size, self.sample_rate, self.steps, generator=generator, start=start)

    def loader(
        self, dataset: Any, collate_fn: Collate | None = None, generator: torch.Generator | None = None, **options: Any
    ) -> DataLoader[Any]:
        """A DataLoader over Poisson batches; an empty batch arrives as the usual structure with zero rows."""
        if len(dataset) != self.dataset_size:
            raise PrivacyError(
                f"the dataset has {len(dataset)} records but the budget was made for {self.dataset_size}"
            )
        sampler = self.sampler(generator, start=self.steps_done)
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=empty_safe(collate_fn, dataset), **options)

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """The batch in parts of at most ``max_physical_batch`` examples; nothing for an empty batch."""
        return micro_batches(batch, self.cfg.max_physical_batch)

    def optimizer(self, lr: float, **options: Any) -> Optimizer:
        """The method's own optimizer, attached: ``Prism``, or AdamW on the factors for the baselines."""
        if self.cfg.method == "prism":
            made: Optimizer = Prism(
                self.factor_pairs, lr, noise_std=self.noise_std, dense=self.dense_parameters, **options
            )
        else:
            made = torch.optim.AdamW(self.parameters(), lr, **{"weight_decay": 0.0, **options})
        return self.attach(made)

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter that receives a private gradient."""
        return list(self._parameters.values())

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Let ``optimizer.step()`` release the step's noisy gradient first. Any torch optimizer will do.

        Raises ``PrivacyError`` if it does not hold exactly the parameters that are trained privately.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = {id(p): name for name, p in self._parameters.items()}
        if missing := [name for key, name in ours.items() if key not in held]:
            raise PrivacyError(
                f"{missing[0]} is not among the optimizer's parameters: it would never move. Build the optimizer after "
                "moving the model, from priv.parameters()"
            )
        if held - set(ours):
            raise PrivacyError("the optimizer holds parameters that get no private gradient; use priv.parameters()")
        self.detach()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        return optimizer

    def detach(self) -> None:
        """Undo ``attach``."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Take every hook off the model and the optimizer."""
        self.detach()
        self._recorder.remove()

    # ------------------------------------------------------------------------------------------------------- a step

    def _begin(self) -> None:
        if not self._begun:
            for s in self._sums:
                s.begin(canonical=self.steps_done == 0)
            self._versions = {name: p._version for name, p in self._parameters.items()}
            self._begun = True

    def backward(self, losses: Float[Tensor, "..."]) -> None:
        """Back-propagate a vector of losses, one per example, and add the clipped gradients to the step's sum.

        Each loss must depend on its own example alone: take the mean over an example's tokens, never over the batch.

        Raises:
            ValueError: the loss is not a vector.
            NonFinite: a loss or a gradient is NaN or infinite; nothing was added.
            PrivacyError: batch normalisation is in training mode.
            TargetError: a module has no per-example gradient; the message names it.
        """
        if losses.ndim != 1:
            raise ValueError(
                f"backward needs a vector of losses, one per example, got shape {tuple(losses.shape)}: clipping is per "
                'example, so compute the loss with reduction="none"'
            )
        for name, layer in self._batch_norms.items():
            if mixes_examples(layer):
                raise PrivacyError(
                    f"{name}: batch normalisation by the batch's own statistics mixes examples; put it in eval mode, "
                    "with running statistics"
                )
        if len(losses) == 0:
            return
        if not bool(torch.isfinite(losses.detach()).all()):
            bad = int((~torch.isfinite(losses.detach())).nonzero()[0])
            raise NonFinite(
                f"the loss of example {bad} of this batch is {float(losses.detach()[bad])}; nothing was added"
            )
        try:
            with torch.autocast(losses.device.type, enabled=False):  # norms in half precision would not bound anything
                self._begin()
                self._recorder.backward(losses, self._take)
                self._clip_and_add(losses.device)
        finally:
            for s in self._sums:
                s.forget()

    def _take(self, layer: str, gradient: LayerGradient) -> None:
        self._owner[layer].take(layer, gradient)

    @torch.no_grad()
    def _clip_and_add(self, device: torch.device) -> None:
        parts = [(s, part) for s in self._sums if (part := s.norm_sq()) is not None]
        for s, part in parts:
            if not bool(torch.isfinite(part).all()):
                raise NonFinite(f"{s.name}: a per-example gradient is NaN or infinite; nothing was added")
        if not parts:
            return
        norms = torch.stack([part.to(device) for _, part in parts]).sum(0).sqrt()
        # (3.2.4) alpha_i = min(1, C / s_i), and 1 where s_i = 0: the norm is global over modules
        weights = (self.cfg.max_grad_norm / (norms * (1 + _SLACK))).clamp(max=1.0)
        for s, part in parts:
            s.add(weights.to(part.device))
        if self.diagnostics is not None:
            self._notes.append(norms)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(a is not None for a in (*args[1:], kwargs.get("closure"))):
            raise PrivacyError("a private step takes no closure: call priv.backward, then optimizer.step()")
        if self.cfg.target_epsilon is not None and self.steps_done >= self.steps:
            raise PrivacyError(
                f"the {self.steps} planned steps are done and epsilon={self.cfg.target_epsilon:g} is spent; a further "
                "step would exceed it. Plan more steps from the start (with more noise)"
            )
        self._check_live(optimizer)
        self._begin()
        if changed := [n for n, p in self._parameters.items() if p._version != self._versions[n]]:
            raise PrivacyError(f"{changed[0]} was changed between priv.backward and optimizer.step()")
        with torch.no_grad():
            self._diagnose()
            for s in self._sums:
                s.release(self.noise_std, self.expected_batch_size, self.generator)
        self._begun = False  # whatever becomes of the update, these records have been released
        self._written = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self.accountant.step(noise_multiplier=self.sigma, sample_rate=self.sample_rate)
        self.steps_done += 1
        if not self._moved:
            self._before = {name: p.detach().clone() for name, p in self._parameters.items()}

    def _check_live(self, optimizer: Optimizer) -> None:
        """Every registered parameter is still the module's own and the optimizer's, and holds no foreign gradient."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for s in self._sums:
            for name, live in s.parameters().items():
                registered = self._parameters[name]
                if live is not registered or id(registered) not in held:
                    raise PrivacyError(
                        f"{name} is no longer the parameter that is trained (the model was moved, cast or reloaded "
                        "after wrapping): build PrismPrivacy and the optimizer after that"
                    )
                if registered.grad is not None and registered.grad is not self._written.get(name):
                    raise PrivacyError(
                        f"{name}.grad holds a gradient that did not come from priv.backward; unclipped gradients would "
                        "void the guarantee. Do not call loss.backward()"
                    )

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._before is not None:
            rates = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
            moving = [n for n, p in self._parameters.items() if self.noise_std > 0 and rates[id(p)] > 0]
            for name in moving:
                if torch.equal(self._before[name], self._parameters[name].detach()):
                    raise PrivacyError(
                        f"{name} did not move in the first step although its gradient holds noise: the update is lost "
                        f"(dtype {self._parameters[name].dtype}; keep adapters in float32) or the parameter is stale"
                    )
            self._before, self._moved = None, bool(moving) or self._moved

    def _diagnose(self) -> None:
        """One line of NON-private numbers on the step that is about to be released, if they were asked for."""
        if self.diagnostics is None:
            return
        norms = torch.cat(self._notes) if self._notes else torch.zeros(0)
        self._notes = []
        signals, dims = zip(*(s.signal() for s in self._sums), strict=True)
        noise = self.sigma * self.cfg.max_grad_norm * math.sqrt(sum(dims)) if self.sigma > 0 else 0.0
        signal = math.sqrt(sum(float(x) for x in signals))
        self.diagnostics.append(
            {
                "private": False,
                "step": self.steps_done + 1,
                "examples": len(norms),
                "clip_fraction": float((norms > self.cfg.max_grad_norm).float().mean()) if len(norms) else 0.0,
                "mean_norm": float(norms.mean()) if len(norms) else 0.0,
                "snr": signal / noise if noise > 0 else math.inf,
            }
        )

    # --------------------------------------------------------------------------------------------- budget and files

    def epsilon(self, delta: float | None = None) -> float:
        """What the steps so far have cost at ``delta`` (default: the target delta); infinite without noise."""
        if self.steps_done == 0:
            return 0.0
        if self.sigma == 0:
            return math.inf
        return spent(self.accountant, self.cfg.target_delta if delta is None else delta)

    def summary(self) -> dict[str, Any]:
        """The guarantee in numbers: what may and should be published with the adapter."""
        return {
            "method": self.cfg.method,
            "epsilon": self.epsilon(),
            "target_epsilon": self.cfg.target_epsilon,
            "delta": self.cfg.target_delta,
            "sigma": self.sigma,
            "sample_rate": self.sample_rate,
            "steps": self.steps_done,
            "planned_steps": self.steps,
            "accountant": self.accountant_name,
            "clip_norm": self.cfg.max_grad_norm,
        }

    def export(self, path: str | Path) -> None:
        """Write the adapter as plain LoRA for the *original* base model (rank 2r if the start shifted the base)."""
        export_plain_lora(self.model, path, self.shift, self.adapter_name)

    def state_dict(self) -> dict[str, Any]:
        """Accountant history, steps and the noise generator, as tensors and JSON values. Call between steps."""
        if self._begun:
            raise PrivacyError("the engine holds gradients of an unfinished step; save after optimizer.step()")
        return {
            "accountant": self.accountant_name,
            "history": [list(entry) for entry in self.accountant.history],
            "steps_done": self.steps_done,
            "generator": self.generator.get_state(),
            **{key: getattr(self, key) for key in ("sigma", "sample_rate", "expected_batch_size", "dataset_size")},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another engine's budget; raises ``PrivacyError`` if that one was set up differently."""
        for key in ("sigma", "sample_rate", "expected_batch_size", "dataset_size"):
            if state[key] != getattr(self, key):
                raise PrivacyError(f"the saved run has {key}={state[key]}, this one {getattr(self, key)}")
        if state["accountant"] != self.accountant_name:
            raise PrivacyError(f"the saved run was accounted by {state['accountant']}, this one {self.accountant_name}")
        self.accountant.history = [(float(s), float(q), int(n)) for s, q, n in state["history"]]
        self.steps_done = int(state["steps_done"])
        self.generator.set_state(torch.as_tensor(state["generator"], dtype=torch.uint8))


def _check_pairs(pairs: Sequence[FactorPair], method: Method) -> None:
    seen: dict[int, str] = {}
    for pair in pairs:
        if getattr(pair.layer, "lora_variant", {}).get(pair.adapter) is not None:
            raise PrivacyError(
                f"{pair.name}: only plain LoRA can be trained privately (this is DoRA or a variant of it)"
            )
        m, n, r = pair.shape
        if r > min(m, n):
            raise ValueError(f"{pair.name}: rank {r} exceeds min(m, n) = {min(m, n)}; lower r for this layer")
        if not (pair.param_A.requires_grad and (method == "ffa" or pair.param_B.requires_grad)):
            raise PrivacyError(
                f"{pair.name}: the adapter is frozen; load it with is_trainable=True or call model.set_adapter first"
            )
        for p in (pair.param_A, pair.param_B):
            if id(p) in seen:
                raise PrivacyError(
                    f"{pair.name} and {seen[id(p)]} share a LoRA factor; private training needs own ones"
                )
            seen[id(p)] = pair.name


def _check_start(model: nn.Module, pairs: Sequence[FactorPair], cfg: PrismConfig) -> None:
    """Refuse a start that was computed from private data without noise: no later noise makes up for it."""
    if cfg.public_data:
        return
    start = getattr(getattr(model, "peft_config", {}).get(pairs[0].adapter), "init_lora_weights", True)
    reasons = [f"init_lora_weights={start!r} looks at data"] if str(start).lower() in _DATA_STARTS else []
    reasons += [f"{pair.name} starts from {why}" for pair in pairs if (why := data_start(pair)) is not None]
    if isinstance(cfg.init, BaseShift) and not cfg.init.public:
        reasons.append("init= is a start that was computed from private data")
    if reasons:
        raise PrivacyError(
            f"{reasons[0]}, without noise, which breaks the guarantee; use another start, or public_data=True if that "
            "data is public"
        )


def _child(generator: torch.Generator) -> torch.Generator:
    """A generator of its own for the start, so that the noise does not depend on whether a start was drawn."""
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator(generator.device).manual_seed(int(seed))
