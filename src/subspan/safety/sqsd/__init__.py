"""Risk scores of training rows: how far a step on each moves a model along danger minus along safety (sqsd)."""
