"""Print results on stdout, as tables or as JSON, and all else on stderr."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from typer import Option

from ..core.progress import above_bar
from ..errors import some
from ..reporting.text import finite

OK, MISMATCH, BAD_INPUT, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141

# Of a table that goes into a file or a pipe, where no terminal cuts it.
_PIPE_WIDTH = 200

# That a name has in any terminal.
_NAME = 20

Json = Annotated[bool, Option("--json", help="Print the result as JSON on stdout.")]


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
        note(self.format(record))


@contextmanager
def news() -> Iterator[None]:
    """Print warnings, and what is said of data, time and files, as lines on stderr."""
    log, notes = logging.getLogger("fp4pass"), _Lines()
    rooms = [
        logging.getLogger(f"fp4pass.{name}")
        for name in ("calibration", "checkpoint", "engine.one_call", "lab")
    ]
    notes.setFormatter(logging.Formatter("fp4pass: %(message)s"))
    log.addHandler(notes)
    for room in rooms:
        room.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(notes)
        for room in rooms:
            room.setLevel(logging.NOTSET)


def print_json(data: Mapping[str, Any]) -> None:
    """Print the whole result on stdout; numbers that JSON does not have are null."""
    print(json.dumps(finite(data), indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; in a narrow terminal the first column is shortened."""
    cut = "COLUMNS" in os.environ or sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if cut else _PIPE_WIDTH
    others = zip(*(row[1:] for row in (header, *rows)), strict=True)
    rest = sum(max(map(len, column)) + 2 for column in others)
    names = [row[0] for row in rows]
    prefix = ""
    if rest + max(map(len, names), default=0) > width:
        # The modules that all names begin with.
        common = os.path.commonprefix(names)  # noqa: RUF071, of characters
        prefix = common[: common.rfind(".") + 1]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(header):
        # A heading that ends in a space is that of text, as the first is; others are of numbers.
        text = i == 0 or heading.endswith(" ")
        side: Any = "left" if text else "right"
        table.add_column(heading.strip(), justify=side, overflow="fold", no_wrap=i > 0)
    for name, *cells in rows:
        table.add_row(name.removeprefix(prefix), *cells)
    # No number is cut: what is wider still goes on in the next line of the terminal.
    console = Console(width=max(width, rest + _NAME), highlight=False, markup=False, emoji=False)
    if prefix:
        print(f"(all names begin with {prefix})")
    console.print(table)


def print_reasons(reasons: Mapping[str, str]) -> None:
    """Print why layers were skipped, a line for each reason."""
    if reasons:
        print("\nskipped:")
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        print(f"  {some(names)}: {reason}")


def percent(value: float | None) -> str:
    """Format a share in per cent, `-` for None."""
    return "-" if value is None else f"{100 * value:.2f} %"
