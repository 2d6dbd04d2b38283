"""Hubs of a table of numbers: the analysis behind ``subspan hubs``, its table, its network and its page."""

import csv
import io
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from subspan.data import read_numbers
from subspan.errors import DataError
from subspan.files import write_text
from subspan.pages import Badge, Figure, Page, Section, Table, Text, bars, network
from subspan.structure.hubs.estimators import IPCHD, JICHD, HubDetector, fit_populations, individual_hubs
from subspan.structure.hubs.samples import check_populations


@dataclass(frozen=True)
class HubAnalysis:
    """A fitted detector and what was asked besides: ``frequency`` of selection (p,) and hubs of single populations."""

    detector: HubDetector
    names: np.ndarray
    individual: dict[Any, np.ndarray]
    frequency: np.ndarray | None
    warnings: list[str]

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Columns, and a row for each variable by falling influence."""
        detector = self.detector
        columns = ["variable", "influence", "hub"]
        columns += ["selected"] if self.frequency is not None else []
        columns += ["hub only in"] if self.individual else []
        common = set(detector.hubs_.tolist())
        rows = []
        for i in np.argsort(-detector.influence_, kind="stable"):
            row: list[Any] = [str(self.names[i]), float(detector.influence_[i]), int(i) in common]
            row += [float(self.frequency[i])] if self.frequency is not None else []
            if self.individual:
                row.append(" ".join(str(name) for name, hubs in self.individual.items() if i in hubs))
            rows.append(row)
        return columns, rows

    def csv(self) -> str:
        columns, rows = self.table()
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([int(cell) if isinstance(cell, bool) else cell for cell in row] for row in rows)
        return out.getvalue()

    def summary(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        detector = self.detector
        return {
            "hubs": [str(name) for name in detector.hub_names_],
            "influence": [float(detector.influence_[i]) for i in detector.hubs_],
            "threshold": float(detector.threshold_) if np.isfinite(detector.threshold_) else None,
            "selected": None if self.frequency is None else [float(self.frequency[i]) for i in detector.hubs_],
            "individual": {str(k): [str(n) for n in self.names[v]] for k, v in self.individual.items()},
            "populations": [
                {"name": str(name), "samples": n, "weight": float(w)}
                for name, n, w in zip(detector.populations_, detector.n_samples_ or (), detector.weights_, strict=True)
            ],
            "variables": len(self.names),
            "components": detector.n_components_,
            "objective": detector.objective_,
            "lower_bound": detector.dual_bound_,
            "warnings": self.warnings,
        }

    def page(self, title: str) -> Page:
        """The hubs, their network, the populations' weights and every variable's influence."""
        detector = self.detector
        columns, rows = self.table()
        marks = {True: Badge("hub", "good"), False: ""}
        shown = [[marks[cell] if isinstance(cell, bool) else cell for cell in row] for row in rows]
        sections = [Section("Notes", [Text("\n\n".join(self.warnings))])] if self.warnings else []
        hubs = [str(name) for name in detector.hub_names_]
        if hubs:
            edges = [(str(self.names[i]), str(self.names[j]), x) for i, j, x in hub_edges(detector)]
            caption = (
                "The hubs (large) and the variables they share the found directions with most strongly; dotted where "
                "they move against each other when the others are held. A sketch from the directions, not an estimated "
                "graph."
            )
            sections.append(Section("Network", [Figure(network(edges, hubs=hubs), caption)]))
        if len(detector.populations_) > 1:
            weights = {str(k): [float(w)] for k, w in zip(detector.populations_, detector.weights_, strict=True)}
            caption = "What each population weighs in the decision. A weight of zero: the others alone decide."
            sections.append(Section("Populations", [Figure(bars(weights, ylabel="weight"), caption)]))
        first = shown[:200]
        note = f"The first {len(first)} of {len(rows)} variables." if len(first) < len(rows) else ""
        sections.append(Section("Variables", [Table(columns, first, note)]))
        lead = (
            f"{len(hubs)} of {len(rows)} variables are hubs in {len(detector.populations_)} population(s): they carry "
            f"much of the {detector.n_components_} directions in which no population varies. Largest variance there "
            f"{detector.objective_:.4g}; no subspace has less than {detector.dual_bound_:.4g}."
        )
        return Page(title, sections, lead)


def hub_edges(detector: HubDetector, per_hub: int = 8) -> list[tuple[int, int, float]]:
    """For each hub i the ``per_hub`` variables j with the largest |M_ij|, as (i, j, -M_ij); every pair once.

    In M, as in the precision matrix, a positive entry is a negative partial correlation: hence the sign.
    """
    edges: dict[tuple[int, int], float] = {}
    for i in detector.hubs_.tolist():
        row = (detector.eigenvectors_[:, i] * detector.shares_) @ detector.eigenvectors_
        others = [j for j in np.argsort(-np.abs(row), kind="stable").tolist() if j != i][:per_hub]
        for j in others:
            if row[j] != 0:
                edges.setdefault((min(i, j), max(i, j)), -float(row[j]))
    return [(i, j, x) for (i, j), x in edges.items()]


def analyse_table(
    path: str | os.PathLike[str],
    *,
    group: str | None = None,
    drop: Sequence[str] = (),
    stability: int = 0,
    random_state: Any = 0,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> HubAnalysis:
    """Find the hubs of a csv, tsv or parquet file whose rows are samples and whose columns are variables.

    Args:
        path: the file.
        group: column that names the population of each row.
        drop: columns to leave out.
        stability: number of half-samples to count selections in.
        random_state: of these.
        out: folder for ``hubs.csv`` and ``report.html``.
        progress: called with (done, total) while ``stability`` is measured.
        options: parameters of ``JICHD``.

    Raises:
        DataError: the file cannot be read as such a table, or a cell is NaN or infinite.
        ValueError: its numbers (a constant column, a population of one row) or the options do not allow it.
    """
    data = read_numbers(path, label=group, drop=drop)
    if not np.isfinite(data.values).all():
        row, column = np.argwhere(~np.isfinite(data.values))[0]
        held = f"row {row + 1} holds {data.values[row, column]}"
        raise DataError(f"{path}, column {data.names[column]!r}: {held}; leave out the row or the column")
    groups = None if data.labels is None else np.asarray(data.labels)
    for name in dict.fromkeys(data.labels or ["all"]):  # here, where the columns have names to complain about
        rows = slice(None) if groups is None else groups == name
        check_populations([data.values[rows]], [name], data.names)
    detector = JICHD(**options)
    alone, frequency = {}, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        detector.fit(data.values, groups=groups)
        if stability:
            frequency = detector.stability(
                data.values, groups, n_splits=stability, random_state=random_state, progress=progress
            )
    if len(detector.populations_) > 1:
        shared = {k: v for k, v in detector.get_params().items() if k in IPCHD().get_params()}
        with warnings.catch_warnings():  # what is said of the joint fit is enough
            warnings.simplefilter("ignore")
            fits = fit_populations(IPCHD(**shared), data.values, groups)
        alone = individual_hubs(fits, detector.hubs_)
    names = np.asarray(data.names, dtype=object)
    detector.hub_names_ = names[detector.hubs_]
    said = list(dict.fromkeys(str(warning.message) for warning in caught))
    analysis = HubAnalysis(detector, names, alone, frequency, said)
    if out is not None:
        write_text(Path(out) / "hubs.csv", analysis.csv())
        analysis.page(f"Hubs of {Path(path).name}").write(Path(out) / "report.html")
    return analysis
