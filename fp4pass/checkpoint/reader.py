"""Open a folder with packed weights in any layout, and read it tensor by tensor."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..core.files import interrupted, path_of
from ..core.fingerprint import fingerprint
from ..core.progress import current
from ..errors import CheckpointError, UnreadError, expected, nearest
from ..nn.experts import dequantize_stack
from ..nn.kv_cache import KV_CACHE
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, StoredWeight
from ..record.rows import Report
from . import source_files
from .layouts import (
    BUFFERS,
    LAYOUTS,
    Layout,
    PackedLayer,
    Piece,
    expected_shapes,
    join,
    layout_of,
    read_layers,
    side_files,
)

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

    @property
    def recipe(self) -> Mapping[str, Any] | None:
        """The options of `convert` that made it, None if another library quantized it."""
        recipe = self.said("recipe")
        return None if self.own is None or "loaded" in recipe else recipe

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the libraries that wrote it, as far as the folder says."""
        known = {"fp4pass": self.own, "torch": self.own, "transformers_version": self.config}
        found = {name: said[name] for name, said in known.items() if said and name in said}
        return {name.removesuffix("_version"): version for name, version in found.items()}

    @property
    def dtype(self) -> str:
        """The name of the dtype of the dense model."""
        dtype: str = next(iter(self.layers.values())).weight_dtype
        return dtype if self.own is None else self.own["dtype"]

    @property
    def declared(self) -> Mapping[str, Any]:
        """The quantization_config, in config.json or in a file of the layout."""
        return declared_config(self.folder, self.config) or {}

    def said(self, key: str) -> Mapping[str, Any]:
        """Return what fp4pass.json says, {} if it says nothing."""
        return (self.own or {}).get(key) or {}

    @property
    def renamed(self) -> dict[str, str]:
        """Names on disk of what has another one in the model, as far as the folder says."""
        return {name: disk for disk, name in self.said("renamed").items()}

    @property
    def cache_scales(self) -> dict[str, Tensor]:
        """The scales of a key-value cache that are no tensors of the folder, [1] each."""
        return {n: torch.tensor([scale]) for n, scale in self.said("cache_scales").items()}

    @property
    def stacks(self) -> dict[str, list[Piece]]:
        """The stacks of experts that lie in pieces, as far as the folder says."""
        return {n: [Piece(*piece) for piece in pieces] for n, pieces in self.said("stacks").items()}

    @property
    def joined(self) -> dict[str, PackedLayer]:
        """The stacks that lie in pieces as a model has them, as far as the folder says."""
        return {n: PackedLayer.from_dict(layer) for n, layer in self.said("joined").items()}

    @property
    def float_layers(self) -> dict[str, PackedLayer]:
        """The packed layers as folders of the float model have them, with whole stacks."""
        found = dict(self.layers)
        for name in self.said("whole"):
            for piece in self.stacks[name]:
                found.pop(piece.name)
            found[name] = self.joined[name]
        return found

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
            twin, layer = alias.removesuffix(f".{PACKED}"), name.rpartition(".")[0]
            # As a model has them, if `with_names` was called.
            if twin not in self.layers and layer not in self.layers:
                twin, layer = (disk.get(n, n).removesuffix(".weight") for n in (twin, layer))
            if twin != alias and (layer in self.layers) != (twin in self.layers):
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

    def plain(self) -> list[str]:
        """Return the names of all tensors that belong to no packed layer."""
        packed = {name for layer in self.layers for name in self.names(layer).values()}
        return [name for name in self.files if name not in packed]

    def dense_layers(self) -> list[str]:
        """Return the names of what has a weight that is not packed."""
        return [each.removesuffix(".weight") for each in self.plain() if each.endswith(".weight")]

    def with_names(self, names: Mapping[str, str]) -> CheckpointReader:
        """Return the folder with layers and tensors under the names that a model has for them."""
        tensors = {name: names.get(name, name) for name in self.plain()}
        for layer in self.layers:
            for part in self.names(layer).values():
                tensors[part] = names.get(layer, layer) + part.removeprefix(layer)
        return dataclasses.replace(
            self,
            layers={names.get(name, name): layer for name, layer in self.layers.items()},
            files={tensors[name]: path for name, path in self.files.items()},
            on_disk={new: self.on_disk.get(name, name) for name, new in tensors.items()},
        )

    def without(self, layers: Collection[str]) -> CheckpointReader:
        """Return the folder without some packed layers."""
        gone = {name for layer in layers for name in self.names(layer).values()}
        return dataclasses.replace(
            self,
            layers={name: layer for name, layer in self.layers.items() if name not in layers},
            files={name: path for name, path in self.files.items() if name not in gone},
        )

    def tensors(self, chosen: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, or those chosen, with its name, file by file, unchecked."""
        names = {disk: name for name, disk in self.on_disk.items()}
        wanted = self.files if chosen is None else chosen
        files = {self.on_disk.get(name, name): self.files[name] for name in wanted}
        for name, tensor in source_files.read_tensors(files):
            yield names.get(name, name), tensor

    def checked(self, chosen: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield what `tensors` does. Raises CheckpointError for a wrong checksum."""
        sums = self.said("tensors")
        for name, tensor in self.tensors(chosen):
            if sums and fingerprint(tensor) != sums[self.on_disk.get(name, name)]:
                raise CheckpointError(
                    f"{self.files[name]}: {name}: it is not what was saved (its checksum, shape or "
                    "dtype differs). Copy it again."
                )
            current().step()
            yield name, tensor

    def decoded(self, name: str, tensor: Tensor, of: tuple[str, str, PackedLayer]) -> Tensor:
        """Return a stored tensor, of what `packed_names` says, as a buffer of a QuantizedLinear."""
        layer, part, record = of
        if problem := packed_problem(part, tensor, record):
            raise CheckpointError(f"{self.files[name]}: {name}: {problem}")
        return self.layout.from_stored({name: tensor}, {layer: record})[join(layer, part)]

    def parts(self, layer: str, chosen: Collection[str] = BUFFERS) -> dict[str, Tensor | None]:
        """Return the buffers of a packed layer, or those chosen, as a QuantizedLinear has them."""
        parts = {name: part for part, name in self.names(layer).items() if part in chosen}
        found = dict.fromkeys(BUFFERS, None) | {
            parts[name]: self.decoded(name, tensor, (layer, parts[name], self.layers[layer]))
            for name, tensor in self.checked(parts)
        }
        return found

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
        if not record.is_stacked:
            packed, bits = packed.unsqueeze(0), bits.unsqueeze(0)
        weight = StoredWeight(packed, bits, parts[GLOBAL], None)
        dense = dequantize_stack(weight, config, torch.float32 if config.is_rotated else dtype)
        if config.is_rotated:
            dense = torch.stack([config.restored(each) for each in dense]).to(dtype)
        return dense if record.is_stacked else dense[0]


def is_packed(directory: str | os.PathLike[str], known: bool = False) -> bool:
    """Return whether a folder says that its weights are quantized; `known`: in a known layout."""
    folder = Path(directory)
    if (folder / source_files.MANIFEST).is_file():
        return True
    declared = declared_config(folder, _read_config(folder))
    layouts = [] if declared is None else [each.detect(declared) for each in LAYOUTS.values()]
    return any(layouts) if known else declared is not None


def open_checkpoint(
    directory: str | os.PathLike[str], *, any_version: bool = False
) -> CheckpointReader:
    """Open a folder with packed weights in any layout.

    Names, shapes and dtypes are checked, checksums are not.

    Args:
        directory: the folder.
        any_version: read one with the fp4pass.json of another version as if it had none.

    Raises:
        CheckpointError: the folder is not packed, is damaged, or is of an unknown layout.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> reader = fp4pass.checkpoint.open_checkpoint("out")
        >>> reader.layout.name, sorted(reader.layers)
        ('compressed-tensors', ['0', '2'])
    """
    folder = path_of(directory, "directory")
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"{folder} is not a folder.{interrupted(folder, source_files.MANIFEST)}"
        )
    config, own = _read_config(folder), source_files.read_manifest(folder, any_version)
    with source_files.well_formed(
        folder / ("config.json" if own is None else source_files.MANIFEST)
    ):
        reader = _open_foreign(folder, config) if own is None else _open_own(folder, config, own)
        dtype = getattr(torch, reader.dtype, None)
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(expected("dtype", "a floating-point dtype of torch", reader.dtype))
        # Parts that are read later are well formed, too.
        dict(reader.versions)
        dict(reader.config.get("quantization_config") or {})
        if own is not None:
            Report.from_dict(own["report"])
        cached = cache_format_in(reader)
    reader = _with_directions(reader)
    return reader if cached is None else _with_cache_names(reader)


