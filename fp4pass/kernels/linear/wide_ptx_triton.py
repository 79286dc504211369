"""The PTX that decodes words of sixteen codes for `wide_kernel`."""

from __future__ import annotations

import triton

from .ptx_triton import step_lines, times, two_to


@triton.constexpr_function
def pair_assembly(FMT):
    """Return PTX for sixteen codes times their scale byte: the codes i and i + 8 as bfloat16."""
    # As `decode_assembly`, whose numbers these are, of two words side by side.
    mantissa_bits, min_exponent = FMT.element.minifloat
    place = 7 - mantissa_bits
    magnitudes = (1 << FMT.element.bits - 1) - 1
    rescales = not FMT.scale.subnormal
    lines = ["{.reg .b32 t, s0, u, two, zero, w0, w1;", "mov.b32 zero, 0x80008000;"]
    lines += ["mov.b64 {w0, w1}, $8;", *step_lines(FMT, "s0", "$9", False)]
    if rescales:
        lines.append(two_to(126 + min_exponent))
    for half, start in (("0x5410", 0), ("0x7632", 4)):
        lines.append(f"prmt.b32 t, w0, w1, {half};")
        for code in range(4):
            if code == 2:
                lines.append("shr.b32 t, t, 8;")
            at = code % 2 * 4
            copies = (1 << 12 - at) + (1 << place - at)
            lines += [
                f"and.b32 u, t, {((1 << FMT.element.bits) - 1 << at) * 0x10001:#x};",
                f"mul.lo.u32 u, u, {copies};",
                f"and.b32 u, u, {(0x8000 | magnitudes << place) * 0x10001:#x};",
            ]
            if rescales:
                lines.append(times("u", "u", "two"))
            lines.append(times(f"${start + code}", "u", "s0"))
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
