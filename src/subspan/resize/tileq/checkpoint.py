"""Checkpoints: one that is larger than memory compressed layer by layer, and compressed ones written and read."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from subspan.errors import DataError, MissingExtra
from subspan.files import replacing, write_json
from subspan.resize.tileq.config import TileQConfig
from subspan.resize.tileq.experts import TileQExperts
from subspan.resize.tileq.report import LayerReport, TileQReport
from subspan.resize.tileq.sources import activation
from subspan.resize.tileq.walk import Batch, all_compressed, calibrated_layers, compress_stage, layer_list, prepared

# Beside the model's own configuration: how it was made and how it came out, written last; what a run is about, written
# first; and the tensors outside the layers.
_FACTS, _RUN, _REST = "tileq.json", "run.json", "rest.safetensors"
_COPIED = re.compile(r"(config|generation_config|tokenizer.*|special_tokens.*|added_tokens|vocab|merges|chat_.*)\.\w+$")


_SHARDS = "layer-*.safetensors"


def _shard(i: int) -> str:
    return f"layer-{i:05d}.safetensors"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError(f"{path} is torn: {error}") from error


class Source:
    """The tensors of a safetensors checkpoint of transformers, read by name when they are asked for."""

    def __init__(self, path: Path) -> None:
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.is_file():
            names = json.loads(index.read_text("utf-8"))["weight_map"]
            self.files = {key: path / file for key, file in names.items()}
        elif single.is_file():
            with _opened(single) as file:
                self.files = dict.fromkeys(file.keys(), single)
        else:
            raise DataError(f"{path} holds no model.safetensors (nor an index of shards)")
        missing = sorted({file.name for file in self.files.values() if not file.is_file()})
        if missing:
            raise DataError(f"{path} lacks {', '.join(missing)}")

    def load(self, model: nn.Module, wanted: Callable[[str], bool]) -> None:
        """Put the tensors of these names into a model on the meta device, by transformers' own renaming and merging."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        keys = [key for key in self.files if wanted(key)]
        tensors: dict[str, Tensor] = {}
        for path in sorted({self.files[key] for key in keys}):
            with _opened(path) as file:
                tensors |= {key: file.get_tensor(key) for key in keys if self.files[key] == path}
        mapping = get_model_conversion_mapping(model)  # pyright: ignore[reportArgumentType]
        info, _ = convert_and_load_state_dict_in_model(
            model,  # pyright: ignore[reportArgumentType]
            tensors,
            LoadStateDictConfig(weight_mapping=mapping),  # pyright: ignore[reportArgumentType]
        )
        if info.unexpected_keys or info.mismatched_keys or info.conversion_errors:
            wrong = sorted(map(str, [*info.unexpected_keys, *info.mismatched_keys, *info.conversion_errors]))
            raise DataError(f"these tensors do not fit {type(model).__name__}: {', '.join(wrong[:5])}")


def skeleton(path: Path) -> nn.Module:
    """The model of a folder's configuration: parameters on the meta device, buffers as they should be."""
    try:
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtra("checkpoints need transformers and accelerate: pip install 'subspan[tune]'") from error
    if not (path / "config.json").is_file():
        raise DataError(f"{path} is no model folder: it holds no config.json")
    config = AutoConfig.from_pretrained(path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    return model.eval()


# ---- writing


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    with replacing(path) as part:
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, part, metadata)


def _write_layer(out: Path, model: nn.Module, name: str, i: int, reports: Sequence[LayerReport]) -> None:
    """One layer's tensors, and in the same file how its experts came out: there is never one without the other."""
    tensors = {f"{name}.{i}.{k}": v for k, v in model.get_submodule(f"{name}.{i}").state_dict().items()}
    _write(out / _shard(i), tensors, {"report": json.dumps([asdict(r) for r in reports])})


def _write_rest(out: Path, model: nn.Module, name: str) -> None:
    """All tensors but the layers'; of tied ones the first."""
    rest = {k: v for k, v in model.state_dict().items() if not k.startswith(f"{name}.")}
    _write(out / _REST, dict({v.data_ptr(): (k, v) for k, v in reversed(rest.items())}.values()))


