"""Packed codes and scale bits back to numbers, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format
from .dequantize_ref import dequantize_ref
from .tiles import LAUNCH, bits_of, cdiv, code_value, decode_scale, float_of, rounded

# Words of eight codes in a program.
_WORDS = 256


def dequantize_triton(
    packed: Tensor, scale: Tensor, global_divisor: Tensor | None, fmt: Format, dtype: torch.dtype
) -> Tensor:
    """code * (scale / global_divisor), in float32 and then rounded to `dtype`.

    packed: [..., K / 2] uint8; scale: bits [..., K / block] uint8; global_divisor: [1] or None.
    Returns [..., K], the bits of dequantize_ref, which serves float64.
    """
    if dtype == torch.float64:
        return dequantize_ref(packed, scale, global_divisor, fmt, dtype)
    out = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)
    words = packed_words(packed)
    if count := words.numel():
        _dequantize[(cdiv(count, _WORDS),)](
            words,
            scale.contiguous(),
            global_divisor,
            out,
            count,
            FMT=fmt,
            WORDS=_WORDS,
            num_warps=2,
            **LAUNCH,
        )
    return out


def packed_words(packed: Tensor) -> Tensor:
    """Packed codes [..., K / 2] as contiguous int32 words of eight codes; copied if need be."""
    packed = packed.contiguous()
    if packed.data_ptr() % 4:
        packed = packed.clone()
    return packed.view(torch.int32)


@triton.jit
def signed_value(word, i, ELEMENT: tl.constexpr):
    """The float32 value of the i-th code in int32 words."""
    code = word >> (4 * i)
    return float_of(bits_of(code_value(code & 7, ELEMENT)) | ((code & 8) << 28))


@triton.jit
def _dequantize(words, scales, divisor, out, count, FMT: tl.constexpr, WORDS: tl.constexpr):
    SCALE: tl.constexpr = FMT.scale
    ELEMENT: tl.constexpr = FMT.element
    start = tl.program_id(0).to(tl.int64) * WORDS
    lane = tl.arange(0, WORDS)
    inside = lane < count - start
    word = tl.load(words + start + lane, mask=inside, other=0)
    block = (start + lane) // (FMT.block // 8)
    step = decode_scale(tl.load(scales + block, mask=inside, other=0), SCALE)
    if divisor is not None:
        number = tl.load(divisor)
        step = tl.where(number < 0, step * -number, tl.math.div_rn(step, number))
    v = ()
    for i in tl.static_range(8):
        v = v + (rounded(signed_value(word, i, ELEMENT) * step, out.dtype.element_ty),)
    # The first join is the highest digit of the column.
    even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
    odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    column = tl.arange(0, 8 * WORDS)
    values = tl.reshape(tl.join(even, odd), (8 * WORDS,))
    tl.store(out + start * 8 + column, values, mask=column < (count - start) * 8)
