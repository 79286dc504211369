"""Searches that need not be done again, and what data a model was calibrated on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..core.paths import path_of
from ..core.quant_state import QuantState
from ..errors import CheckpointError, OptionError, expected


def digest_of(*values: Any) -> str:
    """Return the SHA-256 of plain values and tensors, by dtype, shape and bits."""
    total = hashlib.sha256()
    for value in values:
        _add(total, value)
    return total.hexdigest()


def _add(total: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor):
        total.update(f"{value.dtype} {tuple(value.shape)};".encode())
        # Rows at a time, which a copy of a large weight would not be.
        for part in value.detach().reshape(-1).split(1 << 24):
            total.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            total.update(f"{key}:".encode())
            _add(total, value[key])
    elif isinstance(value, tuple | list):
        total.update(f"[{len(value)}]".encode())
        for item in value:
            _add(total, item)
    else:
        total.update(f"{value!r};".encode())


class SearchCache:
    """A folder of weights that were searched, each under a digest of what decides its result."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = path_of(folder, "resume")
        if self.folder.exists() and not self.folder.is_dir():
            raise OptionError(expected("resume", "a folder", f"{self.folder}, a file"))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"resume is {self.folder}, which cannot be made: {error}.") from error
        self.found = 0

    def key(self, *parts: Any) -> str:
        """Return the name of a search, by everything that decides its result."""
        return digest_of(__version__, *parts)

    def get_or_search(self, key: str, search: Callable[[], QuantState]) -> QuantState:
        """Return the finished search that the folder has under a key, or search and keep it."""
        path = self.folder / f"{key}.safetensors"
        if path.is_file():
            try:
                state = QuantState.load(path)
                self.found += 1
                return state
            except CheckpointError:
                # A disk that was full, a copy that was cut off: search it again.
                path.unlink()
        state = search()
        # Written whole or not at all.
        partial = self.folder / f".{key}.{os.getpid()}"
        state.save(partial)
        partial.rename(path)
        return state
