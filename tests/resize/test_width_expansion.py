"""Growing and folding networks: T1, T11 and T13 of the specification, its edge cases, and what is refused."""

import copy
import warnings
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
import transformers as tf
from torch import nn

from subspan.claims.width_expansion import CharGPT
from subspan.errors import FunctionChanged
from subspan.resize import escape_ratio, expand_width, fold_width, register_axes, trap_projected
from subspan.resize.width.axes import Growth
from subspan.resize.width.model import compare
from tests.resize.width_models import ALL, CAUSAL, network, seeded

tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()
IDS = torch.arange(24).view(2, 12) % 50


def gap(a, b):
    return ((a - b).abs().max() / a.abs().max()).item()


def char_gpt(dtype=torch.float64, width=32):
    torch.manual_seed(0)
    return CharGPT(40, width).to(dtype)


class TestT1:
    @pytest.mark.parametrize("name", ALL)
    def test_t1_every_family_computes_the_same(self, name):
        _, report = expand_width(network(name), 2, generator=seeded())
        assert report.max_rel_err is not None
        assert report.max_rel_err <= 2e-5

    @pytest.mark.parametrize(
        ("n", "ffn_factor", "noise_db", "noise"),
        [(2, None, None, "row"), (2, 1.4, 40.0, "row"), (3, 1, 40.0, "row"), (4, 3, 20.0, "balanced")],
    )
    def test_t1_factors_noise_and_double_precision(self, n, ffn_factor, noise_db, noise):
        for model in (char_gpt(), network("gpt2", torch.float64, tie_word_embeddings=False)):
            big, _ = expand_width(
                model, n, ffn_factor, noise_db=noise_db, noise=noise, generator=seeded(), verify=False
            )
            x = IDS % 40
            a, b = (net(x) for net in (model, big))
            assert gap(getattr(a, "logits", a), getattr(b, "logits", b)) <= 1e-12

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["llama", "gemma"])
    def test_t1_half_precision(self, name, dtype):
        big, report = expand_width(network(name, dtype), 2, generator=seeded())
        assert {p.dtype for p in big.parameters()} == {dtype}
        assert report.max_rel_err <= 3e-2

    @pytest.mark.parametrize("name", ["llama-mha-bias-tied", "qwen3-tied", "gemma2", "gpt2", "opt"])
    def test_t1_a_tie_can_be_kept(self, name):
        model = network(name)
        big, report = expand_width(model, 3, untie=False, generator=seeded())
        assert big.get_output_embeddings().weight is big.get_input_embeddings().weight
        assert big.config.tie_word_embeddings
        assert report.max_rel_err <= 2e-5
        # T11 holds through the changed final norm as well.
        back = fold_width(big, 3)
        assert back.get_output_embeddings().weight is back.get_input_embeddings().weight
        for key, x in back.state_dict().items():
            torch.testing.assert_close(x, model.state_dict()[key], rtol=1e-6, atol=5e-7)

    def test_t1_by_default_a_tied_head_gets_its_own_table(self):
        big, _ = expand_width(network("gpt2"), 2)
        assert big.get_output_embeddings().weight is not big.get_input_embeddings().weight
        assert big.config.tie_word_embeddings is False

    @pytest.mark.parametrize("name", ["llama", "mistral-mqa", "gpt2"])
    def test_t1_with_a_cache_and_left_padding(self, name):
        model = network(name)
        big, _ = expand_width(model, 2, generator=seeded())
        mask = torch.ones_like(IDS)
        mask[0, :4] = 0
        logits = []
        for net in (model, big):
            first = net(IDS[:, :8], attention_mask=mask[:, :8], use_cache=True)
            then = net(IDS[:, 8:], attention_mask=mask, past_key_values=first.past_key_values)
            logits.append(torch.cat([first.logits[:, 4:], then.logits], 1))
        assert gap(*logits) <= 2e-5

    @pytest.mark.parametrize("name", ["qwen3-tied", "gemma3", "mixtral", "vit"])
    def test_t1_after_saving_and_loading(self, name, tmp_path):
        big, _ = expand_width(network(name), 2, generator=seeded())
        big.save_pretrained(tmp_path)
        again = type(big).from_pretrained(tmp_path)
        assert all(torch.equal(x, again.state_dict()[k]) for k, x in big.state_dict().items())

    def test_t1_the_diagonal_scheme(self):
        model = network("llama")
        big, report = expand_width(model, 2, scheme="diagonal", noise_db=None)
        assert report.max_rel_err <= 1e-5
        w = big.model.layers[0].mlp.up_proj.weight
        assert not w[:32, 16:].any()
        assert escape_ratio(w, 2).item() == pytest.approx(0.5**0.5, abs=1e-6)
        for a, b in zip(fold_width(big, 2).state_dict().values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b)
        with pytest.raises(ValueError, match="'diagonal'"):
            expand_width(model, 2, 3, scheme="diagonal")


