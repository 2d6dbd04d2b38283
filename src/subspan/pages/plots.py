"""Plots as inline SVG: deterministic, readable on light and dark ground, safe for colour-blind readers.

Series differ in colour, marker and dash, so that colour is never the only cue. Colours are CSS variables with a
light-ground fallback; a page sets them for either ground. Text stays text. Every function gives one ``<svg>`` element.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

Numbers = Sequence[float | int] | np.ndarray

# (on light ground, on dark ground): Okabe & Ito's hues, darkened or lightened to 3:1 contrast with the page's ground.
PALETTE = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8c42"),
    ("#00865f", "#2fc99b"),
    ("#b5568f", "#e29cc6"),
    ("#946200", "#e6b33c"),
    ("#4b4bb8", "#a3a3ff"),
    ("#6b6b6b", "#b8b8b8"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":")

# Colours that matplotlib writes and that are then replaced by what the page decides.
_INK, _GRID = "#010203", "#010204"
_SERIES = tuple(f"#0203{index:02x}" for index in range(len(PALETTE)))

_RC: dict[Any, Any] = {
    "svg.hashsalt": "subspan",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    **{f"{part}.color": _INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}": _INK for part in ("edgecolor", "labelcolor", "titlecolor")},
}


@dataclass(frozen=True)
class Curve:
    """One line: points (x, y), and a band from ``low`` to ``high`` when both are given."""

    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None


def curves(series: Mapping[str, Curve], *, xlabel: str, ylabel: str, log_x: bool = False, log_y: bool = False) -> str:
    """Lines by name with a legend; points that are not finite leave a gap.

    Raises:
        ValueError: no series, or x and y (or a band) of different lengths.
    """
    from matplotlib.ticker import LogFormatter

    class PlainLogFormatter(LogFormatter):
        """matplotlib's choice of ticks to label, written as plain numbers: mathematics in text is switched off."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    _require(series)

    def draw(axes: Any) -> None:
        for (name, curve), look in zip(series.items(), _looks(), strict=False):
            if len(curve.x) != len(curve.y):
                raise ValueError(f"series {name!r} has {len(curve.x)} x values but {len(curve.y)} y values")
            marker = look.marker if len(curve.x) <= 40 else ""  # beyond that markers hide the line
            axes.plot(curve.x, curve.y, look.dash, color=look.colour, marker=marker, markersize=4, label=name)
            if curve.low is not None and curve.high is not None:
                axes.fill_between(curve.x, curve.low, curve.high, color=look.colour, alpha=0.15, linewidth=0)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        for axis, logarithmic, values in (
            (axes.xaxis, log_x, [curve.x for curve in series.values()]),
            (axes.yaxis, log_y, [curve.y for curve in series.values()]),
        ):
            # a logarithmic axis needs a positive number to stand on (a spectrum of zeros has none)
            if logarithmic and any(np.any(np.asarray(points) > 0) for points in values):
                axis.axes.set(**{f"{axis.axis_name}scale": "log"})
                axis.set_major_formatter(PlainLogFormatter())
                axis.set_minor_formatter(PlainLogFormatter(minor_thresholds=(1, 0.4)))
        if not log_x and all(float(x).is_integer() for curve in series.values() for x in curve.x):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if len(series) > 1:  # below the axes, where no line can run through it
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=min(len(series), 3), fontsize=9)

    return _svg(draw)


def bars(groups: Mapping[str, Numbers], *, ylabel: str) -> str:
    """A horizontal bar at the mean of each group, its standard deviation (ddof 1), and every value as a point.

    Raises:
        ValueError: no groups, or a group without a finite value.
    """
    _require(groups)
    finite = {name: np.asarray(values, dtype=float) for name, values in groups.items()}
    finite = {name: values[np.isfinite(values)] for name, values in finite.items()}
    if hollow := [name for name, values in finite.items() if not len(values)]:
        raise ValueError(f"group {hollow[0]!r} has no finite value")

    def draw(axes: Any) -> None:
        for place, (values, look) in enumerate(zip(finite.values(), _looks(), strict=False)):
            axes.barh(place, values.mean(), height=0.62, color=look.colour, alpha=0.35)
            spread = np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(values, place + spread, ".", color=look.colour, markersize=5)
            if len(values) > 1:
                axes.errorbar(values.mean(), place, xerr=values.std(ddof=1), color=_INK, capsize=3, linewidth=1.2)
        axes.set_yticks(range(len(finite)), list(finite))
        axes.invert_yaxis()
        axes.set_xlabel(ylabel)
        axes.grid(False, axis="y")

    return _svg(draw, height=0.9 + 0.34 * len(finite))


