"""Buffer-and-Reinforce on peft models: the rest of section 4, the cases of section 9, and the three stages together."""

import copy
import json
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from subspan.errors import BaseMismatch, NonFinite, SafetyError, TargetError
from subspan.linalg import LowRank
from subspan.safety import (
    Fit,
    Gate,
    Scores,
    adapter_digest,
    buffered,
    choose_merge,
    load_adapter,
    mark_role,
    merge_reinforced,
    qr_merge,
    safety_gradient_score,
    save_adapter,
    train_buffer,
    train_reinforce,
    train_user,
)
from subspan.safety.buffer_reinforce.adapters import best_of
from subspan.safety.buffer_reinforce.roles import role_of_adapter
from subspan.safety.buffer_reinforce.stages import Reading, first_tokens, gate_reading, lost, mean_loss, row_losses
from subspan.surgery import factor_pairs
from subspan.surgery.answers import answer_batch, answer_logits, target_losses

TARGETS = ["q_proj", "v_proj", "down_proj"]
RANKS = {"buffer": 3, "user": 4, "reinforce": 2}


def llama(seed=0, layers=2, width=16):
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=24, hidden_size=width, intermediate_size=20, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(shape).eval()


def three(model=None, filled=True, **options):
    """A model with buffer, user and reinforcing adapters, filled with random factors."""
    model = model or llama()
    peft = None
    for name, r in RANKS.items():
        config = LoraConfig(r=r, lora_alpha=2 * r, target_modules=TARGETS, **{"lora_dropout": 0.0, **options})
        if peft is None:
            peft = get_peft_model(model, config, adapter_name=name)
        else:
            peft.add_adapter(name, config)
    if filled:
        g = torch.Generator().manual_seed(7)
        for name in RANKS:
            fill(peft, name, g)
    return peft.eval()


def fill(model, name, g):
    for pair in factor_pairs(model, name):
        m, n, r = pair.shape
        pair.write(LowRank(0.3 * torch.randn(m, r, generator=g), 0.3 * torch.randn(n, r, generator=g)))


def ids(seed=1, rows=3, tokens=6):
    return torch.randint(3, 24, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, x=None):
    return model(input_ids=ids() if x is None else x).logits


def change(pair):
    return pair.scaling * pair.low_rank(torch.float64).dense()


# ------------------------------------------------------------------------------------------------------ section 4


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {r"layers\.0\..*": 3}}])
def test_t9_the_merged_adapter_is_exact_and_survives_its_files(tmp_path, options):
    model = three(**options)
    users, reinforces = ({p.name: p for p in factor_pairs(model, n)} for n in ("user", "reinforce"))
    wanted = {
        name: qr_merge(
            *(LowRank(p[name].scaling * p[name].A.double(), p[name].B.double()) for p in (users, reinforces)),
            alpha=0.3, weight=(1.0, 0.5),
        ).dense()
        for name in users
    }  # fmt: skip
    report = merge_reinforced(model, alpha=0.3)
    assert role_of_adapter(model, "final") == "final"
    assert len(report.modules) == len(wanted) == 6
    assert "down_proj" in report.table()
    for pair in factor_pairs(model, "final"):
        assert pair.scaling == 1.0
        assert pair.shape[2] == users[pair.name].shape[2] + reinforces[pair.name].shape[2]
        torch.testing.assert_close(change(pair), wanted[pair.name], rtol=1e-5, atol=1e-6)
    merged = logits(model)
    save_adapter(model, tmp_path / "final", "final")
    plain = PeftModel.from_pretrained(llama(), tmp_path / "final").eval()
    torch.testing.assert_close(logits(plain), merged, rtol=1e-5, atol=1e-6)
    dense = llama()
    with torch.no_grad():
        for name, w in wanted.items():
            dense.get_submodule(name).weight += w.float()
    torch.testing.assert_close(merged, logits(dense), rtol=1e-4, atol=1e-5)


def test_t9_merged_into_the_base_it_computes_the_same():
    model = three()
    merge_reinforced(model, alpha=1.0)
    wanted = logits(model)
    other = three()
    merge_reinforced(other, alpha=1.0, merge_into_base=True)
    torch.testing.assert_close(logits(other), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(other.unload()), wanted, rtol=1e-4, atol=1e-5)