class TestT11:
    @pytest.mark.parametrize(
        ("name", "ffn_factor"), [*((name, None) for name in ALL), ("llama", 4), ("gpt2", 4), ("qwen2_moe", 1)]
    )
    def test_t11_the_fold_is_the_seed_bit_for_bit(self, name, ffn_factor):
        model = network(name)
        big, _ = expand_width(model, 2, ffn_factor, noise_db=None, verify=False)
        back = fold_width(big, 2, ffn_factor).state_dict()
        scaled = {k for k in back if "gemma" in name and "embed_tokens" in k}  # sqrt(2) rounds
        for key, x in model.state_dict().items():
            assert torch.equal(x, back[key]) or (key in scaled and gap(x, back[key]) < 1e-6), key

    def test_t11_by_three_up_to_rounding_and_with_noise(self):
        model = network("llama")
        for noise in (None, 40.0):
            back = fold_width(expand_width(model, 3, noise_db=noise, generator=seeded())[0], 3).state_dict()
            for key, x in model.state_dict().items():
                torch.testing.assert_close(back[key], x, rtol=1e-6, atol=1e-7)

    def test_t11_the_trap_projection_of_a_network_is_idempotent_and_computes_the_fold(self):
        big, _ = expand_width(char_gpt(), 2, verify=False)
        with torch.no_grad():
            for p in big.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=seeded(), dtype=p.dtype))
        once = trap_projected(big, 2)
        twice = trap_projected(once, 2)
        x = IDS % 40
        torch.testing.assert_close(once(x), fold_width(big, 2)(x), rtol=1e-10, atol=1e-12)
        for a, b in zip(once.parameters(), twice.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
        assert gap(once(x), big(x)) > 1e-2


def test_t13_clones_may_be_permuted():
    big, _ = expand_width(char_gpt(), 3, generator=seeded(), verify=False)
    with torch.no_grad():
        for p in big.parameters():  # trained: clones differ
            p.add_(0.05 * torch.randn(p.shape, generator=seeded(1), dtype=p.dtype))
    other = copy.deepcopy(big)
    order = torch.arange(96).view(3, 32)[[2, 0, 1]].flatten()
    residual = {"tok": 1, "pos": 1, "norm": 0, "head": 1, "q": 1, "k": 1, "v": 1, "o": 0, "up": 1, "down": 0,
                "attn_norm": 0, "mlp_norm": 0}  # fmt: skip
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(p.index_select(residual[name.split(".")[-2]], order))
    x = IDS % 40
    torch.testing.assert_close(other(x), big(x), rtol=1e-10, atol=1e-12)
    for a, b in zip(big.parameters(), other.parameters(), strict=True):
        if a.ndim == 2 and a.shape[0] % 3 == 0 and a.shape[1] % 3 == 0:
            torch.testing.assert_close(escape_ratio(a, 3), escape_ratio(b, 3))


class TestChains:
    def test_a_chain_with_norms_and_statistics(self):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(7, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10), nn.LayerNorm(10, bias=False), nn.GELU(),
            nn.Dropout(0.5), nn.Linear(10, 9), nn.RMSNorm(9, elementwise_affine=False), nn.PReLU(9), nn.Linear(9, 3),
        )  # fmt: skip
        model[1](torch.randn(20, 12))  # running statistics
        big, report = expand_width(model, 3, generator=seeded())
        assert report.max_rel_err <= 2e-5
        assert big.training
        assert [m.out_features for m in big if isinstance(m, nn.Linear)] == [36, 30, 27, 3]
        assert big[1].num_features == 36
        assert big[8].normalized_shape == (27,)
        back = fold_width(big, 3)
        assert repr(back) == repr(model)
        torch.testing.assert_close(back[1].running_mean, model[1].running_mean)

    def test_layers_may_have_names_and_an_activation_may_stand_twice(self):
        act = nn.ReLU()
        layers = {"a": nn.Linear(7, 6), "act": act, "b": nn.Linear(6, 5), "again": act, "c": nn.Linear(5, 3)}
        big, report = expand_width(nn.Sequential(OrderedDict(layers)), 2)
        assert [m.out_features for m in big if isinstance(m, nn.Linear)] == [12, 10, 3]
        assert report.max_rel_err <= 2e-5

    def test_noise_that_has_nowhere_to_go_and_growth_that_has_nothing_to_grow_are_refused(self):
        one = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(ValueError, match=r"no layer .* can take noise"):
            expand_width(one, 2)
        assert fold_width(expand_width(one, 2, noise_db=None)[0], 2)[0].out_features == 8
        with pytest.raises(ValueError, match=r"ffn_factor is 3, but"):
            expand_width(one, 1, 3)
        with pytest.raises(ValueError, match=r"can take noise"):
            expand_width(CharGPT(40, 32), 1, 1.5, verify=False)  # clones of single units
        wide, _ = expand_width(CharGPT(40, 32), 1, 1.5, split="random", verify=False)  # whose shares differ
        assert wide.blocks[0].up.out_features == 192

    @pytest.mark.parametrize("layer", [nn.Softmax(-1), nn.Conv1d(1, 1, 1), nn.GRU(8, 8)])
    def test_what_mixes_units_is_refused(self, layer):
        with pytest.raises(ValueError, match=f"layer 1 .*{type(layer).__name__}"):
            expand_width(nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 2)), 2)

    def test_one_layer_has_nothing_between(self):
        with pytest.raises(ValueError, match=r"two nn\.Linear"):
            expand_width(nn.Sequential(nn.Linear(4, 2)), 2)


