"""The bridge to peft: letters, scalings, shifts of the base, and export as plain LoRA."""

import copy
import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from subspan.errors import BaseMismatch, TargetError
from subspan.linalg import LowRank
from subspan.surgery import (
    BaseShift,
    base_fingerprint,
    base_layer,
    check_base,
    data_start,
    export_plain_lora,
    factor_pairs,
    mark_data_start,
    shift_base,
    weight_matrix,
)


class Net(nn.Module):
    """Linear layers whose names end like one another, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.fc = nn.Linear(24, 10)
        self.block = nn.ModuleDict({"fc": nn.Linear(10, 7)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.conv(x)).flatten(1)
        return self.block["fc"](torch.tanh(self.fc(h)))


TARGETS = ["conv", "fc"]


def base(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def batch() -> torch.Tensor:
    return torch.randn(5, 2, 2, 2, generator=torch.Generator().manual_seed(1))


def adapted(model: nn.Module, **config) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(
            model, LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": TARGETS, **config})
        ).eval()


def fill(model: nn.Module, seed: int = 0, size: float = 0.3) -> None:
    g = torch.Generator().manual_seed(seed)
    for pair in factor_pairs(model):
        m, n, r = pair.shape
        pair.write(LowRank(size * torch.randn(m, r, generator=g), size * torch.randn(n, r, generator=g)))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=30, n_positions=16)).eval()


def test_letters_are_swapped_once():
    model = adapted(base())
    fill(model)
    for pair in factor_pairs(model):
        m, n, r = pair.shape
        assert pair.A.shape == (m, r)
        assert pair.B.shape == (n, r)
        assert pair.param_A is pair.layer.lora_B["default"].weight
        assert pair.param_B is pair.layer.lora_A["default"].weight
        delta = pair.layer.get_delta_weight("default").flatten(1)
        torch.testing.assert_close(pair.scaling * pair.A @ pair.B.mT, delta)
        assert pair.name in ("conv", "fc", "block.fc")
        assert (m, n) == tuple(weight_matrix(pair.layer).shape)


@pytest.mark.parametrize(("rslora", "s"), [(False, 3.0), (True, 6 / 2**0.5)])
def test_scaling_is_that_of_the_layer(rslora, s):
    model = adapted(base(), use_rslora=rslora, rank_pattern={"block.fc": 3}, alpha_pattern={"block.fc": 12})
    scalings = {p.name: p.scaling for p in factor_pairs(model)}
    assert scalings["fc"] == pytest.approx(s)
    assert scalings["block.fc"] == pytest.approx(12 / 3**0.5 if rslora else 4.0)


def test_gradients_come_in_the_same_letters():
    model = adapted(base())
    fill(model)
    pair = factor_pairs(model)[1]
    assert pair.grad_A() is None
    model(batch()).square().sum().backward()
    assert pair.grad_A().shape == pair.A.shape
    torch.testing.assert_close(pair.grad_B().mT, pair.param_B.grad)


def test_write_keeps_the_parameters_alive():
    model = adapted(base())
    before = [id(p) for p in model.parameters()]
    fill(model)
    assert [id(p) for p in model.parameters()] == before


def test_an_unknown_adapter_is_named():
    with pytest.raises(TargetError, match=r"no LoRA factors named 'other'; the model's adapters are \['default'\]"):
        factor_pairs(adapted(base()), "other")


def test_shift_keeps_the_function_and_the_parameters():
    plain, model = base(), adapted(base())
    fill(model)
    identities = [id(p) for p in model.parameters()]
    shift_base(model, factor_pairs(model))
    torch.testing.assert_close(model(batch()), plain(batch()), rtol=1e-5, atol=1e-5)
    assert [id(p) for p in model.parameters()] == identities


def test_shift_of_a_conv1d_and_a_packed_projection():
    plain, model = gpt2(), adapted(gpt2(), target_modules=["c_attn", "c_proj", "c_fc"])
    fill(model, size=0.1)
    shift_base(model, factor_pairs(model))
    tokens = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_shift_subtracts_what_the_rounded_factors_say(seed, dtype):
    """Factors are rounded first and the residual is cast once, so only one rounding of W' remains."""
    model = adapted(base(seed).to(dtype))
    for pair in factor_pairs(model):
        pair.layer.to(dtype)
    fill(model, seed)
    before = {p.name: weight_matrix(p.layer).float().clone() for p in factor_pairs(model)}
    shift_base(model, factor_pairs(model))
    for p in factor_pairs(model):
        assert p.A.dtype == dtype
        exact = before[p.name] - p.scaling * p.low_rank().dense()
        after = weight_matrix(p.layer)
        assert torch.equal(after, exact.to(dtype))


def test_shift_refuses_quantised_weights():
    model = adapted(base())
    pair = factor_pairs(model)[1]
    layer = base_layer(pair.layer)
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(TargetError, match="quantised weight"):
        shift_base(model, [pair])


def test_export_over_a_quantised_base_needs_no_shift(tmp_path):
    model = adapted(base())
    layer = base_layer(factor_pairs(model)[1].layer)
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    export_plain_lora(model, tmp_path)
    assert "fc.weight" not in json.loads((tmp_path / "base.json").read_text())["parameters"]


def test_a_shift_survives_its_file_and_applies_to_the_original_base_only(tmp_path):
    model = adapted(base())
    fill(model)
    shift = shift_base(model, factor_pairs(model))
    shift.save(tmp_path / "shift.safetensors")
    loaded = BaseShift.load(tmp_path / "shift.safetensors")
    assert loaded.scaling == shift.scaling
    assert loaded.fingerprint == shift.fingerprint
    assert loaded.public

    fresh = adapted(base())
    fill(fresh)
    loaded.apply(fresh)
    torch.testing.assert_close(fresh(batch()), model(batch()), rtol=0, atol=0)
    with pytest.raises(BaseMismatch, match="load the original base model"):
        loaded.apply(fresh)  # a second time would shift twice