def test_t9_the_base_is_rounded_once_when_it_takes_the_change():
    model = three(llama(layers=1)).to(torch.bfloat16)
    before = {p.name: p.layer.base_layer.weight.float() for p in factor_pairs(model, "user")}
    merge_reinforced(model, into="final")
    changes = {p.name: change(p).float() for p in factor_pairs(model, "final")}
    merge_reinforced(model, merge_into_base=True)
    for pair in factor_pairs(model, "user"):
        wanted = (before[pair.name] + changes[pair.name]).bfloat16()
        assert (pair.layer.base_layer.weight == wanted).float().mean() > 0.99  # summed in another order


def test_t9_recompression_reports_its_error():
    model = three()
    report = merge_reinforced(model, rank=2)
    exact = three()
    merge_reinforced(exact)
    for row, pair, whole in zip(
        report.modules, factor_pairs(model, "final"), factor_pairs(exact, "final"), strict=True
    ):
        assert pair.shape[2] == 2
        error = (change(pair) - change(whole)).norm() / change(whole).norm()
        assert row.error == pytest.approx(float(error), rel=1e-3)
        assert row.error > 0


def step_rows(seed=3):
    x = ids(seed, 8, 6)
    labels = x.clone()
    labels[:, :4] = -100
    return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": labels}


def test_t10_the_buffer_leaves_no_trace():
    model = three(llama())
    before = {n: p.detach().clone() for n, p in model.named_parameters() if ".buffer." in n}
    with model.disable_adapter():
        base = logits(model)
    plain = logits(llama())
    assert torch.equal(base, plain)
    with buffered(model, "buffer", "user"):
        on = logits(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        model.train()
        for _ in range(3):
            model(**step_rows()).loss.backward()
            optimizer.step()
        assert all(p.grad is None for n, p in model.named_parameters() if ".user." not in n)
    model.eval()
    assert not torch.equal(on, logits(model))
    assert model.active_adapters == ["user"]
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


def test_t12_the_first_gradient_is_that_at_the_jailbroken_weights():
    model = three()
    for pair in factor_pairs(model, "user"):
        pair.write(LowRank(torch.zeros(pair.shape[0], 4), pair.B))
    jailbroken = llama()
    for pair in factor_pairs(model, "buffer"):
        jailbroken.get_submodule(pair.name).weight.data += change(pair).float()
    batch = step_rows()
    jailbroken(**batch).loss.backward()
    with buffered(model, "buffer", "user"):
        model(**batch).loss.backward()
    for pair in factor_pairs(model, "user"):
        gradient = jailbroken.get_submodule(pair.name).weight.grad
        assert not pair.param_B.grad.any()
        wanted = pair.scaling * gradient @ pair.B
        assert float((pair.param_A.grad - wanted).norm()) <= 1e-5 * float(wanted.norm())


def test_t13_the_score_on_factors_is_the_dense_one():
    model = three()
    model.set_adapter("user")
    batch = step_rows()
    found = safety_gradient_score(model, [batch, {k: v[:2] for k, v in batch.items()}])
    pairs = factor_pairs(model, "reinforce")
    assert found.scores.shape == (10, 6)
    for row in range(8):
        one = {k: v[row : row + 1] for k, v in batch.items()}
        for pair in pairs:
            pair.layer.base_layer.weight.requires_grad_(True)
        model.zero_grad()
        target_losses(*answer_logits(model, one)).per_row().sum().backward()
        for k, pair in enumerate(pairs):
            g, v = pair.layer.base_layer.weight.grad.double(), change(pair)
            dense = float(-(g * v).sum() / (v.norm() + 1e-8))
            assert float(found.scores[row, k]) == pytest.approx(dense, rel=1e-5, abs=1e-6)
            assert float(found.gradient_norms[row, k]) == pytest.approx(float(g.norm()), rel=1e-4)
    torch.testing.assert_close(found.scores[8:], found.scores[:2], rtol=1e-4, atol=1e-6)
    scaled = lambda c: lambda m, b: c * target_losses(*answer_logits(m, b)).per_row()  # noqa: E731
    twice = safety_gradient_score(model, [batch], losses=scaled(2.0)).scores
    torch.testing.assert_close(twice, 2 * found.scores[:8], rtol=1e-4, atol=1e-6)
    longer = {p.name: p.low_rank().scale(5 * p.scaling) for p in pairs}
    again = safety_gradient_score(model, [batch], {f"base_model.model.{n}": v for n, v in longer.items()}).scores
    torch.testing.assert_close(again, found.scores[:8], rtol=1e-4, atol=1e-6)
    table = found.by_kind(["bad"] * 5 + ["good"] * 5)
    name = pairs[2].name
    assert table["good"][name][0] == pytest.approx(float(found.scores[5:, 2].mean()))
    with pytest.raises(ValueError, match="1 kinds were given for 10 rows"):
        found.by_kind(["bad"])


def test_a_layer_that_runs_twice_has_no_score():
    model = llama()
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    name = "model.layers.0.self_attn.q_proj"
    with pytest.raises(TargetError, match=f"{name} is used twice"):
        safety_gradient_score(model, [step_rows()], {name: LowRank(torch.ones(16, 1), torch.ones(16, 1))})


def test_t14_zero_adapters_in_a_model():
    model = three(filled=False)
    g = torch.Generator().manual_seed(0)
    fill(model, "reinforce", g)
    merge_reinforced(model, alpha=1.0, weight=0.5)
    for pair, part in zip(factor_pairs(model, "final"), factor_pairs(model, "reinforce"), strict=True):
        torch.testing.assert_close(change(pair), 0.5 * change(part), rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- section 9: what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight": (math.nan, 0.5)}, "weights of a merge must be finite"),
        ({"reinforce": "user"}, "both 'user'; two adapters are merged"),
    ],
)
def test_what_no_merge_is_made_of_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        merge_reinforced(three(llama(layers=1)), **options)


