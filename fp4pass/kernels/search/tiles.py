"""Pieces of the search kernels: scale bounds, residuals, codes, and r^T H r by tensor cores."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.formats import Format
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
def nudge(bits, ELEMENT: tl.constexpr):
    """Round scaled quotients (int32 bits) so that the bits from `shift` on are the code's."""
    # A quotient within 2^-14 of a tie is one: quotients of 16-bit floats by scales either are ties
    # or are 2^-12 away, and the error of the reciprocal is 2^-22.
    place: tl.constexpr = shift(ELEMENT)
    half: tl.constexpr = 1 << (place - 1)
    odd = (bits >> (place - 9)) & 0x200
    return bits + (half - 0x100) + odd


@triton.jit
def nearby_codes(x, inverse, ELEMENT: tl.constexpr):
    """Return the codes (int32, no sign) of |x| by products with 2^(-126 - min_exponent) / scale."""
    code = nudge(bits_of(tl.abs(x) * inverse), ELEMENT) >> shift(ELEMENT)
    return tl.minimum(code, top_code(ELEMENT))


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


def packs_pairs(dtype: torch.dtype, fmt: Format) -> bool:
    """Return whether residuals are float16 numbers, and float16 quotients decide every tie."""
    # docs/kernels.md proves it for bfloat16 weights, the elements of E2M1, and mantissas of E4M3.
    element = fmt.element
    proved = element.minifloat == (1, 0) and element.max == 6.0 and fmt.scale.mantissa_bits <= 3
    return dtype == torch.bfloat16 and proved


@triton.constexpr_function
def residual_ptx(ELEMENT, CLIPS):
    """Return the PTX of x - s RTN(x / s) for two float16, given x, 2^-14 / s and -2^14 s."""
    # The quotient is scaled so that the smallest normal element is the smallest normal number: bits
    # from `place` on are its code. Its error is less than an ulp and downward, so that half a code
    # less 1 decides ties of even codes, half a code and 1 those of odd. Residuals have 11 bits.
    place = 10 - ELEMENT.minifloat[0]
    top = top_code(ELEMENT) << place
    half = (1 << (place - 1)) - 1
    clip = "min.f16x2 y, y, top; max.f16x2 y, y, bottom;" if CLIPS else ""
    return f"""{{
        .reg .b32 y, odd, top, bottom;
        mov.b32 top, 0x{_twice(top)};
        mov.b32 bottom, 0x{_twice(0x8000 | top)};
        mul.rn.f16x2 y, $1, $2;
        {clip}
        shr.u32 odd, y, {place - 1};
        and.b32 odd, odd, 0x00020002;
        add.u32 y, y, 0x{_twice(half)};
        add.u32 y, y, odd;
        and.b32 y, y, 0x{_twice(-(1 << place) & 0xFFFF)};
        fma.rn.f16x2 $0, y, $3, $1;
    }}"""


@triton.constexpr_function
def _twice(bits):
    """Return the hexadecimal digits of a 16-bit number in both halves of a register."""
    return 2 * f"{bits:04X}"


@triton.jit
def metric_error(
    x,
    scale,
    factor,
    ELEMENT: tl.constexpr,
    DIVIDES: tl.constexpr,
    PACKS: tl.constexpr,
    CLIPS: tl.constexpr,
):
    """Return r^T (H + e I) r of blocks x float32 [R, N] at scales [R]."""
    # x is normalized so that a scale of 1 rounds all of it to zero. factor: the high and the low
    # part of L, L L^T = H + e I. PACKS: whether x and r are float16 numbers.
    scale = tl.minimum(scale, 1.0)
    if PACKS:
        inverse = (reciprocal(scale) * power(-14 - min_exponent(ELEMENT))).to(tl.float16)
        back = (scale * -power(14 + min_exponent(ELEMENT))).to(tl.float16)
        r = tl.inline_asm_elementwise(
            residual_ptx(ELEMENT, CLIPS),
            "=r,r,r,r",
            [x.to(tl.float16), inverse[:, None], back[:, None]],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
        z = tl.dot(r, factor[0])
        z = tl.dot(r, factor[1], z)
    else:
        scale = tl.maximum(scale, power(-100))
        if DIVIDES:
            code = round_to_codes(tl.math.div_rn(x, scale[:, None]), ELEMENT)
        else:
            inverse = reciprocal(scale) * power(-126 - min_exponent(ELEMENT))
            code = nearby_codes(x, inverse[:, None], ELEMENT)
        r = tl.fma(code_value(code, ELEMENT), -scale[:, None], tl.abs(x))
        r = tl.where(x < 0, -r, r)
        first = r.to(tl.float16)
        second = ((r - first.to(tl.float32)) * power(12)).to(tl.float16)
        z = tl.dot(first, factor[0])
        z = tl.dot(first, factor[1], z)
        z = tl.fma(tl.dot(second, factor[0]), power(-12), z)
    return tl.sum(z * z, axis=1)


@triton.jit
def through_dot(x, N: tl.constexpr, PARTS: tl.constexpr):
    """Return x float32 [R, N] < 1 in the layout of a product, which the search never leaves."""
    i = tl.arange(0, N)
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float16)
    y = tl.zeros_like(x)
    for part in tl.static_range(PARTS):
        half = (x * power(12 * part)).to(tl.float16)
        y = tl.fma(tl.dot(half, identity), power(-12 * part), y)
        x = x - half.to(tl.float32) * power(-12 * part)
    return y
