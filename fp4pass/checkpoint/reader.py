"""Read a folder with packed weights, tensor by tensor, in any layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.fingerprint import fingerprint
from ..errors import CheckpointError, nearest
from ..nn.expert_scales import dequantize_stack
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, StoredWeight
from .layouts import BUFFERS, Layout, PackedLayer, Piece, join, side_files
from .source_files import Stamp, read_json, read_tensors, require_same

_EXPERTS = "expert_dtype"


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

    def said(self, key: str) -> Mapping[str, Any]:
        """Return what fp4pass.json says, {} if it says nothing."""
        return (self.own or {}).get(key) or {}

    @property
    def renamed(self) -> dict[str, str]:
        """Names on disk of what has another one in the model, as far as the folder says."""
        return {name: disk for disk, name in self.said("renamed").items()}

    @property
    def declared(self) -> Mapping[str, Any]:
        """The quantization_config, in config.json or in a file of the layout."""
        return declared_config(self.folder, self.config) or {}

    @property
    def cache_scales(self) -> dict[str, Tensor]:
        """The scales of a key-value cache that are no tensors of the folder, [1] each."""
        return {n: torch.tensor([scale]) for n, scale in self.said("cache_scales").items()}

    @property
    def stacks(self) -> dict[str, list[Piece]]:
        """The stacks of experts that lie in pieces, as far as the folder says."""
        return {n: [Piece(*piece) for piece in pieces] for n, pieces in self.said("stacks").items()}

    @property
    def float_layers(self) -> dict[str, PackedLayer]:
        """The packed layers as folders of the float model have them, with whole stacks."""
        found = dict(self.layers)
        for name in self.said("whole"):
            for piece in self.stacks[name]:
                found.pop(piece.name)
            found[name] = self.joined[name]
        return found

    @property
    def joined(self) -> dict[str, PackedLayer]:
        """The stacks that lie in pieces as a model has them, as far as the folder says."""
        return {n: PackedLayer.from_dict(layer) for n, layer in self.said("joined").items()}

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
            if problem := self.sum_problem(name, tensor):
                raise CheckpointError(f"{self.files[name]}: {name}: {problem}")
            yield name, tensor

    def sum_problem(self, name: str, tensor: Tensor) -> str:
        """Return that a tensor is not what was saved, as far as the folder says, or ""."""
        if self.own is None:
            return ""
        if fingerprint(tensor) == self.own["tensors"][self.on_disk.get(name, name)]:
            return ""
        return "it is not what was saved (its checksum, shape or dtype differs). Copy it again."

    def names(self, layer: str, record: PackedLayer | None = None) -> dict[str, str]:
        """Return the name on disk of each buffer that a packed layer, or its twin, has."""
        fmt = (record or self.layers[layer]).fmt
        full = {part: self.layout.tensor_name(layer, part, fmt) for part in self.layout.parts}
        return {part: name for part, name in full.items() if name in self.files}

    def twins(self) -> dict[str, str]:
        """Return the further names of layers that a model lists twice, and the layer of each."""
        found: dict[str, str] = {}
        disk = {name.removesuffix(".weight"): each for name, each in self.renamed.items()}
        for alias, name in self.said("aliases").items():
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
            for part, name in self.names(layer, self.layers[path]).items()
        }

    def decoded(self, name: str, tensor: Tensor, of: tuple[str, str, PackedLayer]) -> Tensor:
        """Return a stored tensor, of what `packed_names` says, as a buffer of a QuantizedLinear.

        Raises CheckpointError for one whose numbers are none that it can have.
        """
        layer, part, record = of
        if problem := packed_problem(part, tensor, record):
            raise CheckpointError(f"{self.files[name]}: {name}: {problem}")
        return self.layout.from_stored({name: tensor}, {layer: record})[join(layer, part)]

    def parts(self, layer: str, chosen: Collection[str] = BUFFERS) -> dict[str, Tensor | None]:
        """Return the buffers of a packed layer, or those chosen, as a QuantizedLinear has them.

        Raises CheckpointError as `checked` and `decoded` do.
        """
        parts = {name: part for part, name in self.names(layer).items() if part in chosen}
        found = {
            parts[name]: self.decoded(name, tensor, (layer, parts[name], self.layers[layer]))
            for name, tensor in self.checked(parts)
        }
        return {part: found.get(part) for part in BUFFERS}

    def dense(self, layer: str, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [N, K] of a packed layer, [E, N, K] of stacked experts."""
        if layer not in self.layers and layer in self.joined:
            whole = torch.empty(self.joined[layer].shape, dtype=dtype)
            for piece in self.stacks[layer]:
                whole[piece.expert, piece.start : piece.stop] = self.dense(piece.name, dtype)
            return whole
        if layer not in self.layers:
            hint = nearest(layer, self.layers)
            raise CheckpointError(f"{self.folder}: there is no packed layer {layer!r}.{hint}")
        # The scale of inputs, which may be missing or of no use, is not needed.
        parts, record = self.parts(layer, (PACKED, SCALE, GLOBAL)), self.layers[layer]
        packed, scale = parts[PACKED], parts[SCALE]
        assert packed is not None and scale is not None, "open_checkpoint requires both"
        bits, config = scale.view(record.fmt.scale.dtype), record.config
        if record.tile:
            native = record.fmt.element.native
            for side, size in enumerate(record.tile):
                bits = bits.repeat_interleave(size, side).narrow(side, 0, record.shape[side])
            codes = packed if native is None else packed.view(native)
            return (codes.float() * bits).to(dtype)
        if not record.is_stacked:
            packed, bits = packed.unsqueeze(0), bits.unsqueeze(0)
        weight = StoredWeight(packed, bits, parts[GLOBAL], None)
        dense = dequantize_stack(weight, config, torch.float32 if config.is_rotated else dtype)
        if config.is_rotated:
            dense = torch.stack([config.restored(each) for each in dense]).to(dtype)
        return dense if record.is_stacked else dense[0]

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
    # DeepSeek-V4 has it beside, V4.1 among the others.
    if declared is not None and _EXPERTS in config and _EXPERTS not in declared:
        declared = {**declared, _EXPERTS: config[_EXPERTS]}
    return declared


