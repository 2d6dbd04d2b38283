"""The learnability study: its counts, its split, and its bf16."""

import itertools

import numpy as np
import torch

from subspan.theory.turing.learnability import Bf16, Study, accuracy, contexts, count, draw, split_starts


def test_a_count_writes_until_its_target_and_is_cut_into_contexts() -> None:
    run = count([1, 1, 0], 2, 32)  # 3 + 1: two carries, then the target
    assert run == ((1, 1, 0), 2, ((0, 0), (1, 0), (2, 1)), True)
    (whole,) = contexts(run, "cot")
    assert len(whole.tokens) == whole.prompt + 2 * 3 + 1
    first, second = contexts(run, "scot", every=2)
    assert second.tokens[: second.prompt] == first.tokens[-second.prompt :]
    assert [*first.tokens[first.prompt : -second.prompt], *second.tokens[second.prompt :]] == whole.tokens[
        whole.prompt :
    ]
    cut = count([1, 1, 0], 2, 2)
    assert not cut.complete
    assert contexts(cut, "cot")[0].tokens == whole.tokens[:-3]


def test_no_test_count_begins_where_a_training_count_does() -> None:
    starts = split_starts(8, 64, np.random.default_rng(0))
    assert sorted([*starts.training, *starts.validation, *starts.test]) == list(range(256))
    assert (len(starts.training), len(starts.validation)) == (64, 96)
    begun = {run.bits for run in itertools.islice(draw(starts.training, 8, 32, np.random.default_rng(1)), 640)}
    tried = {run.bits for run in itertools.islice(draw(starts.test, 8, 32, np.random.default_rng(1)), 640)}
    assert len(begun) == 64
    assert not begun & tried
    study = Study("cot", 1, width=16, heads=2, cells=8, starts=64, tokens=2048)
    found = accuracy(study, ((1, 32), (33, 64)), 20, 0)
    assert [x.tests for x in found.values()] == [20, 20]
    assert [x.seen for x in found.values()] == [0, 0]
    assert all(0 <= x.solved <= 1 and x.standard_error <= 0.5 / 20**0.5 for x in found.values())


def test_rounded_products_are_those_of_bf16_autocast(generator: torch.Generator) -> None:
    x = torch.randn(2, 3, 5, 8, generator=generator, requires_grad=True)
    layer = torch.nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.bias.normal_(generator=generator)

    def twice() -> tuple[torch.Tensor, torch.Tensor]:
        y = layer(x)
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).float()
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), gradient

    with Bf16():
        ours = twice()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = twice()
    exact = twice()
    for mine, its, full in zip(ours, theirs, exact, strict=True):
        assert torch.equal(mine, mine.bfloat16().float())
        error = (its - full).norm()
        assert error > 0
        assert (mine - its).norm() <= error
        assert error / 2 <= (mine - full).norm() <= 2 * error
