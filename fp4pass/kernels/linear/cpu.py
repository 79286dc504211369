"""Multiply packed weights in C++: few rows by the codes, many by one dense tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.formats import Format
from ...core.packing import PackedWeight
from ..cpu.library import function, is_stored, threads_for, weight_at
from ..dequantize.cpu import dequantize_cpu
from ..fp8.naive import uses_fp8
from .naive import linear_group_ref, linear_quantized_group_ref, linear_quantized_ref, linear_ref

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
