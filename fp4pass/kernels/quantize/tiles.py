"""Blocks of activations to scale bytes and packed codes: a lane takes a block.

Codes are those of IEEE division, which nothing here does per element: quotients are corrected
products, and for bfloat16 and global scales 2^k products alone (`codes_of_pairs`).

`near_byte` takes the scale of least squared error among a few near the naive one. On the inputs of
trained layers these win 84 % of what the best of all scales does (nvfp4; with powers of two all of
it): docs/quality.md has the measurements.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..common import tiles as kit
from ..search.triton import normalization, squared_error


@triton.jit
def load_global_scale(stored, FMT: tl.constexpr):
    """Return the multiplier of a stored global scale, or 1 where there is none: a scalar."""
    if stored is None:
        global_scale = tl.full((), 1.0, tl.float32)
    else:
        global_scale = kit.global_multiplier(stored, FMT)
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
    amax = kit.float_of(tl.where(finite, bits, 0))
    byte, quotient, vanishes = input_byte(amax, global_scale, FMT)
    if SEARCHES:
        byte = near_byte(words, amax, byte, quotient, global_scale, DTYPE, FMT)
        vanishes = ~finite
    else:
        vanishes = vanishes | ~finite
    step = kit.scale_value(byte, SCALE) * global_scale
    if pairs_are_exact(DTYPE, FMT):
        # Whether the global scale is a power of two whose steps are none of the extremes.
        g = kit.bits_of(global_scale)
        if (g > (63 << 23)) & (g < (191 << 23)) & ((g & 0x7FFFFF) == 0):
            codes = codes_of_pairs(words, step, global_scale, FMT)
        else:
            codes = codes_of_values(kit.unpack_block(words, DTYPE), step, global_scale, FMT)
    else:
        codes = codes_of_values(kit.unpack_block(words, DTYPE), step, global_scale, FMT)
    kept = [tl.where(vanishes, 0, word) for word in codes]
    return tl.where(finite, byte, SCALE.nan), kept


@triton.jit
def input_byte(amax, global_scale, FMT: tl.constexpr):
    """Return the naive scale byte (int32) of inputs of finite amax, and its quotient."""
    # Besides the byte: the quotient that it rounds (amax itself for powers of two), and whether
    # that rounds to zero.
    SCALE: tl.constexpr = FMT.scale
    if SCALE.mantissa_bits > 0:
        quotient = tl.math.div_rn(amax, global_scale * FMT.element.max)
        byte = kit.round_to_scale(quotient, SCALE)
        vanishes = byte == 0
        byte = tl.maximum(byte, 1)
    else:
        quotient = amax
        byte = kit.naive_byte(
            kit.float_of(kit.bits_of(amax) + FMT.element.carry), global_scale, FMT
        )
        vanishes = byte == 0
    return byte, quotient, vanishes


@triton.jit
def largest_bits(words, DTYPE: tl.constexpr):
    """Return the float bits (int32) of a block's largest magnitude; above infinity's for NaN."""
    if kit.PTX and DTYPE == tl.bfloat16:
        pairs = split_words(words)
        largest = pairs[0] & 0x7FFF7FFF
        for i in tl.static_range(1, len(pairs)):
            largest = max_pairs(largest, pairs[i] & 0x7FFF7FFF, True)
        largest = max_over_pair(largest, DTYPE)
    else:
        largest = kit.tree_max(
            [kit.bits_of(value) & 0x7FFFFFFF for value in kit.unpack_block(words, DTYPE)]
        )
    return largest


@triton.jit
def codes_of_values(values, step, global_scale, FMT: tl.constexpr):
    """Return the codes of a block's float32 values, packed in int64 words."""
    if kit.PTX:
        # A power of two that brings steps, and x near them, to the middle of the normal numbers.
        exponent = (kit.bits_of(global_scale) >> 23) - 127
        centre = kit.float_of((127 - tl.minimum(tl.maximum(exponent, -100), 100)) << 23)
        step = step * centre
        inverse = tl.math.div_rn(1.0, step)
        # Beyond twice the largest element everything saturates; quotients near a tie must stay
        # normal floats.
        BOUND: tl.constexpr = 2 * FMT.element.max
        quotients = [
            kit.corrected_quotient(tl.minimum(tl.abs(x) * centre, step * BOUND), step, inverse)
            for x in values
        ]
    else:
        quotients = [tl.math.div_rn(x, step) for x in values]
    packed = ()
    for first in tl.static_range(0, len(values), 16):
        low = tl.zeros_like(kit.bits_of(step))
        high = low
        for i in tl.static_range(8):
            low |= signed_code(values[first + i], quotients[first + i], FMT) << (4 * i)
            high |= signed_code(values[first + 8 + i], quotients[first + 8 + i], FMT) << (4 * i)
        packed = packed + (join_halves(low, high),)
    return packed


