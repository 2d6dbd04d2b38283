"""Buffer-and-Reinforce: fine-tuning on rows nobody has read, without losing alignment (Ham et al., ICML 2026).

``merge`` is the mathematics, ``adapter`` merges the adapters of a peft model, ``attach`` keeps the buffer on during a
user's run, ``stages`` trains the provider's two adapters, ``score`` is the safety gradient score.
"""
