"""The scale of least squared error among a few near the naive one.

On the inputs of trained layers these few win 84 % of what the best of all scales does (nvfp4; with
powers of two all of it): docs/quality.md has the measurements.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..common.tiles import (
    PTX,
    UNCLIPPED,
    bits_of,
    float_of,
    min_exponent,
    pack_half,
    power,
    shift,
    unpack_block,
    unpack_half,
)
from ..search.tiles import normalization, squared_error
from .word_tiles import fma_pairs, min_pairs, mul_pairs, pair, split_words, twice


@triton.constexpr_function
def candidates(SCALE):
    """Return how many candidates there are."""
    # The naive one, which maps amax to the largest element; the one below it; and, of scales with
    # mantissas, the one that maps amax to the second largest, where the next element is nearer.
    return 2 if SCALE.mantissa_bits == 0 else 3


@triton.constexpr_function
def step_down(ELEMENT):
    """Return the largest element over the second largest."""
    return ELEMENT.magnitudes[-1] / ELEMENT.magnitudes[-2]


@triton.jit
def candidate_byte(byte, quotient, FMT: tl.constexpr, i: tl.constexpr):
    """Return the byte of a candidate, which may be 0 if there is none."""
    # quotient: amax over the largest element and the global scale.
    SCALE: tl.constexpr = FMT.scale
    if i == 1:
        byte -= 1
    elif i == 2:
        # Its fields rounded, ties away; below the normal scales that is less than the naive byte.
        drop: tl.constexpr = 23 - SCALE.mantissa_bits
        rounded = (bits_of(quotient * step_down(FMT.element)) + (1 << (drop - 1))) >> drop
        rounded -= (127 - SCALE.bias) << SCALE.mantissa_bits
        byte = tl.minimum(tl.maximum(rounded, byte), SCALE.last)
    return byte


@triton.jit
def competes(byte, quotient, SCALE: tl.constexpr, i: tl.constexpr):
    """Return whether a candidate may win."""
    # Of scales with mantissas, the one below naive may only if amax still rounds to the largest
    # element, so that no error needs clipped quotients.
    allowed = byte > 0
    if i == 1 and SCALE.mantissa_bits > 0:
        allowed = quotient < fields(byte, SCALE) * (power(127 - SCALE.bias) * UNCLIPPED)
    return allowed


@triton.jit
def near_byte(words, amax, byte, quotient, global_scale, DTYPE: tl.constexpr, FMT: tl.constexpr):
    """Return the byte (int32) of least squared error near `byte`, which is naive and wins a tie."""
    # words: a block per lane, with its amax, finite, and the quotient that `byte` rounds
    # (`input_byte`). Errors of bfloat16 are summed in bfloat16.
    SCALE: tl.constexpr = FMT.scale
    if DTYPE == tl.bfloat16:
        x, unit = normalize_pairs(words, amax, global_scale, FMT)
    else:
        first, second = normalization(amax, global_scale, -4)
        unit = global_scale * first * second
        x = [tl.abs(value) * first * second for value in unpack_block(words, DTYPE)]
    # Bytes at their place in a float32 are scales but for this.
    unit *= power(127 - SCALE.bias)
    best = byte
    for i in tl.static_range(candidates(SCALE)):
        candidate = candidate_byte(byte, quotient, FMT, i)
        step = fields(candidate, SCALE) * unit
        if DTYPE == tl.bfloat16:
            error = squared_error_of_pairs(x, step, FMT)
        else:
            error = squared_error(x, step, FMT, False, SCALE.mantissa_bits == 0)
        if i == 0:
            least = error
        else:
            better = (error < least) & competes(candidate, quotient, SCALE, i)
            least = tl.where(better, error, least)
            best = tl.where(better, candidate, best)
    return best


@triton.jit
def fields(byte, SCALE: tl.constexpr):
    """Return the float32 with the exponent and mantissa of scale bytes."""
    return float_of(byte << (23 - SCALE.mantissa_bits))


@triton.jit
def normalize_pairs(words, amax, global_scale, FMT: tl.constexpr):
    """Return magnitudes of blocks as pairs, times a power of two, and what matches scales to it."""
    # No scale tried is above 1 then; beyond a global scale of 2^117 no error is finite, naive wins.
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
    """Return the least exponent that no scale reaches."""
    return math.frexp(SCALE.max)[1]


@triton.jit
def squared_error_of_pairs(x, scale, FMT: tl.constexpr):
    """Return the squared error of blocks x >= 0, a tuple of pairs, at scales (search/tiles.py)."""
    # Only powers of two may be so small that quotients are clipped.
    ELEMENT: tl.constexpr = FMT.element
    if FMT.scale.mantissa_bits == 0:
        scale = tl.minimum(tl.maximum(scale, power(-100)), 1.0)
        limit = scale * ELEMENT.max
        limit = pack_half(limit, limit, tl.bfloat16)
    # So scaled, the smallest normal element is the smallest normal number.
    step = scale * power(126 + min_exponent(ELEMENT))
    negative = negative_reciprocal(step)
    negative, back = pack_half(negative, negative, tl.bfloat16), pack_half(step, step, tl.bfloat16)
    place: tl.constexpr = shift(ELEMENT) - 16
    sums = (tl.zeros_like(back), tl.zeros_like(back))
    for i in tl.static_range(len(x)):
        inside = min_pairs(x[i], limit) if FMT.scale.mantissa_bits == 0 else x[i]
        element = (mul_pairs(inside, negative) + twice(1 << (place - 1))) & twice(-(1 << place))
        residual = fma_pairs(element, back, x[i])
        sums = (sums[1], fma_pairs(residual, residual, sums[0]))
    even, odd = unpack_half(fma_pairs(sums[0], pair(1.0), sums[1]), tl.bfloat16)
    return even + odd


@triton.jit
def negative_reciprocal(x):
    """Return -1 / x of normal float32 x, to 2^-23: one instruction, unlike a subtraction."""
    if PTX:
        inverse = tl.inline_asm_elementwise(
            "{ .reg .f32 t; neg.f32 t, $1; rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        inverse = -1.0 / x
    return inverse
