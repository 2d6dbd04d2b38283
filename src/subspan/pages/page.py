"""One self-contained HTML page from text, tables, code and figures: no request, no script.

Everything a caller passes is escaped, except the SVG of :mod:`subspan.pages.plots`.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from subspan.files import write_text
from subspan.pages.plots import PALETTE


@dataclass(frozen=True)
class Text:
    """Paragraphs, separated by blank lines."""

    body: str


@dataclass(frozen=True)
class Code:
    """A block of code or of terminal lines, kept as it is."""

    body: str


@dataclass(frozen=True)
class Badge:
    """A table cell that stands out: ``tone`` is good, bad or neutral. The text must say it too."""

    text: str
    tone: str = "neutral"


@dataclass(frozen=True)
class Table:
    """Rows under column names. Numbers are aligned right and given four significant digits; None is a dash."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.columns):
                raise ValueError(f"row {number} has {len(row)} cells for {len(self.columns)} columns")


@dataclass(frozen=True)
class Figure:
    """An ``<svg>`` element from :mod:`subspan.pages.plots`, its caption, and a description for who cannot see it."""

    svg: str
    caption: str
    description: str = ""

    def __post_init__(self) -> None:
        if not self.svg.startswith("<svg"):
            raise ValueError("a figure is one <svg> element, as the functions of subspan.pages.plots give it")


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Text | Code | Table | Figure]


@dataclass(frozen=True)
class Page:
    """A titled page: ``lead`` says in a sentence or two what the reader looks at."""

    title: str
    sections: Sequence[Section]
    lead: str = ""

    def html(self) -> str:
        """The page as one HTML document; equal pages give equal text."""
        import jinja2
        from markupsafe import Markup

        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("subspan.pages", ""),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters.update(number=format_number, paragraphs=_paragraphs)
        sections = [
            {"id": anchor, "title": section.title, "blocks": [_block(block) for block in section.blocks]}
            for anchor, section in zip(_anchors([s.title for s in self.sections]), self.sections, strict=True)
        ]
        figures = [block for section in sections for block in section["blocks"] if block["kind"] == "figure"]
        for number, figure in enumerate(figures, 1):
            figure["svg"] = Markup(_scoped_ids(figure["svg"], f"figure{number}-"))
        return environment.get_template("page.html.jinja").render(page=self, sections=sections, palette=PALETTE)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page to ``path``, whole or not at all."""
        write_text(path, self.html())


def format_number(value: Any) -> str:
    """Integers whole, reals with four significant digits, None as a dash; anything else as its text."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    if isinstance(value, Integral):
        return str(int(value))
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    return f"{number:.4g}" if 1e-4 <= abs(number) < 1e6 or number == 0 else f"{number:.3e}"


def _block(block: Text | Code | Table | Figure) -> dict[str, Any]:
    """A block's fields and kind for the template; a table also says which of its columns hold only numbers."""
    fields = {"kind": type(block).__name__.lower(), **vars(block)}
    if isinstance(block, Table):
        fields["numeric"] = [all(_is_number(row[i]) for row in block.rows) for i in range(len(block.columns))]
    return fields


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, Real) and not isinstance(value, bool))


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def _anchors(titles: Sequence[str]) -> list[str]:
    """An id for each heading; equal titles are numbered."""
    anchors: list[str] = []
    for title in titles:
        plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        anchor, number = plain, 2
        while anchor in anchors:
            anchor, number = f"{plain}-{number}", number + 1
        anchors.append(anchor)
    return anchors


def _scoped_ids(svg: str, prefix: str) -> str:
    """Put ``prefix`` before every id of an SVG and before every reference to one: a page holds many figures."""

    def scope(tag: re.Match[str]) -> str:
        return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", tag.group())

    return re.sub(r"<[^>]+>", scope, svg)
