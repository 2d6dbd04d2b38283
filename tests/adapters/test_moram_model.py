"""A memory in a model: growth, freezing, files, wrapped layers of every kind, and what is refused."""

import copy
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from safetensors.torch import load_file, save_file
from torch import nn

from subspan.adapters import (
    ContinualMoRAMClassifier,
    MoRAMConfig,
    MoRAMLinear,
    cl_metrics,
    disable_moram,
    inject_moram,
    load_moram,
    save_moram,
)
from subspan.adapters.moram.bank import MemoryBank
from subspan.errors import BaseMismatch, DataError, NonFinite, TargetError

OPTIONS = {"r": 4, "temperature": 0.1, "target_modules": ["0", "2"]}


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 8), nn.GELU(), nn.Linear(8, 3))


def remembering(seed: int = 0, **options) -> nn.Sequential:
    return inject_moram(net(seed), MoRAMConfig(**(OPTIONS | options)))


def data(seed: int = 0, rows: int = 32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g), torch.randint(3, (rows,), generator=g)


def steps(model, count=5, lr=0.05, weight_decay=0.0, seed=0, optimizer=None):
    """Train the open task a little."""
    x, y = data(seed)
    optimizer = optimizer or torch.optim.AdamW(model.moram.parameters(), lr=lr, weight_decay=weight_decay)
    model.train()
    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


def taught(tasks=2, **options):
    model = remembering(**options)
    for t in range(tasks):
        with model.moram.task(generator=torch.Generator().manual_seed(t)):
            steps(model, seed=t)
    return model.eval()


# -------------------------------------------------------------------------------------------------- growth and freezing


def test_t10_freezing_changes_no_output_bit_for_bit():
    for alpha in (None, 8.0, 2.0):  # scales 1, 2 and 1/2
        model = remembering(alpha=alpha)
        for t in range(3):
            model.moram.begin_task()
            steps(model, seed=t)
            model.eval()
            x, _ = data(9)
            before = model(x)
            model.moram.end_task()
            assert torch.equal(model(x), before)
            assert (before - net()(x)).abs().max() > 1e-3


@pytest.mark.parametrize("is_open", [False, True])
def test_t10_what_is_saved_loads_bit_for_bit(tmp_path, is_open):
    model = taught(modules_to_save=["4"])
    if is_open:
        model.moram.begin_task("third", r=2)
        steps(model)
        model.eval()
    before = copy.deepcopy(model.state_dict())
    save_moram(model, tmp_path)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)  # saving changes nothing
    again = load_moram(net(), tmp_path).eval()
    x, _ = data(9)
    assert torch.equal(again(x), model(x))
    assert again.moram.config == model.moram.config
    assert (again.moram.tasks, again.moram.open_task) == (model.moram.tasks, model.moram.open_task)
    assert [p.shape for p in again.moram.parameters()] == [p.shape for p in model.moram.parameters()]
    keys = set(load_file(tmp_path / "moram.safetensors"))
    assert {"0.A", "0.B", "0.scale", "0.task_of_atom", "4.modules_to_save.weight"} <= keys


def test_t14_frozen_atoms_do_not_move_under_weight_decay():
    model = taught(1)
    frozen = {n: (b.keys.clone(), b.values.clone()) for n, b in banks(model)}
    with model.moram.task():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        steps(model, 7, optimizer=optimizer)
    for n, b in banks(model):
        assert torch.equal(b.keys[:4], frozen[n][0])
        assert torch.equal(b.values[:4], frozen[n][1])
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert not model.moram.parameters()


def banks(model):
    return [(n, m) for n, m in model.named_modules() if isinstance(m, MemoryBank)]


def test_t15_base_is_recovered_bit_for_bit():
    base, model = net(), remembering()
    x, _ = data()
    assert torch.equal(model(x), base(x))  # an empty bank
    model.moram.begin_task()
    assert torch.equal(model.eval()(x), base(x))
    steps(model)
    model.moram.end_task()
    assert not torch.equal(model(x), base(x))
    with disable_moram(model) as plain:
        assert torch.equal(plain(x), base(x))
    assert not torch.equal(model(x), base(x))


def test_a_base_in_evaluation_gets_a_memory_in_evaluation(tmp_path):
    save_moram(taught(1), tmp_path)
    model = load_moram(net().eval(), tmp_path)
    assert not any(module.training for module in model.modules())


