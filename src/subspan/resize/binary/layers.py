"""Binary layers as modules, and a model's conversion to them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subspan.errors import TargetError
from subspan.resize.binary.config import SurgeConfig
from subspan.resize.binary.estimators import transformed
from subspan.resize.binary.joint import Call, Convolution, Dense, Observed, surge
from subspan.surgery import is_conv1d, no_match, replace_modules

AUX = "weight_aux"
_NORMS = "smoothed_norms"


class BinaryLayer(nn.Module):
    """What the binary layers share: the twin's weight, the smoothed norms and the call. Mixed into torch's layers."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_aux: nn.Parameter | None
    smoothed_norms: Tensor | None
    config: SurgeConfig
    progress: float
    record: Callable[[Observed], None] | None

    def _set_up(self, config: SurgeConfig, generator: torch.Generator | None = None) -> None:
        self.config, self.progress, self.record = config, 0.0, None
        twin = nn.Parameter(torch.empty_like(self.weight), config.aux_update) if config.has_twin else None
        self.register_parameter(AUX, twin)
        norms = torch.zeros(3, device=self.weight.device) if config.ema is not None else None
        self.register_buffer(_NORMS, norms)
        self.reset_twin(generator)

    @torch.no_grad()
    def reset_twin(self, generator: torch.Generator | None = None) -> None:
        """Start the twin anew, as ``aux_init`` says."""
        twin = self.weight_aux
        if twin is None:
            return
        if self.config.aux_init == "copy":
            twin.copy_(self.weight)
        else:
            nn.init.kaiming_uniform_(twin, a=5**0.5, generator=generator)  # torch's own start of these layers

    def latent(self) -> Tensor:
        """The latent weights as they are before the sign."""
        return transformed(self.weight, self.config.transform, self.config.tau)

    def _call(self, x: Tensor, operator: Dense | Convolution) -> Tensor:
        call = Call(operator, self.config, self.progress, self.smoothed_norms, self.record)
        return surge(x, self.latent(), self.weight_aux, self.bias, call)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, is not watched by the monitor of the original."""
        return self.__dict__ | {"record": None}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """A stripped checkpoint has no twin: it starts anew from the weights that were loaded."""
        stripped = prefix + AUX not in state_dict and prefix + "weight" in state_dict
        missing: list[str] = args[2]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if stripped:
            missing[:] = [k for k in missing if k not in (prefix + AUX, prefix + _NORMS)]
            self.reset_twin()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config.mode}"


class BinaryLinear(BinaryLayer, nn.Linear):
    """``nn.Linear`` with inputs and weights in {-1, +1}: alpha (sign x) (sign W)^T + bias.

    Args:
        in_features: p.
        out_features: q.
        bias: add a real bias.
        config: how the gradient is made; ``weight_aux``, the twin's weight, is a parameter where the mode has one.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: SurgeConfig | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(config or SurgeConfig())

    def forward(self, input: Tensor) -> Tensor:
        return self._call(input, Dense())


