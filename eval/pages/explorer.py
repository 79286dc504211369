"""The numbers of the results page, as one table that a reader filters, from eval/results alone.

    python -m eval.pages.explorer > results.json

A row is what one conversion measured on one text. Needs nothing but Python, so that the site is
built without torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.pages.tables import ROOT

Found = Mapping[str, Any]

# Of what a file says of itself, what the page shows.
ABOUT = ("model", "parameters", "dtype", "machine", "versions", "command", "confidence")

# Measures of a text, each with an interval.
INTERVALS = ("perplexity", "bits_per_byte", "kl", "top1")
# Differences to the original and to the method naive, by their names in the table.
DIFFERENCES = {
    "change": ("change", "perplexity_ratio"),
    "kl_to_naive": ("naive", "kl"),
    "perplexity_to_naive": ("naive", "perplexity_ratio"),
}


def main() -> None:
    """Print the table."""
    json.dump(explorer(load(ROOT / "eval" / "results")), sys.stdout)


def load(folder: Path) -> dict[str, Found]:
    """Return all results by the stem of their file, small models first.

    Raises:
        SystemExit: there is nothing.
    """
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    ours = {stem: each for stem, each in found.items() if is_ours(each)}
    if not ours:
        raise SystemExit(
            f"{folder} has no results. Run python -m eval.quality.models --json {folder}/NAME.json."
        )
    return dict(sorted(ours.items(), key=lambda item: item[1]["parameters"]))


def is_ours(found: Any) -> bool:
    """Return whether a file was written by eval/quality/models.py."""
    rows = found.get("rows") if isinstance(found, dict) else None
    texts = rows[0].get("texts", {}) if rows and isinstance(rows[0], dict) else {}
    return "kl" in next(iter(texts.values()), {})


def explorer(results: Mapping[str, Found]) -> dict[str, Any]:
    """Return the models and their rows, as JSON has them."""
    models = [
        {"stem": stem, **{key: found[key] for key in ABOUT}} for stem, found in results.items()
    ]
    return {"models": models, "rows": [row for each in results.values() for row in rows(each)]}


def rows(found: Found) -> Iterator[dict[str, Any]]:
    """Yield a row for each conversion and text of a model, intervals as [value, low, high]."""
    for row in found["rows"]:
        for text, here in row["texts"].items():
            yield {
                "model": found["model"],
                "text": found["texts"][text]["file"],
                "format": row["format"],
                "block": row["block"],
                "inputs": "float" if row["weight_only"] else "quantized",
                "method": row["method"],
                "bits": row["bits"],
                "weight_error": row["weight_error"],
                "output_error": row.get("output_error"),
                "layer_error": row.get("layer_error"),
                "seconds": row["convert_seconds"],
                **{key: interval(here[key]) for key in INTERVALS if key in here},
                **dict(differences(here)),
            }


def differences(here: Found) -> Iterator[tuple[str, list[Any]]]:
    """Yield what is compared, and whether it is more than chance."""
    compared = {"change": here.get("change", {}), **here["against"]}
    for name, (other, measure) in DIFFERENCES.items():
        if measure in (found := compared.get(other, {})):
            yield name, [*interval(found[measure]), found[measure]["significant"]]


def interval(value: Found) -> list[float | None]:
    """Return a value and the ends of its interval."""
    return [value["value"], value["low"], value["high"]]


if __name__ == "__main__":
    main()