def _open_own(folder: Path, config: Mapping[str, Any], own: Mapping[str, Any]) -> CheckpointReader:
    if own["layout"] not in LAYOUTS:
        what = f"one of {', '.join(LAYOUTS)}, which fp4pass {__version__} knows"
        raise CheckpointError(
            expected(f"{folder / source_files.MANIFEST}: layout", what, repr(own["layout"]))
        )
    files = source_files.find_shards(folder, own["weights"])
    if set(files) != set(own["tensors"]):
        raise CheckpointError(
            f"{folder} does not hold the tensors of {source_files.MANIFEST}: missing "
            f"{sorted(set(own['tensors']) - set(files)) or 'none'}, unknown "
            f"{sorted(set(files) - set(own['tensors'])) or 'none'}. Copy the folder again."
        )
    layers = {name: PackedLayer.from_dict(layer) for name, layer in own["layers"].items()}
    reader = CheckpointReader(folder, LAYOUTS[own["layout"]], config, own, layers, files)
    _check_shapes(reader, source_files.tensor_facts(files))
    return reader


def _open_foreign(folder: Path, config: Mapping[str, Any]) -> CheckpointReader:
    """Open a folder that is described by its quantization_config alone."""
    declared = declared_config(folder, config)
    if declared is None:
        source_files.require_float(folder)
        raise CheckpointError(
            f"{folder} is not quantized: it has neither {source_files.MANIFEST} nor a "
            "quantization_config in config.json. Load it with transformers."
            f"{interrupted(folder, source_files.MANIFEST)}"
        )
    if "_class_name" in config:
        load = f"{config['_class_name']}.from_pretrained(folder)"
        raise UnreadError(f"{folder} is a folder of diffusers: load it with {load}.")
    layout = layout_of(declared, folder)
    files = source_files.find_shards(folder, layout.weights)
    shapes = source_files.tensor_facts(files)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    try:
        layers = read_layers(layout, declared, shapes, dtype.removeprefix("torch."))
    except UnreadError as error:
        raise UnreadError(f"{folder}: {error}") from error
    layout.ignored(declared)
    reader = CheckpointReader(folder, layout, config, None, layers, files)
    read = reader.packed_names()
    source_files.require_all_read(folder, shapes, read)
    if not layers:
        raise CheckpointError(f"{folder} holds no packed weight. Load it with transformers.")
    _check_shapes(reader, shapes)
    return reader


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return source_files.read_json(path) if path.is_file() else {}


