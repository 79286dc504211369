"""Tables and a picture of what eval/layer_error.py measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Of Okabe and Ito: told apart by the colour-blind, too.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*<>hd"
LINES = ("-", "--", ":", "-.")

NOTE = """\
Errors are relative: of the weight, of the output on held-out tokens, and of the output when inputs
are quantized too. `predicted err` is the output error on calibration tokens if blocks of columns
were uncorrelated, which hessian minimizes. `scales moved` are blocks with another scale than
naive's, `offset` is how many steps above it: the mean over all blocks, and the range."""


def page(result: dict[str, Any]) -> str:
    """Everything as Markdown, aligned to be read as it is."""
    rows = result["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    layers = group_by(rows, "layer")
    parts = [
        f"# Errors of single layers: {result['model']}",
        f"Written by\n\n    {result['command']}",
        f"In {result['dtype']} on {result['device']} with torch.set_num_threads"
        f"({result['threads']}); {versions}.\nInputs: {result['inputs']}.",
        f"Means over {len(layers)} layers, and the sum of the times:"
        if len(layers) > 1
        else f"The layer {rows[0]['layer']}, {size(rows[0])}:",
        overview(rows),
        NOTE,
    ]
    if len(layers) > 1:
        parts += ["## Layers", "Weight / output / layer error in percent."]
        parts += [table_of_layers(part) for part in group_by(rows, "format", "block").values()]
    if result["sensitivity"]:
        parts += ["## One layer at a time", sensitivity_note(result["sensitivity"][0])]
        found = group_by(result["sensitivity"], "format", "block", "method")
        parts += [table_of_sensitivity(part) for part in found.values()]
    if result["left_out"]:
        parts += ["## Left out"]
        parts += [grid(("layer", "formats", "why"), (e.values() for e in result["left_out"]))]
    return "\n\n".join(parts)


def overview(rows: Sequence[Row]) -> str:
    """A line for each format, block and method."""
    header = ["format", "block", "method", "bits", "weight err", "predicted err", "output err"]
    header += ["layer err", "scales moved", "offset", "search"]
    lines = []
    for (fmt, block, method), part in group_by(rows, "format", "block", "method").items():
        keys = ("weight_error", "predicted_error", "output_error", "w4a4_error")
        errors = [percent(mean(row[key] for row in part)) for key in keys]
        bits = sum(row["bits"] * weights(row) for row in part) / sum(map(weights, part))
        seconds = duration(sum(row["seconds"] for row in part))
        lines.append([fmt, block, method, f"{bits:.2f}", *errors, *moved(part), seconds])
    return grid(header, lines)


def moved(rows: Iterable[Row]) -> tuple[str, str]:
    """The share of blocks whose scale is not the naive one, and how far it is from that."""
    counts = offsets_of(rows)
    blocks = sum(counts.values())
    if not blocks:
        return "-", "-"
    average = sum(offset * count for offset, count in counts.items()) / blocks
    spread = f"{average:+.2f} ({min(counts):+d} to {max(counts):+d})" if any(counts) else "0"
    return percent(1 - counts[0] / blocks), spread


def offsets_of(rows: Iterable[Row]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update({int(offset): count for offset, count in row["offsets"].items()})
    return counts


def table_of_layers(rows: Sequence[Row]) -> str:
    """A line for each layer in one format."""
    methods = list(group_by(rows, "method"))
    lines = []
    for (name,), part in group_by(rows, "layer").items():
        errors = [[row[f"{key}_error"] for key in ("weight", "output", "w4a4")] for row in part]
        cells = [" / ".join(map(number, each)) for each in errors]
        lines.append([name, size(part[0]), *cells])
    names = [f"{rows[0]['format']}/{rows[0]['block']} {method}" for (method,) in methods]
    return grid(["layer", "N x K", *names], lines)


def sensitivity_note(row: Row) -> str:
    return (
        f"The perplexity of the original is {row['original']:.4f}, on {row['tokens']} tokens of "
        f"{row['units']} documents (windows, if the text is one).\nChange of it, and KL(original "
        "|| quantized) in nats per token, when one layer alone is quantized,\nwith 95 % intervals; "
        "* where that of the change leaves out 0."
    )


def table_of_sensitivity(rows: Sequence[Row]) -> str:
    """A line for each layer: float inputs, then 4-bit inputs."""
    lines = []
    for (name,), part in group_by(rows, "layer").items():
        cells = []
        for row in sorted(part, key=lambda row: not row["weight_only"]):
            cells += [change(row["perplexity_ratio"]), interval(row["kl"], row["kl_interval"])]
        lines.append([name, *cells])
    label = f"{rows[0]['format']}/{rows[0]['block']} {rows[0]['method']}"
    return grid([label, "W4A16 perplexity", "W4A16 KL", "W4A4 perplexity", "W4A4 KL"], lines)


def change(ratio: Row) -> str:
    def signed(value: float) -> str:
        return f"{100 * (value - 1):+.2f}"

    if ratio["significant"] is None:
        return f"{signed(ratio['value'])} %"
    star = "*" if ratio["significant"] else " "
    return f"{signed(ratio['value'])} % ({signed(ratio['low'])}, {signed(ratio['high'])}){star}"


def interval(value: float, ends: Sequence[float] | None) -> str:
    return f"{value:.5f}" + (f" ({ends[0]:.5f}, {ends[1]:.5f})" if ends else "")


def group_by(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that are alike in some keys, together, in the order of the first of each."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def grid(header: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    """A table of Markdown, aligned: names to the left, numbers to the right."""
    cells = [[str(cell) for cell in line] for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = [
        all(cell[0] in "+-.0123456789" for cell in column)
        for column in zip(*cells[1:], strict=True)
    ]
    ways = [str.rjust if number else str.ljust for number in numbers]
    cells.insert(1, ["-" * (w - n) + ":" * n for w, n in zip(widths, numbers, strict=True)])
    aligned = [[way(c, w) for c, w, way in zip(line, widths, ways, strict=True)] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in aligned)


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def weights(row: Row) -> int:
    return row["shape"][0] * row["shape"][1]


def size(row: Row) -> str:
    return " x ".join(map(str, row["shape"]))


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def number(value: float | None) -> str:
    return percent(value).removesuffix(" %")


def duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def plot(result: dict[str, Any], target: Path) -> None:
    """Errors against bits, for inputs in float and in 4 bits, and the offsets of the scales."""
    from matplotlib import pyplot as plt

    rows = result["rows"]
    formats = group_by(rows, "format", "block")
    methods = [method for (method,) in group_by(rows, "method")]
    lines = -(-len(formats) // 4)
    figure = plt.figure(figsize=(11, 4.5 + 3.5 * lines), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(4.5, 3.5 * lines))
    titles = {"output_error": "weights quantized", "w4a4_error": "weights and inputs quantized"}
    for axis, (key, title) in zip(top.subplots(1, 2), titles.items(), strict=True):
        plot_errors(axis, rows, key, methods)
        axis.set(title=title, xlabel="bits per weight, scales included")
        axis.set_ylabel("output error on held-out tokens, %")
    top.legend(handles=legend(rows, methods), loc="outside right upper", frameon=False)
    axes = bottom.subplots(lines, min(4, len(formats)), squeeze=False).flatten()
    for axis in axes[len(formats) :]:
        axis.set_axis_off()
    for axis, ((name, block), part) in zip(axes, formats.items(), strict=False):
        plot_offsets(axis, part, methods)
        axis.set(title=f"{name}, blocks of {block}")
    bottom.supxlabel("steps above the naive scale, where naive has all blocks at 0", fontsize=10)
    bottom.supylabel("blocks, %", fontsize=10)
    layers = len(group_by(rows, "layer"))
    figure.suptitle(f"{result['model']}, {layers} layer{'s' if layers > 1 else ''}")
    figure.savefig(target, dpi=130)
    plt.close(figure)


def style(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """The marker and the line of a format."""
    i = list(group_by(rows, "format")).index((name,))
    return {"marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i % len(LINES)]}


def legend(rows: Sequence[Row], methods: Sequence[str]) -> list[Any]:
    """Colours of methods, then markers and lines of formats."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = [name for (name,) in group_by(rows, "format")]
    patches = [Patch(color=color(methods, method), label=method) for method in methods]
    return patches + [Line2D([], [], color="0.4", label=n, **style(rows, n)) for n in names]


def color(methods: Sequence[str], method: str) -> str:
    return COLORS[methods.index(method) % len(COLORS)]


def plot_errors(axis: Any, rows: Sequence[Row], key: str, methods: Sequence[str]) -> None:
    """A point for each format, block and method; blocks of one format are joined."""
    for (name, method), found in group_by(rows, "format", "method").items():
        points = sorted(
            (mean(r["bits"] for r in each), 100 * (mean(r[key] for r in each) or 0.0))
            for each in group_by(found, "block").values()
        )
        # Side by side where bits are equal.
        shift = 0.006 * (methods.index(method) - (len(methods) - 1) / 2)
        axis.plot(
            [bits + shift for bits, _ in points],
            [error for _, error in points],
            color=color(methods, method),
            **style(rows, name),
        )
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def plot_offsets(axis: Any, rows: Sequence[Row], methods: Sequence[str]) -> None:
    """Bars beside each other: the share of blocks at each offset, by method but naive."""
    searched = [method for method in methods if any(offsets_of(of(rows, method)).keys() - {0})]
    shown = [offset for method in searched for offset in offsets_of(of(rows, method))]
    width = 0.8 / max(1, len(searched))
    for i, method in enumerate(searched):
        counts = offsets_of(of(rows, method))
        places = [offset + (i - (len(searched) - 1) / 2) * width for offset in counts]
        heights = [100 * count / sum(counts.values()) for count in counts.values()]
        axis.bar(places, heights, width=width, color=color(methods, method))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    if shown:
        axis.set_xlim(min(shown) - 0.7, max(shown) + 0.7)


def of(rows: Iterable[Row], method: str) -> list[Row]:
    return [row for row in rows if row["method"] == method]
