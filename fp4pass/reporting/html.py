"""Write the page of a report: one HTML file that needs no network and no scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..evaluation.intervals import VERDICT_UNITS
from . import charts, figures
from .numbers import size

DASH = "\N{EN DASH}"

# Of an evaluation, where it was not measured.
_MEASURES = (
    "bits_per_byte", "kl", "kl_999", "top_p_kl", "top1", "delta_p", "rms_delta_p",
    "reference_perplexity", "difference",
)  # fmt: skip
_UNMEASURED: dict[str, Any] = {**dict.fromkeys(_MEASURES), "reference_intervals": {}}


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
    recipe = data["recipe"]
    if recipe is not None:
        recipe = {key: value for key, value in recipe.items() if key != "calibration"}
    return page.render(
        data=data,
        evaluations=[{**_UNMEASURED, **row} for row in data["evaluations"]],
        charts=drawn,
        verdict_units=VERDICT_UNITS,
        dash=DASH,
        colors=charts.PAGE_COLORS,
        # As a file that `quantize --rules` reads.
        recipe_text="" if recipe is None else json.dumps(recipe, indent=2),
    )


def _svgs(data: Mapping[str, Any], name: str, salt: str = "") -> list[Markup]:
    panels = figures.FIGURES[name](data)
    return [Markup(charts.svg(panel, f"{name}{salt}-{i}")) for i, panel in enumerate(panels)]


def written(value: float | None, style: str) -> str:
    """Return a number in a format of Python, or in one of our own.

    These are "percent", "signed" (percent), "change" (of a ratio, in percent) and "size".
    """
    if value is None:
        return DASH
    if style == "percent":
        return f"{100 * value:.2f} %"
    if style == "signed":
        return f"{100 * value:+.3f} %"
    if style == "change":
        return f"{100 * (value - 1):+.2f} %"
    return size(value) if style == "size" else format(value, style)
