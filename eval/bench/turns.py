"""Processes that get ready side by side and measure one after another.

Most of the time of a model's benchmark goes into making and compiling it, which other processes do
not disturb. `run` starts all at once; each calls `await_turn` before its first clock.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

# The environment variable with the path that a process touches when it is ready.
TURNS = "EVAL_BENCH_TURNS"
GO, LOCK = "go", "lock"

# Open until the process ends, and its turn with it.
_held: list[TextIO] = []


def run(commands: Sequence[Sequence[str]], limit: float | None = None) -> list[int | None]:
    """Run commands at the same time, with a turn for each to measure.

    Args:
        commands: the words of each.
        limit: seconds after which all are killed.

    Returns:
        Their exit codes; None for those that were killed.
    """
    end = time.monotonic() + limit if limit else float("inf")
    with tempfile.TemporaryDirectory() as folder:
        marks = [Path(folder) / str(i) for i in range(len(commands))]
        processes = [
            subprocess.Popen(words, env=os.environ | {TURNS: str(mark)})
            for words, mark in zip(commands, marks, strict=True)
        ]
        while time.monotonic() < end and not all(
            mark.exists() or process.poll() is not None
            for mark, process in zip(marks, processes, strict=True)
        ):
            time.sleep(0.1)
        (Path(folder) / GO).touch()
        return [_code(each, end) for each in processes]


def _code(process: subprocess.Popen[bytes], end: float) -> int | None:
    """Return the exit code of a process, None if it was killed here."""
    try:
        left = None if end == float("inf") else max(0.0, end - time.monotonic())
        return process.wait(left)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def await_turn() -> None:
    """Wait until all processes of `run` are ready, and no other measures until this one ends.

    Returns at once in a process that `run` did not start.
    """
    if TURNS not in os.environ or _held:
        return
    mark = Path(os.environ[TURNS])
    mark.touch()
    parent = os.getppid()
    while not (mark.parent / GO).exists():
        if os.getppid() != parent:
            raise SystemExit("The process that gives turns has ended.")
        time.sleep(0.1)
    _held.append((mark.parent / LOCK).open("w"))
    fcntl.flock(_held[0], fcntl.LOCK_EX)
