"""Check a folder with packed weights alone, and mend what can be mended without its model.

`check_folder` returns what is wrong, `KINDS` are what can be; `repair_folder` writes a new folder.
"""

from __future__ import annotations

from .check import FolderCheck, check_folder
from .kinds import KINDS, Finding, Kind
from .repair import Repair, repair_folder

__all__ = ["KINDS", "Finding", "FolderCheck", "Kind", "Repair", "check_folder", "repair_folder"]


def __dir__() -> list[str]:
    """Return the public names, which completion shows."""
    return sorted(__all__)
