"""fp4pass eval --tasks: what lm-eval finds of a model, and of its original."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError, StateError, nearest
from . import screen
from .sources import choose_device, load_any, load_tokenizer, reading, text_tokenizer


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
) -> list[dict[str, Any]]:
    """A row for each metric of each task, with the value of the reference if there is one.

    tasks: names, groups, tags or patterns of them, each a list with commas. metadata: KEY=VALUE,
    for tasks that read it. Raises OptionError for a task that does not exist.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise OptionError("--tasks needs lm-eval: pip install 'fp4pass[eval]'.")
    for name, value, least in (("--limit", limit, 1), ("--num-fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise OptionError(f"{name} is {value}; at least {least} is wanted.")
    names = [name.strip() for part in tasks for name in part.split(",") if name.strip()]
    if not names:
        raise OptionError("--tasks names no task. Give one or several, with commas between them.")
    chosen = choose_device(device)
    tokenizer = text_tokenizer(load_tokenizer(folder), folder)
    facts = {"pretrained": folder, **_facts(metadata)}
    options: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "batch_size": batch_size}
    with _hushed():
        found = _find(names, include_path, facts)
        rows = _run(folder, chosen, tokenizer, found, **options)
        if reference is not None:
            before = _run(reference, chosen, tokenizer, found, **options)
            for row, other in zip(rows, before, strict=True):
                row["reference"] = other["value"]
    return rows


def print_tasks(rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows of `measure_tasks` as a table."""
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


def _facts(metadata: Sequence[str]) -> dict[str, str]:
    for pair in metadata:
        if "=" not in pair:
            raise OptionError(f"--metadata {pair} is no KEY=VALUE, such as text=wiki.test.raw.")
    return dict(pair.split("=", 1) for pair in metadata)


def _find(names: Sequence[str], include_path: Path | None, facts: dict[str, str]) -> list[Any]:
    """The tasks and groups of names, with their data."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise OptionError(
            f"--include-path {include_path} is not a folder. One with the YAML files "
            "of tasks is wanted."
        )
    own: Any = TaskManager(include_path=include_path, include_defaults=False, metadata=facts)
    # lm-eval reads ten thousand files to know all of its own, which takes it some seconds.
    alone = set(names) <= set(own.all_subtasks)
    manager: Any = own if alone else TaskManager(include_path=include_path, metadata=facts)
    found: dict[str, Any] = {}
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            raise OptionError(
                f"--tasks: lm-eval has no task {name!r}.{nearest(name, manager.all_tasks)} A "
                "folder with tasks of your own goes to --include-path."
            )
        for match in matching:
            with reading(match, "the task"):
                loaded = manager.load(match)
            groups = loaded["groups"]
            found |= {match: groups[match]} if match in groups else loaded["tasks"]
            for task in loaded["tasks"].values():
                if getattr(task, "UNSAFE_CODE", False):
                    raise OptionError(
                        f"{match} runs code that the model wrote. "
                        "python -m fp4pass.integrations.lm_eval run "
                        "--model fp4pass --confirm_run_unsafe_code does, if you want it to."
                    )
    return list(found.values())


def _run(
    source: str,
    device: str,
    tokenizer: Any,
    tasks: Sequence[Any],
    *,
    batch_size: int,
    limit: int | None,
    num_fewshot: int | None,
) -> list[dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model: Any = load_any(source, device)
    if model.get_output_embeddings() is None:
        raise StateError(f"{source} has no language model head, which tasks of lm-eval need.")
    # In float32 as for --text; without, lm-eval takes the softmax in the dtype of the logits.
    lm: Any = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")
    result: Any = simple_evaluate(
        lm, tasks=list(tasks), limit=limit, num_fewshot=num_fewshot, log_samples=False
    )
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
    """How many were used of a task, or of the tasks of a group."""
    if task in result["n-samples"]:
        yield result["n-samples"][task]["effective"]
    for member in result["group_subtasks"].get(task, ()):
        yield from _documents(result, member)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """lm-eval logs and prints much that is no news here; its bars go to terminals only."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    sink = sys.stderr if screen.is_terminal() else io.StringIO()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        log.setLevel(before)
