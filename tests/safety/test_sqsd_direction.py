"""Directions from adapters, models and data; steering; drift; which tokens are the answer."""

import json

import pytest
import torch
from torch import nn

from subspan.errors import BaseMismatch, DataError, NonFinite, TargetError
from subspan.linalg import LowRank
from subspan.safety import Direction, DriftCallback
from subspan.safety.sqsd.tokens import conversation, tokenise
from subspan.safety.sqsd.training import dpo_loss, encoded_rows, row_losses
from subspan.surgery import plain_layers, side_paths, undisturbed
from tests.safety.test_sqsd_risk import direction, small
from tests.tune.conftest import tokenizer


@pytest.fixture(scope="module")
def model():
    return small(torch.float32)


@pytest.fixture(scope="module")
def words():
    return tokenizer(chat=True)


@pytest.fixture(scope="module")
def llama():
    """One whose feed-forward layers can learn a constant answer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)).train()


FEED_FORWARD = ("up_proj", "down_proj")


def lora(model, **options):
    from peft import LoraConfig, get_peft_model

    settings = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**settings | options))


@pytest.mark.parametrize("rslora", [False, True])
def test_a_folder_of_pefts_gives_the_same_direction_as_the_live_adapter(tmp_path, rslora):
    options = {"rank_pattern": {"layers.1.self_attn.v_proj": 3}, "alpha_pattern": {"layers.0.self_attn.q_proj": 5}}
    tuned = lora(small(torch.float32), use_rslora=rslora, **options)
    tuned.save_pretrained(tmp_path)
    live, filed = Direction.from_adapter(tuned), Direction.from_adapter(tmp_path)
    assert set(live.factors) == set(filed.factors)
    assert live.scaling == pytest.approx(filed.scaling)
    assert len({round(s, 6) for s in filed.scaling.values()}) > 1
    assert live.digest() == Direction(filed.factors, live.scaling).digest()
    # a side path computes what peft's layer does
    ids = torch.randint(5, 50, (2, 7))
    plain = small(torch.float32).eval()
    with side_paths(plain_layers(plain), filed.factors, filed.scaling):
        logits = plain(ids).logits
    torch.testing.assert_close(logits, tuned.eval()(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_saved_direction_loads_in_plain_peft(model, tmp_path):
    from peft import PeftModel

    made = direction(model, 1, rank=3)
    made = Direction({n: LowRank(z.A.float(), z.B.float()) for n, z in made.factors.items()}, made.scaling)
    made.save(tmp_path)
    assert Direction.from_adapter(tmp_path).digest() == made.digest()
    tuned = PeftModel.from_pretrained(small(torch.float32), tmp_path).eval()
    assert Direction.from_adapter(tuned).digest() == made.digest()


def test_what_is_no_direction_is_refused(model, tmp_path):
    with pytest.raises(DataError, match="holds no adapter"):
        Direction.from_adapter(tmp_path)
    lora(small(torch.float32), init_lora_weights=True).save_pretrained(tmp_path / "untrained")
    with pytest.raises(DataError, match="never trained, its update is zero"):
        Direction.from_adapter(tmp_path / "untrained")
    lora(small(torch.float32), use_dora=True).save_pretrained(tmp_path / "dora")
    with pytest.raises(DataError, match="is a DoRA"):
        Direction.from_adapter(tmp_path / "dora")
    with pytest.raises(TargetError, match="adapter 'default' is Dora"):
        Direction.from_adapter(lora(small(torch.float32), use_dora=True))
    config = json.loads((tmp_path / "untrained" / "adapter_config.json").read_text())
    (tmp_path / "untrained" / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(DataError, match="is a IA3"):
        Direction.from_adapter(tmp_path / "untrained")
    z = LowRank(torch.full((2, 1), torch.nan), torch.ones(2, 1))
    with pytest.raises(DataError, match="not finite"):
        Direction({"a": z}, {"a": 1.0})


def test_two_models_give_their_difference_and_say_what_the_rank_keeps():
    before, after = small(torch.float32), small(torch.float32)
    generator = torch.Generator().manual_seed(0)
    layer = plain_layers(after)["model.decoder.layers.0.self_attn.q_proj"]
    low = torch.randn(16, 2, generator=generator) @ torch.randn(2, 16, generator=generator)
    noise = torch.randn(16, 16, generator=generator)
    with torch.no_grad():
        layer.weight += low
        plain_layers(after)["model.decoder.layers.1.fc1"].weight[:16] += noise
        after.lm_head.weight += 1
    found = Direction.from_models(before, after, rank=2)
    assert list(found.factors) == ["model.decoder.layers.0.self_attn.q_proj", "model.decoder.layers.1.fc1"]
    torch.testing.assert_close(found.factors["model.decoder.layers.0.self_attn.q_proj"].dense(), low, atol=1e-5, rtol=0)
    s = torch.linalg.svdvals(noise)
    assert found.kept["model.decoder.layers.0.self_attn.q_proj"] == pytest.approx(1, abs=1e-4)
    assert found.kept["model.decoder.layers.1.fc1"] == pytest.approx(
        float(s[:2].square().sum() / s.square().sum()), abs=1e-4
    )
    with pytest.raises(DataError, match="no direction between them"):
        Direction.from_models(before, before)
    with pytest.raises(BaseMismatch, match="in one model and"):
        Direction.from_models(before, small(hidden_size=8, word_embed_proj_dim=8))


def test_a_base_fingerprint_beside_the_adapter_is_checked(model, tmp_path):
    from subspan.surgery import export_plain_lora

    export_plain_lora(lora(small(torch.float32)), tmp_path)
    found = Direction.from_adapter(tmp_path)
    found.check(model)
    other = small(torch.float32)
    with torch.no_grad():
        plain_layers(other)["model.decoder.layers.0.self_attn.q_proj"].weight.mul_(2)
    with pytest.raises(BaseMismatch, match="weights differ"):
        found.check(other)


# ------------------------------------------------------------------------------------------------------- from data


def test_dpo_loss_is_log_two_at_the_start_and_prefers_the_chosen():
    zero = torch.zeros(3)
    assert float(dpo_loss(zero, zero - 5, zero, zero - 5)) == pytest.approx(0.6931472)
    assert float(dpo_loss(zero + 1, zero, zero, zero, beta=2.0)) == pytest.approx(0.126928, abs=1e-5)


def test_dpo_sums_over_the_answers_tokens_and_takes_its_beta(llama, words, monkeypatch):
    from subspan.safety.sqsd import training

    seen, loss = [], training.dpo_loss
    monkeypatch.setattr(training, "dpo_loss", lambda *a: seen.append(a) or loss(*a))
    data = [{"prompt": "w1", "chosen": "w30 w31 w32", "rejected": "w20"}] * 2
    options = dict(targets=FEED_FORWARD, steps=1, stop_margin=None, objective="dpo", beta=0.7)
    Direction.from_data(llama, words, data, **options)
    chosen, rejected, chosen_base, rejected_base, beta = seen[0]
    assert beta == 0.7
    for side, own, base in (("chosen", chosen, chosen_base), ("rejected", rejected, rejected_base)):
        with undisturbed(llama), torch.no_grad():
            total = -row_losses(llama, words, encoded_rows(words, data, 64, side)).total
        for found in (own, base):  # before the first step they are one
            torch.testing.assert_close(found.detach(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_training_makes_the_answers_likelier_and_leaves_the_model_alone(llama, words, objective):
    data = [{"prompt": f"w{i}", "answer": "w30 w31", "chosen": "w30 w31", "rejected": "w20"} for i in range(10)]
    before = {n: p.clone() for n, p in llama.named_parameters()}
    options = dict(targets=FEED_FORWARD, steps=12, batch_size=4, lr=2e-2, stop_margin=None, objective=objective)
    found = Direction.from_data(llama, words, data, **options)
    again = Direction.from_data(llama, words, data, **options)
    assert found.digest() == again.digest()
    assert all(torch.equal(before[n], p) and p.requires_grad for n, p in llama.named_parameters())
    assert all(p.grad is None for p in llama.parameters())
    answers, worse = encoded_rows(words, data, 64), encoded_rows(words, data, 64, "rejected")
    layers = plain_layers(llama)

    def gap():
        with undisturbed(llama), torch.no_grad():
            return float((row_losses(llama, words, worse).total - row_losses(llama, words, answers).total).mean())

    base = gap()
    with side_paths(layers, found.factors, found.scaling):
        assert gap() > base + 0.5


def test_training_stops_at_the_margin_and_at_nan(llama, words, monkeypatch):
    from subspan.safety.sqsd import training

    steps = []
    losses = training.row_losses
    monkeypatch.setattr(training, "row_losses", lambda *a: steps.append(1) or losses(*a))
    data = [{"prompt": f"w{i}", "answer": "w30"} for i in range(10)]
    Direction.from_data(llama, words, data, targets=FEED_FORWARD, steps=50, stop_margin=1e9)
    assert len(steps) == 6  # five steps and one look
    monkeypatch.setattr(training, "row_losses", lambda *a: training.Losses(*(x * torch.nan for x in losses(*a))))
    with pytest.raises(NonFinite, match="the loss is nan in step 1: lower the rate"):
        Direction.from_data(llama, words, data, targets=FEED_FORWARD)
    with pytest.raises(DataError, match="at least two rows"):
        Direction.from_data(llama, words, data[:1])
    with pytest.raises(ValueError, match="steps=0, batch_size=8: at least 1"):
        Direction.from_data(llama, words, data, steps=0)
    with pytest.raises(DataError, match="a pair has an empty answer"):
        Direction.from_data(llama, words, [{"prompt": "w1", "chosen": "w2", "rejected": ""}] * 2, objective="dpo")


def test_steering_follows_the_direction_and_warns_where_it_does_not(llama, words):
    data = [{"prompt": f"w{i}", "answer": "w30 w31"} for i in range(8)]
    found = Direction.from_data(llama, words, data, targets=FEED_FORWARD, steps=4, lr=8e-3)
    rows_ = encoded_rows(words, data, 64)
    probe = lambda m: -float(row_losses(m, words, rows_).per_row().mean())  # noqa: E731
    small_steps = (-0.2, -0.1, 0.0, 0.1, 0.2)  # far out an untrained model's loss is curved
    steering = found.validate(llama, probe, steps=small_steps)
    assert steering.tau == pytest.approx(1.0)
    whole = found.validate(llama, probe, steps=(0.0, 1.0))
    assert steering.values[2] == pytest.approx(whole.values[0])
    assert {*found.scaling.values()} != {1.0}
    with side_paths(plain_layers(llama), found.factors, found.scaling), undisturbed(llama), torch.no_grad():
        assert whole.values[1] == pytest.approx(probe(llama))  # a step of 1 is the adapter itself
    with pytest.warns(UserWarning, match="does not make the probe fall"):
        assert found.validate(llama, probe, "fall", small_steps).tau == pytest.approx(-1.0)
    with pytest.warns(UserWarning, match="tau 0.00"):
        found.validate(llama, lambda m: 1.0)
    with pytest.raises(ValueError, match="rise or fall"):
        found.validate(llama, probe, "up")


# ------------------------------------------------------------------------------------------------------------ drift


def trained(model, callback, steps=4):
    """SGD driven by hand, with the callback's hooks called as transformers does."""
    from transformers import TrainerControl, TrainerState, TrainingArguments

    args, control = TrainingArguments(report_to="none", use_cpu=True), TrainerControl()
    state = TrainerState(max_steps=steps)
    callback.on_train_begin(args, state, control, model=model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = torch.randint(5, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).logits.flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        state.global_step = step
        callback.on_step_end(args, state, control)
    logs = {}
    callback.on_log(args, state, control, logs=logs)
    return logs


@pytest.mark.parametrize("peft", [True, False])
def test_drift_is_the_cosine_of_what_training_changed(peft):
    # In float32, and away from A = 0, a copy of the factors that is none would follow them.
    model = lora(small(torch.float32)) if peft else small()
    model.eval()
    layers = plain_layers(model)

    def effective():
        out = {n: layer.weight.detach().clone() for n, layer in layers.items()}
        if peft:
            from subspan.surgery import factor_pairs

            for p in factor_pairs(model):
                out[p.name] += p.scaling * p.low_rank(torch.float64).dense()
        return out

    danger, safety = direction(small(), 1, names=("q_proj", "v_proj")), direction(small(), 2)
    start = effective()
    callback = DriftCallback(danger, safety, every=3)
    logs = trained(model, callback)
    assert [r["step"] for r in callback.history] == [3, 4]
    moved = {n: w - start[n] for n, w in effective().items()}
    for name, d in (("danger", danger), ("safety", safety)):
        expected = 0.0
        for layer, z in d.factors.items():
            length = moved[layer].norm() * z.dense().norm()
            expected += float((moved[layer] * z.dense()).sum() / length) if length > 0 else 0.0
        assert logs[f"drift_{name}"] == pytest.approx(expected, abs=1e-5)
    assert logs["step_danger"] != logs["drift_danger"]
    with pytest.raises(ValueError, match="at least 1 step"):
        DriftCallback(danger, safety, every=0)
    with pytest.raises(TargetError, match="none of the layers"):
        DriftCallback(danger, danger).on_train_begin(None, None, None, model=small().requires_grad_(False))


# ----------------------------------------------------------------------------------------------------------- tokens


def answers_of(tok, found):
    return tok.decode([i for i, label in zip(found.input_ids, found.labels, strict=True) if label >= 0])


def test_end_marks_come_from_the_template_and_other_models_thoughts_are_skipped(words):
    tok = tokenizer(chat=True)
    # a template that adds to a turn only while it is the last one, as Qwen3's does
    tok.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} </s> {% else %}<bot> "
        "{% if loop.last %}w39 {% endif %}{{ m['content'] }} </s> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<bot> {% endif %}"
    )
    turns = [("user", "w1"), ("assistant", "w2"), ("user", "w3"), ("assistant", "w4 w5")]
    messages = [{"role": r, "content": c} for r, c in turns]
    assert answers_of(tok, tokenise(tok, messages, 1)) == "w2 </s> w39 w4 w5 </s>"
    assert answers_of(tok, tokenise(tok, messages, 1, last_turn_only=True)) == "w39 w4 w5 </s>"
    tok.chat_template = "{{ messages[-1]['content'] }}{% if add_generation_prompt %} <bot>{% endif %}"
    with pytest.raises(DataError, match="row 7: this model's chat template"):
        tokenise(tok, messages, 7)


