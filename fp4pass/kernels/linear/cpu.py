"""Linear layers on packed weights in C++: few rows on the codes, many on a tile at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.formats import Format
from ..cpu.library import function, is_stored, threads_for, weight_at
from ..dequantize.cpu import dequantize_cpu
from ..fp8.reference import uses_fp8
from .reference import (
    linear_group_ref,
    linear_quantized_group_ref,
    linear_quantized_ref,
    linear_ref,
)

# Up to so many rows are multiplied by the codes. More share a dense tile, whose products have the
# bits of dense ones.
FEW_ROWS = 4

# Numbers of a weight that are dense at a time. Products of smaller tiles are slower.
_TILE = 1 << 21


def linear_cpu(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    compute: str = "input",
) -> Tensor:
    """Return x [..., K] times a packed weight [N, K], as `linear_ref` but for the order of sums."""
    n, k = packed.shape[0], x.shape[-1]
    product = function("product", x.dtype, fmt)
    # What is read must be there; the reference takes other tensors, or says what is wrong.
    fits = k > 0 and is_stored(packed, (n, k // 2)) and is_stored(scale, (n, k // fmt.block))
    fits = fits and (global_scale is None or is_stored(global_scale, (1,), torch.float32))
    fits = fits and (bias is None or (bias.is_cpu and bias.shape == (n,)))
    if product is None or not fits or uses_fp8(compute, x.numel() // k, n):
        return linear_ref(x, packed, scale, global_scale, bias, fmt, compute)
    x, packed, scale = x.contiguous(), packed.contiguous(), scale.contiguous()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    weight = weight_at(packed, scale, global_scale, n, k, fmt)
    rows = x.numel() // k
    if rows > FEW_ROWS:
        return _multiply_tiles(x, weight, n, bias, fmt)
    y = x.new_empty((*x.shape[:-1], n))
    at_bias = None if bias is None else bias.data_ptr()
    product(x.data_ptr(), rows, weight, at_bias, y.data_ptr(), threads_for(rows * n * k // 4))
    return y


def _multiply_tiles(x: Tensor, weight: Any, n: int, bias: Tensor | None, fmt: Format) -> Tensor:
    """Return x [..., K] times a weight [N, K], of which some rows are dense at a time."""
    k = x.shape[-1]
    step = min(n, max(1, _TILE // k))
    tile = x.new_empty((step, k))
    dequantize, threads = function("dequantize", x.dtype, fmt), threads_for(tile.numel())
    if step == n:
        dequantize(weight, 0, n, tile.data_ptr(), threads)
        return F.linear(x, tile, bias)
    flat = x.view(-1, k)
    y = x.new_empty((len(flat), n))
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        dequantize(weight, rows.start, rows.stop, tile.data_ptr(), threads)
        dense = tile[: rows.stop - rows.start].t()
        if bias is None:
            torch.mm(flat, dense, out=y[:, rows])
        else:
            torch.addmm(bias[rows], flat, dense, out=y[:, rows])
    return y.view(*x.shape[:-1], n)


linear_quantized_cpu = partial(linear_quantized_ref, dequantize=dequantize_cpu, linear=linear_cpu)
linear_group_cpu = partial(linear_group_ref, linear=linear_cpu)
linear_quantized_group_cpu = partial(
    linear_quantized_group_ref, linear_quantized=linear_quantized_cpu
)
