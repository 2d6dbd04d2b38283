"""AOEPT: prompts made of what a modality usually looks like, for samples that lack one.

"AOEPT: Breaking the Implicit Modality-Reduction Bottleneck in Modality-Missing Prompt Tuning" (Lang, Hong, Zhong and
Zhou, ICML 2026, arXiv 2605.24816), with the details of the authors' released configurations; more than two modalities,
the parallel order, positions, and the estimator of NM2I are ours.

``bank`` distils the training set, ``prompts`` is the mathematics, ``sources`` holds what trains, ``passes`` runs a
backbone (``backbones``, ``towers``) with slots for the prompts, ``model`` is the module one trains.
"""
