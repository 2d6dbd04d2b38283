"""The page of an audit: how scores are distributed, where they come from, and what else would explain them."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subspan.pages import Figure, Page, Section, Table, Text
from subspan.pages.plots import histogram, scatter
from subspan.safety.sqsd.table import RiskTable
from subspan.surgery import role_of

_LIMIT = 0.8  # beyond it something simpler than the score ranks the rows almost alike
_POINTS = 2000


def score_histogram(table: RiskTable, windows: int = 5, size: int | None = None) -> str:
    """Scores as a histogram, with the windows of the ranking above it; a tenth of the rows each if ``size`` is None."""
    size = size or max(1, len(table.ranking) // 10)
    spans = {}
    for i, places in enumerate(table.windows(windows, size), 1):
        scores = table["score"][places]
        spans[f"window {i}"] = (float(scores.min()), float(scores.max()))
    return histogram(table["score"], xlabel="risk score", spans=spans)


def risk_page(table: RiskTable, texts: Sequence[str] | None = None, top: int = 20) -> Page:
    """The page; rows are shown by number and digest alone unless ``texts`` gives what they say."""
    failed = [r for r in table["reason"] if r]
    lead = f"{len(table)} rows, {len(table) - len(failed)} of them scored."
    if not len(table.ranking):
        return Page("subspan audit", [Section("Scores", [Text("No row could be scored."), _reasons(failed)])], lead)
    sections = [_scores(table, failed), _riskiest(table, texts, top), _terms(table), _explained(table), _shares(table)]
    if steering := table.facts.get("steering"):
        sections.append(_steering(steering))
    settings = table.facts.get("settings", {})
    sections.append(Section("Settings", [Table(["setting", "value"], [[k, str(v)] for k, v in settings.items()])]))
    return Page("subspan audit", sections, lead)


def _reasons(failed: Sequence[str]) -> Table:
    return Table(["not scored because", "rows"], [[why, failed.count(why)] for why in dict.fromkeys(failed)])


def _scores(table: RiskTable, failed: Sequence[str]) -> Section:
    blocks: list[Text | Table | Figure] = [
        Figure(score_histogram(table), "Scores, and five windows at equal distances in the ranking.", "A histogram.")
    ]
    if deviation := table.facts.get("null_deviation"):
        beyond = int((table["score"] > 2 * deviation).sum())
        blocks.append(
            Text(
                f"Along random directions a score has mean 0 and standard deviation {deviation:.3g}; {beyond} rows lie "
                "above twice that. The ranking tells; where to cut it is yours to decide."
            )
        )
    blocks.append(
        Text(
            f"{int(table.faint().sum())} rows lie below the 5th percentile of the gradient norm. What they say is "
            "learnt already, their scores are near noise, and an adaptive optimiser may still move far on them."
        )
    )
    if failed:
        blocks.append(_reasons(failed))
    return Section("Scores", blocks)


def _riskiest(table: RiskTable, texts: Sequence[str] | None, top: int) -> Section:
    columns = ["row", "score", "se", "danger", "safety", "loss", "gradient norm", "answer tokens"]
    names = ("row", "score", "se", "danger", "safety", "loss", "grad_norm", "n_answer_tokens")
    rows = []
    for place in table.ranking[:top]:
        line = [table[name][place].item() for name in names]
        rows.append([None if isinstance(v, float) and math.isnan(v) else v for v in line])
        if texts is not None:
            rows[-1].append(texts[place])
    columns += ["text"] if texts is not None else []
    blocks: list[Text | Table] = [Table(columns, rows, "se: jackknife standard error over the layers.")]
    if by := table.by_source():
        lines = [[name, found["rows"], found["score"], found["in_riskiest_tenth"]] for name, found in by.items()]
        blocks.append(Table(["source", "rows", "mean score", "share of the riskiest tenth"], lines))
    return Section("The riskiest rows", blocks)


def _terms(table: RiskTable) -> Section:
    known = np.flatnonzero(np.isfinite(table["score"]))
    known = known[:: max(1, len(known) // _POINTS)]
    sources = table["source"][known] if "source" in table.columns else np.full(len(known), "rows", dtype=object)
    groups = {
        name: (table["danger"][known[sources == name]].tolist(), table["safety"][known[sources == name]].tolist())
        for name in dict.fromkeys(sources.tolist())
    }
    svg = scatter(groups, xlabel="along danger", ylabel="along safety")
    return Section("The two terms", [Figure(svg, "Each row's two terms; the score is the first less the second.")])


def _explained(table: RiskTable) -> Section:
    found = table.correlations()
    lines = [[name.replace("_", " "), None if math.isnan(v) else v] for name, v in found.items()]
    blocks: list[Text | Table] = [Table(["rank correlation of the score with", "Spearman"], lines)]
    if strong := [name.replace("_", " ") for name, v in found.items() if abs(v) > _LIMIT]:
        blocks.append(
            Text(f"Warning: {' and '.join(strong)} ranks these rows almost as the score does; it may be all it sees.")
        )
    return Section("What else explains the ranking", blocks)


def _shares(table: RiskTable) -> Section:
    modules = table.facts.get("modules", {})
    kinds: dict[str, list[float]] = {}
    layers: dict[str, list[float]] = {}
    for name, found in modules.items():
        number = re.search(r"\.(\d+)\.", name)
        for groups, key in ((kinds, role_of(name)), (layers, number.group(1) if number else "other")):
            total = groups.setdefault(key, [0.0, 0.0])
            total[0] += found["mean"]
            total[1] += found["share"]
    caption = "Mean contributions sum to the mean score, shares of its variance over the rows to 1."
    return Section(
        "Which layers make the score",
        [
            Table([what, "mean contribution", "share of the variance"], [[k, *v] for k, v in groups.items()], caption)
            for what, groups in (("kind of layer", kinds), ("layer", layers))
        ],
    )


def _steering(steering: Mapping[str, Mapping[str, Any]]) -> Section:
    lines = [[name, " ".join(f"{v:.3g}" for v in found["values"]), found["tau"]] for name, found in steering.items()]
    words = (
        "The model is moved along each direction by -1, -1/2, 0, 1/2 and 1 times the adapter, and the likelihood of "
        "the probe's answers is measured: it should fall along danger and rise along safety. A tau below 0.6 says that "
        "the direction does not steer this behaviour, and that the scores may mean something else."
    )
    return Section("Do the directions steer?", [Text(words), Table(["direction", "probe", "Kendall's tau"], lines)])
