"""Call the C++: dequantize, quantize, and multiply few rows by codes, more by dense tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import byref
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.formats import Format
from ...core.packing import PackedWeight, empty_blocks
from ..common.rounding import global_multiplier
from ..compute_fp8.naive import uses_fp8
from ..dequantize.naive import dequantize_ref
from ..experts.naive import experts_quantize_ref
from ..linear.naive import (
    linear_group_ref,
    linear_quantized_group_ref,
    linear_quantized_ref,
    linear_ref,
)
from ..quantize.naive import activate_quantize_ref, norm_quantize_ref, quantize_ref
from ..rotate.naive import rotate_quantize_ref
from .library import Grid, Rounding, function, is_stored, tables, threads_for, weight_at


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


@lru_cache(maxsize=64)
def _rounding(fmt: Format) -> Rounding | None:
    """Return how blocks are rounded, but for the global scale; None if it is not known there."""
    element, scale = fmt.element, fmt.scale
    if element.minifloat is None or (scale.mantissa_bits and not scale.subnormal):
        return None
    return Rounding(
        element=Grid(*element.minifloat, element.max),
        scale=Grid(scale.mantissa_bits, 1 - scale.bias, scale.max),
        last=scale.last,
        nan=scale.nan,
        carry=element.carry,
        shift=127 - scale.bias + math.frexp(element.max)[1] - 1,
        steps=tables(fmt)[-1],
        full=element.max,
    )


def quantize_cpu(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scale_method: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Return packed codes and scale bits of activations x [..., K], as `quantize_ref`."""
    call = function("quantize", x.dtype, fmt)
    rounding = None if call is None else _rounding(fmt)
    if call is None or rounding is None or scale_method != "naive":
        return quantize_ref(x, global_scale, fmt, scale_method)
    if global_scale is not None:
        # As the reference has it in float32.
        factor = global_multiplier(global_scale, fmt)
        full = fmt.element.max * factor
        rounding = Rounding.from_buffer_copy(rounding)
        rounding.has_global_scale = True
        rounding.global_scale, rounding.full = float(factor), float(full)
    x = x.contiguous()
    packed, scale = empty_blocks(x, fmt)
    blocks, threads = scale.numel(), threads_for(x.numel())
    pointers = (each.data_ptr() for each in (x, packed, scale))
    call(*pointers, blocks, fmt.block, byref(rounding), threads)
    return packed, scale


activate_quantize_cpu = partial(activate_quantize_ref, quantize=quantize_cpu)
norm_quantize_cpu = partial(norm_quantize_ref, quantize=quantize_cpu)
experts_quantize_cpu = partial(experts_quantize_ref, quantize=quantize_cpu)
rotate_quantize_cpu = partial(rotate_quantize_ref, quantize=quantize_cpu)


# Up to so many rows are multiplied by the codes. More share a dense tile, whose products have the
# bits of dense ones.
FEW_ROWS = 4

# Numbers of a weight that are dense at a time. Products of smaller tiles are slower.
TILE = 1 << 21


def linear_cpu(x: Tensor, weight: PackedWeight, fmt: Format, compute: str = "input") -> Tensor:
    """Return x [..., K] times a packed weight [N, K], as `linear_ref` but for the order of sums."""
    packed, scale, global_scale, bias = weight
    n, k = packed.shape[0], x.shape[-1]
    rows = x.numel() // k if k else 0
    call = function("product" if rows <= FEW_ROWS else "dequantize", x.dtype, fmt)
    # Memory that is read must be there; the reference takes other tensors, or raises.
    fits = (
        call is not None
        and k > 0
        and (packed.is_cpu and packed.dtype == torch.uint8 and packed.shape == (n, k // 2))
        and (scale.is_cpu and scale.dtype == torch.uint8 and scale.shape == (n, k // fmt.block))
        and (global_scale is None or is_stored(global_scale, (1,), torch.float32))
        and (bias is None or (bias.is_cpu and bias.shape == (n,)))
    )
    if not fits or (compute != "input" and uses_fp8(compute, rows)):
        return linear_ref(x, weight, fmt, compute)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    packed, scale = packed.contiguous(), scale.contiguous()
    stored = weight_at(packed, scale, global_scale, n, k, fmt)
    if rows > FEW_ROWS:
        return _multiply_tiles(x, call, stored, n, bias)
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], n))
    at_bias = None if bias is None else bias.data_ptr()
    call(x.data_ptr(), rows, stored, at_bias, y.data_ptr(), threads_for(rows * n * k // 4))
    return y


def _multiply_tiles(
    x: Tensor, dequantize: Callable[..., None], weight: Any, n: int, bias: Tensor | None
) -> Tensor:
    """Return x [..., K] times a weight [N, K], of which some rows are dense at a time."""
    k = x.shape[-1]
    step = min(n, max(1, TILE // k))
    tile = x.new_empty((step, k))
    at, threads = tile.data_ptr(), threads_for(step * k)
    if step == n:
        dequantize(weight, 0, n, at, threads)
        return F.linear(x, tile, bias)
    flat = x.reshape(-1, k)
    y = x.new_empty((len(flat), n))
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        dequantize(weight, rows.start, rows.stop, at, threads)
        dense = tile[: rows.stop - rows.start].t()
        if bias is None:
            torch.mm(flat, dense, out=y[:, rows])
        else:
            torch.addmm(bias[rows], flat, dense, out=y[:, rows])
    return y.view(*x.shape[:-1], n)


linear_quantized_cpu = partial(linear_quantized_ref, dequantize=dequantize_cpu, linear=linear_cpu)
linear_group_cpu = partial(linear_group_ref, linear=linear_cpu)
linear_quantized_group_cpu = partial(linear_quantized_group_ref, linear=linear_quantized_cpu)
