"""Factors beside a model's layers, files of factors, and a model that is left as it was found."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from subspan.linalg import LowRank
from subspan.surgery import factor_pairs, load_factors, plain_layers, save_factors, side_paths, undisturbed


@pytest.fixture(scope="module")
def gpt2():
    """Conv1D layers, and dropout everywhere."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30, n_positions=16)).train()


def tuned(model, **options):
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True, **options)
    return get_peft_model(copy.deepcopy(model), config)


def test_a_side_path_equals_pefts_layer_also_beside_a_conv1d(gpt2):
    adapted = tuned(gpt2)
    pairs = factor_pairs(adapted)
    factors = {p.name: p.low_rank() for p in pairs}
    ids = torch.randint(0, 30, (2, 5))
    expected = copy.deepcopy(adapted).eval()(ids).logits
    with undisturbed(adapted), undisturbed(gpt2):
        base = gpt2(ids).logits
        torch.testing.assert_close(adapted(ids).logits, base)  # peft's own adapter is off
        for model in (adapted, gpt2):
            with side_paths(plain_layers(model), factors, {p.name: p.scaling for p in pairs}):
                beside = model(ids).logits
            torch.testing.assert_close(beside, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(model(ids).logits, base)


def peft_layers(model):
    return [m for m in model.modules() if hasattr(m, "lora_A")]


def test_gradients_reach_the_factors_and_nothing_else(gpt2):
    name = "transformer.h.0.attn.c_attn"
    z = LowRank(torch.zeros(48, 2, requires_grad=True), torch.randn(16, 2).requires_grad_())
    with undisturbed(gpt2), side_paths(plain_layers(gpt2), {name: z}, {name: 2.0}):
        gpt2(torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    assert z.A.grad is not None
    assert z.A.grad.abs().sum() > 0
    assert z.B.grad is not None  # zero at A = 0
    assert all(p.grad is None for p in gpt2.parameters())


def test_the_model_is_put_back_also_after_an_error(gpt2):
    model = tuned(gpt2)
    model.get_submodule("base_model.model.transformer.h.1").eval()
    model.gradient_checkpointing_enable()
    before = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]

    def broken():
        with undisturbed(model):
            assert not any(p.requires_grad for p in model.parameters())
            assert not any(m.training for m in model.modules() if isinstance(m, nn.Dropout))
            assert all(m.disable_adapters for m in peft_layers(model))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        broken()
    assert before == ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    assert not any(m.disable_adapters for m in peft_layers(model))
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"), undisturbed(model):
        pass


def test_checkpointed_layers_keep_checkpointing_without_dropout(gpt2):
    class Block(nn.Module):
        gradient_checkpointing = True

        def __init__(self):
            super().__init__()
            self.dropout, self.inner = 0.5, nn.Dropout(0.5)

    block = Block().train()
    with undisturbed(nn.Sequential(block)):
        assert block.training
        assert block.dropout == 0.0
        assert not block.inner.training
    assert block.dropout == 0.5
    assert block.inner.training


def test_factors_of_unequal_ranks_go_through_a_file_and_peft_reads_it(tmp_path, gpt2):
    names = [f"transformer.h.{i}.attn.c_attn" for i in range(2)]
    factors = {n: LowRank(torch.randn(48, r), torch.randn(16, r)) for n, r in zip(names, (2, 3), strict=True)}
    scaling = dict(zip(names, (2.0, 0.5), strict=True))
    save_factors(tmp_path, factors, scaling)
    back, scales = load_factors(tmp_path)
    assert scales == pytest.approx(scaling)
    for name, z in factors.items():
        assert torch.equal(back[name].A, z.A)
        assert torch.equal(back[name].B, z.B)
    pairs = factor_pairs(PeftModel.from_pretrained(copy.deepcopy(gpt2), tmp_path))
    assert {p.name: p.scaling for p in pairs} == pytest.approx(scaling)
