"""Pieces of kernels for formats with E4M3 codes, which are decoded in integers."""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.formats import FP8_E4M3, WHOLE, Format
from .tiles import bits_of, float_of, octaves, power, round_to_codes

# The smallest scale (`float_scales.SMALLEST`).
_SMALLEST = tl.constexpr(2.0**-126)

# The fields of a code at their places in a float32: its sign, and the low ones of its exponent.
_FIELDS = tl.constexpr(0x87F00000 - (1 << 32))


def supports_e4m3(fmt: Format) -> bool:
    """Return whether these kernels know a format: by its properties, as `tiles.supports`."""
    # Scales are float32 numbers of rows, of tiles of 128 or of all, or powers of two of 32 or 16.
    if fmt.element != FP8_E4M3:
        return False
    if fmt.has_float_scale:
        return (fmt.rows, fmt.block) in ((1, WHOLE), (WHOLE, WHOLE), (128, 128))
    scale = fmt.scale
    powers = scale.mantissa_bits == 0 and scale.bias == 127 and not scale.subnormal
    return powers and fmt.rows == 1 and fmt.block in (16, 32)


@triton.jit
def value_at(word, i):
    """Return the float32 value of the i-th code in int32 words of four."""
    # Its low bits are those of a float32 whose bias is 120 less, subnormal ones included.
    if i < 3:
        word = word << (24 - 8 * i)
    return float_of((word >> 4) & _FIELDS) * power(120)


@triton.jit
def value_of(code):
    """Return the float32 value of codes in uint8."""
    return value_at(code.to(tl.int32), 0)


@triton.jit
def scale_of_amax(amax_bits, FMT: tl.constexpr):
    """Return the stored scales and the factors of codes, for the bits of amax.

    amax is a magnitude, its bits int32. Both results are NaN where it is not finite.
    """
    finite = amax_bits < 0x7F800000
    amax = float_of(tl.where(finite, amax_bits, 0))
    if FMT.has_float_scale:
        step = tl.maximum(tl.math.div_rn(amax, FMT.element.max), _SMALLEST)
        step = tl.where(finite, step, float("nan"))
        stored = step
    else:
        carried = (bits_of(amax) + FMT.element.carry) >> 23
        byte = tl.minimum(tl.maximum(carried - octaves(FMT.element), 1), FMT.scale.last)
        step = tl.where(finite, float_of(byte << 23), float("nan"))
        stored = tl.where(finite, byte, FMT.scale.nan).to(tl.uint8)
    return stored, step


@triton.jit
def codes_of(x, step, ELEMENT: tl.constexpr):
    """Return the codes uint8 of float32 x at steps that broadcast to it; 0 where those are NaN."""
    known = step == step
    quotient = tl.math.div_rn(tl.where(known, x, 0.0), tl.where(known, step, 1.0))
    sign = tl.where(known, (bits_of(x) >> 24) & 0x80, 0)
    return (round_to_codes(quotient, ELEMENT) | sign).to(tl.uint8)


@triton.jit
def power_of_byte(byte):
    """Return the float32 value of E8M0 bytes: 2^(byte - 127), NaN for 255."""
    bits = byte.to(tl.int32) << 23
    value = float_of(tl.maximum(bits, 1 << 22))
    return tl.where(byte.to(tl.int32) == 255, float("nan"), value)
