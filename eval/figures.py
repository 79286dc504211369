"""The pictures of docs/results.md, docs/steps.md and eval/layer_error.py, as panels of charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import ends, format_of, group_by, mean, same, unique

from fp4pass.reporting.charts import (
    GRAY,
    MARKERS,
    Bars,
    Panel,
    Points,
    Scale,
    arrange,
    whole_numbers,
    write_png,
)

Found = Mapping[str, Any]
Row = Mapping[str, Any]

INPUTS = {True: "weights only", False: "weights and inputs"}

# Between the largest and the smallest value; beyond it an axis from zero shows no differences.
WIDE = 20

# Between intervals beside each other on a logarithmic axis of tokens.
APART = 1.08

LINES = ("-", "--", ":", "-.")


# ---- docs/results.md --------------------------------------------------------------------------


def draw_results(found: Found, folder: Path, stem: str) -> None:
    """Write the pictures of one file of results, named after it."""
    if "errors" in found["rows"][0]:
        by_method(found, lambda text: flipped(text["cosine"]), "1 - cosine", folder, stem)
        over_depth(found, folder / f"results-{stem}-layers.png")
    else:
        label = "KL to the original, nats per token"
        by_method(found, lambda text: text["kl"], label, folder, stem)
        if found["layers"]:
            over_depth(by_layer(found), folder / f"results-{stem}-layers.png")


def by_layer(found: Found) -> dict[str, Any]:
    """Return the errors that eval/layer_error.py found, as rows in the order of the methods."""
    rows = []
    for row in found["rows"]:
        key = "output_error" if row["weight_only"] else "w4a4_error"
        errors = {
            each["layer"]: {"layer": each[key]}
            for each in found["layers"]["rows"]
            if same(row, each, "format", "block", "method")
        }
        if errors:
            rows.append({**row, "errors": errors})
    return {"model": found["model"], "rows": rows}


def flipped(value: Mapping[str, float]) -> dict[str, float]:
    """Return the distance from one, so that less is better, as it is for KL."""
    return {"value": 1 - value["value"], "low": 1 - value["high"], "high": 1 - value["low"]}


def by_method(
    found: Found, measure: Callable[[Row], Row], label: str, folder: Path, stem: str
) -> None:
    """Draw a value and its interval by method: formats below each other, texts beside.

    Args:
        found: the results of a model.
        measure: the value and its interval, of what was measured on a text.
        label: name and unit of the value.
        folder: where the picture goes.
        stem: of the file of results.
    """
    rows = found["rows"]
    values = [measure(text)["value"] for row in rows for text in row["texts"].values()]
    log = max(values) > WIDE * min(values)
    scale = Scale(f"{label}, log scale", log=True, grid=True)
    scale = scale if log else Scale(label, low=0, grid=True)
    formats = list(dict.fromkeys(map(format_of, rows)))
    grid = []
    for weight_only, inputs in INPUTS.items():
        here = [row for row in rows if row["weight_only"] == weight_only]
        line = []
        for text, about in found["texts"].items():
            measured = [measure(row["texts"][text]) for row in here]
            line.append(
                Panel(
                    dots(here, measured, unique(rows, "method"), formats),
                    title=f"{inputs}, {about['file']}",
                    x=scale,
                    categories=formats,
                    height=0.7 + 0.45 * len(formats),
                )
            )
        grid.append(line)
    title = f"{found['model']}: bars are {found['confidence']:.0%} intervals"
    write_png(grid, folder / f"results-{stem}.png", title=title, sharex="row", sharey="all")


def dots(
    rows: Sequence[Row], values: Sequence[Row], methods: list[str], formats: list[str]
) -> list[Points]:
    """A series for each method, a little above each other at the place of the format."""
    series = []
    step = 0.6 / max(1, len(methods) - 1)
    for which, method in enumerate(methods):
        mine = [pair for pair in zip(rows, values, strict=True) if pair[0]["method"] == method]
        x = [value["value"] for _, value in mine]
        y = [formats.index(format_of(row)) - 0.3 + which * step for row, _ in mine]
        whiskers = [ends(value) for _, value in mine]
        series.append(Points(x, y, label=method, color=which, x_ends=whiskers))
    return series


def over_depth(found: Found, path: Path) -> None:
    """Draw the error of each linear layer over the depth, in the first format."""
    first = found["rows"][0]
    rows = [row for row in found["rows"] if same(row, first, "format", "block")]
    places = {name: place(name) for name in first["errors"]}
    parts = list(dict.fromkeys(part for depth, part in places.values() if depth is not None))
    depths = [depth for depth, _ in places.values() if depth is not None]
    ticks = {each: str(each) for each in whole_numbers(min(depths), max(depths), most=6)}
    methods = unique(found["rows"], "method")
    grid = []
    for weight_only, title in INPUTS.items():
        line = []
        for part in parts:
            series = []
            for row in rows:
                if row["weight_only"] == weight_only:
                    mine = [name for name in row["errors"] if places[name][1] == part]
                    errors = [100 * row["errors"][name]["layer"] for name in mine]
                    x = [places[name][0] for name in mine]
                    color = methods.index(row["method"])
                    series.append(Points(x, errors, label=row["method"], color=color, line="-"))
            line.append(
                Panel(
                    series,
                    title="" if grid else part.replace("attention.", "attention\n"),
                    x=Scale("layer" if grid else "", ticks=ticks, grid=True),
                    y=Scale(f"output error, %\n{title}" if not line else "", low=0, grid=True),
                    width=2.1,
                    height=2.4,
                )
            )
        grid.append(line)
    title = f"{found['model']}, {format_of(first)}"
    write_png(grid, path, title=title, sharex="all", sharey="row")


def place(name: str) -> tuple[int | None, str]:
    """Return the number of the layer in a name, and what the linear layer is called in it."""
    words = name.split(".")
    at = next((i for i, word in enumerate(words) if word.isdecimal()), None)
    return (None, name) if at is None else (int(words[at]), ".".join(words[at + 1 :]))


# ---- docs/steps.md ----------------------------------------------------------------------------


def draw_steps(found: Found, folder: Path, stem: str, outcome: Callable[[Row, str], str]) -> None:
    """Write the pictures of one file of results, named after it.

    Args:
        found: the results of a model.
        folder: where the pictures go.
        stem: of the file of results.
        outcome: of a row and a text, "better" if the step helps, "" if it is compared with none.
    """
    by_step(found, folder / f"steps-{stem}.png", outcome)
    if any("sweep" in row for row in found["rows"]):
        sweep(found, folder / f"steps-{stem}-sweep.png")


def by_step(found: Found, path: Path, outcome: Callable[[Row, str], str]) -> None:
    """Draw KL and its interval by step: formats beside each other, kinds of inputs below."""
    rows = [row for row in found["rows"] if "sweep" not in row]
    grid: list[list[Panel | None]] = []
    kinds = [only for only in INPUTS if any(row["weight_only"] == only for row in rows)]
    for only in kinds:
        label = "KL to the original, nats per token" if only == kinds[-1] else ""
        line: list[Panel | None] = []
        for fmt in unique(rows, "format"):
            here = [row for row in rows if (row["weight_only"], row["format"]) == (only, fmt)]
            panel = Panel(
                steps_series(found["texts"], here, outcome),
                title=f"{fmt}, {INPUTS[only]}",
                x=Scale(label, low=0, grid=True),
                categories=[row["method"] for row in here],
                width=5.6,
                height=0.7 + 0.36 * len(here),
            )
            line.append(panel if here else None)
        grid.append(line)
    confidence = f"{found['model']}: bars are {found['confidence']:.0%} intervals"
    title = f"{confidence}, hollow marks are steps that do not help"
    write_png(grid, path, title=title, sharex="row")


def steps_series(
    texts: Found, rows: Sequence[Row], outcome: Callable[[Row, str], str]
) -> list[Points]:
    """Two series for each text: steps that help, and hollow ones that do not."""
    series = []
    for which, (text, about) in enumerate(texts.items()):
        aside = (which - (len(texts) - 1) / 2) * 0.3
        for helps in (True, False):
            places = [
                i for i, r in enumerate(rows) if (outcome(r, text) in ("better", "")) == helps
            ]
            values = [rows[i]["texts"][text]["kl"] for i in places]
            series.append(
                Points(
                    [value["value"] for value in values],
                    [i + aside for i in places],
                    # The first step is compared with none, so some marks are filled.
                    label=about["file"] if helps else "",
                    color=which,
                    hollow=not helps,
                    x_ends=[*map(ends, values)],
                )
            )
    return series


def sweep(found: Found, path: Path) -> None:
    """Draw errors where it was calibrated and elsewhere, and KL, by tokens and damping."""
    rows = [row for row in found["rows"] if "sweep" in row]
    dampings = sorted({row["sweep"]["damping"] for row in rows})
    errors: list[Points] = []
    kl: dict[str, list[Points]] = {text: [] for text in found["texts"]}
    for which, damping in enumerate(dampings):
        here = [row for row in rows if row["sweep"]["damping"] == damping]
        tokens = [row["sweep"]["windows"] * found["window"] for row in here]
        label = f"damping {damping:g}"
        for key, line in (("output_error", "-"), ("calibrated_error", "--")):
            y = [100 * row[key] for row in here]
            errors.append(Points(tokens, y, label=label, color=which, line=line))
        aside = [each * APART ** (which - (len(dampings) - 1) / 2) for each in tokens]
        for text, series in kl.items():
            values = [row["texts"][text]["kl"] for row in here]
            y = [value["value"] for value in values]
            series.append(Points(aside, y, color=which, line="-", y_ends=[*map(ends, values)]))
    ticks = {row["sweep"]["windows"] * found["window"] for row in rows}
    x = Scale("calibration tokens", ticks={t: f"{t:,}" for t in sorted(ticks)}, log=True, grid=True)
    y = Scale(grid=True)
    title = "output error, %: held-out (solid),\non the calibration tokens (dashed)"
    panels = [Panel(errors, title=title, x=x, y=y, height=3.6)]
    for text, series in kl.items():
        title = f"KL to the original,\n{found['texts'][text]['file']}"
        panels.append(Panel(series, title=title, x=x, y=y, height=3.6))
    of = f"{found['model']}, gptq, {rows[0]['format']}, {INPUTS[rows[0]['weight_only']]}"
    write_png([panels], path, title=f"{of}: bars are {found['confidence']:.0%} intervals")


# ---- docs/peers.md ----------------------------------------------------------------------------


def draw_peers(found: Found, path: Path) -> None:
    """Draw KL against seconds: a series for each library, a panel for each format and text."""
    panels = []
    libraries = unique(found["rows"], "library")
    for fmt in unique(found["rows"], "format"):
        for text, about in found["texts"].items():
            here = [row for row in found["rows"] if row["format"] == fmt]
            series = []
            for which, library in enumerate(libraries):
                rows = [row for row in here if row["library"] == library]
                values = [row["W4A16"][text]["kl"] for row in rows]
                x, y = [row["cpu_seconds"] for row in rows], [value["value"] for value in values]
                series.append(Points(x, y, label=library, color=which, marker=MARKERS[which]))
            x, y = Scale("CPU seconds", log=True, grid=True), Scale("KL", low=0, grid=True)
            title = f"{fmt}, {INPUTS[True]}, {about['file']}"
            panels.append(Panel(series, title=title, x=x, y=y, width=5, height=4))
    write_png([panels], path, title=f"{found['model']}: KL to the original, nats per token")


# ---- eval/layer_error.py ----------------------------------------------------------------------


def draw_layer_errors(result: dict[str, Any], path: Path) -> None:
    """Draw errors against bits, for inputs in float and in 4 bits, and the offsets of scales."""
    rows = result["rows"]
    methods, formats = unique(rows, "method"), unique(rows, "format")
    styles = {
        name: {"marker": MARKERS[i % len(MARKERS)], "line": LINES[i % len(LINES)]}
        for i, name in enumerate(formats)
    }
    # The legend: colors of methods, then markers and lines of formats.
    legend = [Points([], [], label=m, color=i, marker="s") for i, m in enumerate(methods)]
    legend += [Points([], [], label=f, color=GRAY, **styles[f]) for f in formats]
    titles = {"output_error": "weights quantized", "w4a4_error": "weights and inputs quantized"}
    panels = []
    for key, title in titles.items():
        series = list(legend)
        for (name, method), found in group_by(rows, "format", "method").items():
            points = sorted(
                (mean(r["bits"] for r in each) or 0.0, 100 * (mean(r[key] for r in each) or 0.0))
                for each in group_by(found, "block").values()
            )
            which = methods.index(method)
            # Side by side where bits are equal.
            aside = 0.006 * (which - (len(methods) - 1) / 2)
            x, y = [bits + aside for bits, _ in points], [error for _, error in points]
            series.append(Points(x, y, color=which, **styles[name]))
        bits = Scale("bits per weight, scales included", grid=True)
        error = Scale("output error on held-out tokens, %", low=0, grid=True)
        panels.append(Panel(series, title=title, x=bits, y=error, width=5.5, height=3.8))
    for (name, block), found in group_by(rows, "format", "block").items():
        panels.append(offsets_panel(found, methods, f"{name}, blocks of {block}"))
    layers = len(unique(rows, "layer"))
    title = f"{result['model']}, {layers} layer{'s' if layers > 1 else ''}"
    write_png(arrange(panels, 2), path, title=title, columns=7)


def offsets_panel(rows: Sequence[Row], methods: list[str], title: str) -> Panel:
    """Bars beside each other: the share of blocks at each offset, by method but naive."""
    counts = {m: offsets_of(row for row in rows if row["method"] == m) for m in methods}
    searched = [method for method in methods if counts[method].keys() - {0}]
    width = 0.8 / max(1, len(searched))
    series = []
    for i, method in enumerate(searched):
        at = [offset + (i - (len(searched) - 1) / 2) * width for offset in counts[method]]
        shares = [100 * n / sum(counts[method].values()) for n in counts[method].values()]
        series.append(Bars(at, shares, color=methods.index(method), width=width))
    shown = [offset for method in searched for offset in counts[method]] or [0]
    low, high = min(shown) - 0.7, max(shown) + 0.7
    ticks = {each: str(each) for each in whole_numbers(low, high)}
    x = Scale("steps above the naive scale", low=low, high=high, ticks=ticks)
    return Panel(series, title=title, x=x, y=Scale("blocks, %", grid=True), height=1.9)


def offsets_of(rows: Iterable[Row]) -> Counter[int]:
    """Return how many blocks have a scale so many steps above the naive one."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update({int(offset): count for offset, count in row["offsets"].items()})
    return counts
