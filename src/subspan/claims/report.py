"""The claims page: a verdict for every statement, the peers beside it, and a plot, from what runs have left."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from subspan.claims.claim import Claim, Plot, Results, Row
from subspan.claims.runner import RUNS, claim_fingerprint, claim_slugs, load_claim
from subspan.errors import DataError
from subspan.pages import Badge, Curve, Figure, Page, Section, Table, Text, bars, curves
from subspan.pages.page import format_number


def write_report(
    folder: str | os.PathLike[str] = RUNS, output: str | os.PathLike[str] | None = None
) -> tuple[Path, list[str]]:
    """Write one page about every claim that has results below ``folder``.

    A full run is shown where there is one, else the smoke run, which the page says proves nothing.

    Args:
        folder: where ``run_claim`` put its results.
        output: the page (default ``folder/report.html``).

    Returns:
        The page's path and the slugs it shows.

    Raises:
        DataError: no claim has results there.
    """
    outcomes = {slug: outcome for slug in claim_slugs() if (outcome := _read_outcome(Path(folder) / slug))}
    if not outcomes:
        raise DataError(f"no results in {folder}; make some with: subspan claims run SLUG")
    path = Path(output) if output else Path(folder) / "report.html"
    claims_page([(load_claim(slug), outcome) for slug, outcome in outcomes.items()]).write(path)
    return path, list(outcomes)


def claims_page(measured: list[tuple[Claim, Mapping[str, Any]]]) -> Page:
    """The page for claims and the outcomes that ``run_claim`` returned for them."""
    statements = [statement for _, outcome in measured for statement in outcome["statements"]]
    held = sum(statement["holds"] for statement in statements)
    return Page(
        "Claims, measured again",
        [_section(claim, outcome) for claim, outcome in measured],
        lead=f"{held} of {len(statements)} statements hold. Each was measured on this machine against its peers; "
        "every method that ran is shown, also where a peer wins.",
    )


def _read_outcome(folder: Path) -> dict[str, Any] | None:
    path = next((path for form in ("full", "smoke") if (path := folder / f"{form}.json").is_file()), None)
    return json.loads(path.read_text("utf-8")) if path else None


def _section(claim: Claim, outcome: Mapping[str, Any]) -> Section:
    results = Results.from_summary(outcome["rows"])
    seeds = len(outcome["seeds"])
    run = f"{claim.source}. {seeds} seed{'s' * (seeds != 1)}; {outcome['task_seconds']:.0f} s of one thread."
    if outcome["source"] != claim_fingerprint(claim, outcome["smoke"]):
        run = f"Measured with another state of the source: run it again. {run}"
    if outcome["smoke"]:
        run = f"Smoke run: the path works, the numbers prove nothing. {run}"
    return Section(
        claim.title,
        [
            Text(run),
            _verdicts(outcome["statements"]),
            *(_figure(plot, results) for plot in claim.plots),
            _peers(outcome["rows"]),
            *([Text(claim.notes)] if claim.notes else []),
        ],
    )


def _verdicts(statements: list[dict[str, Any]]) -> Table:
    rows = []
    for line in statements:
        badge = Badge("holds", "good") if line["holds"] else Badge("does not hold", "bad")
        measured = f"NOT MEASURED: {line['problem']}" if line["measured"] is None else format_number(line["measured"])
        rows.append([line["text"], measured, f"{line['relation']} {format_number(line['required'])}", badge])
    return Table(["statement", "measured", "required", "verdict"], rows, "Statements")


def _peers(rows: list[dict[str, Any]]) -> Table:
    lines = [
        [row["method"], _setting(row["setting"]), row["metric"],
         f"{format_number(row['mean'])} ± {format_number(row['std'])}", row["n"]]
        for row in rows
    ]  # fmt: skip
    return Table(["method", "setting", "metric", "mean ± std", "n"], lines, "Every method, over seeds")


def _setting(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {format_number(value)}" for key, value in setting.items())


def _figure(plot: Plot, results: Results) -> Figure | Text:
    """The plot, or a sentence saying that its rows were not measured."""
    setting: dict[str, Any] = dict(plot.where)
    kept = results.where(metric=plot.metric, **setting)
    rows = [row for row in kept if (not plot.methods or row.method in plot.methods) and math.isfinite(row.value)]
    if plot.over is not None:
        rows = [row for row in rows if isinstance(row.setting.get(plot.over), int | float)]
    if not rows:
        return Text(f"No plot of {plot.metric!r}: nothing was measured for it.")
    series = _series(rows, plot.over)
    if plot.over is None:
        return Figure(
            bars({name: [row.value for row in group] for name, group in series.items()}, ylabel=plot.metric), plot.title
        )
    lines = {name: _curve(group, plot.over) for name, group in series.items()}
    svg = curves(lines, xlabel=plot.over, ylabel=plot.metric, log_x=plot.log_x, log_y=plot.log_y)
    return Figure(svg, f"{plot.title} (mean over seeds; bands are one standard deviation)")


def _series(rows: list[Row], over: str | None) -> dict[str, list[Row]]:
    """Rows by method, and by the rest of their setting where a method has several besides ``over``."""
    rest = [_setting({key: value for key, value in row.setting.items() if key != over}) for row in rows]
    variants = {method: {text for row, text in zip(rows, rest, strict=True) if row.method == method}
                for method in {row.method for row in rows}}  # fmt: skip
    groups: dict[str, list[Row]] = {}
    for row, text in zip(rows, rest, strict=True):
        name = row.method if len(variants[row.method]) == 1 else f"{row.method} ({text})"
        groups.setdefault(name, []).append(row)
    return groups


def _curve(rows: list[Row], over: str) -> Curve:
    points: dict[Any, list[float]] = {}
    for row in rows:
        points.setdefault(row.setting[over], []).append(row.value)
    x = sorted(points)
    mean = np.array([np.mean(points[place]) for place in x])
    spread = np.array([np.std(points[place], ddof=1) if len(points[place]) > 1 else 0.0 for place in x])
    return Curve(x, mean, mean - spread, mean + spread)
