"""Count in how many cases one method is better than another, by the intervals of differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.pages.tables import format_of, inputs, table, unique

Found = Mapping[str, Any]

# The differences between methods: less of each is better.
COMPARED = {"kl": "KL", "perplexity_ratio": "perplexity"}

OUTCOMES = ("better", "worse", "undecided")
WORDS = ("lower", "higher", "undecided")


def verdicts(found: Found) -> str:
    """Return a table in Markdown: in how many cases a method is better than another."""
    rows = []
    for (method, other, measure), outcomes in cases(found).items():
        here = list(outcomes.values())
        counts = [str(here.count(each)) for each in OUTCOMES]
        rows.append([f"`{method}`", f"`{other}`", COMPARED[measure], *counts, worse_in(outcomes)])
    header = ["method", "against", "measure", *WORDS, "higher in"]
    return (
        "Numbers of cases: a format, block, inputs and text. A case is undecided if the interval "
        "of the difference includes no change.\nWith equal methods, about "
        f"{1 - found['confidence']:.0%} of the cases would look decided.\n\n"
        f"{table(header, rows, left=len(header))}"
    )


def worse_in(outcomes: Mapping[tuple[str, str], str]) -> str:
    """Return the formats that are worse, by inputs and text."""
    worse: dict[str, list[str]] = {}
    for (name, where), outcome in outcomes.items():
        if outcome == "worse":
            worse.setdefault(where, []).append(name)
    return "<br>".join(f"{where}: {', '.join(names)}" for where, names in worse.items())


def cases(found: Found) -> dict[tuple[str, str, str], dict[tuple[str, str], str]]:
    """Return outcomes by format and circumstances, by method, other method and measure."""
    outcomes: dict[tuple[str, str, str], dict[tuple[str, str], str]] = {}
    for row in found["rows"]:
        for name, text in row["texts"].items():
            where = f"{inputs(row['weight_only'])}, `{found['texts'][name]['file']}`"
            case = format_of(row), where
            for other, change in text["against"].items():
                for measure in COMPARED.keys() & change.keys():
                    outcome = verdict(change[measure], measure)
                    outcomes.setdefault((row["method"], other, measure), {})[case] = outcome
    order, methods = list(COMPARED), unique(found["rows"], "method")
    keys = sorted(outcomes, key=lambda key: (*map(methods.index, key[:2]), order.index(key[2])))
    return {key: outcomes[key] for key in keys}


def verdict(change: Mapping[str, Any], measure: str) -> str:
    """Return one of `OUTCOMES` for the change of a measure."""
    if not change["significant"]:
        return "undecided"
    unchanged = 1.0 if measure == "perplexity_ratio" else 0.0
    return "better" if change["value"] < unchanged else "worse"
