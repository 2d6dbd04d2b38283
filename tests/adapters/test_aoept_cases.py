"""Section 9: what is refused, what keeps working and what is warned of; files; missing tables; the classifier."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

from subspan.adapters import (
    AOEPTConfig,
    AOEPTModel,
    MissingModalityClassifier,
    PrototypeBank,
    make_towers,
    missing_table,
    nm2i,
)
from subspan.adapters.aoept import bank as bank_module
from subspan.adapters.aoept import model as model_module
from subspan.adapters.aoept.bank import Rows, clusters
from subspan.adapters.aoept.prompts import MAX_LOG_SCALE, bounded_scale
from subspan.errors import BaseMismatch, DataError
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
    towers,
    vilt,
)

SMALL = AOEPTConfig(prompt_len=4, depth=2, num_heads=2, reduction=4)

# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("missing", [torch.zeros(4, 2), torch.zeros(4, 2).int(), [[True, False]] * 4])
def test_a_mask_that_is_not_boolean_is_refused(missing):
    with pytest.raises((TypeError, TypeCheckError), match=r"missing"):
        model_for(towers())(**arrays(4), missing=missing)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (3, 2), (4, 2, 1)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"missing must have shape \(4, 2\), a column for each of text, image"):
        model_for(towers())(**arrays(4), missing=torch.zeros(shape).bool())


def test_a_sample_without_any_modality_is_refused_or_gets_the_prior():
    missing, batch = absent((0, 0), (1, 1), (1, 0), (1, 1)), arrays(4)
    with pytest.raises(ValueError, match="samples b, d lack every modality"):
        model_for(towers())(**batch, missing=missing, ids=list("abcd"))
    for kind in KINDS:
        model = model_for(KINDS[kind](), on_all_missing="prior", shared_len=2)
        batch = batch_for(model.backbone, 4)
        out = model(**batch, missing=missing).logits
        assert out.isfinite().all()
        assert torch.allclose(out[1], out[3], atol=1e-6)
        steps = model.trace(batch, missing).steps
        assert all(torch.equal(s.prompts[1], model.prompts.build()[0][s.modality][s.layer]) for s in steps)
        assert model.train()(**batch, missing=missing, labels=torch.zeros(4).long()).loss.isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_modality_that_is_there_names_the_samples(kind):
    backbone = KINDS[kind]()
    batch = batch_for(backbone, 4)
    name = "image" if kind == "towers" else "pixel_values"
    batch[name][2].view(-1)[1] = math.nan
    with pytest.raises(ValueError, match=rf"{name} holds NaN or infinity in samples x7"):
        model_for(backbone)(**batch, ids=["x1", "x2", "x7", "x9"])
    with pytest.raises(ValueError, match=r"NaN or infinity in samples 22"):
        PrototypeBank.collect(backbone, [batch | {"ids": torch.tensor([20, 21, 22, 23])}], depth=2, n_prototypes=2)
    model_for(backbone)(**batch, missing=absent((0, 0), (0, 0), (0, 1), (0, 0)))


def test_an_input_of_another_name_is_not_passed_over():
    with pytest.raises(TypeError, match="unknown input 'text_msk'; this backbone takes text, text_mask, image"):
        model_for(towers())(**arrays(4), text_msk=torch.ones(4, 5).bool())
    with pytest.raises(ValueError, match="num_labels must be at least 1, got 0"):
        model_for(towers(), labels=0)


def test_heads_must_divide_every_width():
    with pytest.raises(ValueError, match="num_heads=16 does not divide 'image"):
        model_for(towers(), num_heads=16)


def test_banks_of_another_shape_are_refused():
    backbone = towers()
    for change, message in (
        (lambda c: c[:1], "cut it with bank.first_layers"),
        (lambda c: c[..., :-1], r"got \(2, 6, 15\)"),
        (lambda c: c.transpose(0, 1), "its first two axes are exchanged"),
    ):
        centres = {name: change(c) for name, c in bank_for(backbone).centres.items()}
        with pytest.raises(ValueError, match=message):
            AOEPTModel(backbone, PrototypeBank(centres), SMALL, num_labels=2)
    with pytest.raises(ValueError, match="the bank has no modality 'image'"):
        AOEPTModel(backbone, PrototypeBank({"text": bank_for(backbone).centres["text"]}), SMALL, num_labels=2)
    with pytest.raises(ValueError, match="give the one of PrototypeBank"):
        AOEPTModel(backbone, None, SMALL, num_labels=2)
    deep = bank_for(backbone, 3)
    assert deep.first_layers(2).depth == 2
    with pytest.raises(ValueError, match="the bank has 3 layers, not 4"):
        deep.first_layers(4)


def test_a_bank_of_other_weights_is_refused_but_training_the_head_is_no_change():
    backbone = clip()
    bank = PrototypeBank.collect(backbone, [captions(6)], n_prototypes=2, depth=2)
    with pytest.raises(BaseMismatch, match="other backbone weights"):
        AOEPTModel(clip(seed=1), bank, SMALL, num_labels=2)
    with torch.no_grad():
        backbone.clip.text_projection.weight.add_(1.0)
    AOEPTModel(backbone, bank, SMALL, num_labels=2)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": -1}, {"prompt_len": -1}, {"num_heads": 0}, {"reduction": 0}, {"alpha": -1.0}, {"alpha": math.inf},
        {"mcp": "mean"}, {"insert": "none"}, {"order": "random"}, {"prompt_positions": "learnt"},
        {"query_init": "zero"}, {"on_all_missing": "skip"}, {"shared_len": 2, "mcp": "init"},
        {"kv_bottleneck": True, "mcp": "random"},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises((ValueError, TypeCheckError), match=next(iter(options))):
        AOEPTConfig(**options)


def test_shared_prompts_need_prompts_of_their_own():
    with pytest.raises(ValueError, match="set prompt_len above 0"):
        model_for(towers(), prompt_len=0, shared_len=2)


class Split(torch.utils.data.Dataset):
    split = "validation"

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {name: x[i] for name, x in arrays(4).items()}


def test_collecting_from_an_evaluation_split_is_refused():
    backbone, loader = towers(), torch.utils.data.DataLoader(Split(), batch_size=4)
    options = {"n_prototypes": 2, "depth": 1}
    with pytest.raises(ValueError, match="must not see the split 'validation'"):
        PrototypeBank.collect(backbone, loader, **options)
    with pytest.raises(ValueError, match="must not see the split 'test'"):
        PrototypeBank.collect(backbone, [arrays(4)], split="test", **options)
    allowed = PrototypeBank.collect(backbone, loader, allow_eval_rows=True, **options)
    named = PrototypeBank.collect(backbone, loader, split="train[:50%]", **options)
    assert torch.equal(allowed.centres["text"], named.centres["text"])
    for depth in (0, 4):
        with pytest.raises(ValueError, match="depth must lie between 1 and the 3 layers"):
            PrototypeBank.collect(backbone, [arrays(4)], depth=depth)
    with pytest.raises(DataError, match="no batch"):
        PrototypeBank.collect(backbone, [], depth=1)
    with pytest.raises(ValueError, match="at least one of text"):
        PrototypeBank.collect(backbone, [{"labels": torch.zeros(3)}], depth=1)
    with pytest.raises(ValueError, match="4 samples has 2 ids"):
        PrototypeBank.collect(backbone, [arrays(4) | {"ids": [0, 1]}], depth=1)
    with pytest.raises(ValueError, match="disagree in the number of samples"):
        PrototypeBank.collect(backbone, [{"text": arrays(4)["text"], "image": arrays(3)["image"]}], depth=1)


def test_nm2i_says_what_it_needs():
    model, batch = model_for(towers()), arrays(30)
    with pytest.raises(ValueError, match="modality must be one of text, image"):
        nm2i(model, [batch], modality="audio")
    with pytest.raises((ValueError, TypeCheckError), match="estimator"):
        nm2i(model, [batch], modality="text", estimator="knn")
    with pytest.raises(ValueError, match="hides the modality itself"):
        nm2i(model, [batch | {"missing": absent(*[(1, 0)] * 30)}], modality="text")
    with pytest.raises(ValueError, match="no prompts"):
        nm2i(model_for(towers(), depth=0), [batch], modality="text")
    for few, estimator, least in (([], "ami", 20), ([arrays(19)], "ami", 20), ([arrays(19)], "gauss", 20)):
        with pytest.raises(ValueError, match=f"takes at least {least}"):  # a code for each would be "identical"
            nm2i(model, few, modality="text", estimator=estimator)
    assert not model.training
    nm2i(model.train(), [arrays(20), arrays(10, seed=1)], modality="text", n_clusters=3)
    assert model.training
    assert not model.backbone.training


# ------------------------------------------------------------------------------------------------ keeps working


def test_small_and_duplicate_data_make_smaller_banks_with_a_warning():
    backbone, batch = towers(), arrays(6)
    doubled = {name: torch.cat([x, x]) for name, x in batch.items()}
    with pytest.warns(UserWarning, match="'text' has 6 distinct rows"):
        bank = PrototypeBank.collect(backbone, [doubled], n_prototypes=10, depth=2)
    assert {tuple(c.shape[:2]) for c in bank.centres.values()} == {(2, 6)}
    assert bank.sizes["text"].unique().tolist() == [2]


def test_a_modality_that_training_never_shows_has_a_random_bank_and_a_warning():
    with pytest.warns(UserWarning, match="no training sample has 'image'"):
        bank = PrototypeBank.collect(
            towers(), [arrays(40) | {"missing": absent(*[(0, 1)] * 40)}], n_prototypes=30, depth=2
        )
    assert bank.centres["image"].shape == (2, 30, 24)
    assert 0.018 < float(bank.centres["image"].std()) < 0.022
    assert not bank.sizes["image"].any()


def test_banks_can_be_normalised_and_rescaled():
    options = {"n_prototypes": 8, "depth": 1}
    single = PrototypeBank.collect(towers(), [arrays(8)], normalize=True, **options).centres["text"]
    torch.testing.assert_close(single.norm(dim=-1), torch.ones(1, 8), atol=1e-5, rtol=0)
    scaled = PrototypeBank.collect(towers(), [arrays(8)], target_norm=3.0, **options).centres["text"]
    torch.testing.assert_close(scaled.norm(dim=-1), torch.full((1, 8), 3.0), atol=1e-5, rtol=0)


def test_clusters_are_the_largest_first_with_ties_by_the_first_channel(monkeypatch):
    rows = np.repeat(np.array([[5.0, 0], [1, 0], [3, 0], [2, 9]], dtype=np.float32), [2, 3, 2, 5], axis=0)
    centres, sizes = clusters(rows, 4, 0)
    assert sizes.tolist() == [5, 3, 2, 2]
    np.testing.assert_allclose(centres, [[2, 9], [1, 0], [3, 0], [5, 0]], atol=1e-6)
    monkeypatch.setattr(bank_module, "MANY_ROWS", 5)  # now through mini-batches
    assert clusters(rows, 4, 0)[1].sum() == 12


def test_large_collections_are_kept_in_half_precision(monkeypatch):
    monkeypatch.setattr(bank_module, "HALF_BEYOND", 100)
    rows = Rows()
    for start in range(0, 12, 4):
        rows.add(np.full((4, 2, 3), start + 0.1, dtype=np.float32), range(start, start + 4))
    assert {part.dtype for part in rows.parts} == {np.dtype(np.float16)}
    assert rows.bytes == 12 * 2 * 3 * 2
    assert [layer.shape for layer in rows.layers()] == [(12, 3)] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2])
def test_batches_of_one_and_batches_with_one_present_sample(kind, count):
    backbone = KINDS[kind]()
    model = model_for(backbone).train()
    missing = absent((0, 0), (1, 0))[:count]
    out = model(**batch_for(backbone, count), missing=missing, labels=torch.zeros(count).long())
    if count == 1:
        assert float(out.aux_loss.detach()) == 0.0
    else:  # two images: their terms alone make the mean
        assert float(out.aux_loss.detach()) > 0
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_empty_texts_padding_alone_and_texts_that_were_cut():
    adapter = clip()
    ids = torch.full((4, 6), 7)
    ids[0] = torch.tensor([EOS - 1, EOS, EOS, EOS, EOS, EOS])  # the empty text
    mask = absent((1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (1, 1, 1, 0, 0, 0)).long()
    batch = captions(4) | {"input_ids": ids, "attention_mask": mask}
    assert adapter.embed("text", batch).pool_at.tolist() == [1, 0, 5, 2]
    for kind in ("clip", "vilt"):
        for depth in (0, 2):
            model = model_for(KINDS[kind](), depth=depth).train()
            loss = model(**batch, labels=torch.tensor([0, 1, 2, 0])).loss
            loss.backward()
            assert loss.isfinite()
            assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_the_scale_is_bounded_and_can_come_back():
    kappa = torch.tensor(MAX_LOG_SCALE + 2, requires_grad=True)
    scale = bounded_scale(kappa)
    assert float(scale.detach()) == pytest.approx(100.0, rel=1e-5)
    scale.backward()
    assert float(kappa.grad) == pytest.approx(100.0, rel=1e-5)
    assert float(bounded_scale(torch.tensor(1.0))) == pytest.approx(math.e)


def test_a_scale_that_stays_at_its_bound_is_warned_of(monkeypatch):
    monkeypatch.setattr(model_module, "PATIENCE", 3)
    model, batch, labels = model_for(towers()).train(), arrays(3), torch.arange(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            model(**batch, labels=labels)  # at the bound, where it starts
    with torch.no_grad():
        model.kappa.add_(0.5)
    for _ in range(4):
        model(**batch, labels=labels)
    with pytest.warns(UserWarning, match="at its bound of 100 for 5 steps"):
        model(**batch, labels=labels)


def test_gates_stuck_open_or_shut_are_warned_of():
    model, batch, labels = model_for(towers()).train(), arrays(3), torch.arange(3)
    model(**batch, labels=labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        means = model.check_gates()
    assert all(0.3 < mean < 0.7 for layers in means.values() for mean in layers)
    with torch.no_grad():
        model.prompts.gates["text"][1].out.bias.fill_(-20.0)
        model.prompts.gates["image"][0].out.bias.fill_(20.0)
    model(**batch, labels=labels)
    with pytest.warns(UserWarning, match="the mean gate of") as caught:
        model.check_gates()
    assert [str(w.message).split(":")[1] for w in caught] == [" prompts are switched off", " the gate does nothing"]
    assert math.isnan(model.check_gates()["text"][0])  # nothing since


def test_gates_are_shared_by_layers_in_a_single_stream():
    assert len(model_for(vilt()).prompts.gates["text"]) == 1
    assert len(model_for(vilt(), gate_shared=False).prompts.gates["text"]) == 2
    assert len(model_for(towers()).prompts.gates["text"]) == 2


def test_the_start_follows_from_the_generator_and_leaves_the_global_stream_alone():
    before = torch.get_rng_state()
    a, b, c = (model_for(towers(), seed=s, query_init="bank").state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_holds_no_frozen_weights_and_loads_with_its_bank(tmp_path, kind):
    model = model_for(KINDS[kind](), shared_len=2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01) if p.requires_grad else None
        model.kappa.fill_(3.0)
    model.save(tmp_path)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert not set(frozen) & set(model.state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["options"]["shared_len"] == 2
    again = AOEPTModel.load(tmp_path, KINDS[kind](), bank_for(model.backbone)).to(next(model.parameters()).dtype)
    batch = batch_for(model.backbone, 3)
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, model(**batch).logits, atol=1e-5, rtol=1e-5)
    assert again.kappa.item() == 3.0
    with pytest.raises(BaseMismatch, match="another prototype bank"):
        AOEPTModel.load(tmp_path, KINDS[kind](), bank_for(model.backbone, seed=1))


def test_another_prompt_length_is_an_error_at_load_time():
    state = model_for(towers()).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for prompts\.own\.text\.queries"):
        model_for(towers(), prompt_len=5).load_state_dict(state, strict=False)


def test_a_folder_without_a_model_says_so(tmp_path):
    for content in (None, "{"):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(DataError, match="holds no saved model"):
            AOEPTModel.load(tmp_path, towers(), bank_for(towers()))


def test_banks_are_saved_and_read(tmp_path):
    bank = PrototypeBank.collect(towers(), [arrays(9)], n_prototypes=3, depth=2)
    bank.save(tmp_path / "bank.safetensors")
    again = PrototypeBank.load(tmp_path / "bank.safetensors")
    assert again.digest == bank.digest
    assert again.backbone == bank.backbone != ""
    assert list(again.centres) == ["text", "image"]
    assert all(torch.equal(again.sizes[name], bank.sizes[name]) for name in bank.sizes)
    other = {name: c.clone() for name, c in bank.centres.items()}
    other["image"][1, 2, 3] += 1e-6
    assert PrototypeBank(other).digest != bank.digest
    (tmp_path / "none.safetensors").write_bytes(b"no tensors")
    for name in ("none.safetensors", "nowhere.safetensors"):
        with pytest.raises(DataError, match="is no prototype bank"):
            PrototypeBank.load(tmp_path / name)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match="its axes are None"):
        PrototypeBank.load(tmp_path / "other.safetensors")


# ------------------------------------------------------------------------------------------------ missing tables


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 150),
    percent=st.integers(0, 100),
    kind=st.sampled_from(["text", "image", "both"]),
    seed=st.integers(0, 9),
)
def test_missing_tables_have_the_counts_they_promise(n, percent, kind, seed):
    ids = [f"row{i}" for i in range(n)]
    table = missing_table(ids, kind=kind, missing_rate=percent / 100, seed=seed)
    whole, each = n * percent // 100, n * percent // 200
    expected = {"text": (whole, 0), "image": (0, whole), "both": (each, each)}[kind]
    assert tuple(table.sum()) == expected
    assert not table.all(axis=1).any()
    shuffled = missing_table(ids[::-1], kind=kind, missing_rate=percent / 100, seed=seed)
    assert shuffled.loc[ids].equals(table)


def test_missing_tables_with_three_modalities_and_bad_arguments():
    table = missing_table(range(100), kind="both", missing_rate=0.9, seed=0, modalities=("a", "b", "c"))
    assert table.sum().tolist() == [30, 30, 30]
    assert table.sum(axis=1).max() == 1
    assert not table.equals(
        missing_table(range(100), kind="both", missing_rate=0.9, seed=1, modalities=("a", "b", "c"))
    )
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="missing_rate must lie in"):
            missing_table(range(5), kind="text", missing_rate=rate, seed=0)
    with pytest.raises(ValueError, match="kind must be one of text, image or both, got 'audio'"):
        missing_table(range(5), kind="audio", missing_rate=0.5, seed=0)
    with pytest.raises(ValueError, match="occurs twice"):
        missing_table([1, 2, 1], kind="text", missing_rate=0.5, seed=0)


# ------------------------------------------------------------------------------------------------ classifier


def two_views(n, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    means = np.random.default_rng(42).standard_normal((2, 3, 4, 2))
    views = [list(2 * means[v][y] + 0.7 * rng.standard_normal((n, 4, 2))) for v in range(2)]
    for row in range(n):
        lost = rng.integers(0, 3)
        if lost < 2:
            views[lost][row] = None
    return {"text": views[0], "image": views[1]}, y


FAST = {
    "width": 8, "layers": 2, "num_heads": 2, "pretrain_steps": 20, "epochs": 12, "n_prototypes": 8, "batch_size": 32,
    "random_state": 0,
}  # fmt: skip


@pytest.mark.slow
def test_the_classifier_learns_from_incomplete_samples_and_predicts_any():
    X, y = two_views(240)
    labels = np.array(["a", "b", "c"])[y]
    model = MissingModalityClassifier(**FAST | {"lr": 3e-2, "epochs": 16}).fit(X, labels)
    again = clone(model).fit(X, labels)
    test, truth = two_views(150, seed=1)
    proba = model.predict_proba(test)
    assert (model.predict(test) == np.array(["a", "b", "c"])[truth]).mean() > 0.8
    np.testing.assert_allclose(proba.sum(1), 1.0)
    np.testing.assert_array_equal(again.predict_proba(test), proba)
    one = {name: [entries[3]] for name, entries in test.items()}
    np.testing.assert_allclose(model.predict_proba(one), proba[3:4], atol=1e-12)
    texts = {"text": [x for x in test["text"] if x is not None], "image": None}
    texts["image"] = [None] * len(texts["text"])
    assert model.predict(texts).shape == (len(texts["text"]),)
    assert len(model.loss_curve_) == 16
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    with pytest.raises(ValueError, match="lack every modality"):
        model.predict({"text": [None], "image": [None]})
    prior = clone(model).set_params(on_all_missing="prior", epochs=1).fit(X, labels)
    assert prior.predict_proba({"text": [None], "image": [None]}).shape == (1, 3)


def test_towers_are_pretrained_on_complete_rows_alone(monkeypatch):
    from subspan.adapters.aoept import classifier

    X, y = two_views(40)
    complete = [row for row in range(40) if X["text"][row] is not None and X["image"][row] is not None]
    seen = []
    monkeypatch.setattr(classifier, "contrastive_pretrain", lambda backbone, arrays, **options: seen.append(arrays))
    MissingModalityClassifier(**FAST | {"epochs": 1}).fit(X, y)
    for name, x in seen[0].items():
        np.testing.assert_array_equal(x.numpy(), np.stack([X[name][row] for row in complete]).astype(np.float32))


def test_the_classifier_takes_towers_and_full_arrays():
    X, y = two_views(60)
    rng = np.random.default_rng(0)
    full = {name: rng.standard_normal((60, 4, 2)) for name in X}
    backbone = make_towers({"text": (4, 2), "image": (4, 2)}, width=8, layers=2, heads=2, generator=generator())
    fast = FAST | {"epochs": 1}
    model = MissingModalityClassifier(backbone=backbone, **fast).fit(full, y)
    assert model.model_.backbone is not backbone
    before, after = backbone.tower("text").project.weight, model.model_.backbone.tower("text").project.weight
    assert before.dtype == torch.float32
    assert not torch.equal(before, after.float())
    with pytest.raises(ValueError, match="the backbone has modalities text, image; X has a, b"):
        MissingModalityClassifier(backbone=backbone, **fast).fit({"a": full["text"], "b": full["image"]}, y)


def test_the_classifier_reads_columns_where_nan_is_a_cell_that_is_not_there():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 60)
    X = np.column_stack([(2 * y - 1) + 0.3 * rng.standard_normal(60) for _ in range(5)]).astype(np.float32)
    X[::3, 0:3:2] = np.nan
    X[1::3, 1:4:2] = np.nan
    columns = {"a": [0, 2], "b": [1, 3, 4]}
    model = MissingModalityClassifier(columns, **FAST | {"epochs": 8, "pretrain_steps": 0, "lr": 5e-2}).fit(X, y)
    assert model.score(X, y) > 0.9
    assert model._inputs(X, reset=False)[1].sum(0).tolist() == [20, 0]  # column 4 remains of b
    with pytest.raises(ValueError, match=r"has 4 features"):
        model.predict(X[:, :4])


def test_the_classifier_says_what_is_wrong():
    X, y = two_views(30)
    fast = FAST | {"epochs": 1, "pretrain_steps": 0}
    for change, message in (
        ({"text": X["text"]}, "needs two towers"),
        (X | {"image": [None] * 30}, "no sample has 'image'"),
        (X | {"image": [np.zeros(3) if x is not None else None for x in X["image"]]}, r"arrays \(tokens, features\)"),
        (X | {"image": X["image"][:-1]}, "inconsistent numbers of samples"),
    ):
        with pytest.raises(ValueError, match=message):
            MissingModalityClassifier(**fast).fit(change, y)
    first = next(row for row, x in enumerate(X["text"]) if x is not None)
    spoilt = X | {"text": [np.full((4, 2), np.nan) if row == first else x for row, x in enumerate(X["text"])]}
    with pytest.raises(ValueError, match=rf"'text' of sample {first} holds NaN or infinity: give None"):
        MissingModalityClassifier(**fast).fit(spoilt, y)
    later = [row for row, x in enumerate(X["text"]) if x is not None][1]
    bent = X | {"text": [x[:3] if row == later else x for row, x in enumerate(X["text"])]}
    with pytest.raises(ValueError, match=rf"'text' of sample {later} has shape \(3, 2\); the others \(4, 2\)"):
        MissingModalityClassifier(**fast).fit(bent, y)
    with pytest.raises(ValueError, match="two classes at least"):
        MissingModalityClassifier(**fast).fit(X, np.zeros(30))
    for option in ({"epochs": 0}, {"lr": -1.0}, {"pretrain_steps": -1}, {"depth": 3}, {"num_heads": 3}):
        with pytest.raises((ValueError, AssertionError), match=r"epochs|lr|pretrain_steps|depth|divi"):
            MissingModalityClassifier(**(fast | option)).fit(X, y)
    lonely = {n: [np.zeros((4, 2)) if (row + v) % 2 else None for row in range(30)] for v, n in enumerate(X)}
    with pytest.warns(UserWarning, match="fewer than two complete rows"):
        MissingModalityClassifier(**fast).fit(lonely, y)


@pytest.mark.slow
def test_check_estimator():
    """Of a plain matrix every check applies."""
    options = {
        "width": 8, "layers": 1, "depth": 1, "num_heads": 2, "prompt_len": 1, "pretrain_steps": 2, "n_prototypes": 2,
        "epochs": 10, "lr": 6e-2,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(MissingModalityClassifier(**options, random_state=0), on_skip=None)
