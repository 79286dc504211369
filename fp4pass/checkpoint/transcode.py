"""A checkpoint in another layout, one tensor at a time; codes and block scales keep their bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import unknown_name
from .atomic import replacing
from .gpt_oss import dense_experts, is_experts
from .layouts import (
    MODELOPT,
    PUBLIC,
    get_layout,
    hf_quant_config,
    quantization_config,
    require_public,
)
from .reader import (
    MODELOPT_FACTS,
    OWN_FACTS,
    WEIGHTS,
    Stored,
    check_sum,
    declared_config,
    open_stored,
    read_json,
)
from .safetensors_io import ShardWriter, bytes_of
from .saving import WeightsWriter, join, write_json

DENSE = "bf16"
TARGETS = (*PUBLIC, DENSE)

# Files that are written anew.
_REPLACED = {OWN_FACTS, MODELOPT_FACTS, "config.json"}


def transcode(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> None:
    """Write a checkpoint of any layout that can be read in another one, whole or not at all.

    to: "compressed-tensors", "modelopt", or "bf16" for dense weights that need no library of ours.
    gpt-oss, whose experts are in mxfp4, can become dense. Everything else in the folder (tokenizer,
    generation config, chat template) comes along. No model is built; in memory are the tensors of
    one file of the target. Raises CheckpointError or OptionError.
    """
    if to not in TARGETS:
        raise unknown_name("The layout", to, TARGETS)
    folder, limit = Path(source), bytes_of(max_shard_size)
    if to == DENSE and is_experts(folder):
        with replacing(Path(target), overwrite, marks=(OWN_FACTS, MODELOPT_FACTS)) as new:
            _copy_rest(folder, new)
            config = read_json(folder / "config.json")
            _write_dense(new, config, dense_experts(folder), limit)
        return
    stored = open_stored(folder)
    if to != DENSE:
        require_public(stored.layers, get_layout(to))
    with replacing(Path(target), overwrite, marks=(OWN_FACTS, MODELOPT_FACTS)) as new:
        _copy_rest(folder, new)
        if to == DENSE:
            _write_dense(new, stored.config, _dense(stored), limit)
        else:
            _write_packed(new, stored, to, limit)


def _write_packed(folder: Path, stored: Stored, to: str, limit: int) -> None:
    layout = get_layout(to)
    config = dict(stored.config)
    ignore, layers = _ignored(stored), stored.layers
    if config:
        config["quantization_config"] = quantization_config(layout, layers, ignore)
        write_json(folder / "config.json", config)
    if layout is MODELOPT:
        write_json(folder / MODELOPT_FACTS, hf_quant_config(layers, ignore))
    renamed = _renamed(stored)
    writer = WeightsWriter(folder, layout, limit)
    for name, tensor in stored.tensors():
        check_sum(stored, name, tensor)
        if name in renamed:
            layer, part, path = renamed[name]
            multiplies = stored.layers[path].config.multiplies
            decoded = stored.decoded(part, name, tensor, multiplies)
            writer.add_part(layer, part, multiplies, decoded)
        else:
            writer.add(name, tensor)
    writer.close(layers, stored.own)


def _renamed(stored: Stored) -> dict[str, tuple[str, str, str]]:
    """The name, the buffer and the layer that every packed tensor on disk is of, under each of
    its names."""
    return {
        name: (layer, part, path)
        for layer, path in ({layer: layer for layer in stored.layers} | stored.twins()).items()
        for part, name in stored.names(layer).items()
    }


def _ignored(stored: Stored) -> list[str]:
    """What is not quantized, by the names and patterns that the folder has."""
    declared = declared_config(stored.folder, stored.config) or {}
    declared = declared.get("quantization", declared)
    return list(declared.get("ignore") or declared.get("exclude_modules") or ())


def _dense(stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model without packed weights; what it keeps in another dtype stays so."""
    renamed = _renamed(stored)
    layer = next(iter(stored.layers.values()))
    dtype = getattr(torch, stored.own["dtype"] if stored.own else layer.weight_dtype)
    for name, tensor in stored.tensors():
        check_sum(stored, name, tensor)
        if name not in renamed:
            path, _, last = name.rpartition(".")
            if last == "bias" and path in stored.layers:
                tensor = _restored_bias(tensor, stored.layers[path].config.output_rotation)
            yield name, tensor.to(torch.bfloat16) if tensor.dtype == dtype else tensor
    names: dict[str, list[str]] = {}
    for twin, path in stored.twins().items():
        names.setdefault(path, []).append(twin)
    for path, facts in stored.layers.items():
        weight = stored.dense(path, torch.bfloat16)
        weight = (weight.t() if facts.transposed else weight).contiguous()
        for name in (path, *names.get(path, ())):
            yield join(name, "weight"), weight if name == path else weight.clone()


def _restored_bias(bias: Tensor, rotation: int) -> Tensor:
    """The bias of a linear whose outputs are rotated, as it was."""
    return ops.rotate(bias, rotation) if rotation else bias


def _write_dense(
    folder: Path, config: Mapping[str, Any], tensors: Iterator[tuple[str, Tensor]], limit: int
) -> None:
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if config:
        write_json(folder / "config.json", config | {"dtype": "bfloat16"})
    writer = ShardWriter(folder, WEIGHTS, limit)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.close()


def _copy_rest(source: Path, target: Path) -> None:
    """What a folder has beside weights and the facts about them."""
    for path in sorted(source.iterdir()):
        weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and not weights and path.name not in _REPLACED:
            shutil.copy2(path, target / path.name)
