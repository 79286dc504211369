"""Activations to packed codes and scale bits: a lane takes a block, whose elements are scalars.

x is read as int64 words. Codes are those of IEEE division, which nothing here does per element:
quotients are corrected products, and for bfloat16 and global scales 2^k products alone.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
from ..common.tiles import (
    DTYPES,
    LAUNCH,
    PTX,
    as_words,
    bits_of,
    cdiv,
    corrected_quotient,
    float_of,
    global_multiplier,
    load_block,
    naive_byte,
    overlapping,
    pack_half,
    power,
    reciprocal,
    round_to_codes,
    round_to_scale,
    scale_value,
    sign_bit,
    tree_max,
    unpack_block,
    unpack_half,
    unpack_word,
    wait,
)
from .near_tiles import near_byte
from .pair_tiles import (
    fma_pairs,
    high_pair,
    low_halves,
    max_or_nan_pairs,
    max_pairs,
    min_pairs,
    mul_pairs,
    pair,
    split_words,
    twice,
)

# A program is two warps; a lane reads so many bytes of blocks. Measured on an H200.
_LANES, _WARPS, _LANE_BYTES = 64, 2, 64

# Quotients are times 2^-_LIFT, so that slopes times 2^-133 are bfloat16 (round_pair).
_LIFT = tl.constexpr(4)

# Words that a lane reads at a time for the amax, and programs: enough to fill any GPU.
_AMAX_LANES, _AMAX_WORDS, _AMAX_PROGRAMS = 256, 8, 1056


def quantize_triton(
    x: Tensor, global_scale: Tensor | None, fmt: Format, scales: str = "naive"
) -> tuple[Tensor, Tensor]:
    """Quantize `x` in blocks along its last dimension (quantize_ref.py): the same bits.

    Scales of least squared error are the best of a few near the naive ones (near_tiles.py).
    """
    packed = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    scale = x.new_empty((*x.shape[:-1], x.shape[-1] // fmt.block), dtype=torch.uint8)
    if blocks := scale.numel():
        words = as_words(x)
        tiles = max(1, _LANE_BYTES * blocks // (8 * words.numel()))
        _quantize_kernel[(cdiv(blocks, _LANES * tiles),)](
            words,
            global_scale,
            packed.view(torch.int64),
            scale,
            blocks,
            DTYPE=DTYPES.get(x.dtype, tl.float32),
            FMT=fmt,
            SEARCHES=scales == "sse",
            LANES=_LANES,
            TILES=tiles,
            num_warps=_WARPS,
            **LAUNCH,
            **overlapping(x.device, False),
        )
    return packed, scale


def dynamic_global_scale_triton(x: Tensor, fmt: Format) -> Tensor:
    """The global scale for the amax of the finite values of `x` (reference.py): [1] float32."""
    words = as_words(x) if x.numel() else x.new_empty(0, dtype=torch.int64)
    stored = x.new_empty(1, dtype=torch.float32)
    programs = cdiv(words.numel(), _AMAX_LANES * _AMAX_WORDS)
    programs = min(max(programs, 1), _AMAX_PROGRAMS)
    _dynamic_global_scale_kernel[(programs,)](
        words,
        x.new_zeros(2, dtype=torch.int32),
        stored,
        words.numel(),
        DTYPE=DTYPES.get(x.dtype, tl.float32),
        FMT=fmt,
        LANES=_AMAX_LANES,
        WORDS=_AMAX_WORDS,
        num_warps=8,
        **LAUNCH,
    )
    return stored


@triton.jit(do_not_specialize=["blocks"])
def _quantize_kernel(
    words,
    stored,
    packed,
    scale,
    blocks,
    DTYPE: tl.constexpr,
    FMT: tl.constexpr,
    SEARCHES: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
    RELEASES: tl.constexpr,
):
    wait(OVERLAP, RELEASES)
    global_scale = load_global_scale(stored, FMT)
    # Backwards: what a pass over x for its amax read last is still in the cache.
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    first = program * (TILES * LANES) + tl.arange(0, LANES)
    # All loads go out before the first store, which they may not pass.
    tiles = ()
    for i in tl.static_range(TILES):
        block = first + i * LANES
        tiles = tiles + (load_block(words, block, block < blocks, word_count(FMT.block, DTYPE)),)
    for i in tl.static_range(TILES):
        block = first + i * LANES
        byte, codes = quantize_block(tiles[i], global_scale, DTYPE, FMT, SEARCHES)
        store_block(packed, scale, block, block < blocks, byte, codes)


@triton.jit(do_not_specialize=["count"])
def _dynamic_global_scale_kernel(
    words,
    state,
    stored,
    count,
    DTYPE: tl.constexpr,
    FMT: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """state: int32 [2], zeroed: the bits of the amax so far, and how many programs are done."""
    programs = tl.num_programs(0)
    lane = tl.arange(0, LANES)
    start = tl.program_id(0).to(tl.int64) * (LANES * WORDS)
    largest = tl.zeros((LANES,), tl.int32)
    while start < count:
        at = ()
        for i in tl.static_range(WORDS):
            index = start + i * LANES + lane
            at = at + (tl.load(words + index, mask=index < count, other=0),)
        for i in tl.static_range(WORDS):
            largest = max_finite(largest, at[i], DTYPE)
        start += programs.to(tl.int64) * (LANES * WORDS)
    tl.atomic_max(state, tl.max(max_over_pair(largest, DTYPE), axis=0))
    if tl.atomic_add(state + 1, 1) == programs - 1:
        tl.store(stored, stored_global_scale(tl.atomic_max(state, 0), FMT))


@triton.jit
def stored_global_scale(bits, FMT: tl.constexpr):
    """The global scale for the float bits of a finite amax >= 0, as it is stored."""
    exponent = (bits >> 23) - 126
    above = ((bits & 0x7FFFFF) > full_mantissa(FMT)).to(tl.int32)
    k = tl.minimum(tl.maximum(exponent - full_exponent(FMT) + above, -126), 126)
    if not FMT.multiplies:
        k = -k
    return tl.where(bits == 0, 1.0, float_of((127 + k) << 23))


@triton.constexpr_function
def full_exponent(FMT):
    """The exponent, as frexp has it, of the largest value at a global scale of 1."""
    return math.frexp(FMT.scale.max * FMT.element.max)[1]


@triton.constexpr_function
def full_mantissa(FMT):
    """The mantissa bits, as float32 has them, of the largest value at a global scale of 1."""
    return round((math.frexp(FMT.scale.max * FMT.element.max)[0] * 2 - 1) * 2**23)


@triton.constexpr_function
def word_count(block, DTYPE):
    """How many int64 words a block of elements is."""
    return block * DTYPE.primitive_bitwidth // 64


@triton.jit
def max_finite(largest, word, DTYPE: tl.constexpr):
    """The larger of `largest` and the float bits of what is finite in a word.

    For bfloat16 both halves of `largest` hold a maximum of their own (max_over_pair).
    """
    if PTX and DTYPE == tl.bfloat16:
        for half in tl.static_range(2):
            magnitude = (word >> (32 * half)).to(tl.int32) & 0x7FFF7FFF
            # x + 0 x is NaN where x is not finite, and the maximum ignores NaN.
            largest = max_pairs(largest, fma_pairs(magnitude, 0, magnitude))
    else:
        values = unpack_word(word, DTYPE)
        for i in tl.static_range(len(values)):
            # What is not finite becomes negative.
            bits = (bits_of(values[i]) & 0x7FFFFFFF) + 0x800000
            largest = tl.maximum(largest, bits - tl.where(bits < 0, 0, 0x800000))
    return largest


@triton.jit
def max_over_pair(largest, DTYPE: tl.constexpr):
    """The float bits of the larger half of a pair of bfloat16 >= 0; other bits as they are."""
    if PTX and DTYPE == tl.bfloat16:
        largest = tl.maximum(largest << 16, largest & -65536)
    return largest


@triton.jit
def load_global_scale(stored, FMT: tl.constexpr):
    """The global scale of a stored one, or 1 where there is none: a float32 scalar."""
    if stored is None:
        global_scale = tl.full((), 1.0, tl.float32)
    else:
        global_scale = global_multiplier(stored, FMT)
    return global_scale


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
    """The scale byte (int32) and the packed codes (int64 words) of one block of words per lane.

    SEARCHES: whether the scale is that of least squared error near the naive one.
    """
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
    """The naive scale byte (int32) of inputs of finite amax, what it was rounded from (amax itself
    for powers of two), and whether that rounds to zero (quantize_ref.py)."""
    SCALE: tl.constexpr = FMT.scale
    if SCALE.mantissa_bits > 0:
        quotient = tl.math.div_rn(amax, global_scale * FMT.element.max)
        byte = round_to_scale(quotient, SCALE)
        vanishes = byte == 0
        byte = tl.maximum(byte, 1)
    else:
        quotient = amax
        byte = naive_byte(float_of(bits_of(amax) + 0x200000), global_scale, FMT)
        vanishes = byte == 0
    return byte, quotient, vanishes


@triton.jit
def largest_bits(words, DTYPE: tl.constexpr):
    """The float bits (int32) of a block's largest magnitude; above those of infinity for NaN."""
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
    """The codes of a block's float32 values, packed in int64 words."""
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
    """x / step as IEEE division rounds it, for 0 <= x up to where everything saturates.

    inverse: 1 / step, rounded. Nothing that is not far from a tie may leave the normal numbers.
    """
    return corrected_quotient(tl.minimum(x, step * (2 * FMT.element.max)), step, inverse)


