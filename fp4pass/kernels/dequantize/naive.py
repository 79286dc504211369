"""Packed codes and scale bits back to numbers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.elements import Element, element_table
from ...core.formats import Format
from ...core.packing import unpack_codes
from ..common.rounding import in_chunks, scale_values


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


def _values(packed: Tensor, element: Element) -> Tensor:
    """Return the float32 values of packed codes, flat, in their order."""
    if element.bits == 4:
        pairs = _pair_table(element, packed.device)
        return pairs.index_select(0, packed.flatten().int()).view(torch.float32)
    codes = unpack_codes(packed, element.bits)
    return element_table(element, packed.device).index_select(0, codes.flatten().int())
