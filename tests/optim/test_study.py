"""The study harness, end to end on the digits in a few seconds."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from subspan.optim import MuonAdamW, StudyConfig, digits_task, finetune, mismatch_table, pretrain, run_study
from subspan.optim.study import make_optimizer, train


def config(**changes: object) -> StudyConfig:
    grids = {"default": (3e-3,), "lora-muon": (1e-2, 2e-2)}
    return StudyConfig(digits_task, **{"lrs": grids, "seeds": (0,), "pretrain_steps": 40, "steps": 15, **changes})


def test_study_runs_every_combination_and_feeds_the_table() -> None:
    seen = []
    rows = run_study(config(), on_row=seen.append)
    assert seen == rows
    assert len(rows) == 2 * (1 + 1 + 1 + 2)
    assert {(r.mode, r.optimizer, r.lr) for r in rows} == {
        ("full", "adamw", 3e-3),
        ("full", "muon", 3e-3),
        ("lora", "adamw", 3e-3),
        ("lora", "muon", 1e-2),
        ("lora", "muon", 2e-2),
    }
    assert all({"score", "validation", "source", "loss", "initial_source", "cosd"} <= set(r.metrics) for r in rows)
    assert all(r.metrics["cosd"] > 0 for r in rows)
    table = mismatch_table(rows)
    assert set(table.gap) == {(p, m) for p in ("adamw", "muon") for m in ("full", "lora")}
    assert table.warnings  # grids this short have nothing but edges


def test_study_is_reproducible_and_leaves_the_global_generator_alone() -> None:
    small = config(pretrain=("adamw",), modes=("lora",), optimizers=("muon",))
    torch.manual_seed(5)
    first = run_study(small)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
    assert run_study(small) == first


class Recorder(nn.Module):
    """Keeps what it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return torch.zeros(len(x), 10)


def test_digits_task_splits_do_not_overlap_and_rotate_the_target() -> None:
    data, task, recorder = load_digits(), digits_task(0), Recorder()
    upright = (data.images / 8 - 1).astype(np.float32)
    # All images differ, also from all rotated ones, so an image tells its row and whether it was turned.
    row_of = {image.tobytes(): row for row, image in enumerate(upright)}
    row_of_turned = {np.rot90(image).tobytes(): row for row, image in enumerate(upright)}
    assert len(row_of | row_of_turned) == 2 * len(upright)

    def rows(images: torch.Tensor, known: dict[bytes, int]) -> list[int]:
        return [known[image.tobytes()] for image in images.numpy()]

    g, drawn = torch.Generator().manual_seed(0), {}
    for which, known in (("source", row_of), ("target", row_of_turned)):
        drawn[which] = set()
        for x, labels in itertools.islice(task.batches(which, g), 300):
            found = rows(x, known)
            assert (data.target[found] == labels.numpy()).all()
            drawn[which] |= set(found)
    task.evaluate(recorder)
    test, validation, source_test, again = recorder.seen
    assert rows(source_test, row_of) == rows(test, row_of_turned) == rows(again, row_of_turned)
    parts = [*drawn.values(), set(rows(test, row_of_turned)), set(rows(validation, row_of_turned))]
    assert [len(part) for part in parts] == [1000, 200, 400, 197]
    assert set().union(*parts) == set(range(1797))  # as many as all parts have together: none shares a row


def test_digits_task_depends_on_the_seed() -> None:
    first, other = digits_task(0), digits_task(1)
    weights = zip(first.model.parameters(), other.model.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in weights)
    batches = [next(task.batches("source", torch.Generator().manual_seed(0)))[0] for task in (first, other)]
    assert not torch.equal(*batches)


def test_pretraining_learns_and_lora_trains_the_four_hidden_layers_only() -> None:
    task = digits_task(0)
    base = pretrain(task, "muon", 3e-3, 60, torch.Generator().manual_seed(0))
    assert task.evaluate(base)["source"] > 0.4
    before = {n: p.clone() for n, p in base.named_parameters()}
    model = finetune(task, base, "lora", "muon", 1e-2, 10, torch.Generator().manual_seed(0))
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 8
    assert all("lora_" in n and "hidden" in n for n in trainable)
    assert all(torch.equal(p, before[n]) for n, p in base.named_parameters())
    dora = finetune(
        task, base, "lora", "adamw", 1e-2, 2, torch.Generator().manual_seed(0), peft_options={"use_dora": True}
    )
    assert any("magnitude" in n for n, _ in dora.named_parameters())


def test_schedule_warms_up_decays_to_zero_and_clips() -> None:
    model = nn.Linear(3, 3)
    optimizer, rates = MuonAdamW([model.weight], lr=1.0), []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return 1e6 * model(batch).square().sum()

    train(model, optimizer, iter([torch.ones(2, 3)] * 20), loss, 20, warmup=0.2)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] < 0.02
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))


def test_unknown_names_are_refused() -> None:
    task = digits_task(0)
    with pytest.raises(ValueError, match="'sgd'"):
        make_optimizer("sgd", task.model, 0.1)
    with pytest.raises(ValueError, match="'half'"):
        finetune(task, task.model, "half", "adamw", 0.1, 1, torch.Generator())