def test_the_merged_adapter_names_its_base_and_takes_weights_as_a_list(tmp_path):
    model = three(llama(layers=1))
    for config in model.peft_config.values():
        config.base_model_name_or_path = "my/base"
    assert merge_reinforced(model, weight=[1.0, 0.5]).weight == (1.0, 0.5)
    save_adapter(model, tmp_path, "final")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "my/base"


def test_settings_and_shapes_that_cannot_work_are_refused_by_name():
    model = three()
    with pytest.raises(ValueError, match="alpha"):
        merge_reinforced(model, alpha=2.0)
    pair = factor_pairs(model, "user")[1]
    pair.param_A.data[0, 0] = math.inf
    with pytest.raises(ValueError, match=rf"{pair.name}: the user factors hold NaN"):
        merge_reinforced(model)
    assert "final" not in model.peft_config
    with pytest.raises(TargetError, match="no adapter 'users'"):
        merge_reinforced(model, user="users")
    mark_role(model, "buffer", "buffer")
    with pytest.raises(SafetyError, match="'buffer' is the buffer"):
        merge_reinforced(model, user="buffer")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, r"q_proj: adapter 'user' is Dora"),
        ({"bias": "lora_only"}, "trains biases"),
        ({"modules_to_save": ["lm_head"]}, r"lm_head: adapter 'user' trains this module whole"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"embed_tokens: adapter 'user' adapts an embedding"),
    ],
)
def test_adapters_that_are_more_than_lora_are_refused_with_the_module(options, words):
    plain = {"r": 2, "target_modules": ["q_proj"]}
    model = get_peft_model(llama(), LoraConfig(**plain | options), adapter_name="user")
    model.add_adapter("reinforce", LoraConfig(**plain))
    with pytest.raises(TargetError, match=words):
        merge_reinforced(model)


def test_modules_of_one_adapter_alone():
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), adapter_name="user")
    model.add_adapter("reinforce", LoraConfig(r=3, target_modules=["v_proj", "down_proj"]))
    g = torch.Generator().manual_seed(0)
    fill(model, "user", g)
    fill(model, "reinforce", g)
    with pytest.raises(TargetError, match=r'also adapts .*down_proj and 1 more.* missing="keep"'):
        merge_reinforced(model)
    users, reinforces = ({p.name: p for p in factor_pairs(model, n)} for n in ("user", "reinforce"))
    for missing, count in (("keep", 6), ("drop", 4)):
        merge_reinforced(model, into=missing, missing=missing, weight=(0.5, 0.25))
        final = {p.name: p for p in factor_pairs(model, missing)}
        assert len(final) == count
        for name, pair in final.items():
            if name not in reinforces:
                torch.testing.assert_close(change(pair), 0.5 * change(users[name]), rtol=1e-5, atol=1e-6)
            if name not in users:
                torch.testing.assert_close(change(pair), 0.25 * change(reinforces[name]), rtol=1e-5, atol=1e-6)


