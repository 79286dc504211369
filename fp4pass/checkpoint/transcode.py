"""Write a checkpoint in another layout; codes and block scales keep their bits."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..core.atomic import replacing
from ..core.files import path_of
from ..core.progress import current, shown
from ..errors import CheckpointError, as_option, some, unknown_name
from ..record.rows import Report
from .beside import copy_beside
from .layouts import (
    CACHE_SCALES,
    LAYOUTS,
    WEIGHTS,
    CompressedTensors,
    Layout,
    fused_problems,
    get_layout,
    is_plain,
    join,
    matches,
    side_files,
)
from .model_layers import ignored_layers
from .reader import (
    CheckpointReader,
    cache_format_in,
    declared_config,
    open_checkpoint,
    require_input_scales,
)
from .readers import DEQUANTIZE, of_engines
from .saving import CheckpointWriter, ShardWriter, bytes_of
from .source_files import MANIFEST, require_config, well_formed, write_json

_log = logging.getLogger(__name__)

# Dense weights, for which no library of ours is needed.
DENSE = "bf16"


def transcode_targets() -> tuple[str, ...]:
    """Return what `transcode` can write: the layouts, and "bf16"."""
    return (*LAYOUTS, DENSE)


def transcode(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    copy_files: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Write a checkpoint of any layout that can be read in another one, whole or not at all.

    Files that go with the model (tokenizer, generation config, chat template) come along, as with
    `save`. No model is built; in memory are the tensors of one file of the target.

    Args:
        source: the folder to read; that of gpt-oss can become dense.
        target: the folder to write.
        to: a layout, or "bf16" for dense weights that need no library of ours.
        copy_files: as for `save`, globs of further files of `source`.
        max_shard_size: of a file of weights, above which there are several and an index.
        overwrite: replace the checkpoint in the target.
        progress: as for `convert`.

    Raises:
        CheckpointError: the source cannot be read or written so, or the target is in the way.
        OptionError: a layout, a size, or what a glob of `copy_files` matches does not exist.

    Example:
        >>> fp4pass.save(fp4pass.convert(model, "nvfp4a16", "sse"), "out")
        >>> fp4pass.checkpoint.transcode("out", "dense", "bf16")
        >>> sorted(safetensors.torch.load_file("dense/model.safetensors"))
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    if to not in transcode_targets():
        raise unknown_name("to: Layout", to, transcode_targets())
    limit = bytes_of(max_shard_size)
    reader = open_checkpoint(source, any_blocks=to == DENSE)
    require_config(reader.folder, reader.config, reader.own)
    layout = None if to == DENSE else get_layout(to)
    if layout is not None:
        layout.require(reader.layers)
        require_input_scales(reader)
        layout.cache.config(cache_format_in(reader), layout.name)
        if reader.own is None and not layout.engines:
            raise CheckpointError(
                f"{reader.folder}: expected a folder that fp4pass wrote, whose {MANIFEST} says how "
                f"it is packed, got one of another library. Save what fp4pass.load makes of it, "
                f"with {as_option('layout', layout.name)}."
            )
    marks = (MANIFEST, *side_files())
    whole = replacing(path_of(target, "target"), overwrite, marks)
    with shown("transcode", progress), whole as folder:
        current().expect(len(reader.files), "tensors")
        weights = {each.name for each in reader.files.values()}
        known = {MANIFEST, "config.json", *side_files(), *weights}
        copy_beside(reader.folder, folder, known, copy_files)
        if layout is not None:
            _write_packed(reader, folder, layout, limit)
            return
        config = {k: v for k, v in reader.config.items() if k != "quantization_config"}
        if config:
            write_json(folder / "config.json", config | {"dtype": "bfloat16"})
        shards = ShardWriter(folder, WEIGHTS, limit)
        for name, tensor in _dense_tensors(reader):
            shards.add(name, tensor)
        shards.close()


def _write_packed(reader: CheckpointReader, folder: Path, layout: Layout, limit: int) -> None:
    config = dict(reader.config)
    if config and reader.own is not None and layout.dtype:
        config["dtype"] = layout.dtype
    writer = CheckpointWriter(folder, layout, reader.layers, limit)
    ignored = _ignored(reader)
    declared = _declared(reader, layout, ignored)
    if config and layout.engines:
        for parent, what in list(fused_problems(reader.layers, reader.dense_layers()))[:1]:
            warnings.warn(
                f"{parent}: {what}. Serving engines multiply by these as by one matrix, and would "
                "read scales that do not exist. fp4pass transcode --to bf16 makes dense weights.",
                stacklevel=3,
            )
        refused, silent = of_engines(reader.layers, declared)
        if silent:
            warnings.warn(f"{silent}.", stacklevel=3)
        for engine, why in refused.items():
            if why:
                _log.info("%s does not load this folder: %s", engine, why)
    writer.declare(config, ignored, declared)
    names = reader.packed_names()
    for name, tensor in reader.checked():
        if name in names:
            path, part, layer = names[name]
            writer.add(join(path, part), reader.decoded(name, tensor, names[name]), layer)
        else:
            writer.add(name, tensor)
    writer.close(reader.own)


def _declared(reader: CheckpointReader, layout: Layout, ignored: list[str]) -> dict[str, Any]:
    """Return the quantization_config in another layout, with what transformers needs in it."""
    cache = layout.cache.config(cache_format_in(reader), layout.name)
    if not isinstance(layout, CompressedTensors):
        return layout.config(reader.layers, ignored) | cache
    weights = {disk.removesuffix(".weight"): name for name, disk in reader.renamed.items()}
    own = {
        weights[disk].removesuffix(".weight"): layer
        for disk, layer in reader.layers.items()
        if disk in weights
    }
    # Which classes need the entry only a model says.
    before = reader.config.get("quantization_config") or {}
    kept = {key: value for key, value in DEQUANTIZE.items() if before.get(key) == value}
    return {**layout.config({**reader.layers, **own}, ignored), **kept, **cache}


def _ignored(reader: CheckpointReader) -> list[str]:
    """Return the names and patterns of what is not packed, as the folder has them."""
    declared = declared_config(reader.folder, reader.config)
    found = None if declared is None else reader.layout.ignored(declared)
    if found is None and reader.own is not None:
        renamed = reader.renamed
        known = {*reader.files, *renamed, *reader.own["aliases"]}
        rows = Report.from_dict(reader.own["report"]).skipped
        found = ignored_layers(rows, reader.layers, lambda name: join(name, "weight") in known)
        weights = (renamed.get(join(name, "weight"), "") for name in found)
        found += [disk.removesuffix(".weight") for disk in weights if disk]
    # For what another layout has no words, the names of what it covers.
    odd = [each for each in found or () if not is_plain(each)]
    with well_formed(reader.folder / "config.json"):
        return [*(found or ()), *(name for name in reader.dense_layers() if matches(name, odd))]


def _dense_tensors(reader: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the dense model; what it keeps in another dtype stays so."""
    packed, dtype = reader.packed_names(), getattr(torch, reader.dtype)
    renamed = reader.renamed
    has_cache, dropped = cache_format_in(reader) is not None, list[str]()
    for name, tensor in reader.checked():
        if name in packed:
            continue
        if name.endswith(CACHE_SCALES) and (has_cache or reader.own is None):
            dropped += [] if has_cache else [name]
            continue
        path, _, last = name.rpartition(".")
        if last == "bias" and path in reader.layers:
            rotation = reader.layers[path].config.output_rotation
            tensor = ops.rotate(tensor, rotation) if rotation else tensor
        yield name, tensor.to(torch.bfloat16) if tensor.dtype == dtype else tensor
    if dropped:
        warnings.warn(
            f"{len(dropped)} scales of a quantized key-value cache ({some(dropped)}) are left out: "
            "a dense model keeps its cache in its own dtype.",
            stacklevel=4,
        )
    twins: dict[str, list[str]] = {}
    for twin, path in reader.twins().items():
        twins.setdefault(path, []).append(twin)
    for path, layer in reader.float_layers.items():
        weight = layer.dense(reader.dense(path, torch.bfloat16)).contiguous()
        # A stack is a parameter of its own name.
        own = renamed.get(path, path)
        yield own if layer.is_stacked else join(path, "weight"), weight
        for twin in twins.get(path, ()):
            yield twin if layer.is_stacked else join(twin, "weight"), weight.clone()
