"""Loading what transformers can read, by the names that ``model_source`` resolves."""

from typing import Any

from subspan.data.assets import model_source
from subspan.errors import DataError, first_line


def load_pretrained(factory: Any, name: str, what: str = "model", **options: Any) -> Any:
    """``factory.from_pretrained`` without a progress bar; packed blocks of a GGUF file become plain matrices.

    Args:
        factory: a model class of transformers, ``AutoConfig`` or ``AutoTokenizer``.
        name: an asset, a local folder or ``.gguf`` file, or a hub name.
        what: is looked for, to say so where it is not there.
        options: passed on, such as ``dtype``.

    Raises:
        DataError: nothing of the kind loads from there, or its files are torn or of another model.
        MissingAsset: the asset is not installed.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    source = model_source(name)
    if source.gguf_file:
        options["gguf_file"] = source.gguf_file
        if factory not in (AutoConfig, AutoTokenizer):
            options["quantization_config"] = GgufConfig(dequantize=True)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return factory.from_pretrained(source.path, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(f"no {what} loads from {name}: {first_line(error)}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise DataError(f"no {what} loads from {name}: weights are not of the sizes that config.json says") from error
    finally:
        if bars:
            logging.enable_progress_bar()
