"""Scores of rows on a small causal model, in float64 against peft and autograd one row at a time."""

import copy
import json
import weakref

import pytest
import torch

from subspan.errors import BaseMismatch, ConfigError, DataError, TargetError
from subspan.linalg import LowRank
from subspan.safety import Direction, RiskTable, SafetyRisk
from subspan.safety.sqsd.direction import fresh_state
from subspan.safety.sqsd.projection import FactorStep
from subspan.safety.sqsd.stream import row_hash, settings_hash
from subspan.surgery import plain_layers
from tests.tune.conftest import WORDS, tokenizer

TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")


def small(dtype=torch.float64, **changes):
    """An OPT, whose layer norms and softmax stay in float64 (Llama's go through float32), with dropout."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    shape = dict(vocab_size=50, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, dropout=0.5)
    shape |= dict(word_embed_proj_dim=16, max_position_embeddings=64, activation_function="gelu", pad_token_id=0)
    shape |= dict(bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
    return OPTForCausalLM(OPTConfig(**shape | changes)).to(dtype).train()


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def words():
    return tokenizer(chat=True)


def direction(model, seed, rank=2, names=TARGETS, scaling=2.0):
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, layer in plain_layers(model).items():
        if name.endswith(names):
            m, n = layer.weight.shape
            draw = [torch.randn(k, rank, generator=generator, dtype=torch.float64) * 0.1 for k in (m, n)]
            factors[name] = LowRank(*draw)
    return Direction(factors, dict.fromkeys(factors, scaling), f"seed {seed}")


@pytest.fixture(scope="module")
def trio(model):
    """danger, safety and an initial state, of unequal ranks."""
    return direction(model, 1, 2), direction(model, 2, 3), direction(model, 3, 4)


def rows(count=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        picks = torch.randint(0, 40, (3 + 2 * i,), generator=generator).tolist()
        said = [WORDS[k] for k in picks]
        out.append({"prompt": " ".join(said[: 2 + i]), "answer": " ".join(said[2 + i :])})
    return out


def by_autograd(model, words, data, danger, safety, state, scaling=None):
    """danger and safety terms with peft's LoRA, one row at a time, through dense matrices."""
    from peft import LoraConfig, get_peft_model

    r = next(iter(state.factors.values())).rank
    s = 2.0 if scaling is None else scaling
    config = LoraConfig(r=r, lora_alpha=s * r, target_modules=list(state.factors), lora_dropout=0.5)
    tuned = get_peft_model(copy.deepcopy(model), config).eval()
    modules = dict(tuned.named_modules())
    layers = {n: modules[f"base_model.model.{n}"] for n in state.factors}
    for name, layer in layers.items():
        layer.lora_A["default"].weight.data = state.factors[name].B.mT.double().clone()
        layer.lora_B["default"].weight.data = state.factors[name].A.double().clone()
    out = []
    for row in data:
        text = f"<user> {row['prompt']} </s> <bot> "
        prompt = words(text)["input_ids"]
        answer = words(f"{row['answer']} </s>")["input_ids"]
        ids = torch.tensor([prompt + answer])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        tuned.zero_grad()
        logits = tuned(input_ids=ids).logits[:, :-1]  # transformers' own loss goes through float32
        torch.nn.functional.cross_entropy(logits[0], labels[0, 1:]).backward()
        terms = []
        for v in (danger, safety):
            total = 0.0
            for name, layer in layers.items():
                if name not in danger.factors or name not in safety.factors:
                    continue
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                dw = -(b.grad @ a + b @ a.grad)
                z = v.factors[name].dense().double()
                total += float(((dw * z).sum() / (dw.norm() * z.norm())).detach())
            terms.append(total)
        out.append(terms)
    return torch.tensor(out, dtype=torch.float64)


def found(table):
    return torch.tensor([table["danger"].tolist(), table["safety"].tolist()], dtype=torch.float64).T


