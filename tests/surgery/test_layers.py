"""Finding layers, reading and writing their weights, and what their names say, on tiny models of the usual families."""

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from subspan.errors import TargetError
from subspan.surgery import (
    base_layer,
    find_targets,
    is_matrix_layer,
    matrix_layers,
    owned_parameters,
    packed_rows,
    replace_modules,
    role_of,
    weight_matrix,
    write_weight,
)

TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
WORDS = dict(vocab_size=50, pad_token_id=0, bos_token_id=0, eos_token_id=0)
PIXELS = dict(image_size=8, patch_size=4)


def llama(**more: object) -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**TINY, **WORDS, num_key_value_heads=2, **more))


def gpt2() -> nn.Module:
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, **WORDS))


def bert() -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**TINY, **WORDS))


def roberta() -> nn.Module:
    return tf.RobertaForSequenceClassification(tf.RobertaConfig(**TINY, **WORDS))


def vit() -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(**TINY, **PIXELS))


def t5() -> nn.Module:
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, **WORDS, feed_forward_proj="gated-gelu"))


def clip() -> nn.Module:
    text, vision = dict(**TINY, **WORDS), dict(**TINY, **PIXELS)
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


FAMILIES = {
    llama: {
        "model.embed_tokens": "embed",
        "model.layers.0.self_attn.q_proj": "q",
        "model.layers.0.self_attn.k_proj": "k",
        "model.layers.0.self_attn.v_proj": "v",
        "model.layers.0.self_attn.o_proj": "o",
        "model.layers.0.mlp.gate_proj": "gate",
        "model.layers.0.mlp.up_proj": "up",
        "model.layers.0.mlp.down_proj": "down",
        "lm_head": "head",
    },
    gpt2: {
        "transformer.wte": "embed",
        "transformer.wpe": "embed",
        "transformer.h.0.attn.c_attn": "qkv",
        "transformer.h.0.attn.c_proj": "o",
        "transformer.h.0.mlp.c_fc": "up",
        "transformer.h.0.mlp.c_proj": "down",
        "lm_head": "head",
    },
    bert: {
        "bert.embeddings.word_embeddings": "embed",
        "bert.embeddings.position_embeddings": "embed",
        "bert.embeddings.token_type_embeddings": "embed",
        "bert.encoder.layer.0.attention.self.query": "q",
        "bert.encoder.layer.0.attention.self.key": "k",
        "bert.encoder.layer.0.attention.self.value": "v",
        "bert.encoder.layer.0.attention.output.dense": "o",
        "bert.encoder.layer.0.intermediate.dense": "up",
        "bert.encoder.layer.0.output.dense": "down",
        "bert.pooler.dense": "other",
        "classifier": "head",
    },
    vit: {
        "vit.embeddings.patch_embeddings.projection": "embed",
        "vit.layers.0.attention.q_proj": "q",
        "vit.layers.0.attention.k_proj": "k",
        "vit.layers.0.attention.v_proj": "v",
        "vit.layers.0.attention.o_proj": "o",
        "vit.layers.0.mlp.fc1": "up",
        "vit.layers.0.mlp.fc2": "down",
        "classifier": "head",
    },
    t5: {
        "shared": "embed",
        "encoder.embed_tokens": "embed",
        "encoder.block.0.layer.0.SelfAttention.q": "q",
        "encoder.block.0.layer.0.SelfAttention.k": "k",
        "encoder.block.0.layer.0.SelfAttention.v": "v",
        "encoder.block.0.layer.0.SelfAttention.o": "o",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "embed",
        "encoder.block.0.layer.1.DenseReluDense.wi_0": "gate",
        "encoder.block.0.layer.1.DenseReluDense.wi_1": "up",
        "encoder.block.0.layer.1.DenseReluDense.wo": "down",
        "decoder.block.0.layer.1.EncDecAttention.o": "o",
        "lm_head": "head",
    },
    clip: {
        "text_model.embeddings.token_embedding": "embed",
        "text_model.encoder.layers.0.self_attn.q_proj": "q",
        "text_model.encoder.layers.0.self_attn.out_proj": "o",
        "vision_model.embeddings.patch_embedding": "embed",
        "vision_model.encoder.layers.0.mlp.fc1": "up",
        "vision_model.encoder.layers.0.mlp.fc2": "down",
        "visual_projection": "other",
        "text_projection": "other",
    },
}