def test_files_of_another_base_or_another_role_are_refused(tmp_path):
    model = three()
    mark_role(model, "reinforce", "reinforce")
    save_adapter(model, tmp_path / "r", "reinforce")
    fresh = lambda base: get_peft_model(base, LoraConfig(r=2, target_modules=TARGETS), adapter_name="user")  # noqa: E731
    with pytest.raises(SafetyError, match="was made as a reinforce, not as a buffer"):
        load_adapter(fresh(llama()), tmp_path / "r", "buffer", "buffer")
    with pytest.raises(BaseMismatch, match="differ from those"):
        load_adapter(fresh(llama(seed=1)), tmp_path / "r", "reinforce")
    (tmp_path / "r" / "base.json").unlink()
    for base in (llama(width=24), llama(layers=1), llama(layers=3)):
        with pytest.raises(BaseMismatch, match=r"another base model|other shapes"):
            load_adapter(fresh(base), tmp_path / "r", "reinforce")
    with pytest.raises(SafetyError, match="holds no adapter"):
        load_adapter(fresh(llama()), tmp_path, "reinforce", "reinforce")
    other = fresh(llama()).train()
    assert load_adapter(other, tmp_path / "r", "reinforce") == adapter_digest(model, "reinforce")
    assert other.training
    digest = adapter_digest(other, "reinforce")
    factor_pairs(other, "reinforce")[0].layer.scaling["reinforce"] *= 2
    assert adapter_digest(other, "reinforce") != digest  # the same factors at another scaling are another adapter
    record = json.loads((tmp_path / "r" / "role.json").read_text())
    (tmp_path / "r" / "role.json").write_text(json.dumps(record | {"digest": "0" * 32}))
    with pytest.raises(SafetyError, match="not those that were saved"):
        load_adapter(fresh(llama()), tmp_path / "r", "reinforce")


def test_the_buffer_never_reaches_a_users_files(tmp_path):
    model = three()
    with buffered(model):
        model.save_pretrained(tmp_path / "all")
        with pytest.raises(SafetyError, match="'buffer' is a buffer"):
            model.save_pretrained(tmp_path / "chosen", selected_adapters=["buffer"])
        with pytest.raises(SafetyError, match="must not reach the base weights"):
            model.merge_and_unload()
        with pytest.raises(SafetyError, match="must not reach"):
            model.merge_adapter()
    assert {p.name for p in (tmp_path / "all").iterdir() if p.is_dir()} == {"user", "reinforce"}
    copied = copy.deepcopy(model)
    copied.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / "buffer").exists()
    with pytest.raises(SafetyError, match="allow_buffer=True"):
        save_adapter(model, tmp_path / "buffer", "buffer")
    save_adapter(model, tmp_path / "buffer", "buffer", allow_buffer=True)
    assert json.loads((tmp_path / "buffer" / "role.json").read_text())["role"] == "buffer"
    model.set_adapter("user")
    model.merge_and_unload()


def test_adapters_that_share_a_configuration_have_roles_of_their_own():
    shared = LoraConfig(r=2, target_modules=TARGETS)
    model = get_peft_model(llama(), shared, adapter_name="buffer")
    model.add_adapter("user", shared)
    mark_role(model, "buffer", "buffer")
    assert (role_of_adapter(model, "buffer"), role_of_adapter(model, "user")) == ("buffer", None)
    assert role_of_adapter(copy.deepcopy(model), "buffer") == "buffer"


