"""The scale of least squared error among a few near the naive one.

On the inputs of trained layers these few win 91 % of what the best of all scales does (nvfp4; with
powers of two all of it): docs/quality.md has the measurements.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .pair_tiles import fma_pairs, min_pairs, mul_pairs, pair, split_words, twice
from .search_tiles import normalization, squared_error
from .tiles import (
    bits_of,
    float_of,
    min_exponent,
    pack_half,
    power,
    reciprocal,
    scale_value,
    shift,
    unpack_block,
    unpack_half,
)


@triton.constexpr_function
def offsets(SCALE):
    """How far the bytes of the candidates lie from the naive one, ascending.

    Naive scales map amax to 6, the largest E2M1. With three mantissa bits 4 or 5 steps above, amax
    is about 4, and the next element below it is nearer.
    """
    return {0: (-1, 0), 3: (-1, 0, 4, 5)}[SCALE.mantissa_bits]


@triton.constexpr_function
def candidates(SCALE):
    """How many there are."""
    return len(offsets(SCALE))


@triton.constexpr_function
def offset(SCALE, i):
    """The distance of a candidate."""
    return offsets(SCALE)[i]


@triton.constexpr_function
def clips(SCALE, i):
    """Whether amax may be beyond the largest element at a candidate."""
    return offsets(SCALE)[i] <= 0


@triton.jit
def near_byte(words, amax, byte, global_scale, DTYPE: tl.constexpr, FMT: tl.constexpr):
    """The byte (int32) of least squared error near `byte`, which is naive; of equal ones the least.

    words: a block per lane, and its amax, finite. Errors of bfloat16 are summed in bfloat16.
    """
    SCALE: tl.constexpr = FMT.scale
    if DTYPE == tl.bfloat16:
        x, unit = normalize_pairs(words, amax, global_scale, FMT)
    else:
        first, second = normalization(amax, global_scale, -4)
        unit = global_scale * first * second
        x = [tl.abs(value) * first * second for value in unpack_block(words, DTYPE)]
    least = tl.full(amax.shape, float("inf"), tl.float32)
    best = byte
    for i in tl.static_range(candidates(SCALE)):
        candidate = tl.minimum(tl.maximum(byte + offset(SCALE, i), 1), SCALE.last)
        step = scale_value(candidate, SCALE) * unit
        if DTYPE == tl.bfloat16:
            error = squared_error_of_pairs(x, step, FMT, clips(SCALE, i))
        else:
            error = squared_error(x, step, FMT, False, clips(SCALE, i))
        better = error < least
        least = tl.where(better, error, least)
        best = tl.where(better, candidate, best)
    return best


@triton.jit
def normalize_pairs(words, amax, global_scale, FMT: tl.constexpr):
    """The magnitudes of blocks as pairs, times a power of two, and what scales are multiplied by.

    Afterwards no scale that is tried is above 1, unless the global scale is beyond 2^117: then no
    error is finite, and the scale stays naive.
    """
    if FMT.scale.mantissa_bits > 0:
        exponent = (bits_of(global_scale) >> 23) - 127
        first = float_of((127 - tl.minimum(exponent + octaves_of(FMT.scale), 126)) << 23)
        unit = global_scale * first
        factor = pack_half(first, first, tl.bfloat16)
        x = [mul_pairs(each & 0x7FFF7FFF, factor) for each in split_words(words)]
    else:
        first, second = normalization(amax, global_scale, -4)
        unit = global_scale * first * second
        a, b = pack_half(first, first, tl.bfloat16), pack_half(second, second, tl.bfloat16)
        x = [mul_pairs(mul_pairs(each & 0x7FFF7FFF, a), b) for each in split_words(words)]
    return x, unit


@triton.constexpr_function
def octaves_of(SCALE):
    """The least exponent that no scale reaches."""
    return math.frexp(SCALE.max)[1]


@triton.jit
def squared_error_of_pairs(x, scale, FMT: tl.constexpr, CLIPS: tl.constexpr):
    """The squared error of blocks x >= 0, a tuple of pairs, at scales (search_tiles.py)."""
    ELEMENT: tl.constexpr = FMT.element
    if FMT.scale.mantissa_bits == 0:
        scale = tl.minimum(tl.maximum(scale, power(-100)), 1.0)
    inverse = reciprocal(scale) * power(-126 - min_exponent(ELEMENT))
    inverse = pack_half(inverse, inverse, tl.bfloat16)
    back = scale * -power(126 + min_exponent(ELEMENT))
    back = pack_half(back, back, tl.bfloat16)
    place: tl.constexpr = shift(ELEMENT) - 16
    sums = (tl.zeros_like(inverse), tl.zeros_like(inverse))
    for i in tl.static_range(len(x)):
        quotient = mul_pairs(x[i], inverse)
        if CLIPS:
            top = pair(ELEMENT.max * power(-126 - min_exponent(ELEMENT)))
            quotient = min_pairs(quotient, top)
        element = (quotient + twice(1 << (place - 1))) & twice(-(1 << place))
        residual = fma_pairs(element, back, x[i])
        sums = (sums[1], fma_pairs(residual, residual, sums[0]))
    even, odd = unpack_half(sums[0], tl.bfloat16), unpack_half(sums[1], tl.bfloat16)
    return (even[0] + even[1]) + (odd[0] + odd[1])
