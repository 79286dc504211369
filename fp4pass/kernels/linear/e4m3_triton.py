"""Compute linear layers on weights with E4M3 codes on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ..._compat.torch import scaled_mm
from ...core.formats import WHOLE, Format
from ...core.packing import PackedInput, PackedWeight
from ..common.tiles import DTYPES, LAUNCH, PTX, cdiv, overlapping, wider
from ..dequantize.naive import dequantize_ref
from .e4m3_tiles_triton import Sizes, one_row_kernel, tiles_kernel
from .naive import linear_quantized_ref, linear_ref

# Words of four columns at a time in the kernel of one row: 16 bytes for each lane of a warp.
_ROW_WORDS = 128

# Rows of a weight from which a program of that kernel takes more of them.
_TALL = 8192

# Rows of x from which a weight that is exact in bfloat16 is expanded for a dense product.
_DENSE = 128


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
    if native and by_rows and x_scales is not None:
        # Both are rows with a factor each.
        left, right = x.view(torch.float8_e4m3fn), codes.view(torch.float8_e4m3fn)
        factors = scales.expand(n, 1).flatten()
        return scaled_mm(left, right, x_scales.flatten(), factors, bias, fast=False)
    exact = not fmt.has_float_scale and dtype == torch.bfloat16
    if exact and m >= _DENSE:
        dense = dequantize_ref(codes, scales, None, fmt, dtype)
        rows = x if x_scales is None else dequantize_ref(x, x_scales, None, fmt, dtype)
        return F.linear(rows, dense, None if bias is None else bias.to(dtype))
    operand = _operand(x.dtype, native, fmt)
    if operand == tl.float8e4nv:
        x, codes = (each.view(torch.float8_e4m3fn) for each in (x, codes))
    sizes = sizes_of(m, n, operand, fmt)
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    tiles_kernel[(cdiv(m, sizes.m) * cdiv(n, sizes.n),)](
        x, x_scales, codes, scales, bias, out, m, n,
        K=k, FMT=fmt, OPERAND=operand, SIZES=sizes,
        num_warps=sizes.warps, num_stages=sizes.stages, **LAUNCH, **overlapping(x.device, False),
    )  # fmt: skip
    return out


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a GPU multiplies E4M3 numbers."""
    return (
        bool(PTX) and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def _operand(of_x: torch.dtype, native: bool, fmt: Format) -> tl.dtype:
    """Return the dtype of operands in which numbers of x, or its codes, and codes are exact."""
    if native and fmt.has_float_scale:
        return tl.float8e4nv
    narrow = of_x == torch.float16 and not fmt.has_float_scale
    # The interpreter multiplies float32 alone.
    if of_x == torch.float32 or narrow or not PTX:
        return tl.float32
    return tl.float16 if of_x == torch.float16 else tl.bfloat16


def sizes_of(m: int, n: int, operand: tl.dtype, fmt: Format) -> Sizes:
    """Return the tile of a program of `tiles_kernel`."""
    # The scales of tiles of 128 columns hold for one step.
    if operand == tl.float32:
        return Sizes(16 if m <= 16 else 64, 32, fmt.block if fmt.block == 128 else 32, 4, 2)
    if m <= 16:
        return Sizes(16, 64 if n >= 8192 else 32, 128, 4, 4)
    if m <= 64:
        return Sizes(64, 64, 128, 4, 4)
    if operand == tl.float8e4nv:
        return Sizes(128, 128, 128, 8, 4) if n * m >= 1 << 22 else Sizes(64, 128, 128, 4, 4)
    return Sizes(128, 128, fmt.block if fmt.block == 128 else 64, 8, 3)


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
    one_row_kernel[(cdiv(n, rows),)](
        words, x_scales, wider(codes, torch.int32), scales, bias, out, n,
        K=k, FMT=fmt, DTYPE=tl.uint8 if x_scales is not None else DTYPES[x.dtype],
        BN=rows, BW=_ROW_WORDS, num_warps=4, num_stages=4,
        **LAUNCH, **overlapping(x.device, False),
    )  # fmt: skip
    return out
