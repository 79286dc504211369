"""Show the examples of docstrings as code, and list the options behind `**options`."""

from __future__ import annotations

import re
from typing import Any

import griffe

from fp4pass.record.signatures import described


class Sections(griffe.Extension):
    """Read `Example:` as the examples that griffe knows, and list the fields of LinearConfig."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object before it is read."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        if isinstance(obj, griffe.Function):
            text = described(text, [parameter.name for parameter in obj.parameters])
        obj.docstring.value = text
