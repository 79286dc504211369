"""Write tables of what eval/layer_error.py measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from figures import offsets_of
from tables import aligned, group_by, mean, percent

Row = Mapping[str, Any]

NOTE = """\
Errors are relative: of the weight, of the output on held-out tokens, and of the output when inputs
are quantized too. `predicted err` is the output error on calibration tokens if blocks of columns
were uncorrelated, which hessian minimizes. `scales moved` are blocks with another scale than
naive's, `offset` is how many steps above it: the mean over all blocks, and the range."""


def page(result: dict[str, Any]) -> str:
    """Return everything as Markdown, aligned to be read as it is."""
    rows = result["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    layers = group_by(rows, "layer")
    parts = [
        f"# Errors of single layers: {result['model']}",
        f"Written by\n\n    {result['command']}",
        f"In {result['dtype']} on {result['device']} with torch.set_num_threads"
        f"({result['threads']}); {versions}.\nInputs: {result['inputs']}.",
        f"Means over {len(layers)} layers, and the sum of the times:"
        if len(layers) > 1
        else f"The layer {rows[0]['layer']}, {size(rows[0])}:",
        overview(rows),
        NOTE,
    ]
    if len(layers) > 1:
        parts += ["## Layers", "Weight / output / layer error in percent."]
        parts += [table_of_layers(part) for part in group_by(rows, "format", "block").values()]
    if result["sensitivity"]:
        parts += ["## One layer at a time", sensitivity_note(result["sensitivity"][0])]
        found = group_by(result["sensitivity"], "format", "block", "method")
        parts += [table_of_sensitivity(part) for part in found.values()]
    if result["left_out"]:
        parts += ["## Left out"]
        parts += [aligned(("layer", "formats", "why"), (e.values() for e in result["left_out"]))]
    return "\n\n".join(parts)


def overview(rows: Sequence[Row]) -> str:
    """Return a line for each format, block and method."""
    header = ["format", "block", "method", "bits", "weight err", "predicted err", "output err"]
    header += ["layer err", "scales moved", "offset", "search"]
    lines = []
    for (fmt, block, method), part in group_by(rows, "format", "block", "method").items():
        keys = ("weight_error", "predicted_error", "output_error", "w4a4_error")
        errors = [percent(mean(row[key] for row in part)) for key in keys]
        bits = sum(row["bits"] * weights(row) for row in part) / sum(map(weights, part))
        seconds = duration(sum(row["seconds"] for row in part))
        lines.append([fmt, block, method, f"{bits:.2f}", *errors, *moved(part), seconds])
    return aligned(header, lines)


def moved(rows: Iterable[Row]) -> tuple[str, str]:
    """Return the share of blocks whose scale is not the naive one, and how far it is from that."""
    counts = offsets_of(rows)
    blocks = sum(counts.values())
    if not blocks:
        return "-", "-"
    average = sum(offset * count for offset, count in counts.items()) / blocks
    spread = f"{average:+.2f} ({min(counts):+d} to {max(counts):+d})" if any(counts) else "0"
    return percent(1 - counts[0] / blocks), spread


def table_of_layers(rows: Sequence[Row]) -> str:
    """Return a line for each layer in one format."""
    methods = list(group_by(rows, "method"))
    lines = []
    for (name,), part in group_by(rows, "layer").items():
        errors = [[row[f"{key}_error"] for key in ("weight", "output", "w4a4")] for row in part]
        cells = [" / ".join(map(number, each)) for each in errors]
        lines.append([name, size(part[0]), *cells])
    names = [f"{rows[0]['format']}/{rows[0]['block']} {method}" for (method,) in methods]
    return aligned(["layer", "N x K", *names], lines)


def sensitivity_note(row: Row) -> str:
    """Return what the table of single layers shows."""
    return (
        f"The perplexity of the original is {row['original']:.4f}, on {row['tokens']} tokens of "
        f"{row['units']} documents (windows, if the text is one).\nChange of it, and KL(original "
        "|| quantized) in nats per token, when one layer alone is quantized,\nwith 95 % intervals; "
        "* where that of the change leaves out 0."
    )


def table_of_sensitivity(rows: Sequence[Row]) -> str:
    """Return a line for each layer: float inputs, then 4-bit inputs."""
    lines = []
    for (name,), part in group_by(rows, "layer").items():
        cells = []
        for row in sorted(part, key=lambda row: not row["weight_only"]):
            cells += [change(row["perplexity_ratio"]), interval(row["kl"], row["kl_interval"])]
        lines.append([name, *cells])
    label = f"{rows[0]['format']}/{rows[0]['block']} {rows[0]['method']}"
    return aligned([label, "W4A16 perplexity", "W4A16 KL", "W4A4 perplexity", "W4A4 KL"], lines)


def change(ratio: Row) -> str:
    """Return the change of perplexity in per cent, with its interval."""

    def signed(value: float) -> str:
        return f"{100 * (value - 1):+.2f}"

    if ratio["significant"] is None:
        return f"{signed(ratio['value'])} %"
    star = "*" if ratio["significant"] else " "
    return f"{signed(ratio['value'])} % ({signed(ratio['low'])}, {signed(ratio['high'])}){star}"


def interval(value: float, ends: Sequence[float] | None) -> str:
    """Return a KL with its interval."""
    return f"{value:.5f}" + (f" ({ends[0]:.5f}, {ends[1]:.5f})" if ends else "")


def weights(row: Row) -> int:
    """Return how many weights a layer has."""
    return row["shape"][0] * row["shape"][1]


def size(row: Row) -> str:
    """Return the shape of a layer."""
    return " x ".join(map(str, row["shape"]))


def number(value: float | None) -> str:
    """Return per cents without their sign."""
    return percent(value).removesuffix(" %")


def duration(seconds: float) -> str:
    """Return a time with three digits."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"