@pytest.mark.parametrize("family", list(FAMILIES), ids=lambda f: f.__name__)
def test_roles_and_matrix_layers_of_real_models(family) -> None:
    layers = matrix_layers(family())
    roles = {name: role_of(name, module) for name, module in layers.items()}
    assert {name: roles[name] for name in FAMILIES[family]} == FAMILIES[family]
    if family not in (t5, clip):  # their expected names above are a selection
        assert set(roles) == set(FAMILIES[family])


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("layers.3.attention.wo", "o"),
        ("layers.3.feed_forward.w1", "gate"),
        ("layers.3.feed_forward.w2", "down"),
        ("layers.3.feed_forward.w3", "up"),
        ("gpt_neox.layers.0.attention.query_key_value", "qkv"),
        ("gpt_neox.layers.0.attention.dense", "o"),
        ("transformer.h.0.self_attention.dense", "o"),
        ("model.layers.0.mlp.gate_up_proj", "up"),
        ("deberta.encoder.layer.0.attention.self.query_proj", "q"),
        ("distilbert.transformer.layer.0.attention.out_lin", "o"),
        ("classifier.out_proj", "head"),
        ("cls.predictions.decoder", "head"),
        ("base_model.model.model.layers.0.self_attn.q_proj", "q"),
        ("hidden.0", "other"),
        ("backup", "other"),
        ("", "other"),
    ],
)
def test_roles_by_name(name: str, role: str) -> None:
    assert role_of(name) == role


# -------------------------------------------------------------------------------------------------------- orientation


@given(m=st.integers(1, 6), n=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_weight_matrix_is_out_by_in_for_every_kind_of_layer(m: int, n: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(5, n)
    for layer in (nn.Linear(n, m), tf.pytorch_utils.Conv1D(m, n)):
        torch.testing.assert_close(x @ weight_matrix(layer).mT + layer.bias, layer(x))
    conv = nn.Conv2d(n, m, 1)
    y = conv(x[..., None, None])[..., 0, 0]
    torch.testing.assert_close(x @ weight_matrix(conv).mT + conv.bias, y)


def test_conv2d_matrix_multiplies_unfolded_patches() -> None:
    conv = nn.Conv2d(3, 4, (2, 3), stride=2, bias=False)
    x = torch.randn(2, 3, 8, 9)
    patches = nn.functional.unfold(x, (2, 3), stride=2)
    torch.testing.assert_close(weight_matrix(conv) @ patches, conv(x).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 5), lambda: tf.pytorch_utils.Conv1D(5, 3), lambda: nn.Conv2d(3, 5, 1)]
)
def test_write_weight_lands_in_the_same_parameter_and_dtype(make, dtype: torch.dtype) -> None:
    layer = make().to(dtype)
    parameter = layer.weight
    matrix = torch.randn(5, 3)
    write_weight(layer, matrix)
    assert layer.weight is parameter
    assert torch.equal(weight_matrix(layer), matrix.to(dtype))


def test_write_weight_reaches_channels_last_convolutions() -> None:
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    matrix = torch.randn(4, 12)
    write_weight(conv, matrix)
    assert torch.equal(conv.weight.detach().reshape(4, -1), matrix)


def test_weight_matrix_goes_through_peft_wrappers_and_lets_gradients_be() -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    wrapper = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert base_layer(wrapper) is wrapper.base_layer
    assert weight_matrix(wrapper).data_ptr() == wrapper.base_layer.weight.data_ptr()
    assert not weight_matrix(nn.Linear(2, 2)).requires_grad


def test_layers_without_a_matrix_are_refused() -> None:
    grouped = nn.Conv2d(4, 4, 3, groups=2)
    for layer in (nn.LayerNorm(3), nn.Embedding(4, 2), nn.Conv1d(2, 2, 1), grouped):
        assert not is_matrix_layer(layer)
        with pytest.raises(TargetError, match=type(layer).__name__):
            weight_matrix(layer)
    quantised = nn.Linear(2, 2)
    quantised.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TargetError, match="quantised"):
        weight_matrix(quantised)
    with pytest.raises(TargetError, match="meta device"):
        weight_matrix(nn.Linear(2, 2, device="meta"))


# ------------------------------------------------------------------------------------------------------ find_targets


def adapted(model: nn.Module, target) -> set[str]:
    """The layers peft itself wraps for this target."""
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=target))
    return {n.removeprefix("base_model.model.") for n, m in peft_model.named_modules() if hasattr(m, "lora_A")}


@pytest.mark.parametrize(
    ("family", "target"),
    [
        (llama, ["q_proj", "v_proj"]),
        (llama, "all-linear"),
        (llama, r".*\.mlp\.(up|down)_proj"),
        (llama, ["layers.0.self_attn.k_proj"]),
        (gpt2, ["c_attn"]),
        (gpt2, "all-linear"),
        (bert, ["query", "value"]),
        (bert, "all-linear"),
        (vit, ["projection", "q_proj"]),
        (t5, ["q", "v"]),
        (clip, ["q_proj", "visual_projection"]),
    ],
)
def test_find_targets_agrees_with_peft(family, target) -> None:
    assert set(find_targets(family(), target)) == adapted(family(), target)


