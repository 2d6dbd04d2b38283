"""The methods that plug into a run, and which configuration brings which."""

from subspan.tune.config import Config
from subspan.tune.part import Part


def assemble(config: Config) -> list[Part]:
    """The parts of a run, in the order their hooks are called."""
    from subspan.tune.parts.optimisers import AdamW, Muon
    from subspan.tune.parts.private import PrivateSteps
    from subspan.tune.parts.starts import FisherStart, PeftStart

    start = FisherStart(config.fisher) if config.init == "fisher" else PeftStart(config.init)
    if config.privacy is not None:
        return [start, PrivateSteps(config.privacy)]
    return [start, Muon() if config.optimizer == "muon" else AdamW()]