def test_without_a_template_or_offsets_the_answer_is_still_known():
    tok = tokenizer(chat=False)
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    tok.eos_token = " </s>"
    tok.eos_token = "</s>"

    class Slow:
        """Word by word, without offsets."""

        chat_template, bos_token, eos_token, is_fast = None, None, " </s>", False

        def __call__(self, text, add_special_tokens=False):
            return {"input_ids": [tok.convert_tokens_to_ids(w) for w in text.split()]}

    found = tokenise(Slow(), messages, 1)
    assert answers_of(tok, found) == "w3 </s>"
    assert found.labels[:2] == [-100, -100]

    class Merging(Slow):
        def __call__(self, text, add_special_tokens=False):
            return {"input_ids": [len(text.split())]}

    with pytest.raises(DataError, match="row 3: this tokenizer gives no offsets"):
        tokenise(Merging(), messages, 3)


def test_rows_of_the_usual_formats_become_conversations():
    def said(row, **names):
        return [m["content"] for m in conversation(row, 1, **names)]

    assert said({"instruction": "do", "context": "this", "response": "done", "category": "qa"}) == [
        "do\n\nthis",
        "done",
    ]
    assert said({"instruction": "do", "input": "", "output": "done"}) == ["do", "done"]
    assert said({"prompt": "a", "answer": "b", "text": "c"}) == ["a", "b"]
    assert said({"prompt": "a", "answer": "b", "text": "c", "note": "d"}, prompt="text", answer="note") == ["c", "d"]
    with pytest.raises(DataError, match="no column 'nothing'"):
        said({"prompt": "a", "answer": "b"}, answer="nothing")


@pytest.mark.slow
def test_smollm2s_answers_are_found_whole():
    from transformers import AutoTokenizer

    from subspan.data import model_source

    source = model_source("asset:smollm2-135m-instruct")
    tok = AutoTokenizer.from_pretrained(source.path, gguf_file=source.gguf_file)
    for text in ("It is  end.", "<|im_end|> quoted", "  spaced  ", "many\nlines\n\nhere", "naïve 日本語"):
        messages = [{"role": "user", "content": "end"}, {"role": "assistant", "content": text}]
        found = answers_of(tok, tokenise(tok, messages, 1))
        assert found.endswith("<|im_end|>")
        assert found.removesuffix("<|im_end|>").strip() == text.strip()
