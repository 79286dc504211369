"""fp4pass eval: measure a model on texts or on tasks of lm-eval, and against its original."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..calibration.rows import read_text
from ..checkpoint.float_models import load_tokenizer, reading, text_tokenizer
from ..errors import OptionError, StateError, expected, nearest
from ..evaluation import Evaluation, fast_dtype
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
    device: given.Device = None,
    trust_remote_code: given.TrustCode = False,
    as_json: screen.Json = False,
) -> None:
    """Measure perplexity, and with --reference the distance from the original.

    Windows do not overlap, and each is scored on all but its first token. With --stride they
    overlap, and each is scored on its new tokens. Intervals come from a bootstrap over documents.
    With --tasks, run tasks of lm-eval instead of a text.
    """
    if not tasks and (include_path or limit is not None or num_fewshot is not None or metadata):
        raise OptionError("--include-path, --limit, --num-fewshot and --metadata need --tasks.")
    if tasks and (data or samples is not None or stride is not None):
        raise OptionError("--data, --samples and --stride cannot be used with --tasks.")
    if not tasks and not data:
        raise OptionError("Expected a text or tasks to measure on, got none. Give --data FILE.")
    if tasks:
        _require_tasks(tasks, include_path, limit, num_fewshot, metadata or ())
    chosen, trust = given.choose_device(device), trust_remote_code
    tokenizer = text_tokenizer(load_tokenizer(folder, trust), folder)
    if tasks:
        names = [name.strip() for part in tasks for name in part.split(",") if name.strip()]
        values = {"pretrained": folder, **dict(pair.split("=", 1) for pair in metadata or ())}
        with _quiet():
            found, manager = _find(names, include_path, values)
        options = {"limit": limit, "num_fewshot": num_fewshot, "task_manager": manager}
        options |= {"tasks": found, "batch_size": batch_size}
        rows = _run(folder, chosen, tokenizer, trust, **options)
        if reference is not None:
            others = _run(reference, chosen, tokenizer, trust, **options)
            for row, other in zip(rows, others, strict=True):
                row["reference"] = other["value"]
        if as_json:
            screen.print_json({"model": folder, "reference": reference, "tasks": rows})
        else:
            _print_tasks(rows)
        return
    texts = read_texts(data or (), samples, seq_len, tokenizer)
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


def _require_tasks(
    tasks: Sequence[str],
    include_path: Path | None,
    limit: int | None,
    num_fewshot: int | None,
    metadata: Sequence[str],
) -> None:
    """Refuse options of tasks that cannot be used."""
    given.require_at_least(1, limit=limit)
    given.require_at_least(0, num_fewshot=num_fewshot)
    if not any(part.replace(",", "").strip() for part in tasks):
        raise OptionError(expected("--tasks", "names of tasks, separated by commas", "none"))
    if include_path is not None and not include_path.is_dir():
        folder_of_tasks = "a folder with YAML files of tasks"
        raise OptionError(expected("--include-path", folder_of_tasks, str(include_path)))
    for pair in metadata:
        if "=" not in pair:
            raise OptionError(expected("--metadata", "KEY=VALUE, as in text=wiki.raw", pair))


def _find(
    names: Sequence[str], include_path: Path | None, metadata: Mapping[str, str]
) -> tuple[list[Any], Any]:
    """Load the tasks and groups of names; return them and the manager that loaded them."""
    from .._compat.lm_eval import TaskManager

    options: dict[str, Any] = {"include_path": include_path, "metadata": metadata}
    manager = TaskManager(include_defaults=False, **options)
    # Its own ten thousand files take lm-eval some seconds to read.
    if not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(include_defaults=True, **options)
    found: dict[str, Any] = {}
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            raise OptionError(
                f"--tasks: lm-eval has no task {name!r}.{nearest(name, manager.all_tasks)} Give a "
                "folder with your own tasks as --include-path."
            )
        for match in matching:
            with reading(match, "the task"):
                loaded = manager.load(match)
            tasks, groups = loaded["tasks"], loaded["groups"]
            if any(getattr(task, "UNSAFE_CODE", False) for task in tasks.values()):
                raise OptionError(
                    f"{match} runs code that the model writes, which this command does not. "
                    "Run python -m fp4pass.integrations.lm_eval run --model fp4pass "
                    "--confirm_run_unsafe_code."
                )
            found |= {match: groups[match]} if match in groups else tasks
    return list(found.values()), manager


def _run(
    source: str, device: str, tokenizer: Any, trust: bool, *, batch_size: int, **options: Any
) -> list[dict[str, Any]]:
    """Return a row for each metric of each task, with options of lm-eval."""
    with _quiet():
        from lm_eval.models.huggingface import HFLM

        from .._compat.lm_eval import evaluate_tasks

    model: Any = given.load_any(source, device, trust)
    if model.get_output_embeddings() is None:
        raise StateError(
            f"{source}: expected a language model with a head, which tasks of lm-eval need, got "
            f"{type(model).__name__} without one."
        )
    given.note_dtype("measures", model)
    with _quiet(), fast_dtype(model):
        # The default of lm-eval is the softmax in the dtype of the logits.
        lm: Any = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")
        result: Any = evaluate_tasks(lm, log_samples=False, **options)
    return [
        {
            "task": task,
            "metric": key.partition(",")[0],
            "filter": key.partition(",")[2],
            "value": value,
            "stderr": _number(values.get(key.replace(",", "_stderr,"))),
            "documents": sum(_documents(result, task)),
            "shots": result["n-shot"].get(task),
        }
        for task, values in result["results"].items()
        for key, value in values.items()
        if "," in key and "_stderr," not in key and _number(value) is not None
    ]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _documents(result: Any, task: str) -> Iterator[int]:
    """Yield how many documents of a task, or of each task of a group, were used."""
    if task in result["n-samples"]:
        yield result["n-samples"][task]["effective"]
    for member in result["group_subtasks"].get(task, ()):
        yield from _documents(result, member)


def _print_tasks(rows: Sequence[Mapping[str, Any]]) -> None:
    def digits(value: float | None, sign: str = "") -> str:
        return "-" if value is None else f"{value:{sign}.4f}"

    compares = any("reference" in row for row in rows)
    header = ["task ", "metric ", "value", "stderr"]
    header += ["reference", "change"] if compares else []
    lines = []
    for row in rows:
        metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
        line = [row["task"], metric, digits(row["value"]), digits(row["stderr"])]
        if compares:
            line += [digits(row["reference"]), digits(row["value"] - row["reference"], "+")]
        lines.append([*line, f"{row['documents']:,}", str(row["shots"])])
    screen.print_table([*header, "documents", "shots"], lines)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log of lm-eval off the screen, and its progress bars to terminals."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    sink = sys.stderr if sys.stderr.isatty() else io.StringIO()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        log.setLevel(before)
