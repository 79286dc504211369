"""Write what eval/quality/mixture.py measured into a page.

    python -m eval.pages.mixture --table docs/moe.md [--results DIR]

Every number comes from the JSON of eval/results/mixture, of all formats and of the sweep, and from
training.json, which examples/train_tiny_moe.py leaves beside the model.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.pages.tables import (
    ROOT,
    Row,
    above,
    ends,
    inputs,
    number,
    origin,
    percent,
    signed,
    table,
    unique,
    with_interval,
    write_between,
)
from eval.pages.verdicts import verdict

Found = Mapping[str, Any]

SWEEP, TRAINING = "sweep", "training"

# What a method with another prior than the default is called.
ENDS = {"own only": 0.0, "layer only": float("inf")}

# What methods are compared on.
SHOWN = ("experts", "all")

# Of a paired change of KL.
OUTCOMES = ("better", "undecided", "worse")


def main() -> None:
    """Write the tables between the marks of the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, required=True, help="the page")
    parser.add_argument("--results", type=Path, default=ROOT / "eval" / "results" / "mixture")
    args = parser.parse_args()
    write_between(args.table, "eval/pages/mixture.py", section(load(args.results)))


def load(folder: Path) -> dict[str, Found]:
    """Return all results by the stem of their file."""
    return {
        path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))
    }


def section(results: Mapping[str, Found]) -> str:
    """Return what stands between the marks, in Markdown."""
    groups = [found for stem, found in results.items() if stem not in (SWEEP, TRAINING)]
    groups = sorted(groups, key=lambda found: order(found["rows"][0]))
    rows = [row for found in groups for row in found["rows"]]
    parts = [*made(results[TRAINING], groups[0]), "", "A case is a format, weights only or W4A4:\n"]
    parts.append(summary(rows, groups[0]["confidence"]))
    parts += ["### Methods\n", METHODS]
    for found in groups:
        parts += [f"{what(found['rows'][0])}:\n", methods(found["rows"])]
    parts += ["### Routers\n", ROUTERS, routers(rows)]
    parts += ["### Calibration tokens and `expert_prior`\n", PRIORS]
    parts.append(priors([*results[SWEEP]["rows"], *groups[0]["rows"]], results[TRAINING]))
    return "\n".join(parts)


METHODS = """\
Change is that of the perplexity from the original's; KL is less or more than that of the method
named behind it. Bold: the interval of the difference excludes no change. "convert" is of all
layers, five measurements at once on the GPU; the first of a kind compiles its kernels.
"""

ROUTERS = """\
Rows are of all layers with float routers, and with routers quantized as the rest is. "kept" is the
share of the experts, of those that the original chooses for a token, that are chosen still.
"""

PRIORS = """\
nvfp4, weights only, experts alone: KL, bold where it is different from the default's, and below it
the error of the stacks' outputs on held-out inputs, a mean over the stacks. The tokens of an expert
are the fewest, the median and the most over all stacks. `sse` needs none.
"""


# ---- what was measured ------------------------------------------------------------------------


def made(training: Found, found: Found) -> list[str]:
    """Return the lines that say what the model is, and how it was measured."""
    recipe, text = training["recipe"], next(iter(found["texts"].values()))
    original = next(iter(found["original"].values()))["perplexity"]
    trained, measured = training["results"]["calib"], found["calibration"]
    low, high = map(number, ends(original))
    said = (
        f"A small mixture, which `examples/train_tiny_moe.py` trains: {training['parameters']:,} "
        f"parameters, {recipe['num_hidden_layers']} layers of {recipe['num_experts']} experts of "
        f"which a token takes {recipe['num_experts_per_tok']}, hidden size "
        f"{recipe['hidden_size']}; {training['steps']} steps on {training['train_tokens']:,} "
        f"tokens of what comes with Python, {training['seconds']:.0f} seconds on an "
        f"{training['device']}. The repository has the numbers of its training "
        f"([training.json](../eval/results/mixture/{TRAINING}.json)) and not its weights. "
        f"`{measured['file']}` chose the step whose weights were kept (perplexity "
        f"{trained['perplexity']:.2f}), and models are calibrated on {measured['tokens']:,} tokens "
        f"of it. What is measured is {text['tokens']:,} tokens of `{text['file']}`, "
        f"{text['units']} other documents, of which the original has the perplexity "
        f"{number(original['value'])} ({low} to {high}). Intervals hold with "
        f"{found['confidence']:.0%} confidence. Models compute in {found['dtype']}."
    )
    return [
        *textwrap.wrap(said, 110, break_long_words=False, break_on_hyphens=False),
        "",
        *origin({**found, "machine": found["device"]}),
        "and likewise for the other formats and inputs, and with `--sweep`; all are in "
        "[eval/results/mixture](../eval/results/mixture).",
    ]