class Split(nn.Module):
    """A network of one's own whose number of heads no shape tells."""

    def __init__(self):
        super().__init__()
        self.heads = 2
        self.inp, self.mix, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.mix(self.inp(x)).unflatten(-1, (self.heads, -1))
        return self.out(torch.softmax(h, -1).flatten(-2))


RULES = {"inp.weight": ("residual", "fixed"), "inp.bias": "residual", "mix": "heads <- residual",
         "out": "class <- heads"}  # fmt: skip


class TestRegistered:
    def test_rules_as_pairs_or_arrows_and_a_hook_for_the_rest(self):
        torch.manual_seed(0)
        register_axes("Split", RULES, resize=lambda net, size: setattr(net, "heads", size("heads", net.heads)))
        model = Split()
        big, report = expand_width(model, 2, verify=torch.randn(5, 3), generator=seeded())
        assert (big.heads, big.mix.out_features) == (4, 16)
        assert fold_width(big, 2).heads == 2
        assert report.lr_multipliers("sgd")["inp.bias"] == 0.5
        # A wrong rule does not pass the comparison: heads of twice the size mix what was apart.
        register_axes("Split", RULES)
        with pytest.raises(FunctionChanged, match="axis rule"):
            expand_width(model, 2, verify=torch.randn(5, 3))

    def test_no_rule_is_guessed(self):
        register_axes("Split", {"mix": "heads <- residual"})
        with pytest.raises(ValueError, match=r"inp\.weight, inp\.bias, out\.weight, out\.bias"):
            expand_width(Split(), 2)
        register_axes("Split", RULES | {"mix": "residual <- heads", "out": "class <- residual"})
        with pytest.raises(ValueError, match="no axis rules for Bilinear"):
            expand_width(nn.Bilinear(2, 2, 2), 2)

    @pytest.mark.parametrize(
        ("rule", "message"), [("heds <- residual", "'heds'"), ("a <- b <- c", "arrow"), ("<- residual", "both sides")]
    )
    def test_a_rule_that_cannot_be_read(self, rule, message):
        with pytest.raises(ValueError, match=message):
            register_axes("Split", {"mix": rule})


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"factor": 1}, "at least 2"), ({"factor": 0}, "at least 2"), ({"factor": True}, "whole number"),
            ({"ffn_factor": 0.5}, "ffn_factor"),
            ({"noise_db": float("nan")}, "noise_db"), ({"noise_db": False}, "noise_db"),
            ({"noise_db": float("inf")}, "noise_db"),
            ({"noise": "columns"}, "noise must"), ({"scheme": "zero"}, "scheme must"), ({"split": "odd"}, "split must"),
        ],
    )  # fmt: skip
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            expand_width(char_gpt(), **{"factor": 2, **options})

    def test_a_fraction_of_the_residual_width(self):
        with pytest.raises(ValueError, match="whole number"):
            Growth.of(1.5)

    def test_a_tie_after_a_post_norm_network(self):
        with pytest.raises(ValueError, match=r"untie=True, or leave out --keep-tie"):
            expand_width(network("bert-mlm"), 2, untie=False)

    def test_weights_that_are_not_finite_are_named(self):
        model = network("llama")
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN"):
            expand_width(model, 2)

    def test_shapes_that_are_not_the_configuration_s(self):
        model = network("llama")
        model.model.layers[0].mlp.up_proj = nn.Linear(16, 30, bias=False)
        with pytest.raises(ValueError, match=r"up_proj\.weight is 30.*intermediate_size"):
            expand_width(model, 2)

    def test_a_head_size_that_is_not_the_configuration_s(self):
        model = network("qwen3-tied")
        model.config.head_dim = 4
        with pytest.raises(ValueError, match=r"q_proj\.weight is 32.*num_attention_heads"):
            expand_width(model, 2)

    def test_adapters_and_quantised_weights(self):
        from peft import LoraConfig, get_peft_model

        model = network("llama")
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
        for carrier in (adapted, adapted.base_model.model):
            with pytest.raises(ValueError, match="merge"):
                expand_width(carrier, 2)
        model.lm_head.weight = nn.Parameter(torch.ones(50, 16, dtype=torch.int8), requires_grad=False)
        with pytest.raises(ValueError, match=r"lm_head\.weight is quantised"):
            expand_width(model, 2)
        with pytest.raises(ValueError, match=r"quantised \(torch\.float8"):
            expand_width(network("llama").to(torch.float8_e4m3fn), 2)

    def test_shared_layers(self):
        model = char_gpt()
        model.blocks[1].up = model.blocks[0].up
        with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight and blocks\.1\.up\.weight share"):
            expand_width(model, 2)

    def test_unknown_architectures(self):
        model = tf.AutoModel.from_config(tf.DistilBertConfig(dim=16, n_heads=2, n_layers=1, hidden_dim=16))
        with pytest.raises(ValueError, match=r"distilbert.*register_axes"):
            expand_width(model, 2)

    def test_a_fraction_of_clones_cannot_be_folded(self):
        big, _ = expand_width(char_gpt(), 2, 1.5, verify=False)
        with pytest.raises(ValueError, match="whole"):
            fold_width(big, 2, 1.5)
        with pytest.raises(ValueError, match=r"equal size|come to"):
            fold_width(big, 3)


