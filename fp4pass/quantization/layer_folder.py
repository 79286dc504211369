"""A folder of packed layers, from which a model maps them: what `convert(stream=)` fills."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from .._version import __version__
from ..core.paths import path_of
from ..distributed import ranks
from ..errors import CheckpointError, OptionError, expected
from ..experts import QUANTIZED
from .plan import LayerPlan, Plan
from .replace import store_packed
from .report import Row
from .search_cache import digest_of
from .state import ModelState

# Numbers of a weight that tell it from that of another model.
_SAMPLE = 1 << 8

# Bytes of a page of memory: one of each is read to have the file in the page cache.
_PAGE = 1 << 12


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


class LayerFolder:
    """Keeps each layer in a file of its own as soon as it is packed.

    The files of another key, which names everything that decides their contents, are removed. Of
    several processes the first writes, and all map what it wrote.
    """

    def __init__(self, folder: str | os.PathLike[str], key: str) -> None:
        self.folder, self.key = path_of(folder, "stream"), key
        if self.folder.exists() and not self.folder.is_dir():
            raise OptionError(expected("stream", "a folder", f"{self.folder}, a file"))
        self.rows: dict[str, Row] = {}
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="fp4pass-fetch")
        with self._usable(), ranks().together():
            self.folder.mkdir(parents=True, exist_ok=True)
        self._files = self._whole_files()

    def has(self, name: str) -> bool:
        """Return whether a layer is there already, from a run before."""
        return name in self._files

    def restore(self, name: str, own: Sequence[LayerPlan]) -> None:
        """Give the linears of a layer what they were packed to."""
        facts, tensors = _mapped(self._files[name])
        rows = [Row.from_dict(each) for each in json.loads(facts["rows"])]
        self.rows.update({row.name: row for row in rows})
        for members in Plan(tuple(own)).by_weight():
            config = self.rows[members[0].name].config
            if config is None:
                continue
            parts = tensors[members[0].name]
            for layer in members:
                store_packed(layer.module, parts, config, transposed=layer.transposed)

    def keep(self, name: str, layer: nn.Module) -> None:
        """Write what was packed of a layer to its file, and map it from there."""
        packed = {
            f"{name}.{path}" if path else name: module
            for path, module in layer.named_modules()
            if isinstance(module, QUANTIZED)
        }
        path = self.folder / f"{name}.safetensors"
        with self._usable(), ranks().first_alone() as is_first:
            if is_first:
                self._write(path, name, packed)
        _, tensors = _mapped(path)
        for full, module in packed.items():
            for part, tensor in tensors[full].items():
                module._buffers[part] = tensor
        self._files[name] = path

    def fetch(self, layer: nn.Module) -> None:
        """Begin to read the weights of a layer into the page cache."""
        tensors = [each.detach() for each in layer.parameters() if each.device.type == "cpu"]
        self._readers.submit(_touch, tensors)

    def _write(self, path: Path, name: str, packed: dict[str, Any]) -> None:
        tensors: dict[str, Tensor] = {}
        shared: dict[str, str] = {}
        first: dict[int, str] = {}
        for full, module in packed.items():
            for part, tensor in module._buffers.items():
                key = f"{full}:{part}"
                if tensor is None:
                    continue
                shared[key] = first.setdefault(id(tensor), key)
                if shared[key] == key:
                    tensors[key] = tensor.detach().cpu().contiguous()
        rows = [row for key, row in self.rows.items() if f"{key}.".startswith(f"{name}.")]
        facts = {
            "key": self.key,
            "rows": json.dumps([row.to_dict() for row in rows]),
            "shared": json.dumps(shared),
        }
        facts["digest"] = _digest(tensors)
        partial = path.with_name(f".{path.name}.partial")
        try:
            save_file(tensors, partial, metadata=facts)
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

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


def _mapped(path: Path) -> tuple[dict[str, str], dict[str, dict[str, Tensor]]]:
    """Return what a file says, and its tensors, mapped, by layer and buffer."""
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    found: dict[str, dict[str, Tensor]] = {}
    for key, original in json.loads(facts["shared"]).items():
        name, _, part = key.rpartition(":")
        found.setdefault(name, {})[part] = tensors[original]
    return facts, found


def _is_whole(path: Path, key: str) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            if facts.get("key") != key:
                return False
            return facts["digest"] == _digest({k: file.get_tensor(k) for k in file.keys()})
    except (SafetensorError, OSError, KeyError):
        return False


def _digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for key in sorted(tensors):
        total.update(f"{key}{tuple(tensors[key].shape)}".encode())
        total.update(tensors[key].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _touch(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.reshape(-1).view(torch.uint8)[::_PAGE].sum()
