"""Replace a folder whole or not at all."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError, as_option, expected


def _module(name: str) -> Any:
    return import_module(name) if importlib.util.find_spec(name) is not None else None


# Locks that end with the process: fcntl where it is, which opens folders, too; msvcrt on Windows.
_fcntl, _msvcrt = _module("fcntl"), _module("msvcrt")

# Of the name of a file, in every file system of note.
_LONGEST_NAME = 255


@contextlib.contextmanager
def replacing(target: Path, overwrite: bool, marks: tuple[str, ...]) -> Iterator[Path]:
    """Yield a new folder to fill, which takes the place of `target` unless the body raises.

    A kill at any moment leaves the old folder or the new one whole, under `target` or under a name
    beside it that `interrupted` finds; what it leaves beside, the next one removes. A folder is
    replaced only with `overwrite`, and only if it holds one of the files `marks`. Errors of
    the disk become a CheckpointError.
    """
    occupied = require_free(target, overwrite, marks)
    # A link stays, and what it leads to is replaced.
    target = _resolved(target)
    # Where nothing is to be replaced, a whole one may be all that is left of a checkpoint.
    left = [
        path
        for path in _left_beside(target)
        if overwrite or not any((path / mark).is_file() for mark in marks)
    ]
    token = secrets.token_hex(4)
    new, old = _beside(target, "new", token), _beside(target, "old", token)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
        with _locked(new):
            yield new
            for path in (*new.rglob("*"), new):
                _sync(path)
            if occupied:
                os.rename(target, old)
            os.rename(new, target)
            _sync(target.parent)
    except BaseException as error:
        if old.exists() and not target.exists():
            os.rename(old, target)
        shutil.rmtree(new, ignore_errors=True)
        # tokenizers has no class of errors of its own.
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            raise CheckpointError(
                f"{target} cannot be written: {error}. What was there before still is; mend that "
                "or make room, and save again."
            ) from error
        raise
    # The new one is in its place, whatever becomes of these.
    shutil.rmtree(old, ignore_errors=True)
    for path in left:
        with contextlib.suppress(FileNotFoundError), _locked(path) as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)


def _beside(target: Path, what: str, token: str) -> Path:
    """Return the name of a folder on its way to `target`, or from there."""
    return target.with_name(f".{target.name}.fp4pass-{what}-{token}")


def _left_beside(target: Path) -> list[Path]:
    """Return the folders of saves to `target` that run now, or were killed."""
    if not os.path.isdir(target.parent):
        return []
    starts = (_beside(target, "new", "").name, _beside(target, "old", "").name)
    beside = (path for path in target.parent.iterdir() if path.name.startswith(starts))
    # A file is the lock of one of them.
    return sorted(path for path in beside if path.is_dir())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the process ends or is killed; yield whether that was possible.

    It is not if another process has it, or if the file system has no locks.
    """
    if _fcntl is None and _msvcrt is None:
        yield False
        return
    path, flags = _lock_file(folder), os.O_RDONLY if _fcntl is not None else os.O_RDWR | os.O_CREAT
    descriptor, free = os.open(path, flags), False
    try:
        with contextlib.suppress(OSError):
            if _fcntl is not None:
                _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
            else:
                _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
            free = True
        yield free
    finally:
        os.close(descriptor)
        if free and path != folder:
            path.unlink(missing_ok=True)


def _lock_file(folder: Path) -> Path:
    """Return what is locked in place of a folder: itself, or a file beside it."""
    return folder if _fcntl is not None else folder.with_name(f"{folder.name}.lock")


def _resolved(target: Path) -> Path:
    """Return where a path leads. Raises CheckpointError for circles and names that are too long."""
    found = Path(os.path.realpath(target))
    if any(map(os.path.islink, (found, *found.parents))):
        raise CheckpointError(f"{target} cannot be made: links lead in a circle. Choose another.")
    longest = _lock_file(_beside(Path("q"), "new", "01234567"))
    most = _LONGEST_NAME - len(longest.name) + 1
    lengths = [len(os.fsencode(name)) for name in found.parts]
    if max(lengths) > _LONGEST_NAME or lengths[-1] > most:
        what = f"names of at most {_LONGEST_NAME} bytes, the last of {most}"
        raise CheckpointError(
            f"{expected(str(target), what, max(lengths))} A save writes beside the folder, under "
            "a longer name. Choose another."
        )
    return found


def require_free(target: Path, overwrite: bool, marks: tuple[str, ...]) -> bool:
    """Return whether there is a folder to replace; raise CheckpointError if it must not be."""
    target = _resolved(target)
    if target.exists() and (os.path.ismount(target) or target == Path.cwd()):
        raise CheckpointError(
            f"{target} is the current folder or a mount point, which cannot be replaced whole. "
            "Choose a new folder in it."
        )
    above = next(path for path in target.parents if path.exists())
    try:
        # Permissions do not say all: a file system may be read-only, or hold no folders.
        tempfile.TemporaryDirectory(prefix=".", dir=above).cleanup()
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be made: {above} is not a folder, or is read-only. Choose another."
        ) from error
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        left = ", ".join(path.name for path in _left_beside(target))
        raise CheckpointError(
            f"{target} exists and is not empty. Choose another folder, or pass "
            f"{as_option('overwrite', True)} to replace the checkpoint in it"
            f"{f' and remove what an interrupted save left beside it ({left})' if left else ''}."
        )
    if occupied and not any((target / mark).is_file() for mark in marks):
        raise CheckpointError(
            f"{target} is not a checkpoint of fp4pass, so it is not overwritten. Choose another "
            "folder, or delete it first."
        )
    return occupied


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk, as far as the platform can."""
    if path.is_dir() and _fcntl is None:
        return
    # Windows waits for nothing that is only read.
    descriptor = os.open(path, os.O_RDONLY if _fcntl is not None else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def interrupted(folder: Path, last: str) -> str:
    """Return a sentence that names the whole folders which an interrupted save left, or ""."""
    beside = _left_beside(Path(os.path.realpath(folder)))
    # A folder that has the file which is written last is whole.
    whole = [str(path) for path in beside if (path / last).is_file()]
    if not whole:
        return ""
    return f" An interrupted save left whole checkpoints at {', '.join(whole)}; rename one back."
