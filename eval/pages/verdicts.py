"""Count in how many cases one method is better than another, by the intervals of differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.pages.tables import format_of, inputs, unique

Found = Mapping[str, Any]

# The differences between methods: less of each is better.
COMPARED = {"kl": "KL", "perplexity_ratio": "perplexity"}

OUTCOMES = ("better", "worse", "undecided")


def verdicts(found: Found) -> str:
    """Return a list in Markdown: of each two methods, how often one is better than the other."""
    lines = []
    for (method, other, measure), outcomes in cases(found).items():
        name = COMPARED[measure]
        count = [list(outcomes.values()).count(each) for each in OUTCOMES]
        worse: dict[str, list[str]] = {}
        for (name_of_format, where), outcome in outcomes.items():
            if outcome == "worse":
                worse.setdefault(where, []).append(name_of_format)
        exceptions = "; ".join(f"{', '.join(names)} ({where})" for where, names in worse.items())
        text = (
            f"- `{method}` against `{other}`: {name} is lower in {count[0]} of "
            f"{len(outcomes)}, higher in {count[1]}, undecided in {count[2]}."
        )
        lines.append(f"{text} Higher: {exceptions}." if worse else text)
    chance = 1 - found["confidence"]
    return "\n".join(
        [
            "Over all formats, blocks, inputs and texts, and only where the interval of the "
            "difference says so:",
            "",
            *lines,
            "",
            f"Of comparisons of what does the same, about {chance:.0%} would look decided.",
            "",
        ]
    )


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
