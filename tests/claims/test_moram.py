"""The claim's smoke form, its statements on hand-made results, and its peers."""

import numpy as np
import pytest
import torch
from torch import nn

from subspan.claims import run_claim
from subspan.claims.claim import Results, Row
from subspan.claims.moram import ABLATIONS, CLAIM, METHODS, images_of
from subspan.claims.moram_peers import Full, Incremental, Learner, Memory, MixtureOfLoRA, OLoRA, Oracle, RoutersAllTrain
from subspan.claims.moram_text import TEXT_METHODS, without_instruction
from tests.claims.judging import failing

GOOD = {
    "op": 92.0,  # MoRAM's; 70 the best baseline
    "forgetting": 2.0,
    "sequential_forgetting": 60.0,
    "just_learned": 94.0,  # 97 sequential
    "hard_op": 65.0,
    "hard_forgetting": 30.0,
    "cosine": 0.95,
    "own": 0.7,
    "text_op": 60.0,  # 58 sequential, 61 the best competitor
    "text_forgetting": 2.0,  # 6 sequential
}


def results(**changes: float) -> Results:
    value = GOOD | changes
    rows = []

    def add(method, setting, seed, **metrics):
        rows.extend(Row(method, setting, k, seed, v) for k, v in metrics.items())

    for seed in (0, 1):
        for method in METHODS:
            for config in ("good", "bad"):
                ours = method == "MoRAM"
                # Better elsewhere on the test split, which must not matter.
                op = 99.0 if config == "bad" else value["op"] if ours else 70.0 if method == "MoE-LoRA" else 40.0
                if "oracle" in method:
                    op = 99.0
                lost = {"MoRAM": value["forgetting"], "sequential LoRA": value["sequential_forgetting"]}
                learned = {"MoRAM": value["just_learned"], "sequential LoRA": 97.0}
                metrics = {
                    "validation_op": 1.0 if config == "good" else 0.0,
                    "test_op": op,
                    "test_forgetting": lost.get(method, 30.0),
                    "test_just_learned": learned.get(method, 95.0),
                }
                add(method, {"data": "permuted", "config": config}, seed, **metrics)
        for method in ABLATIONS:
            hard = method == "MoRAM, no softmax"
            add(
                method,
                {"data": "ablation"},
                seed,
                test_op=value["hard_op"] if hard else 92.0,
                test_forgetting=value["hard_forgetting"] if hard else 2.0,
            )
        for layer in (1, 2):
            setting = {"data": "stability", "layer": layer}
            add("MoRAM", setting, seed, median_cosine=value["cosine"], own_mass=value["own"])
        for method in TEXT_METHODS:
            op = {"MoRAM": value["text_op"], "sequential LoRA": 58.0, "O-LoRA": 61.0}.get(method, 50.0)
            lost = {"MoRAM": value["text_forgetting"], "sequential LoRA": 6.0}.get(method, 5.0)
            setting = {"data": "text", "config": "x"}
            add(method, setting, seed, validation_op=1.0, test_op=op, test_forgetting=lost)
    return Results(rows)


def test_all_statements_hold_on_good_results():
    assert failing(CLAIM, results()) == set()


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"op": 84.0}, 1),  # above 8 on every seed, but not 15 in the mean
        ({"op": 77.0}, 2),
        ({"forgetting": 7.0}, 1),
        ({"sequential_forgetting": 40.0}, 1),
        ({"just_learned": 90.0}, 1),
        ({"hard_op": 80.0}, 1),
        ({"hard_forgetting": 20.0}, 1),
        ({"cosine": 0.8}, 1),
        ({"own": 0.5}, 1),
        ({"text_op": 57.0}, 2),
        ({"text_forgetting": 5.0}, 1),
    ],
)
def test_each_statement_can_fail(changes, count):
    assert len(failing(CLAIM, results(**changes))) == count


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def move(learner, steps=3):
    optimizer = torch.optim.AdamW(learner.parameters(), lr=0.05, weight_decay=0.0)
    x, y = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    for _ in range(steps):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(learner.net(x), y) + learner.penalty()).backward()
        optimizer.step()
    learner.end()


