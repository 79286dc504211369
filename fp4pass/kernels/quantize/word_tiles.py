"""Floats in integer words: pairs of bfloat16 in an int32 (PTX: bf16x2), values in int64 words.

`codes_of_pairs` makes codes of blocks of bfloat16, two at a time, without a division.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..common.tiles import (
    PTX,
    bits_of,
    float_of,
    pack_half,
    power,
    reciprocal,
    sign_bit,
    unpack_half,
    unpack_word,
)

# Quotients are times 2^-_LIFT, so that slopes times 2^-133 are bfloat16 (round_pair).
_LIFT = tl.constexpr(4)


@triton.constexpr_function
def pair(value):
    """Return the int32 with bfloat16 `value`, which is one, in both halves."""
    mantissa, exponent = math.frexp(abs(value))
    if exponent > -126:
        bits = round(math.ldexp(mantissa, 8)) + ((exponent + 125) << 7) if value else 0
    else:
        bits = round(math.ldexp(mantissa, exponent + 133))
    negative = math.copysign(1, value) < 0
    return bits * 0x10001 - (negative << 31) + (negative << 15)


@triton.constexpr_function
def twice(half):
    """Return the int32 with a 16-bit integer in both halves."""
    bits = (half & 0xFFFF) * 0x10001
    return bits - (1 << 32) if bits >> 31 else bits


@triton.jit
def split_words(words):
    """Return the int32 halves of int64 words, in order, a tuple."""
    halves = ()
    for i in tl.static_range(len(words)):
        halves = halves + (words[i].to(tl.int32), (words[i] >> 32).to(tl.int32))
    return halves


@triton.jit
def high_pair(value):
    """Return the upper half of float32 values, which is bfloat16, in both halves of an int32."""
    return halves_of(bits_of(value), bits_of(value), 0x3232)


@triton.jit
def halves_of(a, b, BYTES: tl.constexpr):
    """Return four bytes of two int32, lowest first; BYTES: a digit each; b counts from 4."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,n",
        [a, b, BYTES],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def max_over_pair(largest, DTYPE: tl.constexpr):
    """Return the float bits of the larger half of a pair of bfloat16 >= 0; others as they are."""
    if PTX and DTYPE == tl.bfloat16:
        largest = tl.maximum(largest << 16, largest & -65536)
    return largest


@triton.jit
def max_pairs(a, b, OR_NAN: tl.constexpr):
    """Return the larger of two bfloat16 pairs; of NaN and a number, NaN if OR_NAN, else that."""
    PTX_CODE: tl.constexpr = "max.NaN.bf16x2 $0, $1, $2;" if OR_NAN else "max.bf16x2 $0, $1, $2;"
    return tl.inline_asm_elementwise(
        PTX_CODE, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


# The interpreter has no such instructions, and a call takes it milliseconds: hence no helpers.


@triton.jit
def min_pairs(a, b):
    """Return the smaller of two bfloat16 pairs, or what is not NaN. Interpreted: of pairs >= 0."""
    if PTX:
        smaller = tl.inline_asm_elementwise(
            "min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = tl.minimum(a & 0xFFFF, b & 0xFFFF)
        smaller = tl.minimum(a & -65536, b & -65536) | low
    return smaller


@triton.jit
def fma_pairs(a, b, c):
    """Return a * b + c of bfloat16 pairs, rounded once; by the interpreter to float32 first."""
    if PTX:
        sums = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        # b and c may be numbers.
        b, c = b + (a & 0), c + (a & 0)
        low = tl.fma(
            (a << 16).to(tl.float32, bitcast=True),
            (b << 16).to(tl.float32, bitcast=True),
            (c << 16).to(tl.float32, bitcast=True),
        ).to(tl.int32, bitcast=True)
        high = tl.fma(
            (a & -65536).to(tl.float32, bitcast=True),
            (b & -65536).to(tl.float32, bitcast=True),
            (c & -65536).to(tl.float32, bitcast=True),
        ).to(tl.int32, bitcast=True)
        low = (low + 0x7FFF + ((low >> 16) & 1)) >> 16
        high = (high + 0x7FFF + ((high >> 16) & 1)) & -65536
        sums = (low & 0xFFFF) | high
    return sums


@triton.jit
def mul_pairs(a, b):
    """Return a * b of bfloat16 pairs; sm_80 has it only as a fused addition."""
    return fma_pairs(a, b, pair(-0.0))


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
        slope = pair(line_slope(i, ELEMENT)) + zero
        code = min_pairs(code, fma_pairs(quotient, slope, twice(i << ELEMENT.minifloat[0])))
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


@triton.jit
def pack_pairs(codes):
    """Return the codes of four pairs in an int32."""
    first, last = codes[0] + (codes[1] << 8), codes[2] + (codes[3] << 8)
    # Codes of odd places are 12 bits above their place.
    return halves_of(first + (first >> 12), last + (last >> 12), 0x5410)
