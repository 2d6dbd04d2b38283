"""A tiny language model, a tiny classifier and a tiny table, all in local folders."""

import csv
import json
import random
import shutil

import pytest
import torch

WORDS = [f"w{i}" for i in range(40)]
GOOD, BAD = WORDS[:8], WORDS[8:16]


def tokenizer(chat: bool):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<bot>"]
    vocab = {w: i for i, w in enumerate([*special, *WORDS, "good", "bad", "rate", ":"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat:
        fast.chat_template = (
            "{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}{{ m['content'] }}"
            "{{ ' </s> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
        )
    return fast


@pytest.fixture(scope="session")
def causal(tmp_path_factory):
    """A two-layer Llama with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("causal")
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer(chat=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A two-layer BERT."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("encoder")
    BertModel(shape).save_pretrained(folder)
    tokenizer(chat=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sentence_encoder(encoder, tmp_path_factory):
    """The same BERT in the sentence-transformers format, which says that its tokens are averaged."""
    folder = tmp_path_factory.mktemp("sentence") / "encoder"
    shutil.copytree(encoder, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    """240 rows of words; a row is good when more of its words are good ones."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(240):
            good = rng.random() < 0.5
            words = rng.choices(GOOD if good else BAD, k=3) + rng.choices(WORDS[16:], k=rng.randint(1, 6))
            rng.shuffle(words)
            writer.writerow([" ".join(words), "good" if good else "bad"])
    return path


@pytest.fixture
def settings(causal, encoder, table, tmp_path):
    """Builds a small configuration: ``settings("causal-lm", lr=...)``."""

    def build(task: str = "causal-lm", **changes):
        return {
            "model": str(causal if task == "causal-lm" else encoder),
            "task": task,
            "data": {"source": str(table), "validation": 20, "test": 40} | changes.pop("data", {}),
            **({"prompt": "rate : {text}"} if task == "causal-lm" else {}),
            "output": str(tmp_path / "run"),
            "adapter": {"r": 4, "alpha": 8} | changes.pop("adapter", {}),
            "lr": 1e-2,
            "batch_size": 8,
            "max_steps": 6,
            "checkpoint_every": 2,
            "evaluate_every": 3,
            "log_every": 1,
            **changes,
        }

    return build
