"""Fingerprint, update strength, forgetting and the mismatch table."""

import copy
import math

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn

from subspan.optim import StudyRow, describe, fingerprint, forgetting, mismatch_table, update_strength
from subspan.surgery import BaseShift, factor_pairs, shift_base, weight_matrix
from tests.optim.small import SIZES, llama


def test_t13_descriptions_of_known_matrices() -> None:
    d = describe(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    assert d["stable_rank"] == pytest.approx(1.555556, abs=1e-6)
    assert d["entropy"] == pytest.approx(0.755928, abs=1e-6)
    assert d["max_norm"] == d["spectral_norm"] == pytest.approx(3.0)
    assert d["peak"] == pytest.approx(3 * 3 / math.sqrt(14))
    rows = torch.linalg.qr(torch.randn(20, 6))[0].mT
    assert describe(rows)["stable_rank"] == pytest.approx(6.0, rel=1e-5)
    assert describe(rows)["entropy"] == pytest.approx(1.0, abs=1e-6)
    spike = torch.outer(torch.randn(5), torch.randn(7))
    assert describe(spike)["stable_rank"] == pytest.approx(1.0, rel=1e-5)
    assert describe(spike)["entropy"] == pytest.approx(0.0, abs=1e-5)


def test_descriptions_agree_with_an_svd_and_scale_as_they_should() -> None:
    x = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    s = torch.linalg.svdvals(x.double())
    d, scaled = describe(x), describe(1e-3 * x.bfloat16())
    assert d["stable_rank"] == pytest.approx(float(s.square().sum() / s.max() ** 2), rel=1e-6)
    assert d["spectral_norm"] == pytest.approx(float(s.max()), rel=1e-6)
    for key in ("stable_rank", "entropy", "peak"):
        assert scaled[key] == pytest.approx(d[key], rel=0.02)
    assert describe(torch.zeros(3, 4))["peak"] == 0.0


def test_fingerprint_has_a_row_for_each_role_with_means_over_layers() -> None:
    model = llama()
    rows = {row["group"]: row for row in fingerprint(model)}
    assert set(rows) == {"embed", "q", "k", "v", "o", "gate", "up", "down", "head"}
    assert rows["q"]["layers"] == 2
    expected = [describe(layer.self_attn.q_proj.weight.detach())["stable_rank"] for layer in model.model.layers]
    assert rows["q"]["stable_rank"] == pytest.approx(np.mean(expected))
    assert not any("position" in key for key in rows["q"])


def test_fingerprint_splits_packed_attention() -> None:
    words = dict(vocab_size=64, pad_token_id=0)
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    with torch.no_grad():
        gpt2.transformer.h[0].attn.c_attn.weight[:, 32:64] *= 100  # the keys
    rows = {row["group"]: row for row in fingerprint(gpt2)}
    assert set(rows) == {"embed", "q", "k", "v", "o", "up", "down"}  # the head is the embedding
    assert rows["k"]["max_norm"] > 10 * rows["q"]["max_norm"]
    assert rows["k"]["max_norm"] > 10 * rows["v"]["max_norm"]
    phi = tf.Phi3ForCausalLM(tf.Phi3Config(**SIZES, **words, num_key_value_heads=2))
    with torch.no_grad():
        phi.model.layers[0].self_attn.qkv_proj.weight[32:48] *= 100
    rows = {row["group"]: row for row in fingerprint(phi)}
    assert rows["k"]["max_norm"] > 10 * max(rows["q"]["max_norm"], rows["v"]["max_norm"])
    neox = tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES, vocab_size=64))
    with torch.no_grad():
        neox.gpt_neox.layers[0].attention.query_key_value.weight.view(4, 3, 8, 32)[:, 1] *= 100
    rows = {row["group"]: row for row in fingerprint(neox)}
    assert rows["k"]["max_norm"] > 10 * max(rows["q"]["max_norm"], rows["v"]["max_norm"])


