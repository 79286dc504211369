"""Write the PTX that decodes codes in registers."""

from __future__ import annotations

import math

import triton
import triton.language as tl

# Powers of two as scales: the byte of 2, below which a code takes one product instead of two.
LARGE = tl.constexpr(128)


@triton.constexpr_function
def scale_exponent(FMT):
    """Return the exponent by which `decode` multiplies scales with mantissas in bfloat16."""
    return 127 - math.frexp(FMT.scale.max)[1]


@triton.constexpr_function
def offset(FMT):
    """Return the exponent of what `decode` returns beside code * scale."""
    if not FMT.scale.subnormal:
        return 0
    return scale_exponent(FMT) - 126 - FMT.element.minifloat[1]


@triton.constexpr_function
def small_scales(FMT):
    """Return whether `decode` is faster for scales below 2."""
    return not FMT.scale.subnormal


@triton.constexpr_function
def code_lines(FMT, results, step=None, rescales=False):
    """Return PTX for four codes of both halves of t as bfloat16, times the register `step`."""
    # A product copies a code, so that one copy has the sign and the other the low exponent and high
    # mantissa bits where a bfloat16 has them: a number 2^-(126 + min_exponent) times the code's
    # value, subnormals included. Scales are read likewise.
    place = 7 - FMT.element.minifloat[0]
    magnitudes = (1 << FMT.element.bits - 1) - 1
    lines = []
    for code, result in enumerate(results):
        at = code % 2 * 4
        number = result if step is None else "u"
        lines += ["shr.b32 t, t, 8;"] * (code == 2) + [
            f"and.b32 u, t, {((1 << FMT.element.bits) - 1 << at) * 0x10001:#x};",
            f"mul.lo.u32 u, u, {(1 << 12 - at) + (1 << place - at)};",
            f"and.b32 {number}, u, {(0x8000 | magnitudes << place) * 0x10001:#x};",
        ]
        if rescales:
            lines.append(times("u", "u", "two"))
        if step is not None:
            lines.append(times(result, "u", step))
    return lines


@triton.constexpr_function
def decode_assembly(FMT, PAIRS, STEPS, SMALL):
    """Return PTX for `decode`: four words of eight codes with a scale byte each, or one word."""
    # PAIRS, STEPS, SMALL: as `decode` takes them.
    rescales = not FMT.scale.subnormal and not SMALL
    lines = ["{.reg .b32 t, s<2>, u, two, zero;", "mov.b32 zero, 0x80008000;"]
    if PAIRS:
        lines += ["mov.b32 s0, $5;"] if STEPS else step_lines(FMT, "s0", "$5", SMALL)
        halves = [("mov.b32 t, $4;", 0, range(4))]
    else:
        for i in range(2):
            lines.append(f"prmt.b32 s{i}, $20, 0, {0x4140 + 0x202 * i:#x};")
            if SMALL:
                lines.append(small_line(FMT, f"s{i}", f"s{i}", 1))
                continue
            lines.append(f"shl.b32 s{i}, s{i}, {7 - FMT.scale.mantissa_bits};")
            if rescales:
                lines += [f"sub.u32 u, 0x80008000, s{i};", "and.b32 u, u, 0x80008000;"]
                lines += ["shr.b32 u, u, 9;", f"or.b32 s{i}, s{i}, u;"]
        if not SMALL:
            lines += normal_lines(FMT, "s0") + normal_lines(FMT, "s1")
        # Half of one word beside the same half of the next.
        halves = [
            (f"prmt.b32 t, ${16 + 2 * i}, ${17 + 2 * i}, {half};", i, range(start, start + 8, 2))
            for i in range(2)
            for half, start in (("0x5410", i), ("0x7632", 8 + i))
        ]
    if rescales:
        lines.append(two_to(126 + FMT.element.minifloat[1]))
    for load, i, results in halves:
        lines += [load, *code_lines(FMT, [f"${each}" for each in results], f"s{i}", rescales)]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def wide_assembly(FMT):
    """Return PTX for sixteen codes times their scale byte: the codes i and i + 8 as bfloat16."""
    # As `decode_assembly`, whose numbers these are, of two words side by side.
    rescales = not FMT.scale.subnormal
    lines = ["{.reg .b32 t, s0, u, two, zero, w0, w1;", "mov.b32 zero, 0x80008000;"]
    lines += ["mov.b64 {w0, w1}, $8;", *step_lines(FMT, "s0", "$9", False)]
    if rescales:
        lines.append(two_to(126 + FMT.element.minifloat[1]))
    for half, start in (("0x5410", 0), ("0x7632", 4)):
        lines.append(f"prmt.b32 t, w0, w1, {half};")
        lines += code_lines(FMT, [f"${start + i}" for i in range(4)], "s0", rescales)
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def scale_assembly(FMT):
    """Return PTX for the float32 of a scale byte."""
    if FMT.scale.mantissa_bits == 0:
        # Byte 0 is half of byte 1, a subnormal float32, and 255 is NaN.
        return (
            "{.reg .b32 s; .reg .pred p; setp.eq.u32 p, $1, 255; shl.b32 s, $1, 23; "
            "max.u32 s, s, 0x400000; selp.b32 s, 0x7fc00000, s, p; mov.b32 $0, s;}"
        )
    return (
        "{.reg .b16 t, a, b; .reg .b32 u; cvt.u16.u32 t, $1; cvt.rn.f16x2.e4m3x2 u, t; "
        "mov.b32 {a, b}, u; cvt.f32.f16 $0, a;}"
    )


