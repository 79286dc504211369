"""Charts: the numbers that panels hold, and pictures that are the same from the same numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

for package in ("jinja2", "matplotlib"):
    pytest.importorskip(package)
charts = pytest.importorskip("fp4pass.reporting.charts")
figures = pytest.importorskip("fp4pass.reporting.figures")

PANEL = charts.Panel(
    [
        charts.Points([1, 2], [1, 3], label="dots", x_ends=[(0.5, 1.5), (1, 3)], line="-"),
        charts.Bars([1, 2], [2.5, 4], label="bars", color=1, texts=["2.5", "4"]),
    ],
    title="a < b",
    x=charts.Scale("x", low=0, ticks={1: "one", 2: "two"}),
)
CELLS = charts.Panel(
    [charts.Cells([[1.0, None], [math.nan, 12.345]], ends=(1, 12.345), hatched="skipped")],
    categories=["up", "down"],
)


def cell(error: float | None, converted: int = 1) -> dict[str, Any]:
    return {"converted": converted, "weight_error": error, "output_error": None}


def test_svg_is_text_that_stands_in_a_page() -> None:
    text, again, other = charts.svg(PANEL, "a"), charts.svg(PANEL, "a"), charts.svg(PANEL, "b")
    assert text == again and text.startswith('<svg role="img" viewBox') and text.endswith("</svg>")
    assert all(f">{word}</text>" in text for word in ("a &lt; b", "one", "two", "2.5", "dots"))
    # Nothing asks for a file, and an id is of one picture of the page only.
    assert "://" not in text
    ids = [set(re.findall(r'id="([^"]*)"', each)) for each in (text, other)]
    assert ids[0] and not ids[0] & ids[1]
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', text)) <= ids[0]


@pytest.mark.core
def test_heat_maps_show_numbers_and_what_was_skipped() -> None:
    text = charts.svg(CELLS, "a")
    assert all(f">{word}</text>" in text for word in ("1.00", "12.3", "up", "down", "skipped"))
    assert "nan" not in text and text.count("<pattern") == 1


@pytest.mark.parametrize(
    ("ends", "shown"),
    [
        ((8.09, 8.17), (7.317, 8.943)),  # noise gets nearly one color
        ((5.0, 9.0), (5.0, 9.0)),
        ((4.0, 4.0), (3.6, 4.4)),
        ((0.0, 0.0), (-1.0, 1.0)),
    ],
)
def test_colors_of_a_map_span_a_fifth_of_its_errors_or_more(
    ends: tuple[float, float], shown: tuple[float, float]
) -> None:
    panel = charts.Panel([charts.Cells([list(ends)], ends=ends)], categories=["up"])
    figure = charts._draw([[panel]], "", 2)
    (mesh,) = figure.axes[0].collections
    assert mesh.get_clim() == pytest.approx(shown)


def test_png_is_the_same_from_the_same_numbers(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        charts.write_png(charts.arrange([PANEL, CELLS, PANEL], 2), tmp_path / name, title="both")
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1] and found[0].startswith(b"\x89PNG")


@pytest.mark.core
def test_whole_numbers_are_evenly_apart() -> None:
    assert charts.whole_numbers(-3.5, 4.5) == [-3, -2, -1, 0, 1, 2, 3, 4]
    assert charts.whole_numbers(-10, 40, most=6) == [-9, 0, 9, 18, 27, 36]


@pytest.mark.core
def test_maps_of_layers_have_depth_to_the_right() -> None:
    found = {
        "stack": "model.layers",
        "depths": [0, 3],
        "projections": ["attn.q_proj", "mlp.up"],
        "cells": [[cell(0.01), cell(None, 0)], [cell(0.25), None]],
    }
    ranges = {"weight_error": [0.01, 0.25], "output_error": None}
    (panel,) = figures.layers({"maps": [found], "ranges": ranges})
    (cells,) = panel.series
    (first, empty), (skipped, gap) = cells.values
    assert [first, empty, skipped] == [1.0, 25.0, None] and math.isnan(gap)
    assert panel.categories == ["q_proj", "up"] and panel.x.ticks == {0.5: "0", 1.5: "3"}
    assert cells.ends == (1.0, 25.0)


@pytest.mark.core
def test_whiskers_have_the_intervals_of_their_values() -> None:
    row = {
        "text": "eval.txt",
        "units": 10,
        "perplexity": 11.0,
        "intervals": {"perplexity": [10.5, 12.0], "kl": [0.25, 0.75], "top1": [0.5, 0.75]},
        "reference_perplexity": 10.0,
        "reference_intervals": {"perplexity": [9.0, 11.5]},
        "difference": {"perplexity_ratio": {"value": 1.125, "low": 1.0625, "high": 1.25}},
        "kl": 0.5,
        "top1": 0.625,
    }
    perplexity, change, kl, top1 = figures.perplexity({"evaluations": [row]})
    both = [(each.x, each.y, each.x_ends) for each in perplexity.series]
    assert both == [([11.0], [0], [(10.5, 12.0)]), ([10.0], [1], [(9.0, 11.5)])]
    assert change.series[0].x == [12.5] and change.series[0].x_ends == [(6.25, 25.0)]
    assert kl.series[0].x_ends == [(0.25, 0.75)] and top1.series[0].x_ends == [(50.0, 75.0)]
    # The line of no change.
    assert kl.series[-1].x == [0, 0] and len(top1.series) == 1


@pytest.mark.core
def test_names_are_as_short_as_they_can_be() -> None:
    names = ["attn.q_proj", "attn.proj", "mlp.proj", "x.mlp.up"]
    assert figures.short_names(names) == ["q_proj", "attn.proj", "mlp.proj", "up"]
