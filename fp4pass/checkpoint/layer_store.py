"""Keep finished work of a conversion in a folder, found by a digest of what affects it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError

from .._version import __version__
from ..core.describe import Description, Unknown
from ..core.paths import path_of
from ..core.quant_state import QuantState, read_file, save_state
from ..distributed.ranks import ranks
from ..errors import CheckpointError, OptionError, expected
from ..methods import Certificate, MethodResult

_log = logging.getLogger(__name__)

# The tensors of a Certificate.
_PROOF = ("loss", "bound")


class LayerStore:
    """A folder of finished work, each file whole or not there.

    Attributes:
        option: the option of `convert` that names the folder.
        holds: the work that is in it.
    """

    option: ClassVar[str]
    holds: ClassVar[str]

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = path_of(folder, self.option)
        self._said = set[str]()
        if self.folder.exists() and not self.folder.is_dir():
            raise OptionError(expected(self.option, "a folder", f"{self.folder}, a file"))
        with ranks().together():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OptionError(
                    f"{self.option} is {self.folder}, which cannot be made: {error}."
                ) from error

    def identity(self, name: str, decides: Iterable[Any]) -> str:
        """Return a digest of everything that decides a result, and of the version of fp4pass.

        Objects that cannot be identified have one that no other run finds.
        """
        description = Description()
        description.add(__version__)
        try:
            for each in decides:
                description.add(each)
            return description.digest()
        except Unknown as unknown:
            if str(unknown) not in self._said:
                self._said.add(str(unknown))
                _log.warning(
                    "%s: %s has %s, which cannot be told from another one: it is quantized "
                    "again by every call.",
                    self.option,
                    name,
                    unknown,
                )
            return secrets.token_hex()

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Turn errors of disks into a CheckpointError."""
        try:
            yield
        except (OSError, SafetensorError, CheckpointError) as error:
            raise CheckpointError(
                f"{self.option}: {self.folder} cannot be read or written: "
                f"{error.__cause__ or error}. The {self.holds} that it holds are whole: mend that "
                "or make room, and run the same again."
            ) from error


class FinishedSearches(LayerStore):
    """Finished searches of `convert(resume=)`, each in a file that its digest names.

    Threads and processes may share the folder.
    """

    option, holds = "resume", "searches"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.found = 0

    def get_or_search(
        self, name: str, decides: Sequence[Any], search: Callable[[], MethodResult]
    ) -> MethodResult:
        """Return the search that is finished for what decides it, or search and keep that."""
        path = self.folder / f"{self.identity(name, decides)}.safetensors"
        with self.usable():
            result = self._find(path)
        if result is None:
            result = search()
            proof = result.certificate
            beside = {} if proof is None else {name: getattr(proof, name) for name in _PROOF}
            with self.usable():
                write_whole(
                    path,
                    lambda partial: save_state(partial, result.state, beside),
                    mark=secrets.token_hex(4),
                    sync=True,
                )
        return result

    def _find(self, path: Path) -> MethodResult | None:
        """Return a result that is there and whole, and remove one that is not."""
        if not path.exists():
            return None
        try:
            state, (tensors, _) = QuantState.load(path), read_file(path)
        except (CheckpointError, SafetensorError, OSError):
            # A disk that was full, a copy that was cut off, a bit that fell over.
            path.unlink(missing_ok=True)
            return None
        self.found += 1
        proof = {name: tensors[name] for name in _PROOF if name in tensors}
        return MethodResult(state, Certificate(**proof) if proof else None)


def write_whole(
    path: Path, write: Callable[[Path], object], mark: str = "partial", sync: bool = False
) -> None:
    """Have a file written, whole or not at all, that others can read as far as is usual.

    mark: of the name that it has until then.
    sync: wait for the disk. Layers do not, for the next one is to be read: a file that a machine
        tears when it stops is found by its checksums, and `save` waits for those that it links.
    """
    partial = path.with_name(f".{path.name}.{mark}")
    try:
        # safetensors makes files that only their owner can read.
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(mode)
        if sync:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
        # Over the file of another identity, which Windows would not do by itself.
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
