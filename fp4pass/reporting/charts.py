"""Draw the charts of a report as SVG elements, in colors that the page sets by variables of CSS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

Data = Mapping[str, Any]

# The errors of a layer, and their names in a chart.
ERRORS = {"weight_error": "weight error", "output_error": "output error"}

# The palette of Okabe and Ito, which readers who see fewer colors can tell apart.
COLORS = ("var(--first)", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Cividis, which is seen alike with fewer colors, from the smallest number to the largest.
_CIVIDIS = ((0, 34, 78), (67, 78, 108), (125, 124, 120), (188, 174, 108), (254, 232, 56))
# The colors of a map span at least this share of its middle: errors that are closer to each other,
# as those of one method in all layers of a model, get nearly one color.
_LEAST_RANGE = 0.2
# The widest map whose cells have room for their numbers.
_NUMBERED = 40
_WIDTH, _HEIGHT = 442.0, 288.0
# Of a letter, on average.
_LETTER = 6.3

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """An axis of a chart; `low` is at the left or at the bottom."""

    low: float
    high: float
    ticks: Mapping[float, str] | Mapping[int, str]
    label: str = ""
    grid: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


# Marks of a chart, from functions of a value on each axis to its place.
Place = Callable[[float], float]
Draw = Callable[[Place, Place], Iterable[str]]
# A color, and its name in the legend.
Entry = tuple[str, str]


def layers(data: Data) -> list[Markup]:
    """Return a map for each stack of layers and error, depth to the right; of bits if they vary."""
    bits = {group["bits"] for group in data["groups"]}
    kinds = [(error, name, 100, "%", data["ranges"][error]) for error, name in ERRORS.items()]
    if len(bits) > 1:
        kinds.append(("bits", "bits per weight", 1, "bits", [min(bits), max(bits)]))
    charts = []
    for found, (key, name, factor, unit, ends) in itertools.product(data["maps"], kinds):
        if ends:
            title = name if len(data["maps"]) == 1 else f"{found['stack']}: {name}"
            charts.append(_layer_map(found, key, factor, unit, ends, title))
    return charts


def _layer_map(
    found: Data, key: str, factor: int, unit: str, ends: Sequence[float], title: str
) -> Markup:
    depths, names = found["depths"], short_names(found["projections"])
    low, high = _color_ends(factor * ends[0], factor * ends[1])
    is_numbered = len(depths) <= _NUMBERED

    def draw(x: Place, y: Place) -> Iterable[str]:
        for (i, depth), (j, name) in itertools.product(enumerate(depths), enumerate(names)):
            cell = found["cells"][i][j]
            if cell is None or (cell["converted"] and cell[key] is None):
                continue
            fill, number = "url(#hatch)", "skipped"
            if cell["converted"]:
                value = factor * cell[key]
                fill = _cividis((value - low) / (high - low))
                number = f"{value:.2f}" if value < 9.995 else f"{value:.1f}"
            box = f'x="{x(i):.1f}" y="{y(j):.1f}" width="{x(1) - x(0):.1f}" height="25"'
            said = f"<title>{escape(name)}, {depth}: {number}</title>"
            yield f'<rect {box} fill="{fill}">{said}</rect>'
            if is_numbered and cell["converted"]:
                color = "white" if value < (low + high) / 2 else "black"
                yield _text(x(i + 0.5), y(j) + 16, number, style=f"fill: {color}; font-size: 11px")

    most = len(depths) if is_numbered else 30
    shown = whole_numbers(0, len(depths) - 1, most)
    skipped = any(cell and not cell["converted"] for row in found["cells"] for cell in row)
    swatches = [(0.0, low), (0.5, (low + high) / 2), (1.0, high)]
    legend: list[Entry] = [(_cividis(at), f"{value:.3g} {unit}") for at, value in swatches]
    return _chart(
        title,
        Axis(0, len(depths), {i + 0.5: str(depths[i]) for i in shown}, "depth"),
        Axis(len(names), 0, {j + 0.5: name for j, name in enumerate(names)}),
        draw,
        [*legend, ("url(#hatch)", "skipped")] if skipped else legend,
        width=max(_WIDTH, min(150 + len(depths) * (35 if is_numbered else 13), 1536)),
        inner=25 * len(names),
    )


def scales(data: Data) -> list[Markup]:
    """Return a histogram of the block scales of each format, on a logarithmic axis."""
    return [_histogram(row) for row in data["scales"]]


def _histogram(row: Data) -> Markup:
    counts = {math.log2(each["value"]): each for each in row["counts"]} or {0.0: {"share": 0}}
    at, highest = list(counts), 108 * max(each["share"] for each in counts.values())
    width = 0.8 * min([1.0, *(b - a for a, b in itertools.pairwise(at))])

    def draw(x: Place, y: Place) -> Iterable[str]:
        for place, each in counts.items():
            left, right, share = x(place - width / 2), x(place + width / 2), 100 * each["share"]
            box = f'x="{left:.2f}" y="{y(share):.2f}" width="{right - left:.2f}"'
            yield (
                f'<rect {box} height="{y(0) - y(share):.2f}" fill="{COLORS[0]}">'
                f"<title>{each.get('value', 0):g}: {share:.3g} %</title></rect>"
            )

    powers = whole_numbers(at[0] - 1, at[-1] + 1)
    ticks = {power: f"2{str(power).translate(_SUPERSCRIPT)}" for power in powers}
    across = Axis(at[0] - 0.6, at[-1] + 0.6, ticks, "block scale as stored")
    upwards = Axis(0, highest or 1.0, _ticks(0, highest or 1.0, 7), "blocks, %", grid=True)
    return _chart(f"{row['format']}, scales in {row['scale']}", across, upwards, draw)


def _chart(
    title: str,
    across: Axis,
    upwards: Axis,
    draw: Draw,
    legend: Sequence[Entry] = (),
    *,
    width: float = _WIDTH,
    inner: float = 0.0,
) -> Markup:
    """Draw axes, marks on them, and below a legend of colors with their names."""
    left = (34 if upwards.label else 14) + _LETTER * max(map(len, upwards.ticks.values()))
    top, below = 28 if title else 12, 40 if across.label else 22
    inner = inner or _HEIGHT - top - below
    bottom, end = top + inner, width - 14

    def x(value: float) -> float:
        return left + across.share(value) * (end - left)

    # Where an axis has names they go from the top to the bottom.
    def y(value: float) -> float:
        return top + (1 - upwards.share(value)) * inner

    parts = [_text(left, 16, title, "start", "font-weight: 700")] if title else []
    for value, text in upwards.ticks.items():
        parts.append(_text(left - 8, y(value) + 4, text, "end"))
        if upwards.grid:
            parts.append(_line([(left, y(value)), (end, y(value))], "var(--line)"))
    for value, text in across.ticks.items():
        if left - 1 <= x(value) <= end + 1:
            parts.append(_text(x(value), bottom + 17, text))
    parts += draw(x, y)
    parts.append(_line([(left, top), (left, bottom), (end, bottom)], "var(--ink)", width=0.8))
    parts.append(_text((left + end) / 2, bottom + 35, across.label))
    middle = (top + bottom) / 2
    turned = f' transform="rotate(-90 14 {middle:.1f})"'
    parts.append(_text(14, middle, upwards.label, more=turned))
    # It shrinks on a narrow screen as far as its text can be read, and grows on a wide one.
    size = f"width: {width:g}px; max-width: max(100%, {0.7 * width:g}px)"
    size += f"; min-width: min(100%, {1.25 * width:g}px)"
    box = f'viewBox="0 0 {width:g} {bottom + below:g}"'
    chart = f'<svg role="img" {box} style="{size}">{"".join(parts)}</svg>'
    entries = []
    for color, name in legend:
        drawn = f'<svg width="12" height="12"><rect width="12" height="12" fill="{color}"/></svg>'
        entries.append(f"<span>{drawn}{escape(name)}</span>")
    return Markup(chart + (f'<p class="legend">{"".join(entries)}</p>' if entries else ""))


def _text(
    x: float, y: float, text: str, anchor: str = "middle", style: str = "", more: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{style}"'
    return f"<text {place}{more}>{escape(text)}</text>"


def _line(points: Sequence[tuple[float, float]], color: str, width: float = 1.4) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _cividis(share: float) -> str:
    """Return the color of a share from 0 to 1."""
    place = min(max(share, 0.0), 1.0) * (len(_CIVIDIS) - 1)
    index = min(int(place), len(_CIVIDIS) - 2)
    pairs = zip(_CIVIDIS[index], _CIVIDIS[index + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - index)):02x}" for a, b in pairs)


def _color_ends(low: float, high: float) -> tuple[float, float]:
    """Return the numbers of the first and the last color, at least `_LEAST_RANGE` apart."""
    middle = (low + high) / 2
    reach = max(high - low, _LEAST_RANGE * middle) / 2 or 1.0
    return middle - reach, middle + reach


def _ticks(low: float, high: float, most: int) -> dict[float, str]:
    """Return at most `most` round numbers from `low` to `high`, evenly apart."""
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(each for each in (1, 2, 2.5, 5, 10) if each * power >= rough * 0.999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9) + (step / power == 2.5))
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return {i * step: f"{i * step:.{digits}f}" for i in places}


def whole_numbers(low: float, high: float, most: int = 9) -> list[int]:
    """Return at most `most` whole numbers from `low` to `high`, evenly apart, with 0 among them."""
    first, last = math.ceil(low), math.floor(high)
    step = max(1, math.ceil((last - first + 1) / most))
    return [value for value in range(first, last + 1) if value % step == 0]


def short_names(projections: Sequence[str]) -> list[str]:
    """Return the last words of each projection, as few as tell it from all others."""
    names = []
    for name in projections:
        words = name.split(".")
        for count in range(1, len(words) + 1):
            end = words[-count:]
            if sum(other.split(".")[-count:] == end for other in projections) == 1:
                break
        names.append(".".join(end))
    return names
