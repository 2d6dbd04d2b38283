"""The whole job behind ``subspan inspect``: load, predict, measure, write the page."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subspan.errors import ConfigError, DataError, NonFinite, TargetError
from subspan.files import write_json
from subspan.inspect.examples import labelled_batches
from subspan.inspect.page import inspection_page
from subspan.inspect.subject import Subject, load_subject
from subspan.linalg import effective_rank, singular_values, stable_rank
from subspan.surgery import base_fingerprint, base_layer, matrix_layers, role_of, weight_matrix

Progress = Callable[[str, int, int | None], None]
_SHOWN = 64  # singular values kept per layer


def inspect(
    model: str | nn.Module,
    data: Any = None,
    *,
    base: str | None = None,
    out: str | os.PathLike[str] = "inspection.html",
    layers: Sequence[str] | None = None,
    text: str | None = None,
    label: str | None = None,
    loss: str = "ce",
    rows: int = 128,
    max_length: int = 128,
    batch_size: int = 16,
    measure: int = 20,
    resume: bool = True,
    save_every: float = 10.0,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a page about a model's matrices, and a json file beside it; the same facts are returned.

    Of any model: spectra and ranks of its weights, and the optimiser fingerprint. Of a classifier with ``data``: the
    outliers of each layer's curvature, predicted from class means and measured by Lanczos, and its distance from neural
    collapse. Of an adapter: the subspace of its update. Of binary layers: what their gradients look like.

    A killed call goes on where it stopped when it is made again; until it ends, its sums lie beside ``out``.

    Args:
        model: a local folder, "asset:..." or hub name of a transformers model, the folder of a LoRA adapter, a run
            folder of ``subspan tune``, or a module.
        data: labelled texts (see ``load_text``), or for a module a list of batches (inputs, labels).
        base: the base model of an adapter whose folder does not tell.
        out: the page; a .json file lies beside it.
        layers: whose curvature is looked at (all linear and convolutional layers by default).
        text: column with the texts.
        label: column with the labels.
        loss: of a module, "ce" or "mse".
        rows: as many rows are read, the same number of each class.
        max_length: tokens of a row.
        batch_size: rows at a time; what a kill loses.
        measure: Lanczos steps per layer, beside which the prediction is shown; 0 measures nothing.
        resume: go on from what an earlier call left.
        save_every: seconds between two writes of the running sums.
        say: told what is done.
        progress: called with what is done, how much of it, and the total.

    Raises:
        SubspanError: a file, column, layer or model is missing, or does not fit.
        ValueError: options that cannot work.
    """
    target = Path(out)
    if target.suffix != ".html":
        raise ValueError(f"the page is written as .html, got {target.name}")
    if rows < 1 or batch_size < 1 or max_length < 1 or measure < 0:
        raise ValueError("rows, batch size and length must be at least 1, and measure at least 0")
    if target.is_dir():
        raise ValueError(f"{target} is a folder; the page is one file")
    from subspan.theory.collapse.losses import checked_loss

    checked_loss(loss)
    if isinstance(model, str):
        say(f"loading {model}")
        subject = load_subject(model, base)
    else:
        subject = Subject(type(model).__name__, "module", model)
    facts: dict[str, Any] = {"model": subject.name, "kind": subject.kind, "notes": _notes(subject, data)}
    if subject.model is not None:
        say("weights")
        from subspan.optim import fingerprint

        facts["weights"] = list(_weights(subject.model, progress))
        facts["fingerprint"] = fingerprint(subject.model)
    if subject.update:
        facts["update"] = _update(subject)
    if subject.model is not None and data is not None and subject.kind in ("classifier", "module"):
        peft: Any = subject.model
        network: nn.Module = peft.get_base_model() if hasattr(peft, "get_base_model") else peft  # names without peft's
        if isinstance(data, str):
            say(f"reading {data}")
            batches = labelled_batches(
                subject, data, text=text, label=label, rows=rows, max_length=max_length, batch_size=batch_size
            )
        elif not (batches := list(data)):
            raise DataError("there is no data: the list of batches is empty")
        facts["binary"] = _binary(network, batches[0], loss)
        state = target.with_suffix(".part")
        settings = {
            "model": base_fingerprint(network),
            "data": _digest(batches),
            "layers": None if layers is None else list(layers),
            "measure": measure,
            "loss": loss,
        }
        _claim(state, settings, resume)
        try:
            facts["curvature"] = _curvature(network, batches, layers, loss, measure, state, save_every, say, progress)
        except (TargetError, DataError, NonFinite):  # nothing to go on from
            shutil.rmtree(state, ignore_errors=True)
            raise
        facts["data"] = data if isinstance(data, str) else f"{len(batches)} batches"
    inspection_page(facts).write(target)
    write_json(target.with_suffix(".json"), facts)
    shutil.rmtree(target.with_suffix(".part"), ignore_errors=True)
    return facts


