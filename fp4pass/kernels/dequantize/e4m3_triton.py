"""Dequantize E4M3 codes on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import WHOLE, Format
from ..common.e4m3_tiles import power_of_byte, value_of
from ..common.float_scales import are_of_rows
from ..common.tiles import LAUNCH, cdiv, overlapping, rounded, wait
from .naive import dequantize_ref

_WHOLE = tl.constexpr(WHOLE)

# Columns of a program.
_COLUMNS = 2048


def dequantize_e4m3(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """Return the tensor that E4M3 codes and scales stand for (`dequantize_ref`): the same bits."""
    if dtype == torch.float64 or global_scale is not None:
        return dequantize_ref(packed, scale, global_scale, fmt, dtype)
    out = torch.empty_like(packed, dtype=dtype, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    # Rows that share a scale: of tiles, which begin anew in each matrix of a stack.
    tall = 1 if are_of_rows(scale, packed.shape) else fmt.rows
    matrices = packed.flatten(0, -3) if tall != 1 and packed.ndim > 2 else packed[None]
    parts = matrices, scale.reshape(len(matrices), -1), out.view(matrices.shape)
    for codes, scales, values in zip(*parts, strict=True):
        columns = codes.shape[-1]
        _dequantize_e4m3[(codes.numel() // columns, cdiv(columns, _COLUMNS))](
            codes.contiguous(), scales.contiguous(), values,
            K=columns, FMT=fmt, TALL=tall, COLUMNS=_COLUMNS,
            num_warps=4, **LAUNCH, **overlapping(out.device, False),
        )  # fmt: skip
    return out


@triton.jit
def _dequantize_e4m3(
    codes, scales, out,
    K: tl.constexpr, FMT: tl.constexpr, TALL: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """TALL: rows that share a scale, WHOLE for all."""
    wait(OVERLAP, RELEASES)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < K
    code = tl.load(codes + row * K + column, mask=inside, other=0)
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value_of(code))
    first = row * 0 if TALL == _WHOLE else row // TALL
    if FMT.block == _WHOLE:
        step = tl.load(scales + first)
    else:
        SCALES: tl.constexpr = (K + FMT.block - 1) // FMT.block
        at = scales + first * SCALES + column // FMT.block
        step = tl.load(at, mask=inside, other=0)
    if not FMT.has_float_scale:
        step = power_of_byte(step)
    tl.store(out + row * K + column, rounded(value * step, out.dtype.element_ty), mask=inside)
