"""A model's conversion, its checkpoints, what is recorded while it trains, and the bits it is exported as."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from subspan.errors import TargetError
from subspan.resize import (
    BinaryConv1d,
    BinaryConv2d,
    BinaryLinear,
    PackedLinear,
    SurgeConfig,
    SurgeMonitor,
    binarize,
    clip_latent,
    export_binary,
    load_packed,
    load_twins,
    param_groups,
    save_packed,
    set_progress,
    strip_aux,
)
from subspan.resize.binary.packed import pack, sign_products, word_columns
from subspan.surgery import split_attention


def net(seed=0, **options):
    torch.manual_seed(seed)
    plain = nn.Sequential(
        nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 11), nn.BatchNorm1d(11), nn.Linear(11, 7), nn.Linear(7, 3)
    )
    return binarize(plain, SurgeConfig(**options))


def images(seed=0, **options):
    torch.manual_seed(seed)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6),
        nn.Conv2d(6, 4, (3, 2), stride=2, dilation=2, padding=(2, 1)), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip
    plain(torch.randn(2, 3, 9, 8))
    return binarize(plain, SurgeConfig(**options))


def used(model, *shape, steps=3):
    """After a few steps, so that batch normalisation has seen data and some scales are negative."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(*shape, generator=generator)).square().mean().backward()
        optimizer.step()
    return model.eval()


class TestConversion:
    def test_names_and_parameters_stay_and_the_ends_are_spared(self):
        plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Conv1d(2, 2, 3), nn.Linear(6, 2))
        before = dict(plain.named_parameters())
        model = binarize(plain)
        assert [type(m) for m in model] == [nn.Linear, nn.ReLU, BinaryLinear, BinaryConv1d, nn.Linear]
        after = dict(model.named_parameters())
        assert all(after[name] is p for name, p in before.items())
        assert after.keys() - before.keys() == {"2.weight_aux", "3.weight_aux"}
        assert torch.equal(after["2.weight_aux"], after["2.weight"])

    def test_targets_and_names_to_skip(self):
        plain = nn.ModuleDict({k: nn.Linear(4, 4) for k in ("query", "key", "out")})
        model = binarize(plain, target_modules=["query", "key", "out"], skip=["key"])
        assert [type(m) for m in model.values()] == [BinaryLinear, nn.Linear, BinaryLinear]
        inner = nn.ModuleDict({"attention": nn.ModuleDict({k: nn.Linear(4, 4) for k in ("query", "key")})})
        binarize(inner, target_modules=["query", "key"], skip=["query"])  # name endings here too
        assert [type(m) for m in inner["attention"].values()] == [nn.Linear, BinaryLinear]

    def test_transformers_conv1d_becomes_a_linear_layer(self):
        from transformers.pytorch_utils import Conv1D

        layer = Conv1D(5, 3).requires_grad_(False)  # 3 in, 5 out, stored in x out
        model = binarize(nn.ModuleDict({"c_fc": layer}), skip=())
        assert (model["c_fc"].in_features, model["c_fc"].out_features) == (3, 5)
        assert torch.equal(model["c_fc"].weight, layer.weight.mT)
        assert not model["c_fc"].weight.requires_grad

    def test_a_layer_in_two_places_stays_one(self):
        shared = nn.Linear(4, 4)
        model = binarize(nn.Sequential(nn.Linear(4, 4), shared, shared, nn.Linear(4, 4)))
        assert isinstance(model[1], BinaryLinear)
        assert model[1] is model[2]
        model = binarize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), shared, shared))  # the last one, too
        assert [type(m) for m in model] == [nn.Linear, BinaryLinear, nn.Linear, nn.Linear]

    def test_torch_s_encoder_layer_really_runs_binary_in_evaluation(self, tmp_path):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
        plain = copy.deepcopy(encoder)
        binarize(encoder, target_modules=["linear1", "linear2"], skip=())
        x = torch.randn(2, 3, 8)
        with torch.no_grad():
            out = encoder(x)
            assert not torch.allclose(out, plain(x))
            masked = torch.tensor([[False, False, True], [False, False, False]])
            hidden = encoder(x, src_key_padding_mask=masked)  # would be a nested tensor on the fast path
        torch.testing.assert_close(out, encoder(x))  # with gradients there is no fast path
        torch.testing.assert_close(hidden, encoder(x, src_key_padding_mask=masked))
        save_packed(export_binary(encoder), tmp_path / "bits")
        with torch.no_grad():
            torch.testing.assert_close(load_packed(plain, tmp_path / "bits").eval()(x), out)

    def test_split_attention_s_projections_become_binary(self):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
        split_attention(encoder)
        x = torch.randn(2, 3, 8)
        before = encoder(x)
        binarize(encoder, target_modules=["q_proj", "out_proj"], skip=())
        attention = encoder.layers[0].self_attn
        assert [type(m) for m in (attention.q_proj, attention.k_proj, attention.out_proj)] == [
            BinaryLinear, nn.Linear, BinaryLinear,
        ]  # fmt: skip
        assert not torch.allclose(encoder(x), before)

    def test_random_twins_repeat_with_their_seed(self):
        def twin(seed):
            return binarize(copy.deepcopy(plain), SurgeConfig(aux_init="random"), random_state=seed)[1].weight_aux

        plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        assert torch.equal(twin(0), twin(0))
        assert not torch.equal(twin(0), twin(1))
        assert twin(0).abs().max() <= 0.5  # 1 / sqrt(4), as torch starts a linear layer

    def test_what_cannot_be_converted(self):
        with pytest.raises(TargetError, match=r"did you mean query"):
            binarize(nn.ModuleDict({"query": nn.Linear(4, 4)}), target_modules=["quary"])
        with pytest.raises(TargetError, match="all 2 layers that match are skipped"):
            binarize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        with pytest.raises(TargetError, match="head match no layer"):
            binarize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), skip=["head"])
        with pytest.raises(TargetError, match="block match no layer"):
            binarize(nn.ModuleDict({"block": nn.Sequential(nn.Linear(4, 4)), "head": nn.Linear(4, 4)}), skip=["block"])
        with pytest.raises(TargetError, match="holds no linear or convolutional layer in whose place"):
            binarize(nn.Linear(4, 4), skip=())  # nothing holds it, in which another could take its place
        with pytest.raises(TypeError, match="lists of names, got None and 'first'"):
            binarize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), skip="first")
        with pytest.raises(ValueError, match="the weight of 0 is computed from others"):
            binarize(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), skip=())
        with pytest.raises(ValueError, match="1 is binary already"):
            binarize(binarize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))))
        with pytest.raises(ValueError, match=r"reads the weight of self_attn\.out_proj past its forward"):
            binarize(nn.TransformerEncoderLayer(8, 2, 16), target_modules=["out_proj"], skip=())


