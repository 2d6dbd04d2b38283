"""Training grown networks: T2, T3, T9 and T10 of the specification, optimiser state, rates, monitor and callback."""

import copy
import warnings

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from subspan.claims.width_expansion import CharGPT
from subspan.optim import MuonAdamW
from subspan.resize import (
    TrapMonitor,
    asymmetric_state_reset,
    escape_ratio,
    expand_optimizer_state,
    expand_width,
    fold_width,
    suggest_lr,
    trap_projected,
    use_of_width,
)
from subspan.resize.width.model import WidthReport
from tests.resize.width_models import network, seeded

tf.logging.set_verbosity_error()
tf.logging.disable_progress_bar()
SYMBOLS = 40


def char_gpt():
    torch.manual_seed(0)
    return CharGPT(SYMBOLS, 32).double()


def gpt2(**changes):
    return network("gpt2", torch.float64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **changes)


def loss(model, step=0):
    ids = torch.randint(SYMBOLS, (4, 13), generator=seeded(step))
    out = model(ids[:, :-1])
    return F.cross_entropy(getattr(out, "logits", out).flatten(0, 1), ids[:, 1:].flatten())


def steps(model, optimizer, count, start=0):
    for step in range(start, start + count):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def without_key_bias(key, x):
    """Softmax does not see a key's bias: its gradient is rounding, which Adam without epsilon takes for a direction."""
    return torch.cat([x[:16], x[32:]]) if key.endswith("c_attn.bias") else x


def furthest(a, b):
    """The largest difference of two networks' parameters."""
    return max((without_key_bias(k, x) - without_key_bias(k, b[k])).abs().max().item() for k, x in a.items())


def hidden(model):
    return {n: p for n, p in model.named_parameters() if n.startswith("blocks") and p.ndim == 2}


def grown(model, n=2, ffn_factor=None, **options) -> tuple[nn.Module, WidthReport]:
    return expand_width(model, n, ffn_factor, verify=False, generator=seeded(), **options)


@pytest.mark.parametrize(("n", "noise_db", "noise"), [(2, None, "row"), (2, 20.0, "balanced"), (3, 20.0, "balanced")])
def test_t2_gradients_of_exact_and_balanced_clones_lie_in_the_trap(n, noise_db, noise):
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        big, _ = grown(char_gpt().to(dtype), n, noise_db=noise_db, noise=noise)
        loss(big).backward()
        for name, p in hidden(big).items():
            assert escape_ratio(p.grad, n) <= allowed, name


def test_t2_column_blocks_are_equal_with_any_noise():
    big, _ = grown(char_gpt(), 3, noise_db=20.0)
    loss(big).backward()
    for name, p in hidden(big).items():
        a, *others = p.grad.chunk(3, 1)
        assert all((a - b).norm() <= 1e-12 * a.norm() for b in others), name
        assert torch.linalg.matrix_rank(p.grad, rtol=1e-10) <= p.shape[1] // 3


def test_t9_noise_by_rows_reaches_the_gradients_of_all_but_the_last_writer():
    big, _ = grown(char_gpt(), 2, noise_db=40.0)
    loss(big).backward()
    escaped = {name: escape_ratio(p.grad, 2).item() for name, p in hidden(big).items()}
    last = escaped.pop("blocks.1.down.weight")
    assert last < 1e-12
    assert min(escaped.values()) > 1e-5, escaped


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, 1.0, momentum=0.9),
    # A symbol that never occurs has a gradient of zero: 0 / 1e-25, not 0 / 0.
    "adamw": lambda groups: torch.optim.Adam(groups, 1.0, eps=1e-25),
}


def multiplied(model, report, optimizer, lr):
    """The seed's parameters, each at the rate that the wide run amounts to."""
    rates = report.lr_multipliers(optimizer)
    return [{"params": [p], "lr": lr * rates[name]} for name, p in model.named_parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["own", "gpt2", "gpt2-tied"])
