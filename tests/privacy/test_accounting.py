"""Noise for a budget, by Opacus' accountants."""

import warnings

import pytest
from jaxtyping import TypeCheckError

from subspan.errors import PrivacyError
from subspan.privacy import accounting, noise_multiplier


def test_t16_sigma_is_opacus_own_and_meets_the_budget() -> None:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.utils import get_noise_multiplier

    found = noise_multiplier(3.0, 1e-3, 0.25, 100, "rdp")
    expected = get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-3, sample_rate=0.25, steps=100, accountant="rdp"
    )
    assert found == (expected, "rdp")
    assert found.sigma == pytest.approx(3.03, abs=0.01)  # section 7
    accountant = RDPAccountant()
    for _ in range(100):
        accountant.step(noise_multiplier=found.sigma, sample_rate=0.25)
    assert 2.99 <= accountant.get_epsilon(1e-3) <= 3.0


def test_prv_needs_less_noise_than_rdp() -> None:
    assert noise_multiplier(1.0, 1e-5, 0.05, 1000, "prv").sigma < noise_multiplier(1.0, 1e-5, 0.05, 1000, "rdp").sigma


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_an_unreachable_budget_says_what_to_change(accountant: str) -> None:
    with pytest.raises(PrivacyError, match=r"epsilon=0\.005 .* not reachable in 100 steps .*fewer steps"):
        noise_multiplier(0.005, 1e-5, 0.05, 100, accountant)


def test_a_failing_prv_falls_back_to_rdp_out_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.accountants.prv import PRVAccountant

    def fail(self: PRVAccountant, delta: float, **options: float) -> float:
        raise RuntimeError("discrete mean differs")

    monkeypatch.setattr(PRVAccountant, "get_epsilon", fail)
    with pytest.warns(UserWarning, match=r"PRV accountant failed \(prv: discrete mean differs\)"):
        found = noise_multiplier(3.0, 1e-3, 0.25, 100)
    assert found.accountant == "rdp"
    assert found.sigma == pytest.approx(3.03, abs=0.01)


def test_an_unexpected_failure_is_named_and_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.accountants import RDPAccountant

    def fail(self: RDPAccountant, delta: float, **options: float) -> float:
        raise MemoryError

    monkeypatch.setattr(RDPAccountant, "get_epsilon", fail)
    with pytest.raises(PrivacyError, match=r"not reachable .*\(rdp: MemoryError\)") as caught:
        noise_multiplier(3.0, 1e-3, 0.25, 100, "rdp")
    assert isinstance(caught.value.__cause__, MemoryError)


def test_no_warning_where_nothing_failed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accounting.make_accountant("prv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1e-5, 0.1, 10), "target_epsilon"),
        ((1.0, 0.0, 0.1, 10), "target_delta"),
        ((1.0, 1e-5, 1.5, 10), "sample_rate"),
        ((1.0, 1e-5, 0.1, 0), "steps"),
        ((1.0, 1e-5, 0.1, 10, "gdp"), "accountant"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises((ValueError, TypeCheckError), match=message):
        noise_multiplier(*arguments)
