"""The bridge to peft: factor pairs in the papers' letters, edits of the base weight, and export as plain LoRA.

peft writes the update as s * lora_B @ lora_A. Here, as in the papers, Z = A Bᵀ with A = lora_B.weight (m x r) and
B = lora_A.weightᵀ (n x r). This file is the only place that swaps the letters.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subspan.errors import BaseMismatch, DataError, TargetError
from subspan.files import replacing, write_json
from subspan.linalg import LowRank
from subspan.surgery.layers import base_layer, is_matrix_layer, weight_matrix, write_weight

# peft adds these in front of the base model's own names.
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class FactorPair:
    """One LoRA module of a peft model: W_eff = W0 + s A Bᵀ."""

    name: str
    layer: Any  # a peft LoRA layer, a mix-in of nn.Module for which peft has no type
    adapter: str = "default"

    @property
    def param_A(self) -> nn.Parameter:
        """The live Parameter that stores A (``lora_B.weight``, m x r)."""
        return self.layer.lora_B[self.adapter].weight

    @property
    def param_B(self) -> nn.Parameter:
        """The live Parameter that stores Bᵀ (``lora_A.weight``, r x n)."""
        return self.layer.lora_A[self.adapter].weight

    @property
    def A(self) -> Float[Tensor, "m r"]:
        return self.param_A.detach().flatten(1)

    @property
    def B(self) -> Float[Tensor, "n r"]:
        return self.param_B.detach().flatten(1).mT

    @property
    def scaling(self) -> float:
        """s: lora_alpha / r, or / sqrt(r) under rsLoRA."""
        return float(self.layer.scaling[self.adapter])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, r)."""
        return self.A.shape[0], self.B.shape[0], self.A.shape[1]

    def low_rank(self, dtype: torch.dtype = torch.float32) -> LowRank:
        """Z = A Bᵀ without the scaling, as detached factors in ``dtype``."""
        return LowRank(self.A.to(dtype), self.B.to(dtype))

    def write(self, z: LowRank) -> None:
        """Copy factors into the live Parameters (in their own dtype and shape)."""
        with torch.no_grad():
            self.param_A.copy_(z.A.reshape(self.param_A.shape))
            self.param_B.copy_(z.B.mT.reshape(self.param_B.shape))

    def grad_A(self) -> Float[Tensor, "m r"] | None:
        grad = self.param_A.grad
        return None if grad is None else grad.flatten(1)

    def grad_B(self) -> Float[Tensor, "n r"] | None:
        grad = self.param_B.grad
        return None if grad is None else grad.flatten(1).mT


def factor_pairs(model: nn.Module, adapter_name: str = "default") -> list[FactorPair]:
    """The LoRA modules of ``adapter_name`` in a peft model, in module order (embedding LoRA is not a factor pair).

    Raises ``TargetError`` when the model has no such adapter.
    """
    pairs = [
        FactorPair(name.removeprefix(_PREFIX), module, adapter_name)
        for name, module in model.named_modules()
        if adapter_name in getattr(module, "lora_A", {}) and is_matrix_layer(module)
    ]
    if not pairs:
        known = sorted(getattr(model, "peft_config", {}))
        raise TargetError(f"no LoRA factors named {adapter_name!r}; the model's adapters are {known or 'none'}")
    return pairs


def mark_data_start(pair: FactorPair, why: str) -> None:
    """Record on the LoRA layer that this adapter starts from private data; the mark lives as long as the layer."""
    _mark(pair.layer, pair.adapter, why)


def data_start(pair: FactorPair) -> str | None:
    """Why this adapter, or the base weight under it, depends on private data (``mark_data_start``), or None."""
    marks = getattr(pair.layer, "subspan_start", {})
    return marks.get(pair.adapter, marks.get(None))


def _mark(layer: Any, adapter: str | None, why: str) -> None:
    """``adapter`` None: every adapter on this layer sees the private start, in the base weight."""
    layer.subspan_start = {**getattr(layer, "subspan_start", {}), adapter: why}


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The base model's own floating-point parameters, by the name they have without peft."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):  # tied weights under each of their names
        if ".lora_" in name or ".modules_to_save." in name or not p.is_floating_point():
            continue
        clean = name.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")
        names[clean] = p.detach()
    return names