def test_a_start_from_private_data_is_remembered(tmp_path):
    model = adapted(base())
    model.add_adapter("second", LoraConfig(r=3, target_modules=["fc"]))
    marked, *rest = factor_pairs(model, "second")
    assert data_start(marked) is None
    mark_data_start(marked, "looked at private data")
    twin = copy.deepcopy(model)
    assert [data_start(p) for p in factor_pairs(twin, "second")] == ["looked at private data", *[None] * len(rest)]
    assert all(data_start(p) is None for p in factor_pairs(twin))
    assert shift_base(model, rest).public

    shift = shift_base(model, [marked, *rest])
    shift.save(tmp_path / "shift.safetensors")
    assert not BaseShift.load(tmp_path / "shift.safetensors").public
    # The base weight now holds the private start, for whichever adapter reads it.
    assert [p.name for p in factor_pairs(model) if data_start(p)] == [marked.name]


CONFIGS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"^fc": 3}, "alpha_pattern": {"block.fc": 9}},
    "everything": {"use_rslora": True, "use_dora": True, "rank_pattern": {"block.fc": 1}},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("part", [False, True])
def test_export_loads_in_plain_peft_on_the_unmodified_base(name, part, tmp_path):
    """Shifted, trained and exported: peft alone gives the same outputs on a base it loads afresh."""
    model = adapted(base(), **CONFIGS[name])
    fill(model, 0)
    pairs = factor_pairs(model)
    shift = shift_base(model, pairs[:2] if part else pairs)
    fill(model, 1)  # "training"
    for key, value in model.named_parameters():
        if "magnitude" in key:
            value.data.mul_(1.1)
    export_plain_lora(model, tmp_path, shift)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    torch.testing.assert_close(loaded(batch()), model(batch()), rtol=1e-4, atol=1e-4)
    ranks = {p.name: p.shape[2] for p in factor_pairs(loaded)}
    assert ranks["fc"] == 2 * dict((p.name, p.shape[2]) for p in pairs)["fc"]
    assert not json.loads((tmp_path / "adapter_config.json").read_text())["use_rslora"]


def test_export_without_a_shift_is_the_adapter_itself(tmp_path):
    model = adapted(base(), use_rslora=True)
    fill(model)
    export_plain_lora(model, tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    torch.testing.assert_close(loaded(batch()), model(batch()))
    assert {p.shape[2] for p in factor_pairs(loaded)} == {2}


def test_export_of_a_language_model_with_an_embedding_adapter(tmp_path):
    """The embedding's LoRA is no factor pair: it keeps its rank while the others double theirs."""
    model = adapted(gpt2(), target_modules=["c_attn", "c_fc", "wpe"], lora_alpha=4)
    fill(model, size=0.1)
    shift = shift_base(model, factor_pairs(model))
    fill(model, 1, size=0.1)
    embedding = model.base_model.model.transformer.wpe
    with torch.no_grad():
        embedding.lora_embedding_A["default"].normal_(std=0.1)
    export_plain_lora(model, tmp_path, shift)
    loaded = PeftModel.from_pretrained(gpt2(), tmp_path).eval()
    tokens = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)


def test_export_of_one_of_several_adapters(tmp_path):
    model = adapted(base())
    model.add_adapter("second", LoraConfig(r=3, lora_alpha=3, target_modules=["fc"]))
    model.set_adapter("second")
    for pair in factor_pairs(model, "second"):
        pair.write(LowRank(torch.ones(pair.shape[0], 3), torch.ones(pair.shape[1], 3)))
    shift = shift_base(model, factor_pairs(model, "second"))
    export_plain_lora(model, tmp_path, shift, adapter_name="second")
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    torch.testing.assert_close(loaded(batch()), model(batch()), rtol=1e-4, atol=1e-4)


def test_fingerprint_survives_dtype_and_peft_but_not_an_edit():
    plain = base()
    with torch.no_grad():  # values that bfloat16 and float16 both hold, as a stored checkpoint's
        for p in plain.parameters():
            p.copy_(p.bfloat16())
    print_ = base_fingerprint(plain)
    assert base_fingerprint(copy.deepcopy(plain).bfloat16()) == print_
    assert base_fingerprint(copy.deepcopy(plain).double()) == print_
    assert base_fingerprint(adapted(copy.deepcopy(plain))) == print_
    edited = copy.deepcopy(plain)
    with torch.no_grad():
        edited.fc.weight[3, 4] += 0.01
    assert base_fingerprint(edited) != print_
    names = ["conv.weight"]
    assert base_fingerprint(edited, names) == base_fingerprint(plain, names)


def test_fingerprint_of_a_missing_parameter_says_so():
    with pytest.raises(BaseMismatch, match=r"no parameter 'other\.weight'"):
        base_fingerprint(base(), ["other.weight"])


def test_check_base_recognises_the_base_of_an_export(tmp_path):
    model = adapted(base())
    fill(model)
    shift = shift_base(model, factor_pairs(model))
    export_plain_lora(model, tmp_path, shift)
    check_base(base(), tmp_path)
    check_base(adapted(base()), tmp_path)
    for other in (base(seed=5), model):
        with pytest.raises(BaseMismatch, match="load the original base"):
            check_base(other, tmp_path)


def test_an_export_that_fails_leaves_the_old_one_whole(tmp_path, monkeypatch):
    model = adapted(base())
    fill(model)
    export_plain_lora(model, tmp_path)
    before = (tmp_path / "adapter_model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    fill(model, 1)
    with pytest.raises(OSError, match="No space left"):
        export_plain_lora(model, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))