@triton.jit
def signed_code(x, quotient, FMT: tl.constexpr):
    """Return the code of a quotient's magnitude with the sign of x."""
    ELEMENT: tl.constexpr = FMT.element
    return ((kit.bits_of(x) >> 28) & 8) | kit.round_to_codes(quotient, ELEMENT)


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
        rounded = (kit.bits_of(quotient * step_down(FMT.element)) + (1 << (drop - 1))) >> drop
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
        allowed = quotient < fields(byte, SCALE) * (kit.power(127 - SCALE.bias) * kit.UNCLIPPED)
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
        x = [tl.abs(value) * first * second for value in kit.unpack_block(words, DTYPE)]
    # Bytes at their place in a float32 are scales but for this.
    unit *= kit.power(127 - SCALE.bias)
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
    return kit.float_of(byte << (23 - SCALE.mantissa_bits))


@triton.jit
def normalize_pairs(words, amax, global_scale, FMT: tl.constexpr):
    """Return magnitudes of blocks as pairs, times a power of two, and what matches scales to it."""
    # No scale tried is above 1 then; beyond a global scale of 2^117 no error is finite, naive wins.
    if FMT.scale.mantissa_bits > 0:
        exponent = (kit.bits_of(global_scale) >> 23) - 127
        first = kit.float_of((127 - tl.minimum(exponent + (kit.octaves(FMT.scale) + 1), 126)) << 23)
        unit = global_scale * first
        factor = kit.pack_half(first, first, tl.bfloat16)
        x = [mul_pairs(each & 0x7FFF7FFF, factor) for each in split_words(words)]
    else:
        first, second = normalization(amax, global_scale, -4)
        unit = global_scale * first * second
        a, b = kit.pack_half(first, first, tl.bfloat16), kit.pack_half(second, second, tl.bfloat16)
        x = [mul_pairs(mul_pairs(each & 0x7FFF7FFF, a), b) for each in split_words(words)]
    return x, unit


@triton.jit
def squared_error_of_pairs(x, scale, FMT: tl.constexpr):
    """Return the squared error of blocks x >= 0, a tuple of pairs, at scales (search/triton.py)."""
    # Only powers of two may be so small that quotients are clipped.
    ELEMENT: tl.constexpr = FMT.element
    if FMT.scale.mantissa_bits == 0:
        scale = tl.minimum(tl.maximum(scale, kit.power(-100)), 1.0)
        limit = scale * ELEMENT.max
        limit = kit.pack_half(limit, limit, tl.bfloat16)
    # So scaled, the smallest normal element is the smallest normal number.
    step = scale * kit.power(126 + kit.min_exponent(ELEMENT))
    negative = negative_reciprocal(step)
    negative, back = (
        kit.pack_half(negative, negative, tl.bfloat16),
        kit.pack_half(step, step, tl.bfloat16),
    )
    place: tl.constexpr = kit.shift(ELEMENT) - 16
    sums = (tl.zeros_like(back), tl.zeros_like(back))
    for i in tl.static_range(len(x)):
        inside = min_pairs(x[i], limit) if FMT.scale.mantissa_bits == 0 else x[i]
        element = (mul_pairs(inside, negative) + twice(1 << (place - 1))) & twice(-(1 << place))
        residual = fma_pairs(element, back, x[i])
        sums = (sums[1], fma_pairs(residual, residual, sums[0]))
    even, odd = kit.unpack_half(fma_pairs(sums[0], pair(1.0), sums[1]), tl.bfloat16)
    return even + odd


