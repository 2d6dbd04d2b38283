"""Each adapter without prompts is the original model; CLIP, ViLT, towers; three modalities; the Trainer."""

import copy
import json
import math
import subprocess
import sys
import warnings

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

from subspan.adapters import (
    AOEPTConfig,
    AOEPTModel,
    BackboneAdapter,
    PrototypeBank,
    TorchTowersAdapter,
    Tower,
    ViltAdapter,
    contrastive_pretrain,
    make_towers,
    nm2i,
)
from subspan.adapters.aoept.inputs import embedded
from subspan.adapters.aoept.passes import run
from subspan.adapters.aoept.prompts import attend
from tests.adapters.aoept_models import (
    EOS,
    KINDS,
    absent,
    arrays,
    bank_for,
    batch_for,
    captions,
    clip,
    generator,
    model_for,
    tower,
    towers,
    vilt,
)


@torch.no_grad()
def prompt_free(backbone, batch):
    """Pooled outputs of the backbone as AOEPT runs it."""
    none = torch.zeros(len(next(iter(batch.values()))), len(backbone.modalities)).bool()
    streams = embedded(backbone, batch, none)
    content = run(backbone, streams, ~none).content
    if backbone.fused:
        return {"text": backbone.pool("text", torch.cat(list(content.values()), 1), streams["text"])}
    return {name: backbone.pool(name, content[name], streams[name]) for name in content}


@torch.no_grad()
def originals(adapter, batch):
    text = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    return {
        "text": adapter.clip.get_text_features(**text).pooler_output,
        "image": adapter.clip.get_image_features(batch["pixel_values"]).pooler_output,
    }


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", [True, False])
def test_clip_without_prompts_is_clip(attention, mask):
    adapter, batch = clip(), captions(5)
    adapter.clip.set_attn_implementation(attention)
    if not mask:
        del batch["attention_mask"]
    assert_same(prompt_free(adapter, batch), originals(adapter, batch))


def test_clip_of_old_checkpoints_pools_the_highest_id():
    adapter, batch = clip(eos_token_id=2, bos_token_id=0), captions(5)
    assert (adapter.eos, adapter.blank_ids) == (EOS, (EOS - 1, EOS))
    assert_same(prompt_free(adapter, batch), originals(adapter, batch))


