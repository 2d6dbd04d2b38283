"""Private steps: PRISM, or noisy gradients on the factors as its peers, through one engine and one accountant."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from subspan.files import replacing, write_json
from subspan.tune.config import Config
from subspan.tune.part import Part, Run
from subspan.tune.parts.optimisers import AdamW, Muon, rates
from subspan.tune.sections import Privacy
from subspan.tune.tasks import by_length, trimmed

if TYPE_CHECKING:
    from subspan.privacy import PoissonBatchSampler, PrismPrivacy
    from subspan.tune.tasks import Batch


def noise(config: Config, rows: int) -> dict[str, Any]:
    """The noise multiplier, sampling rate and accountant of a private run, before anything is trained."""
    from subspan.privacy import noise_multiplier

    wanted = config.privacy
    assert wanted is not None
    rate = config.batch_size / rows
    sigma, accountant = noise_multiplier(wanted.epsilon, wanted.delta, rate, config.max_steps, wanted.accountant)
    return {"sigma": round(sigma, 4), "sample_rate": rate, "accountant": accountant}


class PrivateSteps(Part):
    """Poisson batches, each row's gradient clipped, noise added, and the budget kept."""

    logs = ("learning_rate",)

    def __init__(self, privacy: Privacy) -> None:
        self.privacy = privacy
        self.engine: PrismPrivacy | None = None
        self.order: PoissonBatchSampler | None = None

    def prepare_adapter(self, run: Run) -> None:
        from subspan.privacy import PrismConfig, PrismPrivacy

        wanted, config = self.privacy, run.config
        settings = PrismConfig(
            target_epsilon=wanted.epsilon,
            target_delta=wanted.delta,
            max_grad_norm=wanted.clip,
            method=wanted.method,
            init="keep" if run.resuming or wanted.method != "prism" else "spectral",
            accountant=wanted.accountant,
            max_physical_batch=wanted.physical_batch,
            public_data=config.data.public,
        )
        self.engine = PrismPrivacy(
            run.model,
            settings,
            dataset_size=len(run.train),
            expected_batch_size=config.batch_size,
            steps=config.max_steps,
            generator=self._generator(0),
        )
        self.order = self.engine.sampler(self._generator(1))
        if self.engine.shift is not None:
            run.shift = self.engine.shift
        run.say(f"noise multiplier {self.engine.sigma:.3f} for epsilon {wanted.epsilon:g} at delta {wanted.delta:g}")

    def _generator(self, stream: int) -> torch.Generator | None:
        """None lets the engine ask the operating system: whoever knows the seed can subtract the noise."""
        seed = self.privacy.noise_seed
        if seed is None:
            return None
        (state,) = np.random.SeedSequence([seed, stream]).generate_state(1)
        return torch.Generator().manual_seed(int(state))

    def optimizer(self, run: Run) -> torch.optim.Optimizer:
        assert self.engine is not None
        config = run.config
        if self.privacy.method == "prism":
            run.note("optimiser", name="Prism", **rates(run))
            return self.engine.optimizer(config.lr, dense_lr=config.head_lr, weight_decay=config.weight_decay)
        inner = Muon() if config.optimizer == "muon" else AdamW()
        return self.engine.attach(inner.optimizer(run))

    def batches(self, run: Run) -> "PoissonBatchSampler | None":
        return self.order

    def step(self, run: Run, model: nn.Module, batch: "Batch") -> Tensor:
        assert self.engine is not None
        for part in self.engine.micro_batches(by_length(batch)):
            self.engine.backward(run.task.losses(model, trimmed(part)).per_row())
        # The mean loss of private rows carries no noise, and Trainer hands what a step returns to every logger and
        # checkpoint: it stays here. A loss that is not finite has already raised in the engine.
        return torch.zeros((), device=batch["input_ids"].device)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        assert self.engine is not None
        assert self.order is not None
        state = self.engine.state_dict()
        tensors = {"generator": state.pop("generator"), "seeds": self.order.seeds}
        with replacing(folder / "privacy.safetensors") as part:
            save_file(tensors, part)
        write_json(folder / "privacy.json", state)

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        assert self.engine is not None
        assert self.order is not None
        state = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "privacy.safetensors")
        self.engine.load_state_dict(state | {"generator": tensors["generator"]})
        self.order.load_state_dict(self.order.state_dict() | {"seeds": tensors["seeds"]})

    def finish(self, run: Run) -> None:
        assert self.engine is not None
        facts = self.engine.summary()
        facts.pop("target_epsilon")
        run.note("privacy", **facts)
        self.engine.close()
