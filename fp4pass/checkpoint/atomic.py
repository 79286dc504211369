"""Replace a folder whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError, OptionError, expected


@contextlib.contextmanager
def replacing(target: Path, overwrite: bool, marks: tuple[str, ...]) -> Iterator[Path]:
    """Yield a new folder to fill, which takes the place of `target` unless the body raises.

    A kill at any moment leaves the old folder or the new one whole, under `target` or under a name
    beside it that `interrupted` finds. A folder is replaced only with `overwrite`, and only if it
    holds one of the files `marks`.
    """
    # A link stays, and what it leads to is replaced.
    target = target.resolve()
    occupied = require_free(target, overwrite, marks)
    token = secrets.token_hex(4)
    new = target.with_name(f".{target.name}.fp4pass-new-{token}")
    old = target.with_name(f".{target.name}.fp4pass-old-{token}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made: {error}. Choose another.") from error
    try:
        yield new
        for path in (*new.iterdir(), new):
            _sync(path)
        if occupied:
            os.rename(target, old)
        os.rename(new, target)
        _sync(target.parent)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        shutil.rmtree(new, ignore_errors=True)
        raise
    if occupied:
        shutil.rmtree(old)


def require_free(target: Path, overwrite: bool, marks: tuple[str, ...]) -> bool:
    """Return whether there is a folder to replace; raise CheckpointError if it must not be."""
    if not isinstance(overwrite, bool):
        raise OptionError(expected("overwrite", "True or False", repr(overwrite)))
    target = target.resolve()
    if target.exists() and (os.path.ismount(target) or target == Path.cwd()):
        raise CheckpointError(
            f"{target} is the current folder or a mount point, which cannot be replaced whole. "
            "Choose a new folder in it."
        )
    above = next(path for path in target.parents if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise CheckpointError(
            f"{target} cannot be made: {above} is not a folder, or is read-only. Choose another."
        )
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        raise CheckpointError(
            f"{target} exists and is not empty. Choose another folder, or pass overwrite=True "
            "(--overwrite) to replace the checkpoint in it."
        )
    if occupied and not any((target / mark).is_file() for mark in marks):
        raise CheckpointError(
            f"{target} is not a checkpoint of fp4pass, so it is not overwritten. Choose another "
            "folder, or delete it first."
        )
    return occupied


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def interrupted(folder: Path, last: str) -> str:
    """Return a sentence that names the whole folders which an interrupted save left, or ""."""
    folder = folder.resolve()
    if not folder.parent.is_dir():
        return ""
    start = f".{folder.name}.fp4pass-"
    beside = sorted(path for path in folder.parent.iterdir() if path.name.startswith(start))
    # A folder that has the file which is written last is whole.
    whole = [str(path) for path in beside if (path / last).is_file()]
    if not whole:
        return ""
    return f" An interrupted save left whole checkpoints at {', '.join(whole)}; rename one back."