@triton.jit
def negative_reciprocal(x):
    """Return -1 / x of normal float32 x, to 2^-23: one instruction, unlike a subtraction."""
    if kit.PTX:
        code: tl.constexpr = "{ .reg .f32 t; neg.f32 t, $1; rcp.approx.ftz.f32 $0, t; }"
        inverse = kit.asm(code, "=f,f", [x], tl.float32)
    else:
        inverse = -1.0 / x
    return inverse


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
    return halves_of(kit.bits_of(value), kit.bits_of(value), 0x3232)


@triton.jit
def halves_of(a, b, BYTES: tl.constexpr):
    """Return four bytes of two int32, lowest first; BYTES: a digit each; b counts from 4."""
    return kit.asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", [a, b, BYTES])


@triton.jit
def max_over_pair(largest, DTYPE: tl.constexpr):
    """Return the float bits of the larger half of a pair of bfloat16 >= 0; others as they are."""
    if kit.PTX and DTYPE == tl.bfloat16:
        largest = tl.maximum(largest << 16, largest & -65536)
    return largest


@triton.jit
def max_pairs(a, b, OR_NAN: tl.constexpr):
    """Return the larger of two bfloat16 pairs; of NaN and a number, NaN if OR_NAN, else that."""
    code: tl.constexpr = "max.NaN.bf16x2 $0, $1, $2;" if OR_NAN else "max.bf16x2 $0, $1, $2;"
    return kit.asm(code, "=r,r,r", [a, b])


# The interpreter has no such instructions, and a call takes it milliseconds: hence no helpers.


@triton.jit
def min_pairs(a, b):
    """Return the smaller of two bfloat16 pairs, or what is not NaN. Interpreted: of pairs >= 0."""
    if kit.PTX:
        smaller = kit.asm("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b])
    else:
        low = tl.minimum(a & 0xFFFF, b & 0xFFFF)
        smaller = tl.minimum(a & -65536, b & -65536) | low
    return smaller


@triton.jit
def fma_pairs(a, b, c):
    """Return a * b + c of bfloat16 pairs, rounded once; by the interpreter to float32 first."""
    if kit.PTX:
        sums = kit.asm("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c])
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
        word = join_halves(kit.bits_of(values[0]), kit.bits_of(values[1]))
    else:
        low = kit.pack_half(values[0], values[1], DTYPE)
        word = join_halves(low, kit.pack_half(values[2], values[3], DTYPE))
    return word


@triton.jit
def scale_half(a, b, weights, DTYPE: tl.constexpr):
    """Return two float32, rounded to 16 bits, times two 16-bit floats in an int32: the same."""
    pair = kit.pack_half(a, b, DTYPE)
    if kit.PTX and DTYPE == tl.bfloat16:
        pair = mul_pairs(pair, weights)
    else:
        x, weight = kit.unpack_half(pair, DTYPE), kit.unpack_half(weights, DTYPE)
        pair = kit.pack_half(x[0] * weight[0], x[1] * weight[1], DTYPE)
    return pair


@triton.jit
def scale_word(values, factors, DTYPE: tl.constexpr):
    """Return float32 values, rounded to DTYPE, times those of an int64 word, rounded again."""
    if DTYPE == tl.float32:
        factor = kit.unpack_word(factors, DTYPE)
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
    return bool(kit.PTX.value) and DTYPE == tl.bfloat16 and short


@triton.jit
def codes_of_pairs(words, step, global_scale, FMT: tl.constexpr):
    """Return the codes of a block of bfloat16, packed in int64 words."""
    if FMT.scale.mantissa_bits == 0:
        inverse, rest = (
            high_pair(kit.float_of(0x7F000000 - kit.bits_of(step)) * kit.power(-_LIFT.value)),
            None,
        )
    else:
        # In two parts, so that the product is right to far more than its 8 bits.
        exact = kit.reciprocal(step * kit.power(_LIFT.value))
        inverse = high_pair(exact)
        rest = high_pair(exact - kit.float_of(kit.bits_of(exact) & -65536))
    # Zero, which the compiler does not know.
    zero = kit.asm("shr.u32 $0, $1, 31;", "=r,r", [kit.bits_of(global_scale)])
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
