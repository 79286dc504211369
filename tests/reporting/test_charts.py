"""Maps of errors: cells stand where their layers are, in colors of their numbers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jinja2")
page = pytest.importorskip("fp4pass.reporting.page")

pytestmark = pytest.mark.core


def cell(error: float | None, converted: int = 1) -> dict[str, Any]:
    return {"converted": converted, "weight_error": error, "output_error": None, "bits": 4.5}


def test_maps_of_layers_have_depth_to_the_right_and_a_dash_for_what_was_skipped() -> None:
    found = {
        "stack": "model.layers",
        "depths": [0, 3],
        "projections": ["attn.q_proj", "mlp.up"],
        "cells": [[cell(0.01), cell(None, 0)], [cell(0.25), None]],
    }
    (one,) = page._maps({"maps": [found], "groups": [{"bits": 4.5}]})
    assert (one["title"], one["depths"]) == ("weight error, %", [0, 3])
    (name, q), (other, up) = one["rows"]
    assert (name, other) == ("q_proj", "up")
    assert q == [
        ("1.00", "background: #00224e; color: white"),
        ("25.0", "background: #fee838; color: black"),
    ]
    assert up == [("\N{EN DASH}", ""), ("", "")]
    # A mixture of schemes gets a map of its bits, and two stacks have their names.
    groups = [{"bits": 4.5}, {"bits": 8.0}]
    both = list(page._maps({"maps": [found, found], "groups": groups}))
    assert [each["title"] for each in both] == [
        "model.layers: weight error, %",
        "model.layers: bits per weight",
    ] * 2
    assert both[1]["rows"][0][1][0][0] == "4.50"


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
    assert page._color_ends(*ends) == pytest.approx(shown)


def test_names() -> None:
    names = ["attn.q_proj", "attn.proj", "mlp.proj", "x.mlp.up"]
    assert page.short_names(names) == ["q_proj", "attn.proj", "mlp.proj", "up"]
