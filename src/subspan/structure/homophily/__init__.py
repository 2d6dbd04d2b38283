"""Graph domain adaptation when source and target differ in homophily.

PSAHS (Progressive Graph Structure Adjustment for Homophily Shift Adaptation, ICML 2026): both graphs are edited until
their nodes have a prescribed share of equal neighbours, in turn with domain-adversarial training.
"""
