"""The experts of gpt-oss: stacked matrices in mxfp4, as `*_blocks` and `*_scales`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .. import ops
from ..core.formats import get_format
from ..core.quant_state import QuantState
from ..errors import CheckpointError
from .reader import WEIGHTS, read_json
from .safetensors_io import find_shards, opened, read_tensors, tensor_facts

BLOCKS, SCALES = "_blocks", "_scales"


def is_experts(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder declares experts as gpt-oss has them."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        return False
    return read_json(path).get("quantization_config", {}).get("quant_method") == "mxfp4"


def read_experts(
    directory: str | os.PathLike[str],
) -> Iterator[tuple[str, tuple[QuantState, ...]]]:
    """The packed experts of a gpt-oss checkpoint, matrix by matrix, without a changed bit.

    Yields the name of a parameter (`model.layers.0.mlp.experts.gate_up_proj`) and a QuantState
    [N, K] for each expert; gate and up are every other row of gate_up_proj. Raises CheckpointError.
    """
    folder = Path(directory)
    files = find_shards(folder, WEIGHTS)
    facts = tensor_facts(files)
    names = [name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)]
    if not names:
        raise CheckpointError(f"{folder} has no tensor that ends in {BLOCKS}; it is no gpt-oss.")
    fmt = get_format("mxfp4")
    for name in names:
        if name + SCALES not in files:
            raise CheckpointError(f"{folder} has no {name}{SCALES}. Copy the folder again.")
        (shape, kind), (scale_shape, scale_kind) = facts[name + BLOCKS], facts[name + SCALES]
        wanted = (*shape[:-2], shape[-2])
        if len(shape) != 4 or shape[-1] != fmt.block // 2 or (kind, scale_kind) != ("U8", "U8"):
            raise CheckpointError(
                f"{name}{BLOCKS} is {kind} {list(shape)}; U8 [experts, N, K / 32, 16] is wanted."
            )
        if scale_shape != wanted:
            raise CheckpointError(
                f"{name}{SCALES} is {list(scale_shape)}; {list(wanted)} is wanted."
            )
        with opened(files[name + BLOCKS]) as file:
            blocks: Tensor = file.get_tensor(name + BLOCKS)
        with opened(files[name + SCALES]) as file:
            scales: Tensor = file.get_tensor(name + SCALES)
        if (scales > fmt.scale.last).any():
            raise CheckpointError(f"{name}{SCALES} holds NaN. Copy the folder again.")
        rows, columns = shape[1], shape[2] * fmt.block
        yield (
            name,
            tuple(
                QuantState(
                    packed.reshape(rows, columns // 2),
                    scale,
                    1.0,
                    fmt,
                    (rows, columns),
                    torch.bfloat16,
                )
                for packed, scale in zip(blocks, scales, strict=True)
            ),
        )


def dense_experts(directory: str | os.PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a gpt-oss checkpoint, experts as bfloat16 [E, K, N], as transformers
    computes with them."""
    folder = Path(directory)
    for name, states in read_experts(folder):
        dense = [
            ops.dequantize(each.qdata, each.scale, None, each.format.key, torch.bfloat16).t()
            for each in states
        ]
        yield name, torch.stack(dense)
    files = find_shards(folder, WEIGHTS)
    rest = {name: path for name, path in files.items() if not name.endswith((BLOCKS, SCALES))}
    yield from read_tensors(rest)
