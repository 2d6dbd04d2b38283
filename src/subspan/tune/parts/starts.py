"""Where the adapter starts: peft's own initialisations, and Fisher directions."""

from typing import Any

import torch

from subspan.surgery import factor_pairs, shift_base, weight_matrix, write_weight
from subspan.tune.part import Part, Run
from subspan.tune.sections import EDITING_INITS, FisherOptions


class PeftStart(Part):
    """One of peft's initialisations. Where it edits the base weight, the edit is recorded and undone on export."""

    def __init__(self, init: str) -> None:
        self.init = init
        self.original: dict[str, torch.Tensor] = {}
        self.extra: dict[str, Any] = {}

    def prepare_base(self, run: Run) -> None:
        if self.init.startswith(EDITING_INITS):
            self.original = {n: weight_matrix(run.model.get_submodule(n)).clone() for n in run.targets}
        if self.init in ("corda", "lora_ga"):
            self.extra = self._preprocess(run)

    def _preprocess(self, run: Run) -> dict[str, Any]:
        """peft's own pass over the calibration rows; it leaves what it needs on the modules."""
        from peft import LoraConfig
        from peft.tuners.lora.config import CordaConfig, LoraGAConfig

        adapter = run.config.adapter
        assert adapter is not None
        options: dict[str, Any] = (
            {"corda_config": CordaConfig()} if self.init == "corda" else {"lora_ga_config": LoraGAConfig()}
        )
        config = LoraConfig(
            r=adapter.r,
            lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=run.targets,
            init_lora_weights=self.init,  # pyright: ignore[reportArgumentType]
            **options,
        )
        run.model.eval()
        if self.init == "corda":
            from peft.tuners.lora.corda import preprocess_corda

            preprocess_corda(run.model, config, run_model=lambda: self._look(run, backward=False))
        else:
            from peft.tuners.lora.loraga import preprocess_loraga

            preprocess_loraga(run.model, config, train_step=lambda: self._look(run, backward=True))
            run.model.zero_grad()
        return options

    def _look(self, run: Run, backward: bool) -> None:
        # peft's CorDA takes the inputs of one sequence at a time.
        for batch in run.calibration(batch_size=8 if backward else 1):
            with torch.set_grad_enabled(backward):
                losses = run.task.losses(run.model, batch)
            if backward:
                losses.mean().backward()

    def lora_options(self, run: Run) -> dict[str, Any]:
        # A resumed run takes its start, and the edit of the base, from the file.
        if self.init == "default" or run.resuming:
            return {"init_lora_weights": True}
        return {"init_lora_weights": self.init, **self.extra}

    def prepare_adapter(self, run: Run) -> None:
        run.note("start", init=self.init)
        if self.init == "eva" and not run.resuming:
            from peft import initialize_lora_eva_weights

            batches = [{k: v for k, v in b.items() if k in ("input_ids", "attention_mask")} for b in run.calibration()]
            initialize_lora_eva_weights(run.model, batches, show_progress_bar=False)
        if self.original and not run.resuming:
            pairs = factor_pairs(run.model)
            for pair in pairs:  # peft's own residual is replaced by ours, which a resumed run repeats bit by bit
                write_weight(pair.layer, self.original[pair.name])
            run.shift = shift_base(run.model, pairs)
        self.original = {}


class FisherStart(Part):
    """Directions of largest Fisher information, from a short calibration on training rows."""

    def __init__(self, options: FisherOptions) -> None:
        self.options = options
        self.stats: Any = None

    def prepare_base(self, run: Run) -> None:
        from subspan.surgery import collect_fisher

        config = run.config
        assert config.adapter is not None
        run.say(f"measuring Fisher information on {config.calibration_rows} training rows")
        batches = [{k: batch[k] for k in ("input_ids", "attention_mask", "labels")} for batch in run.calibration()]
        self.stats = collect_fisher(
            run.model,
            batches,
            targets=run.targets,
            n_samples=config.calibration_rows,
            rank=config.adapter.r,
            public=config.data.public,
        )

    def prepare_adapter(self, run: Run) -> None:
        options = self.options
        run.note("start", init="fisher", mode=options.mode, sign=options.sign, kappa=options.kappa)
        if run.resuming:
            return
        from subspan.adapters import fisher_init

        report = fisher_init(
            run.model,
            self.stats,
            mode=options.mode,
            sign=options.sign,
            kappa=options.kappa,
            preserve=options.preserve,
            private=run.config.privacy is not None,
        )
        run.shift, self.stats = report.shift, None