def test_t4_scores_equal_autograd_on_pefts_factors_row_by_row(model, words, trio):
    danger, safety, state = trio
    data = rows(7)
    one_by_one = by_autograd(model, words, data, *trio)
    for batch_tokens in (1, 60):
        risk = SafetyRisk(model, danger, safety, tokenizer=words, init=state, batch_tokens=batch_tokens)
        got = found(risk.score(data))
        torch.testing.assert_close(got, one_by_one, rtol=1e-8, atol=1e-8)
    single = small(torch.float32)
    risk = SafetyRisk(single, danger, safety, tokenizer=words, init=state)
    torch.testing.assert_close(found(risk.score(data)), got, rtol=1e-4, atol=1e-4)


def test_the_papers_two_states_take_each_term_at_its_own(model, words, trio):
    danger, safety, state = trio
    data = rows(5)
    risk = SafetyRisk(model, danger, safety, tokenizer=words, state="paper", init=state, safety_scale=0.8)
    table = risk.score(data)
    got = found(table)
    shared = SafetyRisk(model, danger, safety, tokenizer=words, init=state).score(data)
    assert table["loss"].tolist() == shared["loss"].tolist()  # loss and gradient norm are those at init
    at_init = by_autograd(model, words, data, danger, safety, state)
    at_safety = by_autograd(model, words, data, danger, safety, safety, scaling=0.8)
    torch.testing.assert_close(got, torch.stack([at_init[:, 0], at_safety[:, 1]], 1), rtol=1e-8, atol=1e-8)


def test_full_fine_tuning_takes_the_step_of_the_weights_themselves(model, words, trio):
    from subspan.safety.sqsd.training import encoded_rows, row_losses

    danger, safety, _ = trio
    data = rows(4)
    risk = SafetyRisk(model, danger, safety, tokenizer=words, state="zero", update="full")
    table = risk.score(data)
    exact = copy.deepcopy(model).eval()
    layers = plain_layers(exact)
    for place, row in enumerate(encoded_rows(words, data, 64)):
        exact.zero_grad()
        row_losses(exact, words, [row]).per_row().sum().backward()
        for column, v in (("danger", danger), ("safety", safety)):
            steps = {n: -layers[n].weight.grad for n in v.factors}
            cosines = [(steps[n] * z.dense()).sum() / (steps[n].norm() * z.norm()) for n, z in v.factors.items()]
            assert table[column][place] == pytest.approx(float(sum(cosines)), abs=1e-8)
        norm = sum(float(layers[n].weight.grad.square().sum()) for n in danger.factors) ** 0.5
        assert table["grad_norm"][place] == pytest.approx(norm, rel=1e-8)


def test_t5_swapping_the_directions_changes_the_sign(model, words, trio):
    danger, safety, state = trio
    data = rows(5)
    one = SafetyRisk(model, danger, safety, tokenizer=words, init=state).score(data)
    other = SafetyRisk(model, safety, danger, tokenizer=words, init=state).score(data)
    torch.testing.assert_close(torch.tensor(one["score"]), -torch.tensor(other["score"]), rtol=0, atol=1e-12)
    assert (abs(one["danger"]) <= len(one.facts["modules"])).all()
    mean = sum(m["mean"] for m in one.facts["modules"].values())
    share = sum(m["share"] for m in one.facts["modules"].values())
    assert mean == pytest.approx(one["score"].mean())
    assert share == pytest.approx(1.0)


def test_one_term_alone_is_the_score_with_its_sign(model, words, trio):
    danger, safety, state = trio
    both = SafetyRisk(model, danger, safety, tokenizer=words, init=state).score(rows(1)).facts["null_deviation"]
    for terms, sign in (("danger", 1), ("safety", -1)):
        table = SafetyRisk(model, danger, safety, tokenizer=words, init=state, terms=terms).score(rows(3))
        assert table["score"].tolist() == (sign * table[terms]).tolist()
        assert table.facts["null_deviation"] == pytest.approx(both / 2**0.5)


