"""What the page says."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subspan.pages import Figure, Page, Section, Table, Text, bars, spectra

_MEANING = """The curvature of a layer is its Gauss-Newton matrix: a few large eigenvalues, the outliers, above a bulk.

predicted: Ritz values on the outer products of class means, which never exceed the true ones. from means alone: the
paper's formula, exact at neural collapse and without a bound before it. measured: Lanczos on the exact matrix.

share of the trace: what the predicted eigenvalues hold of the whole. overlap: of the predicted and the measured leading
eigenspace, 1 for the same. gap: with K classes, the eigenvalue before the cut at {cut} over the one behind it, both
measured; near 1 there is no gap. certified distance: some eigenvalue lies within this share of the predicted one."""
_COLLAPSE = (
    "All but the last two columns vanish at neural collapse; those are cosines that become 1. The formulas from means "
    "alone hold there, and not before: read them together with the gap between the two predictions. The last column "
    "takes the next layer of the list for the one behind, so it has a meaning for layers in a chain only."
)
_FINGERPRINT = (
    "Means over the matrices of each role. Models pre-trained with Muon have a higher stable rank, entropy and peak "
    "than with Adam on the same data and architecture; between different models the numbers cannot be compared."
)


def inspection_page(facts: Mapping[str, Any]) -> Page:
    """The page for the facts that ``inspect`` collects."""
    sections = [Section("Read this first", [Text("\n\n".join(facts["notes"]))])] if facts["notes"] else []
    if found := facts.get("curvature"):
        sections += [_outliers(found), *_layers(found), _collapse(found), _gradients(found)]
    if update := facts.get("update"):
        sections.append(_update(update))
    if weights := facts.get("weights"):
        sections += [_weights(weights), _fingerprint(facts["fingerprint"])]
    if binary := facts.get("binary"):
        sections.append(_binary(binary))
    return Page(f"subspan inspect: {facts['model']}", sections, _lead(facts))


def _lead(facts: Mapping[str, Any]) -> str:
    lead = f"A {facts['kind']}".replace("A a", "An a").replace("A e", "An e")
    if found := facts.get("curvature"):
        counts = ", ".join(map(str, found["counts"][:10]))
        lead += f", on {sum(found['counts'])} rows of {facts['data']} (of each class: {counts})"
        lead += f", mean loss {found['mean_loss']:.3g}"
    return f"{lead}."


def _outliers(found: Mapping[str, Any]) -> Section:
    classes = len(found["counts"])
    cut = classes**2 if found["loss"] == "mse" else (classes - 1) ** 2
    rows = []
    for layer in found["layers"]:
        measured = layer["measured"] or {"eigenvalues": [], "overlap": None}
        values, theta = measured["eigenvalues"], layer["eigenvalues"][0]
        top = values[0] if values else None
        gap = values[cut - 1] / values[cut] if len(values) > cut and values[cut] > 0 else None
        error = abs(theta - top) / top if top else None
        rows.append(
            [
                layer["layer"], top, theta, error, layer["eigenvalues_means"][0], layer["trace_ratio"],
                measured["overlap"], gap, next(iter(layer["residuals"]), None),
            ]
        )  # fmt: skip
    columns = [
        "layer", "first eigenvalue, measured", "predicted", "relative error", "from means alone", "share of the trace",
        "overlap", "gap", "certified distance",
    ]  # fmt: skip
    name = "K²" if found["loss"] == "mse" else "(K-1)²"
    blocks: list[Any] = [Text(_MEANING.format(cut=name)), Table(columns, rows)]
    if network := found["network"]:
        series = {"predicted": network["eigenvalues"], "from means alone": network["eigenvalues_means"]}
        figure = spectra({k: v for k, v in series.items() if v}, ylabel="eigenvalue")
        blocks.append(Figure(figure, "All layers together.", "Predicted eigenvalues of all analysed layers at once."))
    blocks += [Text(f"{note[0].upper()}{note[1:]}.") for note in found["notes"]]
    return Section("Curvature, predicted and measured", blocks)


def _layers(found: Mapping[str, Any]) -> list[Section]:
    """A figure for each layer: its outliers and where its bulk begins."""
    figures = []
    for layer in found["layers"]:
        series = {"predicted": layer["eigenvalues"], "from means alone": layer["eigenvalues_means"]}
        if layer["measured"]:
            series["measured"] = layer["measured"]["eigenvalues"]
        series = {name: values[:40] for name, values in series.items() if values and max(values) > 0}
        if series:
            caption = f"{layer['layer']} ({layer['shape'][0]} x {layer['shape'][1]})."
            figures.append(Figure(spectra(series, ylabel="eigenvalue"), caption, "Leading eigenvalues by their index."))
    return [Section("Bulk and outliers, layer by layer", figures)] if figures else []


def _collapse(found: Mapping[str, Any]) -> Section:
    keys = ("nc1_trace", "nc1_pinv", "nc1_square", "nc2_frame", "nc2_simplex", "collapse_gap", "nc3", "nc3_dual")
    columns = [
        "layer", "NC1, trace", "NC1, pseudo-inverse", "NC1, squared", "NC2, frame", "NC2, simplex",
        "gap between predictions", "NC3", "NC3, dual",
    ]  # fmt: skip
    rows = [[layer["layer"], *(layer[key] for key in keys)] for layer in found["layers"]]
    return Section("Distance from neural collapse", [Text(_COLLAPSE), Table(columns, rows)])


def _gradients(found: Mapping[str, Any]) -> Section:
    rows = [
        [
            layer["layer"],
            layer["gradient_norm"],
            layer["gradient_fraction"],
            layer["weight_mean_energy"],
            layer["weight_gap"],
        ]
        for layer in found["layers"]
    ]
    columns = [
        "layer", "gradient norm", "share inside the class directions", "share of the weight on class means",
        "gap behind K singular values",
    ]  # fmt: skip
    return Section("Gradients and weights beside class means", [Table(columns, rows)])


def _median_spectra(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Median singular values over the matrices of each role."""
    out = {}
    for role in sorted({row["role"] for row in rows}):
        values = [row["singular_values"] for row in rows if row["role"] == role]
        median = np.median([v[: min(map(len, values))] for v in values], axis=0).tolist()
        if median and max(median) > 0:
            out[role] = median
    return out


