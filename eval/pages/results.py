"""Write docs/results.md and its pictures from what the measuring scripts left behind.

    python -m eval.pages.results [--results DIR] [--docs DIR]

Every number on the page comes from a JSON of eval/results that eval/quality/models.py wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.pages.explorer import load
from eval.pages.figures import draw_results
from eval.pages.tables import ROOT, code, number, origin, parse_args, table, with_interval
from eval.pages.verdicts import verdicts

Found = Mapping[str, Any]

INTRODUCTION = Path(__file__).with_name("results_introduction.md")


def main() -> None:
    """Write the page and its pictures."""
    args = parse_args(__doc__, ROOT / "eval" / "results")
    results = load(args.results)
    (args.docs / "results.md").write_text(page(results), encoding="utf-8")
    for stem, found in results.items():
        draw_results(found, args.docs, stem)


def page(results: Mapping[str, Found]) -> str:
    """Return the page in Markdown."""
    parts = [INTRODUCTION.read_text(encoding="utf-8")]
    models = [found["model"] for found in results.values()]
    links = ", ".join(f"[{name}](#{name.lower()})" for name in models)
    parts.append(f"Models: {links}.\n")
    for stem, found in results.items():
        parts.append(f"## {found['model']}\n\n{made(stem, found)}")
        parts += texts(found)
        parts.append(f"![KL by format and method](results-{stem}.png)\n")
        parts.append(f"### {found['model']}: methods compared\n\n{verdicts(found)}")
    return "\n".join(parts)


def texts(found: Found) -> Iterator[str]:
    """Yield what a language model was measured on, and the measures of the original."""
    yield table(
        ["text", "windows", "of", "scored tokens", "resampled", "perplexity", "bits per byte"],
        [
            [
                code(text["file"]),
                str(text["windows"]),
                str(text["windows_of_the_file"]),
                f"{text['tokens']:,}",
                f"{text['units']} {text['unit']}s",
                with_interval(found["original"][name]["perplexity"], number),
                with_interval(found["original"][name]["bits_per_byte"], number),
            ]
            for name, text in found["texts"].items()
        ],
        left=1,
    )
    yield (
        f"Perplexity and bits per byte of the original, with {found['confidence']:.0%} confidence "
        f"intervals. Windows have {found['window']} tokens, are spread evenly\nover a text and do "
        f"not overlap. Output errors are those on {found['output_error_tokens']:,} tokens of the "
        f"first text.\n"
    )


def made(stem: str, found: Found) -> str:
    """Return how a file of results was made."""
    calibration = found["calibration"]
    formats = dict.fromkeys(code(row["format"]) for row in found["rows"])
    return "\n".join(
        [
            f"{found['parameters']:,} parameters, in {found['dtype']}. Calibrated on "
            f"{calibration['windows']:,} windows ({calibration['tokens']:,} tokens) of "
            f"`{calibration['file']}`.",
            f"Formats: {', '.join(formats)}.",
            f"All numbers are in [{stem}.json](../eval/results/{stem}.json).",
            "",
            *origin(found),
        ]
    )


if __name__ == "__main__":
    main()
