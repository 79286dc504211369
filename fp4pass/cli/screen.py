"""Print results on stdout, as tables or as JSON, and all else on stderr."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..core.progress import above_bar
from ..errors import some
from ..record.rows import percent as percent
from ..reporting.text import finite

OK, MISMATCH, BAD_INPUT, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141


def note(text: str) -> None:
    """Print a line of news on stderr, of all processes once."""
    if os.environ.get("RANK", "0") == "0":
        complain(text)


def complain(text: str) -> None:
    """Print a line on stderr, of every process."""
    with above_bar():
        print(" ".join(text.split()), file=sys.stderr)


class _Lines(logging.Handler):
    """Prints each record as a line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, as logging calls it."""
        note(f"fp4pass: {record.getMessage()}")


@contextmanager
def news() -> Iterator[None]:
    """Print warnings, and what is said of data, time and files, as lines on stderr."""
    log, notes = logging.getLogger("fp4pass"), _Lines()
    names = ("calibration", "checkpoint", "engine.one_call", "lab")
    rooms = [logging.getLogger(f"fp4pass.{name}") for name in names]
    log.addHandler(notes)
    for room in rooms:
        room.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(notes)
        for room in rooms:
            room.setLevel(logging.NOTSET)


def print_json(data: Mapping[str, object]) -> None:
    """Print the whole result on stdout; numbers that JSON does not have are null."""
    print(json.dumps(finite(data), indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; where a terminal is too narrow, names lose what all begin with.

    A heading that ends in a space is that of text, as the first is; others are of numbers.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    if sum(widths) + 2 * len(widths) > shutil.get_terminal_size((200, 0)).columns and rows:
        # The modules that all names begin with.
        common = os.path.commonprefix([row[0] for row in rows])  # noqa: RUF071, of characters
        if prefix := common[: common.rfind(".") + 1]:
            print(f"(all names begin with {prefix})")
            widths[0] -= len(prefix)
            rows = [(row[0].removeprefix(prefix), *row[1:]) for row in rows]
    rule = ["-" * width for width in widths]
    for line in (header, rule, *rows):
        cells = [
            cell.strip().ljust(width) if i == 0 or header[i].endswith(" ") else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def print_reasons(reasons: Mapping[str, str]) -> None:
    """Print why layers were skipped, a line for each reason."""
    if reasons:
        print("\nskipped:")
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        print(f"  {some(names)}: {reason}")
