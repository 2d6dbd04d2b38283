"""Statements of a claim on hand-made results."""

from subspan.claims.claim import Claim, Results


def failing(claim: Claim, results: Results) -> set[str]:
    """The statements that do not hold."""
    return {s.text for s in claim.statements if not s.judge(results).holds}
