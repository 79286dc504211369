"""Write the page of a report: one HTML file that needs no network and no scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import charts, figures
from .text import DASH, calibrated_on, measures, scored, verdict, written


def render(data: Mapping[str, Any]) -> str:
    """Return the page of what `gather` found."""
    environment = Environment(
        loader=PackageLoader("fp4pass.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show"] = written
    page = environment.get_template("page.html")
    drawn: dict[str, Any] = {name: _svgs(data, name) for name in figures.FIGURES}
    drawn["perplexity"] = [
        _svgs({"evaluations": [row]}, "perplexity", str(i))
        for i, row in enumerate(data["evaluations"])
    ]
    return page.render(
        data=data,
        measures=measures,
        scored=scored,
        verdict=verdict,
        calibrated_on=calibrated_on,
        charts=drawn,
        dash=DASH,
        colors=charts.PAGE_COLORS,
        # As a file that `quantize --rules` reads.
        recipe_text="" if data["recipe"] is None else json.dumps(data["recipe"], indent=2),
    )


def _svgs(data: Mapping[str, Any], name: str, salt: str = "") -> list[Markup]:
    panels = figures.FIGURES[name](data)
    return [Markup(charts.svg(panel, f"{name}{salt}-{i}")) for i, panel in enumerate(panels)]