class TestCheckpoints:
    def test_a_run_that_is_resumed_goes_on_bit_by_bit(self):
        def run(model, optimizer, steps):
            for step in steps:
                x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                clip_latent(model, 0.05)

        def start():
            model = net(ema=0.9)
            return model, torch.optim.Adam(param_groups(model, 1e-2))

        whole, optimizer = start()
        run(whole, optimizer, range(6))
        first, optimizer = start()
        run(first, optimizer, range(3))
        state, moments = copy.deepcopy(first.state_dict()), copy.deepcopy(optimizer.state_dict())
        again, optimizer = start()
        again.load_state_dict(state)
        optimizer.load_state_dict(moments)
        run(again, optimizer, range(3, 6))
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True)
        )
        assert whole[2].weight.abs().max() <= 0.05

    def test_a_stripped_checkpoint_is_the_plain_network_s_and_loads_again(self):
        model = used(net(ema=0.9), 8, 5)
        stripped = strip_aux(model.state_dict())
        assert stripped.keys() == net(mode="ste").state_dict().keys()
        other = net(seed=1, ema=0.9)
        other.load_state_dict(stripped)
        assert torch.equal(other[2].weight_aux, model[2].weight)  # started anew as a copy
        net(mode="ste").load_state_dict(stripped)
        trained = copy.deepcopy(model[2].weight_aux)
        model.load_state_dict({"0.weight": model[0].weight}, strict=False)  # nothing of that layer
        assert torch.equal(model[2].weight_aux, trained)
        with pytest.raises(RuntimeError, match=r"2\.weight"):
            other.load_state_dict({k: v for k, v in stripped.items() if k != "2.weight"})

    def test_twins_from_a_full_precision_checkpoint(self):
        torch.manual_seed(3)
        full = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        model = binarize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
        load_twins(model, full.state_dict())
        assert torch.equal(model[1].weight_aux, full[1].weight)
        with pytest.raises(ValueError, match=r"1\.weight should be \(4, 4\) in the checkpoint, it is none"):
            load_twins(model, {})
        with pytest.raises(ValueError, match="its mode is ste"):
            load_twins(net(mode="ste"), {})
        with pytest.raises(ValueError, match="share is True"):
            load_twins(net(share=True), {})

    def test_evaluation_leaves_the_twin_alone(self):
        model = net(ema=0.9)
        before = copy.deepcopy(model.state_dict())
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 5))
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class TestMonitor:
    def test_it_reads_what_the_gradient_was_made_of(self):
        layer = BinaryLinear(6, 4, config=SurgeConfig(eta=0.5))
        monitor = SurgeMonitor(layer)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
        for _ in range(2):  # read as means
            layer(x).square().sum().backward()
        with torch.no_grad():
            layer.weight[0] = -layer.weight[0]
        (figures,) = monitor.read().values()
        assert figures["scale"] == pytest.approx(0.5 * figures["straight"] / figures["twin"], rel=1e-5)
        assert figures["saturated"] == pytest.approx((x.abs() > 1).float().mean().item())
        assert figures["flipped"] == 0.25
        assert 0 < figures["cosine"] <= 1
        assert monitor.read() == {}
        copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
        copied(x).sum().backward()  # is not watched
        assert monitor.read() == {}
        (1e-20 * layer(x).square().sum()).backward()  # a gradient that vanishes has an angle too
        assert monitor.read()[""]["cosine"] > 0.1
        monitor.close()
        layer(x).sum().backward()
        assert monitor.read() == {}

    def test_each_layer_has_its_own_figures_since_the_last_reading(self):
        model = nn.Sequential(BinaryLinear(6, 4), nn.Linear(4, 4), BinaryLinear(4, 3))
        monitor = SurgeMonitor(model)
        x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
        for flipped in (0.25, 0.0):
            hidden = model[1](model[0](x))
            model[2](hidden).square().sum().backward()
            if flipped:
                with torch.no_grad():
                    model[0].weight[0] = -model[0].weight[0]
            seen = monitor.read()
            for name, inputs in (("0", x), ("2", hidden)):
                assert seen[name]["saturated"] == pytest.approx((inputs.abs() > 1).float().mean().item())
            assert (seen["0"]["flipped"], seen["2"]["flipped"]) == (flipped, 0)

    def test_flipped_signs_are_those_after_the_transform(self):
        layer = BinaryLinear(6, 4, config=SurgeConfig(transform="center"))
        monitor = SurgeMonitor(layer)
        with torch.no_grad():
            layer.weight += 10  # which centring takes away again
        layer(torch.ones(1, 6, requires_grad=True)).sum().backward()
        assert monitor.read()[""]["flipped"] == 0

    def test_a_saturated_layer_is_warned_about_once(self):
        layer = BinaryLinear(6, 4)
        monitor = SurgeMonitor(layer)
        for _ in range(2):
            layer(torch.full((2, 6), 3.0, requires_grad=True)).sum().backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                monitor.read()
            heard = [str(w.message) for w in caught]
            assert len(heard) == (1 if _ == 0 else 0)
        with pytest.raises(ValueError, match="no binary layer"):
            SurgeMonitor(nn.Linear(2, 2))

    def test_straight_through_layers_can_be_watched_too(self):
        layer = BinaryLinear(6, 4, config=SurgeConfig(mode="ste"))
        monitor = SurgeMonitor(layer)
        layer(torch.randn(5, 6, requires_grad=True)).sum().backward()
        (figures,) = monitor.read().values()
        assert figures["scale"] == figures["twin"] == 0
        assert figures["straight"] > 0

    def test_progress_moves_the_slope_and_the_schedule(self):
        model = net(estimator="ede", schedule="cosine")
        x = torch.randn(8, 5)
        grads = []
        for progress in (0.0, 1.0):
            set_progress(model, progress)
            model.zero_grad()
            model(x).square().sum().backward()
            grads.append(model[2].weight_aux.grad.clone())
        assert grads[0].abs().sum() > 0
        assert (grads[1] == 0).all()  # eta is zero at the end
        with pytest.raises(ValueError, match="between 0 and 1, got 2"):
            set_progress(model, 2)
        with pytest.raises(ValueError, match="limit must be positive, got 0"):
            clip_latent(model, 0.0)


