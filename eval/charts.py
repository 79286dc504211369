"""Draw charts with matplotlib: a chart is a `Panel` of series, a picture a grid of panels."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The palette of Okabe and Ito, which readers who see fewer colors can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
GRAY, BLACK = "#8c8c8c", "black"

_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}
_SHADE = "#f4f4f4"
_DPI = 110
# Inches above and below the panels of a grid.
_TITLE, _LEGEND = 0.3, 0.25


@dataclass(frozen=True)
class Points:
    """A series of points, joined by a line or not."""

    x: Sequence[float]  # nan interrupts the line
    y: Sequence[float]  # upwards, or the index of a category of the panel
    label: str = ""  # name in the legend
    color: int | str = 0  # index into COLORS, repeated, or a color of matplotlib
    marker: str | None = None  # "" for none; by default that of the color's index
    line: str = ""  # line style of matplotlib
    hollow: bool = False  # whether markers are outlines only
    x_ends: Sequence[tuple[float, float]] = ()  # (low, high) of each point, drawn as a whisker
    y_ends: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Bars:
    """A series of bars."""

    at: Sequence[float]  # centers, across the bars
    lengths: Sequence[float]
    label: str = ""  # name in the legend
    color: int | str = 0  # as for Points
    width: float = 0.8  # of each bar, in the unit of `at`
    texts: Sequence[str] = ()  # at the end of each bar
    horizontal: bool = False  # whether bars grow to the right


@dataclass(frozen=True)
class Scale:
    """One axis of a panel."""

    label: str = ""  # name and unit
    # Limits, and texts of ticks by their places; None to let matplotlib choose.
    low: float | None = None
    high: float | None = None
    ticks: Mapping[float, str] | Mapping[int, str] | None = None
    log: bool = False
    grid: bool = False  # whether lines behind the series mark the ticks


@dataclass(frozen=True)
class Panel:
    """One pair of axes and what is drawn on it."""

    series: Sequence[Points | Bars]  # the first below the others
    title: str = ""
    x: Scale = Scale()
    y: Scale = Scale()
    categories: Sequence[str] = ()  # names of y = 0, 1, ... from the top, in place of numbers
    width: float = 4.6  # inches, with labels
    height: float = 3.0


def write_png(
    grid: Sequence[Sequence[Panel | None]],
    path: Path,
    *,
    title: str = "",
    columns: int = 6,
    **shared: str,
) -> None:
    """Write a grid of panels, rows of equal length, as a PNG: the same bytes for the same panels.

    The legend, of so many columns, names every label once. `shared` is `sharex` and `sharey`.
    """
    from PIL import Image

    file = io.BytesIO()
    with _style():
        figure = _draw(grid, title, columns, **shared)
        figure.savefig(file, format="png", dpi=_DPI)
    # A palette makes the file a third as large.
    image = Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(path, "png", optimize=True)


def arrange(panels: Sequence[Panel], across: int) -> list[list[Panel | None]]:
    """Return rows of `across` panels, the last filled up with empty places."""
    across = min(across, len(panels))
    filled: list[Panel | None] = [*panels, *[None] * (-len(panels) % across)]
    return [filled[i : i + across] for i in range(0, len(filled), across)]


def _style() -> AbstractContextManager[None]:
    """Draw in our style, whatever the user's is."""
    import matplotlib.style

    return matplotlib.style.context(["default", _STYLE])


def _draw(
    grid: Sequence[Sequence[Panel | None]], title: str, columns: int, **shared: Any
) -> Figure:
    """Draw a grid of panels, each row as high and each column as wide as its largest panel."""
    widths = [max(panel.width for panel in column if panel) for column in zip(*grid, strict=True)]
    heights = [max(panel.height for panel in row if panel) for row in grid]
    figure = Figure(layout="constrained")
    shared |= {"squeeze": False, "width_ratios": widths, "height_ratios": heights}
    places = figure.subplots(len(heights), len(widths), **shared).flatten()
    panels = list(zip(places, itertools.chain(*grid), strict=True))
    legend: dict[str, Any] = {}
    for axes, panel in panels:
        if panel is None:
            axes.set_axis_off()
            continue
        for series in panel.series:
            _SERIES[type(series)](axes, series)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    # Limits stop an axis from growing with what is drawn on those that it is shared with.
    for axes, panel in panels:
        if panel is not None:
            _finish(axes, panel)
    outside = _TITLE * bool(title) + _LEGEND * math.ceil(len(legend) / columns)
    figure.set_size_inches(sum(widths), sum(heights) + outside)
    if title:
        figure.suptitle(title, fontsize=10)
    if legend:
        place: Any = {"loc": "outside lower center", "ncols": min(columns, len(legend))}
        figure.legend(list(legend.values()), list(legend), **place)
    return figure


def _draw_points(axes: Axes, series: Points) -> None:
    color = _color(series.color)
    for y, ends in zip(series.y, series.x_ends, strict=bool(series.x_ends)):
        axes.plot(ends, [y, y], color=color)
    for x, ends in zip(series.x, series.y_ends, strict=bool(series.y_ends)):
        axes.plot([x, x], ends, color=color)
    marker = series.marker
    if marker is None and isinstance(series.color, int):
        marker = MARKERS[series.color % len(MARKERS)]
    axes.plot(
        series.x,
        series.y,
        color=color,
        marker=marker or "none",
        markerfacecolor=axes.get_facecolor() if series.hollow else color,
        linestyle=series.line or "none",
        label=series.label,
        zorder=3,
    )


def _draw_bars(axes: Axes, series: Bars) -> None:
    draw = axes.barh if series.horizontal else axes.bar
    style: Any = {"color": _color(series.color), "label": series.label}
    bars = draw(series.at, series.lengths, series.width, **style)
    if series.texts:
        axes.bar_label(bars, series.texts, padding=3, fontsize=8)
        axes.margins(x=0.12) if series.horizontal else axes.margins(y=0.12)


_SERIES: dict[type, Any] = {Points: _draw_points, Bars: _draw_bars}


def _color(color: int | str) -> str:
    return COLORS[color % len(COLORS)] if isinstance(color, int) else color


def _finish(axes: Axes, panel: Panel) -> None:
    """Name and cut the axes of a panel on which everything is drawn."""
    from matplotlib.ticker import NullFormatter

    axes.set_title(panel.title)
    for name, scale, axis in (("x", panel.x, axes.xaxis), ("y", panel.y, axes.yaxis)):
        axis.set_label_text(scale.label)
        if scale.log:
            axes.set(**{f"{name}scale": "log"})
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        if scale.ticks is not None:
            axis.set_ticks(list(scale.ticks), list(scale.ticks.values()))
            axis.set_ticks([], minor=True)
        axes.set(**{f"{name}lim": (scale.low, scale.high)})
        axis.grid(scale.grid)
    if panel.categories:
        count = len(panel.categories)
        axes.set_yticks(range(count), panel.categories)
        axes.set_ylim(count - 0.5, -0.5)
        for shaded in range(0, count, 2):
            axes.axhspan(shaded - 0.5, shaded + 0.5, color=_SHADE, zorder=0)
