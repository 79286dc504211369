"""Linears on 8-bit integers: each row of both operands rounded, their products summed exactly.

Columns of the input that hold outliers are left out of that and multiplied as they are.
Source: Dettmers et al. 2022, LLM.int8(), arXiv 2208.07339.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127

# As many products of two codes as int32 can sum.
MAX_COLUMNS = (2**31 - 1) // LARGEST**2

# As many as float32 can, whatever the order.
_FLOAT_COLUMNS = 2**24 // LARGEST**2


def quantize_rows_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [M, K] to integers times amax / 127: codes int8 [M, K] and scale float32 [M]."""
    # Ties go to even. The scale of a row with NaN or infinity is not finite, its code of NaN is 0.
    values = x.to(_wide(x.dtype))
    amax = values.abs().amax(-1)
    # By a number, CUDA would multiply with its reciprocal.
    scale = (amax / torch.full_like(amax, LARGEST)).float()
    codes = (values / scale.unsqueeze(-1)).round_().clamp_(-LARGEST, LARGEST)
    return codes.nan_to_num_(0.0).to(torch.int8), scale


def dequantize_rows_ref(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes [N, K] times scale [N] in float32, or float64, rounded to `dtype`."""
    return (codes.to(_wide(dtype)) * scale.unsqueeze(-1)).to(dtype)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact product of codes a [M, K] and b [N, K], transposed: int32 [M, N]."""
    if a.is_cuda:
        left, right = padded(a, b)
        return torch._int_mm(left, right.t())[: len(a), : len(b)]
    # Of one column torch 2.13 takes the strides for those of another layout.
    if a.shape[1] > 1 and _sums_exactly():
        return torch._int_mm(a, b.t())
    total = a.new_zeros((len(a), len(b)), dtype=torch.int32)
    for left, right in zip(a.split(_FLOAT_COLUMNS, 1), b.split(_FLOAT_COLUMNS, 1), strict=True):
        total += (left.float() @ right.float().t()).int()
    return total


def padded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [M, K] and b [N, K] with zeros up to what cuBLAS multiplies."""
    # That is M of at least 32, K of at least 16, and K and N in multiples of 8.
    rows, columns = max(32, len(a)), max(16, -(-a.shape[1] // 8) * 8)
    out = -(-len(b) // 8) * 8
    if a.shape != (rows, columns):
        a = F.pad(a, (0, columns - a.shape[1], 0, rows - len(a)))
    if b.shape != (out, columns):
        b = F.pad(b, (0, columns - b.shape[1], 0, out - len(b)))
    return a, b


@lru_cache(maxsize=1)
def _sums_exactly() -> bool:
    """Return whether this CPU multiplies codes exactly: without VNNI pairs saturate in int16."""
    codes = torch.full((33, 64), LARGEST, dtype=torch.int8)
    sums = [torch._int_mm(codes[:rows], codes.t()) for rows in (1, 33)]
    return all(bool((each == 64 * LARGEST**2).all()) for each in sums)


def linear_int8_ref(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, threshold: float
) -> Tensor:
    """Return x [..., K] times codes [N, K] and scale [N], with x rounded to int8 rows too."""
    # Columns of x with a magnitude of at least `threshold`, if it is not 0, are multiplied in x's
    # dtype. Sums are float32 (float64 for such x), rounded once. The gradient of x is that of the
    # dense product, as if rounding were the identity (straight-through).

    # Autocast would change the dtypes.
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1])
        outliers = (rows.abs() >= threshold).any(0) if threshold else None
        kept = rows if outliers is None else rows.masked_fill(outliers, 0.0)
        x_codes, x_scale = quantize_rows_ref(kept)
        y = int_mm(x_codes, codes).to(_wide(x.dtype))
        y.mul_(x_scale.unsqueeze(-1)).mul_(scale)
        if outliers is not None:
            y += _outlier_product(rows, outliers, codes, scale)
        if bias is not None:
            y += bias
        return y.to(x.dtype).view(*x.shape[:-1], len(codes))


def _outlier_product(rows: Tensor, outliers: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return the product of the columns of rows [M, K] where `outliers` [K] is true."""
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        # While a CUDA graph is captured nobody can ask how many there are.
        rows = rows.masked_fill(~outliers, 0.0)
    else:
        columns = outliers.nonzero().squeeze(1)
        rows, codes = rows[:, columns], codes[:, columns]
    return F.linear(rows, dequantize_rows_ref(codes, scale, rows.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are divided and summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
