"""A fitted FacRNN as one page: trajectories by condition, dependence between groups, sub-circuits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from subspan.models.facrnn.estimator import FacRNN
from subspan.pages import Curve, Figure, Page, Section, Table, curves, heat_map


def trajectory_figure(
    latents: Float[np.ndarray, "trials bins H"], conditions: Sequence[Any] | np.ndarray, names: Sequence[str]
) -> str:
    """Mean path of each condition in the first two coordinates; over time where there is one coordinate only.

    Raises:
        ValueError: as many conditions as trials are needed.
    """
    labels = np.asarray(conditions)
    if len(labels) != len(latents):
        raise ValueError(f"{len(labels)} conditions for {len(latents)} trials")
    means = {str(label): latents[labels == label].mean(0) for label in np.unique(labels)}
    if latents.shape[2] == 1:
        bins = np.arange(latents.shape[1])
        return curves({k: Curve(bins, path[:, 0]) for k, path in means.items()}, xlabel="bin", ylabel=names[0])
    return curves({k: Curve(path[:, 0], path[:, 1]) for k, path in means.items()}, xlabel=names[0], ylabel=names[1])


def latent_page(
    model: FacRNN,
    X: Float[np.ndarray, "trials bins N"],
    conditions: Sequence[Any] | np.ndarray,
    *,
    title: str,
    cumulative: bool = False,
) -> Page:
    """What a fit found in trials of equal length, by condition.

    Args:
        model: a fitted estimator.
        X: the trials.
        conditions: a label for each.
        title: of the page.
        cumulative: sum latents over time first (where they stand for velocities).
    """
    latents = model.transform(X)
    paths = latents.cumsum(1) if cumulative else latents
    sections = []
    for g, members in enumerate(model.groups_):
        names = [f"{'sum of ' if cumulative else ''}z{k}" for k in members]
        svg = trajectory_figure(paths[..., list(members)], conditions, names)
        caption = f"Mean trajectory of each condition in group {g}" + (
            f" (the first 2 of its {len(members)} coordinates)." if len(members) > 2 else "."
        )
        sections.append(Section(f"Group {g}", [Figure(svg, caption)]))
    found = model.partial_correlation(X)
    table = Table(
        ["quantity", "nats"],
        [
            ["dependence between the groups (PC)", found.pc],
            ["the same for groups shuffled in time", found.pc_null],
            ["excess", found.pc_excess],
            ["dependence between all coordinates (TC)", found.tc],
            ["log-likelihood of a bin", model.score(X)],
        ],
        "Finitely many bins have PC above 0 even between independent groups: read the excess.",
    )
    sections.append(Section("Dependence", [table]))
    steps = np.arange(1, model.n_iter_ + 1)
    if len(steps):
        svg = curves({"loss": Curve(steps, model.loss_curve_)}, xlabel="epoch", ylabel="loss (nats per bin)")
        sections.append(Section("Training", [Figure(svg, "Mean over the batches of an epoch.")]))
    if model.network_.linear:
        strength = np.abs(model.sub_connectivities_).sum((1, 2))
        shares = [[f"group {g}", float(s / strength.sum())] for g, s in enumerate(strength)]
        parts: list[Any] = [Table(["sub-circuit", "share of the summed |W_g|"], shares, "")]
        N = model.connectivity_.shape[0]
        if N <= 40:
            labels = [str(i) for i in range(N)]
            parts += [
                Figure(
                    heat_map(w, row_labels=labels, column_labels=labels, label=f"W of group {g}"), "From column to row."
                )
                for g, w in enumerate(model.sub_connectivities_)
            ]
        sections.append(Section("Sub-circuits", parts))
    lead = (
        f"{len(model.groups_)} groups of latents in {X.shape[0]} trials of {X.shape[1]} bins and {X.shape[2]} channels."
    )
    return Page(title, sections, lead)
