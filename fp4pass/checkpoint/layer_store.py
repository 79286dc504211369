"""A folder of packed layers, from which a model maps them: what `convert(stream=)` fills."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from .._compat.accelerate import offload_from
from .._version import __version__
from ..core.devices import copy_async
from ..core.fingerprint import digest_of, fingerprint
from ..core.paths import path_of
from ..distributed import ranks
from ..errors import CheckpointError, OptionError, expected
from ..experts import QUANTIZED
from ..quantization.plan import LayerPlan, Plan
from ..quantization.replace import begin_replacing, store_packed
from ..rows import Row
from ..state import PreparedState
from .layer_files import LayerFile

# Layers that are written at a time, while the next one is worked on.
_WRITERS = 2


def open_layers(
    folder: str | os.PathLike[str], root: nn.Module, plan: Plan, before: PreparedState | None
) -> LayerFolder:
    """Return the folder of the packed layers of a model, with those of the same call before.

    Raises OptionError for a model that cannot be streamed.
    """
    if isinstance(root, fx.GraphModule):
        raise OptionError("stream= is for modules: a graph has no layers that are called.")
    recorded = before is not None and before.recording is not None
    key = digest_of(__version__, plan.outline(), recorded)
    return LayerFolder(folder, digest_of(ranks().gather(key)), root)


@dataclass(frozen=True)
class _Kept:
    """A layer that is being written, and the modules that will map it."""

    name: str
    path: Path
    packed: Mapping[str, nn.Module]
    written: Future[None] | None  # by the first process


class LayerFolder:
    """Keeps each layer in a file of its own as soon as it is packed.

    It is written while the next layer is worked on. Each file has the key of its call, the options
    and shapes of all layers, and the identity of its layer, a digest of everything that decides its
    contents. Files of another key are removed, those of another identity are written again. Of
    several processes the first writes, and all map what it wrote.
    """

    def __init__(self, folder: str | os.PathLike[str], key: str, root: nn.Module) -> None:
        self.folder, self.key, self.root = path_of(folder, "stream"), key, root
        if self.folder.exists() and not self.folder.is_dir():
            raise OptionError(expected("stream", "a folder", f"{self.folder}, a file"))
        self.rows: dict[str, Row] = {}
        # What the model maps.
        self.files: list[LayerFile] = []
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="fp4pass-keep")
        self._kept: deque[_Kept] = deque()
        with self._usable(), ranks().together():
            self.folder.mkdir(parents=True, exist_ok=True)
        self._found = self._whole_files()

    def has(self, name: str, identity: str, own: Sequence[LayerPlan]) -> bool:
        """Return whether a layer is there already, from a run before."""
        if self._found.get(name) != identity:
            return False
        rows = {row.name: row for row in self._rows_of(self._path_of(name))}
        return all(each.name in rows and rows[each.name].shape == each.shape for each in own)

    def _rows_of(self, path: Path) -> list[Row]:
        with self._usable():
            facts = json.loads(_facts_of(path).read_text())
        return [Row.from_dict(each) for each in facts["rows"]]

    def restore(self, name: str, layer: nn.Module, own: Sequence[LayerPlan]) -> None:
        """Give the linears of a layer what they were packed to."""
        path = self._path_of(name)
        _, tensors = self._mapped(path)
        self.rows.update({row.name: row for row in self._rows_of(path)})
        begin_replacing(self.root)
        for members in Plan(tuple(own)).by_weight():
            config = self.rows[members[0].name].config
            if config is None:
                continue
            parts = tensors[members[0].name]
            for each in members:
                store_packed(each.module, parts, config, transposed=each.transposed)
        self._add(_Kept(name, path, _packed_of(name, layer), None))

    def keep(self, name: str, layer: nn.Module, identity: str) -> None:
        """Begin to write what was packed of a layer to its file.

        The modules map it from there, in place of the memory that they have, when a later layer is
        kept, or by `close`.
        """
        packed = _packed_of(name, layer)
        path = self._path_of(name)
        written = None
        if ranks().rank == 0:
            buffers = {full: dict(module._buffers) for full, module in packed.items()}
            rows = [row for key, row in self.rows.items() if f"{key}.".startswith(f"{name}.")]
            mark = _mark_of(buffers)
            written = self._writers.submit(self._write, path, identity, buffers, rows, mark)
        self._add(_Kept(name, path, packed, written))

    def close(self, is_done: bool = True) -> None:
        """Wait until all is written; where not `is_done`, what is cut off there is not missed."""
        try:
            while is_done and self._kept:
                self._settle()
        finally:
            self._kept.clear()
            self._writers.shutdown()

    def _add(self, kept: _Kept) -> None:
        while len(self._kept) >= _WRITERS:
            self._settle()
        self._kept.append(kept)

    def _settle(self) -> None:
        """Have the first layer that is being written map its file."""
        kept = self._kept.popleft()
        with self._usable(), ranks().first_alone():
            if kept.written is not None:
                kept.written.result()
        facts, tensors = self._mapped(kept.path)
        own = {f"{full}.{part}": x for full, parts in tensors.items() for part, x in parts.items()}
        self.files.append(LayerFile.of(kept.path, own, facts["sums"]))
        for full, module in kept.packed.items():
            if not offload_from(module, tensors[full]):
                module._buffers.update(tensors[full])

    def _write(
        self,
        path: Path,
        identity: str,
        packed: Mapping[str, Mapping[str, Tensor | None]],
        rows: Sequence[Row],
        mark: torch.cuda.Event | None,
    ) -> None:
        """Write a file of tensors as a checkpoint has them: each under its name, none shared.

        mark: behind it those on a GPU are what they are to be.
        """
        tensors: dict[str, Tensor] = {}
        shared: dict[str, str] = {}
        first: dict[int, str] = {}
        for full, parts in packed.items():
            for part, tensor in parts.items():
                if tensor is None:
                    continue
                key = f"{full}.{part}"
                shared[key] = first.setdefault(id(tensor), key)
                is_first = shared[key] == key
                tensors[key] = _host(tensor, mark) if is_first else tensors[shared[key]].clone()
        facts = {
            "key": self.key,
            "identity": identity,
            "rows": [row.record() for row in rows],
            "shared": shared,
            "sums": {key: fingerprint(tensor) for key, tensor in tensors.items()},
        }
        # What the file of tensors cannot say, whose bytes are to be those of any other run.
        _facts_of(path).unlink(missing_ok=True)
        _write_whole(path, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
        _write_whole(_facts_of(path), lambda partial: partial.write_text(json.dumps(facts)))

    def _mapped(self, path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Return what is said of a file, and its tensors, mapped, by layer and buffer."""
        with self._usable(), safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = json.loads(_facts_of(path).read_text())
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        own = {key: tensors[original] for key, original in facts["shared"].items()}
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in own.items():
            name, _, part = key.rpartition(".")
            found.setdefault(name, {})[part] = tensor
        return facts, found

    def _path_of(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _whole_files(self) -> dict[str, str]:
        """Return the identities of layers with a file of this key, and remove what is not whole."""
        found: dict[str, str] = {}
        group = ranks()
        with self._usable(), group.first_alone() as is_first:
            for path in sorted(self.folder.glob("*.safetensors")) if is_first else ():
                identity = _identity_of(path, self.key)
                if identity is not None:
                    found[path.name.removesuffix(".safetensors")] = identity
                else:
                    path.unlink()
                    _facts_of(path).unlink(missing_ok=True)
        return group.gather(found)[0]

    def _usable(self) -> _Usable:
        return _Usable(self.folder)


class _Usable:
    """Makes what disks raise a CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(
                f"stream: {self.folder} cannot be read or written: {error}. The layers that it "
                "holds are whole: mend that or make room, and run the same again."
            ) from error


def _mark_of(buffers: Mapping[str, Mapping[str, Tensor | None]]) -> torch.cuda.Event | None:
    """Return a mark behind what makes the tensors that are on a GPU."""
    tensors = (tensor for parts in buffers.values() for tensor in parts.values())
    gpu = next((x.device for x in tensors if x is not None and x.is_cuda), None)
    return None if gpu is None else torch.cuda.current_stream(gpu).record_event()


def _host(tensor: Tensor, mark: torch.cuda.Event | None) -> Tensor:
    """Return a contiguous tensor in memory."""
    tensor = tensor.detach()
    if mark is None or not tensor.is_cuda:
        return tensor.cpu().contiguous()
    found = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_async(tensor, found, mark)
    return found


def _packed_of(name: str, layer: nn.Module) -> dict[str, nn.Module]:
    """Return what is packed of a layer, by the names in the model."""
    return {
        f"{name}.{path}" if path else name: module
        for path, module in layer.named_modules()
        if isinstance(module, QUANTIZED)
    }


def _identity_of(path: Path, key: str) -> str | None:
    """Return the identity of the layer in a file; None if that is of another key, or not whole."""
    try:
        facts = json.loads(_facts_of(path).read_text())
        if facts["key"] != key:
            return None
        with safe_open(path, framework="pt") as file:
            found = {name: fingerprint(file.get_tensor(name)) for name in file.keys()}
        return str(facts["identity"]) if found == facts["sums"] else None
    except (SafetensorError, OSError, ValueError, LookupError, TypeError):
        return None


def _facts_of(path: Path) -> Path:
    """Return the file that says what a file of tensors is."""
    return path.with_suffix(".json")


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written, whole or not at all, that others can read as far as is usual.

    It does not wait for the disk, which has the next layer to read: what a machine that stops
    tears, `_identity_of` finds, and `save` waits for what it links.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        # safetensors makes files that only their owner can read.
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(mode)
        # Over the file of another identity, which Windows would not do by itself.
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
