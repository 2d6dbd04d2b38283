"""A wider checkpoint written tensor by tensor, so that the wide network never lies in memory."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from subspan.data import load_pretrained, model_source
from subspan.errors import DataError
from subspan.files import replacing, write_json
from subspan.resize.width.axes import Growth, Layout
from subspan.resize.width.model import TOLERANCE, axis_table, compare
from subspan.resize.width.plan import Plan, plan, state

PLAN = "grow.json"  # in a folder that is not finished: what is being written, so that only the same goes on
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class GrowthSummary:
    """What ``grow_checkpoint`` wrote.

    Attributes:
        out: the folder.
        parameters: of the seed and of the wide network.
        bytes: of the tensors written.
        shards: files written, and files found whole from an earlier call.
        resumed: the latter.
        max_abs_err: of the outputs of the checkpoint as loaded again; None if not compared.
        max_rel_err: the same, relative to the largest output.
        axis_table: as in ``WidthReport``.
    """

    out: str
    parameters: tuple[int, int]
    bytes: int
    shards: int
    resumed: int
    max_abs_err: float | None
    max_rel_err: float | None
    axis_table: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def grow_checkpoint(
    model: str,
    out: str | Path,
    factor: int = 2,
    ffn_factor: int | float | None = None,
    *,
    scheme: str = "clone",
    noise_db: float | None = 40.0,
    noise: str = "row",
    untie: bool = True,
    split: str = "even",
    seed: int = 0,
    dtype: str | None = None,
    shard_bytes: int = 2**30,
    verify: bool = True,
    table: Callable[[list[dict[str, Any]]], Any] = lambda lines: None,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> GrowthSummary:
    """Write a wider checkpoint of a transformers model, with its tokenizer, that computes the same.

    The seed lies in memory, the wide network does not: each tensor is made, written and dropped. Everything goes to
    ``OUT.partial``, whole files at a time, and is renamed to ``OUT`` when it is complete and, with ``verify``, was
    loaded again and compared. After a kill the same call keeps the files that are whole and writes the rest.

    Args:
        model: "asset:..." name, local folder, .gguf file or hub name.
        out: folder to make. It must not exist.
        factor: as for ``expand_width``; so are the next six.
        ffn_factor: of the feed-forward width.
        scheme: "clone" or "diagonal".
        noise_db: signal-to-noise ratio of the noise; None for an exact clone.
        noise: "row" or "balanced".
        untie: give a tied head a table of its own.
        split: shares of clones drawn for a fractional ``ffn_factor``.
        seed: of noise and draws.
        dtype: of the checkpoint ("float32", "bfloat16"); the seed's own by default (float32 for GGUF).
        shard_bytes: size of a file; what a kill can cost.
        verify: load the result and compare outputs.
        table: called with the axis table before anything is written.
        progress: called with bytes done and in total.

    Raises:
        DataError: the model cannot be loaded whole, OUT exists, OUT.partial holds another growth, or the disk is full.
        ValueError: as for ``expand_width``.
        FunctionChanged: the checkpoint's outputs differ by more than rounding; OUT.partial is left for inspection.
    """
    target = Path(out)
    if target.exists() or target.is_symlink():  # a link that leads nowhere could not be replaced at the end
        raise DataError(f"{target} exists already; choose another folder or remove it")
    partial = target.with_name(f"{target.name}.partial")
    small, companions = _load(model, dtype)
    growth = Growth.of(factor, ffn_factor, split, seed)
    found = plan(small, growth, scheme=scheme, noise_db=noise_db, noise=noise, untie=untie)
    lines = axis_table(found)
    table(lines)
    shards = _shards(found, shard_bytes)
    _claim(partial, found, shards, [factor, ffn_factor, scheme, noise_db, noise, untie, split, seed])
    resumed = _write_shards(partial, found, shards, progress)
    total = sum(size for shard in shards for size in shard.values())
    parameters = (sum(p.numel() for p in small.parameters()), _wide_parameters(found))
    config = found.config()
    config.architectures = [type(small).__name__]  # a GGUF file says none
    config.save_pretrained(partial)
    if getattr(small, "generation_config", None) is not None and small.can_generate():
        small.generation_config.save_pretrained(partial)
    for companion in companions:
        companion.save_pretrained(partial)
    errors: tuple[float | None, float | None] = (None, None)
    if verify:
        big = type(small).from_pretrained(partial, dtype="auto")
        errors = compare(small, big, noisy=noise_db is not None)
    partial.rename(target)
    (target / PLAN).unlink()
    return GrowthSummary(str(target), parameters, total, len(shards), resumed, *errors, lines)


def _wide_parameters(found: Plan) -> int:
    own = dict(found.model.named_parameters(remove_duplicate=False))
    return sum(torch.Size(lay.wide_shape).numel() for name, lay in found.written().items() if name in own)


def _load(name: str, dtype: str | None) -> tuple[Any, list[Any]]:
    """A transformers model of the class its configuration names; its tokenizer and image processor if it has them."""
    import transformers
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    if dtype is not None and getattr(torch, dtype, None) not in TOLERANCE:
        raise ValueError(f"dtype must be float64, float32, float16 or bfloat16, got {dtype!r}")
    config: Any = load_pretrained(AutoConfig, name)
    kind: Any = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0], None)
    if kind is None:
        raise DataError(f"transformers has no class {config.architectures[0]}, which {name} asks for")
    stored = "float32" if model_source(name).gguf_file else "auto"  # a GGUF file's blocks have no dtype of their own
    model, read = load_pretrained(kind, name, dtype=dtype or stored, output_loading_info=True)
    if missing := sorted(read["missing_keys"]):
        raise DataError(f"{name} lacks {len(missing)} of {kind.__name__}'s tensors, {missing[0]} for one")
    companions = []
    for factory in (AutoTokenizer, AutoImageProcessor):
        with suppress(DataError, ImportError):  # it has none, or what reads images is not installed
            companions.append(load_pretrained(factory, name))
    return model.eval(), companions


# --------------------------------------------------------------------------------------------------------------- shards


def _shards(found: Plan, limit: int) -> list[dict[str, int]]:
    """Tensor names and their bytes by file, in the network's order; a tensor above the limit has a file of its own."""
    tensors, shards, held = state(found.model), [{}], 0
    for name, layout in found.written().items():
        size = torch.Size(layout.wide_shape).numel() * tensors[name].element_size()
        if shards[-1] and held + size > limit:
            shards.append({})
            held = 0
        shards[-1][name] = size
        held += size
    return shards


