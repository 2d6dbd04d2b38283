"""Mixture-of-experts weights in 2 to 4 bits, with a low-rank correction shared on a grid of experts (TileQ).

"TileQ: Efficient Low-Rank Quantization of Mixture-of-Experts with 2D Tiling" (Gu, Chen, Hu and Liu, ICML 2026, arXiv
2605.09281), and the rotation of LoPRo (arXiv 2601.19675).
"""