def test_rows_beyond_the_first_chunk_keep_their_numbers(model, words, trio, monkeypatch):
    from subspan.safety.sqsd import risk as module

    score = SafetyRisk(model, trio[0], trio[1], tokenizer=words, init=trio[2]).score
    whole = score(rows(7))
    monkeypatch.setattr(module, "_CHUNK", 3)
    parts = score(rows(7))
    assert parts["row"].tolist() == list(range(1, 8))
    torch.testing.assert_close(torch.tensor(parts["score"]), torch.tensor(whole["score"]), rtol=1e-8, atol=1e-8)


def test_a_layer_that_runs_twice_is_refused(words):
    twice = small()
    blocks = twice.model.decoder.layers
    blocks[1].self_attn.q_proj = blocks[0].self_attn.q_proj
    one, two, three = (direction(twice, k, names="q_proj") for k in (1, 2, 3))
    with pytest.raises(TargetError, match="is used twice in one forward pass"):
        SafetyRisk(twice, one, two, tokenizer=words, init=three).score(rows(2))


def test_t7_rows_that_made_a_direction_score_high_along_it(model, words):
    data = rows(6)
    layers = {n: m for n, m in plain_layers(model).items() if n.endswith(TARGETS)}
    start = fresh_state(layers, 4)
    blank = direction(model, 9)
    risk = SafetyRisk(model, direction(model, 8), blank, tokenizer=words, init=start)
    from subspan.safety.sqsd.projection import factor_gradients
    from subspan.safety.sqsd.tokens import conversation, tokenise
    from subspan.surgery.per_example import ExampleRecorder

    sums = {}
    recorder = ExampleRecorder(layers)
    tokens = [tokenise(words, conversation(row, 1), 1) for row in data]
    model.eval()

    def note(name, gradient):
        z = start.factors[name]
        g = factor_gradients(gradient.D, gradient.X, LowRank(z.A.double(), z.B.double()), start.scaling[name])
        sums[name] = -g.A.sum(0)

    from subspan.surgery.answers import answer_batch, answer_logits, target_losses

    batch = answer_batch([{"input_ids": t.input_ids, "labels": t.labels} for t in tokens], 0)
    recorder.backward(target_losses(*answer_logits(model, batch)).per_row(), note)
    recorder.remove()
    model.train()
    step = Direction({n: LowRank(g, start.factors[n].B.double()) for n, g in sums.items()}, start.scaling, "one step")
    table = SafetyRisk(model, step, blank, tokenizer=words, init=start, terms="danger").score(data)
    assert all(m["mean"] > 0 for m in table.facts["modules"].values())
    assert set(risk.names) == set(sums)


def test_t8_the_loss_on_danger_rows_changes_as_predicted_to_first_order(model, words, trio):
    """Halving the step quarters what <dW, gradient> leaves unexplained."""
    from subspan.safety.sqsd.projection import FactorGradients, factor_gradients
    from subspan.safety.sqsd.training import encoded_rows, row_losses
    from subspan.surgery import side_paths, undisturbed
    from subspan.surgery.per_example import ExampleRecorder

    _, _, state = trio
    layers = {n: plain_layers(model)[n] for n in state.factors}
    row, harm = encoded_rows(words, rows(1), 99), encoded_rows(words, rows(4, seed=5), 99)

    def gradients(what, factors):
        out = {}
        recorder = ExampleRecorder(layers)
        with side_paths(layers, factors, state.scaling):
            losses = row_losses(model, words, what).per_row()

            def note(name, g):
                z = factors[name]
                out[name] = FactorGradients(*(x.mean(0) for x in factor_gradients(g.D, g.X, z, state.scaling[name])))

            recorder.backward(losses, note)
        recorder.remove()
        return losses.mean().item(), out

    with undisturbed(model):
        _, own = gradients(row, state.factors)
        base, slope = gradients(harm, state.factors)
        predicted = -sum(float((own[n].A * slope[n].A).sum() + (own[n].B * slope[n].B).sum()) for n in own)
        errors = []
        for e in (2e-3, 1e-3):
            moved = {n: LowRank(z.A - e * own[n].A, z.B - e * own[n].B) for n, z in state.factors.items()}
            errors.append(abs(gradients(harm, moved)[0] - base - e * predicted))
    assert 1.9 <= torch.tensor(errors[0] / errors[1]).log2() <= 2.1


