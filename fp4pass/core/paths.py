"""Paths as callers give them."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import OptionError, expected


def path_of(path: object, what: str, wanted: str = "a path, as a string or a pathlib.Path") -> Path:
    """Return a path. Raises OptionError for what is none, calling it `what`."""
    if not isinstance(path, str | os.PathLike) or str(path) == "" or "\0" in str(path):
        raise OptionError(expected(what, wanted, repr(path)))
    return Path(os.fspath(path))
