"""Find the layout that is asked for, or that a folder declares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UnreadError, unknown_name
from .base import LAYOUTS, Layout


def get_layout(name: str) -> Layout:
    """Return a layout to write, by its name. Raises OptionError for an unknown one."""
    if name not in LAYOUTS:
        raise unknown_name("layout: Layout", name, LAYOUTS)
    return LAYOUTS[name]


def layout_of(declared: Mapping[str, Any], folder: Path) -> Layout:
    """Return the layout that a folder's quantization_config declares. Raises CheckpointError."""
    for layout in LAYOUTS.values():
        if layout.detect(declared):
            return layout
    raise UnreadError(
        f"{folder}: quant_method: expected that of {', '.join(LAYOUTS)}, got "
        f"{declared.get('quant_method')!r}. Load the folder with the library that wrote it."
    )


def side_files() -> tuple[str, ...]:
    """Return the names of the files that some layout has beside config.json."""
    return tuple(name for layout in LAYOUTS.values() for name in layout.side_files)
