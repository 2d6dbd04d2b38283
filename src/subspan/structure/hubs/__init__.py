"""Hub variables of Gaussian graphical models, common to several populations, without estimating a graph.

JIC-HD (Joint Inverse Components for Hub Detection): Sánchez Gómez et al., ICML 2026. IPC-HD, for one population:
Sánchez Gómez, Mo, Zhao and Liu, Hub Detection in Gaussian Graphical Models, JASA 2025, arXiv 2505.23707.
"""
