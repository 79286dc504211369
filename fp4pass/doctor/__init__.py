"""Check a folder with packed weights alone: `check_folder` returns findings, each of a kind."""

from __future__ import annotations

from .check import FolderCheck, check_folder
from .folder import KINDS, Finding, Kind

__all__ = ["KINDS", "Finding", "FolderCheck", "Kind", "check_folder"]
