"""Sentence encoders as classifiers."""

import torch
from transformers import AutoModel

from subspan.data import SentenceClassifier
from subspan.data.sentence import masked_mean, pools_by_mean
from tests.tune.conftest import encoder, sentence_encoder  # noqa: F401  (fixtures)


def test_the_folder_says_how_it_pools(encoder, sentence_encoder):  # noqa: F811
    assert pools_by_mean(str(sentence_encoder))
    assert not pools_by_mean(str(encoder))


def test_the_head_reads_the_mean_of_the_tokens_that_are_no_padding(sentence_encoder):  # noqa: F811
    torch.manual_seed(0)
    model = SentenceClassifier.from_pretrained(str(sentence_encoder), num_labels=3).eval()
    ids = torch.randint(6, 40, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
        plain = AutoModel.from_pretrained(sentence_encoder).eval()
        short = plain(input_ids=ids[1:, :4]).last_hidden_state.mean(1)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits[1:], model.classifier(short), rtol=1e-4, atol=1e-5)


def test_an_empty_row_has_a_finite_mean():
    assert torch.equal(masked_mean(torch.ones(1, 3, 2), torch.zeros(1, 3, dtype=torch.long)), torch.zeros(1, 2))
