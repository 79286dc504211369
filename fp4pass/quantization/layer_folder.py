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
from ..core.fingerprint import fingerprint
from ..core.paths import path_of
from ..distributed import ranks
from ..errors import CheckpointError, OptionError, expected
from ..experts import QUANTIZED
from .copying import copy_beside
from .plan import LayerPlan, Plan
from .replace import store_packed
from .report import Row
from .search_cache import digest_of
from .state import LayerFile, ModelState

# Layers that are written at a time, while the next one is worked on.
_WRITERS = 2

# Numbers of a weight that tell it from that of another model.
_SAMPLE = 1 << 8


def open_layers(
    folder: str | os.PathLike[str], root: nn.Module, plan: Plan, before: ModelState | None
) -> LayerFolder:
    """Return the folder of the packed layers of a model, with those of the same call before.

    Raises OptionError for a model that cannot be streamed.
    """
    if isinstance(root, fx.GraphModule):
        raise OptionError("stream= is for modules: a graph has no layers that are called.")
    seen = {} if before is None else before.recipe.get("calibration", {})
    recorded = before is not None and before.recording is not None
    samples = [(layer.name, *_sample(layer.module)) for layer in plan.layers]
    key = digest_of(__version__, plan.outline(), recorded, seen.get("sha256", ""), samples)
    return LayerFolder(folder, digest_of(ranks().gather(key)))


def _sample(module: nn.Module) -> tuple[Any, ...]:
    """Return something of a weight, which is too large to hash."""
    weight = module.get_parameter("weight")
    if weight.device.type != "cpu":
        return ()
    flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach()[0].reshape(-1)
    return flat[:_SAMPLE], flat[-_SAMPLE:]


@dataclass(frozen=True)
class _Kept:
    """A layer that is being written, and the modules that will map it."""

    name: str
    path: Path
    packed: Mapping[str, Any]
    written: Future[None] | None  # by the first process


class LayerFolder:
    """Keeps each layer in a file of its own as soon as it is packed.

    It is written while the next layer is worked on. The files of another key, which names
    everything that decides their contents, are removed. Of several processes the first writes, and
    all map what it wrote.
    """

    def __init__(self, folder: str | os.PathLike[str], key: str) -> None:
        self.folder, self.key = path_of(folder, "stream"), key
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

    def has(self, name: str) -> bool:
        """Return whether a layer is there already, from a run before."""
        return name in self._found

    def restore(self, name: str, own: Sequence[LayerPlan]) -> None:
        """Give the linears of a layer what they were packed to."""
        facts, tensors = self._mapped(self._found[name])
        rows = [Row.from_dict(each) for each in facts["rows"]]
        self.rows.update({row.name: row for row in rows})
        for members in Plan(tuple(own)).by_weight():
            config = self.rows[members[0].name].config
            if config is None:
                continue
            parts = tensors[members[0].name]
            for layer in members:
                store_packed(layer.module, parts, config, transposed=layer.transposed)

    def keep(self, name: str, layer: nn.Module) -> None:
        """Begin to write what was packed of a layer to its file.

        The modules map it from there, in place of the memory that they have, when a later layer is
        kept, or by `close`.
        """
        while len(self._kept) >= _WRITERS:
            self._settle()
        packed = {
            f"{name}.{path}" if path else name: module
            for path, module in layer.named_modules()
            if isinstance(module, QUANTIZED)
        }
        path = self.folder / f"{name}.safetensors"
        written = None
        if ranks().rank == 0:
            buffers = {full: dict(module._buffers) for full, module in packed.items()}
            rows = [row for key, row in self.rows.items() if f"{key}.".startswith(f"{name}.")]
            written = self._writers.submit(self._write, path, buffers, rows, _mark_of(buffers))
        self._kept.append(_Kept(name, path, packed, written))

    def close(self, is_done: bool = True) -> None:
        """Wait until all is written; where not `is_done`, what is cut off there is not missed."""
        try:
            while is_done and self._kept:
                self._settle()
        finally:
            self._kept.clear()
            self._writers.shutdown()

    def _settle(self) -> None:
        """Have the first layer that is being written map its file."""
        kept = self._kept.popleft()
        with self._usable(), ranks().first_alone():
            if kept.written is not None:
                kept.written.result()
        _, tensors = self._mapped(kept.path)
        for full, module in kept.packed.items():
            if not offload_from(module, tensors[full]):
                module._buffers.update(tensors[full])

    def _write(
        self,
        path: Path,
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
            "rows": [row.to_dict() for row in rows],
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
        self.files.append(LayerFile.of(path, own, facts["sums"]))
        return facts, found

    def _whole_files(self) -> dict[str, Path]:
        """Return the files of this key by their layers, and remove what is not whole."""
        found: dict[str, Path] = {}
        group = ranks()
        with self._usable(), group.first_alone() as is_first:
            for path in sorted(self.folder.glob("*.safetensors")) if is_first else ():
                if _is_whole(path, self.key):
                    found[path.name.removesuffix(".safetensors")] = path
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
    copy_beside(tensor, found, mark)
    return found


def _is_whole(path: Path, key: str) -> bool:
    try:
        facts = json.loads(_facts_of(path).read_text())
        if facts["key"] != key:
            return False
        with safe_open(path, framework="pt") as file:
            found = {name: fingerprint(file.get_tensor(name)) for name in file.keys()}
        return bool(found == facts["sums"])
    except (SafetensorError, OSError, ValueError, LookupError, TypeError):
        return False


def _facts_of(path: Path) -> Path:
    """Return the file that says what a file of tensors is."""
    return path.with_suffix(".json")


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written, whole or not at all, that others can read as far as is usual.

    It does not wait for the disk, which has the next layer to read: what a machine that stops
    tears, `_is_whole` finds, and `save` waits for what it links.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        # safetensors makes files that only their owner can read.
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(mode)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
