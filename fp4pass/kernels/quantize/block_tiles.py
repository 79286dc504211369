"""Blocks of activations to scale bytes and packed codes: a lane takes a block.

Codes are those of IEEE division, which nothing here does per element: quotients are corrected
products, and for bfloat16 and global scales 2^k products alone (pair_code_tiles.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    PTX,
    bits_of,
    corrected_quotient,
    float_of,
    global_multiplier,
    naive_byte,
    round_to_codes,
    round_to_scale,
    scale_value,
    tree_max,
    unpack_block,
)
from .pair_code_tiles import codes_of_pairs, pairs_are_exact, serves_pairs
from .scale_search_tiles import near_byte
from .word_tiles import join_halves, max_or_nan_pairs, max_over_pair, split_words


@triton.jit
def load_global_scale(stored, FMT: tl.constexpr):
    """Return the multiplier of a stored global scale, or 1 where there is none: a scalar."""
    if stored is None:
        global_scale = tl.full((), 1.0, tl.float32)
    else:
        global_scale = global_multiplier(stored, FMT)
    return global_scale


@triton.constexpr_function
def word_count(block, DTYPE):
    """Return how many int64 words a block of elements is."""
    return block * DTYPE.primitive_bitwidth // 64


@triton.jit
def store_block(packed, scale, block, mask, byte, codes):
    """Store the scale byte and the words of codes of one block per lane."""
    for i in tl.static_range(len(codes)):
        tl.store(packed + block * len(codes) + i, codes[i], mask=mask)
    tl.store(scale + block, byte.to(tl.uint8), mask=mask)


@triton.jit
def quantize_block(
    words, global_scale, DTYPE: tl.constexpr, FMT: tl.constexpr, SEARCHES: tl.constexpr
):
    """Return the scale byte (int32) and packed codes (int64) of one block of words per lane."""
    # SEARCHES: whether the scale is that of least squared error near the naive one.
    SCALE: tl.constexpr = FMT.scale
    bits = largest_bits(words, DTYPE)
    finite = bits < 0x7F800000
    amax = float_of(tl.where(finite, bits, 0))
    byte, quotient, vanishes = input_byte(amax, global_scale, FMT)
    if SEARCHES:
        byte = near_byte(words, amax, byte, quotient, global_scale, DTYPE, FMT)
        vanishes = ~finite
    else:
        vanishes = vanishes | ~finite
    step = scale_value(byte, SCALE) * global_scale
    if pairs_are_exact(DTYPE, FMT):
        if serves_pairs(global_scale):
            codes = codes_of_pairs(words, step, global_scale, FMT)
        else:
            codes = codes_of_values(unpack_block(words, DTYPE), step, global_scale, FMT)
    else:
        codes = codes_of_values(unpack_block(words, DTYPE), step, global_scale, FMT)
    kept = [tl.where(vanishes, 0, word) for word in codes]
    return tl.where(finite, byte, SCALE.nan), kept


@triton.jit
def input_byte(amax, global_scale, FMT: tl.constexpr):
    """Return the naive scale byte (int32) of inputs of finite amax, and how it came about."""
    # What it was rounded from (amax itself for powers of two), and whether that rounds to zero.
    SCALE: tl.constexpr = FMT.scale
    if SCALE.mantissa_bits > 0:
        quotient = tl.math.div_rn(amax, global_scale * FMT.element.max)
        byte = round_to_scale(quotient, SCALE)
        vanishes = byte == 0
        byte = tl.maximum(byte, 1)
    else:
        quotient = amax
        byte = naive_byte(float_of(bits_of(amax) + FMT.element.carry), global_scale, FMT)
        vanishes = byte == 0
    return byte, quotient, vanishes


@triton.jit
def largest_bits(words, DTYPE: tl.constexpr):
    """Return the float bits (int32) of a block's largest magnitude; above infinity's for NaN."""
    if PTX and DTYPE == tl.bfloat16:
        pairs = split_words(words)
        largest = pairs[0] & 0x7FFF7FFF
        for i in tl.static_range(1, len(pairs)):
            largest = max_or_nan_pairs(largest, pairs[i] & 0x7FFF7FFF)
        largest = max_over_pair(largest, DTYPE)
    else:
        largest = tree_max([bits_of(value) & 0x7FFFFFFF for value in unpack_block(words, DTYPE)])
    return largest


@triton.jit
def codes_of_values(values, step, global_scale, FMT: tl.constexpr):
    """Return the codes of a block's float32 values, packed in int64 words."""
    if PTX:
        # A power of two that brings steps, and x near them, to the middle of the normal numbers.
        exponent = (bits_of(global_scale) >> 23) - 127
        centre = float_of((127 - tl.minimum(tl.maximum(exponent, -100), 100)) << 23)
        step = step * centre
        inverse = tl.math.div_rn(1.0, step)
        quotients = [divide(tl.abs(x) * centre, step, inverse, FMT) for x in values]
    else:
        quotients = [tl.math.div_rn(x, step) for x in values]
    packed = ()
    for first in tl.static_range(0, len(values), 16):
        low = tl.zeros_like(bits_of(step))
        high = low
        for i in tl.static_range(8):
            low |= signed_code(values[first + i], quotients[first + i], FMT) << (4 * i)
            high |= signed_code(values[first + 8 + i], quotients[first + 8 + i], FMT) << (4 * i)
        packed = packed + (join_halves(low, high),)
    return packed


@triton.jit
def divide(x, step, inverse, FMT: tl.constexpr):
    """Return x / step as IEEE division rounds it, for 0 <= x up to where everything saturates."""
    # inverse: 1 / step, rounded. Quotients near a tie must stay normal floats.
    return corrected_quotient(tl.minimum(x, step * (2 * FMT.element.max)), step, inverse)


@triton.jit
def signed_code(x, quotient, FMT: tl.constexpr):
    """Return the code of a quotient's magnitude with the sign of x."""
    ELEMENT: tl.constexpr = FMT.element
    return ((bits_of(x) >> 28) & 8) | round_to_codes(quotient, ELEMENT)
