"""The pages of architectures, from eval/results/architectures.json alone.

    python -m eval.pages.architectures --kind llama

prints the page of one type of model; without `--kind`, the page that lists all. Needs nothing but
Python, so that the site is built without torch.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.pages.tables import ROOT

FILE = ROOT / "eval" / "results" / "architectures.json"

Row = Mapping[str, Any]

# By the case of the results: what a user asks for.
SCHEMES = {"nvfp4": "nvfp4a16", "mxfp4": "mxfp4a16", "nvfp4, experts mxfp4": "nvfp4a16"}
RULED = "nvfp4, experts mxfp4"
RULE = 'rules=[("*.experts.*", {"fmt": "mxfp4a16"})]'
ENGINES = ("vLLM", "SGLang")

# These sections are alike on hundreds of pages: a search finds the page by its head.
UNSEARCHED = "{ data-search-exclude }"

# What the outcome of a test says of stock transformers.
EQUAL = {
    "equal": "yes: every tensor is equal, bit for bit",
    "equal: dequantized": "yes, as a float model: every weight is equal, bit for bit",
    "own layout": "no: the folder has fp4pass's own layout",
}


def main() -> None:
    """Print a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kind", help="a type of model, as its config.json has it")
    kind = parser.parse_args().kind
    found = pages()
    if kind and f"architectures/{kind}.md" not in found:
        raise SystemExit(f"{FILE} has no {kind!r}; architectures.md lists the types.")
    print(found[f"architectures/{kind}.md" if kind else "architectures.md"])


def pages() -> dict[str, str]:
    """Return all pages by their paths in the site."""
    found = json.loads(FILE.read_text("utf-8"))
    rows = sorted((each for each in found["rows"] if each.get("formats")), key=kind_of)
    others = sorted((each for each in found["rows"] if not each.get("formats")), key=kind_of)
    made = {f"architectures/{each['kind']}.md": page(each, found) for each in rows}
    return {"architectures.md": index(rows, others, found), **made}


def kind_of(row: Row) -> str:
    """Return the type of a model, by which rows are sorted."""
    return row["kind"].lower()


def versions(found: Mapping[str, Any]) -> str:
    """Return the versions of a measurement that matter to a reader."""
    named = {"transformers": "transformers", "compressed_tensors": "compressed-tensors"}
    return " and ".join(f"{name} {found['versions'][key]}" for key, name in named.items())


