"""Binary layers whose gradient a full-precision twin completes (SURGE).

"SURGE: Surrogate Gradient Adaptation in Binary Neural Networks" (Huang et al., ICML 2026, arXiv 2605.10989).
"""
