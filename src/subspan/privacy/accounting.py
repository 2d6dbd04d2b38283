"""How much noise a budget needs, and what it has cost: Opacus' accountants for the Poisson-sampled Gaussian."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from subspan.errors import MissingExtra, PrivacyError

Mechanism = Literal["prv", "rdp"]


class NoiseMultiplier(NamedTuple):
    """sigma, and the accountant under which it meets the budget (not the one asked for if that one failed)."""

    sigma: float
    accountant: Mechanism


def make_accountant(mechanism: Mechanism) -> Any:
    """A fresh Opacus accountant."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # opacus warns about unrelated optional parts while it loads
            from opacus.accountants import create_accountant
    except ImportError as error:
        raise MissingExtra('private training needs opacus: pip install "subspan[tune]"') from error
    return create_accountant(mechanism=mechanism)


@contextmanager
def _quiet(mechanism: Mechanism) -> Iterator[None]:
    """PRV sizes its grid by a rough RDP bound; Opacus' advice to refine that bound concerns RDP results only."""
    with warnings.catch_warnings():
        if mechanism == "prv":
            warnings.filterwarnings("ignore", message="Optimal order is the")
        yield


def spent(accountant: Any, delta: float) -> float:
    """Epsilon of an Opacus accountant's history."""
    with _quiet(accountant.mechanism()):
        return float(accountant.get_epsilon(delta))


def noise_multiplier(
    target_epsilon: float, target_delta: float, sample_rate: float, steps: int, accountant: Mechanism = "prv"
) -> NoiseMultiplier:
    """The smallest sigma (to 0.01 in epsilon) whose ``steps`` releases at ``sample_rate`` cost at most the target.

    "prv" (numerical composition, tight) falls back to "rdp" (looser, robust) with a warning where it fails; the result
    says which one holds.

    Raises:
        ValueError: an argument is out of range.
        PrivacyError: no noise reaches the target with so many steps.
    """
    _check_budget(target_epsilon, target_delta)
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    make_accountant(accountant)
    from opacus.accountants.utils import get_noise_multiplier

    def search(mechanism: Mechanism) -> float:
        with _quiet(mechanism):
            return get_noise_multiplier(
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                sample_rate=sample_rate,
                steps=steps,
                accountant=mechanism,
            )

    problems: list[str] = []
    cause: Exception | None = None
    for mechanism in dict.fromkeys((accountant, "rdp")):
        try:
            sigma = search(mechanism)
            if not math.isfinite(sigma):
                raise OverflowError(f"sigma = {sigma}")
        except Exception as error:  # numerical failures come as ValueError, RuntimeError, OverflowError or MemoryError
            problems.append(f"{mechanism}: {str(error) or type(error).__name__}")
            cause = error
            continue
        if problems:
            warnings.warn(
                f"the PRV accountant failed ({problems[0]}); sigma comes from the looser RDP accountant", stacklevel=2
            )
        return NoiseMultiplier(sigma, mechanism)
    raise PrivacyError(
        f"epsilon={target_epsilon:g} at delta={target_delta:g} is not reachable in {steps} steps at sampling rate "
        f"{sample_rate:.3g} ({'; '.join(problems)}): take fewer steps, a smaller batch, or a larger epsilon or delta"
    ) from cause


def _check_budget(epsilon: float, delta: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"target_epsilon must be positive, got {epsilon}")
    if not 0 < delta < 1:
        raise ValueError(f"target_delta must lie in (0, 1), got {delta}")
