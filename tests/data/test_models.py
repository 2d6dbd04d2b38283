"""One door to transformers' weights: names are resolved, failures are one sentence, the progress bar comes back."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from subspan.data import load_pretrained
from subspan.errors import DataError, MissingAsset


@pytest.fixture
def folder(tmp_path):
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **shape)).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads_with_the_options_given(folder):
    assert load_pretrained(AutoConfig, str(folder)).hidden_size == 8
    assert load_pretrained(AutoModelForCausalLM, str(folder), dtype="auto").dtype == torch.bfloat16
    assert load_pretrained(AutoModelForCausalLM, str(folder), dtype="float32").dtype == torch.float32


@pytest.mark.parametrize("bars", [True, False])
def test_what_fails_says_what_was_looked_for_and_leaves_the_progress_bar_as_it_was(folder, bars):
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
    try:
        with pytest.raises(DataError, match=f"no tokenizer loads from {folder}: "):
            load_pretrained(AutoTokenizer, str(folder), "tokenizer")
        assert logging.is_progress_bar_enabled() == bars
    finally:
        logging.enable_progress_bar()


def test_names_are_those_of_model_source(tmp_path):
    with pytest.raises(DataError, match="there is no model at"):
        load_pretrained(AutoConfig, "./nowhere")
    with pytest.raises((DataError, MissingAsset), match="not a model"):
        load_pretrained(AutoConfig, "asset:reviews")


def test_torn_files_and_those_of_another_model_are_one_sentence(folder):
    config, file = folder / "config.json", folder / "model.safetensors"
    config.write_text(config.read_text().replace('"intermediate_size": 8', '"intermediate_size": 12'))
    with pytest.raises(DataError, match=r"not of the sizes that config\.json says"):
        load_pretrained(AutoModelForCausalLM, str(folder))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match="no model loads from"):
        load_pretrained(AutoModelForCausalLM, str(folder))
