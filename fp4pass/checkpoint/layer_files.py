"""Write packed layers to files that the model maps, find these again, take them into a save."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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
from ..core.plain_files import parse_json
from ..distributed import ranks
from ..errors import OptionError, as_option
from ..nn.experts import QUANTIZED
from ..quantization.plan import LayerPlan, Plan
from ..quantization.replace import begin_replacing, store_packed
from ..record.rows import Row
from ..record.state import ModelState
from .layer_store import LayerStore, write_whole
from .layouts import Layout, PackedLayer

# Layers that are written at a time, while the next one is worked on.
_WRITERS = 2

# Buffers of packed layers, by the names of the layers in the model.
_Buffers = Mapping[str, Mapping[str, Tensor | None]]


@dataclass(frozen=True)
class LayerFile:
    """A file of packed tensors from which a model maps them.

    Attributes:
        path: of the file, which has each tensor under its name in the state dict.
        tensors: by their names, as they were mapped.
        versions: of these, which tell whether they were written to since.
        sums: their fingerprints.
        stamp: what tells whether the file is still the same.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    versions: Mapping[str, int]
    sums: Mapping[str, Any]
    stamp: tuple[int, ...]

    @staticmethod
    def of(path: Path, tensors: Mapping[str, Tensor], sums: Mapping[str, Any]) -> LayerFile:
        """Return the record of a file that was just mapped."""
        versions = {name: tensor._version for name, tensor in tensors.items()}
        return LayerFile(path, tensors, versions, sums, _stamp(path))

    def is_unchanged(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Return whether the file has just these tensors, unchanged since they were mapped."""
        return (
            tensors.keys() == self.tensors.keys()
            and all(tensors[name] is tensor for name, tensor in self.tensors.items())
            and all(each._version == self.versions[name] for name, each in self.tensors.items())
            and self.path.is_file()
            and _stamp(self.path) == self.stamp
        )


def _stamp(path: Path) -> tuple[int, ...]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


@dataclass(frozen=True)
class ConvertedState(ModelState):
    """The record of a converted model, and the files on the disk that it uses.

    Attributes:
        files: those that packed layers are mapped from.
        carried: the file of each tensor that a checkpoint has beyond the model.
    """

    files: tuple[LayerFile, ...] = ()
    carried: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class _Kept:
    """A layer that is being written, and the modules that will map it."""

    path: Path
    packed: Mapping[str, nn.Module]
    written: Future[None] | None = None  # by the first process


class FinishedLayers(LayerStore):
    """The packed layers of `convert(stream=)`, each in a file from which the model maps it.

    A file is written while the next layer is worked on. It has the key of its call, the options and
    shapes of all layers, and the identity of its layer. Files of another key are removed, those of
    another identity are written again. Of several processes the first writes, and all map that.

    Attributes:
        rows: the row of each layer that is packed.
        files: those that the model maps.
    """

    option, holds = "stream", "layers"

    def __init__(self, folder: str | os.PathLike[str], root: nn.Module, call: object) -> None:
        """Open the folder for a call of `convert`, which is told from others by plain values."""
        if isinstance(root, fx.GraphModule):
            raise OptionError(
                f"{as_option('stream')} is for modules: a graph has no layers that are called."
            )
        super().__init__(folder)
        self.root = root
        self.key = digest_of(ranks().gather(digest_of(__version__, call)))
        self.rows: dict[str, Row] = {}
        self.files: list[LayerFile] = []
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="fp4pass-keep")
        self._kept: deque[_Kept] = deque()
        self._found = self._whole_files()

    def has(self, name: str, identity: str) -> bool:
        """Return whether a layer is there already, from a run before."""
        return self._found.get(name) == identity

    def restore(self, name: str, layer: nn.Module, own: Sequence[LayerPlan]) -> None:
        """Give the linears of a layer their packed tensors."""
        path = self._path_of(name)
        facts, tensors = self._mapped(path)
        rows = map(Row.from_dict, facts["rows"])
        self.rows.update({row.name: row for row in rows})
        begin_replacing(self.root)
        for members in Plan(tuple(own)).by_weight():
            config = self.rows[members[0].name].config
            if config is None:
                continue
            for each in members:
                parts = tensors[members[0].name]
                store_packed(each.module, parts, config, transposed=each.transposed)
        self._add(_Kept(path, _packed_of(name, layer)))

    def keep(self, name: str, layer: nn.Module, identity: str) -> None:
        """Begin to write the packed tensors of a layer to its file.

        The modules map it from there, in place of the memory that they have, when a later layer is
        kept, or at the end.
        """
        packed, path, written = _packed_of(name, layer), self._path_of(name), None
        if ranks().rank == 0:
            buffers = {full: dict(module._buffers) for full, module in packed.items()}
            rows = [row for key, row in self.rows.items() if f"{key}.".startswith(f"{name}.")]
            facts = {"key": self.key, "identity": identity, "rows": [row.record() for row in rows]}
            event = _event_behind(buffers)
            written = self._writers.submit(_write_layer, path, buffers, facts, event)
        self._add(_Kept(path, packed, written))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait until all is written; after an error drop layers that are cut off."""
        try:
            while kind is None and self._kept:
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
        with self.usable(), ranks().first_alone():
            if kept.written is not None:
                kept.written.result()
        facts, tensors = self._mapped(kept.path)
        own = {f"{full}.{part}": x for full, parts in tensors.items() for part, x in parts.items()}
        self.files.append(LayerFile.of(kept.path, own, facts["sums"]))
        for full, module in kept.packed.items():
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

    def _whole_files(self) -> dict[str, str]:
        """Return the identities of layers with a whole file of this key, and remove other files."""
        found: dict[str, str] = {}
        group = ranks()
        with self.usable(), group.first_alone() as is_first:
            for path in sorted(self.folder.glob("*.safetensors")) if is_first else ():
                identity = _identity_of(path, self.key)
                if identity is not None:
                    found[path.name.removesuffix(".safetensors")] = identity
                else:
                    path.unlink()
                    _facts_of(path).unlink(missing_ok=True)
        return group.gather(found)[0]


def _packed_of(name: str, layer: nn.Module) -> dict[str, nn.Module]:
    """Return the packed modules of a layer, by their names in the model."""
    return {
        f"{name}.{path}" if path else name: module
        for path, module in layer.named_modules()
        if isinstance(module, QUANTIZED)
    }


def _write_layer(
    path: Path, packed: _Buffers, facts: Mapping[str, Any], event: torch.cuda.Event | None
) -> None:
    """Write a file of tensors as a checkpoint has them: each under its name, none shared.

    event: behind it those on a GPU are complete.
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
            tensors[key] = _host(tensor, event) if is_first else tensors[shared[key]].clone()
    sums = {key: fingerprint(tensor) for key, tensor in tensors.items()}
    record = {**facts, "shared": shared, "sums": sums}
    record["sha256"] = digest_of(record)
    # The file of tensors cannot say it, whose bytes are to be those of any other run.
    _facts_of(path).unlink(missing_ok=True)
    write_whole(path, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
    write_whole(_facts_of(path), lambda partial: partial.write_text(json.dumps(record)))


def _event_behind(buffers: _Buffers) -> torch.cuda.Event | None:
    """Return an event behind the kernels that make the tensors that are on a GPU."""
    tensors = (tensor for parts in buffers.values() for tensor in parts.values())
    gpu = next((x.device for x in tensors if x is not None and x.is_cuda), None)
    return None if gpu is None else torch.cuda.current_stream(gpu).record_event()


def _host(tensor: Tensor, event: torch.cuda.Event | None) -> Tensor:
    """Return a contiguous tensor in memory."""
    tensor = tensor.detach()
    if event is None or not tensor.is_cuda:
        return tensor.cpu().contiguous()
    found = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_async(tensor, found, event)
    return found


def _identity_of(path: Path, key: str) -> str | None:
    """Return the identity of the layer in a file; None if that is of another key, or not whole."""
    try:
        facts = parse_json(_facts_of(path).read_text())
        if facts["key"] != key or facts.pop("sha256") != digest_of(facts):
            return None
        with safe_open(path, framework="pt") as file:
            found = {name: fingerprint(file.get_tensor(name)) for name in file.keys()}
        return str(facts["identity"]) if found == facts["sums"] else None
    except (SafetensorError, OSError, ValueError, LookupError, TypeError):
        return None


def _facts_of(path: Path) -> Path:
    """Return the path of the facts of a file of tensors."""
    return path.with_suffix(".json")


def files_to_take(
    modules: Mapping[str, nn.Module],
    state: ConvertedState,
    layout: Layout,
    packed: Mapping[str, tuple[str, str, PackedLayer]],
    renamed: Collection[str],
    limit: int,
) -> list[LayerFile]:
    """Return the files that a model maps which are files of a checkpoint as they are.

    Args:
        modules: of the model, by their names.
        state: of the model.
        layout: of the checkpoint.
        packed: the layer and the buffer of each packed tensor of the state dict, and the record of
            the layer.
        renamed: the layers that have other names in the checkpoint, or are taken apart there.
        limit: the bytes of a file.
    """
    found = []
    for file in state.files:
        if not file.tensors:
            # Of a layer in which every linear is skipped.
            continue
        layers = {packed[name][0] for name in file.tensors if name in packed}
        tensors = {
            name: (each, tensor)
            for name, each in packed.items()
            if each[0] in layers and (tensor := modules[each[0]]._buffers.get(each[1])) is not None
        }
        is_as_stored = layers.isdisjoint(renamed) and all(
            layout.tensor_name(layer, part, record.fmt) == name
            and layout.encode(part, tensor, record) is tensor
            for name, ((layer, part, record), tensor) in tensors.items()
        )
        holds = file.is_unchanged({name: tensor for name, (_, tensor) in tensors.items()})
        # A layer that is skipped whole has a file without tensors.
        if layers and is_as_stored and holds and file.path.stat().st_size <= limit:
            found.append(file)
    # In the order of the model, whichever were finished first.
    place = {name: i for i, name in enumerate(packed)}
    return sorted(found, key=lambda file: min(place[name] for name in file.tensors))