def _ranked(rows: Sequence[Mapping[str, Any]], extra: Sequence[str], what: str) -> list[Any]:
    keys = [key for key in ("rank", "stable_rank", "effective_rank", *extra) if key in rows[0]]
    table = [
        [row["layer"], row["role"], " x ".join(map(str, row["shape"])), *(row.get(k) for k in keys)] for row in rows
    ]
    blocks: list[Any] = []
    if median := _median_spectra(rows):
        description = "One falling line per role of a layer."
        blocks.append(Figure(spectra(median), f"Singular values of {what}, median over each role.", description))
    ranks = {
        role: [r["effective_rank"] for r in rows if r["role"] == role] for role in sorted({r["role"] for r in rows})
    }
    blocks.append(Figure(bars(ranks, ylabel="effective rank"), f"Effective rank of {what}, one point per matrix."))
    blocks.append(Table(["layer", "role", "shape", *(key.replace("_", " ") for key in keys)], table))
    return blocks


def _weights(rows: Sequence[Mapping[str, Any]]) -> Section:
    return Section("Weights", _ranked(rows, (), "the weights"))


def _update(rows: Sequence[Mapping[str, Any]]) -> Section:
    text = Text(
        "The update s A Bᵀ that the adapter adds. With the base known: cosd = 1 - cos(W, W0), and the update's "
        "Frobenius and spectral norm over those of W0."
    )
    return Section("The update's subspace", [text, *_ranked(rows, ("cosd", "frobenius", "spectral"), "the update")])


def _fingerprint(rows: Sequence[Mapping[str, Any]]) -> Section:
    columns = list(rows[0]) if rows else ["group"]
    table = Table([c.replace("_", " ") for c in columns], [[row[c] for c in columns] for row in rows])
    return Section("Optimiser fingerprint", [Text(_FINGERPRINT), table])


def _binary(found: Mapping[str, Mapping[str, float]]) -> Section:
    columns = list(next(iter(found.values())))
    rows = [[name, *(figures[c] for c in columns)] for name, figures in found.items()]
    text = Text(
        "On the first batch: lambda, the norms of the straight-through and the twin's gradient, and their angle."
    )
    return Section("Binary layers", [text, Table(["layer", *columns], rows)])