@pytest.mark.parametrize("multi_query", [True, False])
def test_fingerprint_of_falcon_splits_where_the_layout_is_known(multi_query: bool) -> None:
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    model = tf.FalconForCausalLM(tf.FalconConfig(**sizes, multi_query=multi_query))
    assert {"q", "k", "v"} <= {row["group"] for row in fingerprint(model)}
    grouped = tf.FalconForCausalLM(tf.FalconConfig(**sizes, num_kv_heads=2, new_decoder_architecture=True))
    assert "qkv" in {row["group"] for row in fingerprint(grouped)}


def test_fingerprint_reads_the_base_under_an_adapter_and_takes_own_groups() -> None:
    plain = fingerprint(llama())
    adapted = fingerprint(
        get_peft_model(llama(), LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"]))
    )
    assert adapted == plain
    own = fingerprint(llama(), groups=lambda name, module: "attention" if "self_attn" in name else None)
    assert [(row["group"], row["layers"]) for row in own] == [("attention", 8)]


def test_fingerprint_positions_need_a_reference_pair() -> None:
    adam, muon = llama(0), llama(1)
    with torch.no_grad():
        for layer in muon.model.layers:
            layer.mlp.up_proj.weight.copy_(torch.linalg.qr(torch.randn(48, 32))[0])
    for model, position in ((adam, 0.0), (muon, 1.0)):
        rows = {row["group"]: row for row in fingerprint(model, reference=(adam, muon))}
        assert rows["up"]["stable_rank_position"] == pytest.approx(position)
        assert "spectral_norm_position" not in rows["up"]
        assert "max_norm_position" not in rows["up"]


def trained_adapter(**options: object) -> nn.Module:
    model = get_peft_model(llama(), LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj"], **options))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for pair in factor_pairs(model):
            pair.param_A.copy_(0.1 * torch.randn(pair.param_A.shape, generator=g))
    return model


def test_update_strength_of_an_adapter_matches_the_dense_update() -> None:
    model = trained_adapter()
    rows = {row["layer"]: row for row in update_strength(model)}
    assert len(rows) == 4
    for pair in factor_pairs(model):
        row = rows[pair.name]
        w0 = weight_matrix(pair.layer).double()
        update = pair.scaling * (pair.A.double() @ pair.B.double().mT)
        assert pair.scaling == 2.0
        w = w0 + update
        assert row["cosd"] == pytest.approx(1 - float((w * w0).sum() / (w.norm() * w0.norm())), rel=1e-4)
        assert row["frobenius"] == pytest.approx(float(update.norm() / w0.norm()), rel=1e-5)
        two = lambda x: float(torch.linalg.matrix_norm(x, 2))  # noqa: E731
        assert row["spectral"] == pytest.approx(two(update) / two(w0), rel=1e-5)
        assert row["stable_rank"] == pytest.approx(row["BA_stable_rank"], rel=1e-4)
        assert row["A_stable_rank"] == pytest.approx(describe(pair.param_B.detach())["stable_rank"], rel=1e-4)
        assert row["B_entropy"] == pytest.approx(describe(pair.param_A.detach())["entropy"], rel=1e-4)
        # Relative to the r directions it could have, not to all of min(m, n).
        assert row["BA_entropy"] == pytest.approx(row["entropy"] * math.log(min(w.shape)) / math.log(3), rel=1e-4)


def test_update_strength_against_a_base_model_agrees_with_the_merged_model() -> None:
    model, base = trained_adapter(), llama()
    from_adapter = {row["layer"]: row for row in update_strength(model, base)}
    merged = {row["layer"]: row for row in update_strength(trained_adapter().merge_and_unload(), base)}
    assert set(from_adapter) == set(merged)
    for name, row in merged.items():
        for key in ("cosd", "frobenius", "spectral"):
            assert row[key] == pytest.approx(from_adapter[name][key], rel=1e-3, abs=1e-9)
    assert merged["lm_head"]["cosd"] == merged["lm_head"]["frobenius"] == 0.0


def test_update_strength_sees_trained_copies_of_saved_modules() -> None:
    model = trained_adapter(modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2.0)
    rows = {row["layer"]: row for row in update_strength(model, llama())}
    assert rows["lm_head"]["frobenius"] == pytest.approx(1.0, rel=1e-5)


def test_tiny_updates_have_an_accurate_cosine_distance() -> None:
    model = trained_adapter()
    pair = factor_pairs(model)[0]
    with torch.no_grad():
        pair.param_A.mul_(1e-8)
    w0, update = weight_matrix(pair.layer).double(), 2.0 * (pair.A.double() @ pair.B.double().mT)
    # 1 - cos is half the squared sine here, which the part of the update orthogonal to W0 tells.
    sine = float((update - (update * w0).sum() / w0.norm() ** 2 * w0).norm() / w0.norm())
    row = next(row for row in update_strength(model) if row["layer"] == pair.name)
    assert 0 < row["cosd"] < 1e-15  # below the rounding of 1 - cos itself
    assert row["cosd"] == pytest.approx(sine**2 / 2, rel=1e-4)


def shifted_adapter(trained: float, **options: object) -> tuple[nn.Module, BaseShift]:
    """An adapter whose non-zero start was taken out of the base weights, then moved by ``trained``."""
    model = trained_adapter(**options)
    shift = shift_base(model, factor_pairs(model))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for pair in factor_pairs(model):
            for p in (pair.param_A, pair.param_B):
                p.add_(trained * torch.randn(p.shape, generator=g))
    return model, shift


@pytest.mark.parametrize("dora", [False, True])
def test_update_strength_with_a_shift_measures_from_the_true_base(dora: bool) -> None:
    model, shift = shifted_adapter(0.05, use_dora=dora)
    with_shift = {row["layer"]: row for row in update_strength(model, shift=shift)}
    with_base = {row["layer"]: row for row in update_strength(model, llama())}
    without = {row["layer"]: row for row in update_strength(model)}
    assert len(with_shift) == 4
    for name, row in with_shift.items():
        for key in ("cosd", "frobenius", "spectral", "stable_rank", "entropy"):
            assert row[key] == pytest.approx(with_base[name][key], rel=1e-4)
        assert abs(without[name]["frobenius"] / row["frobenius"] - 1) > 0.005  # DoRA keeps the rows' norms


def test_update_strength_of_an_untrained_shifted_start_is_zero_and_of_a_tiny_update_accurate() -> None:
    model, shift = shifted_adapter(0.0)
    assert all(row["frobenius"] == row["cosd"] == 0.0 for row in update_strength(model, shift=shift))
    assert all(row["frobenius"] > 0.01 for row in update_strength(model))  # what it assumes without the shift
    pair = factor_pairs(model)[0]
    start = shift.start[pair.name]
    with torch.no_grad():
        pair.param_A.mul_(1 + 1e-5)
    origin = weight_matrix(pair.layer).double() + 2.0 * (start.A.double() @ start.B.double().mT)
    update = 2.0 * (pair.A.double() @ pair.B.double().mT - start.A.double() @ start.B.double().mT)
    row = next(row for row in update_strength(model, shift=shift) if row["layer"] == pair.name)
    assert row["frobenius"] == pytest.approx(float(update.norm() / origin.norm()), rel=1e-5)


def test_update_strength_of_dora_includes_the_magnitudes() -> None:
    model = trained_adapter(use_dora=True)
    with torch.no_grad():
        for pair in factor_pairs(model):
            pair.layer.lora_magnitude_vector["default"].weight.mul_(1.5)
    rows = {row["layer"]: row for row in update_strength(model)}
    merged = {row["layer"]: row for row in update_strength(copy.deepcopy(model).merge_and_unload(), llama())}
    for name, row in rows.items():
        for key in ("cosd", "frobenius", "spectral", "stable_rank", "entropy"):
            assert row[key] == pytest.approx(merged[name][key], rel=1e-4)
    untrained = get_peft_model(llama(), LoraConfig(r=3, target_modules=["q_proj"], use_dora=True))
    assert all(row["frobenius"] < 1e-6 for row in update_strength(untrained))
    with torch.no_grad():
        for pair in factor_pairs(untrained):
            pair.layer.lora_magnitude_vector["default"].weight.mul_(2.0)
    assert all(row["frobenius"] == pytest.approx(1.0, rel=1e-5) for row in update_strength(untrained))


def test_update_strength_of_dora_on_conv1d_and_convolutions_matches_the_merged_weight() -> None:
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    conv = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 2))
    for base, targets, transposed in ((gpt2, ["c_attn"], True), (conv, ["0", "2"], False)):
        config = LoraConfig(r=2, target_modules=targets, use_dora=True, fan_in_fan_out=transposed)
        model = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for pair in factor_pairs(model):
                pair.param_A.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
                magnitude = pair.layer.lora_magnitude_vector["default"].weight
                magnitude.mul_(torch.linspace(0.5, 1.5, magnitude.numel()).view_as(magnitude))
        rows = {row["layer"]: row for row in update_strength(model)}
        merged = {row["layer"]: row for row in update_strength(model.merge_and_unload(), base)}
        for name, row in rows.items():
            for key in ("cosd", "frobenius", "spectral", "stable_rank", "entropy"):
                assert row[key] == pytest.approx(merged[name][key], rel=1e-4)