class TestWorks:
    def test_heads_keep_their_size_and_one_row_is_batch_enough(self):
        for name in ("qwen3-tied", "llama"):
            model = network(name)
            big, report = expand_width(model, 2, verify={"input_ids": IDS[:1]})
            assert big.config.head_dim == model.model.layers[0].self_attn.head_dim
            assert big.config.num_attention_heads == 8
            assert report.max_abs_err > 0

    def test_one_key_head_stays_one(self):
        big, _ = expand_width(network("mistral-mqa"), 2)
        assert (big.config.num_attention_heads, big.config.num_key_value_heads) == (8, 1)
        big, _ = expand_width(network("opt-post-norm"), 2)  # so does a table narrower than the network
        assert (big.config.hidden_size, big.config.word_embed_proj_dim) == (32, 8)

    def test_feed_forward_alone_keeps_the_rest(self):
        model = network("gpt2")
        big, report = expand_width(model, 1, 3, generator=seeded())
        assert report.max_rel_err <= 1e-5
        assert big.get_output_embeddings().weight is big.get_input_embeddings().weight
        assert big.config.n_inner == 3 * 64

    @pytest.mark.parametrize("split", ["even", "random"])
    def test_a_fraction_of_the_feed_forward_units_is_drawn(self, split):
        model = network("llama")
        big, report = expand_width(model, 2, 1.3, split=split, noise_db=None, generator=seeded())
        assert report.max_rel_err <= 1e-5
        up, down = (big.model.layers[0].mlp.get_submodule(n).weight for n in ("up_proj", "down_proj"))
        assert up.shape == (42, 32)
        seed = model.model.layers[0].mlp.up_proj.weight
        torch.testing.assert_close(up[:32, :16], seed / 2)  # every unit once, in place
        clones = [(up[j, :16] == up[:32, :16]).all(1).nonzero().item() for j in range(32, 42)]
        j, u = 32, clones[0]
        group = [u] + [32 + i for i, c in enumerate(clones) if c == u]
        total = down[:16, group].sum(1)
        torch.testing.assert_close(total, model.model.layers[0].mlp.down_proj.weight[:, u])
        assert torch.allclose(down[:16, u], down[:16, j]) is (split == "even")

    def test_twice_by_two_is_once_by_four(self):
        model = network("llama")
        twice, _ = expand_width(expand_width(model, 2, noise_db=None)[0], 2, noise_db=None)
        once, _ = expand_width(model, 4, noise_db=None)
        for a, b in zip(twice.state_dict().values(), once.state_dict().values(), strict=True):
            assert torch.equal(a, b)

    def test_frozen_parameters_modes_and_wrappers(self):
        model = network("llama").train()
        model.model.embed_tokens.weight.requires_grad = False
        compiled = nn.Module()  # what torch.compile's wrapper looks like; the real one costs seconds to import
        compiled._orig_mod = model
        big, _ = expand_width(nn.DataParallel(compiled), 2, generator=seeded())
        assert [n for n, p in big.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]
        assert big.training
        assert all(m.training for m in model.modules())
        assert torch.equal(big.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)

    def test_the_seed_is_untouched_and_shares_no_memory(self):
        model = network("llama")
        before = {k: x.clone() for k, x in model.state_dict().items()}
        big, _ = expand_width(model, 1, 2, generator=seeded())
        with torch.no_grad():
            for p in big.parameters():
                p.add_(1)
        assert all(torch.equal(x, model.state_dict()[k]) for k, x in before.items())

    def test_equal_seeds_give_equal_noise_in_any_order_of_tensors(self):
        model = char_gpt()
        first, again, other = (expand_width(model, 2, generator=seeded(s), verify=False)[0] for s in (0, 0, 1))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
        assert not torch.equal(first.blocks[0].up.weight, other.blocks[0].up.weight)
        swapped = copy.deepcopy(model)
        swapped._modules = dict(reversed(swapped._modules.items()))
        big, _ = expand_width(swapped, 2, generator=seeded(), verify=False)
        assert torch.equal(big.blocks[0].up.weight, first.blocks[0].up.weight)

    def test_noise_has_the_asked_ratio_and_leaves_an_odd_block_and_the_ends_alone(self):
        model = char_gpt()
        exact, noisy = (
            expand_width(model, 3, noise_db=db, generator=seeded(), verify=False)[0].state_dict() for db in (None, 20.0)
        )
        w, z = (s["blocks.0.up.weight"] for s in (exact, noisy))
        change = (z - w).unflatten(1, (3, 32)).unflatten(0, (3, 128))
        assert torch.equal(change[:, :, 2], torch.zeros_like(change[:, :, 2]))
        torch.testing.assert_close(change[:, :, 0], -change[:, :, 1])
        ratio = w.unflatten(1, (3, 32)).unflatten(0, (3, 128))[:, :, 0].square().mean((1, 2))
        torch.testing.assert_close(
            ratio / change[:, :, 0].square().mean((1, 2)), torch.full((3,), 100.0).double(), rtol=1e-5, atol=0
        )
        assert not torch.allclose(change[0], change[1])
        q, k = ((noisy[n] - exact[n]).flatten() for n in ("blocks.0.attn.q.weight", "blocks.0.attn.k.weight"))
        assert torch.cosine_similarity(q, k, 0).abs() < 0.5  # tensors of one shape do not share their noise
        still = ("tok.weight", "pos.weight", "head.weight", "norm.weight", "blocks.0.mlp_norm.weight")
        assert all(torch.equal(exact[k], noisy[k]) for k in still)

    def test_the_report_says_what_became_of_every_tensor(self):
        _, report = expand_width(network("gpt2"), 2, 3, generator=seeded())
        line = next(r for r in report.axis_table if r["name"].endswith("c_attn.weight"))
        assert line == {
            "name": "transformer.h.0.attn.c_attn.weight", "seed": [16, 48], "wide": [32, 96],
            "axes": "residual x2 -> heads x2+heads x2+heads x2", "noise_db": 40.0,
        }  # fmt: skip
        assert "transformer.h.*.mlp.c_fc.weight" in report.table()
        _, report = expand_width(network("gpt2"), 1, 2, generator=seeded())  # noise needs an input that is cloned
        assert [r["name"] for r in report.axis_table if r["noise_db"]] == ["transformer.h.0.mlp.c_proj.weight"]
        assert report.noise_db == 40.0

    @pytest.mark.parametrize(("by", "same"), [(0.05, True), (0.2, False)])
    def test_deep_networks_of_half_precision_pass_the_comparison(self, by, same):
        """SmolLM2's outputs move by 0.03 when it grows in bfloat16, by 0.04 when it is rounded to it."""
        model = nn.Linear(8, 8).bfloat16()
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.weight.mul_(1 + by)
            other.bias.mul_(1 + by)
        x = torch.ones(1, 8, dtype=torch.bfloat16)
        with nullcontext() if same else pytest.raises(FunctionChanged):
            compare(model, other, x, noisy=True)

    def test_growing_draws_nothing_from_the_global_generator(self):
        model, state = network("llama"), torch.get_rng_state()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expand_width(model, 2, generator=seeded())
        assert torch.equal(torch.get_rng_state(), state)


def test_every_family_of_the_table_is_tried():
    from subspan.resize.width.families import FAMILIES

    tried = {config().model_type for config in CAUSAL.values()} | {"bert", "vit"}
    assert tried == set(FAMILIES)