def test_t3_a_folded_exact_run_is_a_run_of_the_seed_at_other_rates(optimizer, kind):
    model = char_gpt() if kind == "own" else gpt2(tie_word_embeddings=kind.endswith("tied"))
    big, report = grown(model, 2, 3, noise_db=None, untie=kind != "gpt2-tied")
    lr = {"sgd": 0.02, "adamw": 1e-3}[optimizer]
    seeds = OPTIMIZERS[optimizer](multiplied(model, report, optimizer, lr))
    wide = OPTIMIZERS[optimizer]([{"params": list(big.parameters()), "lr": lr}])
    before = copy.deepcopy(model.state_dict())
    steps(model, seeds, 6)
    steps(big, wide, 6)
    assert furthest(fold_width(big, 2, 3).state_dict(), model.state_dict()) < 1e-10
    assert furthest(before, model.state_dict()) > 1e-3


def test_t3_an_isotropic_step_folds_by_the_roots():
    model = char_gpt()
    big, report = grown(model, 2, 3, noise_db=None)
    for name, scale in (("muon_unscaled", "none"), ("muon", "match_rms")):
        rates = report.lr_multipliers(name)
        assert rates["blocks.0.attn.q.weight"] == pytest.approx(1 if scale == "none" else 2**0.5)
        nets = [copy.deepcopy(net) for net in (model, big)]
        for net in nets:
            loss(net).backward()
            own = hidden(net)
            groups = [{"params": [p], "lr": 1e-2 * (rates[n] if net is nets[0] else 1.0)} for n, p in own.items()]
            MuonAdamW(groups, ns="exact", scale=scale).step()
        assert furthest(fold_width(nets[1], 2, 3).state_dict(), nets[0].state_dict()) < 1e-10


def test_multipliers_are_those_of_the_table():
    _, report = grown(char_gpt(), 2, 3)
    want = {  # hidden, FFN up, FFN down, embedding, head, norm
        "sgd": (1, 2 / 3, 3 / 2, 1 / 2, 2, 1 / 2),
        "adamw": (2, 2, 3, 1, 2, 1),
        "muon_unscaled": (1, (2 / 3) ** 0.5, 1.5**0.5, 1, 2, 1),
    }
    names = ("blocks.0.attn.k.weight", "blocks.0.up.weight", "blocks.0.down.weight", "tok.weight", "head.weight",
             "norm.weight")  # fmt: skip
    for optimizer, figures in want.items():
        found = report.lr_multipliers(optimizer)
        assert [found[n] for n in names] == pytest.approx(figures)
    assert report.lr_multipliers("lion") == report.lr_multipliers("adamw")
    experts = grown(network("mixtral"))[1].lr_multipliers("muon")["model.layers.0.mlp.experts.down_proj"]
    assert experts == 2  # a stack is no matrix: AdamW trains it
    with pytest.raises(ValueError, match="unknown optimizer 'adafactor'"):
        report.lr_multipliers("adafactor")


def test_suggested_rates_undo_the_multipliers():
    big, report = grown(char_gpt(), 2, 3)
    big.pos.weight.requires_grad = False
    groups = suggest_lr(1e-3, big, "adamw", factor=2, ffn_factor=3)
    placed = {name: group["lr"] for group in groups for name, _ in group["params"]}
    assert set(placed) == {n for n, p in big.named_parameters() if p.requires_grad}
    for name, lr in placed.items():
        assert lr * report.lr_multipliers("adamw")[name] == pytest.approx(1e-3)
    torch.optim.AdamW(groups)


@pytest.mark.parametrize("tied", [False, True])  # a tie that is kept scales the last norm
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_grown_optimiser_state_goes_on_as_the_seed_s(optimizer, tied):
    model = gpt2(tie_word_embeddings=tied)
    lr = {"sgd": 0.02, "adamw": 1e-3}[optimizer]
    first = OPTIMIZERS[optimizer]([{"params": list(model.parameters()), "lr": lr}])
    steps(model, first, 4)
    big, report = grown(model, 2, 3, noise_db=None, untie=not tied)
    wide = OPTIMIZERS[optimizer]([{"params": list(big.parameters()), "lr": lr}])
    state = expand_optimizer_state(first, model, big, 2, 3)
    wide.load_state_dict(state)
    assert [state["param_groups"][0]["param_names"]] == [[n for n, _ in big.named_parameters()]]
    rates = multiplied(model, report, optimizer, lr)
    seeds = OPTIMIZERS[optimizer](rates)
    for p in model.parameters():
        seeds.state[p] = first.state[p]
    steps(model, seeds, 4, start=4)
    steps(big, wide, 4, start=4)
    assert furthest(fold_width(big, 2, 3).state_dict(), model.state_dict()) < 1e-12


