"""Paths as callers give them, plain values of YAML and JSON files, and folders replaced whole."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError, OptionError, as_option, expected

_log = logging.getLogger(__name__)


def path_of(path: object, what: str, wanted: str = "a path, as a string or a pathlib.Path") -> Path:
    """Return a path. Raises OptionError for what is none, calling it `what`."""
    if not isinstance(path, str | os.PathLike) or str(path) == "" or "\0" in str(path):
        raise OptionError(expected(what, wanted, repr(path)))
    return Path(os.fspath(path))


def parse_json(text: str | bytes) -> Any:
    """Return the values of a JSON text. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_file(path: Path) -> Any:
    """Return the plain values of a file. Raises OptionError with the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not text"
        raise OptionError(f"{path} cannot be read as a recipe: {problem}.") from error
    if path.suffix == ".json":
        try:
            return parse_json(text)
        except ValueError as error:
            raise OptionError(f"{path} is not JSON: {error}.") from error
    try:
        import yaml
    except ImportError as error:
        raise OptionError(
            f"{path}: reading YAML needs PyYAML: pip install 'fp4pass[cli]'. Or write JSON."
        ) from error

    class Loader(yaml.SafeLoader):
        """Refuses a key that is there twice, of which YAML would keep the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise OptionError(f"{path}, line {line}: the key {key!r} is there twice.")
                seen.add(key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        hint = " Put names that begin with * in quotes." if "alias" in str(error) else ""
        raise OptionError(f"{where}: this is not YAML: {problem}.{hint}") from error


@contextlib.contextmanager
def replacing(target: Path, overwrite: bool, marks: tuple[str, ...]) -> Iterator[Path]:
    """Yield a new folder to fill, which takes the place of `target` unless the body raises."""
    # A kill at any moment leaves the old folder or the new one whole, under `target` or under a
    # name beside it that `interrupted` finds. A folder is replaced only with `overwrite`, and only
    # if it holds one of the files `marks`. Errors of the disk become a CheckpointError.
    occupied = require_free(target, overwrite, marks)
    # A link stays, and what it leads to is replaced.
    target = Path(os.path.realpath(target))
    token = secrets.token_hex(4)
    new, old = _beside(target, f"new-{token}"), _beside(target, f"old-{token}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
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
    shutil.rmtree(old, ignore_errors=True)
    for path in _left_beside(target):
        _log.warning("%s is of a save that was killed, or runs now; delete it if none runs", path)


def _beside(target: Path, what: str) -> Path:
    """Return the name of a folder on its way to `target`, or from there."""
    return target.with_name(f".{target.name}.fp4pass-{what}")


def _left_beside(target: Path) -> list[Path]:
    """Return the folders of saves to `target` that run now, or were killed."""
    if not os.path.isdir(target.parent):
        return []
    starts = (_beside(target, "new-").name, _beside(target, "old-").name)
    return sorted(path for path in target.parent.iterdir() if path.name.startswith(starts))


def require_free(target: Path, overwrite: bool, marks: tuple[str, ...]) -> bool:
    """Return whether there is a folder to replace; raise CheckpointError if it must not be."""
    target = Path(os.path.realpath(target))
    cannot = f"{target} cannot be made"
    try:
        exists = target.exists()
        if target.is_symlink() or (exists and (os.path.ismount(target) or target == Path.cwd())):
            raise CheckpointError(
                f"{cannot}: it is a circle of links, the current folder or a mount point. Choose "
                "another folder."
            )
        above = next((path for path in target.parents if path.exists()), target)
        # Permissions do not say all: a file system may be read-only, or hold no such names.
        tempfile.TemporaryDirectory(prefix=_beside(target, "new-").name, dir=above).cleanup()
    except OSError as error:
        raise CheckpointError(f"{cannot}: {error.strerror}. Choose another folder.") from error
    occupied = exists and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        left = ", ".join(path.name for path in _left_beside(target))
        raise CheckpointError(
            f"{target} exists and is not empty. Choose another folder, or pass "
            f"{as_option('overwrite', True)} to replace the checkpoint in it"
            f"{f'. An interrupted save left {left} beside it; delete that' if left else ''}."
        )
    if occupied and not any((target / mark).is_file() for mark in marks):
        raise CheckpointError(
            f"{target} is not a checkpoint of fp4pass, so it is not overwritten. Choose another "
            "folder, or delete it first."
        )
    return occupied


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk; Windows opens no folders, nor to read alone."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def interrupted(folder: Path, last: str) -> str:
    """Return a sentence that names the whole folders which an interrupted save left, or ""."""
    beside = _left_beside(Path(os.path.realpath(folder)))
    # A folder that has the file which is written last is whole.
    whole = [str(path) for path in beside if (path / last).is_file()]
    left = f" An interrupted save left whole checkpoints at {', '.join(whole)}; rename one back."
    return left if whole else ""