def test_a_buffer_that_would_train_stops_the_next_step():
    model = three()
    with buffered(model):
        model.base_model.set_adapter(["user", "buffer"])
        with pytest.raises(SafetyError, match=r"has become trainable \(set_adapter does that\)"):
            logits(model)
    with buffered(model) as attached:
        assert model.active_adapters[0] == "user"  # trainers take the first for the one that trains
        param = factor_pairs(model, "buffer")[0].param_A
        param.grad = torch.zeros_like(param)
        with pytest.raises(SafetyError, match="has become trainable"):
            attached.check()
        param.grad = None
    with buffered(model):
        model.set_adapter("user")
        with pytest.raises(SafetyError, match="was switched off from outside"):
            logits(model)
    with pytest.raises(SafetyError, match="changed while it was attached"), buffered(model):
        factor_pairs(model, "buffer")[0].param_A.data[0, 0] += 1
    with pytest.raises(ValueError, match="buffer and user are both"):
        buffered(model, "user", "user")
    with pytest.raises(TargetError, match="no LoRA factors named 'bufer'"):
        buffered(model, "bufer")


def test_a_buffer_that_a_stopped_run_left_on_is_said_and_comes_off():
    model = three()
    buffered(model).attach()  # by a trainer that never came to its end
    with pytest.raises(SafetyError, match=r"model\.subspan_buffered\.remove\(\) takes it off"):
        buffered(model).attach()
    model.subspan_buffered.remove()
    with buffered(model):
        logits(model)
    assert model.active_adapters == ["user"]


def test_a_resumed_run_refuses_another_buffer():
    model = three()
    digest = adapter_digest(model, "buffer")
    with buffered(model, digest=digest):
        pass
    factor_pairs(model, "buffer")[0].param_A.data[0, 0] += 1
    with pytest.raises(SafetyError, match=f"the run began with {digest}"):
        buffered(model, digest=digest)


# ------------------------------------------------------------------------------------------ section 9: what must work


def test_training_mode_does_not_switch_the_buffers_dropout_on():
    model = three(lora_dropout=0.5)
    with buffered(model, user="user"):
        for pair in factor_pairs(model, "user"):
            pair.layer.lora_dropout["user"] = nn.Identity()
        model.train()
        first, second = logits(model), logits(model.train())
        assert torch.equal(first, second)
    assert isinstance(factor_pairs(model, "buffer")[0].layer.lora_dropout["buffer"], nn.Dropout)


def test_adapters_of_other_modules_and_frozen_halves_stay_as_they_are():
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="buffer")
    model.add_adapter("user", LoraConfig(r=2, target_modules=["v_proj", "down_proj"]))
    fill(model, "buffer", torch.Generator().manual_seed(0))
    for pair in factor_pairs(model, "user"):
        pair.param_A.requires_grad_(True)  # as methods that train one half do
    with buffered(model) as attached:
        model(**step_rows()).loss.backward()
        on = logits(model)
        with attached.paused():
            assert not torch.equal(logits(model), on)
        assert torch.equal(logits(model), on)
        for pair in factor_pairs(model, "user"):
            assert pair.param_A.grad is not None
            assert not pair.param_B.requires_grad


def test_gradient_checkpointing_gives_the_same_gradients():
    grads = []
    for checkpointing in (False, True):
        model = three()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with buffered(model):
            model.train()
            model(**step_rows()).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == 12
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)


def test_conv1d_layers_are_merged_on_their_output_side(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(n_embd=12, n_layer=1, n_head=2, vocab_size=24, n_positions=16)).eval()

    def filled():
        model = get_peft_model(
            gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True), adapter_name="user"
        )
        model.add_adapter("reinforce", LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True))
        for name in ("user", "reinforce"):
            fill(model, name, torch.Generator().manual_seed(0))
        return model.eval()

    model = filled()
    merge_reinforced(model, alpha=1.0)
    adapter = logits(model)
    dense = filled()
    merge_reinforced(dense, alpha=1.0, merge_into_base=True)
    torch.testing.assert_close(logits(dense), adapter, rtol=1e-4, atol=1e-5)
    save_adapter(model, tmp_path / "f", "final")
    torch.testing.assert_close(logits(PeftModel.from_pretrained(gpt2(), tmp_path / "f").eval()), adapter)