def _file(number: int, of: int) -> str:
    return "model.safetensors" if of == 1 else f"model-{number + 1:05}-of-{of:05}.safetensors"


def _claim(partial: Path, found: Plan, shards: list[dict[str, int]], options: list[Any]) -> None:
    """Start a folder, or check that an unfinished one is of the same growth of the same seed."""
    digest = blake2b(json.dumps([options, shards, found.config().to_json_string()]).encode(), digest_size=16)
    for name, x in state(found.model).items():
        # The first kilobyte of every tensor tells seeds apart; reading all of it would take as long as growing.
        head = x.detach().flatten()[:256].contiguous()
        digest.update(name.encode() + head.view(torch.uint8).numpy().tobytes())
    plan_file = partial / PLAN
    mine = {"growth": digest.hexdigest(), "options": options}
    if any(partial.glob("*.safetensors")) and plan_file.exists():
        theirs = json.loads(plan_file.read_text(encoding="utf-8"))
        if theirs != mine:
            raise DataError(f"{partial} holds an unfinished growth of another seed or with other options "
                            f"({theirs.get('options')}); finish or remove it")  # fmt: skip
        for left in partial.glob(".*.part"):  # of a file that was being written when the process was killed
            left.unlink()
    elif partial.exists() and not plan_file.exists() and any(partial.iterdir()):
        raise DataError(f"{partial} is no unfinished growth; remove it")
    else:
        write_json(plan_file, mine)


def _write_shards(partial: Path, found: Plan, shards: list[dict[str, int]], progress: Callable[[int, int], Any]) -> int:
    """Write the files that are not there yet, then the index. Returns how many were."""
    total, done, resumed = sum(size for shard in shards for size in shard.values()), 0, 0
    layouts = found.written()
    paths = [partial / _file(number, len(shards)) for number in range(len(shards))]
    needed = sum(sum(shard.values()) for shard, path in zip(shards, paths, strict=True) if not path.exists())
    if needed > (free := shutil.disk_usage(partial).free):
        raise DataError(f"{partial} needs {needed / 2**30:.1f} GiB more, and its disk has {free / 2**30:.1f} free")
    progress(0, total)
    for shard, path in zip(shards, paths, strict=True):
        if path.exists():  # written whole, or it would have another name
            resumed += 1
            done += sum(shard.values())
            progress(done, total)
            continue
        with replacing(path) as part:
            done = _write_safetensors(part, found, {name: layouts[name] for name in shard}, done, total, progress)
    if len(shards) > 1:
        names = {name: path.name for shard, path in zip(shards, paths, strict=True) for name in shard}
        write_json(partial / _INDEX, {"metadata": {"total_size": total}, "weight_map": names})
    return resumed


def _write_safetensors(
    path: Path, found: Plan, layouts: dict[str, Layout], done: int, total: int, progress: Callable[[int, int], Any]
) -> int:
    """One file of the safetensors format, whose header can be written before any tensor is made."""
    tensors = state(found.model)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, layout in layouts.items():
        size = torch.Size(layout.wide_shape).numel() * tensors[name].element_size()
        header[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": list(layout.wide_shape),
                        "data_offsets": [at, at + size]}  # fmt: skip
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, layout in layouts.items():
            wide = found.expand(tensors[name].detach(), layout).contiguous()
            file.write(wide.view(-1).view(torch.uint8).numpy().data)
            done += wide.nbytes
            progress(done, total)
    return done


_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.bool: "BOOL", torch.uint8: "U8",
}  # fmt: skip
