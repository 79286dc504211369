"""Dequantize packed codes and scale bits in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.formats import Format
from ..cpu.library import function, is_stored, threads_for, weight_at
from .naive import dequantize_ref


def dequantize_cpu(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """Return the tensor [..., K] that packed codes and scale bits stand for, as the reference."""
    call = function("dequantize", dtype, fmt)
    fits = is_stored(packed, packed.shape) and is_stored(scale, scale.shape)
    fits = fits and 2 * packed.numel() == scale.numel() * fmt.block
    fits = fits and (global_scale is None or is_stored(global_scale, (1,), torch.float32))
    if call is None or not fits:
        return dequantize_ref(packed, scale, global_scale, fmt, dtype)
    packed, scale = packed.contiguous(), scale.contiguous()
    dense = packed.new_empty((*packed.shape[:-1], fmt.columns(packed.shape[-1])), dtype=dtype)
    blocks = scale.numel()
    weight = weight_at(packed, scale, global_scale, blocks, fmt.block, fmt)
    call(weight, 0, blocks, dense.data_ptr(), threads_for(dense.numel()))
    return dense
