"""Write docs/results.md and its pictures from what the measuring scripts left behind.

    python eval/results_page.py [--results DIR] [--docs DIR]

Every number on the page comes from a JSON of eval/results: of eval/quality.py, of
eval/sentence_embeddings.py and, of what is there, of eval/layer_error.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from figures import by_layer, draw_results, place
from tables import (
    ROOT,
    above,
    code,
    format_of,
    inputs,
    mean,
    number,
    parse_args,
    percent,
    signed,
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


def load(folder: Path) -> dict[str, Found]:
    """Return all results by the stem of their file, small models first.

    `layers` of each is what eval/layer_error.py found of the model, or None.

    Raises:
        SystemExit: there is nothing.
    """
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    ours = {stem: each for stem, each in found.items() if kind(each)}
    if not ours:
        raise SystemExit(f"{folder} has no results. Run eval/quality.py --json {folder}/NAME.json.")
    for stem, each in ours.items():
        each["layers"] = found.get(f"layers-{stem}")
    order = {"language model": 0, "embeddings": 1}
    return dict(sorted(ours.items(), key=lambda i: (order[kind(i[1])], i[1]["parameters"])))


def kind(found: Any) -> str:
    """Return what a file holds, "" if it is not for this page."""
    rows = found.get("rows") if isinstance(found, dict) else None
    texts = rows[0].get("texts", {}) if rows and isinstance(rows[0], dict) else {}
    measures: Found = next(iter(texts.values()), {})
    if "kl" in measures:
        return "language model"
    return "embeddings" if "cosine" in measures else ""


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
    names = {name: f"`{text['file']}`" for name, text in found["texts"].items()}
    yield from texts(found)
    yield f"![KL by format and method](results-{stem}.png)\n"
    yield f"### {found['model']}: what is different\n\n{verdicts(found)}"
    for weight_only in (True, False):
        for name in names:
            title = f"### {found['model']}: {inputs(weight_only)}, {names[name]}"
            yield f"{title}\n\n{language_table(found, name, weight_only)}"
    yield f"### {found['model']}: errors\n\n{error_table(found)}"
    if found["layers"]:
        yield from layers(stem, by_layer(found))
        yield f"Made by\n\n    {found['layers']['command']}\n"
        yield from sensitivity(found)


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


def language_table(found: Found, text: str, weight_only: bool) -> str:
    """Return the measures on one text."""
    header = ["format", "method", "perplexity", "change", "bits per byte", "KL", "top-p KL"]
    header += ["top-1", "KL less naive's", "perplexity over naive's"]
    rows = []
    for row in chosen(found, weight_only):
        here = row["texts"][text]
        to_naive = here["against"].get("naive", {})
        rows.append(
            [
                *first_cells(row),
                with_interval(here["perplexity"], number),
                with_interval(here["change"]["perplexity_ratio"], above, bold=True),
                with_interval(here["bits_per_byte"], number),
                with_interval(here["kl"], number),
                with_interval(here["top_p_kl"], number),
                with_interval(here["top1"], percent),
                with_interval(to_naive.get("kl"), signed, bold=True),
                with_interval(to_naive.get("perplexity_ratio"), above, bold=True),
            ]
        )
    return table(header, rows, left=2)


def error_table(found: Found) -> str:
    """Return what does not depend on the text, of both kinds of inputs."""
    header = ["format", "method", "bits", "weight err", "output err", "layer err", "convert"]
    inner = {tuple(first_cells(row)): percent(row["layer_error"]) for row in chosen(found, False)}
    return table(
        header,
        [
            [
                *first_cells(row),
                f"{row['bits']:.2f}",
                percent(row["weight_error"]),
                percent(row["output_error"]),
                inner.get(tuple(first_cells(row)), ""),
                f"{row['convert_seconds']:.1f} s",
            ]
            for row in chosen(found, True)
        ],
        left=2,
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
    for weight_only in (True, False):
        for name, text in found["texts"].items():
            title = f"### {found['model']}: {inputs(weight_only)}, `{text['file']}`"
            yield f"{title}\n\n{embedding_table(found, name, weight_only)}"
    yield from layers(stem, found)


SENTENCES = ("sentences", "sentences_of_the_file", "tokens")


def embedding_table(found: Found, text: str, weight_only: bool) -> str:
    """Return the measures on one text."""
    header = ["format", "method", "bits", "cosine", "one in twenty below", "one in a hundred below"]
    rows = []
    for row in chosen(found, weight_only):
        here = row["texts"][text]
        rows.append(
            [
                *first_cells(row),
                f"{row['bits']:.2f}",
                with_interval(here["cosine"], cosine),
                cosine(here["percentile_5"]),
                cosine(here["percentile_1"]),
                cosine(here["least"]),
                cosine(here["spearman"]),
                with_interval(
                    here["against"].get("naive", {}).get("cosine"), signed_cosine, bold=True
                ),
            ]
        )
    return table([*header, "least", "Spearman", "cosine less naive's"], rows, left=2)


# ---- layers -----------------------------------------------------------------------------------


def layers(stem: str, found: Found) -> Iterator[str]:
    """Yield the section of the errors of all layers."""
    yield f"### {found['model']}: output error by layer\n"
    yield f"![Output error by layer](results-{stem}-layers.png)\n"
    for weight_only in (True, False):
        yield f"{inputs(weight_only).capitalize()}:\n\n{layer_table(found, weight_only)}"


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


def layer_table(found: Found, weight_only: bool) -> str:
    """Return means over the linear layers of a depth, and over depths for each of them."""
    rows = chosen(found, weight_only)
    split = {name: place(name) for name in rows[0]["errors"]}
    depths = list(dict.fromkeys(depth for depth, _ in split.values()))
    parts = list(dict.fromkeys(part for _, part in split.values()))
    body = []
    for row in rows:
        errors = {name: error["layer"] for name, error in row["errors"].items()}
        means = [mean([e for n, e in errors.items() if split[n][0] == depth]) for depth in depths]
        means += [mean([e for n, e in errors.items() if split[n][1] == part]) for part in parts]
        body.append([*first_cells(row), *map(percent, means)])
    header = ["format", "method", *(f"layer {depth}" for depth in depths), *map(code, parts)]
    return table(header, body, left=2)


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


def cosine(value: float) -> str:
    """Return a cosine."""
    return f"{value:.4f}"


def signed_cosine(value: float) -> str:
    """Return a difference of cosines."""
    return f"{value:+.5f}"


if __name__ == "__main__":
    main()
