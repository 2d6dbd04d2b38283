"""Speed of predicted spectra against Krylov methods on the same layers, and the memory of a prediction.

N = 1740 samples, K = 10 classes, five weight layers of width 128, squared loss; layers 2 to 5, the leading 2K
eigenvalues of each. Peers: curvlinops' GGNLinearOperator under scipy's eigsh where curvlinops can be imported (pip
installs torchvision with it; its import needs none), else the same operator by jvp and vjp, written plainly below; and
eigsh on a hand-written product with the layer's Jacobians, the best one can do knowing the structure.
"""

import argparse
import time
from itertools import pairwise

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from subspan.surgery import logit_jacobians
from subspan.theory import collapse_spectra
from timing import interleaved, median_ratio, peak_bytes, report

N, K, WIDTH = 1740, 10, 128
NAMES = ("2", "4", "6", "8")


def network() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    widths = [64, WIDTH, WIDTH, WIDTH, WIDTH, K]
    layers = [m for i, o in pairwise(widths) for m in (nn.Linear(i, o, bias=False), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(N, 64), torch.arange(N) % K


class PlainGGN(LinearOperator):
    """G v = Jᵀ J v / N of one weight, by a forward-mode and a reverse-mode product over the network."""

    def __init__(self, model: nn.Module, name: str, x: Tensor) -> None:
        weight = model.get_parameter(name).detach()
        self.f = lambda w: functional_call(model, {name: w}, (x,))
        self.weight = weight
        super().__init__(np.float32, (weight.numel(),) * 2)

    def _matvec(self, v: np.ndarray) -> np.ndarray:
        direction = torch.from_numpy(v.astype(np.float32).reshape(self.weight.shape))
        _, moved = jvp(self.f, (self.weight,), (direction,))
        _, pull = vjp(self.f, self.weight)
        return pull(moved)[0].detach().flatten().numpy() / N


def krylov_peer(model: nn.Module, x: Tensor, y: Tensor):
    """(name of the peer, function that finds 2K eigenvalues of each layer)."""
    try:
        from curvlinops import GGNLinearOperator

        targets = nn.functional.one_hot(y).float()
        # the halved squared distance is K/2 times the mean over logits
        operators = [
            GGNLinearOperator(
                model, nn.MSELoss(), [model.get_parameter(f"{n}.weight")], [(x, targets)], check_deterministic=False
            )
            for n in NAMES
        ]
        scipy_operators = [(op.to_scipy(), K / 2) for op in operators]
        name = "curvlinops GGNLinearOperator with eigsh"
    except ImportError:
        scipy_operators = [(PlainGGN(model, f"{n}.weight", x), 1.0) for n in NAMES]
        name = "GGN by jvp and vjp with eigsh (curvlinops is not installed)"
    return name, lambda: [eigsh(op, 2 * K, tol=1e-3)[0][::-1] * scale for op, scale in scipy_operators]


def structured_peer(model: nn.Module, x: Tensor):
    """eigsh on the held Jacobians and inputs of each layer."""

    def run() -> list[np.ndarray]:
        _, jacobians = logit_jacobians(lambda: model(x), {n: model.get_submodule(n) for n in NAMES})
        found = []
        for A, X in jacobians.values():
            a, h = A[:, :, 0].transpose(0, 1).contiguous(), X[:, 0]

            def product(v: np.ndarray, a: Tensor = a, h: Tensor = h) -> np.ndarray:
                moved = h @ torch.from_numpy(v.astype(np.float32).reshape(a.shape[2], -1)).T
                back = (torch.bmm(a, moved[:, :, None]).mT @ a)[:, 0]
                return (back.T @ h / N).flatten().numpy()

            operator = LinearOperator((a.shape[2] * h.shape[1],) * 2, matvec=product, dtype=np.float32)  # pyright: ignore
            found.append(eigsh(operator, 2 * K, tol=1e-3)[0][::-1])
        return found

    return run


def main(repeats: int) -> None:
    model, x, y = network()
    batches = [(x, y)]
    predict = {
        name: lambda name=name: collapse_spectra(model, batches, NAMES, loss="mse", estimator=name, residuals=0)
        for name in ("means", "ritz")
    }
    peer, krylov = krylov_peer(model, x, y)
    structured = structured_peer(model, x)
    times = interleaved({**predict, "krylov": krylov, "structured": structured}, repeats, time.process_time)
    load = {name: min(seconds) for name, seconds in times.items()}
    report("means, speed over Krylov", median_ratio(times, "krylov", "means"), 30, "higher", peer, **load)
    report("ritz, speed over Krylov", median_ratio(times, "krylov", "ritz"), 10, "higher", peer)
    own = "eigsh on products with the layer's Jacobians"
    report("means, speed over structured Krylov", median_ratio(times, "structured", "means"), 8, "higher", own)
    report("ritz, speed over structured Krylov", median_ratio(times, "structured", "ritz"), 3, "higher", own)
    report("ritz over means, time", median_ratio(times, "ritz", "means"), 4, "lower", "means")

    found, exact = predict["ritz"](), krylov()
    worst = max(1 - float(found[n].eigenvalues[0]) / float(e[0]) for n, e in zip(NAMES, exact, strict=True))
    report("ritz, first eigenvalue below the exact one", worst, 0.05, "lower", peer)

    layers = {n: model.get_submodule(n) for n in NAMES}
    backward = peak_bytes(lambda: logit_jacobians(lambda: model(x), layers))
    room = backward + 4 * sum(K * K * sum(layer.weight.shape) for layer in layers.values())
    report("peak memory of ritz", peak_bytes(predict["ritz"]) / room, 1.5, "lower", "one batched backward pass + K² d")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    repeats = 2 if parser.parse_args().quick else 7
    torch.set_num_threads(1)
    main(repeats)
