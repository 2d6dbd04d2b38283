"""Rows that would erode what a model refuses: scored before training, then dropped or drawn less often."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from subspan.errors import DataError
from subspan.tune.part import Part, Run
from subspan.tune.sections import Audit


class WeightedBatches:
    """Row numbers of every batch of a run, in a fixed order: each batch a draw without replacement, by weight."""

    drop_last = False  # with ``batch_size``, what accelerate asks of a sampler whose batches it shares out

    def __init__(self, weights: torch.Tensor, batch_size: int, batches: int, seed: int) -> None:
        drawable = int((weights > 0).sum())
        if batch_size > drawable:
            raise DataError(f"a batch of {batch_size} rows cannot be drawn from {drawable} training rows with a weight")
        self.weights, self.batch_size, self.batches, self.seed = weights, batch_size, batches, seed

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.batches):
            yield torch.multinomial(self.weights, self.batch_size, generator=generator).tolist()


class Audited(Part):
    """Scores the training rows on the bare base model, and keeps or weighs them by it."""

    def __init__(self, options: Audit) -> None:
        self.options = options
        self.table: Any = None
        self.weights: torch.Tensor | None = None

    def prepare_base(self, run: Run) -> None:
        from accelerate import PartialState

        # The first process scores and writes; the others read what it wrote.
        with PartialState().main_process_first():
            self._take(run, self._score(run))

    def _score(self, run: Run) -> Any:
        from subspan.safety import Direction, SafetyRisk
        from subspan.safety.sqsd.audit import find_direction, initial_rows, trained_once

        options, tokenizer = self.options, run.task.tokenizer
        home = run.folder / "audit"
        danger, safety = (
            find_direction(source, run.model, tokenizer, home / name, run.say)
            for name, source in (("danger", str(options.danger)), ("safety", str(options.safety)))
        )
        init: Direction | None = None
        if options.init is not None:
            init = Direction.from_adapter(options.init)
        elif options.state != "zero":
            some = [{k: r[k] for k in ("input_ids", "labels")} for r in initial_rows(run.train)]
            init = trained_once(
                run.model, tokenizer, some, home / "init", run.say, f"{len(some)} rows", stop_margin=None
            )
        run.say(f"scoring {len(run.train)} training rows")
        risk = SafetyRisk(run.model, danger, safety, tokenizer=tokenizer, state=options.state, init=init)
        table = risk.score(run.train, out=home / "scores.parquet")
        table.report(home / "scores.html")
        return table

    def _take(self, run: Run, table: Any) -> None:
        self.table = table
        if self.options.drop_top:
            kept = table.without_top(self.options.drop_top)
            run.train = [run.train[i] for i in kept]
        elif self.options.reweight:
            self.weights = torch.from_numpy(table.weights())

    def prepare_adapter(self, run: Run) -> None:
        if self.table is None:  # a resumed run, whose base is not bare any more
            from subspan.safety import RiskTable

            self._take(run, RiskTable.read(run.folder / "audit" / "scores.parquet"))
        table: Any = self.table
        done = "weighted by the score" if self.weights is not None else f"{len(table) - len(run.train)} dropped"
        run.note("audit", state=self.options.state, rows=len(table), scored=len(table.ranking), outcome=done)

    def batches(self, run: Run) -> Iterable[list[int]] | None:
        if self.weights is None:
            return None
        config = run.config
        size, count = config.batch_size // config.accumulate, config.max_steps * config.accumulate
        return WeightedBatches(self.weights, size, count, config.seed)