def test_update_strength_refusals() -> None:
    with pytest.raises(ValueError, match="needs base="):
        update_strength(llama())
    other = tf.LlamaForCausalLM(
        tf.LlamaConfig(**{**SIZES, "intermediate_size": 64}, num_key_value_heads=2, vocab_size=64)
    )
    with pytest.raises(ValueError, match=r"gate_proj is \(64, 32\) in the base model but \(48, 32\)"):
        update_strength(llama(), other)
    with pytest.raises(ValueError, match="another model"):
        update_strength(llama(), nn.Sequential(nn.Linear(2, 2)))
    model, shift = shifted_adapter(0.0)
    with pytest.raises(ValueError, match="base= or shift=, not both"):
        update_strength(model, llama(), shift=shift)
    start = next(iter(shift.start.values()))
    for name, message in (("block.fc", "no layer block.fc"), ("lm_head", r"\(64, 32\) in the model but")):
        foreign = BaseShift({name: start}, {name: 2.0}, shift.fingerprint)
        with pytest.raises(ValueError, match=message):
            update_strength(model, shift=foreign)


def test_forgetting_compares_with_the_base_or_the_switched_off_adapter() -> None:
    x = torch.arange(12)[None]

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": float(model(input_ids=x, labels=x).loss)}

    model, base = trained_adapter(), llama()
    with_base, without = forgetting(model, evaluate, base), forgetting(model, evaluate)
    assert with_base["loss"] == pytest.approx(without["loss"])
    assert without["loss"]["before"] == pytest.approx(evaluate(base)["loss"])
    assert without["loss"]["after"] == evaluate(model)["loss"] != without["loss"]["before"]
    assert without["loss"]["change"] == pytest.approx(without["loss"]["after"] - without["loss"]["before"])
    with pytest.raises(ValueError, match="needs base="):
        forgetting(base, evaluate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forgetting_with_a_shift_evaluates_the_true_base_and_restores_every_bit(dtype: torch.dtype) -> None:
    x = torch.arange(12)[None]

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": float(model(input_ids=x, labels=x).loss)}

    model, shift = shifted_adapter(0.05)
    model, base = model.to(dtype), llama().to(dtype)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = forgetting(model, evaluate, shift=shift)["loss"]
    close = 1e-6 if dtype == torch.float32 else 0.01
    assert found["before"] == pytest.approx(evaluate(base)["loss"], rel=close)
    assert found["after"] == evaluate(model)["loss"]
    assert abs(forgetting(model, evaluate)["loss"]["before"] - found["before"]) > 1e-3  # the shifted base
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())

    def failing(model: nn.Module) -> dict[str, float]:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        forgetting(model, failing, shift=shift)
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="base= or shift=, not both"):
        forgetting(model, evaluate, base, shift)
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        forgetting(model, evaluate, shift=shift)


