"""Dequantize packed codes and scale bits in plain PyTorch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.elements import Element, element_table
from ...core.formats import Format
from ...core.packing import unpack_codes
from ..common.rounding import CHUNK, are_of_rows, band_of, bands, in_chunks, scale_values, spread


@lru_cache(maxsize=64)
def _pair_table(element: Element, device: torch.device) -> Tensor:
    """Return the two values in each byte of packed codes: [256] int64, two float32 each."""
    # As one number, because index_select copies numbers faster than rows.
    values = element_table(element, device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).view(torch.int64).flatten()


def dequantize_ref(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """Return the tensor [..., K] that packed codes [..., P] and scale bits stand for."""
    # A value is `code * (scale / global_scale)`, or `code * (scale * global_scale)` where
    # `fmt.multiplies`, in float32. It is exact in bfloat16 when the global scale is a power of two.
    if fmt.has_float_scale:
        return _dequantize_tiles(packed, scale, global_scale, fmt, dtype)
    step = scale_values(scale, fmt.scale)
    if global_scale is not None:
        step = step * global_scale if fmt.multiplies else step / global_scale
    columns = fmt.columns(packed.shape[-1])
    dense = packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)
    codes = packed.reshape(-1, fmt.packed_columns(fmt.block))
    blocks = dense.view(-1, fmt.block), codes, step.view(-1, 1)
    for out, part, factor in in_chunks(fmt.block, *blocks):
        out.copy_(_values(part, fmt.element).view(-1, fmt.block).mul_(factor))
    return dense


def _dequantize_tiles(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """Return the same for scales that are float32 numbers of rows, or of tiles of a weight."""
    if global_scale is not None:
        scale = scale * global_scale if fmt.multiplies else scale / global_scale
    dense = packed.new_empty(packed.shape, dtype=dtype)
    if are_of_rows(scale, packed.shape):
        rows = (each.reshape(-1, each.shape[-1]) for each in (dense, packed, scale))
        for out, part, factor in in_chunks(packed.shape[-1], *rows):
            values = _values(part, fmt.element).view(part.shape)
            out.copy_(values.mul_(spread(factor, part.shape, fmt)))
        return dense
    matrices = (each.reshape(-1, *each.shape[-2:]) for each in (dense, packed, scale))
    for out, codes, factors in zip(*matrices, strict=True):
        for band in bands(codes.shape, fmt, CHUNK):
            part = codes[band]
            values = _values(part, fmt.element).view(part.shape)
            out[band] = values.mul_(spread(band_of(factors, band, fmt), part.shape, fmt))
    return dense


def _values(packed: Tensor, element: Element) -> Tensor:
    """Return the float32 values of packed codes, flat, in their order."""
    if element.bits == 4:
        pairs = _pair_table(element, packed.device)
        return pairs.index_select(0, packed.flatten().int()).view(torch.float32)
    if element.native is not None:
        return packed.view(element.native).to(torch.float32).flatten()
    codes = unpack_codes(packed, element.bits)
    return element_table(element, packed.device).index_select(0, codes.flatten().int())