@pytest.mark.parametrize("large", [False, True])
def test_vilt_without_prompts_is_vilt(large):
    adapter, batch = vilt(), captions(4)
    if large:  # images of different sizes, padded
        batch["pixel_values"] = torch.randn(4, 3, 12, 16, generator=generator())
        batch["pixel_mask"] = torch.zeros(4, 12, 16, dtype=torch.int64)
        for row, (height, width) in enumerate([(12, 16), (8, 8), (8, 16), (12, 8)]):
            batch["pixel_mask"][row, :height, :width] = 1
    with torch.no_grad():
        expected = adapter.vilt(**batch).pooler_output
    assert_same(prompt_free(adapter, batch), {"text": expected})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_towers_without_prompts_are_their_encoders(pooling, causal):
    backbone = towers(pooling=pooling, causal=causal)
    batch = arrays(3) | {"text_mask": absent((1, 1, 1, 1, 1), (1, 1, 0, 0, 0), (1, 1, 1, 1, 0))}
    for name in backbone.modalities:
        part, mask = backbone.tower(name), batch.get(f"{name}_mask", torch.ones(3, 5).bool())
        with torch.no_grad():
            h = part.embed(batch[name])
            keep = torch.cat([torch.ones(3, 1).bool(), mask], 1)
            causal_mask = torch.ones(6, 6).bool().triu(1) if causal else None
            h = part.encoder(h, mask=causal_mask, src_key_padding_mask=~keep)
            place = {"first": torch.zeros(3).long(), "last": keep.sum(1) - 1}.get(pooling)
            if place is None:
                pooled = (h * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
            else:
                pooled = h[torch.arange(3), place]
            expected = part.project(pooled)
            torch.testing.assert_close(prompt_free(backbone, batch)[name], expected, atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(part(batch[name], batch.get(f"{name}_mask")), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_follow_the_protocol(kind):
    backbone = KINDS[kind]()
    assert isinstance(backbone, BackboneAdapter)
    assert backbone.modalities == ("text", "image")
    for name in backbone.modalities:
        assert (backbone.n_layers(name), backbone.pooled_width(name) > 0) == (3, True)


# ------------------------------------------------------------------------------------------ blank inputs


def test_blank_inputs_are_the_empty_text_and_a_black_image():
    adapter = clip()
    batch, missing = captions(3), torch.tensor([True, False, True])
    text = adapter.blank("text", batch, missing)
    assert text["input_ids"][0].tolist() == [EOS - 1, EOS, *[EOS] * 7]
    assert text["attention_mask"][0].tolist() == [True, True, *[False] * 7]
    assert torch.equal(text["input_ids"][1], batch["input_ids"][1])
    image = adapter.blank("image", batch, missing)["pixel_values"]
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    torch.testing.assert_close(image[0, :, 3, 4] * std + mean, torch.zeros(3), atol=1e-6, rtol=0)
    single = vilt().blank("image", batch, missing)
    assert (single["pixel_values"][0] == 1).all()
    assert torch.equal(single["pixel_values"][1], batch["pixel_values"][1])


@pytest.mark.parametrize("kind", ["clip", "vilt"])
def test_a_modality_that_all_samples_lack_need_not_be_given(kind):
    backbone = KINDS[kind]()
    model, batch = model_for(backbone), captions(3)
    with torch.no_grad():
        for column, gone in enumerate((("input_ids", "attention_mask"), ("pixel_values",))):
            kept = {name: x for name, x in batch.items() if name not in gone}
            missing = torch.zeros(3, 2).bool()
            missing[:, column] = True
            expected = model(**batch, missing=missing).logits
            torch.testing.assert_close(model(**kept).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="pixel_values is not given, but missing says that some samples have it"):
        model(**{n: batch[n] for n in ("input_ids", "attention_mask")}, missing=torch.zeros(3, 2).bool())


def test_towers_name_the_input_that_is_not_given():
    with pytest.raises(ValueError, match="'image' is not given"):
        model_for(towers())(text=arrays(2)["text"])


def test_stretched_positions_shift_the_text_only_when_asked():
    adapter, batch = clip(), captions(3)
    places = adapter.clip.text_model.embeddings.position_embedding.weight
    plain = adapter.embed("text", batch).h
    shifted = adapter.embed("text", batch, prefix=4).h
    stretched = nn.functional.interpolate(places[None, None], size=(16, 16), mode="bilinear")[0, 0]
    torch.testing.assert_close(shifted - plain, (stretched[4:13] - places[:9]).expand(3, -1, -1), atol=1e-6, rtol=0)
    outputs = [model_for(clip(), prompt_positions=how)(**batch).logits for how in ("none", "interpolate")]
    assert not torch.allclose(*outputs)
    with pytest.raises(ValueError, match="is CLIP's: use 'none'"):
        model_for(towers(), prompt_positions="interpolate")(**arrays(2))


# ------------------------------------------------------------------------------------------ three modalities


def test_three_modalities():
    names = ("text", "image", "audio")
    backbone = towers({"text": 16, "image": 24, "audio": 8}, features=3)
    batch, missing = arrays(5, names=names), absent((1, 0, 0), (0, 1, 1), (0, 0, 0), (1, 1, 0), (0, 0, 1))
    bank = PrototypeBank.collect(backbone, [batch | {"missing": missing}], n_prototypes=2, depth=2)
    config = AOEPTConfig(prompt_len=4, depth=2, num_heads=2, reduction=4)
    model = AOEPTModel(backbone, bank, config, num_labels=2, generator=generator()).double()
    gate = model.prompts.gates["text"][0]
    with torch.no_grad():
        steps = model.trace(batch, missing).steps
        step = next(s for s in steps if (s.modality, s.layer) == ("text", 0))
        mapped = {o: gate.visible.maps[o](step.gated_by[o]) for o in ("image", "audio")}
        for row, visible in enumerate((("image", "audio"), (), ("image", "audio"), ("audio",), ("image",))):
            if visible:
                hidden = torch.stack([mapped[o][row] for o in visible]).mean(0).relu()
                expected = gate.out(hidden).sigmoid() * model.prompts.build()[0]["text"][0]
            else:
                expected = model.prompts.build()[0]["text"][0]
            torch.testing.assert_close(step.prompts[row], expected, atol=1e-10, rtol=0)
    model.train()
    loss = model(**batch, missing=missing, labels=torch.tensor([0, 1, 0, 1, 0])).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert nm2i(model, [arrays(60, names=names)], modality="audio").samples == 60


def test_a_fused_sequence_takes_the_prompts_of_what_is_missing():
    backbone = vilt()
    model, batch = model_for(backbone), captions(3)
    missing = absent((1, 0), (0, 1), (0, 0))
    seen = {}

    def layer(name, index, h, attention, original=backbone.layer):
        seen[index] = h[:, 1:5].clone()
        return original(name, index, h, attention)

    backbone.layer = layer
    with torch.no_grad():
        steps = {(s.modality, s.layer): s.prompts for s in model.trace(batch, missing).steps}
    for index in range(2):
        text, image = steps["text", index], steps["image", index]
        torch.testing.assert_close(seen[index][0], text[0])
        torch.testing.assert_close(seen[index][1], image[1])
        torch.testing.assert_close(seen[index][2], (text[2] + image[2]) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_only_hides_the_prompts_from_samples_that_have_the_modality(kind):
    backbone = KINDS[kind]()
    batch, none = batch_for(backbone, 3), torch.zeros(3, 2).bool()
    with torch.no_grad():
        plain = model_for(backbone, depth=0).trace(batch, none).pooled
        shown = model_for(backbone).trace(batch, none).pooled
        hidden = model_for(backbone, insert="missing_only").trace(batch, none).pooled
        torch.testing.assert_close(hidden, plain, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(shown, plain, atol=1e-3)
        if backbone.fused:  # and shows them to those that lack one
            lost = absent((1, 0), (0, 1), (0, 0))
            some = model_for(backbone, insert="missing_only").trace(batch, lost).pooled
            every = model_for(backbone).trace(batch, lost).pooled
            torch.testing.assert_close(some[:2], every[:2], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(some[2], plain[2], atol=1e-5, rtol=1e-5)


def attended(attention, queries, keys, values):
    """One layer's prompts, by the formula."""
    out = attend(queries[None], keys[None], values[None], 2)[0] + queries
    return nn.functional.layer_norm(out, out.shape[-1:], attention.norm.weight, attention.norm.bias)


def test_shared_prompts_come_first_and_are_gated_by_all_that_is_visible():
    missing = absent((1, 0), (0, 0), (1, 1))
    with torch.no_grad():
        for kind in ("towers", "vilt"):
            backbone = KINDS[kind]()
            model = model_for(backbone, shared_len=3, on_all_missing="prior")
            shared, batch = model.prompts.shared, batch_for(backbone, 3)
            banks = {m: model.prompts.own[m].attention.bank for m in backbone.modalities}
            built, made = model.prompts.build()[1], model.prompts.bind()
            steps = {(s.modality, s.layer): s for s in model.trace(batch, missing).steps}
            for layer, name in ((0, "text"), (1, "image")):
                features = steps[name, layer].gated_by
                names = backbone.modalities if backbone.fused else (name,)
                tokens = made(names, layer, features, ~missing).tokens
                if backbone.fused:
                    bank, queries = torch.cat(list(banks.values()), 1)[layer], shared.queries[layer]
                    attention, gate, key = shared.attention["all"], shared.gates["all"][0], "all"
                    sources = [features["image"], (features["text"] + features["image"]) / 2]
                else:
                    other = next(m for m in backbone.modalities if m != name)
                    bank, queries = banks[name][layer], shared.maps[name][layer](shared.queries[layer])
                    attention, gate, key = shared.attention[name], shared.gates[name][layer], other
                    sources = [features[other]] * 2
                prompt = attended(attention, queries, bank, bank)
                torch.testing.assert_close(
                    built["all" if backbone.fused else name][layer], prompt, atol=1e-5, rtol=1e-5
                )
                for row, f in enumerate(sources):
                    if not backbone.fused and missing[row, backbone.modalities.index(key)]:
                        wanted = prompt
                    else:
                        wanted = gate.out(gate.visible.maps[key](f[row].to(prompt.dtype)).relu()).sigmoid() * prompt
                    torch.testing.assert_close(tokens[row, :3], wanted, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(tokens[2, :3], prompt, atol=1e-5, rtol=1e-5)


def test_bottlenecks_map_the_bank_to_keys_and_to_values():
    model = model_for(towers(), kv_bottleneck=True)
    own = model.prompts.own["text"]
    keys, values = ([maps[n](own.attention.bank[n]) for n in range(2)] for maps in own.attention.maps)
    with torch.no_grad():
        built = model.prompts.build()[0]["text"]
        for n in range(2):
            wanted = attended(own.attention, own.queries[n], keys[n], values[n])
            torch.testing.assert_close(built[n], wanted, atol=1e-8, rtol=1e-8)


def test_a_missing_image_is_the_same_beside_larger_ones():
    model, small, missing = model_for(vilt()), captions(2), absent((0, 1), (0, 0))
    large = small | {"pixel_values": torch.randn(2, 3, 12, 16, generator=generator())}
    with torch.no_grad():
        first, second = (model(**batch, missing=missing).logits[0] for batch in (small, large))
    torch.testing.assert_close(first, second, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("mcp", ["attention", "mlp", "init", "random", "reconstruct"])
@pytest.mark.parametrize("kind", ["towers", "vilt"])
def test_every_construction_gives_every_parameter_a_gradient(kind, mcp):
    backbone = KINDS[kind]()
    shared = {"shared_len": 3, "kv_bottleneck": True} if mcp == "attention" else {}
    model, batch = model_for(backbone, mcp=mcp, **shared).train(), batch_for(backbone, 4)
    for missing in (None, absent((1, 0), (1, 0), (1, 0), (1, 0))):  # also where a batch lacks a modality: for DDP
        model.zero_grad(set_to_none=True)
        out = model(**batch, missing=missing, labels=torch.arange(4) % 3)
        assert out.aux_loss.isfinite()
        out.loss.backward()
        assert not [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_pooled_banks_start_and_make_the_other_constructions():
    backbone = towers()
    bank = bank_for(backbone).centres["text"].double()  # 6 prototypes in 4 tokens
    pooled = torch.stack([bank[:, 0:2].mean(1), bank[:, 1:3].mean(1), bank[:, 3:5].mean(1), bank[:, 4:6].mean(1)], 1)
    torch.testing.assert_close(model_for(backbone, mcp="init").prompts.build()[0]["text"], pooled, atol=1e-6, rtol=0)
    mlp = model_for(backbone, mcp="mlp").prompts.own["text"]
    mapped = torch.stack([mlp.maps[n](bank[n]) for n in range(2)])
    torch.testing.assert_close(mlp()[:, 0], mapped[:, 0:2].mean(1), atol=1e-10, rtol=0)


def test_queries_from_the_bank_start_more_diverse():
    start = {how: model_for(towers(), query_init=how).prompt_diversity() for how in ("normal", "bank")}
    assert set(start["bank"]) == {"text", "image"}
    for name in ("text", "image"):
        for normal, bank in zip(start["normal"][name], start["bank"][name], strict=True):
            assert bank["cosine"] < normal["cosine"]
            assert bank["effective_rank"] > normal["effective_rank"]
    backbone = towers()
    queries = model_for(backbone, query_init="bank").prompts.own["text"].queries
    centres = bank_for(backbone).centres["text"].double()
    distance = torch.cdist(queries, centres - centres.mean(1, keepdim=True)).amin(-1)
    assert distance.max() < 1e-6


# ------------------------------------------------------------------------------------------ evaluation


def test_prompts_are_built_once_in_evaluation_and_again_when_a_parameter_changes(monkeypatch):
    from subspan.adapters.aoept import sources

    calls = []
    monkeypatch.setattr(sources, "attend", lambda *a, f=sources.attend: calls.append(1) or f(*a))
    model, batch = model_for(towers()), arrays(2)
    with torch.no_grad():
        model(**batch)
        assert len(calls) == 2
        first = model(**batch).logits
        assert len(calls) == 2
        model.prompts.own["text"].queries.add_(1.0)
        assert not torch.equal(model(**batch).logits, first)
        assert len(calls) == 4
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        model(**batch)
        assert len(calls) == 6
    model(**batch).logits.sum().backward()  # a graph needs prompts of its own
    assert model.prompts.own["text"].queries.grad is not None


def test_towers_learn_to_match_the_views_of_a_sample():
    g = generator()
    shared = torch.randn(200, 1, 4, generator=g)
    views = {name: shared + 0.1 * torch.randn(200, 5, 4, generator=g) for name in ("text", "image")}
    backbone = make_towers({"text": (5, 4), "image": (5, 4)}, width=16, layers=2, heads=2, generator=g)
    before = torch.get_rng_state()
    losses = contrastive_pretrain(backbone, views, steps=30, batch_size=64, generator=g)
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[-1] < 0.6 * losses[0]
    with torch.no_grad():
        unit = [nn.functional.normalize(backbone.tower(m)(views[m]), dim=-1) for m in views]
    assert (unit[0] @ unit[1].T).argmax(1).eq(torch.arange(200)).float().mean() > 0.3  # of chance 0.005
    with pytest.raises(ValueError, match="two complete samples"):
        contrastive_pretrain(backbone, {name: x[:1] for name, x in views.items()}, steps=1)


def test_towers_refuse_what_they_cannot_run():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.raises(ValueError, match="batch_first=True"):
        Tower(nn.Identity(), nn.TransformerEncoder(layer, 1))
    with pytest.raises((ValueError, TypeCheckError), match="pooling"):
        tower(8, pooling="max")
    with pytest.raises(ValueError, match="two towers"):
        TorchTowersAdapter({"text": tower(8)})
    poolerless = vilt().vilt
    poolerless.pooler = None
    with pytest.raises(ValueError, match="no pooler"):
        ViltAdapter(poolerless)


def test_weights_come_from_a_local_folder(tmp_path):
    adapter = clip()
    adapter.clip.save_pretrained(tmp_path)
    again = type(adapter).from_pretrained(tmp_path)
    batch = captions(2)
    assert_same(prompt_free(again.eval(), batch), originals(adapter, batch))


# ------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_backbones_and_autocast(dtype):
    batch, labels = captions(6), torch.arange(6) % 3
    exact = model_for(clip()).train()
    wanted = exact(**batch, labels=labels)
    half = clip().to(dtype)
    model = AOEPTModel(
        half,
        bank_for(half),
        AOEPTConfig(prompt_len=4, depth=2, num_heads=2, reduction=4),
        num_labels=3,
        generator=generator(),
    ).train()  # prompts and head stay in float32
    out = model(**{n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}, labels=labels)
    torch.testing.assert_close(out.aux_loss, wanted.aux_loss, atol=0.6, rtol=0.1)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.prompts.build()[0]["text"].dtype == torch.float32
    with torch.autocast("cpu", dtype):
        mixed = exact(**batch, labels=labels)
        torch.testing.assert_close(
            exact.prompts.build()[0]["text"], model.prompts.build()[0]["text"], atol=1e-5, rtol=0
        )
    assert mixed.loss.dtype == torch.float32
    torch.testing.assert_close(mixed.aux_loss, wanted.aux_loss, atol=0.6, rtol=0.1)


# ------------------------------------------------------------------------------------------ whole runs


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient(kind):
    backbone = KINDS[kind]()
    batch, labels, grads = batch_for(backbone, 4), torch.arange(4) % 3, []
    model = model_for(backbone).train()
    for on in (False, True):
        model.zero_grad()
        (model.gradient_checkpointing_enable if on else model.gradient_checkpointing_disable)()
        model(**batch, labels=labels).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], atol=1e-6, rtol=1e-4)


COMPILED = """
import json
import numpy as np
import torch
from subspan.adapters import AOEPTConfig
from tests.adapters.aoept_models import absent, arrays, model_for, towers

model, batch, missing = model_for(towers(layers=2), depth=1), arrays(4), absent((1, 0), (0, 1), (0, 0), (0, 0))
compiled = torch.compile(model, backend="eager")
with torch.no_grad():
    expected = model(**batch, missing=missing).logits
    torch.testing.assert_close(compiled(**batch, missing=missing).logits, expected, atol=1e-8, rtol=0)
model.train()
loss = compiled(**batch, missing=missing, labels=torch.arange(4) % 3).loss
loss.backward()
assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
json.dumps(AOEPTConfig(prompt_len=np.int64(3)).prompt_len)  # as a grid search of numpy's integers gives it
"""


@pytest.mark.slow
def test_compiled_it_computes_the_same():
    """In a process without the run-time type checker, which the compiler cannot trace."""
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


class Rows(torch.utils.data.Dataset):
    """Captions whose class both the text and the image tell, with a column ``missing``."""

    def __init__(self, count, seed):
        self.batch = captions(count, seed)
        self.labels = torch.arange(count) % 3
        self.batch["input_ids"][:, 0] = 10 + self.labels
        self.batch["pixel_values"] += 2.0 * (self.labels - 1)[:, None, None, None]
        self.missing = torch.zeros(count, 2).bool()
        self.missing[::3, 0] = True
        self.missing[1::3, 1] = True

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        row = {name: x[i] for name, x in self.batch.items()}
        return row | {"missing": self.missing[i], "labels": self.labels[i]}


def trainer_for(model, folder, **options):
    from transformers import Trainer, TrainingArguments

    from subspan.adapters import GateCallback

    args = TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=30, learning_rate=1e-2, report_to=[], disable_tqdm=True,
        logging_strategy="no", use_cpu=True, seed=0, **({"per_device_train_batch_size": 16} | options),
    )  # fmt: skip

    def accuracy(found):
        assert found.predictions.shape == (30, 3)  # logits alone
        return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}

    return Trainer(
        model,
        args,
        train_dataset=Rows(48, 0),
        eval_dataset=Rows(30, 1),
        compute_metrics=accuracy,
        callbacks=[GateCallback()],
    )


@pytest.mark.slow
def test_the_trainer_trains_evaluates_saves_and_resumes(tmp_path):
    def fresh():
        backbone = clip()
        loader = torch.utils.data.DataLoader(Rows(48, 0), batch_size=16)
        bank = PrototypeBank.collect(backbone, loader, n_prototypes=6, depth=2)
        config = AOEPTConfig(prompt_len=4, depth=2, num_heads=2, reduction=4)
        return AOEPTModel(backbone, bank, config, num_labels=3, generator=generator())

    options = {
        "num_train_epochs": 4,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "gradient_checkpointing": True,
    }
    whole = trainer_for(fresh(), tmp_path / "whole", **options)
    before = whole.evaluate()["eval_accuracy"]
    whole.train()
    assert whole.evaluate()["eval_accuracy"] > max(0.7, before)
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    assert (checkpoint / "model.safetensors").stat().st_size < 60_000  # no backbone in it: that is 100 kB
    resumed = trainer_for(fresh(), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=name)
    assert float(whole.model.kappa.detach()) != math.log(100)


@pytest.mark.slow
def test_the_trainer_accumulates_gradients_of_the_right_size(tmp_path):
    """One step on two batches of 8, or on one of 16, moves the head alike."""
    heads = []
    for options in ({"per_device_train_batch_size": 16}, {"gradient_accumulation_steps": 2}):
        model = model_for(clip(), alpha=0.0)
        options = {"per_device_train_batch_size": 8, "max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0} | options
        trainer_for(model, tmp_path, **options).train()
        heads.append(model.head.weight.detach())
    torch.testing.assert_close(*heads, atol=1e-6, rtol=1e-4)


def test_multi_label_data_uses_the_binary_loss_for_each_label():
    model, batch = model_for(towers(), problem_type="multi_label_classification", alpha=0.0), arrays(4)
    labels = torch.randint(2, (4, 3), generator=generator())
    out = model(**batch, labels=labels)
    expected = nn.functional.binary_cross_entropy_with_logits(out.logits, labels.double())
    torch.testing.assert_close(out.loss, expected)
    with pytest.raises((ValueError, TypeCheckError), match="problem_type"):
        model_for(towers(), problem_type="regression")


@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_the_loss_is_the_tasks_plus_alpha_times_consistency(alpha):
    model, batch, labels = model_for(towers(), alpha=alpha).train(), arrays(4), torch.arange(4) % 3
    out = model(**batch, labels=labels)
    task = nn.functional.cross_entropy(out.logits, labels)
    torch.testing.assert_close(out.loss, task + alpha * out.aux_loss)
    evaluated = model.eval()(**batch, labels=labels)
    assert evaluated.aux_loss is None
    assert set(evaluated) == {"logits", "loss"}
    torch.testing.assert_close(evaluated.loss, nn.functional.cross_entropy(evaluated.logits, labels))
    assert model(**batch).loss is None
    with pytest.raises(AttributeError):
        _ = out.hidden_states


def worker(rank, folder):
    """One of two processes; its batch lacks one modality altogether."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(model_for(towers(), shared_len=2).train())
    missing = torch.zeros(4, 2).bool()
    missing[:, rank] = True
    for step in range(2):
        model(**arrays(4, seed=10 * rank + step), missing=missing, labels=torch.arange(4) % 3).loss.backward()
    grads = {n: float(p.grad.double().square().sum()) for n, p in model.module.named_parameters() if p.requires_grad}
    (folder / f"{rank}.json").write_text(json.dumps(grads))
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_whose_batches_lack_a_modality_stay_in_step(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.multiprocessing.spawn(worker, (tmp_path,), nprocs=2)
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one == pytest.approx(two)
    assert len(one) > 20