class _BinaryConvolution(BinaryLayer):
    """The same for ``nn.Conv1d`` and ``nn.Conv2d``: their arguments, then ``config``."""

    def __init__(self, *args: Any, config: SurgeConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_up(config or SurgeConfig())

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        x, operator = padded(layer, input)
        return self._call(x, operator)


class BinaryConv1d(_BinaryConvolution, nn.Conv1d):
    """``nn.Conv1d`` with inputs and weights in {-1, +1}; padded with zeros after the sign, or as ``padding_mode`` says.

    Takes the arguments of ``nn.Conv1d`` and ``config``.
    """


class BinaryConv2d(_BinaryConvolution, nn.Conv2d):
    """``nn.Conv2d`` with inputs and weights in {-1, +1}; padded with zeros after the sign, or as ``padding_mode`` says.

    Takes the arguments of ``nn.Conv2d`` and ``config``.
    """


def padded(conv: Any, x: Tensor) -> tuple[Tensor, Convolution]:
    """The input after any padding that is not of zeros, and the convolution that is left to do."""
    if x.ndim != len(conv.stride) + 2 or x.shape[1] != conv.in_channels:
        raise ValueError(f"a convolution of {conv.in_channels} channels takes (b, channels, *), got {tuple(x.shape)}")
    around = conv._reversed_padding_repeated_twice  # last dimension first, both sides
    if conv.padding_mode != "zeros":
        x = nn.functional.pad(x, around, mode=conv.padding_mode)
        around = [0] * len(around)
    if around[::2] != around[1::2]:
        raise ValueError(f"padding='same' needs odd kernels (dilated: {around} on the two sides); pad by hand")
    return x, Convolution(conv.stride, around[::-2], conv.dilation, conv.groups)


_TWINS: dict[type[nn.Module], type[BinaryLayer]] = {
    nn.Linear: BinaryLinear,
    nn.Conv1d: BinaryConv1d,
    nn.Conv2d: BinaryConv2d,
}


def binary_kind(module: nn.Module) -> type[BinaryLayer] | None:
    """What this layer becomes; a subclass counts where it computes as torch's own."""
    if is_conv1d(module):
        return BinaryLinear
    same = (twin for own, twin in _TWINS.items() if isinstance(module, own) and type(module).forward is own.forward)
    return next(same, None)


def binarize(
    model: nn.Module,
    config: SurgeConfig | None = None,
    *,
    target_modules: Sequence[str] | None = None,
    skip: Iterable[str] = ("first", "last"),
    random_state: int = 0,
) -> nn.Module:
    """Turn linear and convolutional layers into binary ones, in place; names and parameters stay.

    Args:
        model: any module; ``nn.Linear``, transformers' ``Conv1D`` (which becomes a linear layer), ``nn.Conv1d`` and
            ``nn.Conv2d`` in it are converted. Normalisations, embeddings and activations stay as they are.
        config: how the gradient is made; the default is ``SurgeConfig()``.
        target_modules: names or name endings, as in peft (``["query", "key", "value", "dense"]``); None is all.
        skip: names or name endings left in full precision; "first" and "last" are those of the layers that match, in
            module order.
        random_state: of twins that start at random.

    Returns:
        The model.

    Raises:
        TargetError: nothing matches.
        TypeError: a string where a list of names is wanted.
        ValueError: a layer is binary already, its weight is used past its ``forward`` (inside torch's
            ``nn.MultiheadAttention``), or is computed from others (a parametrisation).
    """
    config = config or SurgeConfig()
    if isinstance(target_modules, str) or isinstance(skip, str):
        raise TypeError(f"target_modules and skip are lists of names, got {target_modules!r} and {skip!r}")
    named = dict(model.named_modules(remove_duplicate=False))
    if again := [name for name, module in named.items() if isinstance(module, BinaryLayer)]:
        raise ValueError(f"{again[0]} is binary already; binarize a model once")
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(random_state)
    chosen = dict.fromkeys(named[name] for name in _chosen(model, named, target_modules, skip))  # once each
    replace_modules(model, {old: to_binary(old, config, generator) for old in chosen})
    return model


def _chosen(
    model: nn.Module, named: Mapping[str, nn.Module], target_modules: Sequence[str] | None, skip: Iterable[str]
) -> list[str]:
    """Names of the layers to convert; raises where there are none or where one cannot be."""
    inside = {f"{name}.out_proj" for name, module in named.items() if isinstance(module, nn.MultiheadAttention)}
    able = [name for name, module in named.items() if name and binary_kind(module) is not None]

    def matching(wanted: str) -> list[str]:
        return [name for name in able if name == wanted or name.endswith(f".{wanted}")]

    if target_modules is None:
        found = [name for name in able if name not in inside]
    else:
        wanted = {name for target in target_modules for name in matching(target)}
        found = [name for name in able if name in wanted]
    if not found:
        nothing = "the model holds no linear or convolutional layer in whose place another could be put"
        raise TargetError(no_match(model, target_modules) if target_modules and able else nothing)
    ends = {"first": found[:1], "last": found[-1:]}
    spared = {entry: ends[entry] if entry in ends else matching(entry) for entry in skip}
    if unknown := [entry for entry, names in spared.items() if not names]:
        raise TargetError(no_match(model, unknown))
    left = {named[name] for names in spared.values() for name in names}  # wherever else they stand
    chosen = [name for name in found if named[name] not in left]
    if not chosen:
        raise TargetError(f"all {len(found)} layers that match are skipped; leave out 'first' or 'last' in skip")
    for name in chosen:
        if name in inside:
            raise ValueError(
                f"nn.MultiheadAttention reads the weight of {name} past its forward; call "
                "subspan.surgery.split_attention(model) first"
            )
        if "weight" not in named[name]._parameters:
            raise ValueError(f"the weight of {name} is computed from others; remove its parametrisation first")
    return chosen


def to_binary(old: nn.Module, config: SurgeConfig, generator: torch.Generator | None = None) -> BinaryLayer:
    """A binary layer with the parameters, hooks and shape of a full-precision one."""
    kind: Any = binary_kind(old)
    new: Any = kind.__new__(kind)
    new.__dict__.update({k: dict(v) if k in ("_parameters", "_buffers") else v for k, v in old.__dict__.items()})
    if is_conv1d(old):
        stored: Any = old.weight
        new.weight = nn.Parameter(stored.detach().mT.contiguous(), stored.requires_grad)
        new.out_features, new.in_features = new.weight.shape
    new._set_up(config, generator)
    return new


def binary_layers(model: nn.Module) -> dict[str, Any]:
    """Name -> layer of a model's binary layers. Raises ``ValueError`` where it has none."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, BinaryLayer)}
    if not found:
        raise ValueError("the model has no binary layer; call binarize first")
    return found


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    aux_lr: float | None = None,
    weight_decay: float = 0.0,
    aux_weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Two groups for any torch optimiser: everything that trains, and the twins apart.

    Args:
        model: a model with binary layers.
        lr: learning rate.
        aux_lr: of the twins (default: ``lr``).
        weight_decay: of all but the twins.
        aux_weight_decay: of the twins.
    """
    twins = {layer.weight_aux for layer in binary_layers(model).values()} - {None}
    parts = [[p for p in model.parameters() if p.requires_grad and (p in twins) is aux] for aux in (False, True)]
    rates = [(lr, weight_decay), (lr if aux_lr is None else aux_lr, aux_weight_decay)]
    return [
        {"params": part, "lr": rate, "weight_decay": decay}
        for part, (rate, decay) in zip(parts, rates, strict=True)
        if part
    ]


def set_progress(model: nn.Module, progress: float) -> None:
    """Tell every binary layer which share of training is done: it moves EDE's slope and a schedule of ``eta``."""
    if not 0 <= progress <= 1:
        raise ValueError(f"progress is a share between 0 and 1, got {progress}")
    for layer in binary_layers(model).values():
        layer.progress = progress


@torch.no_grad()
def clip_latent(model: nn.Module, limit: float = 1.5) -> None:
    """Clamp all latent weights to [-limit, limit], so that none is too far out ever to change its sign."""
    if not limit > 0:
        raise ValueError(f"limit must be positive, got {limit}")
    for layer in binary_layers(model).values():
        layer.weight.clamp_(-limit, limit)


@torch.no_grad()
def load_twins(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Start the twins at a full-precision checkpoint of the same architecture (``aux_init`` "pretrained").

    Raises ``ValueError`` where a layer's weight is missing or of another shape.
    """
    for name, layer in binary_layers(model).items():
        source, twin = state_dict.get(f"{name}.weight"), layer.weight_aux
        if twin is None:
            raise ValueError(f"{name} has no twin: its mode is {layer.config.mode}, share is {layer.config.share}")
        if source is None or source.shape != twin.shape:
            got = "none" if source is None else str(tuple(source.shape))
            raise ValueError(f"{name}.weight should be {tuple(twin.shape)} in the checkpoint, it is {got}")
        twin.copy_(source)


def strip_aux(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint without twins and smoothed norms: what deployment needs."""
    return {k: v for k, v in state_dict.items() if k.rpartition(".")[2] not in (AUX, _NORMS)}