def summary(rows: Sequence[Row], confidence: float) -> str:
    """Return a table of how often KL is lower or higher, over formats and inputs."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for key, change in against(row):
            layers, _, other = key.partition(": ")
            same = layers == row["layers"]
            if same and layers not in SHOWN:
                continue
            where = layers if same else f"{row['layers']}, against {layers}"
            outcome = verdict(change["kl"], "kl")
            cases.setdefault((where, row["method"], other), []).append(outcome)
    body = [
        [*names, str(len(found)), *(str(found.count(each)) for each in OUTCOMES)]
        for names, found in sorted(cases.items(), key=lambda item: item[0][0])
    ]
    header = ["layers", "method", "compared with", "cases", "KL lower"]
    chance = (
        f"Of comparisons of what does the same, about {1 - confidence:.0%} would look different."
    )
    return f"{table([*header, 'no difference seen', 'KL higher'], body, left=3)}\n{chance}\n"


def order(row: Row) -> tuple[int, bool]:
    """Return what formats and inputs are sorted by."""
    return (("nvfp4", "mxfp4").index(row["format"]), not row["weight_only"])


def what(row: Row) -> str:
    """Return the format and the inputs of a row, in words."""
    return f"{row['format']}, {inputs(row['weight_only'])}"


def measures(row: Row) -> Row:
    """Return the measures of a row on its text."""
    return next(iter(row["texts"].values()))


def against(row: Row) -> Iterable[tuple[str, Row]]:
    """Return the differences of a row to others, by their layers and method."""
    return measures(row)["against"].items()


# ---- tables -----------------------------------------------------------------------------------


def methods(rows: Sequence[Row]) -> str:
    """Return the table of one format and kind of inputs."""
    body = []
    for method in unique(rows, "method"):
        here = {row["layers"]: row for row in rows if row["method"] == method}
        seconds = f"{here['all']['convert_seconds']:.1f} s"
        body.append([method, *(cell for each in SHOWN for cell in text_cells(here[each])), seconds])
    header = ["method"]
    for layers in SHOWN:
        header += [f"perplexity, {layers}", "change", f"KL, {layers}", "less or more"]
    return table([*header, "convert"], body, left=1)


def text_cells(row: Row) -> list[str]:
    """Return the cells of perplexity and KL, each with its change."""
    found = measures(row)
    less = [
        f"{with_interval(change['kl'], signed, bold=True)}<br>{key.partition(': ')[2]}"
        for key, change in found["against"].items()
    ]
    return [
        with_interval(found["perplexity"], number),
        with_interval(found["change"]["perplexity_ratio"], above, bold=True),
        with_interval(found["kl"], number),
        "".join(less),
    ]


def routers(rows: Sequence[Row]) -> str:
    """Return the table of what quantized routers do."""
    body = []
    for row in rows:
        if row["layers"] != "all and routers":
            continue
        same = [each for each in rows if what(each) == what(row)]
        by_layers = {each["layers"]: each for each in same if each["method"] == row["method"]}
        alone, without = by_layers["routers"], by_layers["all"]
        change = measures(row)["against"][f"all: {row['method']}"]
        body.append(
            [
                what(row),
                row["method"],
                with_interval(measures(alone)["kl"], number),
                percent(alone["choices_kept"]),
                with_interval(measures(without)["kl"], number),
                with_interval(change["kl"], signed, bold=True),
                f"{percent(without['choices_kept'])}<br>{percent(row['choices_kept'])}",
                with_interval(change["perplexity_ratio"], above, bold=True),
            ]
        )
    header = ["format, inputs", "method", "KL, routers alone", "kept", "KL, all"]
    header += ["KL, routers too, less all's", "kept, all<br>and routers", "perplexity, routers too"]
    return table(header, body, left=2)


def priors(rows: Sequence[Row], training: Found) -> str:
    """Return the table of calibration tokens by prior."""
    defaults = {"hessian": 32.0, "gptq": training["recipe"]["hidden_size"] / 2}
    chosen = [row for row in rows if row["layers"] == "experts" and row["expert_tokens"]]
    cells: dict[tuple[int, str], dict[float, Row]] = {}
    (without,) = {prior_cell(row) for row in chosen if row["method"] == "sse"}
    for row in chosen:
        method, _, prior = row["method"].partition(", ")
        if method in defaults:
            value = ENDS.get(prior) if prior in ENDS else None
            if value is None:
                value = float(prior.removeprefix("prior ")) if prior else defaults[method]
            cells.setdefault((row["tokens"], method), {})[value] = row
    columns = sorted({value for found in cells.values() for value in found})
    body = []
    for (tokens, method), found in sorted(cells.items()):
        spread = " / ".join(f"{count:,.0f}" for count in found[0.0]["expert_tokens"])
        line = [f"{tokens:,}", spread, method]
        for each in columns:
            mark = " (default)" if each == defaults[method] else ""
            line.append(prior_cell(found[each], mark) if each in found else "")
        body.append([*line, without])
    names = {value: name for name, value in ENDS.items()}
    header = ["tokens", "of an expert", "method", *(names.get(c, f"{c:g}") for c in columns), "sse"]
    return table(header, body, left=3)


def prior_cell(row: Row, mark: str = "") -> str:
    """Return KL, in bold if it is different from the default's, and the error of the outputs."""
    found = measures(row)
    change = found["against"].get(f"experts: {row['method'].partition(',')[0]}")
    bold = "**" if change is not None and change["kl"]["significant"] else ""
    return f"{bold}{found['kl']['value']:.5f}{bold}{mark}<br>{percent(row['output_error'])}"


if __name__ == "__main__":
    main()