def test_a_module_to_save_trains_in_a_copy():
    model = remembering(modules_to_save=["4"])
    x, _ = data()
    with model.moram.task():
        steps(model)
    model.eval()
    with disable_moram(model):
        assert torch.equal(model(x), net()(x))
    assert model.get_submodule("4").weight is not model.get_submodule("4").original_module.weight


def test_fresh_atoms_join_evaluation_when_a_step_has_moved_them():
    model = taught(1)
    x, _ = data(3)
    before = model(x)
    model.moram.begin_task()
    assert torch.equal(model.eval()(x), before)  # 3.6: empty atoms do not dilute
    layer = model.get_submodule("0")
    assert layer.bank.live.tolist() == [True] * 4 + [False] * 4
    model.train()
    assert layer.bank.live.all()
    optimizer = steps(model, 1)
    assert model.eval().get_submodule("0").bank.live.all()
    assert not torch.equal(model(x), before)
    state = copy.deepcopy(model.state_dict())
    steps(model, 2, optimizer=optimizer)
    assert not torch.equal(model.state_dict()["0.bank.new_values"], state["0.bank.new_values"])


def test_later_tasks_get_no_gradient_into_old_atoms_and_no_moments():
    model = taught(1)
    with model.moram.task():
        params = model.moram.parameters()
        assert sorted(tuple(p.shape) for p in params) == [(4, 6), (4, 8), (4, 10), (4, 10)]
        assert not torch.optim.AdamW(params).state


def test_growth_is_told_and_ranks_may_differ():
    model = remembering(alpha=8.0)
    for t, r in enumerate((4, 2, 7)):
        with model.moram.task(f"t{t}", r=r):
            steps(model, 1)
    rows = model.moram.growth()
    assert [(row["task"], row["atoms"]) for row in rows] == [("t0", 8), ("t1", 4), ("t2", 14)]
    assert rows[0]["values"] == 4 * (6 + 10 + 1) + 4 * (10 + 8 + 1)
    assert rows[2]["stored"] == sum(row["values"] for row in rows)
    bank = model.get_submodule("0").bank
    assert bank.task_of_atom.tolist() == [0] * 4 + [1] * 2 + [2] * 7
    assert bank.scale.tolist() == pytest.approx([2.0] * 4 + [4.0] * 2 + [8 / 7] * 7)
    assert len(bank) == bank.frozen == 13 > bank.d_in  # more atoms than inputs


def test_a_copied_model_has_a_memory_of_its_own():
    model = taught(1)
    other = copy.deepcopy(model)
    other.moram.begin_task()
    steps(other)
    assert len(model.get_submodule("0").bank) == 4
    assert len(other.get_submodule("0").bank) == 8
    assert model.moram.open_task is None


def test_an_exception_leaves_the_task_open():
    model = remembering()
    with pytest.raises(KeyboardInterrupt), model.moram.task("a"):
        raise KeyboardInterrupt
    assert model.moram.open_task == "a"
    with pytest.raises(ValueError, match="'a' is still open"):
        model.moram.begin_task("b")
    steps(model, 1)
    model.moram.end_task()
    with pytest.raises(ValueError, match="no task is open"):
        model.moram.end_task()
    with pytest.raises(ValueError, match="already"):
        model.moram.begin_task("a")
    with pytest.raises(ValueError, match="r=0"):
        model.moram.begin_task(r=0)


def test_an_old_optimiser_that_trains_nothing_is_noticed():
    model = remembering()
    with model.moram.task():
        optimizer = steps(model)
    with pytest.warns(UserWarning, match="new optimiser"), model.moram.task():
        steps(model, optimizer=optimizer)


