"""fp4pass eval and report: measure a model on texts, and write one page about a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..calibration.rows import read_text
from ..checkpoint import is_packed, open_checkpoint
from ..checkpoint.float_models import load_float, load_tokenizer, text_tokenizer
from ..errors import OptionError
from ..evaluation import evaluate as measure
from ..reporting.page import gather, require_free, write_page
from ..reporting.text import measures, scored, size, verdict, written
from . import options as given
from . import screen


def evaluate(
    folder: str,
    data: list[str] | None = None,
    reference: str | None = None,
    samples: int | None = None,
    seq_len: int = 512,
    stride: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    trust_remote_code: bool = False,
    json: bool = False,
) -> None:
    """Measure perplexity, and with --reference the distance from the original.

    Windows do not overlap, and each is scored on all but its first token. With --stride they
    overlap, and each is scored on its new tokens. Intervals come from a bootstrap over documents.
    """
    if not data:
        raise OptionError("Expected a text to measure on, got none. Give --data FILE.")
    chosen, trust = given.choose_device(device), trust_remote_code
    options = {"window": seq_len, "windows": samples, "batch_size": batch_size, "stride": stride}
    rows, _ = _measured(folder, reference, data, chosen, trust, options)
    if json:
        screen.print_json({"model": folder, "reference": reference, "texts": rows})
        return
    for number, row in enumerate(rows):
        name = row["text"].rpartition("/")[2] or row["text"]
        print("\n" * (number > 0) + f"{name}: {scored(row)}\n")
        lines = [
            [each.label, *(written(value, each.style) for value in each.values)]
            for each in measures(row)
        ]
        screen.print_table(["measure ", "value", "low", "high"], lines)
        if said := verdict(row):
            print(f"\n{said}")


def _measured(
    folder: str,
    reference: str | None,
    data: list[str],
    device: str,
    trust: bool,
    options: dict[str, Any],
) -> tuple[list[dict[str, Any]], Any]:
    """Return the measures of a model on each text, beside those of the original, and that."""
    tokenizer = text_tokenizer(load_tokenizer(folder, trust), folder)
    # Of a dataset as much as so many windows need.
    tokens = None if options["windows"] is None else options["windows"] * options["window"]
    texts = {name: read_text(name, tokens, tokenizer) for name in data}
    model = given.load_any(folder, device, trust)
    original = None if reference is None else given.load_any(reference, device, trust)
    given.note_dtype("measures", model, original)
    rows = []
    for name, text in texts.items():
        before = None if original is None else measure(original, tokenizer, text, **options)
        rows.append(measure(model, tokenizer, text, original, **options).row(name, before))
    return rows, original


def report(
    folder: str,
    output: Path,
    reference: str | None = None,
    data: list[str] | None = None,
    samples: int | None = None,
    seq_len: int = 512,
    batch_size: int = 8,
    device: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Write one page about a quantized model: sizes, errors, scales, perplexity, recipe.

    The page needs no network. Its numbers are written beside it as JSON.
    """
    given.require_at_least(1, batch_size=batch_size)
    require_free(output, overwrite)
    # A damaged folder is refused before a text is read.
    open_checkpoint(Path(folder))
    chosen, trust = given.choose_device(device), trust_remote_code
    original: Any = reference
    rows: list[dict[str, Any]] = []
    if reference is not None and is_packed(reference):
        # It says that a float model is expected.
        load_float(reference, "auto", chosen, trust)
    if data:
        options = {"window": seq_len, "windows": samples, "batch_size": batch_size}
        rows, original = _measured(folder, reference, data, chosen, trust, options)
    elif reference is not None and not Path(reference).is_dir():
        original = load_float(reference, "auto", chosen, trust)
    page = gather(
        folder, name=folder, reference=original, reference_name=reference or "", evaluations=rows
    )
    numbers = write_page(page, output)
    if json:
        screen.print_json(page)
        return
    summary = page["summary"]
    print(
        f"{output}: {summary['layers']} layers at {summary['bits_per_weight']:.2f} bits, "
        f"{size(summary['bytes'])}, {summary['share']:.0%} of "
        f"{size(summary['bytes_before'])} before\nbeside it: {numbers.name}"
    )