def base_fingerprint(model: nn.Module, names: Iterable[str] | None = None) -> str:
    """A digest of the base weights that survives loading in another dtype, but not an edit of the weights.

    Hashes up to 65,536 evenly spread entries of each tensor, rounded to bfloat16, with its name and shape. ``names``
    limits it to some parameters. The dtype may be one that holds the checkpoint's values to bfloat16 precision after a
    single rounding: float32, bfloat16, or the one it is stored in (a float32 checkpoint loaded in float16 differs).
    """
    digest = hashlib.blake2b(digest_size=16)
    weights = base_weights(model)
    chosen = sorted(weights) if names is None else sorted(names)
    missing = [n for n in chosen if n not in weights]
    if missing:
        raise BaseMismatch(f"the base model has no parameter {missing[0]!r}: it is another model than the adapter's")
    for name in chosen:
        flat = weights[name].flatten()
        sample = flat[:: max(1, flat.numel() // 65536)].to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{name} {tuple(weights[name].shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class BaseShift:
    """What was taken out of the base weights so that a non-zero start keeps the function: W' = W0 - s A0 B0ᵀ.

    ``start`` maps each module name to (A0, B0) in the adapter's storage dtype, ``scaling`` to its s, ``fingerprint``
    identifies the base *before* the shift. ``public`` is False where the start was computed from private data: no
    training from it is differentially private.
    """

    start: Mapping[str, LowRank]
    scaling: Mapping[str, float]
    fingerprint: str
    public: bool = True

    def apply(self, model: nn.Module) -> None:
        """Repeat the shift on an unmodified base (to resume a run); raises ``BaseMismatch`` on any other."""
        names = [f"{n}.weight" for n in self.start]
        if base_fingerprint(model, names) != self.fingerprint:
            raise BaseMismatch(
                "the base weights are not those this adapter was started from; load the original base model"
            )
        modules = {n.removeprefix(_PREFIX): m for n, m in model.named_modules()}
        for name, z in self.start.items():
            _subtract(modules[name], z, self.scaling[name])
            if not self.public:
                _mark(modules[name], None, "a saved start that was computed from private data")

    def save(self, path: str | Path) -> None:
        from safetensors.torch import save_file

        tensors = {}
        for name, z in self.start.items():
            tensors[f"{name}.A"], tensors[f"{name}.B"] = z.A.contiguous(), z.B.contiguous()
        meta = {"fingerprint": self.fingerprint, "scaling": json.dumps(dict(self.scaling))}
        meta["public"] = json.dumps(self.public)
        with replacing(path) as part:
            save_file(tensors, part, metadata=meta)

    @classmethod
    def load(cls, path: str | Path) -> "BaseShift":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            meta = file.metadata()
            scaling = json.loads(meta["scaling"])
            start = {n: LowRank(file.get_tensor(f"{n}.A"), file.get_tensor(f"{n}.B")) for n in scaling}
        return cls(start, scaling, meta["fingerprint"], json.loads(meta["public"]))


@torch.no_grad()
def _subtract(module: nn.Module, z: LowRank, s: float) -> None:
    """W <- cast(W - s A Bᵀ), formed in float32 (float64 weights stay so) from the rounded factors."""
    w = weight_matrix(module)
    exact = torch.promote_types(w.dtype, torch.float32)
    update = LowRank(z.A.to(w.device, exact), z.B.to(w.device, exact)).dense()
    write_weight(module, w.to(exact) - s * update)


def shift_base(model: nn.Module, pairs: Iterable[FactorPair]) -> BaseShift:
    """Take each pair's present s A Bᵀ out of its base weight, so that the model computes what it did without adapter.

    Call once, right after writing a non-zero start. The shift is public unless a pair bears ``mark_data_start``. Raises
    ``TargetError`` for quantised weights.
    """
    pairs = list(pairs)
    for pair in pairs:
        weight_matrix(pair.layer)  # refuses what cannot be shifted, before anything is
    start = {p.name: LowRank(p.A.clone(), p.B.clone()) for p in pairs}
    fingerprint = base_fingerprint(model, [f"{n}.weight" for n in start])
    for pair in pairs:
        _subtract(base_layer(pair.layer), start[pair.name], pair.scaling)
        why = data_start(pair)
        if why is not None:
            _mark(pair.layer, None, why)
    public = all(data_start(pair) is None for pair in pairs)
    return BaseShift(start, {p.name: p.scaling for p in pairs}, fingerprint, public)


def export_plain_lora(
    model: Any, path: str | Path, shift: BaseShift | None = None, adapter_name: str = "default"
) -> None:
    """Write the adapter as an ordinary peft LoRA for the *unmodified* base model.

    Where the base was shifted by s A0 B0ᵀ the file holds `[A, A0] [B, -B0]ᵀ`, of twice the rank, with alpha scaled so
    that s is unchanged. The folder also gets ``base.json`` with the fingerprint ``check_base`` reads.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    path = Path(path)
    state = {k: v.detach().clone() for k, v in get_peft_model_state_dict(model, adapter_name=adapter_name).items()}
    config = copy.deepcopy(model.peft_config[adapter_name])
    pairs = factor_pairs(model, adapter_name)
    ranks: dict[str, int] = {}
    for pair in pairs:
        ranks[pair.name] = pair.shape[2]
        if shift is None or pair.name not in shift.start:
            continue
        z0 = shift.start[pair.name]
        key_A, key_B = (f"{_PREFIX}{pair.name}.lora_{x}.weight" for x in "BA")
        a, b = state[key_A], state[key_B]
        state[key_A] = torch.cat([a, z0.A.to(a).reshape(a.shape)], 1)
        state[key_B] = torch.cat([b, -z0.B.to(b).mT.reshape(b.shape)], 0)
        ranks[pair.name] *= 2
    if shift is not None:
        # Embedding LoRA is no factor pair and keeps its rank, which the new config.r no longer says.
        wrapped: dict[str, Any] = {
            n.removeprefix(_PREFIX): m for n, m in model.named_modules() if adapter_name in getattr(m, "r", ())
        }
        ranks = {n: ranks.get(n) or m.r[adapter_name] for n, m in wrapped.items()}
        alphas = {n: m.scaling[adapter_name] * ranks[n] for n, m in wrapped.items()}
        config.r, config.lora_alpha = _most_common(ranks), _most_common(alphas)
        # "^" keeps peft from matching a name as the ending of another.
        config.rank_pattern = {f"^{n}": r for n, r in ranks.items() if r != config.r}
        config.alpha_pattern = {f"^{n}": a for n, a in alphas.items() if a != config.lora_alpha}
        config.use_rslora = False
    config.init_lora_weights = True
    config.inference_mode = True
    if shift is None:
        floating = base_weights(model)
        names = [n for n in (f"{p.name}.weight" for p in pairs) if n in floating]
        fingerprint = base_fingerprint(model, names)
    else:
        fingerprint, names = shift.fingerprint, [f"{n}.weight" for n in shift.start]
    path.mkdir(parents=True, exist_ok=True)
    with replacing(path / "adapter_model.safetensors") as part:
        save_file({k: v.contiguous() for k, v in state.items()}, part, metadata={"format": "pt"})
    settings = config.to_dict()
    settings["target_modules"] = _plain(settings.get("target_modules"))
    write_json(path / "adapter_config.json", {k: _plain(v) for k, v in settings.items()})
    write_json(path / "base.json", {"fingerprint": fingerprint, "parameters": sorted(names)})


def check_base(model: nn.Module, path: str | Path) -> None:
    """Raise ``BaseMismatch`` if ``model`` is not the base the exported adapter in ``path`` was made for."""
    record = json.loads((Path(path) / "base.json").read_text())
    if base_fingerprint(model, record["parameters"]) != record["fingerprint"]:
        raise BaseMismatch(
            f"the base model's weights differ from those the adapter in {path} was made for; load the original base"
        )


def load_factors(path: str | Path) -> tuple[dict[str, LowRank], dict[str, float]]:
    """The factors (float32) and the scaling s of every linear layer of a LoRA folder in peft's format, no model needed.

    Layers have the base model's names. Raises ``DataError`` for a folder without a LoRA, or with what is more than one
    (DoRA's magnitudes).
    """
    from safetensors.torch import load_file

    path = Path(path)
    if not (path / "adapter_config.json").is_file() or not (path / "adapter_model.safetensors").is_file():
        raise DataError(f"{path} holds no adapter: adapter_config.json and adapter_model.safetensors should lie there")
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    if config.get("peft_type", "LORA") != "LORA" or config.get("use_dora"):
        kind = "DoRA" if config.get("use_dora") else config["peft_type"]
        raise DataError(f"the adapter in {path} is a {kind}, whose update is not s A Bᵀ; a plain LoRA is needed")
    halves: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(path / "adapter_model.safetensors").items():
        if found := _FACTOR.fullmatch(key):
            halves.setdefault(found["layer"], {})[found["half"]] = value.float().flatten(1)
    factors = {n: LowRank(h["B"], h["A"].mT) for n, h in halves.items() if len(h) == 2}
    if not factors:
        raise DataError(f"the adapter in {path} has no factors of a linear layer (lora_A and lora_B)")
    return factors, {name: _scaling(config, name, z.rank) for name, z in factors.items()}


_FACTOR = re.compile(r"(base_model\.model\.)?(?P<layer>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight")


def _scaling(config: Mapping[str, Any], name: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    alpha = next((a for key, a in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", name)), config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def save_factors(path: str | Path, factors: Mapping[str, LowRank], scaling: Mapping[str, float]) -> None:
    """Write factors as an ordinary peft LoRA, which ``load_factors`` and peft read."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    path = Path(path)
    ranks = {name: z.rank for name, z in factors.items()}
    alphas = {name: scaling[name] * ranks[name] for name in factors}
    config = LoraConfig(
        r=_most_common(ranks),
        lora_alpha=_most_common(alphas),
        target_modules=sorted(factors),
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.rank_pattern = {f"^{n}": r for n, r in ranks.items() if r != config.r}
    config.alpha_pattern = {f"^{n}": a for n, a in alphas.items() if a != config.lora_alpha}
    path.mkdir(parents=True, exist_ok=True)
    state = {}
    for name, z in factors.items():
        state[f"{_PREFIX}{name}.lora_A.weight"] = z.B.mT.contiguous()
        state[f"{_PREFIX}{name}.lora_B.weight"] = z.A.contiguous()
    with replacing(path / "adapter_model.safetensors") as part:
        save_file(state, part, metadata={"format": "pt"})
    write_json(path / "adapter_config.json", {k: _plain(v) for k, v in config.to_dict().items()})


def _most_common(values: Mapping[str, Any]) -> Any:
    counted = list(values.values())
    return max(counted, key=counted.count)


def _plain(value: Any) -> Any:
    """peft's configuration values as json holds them (sets sorted, enums by value)."""
    if isinstance(value, set):
        return sorted(value)
    return getattr(value, "value", value)