def test_a_task_in_training_goes_on_from_its_files(tmp_path):
    straight, cut = (remembering() for _ in range(2))
    for model in (straight, cut):
        model.moram.begin_task(generator=torch.Generator().manual_seed(0))
    steps(straight, 8)
    optimizer = steps(cut, 3)
    save_moram(cut, tmp_path / "bank")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = load_moram(net(), tmp_path / "bank")
    optimizer = torch.optim.AdamW(resumed.moram.parameters(), lr=0.05, weight_decay=0.0)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    steps(resumed, 5, optimizer=optimizer)
    for a, b in zip(straight.moram.parameters(), resumed.moram.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loading_writes_into_parameters_an_optimiser_holds(tmp_path):
    model = remembering()
    model.moram.begin_task()
    steps(model)
    save_moram(model, tmp_path)
    saved = [p.clone() for p in model.moram.parameters()]
    held = model.moram.parameters()
    steps(model)
    model.moram.load(tmp_path)
    assert all(a is b for a, b in zip(held, model.moram.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held, saved, strict=True))


def test_frozen_banks_are_joined_once_and_not_in_evaluation(monkeypatch):
    model = taught(3)
    calls = []
    original = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *a, **k: calls.append(1) or original(*a, **k))
    x, _ = data()
    for _ in range(3):
        model(x)
    assert not calls
    model.moram.begin_task()
    model(x)  # empty atoms sleep
    calls.clear()
    model.eval()(x)
    assert not calls


# ------------------------------------------------------------------------------------------------- options and training


def test_the_end_of_training_is_gated_where_asked():
    model = remembering(threshold=0.9, threshold_warmup=0.25)
    x, _ = data()
    model.moram.begin_task()
    steps(model)
    model.train()
    early = model(x)
    model.moram.set_progress(0.5)
    assert torch.equal(model(x), early)
    model.moram.set_progress(0.75)
    gated = model(x)
    assert not torch.equal(gated, early)
    torch.testing.assert_close(gated, model.eval()(x))


def test_reading_is_configured_without_touching_atoms():
    model = taught()
    x, _ = data()
    before = model(x)
    model.moram.configure(read="gather")
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=0)
    model.moram.configure(threshold=None, temperature=1.0)
    assert not torch.allclose(model(x), before)


