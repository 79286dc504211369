"""Round numbers and codes to E4M3 in registers."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ...core.formats import E4M3
from ..common.tiles import PTX, bits_of, power, round_to_scale
from ..dequantize.triton import signed_value

_E4M3 = tl.constexpr(E4M3)

# In `decode_e4m3`: eight times four bytes, four words, four float16.
_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 6))


@triton.constexpr_function
def e4m3_assembly(FMT):
    """Return PTX for `decode_e4m3`: four words of eight codes, and a float16 step for each."""
    # The magnitude of a code of two words stands where a float16 has its low exponent and high
    # mantissa bits: its value times 2^-(14 + min_exponent), subnormals included.
    mantissa_bits, min_exponent = FMT.element.minifloat
    place = 10 - mantissa_bits
    magnitudes = ((1 << FMT.element.bits - 1) - 1 << place) * 0x10001
    grow = (15 + 14 + min_exponent << 10) * 0x10001
    lines = ["{.reg .b32 t, two, u, b<4>, l<2>, h<2>;", ".reg .b16 v<16>;"]
    lines.append(f"mov.b32 two, {grow:#x};")
    for pair in range(2):
        words, step = (f"${8 + 2 * pair}, ${9 + 2 * pair}", f"${12 + pair}")
        for half, selector in enumerate(("0x5410", "0x7632")):
            lines.append(f"prmt.b32 t, {words}, {selector};")
            for code in range(4):
                by = place - 4 * code
                shift = f"shl.b32 u, t, {by};" if by > 0 else f"shr.u32 u, t, {-by};"
                lines += [
                    shift,
                    f"and.b32 u, u, {magnitudes:#x};",
                    "mul.rn.f16x2 u, u, two;",
                    f"mul.rn.f16x2 u, u, {step};",
                    f"cvt.rn.satfinite.e4m3x2.f16x2 v{8 * pair + 4 * half + code}, u;",
                ]
    # Byte b of the four words, whose signs follow the magnitudes.
    lines += [
        "prmt.b32 l0, $8, $9, 0x5140;",
        "prmt.b32 l1, $10, $11, 0x5140;",
        "prmt.b32 h0, $8, $9, 0x7362;",
        "prmt.b32 h1, $10, $11, 0x7362;",
    ]
    for byte in range(4):
        source = "l" if byte < 2 else "h"
        selector = "0x5410" if byte % 2 == 0 else "0x7632"
        lines.append(f"prmt.b32 b{byte}, {source}0, {source}1, {selector};")
    for code in range(8):
        lines += [
            f"mov.b32 ${code}, {{v{code}, v{8 + code}}};",
            f"shl.b32 u, b{code // 2}, 4;" if code % 2 == 0 else f"mov.b32 u, b{code // 2};",
            "and.b32 u, u, 0x80808080;",
            f"or.b32 ${code}, ${code}, u;",
        ]
    return "\n".join([*lines, "}"])


@triton.jit
def decode_e4m3(word, step, FMT: tl.constexpr):
    """Return the eight codes in int32 words times float32 steps, rounded to E4M3: bits, uint8."""
    # A product of code and step is exact in float16 unless E4M3 rounds it to zero.
    ELEMENT: tl.constexpr = FMT.element
    if PTX:
        bits = tl.inline_asm_elementwise(
            e4m3_assembly(FMT),
            _CONSTRAINTS,
            [word, step.to(tl.float16)],
            dtype=(tl.uint8,) * 8,
            is_pure=True,
            pack=4,
        )
    else:
        bits = ()
        for i in tl.static_range(8):
            bits = bits + (e4m3_bits(signed_value(word, i, ELEMENT) * step),)
    return bits


@triton.constexpr_function
def float16_bits(value):
    """Return the bits of a float16 that is zero or normal."""
    fraction, exponent = math.frexp(value)
    return (exponent + 14 << 10) + int(2048 * fraction) - 1024 if value else 0


@triton.constexpr_function
def table_assembly(FMT):
    """Return PTX for `decode_sixteen`: a word of sixteen codes and their float32 step."""
    lines = [
        "{.reg .b32 u, m, a, q, eights, s0, s1, w0, w1, step;",
        ".reg .b16 c<4>;",
        "mov.b32 eights, 0x80808080;",
        "mov.b64 {w0, w1}, $4;",
        "cvt.rn.f16x2.f32 step, $5, $5;",
    ]
    # A code without its sign selects the byte of s0 and s1 that its magnitude becomes.
    for i in range(4):
        low, high = FMT.element.magnitudes[2 * i : 2 * i + 2]
        lines += [
            f"mov.b32 u, {float16_bits(low) | float16_bits(high) << 16:#x};",
            "mul.rn.f16x2 u, u, step;",
            f"cvt.rn.satfinite.e4m3x2.f16x2 c{i}, u;",
        ]
    lines += ["mov.b32 s0, {c0, c1};", "mov.b32 s1, {c2, c3};"]
    for quarter in range(4):
        word = f"w{quarter // 2}"
        codes = word
        if quarter % 2:
            lines += [f"shr.u32 u, {word}, 16;", "shr.u32 m, m, 16;"]
            codes = "u"
        else:
            lines.append(f"and.b32 m, {word}, 0x77777777;")
        lines += [
            "prmt.b32 a, s0, s1, m;",
            # A code with a sign selects the sign of 0x80 eight times, others 0x80: shifted, a sign.
            f"prmt.b32 q, eights, eights, {codes};",
            "shl.b32 q, q, 1;",
            f"lop3.b32 ${quarter}, q, eights, a, 0xEA;",
        ]
    return "\n".join([*lines, "}"])


@triton.jit
def decode_sixteen(word, step, FMT: tl.constexpr):
    """Return the codes in int64 words times float32 steps as E4M3, in order: four int32."""
    # As in `decode_e4m3`, but each magnitude is rounded once for all codes of a word.
    ELEMENT: tl.constexpr = FMT.element
    if PTX:
        four = tl.inline_asm_elementwise(
            table_assembly(FMT),
            "=r,=r,=r,=r,l,f",
            [word, step],
            dtype=(tl.int32,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        four = ()
        for quarter in tl.static_range(4):
            value = tl.zeros_like(step).to(tl.int32)
            for i in tl.static_range(4):
                code = (word >> (16 * quarter + 4 * i)).to(tl.int32)
                bits = e4m3_bits(signed_value(code, 0, ELEMENT) * step)
                value |= bits.to(tl.int32) << (8 * i)
            four = four + (value,)
    return four


@triton.jit
def e4m3_bits(x):
    """Return float32 x, at most 448 in size or NaN, rounded to E4M3: its bits, uint8."""
    if PTX:
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # The interpreter's own conversion rounds ties away.
        magnitude = round_to_scale(tl.abs(x), _E4M3.value)
        bits = tl.where(x == x, magnitude | ((bits_of(x) >> 24) & 0x80), 0x7F).to(tl.uint8)
    return bits


@triton.jit
def operand(bits):
    """Return E4M3 numbers for their bits: float32 in the interpreter, which has no other."""
    if PTX:
        value = bits.to(tl.float8e4nv, bitcast=True)
    else:
        magnitude = bits.to(tl.int32) & 0x7F
        # The bits of a float32 of another bias.
        value = (magnitude << 20).to(tl.float32, bitcast=True) * power(120)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        value = tl.where(bits.to(tl.int32) > 0x7F, -value, value)
    return value
