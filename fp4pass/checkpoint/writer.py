"""Write packed weights in a layout, with their checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .layouts import Layout, PackedLayer
from .manifest import fingerprint, write_json, write_manifest
from .safetensors_io import ShardWriter


class CheckpointWriter:
    """Writes a folder in a layout: configs, tensors one after the other, then fp4pass.json.

    Args:
        folder: where to write.
        layout: of the tensors.
        layers: what is packed, by the names of the layers.
        limit: bytes of one file of weights.
    """

    def __init__(
        self, folder: Path, layout: Layout, layers: Mapping[str, PackedLayer], limit: int
    ) -> None:
        self.folder, self.layout, self.layers = folder, layout, layers
        self.shards = ShardWriter(folder, layout.weights, limit)
        self.sums: dict[str, dict[str, Any]] = {}

    def declare(self, config: Mapping[str, Any], ignore: Sequence[str]) -> None:
        """Write config.json, unless it is empty, and what the layout has beside it.

        Args:
            config: of the model; what is packed is added.
            ignore: names and patterns of what stays dense.
        """
        if config:
            declared = self.layout.config(self.layers, ignore)
            write_json(self.folder / "config.json", {**config, "quantization_config": declared})
        for name, data in self.layout.files(self.layers, ignore).items():
            write_json(self.folder / name, data)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor under its own name."""
        self.sums[name] = fingerprint(tensor)
        self.shards.add(name, tensor)

    def add_part(self, layer: str, part: str, multiplies: bool, tensor: Tensor) -> None:
        """Write a buffer of a QuantizedLinear as the layout has it.

        Args:
            layer: a name of the layer.
            part: the name of the buffer.
            multiplies: `LinearConfig.multiplies` of the layer.
            tensor: the buffer.
        """
        name = self.layout.tensor_name(layer, part)
        self.add(name, self.layout.encode(part, tensor, multiplies).contiguous())

    def close(self, facts: Mapping[str, Any] | None) -> None:
        """Write the rest.

        Args:
            facts: the dtype, recipe, report and aliases for fp4pass.json, None to write none.
        """
        self.shards.close()
        if facts is None:
            return
        own = {
            "layout": self.layout.name,
            "weights": self.layout.weights,
            **{key: facts[key] for key in ("dtype", "recipe", "report", "aliases")},
            "layers": {name: layer.to_dict() for name, layer in self.layers.items()},
            "tensors": dict(sorted(self.sums.items())),
        }
        write_manifest(self.folder, own)