# ------------------------------------------------------------------------------------------------------ mismatch table


def study_rows(effect: dict[tuple[str, str, str], float], seeds: int = 8, noise: float = 0.01) -> list[StudyRow]:
    """Scores that peak at lr 0.01 on a grid of three, with a seed effect shared by all runs of a seed."""
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(seeds):
        shared = rng.normal(0, 0.05)
        for (pretrain, mode, optimizer), mean in effect.items():
            for lr, loss in ((0.001, 0.1), (0.01, 0.0), (0.1, 0.2)):
                score = mean - loss + shared + rng.normal(0, noise)
                rows.append(StudyRow(pretrain, mode, optimizer, lr, seed, {"score": score, "validation": score}))
    return rows


EFFECT = {
    ("adamw", "full", "adamw"): 0.90,
    ("adamw", "full", "muon"): 0.84,
    ("adamw", "lora", "adamw"): 0.88,
    ("adamw", "lora", "muon"): 0.865,
    ("muon", "full", "adamw"): 0.85,
    ("muon", "full", "muon"): 0.86,
}


def test_mismatch_table_finds_gaps_and_their_reduction() -> None:
    table = mismatch_table(study_rows(EFFECT))
    assert {(c.pretrain, c.mode, c.optimizer): c.lr for c in table.best} == dict.fromkeys(EFFECT, 0.01)
    full, lora = table.gap["adamw", "full"], table.gap["adamw", "lora"]
    assert full.low < full.value < full.high
    # Pairing removes the seed effect of 0.05, so the intervals are narrow.
    assert full.value == pytest.approx(0.06, abs=0.012)
    assert full.high - full.low < 0.03
    assert table.gap["muon", "full"].value == pytest.approx(0.01, abs=0.012)
    assert table.reduction["adamw"].value == pytest.approx(1 - lora.value / full.value)
    assert table.reduction["adamw"].low < table.reduction["adamw"].value < table.reduction["adamw"].high
    assert "muon" not in table.reduction
    assert table.warnings == ()


