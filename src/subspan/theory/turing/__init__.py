"""Turing machines compiled into softmax transformers (Broesamle and Eckstein, ICML 2026, arXiv 2605.18079)."""
