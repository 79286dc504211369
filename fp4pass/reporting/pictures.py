"""The charts of a page as PNG files, for slides and papers, by matplotlib."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .facts import ERRORS
from .shapes import short_names

_NAMES = {"weight_error": "weight error", "output_error": "output error"}

# Of Okabe and Ito, which people who see fewer colours tell apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SYMBOLS = "osD^vP"


def _has_errors(data: Mapping[str, Any]) -> bool:
    return any(data["ranges"][name] for name in ERRORS)


# Each with whether there are numbers for it.
PICTURES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "layers": lambda data: bool(data["maps"]) and _has_errors(data),
    "bits": _has_errors,
    "scales": lambda data: bool(data["scales"]),
    "offsets": lambda data: bool(data["offsets"]),
    "perplexity": lambda data: bool(data["evaluations"]),
}


def require_matplotlib() -> None:
    """Raise OptionError if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            "Pictures need matplotlib: pip install 'fp4pass[docs]'. Or leave them out with "
            "pictures=False (--no-png)."
        )


def draw(data: Mapping[str, Any], name: str, path: Path) -> None:
    """Write one of the `PICTURES` to a file, whatever its name ends in."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
    }
    with plt.style.context(["default", style]):
        figure = Figure(layout="constrained")
        _DRAW[name](figure, data)
        # A file without the version of matplotlib is the same from the same numbers.
        figure.savefig(path, dpi=150, format="png", metadata={"Software": None})


def _axes(figure: Any, count: int, width: float, height: float, across: int = 2) -> list[Any]:
    """`count` charts, so many `across`, each of a size in inches."""
    columns = min(count, across)
    rows = math.ceil(count / columns)
    figure.set_size_inches(width * columns, height * rows)
    found = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in found[count:]:
        unused.remove()
    return found[:count]


def _known(data: Mapping[str, Any]) -> list[str]:
    return [name for name in ERRORS if data["ranges"][name]]


def _draw_layers(figure: Any, data: Mapping[str, Any]) -> None:
    """A heat map for each stack and error, depth to the right."""
    import numpy as np
    from matplotlib.patches import Patch

    errors, maps = _known(data), data["maps"]
    depths = max(len(each["depths"]) for each in maps)
    projections = max(len(each["projections"]) for each in maps)
    cells = min(max(0.17 * depths, 4.0), 16.0)
    size = (cells + 2.2, 0.26 * min(projections, 40) + 1.0)
    axes = _axes(figure, len(maps) * len(errors), *size, across=1)
    any_left = False
    for each, error in ((each, error) for each in maps for error in errors):
        axis = axes.pop(0)
        table = [
            [math.nan if cell is None else _percent(cell[error]) for cell in row]
            for row in each["cells"]
        ]
        low, high = (100 * end for end in data["ranges"][error])
        image = axis.imshow(
            np.array(table).T, aspect="auto", cmap="cividis", vmin=low, vmax=max(high, low + 1e-9)
        )
        for column, row in enumerate(each["cells"]):
            for line, cell in enumerate(row):
                if cell is not None and not cell["converted"]:
                    any_left = True
                    axis.add_patch(_hatched((column - 0.5, line - 0.5)))
        step = max(1, math.ceil(depths / 30))
        shown = range(0, len(each["depths"]), step)
        axis.set_xticks(list(shown), [str(each["depths"][i]) for i in shown])
        axis.set_yticks(range(len(each["projections"])), short_names(each["projections"]))
        axis.set_xlabel("depth")
        stack = f"{each['stack']}: " if len(maps) > 1 else ""
        axis.set_title(f"{stack}{_NAMES[error]}")
        figure.colorbar(image, ax=axis, label="%", pad=0.01)
    if any_left:
        patch = Patch(facecolor="white", edgecolor="0.6", hatch="////", label="left alone")
        figure.legend(handles=[patch], loc="outside lower right", frameon=False)


def _hatched(corner: tuple[float, float]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, facecolor="white", edgecolor="0.6", hatch="////", lw=0)


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value


def _draw_bits(figure: Any, data: Mapping[str, Any]) -> None:
    errors = _known(data)
    labels = [group["label"] for group in data["groups"]]
    for axis, error in zip(_axes(figure, len(errors), 4.6, 3.6), errors, strict=True):
        for number, label in enumerate(labels):
            layers = [
                layer
                for layer in data["layers"]
                if layer["label"] == label and layer[error] is not None
            ]
            # Spread, for layers of one format have the same bits.
            spread = [((i * 0.618034) % 1 - 0.5) * 0.12 for i in range(len(layers))]
            axis.plot(
                [layer["bits"] + each for layer, each in zip(layers, spread, strict=True)],
                [100 * layer[error] for layer in layers],
                _SYMBOLS[number % len(_SYMBOLS)],
                color=_COLOURS[number % len(_COLOURS)],
                alpha=0.7,
                markersize=4.5,
                markeredgewidth=0,
                label=label,
            )
        used = sorted({group["bits"] for group in data["groups"]})
        axis.set_xticks(used, [f"{bits:g}" for bits in used])
        axis.set_xlim(used[0] - 0.2, used[-1] + 0.2)
        axis.margins(y=0.08)
        axis.set_xlabel("bits per weight")
        axis.set_ylabel(f"{_NAMES[error]}, %")
        axis.grid(axis="y", color="0.9")
        axis.set_axisbelow(True)
    handles, names = axis.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)


def _draw_scales(figure: Any, data: Mapping[str, Any]) -> None:
    rows = data["scales"]
    for axis, row in zip(_axes(figure, len(rows), 5.0, 3.0), rows, strict=True):
        counts = [each for each in row["counts"] if each["value"] > 0]
        exponents = [math.log2(each["value"]) for each in counts]
        gaps = [b - a for a, b in itertools.pairwise(exponents)]
        shares = [100 * each["share"] for each in counts]
        axis.bar(exponents, shares, width=0.8 * min([1.0, *gaps]), color=_COLOURS[0])
        axis.xaxis.set_major_locator(_whole_numbers())
        axis.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
        axis.set_title(f"{row['format']}, scales in {row['scale']}")
        axis.set_xlabel("block scale as stored")
        axis.set_ylabel("% of blocks")


def _draw_offsets(figure: Any, data: Mapping[str, Any]) -> None:
    rows = data["offsets"]
    for axis, row in zip(_axes(figure, len(rows), 5.0, 3.0), rows, strict=True):
        found = [each["offset"] for each in row["counts"]]
        colours = [_COLOURS[int(offset != 0)] for offset in found]
        axis.bar(found, [100 * each["share"] for each in row["counts"]], color=colours)
        axis.set_xlim(min([*found, -4]) - 0.6, max([*found, 4]) + 0.6)
        axis.xaxis.set_major_locator(_whole_numbers())
        axis.set_title(", ".join(filter(None, (row["format"], row["method"]))))
        axis.set_xlabel("steps from naive's scale, to larger ones on the right")
        axis.set_ylabel("% of blocks")


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _draw_perplexity(figure: Any, data: Mapping[str, Any]) -> None:
    rows: Sequence[Mapping[str, Any]] = data["evaluations"]
    for axis, row in zip(_axes(figure, len(rows), 5.2, 2.0, across=1), rows, strict=True):
        found = [("quantized", row["perplexity"], row["intervals"].get("perplexity"))]
        if row.get("reference_perplexity") is not None:
            ends = row.get("reference_intervals", {}).get("perplexity")
            found.append(("original", row["reference_perplexity"], ends))
        for place, (_, value, ends) in enumerate(found):
            colour = _COLOURS[place]
            if ends is not None:
                sides = [[value - ends[0]], [ends[1] - value]]
                axis.errorbar(value, place, xerr=sides, capsize=4, color=colour)
            axis.plot(value, place, "o", color=colour)
            axis.annotate(
                f"{value:.4f}", (value, place), (0, 7), textcoords="offset points", ha="center"
            )
        axis.set_yticks(range(len(found)), [label for label, *_ in found])
        axis.set_ylim(len(found) - 0.4, -0.7)
        axis.set_xlabel("perplexity")
        axis.set_title(row["text"].rpartition("/")[2])


_DRAW: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "layers": _draw_layers,
    "bits": _draw_bits,
    "scales": _draw_scales,
    "offsets": _draw_offsets,
    "perplexity": _draw_perplexity,
}
