"""The section of docs/steps.md about damping and calibration tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tables import above, file, inputs, listed, number, percent, table, with_interval

Found = Mapping[str, Any]
Row = Mapping[str, Any]


def sweep(stem: str, found: Found) -> Iterator[str]:
    """Yield the section: how much of what calibration gains is lost on other tokens."""
    rows = [row for row in found["rows"] if "sweep" in row]
    title = f"### {found['model']}: damping and calibration tokens\n"
    if not rows:
        yield f"{title}\nNot measured yet.\n"
        return
    yield title
    yield (
        f"`gptq`, {rows[0]['format']}, {inputs(rows[0]['weight_only'])}. The output error on the "
        "calibration tokens stands beside that on held-out text.\nThe gap is how much the second "
        "is above the first: overfitting, and whatever else tells the two texts apart.\nWhere less "
        "damping lowers the first and raises the second, it only fits the calibration tokens "
        "better.\n"
    )
    yield sweep_table(found, rows)
    yield from listed("The least of each:", sweep_lines(found, rows), "")
    yield (
        "Errors have no intervals and these conversions are not compared in pairs, so which "
        "damping is best may be chance\nwhere values are close.\n"
    )
    yield f"![Error and KL by calibration tokens](steps-{stem}-sweep.png)\n"


def sweep_table(found: Found, rows: Sequence[Row]) -> str:
    """Return a row for each number of windows and damping."""
    header = ["windows", "tokens", "damping", "err on calibration", "held-out err", "gap"]
    return table(
        [*header, *(f"KL, {file(found, name)}" for name in found["texts"])],
        [
            [
                str(row["sweep"]["windows"]),
                f"{row['sweep']['windows'] * found['window']:,}",
                damping(row),
                percent(row["calibrated_error"]),
                percent(row["output_error"]),
                above(gap(row)),
                *(with_interval(row["texts"][name]["kl"], number) for name in found["texts"]),
            ]
            for row in rows
        ],
        left=0,
    )


def sweep_lines(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    """Yield which damping is best for each number of windows, and the ends of the gap."""
    for windows in dict.fromkeys(row["sweep"]["windows"] for row in rows):
        here = [row for row in rows if row["sweep"]["windows"] == windows]
        fitted = min(here, key=lambda row: row["calibrated_error"])
        held_out = min(here, key=lambda row: row["output_error"])
        least = [
            f"{damping(min(here, key=kl_on(name)))} on {file(found, name)}"
            for name in found["texts"]
        ]
        overfits = (
            f"Less damping overfits: on held-out text it has {percent(fitted['output_error'])} and "
            f"not {percent(held_out['output_error'])}."
            if fitted["sweep"]["damping"] < held_out["sweep"]["damping"]
            else "No overfitting by less damping is seen."
        )
        yield (
            f"{windows} windows: the error on the calibration tokens is least with damping "
            f"{damping(fitted)}, on held-out text with {damping(held_out)}. {overfits} KL is least "
            f"with {', '.join(least)}."
        )
    for word, row in (("largest", max(rows, key=gap)), ("smallest", min(rows, key=gap))):
        yield (
            f"The gap is {word}, {above(gap(row))}, for {row['sweep']['windows']} windows and "
            f"damping {damping(row)}."
        )


def damping(row: Row) -> str:
    """Return the damping of a row."""
    return f"{row['sweep']['damping']:g}"


def kl_on(text: str) -> Callable[[Row], float]:
    """Return a function of a row: its KL on a text."""
    return lambda row: row["texts"][text]["kl"]["value"]


def gap(row: Row) -> float:
    """Return the error on held-out text over that on the calibration tokens."""
    return row["output_error"] / row["calibrated_error"]
