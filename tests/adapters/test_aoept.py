"""Section 4 of the specification, check by check."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from subspan.adapters import (
    AOEPTConfig,
    AOEPTModel,
    PrototypeBank,
    coded_nm2i,
    gaussian_information,
    gaussian_nm2i,
    nm2i,
)
from subspan.adapters.aoept.inputs import embedded
from subspan.adapters.aoept.passes import run
from subspan.adapters.aoept.prompts import attend, consistency_terms, instantiate, masked_mean, mixed
from subspan.adapters.aoept.sources import ContextualPrompts
from tests.adapters.aoept_models import (
    KINDS,
    absent,
    arrays,
    bank_for,
    batch_for,
    captions,
    clip,
    generator,
    model_for,
    towers,
    vilt,
)

MISSING = absent((1, 0), (0, 1), (0, 0), (1, 0))
double = {"dtype": torch.float64}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), **double)


# ------------------------------------------------------------------------------------------ 1, 2 no leakage


@pytest.mark.parametrize("options", [{}, {"shared_len": 2, "insert": "missing_only"}, {"mcp": "reconstruct"}])
@pytest.mark.parametrize("kind", KINDS)
def test_t1_whatever_a_missing_modality_holds_changes_no_bit(kind, options):
    backbone = KINDS[kind]()
    model = model_for(backbone, **options)
    batch, other = (batch_for(backbone, 4, seed=s) for s in (0, 1))
    if kind == "vilt":
        batch["token_type_ids"], other["token_type_ids"] = (torch.full((4, 9), kind) for kind in (0, 1))
    with torch.no_grad():
        before = model(**batch, missing=MISSING).logits
        for column, modality in enumerate(backbone.modalities):
            for name in backbone.input_names(modality):
                if name in batch:
                    rows = MISSING[:, column]
                    batch[name][rows] = other[name][rows]
                    if batch[name].is_floating_point():
                        batch[name][rows] = math.nan
        assert torch.equal(model(**batch, missing=MISSING).logits, before)
        batch = batch_for(backbone, 4, seed=1)  # and of those that are there every bit counts
        assert not torch.isclose(model(**batch, missing=MISSING).logits, before).all(1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_t2_a_sample_alone_and_in_a_batch_has_the_same_logits(kind):
    backbone = KINDS[kind]()
    model, batch = model_for(backbone, shared_len=2), batch_for(backbone, 4)
    with torch.no_grad():
        together = model(**batch, missing=MISSING).logits
        for row in range(4):
            one = {name: x[row : row + 1] for name, x in batch.items()}
            if "attention_mask" in one and not MISSING[row, 0]:  # without its padding, too
                length = int(one["attention_mask"].sum())
                one |= {name: one[name][:, :length] for name in ("input_ids", "attention_mask")}
            alone = model(**one, missing=MISSING[row : row + 1]).logits
            torch.testing.assert_close(alone, together[row : row + 1], atol=2e-6, rtol=1e-5)


# ------------------------------------------------------------------------------------------ 3 gates


@pytest.mark.parametrize("kind", KINDS)
def test_t3_gates_are_the_identity_without_a_visible_modality_and_shrink_otherwise(kind):
    backbone = KINDS[kind]()
    model = model_for(backbone)
    with torch.no_grad():
        base = model.prompts.build()[0]
        steps = model.trace(batch_for(backbone, 4), MISSING).steps
    assert len(steps) == 4
    for step in steps:
        prompt = base[step.modality][step.layer]
        lonely = MISSING[:, 1 - backbone.modalities.index(step.modality)]
        assert torch.equal(step.prompts[lonely], prompt.expand(int(lonely.sum()), -1, -1))
        gated = step.prompts[~lonely]
        assert (gated.abs() <= prompt.abs()).all()
        ratio = gated / prompt
        assert ((ratio > 0) & (ratio < 1)).all()
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5, atol=1e-6)  # one for all L tokens


def test_t3_instantiation_is_bitwise_the_prompt():
    prompt, gate = draw(4, 6), torch.rand(3, 6, **double, generator=generator())
    out = instantiate(prompt, gate, torch.tensor([True, False, True]))
    assert torch.equal(out[1], prompt)
    assert torch.equal(out[0], gate[0] * prompt)


# ------------------------------------------------------------------------------------------ 4, 5 the bank


@settings(max_examples=8, deadline=None)
@given(
    layers=st.integers(1, 3),
    length=st.integers(1, 4),
    k=st.integers(1, 7),
    heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_t4_t5_attention_over_the_bank(layers, length, k, heads, seed):
    queries, bank = draw(layers, length, 8, seed=seed), draw(layers, k, 8, seed=seed + 1)
    out = attend(queries, bank, bank, heads)
    permuted = bank[:, torch.randperm(k, generator=generator(seed))]
    torch.testing.assert_close(attend(queries, permuted, permuted, heads), out, atol=1e-12, rtol=0)
    doubled = torch.cat([bank, bank], 1)
    torch.testing.assert_close(attend(queries, doubled, doubled, heads), out, atol=1e-12, rtol=0)
    mean = bank.mean(1, keepdim=True).expand_as(queries)
    torch.testing.assert_close(attend(torch.zeros_like(queries), bank, bank, heads), mean, atol=1e-12, rtol=0)
    one = bank[:, :1]
    torch.testing.assert_close(attend(queries, one, one, heads), one.expand_as(queries), atol=1e-12, rtol=0)
    # Convexity by head: linear functionals stay within their range over the prototypes, norms below the largest.
    o, c = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (out, bank))
    assert (o.norm(dim=-1).amax(-1) <= c.norm(dim=-1).amax(-1) + 1e-12).all()
    w = draw(o.shape[-1], seed=seed + 2)
    assert ((o @ w).amax(-1) <= (c @ w).amax(-1) + 1e-12).all()
    assert ((o @ w).amin(-1) >= (c @ w).amin(-1) - 1e-12).all()


def test_t4_attention_is_what_the_formula_says():
    q, c = draw(1, 2, 4), draw(1, 3, 4, seed=1)
    expected = []
    for head in (slice(0, 2), slice(2, 4)):
        scores = q[0, :, head] @ c[0, :, head].T / math.sqrt(2)
        expected.append(scores.softmax(-1) @ c[0, :, head])
    torch.testing.assert_close(attend(q, c, c, 2)[0], torch.cat(expected, -1), atol=1e-12, rtol=0)


def test_the_prompt_is_the_norm_of_attention_plus_query():
    backbone = towers()
    prompts = model_for(backbone).prompts
    own, bank = prompts.own["text"], bank_for(backbone).centres["text"].double()
    expected = nn.functional.layer_norm(attend(own.queries, bank, bank, 2) + own.queries, (16,))
    torch.testing.assert_close(prompts.build()[0]["text"], expected, atol=1e-10, rtol=0)


# ------------------------------------------------------------------------------------------ 6 the loss


@settings(max_examples=12, deadline=None)
@given(count=st.integers(1, 6), seed=st.integers(0, 99), scale=st.floats(0.1, 100))
def test_t6_consistency_loss(count, seed, scale):
    u, z, present = draw(2, 6, 5, seed=seed), draw(2, 6, 5, seed=seed + 1), torch.arange(6) < count
    u.requires_grad_(), z.requires_grad_()
    scale = torch.tensor(scale, **double)
    terms = consistency_terms(u, z, present, scale)
    assert terms.isfinite().all()
    assert (terms >= 0).all()
    terms.sum().backward()
    assert z.grad is None
    assert u.grad.isfinite().all()
    if count < 2:
        assert not terms.any()
        assert not u.grad.any()
        return
    assert not u.grad[:, ~present].any()
    plain = nn.functional.normalize(u[:, :count], dim=-1) @ nn.functional.normalize(z[:, :count], dim=-1).mT * scale
    target = torch.arange(count).expand(2, -1)
    expected = nn.functional.cross_entropy(plain.mT, target, reduction="none").mean(1)
    torch.testing.assert_close(terms, expected, atol=1e-10, rtol=1e-10)


def test_t6_equal_vectors_give_log_of_the_count():
    same = torch.ones(1, 7, 5, **double)
    present = torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    assert float(consistency_terms(same, same, present, torch.tensor(100.0, **double))) == pytest.approx(
        math.log(5), abs=1e-10
    )


def test_t6_samples_of_one_class_are_no_negatives_when_asked():
    u = draw(1, 4, 5)
    labels, present = torch.tensor([0, 0, 1, 2]), torch.ones(4).bool()
    scale = torch.tensor(3.0, **double)
    same_class = torch.cat([u[:, :1], u[:, :1], u[:, 2:]], 1)  # two identical samples of class 0
    plain = consistency_terms(same_class, same_class, present, scale)
    kind = consistency_terms(same_class, same_class, present, scale, labels)
    distinct = consistency_terms(same_class, same_class, present, scale, torch.arange(4))
    torch.testing.assert_close(distinct, plain)
    log_p = (
        scale * nn.functional.normalize(same_class[0], dim=-1) @ nn.functional.normalize(same_class[0], dim=-1).T
    ).log_softmax(-1)
    by_hand = -((log_p[0, 0] + log_p[0, 1]) / 2 * 2 + log_p[2, 2] + log_p[3, 3]) / 4
    torch.testing.assert_close(kind[0], by_hand)
    one_lost = torch.tensor([True, False, True, True])  # no positive of the other sample of its class
    rest = consistency_terms(same_class[:, one_lost], same_class[:, one_lost], torch.ones(3).bool(), scale)
    torch.testing.assert_close(consistency_terms(same_class, same_class, one_lost, scale, labels), rest)


def test_the_loss_is_the_mean_over_modalities_and_layers_of_prompts_against_features_after_the_layer():
    model, batch = model_for(towers()).train(), arrays(4)
    with torch.no_grad():
        model.kappa.fill_(1.0)
        loss = model(**batch, missing=MISSING, labels=torch.arange(4) % 3).aux_loss
        terms = []
        for step in model.trace(batch, MISSING).steps:
            there = ~MISSING[:, model.backbone.modalities.index(step.modality)]
            u, z = (nn.functional.normalize(x[there], dim=1) for x in (step.prompts.mean(1), step.features_out))
            terms.append(nn.functional.cross_entropy(math.e * u @ z.T, torch.arange(int(there.sum()))))
    assert len(terms) == 4
    torch.testing.assert_close(loss, torch.stack(terms).mean(), atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------------------------ 7, 8 passes


def slot_outputs(backbone, modality, content, slots):
    h = torch.cat([slots, content], 1)
    return backbone.layer(modality, 0, h, backbone.attention(modality, h, None))[:, : slots.shape[1]]


def test_t7_prompts_never_see_content_in_a_causal_tower_and_do_in_others():
    adapter = clip()
    causal = towers(causal=True)
    with torch.no_grad():
        for backbone, modality, width, sees, dtype in (
            (adapter, "text", 16, False, torch.float32),
            (adapter, "image", 24, True, torch.float32),
            (causal, "text", 16, False, torch.float64),
            (towers(), "text", 16, True, torch.float64),
        ):
            slots, a, b = (draw(2, n, width, seed=s).to(dtype) for s, n in enumerate((3, 5, 5)))
            change = (
                (slot_outputs(backbone, modality, a, slots) - slot_outputs(backbone, modality, b, slots)).abs().max()
            )
            assert (change > 1e-3) if sees else (change < 1e-6)


@pytest.mark.parametrize("options", [{"depth": 0}, {"prompt_len": 0}])
@pytest.mark.parametrize("kind", KINDS)
def test_t8_without_prompts_it_is_the_frozen_backbone_and_a_head(kind, options):
    backbone = KINDS[kind]()
    model, batch = model_for(backbone, **options), batch_for(backbone, 4)
    none = torch.zeros(4, 2).bool()
    with torch.no_grad():
        streams = embedded(backbone, batch, none)
        content = run(backbone, streams, ~none).content
        if backbone.fused:
            pooled = backbone.pool("text", torch.cat(list(content.values()), 1), streams["text"])
        else:
            pooled = torch.cat([backbone.pool(m, content[m], streams[m]) for m in content], 1)
        assert torch.equal(model(**batch).logits, model.head(pooled))
    assert not model.kappa.requires_grad


def test_t8_depth_beyond_the_layers_is_refused():
    backbone = towers()
    with pytest.raises(ValueError, match="depth 4 exceeds the 3 layers of 'text'"):
        AOEPTModel(backbone, bank_for(backbone, 4), AOEPTConfig(depth=4, num_heads=2), num_labels=2)


@pytest.mark.parametrize("kind", ["towers", "clip", "vilt"])
def test_prompts_are_replaced_below_the_depth_and_carried_on_above_it(kind):
    """Layer by layer, by hand: layers 0 and 1 get fresh slots, layer 2 what layer 1 made of them."""
    backbone = KINDS[kind]()
    model, batch = model_for(backbone), batch_for(backbone, 2)
    with torch.no_grad():
        traced = model.trace(batch, None)
        steps = {(s.modality, s.layer): s for s in traced.steps}
        streams = embedded(backbone, batch, torch.zeros(2, 2).bool())
        groups = [backbone.modalities] if backbone.fused else [(m,) for m in backbone.modalities]
        pooled = []
        for names in groups:
            content = torch.cat([streams[m].h for m in names], 1)
            masks = [
                streams[m].h.new_ones(streams[m].h.shape[:2]).bool() if streams[m].mask is None else streams[m].mask
                for m in names
            ]
            at = int(backbone.fused)
            keep = torch.cat(masks, 1)
            keep = torch.cat([keep[:, :at], keep.new_ones(2, 4), keep[:, at:]], 1)
            for layer in range(3):
                if layer < 2:
                    slots = mixed([steps[m, layer].prompts for m in names], torch.ones(2, len(names)).bool())
                h = torch.cat([content[:, :at], slots, content[:, at:]], 1)
                h = backbone.layer(names[0], layer, h, backbone.attention(names[0], h, keep))
                content, slots = torch.cat([h[:, :at], h[:, at + 4 :]], 1), h[:, at : at + 4]
            pooled.append(backbone.pool(names[0], content, streams[names[0]]))
        torch.testing.assert_close(torch.cat(pooled, 1), traced.pooled, atol=1e-5, rtol=1e-4)


def test_the_first_modality_is_gated_by_inputs_and_the_next_by_what_it_has_become():
    model, batch = model_for(towers()), arrays(4)
    with torch.no_grad():
        steps = {(s.modality, s.layer): s for s in model.trace(batch, None).steps}
        streams = embedded(model.backbone, batch, torch.zeros(4, 2).bool())
    assert torch.equal(steps["text", 0].gated_by["image"], masked_mean(streams["image"].h, None))
    assert torch.equal(steps["text", 1].gated_by["image"], steps["image", 0].features_out)
    for layer in range(2):
        assert torch.equal(steps["image", layer].gated_by["text"], steps["text", layer].features_out)


# ------------------------------------------------------------------------------------------ 9, 10 NM2I


def test_t9_ungated_prompts_carry_exactly_nothing_and_gated_ones_no_more_than_what_is_visible():
    backbone = towers()
    shared = draw(300, 1, 3)
    batch = {"text": shared + 0.3 * draw(300, 5, 3, seed=1), "image": shared + 0.3 * draw(300, 5, 3, seed=2)}
    plain = nm2i(model_for(backbone, gate=False), [batch], modality="text")
    assert (plain.value, plain.by_layer["value"]) == (0.0, [0.0, 0.0])
    assert nm2i(model_for(backbone, gate=False), [batch], modality="text", estimator="gauss").value == 0.0
    for estimator in ("ami", "gauss"):
        gated = nm2i(model_for(backbone), [batch], modality="text", estimator=estimator)
        assert gated.samples == 300
        assert 0.1 < gated.value <= gated.ceiling + 0.1
        assert abs(gated.floor) < 0.05


def test_t9_layers_that_mix_content_into_the_slots_give_even_constant_prompts_information():
    backbone = vilt()
    model = model_for(backbone, gate=False)
    batch = captions(200)
    batch["input_ids"][:, 0] = torch.where(batch["pixel_values"].mean((1, 2, 3)) > 0, 5, 6)
    assert nm2i(model, [batch], modality="text", stage="insert").value == 0.0
    out = nm2i(model, [batch], modality="text", stage="output", estimator="gauss")
    assert out.value > 0.0
    assert out.floor < out.value


def test_the_truth_about_a_modality_of_a_single_stream_is_read_from_it_alone():
    from subspan.adapters.aoept.nm2i import _layers

    model, batch, other = model_for(vilt()), captions(5), captions(5, seed=1)
    with torch.no_grad():
        first, second = (
            _layers(model, b, "text", "insert")[2] for b in (batch, batch | {"pixel_values": other["pixel_values"]})
        )
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def correlated(rho, n=20_000, seed=0):
    rng = np.random.default_rng(seed)
    x, e = rng.standard_normal((2, n, len(rho)))
    return x, np.array(rho) * x + np.sqrt(1 - np.square(rho)) * e


def test_t10_gaussian_information_is_calibrated_and_invariant():
    assert gaussian_information(*correlated([0.6])) == pytest.approx(0.22314, abs=0.02)
    x, y = correlated([0.8, 0.3])
    assert gaussian_information(x, y) == pytest.approx(0.55798, abs=0.02)
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 2, 2))
    order = rng.permutation(len(x))
    assert gaussian_information(x @ a + 3, y @ b) == pytest.approx(gaussian_information(x, y), abs=1e-8)
    assert gaussian_information(x[order], y[order]) == pytest.approx(gaussian_information(x, y), abs=1e-8)
    assert gaussian_nm2i(x @ a, y @ b) == pytest.approx(gaussian_nm2i(x, y), abs=1e-8)
    assert gaussian_nm2i(x, y) == pytest.approx(1 - math.exp(-0.55798), abs=0.02)
    assert gaussian_nm2i(x, x) > 0.999
    assert gaussian_nm2i(x, np.zeros_like(x)) == 0.0
    assert gaussian_nm2i(x, correlated([0.0, 0.0], seed=5)[1]) <= 0.02


def test_t10_codes_are_calibrated_and_invariant():
    x, y = correlated([0.9, 0.9], n=1500)
    assert coded_nm2i(x, x) == pytest.approx(1.0)
    assert abs(coded_nm2i(x, correlated([0.0, 0.0], 1500, seed=7)[1])) <= 0.02
    assert coded_nm2i(x, np.full_like(x, 0.1) + 1e-8 * x) == 0.0
    assert coded_nm2i(x, y) > 0.15
    # Codes of permuted rows come from another run of K-means: the same up to its local minima.
    order = np.random.default_rng(0).permutation(1500)
    assert coded_nm2i(x[order], y[order]) == pytest.approx(coded_nm2i(x, y), abs=0.05)


# ------------------------------------------------------------------------------------------ 11 frozen parts


@pytest.mark.parametrize("kind", KINDS)
def test_t11_backbone_and_bank_stay_bitwise_and_everything_else_trains(kind):
    backbone = KINDS[kind]()
    model = model_for(backbone, shared_len=2, kv_bottleneck=True)
    trained = {id(p) for part in backbone.trained_modules() for p in part.parameters()}
    frozen = {n: p.clone() for n, p in backbone.named_parameters() if id(p) not in trained}
    bank = {n: b.clone() for n, b in model.named_buffers() if n.endswith("bank")}
    start = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
    assert len(bank) >= 2
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    model.train()
    missing = absent((0, 0), (0, 0), (0, 1), (1, 0), (0, 0), (0, 1))
    for _ in range(3):
        loss = model(**batch_for(backbone, 6), missing=missing, labels=torch.arange(6) % 3).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(torch.equal(dict(backbone.named_parameters())[n], p) for n, p in frozen.items())
    assert all(torch.equal(dict(model.named_buffers())[n], b) for n, b in bank.items())
    stuck = [n for n, p in model.named_parameters() if n in start and torch.equal(p, start[n])]
    assert not stuck


def test_t11_parameter_count_of_the_papers_setting():
    banks = {"text": torch.zeros(6, 1, 512), "image": torch.zeros(6, 1, 768)}
    prompts = ContextualPrompts(banks, AOEPTConfig(), fused=False)
    assert sum(p.numel() for p in prompts.parameters()) == 748_000


# ------------------------------------------------------------------------------------------ 12 symmetry


@pytest.mark.parametrize(
    "options", [{}, {"insert": "missing_only"}, {"mcp": "mlp"}, {"mcp": "reconstruct"}, {"gate": False}]
)
def test_t12_exchanging_the_modalities_exchanges_the_outputs(options):
    one = towers({"text": 16, "image": 16})
    other = copy.deepcopy(one)
    other.towers["text"], other.towers["image"] = one.towers["image"], one.towers["text"]
    bank = bank_for(one)
    swapped = PrototypeBank({"text": bank.centres["image"], "image": bank.centres["text"]})
    config = AOEPTConfig(prompt_len=4, depth=2, num_heads=2, reduction=4, order="parallel", **options)
    a = AOEPTModel(one, bank, config, num_labels=2, generator=generator()).double().eval()
    b = AOEPTModel(other, swapped, config, num_labels=2).double().eval()
    names = {"text": "image", "image": "text"}

    def exchanged(name):
        return ".".join(names.get(part, part) for part in name.split("."))

    b.prompts.load_state_dict({exchanged(n): x for n, x in a.prompts.state_dict().items()})
    batch = arrays(4)
    with torch.no_grad():
        first = a.trace(batch, MISSING).pooled
        second = b.trace({"text": batch["image"], "image": batch["text"]}, MISSING.flip(1)).pooled
        torch.testing.assert_close(first.unflatten(1, (2, 6)).flip(1).flatten(1), second, atol=1e-10, rtol=0)
        a.options = AOEPTConfig(
            prompt_len=4, depth=2, num_heads=2, reduction=4, **options
        )  # sequential is not symmetric
        if options.get("gate", True):
            assert not torch.allclose(a.trace(batch, MISSING).pooled, first)


# ------------------------------------------------------------------------------------------ 13 the bank


@pytest.mark.parametrize("kind", ["towers", "vilt"])
def test_t13_the_bank_depends_neither_on_labels_nor_on_the_order_of_samples(kind):
    backbone = KINDS[kind]()
    batch = batch_for(backbone, 12) | {"ids": torch.arange(12), "labels": torch.arange(12)}
    order = torch.randperm(12, generator=generator())
    shuffled = {name: x[order] for name, x in batch.items()} | {"labels": torch.zeros(12)}
    # One sample at a time: a matrix product may round a row differently at another place in its batch.
    one, two = ([{n: x[r : r + 1] for n, x in b.items()} for r in range(12)] for b in (batch, shuffled))
    first, second = (PrototypeBank.collect(backbone, loader, n_prototypes=4, depth=2) for loader in (one, two))
    for name in backbone.modalities:
        assert torch.equal(first.centres[name], second.centres[name])
        assert (first.sizes[name].diff(dim=1) <= 0).all()
        assert first.sizes[name].sum(1).tolist() == [12, 12]


def test_features_are_means_over_valid_tokens():
    h, mask = draw(3, 4, 2), absent((1, 1, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0))
    f = masked_mean(h, mask)
    torch.testing.assert_close(f, torch.stack([h[0, :2].mean(0), h[1].mean(0), torch.zeros(2, **double)]))
    assert masked_mean(h.bfloat16(), None).dtype == torch.float32


def test_rows_of_the_bank_are_the_frozen_backbones_features_of_samples_that_have_the_modality():
    adapter = clip()
    batch, missing = captions(4), MISSING
    bank = PrototypeBank.collect(adapter, [batch | {"missing": missing}], n_prototypes=2, depth=2)
    with torch.no_grad():
        table = adapter.clip.text_model(
            **{k: batch[k] for k in ("input_ids", "attention_mask")}, output_hidden_states=True
        )
        pictures = adapter.clip.vision_model(batch["pixel_values"], output_hidden_states=True)
    there = ~missing
    for layer in range(2):
        rows = masked_mean(table.hidden_states[layer], batch["attention_mask"].bool())[there[:, 0]]
        centres = bank.centres["text"][layer]
        torch.testing.assert_close(centres[centres[:, 0].argsort()], rows[rows[:, 0].argsort()], atol=1e-5, rtol=1e-5)
    rows = pictures.hidden_states[0].mean(1)[there[:, 1]]  # three rows in two clusters: the mean is kept
    weights = bank.sizes["image"][0][:, None] / 3
    torch.testing.assert_close((weights * bank.centres["image"][0]).sum(0), rows.mean(0), atol=1e-5, rtol=1e-4)


def test_a_single_stream_is_read_one_modality_at_a_time():
    backbone = vilt()
    batch, other = captions(6), captions(6, seed=1)
    mixed_up = batch | {"pixel_values": other["pixel_values"]}
    options = {"n_prototypes": 3, "depth": 2}
    first, second = (PrototypeBank.collect(backbone, [b], **options) for b in (batch, mixed_up))
    assert torch.equal(first.centres["text"], second.centres["text"])
    assert not torch.equal(first.centres["image"], second.centres["image"])
