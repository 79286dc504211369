"""Where the marks of a chart go: coordinates of the numbers of a page, which stay where they are.

Every chart is `WIDTH` wide, so that its text has the size of the text around it on a phone too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 34

# Colours of a heat map, and of the groups of layers before they repeat.
STEPS, COLOURS = 7, 6

# Ticks that do not touch each other, of an axis from left to right.
_TICKS = 7


@dataclass(frozen=True)
class Tick:
    """A place on an axis and what stands there."""

    at: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A dot, a bar or a whisker: where it is, and the places of its numbers in the JSON.

    x, y: the centre of a dot, the top left corner of a bar. low, high: the ends of a whisker.
    """

    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    low: float | None = None
    high: float | None = None
    label: str = ""
    colour: int = 0
    pointers: tuple[tuple[str, str, str], ...] = ()

    @property
    def interval(self) -> bool:
        return self.low is not None and self.high is not None


@dataclass(frozen=True)
class Chart:
    """A picture from left to right `WIDTH` wide; axes, marks, and what it is called.

    zero: where the line of no difference is, None without one.
    """

    title: str
    unit: str
    height: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    left: float = _LEFT
    y_unit: str = ""
    zero: float | None = None
    legend: tuple[tuple[int, str], ...] = field(default=())

    @property
    def width(self) -> float:
        return WIDTH

    @property
    def right(self) -> float:
        return WIDTH - _RIGHT

    @property
    def bottom(self) -> float:
        return self.height - _BOTTOM

    @property
    def top(self) -> float:
        return _TOP


def ticks(low: float, high: float, most: int = _TICKS) -> list[float]:
    """Round numbers from `low` to `high`, 1, 2 or 5 apart times a power of ten."""
    span = high - low
    rough = span / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _short(value: float, scale: float = 1.0, suffix: str = "") -> str:
    return f"{value * scale:.6g}{suffix}"


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Values to coordinates."""
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 2)


def _padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    low, high = min(values), max(values)
    # One value alone is in the middle of something.
    pad = (high - low) * share or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def bits_chart(data: Mapping[str, Any], measure: str, title: str) -> Chart | None:
    """An error of each layer against its bits; None if no layer has it."""
    labels = [group["label"] for group in data["groups"]]
    found = [
        (index, layer)
        for index, layer in enumerate(data["layers"])
        if not layer["reason"] and layer[measure] is not None
    ]
    if not found:
        return None
    height = 250
    used = sorted({layer["bits"] for _, layer in found})
    low, high = _padded([layer[measure] for _, layer in found])
    y = _axis(low, high, height - _BOTTOM, _TOP)
    x = _axis(min(used) - 0.15, max(used) + 0.15, _LEFT, WIDTH - _RIGHT)
    marks = []
    for order, (index, layer) in enumerate(found):
        colour = labels.index(layer["label"])
        # Layers of one format have the same bits, and would hide each other.
        across = ((order * 0.618034) % 1 - 0.5) * 36 + (colour - (len(labels) - 1) / 2) * 3
        pointers = (
            (f"/layers/{index}/bits", "two", " bits"),
            (f"/layers/{index}/{measure}", "percent", ""),
        )
        marks.append(
            Mark(
                x=round(x(layer["bits"]) + across, 2),
                y=y(layer[measure]),
                label=layer["name"],
                colour=colour % COLOURS,
                pointers=pointers,
            )
        )
    return Chart(
        title=title,
        unit="bits per weight",
        height=height,
        x_ticks=tuple(Tick(x(bits), _short(bits)) for bits in used),
        y_ticks=tuple(Tick(y(v), _short(v, 100, " %")) for v in ticks(low, high, 6)),
        marks=tuple(marks),
        legend=tuple((index % COLOURS, label) for index, label in enumerate(labels)),
    )


def scales_chart(data: Mapping[str, Any], number: int) -> Chart:
    """How many blocks have each scale, the logarithm of the scale to the right."""
    row = data["scales"][number]
    counts = [(i, each) for i, each in enumerate(row["counts"]) if each["value"] > 0]
    values = [math.log2(each["value"]) for _, each in counts] or [0.0]
    low, high = math.floor(min(values)) - 0.25, math.ceil(max(values) + 1e-9) + 0.25
    x = _axis(low, high, _LEFT, WIDTH - _RIGHT)
    height, most = 210, max((each["share"] for _, each in counts), default=1.0) * 1.05
    y = _axis(0.0, most, height - _BOTTOM, _TOP)
    # As wide as the narrowest gap between neighbours leaves room for.
    gaps = [x(b) - x(a) for a, b in itertools.pairwise(values)]
    width = max(1.0, min([18.0, *(0.8 * gap for gap in gaps)]))
    marks = [
        _bar(
            x(math.log2(each["value"])),
            y(each["share"]),
            width,
            height,
            label="scale",
            pointers=(
                (f"/scales/{number}/counts/{i}/value", "short", ""),
                (f"/scales/{number}/counts/{i}/blocks", "count", " blocks"),
                (f"/scales/{number}/counts/{i}/share", "percent", ""),
            ),
        )
        for i, each in counts
    ]
    exponents = range(math.ceil(low), math.floor(high) + 1)
    step = math.ceil(len(exponents) / _TICKS)
    shown = [e for e in exponents if e % step == 0]
    return Chart(
        title=f"{row['format']}, scales in {row['scale']}",
        unit="block scale as stored, logarithmic",
        height=height,
        x_ticks=tuple(Tick(x(e), _power(e)) for e in shown),
        y_ticks=tuple(Tick(y(v), _short(v, 100, " %")) for v in ticks(0.0, most, 5)),
        marks=tuple(marks),
    )


def _power(exponent: int) -> str:
    """2 to a small power as a number, and else as a power."""
    if -3 <= exponent <= 10:
        return str(2**exponent) if exponent >= 0 else f"1/{2**-exponent}"
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _bar(x: float, y: float, width: float, height: float, **more: Any) -> Mark:
    """From the axis at the bottom up to y, around x."""
    bottom = height - _BOTTOM
    # What is there is seen, however few it is.
    tall = max(bottom - y, 0.75)
    size = (round(width, 2), round(tall, 2))
    return Mark(round(x - width / 2, 2), round(bottom - tall, 2), *size, **more)


def offsets_chart(data: Mapping[str, Any], number: int) -> Chart:
    """How many blocks have a scale how many steps from naive's."""
    row = data["offsets"][number]
    counts = row["counts"]
    found = [each["offset"] for each in counts]
    first, last = min([*found, -4]), max([*found, 4])
    x = _axis(first - 0.6, last + 0.6, _LEFT, WIDTH - _RIGHT)
    height, most = 210, max((each["share"] for each in counts), default=1.0) * 1.05
    y = _axis(0.0, most, height - _BOTTOM, _TOP)
    width = min(26.0, 0.72 * (x(1.0) - x(0.0)))
    marks = [
        _bar(
            x(each["offset"]),
            y(each["share"]),
            width,
            height,
            colour=int(each["offset"] != 0),
            label="steps",
            pointers=(
                (f"/offsets/{number}/counts/{i}/offset", "signed", ""),
                (f"/offsets/{number}/counts/{i}/blocks", "count", " blocks"),
                (f"/offsets/{number}/counts/{i}/share", "percent", ""),
            ),
        )
        for i, each in enumerate(counts)
    ]
    step = math.ceil((last - first + 1) / 9)
    shown = [v for v in range(first, last + 1) if v % step == 0]
    return Chart(
        title=", ".join(filter(None, (row["format"], row["method"]))),
        unit="steps from naive's scale, to larger ones on the right",
        height=height,
        x_ticks=tuple(Tick(x(v), f"{v:+d}" if v else "0") for v in shown),
        y_ticks=tuple(Tick(y(v), _short(v, 100, " %")) for v in ticks(0.0, most, 5)),
        marks=tuple(marks),
    )