@pytest.mark.parametrize("read", ["dense", "gather"])
def test_training_reads_alike_on_both_paths(read):
    model = taught(1, read=read)
    reference = taught(1, read="dense")
    for m in (model, reference):
        m.moram.begin_task(generator=torch.Generator().manual_seed(5))
        steps(m, 2)
    for a, b in zip(model.moram.parameters(), reference.moram.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_scores_in_float32(dtype):
    model = taught(temperature=0.01, threshold=0.05)
    x, _ = data()
    seen = []
    layer = model.get_submodule("0")
    layer.observer = lambda x, p, routing: seen.append(p.dtype)
    with torch.autocast("cpu", dtype):
        y = model(x)
        torch.testing.assert_close(layer.memory(x), MoRAMLinear.memory(layer, x.float()))
    assert y.dtype == dtype
    assert set(seen) == {torch.float32}


def test_a_half_precision_base_keeps_a_float32_memory():
    model = inject_moram(net().bfloat16(), MoRAMConfig(**OPTIONS))
    with model.moram.task():
        params = model.moram.parameters()
        assert {p.dtype for p in params} == {torch.float32}
        x, y = data()
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
    assert model(x.bfloat16()).dtype == torch.bfloat16
    model.half()  # as a whole, if someone must
    assert model.eval()(x.half()).isfinite().all()


class Quantised(nn.Linear):
    """A layer that stores its weight as integers; nothing but its forward knows how to read it."""

    def __init__(self, n, m):
        super().__init__(n, m)
        self.weight = nn.Parameter(torch.randint(-128, 127, (m, n), dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) / 256, self.bias)


def test_a_quantised_base_layer_is_never_read(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Quantised(6, 10), nn.GELU(), Quantised(10, 3))

    model = inject_moram(make(), MoRAMConfig(**OPTIONS))
    with model.moram.task():
        steps(model)
    model.eval()
    save_moram(model, tmp_path)
    x, _ = data()
    assert torch.equal(load_moram(make(), tmp_path).eval()(x), model(x))


def test_gradient_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    x, y = data()
    grads = []
    for reentrant in (None, False, True):
        model = remembering(dropout=0.0)
        model.moram.begin_task(generator=torch.Generator().manual_seed(0))
        steps(model, 2)
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        out = model(inputs) if reentrant is None else checkpoint(model, inputs, use_reentrant=reentrant)
        nn.functional.cross_entropy(out, y).backward()
        grads.append([p.grad.clone() for p in model.moram.parameters()])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_unread_atoms_get_a_zero_filled_gradient():
    """So that DistributedDataParallel needs no search for unused parameters."""
    model = remembering(r=4, top_k=2)
    model.moram.begin_task()
    steps(model, 1)
    x, y = data(rows=1)
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()
    grads = [layer.bank.new_values.grad for layer in model.moram.layers.values()]
    assert all(g is not None for g in grads)
    assert (grads[0].abs().sum(1) > 0).sum() == 2


def test_conv1d_and_shared_modules_are_wrapped_once():
    from transformers.pytorch_utils import Conv1D

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn = Conv1D(5, 6)
            self.first = nn.Linear(6, 6)
            self.second = self.first

        def forward(self, x):
            return self.c_attn(self.second(self.first(x)))

    torch.manual_seed(0)
    model = inject_moram(Shared(), MoRAMConfig(r=2, target_modules=["c_attn", "first"]))
    assert isinstance(model.c_attn, MoRAMLinear)
    assert (model.c_attn.in_features, model.c_attn.out_features) == (6, 5)
    assert model.first is model.second
    assert isinstance(model.second, MoRAMLinear)
    with model.moram.task():
        steps(model)
    assert model(data()[0]).shape == (32, 5)


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(3, 8)
            self.out = nn.Linear(8, 3, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.embed(x))

    model = inject_moram(Tied(), MoRAMConfig(r=2, target_modules=["out"]))
    assert model.out.weight is model.embed.weight


def test_small_banks_and_single_rows_work():
    model = remembering(r=1)
    with model.moram.task():
        steps(model)
    x, _ = data(rows=1)
    model.moram.configure(threshold=None)
    layer = model.eval().get_submodule("0")
    p = layer.bank.keys @ x[0]
    torch.testing.assert_close(layer.memory(x)[0], p[0] * layer.bank.values[0])  # one atom: weight 1
    assert model(x[:0]).shape == (0, 3)


# --------------------------------------------------------------------------------------------------------- statistics


def test_stats_by_layer_and_task_are_means_over_tokens():
    model = taught(2)
    x, _ = data(5, 48)
    stats = model.moram.stats([x[:20], (x[20:], None)])
    maps = model.moram.activations(x)
    assert not any(layer.observer for layer in model.moram.layers.values())
    for name, use in stats.items():
        w = maps[name].double()
        torch.testing.assert_close(use.weight, w.mean(0))
        torch.testing.assert_close(use.task_weight, torch.stack([w[:, :4].sum(1).mean(), w[:, 4:].sum(1).mean()]))
        assert use.silent == pytest.approx(float((w.sum(1) == 0).double().mean()))
        assert use.silenced == pytest.approx(1 - float(w.sum(1).mean()))
        assert (use.live, use.tokens) == (8, 48)
        torch.testing.assert_close(use.largest, w.amax(0))
    model.train()
    model.moram.stats([x])
    assert model.training


def test_stats_leave_padding_out():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 6)
            self.body = net()

        def forward(self, input_ids, attention_mask):
            return self.body(self.embed(input_ids))

    torch.manual_seed(0)
    model = inject_moram(Words(), MoRAMConfig(r=4, target_modules=["0"]))
    model.moram.begin_task()
    for layer in model.moram.layers.values():
        nn.init.normal_(layer.bank.new_values)
    model.moram.end_task()
    ids = torch.randint(20, (3, 7))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    (use,) = model.moram.stats([{"input_ids": ids, "attention_mask": mask}]).values()
    assert use.tokens == 18
    mean = 0
    for row, n in zip(ids, (7, 4, 7), strict=True):
        (alone,) = model.moram.stats([{"input_ids": row[None, :n], "attention_mask": mask[:1, :n]}]).values()
        mean += alone.weight * n / 18
    torch.testing.assert_close(use.weight, mean, atol=1e-7, rtol=1e-5)


def test_a_gate_that_silences_most_tokens_is_told_once():
    model = taught(threshold=0.2)
    model.moram.configure(threshold=1.0, temperature=0.2)
    x, _ = data()
    model.train().eval()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(x)
        model(x)
    assert [("more than half" in str(w.message)) for w in told] == [True] * len(model.moram.layers)


