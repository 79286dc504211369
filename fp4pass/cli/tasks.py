"""Measure a model, and its original, on tasks of lm-eval."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.float_models import load_tokenizer, reading, text_tokenizer
from ..errors import OptionError, StateError, expected, nearest
from ..evaluation import fast_dtype
from . import screen
from .sources import choose_device, load_any, note_dtype


def measure_tasks(
    folder: str,
    reference: str | None,
    tasks: Sequence[str],
    *,
    include_path: Path | None,
    metadata: Sequence[str],
    limit: int | None,
    num_fewshot: int | None,
    batch_size: int,
    device: str | None,
    trust: bool,
) -> list[dict[str, Any]]:
    """Return a row for each metric of each task, with the value of the reference if it is given."""
    for name, value, least in (("--limit", limit, 1), ("--num-fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise OptionError(expected(name, f"at least {least}", value))
    names = [name.strip() for part in tasks for name in part.split(",") if name.strip()]
    if not names:
        raise OptionError(expected("--tasks", "names of tasks, separated by commas", "none"))
    if include_path is not None and not include_path.is_dir():
        folder_of_tasks = "a folder with YAML files of tasks"
        raise OptionError(expected("--include-path", folder_of_tasks, str(include_path)))
    for pair in metadata:
        if "=" not in pair:
            raise OptionError(expected("--metadata", "KEY=VALUE, as in text=wiki.raw", pair))
    chosen = choose_device(device)
    tokenizer = text_tokenizer(load_tokenizer(folder, trust), folder)
    with _quiet():
        values = dict(pair.split("=", 1) for pair in metadata)
        found, manager = _find(names, include_path, {"pretrained": folder, **values})
    options = {"limit": limit, "num_fewshot": num_fewshot, "task_manager": manager}
    rows = _run(folder, chosen, tokenizer, found, batch_size, options, trust)
    if reference is not None:
        before = _run(reference, chosen, tokenizer, found, batch_size, options, trust)
        for row, other in zip(rows, before, strict=True):
            row["reference"] = other["value"]
    return rows


def print_tasks(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of `measure_tasks` as a table."""
    compares = any("reference" in row for row in rows)
    header = ["task ", "metric ", "value", "stderr"]
    header += ["reference", "change"] if compares else []
    lines = []
    for row in rows:
        metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
        line = [row["task"], metric, _digits(row["value"]), _digits(row["stderr"])]
        if compares:
            line += [_digits(row["reference"]), _digits(row["value"] - row["reference"], "+")]
        lines.append([*line, f"{row['documents']:,}", str(row["shots"])])
    screen.print_table([*header, "documents", "shots"], lines)


def _digits(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.4f}"


def _find(
    names: Sequence[str], include_path: Path | None, metadata: dict[str, str]
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
    source: str,
    device: str,
    tokenizer: Any,
    tasks: Sequence[Any],
    batch_size: int,
    options: Mapping[str, Any],
    trust: bool,
) -> list[dict[str, Any]]:
    """Return the rows of one model, with options of lm-eval."""
    with _quiet():
        from lm_eval.models.huggingface import HFLM

        from .._compat.lm_eval import evaluate_tasks

    model: Any = load_any(source, device, trust)
    if model.get_output_embeddings() is None:
        raise StateError(
            f"{source}: expected a language model with a head, which tasks of lm-eval need, got "
            f"{type(model).__name__} without one."
        )
    # The default of lm-eval is the softmax in the dtype of the logits; --text uses float32.
    note_dtype("measures", model)
    with _quiet(), fast_dtype(model):
        lm: Any = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")
        result: Any = evaluate_tasks(lm, tasks=list(tasks), log_samples=False, **options)
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log of lm-eval off the screen, and its progress bars to terminals."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    sink = sys.stderr if screen.is_terminal() else io.StringIO()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        log.setLevel(before)
