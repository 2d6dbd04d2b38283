"""What do this model's matrices say? Spectra predicted and measured, ranks, fingerprints and updates, on one page."""

from subspan.inspect.run import inspect

__all__ = ["inspect"]
