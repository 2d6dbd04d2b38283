"""nn.MultiheadAttention split into its projections."""

import pytest
import torch
from torch import nn

from subspan.surgery import SplitAttention, split_attention

PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 6])
CAUSAL = torch.ones(4, 6, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 3}, {"bias": False}, {"batch_first": True}], ids=str)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"need_weights": False},
        {"key_padding_mask": PADDING},
        {"attn_mask": torch.linspace(-2, 2, 24).view(4, 6), "average_attn_weights": False},
        {"attn_mask": torch.zeros(6, 4, 6), "key_padding_mask": PADDING * -9.0, "need_weights": False},
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING, "need_weights": False},
    ],
    ids=lambda extra: "-".join(extra),
)
def test_split_attention_computes_what_the_packed_one_does(options, extra):
    torch.manual_seed(0)
    packed = nn.MultiheadAttention(8, 2, **options).eval()
    split = SplitAttention(packed).eval()
    inputs = [torch.randn(t, 3, d) for t, d in ((4, 8), (6, options.get("kdim", 8)), (6, options.get("vdim", 8)))]
    if packed.batch_first:
        inputs = [t.transpose(0, 1) for t in inputs]
    (wanted, weights), (got, ours) = packed(*inputs, **extra), split(*inputs, **extra)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)
    assert (ours is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(ours, weights, atol=1e-6, rtol=0)


def test_split_attention_of_one_sequence_and_causal():
    torch.manual_seed(0)
    packed = nn.MultiheadAttention(8, 2).eval()
    split = SplitAttention(packed).eval()
    x = torch.randn(5, 8)
    torch.testing.assert_close(split(x, x, x), packed(x, x, x), atol=1e-6, rtol=0)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    options = {"need_weights": False, "is_causal": True}
    wanted = packed(x, x, x, attn_mask=mask, **options)[0]
    torch.testing.assert_close(split(x, x, x, **options)[0], wanted, atol=1e-6, rtol=0)


def test_attention_with_extra_positions_is_refused():
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ValueError, match="cannot be split"):
            split_attention(nn.Sequential(nn.MultiheadAttention(8, 2, **options)))


def test_a_padded_batch_in_evaluation_takes_no_fast_path_of_the_encoder():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, mask = torch.randn(3, 6, 8), PADDING
    wanted = encoder(x, src_key_padding_mask=mask)  # with gradients there is none
    split_attention(encoder)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x, src_key_padding_mask=mask)[~mask], wanted[~mask])
