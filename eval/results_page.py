"""Write docs/results.md and its pictures from what the measuring scripts left behind.

    python eval/results_page.py [--results DIR] [--docs DIR]

Every number on the page comes from a JSON of eval/results: of eval/quality.py, of
eval/sentence_embeddings.py and, of what is there, of eval/layer_error.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from figures import draw_results
from results_table import kind, load
from tables import (
    ROOT,
    above,
    code,
    format_of,
    inputs,
    number,
    parse_args,
    table,
    with_interval,
)
from verdicts import verdicts

# How many linear layers are named as those that matter most.
MOST = 5
ENDS = ("value", "low", "high")

Row = Mapping[str, Any]
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
        parts += embeddings(stem, found) if kind(found) == "embeddings" else language(stem, found)
    return "\n".join(parts)


# ---- causal language models -------------------------------------------------------------------


def language(stem: str, found: Found) -> Iterator[str]:
    """Yield the sections of a causal language model."""
    yield from texts(found)
    yield f"![KL by format and method](results-{stem}.png)\n"
    yield f"### {found['model']}: what is different\n\n{verdicts(found)}"
    if found["layers"]:
        yield layers(stem, found)
        yield from sensitivity(found)
        name = f"layers-{stem}"
        yield (
            f"All layers are in [{name}.json](../eval/results/{name}.json), made by\n\n"
            f"    {found['layers']['command']}\n"
        )


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
        f"Perplexity and bits per byte are the original's. Windows have {found['window']} tokens, "
        f"are spread evenly over a text and\ndo not overlap. Intervals hold with "
        f"{found['confidence']:.0%} confidence. Output errors: on "
        f"{found['output_error_tokens']:,} tokens of the first text.\n"
    )


# ---- sentence embeddings ----------------------------------------------------------------------


def embeddings(stem: str, found: Found) -> Iterator[str]:
    """Yield the sections of a model of sentence embeddings."""
    yield (
        "An embedding is the mean over the tokens of the last hidden states, of length one. "
        "Sentences are cut out of the\ntexts by their punctuation and spread evenly over them.\n"
    )
    yield table(
        ["text", "sentences", "of", "tokens"],
        [
            [f"`{text['file']}`", *(f"{text[key]:,}" for key in SENTENCES)]
            for text in found["texts"].values()
        ],
        left=1,
    )
    yield (
        f"Intervals hold with {found['confidence']:.0%} confidence, over sentences. Errors of "
        "layers are on the inputs that they have in the\noriginal for the sentences of the first "
        "text.\n"
    )
    yield f"![Distance of embeddings by format and method](results-{stem}.png)\n"
    yield f"### {found['model']}: what is different\n\n{verdicts(found)}"
    yield layers(stem, found)


SENTENCES = ("sentences", "sentences_of_the_file", "tokens")


# ---- layers -----------------------------------------------------------------------------------


def layers(stem: str, found: Found) -> str:
    """Return the section of the errors of all layers."""
    return f"### {found['model']}: layers\n\n![Output error by layer](results-{stem}-layers.png)\n"


def sensitivity(found: Found) -> Iterator[str]:
    """Yield what the linear layers that matter most do to the model, each by itself."""
    rows = found["layers"].get("sensitivity", [])
    header = ["linear", "format", "method", "perplexity", "change", "KL"]
    for weight_only in (True, False):
        most = sorted(chosen({"rows": rows}, weight_only), key=lambda row: -row["kl"])[:MOST]
        if most:
            yield (
                f"The linears with the largest KL if they alone are converted, "
                f"{inputs(weight_only)}:\n"
            )
            yield table(
                header,
                [
                    [
                        code(row["layer"]),
                        *first_cells(row),
                        number(row["perplexity"]),
                        with_interval(row["perplexity_ratio"], above, bold=True),
                        with_interval(
                            dict(zip(ENDS, (row["kl"], *row["kl_interval"]), strict=True)), small
                        ),
                    ]
                    for row in most
                ],
                left=3,
            )


# ---- words and cells --------------------------------------------------------------------------


def made(stem: str, found: Found) -> str:
    """Return how a file of results was made."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    calibration = found["calibration"]
    how_many = "windows" if "windows" in calibration else "sentences"
    formats = dict.fromkeys(code(row["format"]) for row in found["rows"])
    return "\n".join(
        [
            f"{found['parameters']:,} parameters, in {found['dtype']}. Calibrated on "
            f"{calibration[how_many]:,} {how_many} ({calibration['tokens']:,} tokens) of "
            f"`{calibration['file']}`.",
            f"Formats that were measured: {', '.join(formats)}.",
            f"{found['device']}, torch.set_num_threads({found['threads']}); {versions}.",
            f"All numbers are in [{stem}.json](../eval/results/{stem}.json), made by",
            "",
            f"    {found['command']}",
            "",
        ]
    )


def chosen(found: Found, weight_only: bool) -> list[Row]:
    """Return the rows of one kind of inputs."""
    return [row for row in found["rows"] if row["weight_only"] == weight_only]


def first_cells(row: Row) -> list[str]:
    """Return the first two cells of a row."""
    return [format_of(row), row["method"]]


def small(value: float) -> str:
    """Return a KL."""
    return f"{value:.5f}"


if __name__ == "__main__":
    main()
