"""Write packed weights in a layout, with their checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.fingerprint import fingerprint
from ..core.progress import Progress, current
from ..core.time_left import Kind
from ..errors import CheckpointError
from ..kv_cache import SCALES
from .layouts import Layout, PackedLayer, matches
from .manifest import write_json, write_manifest
from .safetensors_io import ShardWriter

# Seconds of a byte, as on a laptop with an SSD; those of this machine are measured on the way.
_SECONDS: dict[Kind, float] = {("digest",): 1e-9, ("write",): 1e-9, ("sync",): 1e-9}


def foresee_save(progress: Progress, size: float) -> None:
    """Have the progress of a call know that `save` of so many bytes ends it."""
    seconds: dict[Kind, float] = {("save", *kind): each for kind, each in _SECONDS.items()}
    progress.foresee(dict.fromkeys(seconds, size), seconds)


class CheckpointWriter:
    """Writes a folder: configs, tensors in files of at most `limit` bytes, then fp4pass.json."""

    def __init__(
        self, folder: Path, layout: Layout, layers: Mapping[str, PackedLayer], limit: int
    ) -> None:
        self.folder, self.layout, self.layers = folder, layout, layers
        self.shards = ShardWriter(folder, layout.weights, limit)
        self.sums: dict[str, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        # The format of the key-value cache that is declared.
        self.cache: str | None = None
        self.size = 0

    def expect(self, size: int) -> None:
        """Show the progress of tensors of `size` bytes in memory, which may be others on disk."""
        self.size = size
        current().expect(dict.fromkeys(_SECONDS, size), {"bytes": size}, _SECONDS)

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
        self.cache = None if declared is None else self.layout.cache_format(declared)
        for name, data in self.layout.files(self.layers, ignore, self.cache).items():
            write_json(self.folder / name, data)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor under its own name; a scale of a key-value cache as the layout has it."""
        if self.cache is not None and name.endswith(tuple(f".{each}" for each in SCALES)):
            name, tensor = self.layout.cache_scale(name, tensor)
        self.sums[name] = fingerprint(tensor)
        current().step(("digest",), tensor.nbytes, {"bytes": tensor.nbytes})
        self.shards.add(name, tensor)

    def add_part(self, layer: str, part: str, multiplies: bool, tensor: Tensor) -> None:
        """Write the buffer `part` of a QuantizedLinear as the layout has it."""
        name = self.layout.tensor_name(layer, part)
        self.add(name, self.layout.encode(part, tensor, multiplies).contiguous())

    def add_file(self, path: Path, sums: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take a file that holds tensors as the layout has them, with their fingerprints."""
        self.sums |= sums
        self.shards.add_file(path, {name: tensor.nbytes for name, tensor in tensors.items()})

    def close(self, facts: Mapping[str, Any] | None) -> None:
        """Write the rest, and fp4pass.json with what `facts` says of the model."""
        self.shards.close()
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
