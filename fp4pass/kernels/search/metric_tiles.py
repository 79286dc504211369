"""r^T H r of blocks by tensor cores: residuals as float16, in pairs where that is exact."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...core.formats import Format
from ..common.tiles import code_value, min_exponent, power, reciprocal, round_to_codes
from .tiles import nearby_codes, top_code


def packs_pairs(dtype: torch.dtype, fmt: Format) -> bool:
    """Return whether residuals are float16 numbers, and float16 quotients decide every tie."""
    # docs/kernels.md proves it for bfloat16 weights, elements that are 0, 0.5, 1, 1.5, 2, 3, ... up
    # to 6, and scales with the mantissas of E4M3.
    element = fmt.element
    proved = element.minifloat == (1, 0) and element.max == 6.0 and fmt.scale.mantissa_bits <= 3
    return dtype == torch.bfloat16 and proved


@triton.constexpr_function
def residual_ptx(ELEMENT, CLIPS):
    """Return the PTX of x - s RTN(x / s) for two float16, given x, 2^-14 / s and -2^14 s."""
    # The quotient is scaled so that the smallest normal element is the smallest normal number; the
    # bits from `place` on are then its code. Its error is less than an ulp and downward, so that
    # half a code less 1 decides ties of even codes, and half a code and 1 those of odd ones. The
    # residual is exact: it has 11 bits.
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
