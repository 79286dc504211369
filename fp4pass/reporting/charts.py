"""Draw the charts of a report as SVG elements, in colors that the page sets by variables of CSS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from .text import measures

Data = Mapping[str, Any]

# The errors of a layer, and their names in a chart.
ERRORS = {"weight_error": "weight error", "output_error": "output error"}

# The palette of Okabe and Ito, which readers who see fewer colors can tell apart.
COLORS = ("var(--first)", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "m-3.6-3.6h7.2v7.2h-7.2z",
    "m0-4.8 4.6 8h-9.2z",
    "m0-5 5 5-5 5-5-5z",
    "m0 4.8 4.6-8h-9.2z",
    "m-1.6-4.8h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2v-3.2h-3.2v-3.2h3.2z",
)
# Cividis, which is seen alike with fewer colors, from the smallest number to the largest.
_CIVIDIS = ((0, 34, 78), (67, 78, 108), (125, 124, 120), (188, 174, 108), (254, 232, 56))
# The colors of a map span at least this share of its middle: errors that are closer to each other,
# as those of one method in all layers of a model, get nearly one color.
_LEAST_RANGE = 0.2
# The widest map whose cells have room for their numbers.
_NUMBERED = 40
_WIDTH, _HEIGHT = 442.0, 288.0
# Of a letter, on average, and from line to line.
_LETTER, _LINE = 6.3, 15

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
# A color, or the index of one that has a marker, and its name in the legend.
Entry = tuple[int | str, str]


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
    charts = []
    for row in data["scales"]:
        counts = {math.log2(each["value"]): each for each in row["counts"]} or {0.0: {"share": 0}}
        at = list(counts)
        width = 0.8 * min([1.0, *(b - a for a, b in itertools.pairwise(at))])
        bars = [
            (place, 100 * each["share"], 0, f"{each.get('value', 0):g}")
            for place, each in counts.items()
        ]
        powers = whole_numbers(at[0] - 1, at[-1] + 1)
        ticks = {power: f"2{str(power).translate(_SUPERSCRIPT)}" for power in powers}
        x = Axis(at[0] - 0.6, at[-1] + 0.6, ticks, "block scale as stored")
        charts.append(_bars(f"{row['format']}, scales in {row['scale']}", x, bars, width))
    return charts


def _bars(title: str, across: Axis, bars: Sequence[Any], width: float) -> Markup:
    """Draw bars of (place, per cent, color, name)."""

    def draw(x: Place, y: Place) -> Iterable[str]:
        for at, share, color, name in bars:
            left, right = x(at - width / 2), x(at + width / 2)
            box = f'x="{left:.2f}" y="{y(share):.2f}" width="{right - left:.2f}"'
            yield (
                f'<rect {box} height="{y(0) - y(share):.2f}" fill="{COLORS[color]}">'
                f"<title>{name}: {share:.3g} %</title></rect>"
            )

    upwards = _axis([0.0, *(bar[1] for bar in bars)], "blocks, %")
    return _chart(title, across, upwards, draw)


def perplexity(row: Data) -> list[Markup]:
    """Return a chart for each measure of a text: values with their intervals."""
    known = {each.key: each.values for each in measures(row)}
    change = "change of perplexity_ratio"
    if change in known:
        known[change] = [None if end is None else 100 * (end - 1) for end in known[change]]
    if "top1" in known:
        known["top1"] = [None if end is None else 100 * end for end in known["top1"]]
    top_p = f"in its top {100 * row.get('top_p', 0.95):g} %"
    drawn: list[tuple[str, dict[str, str], bool]] = [
        ("perplexity", {"perplexity": "quantized", "reference_perplexity": "original"}, False),
        ("change of perplexity, %", {change: "quantized"}, True),
        ("KL from the original, nats per token", {"kl": "all tokens", "top_p_kl": top_p}, True),
        ("top-1 agreement, %", {"top1": "quantized"}, False),
        ("bits per byte", {"bits_per_byte": "quantized"}, False),
    ]
    return [
        _whiskers(title, {labels[key]: known[key] for key in labels if key in known}, zero)
        for title, labels, zero in drawn
        if labels.keys() & known.keys()
    ]


def _whiskers(title: str, values: Mapping[str, Sequence[float | None]], zero: bool) -> Markup:
    """Draw values and their intervals one below the other."""
    ends = [end for each in values.values() for end in each if end is not None]
    across = _axis([*ends, *([0.0] if zero else [])])
    count = len(values)

    def draw(x: Place, y: Place) -> Iterable[str]:
        if zero:
            yield _line([(x(0), y(0)), (x(0), y(count))], "var(--soft)", dashes="5 4")
        for place, (label, (value, low, high)) in enumerate(values.items()):
            middle = y(place + 0.5)
            if low is not None and high is not None:
                yield _line([(x(low), middle), (x(high), middle)], COLORS[place])
            yield _marker(x(value or 0.0), middle, place, label, shape=0)

    names = {i + 0.5: f"{label}\n{each[0]:.5g}" for i, (label, each) in enumerate(values.items())}
    return _chart(title, across, Axis(count, 0, names), draw, inner=42 * count)


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
    names = [line for text in upwards.ticks.values() for line in text.split("\n")]
    left = 14 + _LETTER * max(map(len, names), default=0) + (20 if upwards.label else 0)
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
        lines = text.split("\n")
        for i, line in enumerate(lines):
            place = y(value) + 4 + _LINE * (i - (len(lines) - 1) / 2)
            parts.append(_text(left - 8, place, line, "end"))
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
        rect = f'<rect x="-6" y="-6" width="12" height="12" fill="{color}"/>'
        mark = _marker(0, 0, color) if isinstance(color, int) else rect
        drawn = f'<svg width="12" height="12" viewBox="-6 -6 12 12">{mark}</svg>'
        entries.append(f"<span>{drawn}{escape(name)}</span>")
    return Markup(chart + (f'<p class="legend">{"".join(entries)}</p>' if entries else ""))


def _text(
    x: float, y: float, text: str, anchor: str = "middle", style: str = "", more: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{style}"'
    return f"<text {place}{more}>{escape(text)}</text>"


def _line(
    points: Sequence[tuple[float, float]], color: str, width: float = 1.4, dashes: str = "none"
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = f'stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}"'
    return f'<polyline points="{path}" fill="none" {drawn}/>'


def _marker(x: float, y: float, color: int, said: str = "", shape: int | None = None) -> str:
    index = color if shape is None else shape
    path = f"M{x:.1f} {y:.1f}{_MARKERS[index % len(_MARKERS)]}"
    title = f"<title>{escape(said)}</title>" if said else ""
    return f'<path d="{path}" fill="{COLORS[color % len(COLORS)]}">{title}</path>'


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


def _axis(values: Sequence[float], label: str = "") -> Axis:
    """Return an axis on which values lie, with room at the ends that are not 0."""
    low, high = min(values), max(values)
    room = 0.08 * ((high - low) or abs(high) or 1.0)
    low, high = low - room * (low != 0 or not high), high + room * (high != 0 or not low)
    return Axis(low, high, _ticks(low, high, 7), label, grid=True)


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
