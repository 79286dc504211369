"""Read the layers of a folder from its config and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.formats import Format, get_format
from ...errors import CheckpointError, OptionError, UnreadError, some
from ...nn.linear import GLOBAL, INPUT_GLOBAL, PACKED, SCALE
from ...record.config import LinearConfig
from ..source_files import Shapes
from .base import Layout
from .layer import PackedLayer, Scheme

# The safetensors names of what the scales of a format are stored in.
_DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.float32: "F32"}

# Those of codes that are numbers of torch, and of scales that are any float.
_NATIVE = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_FLOATS = ("F32", "BF16", "F16", "F8_E8M0")


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
    for name, (_, kind) in shapes.items():
        if (layer := _layer_of(layout, name, kind)) is None:
            continue
        try:
            found = layout.scheme(layer, declared)
        except UnreadError as error:
            unread[layer] = error
            continue
        fmt = get_format(found.fmt)
        # Others are not read, and `require_all_read` says so.
        if name == layout.tensor_name(layer, PACKED, fmt) and kind == _codes_dtype(layout, fmt):
            layers[layer] = _read_layer(layout, layer, name, found, shapes, dtype)
    if unread:
        group, (first, *_) = layout.group(next(iter(unread)), declared), unread.values()
        count = f"{len(unread)} layers are so: {some(list(unread))}"
        raise UnreadError(f"{f'{group}: ' if group else ''}{first} {count}.") from first
    return layers


def _layer_of(layout: Layout, name: str, kind: str) -> str | None:
    """Return the layer whose codes a tensor may be by its name and dtype, None for others."""
    if layout.stacks:
        layer = name.removesuffix(layout.parts[PACKED])
        return None if layer == name else layer
    layer, _, last = name.rpartition(".")
    usual = layout.parts[PACKED]
    holds_native = any(get_format(each).element.native for each in layout.formats)
    is_native = kind in _NATIVE.values() and last == layout.native_parts.get(PACKED, usual)
    is_bytes = kind == layout.dtypes.get(PACKED, "U8") and last == usual
    return layer if (is_native and holds_native) or is_bytes else None


def _read_layer(
    layout: Layout, layer: str, codes: str, found: Scheme, shapes: Shapes, dtype: str
) -> PackedLayer:
    """Return the record of a layer, whose codes have a name.

    Raises CheckpointError for tensors that are not those of its scheme.
    """
    fmt, (shape, _) = get_format(found.fmt), shapes[codes]
    scale = layout.tensor_name(layer, SCALE, fmt)
    if scale not in shapes:
        beside = scale.removeprefix(layer).lstrip(".") if not layout.stacks else scale
        raise CheckpointError(f"{codes} has no {beside} beside it. Copy the folder again.")
    if layout.stacks and len(shape) != 4:
        raise CheckpointError(
            f"{codes}: expected shape [experts, N, K / 32, 16], got {list(shape)}."
        )
    rows, columns = shape[:1], fmt.columns(shape[-1])
    if layout.stacks:
        rows, columns = shape[:2], shape[2] * fmt.block
    block: int | str = "default"
    if not fmt.has_float_scale:
        blocks = shape[2] if layout.stacks else shapes[scale][0][-1]
        if found.block is not None and found.block * blocks != columns:
            raise CheckpointError(
                f"{scale}: expected {columns // found.block} columns, for {columns} columns of "
                f"weights in blocks of {found.block}, as the config says, got {blocks}. The config "
                "is not that of these weights."
            )
        block = columns // max(blocks, 1)
    try:
        fmt = get_format(found.fmt, block)
        config = LinearConfig(fmt.name, None, found.weight_only, fmt.block, rotation=found.rotation)
    except OptionError as error:
        raise CheckpointError(f"{layer}: {error}") from error
    is_static = found.static_inputs
    whole = (*rows, columns)
    return PackedLayer(
        config, dtype, layout.stacks, whole, static_inputs=is_static, tile=found.tile
    )


def _codes_dtype(layout: Layout, fmt: Format) -> str:
    """Return the safetensors name of the dtype of codes that engines read."""
    native = fmt.element.native
    return layout.dtypes.get(PACKED, "U8") if native is None else _NATIVE[native]


# By kind: the dtypes and the shapes that a tensor may have, the usual ones first.
Expected = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]


def expected_shapes(layout: Layout, layer: PackedLayer) -> dict[str, Expected]:
    """Return the shapes and dtypes that each stored buffer of a layer may have."""
    fmt, (*rows, columns) = layer.fmt, layer.shape
    codes, kind = (*rows, fmt.packed_columns(columns)), "U8"
    if layout.stacks:
        codes = (*layer.scale_shape, fmt.packed_columns(fmt.block))
    if layout.engines:
        kind = _codes_dtype(layout, fmt)
    is_float = fmt.has_float_scale and layout.engines
    usual = layout.dtypes.get(SCALE, _DTYPES[fmt.scale.storage])
    scale_kinds = _FLOATS if is_float else (usual,)
    shapes = layout.scale_shapes(layer) if layout.engines else (layer.scale_shape,)
    found: dict[str, Expected] = {PACKED: ((codes,), (kind,)), SCALE: (shapes, scale_kinds)}
    one: tuple[tuple[int, ...], ...] = ((), (1,))
    each = layer.shape[:1]
    inputs: Expected = ((*one, each) if layer.is_stacked else one, ("F32",))
    if fmt.has_global_scale:
        # Of all rows of an expert, or of its parts, as gate and up.
        of_stack = (each, (*each, 2), (*each, 3))
        found[GLOBAL] = (of_stack if layer.is_stacked else one, ("F32",))
        found[INPUT_GLOBAL] = inputs
    elif layer.static_inputs:
        found[INPUT_GLOBAL] = (inputs[0], _FLOATS)
    return found
