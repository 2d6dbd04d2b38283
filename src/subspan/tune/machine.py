"""What the machine can, and what its libraries print."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


def computes_on_cpu() -> bool:
    """Whether there is nothing else, or a launcher asked for it (``accelerate launch --cpu``)."""
    from accelerate.utils import parse_flag_from_env

    return not torch.accelerator.is_available() or bool(parse_flag_from_env("ACCELERATE_USE_CPU"))


def computes_in_bfloat16() -> bool:
    """Whether products in bfloat16 are fast here; elsewhere they are emulated, many times slower than float32."""
    if not computes_on_cpu() and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    return bool(features.get("amx_bf16") or features.get("avx512_bf16"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Libraries' own progress bars and advice off; warnings about real trouble stay."""
    import datasets
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), datasets.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
            warnings.filterwarnings("ignore", category=UserWarning, module=r"(opacus|peft)\.")
            # A GGUF file has no config.json; peft looks for one to see whether the vocabulary was changed.
            warnings.filterwarnings("ignore", message="Could not find a config file")
            yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
        if not bars:
            datasets.enable_progress_bars()
