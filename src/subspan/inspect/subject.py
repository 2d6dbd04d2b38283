"""What is inspected: a classifier, a language model, an encoder, or an adapter with or without its base."""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from subspan.data import classifier_class, load_pretrained, model_source
from subspan.errors import DataError, first_line
from subspan.linalg import LowRank
from subspan.surgery import load_factors

_HEAD = re.compile(r"(classifier|score)(\.out_proj)?\.weight$")


@dataclass(frozen=True)
class Subject:
    """A model and what it is.

    Attributes:
        name: as the user gave it.
        kind: "classifier", "causal language model", "encoder" or "adapter without its base".
        model: None for an adapter whose base is not known.
        tokenizer: None where texts are not read.
        labels: names of a classifier's labels; empty where it only numbers them.
        update: the factors of an adapter, by layer, and what its products are scaled by.
        scaling: see update.
    """

    name: str
    kind: str
    model: nn.Module | None
    tokenizer: Any = None
    labels: tuple[str, ...] = ()
    update: Mapping[str, LowRank] = field(default_factory=dict)
    scaling: Mapping[str, float] = field(default_factory=dict)


def load_subject(name: str, base: str | None = None) -> Subject:
    """Load a model folder, an asset, a hub name, an adapter's folder, or a run folder of ``subspan tune``.

    Args:
        name: which.
        base: an adapter's base model, where neither its folder nor the run it lies in tells.

    Raises:
        DataError: nothing there is a model or an adapter that can be read.
    """
    path = Path(name).expanduser()
    run = next((folder for folder in (path, path.parent) if (folder / "config.yaml").is_file()), None)
    for part in ("adapter", "model"):
        if run == path and (path / part).is_dir():
            path = path / part
            break
    if not (path / "adapter_config.json").is_file():
        return _whole(name, str(path) if path.exists() else name)
    return _adapter(name, path, base or _base_of(path, run))


def _base_of(path: Path, run: Path | None) -> str | None:
    """The base model that an adapter's folder names, or the run it lies in."""
    named = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if run is not None:
        return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")).get("model")
    return named


def _whole(name: str, path: str) -> Subject:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    source = model_source(path)
    config = _loaded(AutoConfig, path)
    made = " ".join(getattr(config, "architectures", None) or [])
    if "SequenceClassification" in made or (Path(source.path) / "classifier.safetensors").is_file():
        names = tuple(str(config.id2label[i]) for i in range(config.num_labels))
        model = _loaded(classifier_class(source.path), path, dtype="float32")
        numbered = all(re.fullmatch(r"LABEL_\d+", label) for label in names)
        return Subject(name, "classifier", model, _loaded_tokenizer(path), () if numbered else names)
    if source.gguf_file or "CausalLM" in made or "LMHead" in made:
        return Subject(name, "causal language model", _loaded(AutoModelForCausalLM, path, dtype="auto"))
    return Subject(name, "encoder", _loaded(AutoModel, path, dtype="auto"))


def _adapter(name: str, path: Path, base: str | None) -> Subject:
    factors, scaling = load_factors(path)
    if base is None:
        return Subject(name, "adapter without its base", None, update=factors, scaling=scaling)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    classifies, tokenizer = settings.get("task_type") == "SEQ_CLS", None
    if classifies:
        factory, options = classifier_class(model_source(base).path), {"num_labels": _head_rows(path)}
        tokenizer = _loaded_tokenizer(base)
    else:
        factory, options = AutoModelForCausalLM, {}
    plain = _loaded(factory, base, dtype="float32", **options)
    try:
        with warnings.catch_warnings():  # what peft and transformers will change is no news here
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
            model = PeftModel.from_pretrained(plain, str(path))
    except (ValueError, RuntimeError, KeyError) as error:
        raise DataError(f"the adapter in {path} does not fit {base}: {first_line(error)}") from error
    kind = "classifier" if classifies else "causal language model"
    return Subject(name, kind, model, tokenizer, update=factors, scaling=scaling)


def _head_rows(path: Path) -> int:
    """The number of labels of an adapter's classification head."""
    from safetensors import safe_open

    with safe_open(path / "adapter_model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118  (no mapping)
            if _HEAD.search(key):
                return file.get_slice(key).get_shape()[0]
    raise DataError(f"the adapter in {path} is one of a classifier but holds no classification head")


def _loaded(factory: Any, name: str, **options: Any) -> Any:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # an encoder's unused head is no news here
    try:
        return load_pretrained(factory, name, **options)
    finally:
        logging.set_verbosity(level)


def _loaded_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return load_pretrained(AutoTokenizer, name, "tokenizer")


def label_names(known: Sequence[str], values: Sequence[Any], count: int) -> tuple[str, ...]:
    """What a classifier's ``count`` labels are called in the data.

    Raises:
        DataError: the data has more or other labels than a classifier that only numbers its own.
    """
    from subspan.data import Labels

    if known:
        return tuple(known)
    found = Labels.of(values).names
    if all(name.isdigit() and int(name) < count for name in found):
        return tuple(str(number) for number in range(count))
    if len(found) != count:
        raise DataError(
            f"the data has {len(found)} labels ({', '.join(found[:8])}), the classifier {count} numbered ones; give "
            "rows of all labels, or their numbers"
        )
    return found
