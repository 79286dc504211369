"""Compute linear layers on weights with E4M3 codes on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ..._compat.torch import block_scaled_mm, has_block_scaled_mm, scaled_mm
from ...core.formats import WHOLE, Format
from ...core.packing import PackedInput, PackedWeight
from ..common.tiles import DTYPES, LAUNCH, PTX, cdiv, overlapping, wider
from ..dequantize.e4m3_triton import dequantize_e4m3
from .e4m3_tiles_triton import Sizes, e4m3_row_kernel, e4m3_tiles_kernel
from .naive import linear_quantized_ref, linear_ref
from .tiling import shared_memory_of

# Words of four columns at a time in the kernel of one row: 16 bytes for each lane of a warp.
_ROW_WORDS = 128

# Rows of a weight from which a program of that kernel takes more of them.
_TALL = 8192

# Products from which programs take tiles of 128 x 128.
_MANY = 1 << 20

# Rows of x from which a weight that is exact in bfloat16 is expanded for a dense product.
_DENSE = 17

# Rows of x from which cuBLAS multiplies tiles of 128 x 128 faster than Triton.
_BLOCKS = 128


def linear_e4m3(x: Tensor, weight: PackedWeight, fmt: Format, compute: str = "input") -> Tensor:
    """Multiply activations and a weight with E4M3 codes (`linear_ref`)."""
    if x.dtype not in DTYPES or not x.numel() or not len(weight.packed):
        return linear_ref(x, weight, fmt)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _multiply(rows, None, weight, x.dtype, fmt).view(*x.shape[:-1], -1)


def linear_quantized_e4m3(
    x: Tensor,
    x_rows: PackedInput,
    weight: PackedWeight,
    fmt: Format,
    rotation: int = 0,
    compute: str = "input",
) -> Tensor:
    """Multiply quantized activations and a weight with E4M3 codes (`linear_quantized_ref`)."""
    codes, scales, _ = x_rows
    if x.dtype not in DTYPES or not codes.numel() or not len(weight.packed):
        return linear_quantized_ref(x, x_rows, weight, fmt)
    flat = codes.reshape(-1, codes.shape[-1]).contiguous()
    y = _multiply(flat, scales.reshape(len(flat), -1).contiguous(), weight, x.dtype, fmt)
    return y.view(*codes.shape[:-1], -1)


def linear_group_e4m3(
    x: Tensor, weights: Sequence[PackedWeight], fmt: Format, compute: str = "input"
) -> list[Tensor]:
    """Multiply activations and several weights, each alone."""
    return [linear_e4m3(x, each, fmt) for each in weights]


def linear_quantized_group_e4m3(
    x: Tensor,
    x_rows: PackedInput,
    weights: Sequence[PackedWeight],
    fmt: Format,
    compute: str = "input",
) -> list[Tensor]:
    """Multiply quantized activations and several weights, each alone."""
    return [linear_quantized_e4m3(x, x_rows, each, fmt) for each in weights]


def _multiply(
    x: Tensor, x_scales: Tensor | None, weight: PackedWeight, dtype: torch.dtype, fmt: Format
) -> Tensor:
    """Return the product [M, N] of rows, or of codes and their scales, in a dtype."""
    codes, scales, bias = weight.packed.contiguous(), weight.scale.contiguous(), weight.bias
    (m, k), n = x.shape, len(codes)
    native = x_scales is not None and has_tensor_cores(codes.device)
    by_rows = fmt.block == WHOLE and dtype == torch.bfloat16 and n % 16 == 0 and k % 16 == 0
    if m == 1 and k % 16 == 0 and (x_scales is not None or dtype.itemsize == 2):
        return _multiply_row(x, x_scales, codes, scales, bias, dtype, fmt)
    if native and by_rows and x_scales is not None and x.is_cuda:
        # Both are rows with a factor each.
        left, right = x.view(torch.float8_e4m3fn), codes.view(torch.float8_e4m3fn)
        factors = scales.expand(n, 1).flatten()
        return scaled_mm(left, right, x_scales.flatten(), factors, bias, fast=False)
    plain = bias is None and dtype == torch.bfloat16
    if x_scales is not None and plain and _has_block_product(x, n, fmt):
        left, right = x.view(torch.float8_e4m3fn), codes.view(torch.float8_e4m3fn)
        return block_scaled_mm(left, right, x_scales, scales)
    exact = not fmt.has_float_scale and dtype == torch.bfloat16
    if exact and m >= _DENSE:
        dense = dequantize_e4m3(codes, scales, None, fmt, dtype)
        rows = x if x_scales is None else dequantize_e4m3(x, x_scales, None, fmt, dtype)
        return F.linear(rows, dense, None if bias is None else bias.to(dtype))
    operand = _operand(x.dtype, native, fmt)
    if operand == tl.float8e4nv:
        x, codes = (each.view(torch.float8_e4m3fn) for each in (x, codes))
    sizes = sizes_of(m, n, operand, fmt, shared_memory_of(x.device))
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    e4m3_tiles_kernel[(cdiv(m, sizes.m) * cdiv(n, sizes.n),)](
        x, x_scales, codes, scales, bias, out, m, n,
        K=k, FMT=fmt, OPERAND=operand, SIZES=sizes,
        num_warps=sizes.warps, num_stages=sizes.stages, **LAUNCH, **overlapping(x.device, False),
    )  # fmt: skip
    return out


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a GPU multiplies E4M3 numbers."""
    if not PTX or device.type == "cpu":
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) >= (8, 9)


