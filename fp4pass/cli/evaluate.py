"""fp4pass eval: how good a model is on a text, and how far from its original."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..errors import OptionError
from ..evaluate import evaluate as measure
from . import screen
from .sources import choose_device, load_any, load_tokenizer, read_text, text_tokenizer


def evaluate(
    folder: Annotated[
        str, typer.Argument(help="A folder, packed or float, or a hub id.", metavar="DIR")
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to measure on, as --calib of quantize; can be given more than once.",
            metavar="FILE|DATASET",
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The original: a folder or a hub id.", metavar="MODEL")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(help="Of each text, spread evenly.", show_default="all")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Windows that run at once.")] = 8,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, or auto for all of them.", show_default="found")
    ] = None,
    as_json: screen.Json = False,
) -> None:
    """Measure perplexity, and with --reference the distance from the original.

    Windows do not overlap, and each is scored on all but its first token.
    """
    if not text:
        raise OptionError("There is nothing to measure on. Give --text FILE.")
    texts = {spec: read_text(spec, None if windows is None else windows * length) for spec in text}
    chosen = choose_device(device)
    tokenizer = text_tokenizer(load_tokenizer(folder), folder)
    model = load_any(folder, chosen)
    original = None if reference is None else load_any(reference, chosen)
    options: dict[str, Any] = {"window": length, "windows": windows, "batch_size": batch_size}
    options["progress"] = screen.is_terminal()
    rows = []
    for spec, words in texts.items():
        # The reference by itself first, for what it costs is said in its perplexity, too.
        before = None if original is None else measure(original, tokenizer, words, **options)
        found = measure(model, tokenizer, words, original, **options).to_dict()
        if before is not None:
            found["reference_perplexity"] = before.perplexity
        rows.append({"text": spec, **found})
    if as_json:
        screen.print_json({"model": folder, "reference": reference, "texts": rows})
    else:
        _print(rows)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    compares = "reference_perplexity" in rows[0]
    header = ["text ", "tokens", "perplexity", "bits/byte"]
    header += ["reference", "change", "KL", "top-1"] if compares else []
    lines = []
    for row in rows:
        bits = row["bits_per_byte"]
        name = row["text"].rpartition("/")[2] or row["text"]
        line = [name, f"{row['tokens']:,}", f"{row['perplexity']:.4f}"]
        line.append("-" if bits is None else f"{bits:.4f}")
        if compares:
            before = row["reference_perplexity"]
            change = 100 * (row["perplexity"] / before - 1)
            line += [f"{before:.4f}", f"{change:+.2f} %", f"{row['kl']:.5f}"]
            line.append(screen.percent(row["top1"]))
        lines.append(line)
    screen.print_table(header, lines)
