"""Read a folder with packed weights, tensor by tensor, in any layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import CheckpointError, nearest
from ..expert_scales import dequantize_stack
from ..linear import GLOBAL, PACKED, SCALE, StoredWeight
from .checks import packed_problem, sum_problem
from .layouts import BUFFERS, Layout, PackedLayer, Piece, side_files
from .manifest import read_json
from .safetensors_io import (
    Stamp,
    read_tensors,
    require_same,
)


@dataclass(frozen=True)
class CheckpointReader:
    """A folder with packed weights.

    Attributes:
        folder: where it is.
        layout: of its tensors.
        config: config.json, {} without one.
        own: fp4pass.json, None if another library wrote the folder.
        layers: what is packed, by the names of the layers.
        files: the file of every tensor.
        on_disk: the name on disk of every tensor that `renamed` gave another one.
        stamps: of the files; what is read later must be the same files.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> reader = fp4pass.checkpoint.open_checkpoint("out")
        >>> reader.dense("0", torch.float32).shape
        torch.Size([64, 64])
    """

    folder: Path
    layout: Layout
    config: Mapping[str, Any]
    own: Mapping[str, Any] | None
    layers: Mapping[str, PackedLayer]
    files: Mapping[str, Path]
    on_disk: Mapping[str, str] = field(default_factory=dict)
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)

    @property
    def recipe(self) -> Mapping[str, Any] | None:
        """The options of `convert` that made it, None if another library quantized it."""
        recipe: Mapping[str, Any] = {"loaded": True} if self.own is None else self.own["recipe"]
        return None if "loaded" in recipe else recipe

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the libraries that wrote it, as far as the folder says."""
        own = self.own or {}
        found = {name: own[name] for name in ("fp4pass", "torch") if name in own}
        if "transformers_version" in self.config:
            found["transformers"] = self.config["transformers_version"]
        producer = (self.config.get("quantization_config") or {}).get("producer") or {}
        if self.own is None and "name" in producer:
            found[producer["name"]] = producer.get("version", "?")
        return found

    @property
    def dtype(self) -> str:
        """The name of the dtype of the dense model."""
        dtype: str = next(iter(self.layers.values())).weight_dtype
        return dtype if self.own is None else self.own["dtype"]

    @property
    def renamed(self) -> dict[str, str]:
        """Names on disk of what has another one in the model, as far as the folder says."""
        found = {} if self.own is None else self.own.get("renamed", {})
        return {name: disk for disk, name in found.items()}

    @property
    def declared(self) -> Mapping[str, Any]:
        """The quantization_config, in config.json or in a file of the layout."""
        return declared_config(self.folder, self.config) or {}

    @property
    def cache_scales(self) -> dict[str, Tensor]:
        """The scales of a key-value cache that are no tensors of the folder, [1] each."""
        found = {} if self.own is None else self.own.get("cache_scales", {})
        return {name: torch.tensor([scale]) for name, scale in found.items()}

    @property
    def stacks(self) -> dict[str, list[Piece]]:
        """The stacks of experts that lie in pieces, as far as the folder says."""
        found = {} if self.own is None else self.own.get("stacks", {})
        return {name: [Piece(*piece) for piece in pieces] for name, pieces in found.items()}

    @property
    def float_layers(self) -> dict[str, PackedLayer]:
        """The packed layers as folders of the float model have them, with whole stacks."""
        found = dict(self.layers)
        for name in [] if self.own is None else self.own.get("whole", []):
            for piece in self.stacks[name]:
                found.pop(piece.name)
            found[name] = self.joined[name]
        return found

    @property
    def joined(self) -> dict[str, PackedLayer]:
        """The stacks that lie in pieces as a model has them, as far as the folder says."""
        found = {} if self.own is None else self.own.get("joined", {})
        return {name: PackedLayer.from_dict(layer) for name, layer in found.items()}

    def tensors(self, chosen: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, or those chosen, with its name, file by file, unchecked."""
        names = {disk: name for name, disk in self.on_disk.items()}
        wanted = self.files if chosen is None else chosen
        files = {self.on_disk.get(name, name): self.files[name] for name in wanted}
        for name, tensor in read_tensors(files):
            yield names.get(name, name), tensor
        require_same(self.stamps)

    def checked(self, chosen: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield what `tensors` does. Raises CheckpointError for a wrong checksum."""
        for name, tensor in self.tensors(chosen):
            if problem := sum_problem(self, name, tensor):
                raise CheckpointError(f"{self.files[name]}: {name}: {problem}")
            yield name, tensor

    def names(self, layer: str) -> dict[str, str]:
        """Return the name on disk of each buffer that a packed layer has."""
        full = {part: self.layout.tensor_name(layer, part) for part in self.layout.parts}
        return {part: name for part, name in full.items() if name in self.files}

    def twins(self) -> dict[str, str]:
        """Return the further names of layers that a model lists twice, and the layer of each."""
        found: dict[str, str] = {}
        disk = {name.removesuffix(".weight"): each for name, each in self.renamed.items()}
        for alias, name in ({} if self.own is None else self.own["aliases"]).items():
            (twin, _, part), layer = alias.rpartition("."), name.rpartition(".")[0]
            if part != PACKED:
                continue
            # As a model has them, if `renamed` was called.
            if twin not in self.layers and layer not in self.layers:
                twin, layer = (disk.get(n, n).removesuffix(".weight") for n in (twin, layer))
            if (layer in self.layers) != (twin in self.layers):
                found |= {twin: layer} if layer in self.layers else {layer: twin}
        return found

    def packed_names(self) -> dict[str, tuple[str, str, PackedLayer]]:
        """Return the layer, buffer and record of each packed tensor, twins too, by its name."""
        layers = {**dict(zip(self.layers, self.layers, strict=True)), **self.twins()}
        return {
            name: (layer, part, self.layers[path])
            for layer, path in layers.items()
            for part, name in self.names(layer).items()
        }

    def decoded(self, part: str, name: str, tensor: Tensor, layer: PackedLayer) -> Tensor:
        """Return a stored tensor as a buffer of a QuantizedLinear. Raises CheckpointError."""
        if problem := packed_problem(part, tensor, layer):
            raise CheckpointError(f"{self.files[name]}: {name}: {problem}")
        return self.layout.decode(part, tensor, layer.config.multiplies)

    def parts(self, layer: str, chosen: Collection[str] = BUFFERS) -> dict[str, Tensor | None]:
        """Return the buffers of a packed layer, or those chosen, as a QuantizedLinear has them."""
        parts = {name: part for part, name in self.names(layer).items() if part in chosen}
        found = {
            parts[name]: self.decoded(parts[name], name, tensor, self.layers[layer])
            for name, tensor in self.tensors(parts)
        }
        return {part: found.get(part) for part in BUFFERS}

    def dense(self, layer: str, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [N, K] of a packed layer, [E, N, K] of stacked experts."""
        if layer not in self.layers and layer in self.joined:
            whole = torch.empty(self.joined[layer].shape, dtype=dtype)
            for name, *piece in self.stacks[layer]:
                whole[piece[0], slice(*piece[1:])] = self.dense(name, dtype)
            return whole
        if layer not in self.layers:
            hint = nearest(layer, self.layers)
            raise CheckpointError(f"{self.folder}: there is no packed layer {layer!r}.{hint}")
        # The scale of inputs, which may be missing or of no use, is not needed.
        parts, packed_layer = self.parts(layer, (PACKED, SCALE, GLOBAL)), self.layers[layer]
        packed, scale, stored = parts[PACKED], parts[SCALE], parts[GLOBAL]
        assert packed is not None and scale is not None, "open_checkpoint requires both"
        bits, config = scale.view(torch.uint8), packed_layer.config
        kind = torch.float32 if config.is_rotated else dtype
        if packed_layer.is_stacked:
            dense = dequantize_stack(StoredWeight(packed, bits, stored, None), config, kind)
        else:
            dense = ops.dequantize(packed, bits, stored, config.format.key, kind).unsqueeze(0)
        if config.is_rotated:
            dense = torch.stack([config.restored(each) for each in dense]).to(dtype)
        return dense if packed_layer.is_stacked else dense[0]

    def plain(self) -> list[str]:
        """Return the names of all tensors that belong to no packed layer."""
        packed = {name for layer in self.layers for name in self.names(layer).values()}
        return [name for name in self.files if name not in packed]

    def dense_layers(self) -> list[str]:
        """Return the names of what has a weight that is not packed."""
        return [each.removesuffix(".weight") for each in self.plain() if each.endswith(".weight")]


def declared_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of a folder, in config.json or in a file of its layout."""
    declared: Mapping[str, Any] | None = config.get("quantization_config")
    for name in side_files():
        if declared is None and (folder / name).is_file():
            declared = read_json(folder / name)
    return declared
