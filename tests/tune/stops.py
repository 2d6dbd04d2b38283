"""A run that is stopped, as by Ctrl-C."""

import pytest

from subspan.tune import tune


def stopped_at(step, config, monkeypatch):
    """Run until the given step begins, and leave it there."""
    from subspan.tune.trainer import TuneTrainer

    original, calls = TuneTrainer.training_step, []

    def dying(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == step:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TuneTrainer, "training_step", dying)
    with pytest.raises(KeyboardInterrupt):
        tune(config)
    monkeypatch.setattr(TuneTrainer, "training_step", original)
