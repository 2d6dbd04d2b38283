"""Curvature, gradients and weights of a classifier from its class means.

Garrod and Keating, "Unifying Low Dimensional Spectra in Deep Learning" (ICML 2026, arXiv 2404.06106).
"""
