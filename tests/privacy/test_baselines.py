"""The peers' optimizers."""

import pytest
import torch
from torch import nn

from subspan.privacy import Lamb, LoraRite, lora_plus_groups
from tests.privacy.small import adapted, engine, train
from tests.privacy.test_prism import D, fit, start


def test_lamb_steps_have_the_length_of_the_parameter_and_a_zero_start_still_moves() -> None:
    p, zero = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.zeros(2))
    p.grad, zero.grad = torch.tensor([0.1, -0.2]), torch.tensor([1.0, 1.0])
    before = p.detach().clone()
    Lamb([p, zero], 0.01).step()
    assert float((p - before).detach().norm()) == pytest.approx(0.01 * 5, rel=1e-4)
    assert float(zero.detach().norm()) > 0


def test_lora_plus_gives_lora_b_the_larger_rate() -> None:
    model = adapted()
    priv = engine(model, method="naive")
    groups = lora_plus_groups(priv.factor_pairs, 0.01, ratio=8.0)
    assert [g["lr"] for g in groups] == [0.01, 0.08]
    assert all(a is p.param_A for a, p in zip(groups[1]["params"], priv.factor_pairs, strict=True))
    train(priv, priv.attach(torch.optim.AdamW(groups)))


@pytest.mark.parametrize("c", [1.0, 16.0])
def test_rite_does_not_depend_on_the_scale_of_the_factors(c: float) -> None:
    losses = []
    for scale in (1.0, c):
        model, pairs = start(torch.float32)
        for pair in pairs:
            pair.write(pair.low_rank(torch.float32).regauge(scale * torch.eye(3)))
        losses.append(fit(model, LoraRite(pairs, 0.02), 30))
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_all_learn_without_privacy() -> None:
    model, pairs = start(D)
    seen = fit(model, Lamb([p for pair in pairs for p in (pair.param_A, pair.param_B)], 0.02), 40)
    assert seen[-1] < 0.8 * seen[0]
