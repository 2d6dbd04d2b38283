"""Claim: noise on the outputs trains a network on losses that back-propagation cannot use (OVLR, ICML 2026).

Only the abstract was readable. E1 compares the estimate with the true gradient, E2 trains on the error rate under
wrong labels, E3 on a truncated loss that starts outside its window, E4 on F1 as a black box, E5 throws at a target
through a simulator that says hit or miss. Settings were chosen on seeds 0 to 4.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, huber_loss, l1_loss, mse_loss

from subspan.claims.claim import Cell, Claim, Plot, Results, Row, Statement
from subspan.claims.ovlr_peers import Loss, Training, WeightNoise, mean_of, network
from subspan.claims.ovlr_throws import throws
from subspan.data import digits
from subspan.optim import (
    GeometricSigma,
    OutputSpaceLoss,
    expected_zero_one,
    truncated_cross_entropy,
    truncated_square,
    zero_one,
)

uncapped = partial(truncated_cross_entropy, cap=math.inf)


# ------------------------------------------------------------------------------------------------ E1: estimator quality

PAIRS = (1, 4, 16, 64)


def quality(seed: int, smoke: bool) -> list[Row]:
    """Cosine with the gradient of cross-entropy by back-propagation, on all weights of a fresh network."""
    images, labels = digits()
    rows = np.random.default_rng(seed).permutation(len(labels))[:64]
    x, y = torch.from_numpy(images[rows].reshape(-1, 64)), torch.from_numpy(labels[rows])
    model = network(seed, 64, 256, 256, 10)
    params = list(model.parameters())
    truth = torch.cat([g.view(-1) for g in torch.autograd.grad(cross_entropy(model(x), y), params)])
    out = []
    for pairs in PAIRS[:2] if smoke else PAIRS:
        criterion = OutputSpaceLoss(uncapped, sigma=0.5, pairs=pairs, seed=seed)
        es = WeightNoise(model, mean_of(uncapped), pairs, 0.01, seed)
        estimates: dict[str, Callable[[], Any]] = {
            "OVLR": lambda c=criterion: torch.autograd.grad(c(model(x), y), params),
            "ES on the weights": lambda es=es: es.gradient(x, y),
        }
        for method, estimate in estimates.items():
            cosines = [
                torch.cosine_similarity(torch.cat([g.reshape(-1) for g in estimate()]), truth, 0)
                for _ in range(2 if smoke else 10)  # draws of the noise
            ]
            out.append(
                Row(method, {"task": "cosine", "pairs": pairs}, "cosine", seed, float(sum(cosines) / len(cosines)))
            )
    return out


# ----------------------------------------------------------------------------------------------------- E2: wrong labels

NOISE = (0.0, 0.4, 0.6)
CLOSED_FORM = "0-1 smoothed, closed form, warm"
OVLR_WARM, OVLR_COLD, OVLR_CE = "0-1 by OVLR, warm", "0-1 by OVLR, cold", "CE by OVLR"
ES_WARM = "0-1 by ES on the weights, warm"


def gce(z: Tensor, y: Tensor, q: float = 0.7) -> Tensor:
    """Generalised cross-entropy, (1 - p_y^q) / q."""
    return ((1 - z.softmax(1).gather(1, y[:, None]) ** q) / q).mean()


def mae(z: Tensor, y: Tensor) -> Tensor:
    return (1 - z.softmax(1).gather(1, y[:, None])).mean()


def without_signal(loss: Loss) -> Loss:
    """A piecewise constant loss under autograd: its gradient is exactly 0."""
    return lambda z, y: loss(z, y).mean() + 0 * z.sum()


class Labels:
    """Digits: a stratified 30 % test split, and training labels of which a share moved to another class."""

    def __init__(self, seed: int, noise: float) -> None:
        from sklearn.model_selection import train_test_split

        images, labels = digits()
        x = images.reshape(-1, 64)
        train_x, test_x, y, test_y = train_test_split(x, labels, test_size=0.3, stratify=labels, random_state=seed)
        rng = np.random.default_rng(seed)
        wrong = rng.random(len(y)) < noise
        y = np.where(wrong, (y + rng.integers(1, 10, len(y))) % 10, y)
        self.seed = seed
        self.train = torch.from_numpy(train_x), torch.from_numpy(y)
        self.test = torch.from_numpy(test_x), torch.from_numpy(test_y)

    def accuracy(self, loss: Loss, epochs: int, warm: int = 0, es: bool = False) -> float:
        """Clean test accuracy at the end of ``warm`` epochs of cross-entropy and ``epochs`` of the loss."""
        model = network(self.seed, 64, 256, 256, 10)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        training = Training(model, adam, *self.train, 64, self.seed)
        training.run(cross_entropy, warm)
        training.run(WeightNoise(model, mean_of(loss), 16, 0.02, self.seed) if es else loss, epochs)
        x, y = self.test
        with torch.no_grad():
            return float((model(x).argmax(1) == y).float().mean())


def by_noise(loss: Loss, seed: int, sigma: float = 1.0) -> OutputSpaceLoss:
    return OutputSpaceLoss(loss, sigma=sigma, pairs=16, invariance="shift", seed=seed)


def wrong_labels(seed: int, smoke: bool, *, noise: float) -> list[Row]:
    task, epochs = Labels(seed, noise), 1 if smoke else 60
    warm = min(3, epochs)
    found = {
        "CE": task.accuracy(cross_entropy, epochs),
        "GCE": task.accuracy(gce, epochs),
        "MAE": task.accuracy(mae, epochs),
        # A gradient of exactly 0 needs no 60 epochs to do nothing.
        "0-1 by BP": task.accuracy(without_signal(zero_one), 1),
        OVLR_WARM: task.accuracy(by_noise(zero_one, seed), epochs - warm, warm),
        OVLR_COLD: task.accuracy(by_noise(zero_one, seed, 0.5), epochs),
    }
    if noise == 0:
        found[OVLR_CE] = task.accuracy(by_noise(uncapped, seed, 0.5), epochs)
    if noise == 0.4:
        # A step costs about ten times as much: these epochs take as long as OVLR's.
        found[ES_WARM] = task.accuracy(zero_one, 1 if smoke else 6, warm, es=True)
    setting = {"task": "wrong labels", "noise": noise}
    return [Row(method, setting, "test_accuracy", seed, value) for method, value in found.items()]


def closed_form(seed: int, smoke: bool, *, noise: float) -> list[Row]:
    """The same smoothed error rate by its formula: no noise, and no black box either."""
    epochs = 1 if smoke else 60
    warm = min(3, epochs)

    def smoothed(z: Tensor, y: Tensor) -> Tensor:
        return expected_zero_one(z, y, 1.0).mean()

    value = Labels(seed, noise).accuracy(smoothed, epochs - warm, warm)
    return [Row(CLOSED_FORM, {"task": "wrong labels", "noise": noise}, "test_accuracy", seed, value)]


# --------------------------------------------------------------------------------------------------------- E3: outliers

CAPPED_BP, CAPPED_OVLR, CAPPED_ES = "truncated by BP", "truncated by OVLR", "truncated by ES on the weights"
REGRESSION: dict[str, Loss] = {
    "MSE": mse_loss,
    "Huber": huber_loss,
    "MAE": l1_loss,
    CAPPED_BP: mean_of(truncated_square),
}


def outliers(seed: int, smoke: bool, *, shift: float) -> list[Row]:
    """Diabetes: 30 % of the training targets moved by 10 to 15, all of them by ``shift``; clean test MSE."""
    from sklearn.datasets import load_diabetes

    data, target = map(np.asarray, load_diabetes(return_X_y=True))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(target))
    held, used = order[: len(order) * 3 // 10], order[len(order) * 3 // 10 :]
    x = (data - data[used].mean(0)) / data[used].std(0)
    y = (target - target[used].mean()) / target[used].std() + shift
    bent = y[used] + np.where(rng.random(len(used)) < 0.3, rng.uniform(10, 15, len(used)), 0.0)
    given, wanted = (torch.from_numpy(a).float() for a in (x, y[:, None]))
    answers = torch.from_numpy(bent[:, None]).float()
    epochs = 2 if smoke else 150
    steps = epochs * -(-len(used) // 32)
    rows = []
    for method in (*REGRESSION, CAPPED_OVLR, *([CAPPED_ES] if shift else [])):
        model = network(seed, 10, 32, 1)
        adam = torch.optim.Adam(model.parameters(), lr=2e-3)
        if method == CAPPED_ES:
            loss: Loss | WeightNoise = WeightNoise(model, REGRESSION[CAPPED_BP], 16, 0.1, seed)
        elif method == CAPPED_OVLR:
            loss = OutputSpaceLoss(truncated_square, sigma=GeometricSigma(2.0, 0.5, steps), pairs=16, seed=seed)
        else:
            loss = REGRESSION[method]
        Training(model, adam, given[used], answers, 32, seed).run(loss, epochs)
        with torch.no_grad():
            value = float(mse_loss(model(given[held]), wanted[held]))
        rows.append(Row(method, {"task": "outliers", "shift": shift}, "test_mse", seed, value))
    return rows


# -------------------------------------------------------------------------------------------------- E4: F1, a black box


def f_shortfall(out: np.ndarray, target: np.ndarray, beta: float = 1.0) -> np.ndarray | np.floating:
    """1 - F_beta of the positive class for outputs (..., B, 1)."""
    predicted, positive = out[..., 0] > 0, target == 1
    found, b = (predicted & positive).sum(-1), beta**2
    return 1 - (1 + b) * found / np.maximum(1, predicted.sum(-1) + b * positive.sum())


def f_metric(seed: int, smoke: bool, *, beta: float) -> list[Row]:
    """Breast cancer with 60 malignant rows, five features, a linear model; two splits a seed, so that there are ten.

    F1 wants a threshold near the 0.5 of cross-entropy, F2 a far lower one.
    """
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    data, benign = map(np.asarray, load_breast_cancer(return_X_y=True))
    rows, name = [], f"F{beta:g}"
    shortfall = partial(f_shortfall, beta=beta)
    for problem in (2 * seed, 2 * seed + 1):
        rng = np.random.default_rng(problem)
        kept = np.concatenate([rng.permutation(np.flatnonzero(benign == 0))[:60], np.flatnonzero(benign == 1)])
        x, y = data[kept, :5], 1 - benign[kept]
        parts = train_test_split(x, y, test_size=0.4, stratify=y, random_state=problem)
        x, test_x, y, test_y = (np.asarray(part) for part in parts)
        mean, std = x.mean(0), x.std(0)
        given, held = (torch.from_numpy((a - mean) / std).float() for a in (x, test_x))
        labels = torch.from_numpy(y)
        epochs = 2 if smoke else 120

        def logistic(out: Tensor, y: Tensor) -> Tensor:
            return nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.float())

        def black_box(out: Tensor, y: Tensor) -> Tensor:
            return torch.from_numpy(shortfall(out.numpy(), y.numpy())).float()

        scores = {}
        for method in ("CE", f"{name} by OVLR", f"{name} by ES on the weights"):
            model = network(problem, 5, 1)
            training = Training(model, torch.optim.Adam(model.parameters(), lr=5e-3), given, labels, 64, problem)
            training.run(logistic, 5)
            if method == f"{name} by OVLR":
                options: dict[str, Any] = {"credit": "batch", "vectorized": True, "as_numpy": True, "pairs": 128}
                training.run(OutputSpaceLoss(shortfall, seed=problem, **options), epochs)
            elif method == f"{name} by ES on the weights":
                training.run(WeightNoise(model, black_box, 128, 0.3, problem), epochs)
            else:
                training.run(logistic, epochs)
            with torch.no_grad():
                scores[method] = 1 - float(shortfall(model(held).numpy(), test_y))
                if method == "CE":
                    z, z_test = model(given).numpy(), model(held).numpy()
                    cuts = np.sort(z[:, 0])
                    best = min(cuts, key=lambda c: float(shortfall(z - c, y)))
                    scores["CE, threshold tuned"] = 1 - float(shortfall(z_test - best, test_y))
        rows += [Row(method, {"task": name}, f"test_{name}", problem, value) for method, value in scores.items()]
    return rows


def cells(smoke: bool) -> list[Cell]:
    return [
        Cell("cosine", quality),
        *(Cell(f"wrong labels {noise:.0%}", wrong_labels, {"noise": noise}) for noise in NOISE),
        *(Cell(f"closed form {noise:.0%}", closed_form, {"noise": noise}) for noise in NOISE[1:]),
        *(Cell(f"outliers, shift {shift:g}", outliers, {"shift": shift}) for shift in (4.0, 0.0)),
        *(Cell(f"F{beta:g}", f_metric, {"beta": beta}) for beta in (1.0, 2.0)),
        Cell("throws", throws),
    ]


# ----------------------------------------------------------------------------------------------------------- statements


def cosine_at_16(r: Results) -> float:
    return float(r.values("OVLR", "cosine", pairs=16).mean())


def over_es(r: Results) -> float:
    """Smallest ratio, over the numbers of pairs, of the mean cosines."""
    means = [[r.values(m, "cosine", pairs=p).mean() for m in ("OVLR", "ES on the weights")] for p in PAIRS]
    return float(min(a / b for a, b in means))


def gain(method: str, peer: str, *noises: float) -> Callable[[Results], float]:
    """Least, over the shares of wrong labels, of the mean paired difference of test accuracies."""

    def measure(r: Results) -> float:
        at = [{"task": "wrong labels", "noise": noise} for noise in noises]
        return float(
            min((r.values(method, "test_accuracy", **s) - r.values(peer, "test_accuracy", **s)).mean() for s in at)
        )

    return measure


def off_chance(r: Results) -> float:
    """Largest distance of a mean over seeds from 1 in 10."""
    means = [r.values("0-1 by BP", "test_accuracy", task="wrong labels", noise=noise).mean() for noise in NOISE]
    return float(np.abs(np.array(means) - 0.1).max())


def mse_at(method: str, shift: float) -> Callable[[Results], np.ndarray]:
    return lambda r: r.values(method, "test_mse", task="outliers", shift=shift)


def f_gain(name: str, peer: str) -> Callable[[Results], float]:
    metric = f"test_{name}"
    return lambda r: float((r.values(f"{name} by OVLR", metric) - r.values(peer, metric, task=name)).mean())


def hit_gain(peer: str) -> Callable[[Results], float]:
    return lambda r: float((r.values("OVLR", "hit_rate") - r.values(peer, "hit_rate")).mean())


CLAIM = Claim(
    slug="ovlr",
    title="Training on losses without a useful gradient",
    source="OVLR (ICML 2026 poster 64062, abstract only)",
    cells=cells,
    statements=[
        Statement("cosine with the true gradient at 16 pairs", cosine_at_16, 0.75),
        Statement("cosine over that of ES on the weights, worst of 1, 4, 16, 64 pairs", over_es, 20.0),
        Statement("40 % wrong labels: accuracy over CE", gain(OVLR_WARM, "CE", 0.4), 0.12),
        Statement("60 % wrong labels: accuracy over CE", gain(OVLR_WARM, "CE", 0.6), 0.25),
        Statement("40 % wrong labels: accuracy over GCE", gain(OVLR_WARM, "GCE", 0.4), 0.01),
        Statement("60 % wrong labels: accuracy over GCE", gain(OVLR_WARM, "GCE", 0.6), 0.03),
        Statement("40 and 60 %: accuracy over MAE, the worse", gain(OVLR_WARM, "MAE", 0.4, 0.6), -0.01),
        Statement("clean labels: accuracy over CE", gain(OVLR_WARM, "CE", 0.0), -0.01),
        Statement("0-1 loss by back-propagation: distance from chance", off_chance, 0.03, "<="),
        Statement("parity: CE by OVLR over CE by back-propagation", gain(OVLR_CE, "CE", 0.0), -0.01),
        Statement("outliers, bad start: worst MSE", lambda r: float(mse_at(CAPPED_OVLR, 4.0)(r).max()), 1.0, "<="),
        Statement(
            "outliers, bad start: best MSE of back-propagation on the same loss",
            lambda r: float(mse_at(CAPPED_BP, 4.0)(r).min()),
            10.0,
        ),
        Statement(
            "outliers, centred targets: MSE over that of back-propagation on the same loss (it is as good)",
            lambda r: float(mse_at(CAPPED_OVLR, 0.0)(r).mean() / mse_at(CAPPED_BP, 0.0)(r).mean()),
            1.1,
            "<=",
        ),
        Statement("F1 as a black box: F1 over CE", f_gain("F1", "CE"), 0.0),
        Statement("F2 as a black box, where CE's threshold is wrong: F2 over CE", f_gain("F2", "CE"), 0.01),
        Statement("throws: hit rate over the start's", hit_gain("before"), 0.5),
        Statement("throws: hit rate over ES on the weights", hit_gain("ES on the weights"), 0.0),
        Statement("throws: hit rate over REINFORCE with as many throws", hit_gain("REINFORCE"), 0.0),
    ],
    seeds=range(100, 105),
    smoke_seeds=(0,),
    plots=[
        Plot("Cosine with the gradient by back-propagation", "cosine", over="pairs", log_x=True, log_y=True),
        Plot("Test accuracy under wrong training labels", "test_accuracy", over="noise"),
        Plot("Clean test MSE, every residual starts outside the window", "test_mse", where={"shift": 4.0}, log_y=True),
        Plot("Test F1", "test_F1"),
        Plot("Test F2", "test_F2"),
        Plot("Hit rate of the throws", "hit_rate"),
    ],
    notes=(
        "The paper's tables could not be read; nothing here repeats them. With centred targets back-propagation on the "
        "truncated loss has a signal and is as good. The closed form of the smoothed error rate, where there is one, "
        "gives the same accuracies without noise. By F1 and F2 of 24 positive test rows the differences are within "
        "noise, and a threshold tuned on cross-entropy is as good. ES on the weights gets 6 epochs under wrong labels, "
        "which take as long as OVLR's 57."
    ),
)
