"""Numbers and words as JSON, the page and the command line show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..evaluation.intervals import VERDICT_UNITS

DASH = "\N{EN DASH}"

# The errors of a layer, and their names.
ERRORS = {"weight_error": "weight error", "output_error": "output error"}


def finite(value: Any) -> Any:
    """Return values as they come back from JSON, in which a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, None if one of the values is not known or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def size(count: float) -> str:
    """Return bytes in decimal units, as disks and hubs have them."""
    if count < 1000:
        return f"{count:.0f} B"
    unit, divisor = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6) if count >= 1e6 else ("kB", 1e3)
    return f"{count / divisor:.2f} {unit}"


class Measure(NamedTuple):
    """A line of an evaluation. style: of `written`; values: the value, its low and its high end."""

    key: str
    label: str
    style: str
    values: Sequence[float | None]


def written(value: float | None, style: str) -> str:
    """Return a number in a format of Python, or as "percent", "signed", "change" or "size"."""
    if value is None:
        return DASH
    if style == "percent":
        return f"{100 * value:.2f} %"
    if style == "signed":
        return f"{100 * value:+.3f} %"
    if style == "change":
        return f"{100 * (value - 1):+.2f} %"
    return size(value) if style == "size" else format(value, style)


def measures(row: Mapping[str, Any]) -> list[Measure]:
    """Return each known measure of a row of `Evaluation.row`, with intervals of enough units."""
    is_enough = row["units"] >= VERDICT_UNITS
    ends = row["intervals"] if is_enough else {}
    of_original = (row.get("reference_intervals") or {}) if is_enough else {}

    def of(key: str, label: str, style: str) -> Measure:
        return Measure(key, label, style, [row.get(key), *(ends.get(key) or (None, None))])

    def change(key: str, style: str) -> Measure:
        found = (row.get("difference") or {}).get(key) or {}
        values = [
            found.get("value"),
            *(found.get(end) if is_enough else None for end in ("low", "high")),
        ]
        return Measure(f"change of {key}", "  change", style, values)

    original = [row.get("reference_perplexity"), *(of_original.get("perplexity") or (None, None))]
    found = [
        of("perplexity", "Perplexity", ".4f"),
        Measure("reference_perplexity", "  of the original", ".4f", original),
        change("perplexity_ratio", "change"),
        of("bits_per_byte", "Bits per byte", ".4f"),
        change("bits_per_byte", "+.4f"),
        of("kl", "KL from the original", ".5f"),
        of("kl_999", "99.9 % KL", ".5f"),
        of("top1", "Same top token", "percent"),
        of("delta_p", "Mean Δp of the right token", "signed"),
        of("rms_delta_p", "RMS Δp of the right token", "percent"),
    ]
    return [each for each in found if each.values[0] is not None]


def scored(row: Mapping[str, Any]) -> str:
    """Return how many tokens a row is of, and where its intervals come from."""
    units, unit = row["units"], row["unit"]
    said = f"{row['tokens']:,} tokens scored in {_count(row['windows'], 'window')}"
    if units < VERDICT_UNITS or not row["intervals"]:
        return f"{said}; intervals need at least {VERDICT_UNITS} {unit}s"
    return f"{said}; {100 * row['confidence']:g} % intervals over {_count(units, unit)}"


def verdict(row: Mapping[str, Any]) -> str:
    """Return what the interval of the change of perplexity says, "" without one."""
    ratio = (row.get("difference") or {}).get("perplexity_ratio") or {}
    if ratio.get("low") is None or ratio["significant"] is None or row["units"] < VERDICT_UNITS:
        return ""
    if ratio["significant"]:
        return "The change of perplexity is significant: its interval excludes 0."
    return "The change of perplexity may be chance: its interval includes 0."


def calibrated_on(calibration: Mapping[str, Any]) -> str:
    """Return how many tokens a model was calibrated on."""
    said = f"{calibration['tokens']:,} tokens"
    if "batches" in calibration:
        said += f" in {_count(calibration['batches'], 'batch', 'es')}"
    if calibration.get("hidden"):
        said += f", beside {calibration['hidden']:,} that attention_mask hides"
    return said


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number:,} {word}{plural if number != 1 else ''}"
