"""Name the layers that stay dense, as other libraries match them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..quantization.report import Row


def ignored_layers(rows: Iterable[Row], is_module: Callable[[str], bool]) -> list[str]:
    """Return the names and patterns of skipped layers.

    A stacked parameter of experts is a pattern, for checkpoints have a linear layer for each
    expert.

    Args:
        rows: of the report, those of skipped layers.
        is_module: whether a name is that of a module rather than of a parameter.
    """
    found: dict[str, None] = {}
    for row in rows:
        path, _, last = row.name.rpartition(".")
        if is_module(row.name):
            found[row.name] = None
        elif last == "weight":
            found[path] = None
        else:
            found[f"re:{re.escape(path)}.*"] = None
    return list(found)
