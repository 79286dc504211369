"""Keep finished work of a conversion in a folder, found again by all that decides it.

`convert(resume=)` keeps searches; `convert(stream=)` keeps layers in files that the model maps.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from .._compat.accelerate import offload_from
from .._version import __version__
from ..core.files import parse_json, path_of
from ..core.fingerprint import Unknown, digest_of, fingerprint, identity_of
from ..core.quant_state import QuantState, read_state, save_state
from ..distributed import ranks
from ..errors import CheckpointError, OptionError, as_option, expected
from ..methods.base import Certificate, Result
from ..nn.experts import QUANTIZED
from ..quantization.plan import LayerPlan, Plan
from ..quantization.replace import begin_replacing, store_packed
from ..record.rows import Row
from ..record.state import ModelState

_log = logging.getLogger(__name__)


class FinishedWork:
    """A folder of finished work, each file whole or not there."""

    option: ClassVar[str]  # of `convert`, which names the folder
    holds: ClassVar[str]  # the work that is in it

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = path_of(folder, self.option)
        self._said = set[str]()
        if (self.folder / "config.json").exists():
            got = f"{self.folder}, which holds a model"
            raise OptionError(expected(self.option, "a folder of its own", got))
        with ranks().together():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                got = f"{self.folder}, which cannot be made: {error}"
                raise OptionError(expected(self.option, "a folder", got)) from error

    def identity(self, name: str, decides: Iterable[Any]) -> str:
        """Return a digest of all that decides a result; a new one if that cannot be identified."""
        try:
            return identity_of(__version__, *decides)
        except Unknown as unknown:
            if str(unknown) not in self._said:
                what = "is quantized again by every call, for what decides it cannot be identified"
                _log.warning("%s: %s %s: %s.", self.option, name, what, unknown)
            self._said.add(str(unknown))
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


class FinishedSearches(FinishedWork):
    """Finished searches, each in a file that its identity names; processes may share the folder."""

    option, holds = "resume", "searches"
    # The number that was there.
    found = 0

    def get_or_search(
        self, name: str, decides: Sequence[Any], search: Callable[[], Result]
    ) -> Result:
        """Return the search that is finished for what decides it, or search and keep that."""
        path = self.folder / f"{self.identity(name, decides)}.safetensors"
        with self.usable():
            if path.exists():
                try:
                    state, tensors = read_state(path)
                    proof = {name: tensors[name] for name in ("loss", "bound") if name in tensors}
                    if isinstance(state, QuantState):
                        self.found += 1
                        return state, Certificate(**proof) if proof else None
                except (CheckpointError, SafetensorError, OSError):
                    # A disk that was full, a copy that was cut off, a bit that fell over.
                    path.unlink(missing_ok=True)
        state, certificate = search()
        beside = vars(certificate) if certificate else {}
        with self.usable():
            mark = secrets.token_hex(4)
            _write_whole(path, lambda part: save_state(part, state, beside), mark, sync=True)
        return state, certificate


def _write_whole(
    path: Path, write: Callable[[Path], object], mark: str = "partial", sync: bool = False
) -> None:
    """Have a file written whole or not at all, readable as usual. sync: wait for the disk."""
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


@dataclass(frozen=True)
class ConvertedState(ModelState):
    """The record of a converted model, and the file of what a checkpoint has beyond it."""

    carried: Mapping[str, Path] = field(default_factory=dict)


class FinishedLayers(FinishedWork):
    """The packed layers of `convert(stream=)`, each in a file from which the model maps it."""

    # A file is written while the next layer is worked on. It has the identity of its layer, and of
    # the options and shapes of all layers; one of another identity is written again. Of several
    # processes the first writes, and all map that. `rows` has the row of each layer that is packed.

    option, holds = "stream", "layers"

    def __init__(self, folder: str | os.PathLike[str], root: nn.Module, call: object) -> None:
        """Open the folder for a call of `convert`, which is told from others by plain values."""
        if isinstance(root, fx.GraphModule):
            raise OptionError(
                f"{as_option('stream')} is for modules: a graph has no layers that are called."
            )
        super().__init__(folder)
        self.root = root
        self.key = digest_of(ranks().gather(digest_of(call)))
        self.rows: dict[str, Row] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="fp4pass-keep")
        # The layer that will map its file, when the next one is kept, or at the end.
        self._last: tuple[Path, dict[str, nn.Module], Future[None] | None] | None = None

    def identity(self, name: str, decides: Iterable[Any]) -> str:
        """Return the identity of a layer in this call."""
        return super().identity(name, [self.key, *decides])

    def has(self, name: str, identity: str) -> bool:
        """Return whether a layer is there already, whole, from a run before."""
        with self.usable(), ranks().first_alone() as is_first:
            found = is_first and _is_whole(self._path_of(name), identity)
        return ranks().gather(found)[0]

    def restore(self, name: str, layer: nn.Module, own: Sequence[LayerPlan]) -> None:
        """Give the linears of a layer their packed tensors."""
        self._map_last()
        facts, tensors = self._mapped(self._path_of(name))
        self.rows |= {row.name: row for row in map(Row.from_dict, facts["rows"])}
        begin_replacing(self.root)
        for members in Plan(tuple(own)).by_weight():
            config = self.rows[members[0].name].config
            if config is None:
                continue
            for each in members:
                parts = tensors[members[0].name]
                store_packed(each.module, parts, config, transposed=each.transposed)
        self._last = self._path_of(name), _packed_of(name, layer), None

    def keep(self, name: str, layer: nn.Module, identity: str) -> None:
        """Begin to write the packed tensors of a layer to its file, which it maps later."""
        self._map_last()
        packed, path, written = _packed_of(name, layer), self._path_of(name), None
        if ranks().rank == 0:
            tensors: dict[str, Tensor] = {}
            # Each is in the file under its name, as a checkpoint has it, none shared.
            first, shared = dict[int, str](), dict[str, str]()
            for full, module in packed.items():
                for part, tensor in module._buffers.items():
                    if tensor is not None:
                        key = f"{full}.{part}"
                        one = shared[key] = first.setdefault(id(tensor), key)
                        host = tensor.detach().cpu().contiguous()
                        tensors[key] = host if one == key else host.clone()
            rows = [row for key, row in self.rows.items() if f"{key}.".startswith(f"{name}.")]
            facts: dict[str, Any] = {"identity": identity, "shared": shared}
            facts["rows"] = [row.record() for row in rows]
            written = self._writer.submit(_write_layer, path, tensors, facts)
        self._last = path, packed, written

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait until all is written; after an error drop a layer that is cut off."""
        try:
            if kind is None:
                self._map_last()
        finally:
            self._last = None
            self._writer.shutdown()

    def _map_last(self) -> None:
        """Have the layer before map its file, in place of the memory that it has."""
        if self._last is None:
            return
        path, packed, written = self._last
        self._last = None
        with self.usable(), ranks().first_alone():
            if written is not None:
                written.result()
        _, tensors = self._mapped(path)
        for full, module in packed.items():
            if not offload_from(module, tensors[full]):
                module._buffers.update(tensors[full])

    def _mapped(self, path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Return the facts of a file, and its tensors, mapped, by layer and buffer."""
        with self.usable(), safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = json.loads(_facts_of(path).read_text())
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        found: dict[str, dict[str, Tensor]] = {}
        for key, original in facts["shared"].items():
            name, _, part = key.rpartition(".")
            found.setdefault(name, {})[part] = tensors[original]
        return facts, found

    def _path_of(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _packed_of(name: str, layer: nn.Module) -> dict[str, nn.Module]:
    return {
        f"{name}.{path}" if path else name: module
        for path, module in layer.named_modules()
        if isinstance(module, QUANTIZED)
    }


def _write_layer(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a file of tensors, and then what tells that it is whole."""
    record = {**facts, "sums": {key: fingerprint(tensor) for key, tensor in tensors.items()}}
    record["sha256"] = digest_of(record)
    # The file of tensors cannot say it, whose bytes are to be those of any other run.
    _facts_of(path).unlink(missing_ok=True)
    _write_whole(path, lambda part: save_file(dict(tensors), part, metadata={"format": "pt"}))
    _write_whole(_facts_of(path), lambda part: part.write_text(json.dumps(record)))


def _is_whole(path: Path, identity: str) -> bool:
    """Return whether a file has the layer of an identity, to the bit."""
    try:
        facts = parse_json(_facts_of(path).read_text())
        if facts["identity"] != identity or facts.pop("sha256") != digest_of(facts):
            return False
        with safe_open(path, framework="pt") as file:
            sums = {name: fingerprint(file.get_tensor(name)) for name in file.keys()}
        return bool(sums == facts["sums"])
    except (SafetensorError, OSError, ValueError, LookupError, TypeError):
        return False


def _facts_of(path: Path) -> Path:
    return path.with_suffix(".json")
