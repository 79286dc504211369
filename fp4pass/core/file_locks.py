"""Locks that end with the process, of whatever platform: fcntl where it is, msvcrt on Windows."""

from __future__ import annotations

import importlib.util
import os
from importlib import import_module
from pathlib import Path
from typing import Any


def _module(name: str) -> Any:
    return import_module(name) if importlib.util.find_spec(name) is not None else None


_fcntl, _msvcrt = _module("fcntl"), _module("msvcrt")


def opens_folders() -> bool:
    """Return whether a folder can be opened as a file can, to lock it and to wait for the disk."""
    return _fcntl is not None


def lock_file(folder: Path) -> Path:
    """Return what is locked in place of a folder: itself, or a file beside it."""
    return folder if opens_folders() else folder.with_name(f"{folder.name}.lock")


def open_lock(folder: Path) -> int | None:
    """Return a descriptor of what is locked in place of a folder, None without any locks."""
    if _fcntl is None and _msvcrt is None:
        return None
    if opens_folders():
        return os.open(folder, os.O_RDONLY)
    return os.open(lock_file(folder), os.O_RDWR | os.O_CREAT)


def try_lock(descriptor: int) -> bool:
    """Lock what was opened, and return whether that was possible.

    It is not if another one has it, or if the file system has no locks.
    """
    try:
        if _fcntl is not None:
            _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        else:
            _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    return True
