"""Does a method do what its paper says, here, today?"""

from subspan.claims.claim import Cell, Claim, MissingResults, Plot, Results, Row, Statement, Verdict
from subspan.claims.report import write_report
from subspan.claims.runner import claim_slugs, load_claim, run_claim

__all__ = [
    "Cell",
    "Claim",
    "MissingResults",
    "Plot",
    "Results",
    "Row",
    "Statement",
    "Verdict",
    "claim_slugs",
    "load_claim",
    "run_claim",
    "write_report",
]
