"""The page: self-contained, escaped, well formed, readable on either ground."""

import re
from html.parser import HTMLParser

import pytest

from subspan.pages import Badge, Code, Figure, Page, Section, Table, Text, bars
from subspan.pages.page import format_number

from .test_plots import contrast

VOID = {"meta"}


class Outline(HTMLParser):
    """Collects tags and ids, and checks that every element is closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def outline(html: str) -> list[tuple[str, dict]]:
    parser = Outline()
    parser.feed(html)
    assert parser.open == []
    return parser.tags


EVIL = "<script>alert(\"x\")</script> & 'q'"


def full_page() -> Page:
    figure = Figure(bars({"a": [1.0, 2.0], EVIL: [1.0]}, ylabel=EVIL), EVIL)
    return Page(
        EVIL,
        [
            Section(EVIL, [Text(f"{EVIL}\n\nsecond"), Code(EVIL)]),
            Section("Figures", [figure, figure]),
            Section("Figures", [Table(["name", EVIL], [[EVIL, 0.123456], [Badge(EVIL, "bad"), None]], EVIL)]),
            Section("???", []),
        ],
        lead=EVIL,
    )


def test_page_is_self_contained_and_everything_is_escaped():
    html = full_page().html()
    tags = outline(html)
    assert {"script", "link", "img", "iframe"}.isdisjoint(tag for tag, _ in tags)
    assert "http" not in html
    assert not any("src" in attrs for _, attrs in tags)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', html))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert "<title>&lt;script&gt;" in html
    assert html == full_page().html()


def test_ids_are_unique_and_every_reference_meets_its_id():
    html = full_page().html()
    ids = [attrs["id"] for _, attrs in outline(html) if "id" in attrs]
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]*)"', html) + re.findall(r"url\(#([^)]*)\)", html)
    assert references
    assert set(references) <= set(ids)
    assert {"figures", "figures-2", "section"} <= set(ids)


def test_numbers_are_aligned_right_and_short():
    html = Page("p", [Section("s", [Table(["n", "word"], [[0.123456, "a"], [None, 1]])])]).html()
    assert '<td class="number">0.1235</td>' in html
    assert '<td class="number">–</td>' in html
    assert '<th scope="col">word</th>' in html
    assert "<td>1</td>" in html


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (0.0, "0"), (1234.5678, "1235"), (1e-5, "1.000e-05"), (float("nan"), "nan"), (True, "True"), ("x", "x")],
)
def test_format_number(value, text):
    assert format_number(value) == text


def test_ground_and_text_colours_reach_wcag_contrast_for_text_in_both_modes():
    html = Page("p", []).html()
    light, dark = (
        {**dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", part))} for part in html.split("@media (prefers-color", 1)
    )
    assert set(dark) - {"series-"} <= set(light) | {"series-"}
    for mode in (light, dark):
        for text, ground in [
            ("ink", "ground"),
            ("soft", "ground"),
            ("ink", "raised"),
            ("good", "good-ground"),
            ("bad", "bad-ground"),
        ]:
            assert contrast(mode[text], mode[ground]) >= 4.5, (text, ground)


def test_ragged_rows_and_foreign_figures_are_refused():
    with pytest.raises(ValueError, match="row 2 has 1 cells for 2 columns"):
        Table(["a", "b"], [[1, 2], [3]])
    with pytest.raises(ValueError, match="one <svg> element"):
        Figure("<script>", "c")


def test_write_gives_the_same_page(tmp_path):
    path = tmp_path / "deep" / "report.html"
    full_page().write(path)
    assert path.read_text("utf-8") == full_page().html()