def histogram(values: Numbers, *, xlabel: str, spans: Mapping[str, tuple[float, float]] | None = None) -> str:
    """How often values occur, with named intervals drawn as bars above; values that are not finite are left out.

    Raises:
        ValueError: no finite value.
    """
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        raise ValueError("there is nothing to draw: no finite value was given")

    def draw(axes: Any) -> None:
        heights, _, _ = axes.hist(finite, bins=min(40, max(10, len(finite) // 10)), color=_SERIES[0], alpha=0.35)
        axes.set(xlabel=xlabel, ylabel="count")
        top = float(np.max(heights))
        for place, ((name, (low, high)), look) in enumerate(zip((spans or {}).items(), _looks(), strict=False)):
            at = top * (1.06 + 0.08 * place)
            axes.plot([low, high], [at, at], color=look.colour, marker="|", linewidth=2)
            axes.text((low + high) / 2, at, name, ha="center", va="bottom", fontsize=8)

    return _svg(draw, height=3.4 + 0.12 * len(spans or {}))


def scatter(groups: Mapping[str, tuple[Numbers, Numbers]], *, xlabel: str, ylabel: str) -> str:
    """Points (x, y) by group, with a legend where there are several.

    Raises:
        ValueError: no groups, or x and y of different lengths.
    """
    _require(groups)

    def draw(axes: Any) -> None:
        for (name, (x, y)), look in zip(groups.items(), _looks(), strict=False):
            if len(x) != len(y):
                raise ValueError(f"group {name!r} has {len(x)} x values but {len(y)} y values")
            axes.plot(x, y, look.marker, color=look.colour, markersize=4, alpha=0.6, label=name)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if len(groups) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=min(len(groups), 3), fontsize=9)

    return _svg(draw)


def spectra(series: Mapping[str, Numbers], *, xlabel: str = "index", ylabel: str = "singular value") -> str:
    """Spectra on a logarithmic axis against their index from 1; zeros leave a gap.

    Raises:
        ValueError: no series.
    """
    positive = {
        name: np.where(np.asarray(values, dtype=float) > 0, np.asarray(values, dtype=float), np.nan)
        for name, values in series.items()
    }
    lines = {name: Curve(range(1, len(values) + 1), values.tolist()) for name, values in positive.items()}
    return curves(lines, xlabel=xlabel, ylabel=ylabel, log_y=True)


def heat_map(
    values: Sequence[Numbers] | np.ndarray,
    *,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    label: str,
) -> str:
    """A matrix as coloured cells with labelled rows and columns, and a colour bar called ``label``.

    Raises:
        ValueError: the labels do not fit the matrix.
    """
    matrix = np.asarray(values, dtype=float)
    if matrix.shape != (len(row_labels), len(column_labels)):
        raise ValueError(
            f"a matrix of shape {matrix.shape} has no {len(row_labels)} row and {len(column_labels)} column labels"
        )

    def draw(axes: Any) -> None:
        # cividis is perceptually uniform also without red-green vision
        mesh = axes.pcolormesh(np.ma.masked_invalid(matrix), cmap="cividis", linewidth=0)
        axes.set_xticks(np.arange(matrix.shape[1]) + 0.5, column_labels, rotation=45, ha="right")
        axes.set_yticks(np.arange(matrix.shape[0]) + 0.5, row_labels)
        axes.invert_yaxis()
        axes.grid(False)
        axes.figure.colorbar(mesh, ax=axes, label=label)

    return _svg(draw, height=1.2 + 0.22 * len(row_labels))


def network(edges: Sequence[tuple[str, str, float]], *, hubs: Sequence[str]) -> str:
    """Hubs on an inner circle and what they are joined to on an outer one, near its hubs.

    Edges are (name, name, strength). Lines are as thick as their strength is large, and dashed where it is negative.

    Raises:
        ValueError: no hubs, or an edge without a hub.
    """
    if not hubs:
        raise ValueError("there is nothing to draw: no hubs were given")
    if loose := [edge for edge in edges if not {edge[0], edge[1]} & set(hubs)]:
        raise ValueError(f"the edge {loose[0][0]} - {loose[0][1]} has no hub")
    turn = {hub: 2 * np.pi * i / len(hubs) for i, hub in enumerate(hubs)}
    pull: dict[str, complex] = {}
    for a, b, strength in edges:
        for end, other in ((a, b), (b, a)):
            if end not in turn:
                pull[end] = pull.get(end, 0) + abs(strength) * np.exp(1j * turn[other])
    # in the order of where their hubs are, and evenly spread, so that no two lie on each other
    ring = sorted(pull, key=lambda name: (round(float(np.angle(pull[name])) % (2 * np.pi), 9), name))
    inner = 0.45 if len(hubs) > 1 else 0.0
    places = {hub: inner * np.exp(1j * angle) for hub, angle in turn.items()}
    places |= {name: np.exp(2j * np.pi * i / len(ring)) for i, name in enumerate(ring)}
    strongest = max((abs(edge[2]) for edge in edges), default=1.0)

    def draw(axes: Any) -> None:
        for a, b, strength in edges:
            ends = np.array([places[a], places[b]])
            width = 0.3 + 2.2 * abs(strength) / strongest
            axes.plot(ends.real, ends.imag, ":" if strength < 0 else "-", color=_SERIES[6], linewidth=width, zorder=1)
        for name, at in places.items():
            hub = name in turn
            axes.plot(at.real, at.imag, "o", color=_SERIES[0 if hub else 6], markersize=9 if hub else 4, zorder=2)
            out = at / abs(at) if abs(at) > 0 else 1j
            # hubs are named towards the middle, where few lines run
            side = "center" if abs(out.real) < 0.2 or hub else "left" if out.real > 0 else "right"
            where = at + (-0.12 * out if hub else 0.05 * out)
            size = 9 if hub else 7
            axes.text(where.real, where.imag, name, ha=side, va="center", fontsize=size, zorder=3)
        axes.set(aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.2, 1.2))
        axes.axis("off")

    return _svg(draw, height=5.4)


@dataclass(frozen=True)
class _Look:
    colour: str
    marker: str
    dash: str


def _looks() -> Any:
    """Endless looks; colours, markers and dashes turn with different periods, so that repeats are far apart."""
    return (_Look(*look) for look in zip(cycle(_SERIES), cycle(_MARKERS), cycle(_DASHES), strict=False))


def _require(series: Mapping[str, Any]) -> None:
    if not series:
        raise ValueError("there is nothing to draw: no series were given")


def _svg(draw: Callable[[Any], None], height: float = 3.4) -> str:
    """Let ``draw`` fill one pair of axes, and write the figure as an ``<svg>`` element (never through pyplot)."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(6.4, height))
        draw(figure.add_subplot())
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True, metadata=nothing)
    text = re.sub(r"<!--.*?-->\s*", "", buffer.getvalue(), flags=re.DOTALL)  # comments repeat every label
    return re.sub(r"<[^>]+>", lambda tag: _themed(tag.group()), text[text.index("<svg") :]).strip()


def _themed(tag: str) -> str:
    """Replace the stand-in colours inside one tag; sizes and namespaces of the root are the page's business."""
    if tag.startswith("<svg"):
        tag = re.sub(r' (width|height|xmlns(:\w+)?|version)="[^"]*"', "", tag).replace("<svg", '<svg role="img"', 1)
    tag = tag.replace(_INK, "currentColor").replace(_GRID, "var(--grid, #d9d9d9)")
    for index, (stand_in, (light, _)) in enumerate(zip(_SERIES, PALETTE, strict=True)):
        tag = tag.replace(stand_in, f"var(--series-{index}, {light})")
    return tag
