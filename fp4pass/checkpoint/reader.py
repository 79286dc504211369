"""Read a folder with packed weights, tensor by tensor, in any layout."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._version import __version__
from ..core.atomic import interrupted
from ..core.paths import path_of
from ..core.quant_state import QuantState
from ..errors import CheckpointError, UnreadError, nearest
from ..expert_scales import dequantize_stack
from ..linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE, PackedWeight
from .checks import (
    cache_format_in,
    check_facts,
    check_shapes,
    is_small_float,
    packed_problem,
    require_all_read,
    require_float,
    sum_problem,
)
from .files import (
    MANIFEST,
    Stamp,
    find_shards,
    read_json,
    read_manifest,
    read_tensors,
    require_same,
    stamps_of,
    tensor_facts,
    well_formed,
)
from .layouts import BUFFERS, LAYOUTS, Layout, PackedLayer, Piece, layout_of, side_files


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
            dense = dequantize_stack(PackedWeight(packed, bits, stored, None), config, kind)
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


def is_packed(directory: str | os.PathLike[str], known: bool = False) -> bool:
    """Return whether a folder says that its weights are quantized; `known`: in a known layout."""
    folder = Path(directory)
    if (folder / MANIFEST).is_file():
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
        raise CheckpointError(f"{folder} is not a folder.{interrupted(folder, MANIFEST)}")
    stamps = stamps_of(folder / name for name in ("config.json", MANIFEST))
    config, own = _read_config(folder), read_manifest(folder, any_version)
    with well_formed(folder / ("config.json" if own is None else MANIFEST)):
        reader = _open_foreign(folder, config) if own is None else _open_own(folder, config, own)
        check_facts(reader)
    stamps |= reader.stamps
    return _with_cache_names(_with_directions(dataclasses.replace(reader, stamps=stamps)))


def _open_own(folder: Path, config: Mapping[str, Any], own: Mapping[str, Any]) -> CheckpointReader:
    """Open a folder with fp4pass.json."""
    if own["layout"] not in LAYOUTS:
        raise CheckpointError(
            f"{folder / MANIFEST}: layout: expected one of {', '.join(LAYOUTS)}, which this "
            f"fp4pass ({__version__}) knows, got {own['layout']!r}. Update fp4pass."
        )
    files = find_shards(folder, own["weights"])
    stamps = stamps_of({*files.values()})
    if set(files) != set(own["tensors"]):
        missing = sorted(set(own["tensors"]) - set(files)) or "none"
        extra = sorted(set(files) - set(own["tensors"])) or "none"
        raise CheckpointError(
            f"{folder} does not hold the tensors of {MANIFEST}: missing {missing}, unknown "
            f"{extra}. The folder is a mixture or incomplete; copy it again."
        )
    layers = {name: PackedLayer.from_dict(layer) for name, layer in own["layers"].items()}
    if not layers:
        raise ValueError("layers: expected at least one packed layer, got none")
    reader = CheckpointReader(
        folder, LAYOUTS[own["layout"]], config, own, layers, files, stamps=stamps
    )
    shapes = tensor_facts(files)
    check_shapes(reader, shapes)
    if config:
        # What a model of one's own holds beside is its own affair.
        small = {name: facts for name, facts in shapes.items() if is_small_float(facts[1])}
        require_all_read(folder, small, reader.packed_names())
    return reader


def _open_foreign(folder: Path, config: Mapping[str, Any]) -> CheckpointReader:
    """Open a folder that is described by its quantization_config alone."""
    declared = declared_config(folder, config)
    if declared is None:
        without = f"neither {MANIFEST} nor a quantization_config in config.json"
        try:
            require_float(folder)
        except UnreadError as error:
            raise UnreadError(
                f"{folder} is not quantized as far as it says: it has {without}. {error}"
            ) from error
        raise CheckpointError(
            f"{folder} is not quantized: it has {without}. Load it with transformers."
            f"{interrupted(folder, MANIFEST)}"
        )
    layout = layout_of(declared, folder)
    files = find_shards(folder, layout.weights)
    stamps = stamps_of({*files.values()})
    shapes = tensor_facts(files)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    try:
        layers = layout.read(declared, shapes, dtype.removeprefix("torch."))
    except UnreadError as error:
        raise UnreadError(f"{folder}: {error}") from error
    layout.ignored(declared)
    reader = CheckpointReader(folder, layout, config, None, layers, files, stamps=stamps)
    read = reader.packed_names()
    require_all_read(folder, shapes, read, lambda layer: layout.group(layer, declared))
    if not layers:
        raise CheckpointError(f"{folder} holds no packed 4-bit weight. Load it with transformers.")
    check_shapes(reader, shapes)
    return reader


def _read_config(folder: Path) -> dict[str, Any]:
    """Return config.json, {} without one."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def _with_cache_names(reader: CheckpointReader) -> CheckpointReader:
    """Give the scales of a key-value cache the names that a model has for them."""
    own = {f".{disk}": f".{name}" for name, disk in reader.layout.cache_names.items()}
    if not own or cache_format_in(reader) is None:
        return reader
    named = {
        name: f"{name.removesuffix(disk)}{own[disk]}"
        for name in reader.files
        for disk in own
        if name.endswith(disk)
    }
    return dataclasses.replace(
        reader,
        files={named.get(name, name): path for name, path in reader.files.items()},
        on_disk={new: name for name, new in named.items()},
    )


def _with_directions(reader: CheckpointReader) -> CheckpointReader:
    """Have the layers say whether their global scales stay multipliers in memory."""
    if not reader.layout.multiplies:
        return reader
    holders = {
        name: layer
        for layer in reader.layers
        for part, name in reader.names(layer).items()
        if part in (GLOBAL, INPUT_GLOBAL)
    }
    scales: dict[str, list[Tensor]] = {layer: [] for layer in reader.layers}
    for name, tensor in read_tensors({name: reader.files[name] for name in holders}):
        scales[holders[name]].append(tensor)
    layers = {}
    for name, layer in reader.layers.items():
        config = reader.layout.in_memory(layer.config, scales[name])
        layers[name] = dataclasses.replace(layer, config=config)
    return dataclasses.replace(reader, layers=layers)


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


def read_experts(directory: str | os.PathLike[str]) -> Iterator[tuple[str, tuple[QuantState, ...]]]:
    """Yield the packed experts of a folder, such as gpt-oss, without a changed bit.

    Args:
        directory: the folder.

    Yields:
        The name of a parameter, such as model.layers.0.mlp.experts.gate_up_proj, and the state of
        each expert [N, K]; gate and up are every other row of gate_up_proj.

    Raises:
        CheckpointError: the folder is damaged or has no stacked experts.

    Example:
        >>> for name, experts in fp4pass.checkpoint.read_experts("gpt-oss-20b"):  # doctest: +SKIP
        ...     print(name, len(experts), experts[0].shape)
    """
    reader = open_checkpoint(directory)
    for name, layer in reader.layers.items():
        if layer.is_stacked:
            parts, shape = reader.parts(name), (layer.shape[1], layer.shape[2])
            packed, scale = parts[PACKED], parts[SCALE]
            assert packed is not None and scale is not None, "open_checkpoint requires both"
            states = [
                QuantState(codes, bits, 1.0, layer.fmt, shape, torch.bfloat16)
                for codes, bits in zip(packed, scale, strict=True)
            ]
            yield name, tuple(states)
