"""fp4pass eval: measure a model on texts, and against its original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from typer import Argument, Option

from ..calibration.rows import read_text
from ..checkpoint.float_models import load_tokenizer, text_tokenizer
from ..errors import OptionError
from ..evaluation import Evaluation
from ..evaluation import evaluate as measure
from ..reporting.text import measures, scored, verdict, written
from . import options as given
from . import screen


def evaluate(
    folder: Annotated[str, Argument(help="A folder, packed or float, or a hub id.", metavar="DIR")],
    data: given.Measured = None,
    reference: Annotated[
        str | None, Option(help="The original: a folder or a hub id.", metavar="MODEL")
    ] = None,
    samples: given.MeasuredSamples = None,
    seq_len: given.MeasuredLength = 512,
    stride: Annotated[
        int | None, Option(help="New tokens in each window.", show_default="--seq-len")
    ] = None,
    batch_size: given.BatchSize = 8,
    device: given.Device = None,
    trust_remote_code: given.TrustCode = False,
    as_json: screen.Json = False,
) -> None:
    """Measure perplexity, and with --reference the distance from the original.

    Windows do not overlap, and each is scored on all but its first token. With --stride they
    overlap, and each is scored on its new tokens. Intervals come from a bootstrap over documents.
    """
    if not data:
        raise OptionError("Expected a text to measure on, got none. Give --data FILE.")
    chosen, trust = given.choose_device(device), trust_remote_code
    tokenizer = text_tokenizer(load_tokenizer(folder, trust), folder)
    texts = read_texts(data, samples, seq_len, tokenizer)
    model = given.load_any(folder, chosen, trust)
    original = None if reference is None else given.load_any(reference, chosen, trust)
    options = {"window": seq_len, "windows": samples, "batch_size": batch_size, "stride": stride}
    measured = measure_texts(model, original, tokenizer, texts, **options)
    rows = [each.row(name, before) for name, each, before in measured]
    if as_json:
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


def read_texts(
    names: Sequence[str], samples: int | None, seq_len: int, tokenizer: Any
) -> dict[str, str]:
    """Return the texts of names; of a dataset as much as so many windows need."""
    tokens = None if samples is None else samples * seq_len
    return {name: read_text(name, tokens, tokenizer) for name in names}


def measure_texts(
    model: Any, original: Any, tokenizer: Any, texts: Mapping[str, str], **options: Any
) -> list[tuple[str, Evaluation, Evaluation | None]]:
    """Return the evaluations of the model, and of the original if there is one, on each text."""
    given.note_dtype("measures", model, original)
    rows = []
    for name, text in texts.items():
        before = None if original is None else measure(original, tokenizer, text, **options)
        rows.append((name, measure(model, tokenizer, text, original, **options), before))
    return rows
