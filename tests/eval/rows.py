"""Run scripts of eval/ and read the rows that they write."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fp4pass.core.formats import FORMATS


def run(script: Any, *args: object) -> None:
    """Run a script with arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *map(str, args)])
        script.main()


def read(path: Path) -> Any:
    """The results in a file."""
    return json.loads(path.read_text("utf-8"))


def rows_by_key(result: Any) -> dict[tuple[Any, ...], Any]:
    """The rows of a result by what tells them apart."""
    found = {}
    for row in result["rows"]:
        found[row["format"], row["block"], row["weight_only"], row["method"]] = row
    assert len(found) == len(result["rows"])
    return found


def every_row(formats: list[str], methods: Sequence[str]) -> set[tuple[Any, ...]]:
    """All blocks of formats with float and quantized inputs, by each method."""
    return {
        (name, block, weight_only, method)
        for name in formats
        for block in FORMATS[name].blocks
        for weight_only in (True, False)
        for method in methods
    }
