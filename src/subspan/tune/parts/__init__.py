"""The methods that plug into a run, and which configuration brings which."""

from subspan.tune.config import Config
from subspan.tune.part import Part
from subspan.tune.sections import ZEROTH


def assemble(config: Config) -> list[Part]:
    """The parts of a run, in the order their hooks are called."""
    from subspan.tune.parts.audit import Audited
    from subspan.tune.parts.objective import OutputObjective
    from subspan.tune.parts.optimisers import AdamW, Muon
    from subspan.tune.parts.private import PrivateSteps
    from subspan.tune.parts.safeguard import Safeguarded
    from subspan.tune.parts.starts import FisherStart, PeftStart
    from subspan.tune.parts.zeroth import ZerothOrder

    parts: list[Part] = []
    if config.audit is not None:  # first: the other parts see the rows that are left
        parts.append(Audited(config.audit))
    if config.adapter is not None:
        parts.append(FisherStart(config.fisher) if config.init == "fisher" else PeftStart(config.init))
    if config.safeguard is not None:
        parts.append(Safeguarded(config.safeguard))
    if config.objective is not None:
        parts.append(OutputObjective(config.objective))
    if config.privacy is not None:
        parts.append(PrivateSteps(config.privacy))
    elif config.optimizer in ZEROTH:
        parts.append(ZerothOrder(config.optimizer, config.zeroth))
    else:
        parts.append(Muon() if config.optimizer == "muon" else AdamW())
    return parts
