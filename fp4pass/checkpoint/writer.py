"""Write packed weights in a layout, with their checksums."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ..core.fingerprint import fingerprint
from ..core.progress import current
from ..errors import CheckpointError, OptionError, expected
from .layouts import Layout, PackedLayer, matches
from .source_files import write_json, write_manifest

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(size: int | str) -> int:
    """Return a size such as "5GB" or "800MiB" in bytes. Raises OptionError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", str(size).upper())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise OptionError(expected("max_shard_size", "a size such as '5GB' or '800MiB'", size))
    if isinstance(size, str) and not match[2]:
        # On a command line 5 would be 5 bytes, a file for each tensor.
        raise OptionError(expected("max_shard_size", "a size with its unit, as '5GB'", size))
    return int(float(match[1]) * _UNITS[match[2]])


class ShardWriter:
    """A writer of tensors, one after the other; at most one file of them is held in memory.

    A file has at most `limit` bytes, or one tensor. One file is called `weights`, such as
    "model.safetensors"; several are numbered as transformers numbers them, with an index.
    """

    def __init__(self, folder: Path, weights: str, limit: int) -> None:
        self.folder, self.weights, self.limit = folder, weights, limit
        self.part: dict[str, Tensor] = {}
        self._addresses: set[int] = set()
        self.size = self.total = 0
        self.parts: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor on the CPU, contiguous."""
        if self.part and self.size + tensor.nbytes > self.limit:
            self._flush()
        # safetensors refuses two tensors in one memory.
        is_shared = tensor.data_ptr() in self._addresses
        self._addresses.add(tensor.data_ptr())
        self.part[name] = tensor.clone() if is_shared else tensor
        self.size += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        """Write what is held to a file, under a temporary name."""
        path = self.folder / f"part-{len(self.parts)}"
        # safetensors makes files that only their owner can read.
        path.touch()
        mode = path.stat().st_mode
        save_file(self.part, path, metadata={"format": "pt"})
        path.chmod(mode)
        self.parts.append((path, list(self.part)))
        self.part, self.size = {}, 0
        self._addresses.clear()

    def close(self) -> None:
        """Write the rest, give every file its name, and write the index."""
        if self.part or not self.parts:
            self._flush()
        if len(self.parts) == 1:
            self.parts[0][0].rename(self.folder / self.weights)
            return
        stem, count = self.weights.removesuffix(".safetensors"), len(self.parts)
        index: dict[str, str] = {}
        for i, (path, names) in enumerate(self.parts):
            file = f"{stem}-{i + 1:05}-of-{count:05}.safetensors"
            path.rename(self.folder / file)
            index |= dict.fromkeys(names, file)
        data = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(index.items()))}
        write_json(self.folder / f"{self.weights}.index.json", data)


class CheckpointWriter(ShardWriter):
    """A writer of configs, of tensors in files of at most `limit` bytes, and of fp4pass.json."""

    def __init__(
        self, folder: Path, layout: Layout, layers: Mapping[str, PackedLayer], limit: int
    ) -> None:
        super().__init__(folder, layout.weights, limit)
        self.layout, self.layers = layout, layers
        self.sums: dict[str, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        # The format of the key-value cache that is declared.
        self.cache: str | None = None

    def declare(
        self,
        config: Mapping[str, Any],
        ignore: Sequence[str],
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        """Write config.json, unless `config` is empty, and the other files of the layout.

        Its quantization_config is `declared`, by default what the layout says. Raises
        CheckpointError if readers would take a packed layer for one that `ignore` lists.
        """
        if covered := [name for name in self.layers if matches(name, ignore)]:
            raise CheckpointError(
                f"{covered[0]}: it is packed, and a pattern for dense layers covers it, so that "
                f"others would give it random weights: {', '.join(ignore)}."
            )
        if config:
            declared = declared or self.layout.config(self.layers, ignore)
            self.config = {**config, "quantization_config": dict(declared)}
            write_json(self.folder / "config.json", self.config)
        self.cache = None if declared is None else self.layout.cache.format(declared)
        for name, data in self.layout.files(self.layers, ignore, self.cache).items():
            write_json(self.folder / name, data)

    def add(self, name: str, tensor: Tensor, layer: PackedLayer | None = None) -> None:
        """Write a tensor of a state dict as the layout has it; that of a packed layer needs it."""
        layers = {} if layer is None else {name.rpartition(".")[0]: layer}
        stored = self.layout.to_stored({name: tensor}, layers, self.cache is not None)
        for own, each in stored.items():
            each = each.contiguous()
            self.sums[own] = fingerprint(each)
            current().step(each.nbytes)
            super().add(own, each)

    def close(self, facts: Mapping[str, Any] | None = None) -> None:
        """Write the rest, and fp4pass.json with what `facts` says of the model."""
        super().close()
        if facts is None:
            return
        own = {
            "layout": self.layout.name,
            "weights": self.layout.weights,
            **{key: facts[key] for key in ("dtype", "recipe", "report", "aliases")},
            **{key: facts.get(key, {}) for key in ("renamed", "stacks", "joined", "whole")},
            "layers": {name: layer.to_dict() for name, layer in self.layers.items()},
            **{key: facts[key] for key in ("carried", "cache_scales") if facts.get(key)},
            "tensors": dict(sorted(self.sums.items())),
            "config": self.config,
        }
        write_manifest(self.folder, own)