def test_mismatch_table_does_not_reduce_a_gap_that_is_not_there() -> None:
    flat = {**EFFECT, ("adamw", "full", "muon"): 0.90}
    assert mismatch_table(study_rows(flat, noise=0.03)).reduction == {}


def test_mismatch_table_flags_the_edges_of_the_grid() -> None:
    rows = [row for row in study_rows(EFFECT) if (row.optimizer, row.lr) != ("muon", 0.1)]
    table = mismatch_table(rows)
    assert len(table.warnings) == sum(key[2] == "muon" for key in EFFECT)
    assert "full muon on the adamw-pretrained model is best at lr 0.01, the edge of its grid" in table.warnings


def test_mismatch_table_selects_on_validation_and_never_a_diverged_run() -> None:
    rows = []
    for lr, validation, score in ((0.1, math.nan, 2.0), (0.2, 0.5, 0.1), (0.3, 0.4, 0.9)):
        metrics = {"validation": validation, "score": score}
        rows += [StudyRow("adamw", "full", o, lr, 0, metrics) for o in ("adamw", "muon")]
    assert {c.lr for c in mismatch_table(rows).best} == {0.2}
    assert {c.mean for c in mismatch_table(rows).best} == {0.1}


def test_mismatch_table_of_losses_keeps_the_sign_of_the_gap() -> None:
    losses = [
        StudyRow(r.pretrain, r.mode, r.optimizer, r.lr, r.seed, {k: -v for k, v in r.metrics.items()})
        for r in study_rows(EFFECT)
    ]
    table, same = mismatch_table(losses, maximize=False), mismatch_table(study_rows(EFFECT))
    assert table.gap["adamw", "full"].value == pytest.approx(same.gap["adamw", "full"].value)


def test_mismatch_table_is_reproducible_and_refuses_incomplete_results() -> None:
    rows = study_rows(EFFECT)
    assert mismatch_table(rows, random_state=3) == mismatch_table(rows, random_state=3)
    with pytest.raises(ValueError, match="no results"):
        mismatch_table([])
    with pytest.raises(ValueError, match="has not exactly one run"):
        mismatch_table(rows[:-1])
    with pytest.raises(ValueError, match="has not exactly one run"):
        mismatch_table([*rows, rows[0]])
