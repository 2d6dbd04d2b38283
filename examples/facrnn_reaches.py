"""Reaches of a monkey as latent trajectories in two independent groups; writes runs/facrnn/reaches.html.

Needs shared/data/neural/m1_154.npz beside the checkout. Takes about a minute.
"""

import sys

import numpy as np

from subspan.data import motor_cortex
from subspan.errors import MissingAsset
from subspan.models import FacRNN, align_groups, latent_page, trajectory_figure
from subspan.pages import Figure, Page, Section

try:
    data = motor_cortex()
except MissingAsset as error:
    sys.exit(str(error))

counts = {"likelihood": "poisson", "sqrt_counts": True, "nonlinearity": "identity"}
model = FacRNN(4, 2, pad="edge", n_ref=512, epochs=200, n_restarts=3, **counts).fit(data.counts)

# Latents stand for velocities: summed over time, one group should give the hand's x and the other its y.
summed = model.transform(data.counts).cumsum(1).reshape(-1, 4).astype(np.float64)
report = align_groups(summed, data.position().reshape(-1, 2), model.groups_, 2)
print("R2 of x and y on each group:\n", report.scores.round(2))

page = latent_page(model, data.counts, data.direction, title="Motor cortex: reaches", cumulative=True)
hand = trajectory_figure(report.aligned.reshape(168, 14, 2), data.direction, ["x", "y"])
caption = "The hand's mean path in each of eight directions, x and y from one group of summed latents each."
sections = [Section("The hand, from the latents", [Figure(hand, caption)]), *page.sections]
Page(page.title, sections, page.lead).write("runs/facrnn/reaches.html")
print("runs/facrnn/reaches.html")
