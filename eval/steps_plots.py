"""The pictures of docs/steps.md."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter, NullLocator
from results_plots import COLORS, INPUTS, MARKERS, legend, save

Found = Mapping[str, Any]
Row = Mapping[str, Any]

# Of intervals beside each other on an axis of tokens, which is logarithmic.
APART = 1.08


def draw(found: Found, folder: Path, stem: str, outcome: Callable[[Row, str], str]) -> None:
    """The pictures of one file of results, named after it.

    outcome: of a row and a text, "better" if the step helps, "" if it is compared with none.
    """
    by_step(found, outcome)
    save(folder / f"steps-{stem}.png")
    if any("sweep" in row for row in found["rows"]):
        sweep(found)
        save(folder / f"steps-{stem}-sweep.png")


def by_step(found: Found, outcome: Callable[[Row, str], str]) -> None:
    """KL and its interval by step: formats beside each other, kinds of inputs below."""
    rows = [row for row in found["rows"] if "sweep" not in row]
    formats = list(dict.fromkeys(row["format"] for row in rows))
    kinds = [only for only in INPUTS if any(row["weight_only"] == only for row in rows)]
    steps = {
        key: [row for row in rows if (row["weight_only"], row["format"]) == key]
        for key in itertools.product(kinds, formats)
    }
    lines = [max(len(steps[only, fmt]) for fmt in formats) for only in kinds]
    figure, axes = plt.subplots(
        len(kinds),
        len(formats),
        figsize=(5.6 * len(formats), 1.6 + 0.36 * sum(lines)),
        height_ratios=lines,
        sharex="row",
        squeeze=False,
        layout="constrained",
    )
    for (only, fmt), axis in zip(steps, axes.flat, strict=True):
        here = steps[only, fmt]
        if not here:
            axis.set_axis_off()
            continue
        for (place, row), (which, text) in itertools.product(
            enumerate(here), enumerate(found["texts"])
        ):
            at = place + (which - (len(found["texts"]) - 1) / 2) * 0.3
            helps = outcome(row, text) in ("better", "")
            point(axis, row["texts"][text]["kl"], at, which, helps, found["texts"][text]["file"])
        for shaded in range(0, len(here), 2):
            axis.axhspan(shaded - 0.5, shaded + 0.5, color="#f4f4f4", zorder=0)
        axis.set_yticks(range(len(here)), [row["method"] for row in here])
        axis.set_ylim(len(here) - 0.5, -0.5)
        axis.set_title(f"{fmt}, {INPUTS[only]}", fontsize=10)
        grid(axis, "x")
    # When all are drawn: a limit stops the axis from growing.
    for line in axes:
        line[0].set_xlim(left=0)
    for axis in axes[-1]:
        axis.set_xlabel("KL to the original, nats per token")
    legend(figure, axes[0, 0])
    figure.suptitle(
        f"{found['model']}: bars are {found['confidence']:.0%} intervals, hollow marks are steps "
        "that do not help",
        fontsize=11,
    )


def point(
    axis: Any, value: Mapping[str, Any], at: float, which: int, helps: bool, label: str
) -> None:
    """A value of the text `which` and its interval, across."""
    axis.plot(ends(value), [at] * 2, color=COLORS[which], linewidth=1.5, zorder=2)
    axis.plot(
        value["value"],
        at,
        MARKERS[which],
        color=COLORS[which],
        markerfacecolor=COLORS[which] if helps else "white",
        markersize=5.5,
        # Filled ones alone: the first step is compared with none, so there are some.
        label=label if helps else None,
        zorder=3,
    )


def sweep(found: Found) -> None:
    """Errors where it was calibrated and elsewhere, and KL, by tokens and damping."""
    rows = [row for row in found["rows"] if "sweep" in row]
    names = list(found["texts"])
    figure, axes = plt.subplots(
        1,
        1 + len(names),
        figsize=(4.0 * (1 + len(names)), 4.2),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    dampings = sorted({row["sweep"]["damping"] for row in rows})
    for which, damping in enumerate(dampings):
        here = [row for row in rows if row["sweep"]["damping"] == damping]
        tokens = [row["sweep"]["windows"] * found["window"] for row in here]
        style = {"color": COLORS[which], "marker": MARKERS[which], "markersize": 5.5}
        label = f"damping {damping:g}"
        for key, dashes in (("calibrated_error", "--"), ("output_error", "-")):
            errors = [100 * row[key] for row in here]
            axes[0, 0].plot(tokens, errors, dashes, label=label, linewidth=1.2, **style)
        moved = [each * APART ** (which - (len(dampings) - 1) / 2) for each in tokens]
        for axis, name in zip(axes[0, 1:], names, strict=True):
            found_kl = [row["texts"][name]["kl"] for row in here]
            axis.plot(moved, [kl["value"] for kl in found_kl], linewidth=1.2, **style)
            for place, kl in zip(moved, found_kl, strict=True):
                axis.plot([place] * 2, ends(kl), color=COLORS[which], linewidth=1.2)
    titles = ["output error, %: held-out (solid),\non the calibration tokens (dashed)"]
    titles += [f"KL to the original,\n{found['texts'][name]['file']}" for name in names]
    ticks = sorted({row["sweep"]["windows"] * found["window"] for row in rows})
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("calibration tokens")
        grid(axis, "both")
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_xticks(ticks, [f"{each:,}" for each in ticks])
    axes[0, 0].xaxis.set_minor_locator(NullLocator())
    axes[0, 0].xaxis.set_minor_formatter(NullFormatter())
    legend(figure, axes[0, 0])
    first = rows[0]
    figure.suptitle(
        f"{found['model']}, gptq, {first['format']}, {INPUTS[first['weight_only']]}: bars are "
        f"{found['confidence']:.0%} intervals",
        fontsize=11,
    )


def ends(value: Mapping[str, Any]) -> list[float]:
    """Of the interval, or the value twice where there is none."""
    return [value["value"] if value[end] is None else value[end] for end in ("low", "high")]


def grid(axis: Any, which: str) -> None:
    axis.grid(axis=which, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
