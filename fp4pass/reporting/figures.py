"""The charts of a report: panels made of the numbers that `gather` found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import charts
from .charts import GRAY, Bars, Cells, Panel, Points, Scale
from .layers import ERRORS
from .text import measures

Data = Mapping[str, Any]

# Layers of one format have the same bits: their dots are spread over so many.
_SPREAD = 0.12

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def draw(data: Data, name: str, path: Path) -> None:
    """Write the panels of one of `FIGURES` as a PNG file."""
    panels = FIGURES[name](data)
    charts.write_png(charts.arrange(panels, 1 if name == "layers" else 2), path, columns=2)


def layers(data: Data) -> list[Panel]:
    """Return a heat map for each stack of layers and error, depth to the right."""
    panels = []
    for found, error in itertools.product(data["maps"], _known(data)):
        stack = f"{found['stack']}: " if len(data["maps"]) > 1 else ""
        panels.append(_layer_map(found, error, data["ranges"][error], stack))
    return panels


def _layer_map(found: Data, error: str, ends: Sequence[float], stack: str) -> Panel:
    depths, names = found["depths"], short_names(found["projections"])
    numbered = len(depths) <= charts.NUMBERED
    columns = [[_cell_value(cell, error) for cell in row] for row in found["cells"]]
    low, high = ends
    shown = charts.whole_numbers(0, len(depths) - 1, most=len(depths) if numbered else 30)
    rows = list(zip(*columns, strict=True))
    return Panel(
        [Cells(rows, ends=(100 * low, 100 * high), label="%", hatched="skipped")],
        title=f"{stack}{ERRORS[error]}",
        x=Scale("depth", ticks={i + 0.5: str(depths[i]) for i in shown}),
        categories=names,
        width=max(4.6, min(2.2 + len(depths) * (0.36 if numbered else 0.14), 16.0)),
        height=1.0 + 0.26 * min(len(names), 40),
    )


def _cell_value(cell: Data | None, error: str) -> float | None:
    """Return an error in per cent; nan if it is unknown, None for a cell of skipped layers."""
    if cell is not None and not cell["converted"]:
        return None
    return math.nan if cell is None or cell[error] is None else 100 * cell[error]


def bits(data: Data) -> list[Panel]:
    """Return a chart for each error: a dot for each layer against its bits per weight."""
    used = sorted({group["bits"] for group in data["groups"]})
    panels = []
    for error in _known(data):
        series = []
        for color, group in enumerate(data["groups"]):
            mine = [each for each in data["layers"] if each["legend"] == group["legend"]]
            mine = [each for each in mine if each[error] is not None]
            spread = [((i * 0.618034) % 1 - 0.5) * _SPREAD for i in range(len(mine))]
            at = [layer["bits"] + aside for layer, aside in zip(mine, spread, strict=True)]
            errors = [100 * layer[error] for layer in mine]
            series.append(Points(at, errors, label=group["legend"], color=color))
        ticks = {each: f"{each:g}" for each in used}
        x = Scale("bits per weight", used[0] - 0.2, used[-1] + 0.2, ticks=ticks)
        panels.append(Panel(series, x=x, y=Scale(f"{ERRORS[error]}, %", grid=True)))
    return panels


def scales(data: Data) -> list[Panel]:
    """Return a histogram of the block scales of each format, on a logarithmic axis."""
    panels = []
    for row in data["scales"]:
        counts = [each for each in row["counts"] if each["value"] > 0]
        at = [math.log2(each["value"]) for each in counts] or [0.0]
        gaps = [b - a for a, b in itertools.pairwise(at)]
        shares = [100 * each["share"] for each in counts] or [0.0]
        powers = charts.whole_numbers(at[0] - 1, at[-1] + 1)
        ticks = {power: f"2{str(power).translate(_SUPERSCRIPT)}" for power in powers}
        panels.append(
            Panel(
                [Bars(at, shares, width=0.8 * min([1.0, *gaps]))],
                title=f"{row['format']}, scales in {row['scale']}",
                x=Scale("block scale as stored", ticks=ticks),
                y=Scale("blocks, %", grid=True),
            )
        )
    return panels


def offsets(data: Data) -> list[Panel]:
    """Return a histogram for each format and method of how far scales are from naive ones."""
    panels = []
    for row in data["offsets"]:
        low, high = (end(each["offset"] for each in row["counts"]) for end in (min, max))
        low, high = min(low, -4), max(high, 4)
        series = []
        for color, is_naive in enumerate((True, False)):
            mine = [each for each in row["counts"] if (each["offset"] == 0) == is_naive]
            at = [each["offset"] for each in mine]
            series.append(Bars(at, [100 * each["share"] for each in mine], color=color))
        x = Scale(
            "steps from the naive scale, larger scales to the right",
            low - 0.6,
            high + 0.6,
            ticks={each: f"{each:+d}" for each in charts.whole_numbers(low, high)} | {0: "0"},
        )
        title = ", ".join(filter(None, (row["format"], row["method"])))
        panels.append(Panel(series, title=title, x=x, y=Scale("blocks, %", grid=True)))
    return panels


def perplexity(data: Data) -> list[Panel]:
    """Return a chart for each text and measure: values with their intervals."""
    rows = data["evaluations"]
    names = [f", {row['text'].rpartition('/')[2]}" if len(rows) > 1 else "" for row in rows]
    return [panel for row, name in zip(rows, names, strict=True) for panel in _measures(row, name)]


def _measures(row: Data, name: str) -> list[Panel]:
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
        _whiskers(
            f"{title}{name}", {labels[key]: known[key] for key in labels if key in known}, zero
        )
        for title, labels, zero in drawn
        if labels.keys() & known.keys()
    ]


def _whiskers(title: str, values: Mapping[str, Sequence[float | None]], zero: bool) -> Panel:
    """Draw values and their intervals one below the other."""
    series: list[Points] = []
    names = [f"{label}\n{value:.5g}" for label, (value, *_) in values.items()]
    for place, (value, low, high) in enumerate(values.values()):
        ends = [] if low is None or high is None else [(low, high)]
        series.append(Points([value or 0.0], [place], color=place, marker="o", x_ends=ends))
    if zero:
        line = [-0.5, len(names) - 0.5]
        series.append(Points([0, 0], line, color=GRAY, marker="", line="--"))
    return Panel(series, title=title, categories=names, height=1.0 + 0.4 * len(names))


FIGURES: dict[str, Callable[[Data], list[Panel]]] = {
    "layers": layers,
    "bits": bits,
    "scales": scales,
    "offsets": offsets,
    "perplexity": perplexity,
}


def _known(data: Data) -> list[str]:
    return [error for error in ERRORS if data["ranges"][error]]


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