@pytest.mark.slow
def test_the_callback_in_transformers_trainer(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from subspan.resize import SurgeCallback

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    model = binarize(
        BertForSequenceClassification(config), target_modules=["query", "key", "value", "dense"], skip=["first", "last"]
    )
    rows = [{"input_ids": torch.tensor([i % 50, 3, 4]), "labels": i % 2} for i in range(16)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=8, learning_rate=0.5, logging_steps=3,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[SurgeCallback(0.1, monitor=True)])
    trainer.train()
    layer = model.bert.encoder.layer[0].attention.self.key
    assert layer.weight.abs().max() <= 0.1
    assert layer.progress == 1.0
    assert layer.record is None
    logged = [entry for entry in trainer.state.log_history if "surge_cosine" in entry]
    assert len(logged) >= 2
    assert logged[0]["surge_scale"] > 0


@pytest.mark.slow
def test_t5_asks_a_packed_layer_for_its_weight_s_dtype():
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(vocab_size=20, d_model=8, num_layers=1, num_heads=2, d_ff=16, d_kv=4)).eval()
    binarize(model)
    ids = torch.arange(6)[None]
    assert torch.equal(export_binary(model)(ids).last_hidden_state, model(ids).last_hidden_state)


class TestPacked:
    @given(p=st.integers(1, 200), n=st.integers(1, 40), q=st.integers(1, 50), seed=st.integers(0, 9))
    @settings(max_examples=25, deadline=None)
    def test_products_of_signs_are_exact(self, p, n, q, seed):
        rng = np.random.default_rng(seed)
        x, w = rng.standard_normal((n, p)) >= 0, rng.standard_normal((q, p)) >= 0
        found = sign_products(word_columns(pack(x)), word_columns(pack(w)), p)
        assert np.array_equal(found, np.where(x, 1, -1) @ np.where(w, 1, -1).T)

    def test_a_layer_in_two_places_is_packed_in_both(self):
        shared = BinaryLinear(9, 9)
        out = export_binary(nn.Sequential(shared, nn.Tanh(), shared))
        assert isinstance(out[0], PackedLinear)
        assert out[0] is out[2]

    def test_sums_too_long_for_sixteen_bits(self):
        x, w = np.ones((3, 70_000), bool), np.zeros((2, 70_000), bool)
        assert (sign_products(word_columns(pack(x)), word_columns(pack(w)), 70_000) == -70_000).all()

    @pytest.mark.parametrize("options", [{}, {"mode": "ste"}, {"alpha": "none"}, {"transform": "center"}])
    def test_t14_the_same_outputs_without_twins(self, options):
        for make, shape in ((net, (4, 5)), (images, (2, 3, 9, 8))):
            model = used(make(**options), *(8, *shape[1:]))
            out = export_binary(model)
            x = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
            assert torch.equal(out(x), model(x))
            assert not any("aux" in name for name in out.state_dict())
        layer = out[2]
        assert layer.bits.shape == (6, -(-4 * 9 // 8))
        assert layer.bits.dtype == torch.uint8

    def test_t14_sizes(self):
        model = net()
        packed = export_binary(model)[2]
        assert packed.bits.numel() == 11 * 2  # ceil(9 / 8) bytes a row
        assert packed.alpha.numel() == packed.bias.numel() == 11
        plain = sum(p.numel() for p in net(mode="ste").parameters())
        assert sum(v.numel() for v in strip_aux(model.state_dict()).values()) - 2 * 9 - 2 * 11 - 2 == plain

    @pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "circular"])
    def test_padding_in_one_and_two_dimensions(self, padding_mode):
        for layer, shape in (
            (BinaryConv1d(4, 3, 3, padding=1, padding_mode=padding_mode), (2, 4, 7)),
            (BinaryConv2d(4, 3, 3, padding=1, padding_mode=padding_mode, bias=False), (2, 4, 7, 6)),
        ):
            packed = export_binary(nn.Sequential(layer))
            for x in (torch.randn(*shape), torch.randn(*shape, 2).flatten(-2)):  # of two sizes in turn
                torch.testing.assert_close(packed(x), layer(x), atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize(("make", "shape"), [(net, (64, 5)), (images, (16, 3, 9, 8))])
    def test_batch_normalisation_as_thresholds(self, make, shape):
        model = used(make(), *shape)
        with torch.no_grad():
            model[1].weight[:2] = 0  # constants
            model[3].weight[0] = -0.5
        out = export_binary(model, fold_batch_norm=True)
        assert isinstance(out[1], nn.Identity)
        assert isinstance(out[3], nn.Identity)
        assert (out[2].falling.any(), out[2].threshold.isinf().sum()) == (True, 2)
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(out(x), model(x))
        with pytest.raises(ValueError, match="without running statistics"):
            out[2].fold(nn.BatchNorm1d(9, track_running_stats=False))

    def test_ties_are_plus_one_in_bits_and_thresholds(self):
        norm, layer = nn.BatchNorm1d(4), BinaryLinear(4, 2)
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([1.0, -1.0, 0.0, 2.0]))
            layer.weight[0, 1] = 0
        model, x = nn.Sequential(norm, layer).eval(), torch.zeros(1, 4)
        assert torch.equal(layer(x), layer(torch.ones(1, 4)))
        for fold in (False, True):
            assert torch.equal(export_binary(model, fold_batch_norm=fold)(x), model(x))

    @pytest.mark.parametrize(
        ("make", "shape"),
        [(lambda: BinaryLinear(9, 3), (2, 9)), (lambda: BinaryConv2d(2, 3, 3, padding=1), (2, 2, 4, 5))],
    )
    def test_new_bits_replace_what_was_laid_out_for_the_old_ones(self, make, shape):
        layer, x = make().eval(), torch.randn(*shape)
        packed = export_binary(nn.Sequential(make()))
        packed(x)
        packed.load_state_dict(export_binary(nn.Sequential(layer)).state_dict())
        assert torch.equal(packed(x), layer(x))
        assert packed[0].training
        assert not export_binary(nn.Sequential(layer))[0].training

    def test_thresholds_where_a_layer_has_two_of_them_other_axes_or_half_precision(self):
        torch.manual_seed(0)
        shared, norms = BinaryLinear(8, 8), [nn.BatchNorm1d(8), nn.BatchNorm1d(8)]
        for norm in norms:
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.running_mean)
        two = nn.Sequential(norms[0], shared, norms[1], shared).eval()
        x = torch.randn(500, 8)
        assert torch.equal(export_binary(two, fold_batch_norm=True)(x), two(x))
        axes = nn.Sequential(norms[0], BinaryLinear(8, 5)).eval()  # normalises dimension 1, multiplies dimension 2
        assert torch.equal(export_binary(axes, fold_batch_norm=True)(x[:64].view(8, 8, 8)), axes(x[:64].view(8, 8, 8)))
        half = nn.Sequential(norms[0], BinaryLinear(8, 8)).eval().bfloat16()
        folded = export_binary(half, fold_batch_norm=True)
        assert isinstance(folded[0], nn.Identity)
        assert torch.equal(folded(x.bfloat16()), half(x.bfloat16()))

    @pytest.mark.parametrize("fold", [False, True])
    @pytest.mark.parametrize("binary", [False, True])
    def test_files_hold_bits_and_load_into_the_architecture(self, tmp_path, fold, binary):
        model = used(net(alpha="channel" if binary else "none"), 16, 5)
        out = export_binary(model, fold_batch_norm=fold)
        save_packed(out, tmp_path / "model.safetensors")
        plain = nn.Sequential(
            nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 11), nn.BatchNorm1d(11), nn.Linear(11, 7), nn.Linear(7, 3)
        ).eval()
        again = load_packed(net(seed=5).eval() if binary else plain, tmp_path / "model.safetensors")
        x = torch.randn(4, 5)
        assert torch.equal(again(x), out(x))
        assert isinstance(again[2], PackedLinear)
        with pytest.raises(ValueError, match="no packed layer"):
            save_packed(model, tmp_path / "other")

    def test_a_file_of_something_else_is_refused(self, tmp_path):
        from safetensors.torch import save_file

        save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
        with pytest.raises(ValueError, match="holds no packed layers"):
            load_packed(net(), tmp_path / "plain.safetensors")
        save_packed(export_binary(net()), tmp_path / "bits")
        for other in (nn.Sequential(nn.Linear(5, 9)), nn.Sequential(*(nn.ReLU() for _ in range(6)))):
            with pytest.raises(ValueError, match="packs 2, which is no linear or convolutional layer"):
                load_packed(other, tmp_path / "bits")

    def test_a_batch_normalisation_without_state_was_not_folded(self, tmp_path):
        plain = nn.Sequential(nn.BatchNorm1d(4, affine=False, track_running_stats=False), nn.ReLU(), nn.Linear(4, 4))
        out = export_binary(binarize(copy.deepcopy(plain), skip=()))
        save_packed(out, tmp_path / "bits")
        assert isinstance(load_packed(plain, tmp_path / "bits")[0], nn.BatchNorm1d)

    def test_signs_multiplied_off_the_cpu_are_those_counted_on_it(self):
        from subspan.resize.binary.joint import Convolution, Dense

        dense, images_ = (
            export_binary(used(net(), 16, 5), fold_batch_norm=True),
            export_binary(used(images(), 4, 3, 9, 8)),
        )
        x = torch.randn(6, 9)
        x[0, 0] = torch.nan
        layer = dense[2]
        layer.alpha = layer.bias = None
        torch.testing.assert_close(layer.multiplied(x, Dense()), layer(x), equal_nan=True)
        image, layer = torch.randn(2, 8, 7, 6), images_[2]
        layer.alpha = layer.bias = None
        torch.testing.assert_close(layer.multiplied(image, Convolution((1, 1), (1, 1), (1, 1), 2)), layer(image))

    def test_nan_goes_through(self):
        layer = BinaryLinear(9, 3)
        x = torch.randn(3, 9)
        x[1, 4] = torch.nan
        out = export_binary(nn.Sequential(layer))(x)
        assert out.isnan().any(1).tolist() == [False, True, False]
        conv = BinaryConv2d(2, 4, 3, padding=1, groups=2)
        x = torch.randn(2, 2, 5, 5)
        x[1, 0, 0, 0] = torch.nan
        out = export_binary(nn.Sequential(conv))(x)
        assert torch.equal(out.isnan(), conv(x).isnan())
        assert 0 < out.isnan().sum() < out.numel() / 4

    def test_half_precision_inputs_and_empty_batches(self):
        layer = BinaryLinear(9, 3, dtype=torch.bfloat16)
        packed = export_binary(nn.Sequential(layer))
        x = torch.randn(4, 9).bfloat16()
        assert torch.equal(packed(x), layer(x))
        assert packed(x[:0]).shape == (0, 3)
        assert packed(x[None]).shape == (1, 4, 3)
        layer = BinaryConv2d(40, 4, 3, padding=1, dtype=torch.bfloat16)  # sums beyond 256, which bfloat16 rounds
        conv = export_binary(nn.Sequential(layer))
        assert conv(torch.zeros(0, 40, 5, 6)).shape == (0, 4, 5, 6)
        x = torch.ones(2, 40, 5, 6)
        assert conv(x).dtype == torch.float32
        assert torch.equal(conv(x.bfloat16()), layer(x.bfloat16()))  # of a size seen before, in another dtype

    def test_packed_layers_answer_in_autocast_s_dtype(self):
        linear, conv = BinaryLinear(9, 3), BinaryConv2d(2, 4, 3)
        for layer, x in ((linear, torch.randn(4, 9)), (conv, torch.randn(2, 2, 5, 5))):
            packed = export_binary(nn.Sequential(layer))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(packed(x), layer(x))
                assert packed(x).dtype == torch.bfloat16
                assert packed(x.double()).dtype == torch.float64

    def test_inputs_that_cannot_work(self):
        linear = export_binary(nn.Sequential(BinaryLinear(8, 4)))
        conv = export_binary(nn.Sequential(BinaryConv2d(4, 1, 3)))
        with pytest.raises(TypeError, match="int64"):
            linear(torch.ones(3, 8, dtype=torch.int64))
        with pytest.raises(TypeError, match="int64"):
            conv(torch.ones(3, 4, 5, 5, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"of 8 inputs takes \(\*, inputs\), got \(8, 7\)"):
            linear(torch.ones(8, 7))
        with pytest.raises(ValueError, match=r"of 4 channels takes .* got \(2, 8, 5, 5\)"):
            conv(torch.ones(2, 8, 5, 5))