def _clear(out: Path) -> None:
    """Remove what another compression wrote; its facts first: without them nothing is loaded."""
    for file in (out / _FACTS, *out.glob(_SHARDS), out / _REST):
        file.unlink(missing_ok=True)


def _write_facts(out: Path, config: TileQConfig, report: TileQReport) -> None:
    write_json(out / _FACTS, {"config": config.to_json(), "report": report.to_json()})


def save_compressed(model: nn.Module, report: TileQReport, path: str | Path) -> None:
    """Write a model that ``quantize_moe`` compressed: a file per layer, one for the rest, and how it was made.

    ``load_compressed`` reads it without the original.

    Args:
        model: of transformers.
        report: from ``quantize_moe``.
        path: a folder.
    """
    out = Path(path)
    if not report.layers:
        raise ValueError("the report is empty; compress the model first")
    modules = dict(model.named_modules())
    config = getattr(modules.get(report.layers[0].name), "config", None)
    if not isinstance(config, TileQConfig):
        raise ValueError(f"{report.layers[0].name} is not compressed in this model; the report is of another")
    _clear(out)
    (out / _RUN).unlink(missing_ok=True)
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    name = next(n for n in lists if report.layers[0].name.startswith(f"{n}."))  # outermost first
    for i in range(len(model.get_submodule(name))):  # pyright: ignore[reportArgumentType]
        reports = [layer for layer in report.layers if layer.name.startswith(f"{name}.{i}.")]
        _write_layer(out, model, name, i, reports)
    _write_rest(out, model, name)
    model.config.save_pretrained(out)  # pyright: ignore[reportCallIssue]
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(out)
    _write_facts(out, config, report)


# ---- reading


def _place_empty(model: nn.Module, layers: Sequence[LayerReport], config: TileQConfig) -> None:
    """Compressed experts without tensors in the place of the model's own."""
    for layer in layers:
        shapes = {fit.projection: fit.shape for fit in layer.fits}
        experts = TileQExperts(shapes, activation(layer.name, model.get_submodule(layer.name)), config, "meta")
        model.set_submodule(layer.name, experts.eval())


def _fill(model: nn.Module, path: Path) -> None:
    with _opened(path) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    unexpected = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    if unexpected:
        raise DataError(f"{path} holds tensors that {type(model).__name__} lacks: {', '.join(unexpected[:5])}")


def _check_filled(path: Path, model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Raise ``DataError`` where tensors of these names are empty still."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, t in tensors if t.is_meta and wanted(name)]
    if empty:
        raise DataError(f"{path} lacks {', '.join(empty[:5])}{' and more' * (len(empty) > 5)}")


def load_report(path: str | Path) -> tuple[TileQConfig, TileQReport]:
    """How a compressed folder was made and how it came out.

    Raises:
        DataError: the folder holds no finished compression.
    """
    facts = Path(path) / _FACTS
    if not facts.is_file():
        raise DataError(f"{path} holds no finished compression (no {_FACTS})")
    values = json.loads(facts.read_text("utf-8"))
    return TileQConfig.from_json(values["config"]), TileQReport.from_json(values["report"])


def load_compressed(path: str | Path) -> nn.Module:
    """The model of a compressed folder, on the CPU, without the original's weights; bitwise what was saved.

    Raises:
        DataError: the folder holds no finished compression, or tensors are missing.
        MissingExtra: transformers or accelerate are not installed.
    """
    folder = Path(path)
    config, report = load_report(folder)
    model = skeleton(folder)
    from transformers import GenerationConfig

    _place_empty(model, report.layers, config)
    for file in sorted(folder.glob("*.safetensors")):
        _fill(model, file)
    model.tie_weights()  # pyright: ignore[reportCallIssue]
    _check_filled(folder, model)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)  # pyright: ignore[reportArgumentType]
    return model


# ---- layer by layer


