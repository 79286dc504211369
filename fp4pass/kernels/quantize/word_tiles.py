"""Float32 values into the int64 words that tensors of 16-bit floats or float32 are stored as."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import PTX, bits_of, pack_half, unpack_half, unpack_word
from .bf16x2_tiles import mul_pairs


@triton.jit
def join_halves(low, high):
    """Return an int64 word of two int32."""
    return low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def pack_word(values, DTYPE: tl.constexpr):
    """Return float32 values, a tuple of four or two, rounded to DTYPE, in an int64 word."""
    if DTYPE == tl.float32:
        word = join_halves(bits_of(values[0]), bits_of(values[1]))
    else:
        low = pack_half(values[0], values[1], DTYPE)
        word = join_halves(low, pack_half(values[2], values[3], DTYPE))
    return word


@triton.jit
def scale_half(a, b, weights, DTYPE: tl.constexpr):
    """Return two float32, rounded to 16 bits, times two 16-bit floats in an int32: the same."""
    pair = pack_half(a, b, DTYPE)
    if PTX and DTYPE == tl.bfloat16:
        pair = mul_pairs(pair, weights)
    else:
        x, weight = unpack_half(pair, DTYPE), unpack_half(weights, DTYPE)
        pair = pack_half(x[0] * weight[0], x[1] * weight[1], DTYPE)
    return pair


@triton.jit
def scale_word(values, factors, DTYPE: tl.constexpr):
    """Return float32 values, rounded to DTYPE, times those of an int64 word, rounded again."""
    if DTYPE == tl.float32:
        factor = unpack_word(factors, DTYPE)
        word = pack_word((values[0] * factor[0], values[1] * factor[1]), DTYPE)
    else:
        low = scale_half(values[0], values[1], factors.to(tl.int32), DTYPE)
        high = scale_half(values[2], values[3], (factors >> 32).to(tl.int32), DTYPE)
        word = join_halves(low, high)
    return word