def test_find_targets_returns_modules_in_model_order_and_takes_any_iterable() -> None:
    model = llama()
    found = find_targets(model, (name for name in ("v_proj", "q_proj")))
    assert list(found) == [f"model.layers.0.self_attn.{x}_proj" for x in "qv"]
    assert all(model.get_submodule(name) is module for name, module in found.items())


def test_find_targets_excludes() -> None:
    assert set(find_targets(llama(), "all-linear", exclude=["q_proj", "down_proj"])) == {
        f"model.layers.0.{x}_proj" for x in ("self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    }


def test_find_targets_sees_through_an_existing_adapter() -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    prefix = "base_model.model."
    names = {n.removeprefix(prefix) for n in find_targets(model, "all-linear")}
    assert names == set(find_targets(llama(), "all-linear"))


def test_find_targets_names_the_nearest_when_nothing_matches() -> None:
    with pytest.raises(TargetError, match=r"query_proj match no layer.*did you mean.*q_proj"):
        find_targets(llama(), ["query_proj"])
    with pytest.raises(TargetError, match="match no layer"):
        find_targets(llama(), "nothing.*")
    with pytest.raises(TargetError, match="match no layer"):
        find_targets(llama(), ["embed_tokens"])  # an embedding has no out x in matrix


# ---------------------------------------------------------------------------------------- matrix_layers and parameters


def test_matrix_layers_lists_wrapped_layers_once_under_their_own_name() -> None:
    plain, wrapped = llama(), get_peft_model(
        llama(), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], use_dora=True)
    )  # fmt: skip
    names = [n.removeprefix("base_model.model.") for n in matrix_layers(wrapped)]
    assert names == list(matrix_layers(plain))


def test_owned_parameters_lists_each_parameter_once_with_owner_and_ties() -> None:
    model = llama(tie_word_embeddings=True)
    owned = owned_parameters(model)
    assert [o.name for o in owned] == [name for name, _ in model.named_parameters()]
    assert all(a.param is b for a, b in zip(owned, model.parameters(), strict=True))
    assert {o.name for o in owned if o.shared} == {"model.embed_tokens.weight"}
    assert all(getattr(o.module, o.name.rsplit(".", 1)[-1]) is o.param for o in owned)


# ----------------------------------------------------------------------------------------------------- packed attention


def test_packed_rows_of_gpt2_reproduce_its_split() -> None:
    model = gpt2()
    layer = model.transformer.h[0].attn.c_attn
    rows = packed_rows("transformer.h.0.attn.c_attn", layer, heads=4)
    x = torch.randn(3, 32)
    for part, role in zip(layer(x).split(32, dim=-1), "qkv", strict=True):
        torch.testing.assert_close(x @ weight_matrix(layer)[rows[role]].mT + layer.bias[rows[role]], part)


def test_packed_rows_of_gpt_neox_interleave_by_head() -> None:
    model = tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**TINY, **WORDS))
    layer = model.gpt_neox.layers[0].attention.query_key_value
    rows = packed_rows("gpt_neox.layers.0.attention.query_key_value", layer, heads=4)
    x = torch.randn(3, 32)
    by_head = layer(x).view(3, 4, 3 * 8).chunk(3, dim=-1)  # as GPTNeoXAttention does
    for part, role in zip(by_head, "qkv", strict=True):
        index = rows[role]
        torch.testing.assert_close(x @ weight_matrix(layer)[index].mT + layer.bias[index], part.reshape(3, 32))


def test_packed_rows_with_fewer_key_value_heads() -> None:
    model = tf.Phi3ForCausalLM(tf.Phi3Config(**TINY, **WORDS, num_key_value_heads=2))
    layer = model.model.layers[0].self_attn.qkv_proj
    rows = packed_rows("model.layers.0.self_attn.qkv_proj", layer, heads=4, kv_heads=2)
    assert [len(rows[role]) for role in "qkv"] == [32, 16, 16]
    assert torch.equal(torch.cat([rows[role] for role in "qkv"]), torch.arange(64))


def test_packed_rows_refuse_heads_that_do_not_fit() -> None:
    with pytest.raises(TargetError, match="attn: 10 rows do not divide into 4 query and 2 x 4"):
        packed_rows("attn", nn.Linear(3, 10), heads=4)


def test_modules_are_replaced_at_every_name_that_holds_them():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()))
    new = nn.Linear(3, 3)
    replace_modules(model, {shared: new})
    assert model[0] is new
    assert model[1][0] is new
    assert isinstance(model[1][1], nn.ReLU)