def _notes(subject: Subject, data: Any) -> list[str]:
    notes = []
    if subject.model is None:
        notes.append(
            "The adapter's base model is not known, so only the update itself is described (--base names one)."
        )
    elif subject.kind not in ("classifier", "module"):
        notes.append(
            f"This is a model without labels ({subject.kind}): predictions from class means need a classifier, so only "
            "weights are described" + (f"; {data} was not read." if data is not None else ".")
        )
    elif data is None:
        notes.append("No data was given (--data), so curvature and collapse are not looked at.")
    return notes


def _claim(state: Path, settings: Mapping[str, Any], resume: bool) -> None:
    """Make the state folder this call's own."""
    path = state / "inspection.json"
    if state.exists() and any(state.iterdir()) and not path.exists():
        raise ConfigError(f"{state} is no unfinished inspection; move it away, or write the page elsewhere (--out)")
    if not resume:
        shutil.rmtree(state, ignore_errors=True)
    if not path.exists():
        write_json(path, settings)
    if json.loads(path.read_text(encoding="utf-8")) != settings:
        raise ConfigError(
            f"{state} holds an unfinished inspection with another model, data or options; start over: --fresh"
        )


def _digest(batches: Sequence[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def _weights(model: nn.Module, progress: Progress | None) -> Iterator[dict[str, Any]]:
    """One row per matrix: its shape, role, spectrum and ranks."""
    found = matrix_layers(model)
    for number, (name, module) in enumerate(found.items(), 1):
        layer: Any = base_layer(module)
        weight = layer.weight.detach() if isinstance(layer, nn.Embedding) else weight_matrix(layer)
        if not bool(torch.isfinite(weight).all()):
            raise NonFinite(f"the weight of {name or 'the model'} holds NaN or infinity")
        yield {
            "layer": name,
            "role": role_of(name, layer),
            "shape": list(weight.shape),
            **_ranks(singular_values(weight)),
        }
        if progress is not None:
            progress("weights", number, len(found))


def _ranks(ascending: torch.Tensor) -> dict[str, Any]:
    s = ascending.flip(0)
    shown = s[:_SHOWN].tolist()
    return {"stable_rank": float(stable_rank(s)), "effective_rank": float(effective_rank(s)), "singular_values": shown}


def _update(subject: Subject) -> list[dict[str, Any]]:
    """The update subspace of an adapter, layer by layer; beside the base's weights where these are known."""
    from subspan.optim import update_strength

    moved = {} if subject.model is None else {row["layer"]: row for row in update_strength(subject.model)}
    return [
        {
            "layer": name,
            "role": role_of(name),
            "shape": list(z.shape),
            "rank": z.rank,
            **_ranks(abs(subject.scaling[name]) * z.svd().S.flip(0)),
            **{key: moved[name][key] for key in ("cosd", "frobenius", "spectral") if name in moved},
        }
        for name, z in subject.update.items()
    ]


def _binary(model: nn.Module, batch: Any, loss: str) -> dict[str, dict[str, float]]:
    """What the gradients of binary layers look like on one batch, where there are such layers."""
    from subspan.resize import BinaryConv1d, BinaryConv2d, BinaryLinear, SurgeMonitor
    from subspan.theory.collapse.losses import checked_loss, values
    from subspan.theory.collapse.statistics import default_forward

    if not any(isinstance(m, BinaryLinear | BinaryConv1d | BinaryConv2d) for m in model.modules()):
        return {}
    monitor = SurgeMonitor(model)
    try:
        logits, labels = default_forward(model, batch)
        weights = [layer.weight for layer in monitor.layers.values()]
        torch.autograd.grad(values(checked_loss(loss), logits, labels).mean(), weights, allow_unused=True)
        return monitor.read()
    finally:
        monitor.close()


def _curvature(
    model: nn.Module,
    batches: Sequence[Any],
    layers: Sequence[str] | None,
    loss: str,
    steps: int,
    state: Path,
    save_every: float,
    say: Callable[[str], None],
    progress: Progress | None,
) -> dict[str, Any]:
    """Predicted and measured spectra of every layer."""
    from subspan.theory import collapse_spectra, measured_spectra

    say("class means")
    report = collapse_spectra(
        model, batches, layers, loss=loss, state=state / "sums", save_every=save_every,
        progress=None if progress is None else lambda done, total: progress("class means", done, total),
    )  # fmt: skip
    out = report.to_dict()
    path = state / "measured.json"
    measured = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    left = [name for name in report.layers if name not in measured] if steps else []
    if left:
        say(f"measuring {len(left)} layers")
    for name, found in measured_spectra(model, batches, report, left, steps=steps):
        overlap = found.overlap if math.isfinite(found.overlap) else None
        measured[name] = {"eigenvalues": found.eigenvalues.tolist(), "overlap": overlap}
        write_json(path, measured)
        if progress is not None:
            progress("measured layers", len(measured), len(report.layers))
    for layer in out["layers"]:
        layer |= {"role": role_of(layer["layer"]), "measured": measured.get(layer["layer"])}
    return out
