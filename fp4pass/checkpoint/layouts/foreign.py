"""Read the layers of a folder from its config and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...config import LinearConfig
from ...core.formats import get_format
from ...errors import CheckpointError, OptionError, UnreadError, some
from ...linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ...sources.files import Shapes
from .base import Layout
from .layer import PackedLayer

# The safetensors names of what the scales of a format are stored in.
_DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}


def read_layers(
    layout: Layout, declared: Mapping[str, Any], shapes: Shapes, dtype: str
) -> dict[str, PackedLayer]:
    """Return the packed layers of a folder that another library may have written.

    Args:
        layout: of the folder.
        declared: its quantization_config.
        shapes: of all its tensors.
        dtype: of the dense model.

    Raises:
        CheckpointError: what cannot be read.
    """
    layout.require_applied(declared, shapes)
    layers, unread = {}, dict[str, UnreadError]()
    for name, (shape, kind) in shapes.items():
        layer = name.rpartition(".")[0]
        if layout.stacks:
            layer = name.removesuffix(layout.parts[PACKED])
        codes = layout.dtypes.get(PACKED, "U8")
        if layout.tensor_name(layer, PACKED) != name or (kind != codes and not layout.stacks):
            continue
        scale = layout.tensor_name(layer, SCALE)
        if scale not in shapes:
            beside = scale if layout.stacks else layout.parts[SCALE]
            raise CheckpointError(f"{name} has no {beside} beside it. Copy the folder again.")
        if layout.stacks and len(shape) != 4:
            raise CheckpointError(
                f"{name}: expected shape [experts, N, K / 32, 16], got {list(shape)}."
            )
        rows, columns, blocks = shape[:1], 2 * shape[-1], shapes[scale][0][-1]
        if layout.stacks:
            rows, blocks = shape[:2], shape[2]
            columns = blocks * get_format(layout.formats[0]).block
        try:
            config = _read_config(layout, layer, declared, columns, blocks)
        except UnreadError as error:
            unread[layer] = error
            continue
        layers[layer] = PackedLayer(config, dtype, layout.stacks, (*rows, columns))
    if unread:
        group, (first, *_) = layout.group(next(iter(unread)), declared), unread.values()
        count = f"{len(unread)} layers are so: {some(list(unread))}"
        raise UnreadError(f"{f'{group}: ' if group else ''}{first} {count}.") from first
    return layers


def _read_config(
    layout: Layout, layer: str, declared: Mapping[str, Any], columns: int, blocks: int
) -> LinearConfig:
    """Return the config of one layer, whose scale has `blocks` columns."""
    found = layout.scheme(layer, declared)
    if found.block is not None and found.block * blocks != columns:
        raise CheckpointError(
            f"{layout.tensor_name(layer, SCALE)}: expected {columns // found.block} columns, for "
            f"{columns} columns of weights in blocks of {found.block}, as the config says, got "
            f"{blocks}. The config is not that of these weights."
        )
    try:
        fmt = get_format(found.fmt, columns // max(blocks, 1))
        return LinearConfig(fmt.name, None, found.weight_only, fmt.block, rotation=found.rotation)
    except OptionError as error:
        raise CheckpointError(f"{layer}: {error}") from error


def expected_shapes(
    layout: Layout, layer: PackedLayer
) -> dict[str, tuple[tuple[tuple[int, ...], ...], str]]:
    """Return the shapes that each stored buffer of a layer may have, and its dtype."""
    fmt, (*rows, columns) = layer.fmt, layer.shape
    codes, scale = (*rows, fmt.packed_columns(columns)), (*rows, columns // fmt.block)
    if layout.stacks:
        codes = (*scale, fmt.packed_columns(fmt.block))
    found: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
        PACKED: ((codes,), layout.dtypes.get(PACKED, "U8")),
        SCALE: ((scale,), layout.dtypes.get(SCALE, _DTYPES[fmt.scale.storage])),
    }
    if fmt.has_global_scale:
        one: tuple[tuple[int, ...], ...] = ((), (1,))
        each = layer.shape[:1]
        # Of all rows of an expert, or of its parts, as gate and up.
        of_stack = (each, (*each, 2), (*each, 3))
        found[GLOBAL] = (of_stack if layer.is_stacked else one, "F32")
        found[INPUT_GLOBAL] = ((*one, each) if layer.is_stacked else one, "F32")
    return found