def test_compacting_drops_atoms_nobody_reads_and_keeps_outputs():
    model = taught(2)
    x = data(0, 64)[0].abs()
    bank = model.get_submodule("0").bank
    bank.keys.abs_()
    bank.keys[[1, 6]] = -1e-4  # hardly any response, and never among the four best
    before = model(x)
    dropped = model.moram.compact([x], tol=1e-3)
    assert {1, 6} <= set(dropped["0"])
    assert len(bank) == 8 - len(dropped["0"])
    assert len(bank.keys) == len(bank.values) == len(bank.task_of_atom) == len(bank)
    torch.testing.assert_close(model(x), before, atol=5e-3, rtol=0)
    model.moram.begin_task()
    with pytest.raises(ValueError, match="open"):
        model.moram.compact([x])


def test_compacting_leaves_each_task_its_strongest_atom():
    model = taught(2)
    for layer in model.moram.layers.values():
        layer.bank.values.zero_()  # nothing is lost whatever goes
        layer.bank.keys[:4] = 1.0
        layer.bank.keys[4:] = 1e-3 * torch.tensor([[1.0], [2.0], [4.0], [3.0]])
    dropped = model.moram.compact([data()[0].abs()], tol=0.0)
    assert dropped["0"] == [4, 5, 7]
    for layer in model.moram.layers.values():
        assert set(layer.bank.task_of_atom.tolist()) == {0, 1}


def test_compacting_keeps_what_moves_an_output_by_more_than_the_tolerance():
    model = taught(1, r=6, top_k=2)
    bank, x = model.get_submodule("0").bank, data(0, 64)[0].abs()
    bank.keys.copy_(-torch.rand(6, 6))
    bank.keys[:2] = torch.rand(2, 6)  # nobody reads the others, but they are strong in the norm
    assert model.moram.compact([x], tol=0.0)["0"] == []
    assert model.moram.compact([x], tol=1e6)["0"] == [2, 3, 4, 5]


# --------------------------------------------------------------------------------------------------- packed attention


def test_a_transformer_layer_of_torch_trains_its_projections():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    base = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 5, 8)
    wanted = base(x).detach()
    model = inject_moram(copy.deepcopy(base), MoRAMConfig(r=2, target_modules=["q_proj", "out_proj"]))
    torch.testing.assert_close(model(x), wanted, atol=1e-6, rtol=0)
    assert len(model.moram.layers) == 4
    with model.moram.task():
        model.train()
        optimizer = torch.optim.AdamW(model.moram.parameters(), lr=0.1)
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
    assert (model.eval()(x) - wanted).abs().max() > 1e-3


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "options",
    [
        {"r": 0},
        {"r": 1.5},
        {"top_k": 2.5},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"threshold": 1.5},
        {"threshold": -0.1},
        {"top_k": 0},
        {"dropout": 1.0},
        {"alpha": 0.0},
        {"threshold_warmup": 2.0},
        {"read": "fast"},
        {"score": "cosine"},
        {"mixing": "sum"},
        {"normalize": False},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises((ValueError, TypeCheckError), match=next(iter(options))):  # the test run checks types first
        MoRAMConfig(**options)


