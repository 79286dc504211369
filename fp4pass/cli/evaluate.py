"""The command `fp4pass eval`: measure a model on texts or tasks, and against its original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..calibration.rows import read_text
from ..checkpoint.float_models import load_tokenizer, text_tokenizer
from ..errors import OptionError
from ..evaluation import Evaluation
from ..evaluation import evaluate as measure
from ..reporting.text import measures, scored, verdict, written
from . import screen
from .options import Device, Measured, MeasuredLength, MeasuredSamples, TrustCode
from .sources import choose_device, load_any, note_dtype
from .tasks import measure_tasks, print_tasks


def evaluate(
    folder: Annotated[str, Argument(help="A folder, packed or float, or a hub id.", metavar="DIR")],
    data: Measured = None,
    reference: Annotated[
        str | None, Option(help="The original: a folder or a hub id.", metavar="MODEL")
    ] = None,
    samples: MeasuredSamples = None,
    seq_len: MeasuredLength = 512,
    stride: Annotated[
        int | None, Option(help="New tokens in each window.", show_default="--seq-len")
    ] = None,
    tasks: Annotated[
        list[str] | None, Option(help="Tasks of lm-eval, instead of a text.", metavar="NAME[,NAME]")
    ] = None,
    include_path: Annotated[
        Path | None, Option(help="A folder with your own tasks.", metavar="PATH")
    ] = None,
    limit: Annotated[int | None, Option(help="Documents of each task.", show_default="all")] = None,
    num_fewshot: Annotated[
        int | None, Option(help="Examples before each question.", show_default="that of the task")
    ] = None,
    metadata: Annotated[
        list[str] | None, Option(help="Values that a task reads.", metavar="KEY=VALUE")
    ] = None,
    batch_size: Annotated[int, Option(help="Windows or requests that run at once.")] = 8,
    device: Device = None,
    trust_remote_code: TrustCode = False,
    as_json: screen.Json = False,
) -> None:
    """Measure perplexity, and with --reference the distance from the original.

    Windows do not overlap, and each is scored on all but its first token. With --stride they
    overlap, and each is scored on its new tokens. Intervals come from a bootstrap over documents.
    With --tasks, run tasks of lm-eval instead of a text.
    """
    trust = trust_remote_code
    if tasks:
        if data or samples is not None or stride is not None:
            raise OptionError("--data, --samples and --stride cannot be used with --tasks.")
        scores = measure_tasks(
            folder,
            reference,
            tasks,
            include_path=include_path,
            metadata=metadata or (),
            limit=limit,
            num_fewshot=num_fewshot,
            batch_size=batch_size,
            device=device,
            trust=trust,
        )
        if as_json:
            screen.print_json({"model": folder, "reference": reference, "tasks": scores})
        else:
            print_tasks(scores)
        return
    if include_path or limit is not None or num_fewshot is not None or metadata:
        raise OptionError("--include-path, --limit, --num-fewshot and --metadata need --tasks.")
    if not data:
        raise OptionError("Expected a text or tasks to measure on, got none. Give --data FILE.")
    chosen, tokenizer = choose_device(device), text_tokenizer(load_tokenizer(folder, trust), folder)
    texts = read_texts(data, samples, seq_len, tokenizer)
    model = load_any(folder, chosen, trust)
    original = None if reference is None else load_any(reference, chosen, trust)
    options = {"window": seq_len, "windows": samples, "batch_size": batch_size, "stride": stride}
    rows = measure_texts(model, original, tokenizer, texts, **options)
    found = [each.row(name, before) for name, each, before in rows]
    if as_json:
        screen.print_json({"model": folder, "reference": reference, "texts": found})
        return
    for number, row in enumerate(found):
        print(
            "\n" * (number > 0)
            + f"{row['text'].rpartition('/')[2] or row['text']}: {scored(row)}\n"
        )
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
    note_dtype("measures", model, original)
    rows = []
    for name, text in texts.items():
        before = None if original is None else measure(original, tokenizer, text, **options)
        rows.append((name, measure(model, tokenizer, text, original, **options), before))
    return rows
