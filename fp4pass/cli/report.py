"""fp4pass report: one page about a folder with packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..checkpoint import is_packed, open_checkpoint
from ..checkpoint.float_models import load_float, load_tokenizer, text_tokenizer
from ..reporting.data import gather
from ..reporting.page import require_free, write_page
from ..reporting.text import size
from . import options as given
from . import screen
from .evaluate import measure_texts, read_texts


def report(
    folder: Annotated[str, Argument(help="A folder with packed weights.", metavar="DIR")],
    output: Annotated[
        Path, Option("--output", "-o", help="The page to write.", metavar="FILE.html")
    ],
    reference: Annotated[
        str | None,
        Option(help="The original, to compare weights, sizes and outputs with.", metavar="MODEL"),
    ] = None,
    data: given.Measured = None,
    samples: given.MeasuredSamples = None,
    seq_len: given.MeasuredLength = 512,
    batch_size: given.BatchSize = 8,
    device: given.Device = None,
    trust_remote_code: given.TrustCode = False,
    overwrite: Annotated[bool, Option(help="Replace the page and the JSON beside it.")] = False,
    as_json: screen.Json = False,
) -> None:
    """Write one page about a quantized model: sizes, errors, scales, perplexity, recipe.

    The page needs no network. Its numbers are written beside it as JSON.
    """
    given.require_at_least(1, batch_size=batch_size)
    require_free(output, overwrite)
    # A damaged folder is refused before a text is read.
    open_checkpoint(Path(folder))
    chosen, trust = given.choose_device(device), trust_remote_code
    # A folder is read tensor by tensor; a model that runs, or comes from a hub, is loaded.
    original: Any = reference
    if reference is not None and (data or not Path(reference).is_dir() or is_packed(reference)):
        original = load_float(reference, "auto", chosen, trust)
    model: Any = folder
    rows: list[dict[str, Any]] = []
    if data:
        tokenizer = text_tokenizer(load_tokenizer(folder, trust), folder)
        texts = read_texts(data, samples, seq_len, tokenizer)
        model = given.load_any(folder, chosen, trust)
        options = {"window": seq_len, "windows": samples, "batch_size": batch_size}
        measured = measure_texts(model, original, tokenizer, texts, **options)
        rows = [found.row(name, before) for name, found, before in measured]
    page = gather(
        folder,
        name=folder,
        reference=original,
        reference_name=reference or "",
        evaluations=rows,
    )
    numbers = write_page(page, output)
    if as_json:
        screen.print_json(page)
    else:
        _print(page, output, numbers)


def _print(data: Mapping[str, Any], page: Path, numbers: Path) -> None:
    summary = data["summary"]
    print(
        f"{page}: {summary['layers']} layers at {summary['bits_per_weight']:.2f} bits, "
        f"{size(summary['bytes'])}, {summary['share']:.0%} of "
        f"{size(summary['bytes_before'])} before"
    )
    print(f"beside it: {numbers.name}")