@triton.constexpr_function
def step_assembly(FMT, SMALL):
    """Return PTX for `step_of`."""
    lines = ["{.reg .b32 s, two, zero;", "mov.b32 zero, 0x80008000;"]
    return "\n".join([*lines, *step_lines(FMT, "s", "$1", SMALL), "mov.b32 $0, s;}"])


@triton.constexpr_function
def step_lines(FMT, name, byte, SMALL):
    """Return PTX for a scale byte as two bfloat16."""
    if SMALL:
        return [small_line(FMT, name, byte, 0x10001)]
    place = 7 - FMT.scale.mantissa_bits
    if FMT.scale.subnormal:
        lines = [f"mul.lo.u32 {name}, {byte}, {0x10001 << place:#x};"]
    else:
        # Byte 0 is half of byte 1: a subnormal bfloat16.
        lines = [f"shl.b32 {name}, {byte}, {place};", f"max.u32 {name}, {name}, 0x40;"]
        lines.append(f"mul.lo.u32 {name}, {name}, 0x10001;")
    return lines + normal_lines(FMT, name)


@triton.constexpr_function
def small_line(FMT, name, byte, copies):
    """Return PTX for scales below 2 that are powers of two, times what a code's bits lack."""
    # 2^(byte - 127) times 2^(126 + min_exponent) is a bfloat16 then, for byte 0 too.
    lacking = (126 + FMT.element.minifloat[1] << 7) * 0x10001
    return f"mad.lo.u32 {name}, {byte}, {copies << 7:#x}, {lacking:#x};"


@triton.constexpr_function
def normal_lines(FMT, name):
    """Return PTX that multiplies scales with mantissas so that products of codes are normal."""
    if not FMT.scale.subnormal:
        return []
    rest = scale_exponent(FMT) + 127 - FMT.scale.bias - 127
    return [line for e in (127, rest) for line in (two_to(e), times(name, name, "two"))]


@triton.constexpr_function
def times(to, a, b):
    """Return PTX for a product of bfloat16 pairs."""
    # sm_80 has no product of bfloat16 pairs, but this; -0 keeps the sign of zeros.
    return f"fma.rn.bf16x2 {to}, {a}, {b}, zero;"


@triton.constexpr_function
def two_to(exponent):
    """Return PTX that makes `two` a power of two, twice."""
    return f"mov.b32 two, {(exponent + 127 << 7) * 0x10001:#x};"
