"""Networks made wider without changing what they compute, and whether training uses the new width.

"Escaping the Subspace Trap: The Role of Optimizer Geometry in Model Width Expansion" (Chen et al., ICML 2026, PMLR
306), after HyperCloning (Samragh et al. 2024, arXiv 2409.12903) and Net2Net (Chen et al. 2016, arXiv 1511.05641).
"""
