"""Routing to Muon or AdamW on peft and plain models, and the ways into Trainer and accelerate."""

import copy

import pytest
import torch
import transformers as tf
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn

from subspan.errors import TargetError
from subspan.optim import MuonAdamW, build_muon_groups, muon_from_peft, optimizer_cls_and_kwargs, route_parameters
from tests.optim.small import SIZES, llama, tokens


def destinations(model: nn.Module, **options: object) -> dict[str, bool]:
    return {r.name.removeprefix("base_model.model."): r.use_muon for r in route_parameters(model, **options)}


def exactly_once(model: nn.Module, groups: list[dict]) -> None:
    placed = [id(p) for g in groups for _, p in g["params"]]
    assert sorted(placed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    MuonAdamW(groups)


def test_full_fine_tuning_sends_hidden_matrices_to_muon_and_the_rest_to_adamw() -> None:
    model = llama()
    to_muon = {name for name, use_muon in destinations(model).items() if use_muon}
    assert to_muon == {
        n for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n
    }
    groups = build_muon_groups(model, lr=1e-3, weight_decay=0.1)
    exactly_once(model, groups)
    assert {g["name"]: (g["use_muon"], g["weight_decay"], g["lr"]) for g in groups} == {
        "adamw": (False, 0.1, 1e-3),
        "muon": (True, 0.1, 1e-3),
        "adamw_no_decay": (False, 0.0, 1e-3),
    }


def test_tied_embeddings_go_to_adamw_once() -> None:
    model = llama(tie_word_embeddings=True)
    (tied,) = [r for r in route_parameters(model) if "embed" in r.name or "head" in r.name]
    assert (tied.use_muon, tied.reason) == (False, "tied weight")
    exactly_once(model, build_muon_groups(model))


def test_lora_factors_go_to_muon_and_dora_magnitudes_and_saved_modules_to_adamw() -> None:
    saved = ["lm_head", "down_proj"]
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True, modules_to_save=saved)
    model = get_peft_model(llama(), config)
    routed = destinations(model)
    assert {n for n, use_muon in routed.items() if use_muon} == {
        n for n in routed if n.endswith(("lora_A.default.weight", "lora_B.default.weight"))
    }
    assert {n.split(".")[-3] for n, use_muon in routed.items() if not use_muon} >= {"lora_magnitude_vector"}
    assert sum("modules_to_save" in n for n in routed) == 3
    exactly_once(model, build_muon_groups(model))


def test_lora_biases_go_to_adamw() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True, bias="all"))
    assert {n.rsplit(".", 1)[-1]: use_muon for n, use_muon in destinations(model).items()} == {
        "weight": True,
        "bias": False,
    }


def test_dora_magnitude_of_a_convolution_is_no_matrix_for_muon() -> None:
    model = tf.ResNetForImageClassification(
        tf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=2)
    )
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["convolution"], use_dora=True))
    magnitudes = [r for r in route_parameters(model) if "magnitude" in r.name]
    assert magnitudes
    assert all(r.param.ndim == 4 and not r.use_muon for r in magnitudes)
    assert any(r.use_muon and r.param.ndim == 4 for r in route_parameters(model))
    exactly_once(model, build_muon_groups(model))


def test_lora_on_embeddings_and_head_follows_the_option() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "embed_tokens", "lm_head"]))
    everywhere, hidden = destinations(model), destinations(model, lora_everywhere=False)
    assert all(everywhere.values())
    assert {n for n, use_muon in hidden.items() if use_muon} == {n for n in hidden if "q_proj" in n}
    exactly_once(model, build_muon_groups(model, lora_everywhere=False))


def test_only_the_active_adapter_is_trained() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert all(".default." in n for n in destinations(model))
    model.set_adapter("second")
    assert all(".second." in n for n in destinations(model))
    exactly_once(model, build_muon_groups(model))


def test_adalora_diagonals_go_to_adamw() -> None:
    model = get_peft_model(llama(), AdaLoraConfig(init_r=4, target_r=2, target_modules=["q_proj"], total_step=10))
    routed = destinations(model)
    assert {n.split(".")[-2] for n, use_muon in routed.items() if use_muon} == {"lora_A", "lora_B"}
    assert {n.split(".")[-2] for n, use_muon in routed.items() if not use_muon} == {"lora_E"}


def test_vision_models_keep_patches_positions_and_class_tokens_out() -> None:
    model = tf.ViTForImageClassification(tf.ViTConfig(**SIZES, image_size=8, patch_size=4))
    routed = destinations(model)
    outside = {n for n in routed if n.startswith(("vit.embeddings", "classifier"))}
    assert not any(routed[n] for n in outside)
    assert {n for n, use_muon in routed.items() if use_muon} == {
        n for n, p in model.named_parameters() if p.ndim == 2 and n not in outside
    }