def index(rows: list[Row], others: list[Row], found: Mapping[str, Any]) -> str:
    """Return the page that lists all types of models."""
    stock = sum(each["formats"]["nvfp4"]["outcome"].startswith("equal") for each in rows)
    lines = [
        "# Architectures",
        "",
        f"{len(rows)} model types of {versions(found)}, each built small with random weights, "
        f"converted, saved, and read by stock transformers, which reads {stock} of them in "
        "nvfp4a16. The page of a type has the command, the layers that are packed or skipped and "
        "why, and who reads the folder.",
        "",
        "The type is the `model_type` in the model's `config.json`. *skipped* counts matrices of "
        "the small model that stay in floating point, without output embeddings.",
        "",
        '<p class="filter"><input type="search" placeholder="model_type or class" '
        'aria-label="Filter the table" data-filters="architectures"></p>',
        "",
        '<div id="architectures" markdown>',
        "",
        "| type | class | transformers reads nvfp4a16 | mxfp4a16 | skipped |",
        "|---|---|---|---|---|",
        *(line(each) for each in rows),
        "",
        "</div>",
        "",
        '<script src="assets/filter.js"></script>',
        "",
        "## Not in the table",
        "",
        *left_out(others),
        "Models of other libraries: [any PyTorch model](recipes/any_model.md).",
        "",
        f"`{found['command']}` wrote the results with {versions(found)}, "
        f"torch {found['versions']['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    """Return a type's line of the table."""
    cells = [f"[`{row['kind']}`](architectures/{row['kind']}.md)", f"`{row['class']}`"]
    for case in ("nvfp4", "mxfp4"):
        outcome = row["formats"].get(case, {}).get("outcome", "-")
        word = {"equal": "yes", "equal: dequantized": "dequantized", "own layout": "no"}
        cells.append(word.get(outcome, "-" if outcome == "-" else "no"))
    ruled = row["formats"].get(RULED, {}).get("outcome", "")
    if ruled.startswith("equal"):
        cells[2] = "with a rule"
    cells.append(str(sum(n for _, n, why in row["skipped"] if "output embedding" not in why)))
    return f"| {' | '.join(cells)} |"


def left_out(others: list[Row]) -> Iterator[str]:
    """Yield the types that were not counted, by the reason."""
    reasons = {
        "-": "Not tested, because no small model of it can be made",
        "no linear layer": "Without a linear layer that can be packed",
    }
    for outcome, words in reasons.items():
        kinds = [f"`{each['kind']}`" for each in others if each["not counted"] == outcome]
        if kinds:
            yield from (f"{words}: {', '.join(kinds)}.", "")


def page(row: Row, found: Mapping[str, Any]) -> str:
    """Return the page of one type of model."""
    kind, name = row["kind"], row["class"]
    lines = [
        "---",
        f"title: {kind}",
        "search:",
        "  boost: 0.5",
        "---",
        "",
        f"# `{kind}`",
        "",
        f"`{name}` of {versions(found)}. A small model with random weights was converted, saved "
        "and loaded. [All architectures](../architectures.md)",
        "",
        f"## Quantize {UNSEARCHED}",
        "",
        *command(row),
        "```python",
        "import fp4pass",
        f"from transformers import {name}",
        "",
        *wrapped(name),
        'fp4pass.convert(model, "nvfp4a16", quality="fast")',
        'fp4pass.save(model, "out")',
        "```",
        "",
        "`fast` needs no data. `good` and `best` lose less and calibrate: "
        "[quality by name](../quality.md#quality-by-name), "
        "[calibration data](../calibration.md).",
        "",
        f"## What is packed {UNSEARCHED}",
        "",
        "| layers | in the small model |",
        "|---|---:|",
        *(f"| `{each}` | {n} |" for each, n in row["packed"].items()),
        "",
        *skipped(row),
        *other_layers(row),
        f"## Who reads the folder {UNSEARCHED}",
        "",
        *readers(row),
    ]
    return "\n".join(lines) + "\n"


def command(row: Row) -> Iterator[str]:
    """Yield the command, or why there is none."""
    if row["command"]:
        yield from (f"The command line does not support it ({row['command']}). In Python:", "")
        return
    yield from (
        "```sh",
        "fp4pass quantize MODEL -o out --scheme nvfp4a16 --quality fast",
        "```",
        "",
        "MODEL is a folder or a hub id. The same in Python:",
        "",
    )


def wrapped(name: str) -> list[str]:
    """Return the line that loads a model, in two where it is long."""
    line = f'model = {name}.from_pretrained("MODEL", dtype="auto")'
    if len(line) <= 80:
        return [line]
    return [f"model = {name}.from_pretrained(", '    "MODEL", dtype="auto"', ")"]


def skipped(row: Row) -> list[str]:
    """Return the table of what stays in floating point."""
    if not row["skipped"]:
        return ["Every linear layer is packed. Embeddings, norms and convolutions stay dense.", ""]
    return [
        f"## What is skipped, and why {UNSEARCHED}",
        "",
        "| layers | in the small model | why |",
        "|---|---:|---|",
        *(f"| `{name}` | {n} | {escaped(why)} |" for name, n, why in row["skipped"]),
        "",
        "Embeddings, norms and convolutions also stay dense. If the reason says so, "
        "[add a rule](../recipes/mixed_precision.md) to pack the layer.",
        "",
    ]


def other_layers(row: Row) -> Iterator[str]:
    """Yield where another format packs other layers."""
    for case, each in row["formats"].items():
        if "packed" not in each:
            continue
        had = {(name, n) for name, n, _ in row["skipped"]}
        more = [(name, why) for name, n, why in each["skipped"] if (name, n) not in had]
        reasons = "; ".join(f"`{name}` ({escaped(why)})" for name, why in more)
        rule = f" with `{RULE}`" if case == RULED else ""
        if more:
            yield from (f"In {SCHEMES[case]}{rule} these are also skipped: {reasons}.", "")


def readers(row: Row) -> Iterator[str]:
    """Yield the table of readers, and what the words in it rest on."""
    yield f"| scheme | fp4pass | stock transformers | {' | '.join(ENGINES)} |"
    yield "|---|---|---|" + "---|" * len(ENGINES)
    for case, each in row["formats"].items():
        scheme = f"`{SCHEMES[case]}`" + (", experts in mxfp4" if case == RULED else "")
        why = dict(reason.removesuffix(")").split(" (", 1) for reason in each["reasons"])
        stock = EQUAL.get(each["outcome"]) or f"no: {why['transformers']}"
        engines = [engine(name, each["readers"], why) for name in ENGINES]
        yield f"| {' | '.join(map(escaped, (scheme, 'yes', stock, *engines)))} |"
    if RULED in row["formats"]:
        yield from ("", f"Experts in mxfp4: `convert(..., {RULE})`.")
    yield from (
        "",
        "transformers was tested on this type. The loaders of engines were tested on folders of "
        f"other models; see an engine's list of models for `{row['class']}`. "
        "[Who reads what](../readers.md)",
    )


def engine(name: str, readers: Sequence[str], why: Mapping[str, str]) -> str:
    """Return what is known of an engine."""
    if name in readers:
        return "its loader reads the layout"
    if name not in why:
        return "no: the folder has fp4pass's own layout"
    return f"{'not known' if 'may not have' in why[name] else 'no'}: {why[name]}"


def escaped(text: str) -> str:
    """Return a reason for a cell of a table: code as code, and that of a small model named so."""
    text = re.sub(r"(?<!`)rules=\[.*?\)\]", lambda found: f"`{found[0]}`", text)
    small = re.match(r"in_features=\d+ is not a multiple", text)
    return (f"{text}, in the small model" if small else text).replace("|", "\\|")


if __name__ == "__main__":
    main()