def test_grown_state_of_an_untied_head_and_what_cannot_be_grown():
    model = network("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    steps(model, optimizer, 1)
    big, _ = grown(model)
    state = expand_optimizer_state(optimizer, model, big)
    assert all(torch.equal(s["max_exp_avg_sq"], s["exp_avg_sq"]) for s in state["state"].values())  # of one step
    assert state["param_groups"][0]["param_names"][-1] == "lm_head.weight"
    torch.optim.AdamW(big.parameters()).load_state_dict(state)
    with pytest.raises(ValueError, match="not the seed's"):
        expand_optimizer_state(torch.optim.SGD([torch.zeros(3)], 1.0), model, big)
    odd = torch.optim.Adafactor(model.parameters())
    steps(model, odd, 1)
    with pytest.raises(ValueError, match=r"row_var.*cannot be grown"):
        expand_optimizer_state(odd, model, big)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_resetting_the_moments_of_clones_leaves_the_trap(name):
    model = char_gpt()

    def optimizer_for(net):
        if name == "AdamW":
            return torch.optim.AdamW(net.parameters(), 1e-3)
        return MuonAdamW(list(hidden(net).values()), 1e-2, scale="match_rms")

    first = optimizer_for(model)
    steps(model, first, 2)
    big, _ = grown(model, 2, noise_db=None)
    optimizer = optimizer_for(big)
    with pytest.raises(ValueError, match="no moments"):
        asymmetric_state_reset(optimizer, big)
    optimizer.load_state_dict(expand_optimizer_state(first, model, big))
    monitor = TrapMonitor(big)
    assert asymmetric_state_reset(optimizer, big) == 12 * (2 if name == "AdamW" else 1)
    moments = optimizer.state[big.blocks[0].up.weight]["exp_avg" if name == "AdamW" else "momentum_buffer"]
    assert moments[:128].any()
    assert not moments[128:].any()
    steps(big, optimizer, 3, start=2)
    assert monitor.record(3)["esc"] > 0.1


class TestMonitor:
    def test_t10_trapped_changes_have_at_most_the_seed_s_rank(self):
        big, _ = grown(char_gpt(), 2, noise_db=None)
        monitor = TrapMonitor(big, rank_every=5, updates=True, gradients=True)
        start = {n: p.detach().clone() for n, p in hidden(big).items()}
        steps(big, torch.optim.AdamW(big.parameters(), 1e-2), 5)
        row = monitor.record(5)
        assert row["esc"] < 1e-6
        assert row["esc_grad"] < 1e-6
        assert row["esc_update"] < 1e-6
        assert monitor.verdict() == "trapped"
        assert row["effective_rank"] <= 32
        for name, p in hidden(big).items():
            assert torch.linalg.matrix_rank(p.detach() - start[name], rtol=1e-8) <= 32
        assert use_of_width(big, lambda net: loss(net).item()) == pytest.approx(0, abs=1e-10)

    def test_figures_are_those_of_the_definitions(self):
        big, _ = grown(char_gpt())
        monitor = TrapMonitor(big, updates=True)
        groups = [f"esc/{g}" for g in ("down", "k", "o", "q", "up", "v")]
        # Nothing changed: zero, not NaN.
        assert monitor.record(1) == {"step": 1} | dict.fromkeys(["esc", "esc_update", *groups], 0.0)
        start = big.blocks[0].up.weight.detach().clone()
        with torch.no_grad():
            for p in hidden(big).values():
                p.add_(torch.randn(p.shape, generator=seeded(), dtype=p.dtype))
        row = monitor.record(200)
        change = big.blocks[0].up.weight.detach() - start
        s = torch.linalg.svdvals(change)
        p = s / s.sum()
        line = next(r for r in monitor.table() if r["matrix"] == "blocks.0.up.weight")
        assert line["group"] == "up"
        assert line["esc"] == pytest.approx(escape_ratio(change, 2).item())
        assert line["effective_rank"] == pytest.approx((-(p * p.log()).sum()).exp().item(), rel=1e-6)
        assert line["stable_rank"] == pytest.approx((s.square().sum() / s[0] ** 2).item(), rel=1e-6)
        assert row["esc"] == pytest.approx(0.866, abs=0.02)
        assert monitor.verdict() == "escaped"
        used = use_of_width(big, lambda net: loss(net).item())
        assert used == pytest.approx((loss(trap_projected(big)) - loss(big)).item())
        assert TrapMonitor(big, thresholds=(0.9, 0.95)).start  # thresholds are the caller's
        monitor.thresholds = (0.9, 0.95)
        assert monitor.verdict() == "trapped"
        monitor.max_matrices = 5
        monitor.record(400)
        assert 1 < sum("effective_rank" in line for line in monitor.table()) <= 5
        # The verdict is the median's: five of twelve matrices have left, and their mean is no longer small.
        monitor.thresholds = (0.1, 0.5)
        with torch.no_grad():
            for name, p in list(hidden(big).items())[5:]:
                p.copy_(monitor.start[name])
        assert monitor.record(201)["esc"] > 0.3
        assert monitor.verdict() == "trapped"

    @pytest.mark.parametrize(("name", "groups"), [("gpt2", {"q", "k", "v", "o", "up", "down"}),
                                                  ("phi3", {"q", "k", "v", "o", "gate", "up", "down"}),
                                                  ("mixtral", {"q", "k", "v", "o", "gate", "up", "down"}),
                                                  ("gpt_neox", {"qkv", "o", "up", "down"})])  # fmt: skip
    def test_packed_and_stacked_weights_count_as_their_parts(self, name, groups):
        big, _ = grown(network(name))
        monitor = TrapMonitor(big)
        assert set(monitor.groups.values()) == groups
        with torch.no_grad():
            for p in big.parameters():
                p.mul_(1.5)
        assert 0 < monitor.record(0)["esc"] < 0.05  # the noise alone is outside
        with pytest.raises(ValueError, match=r"equal size"):
            TrapMonitor(network("llama", intermediate_size=31), 1, 3)

    def test_activations_of_clones(self):
        model = char_gpt()
        for noise_db, apart in ((None, False), (10.0, True)):
            big, _ = grown(model, 2, noise_db=noise_db)
            with torch.no_grad():
                if apart:
                    big.blocks[0].up.weight[:128] *= 1.5
            seen = TrapMonitor(big).activations(lambda net=big: loss(net))
            assert set(seen) == set(hidden(big))
            up = seen["blocks.0.up.weight"]
            assert (up["clone_distance"] > 0.1) is apart
            assert 1 <= up["effective_rank"] <= 32
            assert seen["blocks.0.attn.q.weight"]["clone_distance"] < 1e-6


class _Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = torch.randint(50, (8,), generator=seeded(i))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
def test_the_callback_logs_while_a_trainer_trains(tmp_path):
    from subspan.resize import TrapCallback

    options = tf.TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=2, report_to=[],
        per_device_train_batch_size=4, learning_rate=1e-2, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    for noise_db, warned in ((None, True), (40.0, False)):
        big, _ = grown(network("llama"), noise_db=noise_db)
        trainer = tf.Trainer(
            big, options, train_dataset=_Rows(), eval_dataset=_Rows(), callbacks=[TrapCallback(2, batches=1)]
        )
        trainer.remove_callback(tf.PrinterCallback)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.train()
        assert any("exact clone" in str(w.message) for w in seen) is warned
        history = {key: value for line in trainer.state.log_history for key, value in line.items()}
        assert (history["trap/esc"] > 1e-4) is not warned
        assert "trap/esc_gate" in history
        assert abs(history["trap/use_of_width"]) < 1
        assert history["trap/verdict"] in (0, 1)