def test_routers_and_packed_experts_stay_out() -> None:
    model = tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=64, num_local_experts=2))
    to_muon = {n for n, use_muon in destinations(model).items() if use_muon}
    assert to_muon
    assert all("self_attn" in n for n in to_muon)
    router = nn.ModuleDict({"gate": nn.Linear(4, 2), "up": nn.Linear(4, 8)})
    assert destinations(router) == {"gate.weight": False, "gate.bias": False, "up.weight": True, "up.bias": False}


def test_torch_attention_and_convolutions_go_to_muon() -> None:
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(8, 2), "conv": nn.Conv3d(2, 4, 2), "norm": nn.LayerNorm(8)}
    )
    routed = destinations(model)
    assert {n for n, use_muon in routed.items() if use_muon} == {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "conv.weight",
    }


def test_conv1d_weights_are_scaled_as_the_out_by_in_matrices_they_are() -> None:
    model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    groups = build_muon_groups(model, scale="original")
    (packed,) = [g for g in groups if g.get("fan_in_fan_out")]
    weight = model.transformer.h[0].mlp.c_fc.weight  # 32 x 128, in x out
    assert any(p is weight for _, p in packed["params"])
    optimizer = MuonAdamW(groups, lr=0.1, ns="exact")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    weight.grad = torch.randn(weight.shape)
    before = weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    moved = torch.linalg.matrix_norm(weight.detach() - before, 2)
    assert float(moved) == pytest.approx(packed["lr"] * 2.0, rel=1e-4)  # sqrt(128 / 32)


def test_names_can_be_kept_from_muon() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert destinations(model, adamw_pattern=r"^1\.") == {
        "0.weight": True, "0.bias": False, "1.weight": False, "1.bias": False,
    }  # fmt: skip


def test_report_has_a_line_for_each_parameter() -> None:
    model, lines = llama(), []
    build_muon_groups(model, report=lines.append)
    (text,) = lines
    assert len(text.splitlines()) == len(list(model.parameters()))
    assert "model.layers.0.mlp.up_proj.weight  (48, 32)  muon x 1.39  (hidden weight matrix)" in text
    assert "lm_head.weight  (64, 32)  adamw  (output head)" in text


def test_frozen_models_and_quantised_weights_are_refused() -> None:
    model = llama().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_muon_groups(model)
    layer = nn.Linear(2, 2)
    layer.weight.quant_state = object()  # how bitsandbytes marks a 4-bit weight
    with pytest.raises(TargetError, match=r"weight is a quantised weight"):
        route_parameters(layer)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x, out = tokens(), []
    for _ in range(steps):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(float(loss.detach()))
    return out


def test_muon_from_peft_learns_and_resumes_bit_exactly() -> None:
    def fresh() -> tuple[nn.Module, MuonAdamW]:
        base = llama()
        torch.manual_seed(1)
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", use_dora=True))
        return model, muon_from_peft(model, lr=3e-2, weight_decay=0.1, ns="polar_express", adamw_pattern="magnitude")

    model, optimizer = fresh()
    whole = losses(model, optimizer, 12)
    assert whole[-1] < whole[0] - 0.3
    model, optimizer = fresh()
    losses(model, optimizer, 6)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    model, optimizer = fresh()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert losses(model, optimizer, 6) == whole[6:]


def test_compiled_models_route_alike() -> None:
    plain = llama()
    compiled = torch.compile(plain, backend="eager")
    assert {n.removeprefix("_orig_mod."): m for n, m in destinations(compiled).items()} == destinations(plain)


def test_trainer_builds_the_optimizer_and_resumes_to_the_same_weights(tmp_path) -> None:
    data = [{"input_ids": row, "labels": row} for row in tokens(24)]

    def trainer(steps: int) -> tf.Trainer:
        base = llama()
        torch.manual_seed(1)
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"]))
        arguments = tf.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, save_steps=3, per_device_train_batch_size=4, report_to=[],
            learning_rate=1e-3, warmup_steps=1, lr_scheduler_type="constant_with_warmup", use_cpu=True, seed=0,
            disable_tqdm=True, logging_steps=1, max_grad_norm=1.0,
        )  # fmt: skip
        return tf.Trainer(
            model, arguments, train_dataset=data, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(lr=5e-3)
        )

    whole = trainer(6)
    whole.train()
    assert isinstance(whole.optimizer.optimizer, MuonAdamW)
    assert [g["lr"] for g in whole.optimizer.param_groups] == [5e-3] * 2
    history = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert history[-1] < history[0]
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_accelerate_prepares_and_accumulates() -> None:
    from accelerate import Accelerator

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    optimizer = muon_from_peft(model, lr=5e-3)
    schedule = tf.get_cosine_schedule_with_warmup(optimizer, 1, 8)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    x, seen = tokens(), []
    for _ in range(16):
        with accelerator.accumulate(model):
            loss = model(input_ids=x, labels=x).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
    assert seen[-1] < seen[0]
    assert all(g["lr"] == pytest.approx(0.0, abs=1e-9) for g in optimizer.param_groups)
