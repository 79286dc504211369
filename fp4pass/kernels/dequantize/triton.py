"""Dequantize packed codes and scale bits on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import WHOLE, Format
from ..common import tiles as kit
from ..common.rounding import are_of_rows
from .naive import dequantize_ref

# The operators of this file ask for it by this name: E4M3 codes have kernels here, too.
supports = kit.supports_any

# Words of eight codes in a program.
_WORDS = 256


def dequantize_triton(
    packed: Tensor, scale: Tensor, global_scale: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """Return the tensor that packed codes stand for (`dequantize_ref`): the same bits."""
    if fmt.element.bits == 8:
        return dequantize_e4m3(packed, scale, global_scale, fmt, dtype)
    return dequantize_all_triton([(packed, scale, global_scale)], fmt, dtype)[0]


def dequantize_all_triton(
    stored: Sequence[tuple[Tensor, Tensor, Tensor | None]], fmt: Format, dtype: torch.dtype
) -> list[Tensor]:
    """Return the tensors that several packed tensors stand for, in one launch."""
    # stored: packed codes, scale bits and stored global scale of each. A launch takes all with a
    # global scale or all without, and the reference serves float64.
    packed, scale, global_scale = zip(*stored, strict=True)
    if dtype == torch.float64:
        return [dequantize_ref(*each, fmt, dtype) for each in stored]
    if len({each is None for each in global_scale}) > 1:
        return [dequantize_triton(*each, fmt, dtype) for each in stored]
    out = [each.new_empty((*each.shape[:-1], 2 * each.shape[-1]), dtype=dtype) for each in packed]
    words = tuple(map(packed_words, packed))
    counts = tuple(each.numel() for each in words)
    *starts, programs = itertools.accumulate((kit.cdiv(n, _WORDS) for n in counts), initial=0)
    if programs:
        _dequantize[(programs,)](
            *(words, tuple(each.contiguous() for each in scale)),
            *(None if global_scale[0] is None else global_scale, tuple(out), counts, tuple(starts)),
            FMT=fmt, WORDS=_WORDS, num_warps=2, **kit.launch(out[0].device),
        )  # fmt: skip
    return out


def packed_words(packed: Tensor) -> Tensor:
    """Return packed codes [..., K / 2] as contiguous int32 words of eight; copied if need be."""
    return kit.wider(packed, torch.int32)


@triton.jit
def signed_value(word, i, ELEMENT: tl.constexpr):
    """Return the float32 value of the i-th code in int32 words."""
    code = word >> (4 * i)
    return kit.float_of(kit.bits_of(kit.code_value(code & 7, ELEMENT)) | ((code & 8) << 28))


@triton.jit
def _dequantize(
    words, scales, global_scales, outs, counts, starts, FMT: tl.constexpr, WORDS: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    kit.wait(OVERLAP, RELEASES)
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    program = tl.program_id(0)
    words, scales = kit.chosen(words, starts, program), kit.chosen(scales, starts, program)
    out, count = kit.chosen(outs, starts, program), kit.chosen(counts, starts, program)
    start = (program - kit.chosen(starts, starts, program)).to(tl.int64) * WORDS
    lane = tl.arange(0, WORDS)
    inside = lane < count - start
    word = tl.load(words + start + lane, mask=inside, other=0)
    block = (start + lane) // (FMT.block // 8)
    step = kit.decode_scale(tl.load(scales + block, mask=inside, other=0), SCALE)
    if global_scales is not None:
        number = tl.load(kit.chosen(global_scales, starts, program))
        if FMT.multiplies:
            step = step * number
        else:
            step = tl.math.div_rn(step, number)
    v = ()
    for i in tl.static_range(8):
        v = v + (kit.rounded(signed_value(word, i, ELEMENT) * step, out.dtype.element_ty),)
    # The first join is the highest digit of the column.
    even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
    odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    column = tl.arange(0, 8 * WORDS)
    values = tl.reshape(tl.join(even, odd), (8 * WORDS,))
    tl.store(out + start * 8 + column, values, mask=column < (count - start) * 8)


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
        _dequantize_e4m3[(codes.numel() // columns, kit.cdiv(columns, _COLUMNS))](
            codes.contiguous(), scales.contiguous(), values,
            K=columns, FMT=fmt, TALL=tall, COLUMNS=_COLUMNS,
            num_warps=4, **kit.launch(out.device),
        )  # fmt: skip
    return out


@triton.jit
def _dequantize_e4m3(
    codes, scales, out,
    K: tl.constexpr, FMT: tl.constexpr, TALL: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """TALL: rows that share a scale, WHOLE for all."""
    kit.wait(OVERLAP, RELEASES)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < K
    code = tl.load(codes + row * K + column, mask=inside, other=0)
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), kit.value_of(code))
    first = row * 0 if TALL == _WHOLE else row // TALL
    if FMT.block == _WHOLE:
        step = tl.load(scales + first)
    else:
        SCALES: tl.constexpr = (K + FMT.block - 1) // FMT.block
        at = scales + first * SCALES + column // FMT.block
        step = tl.load(at, mask=inside, other=0)
    if not FMT.has_float_scale:
        step = kit.power_of_byte(step)
    tl.store(out + row * K + column, kit.rounded(value * step, out.dtype.element_ty), mask=inside)
