"""Searches that need not be done again, and what data a model was calibrated on."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .._version import __version__
from ..core.fingerprint import digest_of
from ..core.paths import path_of
from ..core.quant_state import QuantState, read_file, save_state
from ..errors import CheckpointError, OptionError, expected
from ..methods import Certificate, MethodResult

# The tensors of a Certificate.
_PROOF = ("loss", "bound")


class SearchCache:
    """A folder of weights that were searched.

    The name of a file holds a digest of what decides its result, and one of what is in it. Threads
    and processes may share the folder.
    """

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

    def get_or_search(self, key: str, search: Callable[[], MethodResult]) -> MethodResult:
        """Return the finished search that the folder has under a key, or search and keep it."""
        with self._usable():
            result = self._find(key)
        if result is None:
            result = search()
            with self._usable():
                self._keep(key, result)
        return result

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Make what disks raise a CheckpointError."""
        try:
            yield
        except (OSError, SafetensorError, CheckpointError) as error:
            raise CheckpointError(
                f"resume: {self.folder} cannot be read or written: {error.__cause__ or error}. "
                "The searches that it holds are whole: mend that or make room, and run the same "
                "again."
            ) from error

    def _find(self, key: str) -> MethodResult | None:
        """Return a result that is there and whole, and remove what is not."""
        for path in sorted(self.folder.glob(f"{key}-*.safetensors")):
            # Another thread may have removed it.
            with suppress(FileNotFoundError):
                if path.stem.endswith(_digest_of_file(path)):
                    self.found += 1
                    return _read(path)
                # A disk that was full, a copy that was cut off, a bit that fell over.
                path.unlink()
        return None

    def _keep(self, key: str, result: MethodResult) -> None:
        """Write a result, whole or not at all."""
        partial = self.folder / f".{key}.{secrets.token_hex(4)}"
        proof = result.certificate
        beside = {} if proof is None else {name: getattr(proof, name) for name in _PROOF}
        try:
            save_state(partial, result.state, beside)
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.rename(self.folder / f"{key}-{_digest_of_file(partial)}.safetensors")
        finally:
            partial.unlink(missing_ok=True)


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> MethodResult:
    """Return the result in a file that is whole."""
    tensors, _ = read_file(path)
    proof = {name: tensors[name] for name in _PROOF if name in tensors}
    return MethodResult(QuantState.load(path), Certificate(**proof) if proof else None)
