"""Write docs/results.md and its pictures from what the measuring scripts left behind.

    python eval/results_page.py [--results DIR] [--docs DIR]

Every number on the page comes from a JSON of eval/results: of eval/quality.py, of
eval/sentence_embeddings.py and, of what is there, of eval/layer_error.py.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results_plots import by_layer, draw, place

# Linears that are named as those that matter most.
MOST = 5
ENDS = ("value", "low", "high")

ROOT = Path(__file__).resolve().parents[1]

Row = Mapping[str, Any]
Found = Mapping[str, Any]

INTRODUCTION = Path(__file__).with_name("results_introduction.md")


def main() -> None:
    args = parse_args(__doc__, ROOT / "eval" / "results")
    results = load(args.results)
    (args.docs / "results.md").write_text(page(results), encoding="utf-8")
    for stem, found in results.items():
        draw(found, args.docs, stem)


def parse_args(description: str | None, results: Path) -> argparse.Namespace:
    """Of a script that makes a page and its pictures; the folder for them is there then."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    args.docs.mkdir(parents=True, exist_ok=True)
    return args


def load(folder: Path) -> dict[str, Found]:
    """What is there by the stem of its file, small models first.

    `layers` of each is what eval/layer_error.py found of the model, or None. Raises SystemExit if
    there is nothing.
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
    """What a file holds, "" if it is not for this page."""
    rows = found.get("rows") if isinstance(found, dict) else None
    texts = rows[0].get("texts", {}) if rows and isinstance(rows[0], dict) else {}
    measures: Found = next(iter(texts.values()), {})
    if "kl" in measures:
        return "language model"
    return "embeddings" if "cosine" in measures else ""


def page(results: Mapping[str, Found]) -> str:
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
    """The sections of a causal language model."""
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
    """What a language model was measured on, and the original's measures."""
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
    header = [
        "format",
        "method",
        "perplexity",
        "change",
        "bits per byte",
        "KL",
        "top-p KL",
        "top-1",
    ]
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
    return table([*header, "KL less naive's", "perplexity over naive's"], rows, left=2)


def error_table(found: Found) -> str:
    """What does not depend on the text, of both kinds of inputs."""
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
    """The sections of a model of sentence embeddings."""
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
    """The section of the errors of all layers."""
    yield f"### {found['model']}: output error by layer\n"
    yield f"![Output error by layer](results-{stem}-layers.png)\n"
    for weight_only in (True, False):
        yield f"{inputs(weight_only).capitalize()}:\n\n{layer_table(found, weight_only)}"


def sensitivity(found: Found) -> Iterator[str]:
    """What the linears that matter most do to the whole model, by themselves."""
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
    """Means over the linears of a layer, and over the layers for each of their linears."""
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


# ---- what is real -----------------------------------------------------------------------------

# Of a difference between methods: its name, and whether less is better.
COMPARED = {
    "kl": ("KL", True),
    "perplexity_ratio": ("perplexity", True),
    "cosine": ("cosine", False),
}

OUTCOMES = ("better", "worse", "undecided")


def verdicts(found: Found) -> str:
    """Of each two methods, how often one is better, over formats, blocks, inputs and texts."""
    lines = []
    for (method, other, measure), outcomes in cases(found).items():
        name, less = COMPARED[measure]
        words = ("lower", "higher") if less else ("higher", "lower")
        count = [list(outcomes.values()).count(each) for each in OUTCOMES]
        worse: dict[str, list[str]] = {}
        for (name_of_format, where), outcome in outcomes.items():
            if outcome == "worse":
                worse.setdefault(where, []).append(name_of_format)
        exceptions = "; ".join(f"{', '.join(names)} ({where})" for where, names in worse.items())
        text = (
            f"- `{method}` against `{other}`: {name} is {words[0]} in {count[0]} of "
            f"{len(outcomes)}, {words[1]} in {count[1]}, undecided in {count[2]}."
        )
        lines.append(f"{text} {words[1].capitalize()}: {exceptions}." if worse else text)
    chance = 1 - found["confidence"]
    return "\n".join(
        [
            "Over all formats, blocks, inputs and texts below, and only where the interval of the "
            "difference says so:",
            "",
            *lines,
            "",
            f"Of comparisons of what does the same, about {chance:.0%} would look decided.",
            "",
        ]
    )


def cases(found: Found) -> dict[tuple[str, str, str], dict[tuple[str, str], str]]:
    """The outcome by format and circumstances, by method, other method and measure."""
    outcomes: dict[tuple[str, str, str], dict[tuple[str, str], str]] = {}
    for row in found["rows"]:
        for name, text in row["texts"].items():
            where = f"{inputs(row['weight_only'])}, `{found['texts'][name]['file']}`"
            case = first_cells(row)[0], where
            for other, change in text["against"].items():
                for measure in COMPARED.keys() & change.keys():
                    outcome = verdict(change[measure], measure)
                    outcomes.setdefault((row["method"], other, measure), {})[case] = outcome
    order, methods = list(COMPARED), list(dict.fromkeys(row["method"] for row in found["rows"]))
    keys = sorted(outcomes, key=lambda key: (*map(methods.index, key[:2]), order.index(key[2])))
    return {key: outcomes[key] for key in keys}


def verdict(change: Row, measure: str) -> str:
    if not change["significant"]:
        return "undecided"
    unchanged = 1.0 if measure == "perplexity_ratio" else 0.0
    less_is_better = COMPARED[measure][1]
    return "better" if (change["value"] < unchanged) == less_is_better else "worse"


# ---- words and cells --------------------------------------------------------------------------


def made(stem: str, found: Found) -> str:
    """How a file was made."""
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
    return [row for row in found["rows"] if row["weight_only"] == weight_only]


def first_cells(row: Row) -> list[str]:
    return [f"{row['format']}:{row['block']}", row["method"]]


def inputs(weight_only: bool) -> str:
    return "weights only" if weight_only else "weights and inputs"


def with_interval(value: Row | None, show: Any, *, bold: bool = False) -> str:
    """A value above its interval, in bold where it may be and the interval says so."""
    if value is None:
        return ""
    text = show(value["value"])
    text = f"**{text}**" if bold and value["significant"] else text
    if value["low"] is None:
        return text
    return f"{text}<br>{show(value['low'])} to {show(value['high'])}"


def number(value: float) -> str:
    """Four digits, or `small_places`."""
    places = 4 - len(str(int(value))) if value >= 1 else small_places(value)
    return f"{value:.{max(0, places)}f}"


def small_places(value: float) -> int:
    """Four, or of less than a thousandth as many as show two digits, six at most."""
    return 4 if value == 0 or abs(value) >= 1e-3 else min(6, 1 - math.floor(math.log10(abs(value))))


def small(value: float) -> str:
    return f"{value:.5f}"


def signed(value: float) -> str:
    return f"{value:+.{small_places(value)}f}"


def cosine(value: float) -> str:
    return f"{value:.4f}"


def signed_cosine(value: float) -> str:
    return f"{value:+.5f}"


def percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def above(ratio: float) -> str:
    """How much a ratio is above one."""
    return f"{100 * (ratio - 1):+.2f} %"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def code(text: str) -> str:
    return f"`{text}`"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """In Markdown, numbers to the right of the first `left` columns."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