@triton.jit
def signed_code(x, quotient, FMT: tl.constexpr):
    """The code of a quotient's magnitude with the sign of x."""
    ELEMENT: tl.constexpr = FMT.element
    return ((bits_of(x) >> 28) & 8) | round_to_codes(quotient, ELEMENT)


@triton.jit
def join_halves(low, high):
    """An int64 word of two int32."""
    return low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def pack_word(values, DTYPE: tl.constexpr):
    """Float32 values, a tuple of four or two, rounded to DTYPE, in an int64 word."""
    if DTYPE == tl.float32:
        word = join_halves(bits_of(values[0]), bits_of(values[1]))
    else:
        low = pack_half(values[0], values[1], DTYPE)
        word = join_halves(low, pack_half(values[2], values[3], DTYPE))
    return word


@triton.constexpr_function
def pairs_are_exact(DTYPE, FMT):
    """Whether `codes_of_pairs` gives the codes of IEEE division, for global scales 2^k.

    x and a tie times its step are both numbers of 8 bits, so that a quotient that is no tie is
    more than half of bfloat16's last bit away from one: rounding it to bfloat16 makes none. That
    holds for the ties of elements with one mantissa bit times scales of at most four bits.
    """
    short = FMT.element.minifloat[0] == 1 and FMT.scale.mantissa_bits <= 3
    return bool(PTX.value) and DTYPE == tl.bfloat16 and short