@pytest.mark.parametrize("make", [Learner, Incremental, OLoRA, Oracle, MixtureOfLoRA, RoutersAllTrain, Memory, Full])
def test_every_learner_starts_at_the_network_and_trains_as_many_values_as_it_says(make):
    generator = torch.Generator().manual_seed(0)
    net = network()
    learner = make(net, ["0", "2"], 2, 3)
    x = torch.randn(5, 6)
    learner.begin(generator)
    torch.testing.assert_close(net(x), network()(x))
    trained = sum(p.numel() for p in learner.parameters())
    pair = 2 * (6 + 8) + 2 * (8 + 3)
    router = 6 + 8
    everything = sum(p.numel() for p in network().parameters())
    wanted = {Learner: 3 * pair, MixtureOfLoRA: pair + router, RoutersAllTrain: pair + router, Full: everything}
    assert trained == wanted.get(make, pair)
    move(learner)
    learner.begin(generator)
    if make is RoutersAllTrain:
        assert sum(p.numel() for p in learner.parameters()) == pair + 2 * router
    elif make not in (Learner, Full):
        assert sum(p.numel() for p in learner.parameters()) == wanted.get(make, pair)
    move(learner)
    assert not torch.allclose(net(x), network()(x))


def test_the_oracle_reads_one_pair_and_the_penalty_sees_overlap():
    generator = torch.Generator().manual_seed(0)
    oracle = Oracle(network(), ["0"], 2, 2)
    x = torch.randn(5, 6)
    outputs = []
    for _ in range(2):
        oracle.begin(generator)
        move(oracle)
        outputs.append(oracle.net(x).detach())
    oracle.choose(0)
    assert torch.equal(oracle.net(x), outputs[0])
    oracle.choose(5)
    torch.testing.assert_close(oracle.net(x), network()(x))
    learner = OLoRA(network(), ["0"], 2, 2)
    learner.begin(generator)
    assert learner.penalty() == 0.0
    learner.begin(generator)
    old, new = (pair.A for pair in learner.layers[0].pairs)
    torch.testing.assert_close(learner.penalty(), 0.5 * (old @ new.T).abs().sum())


def test_domains_are_what_they_say():
    images = np.arange(128, dtype=np.float32).reshape(2, 8, 8) / 128
    permuted = images_of("permuted", images, 3)
    assert permuted.shape == (2, 64)
    assert np.array_equal(np.sort(permuted, 1), np.sort(images.reshape(2, 64), 1))
    assert np.array_equal(permuted, images_of("permuted", images, 3))
    np.testing.assert_allclose(images_of("rotated", images, 0), images.reshape(2, 64), atol=1e-6)
    assert not np.allclose(images_of("rotated", images, 2), images.reshape(2, 64))


def test_instructions_and_options_are_taken_off_a_prompt():
    prompt = (
        "What is the topic of the following paragraph? Choose one.\nOption: World, Sports \nTitle: A\nText: B \nAnswer:"
    )
    assert without_instruction(prompt) == "A\n B"
    fomc = "What is the monetary policy stance for the following text? A. dovish.\nText:\nRates rose.\nStance:"
    assert without_instruction(fomc) == "Rates rose."


@pytest.mark.slow
def test_smoke_form_runs_the_whole_path(tmp_path):
    out = run_claim(CLAIM, smoke=True, folder=tmp_path, jobs=1, progress=False)
    assert out["smoke"] is True
    assert {"frozen", *METHODS, *list(ABLATIONS)[:-2]} <= {row["method"] for row in out["rows"]}
    assert {"test_op", "median_cosine", "own_mass"} <= {row["metric"] for row in out["rows"]}
