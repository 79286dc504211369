"""Pieces of the search kernels: scale bounds, residuals, codes, and r^T H r by tensor cores."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ..common.tiles import (
    bits_of,
    code_value,
    float_of,
    min_exponent,
    power,
    reciprocal,
    round_to_codes,
    scale_value,
    shift,
)

# Relative slack on every bound: far above float32 rounding, far below the step between scales.
SLACK = tl.constexpr(1e-5)


def needs_division(weight: Tensor, global_scale: float) -> bool:
    """Return whether quotients need a true division: else they are ties or far from ties."""
    return weight.dtype.itemsize > 2 or math.frexp(global_scale)[0] != 0.5


@triton.constexpr_function
def octave_start(ELEMENT):
    """Return s / amax where the first octave of scales begins, just above 1 / halving_reach."""
    return (1 + 1e-5) / ELEMENT.halving_reach


@triton.constexpr_function
def top_code(ELEMENT):
    """Return the code of the largest magnitude."""
    return len(ELEMENT.magnitudes) - 1


@triton.constexpr_function
def clipping(SCALE):
    """Return 2^60 times the largest scale, or None if no float32 is larger."""
    found = math.ldexp(SCALE.max, 60)
    return found if found < 2.0**127 else None


@triton.constexpr_function
def zero_exponent(ELEMENT):
    """Return the largest k for which all |x| < 2^(k + 1) round to zero at a scale of 1."""
    return math.frexp(ELEMENT.dead_zone)[1] - 2


@triton.jit
def floor_byte(value, SCALE: tl.constexpr):
    """Return the byte (int32) of the largest scale <= value; 0 if there is none."""
    drop: tl.constexpr = 23 - SCALE.mantissa_bits
    byte = (bits_of(value) >> drop) - ((127 - SCALE.bias) << SCALE.mantissa_bits)
    if SCALE.subnormal:
        least: tl.constexpr = power(1 - SCALE.bias)
        steps = (tl.minimum(value, least) * power(SCALE.bias - 1 + SCALE.mantissa_bits)).to(
            tl.int32
        )
        byte = tl.where(value < least, steps, byte)
    return tl.minimum(tl.maximum(byte, 0), SCALE.last)


@triton.jit
def normalization(amax, global_scale, EXPONENT: tl.constexpr):
    """Return two powers of two whose product brings amax to [2^EXPONENT, 2^(EXPONENT + 1))."""
    # The product alone may be beyond float32. Scales of the format are multiplied by it too.
    exponent = tl.minimum(tl.maximum((bits_of(amax) >> 23) - 127, -126), 127)
    half = exponent >> 1
    first = float_of((127 - half) << 23)
    second = float_of((127 + EXPONENT - (exponent - half)) << 23)
    return first, second


@triton.jit
def code_scale(byte, unit, SCALE: tl.constexpr):
    """Return the scales of bytes in the units of normalized blocks, within [2^-100, 1]."""
    # Below 2^-100 all elements saturate and above 1 all round to zero, as they would anyway.
    return tl.minimum(tl.maximum(scale_value(byte, SCALE) * unit, power(-100)), 1.0)


@triton.jit
def sum_of_squares(r, CHAINS: tl.constexpr):
    """Return the sum of squares of a tuple: CHAINS chains of fused additions, then a tree."""
    sums = ()
    for k in tl.static_range(CHAINS):
        total = r[k] * r[k]
        for i in tl.static_range(k + CHAINS, len(r), CHAINS):
            total = tl.fma(r[i], r[i], total)
        sums = sums + (total,)
    for _ in tl.static_range(4):
        if len(sums) > 1:
            level = ()
            for i in tl.static_range(len(sums) // 2):
                level = level + (sums[i] + sums[len(sums) // 2 + i],)
            sums = level
    return sums[0]


@triton.jit
def squared_error(x, scale, FMT: tl.constexpr, DIVIDES: tl.constexpr, CLIPS: tl.constexpr):
    """Return the squared error of blocks x, a tuple of tensors, at scales like one of them."""
    # x is so small that a scale of 1 rounds all of it to zero (`zero_exponent`), as larger ones do.
    # CLIPS: whether quotients beyond halving_reach may round to more than the largest element.
    scale = tl.minimum(tl.maximum(scale, power(-100)), 1.0)
    ELEMENT: tl.constexpr = FMT.element
    r = ()
    if DIVIDES:
        for i in tl.static_range(len(x)):
            code = round_to_codes(tl.math.div_rn(x[i], scale), ELEMENT)
            r = r + (tl.fma(code_value(code, ELEMENT), -scale, tl.abs(x[i])),)
    else:
        # So scaled, the smallest normal element is the smallest normal float.
        inverse = reciprocal(scale) * power(-126 - min_exponent(ELEMENT))
        back = scale * -power(126 + min_exponent(ELEMENT))
        place: tl.constexpr = shift(ELEMENT)
        top: tl.constexpr = ELEMENT.max * power(-126 - min_exponent(ELEMENT))
        for i in tl.static_range(len(x)):
            y = x[i] * inverse
            if CLIPS:
                y = tl.minimum(tl.maximum(y, -top), top)
            bits = (bits_of(y) + (1 << (place - 1))) & -(1 << place)
            r = r + (tl.fma(float_of(bits), back, x[i]),)
    return sum_of_squares(r, len(x) * len(x) // 64)


@triton.jit
def nearby_codes(x, inverse, ELEMENT: tl.constexpr):
    """Return the codes (int32, no sign) of |x| by products with 2^(-126 - min_exponent) / scale."""
    # A quotient within 2^-14 of a tie is one: quotients of 16-bit floats by scales either are ties
    # or are 2^-12 away, and the error of the reciprocal is 2^-22.
    place: tl.constexpr = shift(ELEMENT)
    half: tl.constexpr = 1 << (place - 1)
    bits = bits_of(tl.abs(x) * inverse)
    odd = (bits >> (place - 9)) & 0x200
    return tl.minimum((bits + (half - 0x100) + odd) >> place, top_code(ELEMENT))


@triton.jit
def codes_at(x, y, scale, ELEMENT: tl.constexpr, DIVIDES: tl.constexpr):
    """Return the codes (int32) of x, whose quotients are y / scale."""
    SIGN: tl.constexpr = 1 << (ELEMENT.bits - 1)
    if DIVIDES:
        code = round_to_codes(tl.math.div_rn(y, scale), ELEMENT)
    else:
        inverse = reciprocal(scale) * power(-126 - min_exponent(ELEMENT))
        code = nearby_codes(y, inverse, ELEMENT)
    return code | ((bits_of(x) >> (32 - ELEMENT.bits)) & SIGN)


@triton.jit
def pack_words(codes):
    """Return the 4-bit codes (int32) of a block, a tuple, as int64 words of sixteen."""
    words = ()
    for start in tl.static_range(0, len(codes), 16):
        low = codes[start]
        high = codes[start + 8]
        for i in tl.static_range(1, 8):
            low = low | (codes[start + i] << (4 * i))
            high = high | (codes[start + 8 + i] << (4 * i))
        words = words + ((high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF),)
    return words
