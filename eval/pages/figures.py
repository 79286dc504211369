"""The pictures of docs/results.md and docs/peers.md, as panels of charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.charts import MARKERS, Panel, Points, Scale, write_png
from eval.pages.tables import ends, format_of, unique

Found = Mapping[str, Any]
Row = Mapping[str, Any]

INPUTS = {True: "weights only", False: "weights and inputs"}

# Between the largest and the smallest value; beyond it an axis from zero shows no differences.
WIDE = 20


def draw_results(found: Found, folder: Path, stem: str) -> None:
    """Draw KL and its interval by method: formats below each other, texts beside.

    Args:
        found: the results of a model.
        folder: where the picture goes.
        stem: of the file of results, after which the picture is named.
    """
    rows = found["rows"]
    values = [text["kl"]["value"] for row in rows for text in row["texts"].values()]
    log = max(values) > WIDE * min(values)
    label = "KL to the original, nats per token"
    scale = Scale(f"{label}, log scale", log=True, grid=True)
    scale = scale if log else Scale(label, low=0, grid=True)
    formats = list(dict.fromkeys(map(format_of, rows)))
    grid = []
    for weight_only, inputs in INPUTS.items():
        here = [row for row in rows if row["weight_only"] == weight_only]
        line = []
        for text, about in found["texts"].items():
            measured = [row["texts"][text]["kl"] for row in here]
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


def draw_peers(found: Found, path: Path) -> None:
    """Draw KL against seconds: a series for each library, a panel for each format and text."""
    panels: list[Panel | None] = []
    finished = [row for row in found["rows"] if "failed" not in row]
    libraries = unique(finished, "library")
    for fmt in unique(finished, "format"):
        for text, about in found["texts"].items():
            here = [row for row in finished if row["format"] == fmt]
            series = []
            for which, library in enumerate(libraries):
                rows = [row for row in here if row["library"] == library]
                values = [row["W4A16"][text]["kl"] for row in rows]
                x, y = [row["cpu_seconds"] for row in rows], [value["value"] for value in values]
                series.append(Points(x, y, label=library, color=which, marker=MARKERS[which]))
            x, y = Scale("CPU seconds", log=True, grid=True), Scale("KL", low=0, grid=True)
            title = f"{fmt}, {INPUTS[True]}, {about['file']}"
            panels.append(Panel(series, title=title, x=x, y=y, width=5, height=4))
    # Two in a row, which are read in the column of a page.
    panels += [None] * (len(panels) % 2)
    grid = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    write_png(grid, path, title=f"{found['model']}: KL to the original, nats per token")
