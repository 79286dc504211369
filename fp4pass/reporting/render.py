"""A page of the numbers: HTML with everything in it, which asks no network for anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .facts import ERRORS
from .shapes import (
    COLOURS,
    STEPS,
    Chart,
    Value,
    bits_chart,
    heat_step,
    offsets_chart,
    scales_chart,
    short_names,
    whiskers,
)

DASH = "\N{EN DASH}"

# The name of an error in headings, and what it is.
ERROR_NAMES = {
    "weight_error": ("Weight error", "|W \N{MINUS SIGN} Q| / |W|"),
    "output_error": (
        "Output error",
        "|(W \N{MINUS SIGN} Q) x| / |W x|, predicted from the calibration",
    ),
}


def render(data: Mapping[str, Any]) -> str:
    """The page of what `gather` found."""
    environment = Environment(
        loader=PackageLoader("fp4pass.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = _Numbers(data)
    environment.globals |= {
        "find": numbers.find,
        "show": numbers.show,
        "text": numbers.text,
        "title": numbers.title,
        "heat_step": heat_step,
        "short_names": short_names,
        "dash": DASH,
        "steps": STEPS,
        "colours": COLOURS,
        "error_names": ERROR_NAMES,
        # Without any error there is one map all the same, of what is packed.
        "shown_errors": [name for name in ERRORS if data["ranges"][name]] or [ERRORS[0]],
        "has_left_alone": _has_left_alone,
        "recipe_text": _recipe_text(data["recipe"]),
    }
    page = environment.get_template("report.html")
    charts = {
        "bits": [
            chart
            for name in ERRORS
            if (chart := bits_chart(data, name, ERROR_NAMES[name][0])) is not None
        ],
        "scales": [scales_chart(data, i) for i in range(len(data["scales"]))],
        "offsets": [offsets_chart(data, i) for i in range(len(data["offsets"]))],
        "evaluations": [
            evaluation_charts(data, i, numbers.find) for i in range(len(data["evaluations"]))
        ],
    }
    return page.render(data=data, charts=charts)


class _Numbers:
    """Writes the numbers of the data by their places in it (JSON pointers, RFC 6901)."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def find(self, pointer: str) -> Any:
        """What is at a place; None below what is not there."""
        value: Any = self.data
        for key in pointer.split("/")[1:]:
            if value is None:
                return None
            value = value[int(key)] if isinstance(value, list) else value.get(key)
        return value

    def text(self, pointer: str, style: str) -> str:
        """A number as people read it."""
        return written(self.find(pointer), style)

    def show(self, pointer: str, style: str) -> Markup:
        """The same with the number itself beside, for programs."""
        value = self.find(pointer)
        if value is None:
            return Markup('<span class="none">{}</span>').format(DASH)
        return Markup('<data value="{}" data-at="{}">{}</data>').format(
            json.dumps(value), pointer, written(value, style)
        )

    def title(self, chart: Chart, index: int) -> str:
        """What a mark says when it is pointed at."""
        mark = chart.marks[index]
        said = [self.text(pointer, style) + unit for pointer, style, unit in mark.pointers]
        if mark.interval:
            return f"{mark.label}: {said[0]} ({said[1]} to {said[2]})"
        return f"{mark.label}: {', '.join(said)}"


def written(value: float | None, style: str) -> str:
    """A number in one of the styles of the page, a dash where there is none."""
    if value is None:
        return DASH
    styles = {
        "count": "{:,}",
        "two": "{:.2f}",
        "four": "{:.4f}",
        "five": "{:.5f}",
        "short": "{:.6g}",
        "signed": "{:+d}",
        "signed_four": "{:+.4f}",
    }
    if style == "percent":
        return f"{100 * value:.2f} %"
    if style == "heat":
        return f"{100 * value:.1f}" if value >= 0.0995 else f"{100 * value:.2f}"
    if style == "change":
        return f"{100 * (value - 1):+.2f} %"
    if style == "size":
        return _size(value)
    return styles[style].format(value)


def _size(count: float) -> str:
    """Bytes, in decimal units as disks and hubs have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


def _has_left_alone(map_: Mapping[str, Any]) -> bool:
    return any(cell and not cell["converted"] for row in map_["cells"] for cell in row)


def _recipe_text(recipe: Mapping[str, Any] | None) -> str:
    """The recipe as a file that `quantize --rules` reads."""
    if recipe is None:
        return ""
    return json.dumps({k: v for k, v in recipe.items() if k != "calibration"}, indent=2)


def evaluation_charts(data: Mapping[str, Any], number: int, find: Any) -> list[Chart]:
    """A chart for each kind of measure: perplexity, its change, bits per byte, KL and top-1."""
    at, row = f"/evaluations/{number}", data["evaluations"][number]

    def measure(name: str, label: str, style: str) -> Value:
        ends = f"{at}/intervals/{name}"
        return Value(label, f"{at}/{name}", f"{ends}/0", f"{ends}/1", style)

    perplexity = [measure("perplexity", "quantized", "four")]
    if row.get("reference_perplexity") is not None:
        ends = f"{at}/reference_intervals/perplexity"
        place = f"{at}/reference_perplexity"
        perplexity.append(Value("original", place, f"{ends}/0", f"{ends}/1", "four"))
    charts = [whiskers("Perplexity", "perplexity", perplexity, find)]
    ratio = f"{at}/difference/perplexity_ratio"
    if find(f"{ratio}/value") is not None:
        change = Value(
            "quantized / original",
            f"{ratio}/value",
            f"{ratio}/low",
            f"{ratio}/high",
            "change",
            offset=1.0,
        )
        title = "Change of perplexity"
        charts.append(
            whiskers(title, "per cent", [change], find, factor=100, suffix=" %", zero=1.0)
        )
    if find(f"{at}/kl") is not None:
        name = "KL divergence from the original"
        kinds = [measure("kl", "all tokens", "five")]
        if row.get("top_p_kl") is not None:
            nucleus = f"in its top {100 * row.get('top_p', 0.95):g} %"
            kinds.append(measure("top_p_kl", nucleus, "five"))
        charts.append(whiskers(name, "nats per token", kinds, find, zero=0.0))
    if find(f"{at}/top1") is not None:
        agree = [measure("top1", "same likeliest token", "percent")]
        charts.append(whiskers("Top-1 agreement", "per cent", agree, find, factor=100, suffix=" %"))
    if find(f"{at}/bits_per_byte") is not None:
        own = [measure("bits_per_byte", "quantized", "four")]
        charts.append(whiskers("Bits per byte", "bits per byte", own, find))
    return charts
