"""SVG that is deterministic, themed, and draws what it was given."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from subspan.pages import Curve, bars, curves, heat_map, histogram, network, scatter, spectra
from subspan.pages.plots import PALETTE

DRAWINGS = {
    "curves": lambda: curves(
        {
            "<b>muon</b> & co": Curve([1, 2, 3], [1.0, 2.0, 1.5], [0.5, 1.5, 1.0], [1.5, 2.5, 2.0]),
            "adam": Curve([1], [2]),
        },
        xlabel="step",
        ylabel="loss",
    ),
    "bars": lambda: bars({"a": [0.25, 0.5, float("nan")], "b": [0.75]}, ylabel="accuracy"),
    "spectra": lambda: spectra({"W": [4.0, 2.0, 0.0]}),
    "heat_map": lambda: heat_map(
        [[1.0, 2.0], [3.0, np.nan]], row_labels=["x", "y"], column_labels=["p", "q"], label="rank"
    ),
    "histogram": lambda: histogram([0.1, 0.5, float("nan"), 3.0], xlabel="score", spans={"window 1": (0.5, 3.0)}),
    "scatter": lambda: scatter({"<web>": ([1.0, 2.0], [3.0, 1.0]), "chat": ([0.0], [1.0])}, xlabel="x", ylabel="y"),
    "network": lambda: network(
        [("a", "<b>", 0.5), ("a", "c", -1.0), ("d", "c", 0.2), ("a", "d", 0.1)], hubs=["a", "d"]
    ),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_equal_inputs_give_equal_bytes_and_well_formed_svg_without_addresses(name):
    svg = DRAWINGS[name]()
    assert svg == DRAWINGS[name]()
    assert svg.startswith("<svg")
    assert "http" not in svg
    ElementTree.fromstring(svg.replace("<svg", '<svg xmlns:xlink="x"', 1))


def test_bytes_do_not_depend_on_the_process():
    code = "from subspan.pages import bars; print(bars({'a': [1.0, 2.0], 'b': [3.0]}, ylabel='y'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == bars({"a": [1.0, 2.0], "b": [3.0]}, ylabel="y")


def test_text_stays_text_and_is_escaped():
    svg = DRAWINGS["curves"]()
    assert "&lt;b&gt;muon&lt;/b&gt; &amp; co" in svg
    assert ">step<" in svg
    assert "<b>" not in svg


def test_a_network_names_every_variable_once_and_dashes_what_is_negative():
    svg = DRAWINGS["network"]()
    assert [svg.count(f">{name}<") for name in ("a", "&lt;b&gt;", "c", "d")] == [1] * 4
    assert svg.count("stroke-dasharray") == 1
    assert network([], hubs=["alone"]).count(">alone<") == 1


def test_dollar_signs_in_names_are_text_not_mathematics():
    assert ">cost $x$<" in bars({"cost $x$": [1.0]}, ylabel="y $z$")


def test_logarithmic_ticks_are_plain_numbers():
    svg = curves({"a": Curve([0.001, 0.1], [1, 1000])}, xlabel="lr", ylabel="y", log_x=True, log_y=True)
    assert {"0.01", "100"} <= set(re.findall(r">([^<]+)</text>", svg))
    assert "mathdefault" not in svg


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_logarithmic_axis_without_positive_values_is_drawn(value):
    assert spectra({"zero matrix": [value, value]}).startswith("<svg")


def test_every_colour_comes_from_the_page():
    svg = DRAWINGS["curves"]()
    assert "var(--series-0" in svg
    assert "var(--grid" in svg
    assert "currentColor" in svg
    outside = re.sub(r"var\(--[a-z0-9-]+, #[0-9a-f]{6}\)", "", svg)
    assert re.findall(r"#[0-9a-f]{6}\b", outside) == []


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("pair", PALETTE)
def test_series_colours_reach_wcag_contrast_for_graphics_on_either_ground(pair):
    assert contrast(pair[0], "#ffffff") >= 3
    assert contrast(pair[1], "#16161a") >= 3


def test_more_series_than_colours_still_differ():
    svg = curves({f"s{i}": Curve([0, 1], [i, i]) for i in range(9)}, xlabel="x", ylabel="y")
    assert all(f">s{i}<" in svg for i in range(9))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: curves({}, xlabel="x", ylabel="y"), "nothing to draw"),
        (lambda: curves({"a": Curve([1, 2], [1])}, xlabel="x", ylabel="y"), "'a' has 2 x values but 1 y"),
        (lambda: bars({"a": [float("nan")]}, ylabel="y"), "'a' has no finite value"),
        (lambda: heat_map([[1.0]], row_labels=["a", "b"], column_labels=["c"], label="l"), r"\(1, 1\) has no 2 row"),
        (lambda: histogram([float("nan")], xlabel="x"), "no finite value"),
        (lambda: scatter({}, xlabel="x", ylabel="y"), "nothing to draw"),
        (lambda: scatter({"a": ([1.0], [])}, xlabel="x", ylabel="y"), "'a' has 1 x values but 0 y"),
        (lambda: network([], hubs=[]), "no hubs"),
        (lambda: network([("a", "b", 1.0)], hubs=["c"]), "edge a - b has no hub"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_drawing_leaves_pyplot_and_the_callers_settings_alone():
    code = (
        "import sys, subspan.pages as p; assert 'matplotlib' not in sys.modules; p.bars({'a': [1.0]}, ylabel='y');"
        "import matplotlib as m; assert 'matplotlib.pyplot' not in sys.modules;"
        "assert m.rcParams['svg.hashsalt'] is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