def test_fragile_settings_are_told():
    with pytest.warns(UserWarning, match="leaves small banks silent"):
        MoRAMConfig(temperature=0.01, threshold=0.2)
    with pytest.warns(UserWarning, match="reads 2 atoms"):
        MoRAMConfig(top_k=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoRAMConfig()
        MoRAMConfig(temperature=0.03, threshold=0.2)
        MoRAMConfig(temperature=0.01, threshold=0.1)


def test_targets_that_match_nothing_name_the_nearest():
    with pytest.raises(TargetError, match="did you mean 0"):
        inject_moram(net(), MoRAMConfig(target_modules=["00"]))
    with pytest.raises(TargetError, match="modules_to_save"):
        inject_moram(net(), MoRAMConfig(**OPTIONS, modules_to_save=["head"]))
    with pytest.raises(TargetError, match="linear"):
        inject_moram(nn.Sequential(nn.Conv2d(3, 3, 1)), MoRAMConfig(target_modules=["0"]))
    with pytest.raises(TargetError, match="put it in a module"):
        inject_moram(nn.Linear(6, 6), MoRAMConfig(target_modules="all-linear"))
    nested = nn.ModuleDict({"block": nn.ModuleDict({"up": nn.Linear(6, 6)})})
    with pytest.raises(TargetError, match="cannot both hold a memory"):
        inject_moram(nested, MoRAMConfig(target_modules=["up"], modules_to_save=["block"]))
    with pytest.raises(ValueError, match="has a memory already"):
        inject_moram(remembering(), MoRAMConfig(**OPTIONS))
    with pytest.raises(ValueError, match="no memory"):
        save_moram(net(), "nowhere")


def test_a_memory_cannot_be_merged():
    with pytest.raises(ValueError, match="depends on the token"):
        taught(1).moram.merge_and_unload()


def test_files_that_do_not_fit_are_refused(tmp_path):
    save_moram(taught(2), tmp_path)
    with pytest.raises(BaseMismatch, match="other base weights"):
        load_moram(net(7), tmp_path)
    with pytest.raises(DataError, match="no memory"):
        load_moram(net(), tmp_path / "elsewhere")
    tensors = load_file(tmp_path / "moram.safetensors")
    for change, words in (
        ({"0.A": torch.zeros(8, 5)}, "6 inputs"),
        ({"0.task_of_atom": torch.tensor([0] * 4 + [2] * 4)}, "without a gap"),
        ({"0.task_of_atom": torch.tensor([1] * 4 + [0] * 4)}, "without a gap"),
    ):
        save_file(tensors | change, tmp_path / "moram.safetensors")
        with pytest.raises(ValueError, match=words):
            load_moram(net(), tmp_path)


# ------------------------------------------------------------------------------------------------------------- metrics

R = np.array([[80.0, 0.0, 30.0], [60.0, 90.0, 40.0], [70.0, 95.0, 50.0]])


def test_metrics_are_those_of_their_definitions():
    got = cl_metrics(R, zero_shot=[50.0, 20.0, 45.0])
    assert got["last"] == pytest.approx((70 + 95 + 50) / 3)
    assert got["average"] == pytest.approx(R.mean())
    assert got["just_learned"] == pytest.approx((80 + 90 + 50) / 3)
    assert got["transfer"] == pytest.approx((0 + 35) / 2)
    assert got["bwt"] == pytest.approx((-10 + 5) / 2) == -got["forgetting"]
    assert got["zero_shot"] == pytest.approx(115 / 3)
    assert got["retention"] == pytest.approx(17.5 - 32.5)


def test_metric_variants_are_the_official_quirks():
    trace = cl_metrics(R, "trace")
    assert trace["forgetting"] == trace["bwt"] == pytest.approx(10 / 3)  # gains clipped, all three tasks counted
    xtail = cl_metrics(R, "xtail")
    assert xtail["transfer"] == pytest.approx(35)  # the true zero disappears
    assert np.isnan(cl_metrics([[50.0]])["bwt"])
    for bad in (R[:2], np.zeros((0, 0)), R[:, :1]):
        with pytest.raises(ValueError, match="square"):
            cl_metrics(bad)
    with pytest.raises((ValueError, TypeCheckError), match="variant"):
        cl_metrics(R, "other")
    with pytest.raises(ValueError, match="zero_shot"):
        cl_metrics(R, zero_shot=[1.0])


# ---------------------------------------------------------------------------------------------------------- classifier


def blobs(domain: int, rows: int = 120):
    """Three clouds in twelve dimensions; a domain is an order of the dimensions."""
    rng = np.random.default_rng(domain)
    centres, order = np.random.default_rng(99).normal(size=(3, 12)) * 1.5, rng.permutation(12)
    y = rng.integers(0, 3, rows)
    return (centres[y] + 0.3 * rng.normal(size=(rows, 12)))[:, order], np.array(["a", "b", "c"])[y]


def small(**options):
    return ContinualMoRAMClassifier(
        **(
            {
                "hidden": (16, 16),
                "r": 4,
                "base_steps": 80,
                "task_steps": 80,
                "task_lr": 1e-2,
                "batch_size": 32,
                "random_state": 0,
            }
            | options
        )
    )


def test_the_classifier_learns_domains_in_turn_and_keeps_them():
    options = {"hidden": (16,), "base_steps": 60, "task_steps": 60}
    model = small(**options)
    domains = [blobs(0), blobs(1), blobs(2)]
    model.partial_fit_task(*domains[0])  # the first is fit
    assert model.tasks_ == []
    for i, domain in enumerate(domains[1:]):
        model.partial_fit_task(*domain, name=f"turn {i}")
    assert model.tasks_ == ["turn 0", "turn 1"]
    scores = [model.score(*d) for d in domains]
    assert min(scores) > 0.75
    assert model.predict_proba(domains[0][0]).sum(1) == pytest.approx(1.0, abs=1e-5)
    again = small(**options).fit(*domains[0])
    for i, domain in enumerate(domains[1:]):
        again.partial_fit_task(*domain, name=f"turn {i}")
    assert np.array_equal(again.predict_proba(domains[1][0]), model.predict_proba(domains[1][0]))


def test_the_classifier_refuses_new_classes_and_bad_rows():
    model = small(base_steps=2, task_steps=2).fit(*blobs(0))
    X, y = blobs(1)
    with pytest.raises(ValueError, match="'d' was not among"):
        model.partial_fit_task(X, np.where(y == "a", "d", y))
    assert model.tasks_ == []
    for option in ({"hidden": ()}, {"batch_size": 0}, {"task_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(option))):
            small(**option).fit(X, y)
    with pytest.raises(ValueError, match="12 features"):
        model.predict(X[:, :2])


def test_a_task_may_have_rows_of_some_classes_only():
    model = small(task_steps=40).fit(*blobs(0))
    X, y = blobs(1)
    model.partial_fit_task(X[y != "a"], y[y != "a"])
    assert model.score(X[y != "a"], y[y != "a"]) > 0.8


def test_a_task_that_fails_leaves_no_trace_in_the_classifier():
    model = small(base_steps=40, task_steps=5).fit(*blobs(0))
    X, y = blobs(1)
    before = model.predict_proba(X)
    with pytest.raises(NonFinite, match="lower the learning rate"):
        model.set_params(task_lr=1e30).partial_fit_task(X, y)
    assert model.tasks_ == []
    assert np.array_equal(model.predict_proba(X), before)
    model.set_params(task_lr=1e-2).partial_fit_task(X, y)
    assert model.tasks_ == ["task 1"]


WITHOUT_CHECKS = """
import torch
from sklearn.utils.estimator_checks import check_estimator
from torch import nn
from subspan.adapters import ContinualMoRAMClassifier, MoRAMConfig, inject_moram

check_estimator(ContinualMoRAMClassifier((16,), center=False, base_steps=80, task_steps=20, random_state=0))

for read in ("dense", "gather"):
    model = inject_moram(nn.Sequential(nn.Linear(6, 10), nn.GELU()), MoRAMConfig(r=4, target_modules=["0"], read=read))
    x = torch.randn(5, 6)
    for task in range(2):
        model.moram.begin_task()
        nn.init.normal_(model.moram.layers["0"].bank.new_values)
        compiled = torch.compile(model.train(), backend="aot_eager", fullgraph=True)
        compiled(x).sum().backward()
        grads = [p.grad.clone() for p in model.moram.parameters()]
        model.zero_grad()
        model(x).sum().backward()
        for p, g in zip(model.moram.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, g)
        model.moram.end_task()
    torch.testing.assert_close(torch.compile(model.eval(), backend="aot_eager", fullgraph=True)(x), model(x))
"""


@pytest.mark.slow
def test_scikit_learns_own_checks_and_torch_compile_in_one_graph():
    """In a process without beartype, which refuses nonsense before we do and which no compiler can trace."""
    subprocess.run([sys.executable, "-c", WITHOUT_CHECKS], check=True)


# ------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.slow
def test_the_trainer_keeps_in_step_with_a_memory(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from subspan.adapters import MoRAMCallback

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    shape = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    base = LlamaForCausalLM(shape)
    plain = copy.deepcopy(base)
    ids = torch.randint(32, (8, 6))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = inject_moram(base, MoRAMConfig(r=2, temperature=0.1, threshold_warmup=0.5))
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.05}
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, **options)
    with pytest.raises(ValueError, match="no task is open"):
        Trainer(model=model, args=args, train_dataset=rows, callbacks=[MoRAMCallback()]).train()
    with model.moram.task("first"):
        Trainer(model=model, args=args, train_dataset=rows, callbacks=[MoRAMCallback()]).train()
        assert all(layer.gate_in_training for layer in model.moram.layers.values())  # the second half was gated
    model.eval()
    saved = load_moram(copy.deepcopy(plain), tmp_path / "checkpoint-4" / "moram").eval()
    assert saved.moram.open_task == "first"
    assert torch.equal(saved(input_ids=ids).logits, model(input_ids=ids).logits)
    with disable_moram(model):
        assert torch.equal(model(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
