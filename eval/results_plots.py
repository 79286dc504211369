"""The pictures of docs/results.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator, NullFormatter

# Told apart without colour vision (Okabe and Ito), and by their shapes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
INPUTS = {True: "weights only", False: "weights and inputs"}

# Between the largest and the smallest value; beyond it an axis from zero shows no differences.
WIDE = 20

Found = Mapping[str, Any]


def draw(found: Found, folder: Path, stem: str) -> None:
    """The pictures of one file of results, named after it."""
    if "errors" in found["rows"][0]:
        dots(found, lambda text: flipped(text["cosine"]), "1 - cosine")
        save(folder / f"results-{stem}.png")
        layers(found)
        save(folder / f"results-{stem}-layers.png")
    else:
        dots(found, lambda text: text["kl"], "KL to the original, nats per token")
        save(folder / f"results-{stem}.png")
        if found["layers"]:
            layers(by_layer(found))
            save(folder / f"results-{stem}-layers.png")


def by_layer(found: Found) -> dict[str, Any]:
    """The errors that eval/layer_error.py found, as rows of the order in which methods stand."""
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


def save(path: Path) -> None:
    # Without a date or versions, so that the same results are the same file.
    plt.savefig(path, dpi=110, metadata={"Software": None})
    plt.close()


def flipped(value: Mapping[str, float]) -> dict[str, float]:
    """A distance from one, so that less is better as it is for KL."""
    return {"value": 1 - value["value"], "low": 1 - value["high"], "high": 1 - value["low"]}


def dots(found: Found, measure: Any, label: str) -> None:
    """A value and its interval by method: formats below each other, texts beside."""
    texts, methods = list(found["texts"]), unique(found, "method")
    rows = found["rows"]
    formats = list(dict.fromkeys((row["format"], row["block"]) for row in rows))
    values = [measure(text)["value"] for row in rows for text in row["texts"].values()]
    wide = max(values) > WIDE * min(values)
    figure, axes = plt.subplots(
        2,
        len(texts),
        figsize=(4.6 * len(texts) + 0.8, 1.6 + 2 * 0.45 * len(formats)),
        sharex="row",
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, (weight_only, title) in zip(axes, INPUTS.items(), strict=True):
        for axis, text in zip(line, texts, strict=True):
            for row in rows:
                if row["weight_only"] != weight_only:
                    continue
                which = methods.index(row["method"])
                value = measure(row["texts"][text])
                step = 0.6 / max(1, len(methods) - 1)
                place = formats.index((row["format"], row["block"])) - 0.3 + which * step
                low = value["value"] if value["low"] is None else value["low"]
                high = value["value"] if value["high"] is None else value["high"]
                axis.plot([low, high], [place] * 2, color=COLORS[which % 6], linewidth=1.5)
                axis.plot(
                    value["value"],
                    place,
                    MARKERS[which % 6],
                    color=COLORS[which % 6],
                    markersize=5.5,
                    label=row["method"],
                )
            for shaded in range(0, len(formats), 2):
                axis.axhspan(shaded - 0.5, shaded + 0.5, color="#f4f4f4", zorder=0)
            axis.set_title(f"{title}, {found['texts'][text]['file']}", fontsize=10)
            axis.grid(axis="x", color="#dddddd", linewidth=0.7)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        # When all are drawn: a limit stops the axis from growing.
        if wide:
            line[0].set_xscale("log")
            for axis in line:
                axis.xaxis.set_major_formatter("{x:g}")
                axis.xaxis.set_minor_formatter(NullFormatter())
        else:
            line[0].set_xlim(left=0)
        line[0].set_yticks(range(len(formats)), [f"{name}:{block}" for name, block in formats])
    axes[0, 0].set_ylim(len(formats) - 0.5, -0.5)
    for axis in axes[-1]:
        axis.set_xlabel(f"{label}, log scale" if wide else label)
    legend(figure, axes[0, 0])
    figure.suptitle(f"{found['model']}: bars are {found['confidence']:.0%} intervals", fontsize=11)


def layers(found: Found) -> None:
    """The error of each linear over the depth, in the first format, by what the linear is."""
    first = found["rows"][0]
    rows = [row for row in found["rows"] if same(row, first, "format", "block")]
    places = {name: place(name) for name in first["errors"]}
    parts = list(dict.fromkeys(part for depth, part in places.values() if depth is not None))
    methods = unique(found, "method")
    figure, axes = plt.subplots(
        2,
        len(parts),
        figsize=(2.1 * len(parts) + 0.6, 5.4),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for line, (weight_only, title) in zip(axes, INPUTS.items(), strict=True):
        for axis, part in zip(line, parts, strict=True):
            for row in rows:
                if row["weight_only"] != weight_only:
                    continue
                which = methods.index(row["method"])
                points = [
                    (places[name][0], 100 * error["layer"])
                    for name, error in row["errors"].items()
                    if places[name][1] == part
                ]
                axis.plot(
                    *zip(*points, strict=True),
                    color=COLORS[which % 6],
                    marker=MARKERS[which % 6],
                    markersize=4.5,
                    linewidth=1.2,
                    label=row["method"],
                )
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(color="#dddddd", linewidth=0.7)
            axis.spines[["top", "right"]].set_visible(False)
        # When all are drawn: it stops the axis from growing.
        line[0].set_ylim(bottom=0)
        line[0].set_ylabel(f"output error, %\n{title}")
    for axis, part in zip(axes[0], parts, strict=True):
        axis.set_title(part.replace("attention.", "attention\n"), fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    legend(figure, axes[0, 0])
    figure.suptitle(f"{found['model']}, {first['format']}:{first['block']}", fontsize=11)


def place(name: str) -> tuple[int | None, str]:
    """The number of the layer in a name, and what the linear is called in it."""
    words = name.split(".")
    at = next((i for i, word in enumerate(words) if word.isdecimal()), None)
    return (None, name) if at is None else (int(words[at]), ".".join(words[at + 1 :]))


def legend(figure: Any, axis: Any) -> None:
    """One for all, each method once."""
    handles, labels = axis.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(
        list(once.values()), list(once), loc="outside lower center", ncols=len(once), frameon=False
    )


def unique(found: Found, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in found["rows"]))


def same(row: Found, other: Found, *keys: str) -> bool:
    return all(row[key] == other[key] for key in keys)
