"""Packed codes and scale bits back to numbers, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.formats import Format
from ..cpu.library import function, is_stored, tables, threads_for
from .reference import dequantize_ref


def dequantize_cpu(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """Return the tensor [..., K] that packed codes and scale bits stand for, as the reference."""
    call = function("dequantize", dtype, fmt)
    fits = is_stored(packed, packed.shape) and is_stored(scale, scale.shape)
    fits = fits and 2 * packed.numel() == scale.numel() * fmt.block
    if call is None or not fits or (global_scale is not None and global_scale.numel() != 1):
        return dequantize_ref(packed, scale, global_scale, fmt, dtype)
    _, steps, at_values, _ = tables(fmt)
    if global_scale is not None:
        # Of the 256 scales there are, and not of each block's.
        steps = steps * global_scale if fmt.multiplies else steps / global_scale
    packed, scale = packed.contiguous(), scale.contiguous()
    dense = packed.new_empty((*packed.shape[:-1], fmt.columns(packed.shape[-1])), dtype=dtype)
    places = (packed.data_ptr(), scale.data_ptr(), at_values, steps.data_ptr(), dense.data_ptr())
    call(*places, scale.numel(), fmt.block, threads_for(dense.numel()))
    return dense
