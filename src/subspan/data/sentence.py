"""Sentence encoders as classifiers: the head reads the mean of the tokens, as the encoder was trained to be read."""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subspan.files import write_json

_POOLING, _HEAD = "1_Pooling/config.json", "classifier.safetensors"


def pools_by_mean(path: str) -> bool:
    """Whether a model folder or hub name is in the sentence-transformers format and averages its tokens."""
    from transformers.utils.hub import cached_file

    found = cached_file(
        path,
        _POOLING,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return False
    with open(found, encoding="utf-8") as file:
        return bool(json.load(file).get("pooling_mode_mean_tokens"))


def classifier_class(path: str) -> Any:
    """What loads a model folder or hub name as a classifier: it has ``from_pretrained`` and ``from_config``."""
    from transformers import AutoModelForSequenceClassification

    return SentenceClassifier if pools_by_mean(path) else AutoModelForSequenceClassification


class SentenceClassifier(nn.Module):
    """A linear head on the mean of an encoder's last hidden states (d) over the tokens that are no padding.

    transformers' own sequence classifiers read one position through a pooler, which a sentence encoder was never
    trained to use. The constructor is ``from_pretrained`` or ``from_config``, as for the Auto classes.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        encoder.pooler = None  # BERT's kind has one; nothing would read it
        self.encoder, self.config = encoder, encoder.config
        self.classifier = nn.Linear(self.config.hidden_size, self.config.num_labels)
        nn.init.normal_(self.classifier.weight, std=self.config.initializer_range)
        nn.init.zeros_(self.classifier.bias)
        self.classifier.to(encoder.dtype)

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> "SentenceClassifier":
        """An encoder with a new head, or what ``save_pretrained`` wrote."""
        from safetensors.torch import load_file
        from transformers import AutoModel

        made = cls(AutoModel.from_pretrained(path, **options))
        if (head := Path(path) / _HEAD).exists():
            made.classifier.load_state_dict(load_file(head))
        return made

    def save_pretrained(self, path: str | Path) -> None:
        """A sentence-transformers folder, as the encoder came from, with the head beside it."""
        from safetensors.torch import save_file

        self.encoder.save_pretrained(path)
        save_file(self.classifier.state_dict(), Path(path) / _HEAD)
        write_json(Path(path) / _POOLING, {"pooling_mode_mean_tokens": True})

    @classmethod
    def from_config(cls, config: Any) -> "SentenceClassifier":
        from transformers import AutoModel

        return cls(AutoModel.from_config(config))

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def forward(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"], **unused: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return SequenceClassifierOutput(logits=self.classifier(masked_mean(hidden, attention_mask)))  # pyright: ignore


def masked_mean(hidden: Float[Tensor, "b t d"], mask: Int[Tensor, "b t"]) -> Float[Tensor, "b d"]:
    """Mean over the positions where the mask is 1 (zero where it is 0 everywhere)."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / torch.clamp(weights.sum(1), min=1)
