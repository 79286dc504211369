"""What the scripts that write pages have in common: rows of results, and Markdown."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Row = Mapping[str, Any]


def parse_args(description: str | None, results: Path) -> argparse.Namespace:
    """Read the options of a script that writes a page and its pictures, whose folder it makes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    args.docs.mkdir(parents=True, exist_ok=True)
    return args


# ---- rows of results --------------------------------------------------------------------------


def group_by(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return rows with equal values together, in the order of the first of each."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def unique(rows: Iterable[Row], key: str) -> list[Any]:
    """Return the different values of a key, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def same(row: Row, other: Row, *keys: str) -> bool:
    """Return whether two rows have the same values."""
    return all(row[key] == other[key] for key in keys)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known, None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def format_of(row: Row) -> str:
    """Return the format and the block of a row, as in nvfp4:16."""
    return f"{row['format']}:{row['block']}"


def ends(value: Row) -> tuple[float, float]:
    """Return the ends of an interval, the value twice where there is none."""
    low, high = (value["value"] if value[end] is None else value[end] for end in ("low", "high"))
    return low, high


# ---- cells ------------------------------------------------------------------------------------


def inputs(weight_only: bool) -> str:
    """Return what is quantized, in words."""
    return "weights only" if weight_only else "weights and inputs"


def with_interval(value: Row | None, show: Callable[[float], str], *, bold: bool = False) -> str:
    """Return a value above its interval, in bold if the interval says that it is real.

    Args:
        value: the value and the ends of its interval; None leaves the cell empty.
        show: writes a number.
        bold: whether the value is a difference, which may be real or chance.
    """
    if value is None:
        return ""
    text = show(value["value"])
    text = f"**{text}**" if bold and value["significant"] else text
    if value["low"] is None:
        return text
    return f"{text}<br>{show(value['low'])} to {show(value['high'])}"


def number(value: float) -> str:
    """Return a number with four digits, or with `small_places`."""
    places = 4 - len(str(int(value))) if value >= 1 else small_places(value)
    return f"{value:.{max(0, places)}f}"


def small_places(value: float) -> int:
    """Return four, or for less than a thousandth as many as show two digits, six at most."""
    return 4 if value == 0 or abs(value) >= 1e-3 else min(6, 1 - math.floor(math.log10(abs(value))))


def signed(value: float) -> str:
    """Return a difference, with as many places as `number`."""
    return f"{value:+.{small_places(value)}f}"


def percent(value: float | None) -> str:
    """Return a share in per cent, "-" if it is not known."""
    return "-" if value is None else f"{100 * value:.2f} %"


def above(ratio: float) -> str:
    """Return how much a ratio is above one, in per cent."""
    return f"{100 * (ratio - 1):+.2f} %"


def code(text: str) -> str:
    """Return a word as Markdown writes code."""
    return f"`{text}`"


def file(found: Row, text: str) -> str:
    """Return the name of the file of a text."""
    return code(found["texts"][text]["file"])


# ---- tables -----------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return a table of Markdown, numbers to the right of the first `left` columns."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]
    return "\n".join(lines) + "\n"


def aligned(header: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    """Return a table of Markdown to be read as it is: names to the left, numbers to the right."""
    cells = [[str(cell) for cell in line] for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = [
        all(cell[0] in "+-.0123456789" for cell in column)
        for column in zip(*cells[1:], strict=True)
    ]
    ways = [str.rjust if is_number else str.ljust for is_number in numbers]
    cells.insert(1, ["-" * (w - n) + ":" * n for w, n in zip(widths, numbers, strict=True)])
    lined = [[way(c, w) for c, w, way in zip(line, widths, ways, strict=True)] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lined)


def listed(title: str, lines: Iterable[str], otherwise: str) -> Iterator[str]:
    """Yield a list below its title, or what is said if it is empty."""
    items = [f"- {line}" for line in lines]
    yield "\n".join([title, "", *items, ""]) if items else f"{otherwise}\n"


def origin(result: Row) -> list[str]:
    """Return the lines above a table: the machine, the versions and the command of its results."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [f"{result['machine']}; {versions}.", "", f"    {result['command']}", ""]


def write_between(target: Path, script: str, text: str) -> None:
    """Replace what stands between the two marks of a script in a page.

    Args:
        target: the page.
        script: path of the script, as in its marks.
        text: what is to stand there.
    """
    begin = f"<!-- Written by {script} --table; do not edit by hand. -->"
    end = f"<!-- End of what {script} wrote. -->"
    page = target.read_text()
    head, mark, rest = page.partition(begin)
    _, stop, tail = rest.partition(end)
    if not mark or not stop:
        raise SystemExit(f"{target} lacks the line {begin if not mark else end!r}")
    target.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}")
