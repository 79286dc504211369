"""Linear layers on packed weights in C++: few rows on the codes, many on a tile at a time."""

from __future__ import annotations

from ctypes import byref
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...core.formats import Format
from ..cpu.library import Weight, function, is_stored, tables, threads_for
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
    x = x.contiguous()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    y = x.new_empty((*x.shape[:-1], n))
    rows = x.numel() // k
    if rows > FEW_ROWS:
        _multiply_tiles(x.view(rows, k), packed, scale, global_scale, bias, fmt, y.view(rows, n))
        return y
    packed, scale = packed.contiguous(), scale.contiguous()
    at_number = None if global_scale is None else global_scale.data_ptr()
    weight = _weight(packed.data_ptr(), scale.data_ptr(), at_number, n, k, fmt)
    at_bias = None if bias is None else bias.data_ptr()
    threads = threads_for(rows * n * k // 4)
    product(x.data_ptr(), rows, weight, at_bias, y.data_ptr(), threads)
    return y


# Making one takes longer than asking for it; there is one for each layer.
@lru_cache(maxsize=1024)
def _weight(packed: int, scale: int, number: int | None, n: int, k: int, fmt: Format) -> Any:
    """Return what a product takes of a weight whose tensors are at these places."""
    _, _, values, steps = tables(fmt)
    return byref(Weight(packed, scale, number, values, steps, n, k, fmt.block, fmt.multiplies))


def _multiply_tiles(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    fmt: Format,
    y: Tensor,
) -> None:
    """Multiply rows [M, K] and a weight, some rows of it dense at a time, into y [M, N]."""
    step = max(1, _TILE // x.shape[1])
    for start in range(0, y.shape[1], step):
        rows = slice(start, start + step)
        weight = dequantize_cpu(packed[rows], scale[rows], global_scale, fmt, x.dtype)
        if bias is None:
            torch.mm(x, weight.t(), out=y[:, rows])
        else:
            torch.addmm(bias[rows], x, weight.t(), out=y[:, rows])


linear_quantized_cpu = partial(linear_quantized_ref, dequantize=dequantize_cpu, linear=linear_cpu)
linear_group_cpu = partial(linear_group_ref, linear=linear_cpu)
linear_quantized_group_cpu = partial(
    linear_quantized_group_ref, linear_quantized=linear_quantized_cpu
)
