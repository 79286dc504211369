"""What the scripts that write a table into a page have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def origin(result: Mapping[str, Any]) -> list[str]:
    """Lines above a table: the machine, the versions and the command of its results."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [f"{result['machine']}; {versions}.", "", f"    {result['command']}", ""]


def write_between(target: Path, script: str, text: str) -> None:
    """Replace what stands between the two marks of a script in a page."""
    begin = f"<!-- Written by {script} --table; do not edit by hand. -->"
    end = f"<!-- End of what {script} wrote. -->"
    page = target.read_text()
    head, mark, rest = page.partition(begin)
    _, stop, tail = rest.partition(end)
    if not mark or not stop:
        raise SystemExit(f"{target} lacks the line {begin if not mark else end!r}")
    target.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}")
