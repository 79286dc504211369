"""What commands print: results on stdout, as tables or as JSON, and all else on stderr."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

OK, MISMATCH, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# Of a table that goes into a file or a pipe, where no terminal cuts it.
_PIPE_WIDTH = 200

# That a name has in any terminal.
_NAME = 20

Json = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, and everything else on stderr.")
]

Item = TypeVar("Item")


def note(text: str) -> None:
    """A line of news on stderr, whatever the width of the terminal."""
    print(" ".join(text.split()), file=sys.stderr)


def say(text: str = "") -> None:
    """A line of a result on stdout."""
    print(text)


def print_json(data: Mapping[str, Any]) -> None:
    """The whole result on stdout; numbers that JSON does not have are null."""
    print(json.dumps(_finite(data), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; the first column gives way where a terminal is too narrow for all.

    A heading that ends in a space is that of text, as the first is; other columns are numbers.
    """
    width = _width()
    others = zip(*(row[1:] for row in (header, *rows)), strict=True)
    rest = sum(max(map(len, column)) + 2 for column in others)
    names = [row[0] for row in rows]
    prefix = _common_path(names) if rest + max(map(len, names), default=0) > width else ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(header):
        text = i == 0 or heading.endswith(" ")
        table.add_column(
            heading.strip(),
            justify="left" if text else "right",
            overflow="fold",
            no_wrap=i > 0,
        )
    for name, *cells in rows:
        table.add_row(name.removeprefix(prefix), *cells)
    # No number is cut: what is wider still goes on in the next line of the terminal.
    console = Console(width=max(width, rest + _NAME), highlight=False, markup=False, emoji=False)
    if prefix:
        say(f"(all names begin with {prefix})")
    console.print(table)


def _width() -> int:
    if "COLUMNS" not in os.environ and not sys.stdout.isatty():
        return _PIPE_WIDTH
    return shutil.get_terminal_size().columns


def _common_path(names: Sequence[str]) -> str:
    """The modules that all names begin with, "" if there is nothing to leave out."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return "".join(f"{level[0]}." for level in common)


def track(items: Iterable[Item], what: str, total: int) -> Iterable[Item]:
    """The items, with a bar on stderr if that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield from progress.track(items, total=total, description=what)


def is_terminal() -> bool:
    """Whether somebody sees a bar on stderr."""
    return sys.stderr.isatty()


def print_reasons(reasons: Mapping[str, str]) -> None:
    """Why layers were left alone on stdout, a line for each reason."""
    if reasons:
        say("\nleft alone:")
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        say(f"  {some(names)}: {reason}")


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def percent(value: float | None) -> str:
    """A share with two digits, `-` where there is none."""
    return "-" if value is None else f"{100 * value:.2f} %"


def size(count: float) -> str:
    """Bytes, in decimal units as disks and hubs have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError
