"""Statements of a claim on hand-made results."""

from subspan.claims.claim import Claim, Results


def failing(claim: Claim, results: Results) -> set[str]:
    """The statements that do not hold."""
    return {s.text for s in claim.statements if not s.judge(results).holds}


def measured(claim: Claim, results: Results) -> list[float | None]:
    """What each statement measures; all of them must hold."""
    found = [s.judge(results) for s in claim.statements]
    assert all(v.holds and v.problem is None for v in found), found
    return [v.measured for v in found]


def broken(claim: Claim, results: Results) -> list[int]:
    """Numbers of the statements that do not hold."""
    return [i for i, s in enumerate(claim.statements) if not s.judge(results).holds]