def with_layers(names: Mapping[str, str]) -> dict[str, str]:
    """Return names of tensors, and those of the layers whose weights are among them."""
    weights = {disk: name for disk, name in names.items() if disk.endswith(".weight")}
    layers = {k.removesuffix(".weight"): v.removesuffix(".weight") for k, v in weights.items()}
    return {**names, **layers}


def as_in_model(reader: CheckpointReader) -> CheckpointReader:
    """Return a folder with the names in a model, as far as the folder says."""
    return renamed(reader, with_layers({disk: name for name, disk in reader.renamed.items()}))


def renamed(reader: CheckpointReader, names: Mapping[str, str]) -> CheckpointReader:
    """Return a folder with layers and tensors under the names that a model has for them."""
    tensors = {name: names.get(name, name) for name in reader.plain()}
    for layer in reader.layers:
        for part in reader.names(layer).values():
            tensors[part] = names.get(layer, layer) + part.removeprefix(layer)
    return dataclasses.replace(
        reader,
        layers={names.get(name, name): layer for name, layer in reader.layers.items()},
        files={tensors[name]: path for name, path in reader.files.items()},
        on_disk={new: reader.on_disk.get(name, name) for name, new in tensors.items()},
    )


def _are_scales(tensor: Tensor, layer: PackedLayer) -> bool:
    """Return whether all scales are numbers, and none is negative."""
    if layer.fmt.has_float_scale:
        return bool(((tensor.float() >= 0) & tensor.isfinite()).all())
    return not (tensor.view(torch.uint8) > layer.fmt.scale.last).any()


def _are_codes(tensor: Tensor, layer: PackedLayer) -> bool:
    """Return whether all codes of 8 bits stand for numbers."""
    if layer.fmt.element.native is None:
        return True
    values = torch.tensor(layer.fmt.element.values, dtype=torch.float32)
    return not values.isnan()[tensor.view(torch.uint8).flatten().int()].any()


def packed_problem(part: str, tensor: Tensor, layer: PackedLayer) -> str:
    """Return what is wrong with the numbers of a stored buffer of a layer, or ""."""
    if part == PACKED and not _are_codes(tensor, layer):
        return (
            "it holds NaN. The checkpoint is damaged, or its weights were not finite when it was "
            "written. Copy it again, or quantize a model that is finite."
        )
    if part == SCALE and not _are_scales(tensor, layer):
        return (
            "it holds NaN or a negative scale. The checkpoint is damaged, or its weights were not "
            "finite when it was written. Copy it again, or quantize a model that is finite."
        )
    # Readers divide by what others multiply by: 1e-45 is finite, and its reciprocal is not.
    if (
        part in (GLOBAL, INPUT_GLOBAL)
        and not ((tensor > 0) & tensor.isfinite() & (1 / tensor).isfinite()).all()
    ):
        remedy = (
            "An expert that calibration never reached looks like this; fp4pass transcode --to bf16 "
            "needs no scale of inputs"
            if part == INPUT_GLOBAL
            else "Copy the folder again, or quantize the model again"
        )
        return (
            f"expected a positive finite number with a finite reciprocal, got {tensor.tolist()}. "
            f"{remedy}."
        )
    return ""
