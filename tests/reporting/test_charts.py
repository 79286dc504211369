"""Charts: marks stand where their numbers are, with the names of layers and intervals."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("jinja2")
charts = pytest.importorskip("fp4pass.reporting.charts")

pytestmark = pytest.mark.core


def texts(svg: str) -> list[str]:
    return re.findall(r"(?:<text[^>]*|</svg)>([^<]+)</", svg)


def cell(error: float | None, converted: int = 1) -> dict[str, Any]:
    known = {"weight_error": error, "output_error": None, "bits": 4.5}
    return {"converted": converted, **known}


def test_maps_of_layers_have_depth_to_the_right_and_hatch_what_was_skipped() -> None:
    found = {
        "stack": "model.layers",
        "depths": [0, 3],
        "projections": ["attn.q_proj", "mlp.up"],
        "cells": [[cell(0.01), cell(None, 0)], [cell(0.25), None]],
    }
    ranges = {"weight_error": [0.01, 0.25], "output_error": None}
    (svg,) = charts.layers({"maps": [found], "ranges": ranges, "groups": [{"bits": 4.5}]})
    assert {"weight error", "q_proj", "up", "0", "3", "1.00", "25.0", "skipped"} <= set(texts(svg))
    cells = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)"[^>]*fill="([^"]*)"><title>(.*?)<', svg)
    (x0, y0, low, first), (x1, y1, hatch, skipped), (x2, y2, high, last) = cells
    assert [first, skipped, last] == ["q_proj, 0: 1.00", "up, 0: skipped", "q_proj, 3: 25.0"]
    assert x0 == x1 and float(x1) < float(x2) and y0 == y2 and float(y0) < float(y1)
    assert [low, hatch, high] == ["#00224e", "url(#hatch)", "#fee838"]
    # A mixture of schemes gets a map of its bits.
    groups = [{"bits": 4.5}, {"bits": 8.0}]
    both = charts.layers({"maps": [found], "ranges": ranges, "groups": groups})
    assert len(both) == 2 and "4.50" in texts(both[1])


@pytest.mark.parametrize(
    ("ends", "shown"),
    [
        ((8.09, 8.17), (7.317, 8.943)),  # noise gets nearly one color
        ((5.0, 9.0), (5.0, 9.0)),
        ((0.0, 0.0), (-1.0, 1.0)),
    ],
)
def test_colors_of_a_map_span_a_fifth_of_its_errors_or_more(
    ends: tuple[float, float], shown: tuple[float, float]
) -> None:
    assert charts._color_ends(*ends) == pytest.approx(shown)


def test_bars_stand_where_their_numbers_are() -> None:
    counts = [{"value": 1.0, "share": 0.75}, {"value": 4.0, "share": 0.25}]
    (svg,) = charts.scales({"scales": [{"format": "f", "scale": "e4m3", "counts": counts}]})
    bars = re.findall(r'<rect x="([\d.]+)".*?height="([\d.]+)" fill="([^"]*)"><title>(.*?)<', svg)
    assert [name for *_, name in bars] == ["1: 75 %", "4: 25 %"]
    assert float(bars[0][0]) < float(bars[1][0])
    assert float(bars[0][1]) == pytest.approx(3 * float(bars[1][1]), abs=0.1)
    assert {"f, scales in e4m3", "2⁰", "2²"} <= set(texts(svg))


def test_numbers_that_are_all_zero_have_a_chart() -> None:
    assert charts.scales({"scales": [{"format": "f", "scale": "e4m3", "counts": []}]})


def test_ticks_and_names() -> None:
    assert charts.whole_numbers(-3.5, 4.5) == [-3, -2, -1, 0, 1, 2, 3, 4]
    assert charts.whole_numbers(-10, 40, most=6) == [-9, 0, 9, 18, 27, 36]
    assert list(charts._ticks(8.4, 9.93, 7).values()) == ["8.5", "9.0", "9.5"]
    assert list(charts._ticks(0, 1.1, 6).values()) == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    names = ["attn.q_proj", "attn.proj", "mlp.proj", "x.mlp.up"]
    assert charts.short_names(names) == ["q_proj", "attn.proj", "mlp.proj", "up"]