@dataclass(frozen=True)
class Value:
    """A number with an interval, by their places in the JSON; style: how it is written."""

    label: str
    value: str
    low: str
    high: str
    style: str
    offset: float = 0.0


def whiskers(
    title: str,
    unit: str,
    values: Sequence[Value],
    find: Callable[[str], Any],
    *,
    factor: float = 1.0,
    suffix: str = "",
    zero: float | None = None,
) -> Chart:
    """Dots with whiskers, one below the other; `find` gives the number at a place of the JSON.

    factor, suffix: of the numbers on the axis. zero: what would be no difference.
    """
    numbers = [
        (each, find(each.value), find(each.low), find(each.high))
        for each in values
        if find(each.value) is not None
    ]
    ends = [n for _, *row in numbers for n in row if n is not None]
    low, high = _padded([*ends, *([] if zero is None else [zero])])
    left = 14
    x = _axis(low, high, left, WIDTH - _RIGHT - 4)
    height = _TOP + 40 * len(numbers) + _BOTTOM
    offset = values[0].offset

    def places(each: Value, bottom: float | None, top: float | None) -> list[str]:
        return [each.value] if bottom is None or top is None else [each.value, each.low, each.high]

    marks = [
        Mark(
            x=x(value),
            y=_TOP + 40 * row + 26,
            low=None if bottom is None else x(bottom),
            high=None if top is None else x(top),
            label=each.label,
            colour=row % COLOURS,
            pointers=tuple((at, each.style, "") for at in places(each, bottom, top)),
        )
        for row, (each, value, bottom, top) in enumerate(numbers)
    ]
    return Chart(
        title=title,
        unit=unit,
        height=height,
        x_ticks=tuple(
            Tick(x(v / factor + offset), _short(v, 1.0, suffix))
            for v in ticks((low - offset) * factor, (high - offset) * factor, 5)
        ),
        y_ticks=(),
        marks=tuple(marks),
        left=left,
        zero=None if zero is None else x(zero),
    )


def heat_step(value: float, ends: Sequence[float]) -> int:
    """Which of the `STEPS` colours between two ends a number has."""
    low, high = ends
    if high <= low:
        return STEPS // 2
    return min(int((value - low) / (high - low) * STEPS), STEPS - 1)


def short_names(projections: Sequence[str]) -> list[str]:
    """The last words of projections that tell them apart."""
    names = []
    for name in projections:
        words = name.split(".")
        for count in range(1, len(words) + 1):
            end = words[-count:]
            if sum(other.split(".")[-count:] == end for other in projections) == 1:
                break
        names.append(".".join(end))
    return names