def declared_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization_config of a folder, in config.json or in a file of its layout."""
    declared: Mapping[str, Any] | None = config.get("quantization_config")
    for name in side_files():
        if declared is None and (folder / name).is_file():
            declared = source_files.read_json(folder / name)
    # DeepSeek-V4 has it beside, V4.1 among the others.
    if declared is not None and _EXPERTS in config and _EXPERTS not in declared:
        declared = {**declared, _EXPERTS: config[_EXPERTS]}
    return declared


def cache_format_in(reader: CheckpointReader) -> str | None:
    """Return the format of the key-value cache that a folder has scales of, None without one."""
    if reader.own is not None:
        found: str | None = reader.own["recipe"].get(KV_CACHE)
        return found
    return reader.layout.cache.format(reader.declared)


def _with_cache_names(reader: CheckpointReader) -> CheckpointReader:
    """Give the scales of a key-value cache the names that a model has for them."""
    named = {
        name: f"{name.removesuffix(disk)}{own}"
        for name in reader.files
        for own, disk in reader.layout.cache.names.items()
        if name.endswith(f".{disk}")
    }
    return reader.with_names(named)


def _with_directions(reader: CheckpointReader) -> CheckpointReader:
    """Have the layers say whether their global scales stay multipliers in memory."""
    if not reader.layout.multiplies:
        return reader
    holders = {
        name: layer
        for layer, record in reader.layers.items()
        for part, name in reader.names(layer).items()
        if part in (GLOBAL, INPUT_GLOBAL) and record.format_of(part).has_global_scale
    }
    # One that is no power of two has no exact reciprocal.
    inexact = {
        holders[name]
        for name, tensor in reader.tensors(holders)
        if not (torch.frexp(tensor).mantissa == 0.5).all()
    }
    layers = dict(reader.layers)
    for name in {*holders.values()}:
        config = dataclasses.replace(layers[name].config, multiplies=name in inexact)
        layers[name] = dataclasses.replace(layers[name], config=config)
    return dataclasses.replace(reader, layers=layers)


def with_layers(names: Mapping[str, str]) -> dict[str, str]:
    """Return names of tensors, and those of the layers whose weights are among them."""
    weights = {disk: name for disk, name in names.items() if disk.endswith(".weight")}
    layers = {k.removesuffix(".weight"): v.removesuffix(".weight") for k, v in weights.items()}
    return {**names, **layers}


def _check_shapes(reader: CheckpointReader, shapes: source_files.Shapes) -> None:
    """Raise CheckpointError if the tensors of a layer do not fit each other."""
    for layer, facts in reader.layers.items():
        known, names = expected_shapes(reader.layout, facts), reader.names(layer)
        for part in (part for part in known if part != INPUT_GLOBAL and part not in names):
            missing = reader.layout.tensor_name(layer, part, facts.fmt)
            raise CheckpointError(f"{reader.folder} has no {missing}. Copy the folder again.")
        for part, name in names.items():
            (shape, dtype), (allowed, kinds) = shapes[name], known.get(part, ((), ()))
            if part in known and (shape not in allowed or dtype not in kinds):
                raise CheckpointError(
                    f"{reader.files[name]}: {name}: expected {kinds[0]} {list(allowed[0])} for a "
                    f"weight {list(facts.shape)} in {facts.fmt.key}, got {dtype} {list(shape)}. "
                    "Copy the folder again."
                )


def require_input_scales(reader: CheckpointReader, besides: Container[str] = ()) -> None:
    """Raise CheckpointError for stray scales of inputs, and missing ones but for some layers."""
    # Ours has them, or means that each input gets one of its own.
    for layer, facts in ({} if reader.own else reader.layers).items():
        name = reader.names(layer).get(INPUT_GLOBAL)
        if name and not facts.has_input_scale and facts.config.input_format is not None:
            raise CheckpointError(
                f"{reader.folder}: {name}: expected none for inputs of {facts.scheme}, scaled "
                "anew at each call, as the config says. The config is not that of these weights."
            )
        if facts.has_input_scale and not name and layer not in besides:
            name = reader.layout.tensor_name(layer, INPUT_GLOBAL, facts.fmt)
            raise CheckpointError(
                f"{reader.folder}: {name} is missing, and these inputs are quantized. Copy it "
                "again; or make it dense, which needs none, by fp4pass transcode --to bf16."
            )


def dense_problem(tensor: Tensor, is_buffer: bool) -> str:
    """Return that a dense tensor is not finite, or ""; masks are buffers of infinities."""
    is_float = tensor.is_floating_point() and tensor.itemsize > 1
    if not is_float or not (tensor.isnan() if is_buffer else ~tensor.isfinite()).any():
        return ""
    return "expected finite numbers, got NaN or infinity. Copy it again, or quantize it anew."


def packed_problem(part: str, tensor: Tensor, layer: PackedLayer) -> str:
    """Return what is wrong with the numbers of a stored buffer of a layer, or ""."""
    fmt, is_bad = layer.fmt, False
    if part == PACKED and fmt.element.native is not None:
        values = torch.tensor(fmt.element.values, dtype=torch.float32)
        is_bad = bool(values.isnan()[tensor.view(torch.uint8).flatten().int()].any())
    elif part == SCALE and fmt.has_float_scale:
        is_bad = not ((tensor.float() >= 0) & tensor.isfinite()).all()
    elif part == SCALE:
        is_bad = bool((tensor.view(torch.uint8) > fmt.scale.last).any())
    if is_bad:
        return (
            f"it holds {'NaN' if part == PACKED else 'NaN or a negative scale'}. The checkpoint is "
            "damaged, or its weights were not finite when it was written. Copy it again, or "
            "quantize a model that is finite."
        )
    # Readers divide by what others multiply by: 1e-45 is finite, and its reciprocal is not.
    is_global = part in (GLOBAL, INPUT_GLOBAL)
    if is_global and not ((tensor > 0) & tensor.isfinite() & (1 / tensor).isfinite()).all():
        return (
            f"expected a positive finite number with a finite reciprocal, got {tensor.tolist()}. "
            "Copy the folder again, or quantize the model again; fp4pass transcode --to bf16 needs "
            "no scale of inputs."
        )
    return ""
