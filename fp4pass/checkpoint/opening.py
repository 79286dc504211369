"""Open a folder with packed weights: its layout, its layers and the files of its tensors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..core.atomic import interrupted
from ..core.files import path_of
from ..core.quant_state import QuantState
from ..errors import CheckpointError, UnreadError, some
from ..nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from .checks import cache_format_in, check_facts, check_shapes
from .layouts import LAYOUTS, PackedLayer, layout_of, read_layers
from .reader import CheckpointReader, declared_config
from .source_files import (
    MANIFEST,
    find_shards,
    read_json,
    read_manifest,
    read_tensors,
    stamps_of,
    tensor_facts,
    well_formed,
)
from .unread import is_small_float, require_all_read, require_float


def is_packed(directory: str | os.PathLike[str], known: bool = False) -> bool:
    """Return whether a folder says that its weights are quantized; `known`: in a known layout."""
    folder = Path(directory)
    if (folder / MANIFEST).is_file():
        return True
    declared = declared_config(folder, _read_config(folder))
    layouts = [] if declared is None else [each.detect(declared) for each in LAYOUTS.values()]
    return any(layouts) if known else declared is not None


def open_checkpoint(
    directory: str | os.PathLike[str], *, any_version: bool = False, any_blocks: bool = False
) -> CheckpointReader:
    """Open a folder with packed weights in any layout.

    Names, shapes and dtypes are checked, checksums are not.

    Args:
        directory: the folder.
        any_version: read one with the fp4pass.json of another version as if it had none.
        any_blocks: read FP8 in other blocks than 128 x 128, which is only made dense.

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
    odd = [name for name, layer in reader.layers.items() if layer.tile and not any_blocks]
    if odd:
        raise UnreadError(
            f"{folder}: {some(odd)}: expected fp8_block in blocks of 128 x 128, got "
            f"{reader.layers[odd[0]].scheme}. fp4pass transcode --to bf16 makes it dense, and "
            "fp4pass quantize takes it for a float model."
        )
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
        # A model of one's own may hold other tensors beside.
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
    if "_class_name" in config:
        kind = config["_class_name"]
        raise UnreadError(
            f"{folder} is a folder of diffusers: load it with {kind}.from_pretrained(folder)."
        )
    layout = layout_of(declared, folder)
    files = find_shards(folder, layout.weights)
    stamps = stamps_of({*files.values()})
    shapes = tensor_facts(files)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    try:
        layers = read_layers(layout, declared, shapes, dtype.removeprefix("torch."))
    except UnreadError as error:
        raise UnreadError(f"{folder}: {error}") from error
    layout.ignored(declared)
    reader = CheckpointReader(folder, layout, config, None, layers, files, stamps=stamps)
    read = reader.packed_names()
    require_all_read(folder, shapes, read, lambda layer: layout.group(layer, declared))
    if not layers:
        raise CheckpointError(f"{folder} holds no packed weight. Load it with transformers.")
    check_shapes(reader, shapes)
    return reader


def _read_config(folder: Path) -> dict[str, Any]:
    """Return config.json, {} without one."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def _with_cache_names(reader: CheckpointReader) -> CheckpointReader:
    """Give the scales of a key-value cache the names that a model has for them."""
    own = {f".{disk}": f".{name}" for name, disk in reader.layout.cache.names.items()}
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
        if part in (GLOBAL, INPUT_GLOBAL) and reader.layers[layer].fmt.has_global_scale
    }
    scales: dict[str, list[Tensor]] = {layer: [] for layer in reader.layers}
    for name, tensor in read_tensors({name: reader.files[name] for name in holders}):
        scales[holders[name]].append(tensor)
    layers = {}
    for name, layer in reader.layers.items():
        if not layer.fmt.has_global_scale:
            layers[name] = layer
            continue
        # One that is no power of two has no exact reciprocal.
        exact = all(bool((torch.frexp(each).mantissa == 0.5).all()) for each in scales[name])
        config = dataclasses.replace(layer.config, multiplies=not exact)
        layers[name] = dataclasses.replace(layer, config=config)
    return dataclasses.replace(reader, layers=layers)


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
        >>> for name, experts in fp4pass.checkpoint.read_experts("gpt-oss"):
        ...     print(name, len(experts), experts[0].shape)
        model.layers.0.mlp.experts.gate_up_proj 4 (128, 64)
        model.layers.0.mlp.experts.down_proj 4 (64, 64)
        model.layers.1.mlp.experts.gate_up_proj 4 (128, 64)
        model.layers.1.mlp.experts.down_proj 4 (64, 64)
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
