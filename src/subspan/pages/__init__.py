"""One self-contained page from tables and plots; the only room that draws."""

from subspan.pages.page import Badge, Code, Figure, Page, Section, Table, Text
from subspan.pages.plots import Curve, bars, curves, heat_map, histogram, network, scatter, spectra

__all__ = [
    "Badge",
    "Code",
    "Curve",
    "Figure",
    "Page",
    "Section",
    "Table",
    "Text",
    "bars",
    "curves",
    "heat_map",
    "histogram",
    "network",
    "scatter",
    "spectra",
]
