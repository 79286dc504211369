"""Floats in integer words: pairs of bfloat16 in an int32 (PTX: bf16x2), values in int64 words."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..common.tiles import PTX, bits_of, pack_half, unpack_half, unpack_word


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
def low_halves(low, high):
    """Return the lower halves of two int32 in one."""
    return halves_of(low, high, 0x5410)


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
def max_or_nan_pairs(a, b):
    """Return the larger of two bfloat16 pairs; NaN if either is."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def max_over_pair(largest, DTYPE: tl.constexpr):
    """Return the float bits of the larger half of a pair of bfloat16 >= 0; others as they are."""
    if PTX and DTYPE == tl.bfloat16:
        largest = tl.maximum(largest << 16, largest & -65536)
    return largest


@triton.jit
def max_pairs(a, b):
    """Return the larger of two bfloat16 pairs, or what is not NaN."""
    return tl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
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