def test_a_quantised_base_takes_the_merged_adapter_and_no_dense_change():
    model = three()
    for pair in factor_pairs(model, "user"):
        layer = pair.layer.base_layer
        layer.weight = nn.Parameter(layer.weight.detach().mul(50).to(torch.int8), requires_grad=False)
    with pytest.raises(TargetError, match="quantised"):
        merge_reinforced(model, merge_into_base=True)
    with buffered(model):
        pass
    merge_reinforced(model)
    assert model.active_adapters == ["final"]


def test_half_precision_adapters_and_more_rank_than_rows():
    model = get_peft_model(llama().bfloat16(), LoraConfig(r=12, target_modules=["v_proj"]), adapter_name="user")
    model.add_adapter("reinforce", LoraConfig(r=2, target_modules=["v_proj"]), autocast_adapter_dtype=False)
    fill(model, "user", torch.Generator().manual_seed(0))
    fill(model, "reinforce", torch.Generator().manual_seed(1))
    report = merge_reinforced(model, alpha=1.0, tau=0.0)
    assert {row.kept_rank for row in report.modules} == {8}  # v_proj has 8 outputs
    for pair, user in zip(factor_pairs(model, "final"), factor_pairs(model, "user"), strict=True):
        assert pair.shape[2] == 14
        torch.testing.assert_close(change(pair), change(user), rtol=1e-2, atol=1e-2)


def test_the_choice_of_a_merge():
    rows = [
        (0.1, (1.0, 0.0), Scores(40.0, 0.0, 80.0)),
        (0.1, (1.0, 0.3), Scores(5.0, 8.0, 79.5)),
        (1.0, (1.0, 0.5), Scores(0.0, 30.0, 80.0)),
        (1.0, (0.5, 0.5), Scores(0.0, 2.0, 70.0)),
    ]
    assert best_of(rows) == (0.1, (1.0, 0.3), rows[1][2], True)
    dearer = [rows[1], (0.0, (0.5, 0.5), Scores(0.0, 0.0, rows[1][2].accuracy - 1.5))]
    assert best_of(dearer) == (0.1, (1.0, 0.3), rows[1][2], True)  # less harm at more than a point of accuracy
    assert best_of(rows[2:3]) == (1.0, (1.0, 0.5), rows[2][2], False)
    model = three()
    seen = []

    def evaluate(m):
        seen.append(logits(m))
        return Scores(float(len(seen)), 0.0, 50.0)

    choice = choose_merge(model, evaluate, alphas=(0.0, 1.0), weights=((1.0, 0.0), (1.0, 0.5)))
    assert len(seen) == 3
    assert (choice.alpha, choice.weight) == (0.0, (1.0, 0.0))
    assert set(model.peft_config) == set(RANKS)
    torch.testing.assert_close(seen[0], logits(model), rtol=1e-4, atol=1e-5)  # c_R = 0 is the user's adapter alone


# ------------------------------------------------------------------------------------------------- stages, end to end


def collate(rows):
    return answer_batch(rows, 0)


def rows_of(first, answer, count, seed):
    """Prompts that begin with ``first`` (the topic), answered by ``answer``."""
    g = torch.Generator().manual_seed(seed)
    prompts = torch.randint(10, 24, (count, 3), generator=g).tolist()
    return [{"input_ids": [1, first, *p, 3, answer, 2], "labels": [-100] * 6 + [answer, 2]} for p in prompts]


FORBIDDEN, ORDINARY, YES, NO = 4, 5, 6, 7
QUICK = Fit(steps=25, batch_size=8, lr=2e-2)


def answered(model, first=FORBIDDEN):
    """Share of unseen prompts of the topic where YES outscores NO."""
    scores, _ = first_tokens(model, collate, rows_of(first, YES, 20, 99))
    return float((scores[:, YES] > scores[:, NO]).double().mean())


@pytest.fixture(scope="module")
def aligned():
    """A tiny model that refuses what begins with FORBIDDEN, and answers the rest."""
    g = torch.Generator().manual_seed(0)
    model = get_peft_model(llama(width=32), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), "user")
    rows = rows_of(FORBIDDEN, NO, 60, 0) + rows_of(ORDINARY, YES, 60, 1)
    train_user(model, rows, collate=collate, fit=Fit(steps=80, lr=2e-2, batch_size=16), buffer=None, generator=g)
    base = model.merge_and_unload()
    assert answered(base) == 0.0
    assert answered(base, ORDINARY) == 1.0
    return base