def test_t9_order_and_missing_layers_do_not_matter(model, words, trio):
    danger, safety, state = trio
    data = rows()
    whole = SafetyRisk(model, danger, safety, tokenizer=words, init=state, batch_tokens=50).score(data)
    turned = SafetyRisk(model, danger, safety, tokenizer=words, init=state, batch_tokens=70).score(data[::-1])
    torch.testing.assert_close(
        torch.tensor(whole["score"]), torch.tensor(turned["score"][::-1].copy()), rtol=1e-8, atol=1e-8
    )
    fewer = direction(model, 2, 3, names=("q_proj", "out_proj"))
    with pytest.warns(UserWarning, match="4 layers are compared; not common to all: 4 of danger, 4 of init"):
        partial = SafetyRisk(model, danger, fewer, tokenizer=words, init=state).score(data)
    expected = by_autograd(model, words, data, danger, fewer, state)
    torch.testing.assert_close(found(partial), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_t11_checkpointing_and_bfloat16_keep_the_ranking(words, trio):
    danger, safety, state = trio
    data = [row for seed in range(10) for row in rows(10, seed)]
    exact = SafetyRisk(small(), danger, safety, tokenizer=words, init=state).score(data)["score"]
    half = small(torch.bfloat16)
    half.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = SafetyRisk(half, danger, safety, tokenizer=words, init=state).score(data)["score"]
    from scipy.stats import spearmanr

    assert spearmanr(exact, checkpointed).statistic >= 0.99
    plain = SafetyRisk(small(torch.bfloat16), danger, safety, tokenizer=words, init=state).score(data)["score"]
    torch.testing.assert_close(torch.tensor(plain), torch.tensor(checkpointed))


# -------------------------------------------------------------------------------------------------------- section 9


def test_rows_without_a_score_say_why_and_leave_their_neighbours_alone(model, words, trio):
    danger, safety, state = trio
    data = rows(4)
    odd = [{"prompt": "w1", "answer": " "}, {"prompt": "w1", "answer": None}]
    risk = SafetyRisk(model, danger, safety, tokenizer=words, init=state)
    table = risk.score([data[0], *odd, *data[1:]])
    assert [r for r in table["reason"] if r] == ["the answer is empty"] * 2
    assert torch.tensor(table["score"]).isnan().tolist() == [False, True, True, False, False, False]
    clean = risk.score(data)
    torch.testing.assert_close(torch.tensor(table["score"][[0, 3, 4, 5]]), torch.tensor(clean["score"]))
    assert table["row"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_loss_that_is_not_finite_gives_a_reason(words, trio):
    broken = small()
    with torch.no_grad():
        broken.model.decoder.embed_tokens.weight[words.convert_tokens_to_ids("w39")] = torch.inf
    data = [row for row in rows(5) if "w39" not in row["prompt"] + row["answer"]]
    data.append({"prompt": "w39", "answer": "w2"})
    table = SafetyRisk(broken, trio[0], trio[1], tokenizer=words, init=trio[2]).score(data)
    assert table["reason"].tolist()[-1] == "the loss is not finite"
    assert len(data) > 2
    assert torch.tensor(table["score"][:-1]).isfinite().all()


def test_duplicates_get_equal_scores_and_one_row_is_enough(model, words, trio):
    risk = SafetyRisk(model, trio[0], trio[1], tokenizer=words, init=trio[2], batch_tokens=40)
    data = rows(5)
    table = risk.score([*data, data[2], data[2]])
    assert table["score"][2] == pytest.approx(table["score"][5], abs=1e-9)
    assert table["score"][5] == pytest.approx(table["score"][6], abs=1e-9)
    assert len({table["hash"][i] for i in (2, 5, 6)}) == 1
    alone = risk.score([data[2]])
    assert alone["score"][0] == pytest.approx(table["score"][2], abs=1e-9)


def test_one_module_has_no_jackknife_error(model, words):
    one = [direction(model, k, names="layers.0.self_attn.out_proj") for k in (1, 2, 3)]
    table = SafetyRisk(model, one[0], one[1], tokenizer=words, init=one[2]).score(rows(2))
    assert torch.tensor(table["se"]).isnan().all()
    assert torch.tensor(table["score"]).isfinite().all()


def test_long_rows_lose_the_beginning_of_the_prompt_and_then_the_end_of_the_answer(model, words, trio):
    risk = SafetyRisk(model, trio[0], trio[1], tokenizer=words, init=trio[2], max_length=8)
    long = {"prompt": " ".join(WORDS[:20]), "answer": "w1 w2 w3"}
    row = risk._row(long, 1)
    assert words.decode(row.tokens.input_ids) == "w18 w19 </s> <bot> w1 w2 w3 </s>"
    assert row.tokens.labels == [-100] * 4 + row.tokens.input_ids[4:]
    longer = risk._row({"prompt": "w0", "answer": " ".join(WORDS[:20])}, 2).tokens
    assert words.decode(longer.input_ids) == "<bot> w0 w1 w2 w3 w4 w5 w6"
    assert longer.labels[0] == -100
    assert longer.labels[1:] == longer.input_ids[1:]
    assert torch.tensor(risk.score([long])["score"]).isfinite().all()


def test_the_model_is_left_as_it_was_also_after_an_exception(words, trio):
    from peft import LoraConfig, get_peft_model

    data = rows(3)
    expected = SafetyRisk(small(), trio[0], trio[1], tokenizer=words, init=trio[2]).score(data)
    tuned = get_peft_model(small(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    tuned.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    before = [p.requires_grad for p in tuned.parameters()], [m.training for m in tuned.modules()], tuned.active_adapters
    risk = SafetyRisk(tuned, trio[0], trio[1], tokenizer=words, init=trio[2])
    torch.testing.assert_close(torch.tensor(risk.score(data)["score"]), torch.tensor(expected["score"]))
    risk._norms["danger"] = None
    with pytest.raises(AttributeError):
        risk.score(data)
    after = [p.requires_grad for p in tuned.parameters()], [m.training for m in tuned.modules()], tuned.active_adapters
    assert before == after
    assert not any(m._forward_hooks for m in tuned.modules())
    tuned.merge_adapter()
    with pytest.raises(ValueError, match="merged into the base weights"):
        risk.score(data)


def test_conversations_count_every_answer_or_the_last(model, words, trio):
    turns = [("user", "w1"), ("assistant", "w2 w3"), ("user", "w4"), ("assistant", "w5")]
    data = [{"messages": [{"role": r, "content": c} for r, c in turns]}]
    risk = SafetyRisk(model, trio[0], trio[1], tokenizer=words, init=trio[2])
    assert risk.score(data)["n_answer_tokens"].tolist() == [5]
    last = SafetyRisk(model, trio[0], trio[1], tokenizer=words, init=trio[2], last_turn_only=True)
    assert last.score(data)["n_answer_tokens"].tolist() == [2]
    with pytest.raises(DataError, match="row 1: messages should be a list"):
        risk.score([{"messages": [{"from": "human"}]}])
    with pytest.raises(DataError, match="columns are: prompt, said"):
        risk.score([{"prompt": "w1", "said": "w2"}])


def test_what_cannot_work_is_refused_with_the_reason(model, words, trio, tmp_path):
    danger, safety, state = trio
    for options, message in (
        ({"init": None}, "state 'shared' takes gradients at a trained adapter"),
        ({"state": "zero"}, "leave init out"),
        ({"metric": "l1"}, "metric must be one of cosine"),
        ({"max_length": 1}, "max_length=1"),
    ):
        with pytest.raises(ValueError, match=message):
            SafetyRisk(model, danger, safety, **{"init": state, "tokenizer": words} | options)
    twice = Direction(danger.factors, dict.fromkeys(danger.factors, 5.0))
    with pytest.raises(ValueError, match="every score would be 0"):
        SafetyRisk(model, danger, twice, init=state)
    with pytest.raises(BaseMismatch, match=r"seed 1 is of another base model: .*layers.0.self_attn.k_proj is"):
        SafetyRisk(small(hidden_size=8, word_embed_proj_dim=8), danger, safety, init=state)
    other = Direction({"h.0.attn": next(iter(danger.factors.values()))}, {"h.0.attn": 1.0}, "gpt")
    with pytest.raises(BaseMismatch, match=r"gpt is of another base model: it has h.0.attn"):
        SafetyRisk(model, other, safety, init=state)
    with pytest.raises(TargetError, match="no linear layer is common"):
        SafetyRisk(model, direction(model, 1, names="q_proj"), direction(model, 1, names="v_proj"), init=state)
    with pytest.raises(ValueError, match="need the tokenizer"):
        SafetyRisk(model, danger, safety, init=state).score(rows(1))
    with pytest.raises(DataError, match="no rows"):
        SafetyRisk(model, danger, safety, init=state).score([])


# ------------------------------------------------------------------------------------------------- files and resuming


class Killed(Exception):
    pass


def test_a_killed_audit_goes_on_where_it_stopped_with_equal_bits(model, words, trio, tmp_path):
    data = rows(8)
    options = dict(tokenizer=words, init=trio[2], batch_tokens=60)
    whole = SafetyRisk(model, trio[0], trio[1], **options).score(data)
    out, scored = tmp_path / "scores.parquet", []

    def stop(done, total):
        if done >= 3:
            raise Killed

    with pytest.raises(Killed):
        SafetyRisk(model, trio[0], trio[1], **options).score(data, out, progress=stop)
    part = tmp_path / "scores.parquet.part"
    assert not out.exists()
    with part.open("ab") as file:  # a kill in the middle of a write
        file.write(b'{"rows": [{"row": 7, "ha')
    with pytest.raises(Killed):  # and another one after the next batch
        SafetyRisk(model, trio[0], trio[1], **options).score(data, out, progress=lambda done, _: stop(done - 2, None))
    risk = SafetyRisk(model, trio[0], trio[1], **options)
    score_batch = risk._score_batch
    risk._score_batch = lambda batch, recorder: scored.extend(r.number for r in batch) or score_batch(batch, recorder)
    table = risk.score(data, out)
    assert 0 < len(scored) < 8
    for name in whole.columns:
        assert table[name].tolist() == whole[name].tolist() or name == "se"
    assert table.facts["modules"] == whole.facts["modules"]
    assert not part.exists()
    assert RiskTable.read(out)["score"].tolist() == whole["score"].tolist()
    scored.clear()
    assert risk.score(data, out)["score"].tolist() == whole["score"].tolist()
    assert scored == []  # a finished audit is read, not repeated


def test_the_order_of_columns_makes_no_other_row():
    assert row_hash({"a": 1, "b": 2}) == row_hash({"b": 2, "a": 1}) != row_hash({"a": 2, "b": 1})


def test_resuming_with_another_batch_size_scores_no_row_twice(model, words, trio, tmp_path):
    data, out = rows(8), tmp_path / "scores.csv"

    def stop(done, total):
        if done >= 3:
            raise Killed

    options = dict(tokenizer=words, init=trio[2])
    with pytest.raises(Killed):
        SafetyRisk(model, trio[0], trio[1], batch_tokens=30, **options).score(data, out, progress=stop)
    table = SafetyRisk(model, trio[0], trio[1], batch_tokens=4096, **options).score(data, out)
    mean = sum(m["mean"] for m in table.facts["modules"].values())
    assert mean == pytest.approx(table["score"].mean())


def test_resuming_with_other_settings_or_rows_is_refused(model, words, trio, tmp_path):
    data, out = rows(6), tmp_path / "scores.csv"

    def stop(done, total):
        raise Killed

    def risk(**changes):
        return SafetyRisk(
            model, trio[0], trio[1], **{"tokenizer": words, "init": trio[2], "batch_tokens": 30} | changes
        )

    with pytest.raises(Killed):
        risk().score(data, out, progress=stop)
    with pytest.raises(ConfigError, match=r"other settings .metric: 'cosine' there, 'dot' here"):
        risk(metric="dot").score(data, out)
    shortest = min(range(6), key=lambda i: len(data[i]["prompt"]))
    changed = [row if i != shortest else {"prompt": "w9", "answer": "w9"} for i, row in enumerate(data)]
    with pytest.raises(DataError, match="is not the one that was scored before"):
        risk().score(changed, out)
    risk().score(data, out)
    with pytest.raises(ConfigError, match="other settings"):
        risk(metric="dot").score(data, out)
    with pytest.raises(ConfigError, match="scores of other rows"):
        risk().score(data[:5], out)
    assert len(risk(metric="dot").score(data[:5], out, resume=False)) == 5


def test_whatever_changes_a_score_is_in_the_settings(model, trio):
    def settings(tok=None, **changes):
        options = {"init": trio[2], "tokenizer": tok or tokenizer(chat=True), "batch_tokens": 30} | changes
        return settings_hash(SafetyRisk(model, trio[0], trio[1], **options).settings)

    other = tokenizer(chat=True)
    other.chat_template += " "
    changes = [{"metric": "dot"}, {"update": "full"}, {"terms": "danger"}, {"safety_scale": 0.5}, {"max_length": 9}]
    changes += [{"last_turn_only": True}, {"prompt": "a"}, {"answer": "b"}, {"init": trio[0]}, {"tok": other}]
    found = [settings(), *(settings(**c) for c in changes)]
    assert len(set(found)) == len(found)
    assert settings(batch_tokens=99) == found[0]  # it changes none


def test_rows_that_are_tokens_already_and_a_source_are_taken(model, trio):
    data = [{"input_ids": [4, 7, 5, 8, 2], "labels": [-100, -100, -100, 8, 2], "source": "web"}]
    data.append({"input_ids": [4, 7], "labels": [-100, -100], "source": "chat"})
    table = SafetyRisk(model, trio[0], trio[1], init=trio[2]).score(data)
    assert table["source"].tolist() == ["web", "chat"]
    assert table["reason"].tolist() == ["", "no token of an answer"]


def test_scores_do_not_keep_gradients(model, words, trio, monkeypatch):
    """Constant memory: a layer's gradients are gone when the next batch's come."""
    project, seen = FactorStep.project, []

    def watched(self, D, X):
        alive = [r() for r in seen if r() is not None]
        assert len(alive) <= 2  # those of the layer before, which autograd may still hold
        seen.extend((weakref.ref(D), weakref.ref(X)))
        return project(self, D, X)

    monkeypatch.setattr(FactorStep, "project", watched)
    risk = SafetyRisk(model, trio[0], trio[1], tokenizer=words, init=trio[2], batch_tokens=30)
    risk.score(rows(6))
    assert len(seen) > 2 * len(risk.names)
    assert not any(r() is not None for r in seen)
    assert all(p.grad is None for p in model.parameters())


def test_settings_are_written_with_the_scores(model, words, trio, tmp_path):
    risk = SafetyRisk(model, trio[0], trio[1], tokenizer=words, init=trio[2])
    risk.score(rows(3), tmp_path / "scores.csv")
    facts = json.loads((tmp_path / "scores.json").read_text())
    assert facts["settings"]["danger"] == trio[0].digest()
    assert facts["null_deviation"] > 0
