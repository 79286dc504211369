"""Codes of blocks of bfloat16, two at a time, without a division."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..common.tiles import PTX, bits_of, float_of, power, reciprocal, sign_bit
from .word_tiles import (
    fma_pairs,
    high_pair,
    join_halves,
    low_halves,
    min_pairs,
    mul_pairs,
    pair,
    split_words,
    twice,
)

# Quotients are times 2^-_LIFT, so that slopes times 2^-133 are bfloat16 (round_pair).
_LIFT = tl.constexpr(4)


@triton.constexpr_function
def pairs_are_exact(DTYPE, FMT):
    """Return whether `codes_of_pairs` gives the codes of IEEE division, for global scales 2^k."""
    # x and a tie times its step are both numbers of 8 bits, so that a quotient that is no tie is
    # more than half of bfloat16's last bit away from one: rounding it to bfloat16 makes none. That
    # holds for the ties of elements with one mantissa bit times scales of at most four bits.
    short = FMT.element.minifloat[0] == 1 and FMT.scale.mantissa_bits <= 3
    return bool(PTX.value) and DTYPE == tl.bfloat16 and short


@triton.jit
def serves_pairs(global_scale):
    """Return whether a global scale is a power of two whose steps are none of the extremes."""
    bits = bits_of(global_scale)
    return (bits > (63 << 23)) & (bits < (191 << 23)) & ((bits & 0x7FFFFF) == 0)


@triton.jit
def codes_of_pairs(words, step, global_scale, FMT: tl.constexpr):
    """Return the codes of a block of bfloat16, packed in int64 words."""
    if FMT.scale.mantissa_bits == 0:
        inverse, rest = high_pair(float_of(0x7F000000 - bits_of(step)) * power(-_LIFT.value)), None
    else:
        # In two parts, so that the product is right to far more than its 8 bits.
        exact = reciprocal(step * power(_LIFT.value))
        inverse = high_pair(exact)
        rest = high_pair(exact - float_of(bits_of(exact) & -65536))
    zero = sign_bit(global_scale)
    codes = [round_pair(each, inverse, rest, zero, FMT) for each in split_words(words)]
    packed = ()
    for i in tl.static_range(0, len(codes), 8):
        low, high = pack_pairs(codes[i : i + 4]), pack_pairs(codes[i + 4 : i + 8])
        packed = packed + (join_halves(low, high),)
    return packed


@triton.jit
def round_pair(x, inverse, rest, zero, FMT: tl.constexpr):
    """Return the codes of a pair, in the lowest bits of its halves."""
    # inverse, rest: two parts of 2^-_LIFT over the step. Within a binade the code is a line in the
    # quotient, rounded, ties to even, and overall the least of these lines. To round is what a
    # multiplication does whose result is subnormal: an integer times 2^-133.
    # zero: not known to be, or constants would be moved to a register for each of their uses.
    magnitude = x & 0x7FFF7FFF
    if rest is None:
        quotient = mul_pairs(magnitude, inverse)
    else:
        quotient = fma_pairs(magnitude, inverse, mul_pairs(magnitude, rest))
    ELEMENT: tl.constexpr = FMT.element
    code = twice(len(ELEMENT.magnitudes) - 1)
    for i in tl.static_range(binades(ELEMENT)):
        line = fma_pairs(quotient, pair(line_slope(i, ELEMENT)) + zero, line_start(i, ELEMENT))
        code = min_pairs(code, line)
    return code | ((x >> 12) & 0x00080008)


@triton.constexpr_function
def binades(ELEMENT):
    """Return how many binades there are of normal elements."""
    return max(1, (len(ELEMENT.magnitudes) - 2) >> ELEMENT.minifloat[0])


@triton.constexpr_function
def line_slope(i, ELEMENT):
    """Return the codes in a binade, as subnormal numbers, over quotients times 2^-_LIFT."""
    mantissa_bits, exponent = ELEMENT.minifloat
    return math.ldexp(1.0, _LIFT.value - 133 - (exponent + i - mantissa_bits))


@triton.constexpr_function
def line_start(i, ELEMENT):
    """Return what the line of the codes in a binade is at 0: a pair of integers."""
    return twice(i << ELEMENT.minifloat[0])


@triton.jit
def pack_pairs(codes):
    """Return the codes of four pairs in an int32."""
    first, last = codes[0] + (codes[1] << 8), codes[2] + (codes[3] << 8)
    # Codes of odd places are 12 bits above their place.
    return low_halves(first + (first >> 12), last + (last >> 12))