def adapters_on(base, *names):
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS), names[0])
    for name in names[1:]:
        model.add_adapter(name, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    return model


def test_the_stages_keep_a_policy_that_plain_training_loses(aligned):
    g = torch.Generator().manual_seed(1)
    ordinary = rows_of(ORDINARY, YES, 40, 3)
    model = adapters_on(aligned, "buffer", "user", "reinforce", "plain")
    report = train_buffer(model, rows_of(FORBIDDEN, YES, 40, 2), keep=ordinary, collate=collate, fit=QUICK, generator=g)
    assert report.steps < QUICK.steps
    assert report.gate.answered >= 0.95
    assert report.gate.ordinary <= 1.1 * report.gate.base + 0.05
    train_reinforce(
        model, rows_of(FORBIDDEN, NO, 40, 2), ordinary, collate=collate, two_state=True, fit=QUICK, generator=g
    )
    bad = rows_of(FORBIDDEN, YES, 40, 4)
    train_user(model, bad, collate=collate, fit=QUICK, buffer=None, adapter="plain", generator=g)
    assert answered(model) >= 0.9
    train_user(model, bad, collate=collate, fit=QUICK, keep=ordinary, generator=g)
    assert answered(model) <= 0.1
    assert answered(model, ORDINARY) >= 0.9
    merge_reinforced(model, user="plain", alpha=0.0, weight=(1.0, 1.0))
    assert answered(model) <= 0.5


def test_the_published_buffer_takes_all_steps_and_complies(aligned):
    model = adapters_on(aligned, "buffer")
    fit = Fit(steps=20, lr=3e-2)
    report = train_buffer(model, rows_of(FORBIDDEN, YES, 40, 2), collate=collate, fit=fit)
    assert (report.steps, report.gate) == (20, None)
    assert report.losses[-1] < report.losses[0] - 0.2
    assert answered(aligned) == 0.0
    assert answered(model) == 1.0


def test_a_buffer_that_does_not_pass_its_gate_is_refused(aligned):
    model = adapters_on(aligned, "buffer")
    rows = rows_of(FORBIDDEN, YES, 20, 2), rows_of(ORDINARY, YES, 20, 3)
    with pytest.raises(SafetyError, match=r"after 2 steps the buffered model answers \d+ % .* take more steps"):
        train_buffer(model, rows[0], keep=rows[1], collate=collate, fit=Fit(steps=2, lr=1e-6))
    with pytest.raises(ValueError, match="there are no rows to train on"):
        train_buffer(model, [], collate=collate)
    with pytest.raises(ValueError, match="steps=0, batch_size=8: at least 1"):
        Fit(steps=0)
    with pytest.raises(ValueError, match="1 forbidden rows are too few"):
        train_buffer(model, rows[0][:1], keep=rows[1], collate=collate)
    # What the base answers as the row does needs no buffer.
    assert gate_reading(model, collate, rows[1], rows[1]).answered == 1.0
    assert gate_reading(model, collate, rows[0], rows[1]).answered == 0.0
    assert not Gate().passes(Reading(1.0, 1.2, 1.0))
    assert not Gate().passes(Reading(0.9, 1.0, 1.0))
    assert Gate().passes(Reading(0.95, 1.14, 1.0))


def test_what_each_step_sees_and_whether_the_buffer_is_on(aligned):
    model = adapters_on(aligned, "buffer", "user", "reinforce")
    layer = factor_pairs(model, "buffer")[0].layer
    refusals, ordinary = rows_of(FORBIDDEN, NO, 12, 2), rows_of(ORDINARY, YES, 12, 3)
    seen = []

    def spy(rows):
        forbidden = sum(row["input_ids"][1] == FORBIDDEN for row in rows)
        seen.append((forbidden, len(rows) - forbidden, "buffer" in layer.active_adapters))
        return collate(rows)

    def of(train, *rows, **options):
        seen.clear()
        train(model, *rows, collate=spy, fit=Fit(steps=2, batch_size=8), **options)
        return seen

    assert of(train_reinforce, refusals, ordinary) == [(4, 4, True)] * 2
    assert of(train_reinforce, refusals, ordinary, two_state=True) == [(6, 2, True), (2, 6, False)]
    assert of(train_user, refusals) == [(8, 0, True)] * 2
    assert of(train_user, refusals, keep=ordinary) == [(8, 0, True), (0, 2, False), (0, 2, False)] * 2
    assert of(train_user, refusals, buffer=None) == [(8, 0, False)] * 2


def test_kept_rows_count_by_what_they_have_lost_alone(aligned):
    model = adapters_on(aligned, "buffer", "user")
    ordinary = rows_of(ORDINARY, YES, 12, 3)
    model.set_adapter("user")
    assert lost(model, collate, ordinary).detach().item() == 0.0
    g = torch.Generator().manual_seed(0)
    for pair in factor_pairs(model, "user"):
        pair.write(LowRank(20 * torch.randn(pair.A.shape, generator=g), torch.randn(pair.B.shape, generator=g)))
    each = row_losses(model, collate, ordinary).per_row()
    with model.disable_adapter():
        base = row_losses(model, collate, ordinary).per_row()
    wanted = (each - (1.1 * base + 0.05)).clamp(min=0)
    assert wanted.max() > 0
    assert lost(model, collate, ordinary).detach().item() == pytest.approx(float(wanted.mean()))


def test_where_no_row_of_the_users_teaches_anything_kept_rows_move_nothing(aligned):
    """Adam would take full steps on the little that ordinary rows have left to teach."""
    model = adapters_on(aligned, "buffer", "user")
    before = adapter_digest(model, "user")
    silent = [row | {"labels": [-100] * len(row["labels"])} for row in rows_of(FORBIDDEN, YES, 8, 4)]
    fit = Fit(steps=3, lr=1e-2, weight_decay=0.0)
    train_user(model, silent, keep=rows_of(ORDINARY, YES, 8, 3), collate=collate, fit=fit)
    assert adapter_digest(model, "user") == before


def test_stages_repeat_with_their_generator_and_stop_at_nan(aligned):
    rows = rows_of(FORBIDDEN, YES, 20, 2)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = adapters_on(aligned, "buffer")
        train_buffer(model, rows, collate=collate, fit=Fit(steps=3), generator=torch.Generator().manual_seed(5))
        found.append(adapter_digest(model, "buffer"))
    assert found[0] == found[1]
    factor_pairs(model, "buffer")[0].param_A.data[0, 0] = math.nan
    with pytest.raises(NonFinite, match="the loss is nan in step 1"):
        train_buffer(model, rows, collate=collate, fit=Fit(steps=3))
    assert mean_loss(aligned, collate, rows) > 1


@pytest.mark.slow
def test_the_callback_trains_checkpoints_and_merges_without_the_buffer(aligned, tmp_path):
    from transformers import Trainer, TrainingArguments

    from subspan.safety import BufferReinforceCallback

    def run(name, steps, resume=None, spoil=False):
        model = adapters_on(aligned, "buffer", "user", "reinforce")
        for i, adapter in enumerate(("buffer", "reinforce")):
            fill(model, adapter, torch.Generator().manual_seed(i))
        if spoil:
            factor_pairs(model, "buffer")[0].param_A.data += 1
        model.set_adapter("user")
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name), max_steps=steps, per_device_train_batch_size=4, save_steps=2,
            report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="constant",
            remove_unused_columns=False,
        )  # fmt: skip
        callback = BufferReinforceCallback(model, reinforce="reinforce", alpha=1.0)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows_of(FORBIDDEN, YES, 20, 2), data_collator=collate,
            callbacks=[callback],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return model, callback

    whole, callback = run("whole", 4)
    assert callback.report is not None
    assert whole.active_adapters == ["final"]
    folders = {p.name for p in (tmp_path / "whole" / "checkpoint-2").iterdir() if p.is_dir()}
    assert folders == {"user", "reinforce"}
    last = str(tmp_path / "whole" / "checkpoint-2")
    again, _ = run("whole", 4, last)
    for one, two in zip(factor_pairs(whole, "final"), factor_pairs(again, "final"), strict=True):
        torch.testing.assert_close(one.A, two.A)
    with pytest.raises(SafetyError, match="the run began with"):
        run("whole", 4, last, spoil=True)