def run_identity(source: Path, batches: Sequence[Batch], config: TileQConfig) -> dict[str, Any]:
    """What a run is about: a second one goes on with it only when this is the same."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, t in sorted((dict(batch) if not isinstance(batch, Tensor) else {"": batch}).items()):
            digest.update(f"{name} {tuple(t.shape) if isinstance(t, Tensor) else t}".encode())
            if isinstance(t, Tensor):
                digest.update(t.cpu().flatten().view(torch.uint8).numpy().tobytes())
    files = sorted([*source.glob("*.safetensors"), source / "config.json"])
    sizes = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"config": config.to_json(), "calibration": digest.hexdigest(), "source": sizes}


def compress_checkpoint(
    source: str | Path,
    out: str | Path,
    batches: Sequence[Batch] | None,
    config: TileQConfig | None = None,
    *,
    fresh: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TileQReport:
    """Compress the experts of a checkpoint that need not fit into memory: one layer at a time is.

    A layer is loaded, calibrated on what the compressed layers before it give, compressed, written, and dropped. A run
    that was cut off goes on behind the last layer it wrote, and ends in the same bytes.

    Args:
        source: folder of a transformers checkpoint in safetensors, sharded or not.
        out: folder to write; ``load_compressed`` reads it.
        batches: calibration inputs, as for ``quantize_moe``.
        config: how.
        fresh: start over where the folder holds another run.
        progress: is told the layers done and their number.

    Raises:
        DataError: no such checkpoint, or the folder holds another run.
        ValueError: ``out`` is ``source``; the quantizer needs calibration.
        TargetError: as for ``quantize_moe``.
    """
    source, out = Path(source), Path(out)
    config = TileQConfig() if config is None else config
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} holds the original; give another folder")
    if (source / _FACTS).is_file():
        raise ValueError(f"{source} holds compressed experts already")
    model = skeleton(source)
    batches = prepared(model, batches, config)
    name, layers = layer_list(model)
    tensors = Source(source)
    _begin(out, json.loads(json.dumps(run_identity(source, batches, config))), fresh)
    if (out / _FACTS).is_file() and all((out / _shard(i)).is_file() for i in range(len(layers))):
        return load_report(out)[1]
    for file in source.iterdir():
        if _COPIED.match(file.name):
            shutil.copyfile(file, out / file.name)
    tensors.load(model, lambda key: not _in_layers(key, name))
    model.tie_weights()  # pyright: ignore[reportCallIssue]
    _check_filled(source, model, lambda key: not _in_layers(key, name))
    _write_rest(out, model, name)
    report, new = TileQReport(), []

    def prepare(i: int) -> None:
        new.clear()
        if not (out / _shard(i)).is_file():
            tensors.load(model, lambda key: _in_layers(key, f"{name}.{i}"))
            _check_filled(source, model, lambda key: _in_layers(key, f"{name}.{i}"))
            return
        with _opened(out / _shard(i)) as file:
            known = [LayerReport.from_json(r) for r in json.loads(file.metadata()["report"])]
        _place_empty(model, known, config)
        _fill(model, out / _shard(i))
        report.layers.extend(known)

    def finish(i: int) -> None:
        if not (out / _shard(i)).is_file():
            _write_layer(out, model, name, i, new)
            report.layers.extend(new)
        layers[i].to("meta")
        progress(i + 1, len(layers))

    for stage in calibrated_layers(model, batches, config, prepare=prepare, finish=finish):
        new.append(compress_stage(stage, model, config))
    all_compressed(model)
    _write_facts(out, config, report)
    return report


def _in_layers(key: str, name: str) -> bool:
    """Whether a tensor belongs to these layers; checkpoints of a bare decoder leave the model's name out."""
    return key.startswith((f"{name}.", f"{name.split('.', 1)[-1]}."))


def _begin(out: Path, identity: dict[str, Any], fresh: bool) -> None:
    """Leave the folder empty or with the shards of the same run."""
    known = json.loads((out / _RUN).read_text("utf-8")) if (out / _RUN).is_file() else None
    if known == identity and not fresh:
        return
    if known is not None and not fresh and any(out.glob(_SHARDS)):
        raise DataError(
            f"{out} holds a run with another model, calibration or configuration; give another folder, or start over "
            "with --fresh (fresh=True)"
        )
    if known is None and out.exists() and (out.is_file() or any(out.iterdir())):
        raise DataError(f"{out} is no empty folder and holds no run of this command; give another folder")
    _clear(out)
    write_json(out / _RUN, identity)