def _has_block_product(x: Tensor, n: int, fmt: Format) -> bool:
    """Return whether `block_scaled_mm` multiplies many rows of codes x and a weight [n, K]."""
    m, k = x.shape
    tiled = fmt.block == fmt.rows == 128 and n % 128 == k % 512 == 0
    return tiled and m >= _BLOCKS and m % 4 == 0 and has_block_scaled_mm(x.device)


def _operand(of_x: torch.dtype, native: bool, fmt: Format) -> tl.dtype:
    """Return the dtype of operands in which numbers of x, or its codes, and codes are exact."""
    if native and fmt.has_float_scale:
        return tl.float8e4nv
    narrow = of_x == torch.float16 and not fmt.has_float_scale
    # The interpreter multiplies float32 alone.
    if of_x == torch.float32 or narrow or not PTX:
        return tl.float32
    return tl.float16 if of_x == torch.float16 else tl.bfloat16


def sizes_of(m: int, n: int, operand: tl.dtype, fmt: Format, shared_memory: int) -> Sizes:
    """Return the tile of a program of `e4m3_tiles_kernel`, which fits into shared memory."""
    # The scales of tiles of 128 columns hold for one step.
    least = fmt.block if fmt.block == 128 else 32
    if operand == tl.float32:
        return Sizes(16 if m <= 16 else 64, 32, least, 4, 1)
    known = [Sizes(16, 32, 128, 4, 4)]
    if m <= 16:
        known.insert(0, Sizes(16, 64 if n >= _TALL else 32, 128, 4, 4))
    else:
        known.insert(0, Sizes(64, 64, 128, 4, 4))
        if m * n >= _MANY:
            known.insert(
                0, Sizes(128, 128, 128 if operand == tl.float8e4nv else max(64, least), 8, 4)
            )
    fitting = (_fitted(each, operand, shared_memory) for each in known)
    return next((each for each in fitting if each.stages > 1), known[-1])


def _fitted(sizes: Sizes, operand: tl.dtype, shared_memory: int) -> Sizes:
    """Return a tile with as many stages as fit, if so many are wanted."""
    # A stage holds both tiles as they are loaded; decoded ones are there once.
    itemsize = operand.primitive_bitwidth // 8
    decoded = 0 if itemsize == 1 else itemsize * (sizes.m + sizes.n) * sizes.k
    stage = (itemsize * sizes.m + sizes.n) * sizes.k
    fitting = (shared_memory - decoded) // stage
    return dataclasses.replace(sizes, stages=max(1, min(sizes.stages, fitting)))


def _multiply_row(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fmt: Format,
) -> Tensor:
    """Return the product [1, N] of one row and a weight."""
    n, k = codes.shape
    words = wider(x, torch.int64 if x_scales is None else torch.int32)
    rows = 8 if n >= _TALL else 4
    out = torch.empty((1, n), dtype=dtype, device=x.device)
    e4m3_row_kernel[(cdiv(n, rows),)](
        words, x_scales, wider(codes, torch.int32), scales, bias, out, n,
        K=k, FMT=fmt, DTYPE=tl.uint8 if x_scales is not None else DTYPES[x.dtype],
        BN=rows, BW=_ROW_WORDS, num_warps=4, num_stages=4,
        **LAUNCH, **overlapping(x.device, False),
    )  # fmt: skip
    return out
