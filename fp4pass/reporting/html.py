"""Write the page of a report: one HTML file that needs no network and no scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import charts, figures

DASH = "\N{EN DASH}"

# Of an evaluation, where it was not measured.
_MEASURES = ("bits_per_byte", "kl", "top_p_kl", "top1", "reference_perplexity", "difference")
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
    return page.render(
        data=data,
        evaluations=[{**_UNMEASURED, **row} for row in data["evaluations"]],
        charts=drawn,
        dash=DASH,
        colors=charts.COLORS,
        recipe_text=_recipe_text(data["recipe"]),
    )


def _svgs(data: Mapping[str, Any], name: str, salt: str = "") -> list[Markup]:
    panels = figures.FIGURES[name](data)
    return [Markup(charts.svg(panel, f"{name}{salt}-{i}")) for i, panel in enumerate(panels)]


def written(value: float | None, style: str) -> str:
    """Return a number in a format of Python, or as "percent", "change" (of a ratio) or "size"."""
    if value is None:
        return DASH
    if style == "percent":
        return f"{100 * value:.2f} %"
    if style == "change":
        return f"{100 * (value - 1):+.2f} %"
    return _size(value) if style == "size" else format(value, style)


def _size(count: float) -> str:
    """Bytes in decimal units, as disks and hubs have them."""
    if count < 1000:
        return f"{count:.0f} B"
    unit, power = next(
        (u, p) for u, p in (("kB", 3), ("MB", 6), ("GB", 99)) if count < 10 ** (p + 3)
    )
    return f"{count / 10 ** min(power, 9):.2f} {unit}"


def _recipe_text(recipe: Mapping[str, Any] | None) -> str:
    """The recipe as a file that `quantize --rules` reads."""
    if recipe is None:
        return ""
    return json.dumps({k: v for k, v in recipe.items() if k != "calibration"}, indent=2)