@triton.jit
def serves_pairs(global_scale):
    """Whether it is a power of two, and none of its steps and their reciprocals are extreme."""
    bits = bits_of(global_scale)
    return (bits > (63 << 23)) & (bits < (191 << 23)) & ((bits & 0x7FFFFF) == 0)


@triton.jit
def codes_of_pairs(words, step, global_scale, FMT: tl.constexpr):
    """The codes of a block of bfloat16, packed in int64 words."""
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
    """The codes of a pair, in the lowest bits of its halves.

    inverse, rest: two parts of 2^-_LIFT over the step. Within a binade the code is a line in the
    quotient, rounded, ties to even, and overall the least of these lines. To round is what a
    multiplication does whose result is subnormal: an integer times 2^-133.
    zero: not known to be, or constants would be moved to a register for each of their uses.
    """
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
    """How many there are, of the normal elements."""
    return max(1, (len(ELEMENT.magnitudes) - 2) >> ELEMENT.minifloat[0])


@triton.constexpr_function
def line_slope(i, ELEMENT):
    """Of the codes in a binade as subnormal numbers, over quotients times 2^-_LIFT."""
    mantissa_bits, exponent = ELEMENT.minifloat
    return math.ldexp(1.0, _LIFT.value - 133 - (exponent + i - mantissa_bits))


@triton.constexpr_function
def line_start(i, ELEMENT):
    """What the line of the codes in a binade is at 0: a pair of integers."""
    return twice(i << ELEMENT.minifloat[0])


@triton.jit
def pack_pairs(codes):
    """The codes of four pairs in an int32."""
    first, last = codes[0] + (codes[1] << 8), codes[2] + (codes[3] << 8)
    # Codes of odd places are 12 bits above their place.
    return low_halves(first + (first >> 12), last + (last >> 12))


@triton.jit
def scale_half(a, b, weights, DTYPE: tl.constexpr):
    """Two float32, rounded to 16 bits, times two 16-bit floats in an int32: the same."""
    pair = pack_half(a, b, DTYPE)
    if PTX and DTYPE == tl.bfloat16:
        pair = mul_pairs(pair, weights)
    else:
        x, weight = unpack_half(pair, DTYPE), unpack_half(weights, DTYPE)
        pair = pack_half(x[0] * weight[0], x[1] * weight[1], DTYPE)
    return pair


@triton.jit
def scale_word(values, factors, DTYPE: tl.constexpr):
    """Float32 values, rounded to DTYPE, times those of an int64 word: the same, rounded again."""
    if DTYPE == tl.float32:
        factor = unpack_word(factors, DTYPE)
        word = pack_word((values[0] * factor[0], values[1] * factor[1]), DTYPE)
    else:
        low = scale_half(values[0], values[1], factors.to(tl.int32), DTYPE)
        high = scale_half(values[2], values[3], (factors >> 32).to(tl.int32), DTYPE)
        word = join_halves(low, high)
    return word
