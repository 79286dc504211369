"""Draw charts with matplotlib, for the report page, its PNG files and the scripts of eval/.

A chart is a `Panel` of series, a picture a grid of panels. Nothing else imports matplotlib.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "hatch.color": "#b0b0b0",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    # Text stays text: small, and found by a search in the page.
    "svg.fonttype": "none",
}
# Colors that nothing else has, and what they become in a page: its own, in the light or the dark.
_INK, _PAPER, _SHADE = "#010203", "#fdfefc", "#f4f4f4"
_OF_PAGE = {
    _INK: "var(--ink)",
    _PAPER: "var(--card)",
    _SHADE: "var(--shade)",
    "#dddddd": "var(--line)",
    "#b0b0b0": "var(--hatch)",
    # Too dark for thin lines on a dark page.
    COLORS[0].lower(): "var(--first)",
}
_PAGE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.edgecolor", "legend.labelcolor"), _INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), _PAPER),
}
# As the page writes them beside its charts.
PAGE_COLORS = [_OF_PAGE.get(color.lower(), color) for color in COLORS]
_DPI = 110
# Inches above and below the panels of a grid.
_TITLE, _LEGEND = 0.3, 0.25

# The colors of a heat map span at least this share of its middle: errors that are closer to each
# other, as those of one method in all layers of a model, get nearly one color.
_LEAST_RANGE = 0.2
# The widest heat map whose cells have room for their numbers.
NUMBERED = 40


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
class Cells:
    """A heat map with its color bar."""

    values: Sequence[Sequence[float | None]]  # from the top; nan is empty, None is hatched
    ends: tuple[float, float]  # the smallest and the largest number that colors tell apart
    label: str = ""  # name of the color bar
    hatched: str = ""  # what hatched cells are called in the legend


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

    series: Sequence[Points | Bars | Cells]  # the first below the others
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
    with _style({}):
        figure = _draw(grid, title, columns, **shared)
        figure.savefig(file, format="png", dpi=_DPI)
    # A palette makes the file a third as large.
    image = Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(path, "png", optimize=True)


def svg(panel: Panel, salt: str) -> str:
    """Return a panel as an SVG element for a page, whose colors it takes from variables of CSS.

    `salt` makes its ids those of no other picture.
    """
    text = io.StringIO()
    with _style({"svg.hashsalt": salt, **_PAGE}):
        figure = _draw([[panel]], "", 2)
        unwanted = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=unwanted)
    ((box, body),) = re.findall(r'<svg[^>]*(viewBox="[^"]*")[^>]*>(.*)', text.getvalue(), re.S)
    # Names such as axes_1 occur in every picture, and nothing refers to them.
    body = re.sub(r' id="[^"]*_\d{1,4}"', "", body)
    for color, variable in _OF_PAGE.items():
        body = body.replace(color, variable)
    # It shrinks on a narrow screen as far as its text can be read, and grows on a wide one.
    size = f"width: {panel.width:g}in; max-width: max(100%, {0.7 * panel.width:.2f}in)"
    size += f"; min-width: min(100%, {1.25 * panel.width:.2f}in)"
    return f'<svg role="img" {box} style="{size}">{body.strip()}'


def arrange(panels: Sequence[Panel], across: int) -> list[list[Panel | None]]:
    """Return rows of `across` panels, the last filled up with empty places."""
    across = min(across, len(panels))
    filled: list[Panel | None] = [*panels, *[None] * (-len(panels) % across)]
    return [filled[i : i + across] for i in range(0, len(filled), across)]


def whole_numbers(low: float, high: float, most: int = 9) -> list[int]:
    """Return at most `most` whole numbers from `low` to `high`, evenly apart, with 0 among them."""
    first, last = math.ceil(low), math.floor(high)
    step = max(1, math.ceil((last - first + 1) / most))
    return [value for value in range(first, last + 1) if value % step == 0]


def _style(more: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Draw in our style, whatever the user's is."""
    import matplotlib.style

    return matplotlib.style.context(["default", {**_STYLE, **more}])


def _draw(
    grid: Sequence[Sequence[Panel | None]], title: str, columns: int, **shared: Any
) -> Figure:
    """Draw a grid of panels, each row as high and each column as wide as its largest panel."""
    from matplotlib.figure import Figure

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


def _draw_cells(axes: Axes, series: Cells) -> None:
    from matplotlib.patches import Rectangle

    low, high = _color_ends(*series.ends)
    numbers = [[math.nan if value is None else value for value in row] for row in series.values]
    mesh = axes.pcolormesh(numbers, cmap="cividis", vmin=low, vmax=high)
    for y, row in enumerate(series.values):
        for x, value in enumerate(row):
            if value is None:
                hatched: Any = {"hatch": "////", "label": series.hatched}
                hatched["facecolor"] = axes.get_facecolor()
                axes.add_patch(Rectangle((x, y), 1, 1, lw=0, **hatched))
            elif len(row) <= NUMBERED and not math.isnan(value):
                # Cividis goes from dark to bright.
                color = "white" if value < (low + high) / 2 else "black"
                number = f"{value:.2f}" if value < 9.995 else f"{value:.1f}"
                style: Any = {"ha": "center", "va": "center", "color": color, "fontsize": 7}
                axes.text(x + 0.5, y + 0.5, number, **style)
    axes.figure.colorbar(mesh, ax=axes, label=series.label, pad=0.01)


def _color_ends(low: float, high: float) -> tuple[float, float]:
    """Return the numbers of the first and the last color, at least `_LEAST_RANGE` apart."""
    middle = (low + high) / 2
    reach = max(high - low, _LEAST_RANGE * middle) / 2 or 1.0
    return middle - reach, middle + reach


_SERIES: dict[type, Any] = {Points: _draw_points, Bars: _draw_bars, Cells: _draw_cells}


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
        count, middle = len(panel.categories), 0.5 * isinstance(panel.series[0], Cells)
        axes.set_yticks([i + middle for i in range(count)], panel.categories)
        axes.set_ylim(count - 0.5 + middle, middle - 0.5)
        for shaded in range(0, 0 if middle else count, 2):
            axes.axhspan(shaded - 0.5, shaded + 0.5, color=_SHADE, zorder=0)
