"""Show the examples of docstrings as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Read `Example:` as the examples that griffe knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object before it is read."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        obj.docstring.value = text
